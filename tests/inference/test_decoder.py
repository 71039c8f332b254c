"""Decoding with any drafter is decoding without one, token for token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from drafts import (
    AlwaysWrong,
    HalfRight,
    Oracle,
    Random,
    endless,
    ids_of,
    keyed,
    own_greedy,
    prompt_of,
    rows_of_run,
)
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

from drafthead.heads.base import DraftHead
from drafthead.inference.decoder import decode
from drafthead.inference.drafters import Drafter, HeadDrafter, LookupDrafter, MergedDrafter
from drafthead.inference.noise import Noise, Purpose
from drafthead.inference.sampling import Sampler
from drafthead.inference.target import Target
from drafthead.inference.tree import Tree, chain, parse_shape
from drafthead.inference.warps import Warps

LENGTHS = (1, 2, 7, 33)
TREE = "tree:3x3:8"

Make = Callable[[Sequence[Sequence[int]], DraftHead], Drafter]

DRAFTERS: dict[str, Make] = {
    "oracle chain": lambda texts, head: Oracle(texts),
    "oracle tree": lambda texts, head: Oracle(texts, tree=True),
    "half-right chain": lambda texts, head: HalfRight(texts, 2),
    "half-right tree": lambda texts, head: HalfRight(texts, 2, tree=True),
    "wrong chain": lambda texts, head: AlwaysWrong(texts),
    "wrong tree": lambda texts, head: AlwaysWrong(texts, tree=True),
    "random chain": lambda texts, head: Random(0),
    "random tree": lambda texts, head: Random(0, tree=True),
    "lookup": lambda texts, head: LookupDrafter(4),
    "head chain": lambda texts, head: HeadDrafter(head, parse_shape("chain:3")),
    "head tree": lambda texts, head: HeadDrafter(head, parse_shape(TREE)),
    "merged": lambda texts, head: MergedDrafter(
        LookupDrafter(4, longest=2, shortest=2), HeadDrafter(head, parse_shape(TREE))
    ),
}


@pytest.fixture(scope="module")
def greedy(target64: Target) -> list[list[int]]:
    """What transformers' own greedy loop makes of each prompt."""
    return [own_greedy(target64, prompt_of(n), 48) for n in LENGTHS]


@pytest.mark.parametrize("name", DRAFTERS)
def test_f39_greedy_equals_transformers_own_loop(
    target64: Target, head64: DraftHead, greedy: list[list[int]], name: str
) -> None:
    """Alone for the shortest, all four as one ragged batch; fp64, 48 tokens."""
    prompts = [prompt_of(n) for n in LENGTHS]
    drafter = DRAFTERS[name](greedy, head64)
    assert ids_of(target64, prompts[:1], Sampler(), drafter, 48) == greedy[:1]
    rows = rows_of_run(target64, prompts, drafter, 48)
    assert [row.ids for row in rows] == greedy
    if name.startswith("oracle"):
        assert {r.accepted for r in rows[3].rounds[:-1]} == {4}, "the oracle is right"
    if name.startswith(("wrong", "half")):
        right = 2 if name.startswith("half") else 0
        assert all(r.accepted <= right for row in rows for r in row.rounds)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_f39_every_supported_attention_is_exact(attention: str, shape: str) -> None:
    model = endless(num_layers=3).double()
    model.set_attn_implementation(attention)
    target = Target(model)
    prompts = [prompt_of(n) for n in (2, 9)]
    texts = [own_greedy(target, prompt, 20) for prompt in prompts]
    drafter = HalfRight(texts, [1, 3], tree=shape == "tree")
    assert ids_of(target, prompts, Sampler(), drafter, 20) == texts


def test_f39_absolute_positions_up_to_the_last_one() -> None:
    """A GPT-2 type; rows end at different times, one at the very end of the context."""
    config = GPT2Config(
        vocab_size=512, n_embd=32, n_layer=2, n_head=2, n_positions=40, bos_token_id=1
    )
    config.eos_token_id = None
    torch.manual_seed(0)
    target = Target(GPT2LMHeadModel(config).double())
    target.model.generation_config.eos_token_id = None
    prompts = [prompt_of(20), prompt_of(3)]
    texts = [own_greedy(target, prompt, 20) for prompt in prompts]
    for drafter in (HalfRight(texts, [4, 0]), HalfRight(texts, [4, 1], tree=True), None):
        assert ids_of(target, prompts, Sampler(), drafter, 20) == texts


WARPS: dict[str, dict[str, Any]] = {
    "plain": {},
    "top-p": {"top_p": 0.9},
    "top-k": {"top_k": 20},
}


