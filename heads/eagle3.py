"""EAGLE-3 (arXiv 2503.01840): a decoder layer over three fused target states, fed its own output.

Tensor names and maths are those that serving engines load. The layer may have ordinary ones above
it, which read its stream alone; what is fed back is the output of the last. Slot t holds the
target's states at position t and the embedding of token t + 1, has rotary position t, and predicts
token t + 2. At unroll step i the same slot holds the head's own output of step i - 1 and token
t + 1 + i, has position t + i, and predicts token t + 2 + i. A draft node of depth i is that very
computation.

Shapes: B batch, T positions, D width, V vocabulary, Vd draft vocabulary, L captured layers,
M supervised positions of one depth, m draft nodes, d head width.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Literal, Self, cast

import torch
import torch.nn.functional as F
from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModel, PreTrainedConfig

from drafthead.heads.base import HeadState, Prediction, TeacherBatch, register
from drafthead.heads.blocks import (
    Eagle3Layer,
    RMSNorm,
    active_slots,
    take_slots,
    unroll_attention,
)
from drafthead.heads.borrowed import Borrowed
from drafthead.heads.contract import Contract, default_layers
from drafthead.heads.decoder_layer import DecoderLayer
from drafthead.heads.fused import FusedHead, FusedSettings
from drafthead.heads.geometry import HeadConfig
from drafthead.heads.stack import StackMemory, attend_new
from drafthead.heads.warm_start import MODESTY, Moments

Layer = Eagle3Layer | DecoderLayer
Turns = tuple[Tensor, Tensor]
LATER = ("norm_before_residual", "norm_before_fc")
Held = list[tuple[list[Tensor], list[Tensor]]]
"""Keys and values of each unroll step so far, for each layer."""


@register("eagle3")
class Eagle3Settings(FusedSettings):
    """What a user chooses about an EAGLE-3 head."""

    type: Literal["eagle3"] = "eagle3"
    unroll_steps: int = Field(default=3, ge=1)
    norm_output: bool = False
    """Feed the next step the output after the final norm (EAGLE-3.1) instead of before it."""
    own_rows: bool = False
    """Train output rows of its own, started from the target's; otherwise they are borrowed."""
    feature_loss: float = Field(default=0.0, ge=0)
    """Weight of a smooth-L1 loss between the normed output and the target's state."""
    num_layers: int = Field(default=1, ge=1)
    """Draft layers: EAGLE-3's own, and ordinary ones above it."""
    norm_before_residual: bool = False
    """Let the first layer add to the normed hidden, as many heads of `speculators` do."""
    norm_before_fc: bool = False
    """One norm over all captured states together, in place of one for each of them."""

    @model_validator(mode="after")
    def _fitting(self) -> Self:
        if self.norm_before_fc and self.norm_features:
            raise ValueError("norm_before_fc is in place of norm_features; set that to false")
        if self.warm_start and (self.norm_before_residual or self.norm_before_fc):
            raise ValueError(
                "warm_start has no closed form with norm_before_residual or norm_before_fc; use 0"
            )
        return self

    @model_serializer(mode="wrap")
    def _lean(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Without what came later and is off: runs and heads from before stay what they were."""
        values: dict[str, Any] = dump(self)
        return {k: v for k, v in values.items() if v or k not in LATER}

    def captured(self, num_layers: int) -> tuple[int, ...]:
        return self.layers or default_layers(num_layers)

    def build(
        self, contract: Contract, target: PreTrainedConfig, draft_ids: Tensor | None
    ) -> Eagle3Head:
        self.check_layers(contract)
        size = self.vocabulary_size(contract, draft_ids)
        config = Eagle3Config.of(
            self,
            contract,
            target,
            size,
            self.num_layers,
            intermediate_size=self.intermediate_size,
            rope_theta=self.rope_theta,
        )
        head = Eagle3Head(config)
        head.untrained(draft_ids)
        return head


class Eagle3Config(HeadConfig):
    """The published names and the stored geometry."""

    model_type = "drafthead_eagle3"


class Eagle3Head(FusedHead):
    """See the module docstring; the stored tensors are exactly those of the published layout."""

    config_class = Eagle3Config
    config: Eagle3Config
    settings: Eagle3Settings
    supports_gradient_checkpointing = True
    packs = True

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__(config)
        width, eps, size = config.hidden_size, config.rms_norm_eps, config.draft_vocab_size
        inner, activation = config.intermediate_size, config.hidden_act
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        layer = Eagle3Layer(width, inner, heads, kv_heads, config.head_dim, eps, activation)
        above = [DecoderLayer(config) for _ in range(config.num_hidden_layers - 1)]
        self.layers = nn.ModuleList([layer, *above])
        self.norm = RMSNorm(width, eps)
        if self.settings.norm_before_fc:
            self.input_norm = RMSNorm(len(self.contract.layers) * width, eps)
        if self.settings.own_rows:
            self.lm_head = nn.Linear(width, size, bias=False)
        self.post_init()  # type: ignore[no-untyped-call]

    def start_weights(self, borrowed: Borrowed) -> None:
        super().start_weights(borrowed)
        if self.settings.own_rows:
            self.lm_head.weight.copy_(borrowed.rows)

    # The parts that training and decoding share

    def _stack(self) -> list[Layer]:
        """The layers, the lowest first."""
        return [cast(Layer, layer) for layer in self.layers]

    def fuse(self, features: Tensor) -> Tensor:
        if self.settings.norm_before_fc:
            features = self.input_norm(features.to(self.compute_dtype()))
        return super().fuse(features)

    def _inputs(self, layer: Layer, embedded: Tensor, stream: Tensor) -> tuple[Tensor, Tensor]:
        """What a layer's attention reads, and the stream that the layer adds to.

        The tokens' embeddings enter the first one alone.
        """
        if not isinstance(layer, Eagle3Layer):
            return layer.inputs(stream), stream
        x = layer.inputs(embedded, stream)
        return x, x[..., stream.shape[-1] :] if self.settings.norm_before_residual else stream

    def _fed_back(self, outputs: Tensor) -> Tensor:
        """The layer's output → what the next step reads as hidden; both (…, D)."""
        return self.norm(outputs) if self.settings.norm_output else outputs

    def _logits(self, normed: Tensor) -> Tensor:
        """(…, D) after the final norm → (…, Vd)."""
        if self.settings.own_rows:
            return self.contract.transform(self.lm_head(normed))
        return self.teacher_logits(normed)

    # Training

    def unroll(self, batch: TeacherBatch, steps: int) -> Iterator[Prediction]:
        """See the base class. Only slots with a label at some depth go beyond the last layer's
        first keys.
        """
        embedding, top = self.bound()[0], self._stack()[-1]
        T = batch.ids.shape[1]
        labelled = [batch.supervised(2 + i) for i in range(steps)]  # slot t predicts t + 2 + i
        slots = active_slots(torch.stack(labelled).any(0))  # (B, m)
        n = int(slots.max()) + 1 if slots.numel() else 0
        starts = torch.zeros_like(batch.ids) if batch.starts is None else batch.starts
        every = torch.arange(n, device=slots.device).expand(len(slots), n)
        turns = self.turns(every - starts[:, :n], T + steps)
        held: Held = [([], []) for _ in self.layers]
        tokens = F.embedding(batch.ids[:, 1 : 1 + n], embedding)
        x, stream = self._climb(
            tokens, self.fuse(batch.features[:, :n]), turns, every, starts[:, :n], held
        )
        x, stream, starts = take_slots(x, slots), take_slots(stream, slots), starts.gather(1, slots)
        for i in range(steps):
            turns = self.turns(slots - starts + i, T + steps)
            if i > 0:
                tokens = batch.ids.gather(1, (slots + 1 + i).clamp(max=T - 1))
                tokens = F.embedding(tokens, embedding)
                x, stream = self._climb(tokens, stream, turns, slots, starts, held)
            outputs = self._recomputed(top, x, stream, turns, slots, starts, held[-1])
            rows, at = labelled[i].gather(1, slots).nonzero(as_tuple=True)
            normed = self.norm(outputs[rows, at])
            teacher = rows * T + slots[rows, at] + 1 + i
            auxiliary = self._auxiliary(batch, normed, teacher)
            yield Prediction(
                normed, self._logits, teacher, self.settings.own_rows, auxiliary=auxiliary
            )
            stream = self._fed_back(outputs)

    def _climb(
        self,
        embedded: Tensor,
        stream: Tensor,
        turns: Turns,
        slots: Tensor,
        starts: Tensor,
        held: Held,
    ) -> tuple[Tensor, Tensor]:
        """One unroll step up to the last layer's attention; each layer's keys and values are held.

        Returns what the last layer's queries are read from, and the stream that it adds to.
        """
        for layer, kept in zip(self._stack(), held, strict=True):
            x, stream = self._inputs(layer, embedded, stream)
            for parts, new in zip(kept, layer.keys_values(x, *turns), strict=True):
                parts.append(new)
            if kept is not held[-1]:
                stream = self._recomputed(layer, x, stream, turns, slots, starts, kept)
        return x, stream

    def _recomputed(
        self,
        layer: Layer,
        x: Tensor,
        stream: Tensor,
        turns: Turns,
        slots: Tensor,
        starts: Tensor,
        kept: tuple[list[Tensor], list[Tensor]],
    ) -> Tensor:
        """A layer's outputs; with `gradient_checkpointing` what is inside is not kept."""
        operands = x, stream, *turns, slots, starts, *kept[0], *kept[1]
        if self.gradient_checkpointing and torch.is_grad_enabled():
            out: Tensor = checkpoint(_outputs, layer, *operands, use_reentrant=False)
            return out
        return _outputs(layer, *operands)

    @torch.no_grad()
    def warm_start(self, batches: Iterable[TeacherBatch]) -> None:
        """Fit `fc` and the attention's value path in closed form (see `warm_start`)."""
        config, parts = self.config, len(self.contract.layers) if self.settings.norm_features else 0
        moments = Moments.of(batches, self.bound()[0], parts, config.rms_norm_eps)
        first, *above = self._stack()
        attention = first.self_attn
        moments.write(self.fc, attention, config.num_attention_heads, config.num_key_value_heads)
        for layer in above:
            assert isinstance(layer, DecoderLayer)
            layer.silence()  # the fit is of the stream that they pass on
        self.norm.weight.fill_(MODESTY * moments.rms / moments.n)

    def _auxiliary(self, batch: TeacherBatch, normed: Tensor, teacher: Tensor) -> dict[str, Tensor]:
        weight = self.settings.feature_loss
        if not weight:
            return {}
        truth = batch.last_hidden.flatten(0, 1)[teacher].float()
        loss = F.smooth_l1_loss(normed.float(), truth, reduction="none").mean(-1)
        return {"regression": weight * loss}

    # Decoding

    @torch.no_grad()
    def open(self, batch: int, capacity: int) -> StackMemory:
        config, device = self.config, self.bound()[0].device
        heads, head_dim, width = config.num_key_value_heads, config.head_dim, config.hidden_size
        shape = batch, capacity, heads, head_dim, width
        return StackMemory(config.num_hidden_layers, *shape, device, self.compute_dtype())

    @torch.no_grad()
    def extend(
        self, state: HeadState, features: Tensor, next_ids: Tensor, counts: Tensor
    ) -> Tensor:
        assert isinstance(state, StackMemory)
        row, committed, memories = state.row, counts.tolist(), state.layers
        positions = state.next_positions(next_ids.shape[1])
        turns = self.turns(positions, state.capacity)
        embedded, stream = F.embedding(next_ids, self.bound()[0]), self.fuse(features)
        for layer, memory in zip(self._stack(), memories, strict=True):
            x, stream = self._inputs(layer, embedded, stream)
            memory.commit(*layer.keys_values(x, *turns), committed)
            if memory is not memories[-1]:
                attended = attend_new(memory, layer.queries(x, *turns), positions)
                stream = layer.finish(attended, stream)

        # In the last layer earlier slots gave their keys and values; only the last one is asked
        # for an output.
        counts = counts.to(row.device)[:, None]
        last = (counts - 1).clamp(min=0)
        query = layer.queries(x[row, last], *self.turns(positions[row, last], state.capacity))
        outputs = layer.finish(memory.attend_committed(query), stream[row, last])
        outputs = torch.where(counts[:, None] > 0, outputs, state.outputs[:, :1])
        state.start_round(outputs)
        return self._logits(self.norm(outputs[:, 0]))

    @torch.no_grad()
    def expand(self, state: HeadState, ids: Tensor, parents: Tensor) -> Tensor:
        assert isinstance(state, StackMemory)
        parents = parents.to(ids.device)
        above, positions = state.below(parents)
        turns = self.turns(positions, state.capacity)
        embedded, stream = F.embedding(ids, self.bound()[0]), self._fed_back(above)
        for layer, memory in zip(self._stack(), state.layers, strict=True):
            x, stream = self._inputs(layer, embedded, stream)
            queries, (keys, values) = layer.queries(x, *turns), layer.keys_values(x, *turns)
            stream = layer.finish(memory.add(queries, keys, values, parents), stream)
        state.finish(stream)
        return self._logits(self.norm(stream))


def _outputs(
    layer: Layer,
    x: Tensor,
    stream: Tensor,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    starts: Tensor,
    *held: Tensor,
) -> Tensor:
    """A layer at one unroll step; held: all steps' keys, then all steps' values."""
    keys, values = held[: len(held) // 2], held[len(held) // 2 :]
    queries = layer.queries(x, cos, sin)
    return layer.finish(unroll_attention(queries, keys, values, slots, starts), stream)


AutoConfig.register(Eagle3Config.model_type, Eagle3Config)
AutoModel.register(Eagle3Config, Eagle3Head)
