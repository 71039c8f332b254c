"""EAGLE-1 (arXiv 2401.15077): one decoder layer that goes on with the target's last hidden states.

EAGLE-2 (arXiv 2406.16858) is this head with a best-first tree; HASS (arXiv 2408.15766) is this head
with `unroll_steps` above 1. Tensor names and maths are those that serving engines load. Slot t
holds x = fc([embedding of token t + 1; f]), f being the target's last hidden state at position t,
has rotary position t, and its output stands for the state at t + 1, from which the target's own
rows read token t + 2. At unroll step i the same slot holds the output of step i - 1 for f and token
t + 1 + i, and has position t + i. A draft node of depth i is that very computation.

Shapes: B batch, T positions, D width, Vd draft vocabulary, M supervised positions of one depth,
m draft nodes, d head width.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal, cast

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModel, PreTrainedConfig

from drafthead.heads.base import HeadState, Prediction, TeacherBatch, register
from drafthead.heads.blocks import active_slots, take_slots, unroll_attention
from drafthead.heads.borrowed import Borrowed
from drafthead.heads.borrowing import BorrowingHead, BorrowingSettings
from drafthead.heads.contract import LAST, Contract
from drafthead.heads.decoder_layer import DecoderLayer
from drafthead.heads.geometry import HeadConfig
from drafthead.heads.memory import LayerMemory
from drafthead.heads.warm_start import Moments

TOP = 10
"""The target's likeliest tokens of `topk_loss`, as many as HASS takes."""
TOP_ROWS = 256
"""Rows of logits that `topk_loss` makes at one time, forward and back."""


@register("eagle")
class EagleSettings(BorrowingSettings):
    """What a user chooses about an EAGLE-1 head."""

    type: Literal["eagle"] = "eagle"
    unroll_steps: int = Field(default=1, ge=1)
    """Depths trained: 1 is EAGLE-1, more is HASS, which has 3. Drafts may be deeper."""
    feature_loss: float = Field(default=10.0, ge=0)
    """Weight of the smooth-L1 loss between output and target's state; the paper's is 10 : 1."""
    feature_noise: float = Field(default=0.1, ge=0)
    """Training adds uniform noise within ± this to the target's states; the paper's is 0.1."""
    topk_loss: float = Field(default=0.0, ge=0)
    """Weight of the cross-entropy over the target's ten likeliest tokens alone (HASS)."""
    detach_passes: bool = True
    """Whether a step's loss leaves the states that it was fed as they are (HASS)."""
    fc_bias: bool = False
    """Train the bias of `fc`; it is stored in any case, but vLLM drops it without a word."""
    rope_theta: float | None = Field(default=None, gt=0)
    """Rotary base of the draft layer; None = the target's, or 10,000 where it has none."""
    intermediate_size: int | None = Field(default=None, ge=1)
    """Width inside the draft layer's MLP; None = the target's."""

    def captured(self, num_layers: int) -> tuple[int, ...]:
        return (LAST,)

    def without_effect(self) -> list[str]:
        return ["detach_passes"] if self.unroll_steps == 1 and not self.detach_passes else []

    def build(
        self, contract: Contract, target: PreTrainedConfig, draft_ids: Tensor | None
    ) -> EagleHead:
        size = self.vocabulary_size(contract, draft_ids)
        inner, theta = self.intermediate_size, self.rope_theta
        head = EagleHead(
            EagleConfig.of(self, contract, target, size, intermediate_size=inner, rope_theta=theta)
        )
        head.untrained(draft_ids)
        return head


class EagleConfig(HeadConfig):
    """The published names and the stored geometry."""

    model_type = "drafthead_eagle"


