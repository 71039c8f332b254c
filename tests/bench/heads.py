"""Draft heads side by side, trained on the same data: `make bench-heads`, or see --help.

Every head gets the same rows in the same order, the same draft vocabulary, three learning rates to
choose from (by held-out simulated tau of four depths), one full run, and an evaluation on prompts
of another source; the two best get two more seeds; then come variants of the block head. Each piece
is one process with one thread, and its record is kept in --results, so that the command may be
stopped at any time, and goes on where it was, also on another machine.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before torch is imported

from heads_plan import Budget, Entry, Piece, Results, pieces
from heads_queue import Place, Queue, Stopped, forecast, work
from heads_report import plot, tables

from drafthead.data.embedded import preset_path
from drafthead.data.files import held
from drafthead.heads.contract import inner_layers
from drafthead.train.assemble import head_layers
from drafthead.train.config import load_config
from drafthead.train.planning import target_config

BLOCK, STOP = ("training.loss=ce_l1",), ("stop:7:0.3",)
"""Of the block head and its variants: DSpark's loss, and one more tree to choose from."""

HEADS = {
    "eagle3": Entry("smollm2-eagle3"),
    "block": Entry("smollm2-block", BLOCK, STOP),
    "medusa": Entry("smollm2-medusa"),
    "eagle": Entry("smollm2-eagle"),
    "hydra": Entry("smollm2-hydra"),
    "hass": Entry("smollm2-hass"),
    "hydrapp": Entry("smollm2-hydrapp"),
}
"""The heads in the order of work; overrides go behind the preset."""

CHANGES = {
    "block-cold": "head.warm_start=0",
    "block-1-layer": "head.num_layers=1",
    "block-no-markov": "head.markov_rank=0",
    "block-no-feature-norm": "head.norm_features=false",
    "block-soft-ce": "training.loss=soft_ce",
    "block-all-anchors": "head.anchor_share=1.0",
    "block-dpace": "training.position_weights=dpace",
}

ABLATIONS = {
    "eagle3-features": ("eagle3", Entry("smollm2-eagle3", ("head.feature_loss=1.0",))),
    **{
        name: ("block", Entry("smollm2-block", (*BLOCK, change), STOP))
        for name, change in CHANGES.items()
    },
    "block-dflash": ("block", Entry("smollm2-dflash", trees=STOP)),
    "eagle3-cold": ("eagle3", Entry("smollm2-eagle3", ("head.warm_start=0",))),
}
"""Variants, each with the head whose learning rate it takes."""

BASE = (
    "data.max_length=512",
    "data.heldout=samples/test",
    "head.draft_vocab_size=16384",
    "training.tokens_per_batch=1024",
    "training.epochs=1",
    "training.heldout_depth=4",
)
"""Of every training."""

RATES = (3e-4, 1e-3, 3e-3)
TREES = ("auto:4x4:12", "tree:4x4:12")
REPOSITORY = Path(__file__).parents[2]
DATA = REPOSITORY.parent / "shared" / "data"


def main() -> int:
    asked = options()
    results = Results(asked.results)
    if asked.report:
        print(tables(list(results.records.values())))
        print(f"\nplot: {plot(list(results.records.values()), asked.results.with_suffix('.png'))}")
        return 0
    try:
        queue = queue_of(asked, results)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if asked.list:
        show(queue, asked.jobs)
        return 0
    if not asked.data.is_file():
        print(
            f"error: --data {asked.data}: no such file; give conversations that the target "
            "answered (`drafthead regenerate` writes them)",
            file=sys.stderr,
        )
        return 2
    asked.work.mkdir(parents=True, exist_ok=True)
    try:
        with held(asked.work):
            return 0 if work(queue, asked.jobs, lambda text: print(text, flush=True)) else 1
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (KeyboardInterrupt, Stopped):
        print("stopped; the same command goes on", file=sys.stderr)
        return 130


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=DATA / "smollm2_answers.jsonl")
    parser.add_argument("--prompts", default=str(DATA / "spec_bench_dev.jsonl"))
    parser.add_argument("--choice", default=str(DATA / "vicuna_bench.jsonl"))
    parser.add_argument("--results", type=Path, default=REPOSITORY / "tests/bench/heads.json")
    parser.add_argument("--work", type=Path, default=Path("runs/bench-heads"))
    parser.add_argument("--positions", type=int, default=300_000, help="of a full run")
    parser.add_argument("--tuning", type=int, default=50_000, help="of each tuning run")
    parser.add_argument("--heldout", type=int, default=12_000, help="positions, simulated on")
    parser.add_argument("--count", type=int, default=26, help="prompts of an evaluation")
    parser.add_argument("--tokens", type=int, default=64, help="new tokens of each prompt")
    parser.add_argument("--jobs", type=int, default=1, help="pieces at a time, one thread each")
    parser.add_argument("--only", nargs="+", help="heads or variants", metavar="NAME")
    parser.add_argument("--list", action="store_true", help="what is done, missing, and forecast")
    parser.add_argument("--report", action="store_true", help="tables and a plot, from --results")
    return parser.parse_args()


