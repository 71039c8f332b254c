"""What a run tells: its tracker's files, read with the trackers' own readers, and its table."""

from __future__ import annotations

import json
import os
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from command import COMMAND, write_config
from tiny_runs import events, write_chats

from drafthead.train.runtable import DEPTHS, run_table

FIGURES = ("loss_1", "loss_2", "simulated_match_1", "simulated_match_2", "grad_norm", "data_wait")
"""Of a step: what must reach a tracker, beside the speed."""


def train(root: Path, target: Path, tracker: str, *extra: str) -> subprocess.CompletedProcess[str]:
    """The real command on a tiny target, as a user without any key runs it."""
    write_chats(root / "train.jsonl", [8] * 20)
    write_chats(root / "heldout.jsonl", [8] * 6, seed=1)
    config = write_config(root / "run.yaml", root, target, eval_every=2)
    hidden = ("WANDB_MODE", "WANDB_API_KEY")
    environment = {k: v for k, v in os.environ.items() if k not in hidden}
    # A key in the developer's ~/.netrc must not send the test's run anywhere.
    environment |= {"HOME": str(root), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [*COMMAND, "train", "--config", str(config), f"tracker={tracker}", *extra],
        capture_output=True,
        text=True,
        timeout=300,
        env=environment,
        cwd=root,
    )
    assert done.returncode == 0, done.stderr
    return done


def log_records(file: bytes) -> Iterator[bytes]:
    """Records of a wandb file: LevelDB's log format in blocks of 32 kB, behind a header of 7 bytes.

    Each piece has a checksum (4 bytes), a length (2) and a kind (1): whole, first, middle, last.
    """
    assert file.startswith(b":W&B")
    at, pieces = 7, []
    while at + 7 <= len(file):
        if 32768 - at % 32768 < 7:  # no header fits into the block's rest
            at += 32768 - at % 32768
            continue
        length, kind = struct.unpack("<HB", file[at + 4 : at + 7])
        pieces.append(file[at + 7 : at + 7 + length])
        at += 7 + length
        if kind in (1, 4):
            yield b"".join(pieces)
            pieces = []


def wandb_history(run: Path) -> list[dict[str, Any]]:
    """The history of the one offline run below, in wandb's own message classes."""
    from wandb.proto import wandb_internal_pb2

    (path,) = run.glob("wandb/offline-run-*/run-*.wandb")
    history = []
    for data in log_records(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            history.append(
                {"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in items}
            )
    return history


def tensorboard_scalars(run: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found: dict[str, list[tuple[int, float]]] = {}
    for folder in {path.parent for path in run.rglob("events.out.tfevents.*")}:
        reader = EventAccumulator(str(folder))
        reader.Reload()
        for tag in reader.Tags()["scalars"]:
            found[tag] = [(event.step, event.value) for event in reader.Scalars(tag)]
    return found


@pytest.mark.slow
def test_a_run_without_a_key_is_written_offline_and_wandb_reads_it_back(
    tmp_path: Path, target_folder: Path
) -> None:
    done = train(tmp_path, target_folder, "wandb")
    assert "no key found, logging offline" in done.stderr
    assert done.stdout.count("\n") == 1, "wandb writes among the results"
    history = wandb_history(tmp_path / "run")
    steps = events(tmp_path / "run")
    assert len(steps) == 4
    for event in steps:
        (seen,) = [h for h in history if h["_step"] == event["step"] and "train/loss" in h]
        for name in (*FIGURES, "loss", "lr", "positions_per_s"):
            assert seen[f"train/{name}"] == pytest.approx(event[name]), name
    heldout = [h["heldout/simulated_tau"] for h in history if "heldout/simulated_tau" in h]
    assert heldout == [e["simulated_tau"] for e in events(tmp_path / "run", "evaluation")]


@pytest.mark.slow
def test_tensorboard_reads_every_figure_of_a_run(tmp_path: Path, target_folder: Path) -> None:
    pytest.importorskip("tensorboard")
    train(tmp_path, target_folder, "tensorboard")
    scalars = tensorboard_scalars(tmp_path / "run")
    steps = events(tmp_path / "run")
    for name in (*FIGURES, "positions_per_s"):
        told = [(event["step"], pytest.approx(event[name], rel=1e-5)) for event in steps]
        assert scalars[f"train/{name}"] == told, name
    evaluations = events(tmp_path / "run", "evaluation")
    assert len(scalars["heldout/simulated_tau"]) == len(evaluations) == 2
    assert {"heldout/simulated_match_1", "heldout/simulated_match_2"} <= set(scalars)


def test_a_run_ends_with_its_table_on_standard_error(place: Any) -> None:
    shown = place.train.stderr
    assert all(head in shown for head in DEPTHS)
    assert "4 steps (0 skipped)" in shown
    assert "held-out simulated tau" in shown
    assert "positions/s" in shown
    assert "time: " in shown
    json.loads(place.train.stdout)  # alone there


def write_events(folder: Path, lines: list[dict[str, Any]]) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def step(number: int, loss: float, norm: float | None = 1.0) -> dict[str, Any]:
    return {
        "event": "step",
        "step": number,
        "epoch": 0,
        "loss": loss,
        "grad_norm": norm,
        "positions": 100 * number,
        "positions_per_s": 50.0,
        "data_wait": 0.25,
        "loss_1": loss,
        "simulated_match_1": 0.1 * number,
    }


def test_the_table_of_a_resumed_run_spans_all_sittings(tmp_path: Path) -> None:
    run = tmp_path / "run"
    # Killed after step 3, gone on with from step 2; step 4 was skipped.
    lines = [step(1, 9.0), step(2, 8.0), step(3, 99.0), step(3, 7.0), step(4, 6.0, norm=None)]
    taus = {"simulated_survival_1": 0.5, "event": "evaluation", "epoch": 0}
    lines.insert(2, {**taus, "step": 2, "simulated_tau": 1.5})
    lines.append({**taus, "step": 4, "simulated_tau": 1.25, "simulated_survival_1": 0.25})
    write_events(run, lines)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"event": "step", "st')  # cut off by a kill
    found = run_table(run)
    assert found is not None
    assert found.rows == [["1", "9.000", "6.000", "0.100", "0.400", "0.500"]]
    text = "\n".join(found.lines)
    assert "4 steps (1 skipped), 400 positions" in text
    assert "1.250 at the last evaluation, 1.500 at the best (step 2)" in text
    assert "50 positions/s, 25% of it waiting" in text
    assert "time: " not in text, "nothing wrote result.json"


def test_a_run_without_a_step_has_no_table(tmp_path: Path) -> None:
    assert run_table(tmp_path) is None
