"""The block head: a whole block of drafts in one forward (DFlash, arXiv 2602.06036; DSpark,
arXiv 2607.05147).

Slot t holds the target's states at position t; token t + 1, the anchor, is known. The block of this
slot is the anchor's embedding and masks, at rotary positions t + 1, t + 2, …; it sees the fused
states at positions ≤ t, projected to keys and values in every layer, and itself. Depth i predicts
token t + 2 + i: from input i where the anchor predicts (DSpark), else from input i + 1, each mask
its own token (DFlash).

What a block cannot know, the tokens drafted before, comes in as a low-rank correction: the logits
after a token x gain W1[x] W2, so trees cost no further forward.

Shapes: B batch, T positions, D width, V vocabulary, Vd draft vocabulary, L captured layers, m
anchors, S inputs of a block, K depths, r rank of the correction, M positions of one depth.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Literal, cast

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModel, PreTrainedConfig, initialization

from drafthead.heads.base import HeadState, Prediction, TeacherBatch, register
from drafthead.heads.block_layer import BlockLayer, BlockMemory, BlockPlan, Turns
from drafthead.heads.block_start import Moments, fading, fit, rare_direction
from drafthead.heads.blocks import RMSNorm, active_slots, widened
from drafthead.heads.borrowed import Borrowed
from drafthead.heads.calibration import acceptance, fit_temperatures
from drafthead.heads.contract import Contract
from drafthead.heads.fused import FusedHead, FusedSettings
from drafthead.heads.geometry import HeadConfig
from drafthead.heads.warm_start import MODESTY, normed


def spread_layers(num_layers: int, count: int = 5) -> tuple[int, ...]:
    """Evenly from 2 to n - 2, as DFlash's servers do; fewer where they would collide."""
    steps = (1 + i * (num_layers - 4) / (count - 1) for i in range(count))
    return tuple(sorted({min(max(round(step) + 1, 1), num_layers) for step in steps}))


@register("block")
class BlockSettings(FusedSettings):
    """What a user chooses about a block head."""

    type: Literal["block"] = "block"
    unroll_steps: int = Field(default=8, ge=1)
    """Tokens that one block drafts."""
    num_layers: int = Field(default=2, ge=1)
    """Draft layers."""
    causal: bool = False
    """Whether inputs see only the earlier ones of their block (JetSpec), or all of them."""
    anchor_predicts: bool = True
    """Whether the anchor predicts the first token; otherwise only masks do, one more of them."""
    mask_token_id: int | None = Field(default=None, ge=0)
    """Token whose embedding the masks are; None = a trained one."""
    num_key_value_heads: int | None = Field(default=None, ge=1)
    """Key/value heads of the draft layers; None = the target's. States come in through them."""
    markov_rank: int = Field(default=256, ge=0)
    """Rank of the correction by the token before; 0 = none."""
    confidence: bool = True
    """Predict the chance that a draft is accepted, for trees and stops."""
    anchor_share: float = Field(default=0.5, gt=0, le=1)
    """Share of the supervised slots that are anchors in training, drawn anew in each step."""

    def captured(self, num_layers: int) -> tuple[int, ...]:
        return self.layers or spread_layers(num_layers)

    def without_effect(self) -> list[str]:
        alone = self.unroll_steps == 1 and self.anchor_predicts  # the anchor, and no mask after it
        idle = {"mask_token_id": self.mask_token_id is not None, "causal": self.causal}
        return [name for name, given in idle.items() if given and alone]

    def build(
        self, contract: Contract, target: PreTrainedConfig, draft_ids: Tensor | None
    ) -> BlockHead:
        self.check_layers(contract)
        if self.mask_token_id is not None and self.mask_token_id >= contract.vocab_size:
            raise ValueError(
                f"head.mask_token_id: {self.mask_token_id} is not below the target's vocabulary "
                f"of {contract.vocab_size}: choose a token that it has, or null for a trained mask"
            )
        size = self.vocabulary_size(contract, draft_ids)
        config = BlockConfig.of(
            self,
            contract,
            target,
            size,
            layers=self.num_layers,
            intermediate_size=self.intermediate_size,
            rope_theta=self.rope_theta,
            num_key_value_heads=self.num_key_value_heads,
        )
        head = BlockHead(config)
        head.untrained(draft_ids)
        return head


