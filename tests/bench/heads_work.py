"""One piece of a comparison of heads, in a process of its own: `python heads_work.py FOLDER`.

FOLDER holds `job.json`; `record.json` is written beside it when all is done. A training that was
stopped goes on from the checkpoint in the same folder.
"""

from __future__ import annotations

import json
import logging
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf

from drafthead.data.batches import plan
from drafthead.data.chat import ChatFormat
from drafthead.data.conversations import Prompt
from drafthead.data.embedded import default_target, fetch_target
from drafthead.data.files import write_atomically
from drafthead.heads.base import DraftHead
from drafthead.inference.compare import fitted, opened, prompts_of, records_of, spread
from drafthead.inference.evaluate import PLAIN, Settings, evaluate
from drafthead.inference.grow import check_shape, drafting
from drafthead.inference.simulate import simulate
from drafthead.inference.target import Target, load_target, load_tokenizer, serving_dtype
from drafthead.inference.tree import parse_shape
from drafthead.train.assemble import read_rows
from drafthead.train.config import RunConfig, load_config
from drafthead.train.drafting import DraftShape, draft_costs
from drafthead.train.extract import extract
from drafthead.train.loop import run
from drafthead.train.planning import target_config
from drafthead.train.record import RunFolder
from drafthead.train.rehearsal import BatchShape, rehearse
from drafthead.train.result import Tick

Job = Mapping[str, Any]
KEPT = ("tau", "tau_interval", "survival", "conditional", "cut", "rounds", "accepted_per_drafted")
SPEEDS = ("tokens_per_s", "cpu_tokens_per_s", "speedup", "cpu_speedup", "agreement", "round_ms")


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    job: Job = json.loads((folder / "job.json").read_text())
    fetch_target(default_target())
    make = {"extract": stored, "tune": trained, "run": trained, "evaluate": evaluated}
    record = make[job["kind"]](job, folder)
    machine = f"{platform.machine()}, {torch.get_num_threads()} thread"
    record |= {"machine": machine, "torch": torch.__version__, "date": time.strftime("%Y-%m-%d")}
    write_atomically(folder / "record.json", json.dumps(record, indent=1, default=str))


# States


def stored(job: Job, folder: Path) -> dict[str, Any]:
    """The states of all rows, of every layer that some head reads."""
    settings = dict(job["settings"])
    layers = settings.pop("layers")
    made = extract(config_of(settings, job, folder), folder / "states", layers)
    return {"positions": made.positions, "bytes": made.bytes, "dropped": made.dropped}


# Training


class Clock:
    """CPU seconds of a training by step, over sittings and without its evaluations.

    Loading and a closed-form start are in it, as part of the first step.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        lines = path.read_text().splitlines() if path.exists() else []
        pairs = [json.loads(line) for line in lines if line.endswith("]")]  # a kill may cut one
        self.by_step: dict[int, float] = dict(pairs)
        self._seconds: float | None = None
        self._last = time.process_time()

    def __call__(self, tick: Tick) -> None:
        now = time.process_time()
        spent, self._last = now - self._last, now
        if self._seconds is None:
            self.by_step = {n: s for n, s in self.by_step.items() if n <= tick.step}
            self._seconds = self.at(tick.step)
        if tick.phase != "train":
            return
        self._seconds += spent
        self.by_step[tick.step + 1] = self._seconds
        with self.path.open("a") as file:
            file.write(json.dumps([tick.step + 1, self._seconds]) + "\n")

    def at(self, step: int) -> float:
        """Seconds when so many steps were made."""
        return max((s for n, s in self.by_step.items() if n <= step), default=0.0)


def trained(job: Job, folder: Path) -> dict[str, Any]:
    """Train one head on the stored states; a full run also says what training and drafting cost."""
    config = config_of(job["settings"], job, folder)
    clock = Clock(folder / "cpu.jsonl")
    result = run(config, resume=RunFolder(config.out).last.exists(), progress=clock)
    record = {
        "positions": result.positions,
        "steps": result.steps,
        "simulated_tau": result.simulated_tau,
        "simulated_survival": result.simulated_survival,
        "best_step": result.best_step,
        "seconds": result.seconds,
        "training_cpu_seconds": clock.at(result.steps),
        "shares": result.shares,
        "skipped": result.skipped,
        "curve": curve(config.out, clock),
    }
    return record | (costs(config) if job["kind"] == "run" else {})


def config_of(settings: Mapping[str, Any], job: Job, folder: Path) -> RunConfig:
    """The settings as a config, with this machine's paths."""
    path = folder / "config.yaml"
    path.write_text(OmegaConf.to_yaml(OmegaConf.create(dict(settings))))
    places = [f"data.train={job['data']}", f"out={folder / 'train'}"]
    if job["kind"] in ("tune", "run"):
        places.append(f"data.states={job['states']}")
    return load_config(path, places)


