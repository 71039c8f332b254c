"""The bookkeeping of `make bench-heads`: what is made, what is made again, and its report."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).with_name("bench")))  # its scripts are no package

import heads_queue
from heads_plan import Budget, Entry, Piece, Results, pieces
from heads_queue import Place, Queue, forecast, work
from heads_report import plot, tables
from heads_work import Clock

from drafthead.train.result import Tick

HEADS = {"eagle3": Entry("smollm2-eagle3"), "no such head": Entry("no-such-preset")}
VARIANTS = {"cold": ("eagle3", Entry("smollm2-eagle3", ("head.warm_start=0",)))}
BUDGET = Budget(
    base=("training.tokens_per_batch=1024",),
    data="answers.jsonl",
    positions=30_000,
    tuning=5_000,
    rates=(1e-4, 1e-3, 1e-2),
    seeds=(0, 1),
    best=1,
    evaluations=3,
    evaluation={"trees": ["tree:2x2:4"]},
)
STATES = Piece("states", "extract", "", {"layers": [1, 2]}, 30_000)

WORKER = """
import json, pathlib, sys
folder = pathlib.Path(sys.argv[1])
job = json.loads((folder / "job.json").read_text())
record = {"positions": 1000}
if job["kind"] == "extract":
    (folder / "states").mkdir(exist_ok=True)
    (folder / "states" / "manifest.json").touch()
elif job["kind"] == "evaluate":
    assert (pathlib.Path(job["head"]) / "config.json").exists()
    record = {"greedy": {"chain": {"tau": 1.5}}}
else:
    assert (pathlib.Path(job["states"]) / "manifest.json").exists()
    rate = job["settings"]["optimiser"]["lr"]
    if (folder.parent / "broken").exists() and rate == 0.001:
        sys.exit("no luck")
    record["simulated_tau"] = 2 - abs(rate - 0.001)
    (folder / "train" / "head").mkdir(parents=True, exist_ok=True)
    (folder / "train" / "head" / "config.json").touch()
(folder / "record.json").write_text(json.dumps(record))
"""

RUN, COLD = ["eagle3/run", "eagle3/evaluate"], ["cold/run", "cold/evaluate"]
TUNES = ["eagle3/tune/0.0001", "eagle3/tune/0.001", "eagle3/tune/0.01"]
SEED = ["eagle3/seed1/run", "eagle3/seed1/evaluate"]
MORE = [SEED[0], COLD[0], SEED[1], COLD[1]]


class Bench:
    """A comparison whose pieces are made by a worker that does nothing."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def queue(self, budget: Budget = BUDGET) -> Queue:
        results = Results(self.root / "results.json")
        place = Place(self.root, self.root / "answers.jsonl", {})
        return Queue(lambda: pieces(HEADS, VARIANTS, budget, results), STATES, results, place)

    def made(self, budget: Budget = BUDGET, jobs: int = 1, fine: bool = True) -> list[str]:
        """Names of what one call of the command finishes, in that order."""
        told: list[str] = []
        assert work(self.queue(budget), jobs, told.append) is fine
        return [line.split(": ")[1].split(",")[0] for line in told if " done: " in line]


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    worker = tmp_path / "worker.py"
    worker.write_text(WORKER)
    monkeypatch.setattr(heads_queue, "WORKER", worker)
    monkeypatch.setattr(heads_queue, "POLL", 0.005)
    return Bench(tmp_path)


def test_pieces_are_made_once_and_a_changed_setting_makes_only_what_depends_on_it(
    bench: Bench,
) -> None:
    assert bench.made() == ["states", *TUNES, *RUN, *MORE]
    results = Results(bench.root / "results.json")
    runs = [record for record in results.records.values() if record["kind"] == "run"]
    rates = {run["name"]: run["settings"]["optimiser"]["lr"] for run in runs}
    assert rates == dict.fromkeys([RUN[0], SEED[0], COLD[0]], 0.001), "the best one's"
    assert bench.made() == []
    longer = replace(BUDGET, positions=40_000)
    assert bench.made(longer) == [*RUN, *MORE]
    assert bench.made() == [], "what was made before is still known"
    wider = replace(BUDGET, evaluation={"trees": ["chain:1"]})
    assert sorted(bench.made(wider, jobs=2)) == sorted([RUN[1], SEED[1], COLD[1]])


