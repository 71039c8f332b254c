"""What each acceptance rule keeps of real drafts: `python tests/bench/rules.py --head DIR`.

Temperature 1, on answers that SmolLM2 gives to held-out prompts, as Markdown. One step: the chance
that one of n candidates for a single token is kept. A whole round: tokens kept of the head's chain
or tree, drafted and verified by the models at given positions of the answers. Every rule sees the
same positions, and rules that verify draws see the same draws. Each figure is a mean over positions
± its standard error, taking positions for independent.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before torch is imported
sys.path.insert(0, str(Path(__file__).parents[1]))  # enumeration is the tests'

import torch
from enumeration import Fork, outcomes
from torch import Tensor

from drafthead.data.chat import ChatFormat
from drafthead.data.embedded import default_target, fetch_target
from drafthead.heads.base import DraftHead, TeacherBatch
from drafthead.inference.compare import fitted, opened, prompts_of, spread
from drafthead.inference.decoder import decode
from drafthead.inference.evaluate import end_ids
from drafthead.inference.grow import HeadDrafter
from drafthead.inference.history import History
from drafthead.inference.noise import Noise, Purpose
from drafthead.inference.sampling import Sampler
from drafthead.inference.target import Target, load_target, serving_dtype
from drafthead.inference.tree import Tree, parse_shape
from drafthead.inference.verify import (
    RULES,
    LawAfter,
    accept_probability,
    block,
    reject,
    residual,
    without,
)

CHAIN = "chain:4"
TREE = "static:0,1,0.0,0.1,1.0,1.1,0.0.0,0.1.0,1.0.0,1.1.0"
"""Two children of the root, two of each of those, one of each of those."""
COUNTS = (1, 2, 4, 8)
STRIDE = 4
"""Tokens from one round's root to the next."""
BATCH = 6
SEED = 17


@dataclass(frozen=True)
class Answer:
    ids: list[int]
    """Prompt and answer."""
    prompt: int
    """Tokens of the prompt."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--head", type=Path, required=True)
    parser.add_argument("--dtype", default=serving_dtype())
    parser.add_argument("--prompts", type=int, default=18)
    parser.add_argument("--new-tokens", type=int, default=49)
    parser.add_argument("--draws", type=int, default=2, help="of whole rounds at each position")
    asked = parser.parse_args()
    since = time.perf_counter()
    target = load_target(fetch_target(default_target(), progress=print), asked.dtype)
    head = fitted(opened(asked.head, asked.dtype), target)
    answers = answers_of(target, head, asked.prompts, asked.new_tokens)
    one_step(target, head, answers)
    whole_rounds(target, head, answers, asked.draws)
    spent = time.perf_counter() - since
    print(f"\n{asked.dtype}, {torch.get_num_threads()} threads, {spent:.0f} s")


def answers_of(target: Target, head: DraftHead, count: int, tokens: int) -> list[Answer]:
    """The target's own answers at temperature 1; how they were drafted does not show in them."""
    assert target.tokenizer is not None
    chat = ChatFormat(target.tokenizer, head.contract.template_kwargs)
    prompts = [
        chat.prompt_ids(p.opening) for p in spread(prompts_of(["samples/test"], print), count)
    ]
    drafter, answers = HeadDrafter(head, parse_shape(CHAIN)), []
    for start in range(0, len(prompts), BATCH):
        some = prompts[start : start + BATCH]
        noise = [Noise(SEED, start + i, target.vocab_size) for i in range(len(some))]
        rows, _ = decode(
            target, some, Sampler(noise=noise), drafter, max_new_tokens=tokens, eos=end_ids(target)
        )
        answers += [Answer(row.ids, row.prompt) for row in rows]
    return answers


# One step


def one_step(target: Target, head: DraftHead, answers: Sequence[Answer], draws: int = 4) -> None:
    """One token after every token of the answers."""
    names = ("deterministic top-n", "recursive rejection", "coupled")
    kept: dict[str, list[list[float]]] = {name: [] for name in names}
    for number, answer in enumerate(answers):
        for position, p, q in _laws(target, head, answer):
            noise = Noise(SEED + 1, number, target.vocab_size)
            best = head.draft_ids[q.topk(max(COUNTS)).indices]
            kept[names[0]].append([float(p[best[:n]].sum()) for n in COUNTS])
            full = p.new_zeros(len(p)).index_copy_(0, head.draft_ids, q)
            ratio, coupled = torch.zeros(len(COUNTS)), torch.zeros(len(COUNTS))
            for draw in range(draws):
                noise.forget(draw)  # fresh numbers for drafts; positions are told apart below
                at = position * draws + draw
                ratio += torch.tensor(_drawn(p, full, noise.gumbel(at, Purpose.DRAFT)))
                coupled += torch.tensor(_coupled(p, full, noise.gumbel(at)))
            ratio[0] = draws * torch.minimum(p, full).sum()  # exact
            kept[names[1]].append((ratio / draws).tolist())
            kept[names[2]].append((coupled / draws).tolist())
    positions = len(kept[names[0]])
    print(
        f"\nOne step: chance that one of n candidates is kept ({positions} positions; exact for "
        f"deterministic top-n and for rejection at n = 1, else {draws} draws each)\n"
    )
    print("| rule | " + " | ".join(f"n = {n}" for n in COUNTS) + " |")
    print("|---" * (1 + len(COUNTS)) + "|")
    for name, rows in kept.items():
        cells = [_mean(column) for column in zip(*rows, strict=True)]
        print(f"| {name} | " + " | ".join(f"{m:.3f} ± {e:.3f}" for m, e in cells) + " |")