def curve(out: Path, clock: Clock) -> list[dict[str, Any]]:
    """Held-out simulated figures as training went on."""
    events = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    positions = {e["step"]: e["positions"] for e in events if e["event"] == "step"}
    return [
        {
            "step": e["step"],
            "positions": positions[e["step"]],
            "simulated_tau": e["simulated_tau"],
            "training_cpu_seconds": clock.at(e["step"]),
        }
        for e in events
        if e["event"] == "evaluation"
    ]


def costs(config: RunConfig) -> dict[str, Any]:
    """Operations of a training position, of a mean micro-batch, and of rounds of drafting."""
    target = target_config(config.target.name)
    bf16 = serving_dtype() == "bfloat16"
    chat = ChatFormat(load_tokenizer(default_target()), config.data.template_kwargs)
    rows = read_rows(config.data.train, config.data, chat, config.data.positions)
    training, lengths = config.training, [len(row.ids) for row in rows]
    asked = [sum(1 for _ in takewhile(lambda seen: not seen, row.mask)) for row in rows]
    batches = plan(lengths, training.tokens_per_batch, training.seed)
    mean = [round(sum(values) / len(rows)) for values in (lengths, asked)]
    shape = BatchShape(max(1, round(len(rows) / len(batches))), *mean)
    seen = rehearse(config, target, shape, bf16)
    parts = ("target_flops", "forward_flops", "backward_flops")
    rounds = draft_costs(config, target, bf16, [DraftShape(4), DraftShape(4, 4)])
    return {
        "trained_weights": seen.trained,
        "flops_per_position": {part: getattr(seen, part) / shape.positions for part in parts},
        "drafting": {
            name: asdict(cost) for name, cost in zip(("chain", "tree"), rounds, strict=True)
        },
    }


# Evaluation


def evaluated(job: Job, folder: Path) -> dict[str, Any]:
    """Acceptance and speed: a chain and the best tree, greedy and drawn, beside plain decoding."""
    asked, dtype = job["settings"], serving_dtype()
    target = load_target(str(default_target()), dtype)
    head = fitted(opened(Path(job["head"]), dtype), target)
    chain = f"chain:{min(asked['chain'], head.max_depth or asked['chain'])}"
    trees, refused = fitting(asked["trees"], head)
    few = prompts(job, "choice", asked["choice_prompts"])
    choice = compared(target, head, trees, few, Settings(asked["choice_tokens"]))[0]
    speed = {name: record["cpu_tokens_per_s"] for name, record in choice.items() if name != PLAIN}
    tree = max(speed, key=lambda name: speed[name])
    many = prompts(job, "prompts", asked["prompts"])
    found: dict[str, Any] = {"dtype": dtype, "choice": {"speeds": speed, "refused": refused}}
    found |= {"chain_shape": chain, "tree_shape": tree, "dev_prompts": len(many)}
    temperatures = {"greedy": 0.0} | ({"drawn": 1.0} if asked["drawn"] else {})
    for name, temperature in temperatures.items():
        settings = Settings(asked["tokens"], temperature)
        records, texts = compared(target, head, [chain, tree], many, settings)
        kept = {key: records[PLAIN][key] for key in ("tokens_per_s", "cpu_tokens_per_s")}
        found[name] = {"plain": kept}
        for role, shape in (("chain", chain), ("tree", tree)):
            figures = records[shape]
            found[name][role] = {key: figures[key] for key in (*KEPT, *SPEEDS)}
            found[name][role]["categories"] = {
                category: given and given["tau"]
                for category, given in figures["by_category"].items()
            }
        if temperature == 0:
            told = simulate(head, target, texts, parse_shape(chain).depth)
            found[name]["chain"]["simulated_tau"] = told.tau
    return found


def fitting(trees: Sequence[str], head: DraftHead) -> tuple[list[str], dict[str, str]]:
    """The shapes that this head can draft, and why not the others."""
    fit, refused = [], {}
    for tree in trees:
        try:
            check_shape(parse_shape(tree), head)
            fit.append(tree)
        except ValueError as error:
            refused[tree] = str(error)
    return fit, refused


def prompts(job: Job, name: str, count: int) -> list[Prompt]:
    """First turns, from the categories in turn."""
    found = spread(prompts_of([job["prompts"][name]], print), count)
    return [replace(prompt, turns=prompt.turns[:1]) for prompt in found]


def compared(
    target: Target,
    head: DraftHead,
    shapes: Sequence[str],
    asked: Sequence[Prompt],
    settings: Settings,
) -> tuple[dict[str, Any], list[tuple[list[int], int]]]:
    """Records by shape, plain's among them, and the first one's texts, prompts' lengths beside."""
    drafters = {shape: drafting(head, parse_shape(shape), target) for shape in shapes}
    kwargs = dict(head.contract.template_kwargs)
    answers = evaluate(target, asked, drafters, settings, template_kwargs=kwargs).answers
    texts = [(answer.ids, answer.prompt_length) for answer in answers[shapes[0]]]
    return records_of([answers], {}), texts


if __name__ == "__main__":
    main()
