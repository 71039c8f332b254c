"""A sibling cut from the target, trained by the ordinary loop and stored as a plain model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from families import EAGER_ONLY, FAMILIES
from tiny import tiny_batch, tiny_target, tiny_tokenizer
from tiny_runs import MakeConfig, events
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from drafthead.heads.base import TeacherBatch
from drafthead.heads.contract import ContractError, describe
from drafthead.inference.decoder import decode
from drafthead.inference.grow import HeadDrafter
from drafthead.inference.sampling import Sampler
from drafthead.inference.sibling import Sibling, SiblingSettings, load_sibling
from drafthead.inference.target import load_target
from drafthead.inference.tree import parse_shape
from drafthead.train.checkpoint import load_checkpoint, save_head
from drafthead.train.config import load_config
from drafthead.train.heldout import drafts_of
from drafthead.train.loop import run
from drafthead.train.teacher import supervised

SETTINGS = {"type": "sibling", "keep_layers": 2}


def cut(target: PreTrainedModel, keep: int, scale: float = 1.0, bind: bool = True) -> Sibling:
    settings = SiblingSettings(keep_layers=keep, start_logit_scale=scale)
    head = settings.build(describe(target, None, (), {}), target.config, None)
    assert isinstance(head, Sibling)
    if bind:
        head.bind(target)
    return head


def some_batch(target: PreTrainedModel) -> TeacherBatch:
    ids = torch.randint(3, 512, (3, 20), generator=torch.Generator().manual_seed(0))
    mask = torch.zeros(3, 20, dtype=torch.bool)
    mask[0, 5:], mask[1, :8], mask[2, 12:18] = True, True, True
    return tiny_batch(target, ids, mask, (1,))


@pytest.mark.parametrize("name", FAMILIES)
def test_a_sibling_of_all_layers_is_the_target(name: str) -> None:
    target = FAMILIES[name]()
    target.set_attn_implementation("eager" if name in EAGER_ONLY else "sdpa")
    head = cut(target, 3).train(False)
    ids = torch.randint(3, 512, (2, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = target(ids).logits
        torch.testing.assert_close(head.lm(ids).logits, expected, atol=1e-5, rtol=1e-5)
        shorter = cut(target, 2).lm.train(False)
        assert shorter.config.num_hidden_layers == 2
        if kinds := getattr(target.config, "layer_types", None):
            assert shorter.config.layer_types == kinds[:2]
        assert not torch.allclose(shorter(ids).logits, expected, atol=1e-2)


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt-neox", "gpt2"])
def test_it_starts_with_logits_scaled_down_and_ends_texts_as_the_target_does(name: str) -> None:
    """Whatever the final norm is: with a bias, or with weights that count from one."""
    target = FAMILIES[name]()
    target.generation_config.eos_token_id = [7, 9]
    head = cut(target, 3, scale=0.5).train(False)
    ids = torch.randint(3, 512, (2, 9), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(head.lm(ids).logits, 0.5 * target(ids).logits)
    assert head.lm.generation_config.eos_token_id == [7, 9]


@pytest.mark.parametrize("tied", [True, False])
def test_its_predictions_stand_where_the_teachers_do(tied: bool) -> None:
    """As the whole target it agrees everywhere, at every depth, and its overlap is whole."""
    target = tiny_target(num_layers=3, tied=tied)
    batch = some_batch(target)
    drafts, sums = drafts_of(cut(target, 3).train(False), batch, 3)
    matches, overlaps, positions = sums.T.tolist()
    assert matches == positions
    assert overlaps == pytest.approx(positions, rel=1e-4)
    # Supervised tokens with a token before them, but those too near to the row's start.
    assert positions == [15 + 7 + 6, 15 + 6 + 6, 15 + 5 + 6]
    assert torch.equal(drafts.known[..., 0], supervised(batch.mask))
    assert (drafts.match == drafts.known).all()
    assert drafts_of(cut(target, 1).train(False), batch, 1)[1][0, 0] < positions[0]


@pytest.mark.parametrize("tied", [True, False])
def test_embedding_and_output_rows_stay_the_targets_and_are_not_its_own(tied: bool) -> None:
    target = tiny_target(num_layers=3, tied=tied)
    head = cut(target, 2, scale=0.5)
    frozen = {name for name, p in head.named_parameters() if not p.requires_grad}
    names = {"lm.model.embed_tokens.weight"} | (set() if tied else {"lm.lm_head.weight"})
    assert frozen == names
    assert head.state_dict().keys() == {n for n, p in head.named_parameters() if p.requires_grad}
    assert torch.equal(head.lm.lm_head.weight, target.lm_head.weight)
    assert (head.lm.lm_head.weight is head.lm.model.embed_tokens.weight) == tied
    assert torch.equal(head.lm.model.norm.weight, 0.5 * target.model.norm.weight)


def test_it_binds_to_a_folder_as_to_the_live_target(tmp_path: Path) -> None:
    target = tiny_target(num_layers=3)
    target.save_pretrained(tmp_path)
    live, stored = cut(target, 2), cut(target, 2, bind=False)
    stored.bind(tmp_path)
    theirs = stored.lm.state_dict()
    assert all(torch.equal(tensor, theirs[n]) for n, tensor in live.lm.state_dict().items())
    with pytest.raises(ContractError, match="was made for target"):
        cut(target, 2, bind=False).bind(tiny_target(num_layers=3, seed=1))
    with pytest.raises(ContractError, match=r"has no embed_tokens\.weight of shape"):
        cut(target, 2, bind=False).bind(tiny_target(num_layers=3, vocab_size=300), check=False)
    with pytest.raises(ValueError, match="is not bound: call bind"):
        cut(target, 2, bind=False).teacher_logits(torch.zeros(1, 64))


def test_impossible_settings_are_refused(make_config: MakeConfig) -> None:
    with pytest.raises(ValueError, match=r"head\.unroll_steps: input should be 1"):
        make_config(head={**SETTINGS, "unroll_steps": 2})
    with pytest.raises(ValueError, match=r"head\.keep_layers"):
        make_config(head={**SETTINGS, "keep_layers": 0})
    with pytest.raises(ValueError, match=r"head\.keep_layers: 4 asked for, the target has 3"):
        cut(tiny_target(num_layers=3), 4)


def test_the_preset_is_a_sibling() -> None:
    config = load_config("smollm2-sibling")
    assert isinstance(config.head, SiblingSettings)
    assert config.head.keep_layers == 10


def test_a_run_distils_it_into_a_plain_model_that_drafts(make_config: MakeConfig) -> None:
    config = make_config(
        head=SETTINGS, optimiser={"lr": 3e-3}, training={"epochs": 3, "eval_every": 3}
    )
    result = run(config)
    losses = [event["loss"] for event in events(config.out)]
    assert sum(losses[-3:]) < sum(losses[:3])
    checkpoint = load_checkpoint(config.out / "checkpoints/last.safetensors")
    assert not any("embed" in name or "lm_head" in name for name in checkpoint.weights)
    assert checkpoint.contract.layers == ()

    plain = AutoModelForCausalLM.from_pretrained(result.head)
    assert type(plain).__name__ == "LlamaForCausalLM"
    assert plain.config.num_hidden_layers == 2
    assert AutoTokenizer.from_pretrained(result.head).get_vocab() == tiny_tokenizer().get_vocab()
    best = load_checkpoint(config.out / "checkpoints/best.safetensors").weights
    named = {f"lm.{name}": tensor for name, tensor in plain.state_dict().items()}
    assert all(torch.equal(tensor, named[name]) for name, tensor in best.items())

    target = load_target(config.target.name)
    drafter = HeadDrafter(load_sibling(result.head, target, "float32"), parse_shape("chain:3"))
    prompt = list(range(5, 15))
    expected, _ = decode(target, [prompt], Sampler(), max_new_tokens=20)
    rows, _ = decode(target, [prompt], Sampler(), drafter, max_new_tokens=20)
    assert rows[0].ids == expected[0].ids
    assert {made.source for made in rows[0].rounds} <= {"sibling", ""}


def test_a_resumed_run_goes_on_as_if_nothing_had_happened(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    run(make_config(head=SETTINGS, training={"max_steps": 6}, schedule={"kind": "constant"}))
    halves = make_config(head=SETTINGS, training={"max_steps": 3}, schedule={"kind": "constant"})
    halves = halves.model_copy(update={"out": tmp_path / "halves"})
    run(halves)
    longer = halves.model_copy(
        update={"training": halves.training.model_copy(update={"max_steps": 6})}
    )
    run(longer, resume=True)
    once = load_checkpoint(tmp_path / "run/checkpoints/last.safetensors")
    twice = load_checkpoint(tmp_path / "halves/checkpoints/last.safetensors")
    assert once.state.step == twice.state.step == 6
    assert all(torch.equal(t, twice.weights[name]) for name, t in once.weights.items())


def test_it_is_stored_in_the_targets_own_dtype(tmp_path: Path) -> None:
    target = tiny_target(num_layers=3).to(torch.bfloat16)
    head = cut(target, 2)
    assert {p.dtype for p in head.parameters() if p.requires_grad} == {torch.float32}
    save_head(head, tmp_path / "head")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "head").dtype == torch.bfloat16