class EagleHead(BorrowingHead):
    """See the module docstring; the stored tensors are exactly those of the published layout."""

    config_class = EagleConfig
    config: EagleConfig
    settings: EagleSettings
    supports_gradient_checkpointing = True
    packs = True

    def __init__(self, config: EagleConfig) -> None:
        super().__init__(config)
        width = config.hidden_size
        self.fc = nn.Linear(2 * width, width, bias=self.settings.fc_bias)
        if not self.settings.fc_bias:
            del self.fc.bias
            self.fc.register_buffer("bias", torch.zeros(width))
        self.layers = nn.ModuleList([DecoderLayer(config, input_norm=False)])
        self.post_init()  # type: ignore[no-untyped-call]

    def start_weights(self, borrowed: Borrowed) -> None:
        self.layer.silence()

    # The parts that training and decoding share

    @property
    def layer(self) -> DecoderLayer:
        return cast(DecoderLayer, self.layers[0])

    def _inputs(self, ids: Tensor, states: Tensor) -> Tensor:
        """Tokens (B, n) and the states before them (B, n, D) → (B, n, D), the residual stream."""
        embedded = F.embedding(ids, self.bound()[0])
        out: Tensor = self.fc(torch.cat((embedded, states.to(self.compute_dtype())), dim=-1))
        return out

    # Training

    def unroll(self, batch: TeacherBatch, steps: int) -> Iterator[Prediction]:
        """See the base class. Only slots with a label at some depth go beyond the first keys."""
        layer, T = self.layer, batch.ids.shape[1]
        labelled = [batch.supervised(2 + i) for i in range(steps)]  # slot t predicts t + 2 + i
        slots = active_slots(torch.stack(labelled).any(0))  # (B, m)
        n = int(slots.max()) + 1 if slots.numel() else 0
        starts = torch.zeros_like(batch.ids) if batch.starts is None else batch.starts
        turns = self.turns(torch.arange(n, device=slots.device) - starts[:, :n], T + steps)
        x = self._inputs(batch.ids[:, 1 : 1 + n], self._noisy(batch.features[:, :n]))
        keys, values = ([kv] for kv in layer.keys_values(x, *turns))
        x, starts = take_slots(x, slots), starts.gather(1, slots)
        outputs = x  # of the step before
        for i in range(steps):
            turns = self.turns(slots - starts + i, T + steps)
            if i > 0:
                tokens = batch.ids.gather(1, (slots + 1 + i).clamp(max=T - 1))
                x = self._inputs(
                    tokens, outputs.detach() if self.settings.detach_passes else outputs
                )
                key, value = layer.keys_values(x, *turns)
                keys.append(key)
                values.append(value)
            outputs = self._recomputed(x, *turns, slots, starts, *keys, *values)
            rows, at = labelled[i].gather(1, slots).nonzero(as_tuple=True)
            made, teacher = outputs[rows, at], rows * T + slots[rows, at] + 1 + i
            auxiliary = self._auxiliary(batch, made, teacher)
            yield Prediction(made, self.teacher_logits, teacher, auxiliary=auxiliary)

    def _noisy(self, states: Tensor) -> Tensor:
        """The target's states, in training a little off: a draft's own are never quite right."""
        noise = self.settings.feature_noise
        if not noise or not self.training:
            return states
        return states + (2 * torch.rand_like(states) - 1) * noise

    def _recomputed(self, *operands: Tensor) -> Tensor:
        """The layer's outputs; with `gradient_checkpointing` what is inside is not kept."""
        if self.gradient_checkpointing and torch.is_grad_enabled():
            out: Tensor = checkpoint(self._outputs, *operands, use_reentrant=False)
            return out
        return self._outputs(*operands)

    def _outputs(
        self, x: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, starts: Tensor, *held: Tensor
    ) -> Tensor:
        """The layer at one unroll step; held: all steps' keys, then all steps' values."""
        keys, values = held[: len(held) // 2], held[len(held) // 2 :]
        queries = self.layer.queries(x, cos, sin)
        return self.layer.finish(unroll_attention(queries, keys, values, slots, starts), x)

    def _auxiliary(self, batch: TeacherBatch, made: Tensor, teacher: Tensor) -> dict[str, Tensor]:
        settings, extra = self.settings, {}
        truth = batch.last_hidden.flatten(0, 1)[teacher]
        if settings.feature_loss:
            loss = F.smooth_l1_loss(made.float(), truth.float(), reduction="none").mean(-1)
            extra["regression"] = settings.feature_loss * loss
        if settings.topk_loss:
            # As with the soft loss: where the target's choice cannot be drafted there is none.
            known = self.in_vocabulary(batch.top.flatten()[teacher])
            extra["top"] = settings.topk_loss * known * self._top_loss(made, truth)
        return extra

    def _top_loss(self, made: Tensor, truth: Tensor) -> Tensor:
        """Outputs and the target's states (M, D) → (M,); no more logits than of TOP_ROWS exist."""
        pairs = zip(made.split(TOP_ROWS), truth.split(TOP_ROWS), strict=True)
        parts = [checkpoint(self._top_part, *pair, use_reentrant=False) for pair in pairs]
        return torch.cat(parts)

    def _top_part(self, made: Tensor, truth: Tensor) -> Tensor:
        """- sum of q log p over the TOP tokens of largest q, the target's probability."""
        with torch.no_grad():
            target = self.teacher_logits(truth).float().softmax(-1)
            top = target.topk(min(TOP, target.shape[-1]), dim=-1)
        drafted = self.teacher_logits(made).float()
        logs = drafted.gather(-1, top.indices) - drafted.logsumexp(-1, keepdim=True)
        return -(top.values * logs).sum(-1)

    @torch.no_grad()
    def warm_start(self, batches: Iterable[TeacherBatch]) -> None:
        """Set `fc` to the ridge regression of the target's next state on what a slot holds.

        The layer's two branches start as they are and learn what is left.
        """
        embedding, moments = self.bound()[0].float(), Moments()
        scale = embedding.square().mean().sqrt()  # one penalty for both halves of the input
        for batch in batches:
            rows, slots = batch.mask[:, 2:].nonzero(as_tuple=True)
            token = F.embedding(batch.ids[rows, slots + 1], embedding) / scale
            states = batch.features[rows, slots].float()
            moments.add(torch.cat((token, states), -1), batch.last_hidden[rows, slots + 1])
        if not moments.n:
            raise ValueError("head.warm_start: no supervised position in its batches")
        weight = moments.solve().T.clone()
        weight[:, : embedding.shape[1]] /= scale
        self.fc.weight.copy_(weight)

    # Decoding

    @torch.no_grad()
    def open(self, batch: int, capacity: int) -> LayerMemory:
        config, device = self.config, self.bound()[0].device
        heads, head_dim, width = config.num_key_value_heads, config.head_dim, config.hidden_size
        dtype = self.compute_dtype()
        return LayerMemory(batch, capacity, heads, head_dim, width, device, dtype)

    @torch.no_grad()
    def extend(
        self, state: HeadState, features: Tensor, next_ids: Tensor, counts: Tensor
    ) -> Tensor:
        assert isinstance(state, LayerMemory)
        layer, row = self.layer, state.row
        positions = state.next_positions(next_ids.shape[1])
        x = self._inputs(next_ids, features)
        state.commit(*layer.keys_values(x, *self.turns(positions, state.capacity)), counts.tolist())

        # Earlier slots gave their keys and values; only the last one is asked for an output.
        counts = counts.to(row.device)[:, None]
        last = (counts - 1).clamp(min=0)
        x = x[row, last]
        query = layer.queries(x, *self.turns(positions[row, last], state.capacity))
        outputs = layer.finish(state.attend_committed(query), x)
        outputs = torch.where(counts[:, None] > 0, outputs, state.outputs[:, :1])
        state.start_round(outputs)
        return self.teacher_logits(outputs[:, 0])

    @torch.no_grad()
    def expand(self, state: HeadState, ids: Tensor, parents: Tensor) -> Tensor:
        assert isinstance(state, LayerMemory)
        layer, parents = self.layer, parents.to(ids.device)
        above, positions = state.below(parents)
        turns = self.turns(positions, state.capacity)
        x = self._inputs(ids, above)
        attended = state.add(layer.queries(x, *turns), *layer.keys_values(x, *turns), parents)
        outputs = layer.finish(attended, x)
        state.finish(outputs)
        return self.teacher_logits(outputs)


AutoConfig.register(EagleConfig.model_type, EagleConfig)
AutoModel.register(EagleConfig, EagleHead)
