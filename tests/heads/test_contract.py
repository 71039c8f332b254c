"""What the contract records of a target, and which targets it tells apart."""

from pathlib import Path

import pytest
import torch
from pydantic import ValidationError
from tiny import tiny_target, tiny_tokenizer
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteForCausalLM,
    OlmoConfig,
    OlmoForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    PreTrainedModel,
)

from drafthead.heads.borrowed import borrow
from drafthead.heads.contract import (
    LAST,
    Contract,
    ContractError,
    check_layers,
    default_layers,
    describe,
    fingerprint,
)

SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "pad_token_id": 0,
}


def odd_targets() -> dict[str, PreTrainedModel]:
    """Targets with their own ways from the last state to the logits."""
    torch.manual_seed(0)
    models: dict[str, PreTrainedModel] = {
        "llama": tiny_target(num_layers=2),
        "gemma2": Gemma2ForCausalLM(Gemma2Config(**SIZES, final_logit_softcapping=3.0)),
        "cohere": CohereForCausalLM(CohereConfig(**SIZES, logit_scale=0.25)),
        "granite": GraniteForCausalLM(GraniteConfig(**SIZES, logits_scaling=4.0)),
        "gpt2": GPT2LMHeadModel(GPT2Config(vocab_size=96, n_embd=32, n_layer=2, n_head=2)),
    }
    for model in models.values():
        for name, parameter in model.named_parameters():
            if "norm" in name or "ln_" in name:
                torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return models


def test_describe_writes_all_facts() -> None:
    model, tokenizer = tiny_target(), tiny_tokenizer()
    contract = describe(model, tokenizer, (2, 4, 5), {"enable_thinking": False}, revision="abc")
    assert contract.layers == (2, 4, 5)
    assert (contract.hidden_size, contract.vocab_size, contract.num_layers) == (64, 512, 8)
    assert (contract.dtype, contract.revision) == ("float32", "abc")
    assert contract.embedding == "model.embed_tokens.weight"
    assert contract.output == "lm_head.weight"
    assert contract.norm == "model.norm.weight"
    assert Contract.model_validate_json(contract.model_dump_json()) == contract
    with pytest.raises(ValidationError):
        Contract.model_validate(contract.model_dump() | {"typo": 1})


def test_tied_rows_go_by_the_name_of_the_embedding() -> None:
    contract = describe(tiny_target(tied=True), None, (2, 4, 5), {})
    assert contract.output == contract.embedding == "model.embed_tokens.weight"


def test_f60_vocabulary_is_the_models_not_the_tokenizers() -> None:
    assert describe(tiny_target(vocab_size=544), tiny_tokenizer(), (1,), {}).vocab_size == 544


def test_f23_a_folder_goes_by_its_name_never_by_its_path(tmp_path: Path) -> None:
    tiny_target().save_pretrained(tmp_path / "my-model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "my-model")
    contract = describe(model, None, (1,), {})
    assert contract.target == "my-model"
    model.name_or_path = "org/model"
    assert describe(model, None, (1,), {}).target == "org/model"


def test_f23_same_weights_are_the_same_target(tmp_path: Path) -> None:
    tiny_target().bfloat16().save_pretrained(tmp_path / "a")
    tiny_target().bfloat16().save_pretrained(tmp_path / "b")
    loads = [
        AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=dtype)
        for name, dtype in [("a", torch.bfloat16), ("a", torch.float32), ("b", torch.float32)]
    ]
    first, *others = [describe(model, None, (1, 2), {}) for model in loads]
    for other in others:
        assert first.differences(other) == []
        first.check(other)


def test_f23_other_weights_are_refused_naming_both() -> None:
    mine, other = tiny_target(), tiny_target(seed=1)
    mine.name_or_path, other.name_or_path = "org/mine", "org/other"
    contract = describe(mine, None, (1,), {})
    with pytest.raises(ContractError, match=r"'org/mine' .* 'org/other': fingerprint is") as error:
        contract.check(describe(other, None, (1,), {}))
    assert "\n" not in str(error.value)


def test_one_changed_layer_changes_the_fingerprint() -> None:
    model = tiny_target()
    before = fingerprint(model)
    model.model.layers[3].mlp.up_proj.weight.mul_(1.1)
    assert fingerprint(model) != before


