"""One training step without weights: what it would hold and compute, from configs alone.

The target is built from its config, the head from its settings, and one micro-batch goes through
the very code of a run, in a `dry_run`; so a new head needs no formula here. It knows no hardware
and no number of processes.

Shapes: B batch, T positions, D width, L captured layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from drafthead.heads.base import DraftHead, TeacherBatch
from drafthead.heads.contract import Contract, logit_transform
from drafthead.inference.target import Target
from drafthead.train.assemble import head_layers
from drafthead.train.config import RunConfig
from drafthead.train.dryrun import DryRun, dry_run
from drafthead.train.objective import Objective
from drafthead.train.teacher import DTYPE
from drafthead.train.timing import Stopwatch

WHOLE, SHORT = 1024, 256
"""Positions up to which a micro-batch is gone through as it is; length of the rows drawn from."""


@dataclass(frozen=True)
class BatchShape:
    """The largest micro-batch of a run."""

    rows: int
    length: int
    """Positions of each row, padding included."""
    unsupervised: int = 0
    """Positions at the start of each row that carry no loss."""

    @property
    def positions(self) -> int:
        return self.rows * self.length


@dataclass(frozen=True)
class Footprint:
    """Bytes and operations of one process that shares nothing with others."""

    target_weights: int
    """Parameters of the target."""
    largest_layer: int
    """Bytes of the target's largest part that runs at one time."""
    output_rows: int
    """Bytes of the target's output rows."""
    target: int
    """Bytes of its parameters and buffers."""
    trained: int
    """Weights of the head that are trained, in fp32."""
    frozen: int
    """Weights of the head that are not."""
    head: int
    """Bytes of the head's parameters and buffers."""
    borrowed: int
    """Bytes that binding adds while the target is there to share tensors with."""
    borrowed_alone: int
    """Bytes of what the head borrows where it shares nothing."""
    batch: int
    """Bytes of one micro-batch of teacher states."""
    target_forward: int
    """Bytes above all that is held, at the peak of the target's forward."""
    step: int
    """Bytes above all that is held, at the peak of the head's forward and backward pass."""
    target_flops: int
    """Operations of the target's forward, of the micro-batch."""
    forward_flops: int
    """Of the head's forward: all depths, the loss included."""
    backward_flops: int
    first_depth: float
    """Share of the first depth in the head's operations."""


