"""Medusa-1 (arXiv 2401.10774): one small residual head for each depth, all on the last state.

Slot t holds the target's last hidden state at position t; head i predicts token t + 2 + i from it
and from nothing else, so every node of one depth has the same draft logits. A head is some blocks
x + SiLU(Wx + b) and output rows, the target's or its own. W and b start at zero: then each head is
the target's own readout. Tensor names are those of the published layout, in which blocks of one
head share no weights here.

Shapes: B batch, T positions, D width, Vd draft vocabulary, M supervised positions of one depth,
m draft nodes, K heads.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Literal, cast

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, PreTrainedConfig, initialization

from drafthead.heads.base import HeadState, Prediction, TeacherBatch, register
from drafthead.heads.borrowed import Borrowed
from drafthead.heads.borrowing import BorrowingHead, BorrowingSettings
from drafthead.heads.contract import LAST, Contract
from drafthead.heads.geometry import HeadConfig
from drafthead.heads.memory import depths_below


class MedusaOptions(BorrowingSettings):
    """What a user chooses about the heads, whatever becomes of the target."""

    unroll_steps: int = Field(default=4, ge=1)
    """Heads, one for each depth."""
    blocks: int = Field(default=1, ge=1)
    """Residual blocks of each head."""
    own_rows: bool = False
    """Train output rows for each head, started from the target's; otherwise they are borrowed."""

    def captured(self, num_layers: int) -> tuple[int, ...]:
        return (LAST,)


@register("medusa")
class MedusaSettings(MedusaOptions):
    """Medusa-1: the target stays as it is."""

    type: Literal["medusa"] = "medusa"

    def build(
        self, contract: Contract, target: PreTrainedConfig, draft_ids: Tensor | None
    ) -> MedusaHead:
        size = self.vocabulary_size(contract, draft_ids)
        head = MedusaHead(
            MedusaConfig.of(
                self, contract, target, size, self.blocks, intermediate_size=contract.hidden_size
            )
        )
        head.untrained(draft_ids)
        return head


class MedusaConfig(HeadConfig):
    """The stored geometry; how many heads and blocks, and whose rows, its settings say."""

    model_type = "drafthead_medusa"


