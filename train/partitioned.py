"""What DeepSpeed spreads over the ranks: a frozen target, a head's weights, an optimiser's state.

No rank holds these whole. Everything here that reads one of them, and every forward of a
partitioned module, is collective: all ranks must come to it, equally often and in one order.

Shapes: B batch, T positions, D hidden width, V vocabulary, L captured layers.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.integrations.deepspeed import HfDeepSpeedConfig, unset_hf_deepspeed_config
from transformers.utils.hub import cached_file

from drafthead.heads.contract import Contract, describe, logit_transform
from drafthead.inference.target import Target, load_target

logger = logging.getLogger(__name__)


def leave_sums_to_gloo() -> None:
    """Keep DeepSpeed from compiling an operation of its own at its first start on a CPU.

    That takes minutes, and if it is killed, every later start waits for its lock for ever.
    """
    import deepspeed  # type: ignore[import-untyped]

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


@contextmanager
def gathered(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Hold these parameters whole inside the block, on every rank; to be read, not written."""
    import deepspeed

    with deepspeed.zero.GatheredParameters(list(parameters)):
        yield


class PartitionedTarget(Target):
    """A target of which each rank holds a part of every matrix (ZeRO stage 3).

    Each of its layers is put together when it runs and taken apart again. Only the output rows, for
    which the target's own choices are looked up chunk by chunk, are copied whole (V x D: 2.1 GB for
    a 70B in bf16), so that `unembed` is not collective.
    """

    def __init__(self, whole: Target, folder: Path) -> None:
        """`whole`: as `load_partitioned` loads it. `folder`: its files, which a head reads."""
        import deepspeed

        super().__init__(whole.model, whole.tokenizer)
        rows: nn.Module = self.model.get_output_embeddings()
        with gathered(rows.parameters()):
            self._rows = {name: p.detach().clone() for name, p in rows.named_parameters()}
        self._source = folder
        # Never by accelerate's `prepare`: it would save this engine's state and bind to it.
        self._engine, *_ = deepspeed.initialize(
            model=self.model.get_decoder(), config=_settings(whole.dtype, self.config.hidden_size)
        )

    @property
    def num_weights(self) -> int:
        return sum(int(getattr(p, "ds_numel", p.numel())) for p in self.model.parameters())

    @property
    def source(self) -> Path:
        return self._source

    def contract(
        self, layers: Sequence[int], template_kwargs: Mapping[str, Any] | None = None
    ) -> Contract:
        kwargs = dict(template_kwargs or {})
        return describe(self.model, self.tokenizer, tuple(layers), kwargs, whole=gathered)

    def unembed(self, hidden: Tensor) -> Tensor:
        logits = F.linear(hidden, self._rows["weight"], self._rows.get("bias"))
        return logit_transform(self.config)(logits)

    def last_hidden(self, ids: Tensor) -> Tensor:
        self._any_runs(True)
        return self._run(ids)

    @contextmanager
    def together(self) -> Iterator[None]:
        """Let each rank run the target as often as it needs to inside the block.

        A rank that needs it less lends its part to the others: it runs along on one token.
        """
        yield
        while self._any_runs(False):
            self._run(torch.zeros(1, 1, dtype=torch.int64, device=self.device))

    @torch.no_grad()
    def _run(self, ids: Tensor) -> Tensor:
        last: Tensor = self._engine(input_ids=ids, use_cache=False).last_hidden_state
        return last

    def _any_runs(self, mine: bool) -> bool:
        """Whether any rank is about to run the target; all ranks ask at once."""
        running = torch.tensor(float(mine), device=self.device)
        torch.distributed.all_reduce(running)
        return bool(running)

    def local_bytes(self) -> int:
        """Bytes of parameters that this rank holds between two forwards, the output rows apart."""
        parts = (getattr(p, "ds_tensor", p) for p in self.model.parameters())
        return sum(part.nbytes for part in parts)


