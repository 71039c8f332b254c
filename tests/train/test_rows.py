"""What training makes of rows: padding, template switches, and the ids that every part sees."""

from __future__ import annotations

import pytest
import torch
from chats import PLAIN, THINKING, ask, chat_format
from tiny import tiny_tokenizer
from tiny_runs import LAYERS, three_layers
from tokenizers.processors import TemplateProcessing

import drafthead.heads  # noqa: F401  registers the built-in heads
from drafthead.data.chat import ChatFormat, build_rows
from drafthead.data.conversations import Message, Prompt
from drafthead.heads.base import settings_class
from drafthead.inference.evaluate import Settings, evaluate
from drafthead.inference.target import Target
from drafthead.train.objective import Objective
from drafthead.train.teacher import OnlineFeatures
from drafthead.train.timing import Stopwatch


def test_f06_padding_is_told_by_length_where_pad_equals_eos() -> None:
    fmt = chat_format(PLAIN)
    end = fmt.tokenizer.eos_token_id
    assert fmt.tokenizer.pad_token_id == end
    rows, _ = build_rows([ask("Hi", "Paris"), ask("Hi", "Paris on the river Seine")], fmt, 128)
    target = Target(three_layers(), fmt.tokenizer)
    together = OnlineFeatures(target, rows, [(0, 1)], LAYERS).batch(0)
    for place, row in enumerate(rows):
        assert together.ids[place, len(row.ids) - 1] == end
        assert together.mask[place, len(row.ids) - 1]
        assert not together.mask[place, len(row.ids) :].any()
    settings = settings_class("eagle3").model_validate(
        {"layers": LAYERS, "draft_vocab_size": None, "unroll_steps": 3}
    )
    torch.manual_seed(0)
    head = settings.build(target.contract(LAYERS, {}), target.config, None)
    head.bind(target.model)
    objective = Objective(head, target.vocab_size, decay=0.8, bf16=False, watch=Stopwatch())
    alone = [OnlineFeatures(target, [row], [(0,)], LAYERS).batch(0) for row in rows]
    count = float(sum(sum(row.mask) for row in rows))
    sums = [objective(batch, count) for batch in (together, *alone)]
    torch.testing.assert_close(sums[0].loss, sums[1].loss + sums[2].loss)
    torch.testing.assert_close(sums[0].sums, sums[1].sums + sums[2].sums)
    assert sums[0].sums[0, 3] == count


def test_f07_another_switch_of_the_template_is_refused_by_the_head() -> None:
    target = Target(three_layers(), tiny_tokenizer(template=THINKING))
    trained = target.contract(LAYERS, {"think": True})
    trained.check(target.contract(LAYERS, {"think": True}))
    with pytest.raises(ValueError, match="template"):
        trained.check(target.contract(LAYERS, {"think": False}))


def test_f09_training_evaluation_and_serving_see_the_same_ids_with_one_bos() -> None:
    tokenizer = tiny_tokenizer(template="{{ bos_token }}" + PLAIN)
    tokenizer.bos_token = "<|endoftext|>"
    bos = tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", bos)]
    )
    assert tokenizer("Hi")["input_ids"][0] == bos
    target, fmt = Target(three_layers(), tokenizer), ChatFormat(tokenizer)
    ((row,), _) = build_rows([ask("Hi", "Paris")], fmt, 128)
    measured = evaluate(target, [Prompt("p", "qa", ["Hi"])], {}, Settings(max_new_tokens=2))
    (answer,) = measured.answers["plain"]
    evaluated = answer.ids[: answer.prompt_length]
    trained = row.ids[: row.mask.index(True)]
    generated = fmt.prompt_ids([Message("user", "Hi")])
    served = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, return_dict=True
    )["input_ids"]
    assert trained == evaluated == generated == served
    assert trained.count(bos) == 1
