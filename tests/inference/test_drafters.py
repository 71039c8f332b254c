"""What drafters propose, and vocabularies that differ from the target's."""

from __future__ import annotations

import pytest
import torch
from drafts import (
    HalfRight,
    Oracle,
    endless,
    ids_of,
    keyed,
    own_greedy,
    prompt_of,
    rows_of_run,
)
from tiny import tiny_head, tiny_target, tiny_tokenizer

from drafthead.heads.base import DraftHead
from drafthead.inference.drafters import HeadDrafter, LookupDrafter, MergedDrafter
from drafthead.inference.sampling import Sampler
from drafthead.inference.target import Target
from drafthead.inference.tree import Shape

TREE = "tree:3x3:8"


def test_f58_a_tree_wider_than_the_draft_vocabulary_is_refused(target32: Target) -> None:
    head = tiny_head(tiny_target(num_layers=6), draft_ids=torch.tensor([5, 9, 11, 40]))
    with pytest.raises(ValueError, match=r"width 5 exceeds the draft vocabulary .*4"):
        HeadDrafter(head, Shape.parse("tree:3x5:9"))
    drafter = HeadDrafter(head, Shape.parse("tree:3x4:30"))
    text = own_greedy(target32, prompt_of(6), 12)
    assert ids_of(target32, [prompt_of(6)], Sampler(), drafter, 12) == [text]


@pytest.mark.parametrize("bad", [{"length": 0}, {"length": 3, "shortest": 0}])
def test_f58_impossible_lookups_are_refused(bad: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"lookup of .* must be positive"):
        LookupDrafter(**bad)


def test_a_reduced_draft_vocabulary_changes_no_text(target64: Target) -> None:
    """Tokens outside it are refusals; ids go through the map (greedy, coupled, rejection)."""
    head = tiny_head(endless(), draft_ids=torch.arange(3, 512, 5)).double()
    head.bind(target64.model, check=False)
    prompt = prompt_of(6)
    greedy = ids_of(target64, [prompt], Sampler(), None, 16)
    sampled = ids_of(target64, [prompt], keyed(target64, top_k=9), None, 16)
    for shape in ("chain:3", TREE):
        drafter = HeadDrafter(head, Shape.parse(shape))
        assert ids_of(target64, [prompt], Sampler(), drafter, 16) == greedy
        assert ids_of(target64, [prompt], keyed(target64, top_k=9), drafter, 16) == sampled
    chained = HeadDrafter(head, Shape.parse("chain:3"))
    text = ids_of(target64, [prompt], keyed(target64, rule="rejection"), chained, 16)
    assert len(text[0]) == 6 + 16


def test_f60_a_vocabulary_padded_beyond_the_tokenizers() -> None:
    """Model 544, tokenizer 512; the target emits 530 again and again, as in plain decoding."""
    model = endless(num_layers=6, vocab_size=544)
    with torch.no_grad():
        model.lm_head.weight[530] = 3 * model.lm_head.weight[40]
    target = Target(model.double(), tiny_tokenizer(512))
    prompt = next(
        p for p in (prompt_of(6, seed) for seed in range(40)) if 530 in own_greedy(target, p, 12)
    )
    text = own_greedy(target, prompt, 12)
    head = tiny_head(endless(num_layers=6, vocab_size=544)).double()
    head.bind(model, check=False)
    for drafter in (
        Oracle([text]),
        HalfRight([text], 1, tree=True, vocab_size=544),
        HeadDrafter(head, Shape.parse(TREE)),
        LookupDrafter(4),
    ):
        assert ids_of(target, [prompt], Sampler(), drafter, 12) == [text]
    assert target.vocab_size == 544
    assert "530" not in target.tokenizer.decode(text, skip_special_tokens=True)


# Lookup and merged


def test_lookup_continues_as_the_text_did_after_the_latest_longest_match() -> None:
    drafter = LookupDrafter(3, longest=2, shortest=1)
    drafter.open(1, 64)
    drafter.start(0)
    ids = [7, 8, 1, 2, 9, 8, 3, 4, 5, 7, 8]
    drafter.observe(0, ids, None)
    assert drafter.propose([ids], [9], Sampler())[0].tokens == [1, 2, 9], "2-gram 7 8"
    ids += [3]
    drafter.observe(0, ids, None)
    assert drafter.propose([ids], [9], Sampler())[0].tokens == [4, 5, 7], "8 3"
    assert drafter.propose([ids], [2], Sampler())[0].tokens == [4, 5], "no deeper than asked"
    assert drafter.propose([ids], [0], Sampler())[0].tokens == []
    drafter.start(0)
    drafter.observe(0, [7, 8], None)
    assert drafter.propose([[7, 8]], [9], Sampler())[0].tokens == [], "a new row knows nothing"


def test_merged_credits_each_draft_to_its_source(target64: Target, head64: DraftHead) -> None:
    prompt = prompt_of(6) * 3
    lookup = LookupDrafter(4, longest=3, shortest=3)
    drafter = MergedDrafter(lookup, HeadDrafter(head64, Shape.parse("chain:2")))
    (row,) = rows_of_run(target64, [prompt], drafter, 30)
    assert row.ids == own_greedy(target64, prompt, 30)
    assert {r.source for r in row.rounds} <= {"lookup", "head", ""}
    assert "head" in {r.source for r in row.rounds}
    assert all(r.source for r in row.rounds if r.drafted)


@pytest.mark.parametrize("shape", ["tree:4x8:8", "tree:5x8:16", "tree:6x10:6"])
def test_f58_a_tree_that_expands_more_than_it_verifies_fits_the_heads_memory(
    target64: Target, head64: DraftHead, shape: str
) -> None:
    """To the last token of the longer row, and of a row that waits beside it."""
    prompts = [prompt_of(6), prompt_of(40)]
    drafter = HeadDrafter(head64, Shape.parse(shape))
    texts = [own_greedy(target64, prompt, 24) for prompt in prompts]
    assert ids_of(target64, prompts, Sampler(), drafter, 24) == texts
    assert ids_of(target64, prompts[:1], Sampler(), drafter, 24) == texts[:1]


@pytest.mark.parametrize("rule", ["coupled", "rejection"])
def test_f44_a_head_that_is_not_finite_decides_nothing(target64: Target, rule: str) -> None:
    """Its NaN must not pass for the certainty that a ratio rule accepts."""
    head = tiny_head(endless()).double()
    head.bind(target64.model, check=False)
    with torch.no_grad():
        head.norm.weight.fill_(torch.nan)
    drafter = HeadDrafter(head, Shape.parse("chain:3"))
    sampler = keyed(target64, 1, rule=rule, top_k=5)
    (text,) = ids_of(target64, [prompt_of(6)], sampler, drafter, 24)
    laws = target64.model(torch.tensor([text])).logits[0]
    best = laws.topk(5).indices.tolist()
    assert all(token in best[at - 1] for at, token in enumerate(text) if at >= 6)
