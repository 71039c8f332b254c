"""Building, binding, saving and loading heads: nothing missing, swapped, shared or executed."""

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import tiny_batch, tiny_head, tiny_target
from torch import Tensor
from transformers import AutoModel, GPT2Config, GPT2LMHeadModel, LlamaForCausalLM

from drafthead.heads import load_head
from drafthead.heads.contract import ContractError, describe
from drafthead.heads.eagle3 import Eagle3Config, Eagle3Head, Eagle3Settings

LAYERS = (2, 4, 5)
REDUCED = torch.arange(0, 512, 4)
WHOLE = Eagle3Settings(draft_vocab_size=None)
SMALL = Eagle3Settings(draft_vocab_size=len(REDUCED))


def build(target: LlamaForCausalLM, settings: Eagle3Settings, ids: Tensor | None) -> Eagle3Head:
    head = settings.build(describe(target, None, LAYERS, {}), target.config, ids)
    assert isinstance(head, Eagle3Head)
    return head


def logits_of(head: Eagle3Head, target: LlamaForCausalLM) -> Tensor:
    torch.manual_seed(5)
    ids = torch.randint(0, 512, (1, 16))
    batch = tiny_batch(target, ids, torch.ones_like(ids, dtype=torch.bool), LAYERS)
    with torch.no_grad():
        return torch.cat([p.logits for p in head.unroll(batch, 3)])


# Building


@pytest.mark.parametrize(
    ("settings", "ids"), [(SMALL, None), (WHOLE, REDUCED), (SMALL, REDUCED[:64])]
)
def test_f34_a_map_of_another_size_is_refused(settings: Eagle3Settings, ids: Tensor | None) -> None:
    with pytest.raises(ValueError, match=r"head\.draft_vocab_size: \d+ tokens asked for"):
        build(tiny_target(), settings, ids)


def test_f14_layers_are_those_asked_for() -> None:
    with pytest.raises(ValueError, match=r"head\.layers: \(1, 2, 3\) asked for"):
        build(tiny_target(), WHOLE.model_copy(update={"layers": (1, 2, 3)}), None)


def test_f34_no_map_unless_asked_for() -> None:
    everything = torch.arange(512)
    for ids in (None, everything):
        head = build(tiny_target(), WHOLE, ids)
        assert "d2t" not in head.state_dict()
        assert head.draft_ids.equal(everything)
        assert head.in_vocabulary(everything).all()


def test_f35_ids_outside_the_vocabulary_are_refused() -> None:
    with pytest.raises(ValueError, match="do not fit"):
        build(tiny_target(), SMALL, REDUCED + 4)


def test_reduced_vocabulary_maps_both_ways() -> None:
    head = build(tiny_target(), SMALL, REDUCED)
    assert head.draft_ids.equal(REDUCED)
    assert head.in_vocabulary(torch.arange(512)).nonzero()[:, 0].equal(REDUCED)


def test_f60_padded_vocabulary() -> None:
    target = tiny_target(vocab_size=544)
    head = build(target, Eagle3Settings(draft_vocab_size=2), torch.tensor([7, 530]))
    head.bind(target)
    assert head.in_vocabulary(torch.tensor([530, 531])).tolist() == [True, False]
    state = head.open(1, 8)
    head.extend(state, torch.randn(1, 1, 192), torch.tensor([[530]]), torch.tensor([1]))
    logits = head.expand(state, torch.tensor([[530]]), torch.tensor([[-1]]))
    assert logits.shape == (1, 1, 2)


def test_f25_geometry_is_written_explicitly(tmp_path: Path) -> None:
    tiny_head(tiny_target(head_dim=32), WHOLE).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["head_dim"], config["num_attention_heads"], config["num_key_value_heads"]) == (
        32,
        4,
        2,
    )
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": 10_000.0}
    assert config["tie_word_embeddings"] is False
    assert config["hidden_act"] == "silu"
    assert load_head(tmp_path).get_parameter("layers.0.self_attn.q_proj.weight").shape == (128, 128)