def load_partitioned(name: str | Path, dtype: str, revision: str | None) -> PartitionedTarget:
    """Load a target in parts: rank 0 reads it tensor by tensor, no rank ever holds it whole."""
    # `from_pretrained` partitions while such a config is alive. Batch sizes mean nothing here.
    alive = HfDeepSpeedConfig(_settings(getattr(torch, dtype), 1))
    try:
        whole = load_target(name, dtype, revision)
    finally:
        unset_hf_deepspeed_config()
        del alive
    whole.model.requires_grad_(False)
    config = Path(name) / "config.json"
    if not config.is_file():  # a Hub id, whose files are in the cache by now
        config = Path(str(cached_file(str(name), "config.json", revision=revision)))
    target = PartitionedTarget(whole, config.parent)
    ranks, here = torch.distributed.get_world_size(), target.local_bytes() / 1e6
    logger.info("target: in parts over %d ranks, %.1f MB on each", ranks, here)
    return target


def _settings(dtype: torch.dtype, width: int) -> dict[str, Any]:
    """DeepSpeed's settings of a frozen model; vectors (norms, biases) up to `width` stay whole."""
    return {
        "train_micro_batch_size_per_gpu": 1,
        # Left out, parameters would be made in fp32, whatever the model's dtype.
        "bf16": {"enabled": dtype == torch.bfloat16},
        "fp16": {"enabled": dtype == torch.float16},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": width},
    }


def head_settings(parameters: Iterable[nn.Parameter]) -> dict[str, Any]:
    """What DeepSpeed's `zero_optimization` has to be for a head."""
    vectors = [p.numel() for p in parameters if p.dim() < 2]
    return {"stage3_param_persistence_threshold": max(vectors, default=0)}


def set_aside_frozen(module: nn.Module) -> None:
    """Hide frozen parameters (borrowed rows) from DeepSpeed: plain attributes, whole on each rank.

    A batch decides how often their modules run, for chunks of its positions; what DeepSpeed gathers
    has to be gathered on all ranks at once.
    """
    for owner in module.modules():
        for name, parameter in list(owner.named_parameters(recurse=False)):
            if not parameter.requires_grad:
                del owner._parameters[name]
                owner.__dict__[name] = parameter


def unhook_frozen(module: nn.Module) -> None:
    """Let modules that `set_aside_frozen` emptied run without DeepSpeed noting it.

    It compares these notes between ranks.
    """
    for owner in module.modules():
        if _set_aside(owner) and not list(owner.parameters(recurse=False)):
            owner._forward_pre_hooks.clear()
            owner._forward_hooks.clear()


def _set_aside(owner: nn.Module) -> list[str]:
    return [name for name, value in vars(owner).items() if isinstance(value, nn.Parameter)]


def whole_again(engine: Any, module: nn.Module) -> None:
    """Undo ZeRO stage 3 on a trained module: plain parameters, whole, without DeepSpeed's hooks."""
    owners = [(m, n, p) for m in module.modules() for n, p in m.named_parameters(recurse=False)]
    with gathered({id(p): p for _, _, p in owners}.values()):
        full = {id(p): nn.Parameter(p.detach().clone()) for _, _, p in owners}
    engine.destroy()
    for owner in module.modules():
        owner._parameters = dict(owner._parameters)
    for owner, name, parameter in owners:
        owner._parameters[name] = full[id(parameter)]
    for owner in module.modules():
        for name in _set_aside(owner):
            owner._parameters[name] = owner.__dict__.pop(name)


# The optimiser's state, by parameter: whole for the caller, a part on each rank


def moment(parameter: nn.Parameter, key: str) -> Tensor:
    """One moment of one parameter, whole."""
    from deepspeed.utils import safe_get_full_optimizer_state  # type: ignore[import-untyped]

    value: Tensor = safe_get_full_optimizer_state(parameter, key)
    return value


def set_moment(parameter: nn.Parameter, key: str, value: Tensor) -> None:
    """Undo `moment`; after `make_state`."""
    from deepspeed.utils import safe_set_full_optimizer_state

    safe_set_full_optimizer_state(parameter, value, key)


def make_state(optimiser: Any, keys: Sequence[str], updates: int) -> None:
    """Give DeepSpeed's inner AdamW the state it would have after this many updates, all zero."""
    if hasattr(optimiser, "fp32_partitioned_groups_flat"):  # stage 3
        flat = optimiser.fp32_partitioned_groups_flat
    else:
        flat = optimiser.single_partition_of_fp32_groups
    for part in flat:
        optimiser.optimizer.state[part] = {
            "step": torch.tensor(float(updates), device=part.device),
            **{key: torch.zeros_like(part) for key in keys},
        }
    if hasattr(optimiser, "_lazy_init_hp_params_optimizer_state"):
        optimiser._lazy_init_hp_params_optimizer_state()
