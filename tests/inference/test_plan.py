"""What a shape is said to come to, held against decoding with it; and the best static tree."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from drafts import endless, prompt_of
from ladder import ladder_head

from drafthead.heads.base import DraftHead
from drafthead.inference.costs import Costs
from drafthead.inference.decoder import decode
from drafthead.inference.governor import Governor
from drafthead.inference.grow import HeadDrafter
from drafthead.inference.plan import best_static, forecast, priced, shapes
from drafthead.inference.record import record, sampler_of
from drafthead.inference.sibling import Sibling
from drafthead.inference.survey import Survey
from drafthead.inference.target import Target
from drafthead.inference.tree import OFF, Static, parse_shape

PROMPTS = [prompt_of(6), prompt_of(11, 1)]
TOKENS = 20
COSTS = Costs(
    tokens=(1, 3, 9, 33),
    seconds=(1.0, 1.05, 1.6, 6.0),
    extend=0.05,
    step=0.03,
    widths=(1, 4),
    steps=(0.03, 0.05),
)
SHAPES = (
    "off",
    "chain:1",
    "chain:4",
    "stop:6:0.3",
    "static:0,1,2,0.0,0.1,1.0,0.0.0,0.0.1,1.0.0",
    "tree:4x3:7",
    "tree:6x2:9",
    "tree:3x8:40",
    "auto:5x4:16",
    "auto:6x2:12",
)


@pytest.fixture(scope="module")
def sibling(target64: Target) -> Sibling:
    """The target with a changed layer: often right, not always."""
    model = endless().double()
    with torch.no_grad():
        model.model.layers[3].mlp.down_proj.weight.mul_(0.5)
    return Sibling.of(model, None, target64, check=False)


@pytest.fixture(scope="module")
def survey(target64: Target, sibling: Sibling) -> Survey:
    return Survey(record(target64, sibling, PROMPTS, max_new_tokens=TOKENS))


class Billed:
    """Decodes and adds up what each forward and draft step really asked for costs."""

    def __init__(self, target: Target, head: DraftHead, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seconds = 0.0
        self._watch(monkeypatch, head, "extend", lambda *given: COSTS.extend)
        self._watch(monkeypatch, head, "expand", lambda s, ids, p: COSTS.going_on(ids.shape[1]))
        self._watch(
            monkeypatch,
            target,
            "verify",
            lambda s, r, trees, *_: COSTS.verify(1 + max(map(len, trees))),
        )

    def _watch(self, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, price: Any) -> None:
        inner = getattr(owner, name)

        def watched(*given: Any) -> Any:
            self.seconds += price(*given)
            return inner(*given)

        monkeypatch.setattr(owner, name, watched)


def check(
    target: Target,
    head: DraftHead,
    survey: Survey,
    shape: str,
    batch: int,
    monkeypatch: pytest.MonkeyPatch,
    temperature: float = 0.0,
) -> None:
    """Tokens, rounds and seconds of a forecast are those of decoding."""
    monkeypatch.setattr(Governor, "resting", lambda self: False)
    told = forecast(survey, parse_shape(shape), COSTS, batch)
    billed = Billed(target, head, monkeypatch)
    rounds = tokens = 0
    for first in range(0, len(PROMPTS), batch):
        some = PROMPTS[first : first + batch]
        drafter = HeadDrafter(head, parse_shape(shape), priced(COSTS, parse_shape(shape)))
        sampler = sampler_of(target, range(first, first + batch), temperature, 0)
        rows, _ = decode(target, some, sampler, drafter, max_new_tokens=TOKENS)
        rounds += sum(len(row.rounds) for row in rows)
        tokens += sum(r.emitted for row in rows for r in row.rounds)
    assert (told.rounds, told.tokens) == (rounds, tokens)
    assert told.seconds == pytest.approx(billed.seconds)
    assert told.tau == tokens / rounds


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_forecast_is_what_decoding_comes_to(
    shape: str,
    batch: int,
    target64: Target,
    sibling: Sibling,
    survey: Survey,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    check(target64, sibling, survey, shape, batch, monkeypatch)


@pytest.mark.parametrize("shape", ["chain:3", "static:0,1,0.0", "tree:3x3:6"])
def test_a_forecast_of_sampled_text_is_what_decoding_comes_to(
    shape: str, target64: Target, sibling: Sibling, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Coupled: the text is the same whatever drafts it, at a temperature, too."""
    drawn = record(target64, sibling, PROMPTS, max_new_tokens=TOKENS, temperature=0.8)
    check(target64, sibling, Survey(drawn), shape, 2, monkeypatch, temperature=0.8)


