"""A real target decodes the same text with drafts and without (fp32)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from drafts import ids_of, keyed, own_greedy

from drafthead.data.chat import ChatFormat
from drafthead.data.conversations import Message
from drafthead.data.embedded import REFERENCE
from drafthead.heads.base import DraftHead
from drafthead.inference.compare import fitted, opened
from drafthead.inference.drafters import Drafter, HeadDrafter, LookupDrafter
from drafthead.inference.evaluate import Settings, answer, end_ids
from drafthead.inference.sampling import Sampler
from drafthead.inference.target import Target, load_target
from drafthead.inference.tree import parse_shape

pytestmark = pytest.mark.slow

QUESTIONS = (
    "What is the capital of France?",
    "Repeat this twice: the quick brown fox jumps over the lazy dog.",
    "Write a Python function that adds two numbers.",
)
TOKENS = 32

MAKE: dict[str, Callable[[DraftHead], Drafter]] = {
    "chain": lambda head: HeadDrafter(head, parse_shape("chain:3")),
    "tree": lambda head: HeadDrafter(head, parse_shape("tree:3x4:10")),
    "lookup": lambda head: LookupDrafter(4, longest=3, shortest=2),
}


@pytest.fixture(scope="module")
def target(smollm2: Path) -> Target:
    return load_target(smollm2, "float32")


@pytest.fixture(scope="module")
def head(target: Target) -> DraftHead:
    """The one that comes with the package, which `fitted` compares with the target's contract."""
    return fitted(opened(Path(REFERENCE), "float32"), target)


@pytest.fixture(scope="module")
def prompts(target: Target) -> list[list[int]]:
    assert target.tokenizer is not None
    chat = ChatFormat(target.tokenizer)
    return [chat.prompt_ids([Message("user", question)]) for question in QUESTIONS]


def test_the_reference_head_drafts_well(
    target: Target, head: DraftHead, prompts: list[list[int]]
) -> None:
    rounds = [
        one
        for prompt in prompts
        for one in answer(
            target, MAKE["chain"](head), prompt, Settings(max_new_tokens=TOKENS)
        ).rounds
    ]
    assert sum(r.emitted for r in rounds) / len(rounds) > 1.4


def test_f39_greedy_equals_transformers_own_loop(
    target: Target, head: DraftHead, prompts: list[list[int]]
) -> None:
    ends = end_ids(target)
    texts = [own_greedy(target, prompt, TOKENS) for prompt in prompts]
    for name, make in MAKE.items():
        assert ids_of(target, prompts, Sampler(), make(head), TOKENS, ends) == texts, name


def test_coupled_sampling_equals_plain_keyed_decoding(
    target: Target, head: DraftHead, prompts: list[list[int]]
) -> None:
    def run(drafter: Drafter | None) -> list[list[int]]:
        return ids_of(target, prompts, keyed(target, 3, temperature=1.0), drafter, TOKENS)

    texts = run(None)
    for name in ("chain", "tree"):
        assert run(MAKE[name](head)) == texts, name
