"""Every family of targets decodes with trees to the text of transformers' own loop."""

from __future__ import annotations

import pytest
import torch
from drafts import HalfRight, Random, ids_of, own_greedy, prompt_of, rows_of_run
from families import EAGER_ONLY, FAMILIES, PADDED, WINDOWED

from drafthead.inference.sampling import Sampler
from drafthead.inference.target import Target

ATTENTION = ("sdpa", "eager")


def target_of(family: str, attention: str) -> Target:
    if attention == "sdpa" and family in EAGER_ONLY:
        attention = "eager"
    model = FAMILIES[family]().double()
    model.set_attn_implementation(attention)
    return Target(model)


@pytest.mark.parametrize("family", WINDOWED)
def test_f42_text_goes_on_rightly_past_every_window(family: str) -> None:
    """Window 16; prompts of 4, 15, 16, 17 and 40 tokens side by side, 48 new ones, siblings."""
    prompts = [prompt_of(n) for n in (4, 15, 16, 17, 40)]
    texts: list[list[int]] = []
    for attention in [a for a in ATTENTION if a == "eager" or family not in EAGER_ONLY]:
        target = target_of(family, attention)
        texts = texts or [own_greedy(target, prompt, 48) for prompt in prompts]
        assert min(len(set(text[-48:])) for text in texts) > 4, "a text that repeats shows little"
        drafter = HalfRight(texts, [0, 1, 2, 3, 4], tree=True)
        rows = rows_of_run(target, prompts, drafter, 48)
        assert [row.ids for row in rows] == texts, attention
        lengths = {r.accepted for row in rows for r in row.rounds}
        assert {0, 1, 2, 3, 4} <= lengths
        short = [text[:-24] for text in texts]
        chains = HalfRight(texts, [4, 0, 3, 1, 2])
        assert ids_of(target, prompts, Sampler(), chains, 24) == short


@pytest.mark.parametrize("family", WINDOWED)
def test_f42_these_texts_depend_on_the_window(family: str) -> None:
    """Without it a text of 40 tokens goes on otherwise, so the test above can fail."""
    model = FAMILIES[family]()
    ids = torch.tensor([prompt_of(40)])
    with_window = model(ids).logits[0, -1]
    model.config.sliding_window = 256
    assert (model(ids).logits[0, -1] - with_window).abs().max() > 1e-2


@pytest.mark.parametrize("family", [f for f in FAMILIES if f not in WINDOWED])
def test_f39_other_families_decode_to_their_own_greedy_text(family: str) -> None:
    prompts = [prompt_of(n) for n in (1, 23, 9)]
    target = target_of(family, "sdpa")
    texts = [own_greedy(target, prompt, 24) for prompt in prompts]
    for attention in ATTENTION:
        target = target_of(family, attention)
        drafter = HalfRight(texts, [1, 4, 2], tree=True)
        assert ids_of(target, prompts, Sampler(), drafter, 24) == texts, attention
        shaken = Random(3, tree=True)
        assert ids_of(target, prompts, Sampler(), shaken, 24) == texts, attention


def test_f60_a_token_beyond_the_tokenizer_is_a_token_like_others() -> None:
    """Vocabulary 544 beside a tokenizer of 512, and a text that 530 is the argmax of at times."""
    model, prompt = FAMILIES["padded"]().double(), prompt_of(6)
    first = own_greedy(Target(model), prompt, 3)[-1]
    with torch.no_grad():
        model.lm_head.weight[530] = 1.01 * model.lm_head.weight[first]
    target = Target(model)
    text = own_greedy(target, prompt, 32)
    assert text[8] == 530
    assert len(set(text[6:])) > 4
    assert target.vocab_size == PADDED
    for tree in (False, True):
        drafter = HalfRight([text], 2, tree=tree, vocab_size=PADDED)
        rows = rows_of_run(target, [prompt], drafter, 32)
        assert rows[0].ids == text
        assert sum(r.accepted for r in rows[0].rounds) > 8
