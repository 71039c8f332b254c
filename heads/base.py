"""What every draft head is: a `PreTrainedModel` that borrows from a target, unrolls, and drafts.

A head knows no tree, no acceptance rule and no trainer. Training asks it for `Prediction`s by
depth; decoding asks it for draft steps (`open`, `extend`, `expand`). Both run the same layers.

Shapes: B batch, T positions, D hidden width, V vocabulary, Vd draft vocabulary, L captured layers,
M supervised positions of one depth, n and m small counts of tokens.
"""

from __future__ import annotations

import difflib
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from drafthead.heads.contract import Contract, default_layers


class HeadSettings(BaseModel):
    """What a user chooses about a head; one subclass per head, selected by `type` in a config."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    reads_states: ClassVar[bool] = True
    """Whether the head reads captured states of the target; otherwise tokens alone."""
    adapts: ClassVar[bool] = False
    """Whether the head changes its target (`DraftHead.adapt`), which training then needs live."""
    follows: ClassVar[tuple[str, ...]] = ()
    """Other types of head whose trained weights this one can start from."""

    type: str
    unroll_steps: int = 3
    """Draft depths trained together (training-time test, arXiv 2503.01840)."""
    warm_start: int = Field(default=0, ge=0)
    """Positions of a closed-form start before training, for heads that have one; 0 = none."""

    def captured(self, num_layers: int) -> tuple[int, ...]:
        """Ids of the target's states that it reads, ascending, by the contract's convention."""
        return default_layers(num_layers)

    def without_effect(self) -> list[str]:
        """Settings that were given but that the others leave nothing to act on."""
        return []

    @abstractmethod
    def build(
        self, contract: Contract, target: PreTrainedConfig, draft_ids: Tensor | None
    ) -> DraftHead:
        """Make an untrained, unbound head for the target with this text config.

        `draft_ids`: (Vd,) ascending target ids of the draft vocabulary, or None for all of them.
        """


@dataclass(frozen=True)
class TeacherBatch:
    """One batch as every source of teacher features gives it; rows are padded on the right.

    The target's distribution for the token at position t + 1 is
    `softmax(unembed(last_hidden[:, t]))`.
    """

    ids: Tensor
    """(B, T) int64 token ids."""
    mask: Tensor
    """(B, T) bool: True where the token itself is supervised (the assistant wrote it)."""
    features: Tensor
    """(B, T, L * D) the target's captured states, ascending layers."""
    last_hidden: Tensor
    """(B, T, D) what the target's output rows see (after its final norm)."""
    top: Tensor
    """(B, T) int64: the target's likeliest next token; valid only where that one is supervised."""
    starts: Tensor | None = None
    """(B, T) int64: where in the row each token's own sequence begins, for rows that are packed.

    Rotary position of slot t is t - starts[t], and nothing looks across a start. None: every row
    is one sequence from 0.
    """

    def supervised(self, ahead: int) -> Tensor:
        """(B, T) bool: the token `ahead` places on is supervised and of the same sequence."""
        found = torch.zeros_like(self.mask)
        found[:, :-ahead] = self.mask[:, ahead:]
        if self.starts is not None:
            found[:, :-ahead] &= self.starts[:, ahead:] == self.starts[:, :-ahead]
        return found

    def packed(self) -> TeacherBatch:
        """The rows end to end as one, each up to its last supervised token: no padding is left."""
        place = torch.arange(self.ids.shape[1], device=self.ids.device)
        lengths = torch.where(self.mask, place + 1, 1).amax(dim=1)  # one token where there is none
        keep = place < lengths[:, None]
        first = lengths.cumsum(0) - lengths
        return TeacherBatch(
            ids=self.ids[keep][None],
            mask=self.mask[keep][None],
            features=self.features[keep][None],
            last_hidden=self.last_hidden[keep][None],
            top=self.top[keep][None],
            starts=first.repeat_interleave(lengths)[None],
        )


def as_it_is(logits: Tensor) -> Tensor:
    """A readout for what are logits already."""
    return logits


@dataclass(frozen=True)
class Prediction:
    """One depth of an unroll, at the M positions where it has a supervised label.

    Logits are a function still to be called, so that a loss may make them some rows at a time.
    """

    hidden: Tensor
    """(M, D) what the draft logits are read from."""
    readout: Callable[[Tensor], Tensor]
    """(m, D) of those rows → (m, Vd) over the draft vocabulary, each row from its own alone."""
    teacher: Tensor
    """(M,) int64 index into the flattened (B * T) states: the one that predicts the same token."""
    trained_readout: bool = False
    """Whether `readout` has weights that are trained."""
    confidence: Tensor | None = None
    """(M,) logit of the chance that this depth's draft is accepted, where the head predicts it."""
    auxiliary: dict[str, Tensor] = field(default_factory=dict)
    """Named extra losses, each (M,), weighed by the head's own settings; summed by the trainer."""

    @property
    def logits(self) -> Tensor:
        """(M, Vd), all rows at once."""
        return self.readout(self.hidden)


class HeadState:
    """A head's memory of one batch of committed tokens; each head subclasses it."""

    lengths: list[int]
    """Committed positions of each row."""

    def start(self, row: int) -> None:
        """Forget a row, so that another sequence can begin there."""
        self.lengths[row] = 0


