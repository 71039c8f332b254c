"""Hydra and Hydra++ (arXiv 2402.05109): an MLP for each depth that sees what was drafted above it.

Depth i of slot t sees the target's last hidden state at position t and the embeddings of tokens
t + 1 .. t + 1 + i, and predicts token t + 2 + i. Depths share nothing and feed each other nothing
but tokens. Hydra++ puts a decoder layer over the states of the context first, run once a round; a
slot's state is then that layer's output. The MLPs' tensor names are those of the published layout.

A fresh head hands the target's state on: the first block's straight branch copies it, scaled down,
and all other branches are zero. So every depth starts at the target's own choice for token t + 1,
modestly, as Medusa's heads do, and learns from there.

Shapes: B batch, T positions, D width, Vd draft vocabulary, M supervised positions of one depth,
m draft nodes, K depths, d head width.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Literal, Self, cast

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, PreTrainedConfig

from drafthead.heads.base import HeadState, Prediction, TeacherBatch, register
from drafthead.heads.blocks import active_slots, take_slots, unroll_attention
from drafthead.heads.borrowed import Borrowed
from drafthead.heads.borrowing import BorrowingHead, BorrowingSettings
from drafthead.heads.contract import LAST, Contract
from drafthead.heads.decoder_layer import DecoderLayer
from drafthead.heads.geometry import HeadConfig
from drafthead.heads.memory import LayerMemory, depths_below


@register("hydra")
class HydraSettings(BorrowingSettings):
    """What a user chooses about a Hydra head."""

    type: Literal["hydra"] = "hydra"
    unroll_steps: int = Field(default=4, ge=1)
    """Depths, each with an MLP of its own: it drafts no deeper."""
    mlp_layers: int = Field(default=1, ge=1)
    """Residual blocks of each MLP; Hydra++ has 4."""
    prefix_attention: bool = False
    """A decoder layer over the states of the context (Hydra++)."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Before every block and the readout, in training alone; Hydra++ has 0.2."""
    own_rows: bool = False
    """Train output rows for each depth, started from the target's; otherwise they are borrowed."""
    start_logit_scale: float = Field(default=0.3, gt=0)
    """First logits over the target's: below 1 the first guesses are modest."""
    intermediate_size: int | None = Field(default=None, ge=1)
    """Width inside the MLP of `prefix_attention`'s layer; None = the target's."""

    @model_validator(mode="after")
    def _effective(self) -> Self:
        if self.intermediate_size is not None and not self.prefix_attention:
            raise ValueError(
                "head.intermediate_size: only head.prefix_attention has a layer of that width; "
                "leave it out or set that"
            )
        return self

    def captured(self, num_layers: int) -> tuple[int, ...]:
        return (LAST,)

    def build(
        self, contract: Contract, target: PreTrainedConfig, draft_ids: Tensor | None
    ) -> HydraHead:
        size = self.vocabulary_size(contract, draft_ids)
        # Without the layer nothing is so wide, and not every target has one such width.
        inner = self.intermediate_size if self.prefix_attention else contract.hidden_size
        head = HydraHead(HydraConfig.of(self, contract, target, size, intermediate_size=inner))
        head.untrained(draft_ids)
        return head


class HydraConfig(HeadConfig):
    """The stored geometry."""

    model_type = "drafthead_hydra"


