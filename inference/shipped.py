"""The self-test of an export: it is read back as anyone would read it, and must be the same head.

Tensors are compared bit for bit, the contract fact by fact, draft logits on a fixed text, and what
a chain of drafts comes to on a few prompts. Only then does the folder take its name: a failed
export leaves nothing there. It knows no layout.

Shapes: D hidden width, L captured layers, Vd draft vocabulary, K draft depth.
"""

from __future__ import annotations

import copy
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from drafthead.data.files import held
from drafthead.heads.borrowed import borrow
from drafthead.heads.borrowing import BorrowingHead
from drafthead.heads.contract import LAST, Contract
from drafthead.heads.layouts.files import load_foreign, read_folder, write_folder
from drafthead.heads.layouts.layout import Asked, Layout
from drafthead.heads.layouts.schema import check_folder, load_schema
from drafthead.inference.answering import end_ids
from drafthead.inference.decoder import decode
from drafthead.inference.grow import HeadDrafter
from drafthead.inference.metrics import acceptance
from drafthead.inference.row import Row
from drafthead.inference.sampling import Sampler
from drafthead.inference.target import Target
from drafthead.inference.tree import Static

DEPTH = 4
"""Of the chains that are decoded, and of the logits that are compared; less where a head can."""
TOKENS = 32
"""New tokens of each prompt."""
TEXT = 8
"""Tokens of the fixed text."""


class ShippedError(ValueError):
    """What was read back is not what was to be written."""


@dataclass(frozen=True)
class Chained:
    """What chains of drafts came to on the prompts."""

    tau: float
    rounds: tuple[tuple[tuple[int, int], ...], ...]
    """Drafted and accepted tokens of each round, of each prompt."""
    ids: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Decoding:
    """Prompts, and the target that decodes them."""

    target: Target
    prompts: Sequence[Sequence[int]]
    tokens: int = TOKENS
    """New ones of each prompt."""

    def __call__(self, head: BorrowingHead) -> Chained:
        """With this bound head, in the target's dtype; the head is left as it is."""
        ready = copy.deepcopy(head).to(self.target.dtype)  # type: ignore[arg-type]
        drafter = HeadDrafter(ready, Static.chain(min(ready.max_depth or DEPTH, DEPTH)))
        ends, most = end_ids(self.target), self.tokens
        rows: list[Row] = []
        for ids in self.prompts:  # one by one: what shares a batch may round otherwise
            rows += decode(self.target, [ids], Sampler(), drafter, max_new_tokens=most, eos=ends)[0]
        made = [row.rounds for row in rows]
        return Chained(
            acceptance(made, resamples=1).tau if any(made) else 1.0,
            tuple(tuple((r.drafted, r.accepted) for r in rounds) for rounds in made),
            tuple(tuple(row.ids) for row in rows),
        )


@dataclass(frozen=True)
class Shipped:
    """A finished export."""

    out: Path
    layout: str
    dtype: str
    size: int
    """Bytes of all files."""
    tensors: int
    """Compared bit for bit."""
    prompts: int
    before: Chained | None
    """Of the head as it was; None where nothing was decoded."""
    after: Chained | None
    """Of the head that was read back."""

    @property
    def tau(self) -> tuple[float, float] | None:
        """Before and after."""
        if self.before is None or self.after is None:
            return None
        return self.before.tau, self.after.tau


def ship(
    head: BorrowingHead,
    layout: Layout,
    out: Path,
    dtype: torch.dtype,
    source: PreTrainedModel | Path,
    decoding: Decoding | None = None,
) -> Shipped:
    """Write a bound head in a layout, test what was written, and give it its name.

    source: the target that the head is bound to. Raises ValueError for an `out` that exists,
    LayoutError where the layout cannot express the head, ShippedError where a test fails.
    """
    check_free(out)
    meant = _cast(head, dtype)
    stored = layout.write(meant, dtype)
    with unnamed(out) as fresh:
        write_folder(stored, fresh)
        _demand(fresh, layout)
        read = load_foreign(fresh, asked_of(source, partial(_reading, head.contract)))
        assert isinstance(read, BorrowingHead)
        read.bind(source)
        problems = unlike(meant, read)
        before = after = None
        if not problems and decoding is not None:
            before, after = decoding(head), decoding(read)
            # Where both are rounded to the same, the drafts are the same, and so is all else.
            if dtype in (head.dtype, decoding.target.dtype) and before != after:
                problems = [f"tau is {after.tau:.4f}, before {before.tau:.4f}"]
        if problems:
            raise ShippedError(
                f"{out}: not written: read back, the head is another one: {'; '.join(problems)}"
            )
        for file in fresh.iterdir():
            file.chmod(fresh.stat().st_mode & 0o666)  # weights come out for their owner only
        size = sum(file.stat().st_size for file in fresh.iterdir())
    return Shipped(
        out=out,
        layout=layout.name,
        dtype=str(dtype).removeprefix("torch."),
        size=size,
        tensors=len(meant.state_dict()),
        prompts=0 if decoding is None else len(decoding.prompts),
        before=before,
        after=after,
    )