@torch.no_grad()
def _laws(target: Target, head: DraftHead, answer: Answer) -> Iterator[tuple[int, Tensor, Tensor]]:
    """At every position of an answer but its first: the target's law (V,) and the head's (Vd,)."""
    tokens = torch.tensor([answer.ids], device=target.device)
    features, last_hidden = target.states(tokens, head.contract.layers)
    mask = torch.arange(len(answer.ids), device=target.device)[None] > answer.prompt
    batch = TeacherBatch(tokens, mask, features, last_hidden, top=tokens)
    prediction = next(iter(head.unroll(batch, 1)))
    theirs = target.unembed(last_hidden[0, prediction.teacher]).float().softmax(-1)
    ours = prediction.logits.float().softmax(-1)
    yield from zip(prediction.teacher.tolist(), theirs, ours, strict=True)


def _drawn(p: Tensor, q: Tensor, noise: Tensor) -> list[float]:
    """Chance that one of n children drawn without replacement is kept, given all of them."""
    children = (q.log() + noise).topk(max(COUNTS)).indices.tolist()
    left, refused, kept = p, 1.0, []
    for count, token in enumerate(children, start=1):
        law = without(q, children[: count - 1])
        if law is not None and law[token] > 0:
            refused *= 1 - accept_probability(left, law, token)
            left = residual(left, law)
        if count in COUNTS:
            kept.append(1 - refused)
    return kept


def _coupled(p: Tensor, q: Tensor, noise: Tensor) -> list[float]:
    """Whether the target's choice is among the n best candidates under the same noise."""
    token = int((p.log() + noise).argmax())
    candidates = (q.log() + noise).topk(max(COUNTS)).indices.tolist()
    return [float(token in candidates[:n]) for n in COUNTS]


# Whole rounds

Kept = Callable[[int, Tree, Tensor, History], dict[str, float]]
"""What rules keep of a slot's tree, given the verify pass's logits (n, V) and the text so far."""


def whole_rounds(target: Target, head: DraftHead, answers: Sequence[Answer], draws: int) -> None:
    print(
        f"\nWhole round: tokens kept ({draws} draws of drafts and noise at each position; exact "
        "expectation over what verifies drawn drafts and fixed guesses, coupled as it came out)\n"
    )
    print("| drafts | rule | exact | kept | emitted per round (tau) | positions |")
    print("|---|---|---|---|---|---|")
    for shape, words in ((CHAIN, CHAIN), (TREE, "tree 2-2-1")):
        drafter = HeadDrafter(head, parse_shape(shape))
        found = [
            _repeated(target, drafter, answers, "rejection", draws, _by_ratio),
            _repeated(target, drafter, answers, "coupled", draws, _by_accept),
            _repeated(target, drafter, answers, "typical", 1, _by_typical),
        ]
        for name, values in [item for part in found for item in part.items()]:
            mean, error = _mean(values)
            exact = "no: lossy" if name == "typical" else "yes"
            print(
                f"| {words} | {name} | {exact} | {mean:.3f} ± {error:.3f} | {1 + mean:.3f} "
                f"| {len(values)} |",
                flush=True,
            )
        if "block" in found[0]:
            pairs = zip(found[0]["block"], found[0]["token by token"], strict=True)
            mean, error = _mean([ours - theirs for ours, theirs in pairs])
            print(f"| {words} | block, less token by token | | {mean:.3f} ± {error:.3f} | | |")


def _by_ratio(sampler: Sampler) -> Kept:
    def kept(slot: int, tree: Tree, logits: Tensor, history: History) -> dict[str, float]:
        laws = _laws_after(tree, logits)
        if not tree.is_chain:
            return {"recursive rejection": expected(reject, tree, laws)}
        return {
            "token by token": expected(reject, tree, laws),
            "block": expected(block, tree, laws),
        }

    return kept


def _by_accept(sampler: Sampler) -> Kept:
    def kept(slot: int, tree: Tree, logits: Tensor, history: History) -> dict[str, float]:
        return {sampler.rule: float(len(sampler.accept(slot, tree, logits, history)[0]))}

    return kept


