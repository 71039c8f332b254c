"""The decode loop: draft, verify, accept, commit; plain decoding is this loop without drafts.

A round, worked: the row is `The cat sat`, whose last token `sat` (the root) the target has not run
yet. The drafter proposes a tree below it: `on` with children `the` and `a`, and `down` beside
`on`. One target forward over [sat, on, down, the, a] gives the target's own token after each. After
`sat` it says `on`: kept. After `on` it says `a`: kept. After `a` it says `mat`, which was not
drafted, so the round ends and `mat` is emitted too: three tokens for one forward, `on a mat`. The
store keeps the slots of `sat on a` and drops `down the`; `mat` is the next root.

Nothing drafted can change the text: each emitted token is the target's own choice given the tokens
before it (`verify`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from drafthead.inference.drafters import Drafter
from drafthead.inference.metrics import Round
from drafthead.inference.sampling import Sampler
from drafthead.inference.target import Target
from drafthead.inference.tree import Tree

Stop = Callable[[Sequence[int]], bool]
"""Whether a row, whose last token was just emitted, ends with it."""


@dataclass
class Row:
    """One sequence being decoded; `ids` grows, its last token being the root of the next round."""

    ids: list[int]
    prompt: int
    limit: int
    """Most new tokens."""
    stop: Stop
    done: bool = False
    rounds: list[Round] = field(default_factory=list)
    logits: list[Tensor] | None = None
    """If a list: the target's raw logits (V,) behind each emitted token."""

    @property
    def new_ids(self) -> list[int]:
        return self.ids[self.prompt :]

    @property
    def left(self) -> int:
        return self.limit - (len(self.ids) - self.prompt)

    def emit(self, tokens: Sequence[int]) -> int:
        """Append tokens in order up to the first stop or the limit; how many were emitted."""
        for count, token in enumerate(tokens, start=1):
            self.ids.append(token)
            if self.left <= 0 or self.stop(self.ids):
                self.done = True
                return count
        return len(tokens)


def stop_at(eos: Sequence[int]) -> Stop:
    """Stop at any of these ids."""
    ends = frozenset(eos)
    return lambda ids: ids[-1] in ends


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
        self.target = target
        self.sampler = sampler
        self.drafter = drafter
        self.layers = drafter.layers if drafter else ()
        room = capacity + 1 + (drafter.nodes if drafter else 0)
        self.store = target.open(batch, room)
        self.rows: list[Row | None] = [None] * batch
        self.seconds = {"prefill": 0.0, "draft": 0.0, "verify": 0.0, "commit": 0.0}
        if drafter:
            drafter.open(batch, room)

    def start(self, slot: int, row: Row) -> None:
        """Prefill a row into a slot and emit its first token, which takes no round."""
        since = time.perf_counter()
        out = self.target.prefill(self.store, slot, row.ids, self.layers)
        _, token = self.sampler.accept(slot, Tree(), out.logits[0], len(row.ids))
        self.rows[slot] = row
        if row.logits is not None:
            row.logits.append(out.logits[0, 0])
        row.emit([token])
        if self.drafter:
            self.drafter.start(slot)
            self.drafter.observe(slot, row.ids, None if out.features is None else out.features[0])
        self.seconds["prefill"] += time.perf_counter() - since

    def round(self) -> None:
        """One verifying forward for all rows that are not done."""
        marks = [time.perf_counter()]
        trees = self._propose()
        marks.append(time.perf_counter())
        roots = [row.ids[-1] if row else 0 for row in self.rows]
        out = self.target.verify(self.store, roots, trees, self.layers)
        marks.append(time.perf_counter())
        paths: list[list[int]] = []
        for slot, (row, tree) in enumerate(zip(self.rows, trees, strict=True)):
            if row is None or row.done:
                paths.append([])
                continue
            path, token = self.sampler.accept(slot, tree, out.logits[slot], len(row.ids))
            kept = [0, *(node + 1 for node in path)]
            emitted = row.emit([*(tree.tokens[node] for node in path), token])
            row.rounds.append(Round.of(tree, len(path), emitted))
            if row.logits is not None:
                row.logits.extend(out.logits[slot, kept[:emitted]])
            self.sampler.forget(slot, len(row.ids))
            if self.drafter and not row.done:
                features = None if out.features is None else out.features[slot, kept]
                self.drafter.observe(slot, row.ids, features)
            paths.append(kept)
        self.store.commit(paths)
        marks.append(time.perf_counter())
        for part, begin, end in zip(("draft", "verify", "commit"), marks, marks[1:], strict=False):
            self.seconds[part] += end - begin

    def _propose(self) -> list[Tree]:
        """A tree per row, no deeper than it can use: the target adds one token itself."""
        depths = [0 if row is None or row.done else row.left - 1 for row in self.rows]
        if self.drafter is None or max(depths) < 1:
            return [Tree()] * len(self.rows)
        return self.drafter.propose(
            [row.ids if row else [] for row in self.rows], depths, self.sampler
        )

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

    Raises ValueError for an empty prompt or one that does not fit the target's context.
    """
    rows = [Row(list(ids), len(ids), max_new_tokens, stop_at(eos)) for ids in prompts]
    for ids in prompts:
        check_prompt(target, ids, max_new_tokens)
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
