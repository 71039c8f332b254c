"""Draft heads and their contract with a target. Imports no sibling package."""

from drafthead.heads import eagle3  # noqa: F401  (built-in heads register themselves)
from drafthead.heads.load import load_head

__all__ = ["load_head"]
