"""Targets that the decoding tests share; all are read-only."""

from __future__ import annotations

import pytest
from drafts import endless
from tiny import tiny_head, tiny_tokenizer

from drafthead.heads.base import DraftHead
from drafthead.inference.target import Target


@pytest.fixture(scope="session")
def target32() -> Target:
    return Target(endless())


@pytest.fixture(scope="session")
def target64() -> Target:
    return Target(endless().double())


@pytest.fixture(scope="session")
def head64(target64: Target) -> DraftHead:
    """An untrained head in the target's dtype."""
    head = tiny_head(endless()).double()
    head.bind(target64.model, check=False)
    return head


@pytest.fixture(scope="session")
def chatting() -> Target:
    """A target with a tokenizer, to be asked in chats."""
    return Target(endless(num_layers=4), tiny_tokenizer())