@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("warp", WARPS)
def test_coupled_sampling_is_the_same_with_any_drafter_or_none(
    target64: Target, head64: DraftHead, temperature: float, warp: str
) -> None:
    """Same seed, same ids: chains, trees, right and wrong drafts, at temperature > 0 (fp64)."""
    prompts = [prompt_of(n) for n in (1, 7, 12)]

    def run(drafter: Drafter | None, seed: int = 5) -> list[list[int]]:
        sampler = keyed(target64, 3, temperature=temperature, seed=seed, **WARPS[warp])
        return ids_of(target64, prompts, sampler, drafter, 20)

    texts = run(None)
    assert run(None) == texts
    assert run(None, seed=6) != texts
    assert texts != ids_of(target64, prompts, Sampler(), None, 20), "sampled, not greedy"
    for name, make in DRAFTERS.items():
        assert run(make(texts, head64)) == texts, name


def test_coupled_head_drafts_are_accepted_where_head_and_target_agree(target64: Target) -> None:
    """Noise is shared: a drafter that knows the target's law proposes the target's very draw."""

    class Knowing(Random):
        def propose(
            self, ids: Sequence[Sequence[int]], depths: Sequence[int], sampler: Sampler
        ) -> list[Tree]:
            if depths[0] < 1:
                return [Tree()]
            logits = target64.model(torch.tensor([list(ids[0])])).logits[0, -1:]
            scores, _ = sampler.draft_scores(0, logits, torch.arange(512), len(ids[0]))
            return [chain([int(scores[0].argmax())])]

    sampler = keyed(target64, temperature=0.8, top_p=0.9)
    rows, _ = decode(target64, [prompt_of(5)], sampler, Knowing(0), max_new_tokens=13)
    assert [r.accepted for r in rows[0].rounds] == [1] * 6


def test_f51_top_k_one_and_tiny_top_p_are_greedy(target64: Target, head64: DraftHead) -> None:
    prompts = [prompt_of(7)]
    greedy = ids_of(target64, prompts, Sampler(), None, 16)
    drafter = HeadDrafter(head64, parse_shape(TREE))
    assert ids_of(target64, prompts, keyed(target64, top_k=1), drafter, 16) == greedy
    assert ids_of(target64, prompts, keyed(target64, top_p=1e-6), drafter, 16) == greedy


@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_f53_each_row_of_a_batch_equals_its_single_run(target64: Target, shape: str) -> None:
    """Lengths 1, 7, 20, 33 with drafts accepting 0, 1, 3, all; per-row acceptance equal as well."""
    lengths, rights = (1, 7, 20, 33), (0, 1, 3, 4)
    prompts = [prompt_of(n) for n in lengths]
    texts = [own_greedy(target64, prompt, 20) for prompt in prompts]
    drafter = HalfRight(texts, rights, tree=shape == "tree")
    together = rows_of_run(target64, prompts, drafter, 20)
    for index, prompt in enumerate(prompts):
        alone = rows_of_run(target64, [prompt], drafter, 20)[0]
        assert together[index].ids == alone.ids == texts[index]
        assert together[index].rounds == alone.rounds
    counts = [max(r.accepted for r in row.rounds) for row in together]
    assert counts == list(rights)


def test_f53_order_and_an_early_end_change_no_row(target64: Target, head64: DraftHead) -> None:
    """Sampled rows keep their text in another order if they keep their streams; one ends early."""
    prompts = [prompt_of(n) for n in (1, 7, 20, 33)]
    drafter = HeadDrafter(head64, parse_shape(TREE))
    texts = ids_of(target64, prompts, keyed(target64, 4), None, 20)
    eos = [texts[1][7 + 4]]
    ended = ids_of(target64, prompts, keyed(target64, 4), None, 20, eos)
    assert len(ended[1]) <= 7 + 5
    for order in ([0, 1, 2, 3], [3, 1, 0, 2], [2, 0, 3, 1]):
        shuffled = [prompts[i] for i in order]
        for made in (drafter, HalfRight(texts, [0, 1, 3, 4], tree=True)):
            sampler = keyed(target64, streams=order)
            again = ids_of(target64, shuffled, sampler, made, 20, eos)
            assert again == [ended[i] for i in order]
    one = keyed(target64, streams=[2])
    assert ids_of(target64, prompts[2:3], one, drafter, 20, eos) == ended[2:3]