def _by_typical(sampler: Sampler) -> Kept:
    """Typical acceptance drafts fixed guesses, of which an exact rule keeps less."""

    def kept(slot: int, tree: Tree, logits: Tensor, history: History) -> dict[str, float]:
        length = float(len(sampler.accept(slot, tree, logits, history)[0]))
        fixed = expected(reject, tree, _laws_after(tree, logits))
        return {"fixed guesses": fixed, "typical": length}

    return kept


def _laws_after(tree: Tree, logits: Tensor) -> LawAfter:
    known: dict[int, Tensor] = {}

    def law_after(path: Sequence[int]) -> Tensor:
        row = path[-1] + 1 if path else 0
        if row not in known:
            known[row] = logits[row].float().softmax(-1)
        return known[row]

    return law_after


class _Undrawn:
    """Chance in which the added token does not matter."""

    def __init__(self, fork: Fork) -> None:
        self.accept = fork.accept

    def draw(self, law: Tensor, depth: int) -> int:
        return 0


def expected(
    rule: Callable[[Tree, LawAfter, _Undrawn], tuple[list[int], int]], tree: Tree, laws: LawAfter
) -> float:
    """Tokens that a rule keeps of these drafts on average."""
    every = outcomes(lambda fork: len(rule(tree, laws, _Undrawn(fork))[0]))
    return sum(chance * kept for chance, kept in every)


def _repeated(
    target: Target,
    drafter: HeadDrafter,
    answers: Sequence[Answer],
    rule: str,
    draws: int,
    measure: Callable[[Sampler], Kept],
) -> dict[str, list[float]]:
    """By name, the mean of `draws` rounds at each position."""
    totals: dict[str, list[float]] = {}
    for draw in range(draws):
        values: dict[str, list[float]] = {}
        for start in range(0, len(answers), BATCH):
            some = answers[start : start + BATCH]
            streams = range(start, start + len(some))
            noise = [Noise(SEED + 2 + draw, s, target.vocab_size) for s in streams]
            sampler = Sampler(noise=noise, rule=rule, lossy=not RULES[rule].exact)
            for found in _along(target, drafter, some, sampler, measure(sampler)):
                for name, value in found.items():
                    values.setdefault(name, []).append(value)
        for name, column in values.items():
            before = totals.get(name, [0.0] * len(column))
            totals[name] = [a + b / draws for a, b in zip(before, column, strict=True)]
    return totals


def _along(
    target: Target,
    drafter: HeadDrafter,
    answers: Sequence[Answer],
    sampler: Sampler,
    kept: Kept,
) -> Iterator[dict[str, float]]:
    """A round at every few tokens of these answers, which are decoded beside it: each verify pass
    takes the draft and, as another branch, the answer's own next tokens, which are committed.
    """
    capacity = max(len(a.ids) for a in answers) + drafter.nodes + STRIDE
    store = target.open(len(answers), capacity)
    drafter.open(len(answers), capacity)
    at = [a.prompt for a in answers]  # each round's root
    for slot, answer in enumerate(answers):
        out = target.prefill(store, slot, answer.ids[: answer.prompt], drafter.layers)
        drafter.start(slot)
        drafter.observe(slot, answer.ids[: at[slot] + 1], _row(out.features, 0))
    while running := [s for s, a in enumerate(answers) if at[s] + STRIDE < len(a.ids)]:
        texts = [a.ids[: at[slot] + 1] for slot, a in enumerate(answers)]
        depths = [drafter.shape.depth if s in running else 0 for s in range(len(answers))]
        trees = drafter.propose(texts, depths, sampler)
        joined = [
            _beside(tree, a.ids[at[slot] + 1 : at[slot] + STRIDE]) if slot in running else tree
            for slot, (tree, a) in enumerate(zip(trees, answers, strict=True))
        ]
        out = target.verify(store, [text[-1] for text in texts], joined, drafter.layers)
        paths: list[list[int]] = [[] for _ in answers]
        for slot in running:
            drafted = len(trees[slot])
            history = History(texts[slot], capacity)
            yield kept(slot, trees[slot], out.logits[slot, : drafted + 1], history)
            paths[slot] = [0, *range(drafted + 1, drafted + STRIDE)]
        store.commit(paths)
        for slot in running:
            at[slot] += STRIDE
            features = None if out.features is None else out.features[slot, paths[slot]]
            drafter.observe(slot, answers[slot].ids[: at[slot] + 1], features)
            sampler.forget(slot, at[slot] + 1)


def _row(features: Tensor | None, row: int) -> Tensor | None:
    return None if features is None else features[row]


def _beside(tree: Tree, branch: Sequence[int]) -> Tree:
    """A tree, and a branch from the root behind its nodes."""
    parents = [-1, *range(len(tree), len(tree) + len(branch) - 1)]
    return Tree([*tree.tokens, *branch], [*tree.parents, *parents[: len(branch)]])


def _mean(values: Sequence[float]) -> tuple[float, float]:
    """Mean and its standard error."""
    column = torch.tensor(values, dtype=torch.float64)
    return float(column.mean()), float(column.std() / len(column) ** 0.5)


if __name__ == "__main__":
    main()
