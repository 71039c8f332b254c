"""The decode loop: draft, verify, accept, commit; plain decoding is this loop without drafts.

A round, worked: the row is `The cat sat`, whose last token `sat` (the root) the target has not run
yet. The drafter proposes a tree below it: `on` with children `the` and `a`, and `down` beside
`on`. One target forward over [sat, on, down, the, a] gives the target's own token after each. After
`sat` it says `on`: kept. After `on` it says `a`: kept. After `a` it says `mat`, which was not
drafted, so the round ends and `mat` is emitted too: three tokens for one forward, `on a mat`. The
store keeps the slots of `sat on a` and drops `down the`; `mat` is the next root.

Greedy or coupled, nothing drafted can change the text: each emitted token is the target's own
choice given the tokens before it. Ratio rules keep the law of that choice instead (`verify`).

Near the end a draft gets shorter, as the text needs one token of the target's own; a row that is
done stays in the batch without a draft. The time of a round grows with the text in attention only.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from drafthead.inference.drafters import Drafter
from drafthead.inference.metrics import Round
from drafthead.inference.row import Row, stop_at
from drafthead.inference.sampling import Sampler, Verdict
from drafthead.inference.target import Output, Target
from drafthead.inference.tree import Tree

PARTS = ("draft", "verify", "accept", "commit")
"""Of a round; `observe`, in which drafters take what was committed, counts as draft."""


class Decoder:
    """Rows that share verify passes; each row is decoded as if it were alone."""

    def __init__(
        self,
        target: Target,
        sampler: Sampler,
        drafter: Drafter | None = None,
        *,
        batch: int = 1,
        capacity: int,
    ) -> None:
        """`capacity`: most tokens of a row, prompt and new ones; room for draft nodes is added."""
        if sampler.noise is not None and len(sampler.noise) < batch:
            raise ValueError(f"the sampler has noise for {len(sampler.noise)} of {batch} rows")
        self.target = target
        self.sampler = sampler
        self.drafter = drafter
        self.layers = drafter.layers if drafter else ()
        room = capacity + 1 + (drafter.nodes if drafter else 0)
        self.store = target.open(batch, room)
        self.rows: list[Row | None] = [None] * batch
        self.seconds = dict.fromkeys(("prefill", *PARTS), 0.0)
        if drafter:
            drafter.open(batch, room)

    def start(self, slot: int, row: Row) -> None:
        """Prefill a row into a slot and emit its first token, which takes no round."""
        with self._timed("prefill"):
            out = self.target.prefill(self.store, slot, row.ids, self.layers)
            _, token = self.sampler.accept(slot, Tree(), out.logits[0], row.history)
            self.rows[slot] = row
            if row.logits is not None:
                row.logits.append(out.logits[0, 0])
            row.emit([token])
            # Also of what a run before this one left in the noise.
            self.sampler.forget(slot, len(row.ids))
            if self.drafter:
                features = None if out.features is None else out.features[0]
                self.drafter.start(slot)
                self.drafter.observe(slot, row.ids, features)

    def round(self) -> None:
        """One verifying forward for all rows that are not done."""
        trees = self._propose()
        out, verdicts = self._verify(trees)
        kept = {slot: [0, *(node + 1 for node in path)] for slot, (path, _) in verdicts.items()}
        with self._timed("commit"):
            self.store.commit([kept.get(slot, []) for slot in range(len(trees))])
            for slot, (path, token) in verdicts.items():
                self._emit(slot, trees[slot], path, token, out)
        with self._timed("draft"):
            for slot, indices in kept.items():
                self._observe(slot, indices, out)

    def _propose(self) -> list[Tree]:
        """A tree per row, no deeper than it can use: the target adds one token itself."""
        depths = [0 if row is None or row.done else row.left - 1 for row in self.rows]
        if self.drafter is None or max(depths) < 1:
            return [Tree()] * len(self.rows)
        with self._timed("draft"):
            ids = [row.ids if row else [] for row in self.rows]
            trees = self.drafter.propose(ids, depths, self.sampler)
        for tree, depth in zip(trees, depths, strict=True):
            self._check(tree, depth)
        return trees

    def _check(self, tree: Tree, depth: int) -> None:
        """Refuse a draft that breaks the drafter's promises, before it breaks the store."""
        assert self.drafter is not None
        if not len(tree):
            return
        if len(tree) > self.drafter.nodes or max(tree.depths) > depth:
            raise ValueError(
                f"drafter {self.drafter.name!r} proposed {len(tree)} nodes, {max(tree.depths)} "
                f"deep, where {self.drafter.nodes} nodes, {depth} deep, were the most"
            )
        if not 0 <= min(tree.tokens) <= max(tree.tokens) < self.target.vocab_size:
            raise ValueError(
                f"drafter {self.drafter.name!r} proposed token {max(tree.tokens)}, which is not in "
                f"the target's vocabulary of {self.target.vocab_size}"
            )

    def _verify(self, trees: Sequence[Tree]) -> tuple[Output, dict[int, Verdict]]:
        """The target's forward over roots and trees, and what it decides for each running row."""
        roots = [row.ids[-1] if row else 0 for row in self.rows]
        with self._timed("verify"):
            out = self.target.verify(self.store, roots, trees, self.layers)
        with self._timed("accept"):
            histories = {
                slot: row.history
                for slot, row in enumerate(self.rows)
                if row is not None and not row.done
            }
            return out, self.sampler.decide(histories, trees, out.logits)

    def _emit(self, slot: int, tree: Tree, path: Sequence[int], token: int, out: Output) -> None:
        row = self.rows[slot]
        assert row is not None
        emitted = row.emit([*(tree.tokens[node] for node in path), token])
        row.rounds.append(Round.of(tree, len(path), emitted))
        if row.logits is not None:
            row.logits.extend(out.logits[slot, [0, *(node + 1 for node in path)][:emitted]])
        self.sampler.forget(slot, len(row.ids))

    def _observe(self, slot: int, kept: Sequence[int], out: Output) -> None:
        row = self.rows[slot]
        assert row is not None
        if self.drafter and not row.done:
            features = None if out.features is None else out.features[slot, kept]
            self.drafter.observe(slot, row.ids, features)

    @contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        since = time.perf_counter()
        yield
        self.seconds[part] += time.perf_counter() - since

    @property
    def running(self) -> bool:
        return any(row is not None and not row.done for row in self.rows)