def test_what_has_gone_is_made_again_only_where_something_missing_needs_it(bench: Bench) -> None:
    bench.made()
    queue = bench.queue()
    for piece in [*queue.plan(), STATES]:
        heads = queue.place.of(piece)
        for path in (heads / "train" / "head" / "config.json", heads / "states" / "manifest.json"):
            path.unlink(missing_ok=True)
    assert bench.made() == [], "all figures are there"
    (lost,) = [p for p in queue.plan() if p.name == SEED[1]]
    del queue.results.records[lost.key]
    (bench.root / "results.json").write_text(json.dumps(queue.results.records))
    assert [piece.name for piece, _ in forecast(bench.queue(), 1)[0]] == ["states", *SEED]
    assert bench.made() == ["states", *SEED]


def test_a_piece_that_fails_holds_up_only_what_needs_it(bench: Bench) -> None:
    (bench.root / "broken").touch()
    assert bench.made(fine=False) == ["states", TUNES[0], TUNES[2]]
    waiting = {piece.name for piece in bench.queue().missing() if piece.settings is None}
    seed = {"best 1/seed1/run", "best 1/seed1/evaluate"}
    assert waiting == {*RUN, *COLD, *seed}, "nor is it known whose seeds are to follow"
    (bench.root / "broken").unlink()
    assert bench.made() == [TUNES[1], *RUN, *MORE]


def test_cpu_seconds_of_a_training_go_on_from_its_checkpoint_and_leave_evaluations_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "process_time", lambda: now[0])

    def go(clock: Clock, phase: str, step: int, seconds: float) -> None:
        now[0] += seconds
        clock(Tick(phase, step, 0.5, None, 1.0))

    clock = Clock(tmp_path / "cpu.jsonl")
    for step in (0, 1, 2):  # complete steps, told within the next one
        go(clock, "train", step, 2.0)
    go(clock, "evaluate", 3, 50.0)
    go(clock, "train", 3, 1.0)
    assert [clock.at(step) for step in (0, 1, 3, 4)] == [0.0, 2.0, 6.0, 7.0]
    now[0] = 5.0  # another process, which goes on behind step 2
    again = Clock(tmp_path / "cpu.jsonl")
    go(again, "train", 2, 3.0)
    assert again.at(3) == 4.0 + 3.0, "the steps made in vain are not counted"


def test_the_report_needs_the_results_file_alone(tmp_path: Path) -> None:
    results = Results(tmp_path / "results.json")
    point = {"step": 1, "positions": 500, "simulated_tau": 1.4, "training_cpu_seconds": 30.0}
    cost = {"macs": 50_000_000, "bytes": 8_000_000, "steps": 5, "small_steps": 4}
    run = Piece("block/run", "run", "block", {"optimiser": {"lr": 0.001}})
    results.add(
        run,
        {
            "positions": 1000,
            "simulated_tau": 1.5,
            "trained_weights": 2_000_000,
            "training_cpu_seconds": 60.0,
            "flops_per_position": {"forward_flops": 2e9, "backward_flops": 3e9},
            "drafting": {"chain": cost, "tree": cost},
            "curve": [point, point | {"positions": 1000, "simulated_tau": 1.5}],
        },
    )
    side = {
        "tau": 2.0,
        "tau_interval": [1.9, 2.1],
        "speedup": 1.25,
        "cpu_speedup": 1.5,
        "survival": [0.6, 0.4],
        "agreement": {"equal": 25, "of": 26},
    }
    facts = {"chain_shape": "chain:4", "tree_shape": "auto:4x4:12"}
    results.add(
        Piece("block/evaluate", "evaluate", "block", {}, run=run),
        {**facts, "greedy": {"chain": side, "tree": side}},
    )
    shown = tables(list(Results(results.path).records.values()))
    # 5 GFLOP a position and 1000 positions: 5 TFLOP, so tau 2 is 400 a PFLOP; 40 a draft's GMAC.
    trained = "2.00 M | 0.001 | 1,000 | 5.0 | 1.0 | 1.500 | 50.0 M MAC | 8.0 MB | 5 (4 small)"
    decoded = "chain:4 | 2.00 (1.90–2.10) | 1.25 | 1.50 | – | – | – | 400.0 | 40.0 | 25 of 26"
    assert f"| block | {trained} |" in shown
    assert f"| block | {decoded} |" in shown
    assert "| block | 0.600 | 0.400 |" in shown
    png = plot(list(results.records.values()), tmp_path / "plot.png").read_bytes()
    assert png.startswith(b"\x89PNG")
    assert tables([]) == "nothing finished yet"