def test_f56_rotary_base_is_the_drafts_own(tmp_path: Path) -> None:
    target = tiny_target(rope_theta=1e6)
    assert build(target, WHOLE, None).config.rope_parameters["rope_theta"] == 1e6
    own = WHOLE.model_copy(update={"rope_theta": 500.0})
    head = tiny_head(target, own)
    assert head.config.rope_parameters["rope_theta"] == 500.0
    head.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    del config["rope_parameters"]
    file.write_text(json.dumps(config | {"rope_theta": 500.0}))
    old = load_head(tmp_path)
    old.bind(target)
    assert isinstance(old, Eagle3Head)
    assert logits_of(old, target).equal(logits_of(head, target))
    other = {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}
    file.write_text(json.dumps(config | other))
    with pytest.raises(ValueError, match="'dynamic' is not supported"):
        load_head(tmp_path)


def test_missing_geometry_names_the_option() -> None:
    target = GPT2LMHeadModel(GPT2Config(vocab_size=96, n_embd=32, n_layer=8, n_head=2))
    contract = describe(target, None, LAYERS, {})
    with pytest.raises(ValueError, match=r"head\.intermediate_size: target gpt2"):
        WHOLE.build(contract, target.config, None)
    head = Eagle3Settings(draft_vocab_size=None, intermediate_size=64).build(
        contract, target.config, None
    )
    head.bind(target)
    assert head.open(1, 4).lengths == [0]


# Binding


def test_start_is_modest_and_happens_once(tmp_path: Path) -> None:
    target = tiny_target()
    settings = SMALL.model_copy(update={"own_rows": True, "start_logit_scale": 0.3})
    head = build(target, settings, REDUCED)
    head.bind(target)
    norm, rows = head.get_parameter("norm.weight"), head.get_parameter("lm_head.weight")
    torch.testing.assert_close(norm, 0.3 * target.model.norm.weight)
    assert rows.equal(target.lm_head.weight[REDUCED])
    with torch.no_grad():
        norm.fill_(2)
        rows.fill_(3)
    head.bind(target)
    head.save_pretrained(tmp_path)
    loaded = load_head(tmp_path)
    loaded.bind(target)
    for bound in (head, loaded):
        assert (bound.get_parameter("norm.weight") == 2).all()
        assert (bound.get_parameter("lm_head.weight") == 3).all()


def test_first_losses_are_near_chance() -> None:
    target = tiny_target()
    head = build(target, WHOLE, None)
    head.bind(target)
    logits = logits_of(head, target)
    assert logits.logsumexp(-1).mean() - logits.mean() < torch.tensor(512.0).log() + 0.5


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("shard", ["1GB", "100KB"])
def test_bind_reads_a_folder_as_the_live_model(tied: bool, shard: str, tmp_path: Path) -> None:
    target = tiny_target(tied=tied)
    target.save_pretrained(tmp_path, max_shard_size=shard)
    live, stored = build(target, SMALL, REDUCED), build(target, SMALL, REDUCED)
    live.bind(target)
    stored.bind(tmp_path)
    for name in ("embedding", "rows", "norm.weight"):
        mine, theirs = (
            head.get_parameter(name) if "." in name else head.get_buffer(name)
            for head in (stored, live)
        )
        assert mine.equal(theirs)


def test_bind_refuses_what_does_not_fit(tmp_path: Path) -> None:
    head = build(tiny_target(), WHOLE, None)
    with pytest.raises(ContractError, match=r"no model\.safetensors"):
        head.bind(tmp_path)
    tiny_target(vocab_size=300).save_pretrained(tmp_path)
    with pytest.raises(ContractError, match=r"shape \(300, 64\).*expects \(512, 64\)"):
        head.bind(tmp_path)
    with pytest.raises(ContractError, match=r"expects \(512, 64\)"):
        head.bind(tiny_target(vocab_size=300), check=False)
    tiny_target(tied=True).save_pretrained(tmp_path)
    with pytest.raises(ContractError, match=r"no tensor lm_head\.weight"):
        head.bind(tmp_path)
    os.truncate(tmp_path / "model.safetensors", 5000)
    with pytest.raises(ContractError, match="to be read, which the head borrows"):
        head.bind(tmp_path)


