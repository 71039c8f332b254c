"""Run model code without its memory: shapes only, every live byte and every operation counted.

Inside the block tensors have shapes and no data (`FakeTensorMode`), so a step of a 70B target runs
in seconds on a laptop; storages are counted from their birth to their end, so the peak is that of
the very code that will run, whatever head it is. Integers and booleans do keep their values where
they depend on no weight: which positions are supervised decides how much is computed. Where code
asks for a value that does depend on weights ("are the states finite?"), the answer is yes.

What it cannot see: memory inside one kernel, an allocator's waste, the libraries' own.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import flop_registry

MOST_VALUES = 1 << 24
"""Bytes up to which a tensor's values are kept."""
_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


class DryRun(TorchDispatchMode):
    """Counts of one block: live and peak bytes of tensors, floating-point operations."""

    def __init__(self, fakes: FakeTensorMode) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._fakes = fakes
        self.live = 0
        self.peak = 0
        self.flops = 0
        self._held: dict[int, int] = {}
        """Bytes by storage."""
        self._values: dict[int, Tensor] = {}
        """Flat real values by storage, where they are known."""

    def restart(self) -> None:
        """Begin anew with peak and operations, from what is live now."""
        self.peak, self.flops = self.live, 0

    def read(self, tensor: Tensor, how: Callable[[Tensor], Any]) -> Any:
        """What `how` makes of a tensor's values; they are ones where they depend on weights."""
        with unset_fake_temporarily():
            try:
                return how(self._real(tensor))
            except LookupError:
                return how(torch.ones(tensor.shape, dtype=tensor.dtype))

    def known(self, tensor: Tensor) -> Tensor:
        """A tensor without data whose values this run nevertheless knows: (…) int or bool."""
        with unset_fake_temporarily():
            real = tensor.clone()
        made = torch.empty_like(tensor)
        self._keep(made, real)
        return made

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default:  # asked for far more often than anything is done
            return args[0].fake_device
        if func is torch.ops.aten._local_scalar_dense.default:
            return self.read(args[0], Tensor.item)
        if func is torch.ops.aten.nonzero.default:
            return self._nonzero(args[0])
        if func is torch.ops.aten.index.Tensor:
            args = (args[0], self._places(args[1]))
        try:
            out = func(*args, **kwargs)
        except DynamicOutputShapeException:  # a shape that only values give
            with unset_fake_temporarily():
                out = func(*tree_map(self._real, args), **tree_map(self._real, kwargs))
            return tree_map(self.known, out)
        if func is torch.ops.aten._to_copy.default:
            # `module.to(dtype)` swaps parameters, which its memory of them would forbid.
            self._fakes.fake_tensor_converter.meta_converter.tensor_memo.clear()
        if any(_shape_alone(tensor) for tensor in tree_leaves(out)):
            return out
        self._count(func, args, kwargs, out)
        self._follow(func, args, kwargs, out)
        return out

    # Bytes and operations

    def _count(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        for tensor in tree_leaves(out):
            if isinstance(tensor, FakeTensor):
                self._hold(tensor)
        if func._overloadpacket is _ATTENTION:
            (B, H, n, d), S = args[0].shape, args[1].shape[2]
            self.flops += 4 * B * H * n * S * d
        elif func._overloadpacket in flop_registry:
            count: Callable[..., int] = flop_registry[func._overloadpacket]
            self.flops += int(count(*args, **kwargs, out_val=out))

    def _hold(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._held:
            return
        self._held[key] = storage.nbytes()
        self.live += storage.nbytes()
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._release, key)

    def _release(self, key: int) -> None:
        self.live -= self._held.pop(key, 0)
        self._values.pop(key, None)

    # Values that are known

    def _real(self, value: Any) -> Any:
        """The real counterpart of an argument; LookupError where its values are not known."""
        if not isinstance(value, FakeTensor):
            return value
        flat = self._values.get(value.untyped_storage()._cdata)
        if flat is None or flat.dtype != value.dtype:
            raise LookupError
        return flat.as_strided(value.shape, value.stride(), value.storage_offset())

    def _keep(self, tensor: Tensor, real: Tensor) -> None:
        storage = tensor.untyped_storage()
        self._hold(tensor)
        with unset_fake_temporarily():
            flat = torch.empty(storage.nbytes() // tensor.itemsize, dtype=tensor.dtype)
            flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).copy_(real)
        self._values[storage._cdata] = flat

    def _follow(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Compute the values of the result too, where all that it is made of is known."""
        made = [t for t in tree_leaves(out) if isinstance(t, FakeTensor)]
        writes = _writes(func)
        if not writes:
            if not any(map(_countable, made)):
                return
            given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, FakeTensor)]
            keys = {t.untyped_storage()._cdata for t in given}
            if all(t.untyped_storage()._cdata in keys for t in made):
                return  # a view: it shares the storage whose values are kept
        try:
            with unset_fake_temporarily():
                real_args, real_kwargs = tree_map(self._real, (args, kwargs))
                real = func(*real_args, **real_kwargs)
        except LookupError:
            if writes:
                for tensor in made:
                    self._values.pop(tensor.untyped_storage()._cdata, None)
            return
        if not writes:
            for tensor, value in zip(tree_leaves(out), tree_leaves(real), strict=True):
                if isinstance(tensor, FakeTensor) and _countable(tensor):
                    self._keep(tensor, value)

    def _nonzero(self, tensor: Tensor) -> Tensor:
        return self.known(self.read(tensor, torch.nonzero))

    def _places(self, indices: Any) -> list[Any]:
        """Boolean indices as integer ones, which have a known shape."""
        places: list[Any] = []
        for index in indices:
            if isinstance(index, Tensor) and index.dtype == torch.bool:
                places += self._nonzero(index).unbind(1)
            else:
                places.append(index)
        return places


@cache
def _writes(func: Any) -> bool:
    return any(a.alias_info and a.alias_info.is_write for a in func._schema.arguments)


def _shape_alone(made: Any) -> bool:
    """Whether this would take no memory and do nothing in a real run, either."""
    return isinstance(made, FakeTensor) and made.fake_device.type == "meta"


def _countable(tensor: Tensor) -> bool:
    small = tensor.untyped_storage().nbytes() <= MOST_VALUES
    return small and (not tensor.dtype.is_floating_point or tensor.numel() <= 1 << 16)


@contextmanager
def dry_run() -> Iterator[DryRun]:
    """Everything made inside the block has a shape and no data."""
    with FakeTensorMode(allow_non_fake_inputs=True) as fakes, DryRun(fakes) as run:
        kind: Any = FakeTensor  # whose `tolist` asks for each element by itself
        element_by_element = kind.tolist
        kind.tolist = lambda tensor: run.read(tensor, Tensor.tolist)
        try:
            yield run
        finally:
            kind.tolist = element_by_element
