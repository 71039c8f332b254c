"""Count prompts on which drafting changes nothing: `python tests/bench/lossless.py --head DIR`.

Greedy chains and trees against transformers' own `generate(do_sample=False)`, through `generate`
with `custom_generate`; at temperature > 0, the same seed with the head, with drafts that are always
wrong, and with none. Float32, held-out prompts. Exit code 1 if anything differs.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before torch is imported

import torch

from drafthead.data.chat import ChatFormat
from drafthead.data.conversations import Message
from drafthead.data.embedded import default_target, fetch_target
from drafthead.heads.base import DraftHead
from drafthead.inference.compare import fitted, opened, prompts_of, spread
from drafthead.inference.drafters import Drafter
from drafthead.inference.sampling import Sampler
from drafthead.inference.speculate import speculate
from drafthead.inference.target import Target, load_target
from drafthead.inference.tree import Tree, chain

TREES = ("chain:3", "tree:3x3:8")
SAMPLED = ((0.7, 1.0), (0.7, 0.9), (1.0, 1.0), (1.0, 0.9))
"""Temperature and top-p."""


class AlwaysWrong:
    """Proposes one token after another that no text holds: the unknown token."""

    name = "always wrong"
    layers: tuple[int, ...] = ()
    nodes = 3

    def open(self, batch: int, capacity: int) -> None: ...

    def start(self, row: int) -> None: ...

    def observe(self, row: int, ids: Sequence[int], features: object) -> None: ...

    def propose(
        self, ids: Sequence[Sequence[int]], depths: Sequence[int], sampler: Sampler
    ) -> list[Tree]:
        return [chain([0] * min(depth, self.nodes)) for depth in depths]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--head", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=10)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--sampled-prompts", type=int, default=4)
    asked = parser.parse_args()
    target = load_target(fetch_target(default_target(), progress=print), "float32")
    head = fitted(opened(asked.head, "float32"), target)
    prompts = prompts_of_target(target, asked.prompts)
    tokens = asked.new_tokens
    wrong = 0
    plain = [run(target, prompt, tokens) for prompt in prompts]
    for tree in TREES:
        ours = [run(target, prompt, tokens, head, tree) for prompt in prompts]
        wrong += told(f"greedy, {tree}, against transformers' generate", ours, plain)
    for temperature, top_p in SAMPLED:
        name = f"coupled, temperature {temperature}, top-p {top_p}"
        options = {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": 0}
        some = prompts[: asked.sampled_prompts]
        plain = [drawn(target, prompt, tokens, None, "chain:3", options) for prompt in some]
        for drafter, tree in ((head, "chain:3"), (head, "tree:3x3:8"), (AlwaysWrong(), "chain:3")):
            ours = [drawn(target, prompt, tokens, drafter, tree, options) for prompt in some]
            who = drafter.name if isinstance(drafter, AlwaysWrong) else f"head, {tree}"
            wrong += told(f"{name}, {who}, against none", ours, plain)
    sys.exit(1 if wrong else 0)


def prompts_of_target(target: Target, count: int) -> list[list[int]]:
    """Ids of held-out prompts, spread over the categories."""
    assert target.tokenizer is not None
    chat = ChatFormat(target.tokenizer)
    chosen = spread(prompts_of(["samples/test"], print), count)
    return [chat.prompt_ids([Message("user", p.turns[0])]) for p in chosen]


def run(
    target: Target, ids: list[int], tokens: int, head: DraftHead | None = None, tree: str = ""
) -> list[int]:
    """Greedy ids: transformers' own loop, or ours where a head is given."""
    method = {} if head is None else {"custom_generate": speculate(head, tree=tree)}
    return generated(target, ids, tokens, {"do_sample": False} | method)


def drawn(
    target: Target,
    ids: list[int],
    tokens: int,
    drafter: DraftHead | Drafter | None,
    tree: str,
    options: dict[str, object],
) -> list[int]:
    """Sampled ids by our loop, seed 11."""
    method = {"custom_generate": speculate(drafter, tree=tree, seed=11)}
    return generated(target, ids, tokens, options | method)


def generated(target: Target, ids: list[int], tokens: int, options: dict[str, object]) -> list[int]:
    prompt = torch.tensor([ids])
    out = target.model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=tokens, **options
    )
    found: list[int] = out[0].tolist()
    return found


def told(name: str, ours: list[list[int]], theirs: list[list[int]]) -> int:
    """Print how many are equal; how many are not."""
    equal = sum(a == b for a, b in zip(ours, theirs, strict=True))
    print(f"{name}: {equal} of {len(theirs)} equal", flush=True)
    return len(theirs) - equal


if __name__ == "__main__":
    main()
