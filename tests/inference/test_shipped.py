"""The self-test of an export: what it compares, and that nothing has a name before it passed."""

from __future__ import annotations

import copy
import json
import os
import resource
import signal
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from ladder import REDUCED, SIZE, ladder_head
from safetensors.torch import load_file
from tiny import tiny_head, tiny_target
from torch import Tensor
from transformers import LlamaForCausalLM

from drafthead.heads.borrowing import BorrowingHead
from drafthead.heads.contract import describe
from drafthead.heads.eagle3 import Eagle3Head, Eagle3Settings
from drafthead.heads.layouts.files import load_foreign
from drafthead.heads.layouts.layout import Layout, LayoutError, Stored, layout_of
from drafthead.heads.layouts.serve import uses_of
from drafthead.heads.layouts.whole import whole_vocabulary
from drafthead.inference.shipped import (
    Chained,
    Decoding,
    ShippedError,
    asked_of,
    probe,
    ship,
    unlike,
    unnamed,
)
from drafthead.inference.target import Target

PROMPTS = [[1, 5, 9, 30, 7], [1, 88, 3], [2, 200, 40, 41]]


@pytest.fixture(scope="module")
def target() -> LlamaForCausalLM:
    return tiny_target()


def reduced(target: LlamaForCausalLM, **options: Any) -> Eagle3Head:
    settings = Eagle3Settings(draft_vocab_size=SIZE, **options)
    return tiny_head(target, settings, REDUCED)


@pytest.mark.parametrize("format", ["vllm", "speculators"])
def test_an_export_is_the_same_head_down_to_its_drafts(
    format: str, target: LlamaForCausalLM, tmp_path: Path
) -> None:
    head, out = reduced(target), tmp_path / "new" / "out"
    before = {name: value.clone() for name, value in head.state_dict().items()}
    decoding = Decoding(Target(target), PROMPTS, tokens=8)
    made = ship(head, layout_of(format, head), out, torch.float32, target, decoding)
    assert made.tau is not None
    assert made.tau[0] == made.tau[1]
    assert made.before == made.after
    assert made.prompts == len(PROMPTS)
    assert made.before is not None
    assert [len(ids) for ids in made.before.ids] == [len(prompt) + 8 for prompt in PROMPTS]
    assert all(rounds[0][0] == 4 for rounds in made.before.rounds), "a chain was drafted"
    assert made.size == sum(file.stat().st_size for file in out.iterdir())
    assert [file.name for file in tmp_path.glob("new/*")] == ["out"]
    assert all(value.equal(before[name]) for name, value in head.state_dict().items())
    assert out.joinpath("model.safetensors").stat().st_mode & 0o044 == 0o044 & ~_umask()


def _umask() -> int:
    now = os.umask(0)
    os.umask(now)
    return now


def test_f69_another_dtype_is_the_rounded_head(target: LlamaForCausalLM, tmp_path: Path) -> None:
    head = reduced(target)
    decoding = Decoding(Target(target), PROMPTS[:1], tokens=4)
    sizes = {}
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        out = tmp_path / str(dtype)
        # In another dtype than the head's and the target's drafts may differ, and are shown.
        asked = decoding if dtype == torch.bfloat16 else None
        made = ship(head, layout_of("vllm", head), out, dtype, target, asked)
        assert (made.tau is None) == (asked is None)
        sizes[dtype] = made.size
        kinds = {x.dtype for x in load_file(out / "model.safetensors").values()}
        assert kinds == {dtype, torch.int64, torch.bool}
        assert json.loads((out / "config.json").read_text())["dtype"] == made.dtype
    assert head.dtype == torch.float32
    assert sizes[torch.bfloat16] == pytest.approx(sizes[torch.float32] / 2, rel=0.05)


def test_a_weight_that_the_dtype_does_not_hold_is_named(
    target: LlamaForCausalLM, tmp_path: Path
) -> None:
    head = reduced(target)
    with torch.no_grad():
        head.fc.weight[3, 4] = 1e6
    with pytest.raises(ValueError, match=r"--dtype float16: fc.weight is not finite in it; use b"):
        ship(head, layout_of("vllm", head), tmp_path / "out", torch.float16, target)
    assert not [*tmp_path.iterdir()]


