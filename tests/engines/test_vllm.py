"""Exports loaded by vLLM: what it drafts is what the head drafts here, and wrong exports show.

One process starts all engines, one after the other, a few seconds each. The target is tiny and
random, of eight layers, so that the captured states differ; so are the heads.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from tiny import greedy_batches, tiny_target, tiny_tokenizer
from transformers import LlamaForCausalLM

from drafthead.heads.block import BlockSettings
from drafthead.heads.borrowing import BorrowingHead, BorrowingSettings
from drafthead.heads.contract import describe
from drafthead.heads.eagle import EagleSettings
from drafthead.heads.eagle3 import Eagle3Settings
from drafthead.heads.layouts.files import write_folder
from drafthead.heads.layouts.layout import Stored, layout_of
from drafthead.heads.medusa import MedusaSettings
from drafthead.inference.engine_check import (
    DEPTH,
    Decoded,
    EngineResult,
    Job,
    chained,
    check,
    compared,
    run_engine,
)
from drafthead.inference.target import Target

pytestmark = pytest.mark.timeout(3600)  # the first test waits for all engines

NEW = 24
REDUCED = torch.arange(0, 512, 3)
SIZE = len(REDUCED)


@dataclass(frozen=True)
class Case:
    """A head, and how it is exported."""

    settings: BorrowingSettings
    method: str
    format: str = "vllm"
    fitted: bool = False
    """Started in closed form on the target's own texts, so that drafts are accepted."""


DFLASH = BlockSettings(
    draft_vocab_size=None,
    unroll_steps=4,
    anchor_predicts=False,
    norm_features=False,
    markov_rank=0,
    confidence=False,
    mask_token_id=9,
)
PLAIN3 = Eagle3Settings(draft_vocab_size=None, norm_features=False)

CASES = {
    "eagle": Case(EagleSettings(draft_vocab_size=None), "eagle"),
    "eagle-fitted": Case(EagleSettings(draft_vocab_size=None), "eagle", fitted=True),
    "eagle3": Case(PLAIN3, "eagle3"),
    "eagle3-fc-norm": Case(Eagle3Settings(draft_vocab_size=None), "eagle3"),
    "eagle3-fitted": Case(Eagle3Settings(draft_vocab_size=None), "eagle3", fitted=True),
    "eagle3-ids": Case(PLAIN3.model_copy(update={"layers": (1, 3, 8)}), "eagle3"),
    "eagle3-two-ids": Case(PLAIN3.model_copy(update={"layers": (2, 6)}), "eagle3"),
    "eagle3-reduced": Case(Eagle3Settings(draft_vocab_size=SIZE, own_rows=True), "eagle3"),
    "eagle3-reduced-borrowed": Case(Eagle3Settings(draft_vocab_size=SIZE), "eagle3"),
    "eagle3-layers": Case(PLAIN3.model_copy(update={"num_layers": 3}), "eagle3"),
    "eagle3-norm-output": Case(PLAIN3.model_copy(update={"norm_output": True}), "eagle3"),
    "eagle3-both-norms": Case(
        PLAIN3.model_copy(update={"norm_before_residual": True, "norm_before_fc": True}), "eagle3"
    ),
    "medusa": Case(MedusaSettings(draft_vocab_size=None, unroll_steps=3), "medusa"),
    "medusa-own-rows": Case(
        MedusaSettings(draft_vocab_size=None, own_rows=True, blocks=2, unroll_steps=4), "medusa"
    ),
    "dflash": Case(DFLASH, "dflash"),
    "dflash-reduced": Case(
        DFLASH.model_copy(update={"draft_vocab_size": SIZE, "mask_token_id": None}), "dflash"
    ),
    "dflash-one-layer": Case(DFLASH.model_copy(update={"num_layers": 1}), "dflash"),
    "speculators-eagle3": Case(
        Eagle3Settings(draft_vocab_size=SIZE, layers=(2, 6)), "eagle3", "speculators"
    ),
    "speculators-dflash": Case(DFLASH, "dflash", "speculators"),
}