class BlockConfig(HeadConfig):
    """The stored geometry."""

    model_type = "drafthead_block"


class BlockHead(FusedHead):
    """See the module docstring. Tensors that DFlash has, too, are named as there."""

    config_class = BlockConfig
    config: BlockConfig
    settings: BlockSettings
    supports_gradient_checkpointing = True
    packs = True

    calibration: Tensor
    """(K,) temperature of the confidence at each depth."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__(config)
        settings, width, eps = self.settings, config.hidden_size, config.rms_norm_eps
        rank = settings.markov_rank
        self.max_depth = settings.unroll_steps
        self.size = settings.unroll_steps + (not settings.anchor_predicts)
        self.hidden_norm = RMSNorm(width, eps)
        if settings.mask_token_id is None:
            self.mask_embedding = nn.Embedding(1, width)
        self.layers = nn.ModuleList(
            BlockLayer(
                width,
                config.intermediate_size,
                config.num_attention_heads,
                config.num_key_value_heads,
                config.head_dim,
                eps,
                config.hidden_act,
            )
            for _ in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(width, eps)
        if rank:
            self.markov_in = nn.Embedding(config.vocab_size, rank)
            self.markov_out = nn.Linear(rank, config.draft_vocab_size, bias=False)
        if settings.confidence:
            self.confidence_head = nn.Linear(width + rank, 1)
            self.register_buffer("calibration", torch.ones(settings.unroll_steps))
            self.calibrates = True
        self.post_init()  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if module is self and self.settings.markov_rank:
            initialization.zeros_(self.markov_out.weight)

    def start_weights(self, borrowed: Borrowed) -> None:
        super().start_weights(borrowed)
        if self.settings.markov_rank:
            # The target's embedding seen through random directions: tokens that are alike there
            # are corrected alike from the start, rare ones too.
            table = borrowed.embedding.to(self.markov_in.weight)
            # As many directions as it is wide; a vocabulary may have fewer tokens than that.
            directions = self.markov_in.weight[torch.arange(table.shape[1]) % len(table)]
            table = (table - table.mean(0)) @ directions
            self.markov_in.weight.copy_(F.normalize(table, dim=-1))

    # The parts that training and decoding share

    @property
    def draft_layers(self) -> list[BlockLayer]:
        return cast(list[BlockLayer], list(self.layers))

    def fuse(self, features: Tensor) -> Tensor:
        return cast(Tensor, self.hidden_norm(super().fuse(features)))

    def _inputs(self, anchors: Tensor) -> Tensor:
        """(B, m) tokens → (B, m * S, D): each one's embedding, and masks after it."""
        embedding, mask_id = self.bound()[0], self.settings.mask_token_id
        if mask_id is None:
            mask = self.mask_embedding(anchors.new_zeros(1))[0]
        else:
            mask = embedding[mask_id]
        anchor = F.embedding(anchors, embedding)[:, :, None]
        masks = mask.to(anchor.dtype).expand(*anchors.shape, self.size - 1, -1)
        return torch.cat((anchor, masks), dim=2).flatten(1, 2)

    def _predicting(self, outputs: Tensor) -> Tensor:
        """(B, m * S, D) outputs of blocks → (B, m, K, D), normed, those that predict."""
        m = outputs.shape[1] // self.size
        blocks: Tensor = self.norm(outputs).unflatten(1, (m, self.size))
        return blocks if self.settings.anchor_predicts else blocks[:, :, 1:]

    def _corrected(self, logits: Tensor, before: Tensor | None) -> Tensor:
        """(…, Vd) raw logits and (…, r) rows of W1 for the token before → logits."""
        if before is not None:
            logits = logits + self.markov_out(before)
        return self.contract.transform(logits)

    def _before(self, ids: Tensor) -> Tensor | None:
        """(…) target ids → their rows of W1 (…, r), or None."""
        if not self.settings.markov_rank:
            return None
        out: Tensor = self.markov_in(ids).to(self.compute_dtype())
        return out

    def _chance_logits(self, hidden: Tensor) -> Tensor:
        """(…, D + r) → (…) logits of the chance of acceptance, not calibrated."""
        out: Tensor = self.confidence_head(hidden).squeeze(-1)
        return out

    # Training

    def unroll(self, batch: TeacherBatch, steps: int) -> Iterator[Prediction]:
        """See the base class; at most the K depths of a block, all from one forward.

        In training a share of the slots with a label are anchors; otherwise all of them are.
        """
        self.bound()
        T, steps = batch.ids.shape[1], min(steps, self.settings.unroll_steps)
        labelled = [batch.supervised(2 + i) for i in range(steps)]  # slot t predicts t + 2 + i
        wanted = self._anchors(torch.stack(labelled).any(0))
        slots = active_slots(wanted)  # (B, m)
        starts = torch.zeros_like(batch.ids) if batch.starts is None else batch.starts
        hidden = self._predicting(self._blocks(batch, slots, starts))
        ahead = slots[..., None] + 1 + torch.arange(steps, device=slots.device)
        before = self._before(batch.ids.gather(1, ahead.clamp(max=T - 1).flatten(1)))
        if before is not None:
            before = before.view(*ahead.shape, self.settings.markov_rank)
            hidden = torch.cat((hidden[:, :, :steps], before), dim=-1)
        for i in range(steps):
            rows, at = (labelled[i] & wanted).gather(1, slots).nonzero(as_tuple=True)
            read = hidden[rows, at, i]
            yield Prediction(
                read,
                self._readout,
                teacher=rows * T + slots[rows, at] + 1 + i,
                trained_readout=self.settings.markov_rank > 0,
                confidence=self._chance_logits(read) if self.settings.confidence else None,
            )

    def _anchors(self, wanted: Tensor) -> Tensor:
        """(B, T) bool → those of the slots that are anchors now."""
        if not self.training or self.settings.anchor_share == 1:
            return wanted
        drawn = torch.rand(wanted.shape) < self.settings.anchor_share
        return wanted & drawn.to(wanted.device)

    def _blocks(self, batch: TeacherBatch, slots: Tensor, starts: Tensor) -> Tensor:
        """The layers' outputs, (B, m * S, D), for the blocks after (B, m) slots."""
        T, size = batch.ids.shape[1], self.size
        n = int(slots.max()) + 1 if slots.numel() else 0
        context = self.fuse(batch.features[:, :n])
        place = torch.arange(n, device=slots.device)
        context_turns = self.turns(place - starts[:, :n], T + size)
        anchors = batch.ids.gather(1, (slots + 1).clamp(max=T - 1))
        own = starts.gather(1, slots)
        positions = (slots - own + 1)[..., None] + torch.arange(size, device=slots.device)
        turns = self.turns(positions.flatten(1), T + size)
        plan = BlockPlan(slots, own, size, self.settings.causal)
        hidden = self._inputs(anchors)
        for layer in self.draft_layers:
            run = partial(_run, layer, plan, context_turns, turns)
            if self.gradient_checkpointing and torch.is_grad_enabled():
                hidden = checkpoint(run, hidden, context, use_reentrant=False)
            else:
                hidden = run(hidden, context)
        return hidden

    def _readout(self, read: Tensor) -> Tensor:
        """(m, D + r) → (m, Vd)."""
        hidden, before = read.split((self.config.hidden_size, self.settings.markov_rank), dim=-1)
        logits = F.linear(hidden, self.bound()[1])
        return self._corrected(logits, before if self.settings.markov_rank else None)

    @torch.no_grad()
    def warm_start(self, batches: Iterable[TeacherBatch]) -> None:
        """Fit the first layer's attention and the correction in closed form (`block_start`)."""
        config, settings, (embedding, rows) = self.config, self.settings, self.bound()
        parts, eps = len(self.contract.layers) if settings.norm_features else 0, config.rms_norm_eps
        moments = Moments.of(batches, embedding, parts, eps)
        if settings.mask_token_id is None:
            mask = rare_direction(moments)
            self.mask_embedding.weight.copy_(mask * widened(embedding).square().mean().sqrt())
        else:
            mask = normed(embedding[settings.mask_token_id], eps)
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        own = kv_heads // 2 if settings.anchor_predicts else 0
        start = fit(moments, mask, config.head_dim, kv_heads, own, settings.markov_rank)
        self.fc.weight.copy_(start.fuse.T)
        first = self.draft_layers[0].self_attn
        start.write(first, fading(self._rotary.frequencies), heads, kv_heads)
        self.norm.weight.fill_(MODESTY * start.size)
        if settings.markov_rank:
            self.markov_in.weight.copy_(normed(embedding, eps) @ start.before.float())
            self.markov_out.weight.copy_(MODESTY * rows.float() @ start.correction.float().T)

    @torch.no_grad()
    def calibrate(self, batches: Iterable[TeacherBatch]) -> None:
        """Fit the temperatures of the confidence; a choice it cannot draft is never accepted."""
        if not self.settings.confidence:
            return
        was_training, K = self.training, self.settings.unroll_steps
        self.train(False)
        found: list[Tensor] = []
        for batch in batches:
            table = torch.full((2, K, batch.ids.numel()), torch.nan)
            for depth, prediction in enumerate(self.unroll(batch, K)):
                at = prediction.teacher
                assert prediction.confidence is not None
                teacher = self.teacher_logits(batch.last_hidden.flatten(0, 1)[at])
                chance = acceptance(prediction.logits, teacher)
                chance = chance * self.in_vocabulary(batch.top.flatten()[at])
                pair = torch.stack((prediction.confidence.float(), chance))
                table[:, depth, (at - depth).cpu()] = pair.cpu()
            found.append(table)
        if found:
            self.calibration.copy_(fit_temperatures(*torch.cat(found, dim=-1)))
        self.train(was_training)

    # Decoding

    @torch.no_grad()
    def open(self, batch: int, capacity: int) -> BlockMemory:
        config, device = self.config, self.bound()[0].device
        layers, heads = config.num_hidden_layers, config.num_key_value_heads
        dtype = self.compute_dtype()
        return BlockMemory(
            batch, capacity, self.size, layers, heads, config.head_dim, device, dtype
        )

    @torch.no_grad()
    def extend(
        self, state: HeadState, features: Tensor, next_ids: Tensor, counts: Tensor
    ) -> Tensor:
        assert isinstance(state, BlockMemory)
        length = state.capacity + self.size + 1
        turns = self.turns(state.next_positions(next_ids.shape[1]), length)
        context = self.fuse(features)
        pairs = [layer.keys_values(context, turns) for layer in self.draft_layers]
        state.commit(pairs, next_ids, counts)

        turns = self.turns(state.next_positions(self.size), length)
        hidden, seen = self._inputs(state.anchors), state.seen(self.settings.causal)
        for index, layer in enumerate(self.draft_layers):
            hidden = layer(hidden, turns, state.attend(index, seen))
        hidden = self._predicting(hidden)[:, 0]
        state.start_round(hidden, F.linear(hidden, self.bound()[1]))
        return self._corrected(state.logits[:, 0], self._before(state.anchors[:, 0]))

    @torch.no_grad()
    def expand(self, state: HeadState, ids: Tensor, parents: Tensor) -> Tensor:
        assert isinstance(state, BlockMemory)
        depths = state.add(ids, parents.to(ids.device))
        return self._corrected(state.logits[state.row, depths], self._before(ids))

    @torch.no_grad()
    def confidence(self, state: HeadState) -> Tensor | None:
        assert isinstance(state, BlockMemory)
        if not self.settings.confidence:
            return None
        depths, ids = state.asked
        hidden, before = state.hidden[state.row, depths], self._before(ids)
        if before is not None:
            hidden = torch.cat((hidden, before), dim=-1)
        return (self._chance_logits(hidden).float() / self.calibration[depths]).sigmoid()


def _run(
    layer: BlockLayer,
    plan: BlockPlan,
    context_turns: Turns,
    turns: Turns,
    hidden: Tensor,
    context: Tensor,
) -> Tensor:
    """One layer of an unroll: hidden (B, m * S, D), context (B, n, D)."""
    keys, values = layer.keys_values(context, context_turns)
    out: Tensor = layer(hidden, turns, partial(plan.attend, keys, values))
    return out


AutoConfig.register(BlockConfig.model_type, BlockConfig)
AutoModel.register(BlockConfig, BlockHead)