def test_f59_tokenizer_and_template_are_compared() -> None:
    model = tiny_target()
    contract = describe(model, tiny_tokenizer(), (1,), {})
    other = tiny_tokenizer(corpus=["aaaa bbbb cccc dddd " + " ".join(map(str, range(1000, 1400)))])
    assert "tokenizer" in contract.differences(describe(model, other, (1,), {}))[0]
    other = tiny_tokenizer(template="{{ messages }}")
    assert "template" in contract.differences(describe(model, other, (1,), {}))[0]
    thinking = describe(model, tiny_tokenizer(), (1,), {"enable_thinking": True})
    assert [line.split()[0] for line in contract.differences(thinking)] == [
        "template",
        "template_kwargs",
    ]
    # One side without a tokenizer knows nothing to compare.
    assert contract.differences(describe(model, None, (1,), {})) == []


def test_f14_layers_are_compared() -> None:
    model = tiny_target()
    contract = describe(model, None, (2, 4, 5), {})
    assert "layers" in contract.differences(describe(model, None, (1, 3, 4), {}))[0]


def test_f15_defaults_or_a_refusal_that_names_the_option() -> None:
    for num_layers in range(1, 7):
        with pytest.raises(ValueError, match=r"head\.layers: .* of \d layers; set it") as error:
            default_layers(num_layers)
        assert "\n" not in str(error.value)
    for num_layers in range(7, 81):
        layers = default_layers(num_layers)
        assert check_layers(layers, num_layers) == layers
    assert default_layers(32) == (2, 16, 29)


@pytest.mark.parametrize("layers", [(-2,), (-1, -1), (3, -1), (0, 2), (7,), (2, 2), (4, 2), ()])
def test_f14_bad_layer_ids_are_refused(layers: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"in 1\.\.6"):
        check_layers(layers, 6)


def test_f15_explicit_layers_are_honoured() -> None:
    assert check_layers([1], 1) == (1,)
    assert check_layers([1, 6], 6) == (1, 6)
    assert check_layers([-1, 6], 6) == (-1, 6)


@pytest.mark.parametrize("name", ["llama", "gemma2", "cohere", "granite", "gpt2"])
def test_f16_logits_are_rebuilt_from_the_last_state(name: str) -> None:
    model = odd_targets()[name].eval()
    contract = describe(model, None, (1,), {})
    ids = torch.arange(1, 21)[None]
    with torch.no_grad():
        states = model.base_model(ids).last_hidden_state
        rebuilt = contract.transform(states @ model.get_parameter(contract.output).T)
        assert (rebuilt.softmax(-1) - model(ids).logits.softmax(-1)).abs().max() < 1e-5
    plain = contract.logit_scale == 1 and contract.logit_softcap is None
    assert plain == (name in ("llama", "gpt2"))


@pytest.mark.parametrize("name", ["llama", "gemma2", "cohere", "granite", "gpt2"])
def test_final_norm_is_found_with_its_offset(name: str) -> None:
    model = odd_targets()[name]
    contract = describe(model, None, (1,), {})
    assert contract.norm is not None
    assert contract.norm.split(".")[1] == ("ln_f" if name == "gpt2" else "norm")
    assert contract.norm_offset == (1.0 if name == "gemma2" else 0.0)


def test_biased_output_rows_are_refused() -> None:
    sizes = {k: v for k, v in SIZES.items() if k != "head_dim"}
    with pytest.raises(ContractError, match="bias"):
        describe(PhiForCausalLM(PhiConfig(**sizes)), None, (1,), {})


def test_biased_output_rows_are_refused_from_files_too(tmp_path: Path) -> None:
    """A store of last states alone was made without a look at them: other heads use them whole."""
    model = PhiForCausalLM(PhiConfig(**{k: v for k, v in SIZES.items() if k != "head_dim"}))
    contract = describe(model, None, (), {})
    model.save_pretrained(tmp_path / "one")
    model.save_pretrained(tmp_path / "several", max_shard_size="20KB")
    for folder in (tmp_path / "one", tmp_path / "several"):
        with pytest.raises(ContractError, match=r"lm_head\.bias"):
            borrow(folder, contract.model_copy(update={"layers": (LAST,)}), None, True)
        assert borrow(folder, contract, None, True).rows.equal(model.lm_head.weight)


def test_partitioned_parameters_are_refused() -> None:
    model = tiny_target()
    model.model.layers[0].mlp.up_proj.weight.data = torch.empty(0)
    with pytest.raises(ContractError, match="not in this process"):
        fingerprint(model)


def test_a_final_norm_without_weights_is_none() -> None:
    config = OlmoConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=2)
    assert describe(OlmoForCausalLM(config), None, (1, 2), {}).norm is None
