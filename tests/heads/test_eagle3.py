"""EAGLE-3: the unroll is the decoder's chain; labels and gradients are where they belong."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ladder import rollout
from tiny import tiny_batch, tiny_head, tiny_target
from torch import Tensor
from transformers import LlamaForCausalLM

from drafthead.heads.base import Prediction, TeacherBatch
from drafthead.heads.contract import ContractError, describe
from drafthead.heads.eagle3 import Eagle3Head, Eagle3Settings

LAYERS = (2, 4, 5)
REDUCED = torch.arange(0, 512, 3)


def random_batch(target: LlamaForCausalLM, B: int = 2, T: int = 20, seed: int = 5) -> TeacherBatch:
    torch.manual_seed(seed)
    ids = torch.randint(0, target.config.vocab_size, (B, T))
    return tiny_batch(target, ids, torch.ones_like(ids, dtype=torch.bool), LAYERS)


SMALL: dict[str, Any] = {"draft_vocab_size": len(REDUCED)}
# name: (how the target differs, the head's settings)
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "whole": ({}, {"draft_vocab_size": None}),
    "reduced": ({}, SMALL),
    "post-norm": ({}, SMALL | {"norm_output": True}),
    "own-rows": ({}, SMALL | {"own_rows": True}),
    "bare-features": ({}, SMALL | {"norm_features": False}),
    "head-dim": ({"head_dim": 32}, SMALL),
    "tied": ({"tied": True}, {"draft_vocab_size": None}),
    "own-rope": ({"rope_theta": 1e6}, SMALL | {"rope_theta": 10_000.0}),
    "layers": ({}, SMALL | {"num_layers": 3}),
    "norms": (
        {},
        SMALL
        | {"norm_features": False, "norm_before_fc": True, "norm_before_residual": True}
        | {"num_layers": 2},
    ),
}


@pytest.fixture(scope="module")
def heads() -> dict[str, Eagle3Head]:
    built = {}
    for name, (kind, options) in VARIANTS.items():
        settings = Eagle3Settings(**options)
        ids = None if settings.draft_vocab_size is None else REDUCED
        built[name] = tiny_head(tiny_target(**kind), settings, ids)
    return built


@pytest.mark.parametrize("name", VARIANTS)
def test_f36_unroll_equals_the_decoders_chain(name: str, heads: dict[str, Eagle3Head]) -> None:
    head, steps = heads[name], 5
    batch = random_batch(tiny_target(**VARIANTS[name][0]))
    T = batch.ids.shape[1]
    with torch.no_grad():
        depths = list(head.unroll(batch, steps))
    for depth, prediction in enumerate(depths):
        for row in (0, 1):
            for slot in (0, 1, T // 2, T - 3 - depth):  # first and last included
                at = (prediction.teacher == row * T + slot + 1 + depth).nonzero().item()
                decoded = rollout(head, batch, row, slot, depth + 1)[depth]
                torch.testing.assert_close(prediction.logits[int(at)], decoded, atol=1e-5, rtol=0)
    spread = depths[0].logits.std()
    assert spread > 0.1  # the comparison is about something


def test_f36_parity_needs_every_later_key_and_its_position(heads: dict[str, Eagle3Head]) -> None:
    """Control: a chain at another depth, or without its middle, gives other logits."""
    head, batch = heads["whole"], random_batch(tiny_target())
    chain = rollout(head, batch, 0, 6, 4)
    state = head.open(1, 16)
    head.extend(state, batch.features[:1, :7], batch.ids[:1, 1:8], torch.tensor([7]))
    skipped = head.expand(state, batch.ids[:1, 9:10], torch.tensor([[-1]]))[0, 0]
    assert not torch.allclose(chain[2], skipped, atol=1e-2)


@pytest.mark.parametrize("length", [1, 2, 3])
def test_f57_short_prompts(length: int, heads: dict[str, Eagle3Head]) -> None:
    head, batch = heads["whole"], random_batch(tiny_target(), T=length + 1)
    logits = rollout(head, batch, 0, length - 1, 1)[0]
    assert logits.isfinite().all()
    predictions = list(head.unroll(batch, 3))
    assert [len(p.logits) for p in predictions] == [2 * max(length - 1 - i, 0) for i in range(3)]


def test_f55_past_the_draft_layers_positions() -> None:
    target = tiny_target()
    head = tiny_head(target, Eagle3Settings(draft_vocab_size=None))
    head.config.max_position_embeddings = 16
    batch = random_batch(target, B=1, T=60)
    decoded = rollout(head, batch, 0, 50, 3)
    for depth, prediction in enumerate(head.unroll(batch, 3)):
        torch.testing.assert_close(prediction.logits[50], decoded[depth], atol=1e-5, rtol=0)


def test_padding_may_reach_beyond_the_memory(heads: dict[str, Eagle3Head]) -> None:
    head, batch = heads["whole"], random_batch(tiny_target())
    state = head.open(2, 256)
    state.lengths = [255, 3]
    logits = head.extend(state, batch.features[:, :9], batch.ids[:, 1:10], torch.tensor([1, 9]))
    assert logits.isfinite().all()
    assert state.lengths == [256, 12]
    with pytest.raises(ValueError, match="257 slots needed, 256 held"):
        head.expand(state, torch.tensor([[1], [1]]), torch.tensor([[-1], [-1]]))


def test_memory_that_is_full_says_so(heads: dict[str, Eagle3Head]) -> None:
    head, batch = heads["whole"], random_batch(tiny_target())
    state = head.open(1, 4)
    with pytest.raises(ValueError, match="5 slots needed, 4 held"):
        head.extend(state, batch.features[:1, :5], batch.ids[:1, :5], torch.tensor([5]))
    with pytest.raises(ValueError, match="has 0 nodes"):
        head.expand(state, torch.tensor([[1]]), torch.tensor([[0]]))


# Labels, gradients, loss


def test_f05_each_prediction_sees_its_past_only(heads: dict[str, Eagle3Head]) -> None:
    head = heads["whole"]
    batch = random_batch(tiny_target(), B=1)
    features = batch.features.clone().requires_grad_()
    for depth, prediction in enumerate(head.unroll(replace(batch, features=features), 3)):
        for row in (0, len(prediction.logits) - 1):
            slot = int(prediction.teacher[row]) - 1 - depth
            (grad,) = torch.autograd.grad(prediction.logits[row].sum(), features, retain_graph=True)
            touched = grad[0].abs().amax(-1) > 0
            assert touched[: slot + 1].all()
            assert not touched[slot + 1 :].any()
            changed = batch.ids.clone()
            changed[0, slot + 2 + depth :] += 1  # the label and all after it
            other = list(head.unroll(replace(batch, ids=changed % 512), depth + 1))[depth]
            torch.testing.assert_close(other.logits[row], prediction.logits[row])
            changed = batch.ids.clone()
            changed[0, slot + 1 + depth] += 1  # the token just before the label
            other = list(head.unroll(replace(batch, ids=changed % 512), depth + 1))[depth]
            assert not torch.allclose(other.logits[row], prediction.logits[row], atol=1e-3)


@pytest.mark.parametrize("name", ["reduced", "layers"])
def test_padding_changes_nothing(name: str, heads: dict[str, Eagle3Head]) -> None:
    head, batch = heads[name], random_batch(tiny_target())
    mask = batch.mask.clone()
    mask[1, 12:] = False
    ids, features = batch.ids.clone(), batch.features.clone()
    ids[1, 12:], features[1, 12:] = 0, 99.0
    padded = list(head.unroll(replace(batch, ids=ids, mask=mask, features=features), 3))
    cut = replace(batch, ids=ids[1:, :12], mask=mask[1:, :12], features=features[1:, :12])
    T = ids.shape[1]
    for together, alone in zip(padded, head.unroll(cut, 3), strict=True):
        mine = together.logits[together.teacher >= T]
        torch.testing.assert_close(mine, alone.logits, atol=1e-5, rtol=0)


@pytest.mark.parametrize("steps", [1, 2, 3, 5])
def test_f38_every_depth_trains_every_part(steps: int) -> None:
    target = tiny_target()
    head = tiny_head(target, Eagle3Settings(draft_vocab_size=len(REDUCED), own_rows=True), REDUCED)
    batch = random_batch(target)
    for depth in range(steps):
        prediction = list(head.unroll(batch, steps))[depth]
        head.zero_grad()
        prediction.logits.logsumexp(-1).sum().backward()
        silent = [name for name, p in head.named_parameters() if p.grad is None or not p.grad.any()]
        assert silent == []


def text_loss(batch: TeacherBatch, prediction: Prediction) -> tuple[Tensor, float]:
    labels = batch.ids.flatten()[prediction.teacher + 1]
    right = (prediction.logits.argmax(-1) == labels).float().mean().item()
    return F.cross_entropy(prediction.logits, labels), right


def test_f29_only_the_heads_own_tensors_are_trained_or_stored(heads: dict[str, Eagle3Head]) -> None:
    layer = ["input_layernorm", "hidden_norm", "post_attention_layernorm"]
    layer += [f"self_attn.{x}_proj" for x in "qkvo"] + [
        f"mlp.{x}_proj" for x in ("gate", "up", "down")
    ]
    base = {f"layers.0.{name}.weight" for name in layer} | {"fc.weight", "norm.weight"}
    norms = {f"fc_norm.{k}.weight" for k in range(3)}
    above = {f"layers.1.{name}.weight" for name in layer if name != "hidden_norm"}
    expected = {
        "whole": base | norms,
        "reduced": base | norms,
        "bare-features": base,
        "own-rows": base | norms | {"lm_head.weight"},
        "norms": base | {"input_norm.weight"} | above,
    }
    for name, trained in expected.items():
        parameters = dict(heads[name].named_parameters())
        assert set(parameters) == trained
        assert all(p.requires_grad and p.dtype == torch.float32 for p in parameters.values())
        maps = set() if name == "whole" else {"d2t", "t2d"}
        assert set(heads[name].state_dict()) == trained | maps
    assert heads["whole"].embedding is not None
    assert not heads["whole"].embedding.requires_grad


def test_f29_training_moves_nothing_borrowed() -> None:
    target = tiny_target()
    head = tiny_head(target, Eagle3Settings(draft_vocab_size=None, feature_loss=0.5))
    before = {name: tensor.clone() for name, tensor in target.state_dict().items()}
    batch = random_batch(target)
    optimizer = torch.optim.AdamW(head.parameters(), lr=1e-2, weight_decay=0.1)
    for _ in range(3):
        loss = sum(
            (text_loss(batch, p)[0] + p.auxiliary["regression"].mean())
            for p in head.unroll(batch, 2)
        )
        assert isinstance(loss, Tensor)
        loss.backward()
        optimizer.step()
    assert all(tensor.equal(before[name]) for name, tensor in target.state_dict().items())


def test_feature_loss_compares_with_the_state_that_predicts_the_same_token() -> None:
    target = tiny_target()
    settings = Eagle3Settings(draft_vocab_size=None, feature_loss=0.5)
    head, batch = tiny_head(target, settings), random_batch(target)
    rows = target.lm_head.weight
    for prediction in head.unroll(batch, 3):
        normed = torch.linalg.lstsq(rows, prediction.logits.T).solution.T
        truth = batch.last_hidden.flatten(0, 1)[prediction.teacher]
        expected = 0.5 * F.smooth_l1_loss(normed, truth, reduction="none").mean(-1)
        torch.testing.assert_close(
            prediction.auxiliary["regression"], expected, atol=1e-4, rtol=1e-4
        )
        teacher = head.teacher_logits(truth)
        assert (teacher.argmax(-1) == batch.top.flatten()[prediction.teacher]).all()


def test_unbound_head_says_so() -> None:
    target = tiny_target()
    head = Eagle3Settings(draft_vocab_size=None).build(
        describe(target, None, LAYERS, {}), target.config, None
    )
    batch = random_batch(target)
    for call in (lambda: next(iter(head.unroll(batch, 1))), lambda: head.open(1, 4)):
        with pytest.raises(ValueError, match=r"not bound: call bind\(target\)"):
            call()
    with pytest.raises(ContractError, match="fingerprint"):
        head.bind(tiny_target(seed=1))


# Settings that heads of others have


def test_what_came_later_is_stored_where_it_is_on_only() -> None:
    """Runs and heads from before the settings keep their identity, and are read as they were."""
    plain = Eagle3Settings().model_dump(mode="json")
    assert not {"norm_before_residual", "norm_before_fc"} & plain.keys()
    assert Eagle3Settings.model_validate(plain) == Eagle3Settings()
    on = Eagle3Settings(norm_features=False, norm_before_fc=True, norm_before_residual=True)
    assert Eagle3Settings.model_validate(on.model_dump(mode="json")) == on


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"norm_before_fc": True}, "set that to false"),
        ({"norm_before_residual": True, "warm_start": 9}, "warm_start has no closed form"),
        (
            {"norm_before_fc": True, "norm_features": False, "warm_start": 9},
            "warm_start has no closed form",
        ),
    ],
)
def test_settings_that_contradict_each_other(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Eagle3Settings(**options)


def test_norm_before_residual_changes_what_is_added_to() -> None:
    """With attention and MLP silent the output is the normed hidden, else the hidden itself."""
    target, batch = tiny_target(), random_batch(tiny_target(), B=1)
    for on in (False, True):
        head = tiny_head(target, Eagle3Settings(draft_vocab_size=None, norm_before_residual=on))
        with torch.no_grad():
            head.layers[0].self_attn.o_proj.weight.zero_()
            head.layers[0].mlp.down_proj.weight.zero_()
            hidden = head.fuse(batch.features[:, :4])[0, -1]
            wanted = head.layers[0].hidden_norm(hidden) if on else hidden
        state = head.open(1, 8)
        head.extend(state, batch.features[:, :4], batch.ids[:, 1:5], torch.tensor([4]))
        torch.testing.assert_close(state.outputs[0, 0], wanted)
