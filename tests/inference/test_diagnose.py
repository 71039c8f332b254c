"""Faults planted where users meet them, each of which the diagnosis has to call by its name."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from by_heart import asked, learnt, plain_target, texts_of
from safetensors.torch import load_file, save_file
from tiny import CHATML, tiny_tokenizer
from torch import Tensor

from drafthead.heads import load_head
from drafthead.heads.base import DraftHead, HeadSettings
from drafthead.heads.block import BlockSettings
from drafthead.heads.borrowing import BorrowingHead
from drafthead.heads.contract import LAST
from drafthead.heads.eagle import EagleSettings
from drafthead.heads.eagle3 import Eagle3Settings
from drafthead.inference.diagnose import Rendered, Text, causes, diagnose
from drafthead.inference.simulate import simulate
from drafthead.inference.target import Target

DEPTH = 3
LAYERS = (2, 3, 5)
HEADS: dict[str, tuple[HeadSettings, tuple[int, ...]]] = {
    "eagle3": (Eagle3Settings(draft_vocab_size=200, layers=LAYERS, own_rows=True), LAYERS),
    "eagle": (EagleSettings(draft_vocab_size=200, feature_noise=0.0), (LAST,)),
    "block": (
        BlockSettings(
            draft_vocab_size=200,
            layers=LAYERS,
            unroll_steps=DEPTH,
            num_layers=1,
            markov_rank=16,
            confidence=False,
            anchor_share=1.0,
        ),
        LAYERS,
    ),
}


@dataclass
class Ground:
    """A target, texts of it, and for each head its folder and what training expects of it."""

    target: Target
    prompts: list[list[int]]
    texts: list[Text]
    root: Path
    expected: dict[str, float]


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Ground:
    target, root = plain_target(), tmp_path_factory.mktemp("heads")
    prompts = asked(target)
    texts: list[Text] = list(texts_of(target, prompts))
    expected = {}
    for name, (settings, layers) in HEADS.items():
        depth = DEPTH if name == "block" else 2
        head = learnt(target, settings, layers, texts, depth=depth)  # type: ignore[arg-type]
        head.save_pretrained(root / name)
        expected[name] = simulate(head, target, texts, DEPTH).tau
    assert min(expected.values()) > 1.5, "nothing would show"
    return Ground(target, prompts, texts, root, expected)


def served(ground: Ground, folder: Path, target: Target | None = None) -> DraftHead:
    head = load_head(folder)
    head.bind((target or ground.target).model)
    return head


# Plants: each gives the head, target and texts as they are then served


@dataclass
class Planted:
    head: DraftHead
    target: Target
    texts: Sequence[Text]
    rendered: Sequence[Rendered] = ()


Plant = Callable[[Ground, random.Random, str, Path], Planted]


def edited(
    ground: Ground, name: str, folder: Path, edit: Callable[[dict[str, Any]], None]
) -> Planted:
    """The saved folder with another config.json."""
    shutil.copytree(ground.root / name, folder)
    config = json.loads((folder / "config.json").read_text())
    edit(config)
    (folder / "config.json").write_text(json.dumps(config))
    return Planted(served(ground, folder), ground.target, ground.texts)


class OffByOne(Target):
    """It serves the states of one layer on, or one before."""

    step = 1

    def _capture(self, layers: Sequence[int]) -> AbstractContextManager[dict[int, Tensor]]:
        return super()._capture([layer + self.step for layer in layers])


class NormedTwice(Target):
    """It puts the last states through the final norm once more."""

    def _features(self, captured: Any) -> Tensor | None:
        found = super()._features(captured)
        return None if found is None else self.model.get_decoder().norm(found)


def layer(ground: Ground, rng: random.Random, name: str, folder: Path) -> Planted:
    step = rng.choice([1, -1])
    if rng.random() < 0.5:
        target = OffByOne(ground.target.model, ground.target.tokenizer)
        target.step = step
        return Planted(served(ground, ground.root / name), target, ground.texts)

    def edit(config: dict[str, Any]) -> None:
        moved = [layer + step for layer in LAYERS]
        config["contract"]["layers"] = config["settings"]["layers"] = moved

    return edited(ground, name, folder, edit)


def norm(ground: Ground, rng: random.Random, name: str, folder: Path) -> Planted:
    if name == "eagle3":
        return edited(
            ground, name, folder, lambda config: config["settings"].update(norm_output=True)
        )
    if rng.random() < 0.5:
        target = NormedTwice(ground.target.model, ground.target.tokenizer)
        return Planted(served(ground, ground.root / name), target, ground.texts)
    last = ground.target.num_layers
    return edited(ground, name, folder, lambda config: config["contract"].update(layers=[last]))


def template(ground: Ground, rng: random.Random, name: str, folder: Path) -> Planted:
    old, new = rng.choice(
        [("You are a small assistant", "You help"), ("<|im_start|>assistant\n", ""), ("\n", " ")]
    )
    tokenizer = tiny_tokenizer(template=CHATML.replace(old, new))
    target = Target(ground.target.model, tokenizer)
    prompts = asked(target)
    rendered = list(zip(ground.prompts, prompts, strict=True))
    return Planted(
        served(ground, ground.root / name), target, list(texts_of(target, prompts)), rendered
    )


def vocabulary(ground: Ground, rng: random.Random, name: str, folder: Path) -> Planted:
    step = rng.choice([1, -1])
    if name == "eagle3" and rng.random() < 0.5:  # with rows of its own a stored map does it
        shutil.copytree(ground.root / name, folder)
        tensors = load_file(folder / "model.safetensors")
        ids = tensors["d2t"] + torch.arange(len(tensors["d2t"])) + step
        moved = ids.clamp(0, ground.target.vocab_size - 1)
        if len(moved.unique()) == len(moved):
            tensors["d2t"] = moved - torch.arange(len(moved))
            tensors["t2d"] = torch.zeros_like(tensors["t2d"]).index_fill_(0, moved, True)
            save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
            return Planted(served(ground, folder), ground.target, ground.texts)
    head = served(ground, ground.root / name)
    assert isinstance(head, BorrowingHead)
    head.d2t.copy_((head.draft_ids + step).clamp(0, 511) - torch.arange(len(head.d2t)))
    return Planted(head, ground.target, ground.texts)


def rotary(ground: Ground, rng: random.Random, name: str, folder: Path) -> Planted:
    base = rng.choice([50.0, 500.0, 200_000.0, 3_000_000.0])

    def edit(config: dict[str, Any]) -> None:
        config["rope_parameters"]["rope_theta"] = base

    return edited(ground, name, folder, edit)


CASES: list[tuple[str, Plant, str, int]] = [
    *(("layer", layer, name, seed) for name in ("eagle3", "block") for seed in (0, 1, 3, 5)),
    *(("norm", norm, name, seed) for name, seed in (("eagle", 0), ("eagle", 1), ("eagle3", 0))),
    *(("template", template, "eagle3", seed) for seed in (0, 1)),
    *(
        ("vocabulary map", vocabulary, name, seed)
        for name in ("eagle3", "eagle")
        for seed in (0, 1)
    ),
    *(("rotary base", rotary, name, seed) for name in ("eagle3", "block") for seed in (0, 1)),
]


@pytest.mark.parametrize(("cause", "plant", "name", "seed"), CASES)
def test_f16_f36_a_fault_planted_at_random_is_called_by_its_name(
    ground: Ground, tmp_path: Path, cause: str, plant: Plant, name: str, seed: int
) -> None:
    given = plant(ground, random.Random(f"{cause} {seed}"), name, tmp_path / "head")
    found = diagnose(
        given.head,
        given.target,
        given.texts,
        ground.expected[name],
        DEPTH,
        rendered=given.rendered,
    )
    tau = simulate(given.head, given.target, given.texts, DEPTH).tau
    assert tau < 0.97 * ground.expected[name], "the fault shows, or there is nothing to name"
    assert [finding.cause for finding in causes(found)] == [cause], found
    assert causes(found)[0].undone == pytest.approx(ground.expected[name], rel=0.02)
    assert causes(found)[0].tau == pytest.approx(tau)


@pytest.mark.parametrize("name", HEADS)
def test_a_healthy_head_gets_no_cause_and_is_left_as_it_was(ground: Ground, name: str) -> None:
    head = served(ground, ground.root / name)
    before = {n: t.clone() for n, t in [*head.named_parameters(), *head.named_buffers()]}
    rendered = [(prompt, prompt) for prompt in ground.prompts]
    expected = ground.expected[name]
    found = diagnose(
        head, ground.target, ground.texts, expected, DEPTH, rendered=rendered, decoded=expected
    )
    assert not causes(found)
    assert all(f.tau == pytest.approx(expected) for f in found)
    others = [f.undone for f in found if f.undone is not None and f.cause != "decoding"]
    assert others
    assert max(others) < 1.1 * expected, "to undo what is right helps nothing"
    after = dict([*head.named_parameters(), *head.named_buffers()])
    assert all(torch.equal(after[n], t) for n, t in before.items())
    assert simulate(head, ground.target, ground.texts, DEPTH).tau == expected


def test_other_rows_than_the_targets_are_named(ground: Ground) -> None:
    """An embedding of another target, bound with no check."""
    head = served(ground, ground.root / "block")
    assert isinstance(head, BorrowingHead)
    assert head.embedding is not None
    head.embedding = head.embedding.flip(0)
    found = diagnose(head, ground.target, ground.texts, ground.expected["block"], DEPTH)
    assert [finding.cause for finding in causes(found)] == ["embedding and rows"]


def test_a_fault_of_none_of_these_kinds_gets_no_name(ground: Ground) -> None:
    head = served(ground, ground.root / "eagle3")
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(parameter.flatten().flip(0).view_as(parameter))
    found = diagnose(head, ground.target, ground.texts, ground.expected["eagle3"], DEPTH)
    assert not causes(found)


def test_where_only_drafting_is_wrong_it_is_called_decoding(ground: Ground) -> None:
    head = served(ground, ground.root / "eagle3")
    expected = ground.expected["eagle3"]
    found = diagnose(head, ground.target, ground.texts, expected, DEPTH, decoded=1.02)
    assert [finding.cause for finding in causes(found)] == ["decoding"]
