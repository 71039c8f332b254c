"""Activations that are computed again: less is kept, and the gradient is the same."""

from __future__ import annotations

import pytest
import torch
import toy_head  # noqa: F401  registers itself
from tiny_runs import MakeConfig
from torch import Tensor
from trainers import make_trainer

from drafthead.train.config import RunConfig
from drafthead.train.loop import run


def kept_for_backward(config: RunConfig) -> tuple[int, dict[str, Tensor]]:
    """Bytes that the first micro-batch's forward keeps, and the gradient of it."""
    trainer, kept = make_trainer(config), {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = (tensor, storage.nbytes())  # held, or its address is used again
        return tensor

    (batch,) = trainer.fetch(trainer.next_group())
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = trainer.model(batch, 1.0).loss
    loss.backward()
    grads = {n: p.grad for n, p in trainer.parts.trainable.items() if p.grad is not None}
    return sum(size for _, size in kept.values()), grads


@pytest.mark.parametrize(
    "head",
    [
        {"type": "eagle3", "layers": (1, 2, 3), "draft_vocab_size": 256, "intermediate_size": 512},
        {"type": "sibling", "keep_layers": 3},
    ],
    ids=lambda head: head["type"],
)
def test_activations_computed_again_take_less_memory_and_give_the_same_gradient(
    make_config: MakeConfig, head: dict[str, object]
) -> None:
    figures = [
        kept_for_backward(make_config(head=head, training={"checkpoint_activations": again}))
        for again in (False, True)
    ]
    (whole, first), (less, second) = figures
    assert less < 0.6 * whole
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        torch.testing.assert_close(second[name], tensor, rtol=1e-5, atol=1e-7, msg=name)


def test_a_head_that_cannot_compute_again_is_refused(make_config: MakeConfig) -> None:
    config = make_config(head={"type": "toy"}, training={"checkpoint_activations": True})
    with pytest.raises(ValueError, match=r"training\.checkpoint_activations: a head of type 'toy'"):
        run(config)