def check_free(out: Path) -> None:
    """Refuse a place that holds something, or where nothing can be made, before any work;
    ValueError.
    """
    place = out.resolve()  # where it is a link, what that leads to is made
    if place.exists() and not (place.is_dir() and not any(place.iterdir())):
        raise ValueError(f"{out}: exists already; name a new folder, or remove it first")
    above = next(folder for folder in place.parents if folder.exists())
    if not (above.is_dir() and os.access(above, os.W_OK | os.X_OK)):
        reason = "cannot be written to" if above.is_dir() else "is no folder"
        raise ValueError(f"{out}: {above} {reason}; name a new folder elsewhere")


@contextmanager
def unnamed(out: Path) -> Iterator[Path]:
    """A place beside `out` for what shall have its name once the block ends well.

    It is inside a hidden folder that one process holds: another one's work would be taken for its
    own. What a killed process left there goes with the next work of that name. Raises ValueError
    where another process works there, or `out` was made meanwhile.
    """
    place = out.resolve()
    around = place.with_name(f".{place.name}.new")
    around.mkdir(parents=True, exist_ok=True)
    with held(around):
        try:
            for left in around.iterdir():
                shutil.rmtree(left, ignore_errors=True)
            yield around / place.name
            check_free(out)
            (around / place.name).replace(place)
        finally:
            shutil.rmtree(around, ignore_errors=True)


def asked_of(
    source: PreTrainedModel | Path,
    contract_of: Callable[[tuple[int, ...]], Contract],
    layers: tuple[int, ...] | None = None,
    producer: str | None = None,
) -> Asked:
    """What a reader of foreign folders has to know of the target.

    layers, producer: what the user says of the folder.
    """
    # The whole rows: which of them a head borrows, its folder says.
    whole = borrow(source, contract_of((LAST,)), None, check=False)
    config: PreTrainedConfig = (
        source.config if isinstance(source, PreTrainedModel) else AutoConfig.from_pretrained(source)
    )
    return Asked(contract_of, config, whole.embedding, whole.rows, layers, producer)


def unlike(meant: BorrowingHead, read: BorrowingHead) -> list[str]:
    """What differs between two bound heads, a line each: contracts, positions, tensors, and, where
    all these are equal, draft logits.

    Output rows that one of them holds as its own and the other borrows are compared as well.
    """
    lines = meant.contract.differences(read.contract)
    if meant.positions != read.positions:
        lines.append(f"it was made for {read.positions} positions, not {meant.positions}")
    mine, theirs = meant.state_dict(), read.state_dict()
    for name in sorted(mine.keys() | theirs.keys()):
        left, right = (
            held.get(name, head.bound()[1]) for held, head in ((mine, meant), (theirs, read))
        )
        if left.dtype != right.dtype:
            lines.append(f"{name} is {right.dtype}, not {left.dtype}")
        elif not torch.equal(left, right):
            lines.append(f"{name} differs")
    if not lines and not torch.equal(probe(meant), probe(read)):
        lines.append("its draft logits are others")
    return lines


@torch.no_grad()
def probe(head: BorrowingHead) -> Tensor:
    """(K, Vd) draft logits of a bound head by depth, in fp32, after a fixed text and its states."""
    head = _cast(head, torch.float32)
    contract, depth = head.contract, min(head.max_depth or DEPTH, DEPTH)
    generator = torch.Generator().manual_seed(0)
    width = len(contract.layers) * contract.hidden_size
    features = torch.randn(1, TEXT, width, generator=generator).to(head.device, head.dtype)
    ids = torch.randint(contract.vocab_size, (1, TEXT + depth), generator=generator)
    ids = ids.to(head.device)
    state = head.open(1, TEXT + depth)
    logits = [head.extend(state, features, ids[:, :TEXT], torch.tensor([TEXT]))[0]]
    for step in range(1, depth):
        token = ids[:, TEXT + step - 1 : TEXT + step]
        logits.append(head.expand(state, token, torch.tensor([[step - 2]]))[0, 0])
    return torch.stack(logits)


def _demand(folder: Path, layout: Layout) -> None:
    """ShippedError unless the folder is what each consumer of the layout takes."""
    stored = read_folder(folder)
    for consumer in layout.consumers:
        if problems := check_folder(folder, stored, load_schema(consumer)):
            raise ShippedError(f"not written: {consumer} does not take it: {'; '.join(problems)}")


def _reading(contract: Contract, layers: tuple[int, ...]) -> Contract:
    """The contract of the same target for a head that reads these states."""
    return contract.model_copy(update={"layers": layers})


def _cast(head: BorrowingHead, dtype: torch.dtype) -> BorrowingHead:
    """A copy, what it borrows included, in another dtype; ValueError where a weight overflows."""
    cast: BorrowingHead = copy.deepcopy(head).to(dtype)  # type: ignore[arg-type]
    for name, value in cast.state_dict().items():
        if value.is_floating_point() and not bool(value.isfinite().all()):
            raise ValueError(
                f"--dtype {str(dtype).removeprefix('torch.')}: {name} is not finite in it; "
                "use bfloat16 or float32"
            )
    return cast
