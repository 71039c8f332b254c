"""Rests where drafts do not pay: the estimate, what it goes by, and that no text changes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from drafts import ids_of, keyed, own_greedy, prompt_of, rows_of_run
from enumeration import Fork, Rule, Text, chain_of, distance, grown, outcomes, plain, table
from torch import Tensor

from drafthead.inference import governor as module
from drafthead.inference.costs import Costs
from drafthead.inference.governor import LONGEST, REST, Governor
from drafthead.inference.grow import HeadDrafter
from drafthead.inference.target import Target
from drafthead.inference.tree import Tree, chain, parse_shape
from drafthead.inference.verify import block, reject

COSTS = Costs(tokens=(1, 4), seconds=(1.0, 1.3), extend=0.1, step=0.1)
"""A chain of three takes 1.6 plain rounds."""


def played(governor: Governor, accepted: Sequence[int]) -> list[bool]:
    """Rounds in which so many of a chain of three are accepted, if there is one; which had one."""
    text, drafted = [0], []
    for kept in accepted:
        drafted.append(not governor.resting())
        if drafted[-1]:
            governor.drafted({0: chain([1, 1, 1])}, [len(text)], steps=2)
            text += [1] * kept
        text.append(2)
        if drafted[-1]:
            governor.observe(0, text)
    return drafted


def test_drafts_that_earn_less_than_plain_rest_ever_longer_and_only_probe() -> None:
    drafted = played(Governor(COSTS), [0] * 600)
    first = drafted.index(False)
    assert first < 16, "it does not take long"
    rests = [len(rest) for rest in "".join(" x"[d] for d in drafted[first:]).split("x") if rest]
    assert rests[:4] == [REST, 2 * REST, 4 * REST, LONGEST]
    assert sum(drafted[first:]) < 25


def test_drafts_that_pay_never_rest_though_single_ones_fail() -> None:
    """Three rounds in four accept two, which earns 3 / 1.6; the others earn 1 / 1.6."""
    assert all(played(Governor(COSTS), [2, 2, 0, 2] * 100))


def test_drafts_that_pay_alone_rest_in_a_batch_whose_forwards_are_full() -> None:
    """2.25 tokens a round either way, for 1.6 plain rounds or for 3.6."""
    full = Costs(COSTS.tokens, (1.0, 3.3), COSTS.extend, COSTS.step)
    accepted = [2, 0, 1, 2] * 30
    assert all(played(Governor(COSTS), accepted))
    assert sum(played(Governor(full), accepted)) < len(accepted) / 4


def test_where_a_text_turns_predictable_drafts_come_back_and_stay() -> None:
    governor = Governor(COSTS)
    played(governor, [0] * 200)
    drafted = played(governor, [3] * 200)
    back = drafted.index(True)
    assert back <= LONGEST
    assert all(drafted[back:])
    assert governor.earning > 1.5


def test_the_estimate_is_of_tokens_a_row_over_measured_seconds() -> None:
    """Literal: rows accept 2, 0 and 1 of up to 3; 2 tokens a row in 1.6 s, 1.25 times plain."""
    governor = Governor(COSTS)
    trees = {0: chain([1, 1, 1]), 1: chain([5]), 4: Tree([7, 8], [-1, -1])}
    before = governor.earning
    assert not governor.resting()
    governor.drafted(trees, [2, 3, 9, 9, 4], steps=2)
    for row, text in ((0, [0, 0, 1, 1, 9]), (1, [0, 0, 0, 6]), (4, [0, 0, 0, 0, 8, 1])):
        governor.observe(row, text)
    governor.resting()
    weight = module.TRUST + 3
    assert governor.earning == pytest.approx(before + (1.25 - before) * 3 / weight)


def test_rows_that_ended_began_anew_or_were_drafted_for_by_others_are_not_counted() -> None:
    governor = Governor(COSTS)
    governor.drafted({0: chain([1]), 1: chain([1])}, [1, 1], steps=0)
    governor.start(0)
    governor.observe(0, [4, 4, 4])
    before = governor.earning
    governor.resting()
    assert governor.earning == before, "no row is known"
    governor.drafted({0: chain([1, 2])}, [1], steps=1)
    governor.observe(0, [4, 1, 3, 3, 3, 3])  # one was ours
    governor.resting()
    lasted = COSTS.drafting(1) + COSTS.verify(3)
    earned = before + (2 / lasted - before) / (module.TRUST + 1)
    assert governor.earning == pytest.approx(earned)


# In decoding


class Knowing:
    """A head that drafts a known text rightly from one place on, and is always sure of itself."""

    max_depth, goes_on, drafter, positions = None, True, "knowing", None

    def __init__(self, text: Sequence[int], right_from: int, V: int = 512) -> None:
        self.text, self.right_from, self.draft_ids = list(text), right_from, torch.arange(V)
        self.contract = SimpleNamespace(layers=(), vocab_size=V)
        self.asked: list[int] = []
        """Lengths of the text at which it was asked for a draft."""

    def open(self, batch: int, capacity: int) -> SimpleNamespace:
        self.length = self.deep = 0
        return SimpleNamespace(start=lambda row: None)

    def extend(self, state: Any, features: Tensor, next_ids: Tensor, counts: Tensor) -> Tensor:
        self.length, self.deep = self.length + int(counts), 0
        self.asked.append(self.length)
        return self._logits()[:, 0]

    def expand(self, state: Any, ids: Tensor, parents: Tensor) -> Tensor:
        self.deep += 1
        return self._logits().expand(1, ids.shape[1], -1)

    def confidence(self, state: Any) -> None:
        return None

    def _logits(self) -> Tensor:
        at = min(self.length + self.deep, len(self.text) - 1)
        token = self.text[at] if at >= self.right_from else (self.text[at] + 1) % 512
        logits = torch.zeros(1, 1, 512)
        logits[..., token] = 50.0
        return logits


@pytest.mark.parametrize("shape", ["chain:3", "auto:3x2:6"])
def test_a_head_that_is_sure_and_wrong_rests_until_the_text_turns_predictable(
    target64: Target, shape: str
) -> None:
    prompt = prompt_of(9)
    text = own_greedy(target64, prompt, 160)
    turn = 110
    head = Knowing(text, right_from=turn)
    drafter = HeadDrafter(head, parse_shape(shape), COSTS)  # type: ignore[arg-type]
    (row,) = rows_of_run(target64, [prompt], drafter, 160)
    assert row.ids == text, "whatever rests"
    asked = [at for at in head.asked if at < turn]
    assert 5 < len(asked) < (turn - 9) / 3
    back = next(n for n, r in enumerate(row.rounds) if r.accepted == 3)
    assert sum(r.emitted for r in row.rounds[:back]) < turn - 9 + LONGEST
    assert all(r.accepted == min(3, r.drafted) > 0 for r in row.rounds[back:-1])


def test_seeded_text_is_the_same_with_rests_and_without(target64: Target) -> None:
    prompt = prompt_of(7)
    alone = ids_of(target64, [prompt], keyed(target64), None, 40)
    head = Knowing(alone[0], right_from=30)
    drafter = HeadDrafter(head, parse_shape("chain:3"), COSTS)  # type: ignore[arg-type]
    assert ids_of(target64, [prompt], keyed(target64), drafter, 40) == alone
    assert len(head.asked) < 30


# Exactness of ratio rules


V, STEPS = 3, 4
P, Q = table(V, 1), table(V, 2)
DRAFTS = grown(chain_of(2), {"q": Q})


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goes by the last round alone, and rests for one."""
    for name in ("TRUST", "WINDOW", "REST", "LONGEST"):
        monkeypatch.setattr(module, name, 1)


