"""Runs with other losses than the default one: what is reported, and what may be changed later."""

from __future__ import annotations

import pytest
import torch
from tiny_runs import LAYERS, MakeConfig, events

from drafthead.train import loop
from drafthead.train.checkpoint import CheckpointError
from drafthead.train.loop import run
from drafthead.train.objective import Objective

BLOCK = {"type": "block", "layers": LAYERS, "draft_vocab_size": 256, "unroll_steps": 3}
OTHER = {
    "loss": "lk",
    "position_weights": "dpace",
    "alive_prefix": True,
    "loss_mean": "positions",
    "heldout_depth": 5,
    "accumulate": 2,
    "max_steps": 3,
}


def test_every_depth_of_every_loss_is_reported(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    modes, simulate = [], loop.simulate

    def watched(objective: Objective, *rest: object) -> torch.Tensor:
        modes.append(objective.head.training)
        return simulate(objective, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(loop, "simulate", watched)
    config = make_config(head=BLOCK, training=OTHER)
    result = run(config)
    steps, evaluations = events(config.out, "step"), events(config.out, "evaluation")
    for depth in (1, 2, 3):
        assert 0.0 < steps[-1][f"loss_{depth}"] < 10.0
        assert 0.1 < steps[-1][f"confidence_{depth}"] < 1.5
    assert "target_change" not in steps[-1]
    assert len(result.simulated_survival or ()) == 3, "the head makes no more than three drafts"
    assert "simulated_match_3" in evaluations[-1]
    assert modes
    assert not any(modes), "held-out rows are seen in evaluation mode"


def test_another_held_out_depth_is_refused_and_another_loss_goes_on(
    make_config: MakeConfig,
) -> None:
    run(make_config(training={"max_steps": 1}))
    with pytest.raises(CheckpointError, match=r"training\.heldout_depth"):
        run(make_config(training={"max_steps": 2, "heldout_depth": 4}), resume=True)
    assert run(make_config(training={"max_steps": 2, "loss": "kl"}), resume=True).steps == 2
