"""What all heads share that draft with the target's own embedding and output rows.

They are bound as non-persistent buffers, so nothing of them is trained, stored or missing when a
head is loaded; with a reduced draft vocabulary the maps `d2t` and `t2d` are stored. It knows no
architecture: subclasses add layers, an unroll and draft steps.

Shapes: B batch, D width, V vocabulary, Vd draft vocabulary, n slots, d head width.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor
from transformers import PreTrainedModel

from drafthead.heads.base import DraftHead, HeadSettings, settings_class
from drafthead.heads.blocks import Rotary
from drafthead.heads.borrowed import Borrowed, borrow
from drafthead.heads.contract import Contract
from drafthead.heads.geometry import HeadConfig
from drafthead.heads.vocabulary import check_maps, ids_of, maps_of


class BorrowingSettings(HeadSettings):
    """Settings of every head that borrows."""

    draft_vocab_size: int | None = Field(default=16384, ge=1)
    """Tokens that can be proposed; None = all of the target's."""

    def vocabulary_size(self, contract: Contract, draft_ids: Tensor | None) -> int:
        """Of the draft vocabulary given; ValueError unless it is as large as was asked for."""
        vocab_size = contract.vocab_size
        size = vocab_size if draft_ids is None else draft_ids.shape[0]
        asked = vocab_size if self.draft_vocab_size is None else self.draft_vocab_size
        if size != asked:
            raise ValueError(
                f"head.draft_vocab_size: {asked} tokens asked for, the vocabulary given has {size} "
                f"of {vocab_size}: make it anew or change the setting"
            )
        return size


class BorrowingHead(DraftHead):
    """See the module docstring."""

    config_class = HeadConfig
    config: HeadConfig
    base_model_prefix = ""

    d2t: Tensor
    t2d: Tensor
    embedding: Tensor | None
    rows: Tensor | None

    def __init__(self, config: HeadConfig) -> None:
        super().__init__(config)
        if config.contract is None or config.settings is None:
            raise ValueError("head config: no contract or settings; was it written by drafthead?")
        self.contract = Contract.model_validate(config.contract)
        kind: Any = settings_class(config.settings["type"])
        self.settings = kind.model_validate(config.settings)
        self.reduced = config.draft_vocab_size < config.vocab_size
        if self.reduced:
            self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
            self.register_buffer("t2d", torch.zeros(config.vocab_size, dtype=torch.bool))
        self.register_buffer("embedding", None, persistent=False)
        self.register_buffer("rows", None, persistent=False)
        self._rotary = Rotary(config.head_dim, config.rope_parameters or {})
        self.starts_at_bind = False
        """True for an untrained head: `bind` also sets its first weights (`start_weights`)."""

    @classmethod
    def is_custom_code(cls) -> bool:
        """No: else transformers passes over `_init_weights` of modules with no weight of their own.

        It takes them for initialised already. What was loaded stays: `initialization` asks each
        parameter.
        """
        return False

    def untrained(self, draft_ids: Tensor | None) -> None:
        """Take the draft vocabulary, (Vd,) ascending target ids, and be started by `bind`."""
        if draft_ids is not None and self.reduced:
            d2t, t2d = maps_of(draft_ids, self.config.vocab_size)
            self.d2t.copy_(d2t)
            self.t2d.copy_(t2d)
        self.starts_at_bind = True

    def start_weights(self, borrowed: Borrowed) -> None:
        """Set an untrained head's first weights from what it borrows; nothing by default."""

    def bind(self, source: PreTrainedModel | Path, check: bool = True) -> None:
        """Borrow from a live target or its folder, in the dtype that the head computes in.

        `check=False` accepts another target of equal shape: harmless, but drafts may be useless.
        """
        if self.reduced:
            check_maps(self.d2t, self.t2d)
        borrowed = borrow(source, self.contract, self.draft_ids if self.reduced else None, check)
        device, dtype = self.device, self.compute_dtype()
        self.embedding = borrowed.embedding.to(device, dtype)
        same = borrowed.rows is borrowed.embedding
        self.rows = self.embedding if same else borrowed.rows.to(device, dtype)
        if self.starts_at_bind:
            with torch.no_grad():
                self.start_weights(borrowed)
            self.starts_at_bind = False

    def bound(self) -> tuple[Tensor, Tensor]:
        """Embedding (V, D) and output rows (Vd, D) of the target; ValueError before `bind`."""
        if self.embedding is None or self.rows is None:
            raise ValueError(
                f"head of {self.contract.target!r} is not bound: call bind(target) before a forward"
            )
        return self.embedding, self.rows

    def compute_dtype(self) -> torch.dtype:
        """What matrix products run in here: autocast's, or that of the weights."""
        device = self.device.type
        if torch.is_autocast_enabled(device):
            return torch.get_autocast_dtype(device)
        dtype: torch.dtype = self.dtype
        return dtype

    @property
    def draft_ids(self) -> Tensor:
        if self.reduced:
            return ids_of(self.d2t)
        return torch.arange(self.config.vocab_size, device=self.device)

    @property
    def positions(self) -> int | None:
        return self.config.max_position_embeddings

    def in_vocabulary(self, ids: Tensor) -> Tensor:
        """Target ids → bool of the same shape: True where the head can propose the token."""
        return self.t2d[ids] if self.reduced else torch.ones_like(ids, dtype=torch.bool)

    def teacher_logits(self, last_hidden: Tensor) -> Tensor:
        rows = self.bound()[1]
        return self.contract.transform(F.linear(last_hidden.to(rows.dtype), rows))

    @property
    def rotary_base(self) -> float:
        """What its layers turn by, where it has any that do."""
        return float((self.config.rope_parameters or {})["rope_theta"])

    def rebase(self, base: float) -> None:
        """Turn by another rotary base from now on."""
        parameters = {**(self.config.rope_parameters or {}), "rope_theta": base}
        self.config.rope_parameters = parameters
        self._rotary = Rotary(self.config.head_dim, parameters)

    def turns(self, positions: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """(B, n) positions below `length` → cos and sin, (B, 1, n, d)."""
        cos, sin = self._rotary.tables(length, positions.device, self.compute_dtype())
        # Beyond it there is only padding, or a draft that `write_rows` refuses.
        positions = positions.clamp(max=length - 1)
        return cos[positions][:, None], sin[positions][:, None]
