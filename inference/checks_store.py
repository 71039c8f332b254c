"""After rounds with kept and refused drafts, what is remembered is what a fresh prefill makes.

The target's keys and values are compared slot by slot; a head's memory, which every head keeps in
its own way, by the draft that it makes next.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from drafthead.inference.checks_subject import DEEPEST, Check, Subject, opened
from drafthead.inference.decoder import Decoder
from drafthead.inference.drafters import Drafter
from drafthead.inference.grow import HeadDrafter
from drafthead.inference.rounding import Rounding, Truth, relative_change
from drafthead.inference.row import Row, stop_at
from drafthead.inference.sampling import Sampler
from drafthead.inference.store import Store
from drafthead.inference.target import Target

ROUNDS = 4
PROMPTS = 2
MARGIN = 10
"""A slot may differ by this many times what rounding was measured to do: still far below what a
slot of another token differs by, which is about as large as the numbers themselves."""


def check_store(
    subject: Subject,
    texts: Sequence[Truth],
    measured: Rounding,
    drafters: Mapping[str, Drafter],
    *,
    target: Target | None = None,
    store: type[Store] = Store,
    name: str = "store after rounds",
) -> Check:
    """Compare after every one of some rounds; `target` and `store` are those of the run."""
    worst, kept, refused, stale = 0.0, 0, 0, []
    texts = texts[:PROMPTS]
    for who, drafter in drafters.items():
        rows = [Row(list(t.prompt), (DEEPEST + 1) * ROUNDS + 2, stop_at(())) for t in texts]
        decoder = opened(target or subject.target, Sampler(), drafter, rows, store)
        for _ in range(ROUNDS):
            decoder.round()
            worst = max(
                worst, *(_change(subject.target, decoder, slot) for slot in range(len(rows)))
            )
        rounds = [r for row in rows for r in row.rounds]
        kept += sum(r.accepted for r in rounds)
        refused += sum(r.drafted - r.accepted for r in rounds)
        if isinstance(drafter, HeadDrafter) and not _remembers(subject.target, drafter, rows):
            stale.append(who)
    bound = MARGIN * measured.states
    figure = f"largest change {worst:.2g}, bound {bound:.2g}"
    detail = (
        f"Keys and values of every committed slot after each of {ROUNDS} rounds of {len(texts)} "
        f"rows, for {', '.join(drafters)}, against a fresh prefill of the text in "
        f"{subject.dtype}, as a share of the layer's largest; {kept} drafted tokens were kept, "
        f"{refused} refused. "
        f"The target's own forwards differ by {measured.states:.2g}; {MARGIN} times that is "
        "allowed."
    )
    if any(isinstance(drafter, HeadDrafter) for drafter in drafters.values()):
        detail += " The head's next draft is that of a head that has just read the text"
        detail += f", but not for {', '.join(stale)}." if stale else "."
    return Check(name, worst <= bound and not stale, figure, detail)


def _change(target: Target, decoder: Decoder, slot: int) -> float:
    """The largest relative change of a row's keys and values against a fresh prefill."""
    row = decoder.rows[slot]
    assert row is not None
    ids, length = row.ids[:-1], decoder.store.lengths[slot]
    if length != len(ids):
        return math.inf
    fresh = target.open(1, len(ids))
    target.prefill(fresh, 0, ids)
    worst = 0.0
    for ours, own in zip(decoder.store.kept, fresh.kept, strict=True):
        for live, true in zip(ours.buffers, own.buffers, strict=True):
            worst = max(worst, relative_change(live[slot, :, :length], true[0]))
    return worst


def _remembers(target: Target, worn: HeadDrafter, rows: Sequence[Row]) -> bool:
    """Whether the head's next draft is that of one that reads the text as a whole."""
    fresh = HeadDrafter(worn.head, worn.shape)
    room = max(len(row.ids) for row in rows) + 1 + fresh.nodes
    fresh.open(len(rows), room)
    for slot, row in enumerate(rows):
        out = target.prefill(target.open(1, len(row.ids)), 0, row.ids[:-1], worn.layers)
        fresh.start(slot)
        fresh.observe(slot, row.ids, None if out.features is None else out.features[0])
    ids, depths = [row.ids for row in rows], [fresh.shape.depth] * len(rows)
    pairs = zip(
        worn.propose(ids, depths, Sampler()), fresh.propose(ids, depths, Sampler()), strict=True
    )
    return all((a.tokens, a.parents) == (b.tokens, b.parents) for a, b in pairs)
