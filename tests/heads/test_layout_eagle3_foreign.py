"""EAGLE-3 from others: drafts as its maker's do, or says in one line what is not clear."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from foreign import asked_of, random_tensors, write
from ladder import rollout
from plain_eagle import PlainEagle3
from tiny import tiny_batch, tiny_target
from torch import Tensor

from drafthead.heads import load_head
from drafthead.heads.contract import Contract
from drafthead.heads.eagle3 import Eagle3Head
from drafthead.heads.layouts.files import load_foreign, read_folder
from drafthead.heads.layouts.layout import LayoutError


def shapes(first: str, count: int = 3, rows: int = 170) -> dict[str, tuple[int, ...]]:
    """An EAGLE-3 head of a width-64 target, by the names of one producer."""
    return {
        "fc.weight": (64, 64 * count),
        f"{first}.hidden_norm.weight": (64,),
        f"{first}.input_layernorm.weight": (64,),
        f"{first}.post_attention_layernorm.weight": (64,),
        f"{first}.self_attn.q_proj.weight": (64, 128),
        f"{first}.self_attn.k_proj.weight": (32, 128),
        f"{first}.self_attn.v_proj.weight": (32, 128),
        f"{first}.self_attn.o_proj.weight": (64, 64),
        f"{first}.mlp.gate_proj.weight": (96, 64),
        f"{first}.mlp.up_proj.weight": (96, 64),
        f"{first}.mlp.down_proj.weight": (64, 96),
        "norm.weight": (64,),
        "lm_head.weight": (rows, 64),
    }


KEPT = torch.arange(1, 511, 3)
LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "vocab_size": 512,
    "draft_vocab_size": 170,
    "max_position_embeddings": 256,
    "torch_dtype": "float32",
}
MODELOPT = LLAMA | {
    "architectures": ["LlamaForCausalLMEagle3"],
    "rope_scaling": None,
    "eagle_config": {
        "eagle_aux_hidden_state_layer_ids": [1, 3, 4],
        "use_aux_hidden_state": True,
        "use_input_layernorm_in_first_layer": True,
    },
}
SAFEAILAB = LLAMA | {"architectures": ["LlamaForCausalLM"], "bos_token_id": 1}


def modelopt(folder: Path, **changes: Any) -> Path:
    tensors = random_tensors(shapes("layers.0")) | {"d2t": KEPT - torch.arange(170)}
    return write(folder, MODELOPT | changes, tensors)


def safeailab(folder: Path, **changes: Any) -> Path:
    t2d = torch.zeros(512, dtype=torch.bool)
    t2d[KEPT] = True
    tensors = random_tensors(shapes("midlayer"))
    tensors = {f"model.{name}": tensor for name, tensor in tensors.items()}
    tensors |= {"model.d2t": KEPT - torch.arange(170), "model.t2d": t2d}
    return write(folder, SAFEAILAB | changes, tensors)


@pytest.mark.parametrize("make", [modelopt, safeailab])
def test_foreign_heads_draft_as_their_makers_do(make: Any, tmp_path: Path) -> None:
    target = tiny_target()
    folder = make(tmp_path / "theirs")
    head = load_foreign(folder, asked_of(target))
    assert isinstance(head, Eagle3Head)
    assert head.contract.layers == (2, 4, 5)
    assert head.settings.own_rows
    assert head.draft_ids.equal(KEPT)
    head.save_pretrained(tmp_path / "ours")
    head = load_head(tmp_path / "ours")  # type: ignore[assignment]
    head.bind(target)
    plain = PlainEagle3(folder)
    plain.tensors = {k.removeprefix("model."): v for k, v in plain.tensors.items()}
    torch.manual_seed(5)
    ids = torch.randint(0, 512, (1, 16))
    batch = tiny_batch(target, ids, torch.ones_like(ids, dtype=torch.bool), (2, 4, 5))
    theirs = plain.chain(target.get_input_embeddings().weight, batch.features[0, :7], ids[0], 4)
    ours = rollout(head, batch, 0, 6, 4)
    torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=0)
    assert ours.std() > 0.1


IDS = "eagle_aux_hidden_state_layer_ids"
# name: (config changes, --layers, --producer, what becomes of it: layers or the error)
COUNTED: dict[str, tuple[dict[str, Any], tuple[int, ...] | None, str | None, Any]] = {
    "none": ({"eagle_config": None}, None, None, (2, 4, 5)),
    "top": ({IDS: [2, 5, 7], "eagle_config": None}, None, None, (2, 5, 7)),
    "pair": ({IDS: [2, 4, 6], "eagle_config": {IDS: [1, 3, 5]}}, None, None, (2, 4, 6)),
    "last": ({"eagle_config": {IDS: [2, 4, 8]}}, None, None, (2, 4, 8)),
    "unclear": ({"eagle_config": {IDS: [2, 4, 5]}}, None, None, "may be counted as vLLM does"),
    "by-output-on-top": ({IDS: [1, 3, 4], "eagle_config": None}, None, None, "may be counted"),
    "vllm": ({"eagle_config": {IDS: [2, 4, 5]}}, None, "vllm", (2, 4, 5)),
    "specforge": ({"eagle_config": {IDS: [2, 4, 5]}}, None, "specforge", (3, 5, 6)),
    "said": ({"eagle_config": {IDS: [2, 4, 5]}}, (1, 2, 3), None, (1, 2, 3)),
    "too-few": ({}, (1, 2), None, r"layers \[1, 2\] are named, fc.weight takes 3"),
    "angelslim": (
        {"eagle_config": {}, "aux_hidden_states_layer_ids": [1, 4, 6]},
        None,
        None,
        (2, 5, 7),
    ),
    "nobody": ({"eagle_config": {IDS: [2, 4, 5]}}, None, "nobody", "--producer 'nobody': choose"),
    "features-off": ({"eagle_config": {"use_aux_hidden_state": False}}, None, None, "no states"),
}


@pytest.mark.parametrize("name", COUNTED)
def test_layers_of_foreign_heads_are_told_or_asked_for(name: str, tmp_path: Path) -> None:
    changes, layers, producer, wanted = COUNTED[name]
    folder, asked = modelopt(tmp_path / "in", **changes), asked_of(tiny_target(), layers, producer)
    if isinstance(wanted, str):
        with pytest.raises(LayoutError, match=wanted) as caught:
            load_foreign(folder, asked)
        assert "\n" not in str(caught.value)
    else:
        assert load_foreign(folder, asked).contract.layers == wanted


def damaged(folder: Path, out: Path, change: Any, **config: Any) -> Path:
    stored = read_folder(folder)
    tensors = dict(stored.tensors)
    change(tensors)
    return write(out, {**stored.config, **config}, tensors)


# name: (what happens to the tensors, config changes, the error)
DAMAGES: dict[str, tuple[Any, dict[str, Any], str]] = {
    "f66-no-rows": (lambda t: t.pop("lm_head.weight"), {}, "lm_head.weight is missing"),
    "f66-no-norm": (lambda t: t.pop("norm.weight"), {}, "missing norm.weight"),
    "f66-stray": (lambda t: t.update(extra=torch.ones(2)), {}, "surplus extra"),
    "f66-mask": (lambda t: t.update(mask_hidden=torch.ones(192)), {}, "P-EAGLE"),
    "f75-no-map": (lambda t: t.pop("d2t"), {}, "170 of 512 tokens .* d2t, .* is missing"),
    "f75-other-size": (lambda t: None, {"draft_vocab_size": 169}, "d2t has 170 tokens"),
    "f75-descending": (lambda t: t.update(d2t=t["d2t"].flip(0)), {}, "d2t is no map"),
    "fc-norm-off": (lambda t: t.update({"fc_norm.0.weight": torch.ones(64)}), {}, "fc_norm is F"),
    "fc-norm-on": (lambda t: None, {"fc_norm": True}, "has no fc_norm.0.weight"),
    "bias": (
        lambda t: t.update({"layers.0.self_attn.q_proj.bias": torch.ones(64)}),
        {},
        "surplus layers.0.self_attn.q_proj.bias",
    ),
    "embedding": (
        lambda t: t.update({"embed_tokens.weight": torch.ones(512, 64)}),
        {},
        "differs from the target's embedding in 512 of 512 rows",
    ),
    "vocabulary": (lambda t: None, {"vocab_size": 500}, "vocab_size is 500"),
    "heads": (lambda t: None, {"num_attention_heads": 5}, "5 heads"),
    "rope": (
        lambda t: None,
        {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
        "'dynamic' is not supported",
    ),
    "rope-partial": (lambda t: None, {"partial_rotary_factor": 0.5}, "turns a part"),
    "no-heads": (lambda t: None, {"num_attention_heads": None}, "no num_attention_heads"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_f66_f75_what_is_not_whole_is_refused_by_name(name: str, tmp_path: Path) -> None:
    change, config, message = DAMAGES[name]
    folder = damaged(modelopt(tmp_path / "in"), tmp_path / "out", change, **config)
    with pytest.raises(ValueError, match=message) as caught:
        load_foreign(folder, asked_of(tiny_target()))
    assert "\n" not in str(caught.value)


def test_f75_absolute_and_whole_maps(tmp_path: Path) -> None:
    """Ids in place of offsets are taken for what t2d says; a map of everything is none."""
    target = tiny_target()
    folder = safeailab(tmp_path / "in")

    def absolute(tensors: dict[str, Tensor]) -> None:
        tensors["model.d2t"] = KEPT.clone()

    read = load_foreign(damaged(folder, tmp_path / "ids", absolute), asked_of(target))
    assert read.draft_ids.equal(KEPT)
    rows = target.get_output_embeddings().weight

    def everything(tensors: dict[str, Tensor]) -> None:  # as SpecForge writes it
        tensors["model.d2t"] = torch.zeros(512, dtype=torch.int64)
        tensors["model.t2d"] = torch.ones(512, dtype=torch.bool)
        tensors["model.lm_head.weight"] = rows.detach().clone()

    whole = damaged(folder, tmp_path / "all", everything, draft_vocab_size=512)
    read = load_foreign(whole, asked_of(target))
    assert not {"d2t", "t2d", "lm_head.weight"} & read.state_dict().keys()
    assert not read.settings.own_rows  # type: ignore[attr-defined]

    def shared(tensors: dict[str, Tensor]) -> None:
        del tensors["model.d2t"], tensors["model.t2d"], tensors["model.lm_head.weight"]

    null = damaged(folder, tmp_path / "null", shared, draft_vocab_size=None)
    assert load_foreign(null, asked_of(target)).draft_ids.equal(torch.arange(512))


def test_names_that_were_in_use(tmp_path: Path) -> None:
    """Norms of captured states as SGLang first called them; a map in TensorRT-LLM's dtype."""

    def old(tensors: dict[str, Tensor]) -> None:
        for k, name in enumerate(("low", "mid", "high")):
            tensors[f"aux_norm_{name}.weight"] = torch.full((64,), k + 1.0)
        tensors["d2t"] = tensors["d2t"].int()

    folder = damaged(modelopt(tmp_path / "in"), tmp_path / "old", old, use_aux_norm=True)
    read = load_foreign(folder, asked_of(tiny_target()))
    assert read.draft_ids.equal(KEPT)
    norms = [read.state_dict()[f"fc_norm.{k}.weight"][0].item() for k in range(3)]
    assert norms == [1.0, 2.0, 3.0]