def test_f23_another_target_is_refused_unless_overridden(tmp_path: Path) -> None:
    target, other = tiny_target(), tiny_target(seed=9)
    target.save_pretrained(tmp_path / "renamed")
    head = build(target, WHOLE, None)
    head.bind(LlamaForCausalLM.from_pretrained(tmp_path / "renamed"))
    with pytest.raises(ContractError, match="unnamed llama"):
        head.bind(other)
    head.bind(other, check=False)
    assert head.rows is not None
    assert head.rows.equal(other.lm_head.weight)


def test_borrowed_tensors_follow_the_compute_dtype() -> None:
    target = tiny_target()
    head = build(target, SMALL, REDUCED)
    with torch.autocast("cpu", torch.bfloat16):
        head.bind(target)
        assert head.rows is not None
        assert head.rows.dtype == torch.bfloat16
        assert logits_of(head, target).isfinite().all()
    assert head.fc.weight.dtype == torch.float32
    head.to(torch.bfloat16)
    head.bind(target)
    assert head.d2t.dtype == torch.int64
    state = head.open(1, 8)
    logits = head.extend(state, torch.randn(1, 2, 192), torch.tensor([[1, 2]]), torch.tensor([2]))
    assert logits.dtype == torch.bfloat16
    assert head.expand(state, torch.tensor([[1]]), torch.tensor([[-1]])).isfinite().all()


# Saving and loading


@pytest.mark.parametrize("own_rows", [False, True])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("ids", [None, REDUCED])
def test_f65_f67_f70_reloaded_heads_are_equal(
    own_rows: bool, tied: bool, ids: Tensor | None, tmp_path: Path
) -> None:
    target = tiny_target(tied=tied)
    settings = (WHOLE if ids is None else SMALL).model_copy(update={"own_rows": own_rows})
    head = tiny_head(target, settings, ids)
    head.save_pretrained(tmp_path)
    loaded = load_head(tmp_path)
    assert isinstance(loaded, Eagle3Head)
    assert loaded.settings == head.settings
    assert loaded.contract == head.contract
    assert loaded.embedding is None
    loaded.bind(target)
    before, after = head.state_dict(), loaded.state_dict()
    assert before.keys() == after.keys()
    assert all(before[name].equal(after[name]) for name in before)
    assert logits_of(loaded, target).equal(logits_of(head, target))
    if own_rows:
        assert loaded.lm_head.weight.data_ptr() not in {
            loaded.get_buffer("embedding").data_ptr(),
            target.lm_head.weight.data_ptr(),
        }


def test_auto_model_and_sharded_folders_load(tmp_path: Path) -> None:
    head = tiny_head(tiny_target(), SMALL, REDUCED)
    head.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    for loaded in (load_head(tmp_path), AutoModel.from_pretrained(tmp_path)):
        assert all(t.equal(head.state_dict()[name]) for name, t in loaded.state_dict().items())


@pytest.mark.slow
def test_f65_equal_in_a_fresh_process(tmp_path: Path) -> None:
    head = tiny_head(tiny_target(), SMALL, REDUCED)
    head.save_pretrained(tmp_path / "head")
    code = (
        "import sys, torch; from drafthead.heads import load_head;"
        "torch.save(load_head(sys.argv[1]).state_dict(), sys.argv[2])"
    )
    out = tmp_path / "state.pt"
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "head"), str(out)], check=True)
    state = torch.load(out, weights_only=True)
    assert all(tensor.equal(state[name]) for name, tensor in head.state_dict().items())


