"""Is what `drafthead tune` chooses as fast as the best of a grid, on other prompts?

`python tests/bench/tune.py --head reference --out FILE`: tunes on the last prompts of the files,
then decodes the first ones plainly, as tuned, and in every shape of a grid, in turn, repeats
interleaved, at each batch size. Shown are tokens per second of CPU time and of the wall, how many
times plain's that is, and tuned against the best of the grid with an interval over prompts and
repeats. Exit code 1 where it is more than three hundredths slower by CPU time.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before torch is imported

from drafthead.data.chat import ChatFormat
from drafthead.data.embedded import default_target, fetch_target
from drafthead.data.files import write_atomically
from drafthead.heads.base import DraftHead
from drafthead.inference.compare import fitted, opened, prompts_of, spread, template_of, versions
from drafthead.inference.drafters import Drafter
from drafthead.inference.grow import HeadDrafter, drafting
from drafthead.inference.target import Target, load_target, serving_dtype
from drafthead.inference.tree import parse_shape
from drafthead.inference.tune import CLOCKS, Timed, Trial, decoded, gain, rate, tune
from drafthead.inference.tuning import Tuning, as_dict

GRID = (
    "chain:1",
    "chain:2",
    "chain:3",
    "chain:5",
    "stop:6:0.3",
    "static:0,1,2,0.0,0.1,1.0,0.0.0",
    "tree:2x4:6",
    "tree:3x3:8",
    "tree:4x4:12",
    "tree:5x6:24",
    "auto:4x4:12",
    "auto:6x6:32",
)
ALLOWED = 0.97
"""Of the grid's best, what tuned has to come to."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--head", type=Path, default=Path("reference"))
    parser.add_argument("--target", help="folder or Hub id; default: the embedded one")
    parser.add_argument("--dtype", default=serving_dtype())
    parser.add_argument("--prompts", nargs="*", default=["samples/test"])
    parser.add_argument("--tune-on", type=int, default=24, help="prompts")
    parser.add_argument("--count", type=int, default=20, help="other prompts that are measured")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 4])
    parser.add_argument("--grid", nargs="*", default=GRID)
    parser.add_argument("--clock", default="cpu", choices=[*CLOCKS], help="that tuning goes by")
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()

    head = opened(asked.head, asked.dtype)
    target = load_target(
        asked.target or fetch_target(default_target(), progress=print), asked.dtype
    )
    head = fitted(head, target)
    mine, others = prompts_apart(target, head, asked)
    trial = Trial(asked.new_tokens, clock=asked.clock)
    tuning = tune(target, head, mine, asked.batches, trial, stage=print)
    found: dict[str, Any] = {"tuning": as_dict(tuning), "versions": versions(), "batches": {}}
    slow = False
    for batch in asked.batches:
        sides = line_up(target, head, tuning, asked.grid, batch)
        times = measured(target, sides, others, batch, trial, asked.repeats)
        found["batches"][str(batch)] = result = compared(times)
        write_atomically(asked.out, json.dumps(found, indent=2))  # what is done is kept
        slow = show(batch, str(tuning.shapes[batch]), result) or slow
    sys.exit(slow)


def prompts_apart(
    target: Target, head: DraftHead, asked: argparse.Namespace
) -> tuple[list[list[int]], list[list[int]]]:
    """Ids of the prompts to tune on, and of others: the files' last and first, all categories."""
    assert target.tokenizer is not None
    chat = ChatFormat(target.tokenizer, template_of({"head": head}))
    known = prompts_of(asked.prompts, print)
    mine, others = spread(known[::-1], asked.tune_on), spread(known, asked.count)
    shared = {p.id for p in mine} & {p.id for p in others}
    if shared:
        raise SystemExit(f"{len(shared)} prompts would be tuned on and measured: ask for fewer")
    first, second = ([chat.prompt_ids(p.opening) for p in some] for some in (mine, others))
    return first, second


def line_up(
    target: Target, head: DraftHead, tuning: Tuning, grid: Sequence[str], batch: int
) -> dict[str, Drafter | None]:
    sides: dict[str, Drafter | None] = {"plain": None}
    sides["tuned"] = HeadDrafter(head, tuning.shapes[batch], tuning.costs[batch])
    return sides | {name: drafting(head, parse_shape(name), target, batch) for name in grid}


def measured(
    target: Target,
    sides: dict[str, Drafter | None],
    prompts: Sequence[Sequence[int]],
    batch: int,
    trial: Trial,
    repeats: int,
) -> dict[str, list[Timed]]:
    """Times of each side, the same decodings in the same places."""
    groups = [prompts[first : first + batch] for first in range(0, len(prompts), batch)]
    found: dict[str, list[Timed]] = {name: [] for name in sides}
    order = list(sides.items())
    for _, drafter in order:  # warm-up
        decoded(target, drafter, groups[0], trial, tokens=8)
    for repeat in range(repeats):
        for number, group in enumerate(groups):
            turn = (repeat + number) % len(order)
            for name, drafter in (*order[turn:], *order[:turn]):
                found[name].append(decoded(target, drafter, group, trial, first=number * batch))
            print(f"batch {batch}: {repeat * len(groups) + number + 1}/{repeats * len(groups)}",
                  end="\r", file=sys.stderr)  # fmt: skip
    return found


def compared(times: dict[str, list[Timed]]) -> dict[str, Any]:
    """Rates and gains over plain by side and clock, and tuned against the best of the grid."""
    result: dict[str, Any] = {"sides": {}, "tuned": {}}
    for name, taken in times.items():
        result["sides"][name] = {
            clock: {"tokens_per_s": rate(taken, clock), "gain": gain(taken, times["plain"], clock)}
            for clock in CLOCKS
        }
    for clock in CLOCKS:
        grid = [name for name in times if name != "tuned"]  # plain is a shape, too
        best = max(grid, key=lambda name: rate(times[name], clock))
        result["tuned"][clock] = {
            "best": best,
            "of_best": gain(times["tuned"], times[best], clock),
        }
    return result


def show(batch: int, shape: str, result: dict[str, Any]) -> bool:
    """Print a table; whether tuned is slower than is allowed."""
    print(
        f"\nbatch {batch}, tuned: {shape}\n\n| | CPU tokens/s, times plain | wall |\n|---|---|---|"
    )
    for name, by_clock in result["sides"].items():
        cells = []
        for clock in ("cpu", "wall"):
            ratio, low, high = by_clock[clock]["gain"]
            tokens = by_clock[clock]["tokens_per_s"]
            cells.append(f"{tokens:.1f}, {ratio:.3f} ({low:.3f}–{high:.3f})")
        print(f"| {name} | {cells[0]} | {cells[1]} |")
    for clock in ("cpu", "wall"):
        told = result["tuned"][clock]
        ratio, low, high = told["of_best"]
        print(f"{clock}: tuned is {ratio:.3f} ({low:.3f}–{high:.3f}) of {told['best']}")
    return bool(result["tuned"]["cpu"]["of_best"][0] < ALLOWED)


if __name__ == "__main__":
    main()