def _other_flag(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    config["norm_output"] = True


FAULTS: dict[str, tuple[Callable[[dict[str, Any], dict[str, Tensor]], Any], str]] = {
    "value": (lambda c, t: t["layers.0.mlp.up_proj.weight"][0, 0].add_(1e-4), "up_proj.weight dif"),
    "rows": (lambda c, t: t["lm_head.weight"][5].mul_(1.01), "lm_head.weight differs"),
    "map": (lambda c, t: t["d2t"].zero_(), "d2t is no map"),
    "layers": (
        lambda c, t: c.update(eagle_aux_hidden_state_layer_ids=[2, 4, 6]),
        r"layers is \(2, 4, 6\)",
    ),
    "flag": (_other_flag, "its draft logits are others"),
    "base": (
        lambda c, t: c["transformer_layer_config"].update(
            rope_theta=5e5, rope_parameters={"rope_type": "default", "rope_theta": 5e5}
        ),
        "its draft logits are others",
    ),
    "positions": (
        lambda c, t: c["transformer_layer_config"].update(max_position_embeddings=128),
        "made for 128 positions, not 256",
    ),
    "consumer": (lambda c, t: t.update(stray=torch.ones(1)), "speculators-0.9.0-eagle3 does not"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_f65_f66_f71_a_fault_in_what_was_written_leaves_nothing(
    name: str, target: LlamaForCausalLM, tmp_path: Path
) -> None:
    head, (change, said) = reduced(target), FAULTS[name]
    layout = Faulty(layout_of("speculators", head), change)
    with pytest.raises(ValueError, match=said):
        ship(head, layout, tmp_path / "out", torch.float32, target)
    assert not [*tmp_path.iterdir()]


class Faulty:
    """A layout that makes one mistake."""

    def __init__(self, layout: Layout, change: Callable[..., Any]) -> None:
        self.kind, self.name, self.formats = layout.kind, "faulty", layout.formats
        self.consumers, self._layout, self._change = layout.consumers, layout, change
        self.refusals, self.recognises, self.read = layout.refusals, layout.recognises, layout.read

    def write(self, head: Any, dtype: torch.dtype) -> Stored:
        written = self._layout.write(head, dtype)
        tensors = {name: x.clone() for name, x in written.tensors.items()}
        made = replace(written, config=copy.deepcopy(written.config), tensors=tensors)
        self._change(made.config, made.tensors)
        return made


@dataclass(frozen=True)
class OtherEachTime(Decoding):
    """Counts one round more for what was read back."""

    calls: list[BorrowingHead] = field(default_factory=list)

    def __call__(self, head: BorrowingHead) -> Chained:
        self.calls.append(head)
        found = super().__call__(head)
        return replace(found, tau=found.tau + len(self.calls))


def test_a_chain_that_comes_to_something_else_is_not_shipped(
    target: LlamaForCausalLM, tmp_path: Path
) -> None:
    head = reduced(target)
    decoding = OtherEachTime(Target(target), PROMPTS[:1], tokens=4)
    with pytest.raises(ShippedError, match=r"tau is \d\.\d+, before"):
        ship(head, layout_of("vllm", head), tmp_path / "out", torch.float32, target, decoding)
    assert len(decoding.calls) == 2
    assert not [*tmp_path.iterdir()]


def test_a_folder_that_holds_something_is_left_alone(
    target: LlamaForCausalLM, tmp_path: Path
) -> None:
    (tmp_path / "mine").write_text("x")
    head = reduced(target)
    with pytest.raises(ValueError, match="exists already; name a new folder"):
        ship(head, layout_of("vllm", head), tmp_path, torch.float32, target)
    assert [file.name for file in tmp_path.iterdir()] == ["mine"]


def test_what_a_killed_export_left_goes_with_the_next(
    target: LlamaForCausalLM, tmp_path: Path
) -> None:
    child = os.fork()
    if not child:
        with unnamed(tmp_path / "out") as fresh:
            fresh.mkdir()
            fresh.with_name(".out.123.partial").mkdir()
            os.kill(os.getpid(), signal.SIGKILL)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    assert [file.name for file in tmp_path.iterdir()] == [".out.new"]
    head = reduced(target)
    ship(head, layout_of("vllm", head), tmp_path / "out", torch.float32, target)
    assert [file.name for file in tmp_path.iterdir()] == ["out"]


def test_two_exports_into_one_name_do_not_take_each_others_work(
    target: LlamaForCausalLM, tmp_path: Path
) -> None:
    head, out = reduced(target), tmp_path / "out"
    with unnamed(out) as fresh:
        fresh.mkdir()
        (fresh / "mine").touch()
        with pytest.raises(ValueError, match="another process writes here"):
            ship(head, layout_of("vllm", head), out, torch.float32, target)
    assert [file.name for file in out.iterdir()] == ["mine"]
    assert [file.name for file in tmp_path.iterdir()] == ["out"]


def test_what_was_made_there_meanwhile_is_left_alone(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(ValueError, match="exists already"), unnamed(out) as fresh:  # noqa: PT012
        fresh.mkdir()
        out.mkdir()
        (out / "theirs").touch()
    assert [file.name for file in out.iterdir()] == ["theirs"]
    assert [file.name for file in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize(("name", "format"), [("eagle3", "vllm"), ("hydra", "hydra")])
def test_a_full_disk_is_an_error_of_the_system_and_leaves_nothing(
    name: str, format: str, target: LlamaForCausalLM, tmp_path: Path
) -> None:
    head = whole_vocabulary(ladder_head(name, target))
    head.bind(target)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))  # the config fits, weights not
    try:
        with pytest.raises(OSError, match=r"could not be written|too large"):
            ship(head, layout_of(format, head), tmp_path / "out", torch.float32, target)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not [*tmp_path.iterdir()]


def test_a_refusal_is_that_of_the_widest_layout(target: LlamaForCausalLM) -> None:
    """`--format vllm` is not told that only vLLM takes a reduced vocabulary."""
    with pytest.raises(LayoutError) as info:
        layout_of("vllm", ladder_head("block", target))
    assert "no engine norms each captured state" in str(info.value)
    assert "vLLM" not in str(info.value)


def test_own_rows_that_are_still_the_targets_are_no_difference(
    target: LlamaForCausalLM, tmp_path: Path
) -> None:
    head = reduced(target, own_rows=True)
    ship(head, layout_of("speculators", head), tmp_path / "out", torch.float32, target)
    asked = asked_of(target, lambda ids: describe(target, None, ids, {}))
    again = load_foreign(tmp_path / "out", asked)
    assert isinstance(again, BorrowingHead)
    again.bind(target)
    assert "lm_head.weight" not in again.state_dict()
    assert unlike(head, again) == []
    with torch.no_grad():
        head.lm_head.weight[0, 0] += 1
    assert unlike(head, again) == ["lm_head.weight differs"]


@pytest.mark.parametrize("name", ["eagle3", "medusa", "eagle", "hydra"])
def test_a_head_that_borrows_is_the_same_over_the_whole_vocabulary(
    name: str, target: LlamaForCausalLM
) -> None:
    head = ladder_head(name, target)
    assert head.reduced
    whole = whole_vocabulary(head)
    whole.bind(target)
    assert not whole.reduced
    assert whole.draft_ids.equal(torch.arange(512))
    assert whole.settings.draft_vocab_size is None  # type: ignore[attr-defined]
    torch.testing.assert_close(probe(whole)[:, head.draft_ids], probe(head), atol=1e-5, rtol=1e-6)
    assert whole_vocabulary(whole) is whole


@pytest.mark.parametrize(("name", "tensor"), [("block", "markov_out.weight"), ("own", "lm_head")])
def test_what_was_trained_for_some_tokens_cannot_be_had_for_all(
    name: str, tensor: str, target: LlamaForCausalLM
) -> None:
    head = reduced(target, own_rows=True) if name == "own" else ladder_head(name, target)
    with pytest.raises(LayoutError, match=rf"--whole-vocabulary: {tensor}\S* was trained for the"):
        whole_vocabulary(head)


def test_every_layout_has_a_way_to_be_served(target: LlamaForCausalLM) -> None:
    import drafthead.heads.layouts
    from drafthead.heads.layouts.layout import LAYOUTS

    assert drafthead.heads.layouts
    heads = {"block": "block-dflash"}
    for layout in LAYOUTS:
        if layout.consumers:
            head = ladder_head(heads.get(layout.kind, layout.kind), target)
            uses = uses_of(layout, head, "exported")
            assert [use.consumer for use in uses] == [*dict.fromkeys(use.consumer for use in uses)]
            assert all(use.command for use in uses)
    flat = next(layout for layout in LAYOUTS if layout.name == "eagle3-vllm")
    (use,) = [u for u in uses_of(flat, reduced(target), "exported") if u.consumer == "vLLM 0.32.0"]
    assert use.command.startswith("vllm serve 'unnamed llama' --speculative-config '")
    asked = json.loads(use.command.split("'")[3])
    assert asked == {"method": "eagle3", "model": "exported", "num_speculative_tokens": 3}