def saved(
    folder: Path, change: Callable[[dict[str, Tensor]], object], own_rows: bool = True
) -> Path:
    """A saved head whose stored tensors were changed afterwards."""
    tiny_head(
        tiny_target(), SMALL.model_copy(update={"own_rows": own_rows}), REDUCED
    ).save_pretrained(folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("name", ["lm_head.weight", "d2t", "fc.weight"])
def test_f66_f75_missing_tensors_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"missing {name}") as error:
        load_head(saved(tmp_path, lambda tensors: tensors.pop(name)))
    assert "\n" not in str(error.value)


def test_f66_borrowed_rows_are_not_missing(tmp_path: Path) -> None:
    target = tiny_target()
    loaded = load_head(saved(tmp_path, lambda tensors: None, own_rows=False))
    loaded.bind(target)
    state = torch.randn(3, 64)
    torch.testing.assert_close(
        loaded.teacher_logits(state), state @ target.lm_head.weight[REDUCED].T
    )


def test_f66_surplus_tensors_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"surplus stray\.weight"):
        load_head(saved(tmp_path, lambda tensors: tensors.update({"stray.weight": torch.ones(2)})))


def test_f75_rows_of_another_size_are_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path, lambda t: t.update({"lm_head.weight": torch.ones(512, 64)}))
    with pytest.raises(ValueError, match=r"lm_head\.weight has shape \(512, 64\), not \(128, 64\)"):
        load_head(folder)


@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        (torch.zeros(128, dtype=torch.int64), "the map was lost"),
        (torch.arange(128) * 3 + 4, "do not fit"),
        (torch.arange(128) * 3 - 4, "do not fit"),
        (torch.arange(128) * 3 + 1, "disagree"),
    ],
)
def test_f59_f75_broken_maps_are_refused(offsets: Tensor, message: str, tmp_path: Path) -> None:
    head = load_head(saved(tmp_path, lambda tensors: tensors.update({"d2t": offsets})))
    with pytest.raises(ValueError, match=message):
        head.bind(tiny_target())


class _Trap:
    """Unpickling it makes a marker file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (str(self.marker),)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors"])
def test_f73_pickles_are_never_opened(name: str, tmp_path: Path) -> None:
    folder, marker = saved(tmp_path / "head", lambda tensors: None), tmp_path / "marker"
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(pickle.dumps(_Trap(marker)))
    with pytest.raises(ValueError, match="safetensors"):
        load_head(folder)
    assert not marker.exists()


def test_f73_remote_code_is_not_executed(tmp_path: Path) -> None:
    folder, marker = saved(tmp_path / "head", lambda tensors: None), tmp_path / "marker"
    file = folder / "config.json"
    auto_map = {"AutoConfig": "evil.Evil", "AutoModel": "evil.Evil"}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"auto_map": auto_map}))
    (folder / "evil.py").write_text(f"import os\nos.mkdir({str(marker)!r})\nclass Evil: pass\n")
    load_head(folder)
    assert not marker.exists()


def test_folders_that_are_no_heads_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no config\.json"):
        load_head(tmp_path)
    tiny_target().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"model_type 'llama' is no head .*drafthead_eagle3"):
        load_head(tmp_path)
    (tmp_path / "config.json").write_text("[")
    with pytest.raises(ValueError, match="not the config of a head"):
        load_head(tmp_path)


def test_a_damaged_contract_is_named(tmp_path: Path) -> None:
    folder = saved(tmp_path, lambda tensors: None)
    file = folder / "config.json"
    config = json.loads(file.read_text())
    del config["contract"]["fingerprint"]
    file.write_text(json.dumps(config))
    with pytest.raises(ValueError, match="fingerprint: Field required") as error:
        load_head(folder)
    assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match="no contract or settings"):
        Eagle3Head(Eagle3Config())


@pytest.mark.parametrize("text", ["{", "{}", "[]"])
def test_f73_a_broken_index_is_one_line(tmp_path: Path, text: str) -> None:
    tiny_head(tiny_target()).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ValueError, match="not an index of safetensors"):
        load_head(tmp_path)
