"""Simulated figures: rounds walked by hand, censoring, names, and their identities."""

from __future__ import annotations

from math import prod

import pytest
import torch

from drafthead.inference.metrics import walk_rounds
from drafthead.train.heldout import Drafts, summarise, walk


def make_drafts(
    match: list[list[int]],
    follow: list[list[int]] | None = None,
    known: list[list[int]] | None = None,
) -> Drafts:
    """One row: (T, K) tables of 0 and 1; by default all is known, and a match follows the text."""
    table = torch.tensor([match], dtype=torch.bool)
    return Drafts(
        known=torch.ones_like(table) if known is None else torch.tensor([known], dtype=torch.bool),
        match=table,
        follow=table if follow is None else torch.tensor([follow], dtype=torch.bool),
    )


def sums_of(drafts: Drafts) -> torch.Tensor:
    counts = walk(drafts)
    rest = torch.tensor([[1.0, 0.5, 4.0]] * len(counts), dtype=torch.float64)
    return torch.cat([counts, rest], dim=1)


def test_only_tokens_before_the_first_rejection_count() -> None:
    """F61: vectors 1010, 1111, 0000 in three rounds: survival 2/3, 1/3, 1/3, 1/3."""
    skipped = [0, 0, 0, 0]
    match = [[1, 0, 1, 0], skipped, [1, 1, 1, 1], skipped, skipped, skipped, skipped, [0] * 4]
    result = summarise(sums_of(make_drafts(match)))
    assert result.rounds == 3
    assert result.simulated_survival == pytest.approx((2 / 3, 1 / 3, 1 / 3, 1 / 3))
    assert result.simulated_tau == pytest.approx(1 + 5 / 3)


def test_oracle_and_always_wrong() -> None:
    perfect = summarise(sums_of(make_drafts([[1, 1, 1]] * 12)))
    assert perfect.simulated_tau == 4.0
    assert perfect.rounds == 3
    useless = summarise(sums_of(make_drafts([[0, 0, 0]] * 12)))
    assert useless.simulated_tau == 1.0
    assert useless.rounds == 12


def test_a_round_that_the_text_leaves_or_that_ends_with_the_answer_is_censored() -> None:
    # Slot 0: the first draft is accepted but the text goes another way. Slot 2: the answer ends.
    match = [[1, 0], [0, 0], [1, 0]]
    drafts = make_drafts(match, follow=[[0, 0], [0, 0], [1, 0]], known=[[1, 1], [1, 1], [1, 0]])
    assert walk(drafts).tolist() == [[2, 2], [0, 0]]


def test_walks_start_at_the_first_answer_token_and_jump_over_gaps() -> None:
    known = [[0, 0], [1, 1], [1, 0], [0, 0], [0, 0], [1, 0]]
    drafts = make_drafts([[1, 1]] * 6, known=known)
    assert walk(drafts).tolist() == [[2, 2], [1, 1]]


def test_the_product_of_conditionals_is_the_survival_and_names_say_simulated() -> None:
    """F62."""
    table = torch.rand(40, 3, generator=torch.Generator().manual_seed(0)) < 0.6
    result = summarise(sums_of(make_drafts(table.int().tolist())))
    for depth in range(1, 4):
        product = prod(result.simulated_conditional[:depth])
        assert result.simulated_survival[depth - 1] == pytest.approx(product, abs=1e-12)
    assert all(name.startswith("simulated_") or name == "rounds" for name in result.flat())
    assert not any("accept" in name for name in result.flat())


def test_on_the_targets_own_text_rounds_are_those_of_the_one_definition() -> None:
    """A draft that is the target's choice is then the token of the text, too."""
    table = torch.rand(60, 3, generator=torch.Generator().manual_seed(1)) < 0.7
    table[-4:] = False  # no round reaches the end of the text
    counts = walk(make_drafts(table.int().tolist()))
    accepted = walk_rounds(table.numpy(), 0, len(table))
    assert counts[0, 0] == len(accepted)
    assert counts[:, 1].tolist() == [sum(a > depth for a in accepted) for depth in range(3)]


def test_nothing_supervised_is_refused() -> None:
    with pytest.raises(ValueError, match=r"data\.heldout"):
        summarise(torch.zeros(2, 5, dtype=torch.float64))