MENDED = {"dflash", "dflash-reduced", "speculators-dflash"}
"""Cases of several DFlash layers, which vLLM's CPU kernel would norm wrongly."""
UNMENDED = "dflash as the engine runs it"

Spoil = Callable[[Stored], Stored]


def saying(**fields: object) -> Spoil:
    """Other fields in the config."""
    return lambda stored: replace(stored, config={**stored.config, **fields})


def holding(change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor | None]]) -> Spoil:
    """Other tensors in the file; None takes one away."""

    def spoil(stored: Stored) -> Stored:
        tensors = {**stored.tensors, **change(stored.tensors)}
        return replace(stored, tensors={k: v for k, v in tensors.items() if v is not None})

    return spoil


def halves_swapped(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor | None]:
    return {"fc.weight": tensors["fc.weight"].roll(64, dims=1)}


def one_later(stored: Stored) -> Stored:
    ids = [layer + 1 for layer in stored.config["eagle_aux_hidden_state_layer_ids"]]
    return saying(eagle_aux_hidden_state_layer_ids=ids)(stored)


WRONG: dict[str, tuple[str, Spoil]] = {
    "halves of fc swapped": ("eagle", holding(halves_swapped)),
    "ids of the other convention": (
        "eagle3-ids",
        saying(eagle_aux_hidden_state_layer_ids=[0, 2, 7]),
    ),
    "the residual after its norm": ("eagle3", saying(norm_before_residual=True)),
    "the state before its norm fed back": ("eagle3-norm-output", saying(norm_output=False)),
    "no map of the reduced vocabulary": (
        "eagle3-reduced",
        holding(lambda tensors: {"d2t": None}),
    ),
    "biases not read": ("medusa", saying(medusa_fc_bias=False)),
    "DFlash ids one later": ("dflash", one_later),
    "blocks made causal": ("speculators-dflash", saying(sliding_window_non_causal=False)),
}
"""Exports that the engine takes without a word, and drafts something else with."""

REFUSED: dict[str, tuple[str, Spoil]] = {
    "a map of the whole vocabulary": (
        "eagle3",
        holding(lambda tensors: {"d2t": torch.zeros(512, dtype=torch.int64)}),
    ),
    "output rows of EAGLE-1": (
        "eagle",
        holding(lambda tensors: {"lm_head.weight": torch.zeros(512, 64)}),
    ),
}


@pytest.fixture(scope="module")
def target() -> LlamaForCausalLM:
    return tiny_target(head_dim=32)


@pytest.fixture(scope="module")
def heads(target: LlamaForCausalLM) -> dict[str, BorrowingHead]:
    return {name: made(case, target) for name, case in CASES.items()}


def made(case: Case, target: LlamaForCausalLM) -> BorrowingHead:
    """A bound head, its weights random and large enough that every part shows, or fitted."""
    layers = case.settings.captured(target.config.num_hidden_layers)
    ids = None if case.settings.draft_vocab_size is None else REDUCED
    with torch.random.fork_rng():
        torch.manual_seed(4)
        head = case.settings.build(describe(target, None, layers, {}), target.config, ids)
        assert isinstance(head, BorrowingHead)
        head.bind(target)
        if case.fitted:
            head.warm_start(greedy_batches(target, 6, layers))
        else:
            with torch.no_grad():
                for parameter in head.parameters():
                    spread = 0.3 if parameter.dim() < 2 else 2.0 * parameter.shape[-1] ** -0.5
                    parameter.add_(spread * torch.randn_like(parameter))
    return head.eval()


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(3, 512, (n,), generator=generator).tolist() for n in (5, 9, 14, 23, 7, 2)]


