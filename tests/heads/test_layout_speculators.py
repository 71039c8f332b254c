"""The format of speculators, against folders that the library made and what it drafts with them.

`speculators_made/make.py` made both, with the library alone (0.9.0).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from foreign import asked_of
from ladder import REDUCED, SIZE, ladder_head
from safetensors.torch import load_file, save_file
from tiny import tiny_head, tiny_target
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from drafthead.heads.base import TeacherBatch
from drafthead.heads.block import BlockSettings
from drafthead.heads.borrowing import BorrowingHead
from drafthead.heads.contract import describe
from drafthead.heads.eagle3 import Eagle3Settings
from drafthead.heads.layouts.files import load_foreign, read_folder, write_folder
from drafthead.heads.layouts.layout import Asked, LayoutError, Stored, layout_of
from drafthead.heads.layouts.schema import check, check_folder, load_schema
from drafthead.heads.layouts.speculators import BlockSpeculators, Eagle3Speculators

MADE = Path(__file__).parent / "speculators_made"
SEEN = load_file(MADE / "seen.safetensors")
FOLDERS = ("eagle3", "eagle3-whole", "dflash", "dspark")
LOST = {"auto_map", "transformers_version", "architectures"}
"""Of a folder that the library saved: what depends on who saved it, and not on the head."""


@pytest.fixture(scope="module")
def verifier() -> LlamaForCausalLM:
    """A target of eight layers with the embedding of the one that the folders were made for."""
    vocabulary, width = SEEN["embedding"].shape
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=24,
        num_hidden_layers=8,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config)
    model.model.embed_tokens.weight.data.copy_(SEEN["embedding"])
    model.name_or_path = "target"
    return model.eval()  # type: ignore[no-any-return]


def read(folder: Path, verifier: LlamaForCausalLM) -> BorrowingHead:
    head = load_foreign(folder, asked_of(verifier))
    assert isinstance(head, BorrowingHead)
    head.bind(verifier)
    return head


def drafted(head: BorrowingHead) -> list[tuple[Tensor, Tensor]]:
    """Slots and logits of each depth of an unroll over the text that the library had."""
    ids, features = SEEN["ids"], SEEN["features"]
    mask = torch.ones_like(ids, dtype=torch.bool)
    last = torch.zeros(*ids.shape, head.config.hidden_size)
    batch = TeacherBatch(ids=ids, mask=mask, features=features, last_hidden=last, top=ids)
    with torch.no_grad():
        steps = list(head.unroll(batch, head.max_depth or 3))
    return [(step.teacher - 1 - depth, step.logits) for depth, step in enumerate(steps)]


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_of_the_library_drafts_as_it_does_there(
    name: str, verifier: LlamaForCausalLM
) -> None:
    head = read(MADE / name, verifier)
    theirs, compared = SEEN[f"{name}.logits"], 0
    for depth, (slots, ours) in enumerate(drafted(head)):
        assert len(slots) == 10 - depth
        if f"{name}.anchors" not in SEEN:
            torch.testing.assert_close(ours, theirs[depth][slots], atol=1e-5, rtol=0)
            compared += len(slots)
            continue
        # The input that predicts at this depth: the anchor is the first where it predicts.
        inner = depth + (name == "dflash")
        for block, anchor in enumerate(SEEN[f"{name}.anchors"].tolist()):
            for at in (slots == anchor - 1).nonzero().flatten().tolist():
                torch.testing.assert_close(ours[at], theirs[block, inner], atol=1e-5, rtol=0)
                compared += 1
    assert compared >= 9
    assert theirs.std() > 0.3


@pytest.mark.parametrize("name", FOLDERS)
def test_f65_f68_what_is_written_is_what_the_library_saved(
    name: str, verifier: LlamaForCausalLM, tmp_path: Path
) -> None:
    layout = layout_of("speculators", head := read(MADE / name, verifier))
    folder = write_folder(layout.write(head, torch.float32), tmp_path / "out")
    ours, theirs = read_folder(folder), read_folder(MADE / name)
    assert ours.tensors.keys() == theirs.tensors.keys()
    assert all(x.equal(theirs.tensors[key]) for key, x in ours.tensors.items())
    # The library writes this one as false: vLLM then drafts otherwise than it does itself.
    assert ours.config.pop("sliding_window_non_causal", True)
    for key, value in theirs.config.items():
        if key == "transformer_layer_config":  # a part of what a whole config says
            shared = ours.config[key].keys() & value.keys()
            assert {k: ours.config[key][k] for k in shared} == {k: value[k] for k in shared}
            assert len(shared) >= 13
        elif key not in LOST | {"sliding_window_non_causal"}:
            assert ours.config[key] == value, key


def eagle3(**options: Any) -> BorrowingHead:
    options = {"draft_vocab_size": SIZE} | options
    ids = None if options["draft_vocab_size"] is None else REDUCED
    layers = options.pop("captured", (2, 4, 5))
    return tiny_head(tiny_target(), Eagle3Settings(**options), ids, layers)


def block(**options: Any) -> BorrowingHead:
    settings = BlockSettings(
        **{"draft_vocab_size": SIZE, "norm_features": False, "mask_token_id": 9} | options
    )
    target = tiny_target()
    ids = None if settings.draft_vocab_size is None else REDUCED
    contract = describe(target, None, settings.captured(8), {})
    head = settings.build(contract, target.config, ids)
    assert isinstance(head, BorrowingHead)
    head.bind(target)
    return head


DFLASH: dict[str, Any] = {"anchor_predicts": False, "markov_rank": 0, "confidence": False}
WRITTEN: dict[str, Callable[[], BorrowingHead]] = {
    "eagle3": eagle3,
    "own-rows": lambda: eagle3(own_rows=True, num_layers=2),
    "whole": lambda: eagle3(draft_vocab_size=None, captured=(1, 3, 6, 8)),
    "dflash": lambda: block(**DFLASH),
    "dspark": lambda: block(markov_rank=6, draft_vocab_size=None),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_f69_f70_heads_of_ours_come_back_in_the_dtype_asked_for(name: str, tmp_path: Path) -> None:
    head = WRITTEN[name]().to(torch.bfloat16)  # type: ignore[arg-type]
    layout = layout_of("speculators", head)
    folder = write_folder(layout.write(head, torch.bfloat16), tmp_path / "out")
    for consumer in layout.consumers:
        assert check_folder(folder, read_folder(folder), load_schema(consumer)) == []
    again = load_foreign(folder, asked_of(tiny_target()))
    mine, theirs = head.state_dict(), again.state_dict()
    if name == "own-rows":  # they are still the target's, and are taken for them
        del mine["lm_head.weight"]
    assert mine.keys() == theirs.keys()
    assert all(x.equal(theirs[key]) and x.dtype == theirs[key].dtype for key, x in mine.items())
    assert again.contract == head.contract


# Faults


def stored(name: str = "eagle3") -> tuple[Stored, list[str]]:
    """What is written of a head, and the names of its schemas."""
    layout = layout_of("speculators", head := WRITTEN[name]())
    return layout.write(head, torch.float32), list(layout.consumers)


def _layer(config: dict[str, Any], **changes: Any) -> None:
    config["transformer_layer_config"] = config["transformer_layer_config"] | changes


def _prefixed(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    named = {f"model.{name}": tensor for name, tensor in tensors.items()}
    tensors.clear()
    tensors.update(named)


PLANTED: dict[str, tuple[str, Any, str]] = {
    "missing": ("eagle3", lambda c, t: t.pop("layers.0.hidden_norm.weight"), "hidden_norm"),
    "map": ("eagle3", lambda c, t: t.pop("d2t"), "tensor d2t is missing"),
    "rows": ("eagle3", lambda c, t: t.pop("lm_head.weight"), "lm_head.weight is missing"),
    "whole-map": ("whole", lambda c, t: t.update(d2t=torch.zeros(512).long()), "d2t is there"),
    "prefix": ("eagle3", _prefixed, "fc.weight is missing"),
    "outputs": (
        "whole",
        lambda c, t: c.update(eagle_aux_hidden_state_layer_ids=[0, 2, 5, 7]),
        "count outputs",
    ),
    "captured": (
        "whole",
        lambda c, t: c["transformer_layer_config"].pop("num_aux_hidden_states"),
        "num_aux_hidden_states",
    ),
    "flag": ("eagle3", lambda c, t: c.pop("norm_before_residual"), "norm_before_residual"),
    "default": (
        "eagle3",
        lambda c, t: c["transformer_layer_config"].pop("hidden_act"),
        "leaves out a field",
    ),
    "dtype": ("eagle3", lambda c, t: c.update(dtype="bfloat16", torch_dtype="bfloat16"), "dtype"),
    "path": (
        "eagle3",
        lambda c, t: c["speculators_config"]["verifier"].update(name_or_path="/home/me/model"),
        "place of this machine",
    ),
    "causal": (
        "dflash",
        lambda c, t: c.update(sliding_window_non_causal=False),
        "sliding_window_non_causal",
    ),
    "tokens": ("dflash", lambda c, t: c.update(block_size=8), "does not draft as many tokens"),
    "embedding": (
        "dspark",
        lambda c, t: t.update({"embed_tokens.weight": torch.zeros(512, 64)}),
        "nothing that it reads",
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_f68_f71_f75_a_planted_fault_is_caught(name: str) -> None:
    kind, change, said = PLANTED[name]
    written, consumers = stored(kind)
    schema = load_schema(consumers[0])
    assert check(written, schema) == []
    written = Stored(json.loads(json.dumps(written.config)), dict(written.tensors))
    change(written.config, written.tensors)
    assert any(said in problem for problem in check(written, schema))


READ: dict[str, tuple[str, Any, str]] = {
    "family": ("eagle3", lambda c, t: c.update(speculators_model_type="peagle"), "'peagle'"),
    "flag": ("eagle3", lambda c, t: c.pop("norm_before_residual"), "--producer speculators or"),
    "map": ("eagle3", lambda c, t: t.pop("d2t"), "d2t has to say which, and there is none"),
    "zeroed": ("eagle3", lambda c, t: t["d2t"].zero_(), "d2t is no map"),
    "rows": ("eagle3", lambda c, t: t.pop("lm_head.weight"), "no lm_head.weight"),
    "trained": ("eagle3", lambda c, t: t["embed_tokens.weight"][3].add_(1), "in 1 of 48 rows"),
    "missing": ("eagle3", lambda c, t: t.pop("norm.weight"), "missing norm.weight"),
    "lost": (
        "dflash",
        lambda c, t: [t.pop(name) for name in ("d2t", "t2d", "lm_head.weight")],
        "draft_vocab_size is 20, the tensors are for 48",
    ),
    "surplus": ("dflash", lambda c, t: t.update(stray=torch.ones(2)), "surplus stray"),
    "window": (
        "dflash",
        lambda c, t: _layer(c, layer_types=["sliding_attention"] * 2, sliding_window=8),
        "window",
    ),
    "width": ("eagle3", lambda c, t: _layer(c, vocab_size=49), "vocab_size is 49"),
    "layers": ("dspark", lambda c, t: c.pop("aux_hidden_state_layer_ids"), "name them with --lay"),
    "correction": ("dspark", lambda c, t: c.update(markov_head_type="rnn"), "markov_head_type"),
}


@pytest.mark.parametrize("name", READ)
def test_f66_what_is_not_clear_or_not_whole_is_refused_by_name(
    name: str, verifier: LlamaForCausalLM, tmp_path: Path
) -> None:
    source, change, said = READ[name]
    folder = shutil.copytree(MADE / source, tmp_path / "theirs")
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    change(config, tensors)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(LayoutError) as error:
        load_foreign(folder, asked_of(verifier))
    assert said in str(error.value)
    assert str(folder) in str(error.value)
    assert "\n" not in str(error.value)


def test_a_missing_flag_is_what_its_maker_takes_it_for(verifier: LlamaForCausalLM) -> None:
    folder = read_folder(MADE / "eagle3-whole")
    folder.config.pop("norm_before_residual")
    for producer, meant in (("speculators", False), ("vllm", True)):
        asked: Asked = replace(asked_of(verifier), producer=producer)
        head = Eagle3Speculators().read(folder, asked)
        assert head.config.settings is not None
        assert bool(head.config.settings.get("norm_before_residual")) == meant


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"norm_features": True}, "head.norm_features: false"),
        ({"mask_token_id": None}, "head.mask_token_id"),
        ({"causal": True}, "head.causal: false"),
        (DFLASH | {"anchor_predicts": True}, "head.anchor_predicts: false"),
    ],
)
def test_block_heads_that_cannot_be_expressed_are_refused_in_one_line(
    options: dict[str, Any], said: str
) -> None:
    with pytest.raises(LayoutError) as error:
        layout_of("speculators", block(**options))
    assert str(error.value).startswith("--format speculators: ")
    assert said in str(error.value)
    assert "this is no" not in str(error.value)
    assert "\n" not in str(error.value)


def test_other_heads_have_no_such_format() -> None:
    with pytest.raises(LayoutError, match="it has no medusa heads; use --format"):
        layout_of("speculators", ladder_head("medusa", tiny_target()))
    assert not BlockSpeculators("dflash", "").recognises(Stored({}, {}))