def test_the_norm_of_an_upper_layer_is_its_producers(tmp_path: Path) -> None:
    upper = {
        f"layers.1.{name.removeprefix('layers.0.')}": shape
        for name, shape in shapes("layers.0").items()
        if name.startswith("layers.0.")
    }
    upper |= {
        f"layers.1.self_attn.{k}_proj.weight": (rows, 64)
        for k, rows in zip("qkv", (64, 32, 32), strict=True)
    }

    def two(tensors: dict[str, Tensor]) -> None:
        tensors.update(random_tensors(upper, seed=5))

    folder = damaged(modelopt(tmp_path / "in"), tmp_path / "two", two, num_hidden_layers=2)
    theirs, target = read_folder(folder).tensors, tiny_target()
    with pytest.raises(LayoutError, match="layer 1 has two norms before attention"):
        load_foreign(folder, asked_of(target))
    for producer, name in (("vllm", "input_layernorm"), ("sglang", "hidden_norm")):
        read = load_foreign(folder, asked_of(target, (2, 4, 5), producer)).state_dict()
        own = read["layers.1.input_layernorm.weight"]
        assert own.equal(theirs[f"layers.1.{name}.weight"])


def test_rows_of_targets_that_scale_their_logits(tmp_path: Path) -> None:
    """Rows in a file give logits as they are; ours are scaled as the target's are."""
    target = tiny_target()
    folder, asked = modelopt(tmp_path / "in"), asked_of(target)

    def scaled(ids: tuple[int, ...]) -> Contract:
        return asked.contract_of(ids).model_copy(update={"logit_scale": 0.25})

    rows = read_folder(folder).tensors["lm_head.weight"]
    read = load_foreign(folder, replace(asked, contract_of=scaled))
    torch.testing.assert_close(read.state_dict()["lm_head.weight"], rows * 4)
    told = damaged(folder, tmp_path / "told", lambda t: None, logit_scale=0.25)
    read = load_foreign(told, replace(asked, contract_of=scaled))
    assert read.state_dict()["lm_head.weight"].equal(rows)


def test_rope_parameters_win_over_older_spellings(tmp_path: Path) -> None:
    """As in transformers 5, and over `rope_scaling`."""
    folder = modelopt(
        tmp_path / "in",
        rope_parameters={"rope_theta": 7e4},
        rope_scaling={"type": "linear", "factor": 2.0, "rope_theta": 8e4},
    )
    assert load_foreign(folder, asked_of(tiny_target())).rotary_base == 7e4  # type: ignore[attr-defined]
