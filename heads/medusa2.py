"""Medusa-2 (arXiv 2401.10774): Medusa heads trained together with a low-rank adapter of the target.

The adapter is part of the head: trained with it, stored with it, put into a live target by `adapt`.
What is decoded then is the adapted target, without loss; the target's own files never change. In
training each micro-batch runs through the target twice: as it is, which is what the teacher's
source gives, and with the adapter, with a gradient (`live`). Heads learn from the second run's
states; a divergence between the two keeps the target's text what it was (self-distillation).

Train a Medusa-1 head first and begin from it (`training.start`): that is the paper's two-stage
warm-up, without which heads that know nothing would pull the target with them.

Shapes: B batch, T positions, D width, V vocabulary, N supervised positions.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModel, PreTrainedConfig, PreTrainedModel

from drafthead.heads.adapter import Adapter, LowRank, acting, insert, scale, shapes_of
from drafthead.heads.base import TeacherBatch, register
from drafthead.heads.contract import Contract
from drafthead.heads.medusa import MedusaConfig, MedusaHead, MedusaOptions

logger = logging.getLogger(__name__)

CHUNK_LOGITS = 1 << 23
"""Most elements of one table of full-vocabulary logits at a time."""


@register("medusa2")
class Medusa2Settings(MedusaOptions):
    """Medusa-2: the target learns to be drafted for."""

    adapts = True
    follows = ("medusa",)

    type: Literal["medusa2"] = "medusa2"
    lora_rank: int = Field(default=16, ge=1)
    lora_alpha: float = Field(default=4.0, gt=0)
    """What the adapter adds is scaled by lora_alpha / lora_rank. AdamW moves all weights by steps
    of one size, so the target follows at about this share of the heads' pace: 1/4 is the paper's,
    which gives heads four times its learning rate."""
    lora_targets: tuple[str, ...] = Field(
        default=("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
        min_length=1,
    )
    """Linear layers of the target that are adapted, by the last part of their names."""
    distillation: float = Field(default=5.0, ge=0)
    """Weight of the divergence from the target as it was, over that of the heads' loss: the
    paper's 1 to 0.2."""

    def build(
        self, contract: Contract, target: PreTrainedConfig, draft_ids: Tensor | None
    ) -> Medusa2Head:
        size = self.vocabulary_size(contract, draft_ids)
        config = Medusa2Config.of(
            self, contract, target, size, self.blocks, intermediate_size=contract.hidden_size
        )
        config.adapted = {
            name: list(widths)
            for name, widths in shapes_of(target.get_text_config(), self.lora_targets).items()
        }
        head = Medusa2Head(config)
        head.untrained(draft_ids)
        return head


class Medusa2Config(MedusaConfig):
    """The geometry of the adapter, beside the heads'."""

    model_type = "drafthead_medusa2"

    adapted: dict[str, list[int]] | None = None
    """Widths (in, out) of the adapted layers, by their names in the target."""


class Medusa2Head(MedusaHead):
    """See the module docstring."""

    config_class = Medusa2Config
    config: Medusa2Config
    settings: Medusa2Settings

    def __init__(self, config: Medusa2Config) -> None:
        super().__init__(config)
        if not config.adapted:
            raise ValueError("head config: no adapted layers; was it written by drafthead?")
        shapes = {name: (widths[0], widths[1]) for name, widths in config.adapted.items()}
        self.adapter = Adapter(shapes, self.settings.lora_rank)
        self._target: list[PreTrainedModel] = []
        """The live target, in training; in a list, so that it is no part of the head."""
        self.post_init()  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, LowRank):
            module.start()

    def adapt(self, target: PreTrainedModel, *, resting: bool = False) -> None:
        settings = self.settings
        fresh = insert(target, self.adapter, settings.lora_rank, settings.lora_alpha)
        scale(target, 0.0 if resting else 1.0)
        if resting:
            self._target = [target]
        elif fresh:
            logger.warning(
                "the head adapts its target in memory: text is, without loss, that of %r as "
                "adapted, not as published",
                self.contract.target,
            )

    def live(self, batch: TeacherBatch) -> tuple[TeacherBatch, Tensor]:
        if not self._target:
            raise ValueError("a Medusa-2 head learns with its target: call adapt(target) first")
        (model,) = self._target
        # Rows with nothing to learn from may be those whose states overflow: they are not run.
        ids = batch.ids * batch.mask.any(dim=1, keepdim=True)
        with torch.set_grad_enabled(self.training), acting(model):
            out = model.get_decoder()(input_ids=ids, use_cache=False)
            last: Tensor = out.last_hidden_state
        needed = batch.supervised(1).flatten()
        drift, choices = self._against(batch.last_hidden.flatten(0, 1), last.flatten(0, 1), needed)
        top = torch.zeros_like(needed, dtype=torch.int64)
        top[needed] = choices
        adapted = replace(
            batch, features=last, last_hidden=last.detach(), top=top.view(batch.top.shape)
        )
        return adapted, self.settings.distillation * drift

    def _against(self, original: Tensor, adapted: Tensor, needed: Tensor) -> tuple[Tensor, Tensor]:
        """Of the needed (N of (B * T)) rows: Σ KL(original ‖ adapted), and the adapted's choices.

        Chunk by chunk, and once more in the backward pass, so that logits never exist at once.
        """
        exact = torch.promote_types(adapted.dtype, torch.float32)
        drift, choices = adapted.new_zeros((), dtype=exact), []
        size = max(1, CHUNK_LOGITS // self.contract.vocab_size)
        for chunk in needed.nonzero()[:, 0].split(size):
            divergence, chosen = checkpoint(
                self._divergence, original[chunk], adapted[chunk], use_reentrant=False
            )
            drift = drift + divergence
            choices.append(chosen)
        return drift, torch.cat(choices) if choices else needed.nonzero()[:, 0]

    def _divergence(self, original: Tensor, adapted: Tensor) -> tuple[Tensor, Tensor]:
        """Two (n, D) → the summed KL of their distributions over V, and (n,) likeliest tokens."""
        rows: nn.Module = self._target[0].get_output_embeddings()
        dtype = next(rows.parameters()).dtype
        logits = self.contract.transform(rows(adapted.to(dtype)))
        chosen = logits.max(dim=-1).indices
        exact = torch.promote_types(logits.dtype, torch.float32)
        if not (self.training and self.settings.distillation):
            return logits.new_zeros((), dtype=exact), chosen
        before = self.contract.transform(rows(original.to(dtype)))
        q, p = (side.to(exact).log_softmax(dim=-1) for side in (logits, before))
        return F.kl_div(q, p, reduction="sum", log_target=True), chosen


AutoConfig.register(Medusa2Config.model_type, Medusa2Config)
AutoModel.register(Medusa2Config, Medusa2Head)
