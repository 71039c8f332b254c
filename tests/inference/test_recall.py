"""What is remembered between decodes saves forwards and changes nothing."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from drafts import HalfRight, own_greedy, prompt_of
from families import FAMILIES

from drafthead.heads.base import DraftHead
from drafthead.inference.decoder import Decoder
from drafthead.inference.drafters import Drafter
from drafthead.inference.grow import HeadDrafter
from drafthead.inference.recall import AT_ONCE, RecallingTarget
from drafthead.inference.row import Row, stop_at
from drafthead.inference.sampling import Sampler
from drafthead.inference.target import Target
from drafthead.inference.tree import parse_shape

NEW = 8


def answer(
    target: Target, drafter: Drafter | None, ids: Sequence[int], rounds: int | None = None
) -> tuple[Row, int]:
    """The finished row, or as far as `rounds` take it, and the tokens that were run for it."""
    row = Row(list(ids), NEW, stop_at(()), logits=[])
    ran = 0

    def count(_module: object, args: tuple[torch.Tensor, ...], _kwargs: object) -> None:
        nonlocal ran
        ran += args[0].shape[1]

    hook = target.model.register_forward_pre_hook(count, with_kwargs=True)
    try:
        decoder = Decoder(target, Sampler(), drafter, capacity=len(ids) + NEW)
        decoder.start(0, row)
        while decoder.running and (rounds is None or len(row.rounds) < rounds):
            decoder.round()
    finally:
        hook.remove()
    return row, ran


def same(target: Target, drafter: Drafter | None, ids: Sequence[int], ours: Row) -> int:
    """A fresh decoder gives the same tokens, rounds and logits; the tokens it runs."""
    fresh, ran = answer(target, drafter, ids)
    assert ours.ids == fresh.ids
    assert ours.rounds == fresh.rounds
    assert ours.logits is not None
    assert fresh.logits is not None
    torch.testing.assert_close(
        torch.stack(ours.logits), torch.stack(fresh.logits), rtol=1e-9, atol=1e-9
    )
    return ran


@pytest.mark.parametrize("shape", [None, "chain:3", "tree:3x2:6"])
def test_a_later_turn_equals_a_fresh_decoders_and_runs_only_what_is_new(
    target64: Target, head64: DraftHead, shape: str | None
) -> None:
    """Turns as a chat has them: one goes on, one is taken back, one was stopped, one is other."""
    drafter = None if shape is None else HeadDrafter(head64, parse_shape(shape))
    recalling = RecallingTarget(target64)
    first, ran = answer(recalling, drafter, prompt_of(30))
    assert ran >= 30
    other = [*first.ids, *prompt_of(9)]
    for ids, common, rounds in (
        ([*first.ids, *prompt_of(5)], len(first.ids) - 1, None),  # its last token was never run
        (other, len(first.ids), 1),
        ([*other, *prompt_of(4)], len(other), None),
        (prompt_of(40), 0, None),
    ):
        row, ran = answer(recalling, drafter, ids, rounds)
        if rounds is None:
            assert ran == same(target64, drafter, ids, row) - common


def test_drafters_are_given_the_states_of_the_whole_prompt(target64: Target) -> None:
    texts = [own_greedy(target64, prompt_of(6), NEW)]
    texts.append(own_greedy(target64, [*texts[0], *prompt_of(5)], NEW))
    watching, fresh = (HalfRight(texts, 2, tree=True, layers=(2, 4)) for _ in range(2))
    recalling = RecallingTarget(target64)
    answer(recalling, watching, prompt_of(6))
    answer(recalling, watching, [*texts[0], *prompt_of(5)])
    answer(target64, fresh, [*texts[0], *prompt_of(5)])
    assert [f.shape for f in watching.features[0]] == [f.shape for f in fresh.features[0]]
    for ours, theirs in zip(watching.features[0], fresh.features[0], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("family", ["gemma3", "gpt2"])
def test_windows_and_learned_positions_see_what_was_kept(family: str) -> None:
    """A window of 16 positions, which both turns pass; the new part is longer than one forward."""
    target = Target(FAMILIES[family]().double())
    recalling = RecallingTarget(target)
    first, _ = answer(recalling, None, prompt_of(30))
    ids = [*first.ids, *prompt_of(AT_ONCE + 20)]
    second, ran = answer(recalling, None, ids)
    assert ran < len(ids)
    same(target, None, ids, second)


def test_other_layers_and_several_rows_are_not_remembered(target64: Target) -> None:
    recalling = RecallingTarget(target64)
    first, _ = answer(recalling, None, prompt_of(30))
    texts = [own_greedy(target64, first.ids, NEW)]
    row, ran = answer(recalling, HalfRight(texts, 2, layers=(3,)), first.ids)
    assert row.ids == texts[0]
    assert ran >= len(first.ids), "its states had not been kept"
    assert recalling.open(2, 50) is not recalling.open(2, 50)


def test_an_interrupt_in_the_middle_forgets_at_worst(target64: Target) -> None:
    """Wherever a Ctrl-C falls: the next answer is a fresh decoder's."""
    first, _ = answer(target64, None, prompt_of(30))
    ids = [*first.ids, *prompt_of(5)]
    for layer in (0, 4):
        for forward in (0, 1):
            recalling = RecallingTarget(target64)
            answer(recalling, None, prompt_of(20))
            seen = 0

            def interrupt(*_: object, at: int = forward) -> None:
                nonlocal seen
                seen += 1
                if seen == at + 1:
                    raise KeyboardInterrupt

            hook = target64.model.model.layers[layer].register_forward_hook(interrupt)
            with pytest.raises(KeyboardInterrupt):
                answer(recalling, None, prompt_of(30))
            hook.remove()
            row, _ = answer(recalling, None, ids)
            same(target64, None, ids, row)
