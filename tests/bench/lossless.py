"""Count prompts on which drafting changes nothing: `python tests/bench/lossless.py --head DIR`.

Every drafter of the report (lookup, head and sibling with chains and static, best-first and auto
trees, merged), through `generate` with `custom_generate`: greedily, with and without a repetition
penalty, against transformers' own `generate`; at temperature > 0 against plain keyed decoding with
the same seed, where drafts that are always wrong are tried, too. Float32, held-out prompts. Exit
code 1 if anything differs.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before torch is imported
sys.path.insert(0, str(Path(__file__).parents[1]))  # forced drafters are the tests'

import torch
from drafts import AlwaysWrong

from drafthead.data.chat import ChatFormat
from drafthead.data.embedded import default_target, fetch_target
from drafthead.inference.compare import (
    Comparison,
    line_up,
    models,
    prompts_of,
    spread,
    template_of,
)
from drafthead.inference.drafters import Drafter
from drafthead.inference.speculate import speculate
from drafthead.inference.target import Target
from drafthead.inference.tree import parse_shape

TREES = ("chain:3", "static:0,1,0.0,0.1", "tree:3x3:8", "auto:4x4:12")
PENALTY = {"repetition_penalty": 1.3}
GREEDY: tuple[dict[str, Any], ...] = ({}, PENALTY)
SAMPLED: tuple[dict[str, Any], ...] = (
    {"temperature": 0.7, "top_p": 1.0},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.0, "top_p": 1.0},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 1.0, "top_p": 0.9, **PENALTY},
)
"""Settings of `generate`."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--head", type=Path, required=True)
    parser.add_argument("--sibling")
    parser.add_argument("--prompts", type=int, default=10)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--fewer", type=int, default=3, help="prompts for all but plain greedy")
    asked = parser.parse_args()
    folder = str(fetch_target(default_target(), progress=print))
    target, heads = models(Comparison(folder, "float32", asked.head, asked.sibling), "float32")
    drafters = line_up(target, heads, [parse_shape(tree) for tree in TREES])
    assert target.tokenizer is not None
    chat = ChatFormat(target.tokenizer, template_of(heads))
    held_out = spread(prompts_of(["samples/test"], print), asked.prompts)
    prompts = [chat.prompt_ids(prompt.opening) for prompt in held_out]
    some, tokens, wrong = prompts[: asked.fewer], asked.new_tokens, 0
    for options in GREEDY:
        chosen = some if options else prompts
        options = {"do_sample": False, **options}
        theirs = [generated(target, ids, tokens, options) for ids in chosen]
        wrong += differing(
            target, chosen, tokens, theirs, drafters, options, "transformers' generate"
        )
    for options in SAMPLED:
        options = {"do_sample": True, "top_k": 0, **options}
        plain = [generated(target, ids, tokens, drafting(None, options)) for ids in some]
        tried = {**drafters, "always wrong": AlwaysWrong(plain)}
        wrong += differing(target, some, tokens, plain, tried, options, "no drafter")
    sys.exit(1 if wrong else 0)


def differing(
    target: Target,
    prompts: Sequence[list[int]],
    tokens: int,
    expected: Sequence[list[int]],
    drafters: Mapping[str, Drafter],
    options: dict[str, Any],
    against: str,
) -> int:
    """How many texts are not as expected; told for each drafter."""
    name = ", ".join(f"{key} {value}" for key, value in options.items())
    print(f"\n{name}, against {against}:", flush=True)
    wrong = 0
    for who, drafter in drafters.items():
        settings = drafting(drafter, options)
        ours = [generated(target, ids, tokens, settings) for ids in prompts]
        equal = sum(a == b for a, b in zip(ours, expected, strict=True))
        print(f"  {who}: {equal} of {len(prompts)} equal", flush=True)
        wrong += len(prompts) - equal
    return wrong


def drafting(drafter: Drafter | None, options: dict[str, Any]) -> dict[str, Any]:
    """The same settings by our loop, seed 11."""
    return {**options, "custom_generate": speculate(drafter, seed=11)}


def generated(target: Target, ids: list[int], tokens: int, options: dict[str, Any]) -> list[int]:
    prompt = torch.tensor([ids])
    out = target.model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=tokens, **options
    )
    found: list[int] = out[0].tolist()
    return found


if __name__ == "__main__":
    main()