def test_f41_the_drafter_sees_the_targets_own_states(target32: Target) -> None:
    """After accepted, refused and second-branch drafts, in a ragged batch: 1e-5 in fp32."""
    prompts = [prompt_of(n) for n in (1, 6, 11)]
    texts = [own_greedy(target32, prompt, 20) for prompt in prompts]
    for tree in (False, True):
        drafter = HalfRight(texts, [0, 2, 4], tree=tree, layers=(2, 4, 5))
        rows_of_run(target32, prompts, drafter, 20)
        for row in range(3):
            seen, ids = torch.cat(drafter.features[row]), drafter.ids[row]
            fresh, _ = target32.states(torch.tensor([ids[:-1]]), (2, 4, 5))
            torch.testing.assert_close(seen, fresh[0], atol=1e-5, rtol=0)


class Recording(Noise):
    """Notes which of its numbers were asked for."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__(3, 0, vocab_size)
        self.asked: list[tuple[Purpose, int]] = []

    def gumbel(self, position: int, purpose: Purpose = Purpose.COUPLED) -> Tensor:
        self.asked.append((purpose, position))
        return super().gumbel(position, purpose)

    def uniform(self, position: int, purpose: Purpose = Purpose.ACCEPT, index: int = 0) -> float:
        self.asked.append((purpose, position))
        return super().uniform(position, purpose, index)


def test_f50_the_ratio_rule_uses_each_number_for_one_decision(
    target64: Target, head64: DraftHead
) -> None:
    """Draft, accept and recovery read streams of their own, each at the position it decides.

    Draft noise of a position may be asked for again after a refusal before it: it is fresh then.
    """
    noise = Recording(512)
    sampler = Sampler(Warps.of(1.8), [noise], "rejection")
    drafter = HeadDrafter(head64, parse_shape("chain:3"))
    (row,), _ = decode(target64, [prompt_of(5)], sampler, drafter, max_new_tokens=40)
    assert {0, 1} < {r.accepted for r in row.rounds}, "some drafts are kept, some refused"
    wanted, at = [(Purpose.RECOVER, 5)], 6
    for round_ in row.rounds:
        wanted += [(Purpose.DRAFT, at + k) for k in range(round_.drafted)]
        tested = min(round_.accepted + 1, round_.drafted)
        wanted += [(Purpose.ACCEPT, at + k) for k in range(tested)]
        wanted.append((Purpose.RECOVER, at + round_.accepted))
        at += round_.emitted
    drafts = [a for a in noise.asked if a[0] == Purpose.DRAFT]
    # A chain drafts to its full depth and is cut to what the row can still use.
    assert set(drafts) >= {a for a in wanted if a[0] == Purpose.DRAFT}
    assert [a for a in noise.asked if a not in drafts] == [a for a in wanted if a not in drafts]
    decided = [a for a in noise.asked if a[0] in (Purpose.ACCEPT, Purpose.RECOVER)]
    assert len(set(decided)) == len(decided), "no number decides twice"
    assert not [a for a in noise.asked if a[0] == Purpose.COUPLED]


@pytest.mark.parametrize("rule", ["coupled", "rejection", "block"])
def test_a_sampler_used_again_draws_the_same_text(
    target64: Target, head64: DraftHead, rule: str
) -> None:
    """Its noise begins anew with every row: else a later round could meet an earlier one's."""
    sampler = keyed(target64, rule=rule)
    drafter = HeadDrafter(head64, parse_shape("chain:3"))
    first, again = (ids_of(target64, [prompt_of(5)], sampler, drafter) for _ in range(2))
    assert first == again


@pytest.mark.parametrize("length", [1, 2, 3])
def test_f57_prompts_of_one_to_three_tokens(
    target64: Target, head64: DraftHead, length: int
) -> None:
    prompt = prompt_of(length)
    text = own_greedy(target64, prompt, 12)
    for make in DRAFTERS.values():
        assert ids_of(target64, [prompt], Sampler(), make([text], head64), 12) == [text]


@pytest.mark.parametrize("ids", [[5, 512], [-1, 5]])
def test_f59_ids_of_another_tokenizer_are_refused(target64: Target, ids: list[int]) -> None:
    with pytest.raises(ValueError, match="do not fit the target's vocabulary of 512"):
        decode(target64, [ids], Sampler(), max_new_tokens=4)


@pytest.mark.parametrize(
    ("prompts", "noise", "tokens", "message"),
    [
        ([], 1, 4, "there are no prompts"),
        ([[5]], 1, -5, "max_new_tokens is -5"),
        ([[5], [6]], 1, 4, "the sampler has noise for 1 of 2 rows"),
    ],
)
def test_what_cannot_be_decoded_is_refused_in_one_line(
    target64: Target, prompts: list[list[int]], noise: int, tokens: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        decode(target64, prompts, keyed(target64, noise), max_new_tokens=tokens)
