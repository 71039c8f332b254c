"""A head defined outside the package: one linear map per depth, in the manner of Medusa.

It shows what a new head needs, trains through the ordinary loop, and has no norm, so that huge
states reach its gradient.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from drafthead.heads.base import (
    DraftHead,
    HeadSettings,
    HeadState,
    Prediction,
    TeacherBatch,
    register,
)
from drafthead.heads.contract import Contract


@register("toy")
class ToySettings(HeadSettings):
    """Depths and the captured layers; the draft vocabulary is the target's."""

    type: Literal["toy"] = "toy"
    layers: tuple[int, ...] = (1,)
    dropout: float = 0.0

    def captured(self, num_layers: int) -> tuple[int, ...]:
        return self.layers

    def build(
        self, contract: Contract, target: PreTrainedConfig, draft_ids: Tensor | None
    ) -> ToyHead:
        assert draft_ids is None
        return ToyHead(
            ToyConfig(settings=self.model_dump(), contract=contract.model_dump(mode="json"))
        )


class ToyConfig(PreTrainedConfig):
    model_type = "drafthead_toy"
    settings: dict[str, Any] | None = None
    contract: dict[str, Any] | None = None


class ToyHead(DraftHead):
    """Depth i at position t predicts token t + 1 + i from the states at t and nothing else."""

    config_class = ToyConfig
    rows: Tensor | None

    def __init__(self, config: ToyConfig) -> None:
        super().__init__(config)
        self.contract = Contract.model_validate(config.contract)
        self.settings: ToySettings = ToySettings.model_validate(config.settings)
        width = self.contract.hidden_size
        self.maps = nn.ModuleList(
            nn.Linear(len(self.contract.layers) * width, width)
            for _ in range(self.settings.unroll_steps)
        )
        self.dropout = nn.Dropout(self.settings.dropout)
        self.register_buffer("rows", None, persistent=False)
        self.post_init()

    def bind(self, source: PreTrainedModel | Path) -> None:
        assert isinstance(source, PreTrainedModel)
        self.rows = source.get_output_embeddings().weight.detach().clone()  # type: ignore[union-attr]

    @property
    def draft_ids(self) -> Tensor:
        return torch.arange(self.contract.vocab_size)

    def teacher_logits(self, last_hidden: Tensor) -> Tensor:
        assert self.rows is not None
        return last_hidden.to(self.rows.dtype) @ self.rows.T

    def unroll(self, batch: TeacherBatch, steps: int) -> Iterator[Prediction]:
        T = batch.ids.shape[1]
        for depth in range(steps):
            rows, slots = batch.mask[:, 1 + depth :].nonzero(as_tuple=True)
            states = self.dropout(batch.features[rows, slots])
            hidden = self.maps[depth](states)
            yield Prediction(hidden, self.teacher_logits, rows * T + slots + depth)

    def open(self, batch: int, capacity: int) -> HeadState:
        return HeadState()

    def extend(
        self, state: HeadState, features: Tensor, next_ids: Tensor, counts: Tensor
    ) -> Tensor:
        last = (counts - 1).clamp(min=0)
        return self.teacher_logits(self.maps[0](features[torch.arange(len(last)), last]))

    def expand(self, state: HeadState, ids: Tensor, parents: Tensor) -> Tensor:
        assert self.rows is not None
        return torch.zeros(*ids.shape, len(self.rows))