class ResidualBlock(nn.Module):
    """x + SiLU(Wx + b), zero at first: (…, D) → (…, D)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.silu(self.linear(x))


class MedusaMemory(HeadState):
    """Each row's last committed state, and the depths of this round's nodes."""

    def __init__(self, batch: int, width: int, device: torch.device, dtype: torch.dtype) -> None:
        self.lengths = [0] * batch
        self.last = torch.zeros(batch, width, device=device, dtype=dtype)
        self.row = torch.arange(batch, device=device)[:, None]
        self.start_round(self.last)

    def start_round(self, last: Tensor) -> None:
        """Forget all nodes; (B, D) states at the roots."""
        self.last = last
        self.logits: list[Tensor] = []
        """(B, Vd) by depth, as far as they were asked for."""
        self.depths = torch.zeros_like(self.row)  # (B, 1 + N), the root first

    def add(self, parents: Tensor) -> Tensor:
        """Hold nodes below their parents (B, m), -1 the root; their depths (B, m), from 1 on."""
        depths = depths_below(self.depths, parents)
        self.depths = torch.cat((self.depths, depths), dim=1)
        return depths


class MedusaHead(BorrowingHead):
    """See the module docstring."""

    config_class = MedusaConfig
    config: MedusaConfig
    settings: MedusaOptions
    packs = True

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__(config)
        width, settings = config.hidden_size, self.settings
        self.max_depth = settings.unroll_steps

        def parts() -> Iterator[nn.Module]:
            for _ in range(settings.blocks):
                yield ResidualBlock(width)
            if settings.own_rows:
                yield nn.Linear(width, config.draft_vocab_size, bias=False)

        self.medusa_head = nn.ModuleList(
            nn.Sequential(*parts()) for _ in range(settings.unroll_steps)
        )
        self.post_init()  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)  # type: ignore[no-untyped-call]
        if isinstance(module, ResidualBlock):
            initialization.zeros_(module.linear.weight)
            initialization.zeros_(module.linear.bias)

    def start_weights(self, borrowed: Borrowed) -> None:
        if self.settings.own_rows:
            for head in self.medusa_head:
                cast(nn.Linear, cast(nn.Sequential, head)[-1]).weight.copy_(borrowed.rows)

    @property
    def positions(self) -> int | None:
        return None  # it looks at no position

    # The parts that training and decoding share

    def _output(self, depth: int, states: Tensor) -> Tensor:
        """(…, D) last states → (…, D) what the rows of this depth's head see."""
        for block in list(cast(nn.Sequential, self.medusa_head[depth]))[: self.settings.blocks]:
            states = block(states)
        return states

    def _logits(self, depth: int, output: Tensor) -> Tensor:
        """(…, D) → (…, Vd)."""
        if self.settings.own_rows:
            rows = cast(nn.Sequential, self.medusa_head[depth])[-1]
            return self.contract.transform(rows(output))
        return self.teacher_logits(output)

    def _check_depth(self, depth: int) -> None:
        if depth > len(self.medusa_head):
            raise ValueError(
                f"a draft of depth {depth} asked of {len(self.medusa_head)} Medusa heads "
                "(head.unroll_steps)"
            )

    # Training

    def unroll(self, batch: TeacherBatch, steps: int) -> Iterator[Prediction]:
        self._check_depth(steps)
        T = batch.ids.shape[1]
        states = batch.features.to(self.compute_dtype())
        for i in range(steps):
            rows, slots = batch.supervised(2 + i).nonzero(as_tuple=True)
            yield Prediction(
                hidden=self._output(i, states[rows, slots]),
                readout=partial(self._logits, i),
                teacher=rows * T + slots + 1 + i,
                trained_readout=self.settings.own_rows,
            )

    # Decoding

    @torch.no_grad()
    def open(self, batch: int, capacity: int) -> MedusaMemory:
        device = self.bound()[1].device
        return MedusaMemory(batch, self.config.hidden_size, device, self.compute_dtype())

    @torch.no_grad()
    def extend(
        self, state: HeadState, features: Tensor, next_ids: Tensor, counts: Tensor
    ) -> Tensor:
        assert isinstance(state, MedusaMemory)
        state.lengths = [a + b for a, b in zip(state.lengths, counts.tolist(), strict=True)]
        counts = counts.to(state.row.device)[:, None]
        last = state.last
        if features.shape[1]:
            newest = features[state.row, (counts - 1).clamp(min=0)][:, 0]
            last = torch.where(counts > 0, newest.to(last.dtype), last)
        state.start_round(last)
        return self._at(state, 0)

    @torch.no_grad()
    def expand(self, state: HeadState, ids: Tensor, parents: Tensor) -> Tensor:
        assert isinstance(state, MedusaMemory)
        depths = state.add(parents.to(state.row.device))
        low, high = (int(bound) for bound in depths.aminmax())
        self._check_depth(high + 1)
        if low == high:  # as whenever a tree grows level by level
            return self._at(state, high)[:, None].expand(-1, depths.shape[1], -1)
        table = torch.stack([self._at(state, depth) for depth in range(high + 1)], dim=1)
        return table[state.row, depths]

    def _at(self, state: MedusaMemory, depth: int) -> Tensor:
        """(B, Vd) draft logits of this depth, computed once in a round."""
        while len(state.logits) <= depth:
            i = len(state.logits)
            state.logits.append(self._logits(i, self._output(i, state.last)))
        return state.logits[depth]


AutoConfig.register(MedusaConfig.model_type, MedusaConfig)
AutoModel.register(MedusaConfig, MedusaHead)
