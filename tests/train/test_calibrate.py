"""A trained head's chances are fitted to held-out rows, with the weights that are kept."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import LAYERS, MakeConfig

from drafthead.heads.base import TeacherBatch
from drafthead.heads.block import BlockHead
from drafthead.heads.load import load_head
from drafthead.train.loop import run

HEAD: dict[str, Any] = {
    "type": "block",
    "layers": LAYERS,
    "draft_vocab_size": 256,
    "unroll_steps": 3,
    "num_layers": 1,
    "markov_rank": 8,
}


def stored(folder: Path, target: Path) -> BlockHead:
    head = load_head(folder)
    assert isinstance(head, BlockHead)
    head.bind(target)
    return head


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_kept_head_is_calibrated_on_the_held_out_rows(
    precision: str, make_config: MakeConfig, target_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[TeacherBatch] = []
    calibrate = BlockHead.calibrate

    def watched(head: BlockHead, batches: Iterable[TeacherBatch]) -> None:
        def noted() -> Iterable[TeacherBatch]:
            for batch in batches:
                seen.append(batch)
                yield batch

        calibrate(head, noted())

    monkeypatch.setattr(BlockHead, "calibrate", watched)
    config = make_config(
        head=HEAD, training={"precision": precision, "max_steps": 6, "eval_every": 2}
    )
    result = run(config)
    assert sum(int(batch.mask.any(1).sum()) for batch in seen) == 6, "every held-out row, once"
    head = stored(result.head, target_folder)
    kept = head.calibration.clone()
    assert (kept != 1).any()
    head.calibration.fill_(1.0)
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
        head.bind(target_folder)
        calibrate(head, seen)
    torch.testing.assert_close(head.calibration, kept)


def test_without_held_out_rows_chances_stay_as_they_are(
    make_config: MakeConfig, target_folder: Path
) -> None:
    config = make_config(head=HEAD, data={"heldout": []}, training={"max_steps": 2})
    assert (stored(run(config).head, target_folder).calibration == 1).all()