class DraftHead(PreTrainedModel):
    """Base of all heads. `bind` must be called before any forward."""

    settings: HeadSettings
    contract: Contract
    drafter: ClassVar[str] = "head"
    """What its drafts are called in figures."""
    max_depth: int | None = None
    """Deepest draft it can make; None where any depth will do."""
    goes_on: ClassVar[bool] = True
    """Whether it can draft past its positions, perhaps worse."""
    packs: ClassVar[bool] = False
    """Whether its unroll takes rows that hold several sequences (`TeacherBatch.starts`)."""
    calibrates: bool = False
    """Whether `calibrate` has something to fit."""
    gradient_checkpointing: bool = False
    """Whether `unroll` makes its activations anew in the backward pass: less memory, more time.

    Set by transformers' `activation_checkpointing_enable`, for heads that say they support it.
    """
    tokenizer: PreTrainedTokenizerBase | None = None
    """The target's, where it is known: for heads that are stored as models of their own."""

    @abstractmethod
    def bind(self, source: PreTrainedModel | Path) -> None:
        """Copy the borrowed tensors from a live target, or read only them from its safetensors
        folder.

        Raises ContractError if the source is of another shape than the contract says.
        """

    def adapt(self, target: PreTrainedModel, *, resting: bool = False) -> None:
        """Put into a live target, once, what the head changes in it; nothing by default.

        `resting`, for training: it acts inside `live` alone. Raises ContractError where it cannot.
        """

    def live(self, batch: TeacherBatch) -> tuple[TeacherBatch, Tensor]:
        """In training: the batch as the target gives it with the head's change, to be unrolled with
        a gradient; and a loss of that change, 0-dim, summed over positions. Here the batch, and 0.
        """
        return batch, batch.last_hidden.new_zeros((), dtype=torch.float32)

    @property
    @abstractmethod
    def draft_ids(self) -> Tensor:
        """(Vd,) int64: the target's id of each draft id, ascending."""

    @property
    def positions(self) -> int | None:
        """How many positions it was made for; None where any number will do."""
        return None

    @abstractmethod
    def teacher_logits(self, last_hidden: Tensor) -> Tensor:
        """(M, D) states of the target → (M, Vd) its own logits of the draft vocabulary."""

    def export(self) -> PreTrainedModel:
        """The model whose tensors `save_pretrained` writes: the head itself, or its plain form."""
        return self

    def warm_start(self, batches: Iterable[TeacherBatch]) -> None:
        """Set a bound, untrained head's weights in closed form; ValueError where it has no such."""
        raise ValueError(f"head.warm_start: {self.settings.type} has no closed-form start; use 0")

    def calibrate(self, batches: Iterable[TeacherBatch]) -> None:
        """Fit what `confidence` says to held-out rows, once training is over.

        Called on one process, where `calibrates` says so, with weights that are whole.
        """
        return None

    @abstractmethod
    def unroll(self, batch: TeacherBatch, steps: int) -> Iterator[Prediction]:
        """Yield depth 0 .. steps - 1: training's view of what decoding will do."""

    @abstractmethod
    def open(self, batch: int, capacity: int) -> HeadState:
        """Make an empty memory: `batch` rows of at most `capacity` tokens, draft nodes included."""

    @abstractmethod
    def extend(
        self, state: HeadState, features: Tensor, next_ids: Tensor, counts: Tensor
    ) -> Tensor:
        """Commit true positions and return the draft logits of the token after the last one.

        features: (B, n, L * D) of positions p .. p + n - 1; next_ids: (B, n) tokens at p + 1 .. p +
        n; counts: (B,) how many of the n are real in each row (right padded). A head that reads
        tokens alone gets no columns, and all of a row's tokens, the first one included. Drops all
        draft nodes of the round before. Returns (B, Vd).
        """

    @abstractmethod
    def expand(self, state: HeadState, ids: Tensor, parents: Tensor) -> Tensor:
        """Add m draft nodes below earlier ones and return the draft logits after each.

        ids: (B, m) target ids; parents: (B, m) index of an earlier node of this round in the order
        of expansion (0 is the first node expanded), -1 for the root. Returns (B, m, Vd).
        """

    def confidence(self, state: HeadState) -> Tensor | None:
        """(B, m) chances that the drafts after the nodes of the last call are accepted, calibrated.

        For the root alone after `extend`, (B, 1). None where the head predicts none: then its
        draft probabilities stand for them.
        """
        return None


HEADS: dict[str, type[HeadSettings]] = {}


def register(name: str) -> Callable[[type[HeadSettings]], type[HeadSettings]]:
    """Register a settings class under the `type` that configs use, once."""

    def add(cls: type[HeadSettings]) -> type[HeadSettings]:
        if name in HEADS:
            raise ValueError(f"head type {name!r} is registered already ({HEADS[name].__name__})")
        HEADS[name] = cls
        return cls

    return add


def settings_class(name: str) -> type[HeadSettings]:
    """Look a head type up; the error lists the known ones and the nearest."""
    if name in HEADS:
        return HEADS[name]
    near = difflib.get_close_matches(name, HEADS, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ValueError(f"head.type: unknown head {name!r}{hint} (known: {', '.join(sorted(HEADS))})")