@pytest.mark.parametrize("shape", ["chain:4", "stop:4:0.3", "tree:4x3:8", "auto:4x2:8"])
def test_a_forecast_of_a_head_that_says_how_sure_it_is(
    shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = endless(num_layers=8).double()
    target, head = Target(model), ladder_head("block", model)
    found = record(target, head, PROMPTS, max_new_tokens=TOKENS)
    assert found.tells
    check(target, head, Survey(found), shape, 1, monkeypatch)


def test_every_shape_tried_can_be_forecast_and_more_is_accepted_where_all_is_drafted(
    survey: Survey,
) -> None:
    told = {str(s): forecast(survey, s, COSTS) for s in shapes(survey, most=16)}
    assert all(each.tokens == told["off"].tokens for each in told.values())
    assert told["off"].tau == 1
    chains = [told[f"chain:{depth}"].tau for depth in range(1, 9)]
    assert chains == sorted(chains)
    assert told["tree:8x8:16"].tau > told["tree:8x8:8"].tau >= 1
    assert max(shape.nodes for shape in shapes(survey, most=16)) == 16
    assert {type(shape) for shape in shapes(survey)} >= {Static}
    assert shapes(survey)[0] == OFF


# Rates and the static tree they make


def test_rates_are_how_often_each_rank_is_right(target64: Target, sibling: Sibling) -> None:
    """Counted anew, from plain forwards along the texts."""
    rows, _ = decode(target64, PROMPTS, sampler_of(target64, [0, 1], 0, 0), max_new_tokens=TOKENS)
    counts = torch.zeros(2, 8)
    reached = [0, 0]
    for row in rows:
        ids = torch.tensor([row.ids])
        ranks = (-sibling.lm(ids).logits[0]).argsort(dim=-1)
        for at in range(row.prompt + 1, len(row.ids) - 1):  # the last place drafts nothing
            for depth in (0, 1):
                if at + depth >= len(row.ids) - 1 and depth:
                    continue
                right = ranks[at + depth - 1].tolist().index(row.ids[at + depth])
                reached[depth] += 1
                if right < 8:
                    counts[depth, right] += 1
                if right >= 8:
                    break
    survey = Survey(record(target64, sibling, PROMPTS, max_new_tokens=TOKENS))
    first = counts[0] / reached[0]
    assert survey.rates()[0][0] == pytest.approx(float(first[0]))
    falling = torch.cummin(first, dim=0).values.tolist()
    assert survey.rates()[0] == pytest.approx(falling)
    assert survey.rates()[1][0] == pytest.approx(float(counts[1, 0] / reached[1]))


def value_of(paths: Sequence[tuple[int, ...]], rates: Sequence[Sequence[float]]) -> float:
    total = 0.0
    for path in paths:
        product = 1.0
        for depth, rank in enumerate(path):
            product *= rates[depth][rank]
        total += product
    return total


def trees(nodes: int, depth: int, ranks: int) -> set[frozenset[tuple[int, ...]]]:
    """Every tree of so many nodes whose nodes have their parents and better siblings."""
    found = {frozenset[tuple[int, ...]]()}
    for _ in range(nodes):
        larger = set()
        for tree in found:
            for above in [(), *tree]:
                free = next((r for r in range(ranks) if (*above, r) not in tree), None)
                if len(above) < depth and free is not None:
                    larger.add(tree | {(*above, free)})
        found = larger
    return found


@pytest.mark.parametrize("seed", range(6))
def test_the_static_tree_is_the_best_of_all_trees_of_its_size(seed: int) -> None:
    rng = random.Random(seed)
    depth, ranks = 3, 3
    rates = [sorted((rng.random() / 2 for _ in range(ranks)), reverse=True) for _ in range(depth)]
    for nodes in range(1, 6):
        best = max(value_of(sorted(tree), rates) for tree in trees(nodes, depth, ranks))
        found = best_static(rates, nodes)
        assert found.nodes == nodes
        assert value_of(found.paths, rates) == pytest.approx(best)


def test_no_node_without_a_chance_is_in_a_static_tree() -> None:
    assert best_static([[0.5, 0.0], [0.4, 0.0]], 9) == Static.chain(2)
    assert best_static([], 3) == OFF
    assert best_static([[0.0, 0.0]], 3) == OFF


def test_costs_have_the_draft_step_of_the_shape() -> None:
    assert priced(COSTS, parse_shape("tree:3x4:8")).step == pytest.approx(0.05)
    assert priced(COSTS, parse_shape("tree:3x2:6")).step == pytest.approx(0.03 + 0.02 / 3)
    static = parse_shape("static:0,1,2,3,0.0,1.0,2.0,3.0,0.0.0")
    assert priced(COSTS, static).step == pytest.approx((0.05 + 0.03) / 2)
    assert priced(COSTS, OFF).step == 0
    widths = list(itertools.pairwise(COSTS.going_on(w) for w in range(1, 9)))
    assert all(a <= b for a, b in widths)
