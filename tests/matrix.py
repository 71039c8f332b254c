"""All cells of the matrix, one test for each: `make test-matrix`. See `cells`."""

from __future__ import annotations

import pytest
from cells import DRAFTERS, SAMPLED, Cell, cells, has_head, run, run_sampled
from families import FAMILIES


def able(family: str, drafter: str) -> bool:
    """Whether there is such a drafter: no head borrows output rows with a bias."""
    return drafter != "head" or has_head(family)


@pytest.mark.parametrize("cell", [c for c in cells() if able(c.family, c.drafter)], ids=str)
def test_greedy_ids_are_transformers_own(cell: Cell) -> None:
    run(cell)


@pytest.mark.parametrize("setting", SAMPLED)
@pytest.mark.parametrize(
    ("family", "drafter"), [(f, d) for f in FAMILIES for d in DRAFTERS if able(f, d)]
)
def test_coupled_ids_are_the_same_with_any_drafter_or_none(
    family: str, drafter: str, setting: str
) -> None:
    run_sampled(family, drafter, setting)