def decode(
    target: Target,
    prompts: Sequence[Sequence[int]],
    sampler: Sampler,
    drafter: Drafter | None = None,
    *,
    max_new_tokens: int,
    eos: Sequence[int] = (),
) -> tuple[list[Row], dict[str, float]]:
    """Decode prompts together; the finished rows, and seconds spent by part.

    Raises ValueError for no prompt, an empty one or one that does not fit the target's context.
    """
    if not prompts:
        raise ValueError("there are no prompts: give at least one")
    for ids in prompts:
        check_prompt(target, ids, max_new_tokens)
    rows = [Row(list(ids), max_new_tokens, stop_at(eos)) for ids in prompts]
    capacity = max(len(ids) for ids in prompts) + max_new_tokens
    decoder = Decoder(target, sampler, drafter, batch=len(rows), capacity=capacity)
    for slot, row in enumerate(rows):
        decoder.start(slot, row)
    while decoder.running:
        decoder.round()
    return rows, decoder.seconds


def check_prompt(target: Target, ids: Sequence[int], max_new_tokens: int) -> None:
    """Refuse what cannot be decoded, before any work."""
    if not ids:
        raise ValueError("the prompt has no tokens: give at least one (a BOS token will do)")
    if not 0 <= min(ids) <= max(ids) < target.vocab_size:
        raise ValueError(
            f"prompt ids {min(ids)}..{max(ids)} do not fit the target's vocabulary of "
            f"{target.vocab_size}: they are another tokenizer's"
        )
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens is {max_new_tokens}: ask for at least 1")
    if len(ids) + max_new_tokens > target.context:
        raise ValueError(
            f"prompt of {len(ids)} tokens + {max_new_tokens} new ones exceed the target's context "
            f"of {target.context}: shorten the prompt or lower max_new_tokens"
        )