@pytest.fixture(scope="module")
def folder(target: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("engines")
    target.save_pretrained(out / "target")
    tiny_tokenizer().save_pretrained(out / "target")
    return out


@pytest.fixture(scope="module")
def answers(
    request: pytest.FixtureRequest,
    engine_python: Path,
    heads: dict[str, BorrowingHead],
    prompts: list[list[int]],
    folder: Path,
) -> dict[str, Decoded | str]:
    """Give what the engine makes of every export, right and wrong, that a test will ask for."""
    calls = [getattr(item, "callspec", None) for item in request.session.items]
    asked = {call.params.get("name") for call in calls if call}
    jobs: dict[str, Job] = {}

    def add(name: str, of: str, stored: Stored) -> None:
        draft = write_folder(stored, folder / f"draft-{len(jobs)}")
        depth = heads[of].max_depth or DEPTH
        jobs[name] = Job(str(folder / "target"), str(draft), CASES[of].method, depth, prompts, NEW)

    stored = {
        name: layout_of(CASES[name].format, head).write(head, torch.float32)
        for name, head in heads.items()
    }
    for name in CASES:
        add(name, name, stored[name])
    jobs[UNMENDED] = replace(jobs["dflash"], as_it_is=True)
    for name, (of, spoil) in {**WRONG, **REFUSED}.items():
        add(name, of, spoil(stored[of]))
    jobs = {name: job for name, job in jobs.items() if name in asked}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(folder))  # where the log of a refusal stays
        made = run_engine(engine_python, list(jobs.values()))
    return dict(zip(jobs, made, strict=True))


@pytest.fixture(scope="module")
def result(
    answers: dict[str, Decoded | str],
    heads: dict[str, BorrowingHead],
    target: LlamaForCausalLM,
    prompts: list[list[int]],
) -> Callable[[str, str], EngineResult]:
    """Give the comparison of an export by name with the head that it was made of."""

    def compare(name: str, of: str) -> EngineResult:
        answer, depth = answers[name], heads[of].max_depth or DEPTH
        assert isinstance(answer, Decoded), answer
        return compared(chained(Target(target), heads[of], prompts, depth, NEW), answer)

    return compare


@pytest.mark.parametrize("name", CASES)
def test_the_engine_drafts_what_the_head_drafts(
    name: str, result: Callable[[str, str], EngineResult]
) -> None:
    found = result(name, name)
    assert found.passed, found.line()
    assert found.drafts_equal == found.drafts > 5 * found.prompts
    assert bool(found.mended) == (name in MENDED)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.fitted])
def test_accepted_drafts_are_among_them(
    name: str, result: Callable[[str, str], EngineResult]
) -> None:
    assert result(name, name).our_tau > 1.2


@pytest.mark.parametrize("name", [UNMENDED])
def test_the_cpu_kernel_norms_all_context_keys_alike(
    name: str, result: Callable[[str, str], EngineResult]
) -> None:
    """Why the driver mends DFlash of several layers: where this fails, vLLM has done so itself."""
    found = result(name, "dflash")
    assert not found.mended
    assert found.drafts_equal < found.drafts


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_export_drafts_otherwise_and_leaves_the_text(
    name: str, result: Callable[[str, str], EngineResult]
) -> None:
    found = result(name, WRONG[name][0])
    assert not found.passed, found.line()
    assert found.first_drafts_equal < found.prompts
    assert found.drafts_equal < 0.75 * found.drafts
    assert found.texts_equal == found.prompts


@pytest.mark.parametrize("name", REFUSED)
def test_the_engine_refuses(name: str, answers: dict[str, Decoded | str]) -> None:
    answer = answers[name]
    assert isinstance(answer, str)
    assert answer.startswith("the engine refused the export")
    assert "\n" not in answer


def test_check_does_all_of_it(
    engine_python: Path, heads: dict[str, BorrowingHead], prompts: list[list[int]], folder: Path
) -> None:
    head = heads["eagle3-fitted"]
    exported = folder / "checked"
    write_folder(layout_of("vllm", head).write(head, torch.float32), exported)
    found = check(str(folder / "target"), head, exported, engine_python, prompts[:3], NEW, "eagle3")
    assert found.passed
    assert "3 of 3 equal" in found.line()
