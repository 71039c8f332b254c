"""Draft heads and their contract with a target. Imports no sibling package."""

from drafthead.heads import (  # noqa: F401  (built-in heads register themselves)
    block,
    eagle,
    eagle3,
    hydra,
    medusa,
    medusa2,
)
from drafthead.heads.load import load_head

__all__ = ["load_head"]