def queue_of(asked: argparse.Namespace, results: Results) -> Queue:
    """Everything that is to be done, as far as its presets are there."""
    unknown = sorted({*(asked.only or ())} - {*HEADS, *ABLATIONS})
    if unknown:
        raise ValueError(f"--only {unknown[0]!r}: known are {', '.join([*HEADS, *ABLATIONS])}")
    budget = Budget(
        base=(*BASE, f"data.heldout_positions={asked.heldout}"),
        data=asked.data.name,
        positions=asked.positions,
        tuning=min(asked.tuning, asked.positions),
        rates=RATES,
        seeds=(0, 1, 2),
        best=2,
        evaluations=6,
        evaluation={
            "chain": 4,
            "trees": list(TREES),
            "prompts": asked.count,
            "tokens": asked.tokens,
            "choice_prompts": max(1, asked.count // 6),
            "choice_tokens": asked.tokens,
        },
    )

    def plan() -> list[Piece]:
        found = pieces(HEADS, ABLATIONS, budget, results)
        return [p for p in found if not asked.only or p.entry in asked.only]

    place = Place(asked.work, asked.data, {"prompts": asked.prompts, "choice": asked.choice})
    return Queue(plan, states(asked, plan()), results, place)


def states(asked: argparse.Namespace, planned: list[Piece]) -> Piece | None:
    """The piece that stores the target's states, of every layer that a head here reads."""
    if not planned:
        return None
    entries = {**HEADS, **{name: entry for name, (_, entry) in ABLATIONS.items()}}
    read: set[int] = set()
    for name in dict.fromkeys(piece.entry for piece in planned if piece.entry):
        path = preset_path(f"heads/{entries[name].preset}.yaml")
        config = load_config(path, [*BASE, *entries[name].overrides])
        count = int(target_config(config.target.name).get_text_config().num_hidden_layers)
        read.update(inner_layers(head_layers(config, count)))
    settings = {
        "layers": sorted(read),
        "data": {
            "train": asked.data.name,
            "heldout": "samples/test",
            "heldout_positions": asked.heldout,
            "max_length": 512,
            "positions": asked.positions,
        },
        # Any head does: its layers are among those above.
        "head": {"type": "eagle3", "layers": sorted(read)},
        "training": {"tokens_per_batch": 1024},
    }
    return Piece("states", "extract", "", settings, asked.positions)


def show(queue: Queue, jobs: int) -> None:
    """What is done and what is not."""
    missing, hours = forecast(queue, jobs)
    left = {piece.name: seconds for piece, seconds in missing}
    for piece in [*([queue.states] if queue.states else []), *queue.plan()]:
        record = queue.results.of(piece)
        if record is not None and piece.name not in left:
            print(f"done     {piece.name:28} {record['wall_seconds']:6.0f} s")
        elif piece.name in left:
            state = "waiting " if piece.settings is None else "missing "
            print(f"{state} {piece.name:28} {left[piece.name]:6.0f} s (forecast)")
    print(f"{len(missing)} pieces left, about {hours:.1f} h with --jobs {jobs}")


if __name__ == "__main__":
    sys.exit(main())
