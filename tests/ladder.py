"""Tiny settings of every kind of head by name: generic tests run over all of them.

A new head adds its line here, and is then held to the same promises as the others.
"""

from __future__ import annotations

import torch
from tiny import tiny_batch
from torch import Tensor
from transformers import LlamaForCausalLM

from drafthead.heads.base import TeacherBatch
from drafthead.heads.block import BlockSettings
from drafthead.heads.borrowing import BorrowingHead, BorrowingSettings
from drafthead.heads.contract import describe
from drafthead.heads.eagle import EagleSettings
from drafthead.heads.eagle3 import Eagle3Settings
from drafthead.heads.hydra import HydraSettings
from drafthead.heads.medusa import MedusaSettings

REDUCED = torch.arange(0, 512, 3)
SIZE = len(REDUCED)

LADDER: dict[str, BorrowingSettings] = {
    "block": BlockSettings(draft_vocab_size=SIZE, unroll_steps=5, markov_rank=16),
    "block-dflash": BlockSettings(
        draft_vocab_size=None,
        unroll_steps=4,
        num_layers=3,
        anchor_predicts=False,
        norm_features=False,
        markov_rank=0,
        confidence=False,
        mask_token_id=9,
    ),
    "block-causal": BlockSettings(
        draft_vocab_size=SIZE, unroll_steps=4, num_layers=1, causal=True, confidence=False
    ),
    "eagle": EagleSettings(draft_vocab_size=SIZE),
    "eagle-hass": EagleSettings(
        draft_vocab_size=None, unroll_steps=3, topk_loss=1.0, fc_bias=True, detach_passes=False
    ),
    "eagle3": Eagle3Settings(draft_vocab_size=SIZE),
    "eagle3-layers": Eagle3Settings(draft_vocab_size=SIZE, num_layers=3),
    "eagle3-whole": Eagle3Settings(
        draft_vocab_size=None,
        norm_output=True,
        norm_features=False,
        norm_before_fc=True,
        norm_before_residual=True,
    ),
    "hydra": HydraSettings(draft_vocab_size=SIZE),
    "hydra++": HydraSettings(
        draft_vocab_size=None, mlp_layers=3, prefix_attention=True, dropout=0.2, own_rows=True
    ),
    "medusa": MedusaSettings(draft_vocab_size=SIZE),
    "medusa-own-rows": MedusaSettings(
        draft_vocab_size=None, own_rows=True, blocks=2, unroll_steps=3
    ),
}
"""`draft_vocab_size` is SIZE or None."""


def ladder_head(name: str, target: LlamaForCausalLM, *, fresh: bool = False) -> BorrowingHead:
    """A bound head in evaluation mode, fp64 if the target is.

    Its weights are random and large enough that every part shows, or those of a `fresh` start.
    """
    settings = LADDER[name]
    ids = None if settings.draft_vocab_size is None else REDUCED
    layers = settings.captured(target.config.num_hidden_layers)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        head = settings.build(describe(target, None, layers, {}), target.config, ids)
        assert isinstance(head, BorrowingHead)
        head.to(target.dtype)  # type: ignore[arg-type]
        head.bind(target)
        if not fresh:
            with torch.no_grad():
                for parameter in head.parameters():
                    spread = 0.3 if parameter.dim() < 2 else 2.0 * parameter.shape[-1] ** -0.5
                    parameter.add_(spread * torch.randn_like(parameter))
    return head.eval()  # type: ignore[no-any-return]


def ladder_batch(
    head: BorrowingHead, target: LlamaForCausalLM, ids: Tensor, mask: Tensor | None = None
) -> TeacherBatch:
    """The teacher's states for this head; everything is supervised by default."""
    mask = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask
    return tiny_batch(target, ids, mask, head.contract.layers)


def rollout(head: BorrowingHead, batch: TeacherBatch, row: int, slot: int, steps: int) -> Tensor:
    """Decode with the text's own tokens from a cold memory: (steps, Vd) logits by depth."""
    n = slot + 1
    state = head.open(1, n + steps)
    features, ids = batch.features[row : row + 1], batch.ids[row : row + 1]
    logits = [head.extend(state, features[:, :n], ids[:, 1 : n + 1], torch.tensor([n]))[0]]
    for i in range(1, steps):
        token = ids[:, n + i : n + i + 1]
        logits.append(head.expand(state, token, torch.tensor([[i - 2]]))[0, 0])
    return torch.stack(logits)
