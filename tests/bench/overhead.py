"""What the engine itself costs: `python tests/bench/overhead.py`.

Three figures, in CPU time, parts interleaved: tokens per second with a drafter that is always right
and costs nothing, against the bare forward it cannot beat; the cost of verifying n tokens against
one; and a ragged batch of four against four single runs, on a tiny Llama where the loop itself, not
the model, is most of the time.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before torch is imported
sys.path.insert(0, str(Path(__file__).parents[1]))  # forced drafters are the tests'

import torch
from drafts import HalfRight, Oracle, endless, prompt_of

from drafthead.data.embedded import default_target, fetch_target
from drafthead.inference.decoder import decode
from drafthead.inference.drafters import Drafter
from drafthead.inference.row import Row
from drafthead.inference.sampling import Sampler
from drafthead.inference.target import Target, load_target, serving_dtype
from drafthead.inference.tree import chain

LENGTH = 7
"""Tokens the oracle drafts: a round verifies one more and emits one more."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", default=serving_dtype())
    parser.add_argument("--repeats", type=int, default=5)
    asked = parser.parse_args()
    target = load_target(fetch_target(default_target(), progress=print), asked.dtype)
    print(f"{asked.dtype}, {torch.get_num_threads()} threads")
    oracle(target, asked.repeats)
    curve(target, asked.repeats)
    batch(Target(endless()), asked.repeats)


def oracle(target: Target, repeats: int) -> None:
    """Rounds of eight tokens against eight per bare forward of eight."""
    assert target.tokenizer is not None
    ids = target.tokenizer("Once upon a time there was a small engine that wanted to").input_ids
    tokens = 1 + 12 * (LENGTH + 1)
    text = settled(target, ids, tokens)
    drafter = Oracle([text], LENGTH)
    bare, whole = [], []
    for _ in range(repeats):
        bare.append(seconds(forward(target, text[: len(ids) + tokens // 2], LENGTH + 1)))
        start = time.process_time()
        (drafted,), parts = decode(target, [ids], Sampler(), drafter, max_new_tokens=tokens)
        # The prefill is no part of a round.
        spent = time.process_time() - start - parts["prefill"]
        assert all(r.emitted == LENGTH + 1 for r in drafted.rounds), "the oracle was wrong"
        whole.append(spent / len(drafted.rounds))
    share = median(bare) / median(whole)
    print(
        f"oracle of {LENGTH}: {8 / median(whole):.1f} tokens/s, {100 * share:.0f} % of "
        f"8 / forward of 8 ({1000 * median(bare):.1f} ms; a round: {1000 * median(whole):.1f} ms)"
    )


def settled(target: Target, ids: list[int], tokens: int) -> list[int]:
    """The greedy text as rounds of eight make it: in bf16 they round otherwise than plain ones."""
    (row,), _ = decode(target, [ids], Sampler(), None, max_new_tokens=tokens)
    for _ in range(tokens):
        drafter = Oracle([row.ids], LENGTH)
        (row,), _ = decode(target, [ids], Sampler(), drafter, max_new_tokens=tokens)
        if all(r.emitted == LENGTH + 1 for r in row.rounds):
            break
    return row.ids


def forward(target: Target, ids: Sequence[int], n: int) -> Callable[[], object]:
    """The target's forward of n tokens behind a text, as a round runs it; nothing is committed."""
    store = target.open(1, len(ids) + n)
    target.prefill(store, 0, ids)
    tree = chain(list(ids[1:n]))
    return lambda: target.verify(store, [ids[0]], [tree])


def curve(target: Target, repeats: int) -> None:
    """Verifying n tokens, relative to one, behind 256 tokens."""
    ids = [5 + i % 1000 for i in range(256)]
    runs = {n: forward(target, ids, n) for n in (1, 2, 3, 5, 8, 12, 16)}
    spent: dict[int, list[float]] = {n: [] for n in runs}
    for _ in range(repeats):
        for n, run in runs.items():
            spent[n].append(seconds(run))
    one = median(spent[1])
    ratios = ", ".join(f"{n}: {median(s) / one:.2f}" for n, s in spent.items())
    print(f"verifying n tokens against one ({1000 * one:.1f} ms): {ratios}")


def batch(target: Target, repeats: int) -> None:
    """Four ragged rows together against the same four one after another."""
    prompts = [prompt_of(n) for n in (1, 7, 20, 33)]
    texts = [row.ids for row in decoded(target, prompts, None)]
    # The last rows end at different times: four runs take 187 rounds, together they take 96.
    shapes = {"plain": None, "half-right chains": [2] * 4, "of unequal luck": [0, 1, 3, 4]}
    for name, right in shapes.items():
        drafter = None if right is None else HalfRight(texts, right)
        together = partial(decoded, target, prompts, drafter)
        apart = [partial(decoded, target, [prompt], drafter) for prompt in prompts]
        pairs = [
            (seconds(together, 1), sum(seconds(run, 1) for run in apart)) for _ in range(repeats)
        ]
        one, four = median(a for a, _ in pairs), median(b for _, b in pairs)
        print(f"tiny Llama, batch of 4 ({name}): {four / one:.2f} x the speed of four single runs")


def decoded(
    target: Target, prompts: list[list[int]], drafter: Drafter | None, tokens: int = 96
) -> list[Row]:
    return decode(target, prompts, Sampler(), drafter, max_new_tokens=tokens)[0]


def seconds(run: Callable[[], object], times: int = 3) -> float:
    """CPU seconds of one run, the mean of some."""
    run()
    start = time.process_time()
    for _ in range(times):
        run()
    return (time.process_time() - start) / times


if __name__ == "__main__":
    main()