class ResidualBlock(nn.Module):
    """x + SiLU(linear(x)); where the width changes, x goes through a linear map as well."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, width)
        if inputs != width:
            self.res_connection = nn.Linear(inputs, width)
        self._narrows = inputs != width

    def start(self, scale: float) -> None:
        """Hand on x, or the first `width` of it times `scale` where the width changes."""
        self.linear.weight.zero_()
        if self._narrows:
            self.res_connection.weight.copy_(scale * torch.eye(*self.res_connection.weight.shape))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = (self.res_connection(x) if self._narrows else x) + F.silu(self.linear(x))
        return out


class HydraMemory(HeadState):
    """The state at each row's root, and the tokens on the way to each node of a round.

    Index 0 of nodes is the root: the last committed token, after which depth 0 drafts.
    """

    def __init__(self, root: Tensor, depths: int, context: LayerMemory | None) -> None:
        """root: (B, D) zeros; depths: K; context: of the layer over the states, if there is one."""
        B = len(root)
        self.lengths = [0] * B
        self.root = root
        self.context = context
        self.row = torch.arange(B, device=root.device)[:, None]
        self.paths = torch.zeros(B, 1, depths, dtype=torch.int64, device=root.device)
        """(B, 1 + N, K) tokens from the root's down to each node's; behind them nothing is read."""
        self.depths = torch.zeros_like(self.row)  # (B, 1 + N)

    def start(self, row: int) -> None:
        super().start(row)
        if self.context is not None:
            self.context.start(row)

    def start_round(self, root: Tensor, ids: Tensor, counts: Tensor) -> None:
        """Take the roots' states (B, D) and tokens (B,) of rows that committed; drop all nodes."""
        new = counts > 0
        self.root = torch.where(new[:, None], root, self.root)
        self.paths = self.paths[:, :1].clone()
        self.paths[:, 0, 0] = torch.where(new, ids, self.paths[:, 0, 0])
        self.depths = self.depths[:, :1]
        self.lengths = [a + b for a, b in zip(self.lengths, counts.tolist(), strict=True)]

    def add(self, ids: Tensor, parents: Tensor) -> tuple[Tensor, Tensor]:
        """Hold m nodes (B, m) below their parents: their depths (B, m) and paths (B, m, K)."""
        most = self.paths.shape[2] - 1
        depths = depths_below(self.depths, parents)
        if int(depths.max()) > most:
            raise ValueError(
                f"a node of depth {int(depths.max())}: the head drafts {most + 1} tokens at most"
            )
        paths = self.paths[self.row, parents + 1].scatter(2, depths[..., None], ids[..., None])
        self.depths = torch.cat((self.depths, depths), dim=1)
        self.paths = torch.cat((self.paths, paths), dim=1)
        return depths, paths