def rehearse(
    config: RunConfig, target: PreTrainedConfig, shape: BatchShape, bf16: bool
) -> Footprint:
    """Go through one micro-batch of this shape; `bf16`: whether the run computes in it.

    A large one is not gone through but drawn as a line through small ones: bytes are linear in
    positions and in length (no T x T table is ever made), operations in positions times length.
    Raises ValueError for settings that a run would refuse.
    """
    with dry_run() as run:
        stage = _Stage(config, target, bf16, run)
        if shape.positions <= WHOLE or shape.length <= 2 * SHORT:
            seen = stage.go(shape)
        else:
            start = min(shape.unsupervised * SHORT // shape.length, SHORT - 2)
            shapes = [(1, SHORT, start), (2, SHORT, start), (1, 2 * SHORT, 2 * start)]
            seen = _drawn(shape, *[stage.go(BatchShape(*short)) for short in shapes])
        return Footprint(**stage.held(), **vars(seen), first_depth=stage.first_depth())


@dataclass(frozen=True)
class _Seen:
    """The fields of `Footprint` that depend on the micro-batch."""

    batch: int
    target_forward: int
    step: int
    target_flops: int
    forward_flops: int
    backward_flops: int


def _drawn(shape: BatchShape, one: _Seen, two: _Seen, long: _Seen) -> _Seen:
    """What a large micro-batch would show, from one short row, two, and one of twice the length."""
    n, t = shape.positions / SHORT, shape.length / SHORT
    drawn = {}
    for name in ("batch", "target_forward", "step"):
        a, b, c = (getattr(seen, name) for seen in (one, two, long))
        # c has two portions of positions and one more of length than a.
        drawn[name] = int(a + (b - a) * (n - 1) + (c - b) * (t - 1))
    for name in ("target_flops", "forward_flops", "backward_flops"):
        a, c = getattr(one, name), getattr(long, name)
        drawn[name] = int(n * (a + (c / 2 - a) * (t - 1)))
    return _Seen(**drawn)


class _Stage:
    """Target, head and objective of one run, made once and gone through as often as needed."""

    def __init__(
        self, config: RunConfig, target: PreTrainedConfig, bf16: bool, run: DryRun
    ) -> None:
        self.run, self.bf16 = run, bf16
        self.model = dry_target(config, target, bf16)
        after_target = run.live
        self.target = Target(self.model)
        contract = dry_contract(config, self.model)
        self.layers = contract.layers
        self.head = dry_head(config, contract, target, run)
        after_head = run.live
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            # Any target of this shape does: there are no values to compare.
            cast(Any, self.head).bind(self.model, check=False)
        with unset_fake_temporarily():  # PEFT moves modules, which fakes do not allow
            self.head.adapt(self.model, resting=True)
        self.head.train()
        self.bytes = (after_target, after_head - after_target, run.live - after_head)
        self._last: tuple[_Seen, TeacherBatch] | None = None
        training, words = config.training, self.target.vocab_size
        self.objective = Objective(
            self.head, words, training.depth_decay, bf16, Stopwatch(), training
        )

    def held(self) -> dict[str, int]:
        """What stays from step to step."""
        table, rows = self.model.get_input_embeddings(), self.model.get_output_embeddings()
        trained = sum(p.numel() for p in self.head.parameters() if p.requires_grad)
        whole = sum(p.numel() for p in self.head.parameters())
        lent = [b for name, b in self.head.named_buffers() if not _stored(self.head, name)]
        storages = {b.untyped_storage()._cdata: b.untyped_storage().nbytes() for b in lent}
        target, head, borrowed = self.bytes
        return {
            "target_weights": self.target.num_weights,
            "largest_layer": max(*map(_bytes, self.target._layers), _bytes(table)),
            "output_rows": _bytes(rows),
            "target": target,
            "trained": trained,
            "frozen": whole - trained,
            "head": head,
            "borrowed": borrowed,
            "borrowed_alone": sum(storages.values()),
        }

    def go(self, shape: BatchShape) -> _Seen:
        """One micro-batch forward and back; nothing but the states is left behind."""
        run, self._last = self.run, None
        before = run.live
        run.restart()
        batch = _batch(run, self.target, self.layers, shape)
        target_peak, target_flops, with_batch = run.peak, run.flops, run.live
        forward_flops, backward_flops = self._step(batch)
        seen = _Seen(
            batch=with_batch - before,
            target_forward=target_peak - before,
            step=run.peak - with_batch,
            target_flops=target_flops,
            forward_flops=forward_flops,
            backward_flops=backward_flops,
        )
        self._last = seen, batch
        return seen

    def _step(self, batch: TeacherBatch) -> tuple[int, int]:
        """Operations of the head, forward and back."""
        self.run.restart()
        loss = self.objective(batch, 1.0).loss
        forward = self.run.flops
        loss.backward()
        self.head.zero_grad(set_to_none=True)
        return forward, self.run.flops - forward

    def first_depth(self) -> float:
        """Share of the first depth in the operations of an unroll."""
        if self.objective.steps == 1:
            return 1.0
        assert self._last is not None, "go comes first"
        seen, batch = self._last
        steps = self.objective.steps
        self.objective.steps = 1
        first = sum(self._step(batch))
        self.objective.steps = steps
        return first / (seen.forward_flops + seen.backward_flops)


def dry_target(config: RunConfig, target: PreTrainedConfig, bf16: bool) -> PreTrainedModel:
    """The target of a run; call it in a `dry_run`, as the next two."""
    asked = config.target.dtype
    dtype = ("bfloat16" if bf16 else "float32") if asked == "auto" else asked
    model: PreTrainedModel = AutoModelForCausalLM.from_config(target, dtype=getattr(torch, dtype))
    model.eval()
    model.requires_grad_(False)
    return model


def dry_contract(config: RunConfig, model: PreTrainedModel) -> Contract:
    """What `describe` finds but for all that needs weights or a tokenizer."""
    text = model.config.get_text_config()
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    table: Any = model.get_input_embeddings()
    rows: Any = model.get_output_embeddings()
    scale, softcap = logit_transform(text)
    return Contract(
        target=config.target.name,
        fingerprint=None,
        model_type=text.model_type,
        hidden_size=text.hidden_size,
        vocab_size=rows.weight.shape[0],
        num_layers=text.num_hidden_layers,
        layers=head_layers(config, text.num_hidden_layers),
        tokenizer=None,
        template=None,
        dtype=str(model.dtype).removeprefix("torch."),
        embedding=names[id(table.weight)],
        output=names[id(rows.weight)],
        norm=None,
        logit_scale=scale,
        logit_softcap=softcap,
    )


def dry_head(
    config: RunConfig, contract: Contract, target: PreTrainedConfig, run: DryRun
) -> DraftHead:
    """The untrained head, unbound."""
    size = config.head.model_dump().get("draft_vocab_size")
    if size is not None and size > contract.vocab_size:
        raise ValueError(
            f"head.draft_vocab_size: {size} asked for, the target has {contract.vocab_size} tokens"
        )
    # Spread over the vocabulary, as the frequent tokens are.
    ids = None if size is None else torch.arange(size) * contract.vocab_size // size
    known = None if ids is None else run.known(ids)
    return config.head.build(contract, target.get_text_config(), known)


def _batch(run: DryRun, target: Target, layers: tuple[int, ...], shape: BatchShape) -> TeacherBatch:
    """A batch in which every row is whole and the answer begins after its prompt."""
    ids = run.known(torch.zeros(shape.rows, shape.length, dtype=torch.int64))
    mask = torch.ones(shape.rows, shape.length, dtype=torch.bool)
    mask[:, : shape.unsupervised] = False
    features, last_hidden = target.states(ids, layers)
    return TeacherBatch(
        ids=ids,
        mask=run.known(mask),
        features=features.to(DTYPE),
        last_hidden=last_hidden.to(DTYPE),
        top=run.known(torch.zeros_like(ids)),
    )


def _stored(head: DraftHead, name: str) -> bool:
    module_name, _, buffer = name.rpartition(".")
    return buffer not in head.get_submodule(module_name)._non_persistent_buffers_set


def _bytes(module: Any) -> int:
    return sum(p.nbytes for p in module.parameters())
