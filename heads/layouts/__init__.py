"""Checkpoint layouts of serving engines and other trainers, read and written; one file a layout."""

from __future__ import annotations

from drafthead.heads.layouts import (  # noqa: F401  (layouts register themselves)
    dflash,
    dspark,
    eagle,
    eagle3,
    hydra,
    medusa,
    speculators,
)
