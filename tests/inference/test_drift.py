"""A head on another target: the loss is what the rounds say, and what does not fit is refused."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from by_heart import QUESTIONS, TOKENS, asked, learnt, plain_target, texts_of
from tiny import tiny_head, tiny_target, tiny_tokenizer
from transformers import LlamaForCausalLM

from drafthead.data.conversations import Prompt
from drafthead.heads.contract import ContractError
from drafthead.heads.eagle3 import Eagle3Settings
from drafthead.inference.agreement import paired_interval
from drafthead.inference.answering import Answer, Settings
from drafthead.inference.drift import _answers, _loss, advice, drift, worth
from drafthead.inference.evaluate import evaluate
from drafthead.inference.grow import HeadDrafter
from drafthead.inference.metrics import Round
from drafthead.inference.target import Target, load_target
from drafthead.inference.tree import Shape

LAYERS = (2, 3, 5)
CHAIN = Shape(3, 1, 3)
SETTINGS = Settings(max_new_tokens=TOKENS)
PROMPTS = [
    Prompt(f"p{n}", "chat" if n < 2 else "maths", [question, "And then?"][: 1 + (n == 0)])
    for n, question in enumerate(QUESTIONS)
]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of a target, of a head that knows it by heart, and of the target a little tuned."""
    folder, target = tmp_path_factory.mktemp("drift"), plain_target()
    texts = texts_of(target, asked(target))
    settings = Eagle3Settings(draft_vocab_size=200, layers=LAYERS)
    learnt(target, settings, LAYERS, texts).save_pretrained(folder / "head")
    write(folder / "target", target.model)
    tuned = copy.deepcopy(target.model)
    with torch.no_grad():
        generator = torch.Generator().manual_seed(0)
        for parameter in tuned.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(noise * parameter.std() * 0.2)
    write(folder / "tuned", tuned)
    return folder


def write(folder: Path, model: LlamaForCausalLM, template: str | None = None) -> None:
    model.save_pretrained(folder)
    given = {} if template is None else {"template": template}
    tiny_tokenizer(**given).save_pretrained(folder)


def drifted(root: Path, other: str, before: list[Answer] | None = None) -> dict[str, Any]:
    return drift(
        root / "head",
        str(root / "target"),
        other,
        PROMPTS,
        CHAIN,
        SETTINGS,
        dtype="float32",
        batch=4,
        before=before,
    )


def test_a_tuned_target_costs_tau_and_the_advice_is_to_train(root: Path) -> None:
    found = drifted(root, str(root / "tuned"))
    assert found["kind"] == "model"
    assert found["tau"]["tau"] > found["other"]["tau"] > 1.0
    assert found["lost"] == pytest.approx(found["tau"]["tau"] - found["other"]["tau"])
    low, high = found["lost_interval"]
    assert 0 < low <= found["lost"] <= high
    assert found["worth"] is True
    assert "train the head anew" in found["advice"]
    assert f"{100 * found['lost'] / found['tau']['tau']:.1f} %" in found["advice"]
    groups = found["by_category"]
    assert {name: group["prompts"] for name, group in groups.items()} == {"chat": 2, "maths": 2}
    for group in groups.values():
        assert group["lost"] == pytest.approx(group["tau"] - group["other"])


def test_the_same_target_under_another_name_costs_nothing(root: Path) -> None:
    found = drifted(root, str(root / "target"))
    assert (found["lost"], found["lost_interval"]) == (0.0, (0.0, 0.0))
    assert found["worth"] is False
    assert found["advice"].startswith("keep the head")
    assert "its weights are those of the head's own target" in found["remarks"]


def test_sampled_turns_are_those_of_an_evaluation(chatting: Target) -> None:
    """Both key the noise of a second turn alike, or the head would be held against other texts."""
    head = tiny_head(chatting.model, layers=(1, 2, 3))
    prompts = [Prompt("one", "a", ["Why?"]), Prompt("two", "a", ["Why?", "And then?"])]
    settings = Settings(max_new_tokens=6, temperature=1.0, seed=3)
    measured = evaluate(chatting, prompts, {"head": HeadDrafter(head, CHAIN)}, settings)
    drifting = _answers(head, chatting, prompts, CHAIN, settings, batch=2)
    texts = {a.place: a.ids for a in measured.answers["head"]}
    assert len(texts) == 3
    assert {a.place: a.ids for a in drifting} == texts


