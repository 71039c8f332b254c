"""What heads share that fuse several captured states of their target into one.

Each state is normed or not, and one linear map fuses them; the names are EAGLE-3's (arXiv
2503.01840) and DFlash's (arXiv 2602.06036). It knows no layers behind the fusion.

Shapes: B batch, n slots, D width, L captured layers.
"""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor, nn
from transformers import initialization

from drafthead.heads.blocks import Attention, GatedMLP, RMSNorm
from drafthead.heads.borrowed import Borrowed
from drafthead.heads.borrowing import BorrowingHead, BorrowingSettings
from drafthead.heads.contract import Contract
from drafthead.heads.geometry import HeadConfig


class FusedSettings(BorrowingSettings):
    """Settings of every head that fuses states."""

    layers: tuple[int, ...] | None = None
    """Captured states, ascending ids of the contract's convention; None = the head's own choice."""
    norm_features: bool = True
    """Norm each captured state before they are fused."""
    start_logit_scale: float = Field(default=0.3, gt=0)
    """First weight of the final norm over the target's: below 1 the first guesses are modest."""
    rope_theta: float | None = Field(default=None, gt=0)
    """Rotary base of the draft layers; None = the target's, or 10,000 where it has none."""
    intermediate_size: int | None = Field(default=None, ge=1)
    """Width inside the draft layers' MLPs; None = the target's."""

    def check_layers(self, contract: Contract) -> None:
        """ValueError where the contract is of other states than were asked for."""
        if self.layers is not None and self.layers != contract.layers:
            raise ValueError(f"head.layers: {self.layers} asked for, not {contract.layers}")


class FusedHead(BorrowingHead):
    """See the module docstring; subclasses add `norm`, the final one."""

    settings: FusedSettings
    norm: RMSNorm

    def __init__(self, config: HeadConfig) -> None:
        super().__init__(config)
        width, captured = config.hidden_size, self.contract.layers
        if self.settings.norm_features:
            self.fc_norm = nn.ModuleList(RMSNorm(width, config.rms_norm_eps) for _ in captured)
        self.fc = nn.Linear(len(captured) * width, width, bias=False)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)  # type: ignore[no-untyped-call]
        # Two branches of each layer write to the stream; together they start at the size of one.
        std = self.config.initializer_range * (2 * self.config.num_hidden_layers) ** -0.5
        if isinstance(module, Attention):
            initialization.normal_(module.o_proj.weight, std=std)
        elif isinstance(module, GatedMLP):
            initialization.normal_(module.down_proj.weight, std=std)

    def start_weights(self, borrowed: Borrowed) -> None:
        scale = self.settings.start_logit_scale
        if borrowed.norm is None:
            self.norm.weight.fill_(scale)
        else:
            self.norm.weight.copy_(borrowed.norm * scale)

    def fuse(self, features: Tensor) -> Tensor:
        """(B, n, L * D) captured states → (B, n, D)."""
        features = features.to(self.compute_dtype())
        if self.settings.norm_features:
            parts = features.chunk(len(self.fc_norm), dim=-1)
            normed = [norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)]
            features = torch.cat(normed, dim=-1)
        out: Tensor = self.fc(features)
        return out
