"""Drafters side by side on SmolLM2, transformers' prompt lookup among them.

`python tests/bench/engine.py --head DIR --sibling DIR --out FILE`: the same prompts by every side
in turn, repeats interleaved; tokens per second of CPU time and tau, in all and by category. The
prefill is left out: for transformers, whose loop cannot be stopped after it, the time of a run of
one token is taken off.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before torch is imported

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from drafthead.data.chat import ChatFormat
from drafthead.data.conversations import Prompt
from drafthead.data.embedded import default_target, fetch_target
from drafthead.heads import load_head
from drafthead.heads.base import DraftHead
from drafthead.inference.compare import fitted, opened, prompts_of, spread
from drafthead.inference.drafters import Drafter, LookupDrafter, MergedDrafter
from drafthead.inference.evaluate import Settings, answer
from drafthead.inference.grow import drafting
from drafthead.inference.sibling import Sibling, load_sibling
from drafthead.inference.target import Target, load_target, serving_dtype
from drafthead.inference.tree import parse_shape

LOOKUP = 10
"""Tokens that both prompt lookups look ahead, on n-grams of at most two, transformers' default."""

TREES = ("chain:1", "chain:3", "tree:3x3:8", "auto:4x4:12")


@dataclass(frozen=True)
class Run:
    """One side's answer to one prompt."""

    side: str
    prompt: str
    category: str
    repeat: int
    tokens: int
    rounds: int
    cpu_seconds: float
    seconds: float
    ids: list[int]


Side = Callable[[list[int]], tuple[int, int, float, float, list[int]]]
"""Prompt ids → tokens and rounds, CPU and wall seconds of the rounds, and the text's ids."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--head", type=Path, required=True)
    parser.add_argument("--sibling", type=Path)
    parser.add_argument("--dtype", default=serving_dtype())
    parser.add_argument("--prompts", nargs="*", default=["samples/test"])
    parser.add_argument("--count", type=int, default=18)
    parser.add_argument("--categories", type=int, default=6)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--sides", nargs="*", help="only these, beside plain")
    parser.add_argument("--aliens", action="store_true", help="also drafters that do not fit")
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()

    target = load_target(fetch_target(default_target(), progress=print), asked.dtype)
    prompts = chosen(asked.prompts, asked.count, asked.categories)
    sides = line_up(target, asked.head, asked.sibling, asked.new_tokens)
    if asked.aliens:
        sides |= aliens(target, asked.head, asked.new_tokens)
    if asked.sides:
        sides = {name: sides[name] for name in ("plain", *asked.sides)}
    runs = list(measure(target, prompts, sides, asked.repeats))
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    asked.out.write_text(json.dumps([asdict(run) for run in runs], indent=1))
    print(f"{asked.dtype}, {len(prompts)} prompts of {asked.categories} categories x ", end="")
    print(f"{asked.new_tokens} tokens, {asked.repeats} repeats, {torch.get_num_threads()} threads")
    show(runs)


def chosen(names: Sequence[str], count: int, categories: int) -> list[Prompt]:
    """Prompts of the first so many categories, in turn."""
    prompts = prompts_of(names, print)
    kept = list(dict.fromkeys(p.category for p in prompts))[:categories]
    return spread([p for p in prompts if p.category in kept], count)


def line_up(
    target: Target, head_folder: Path, sibling_folder: Path | None, tokens: int
) -> dict[str, Side]:
    """All sides by name, plain first."""
    head = fitted(opened(head_folder, str(target.dtype).removeprefix("torch.")), target)
    drafters: dict[str, Drafter | None] = {
        "plain": None,
        "lookup": LookupDrafter(LOOKUP, longest=2, shortest=1),
    } | {f"head {tree}": drafter(head, tree, target) for tree in TREES}
    drafters["merged"] = merged(head, "auto:4x4:12", target)
    if sibling_folder is not None:
        sibling = load_sibling(sibling_folder, target, str(target.dtype).removeprefix("torch."))
        drafters["sibling chain:2"] = drafter(sibling, "chain:2", target)
    sides = {name: ours(target, d, tokens) for name, d in drafters.items()}
    return {"plain": sides.pop("plain"), "transformers lookup": theirs(target, tokens)} | sides


def aliens(target: Target, head_folder: Path, tokens: int) -> dict[str, Side]:
    """Drafters that know nothing of this target: the text must stay, the speed will not."""
    random = fitted(load_head(head_folder, target.dtype), target)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in random.parameters():
            parameter.normal_(0, 0.02)
    config = GPT2Config(vocab_size=target.vocab_size, n_embd=256, n_layer=4, n_head=4)
    other = Sibling.of(GPT2LMHeadModel(config).to(target.dtype), None, target, check=False)
    return {
        "random head chain:3": ours(target, drafter(random, "chain:3", target), tokens),
        "random sibling of another family chain:3": ours(
            target, drafter(other, "chain:3", target), tokens
        ),
    }


def drafter(head: DraftHead, tree: str, target: Target) -> Drafter:
    return drafting(head, parse_shape(tree), target)


def merged(head: DraftHead, tree: str, target: Target) -> MergedDrafter:
    return MergedDrafter(LookupDrafter(LOOKUP, longest=3), drafter(head, tree, target))


def ours(target: Target, drafted: Drafter | None, tokens: int) -> Side:
    """A side of our own loop."""
    settings = Settings(max_new_tokens=tokens)

    def run(ids: list[int]) -> tuple[int, int, float, float, list[int]]:
        given = answer(target, drafted, ids, settings)
        spent = given.cpu_seconds, given.seconds
        return given.timed_tokens, len(given.rounds), *spent, given.new_ids

    return run


def theirs(target: Target, tokens: int) -> Side:
    """Transformers' assisted decoding with prompt lookup."""

    def generate(ids: list[int], new: int) -> tuple[list[int], float, float]:
        prompt = torch.tensor([ids])
        wall, cpu = time.perf_counter(), time.process_time()
        out = target.model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            max_new_tokens=new,
            prompt_lookup_num_tokens=LOOKUP,
        )
        spent = time.process_time() - cpu, time.perf_counter() - wall
        return out[0, len(ids) :].tolist(), *spent

    def run(ids: list[int]) -> tuple[int, int, float, float, list[int]]:
        _, cpu_first, wall_first = generate(ids, 1)
        with counted(target) as calls:
            new, cpu, wall = generate(ids, tokens)
        return len(new) - 1, calls[0] - 1, cpu - cpu_first, wall - wall_first, new

    return run