def test_an_adapter_is_laid_over_the_target(root: Path, tmp_path: Path) -> None:
    """Against its weights merged by hand."""
    peft = pytest.importorskip("peft")
    target = load_target(root / "target")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(copy.deepcopy(target.model), config)
    adapted.save_pretrained(tmp_path / "adapter")
    write(tmp_path / "merged", adapted.merge_and_unload())
    found = drifted(root, str(tmp_path / "adapter"))
    by_hand = drifted(root, str(tmp_path / "merged"))
    assert found["kind"] == "adapter"
    assert found["other"] == by_hand["other"]
    assert found["other"] != found["tau"]


def test_int8_is_the_same_target_in_eight_bits(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "int8").mkdir()  # as `--out int8` makes one; a folder is ./int8
    monkeypatch.chdir(tmp_path)
    found = drifted(root, "int8")
    assert found["kind"] == "int8"
    assert found["other"]["tau"] > 1.2
    assert abs(found["lost"]) < 0.7, "eight bits change little"


def test_int8_without_torchao_says_what_to_install(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "torchao.quantization", None)
    with pytest.raises(ValueError, match=r"drafthead\[quant\]"):
        drifted(root, "int8", before=[])


@pytest.mark.parametrize("other", ["layers", "tokenizer"])
def test_another_shape_or_vocabulary_is_refused_in_one_line(
    root: Path, tmp_path: Path, other: str
) -> None:
    if other == "layers":
        write(tmp_path / "other", tiny_target(num_layers=5))
    else:
        target = load_target(root / "target")
        target.model.save_pretrained(tmp_path / "other")
        corpus = ["Quite other words make quite another vocabulary, " * 8, *map(str, range(999))]
        tiny_tokenizer(corpus=corpus).save_pretrained(tmp_path / "other")
    with pytest.raises(ContractError, match="cannot draft for it") as error:
        drifted(root, str(tmp_path / "other"), before=[])
    assert ("num_layers is 5" if other == "layers" else "other tokens") in str(error.value)
    assert "\n" not in str(error.value)


def test_another_template_is_told_and_used(root: Path, tmp_path: Path) -> None:
    target = load_target(root / "target")
    assert target.tokenizer is not None
    template = str(target.tokenizer.chat_template).replace("You are a small", "Here is one more")
    write(tmp_path / "other", target.model, template)
    found = drifted(root, str(tmp_path / "other"))
    assert any("chat template is another" in remark for remark in found["remarks"])
    assert found["lost"] > 0, "it knows the texts of one template by heart"


def test_advice_is_given_where_the_interval_is_clear_of_three_per_cent() -> None:
    cases = {(0.1, 0.3): True, (0.01, 0.3): None, (-0.02, 0.05): False, (-0.3, -0.1): False}
    for interval, wanted in cases.items():
        assert worth(2.0, interval) is wanted
        first = {True: "train the head anew", None: "undecided", False: "keep the head"}[wanted]
        assert advice(2.0, sum(interval) / 2, interval).startswith(first)


def test_one_prompt_has_no_interval_and_leaves_the_advice_open() -> None:
    own, other = {"a": [Round(2, 2, 3)]}, {"a": [Round(2, 0, 1)]}
    assert _loss(own, other)["lost_interval"] is None
    assert worth(2.0, None) is None
    assert advice(2.0, 0.5, None) == (
        "undecided: the head loses 25.0 % of tau on a single prompt; give more prompts"
    )


def test_the_loss_is_paired_over_prompts() -> None:
    """Prompts that differ much from each other, and all lose the same, leave a narrow interval."""
    own = [[Round(8, n, n + 1)] * 10 for n in range(2, 8)]
    other = [[Round(8, n - 1, n)] * 10 for n in range(2, 8)]
    low, high = paired_interval(own, other) or (0.0, 0.0)
    assert low == pytest.approx(1.0)
    assert high == pytest.approx(1.0)
