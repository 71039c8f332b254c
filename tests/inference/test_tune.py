"""Tuning: what is chosen, where it lies, what it holds for, and that decoding goes by it."""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from calls import generate
from drafts import endless, own_greedy, prompt_of
from tiny import tiny_head

from drafthead.heads import load_head
from drafthead.heads.base import DraftHead
from drafthead.heads.contract import fingerprint
from drafthead.inference import tuning as files
from drafthead.inference.costs import Costs
from drafthead.inference.grow import drafting
from drafthead.inference.machine import machine
from drafthead.inference.sibling import Sibling
from drafthead.inference.target import Target
from drafthead.inference.tree import OFF, UNTUNED, TreeShape, parse_shape
from drafthead.inference.tune import Timed, Trial, best, compete, gain, rate, tune, tuned_shape
from drafthead.inference.tuning import Tuning, cached, place_for, read, tuned, write

COSTS = Costs((1, 5), (1.0, 1.2), extend=0.1, step=0.05, widths=(1, 4), steps=(0.05, 0.08))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's cache of its own, and nothing said yet."""
    monkeypatch.setenv("DRAFTHEAD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(files, "_TOLD", set())
    return tmp_path / "cache"


@pytest.fixture
def head(target32: Target, tmp_path: Path) -> DraftHead:
    """An untrained head out of a folder."""
    tiny_head(target32.model).save_pretrained(tmp_path / "head")  # type: ignore[arg-type]
    head = load_head(tmp_path / "head")
    head.bind(target32.model)
    return head


def tuning_for(target: Target, head: DraftHead, **shapes: str) -> Tuning:
    by_batch: dict[int, TreeShape] = {int(n[1:]): parse_shape(s) for n, s in shapes.items()}
    return Tuning(
        machine=machine(target.device),
        dtype="float32",
        target=fingerprint(target.model),
        head=fingerprint(head),
        shapes=by_batch,
        costs=dict.fromkeys(by_batch, COSTS),
        measured={1: {"off": 15.0, "chain:2": 16.5}},
        gains={1: {"chain:2": [1.1, 1.05, 1.15]}},
        prompts=3,
        date="2026-01-01T00:00:00+00:00",
    )


def forbid(head: DraftHead, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every draft call of a head be an error."""

    def never(*given: object) -> None:
        raise AssertionError("the head was asked")

    for name in ("open", "extend", "expand"):
        monkeypatch.setattr(head, name, never)


class Forwards:
    """Counts the forwards of a target, and those with a listener to its layers."""

    def __init__(self, target: Target) -> None:
        self.count = self.captured = 0
        self.model = target.model
        self._before = self._listeners()

    def _listeners(self) -> int:
        return sum(len(module._forward_hooks) for module in self.model.modules())

    def _note(self, *given: object) -> None:
        self.count += 1
        self.captured += self._listeners() > self._before

    def __enter__(self) -> Forwards:
        self._handle = self.model.register_forward_pre_hook(self._note)
        return self

    def __exit__(self, *error: object) -> None:
        self._handle.remove()


# The file


def test_a_tuning_is_read_as_it_was_written(
    target32: Target, head: DraftHead, tmp_path: Path
) -> None:
    tuning = tuning_for(
        target32, head, b1="auto:6x4:20", b4="stop:7:0.3", b16="off", b64="static:0,1,0.0"
    )
    write(tuning, tmp_path / "new" / "tuning.json")
    assert read(tmp_path / "new" / "tuning.json") == tuning
    values = json.loads((tmp_path / "new" / "tuning.json").read_text())
    assert values["format"] == 1
    assert values["shapes"] == {
        "1": "auto:6x4:20", "4": "stop:7:0.3", "16": "off", "64": "static:0,1,0.0"
    }  # fmt: skip
    assert values["costs"]["4"]["tokens"] == [1, 5]
    assert {"tokens", "seconds", "extend", "step"} <= values["costs"]["1"].keys()
    assert {"machine", "dtype", "target", "measured", "prompts", "date"} <= values.keys()


def test_a_batch_between_goes_by_the_next_larger_which_drafts_less(
    target32: Target, head: DraftHead, tmp_path: Path
) -> None:
    write(
        tuning_for(target32, head, b1="chain:4", b4="chain:2", b16="off"), tmp_path / "tuning.json"
    )
    shapes = [str(tuned_shape(tmp_path, target32, batch)) for batch in (1, 2, 4, 5, 16, 99)]
    assert shapes == ["chain:4", "chain:2", "chain:2", "off", "off", "off"]
    here = tuned(tmp_path, target32, 2)
    larger = tuned(tmp_path, target32, 17)
    assert here is not None
    assert here.costs == COSTS
    assert larger is not None
    assert larger.costs is None, "those of a smaller batch say nothing"


@pytest.mark.parametrize("what", ["machine", "dtype", "target", "head"])
def test_a_tuning_of_something_else_is_not_used_which_is_said_once(
    what: str, target32: Target, head: DraftHead, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    good = tuning_for(target32, head, b1="chain:2")
    other = {"machine": {**good.machine, "threads": 99}, "dtype": "bfloat16"}
    write(
        dataclasses.replace(good, **{what: other.get(what, "f00d")}), tmp_path / "head/tuning.json"
    )
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert drafting(head, None, target32).shape == UNTUNED
    assert caplog.text.count(f"was measured with another {what}: not used") == 1
    write(good, cached(tmp_path / "head"))
    assert str(drafting(head, None, target32).shape) == "chain:2", "this machine's own is"


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"format": 2}', '{"format": 1, "shapes": {"1": "chain:2"}}']
)
def test_a_torn_file_is_one_line(text: str, target32: Target, tmp_path: Path) -> None:
    (tmp_path / "tuning.json").write_text(text)
    with pytest.raises(ValueError, match=r"tuning.json: no tuning of a head .*tune again") as error:
        tuned_shape(tmp_path, target32, 1)
    assert "\n" not in str(error.value)


def test_no_file_and_no_folder_is_no_tuning(target32: Target, tmp_path: Path) -> None:
    assert tuned_shape(tmp_path, target32, 1) is None
    assert tuned_shape(None, target32, 1) is None


def test_it_lies_beside_the_head_or_in_the_cache(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from drafthead.data.embedded import reference_head

    assert place_for(tmp_path) == tmp_path / "tuning.json"
    assert place_for(reference_head()).parent == cache / "tuning", "package data stays as it is"
    monkeypatch.setattr(files.os, "access", lambda *given: False)
    assert place_for(tmp_path).parent == cache / "tuning"
    assert cached(tmp_path / "a") != cached(tmp_path / "b")


# Decoding by it


def test_speculate_drafts_in_the_tuned_shape_of_its_rows_and_as_asked_where_asked(
    target32: Target, head: DraftHead, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tuning_for(target32, head, b1="tree:2x3:5", b2="off"), tmp_path / "head/tuning.json")
    prompts, levels = [prompt_of(6), prompt_of(9)], []
    inner = head.expand

    def watched(state: Any, ids: Any, parents: Any) -> Any:
        levels.append(tuple(ids.shape))
        return inner(state, ids, parents)

    monkeypatch.setattr(head, "expand", watched)
    text = own_greedy(target32, prompts[0], 12)
    assert generate(target32, head, prompts[:1]).tolist() == [text]
    assert set(levels) == {(1, 3)}
    levels.clear()
    generate(target32, head, prompts)
    assert not levels, "two rows: off"
    generate(target32, head, prompts, tree="chain:3")
    assert set(levels) == {(2, 1)}


def test_a_tuned_tree_that_a_rule_cannot_verify_gives_way_to_a_chain(
    target32: Target, head: DraftHead, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tuning_for(target32, head, b1="tree:4x3:9"), tmp_path / "head/tuning.json")
    with caplog.at_level(logging.WARNING):
        assert drafting(head, None, target32, rule="block").shape == UNTUNED
    assert "rule 'block' cannot verify the tuned tree:4x3:9: a chain" in caplog.text
    out = generate(target32, head, [prompt_of(5)], rule="rejection", do_sample=True, seed=1)
    assert out.shape == (1, 5 + 12)


@pytest.mark.parametrize("rule", ["coupled", "block"])
def test_off_asks_no_head_and_captures_no_states(
    rule: str, target32: Target, head: DraftHead, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Target forwards equal tokens: the prefill's, and one for each of the others."""
    forbid(head, monkeypatch)
    prompt = prompt_of(7)
    text = own_greedy(target32, prompt, 12)
    with Forwards(target32) as counted:
        assert generate(target32, head, [prompt], tree="off", rule=rule).tolist() == [text]
    assert (counted.count, counted.captured) == (12, 0)


# The choice


def test_a_useless_head_is_tuned_off_and_then_never_asked(
    target32: Target, head: DraftHead, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial = Trial(max_new_tokens=10, repeats=1, clock="cpu")
    found = tune(target32, head, [prompt_of(5), prompt_of(8)], [1, 2], trial)
    assert found.shapes == {1: OFF, 2: OFF}
    write(found, place_for(tmp_path / "head"))
    forbid(head, monkeypatch)
    prompt = prompt_of(7)
    text = own_greedy(target32, prompt, 12)
    with Forwards(target32) as counted:
        assert generate(target32, head, [prompt]).tolist() == [text]
    assert (counted.count, counted.captured) == (12, 0)


def test_a_head_that_is_always_right_and_cheap_drafts_deep() -> None:
    """The target's layers past the first add nothing, so its first layer is all of it."""
    model, small = endless(num_layers=16), endless(num_layers=1)
    with torch.no_grad():
        for layer in model.model.layers[1:]:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        weights = {name: model.state_dict()[name] for name in small.state_dict()}
        small.load_state_dict(weights)
    target = Target(model)
    sibling = Sibling.of(small, None, target, check=False)
    trial = Trial(max_new_tokens=14, repeats=1, clock="cpu")
    stages: list[str] = []
    found = tune(target, sibling, [prompt_of(5), prompt_of(8)], [1], trial, stage=stages.append)
    shape = found.shapes[1]
    assert shape.depth >= 3
    assert found.gains[1][str(shape)][1] > 1
    assert found.measured[1][str(shape)] == max(found.measured[1].values())
    assert "off" in found.measured[1]
    assert stages == ["recording drafts", "batch 1: measuring costs"]
    assert found.costs[1].step == pytest.approx(found.costs[1].going_on(1), rel=1)


def timed(*seconds: float, tokens: int = 10) -> list[Timed]:
    return [Timed(tokens, each, 1.0) for each in seconds]


def test_the_fastest_is_chosen_of_those_that_beat_plain_beyond_chance() -> None:
    slow, sure, lucky = (parse_shape(text) for text in ("chain:1", "chain:2", "tree:3x3:9"))
    plain = timed(1.0, 1.1, 0.9, 1.0)
    times = {
        OFF: plain,
        slow: timed(1.2, 1.3, 1.1, 1.2),
        sure: timed(0.8, 0.9, 0.7, 0.8),
        lucky: timed(0.1, 1.2, 1.0, 1.1),
    }
    assert best(times) == sure
    assert best({OFF: plain, slow: times[slow], lucky: times[lucky]}) == OFF
    assert best({OFF: []}) == OFF
    ratio, low, high = gain(times[sure], plain)
    assert ratio == pytest.approx(4.0 / 3.2)
    assert 1 < low < ratio < high
    assert best(times, clock="cpu") == OFF, "by the other clock all are alike"


def test_a_fixed_shape_has_to_beat_one_that_adapts_beyond_chance() -> None:
    """Prompts to tune on are few: what is a little faster there may be slower on others."""
    fixed, adapting = parse_shape("tree:2x6:16"), parse_shape("auto:4x8:32")
    plain, other = timed(1.0, 1.1, 0.9, 1.0), timed(0.7, 0.9, 0.7, 0.8)
    close = {OFF: plain, fixed: timed(0.8, 0.8, 0.6, 0.7), adapting: other}
    assert rate(close[fixed]) > rate(close[adapting])
    assert best(close) == adapting
    clear = {**close, fixed: timed(0.5, 0.6, 0.5, 0.5)}
    assert best(clear) == fixed
    assert best({**clear, adapting: timed(1.0, 1.2, 1.0, 1.0)}) == fixed


def test_few_prompts_are_decoded_more_than_once(target32: Target, head: DraftHead) -> None:
    """So that there is an interval, also of a batch that takes all prompts at a time."""
    shape, trial = parse_shape("chain:1"), Trial(max_new_tokens=4)
    prompts = [prompt_of(5), prompt_of(8), prompt_of(7)]
    for batch in (1, 2, 3):
        times = compete(target32, head, prompts, [shape], COSTS, batch, trial)
        assert {len(taken) for taken in times.values()} == {6}


@pytest.mark.parametrize(
    ("prompts", "batches", "trial", "said"),
    [
        ([], [1], Trial(), "no prompts"),
        ([[5, 6]], [0], Trial(), r"batch sizes \[0\]"),
        ([[5, 6]], [1], Trial(clock="sun"), "clock 'sun': choose one of wall, cpu"),
    ],
)
def test_what_cannot_be_tuned_is_refused(
    prompts: list[list[int]],
    batches: list[int],
    trial: Trial,
    said: str,
    target32: Target,
    head: DraftHead,
) -> None:
    with pytest.raises(ValueError, match=said):
        tune(target32, head, prompts, batches, trial)