@contextmanager
def counted(target: Target) -> Iterator[list[int]]:
    """Count the target's forwards."""
    calls = [0]

    def count(*_: object) -> None:
        calls[0] += 1

    handle = target.model.get_decoder().register_forward_hook(count)
    try:
        yield calls
    finally:
        handle.remove()


def measure(
    target: Target, prompts: Sequence[Prompt], sides: dict[str, Side], repeats: int
) -> Iterator[Run]:
    """Every side on every prompt, another one first each time."""
    assert target.tokenizer is not None
    chat = ChatFormat(target.tokenizer)
    names = list(sides)
    first = chat.prompt_ids(prompts[0].opening)
    for name in names:  # warm up
        sides[name](first)
    turn = 0
    for repeat in range(repeats):
        for prompt in prompts:
            ids = chat.prompt_ids(prompt.opening)
            for name in (*names[turn % len(names) :], *names[: turn % len(names)]):
                yield Run(name, prompt.id, prompt.category, repeat, *sides[name](ids))
            turn += 1
        print(f"repeat {repeat + 1} of {repeats} done", flush=True)


def show(runs: Sequence[Run]) -> None:
    """A Markdown table: speed in CPU time relative to plain, tau, and how many texts equal plain's;
    by category behind.
    """
    categories = list(dict.fromkeys(run.category for run in runs))
    plain = [run for run in runs if run.side == "plain"]
    print(f"| side | tokens/s | CPU | repeats | wall | tau | equal | {' | '.join(categories)} |")
    print(f"|{'---|' * (7 + len(categories))}")
    texts = {(run.prompt, run.repeat): run.ids for run in plain}
    for side in dict.fromkeys(run.side for run in runs):
        own = [run for run in runs if run.side == side]
        repeats = sorted({run.repeat for run in own})
        ratios = [
            speed([r for r in own if r.repeat == n]) / speed([r for r in plain if r.repeat == n])
            for n in repeats
        ]
        cells = [by_category(own, plain, category) for category in categories]
        equal = sum(run.ids == texts[run.prompt, run.repeat] for run in own)
        wall = speed(own, wall=True) / speed(plain, wall=True)
        spread_ = f"{min(ratios):.2f}–{max(ratios):.2f}"
        print(
            f"| {side} | {speed(own):.1f} | {median(ratios):.2f} x | {spread_} | {wall:.2f} x "
            f"| {tau(own):.2f} | {equal} of {len(own)} | {' | '.join(cells)} |"
        )


def by_category(own: Sequence[Run], plain: Sequence[Run], category: str) -> str:
    mine, base = ([r for r in runs if r.category == category] for runs in (own, plain))
    return f"{tau(mine):.2f}, {speed(mine) / speed(base):.2f} x"


def speed(runs: Sequence[Run], *, wall: bool = False) -> float:
    """Tokens per second: all tokens over all seconds."""
    return sum(r.tokens for r in runs) / sum(r.seconds if wall else r.cpu_seconds for r in runs)


def tau(runs: Sequence[Run]) -> float:
    return sum(r.tokens for r in runs) / sum(r.rounds for r in runs)


if __name__ == "__main__":
    main()
