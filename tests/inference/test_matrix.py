"""A pairwise slice of the matrix; `make test-matrix` runs all of it."""

from __future__ import annotations

import itertools

import pytest
from cells import DRAFTERS, SAMPLED, Cell, cells, has_head, pairwise, run, run_sampled
from families import EAGER_ONLY

from drafthead.heads.contract import ContractError


@pytest.mark.parametrize("cell", pairwise(), ids=str)
def test_f39_greedy_ids_are_transformers_own(cell: Cell) -> None:
    if cell.drafter == "head" and not has_head(cell.family):
        with pytest.raises(ContractError, match="bias"):
            run(cell)
        return
    run(cell)


@pytest.mark.parametrize("setting", SAMPLED)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_coupled_ids_are_the_same_with_any_drafter_or_none(drafter: str, setting: str) -> None:
    """On the family with alternating windows and soft caps."""
    run_sampled("gemma2", drafter, setting)


def test_every_pair_of_settings_is_in_the_slice() -> None:
    def pairs(chosen: list[Cell]) -> set[tuple[tuple[str, str], tuple[str, str]]]:
        return {pair for cell in chosen for pair in itertools.combinations(vars(cell).items(), 2)}

    missing = pairs(cells()) - pairs(pairwise())
    assert not missing
    assert all(cell.attention == "eager" for cell in cells() if cell.family in EAGER_ONLY)