def law(rule: Rule, seen: set[str], anticipating: bool = False) -> dict[Text, float]:
    """The exact law of the first tokens, with a governor over all rounds.

    anticipating: a draft is left out for what was drawn, as no governor may.
    """

    def run(fork: Fork) -> Text:
        governor, text = Governor(COSTS), ()
        while len(text) < STEPS:
            fork.asked = set()  # every round draws afresh
            resting, tree = governor.resting(), Tree()
            if not resting:
                tree = DRAFTS(text, fork)
                if anticipating and tree.tokens[0] == 0:
                    tree = Tree()
                governor.drafted({0: tree}, [len(text)], steps=1)
            seen.add("rest" if resting else "draft")

            def law_after(path: Sequence[int], before: Text = text, tree: Tree = tree) -> Tensor:
                return P((*before, *(tree.tokens[node] for node in path)))

            path, token = rule(tree, law_after, fork)
            text = (*text, *(tree.tokens[node] for node in path), token)
            governor.observe(0, text)
        return text[:STEPS]

    laws: dict[Text, float] = defaultdict(float)
    for probability, text in outcomes(run):
        laws[text] += probability
    return laws


@pytest.mark.parametrize("rule", [reject, block], ids=["token", "block"])
def test_ratio_rules_keep_the_targets_law_through_rests(rule: Rule, quick: None) -> None:
    seen: set[str] = set()
    assert distance(law(rule, seen), plain(P, V, STEPS)) < 1e-10
    assert seen == {"rest", "draft"}


def test_control_a_rest_because_of_what_was_drawn_is_seen(quick: None) -> None:
    assert distance(law(reject, set(), anticipating=True), plain(P, V, STEPS)) > 0.03