class HydraHead(BorrowingHead):
    """See the module docstring."""

    config_class = HydraConfig
    config: HydraConfig
    settings: HydraSettings
    packs = True

    def __init__(self, config: HydraConfig) -> None:
        super().__init__(config)
        settings, width = self.settings, config.hidden_size
        self.max_depth = settings.unroll_steps
        self.prefix = DecoderLayer(config) if settings.prefix_attention else None
        self.hydra_mlp = nn.ModuleList(
            nn.ModuleList(
                ResidualBlock(width if j else (i + 2) * width, width)
                for j in range(settings.mlp_layers)
            )
            for i in range(self.max_depth)
        )
        if settings.own_rows:
            size = config.draft_vocab_size
            self.hydra_lm_head = nn.ModuleList(
                nn.Linear(width, size) for _ in range(self.max_depth)
            )
        self.post_init()  # type: ignore[no-untyped-call]

    def start_weights(self, borrowed: Borrowed) -> None:
        if self.prefix is not None:
            self.prefix.silence()
        for mlp in self.hydra_mlp:
            for block in cast(nn.ModuleList, mlp):
                cast(ResidualBlock, block).start(self.settings.start_logit_scale)
        if self.settings.own_rows:
            for rows in self.hydra_lm_head:
                cast(nn.Linear, rows).weight.copy_(borrowed.rows)

    @property
    def positions(self) -> int | None:
        return super().positions if self.settings.prefix_attention else None

    # The parts that training and decoding share

    def _hidden(self, depth: int, states: Tensor, ids: Tensor, dropout: float = 0.0) -> Tensor:
        """(R, D) states and (R, depth + 1) tokens after them → (R, D), what is read out."""
        embedded = F.embedding(ids, self.bound()[0]).flatten(1)
        x = torch.cat((states, embedded), dim=-1)
        for block in cast(nn.ModuleList, self.hydra_mlp[depth]):
            x = block(F.dropout(x, dropout))
        return F.dropout(x, dropout)

    def _readout(self, depth: int, hidden: Tensor) -> Tensor:
        """(R, D) → (R, Vd)."""
        if self.settings.own_rows:
            return self.contract.transform(self.hydra_lm_head[depth](hidden))
        return self.teacher_logits(hidden)

    # Training

    def unroll(self, batch: TeacherBatch, steps: int) -> Iterator[Prediction]:
        """See the base class; ValueError for more steps than the head has depths."""
        if steps > self.settings.unroll_steps:
            raise ValueError(
                f"head.unroll_steps: {steps} depths asked of a head of {self.settings.unroll_steps}"
            )
        T = batch.ids.shape[1]
        labelled = [batch.supervised(2 + i) for i in range(steps)]  # slot t predicts t + 2 + i
        slots = active_slots(torch.stack(labelled).any(0))  # (B, m)
        states = self._states(batch, slots)
        dropout = self.settings.dropout if self.training else 0.0
        for i in range(steps):
            rows, at = labelled[i].gather(1, slots).nonzero(as_tuple=True)
            place = slots[rows, at]
            ids = batch.ids[
                rows[:, None], place[:, None] + 1 + torch.arange(i + 1, device=rows.device)
            ]
            hidden = self._hidden(i, states[rows, at], ids, dropout)
            yield Prediction(
                hidden,
                partial(self._readout, i),
                rows * T + place + 1 + i,
                self.settings.own_rows,
            )

    def _states(self, batch: TeacherBatch, slots: Tensor) -> Tensor:
        """(B, m, D) at these slots: the target's states, or the layer's outputs over them."""
        layer, dtype = self.prefix, self.compute_dtype()
        if layer is None:
            return take_slots(batch.features.to(dtype), slots)
        n = int(slots.max()) + 1 if slots.numel() else 0
        starts = torch.zeros_like(batch.ids) if batch.starts is None else batch.starts
        places = torch.arange(n, device=slots.device) - starts[:, :n]
        stream = batch.features[:, :n].to(dtype)
        x = layer.inputs(stream)
        keys, values = layer.keys_values(x, *self.turns(places, batch.ids.shape[1]))
        x, stream, starts = take_slots(x, slots), take_slots(stream, slots), starts.gather(1, slots)
        queries = layer.queries(x, *self.turns(slots - starts, batch.ids.shape[1]))
        return layer.finish(unroll_attention(queries, [keys], [values], slots, starts), stream)

    # Decoding

    @torch.no_grad()
    def open(self, batch: int, capacity: int) -> HydraMemory:
        config, device, dtype = self.config, self.bound()[0].device, self.compute_dtype()
        heads, head_dim, width = config.num_key_value_heads, config.head_dim, config.hidden_size
        context = None
        if self.settings.prefix_attention:
            context = LayerMemory(batch, capacity, heads, head_dim, width, device, dtype)
        root = torch.zeros(batch, width, device=device, dtype=dtype)
        return HydraMemory(root, self.settings.unroll_steps, context)

    @torch.no_grad()
    def extend(
        self, state: HeadState, features: Tensor, next_ids: Tensor, counts: Tensor
    ) -> Tensor:
        assert isinstance(state, HydraMemory)
        layer, memory = self.prefix, state.context
        counts = counts.to(state.row.device)
        last = (counts[:, None] - 1).clamp(min=0)
        stream = features.to(self.compute_dtype())
        if layer is not None and memory is not None:
            x, positions = layer.inputs(stream), memory.next_positions(next_ids.shape[1])
            turns = self.turns(positions, memory.capacity)
            memory.commit(*layer.keys_values(x, *turns), counts.tolist())
            turns = self.turns(positions[state.row, last], memory.capacity)
            attended = memory.attend_committed(layer.queries(x[state.row, last], *turns))
            root = layer.finish(attended, stream[state.row, last])
        else:
            root = stream[state.row, last]
        state.start_round(root[:, 0], next_ids[state.row, last][:, 0], counts)
        return self._readout(0, self._hidden(0, state.root, state.paths[:, 0, :1]))

    @torch.no_grad()
    def expand(self, state: HeadState, ids: Tensor, parents: Tensor) -> Tensor:
        assert isinstance(state, HydraMemory)
        depths, paths = state.add(ids, parents.to(ids.device))
        logits = paths.new_empty(*ids.shape, len(self.bound()[1]), dtype=state.root.dtype)
        for depth in depths.unique().tolist():  # one, where a tree is grown level by level
            rows, nodes = (depths == depth).nonzero(as_tuple=True)
            hidden = self._hidden(depth, state.root[rows], paths[rows, nodes, : depth + 1])
            logits[rows, nodes] = self._readout(depth, hidden)
        return logits


AutoConfig.register(HydraConfig.model_type, HydraConfig)
AutoModel.register(HydraConfig, HydraHead)
