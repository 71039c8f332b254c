"""Heads that draw random numbers while they train draw them from the micro-batch's own seed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_runs import MakeConfig
from torch import Tensor
from trainers import make_trainer


@pytest.mark.parametrize(
    ("head", "without"),
    [
        ({"type": "eagle", "draft_vocab_size": 256}, {"feature_noise": 0.0}),
        ({"type": "hydra", "draft_vocab_size": 256, "dropout": 0.2}, {"dropout": 0.0}),
        ({"type": "block", "draft_vocab_size": 256, "num_layers": 1}, {"anchor_share": 1.0}),
    ],
    ids=["eagle", "hydra", "block"],
)
def test_f30_a_steps_noise_depends_on_its_number_alone(
    make_config: MakeConfig, head: dict[str, Any], without: dict[str, Any]
) -> None:
    """So a resumed run, or one on more processes, draws what the straight one drew."""
    gradients: dict[str, list[Tensor]] = {}
    for name, settings in (("noisy", head), ("clean", head | without)):
        trainer = make_trainer(make_config(head=settings, out=f"{make_config().out}-{name}"))
        batches = trainer.fetch(trainer.next_group())
        trained = list(trainer.parts.trainable.values())
        for step, before in ((0, 1), (0, 2), (1, 1)):
            trainer.state.step = step
            torch.manual_seed(before)
            trainer.forward_backward(batches)
            made = [p.grad.flatten() for p in trained if p.grad is not None]
            gradients.setdefault(name, []).append(torch.cat(made))
            trainer.parts.objective.zero_grad()
    first, again, other = gradients["noisy"]
    assert first.equal(again)
    assert (first - other).norm() > 1e-3 * first.norm()
    assert all(map(gradients["clean"][0].equal, gradients["clean"][1:]))
