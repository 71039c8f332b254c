"""EAGLE-3: the unroll is the decoder's chain; labels and gradients are where they belong."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
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


def rollout(head: Eagle3Head, batch: TeacherBatch, row: int, slot: int, steps: int) -> list[Tensor]:
    """Decode with the text's own tokens from a cold memory: (Vd,) logits of each depth."""
    n = slot + 1
    state = head.open(1, n + steps)
    features, ids = batch.features[row : row + 1], batch.ids[row : row + 1]
    logits = [head.extend(state, features[:, :n], ids[:, 1 : n + 1], torch.tensor([n]))[0]]
    for i in range(1, steps):
        token = ids[:, n + i : n + i + 1]
        logits.append(head.expand(state, token, torch.tensor([[i - 2]]))[0, 0])
    return logits


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


def test_f36_tree_nodes_equal_their_own_chains(heads: dict[str, Eagle3Head]) -> None:
    head, batch = heads["reduced"], random_batch(tiny_target())
    n, levels = (
        7,
        [([11, 12, 13], [-1, -1, -1]), ([21, 22, 23, 24], [0, 2, 0, 1]), ([31, 32], [4, 3])],
    )
    state = head.open(1, 32)
    features, ids = batch.features[:1], batch.ids[:1]
    head.extend(state, features[:, :n], ids[:, 1 : n + 1], torch.tensor([n]))
    tokens: list[int] = []
    parents: list[int] = []
    logits: list[Tensor] = []
    for new, below in levels:
        logits += head.expand(state, torch.tensor([new]), torch.tensor([below]))[0]
        tokens, parents = tokens + new, parents + below
    for node in range(len(tokens)):
        path = []
        at = node
        while at >= 0:
            path.append(tokens[at])
            at = parents[at]
        alone = head.open(1, 32)
        head.extend(alone, features[:, :n], ids[:, 1 : n + 1], torch.tensor([n]))
        for i, token in enumerate(reversed(path)):
            last = head.expand(alone, torch.tensor([[token]]), torch.tensor([[i - 1]]))[0, 0]
        torch.testing.assert_close(logits[node], last, atol=1e-5, rtol=0)


def ragged_rounds(
    head: Eagle3Head, batch: TeacherBatch, rows: Sequence[int], rounds: Sequence[Sequence[int]]
) -> list[Tensor]:
    """Several rounds of extend and a small tree; rounds: how many positions each row commits."""
    state = head.open(len(rows), 40)
    done = [0] * len(rows)
    out = []
    for counts in rounds:
        n = max(counts)
        features = torch.full(
            (len(rows), n, batch.features.shape[-1]), 7.0
        )  # padding shows if read
        ids = torch.full((len(rows), n), 3)
        for b, (row, start, count) in enumerate(zip(rows, done, counts, strict=True)):
            features[b, :count] = batch.features[row, start : start + count]
            ids[b, :count] = batch.ids[row, start + 1 : start + count + 1]
        out.append(head.extend(state, features, ids, torch.tensor(counts)))
        done = [a + b for a, b in zip(done, counts, strict=True)]
        parents = torch.tensor([[-1, -1]] * len(rows))
        nodes = torch.tensor([[row + 5, row + 6] for row in rows])
        out.append(head.expand(state, nodes, parents)[:, 1])
        parents = torch.tensor([[row % 2, 0, 1] for row in rows])
        out.append(head.expand(state, torch.tensor([[7, 8, 9]] * len(rows)), parents)[:, 2])
    return out


def test_f36_ragged_rows_equal_single_rows(heads: dict[str, Eagle3Head]) -> None:
    head, batch = heads["reduced"], random_batch(tiny_target(), B=3)
    rounds = [(4, 1, 9), (1, 3, 2), (2, 2, 1), (3, 0, 1)]
    together = ragged_rounds(head, batch, [0, 1, 2], rounds)
    for row in range(3):
        alone = ragged_rounds(
            head, batch, [row], [(counts[row],) for counts in rounds if counts[row]]
        )
        mine = [
            out[row]
            for out, counts in zip(together, [r for r in rounds for _ in "123"], strict=True)
            if counts[row]
        ]
        assert len(alone) == len(mine)
        for expected, got in zip(alone, mine, strict=True):
            torch.testing.assert_close(got, expected[0], atol=1e-5, rtol=0)


def test_a_row_can_be_given_to_another_sequence(heads: dict[str, Eagle3Head]) -> None:
    head, batch = heads["reduced"], random_batch(tiny_target())
    state = head.open(2, 20)
    head.extend(state, batch.features[:, :9], batch.ids[:, 1:10], torch.tensor([9, 5]))
    head.expand(state, torch.tensor([[4], [4]]), torch.tensor([[-1], [-1]]))
    state.start(1)
    swapped = batch.ids[[0, 0], 1:5], batch.features[[0, 0], :4]
    logits = head.extend(state, swapped[1], swapped[0], torch.tensor([0, 4]))
    torch.testing.assert_close(logits[1], rollout(head, batch, 0, 3, 1)[0], atol=1e-5, rtol=0)
    torch.testing.assert_close(logits[0], rollout(head, batch, 0, 8, 1)[0], atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["reduced", "post-norm"])
def test_f41_drafts_leave_nothing_behind(name: str, heads: dict[str, Eagle3Head]) -> None:
    head, batch = heads[name], random_batch(tiny_target())
    state = head.open(1, 40)
    start = 0
    for count in (3, 1, 4, 2):
        end = start + count
        logits = head.extend(
            state,
            batch.features[:1, start:end],
            batch.ids[:1, start + 1 : end + 1],
            torch.tensor([count]),
        )
        start = end
        torch.testing.assert_close(
            logits[0], rollout(head, batch, 0, end - 1, 1)[0], atol=1e-5, rtol=0
        )
        for i in range(3):
            head.expand(state, torch.tensor([[9, 10]]), torch.tensor([[-1, 2 * i - 1]]))


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


def test_f05_labels_are_the_supervised_tokens_and_no_others(heads: dict[str, Eagle3Head]) -> None:
    head = heads["whole"]
    ids = torch.arange(20)[None]
    mask = (ids >= 10) & (ids <= 14)
    batch = tiny_batch(tiny_target(), ids, mask, LAYERS)
    for depth, prediction in enumerate(head.unroll(batch, 4)):
        labels = ids[0, prediction.teacher + 1]
        assert labels.tolist() == [10, 11, 12, 13, 14]
        slots = prediction.teacher - 1 - depth
        assert (slots + 2 + depth == labels).all()
    early = replace(batch, mask=ids <= 4)
    reachable = [(p.teacher + 1).tolist() for p in head.unroll(early, 4)]
    assert reachable == [[2, 3, 4], [3, 4], [4], []]


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


def test_padding_changes_nothing(heads: dict[str, Eagle3Head]) -> None:
    head, batch = heads["reduced"], random_batch(tiny_target())
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


def test_f38_one_chat_is_learnt_at_every_depth() -> None:
    target = tiny_target()
    torch.manual_seed(3)
    ids = torch.randint(0, 512, (1, 24))
    mask = torch.arange(24)[None] >= 8
    batch = tiny_batch(target, ids, mask, LAYERS)
    contract = describe(target, None, LAYERS, {})
    head = Eagle3Settings(draft_vocab_size=None).build(contract, target.config, None)
    head.bind(target)
    optimizer = torch.optim.AdamW(head.parameters(), lr=5e-3)
    rights: list[float] = []
    for _ in range(150):
        losses, rights = zip(*(text_loss(batch, p) for p in head.unroll(batch, 4)), strict=True)
        optimizer.zero_grad()
        torch.stack(losses).sum().backward()
        optimizer.step()
        if min(rights) == 1.0:
            break
    assert list(rights) == [1.0] * 4


def test_f29_only_the_heads_own_tensors_are_trained_or_stored(heads: dict[str, Eagle3Head]) -> None:
    layer = ["input_layernorm", "hidden_norm", "post_attention_layernorm"]
    layer += [f"self_attn.{x}_proj" for x in "qkvo"] + [
        f"mlp.{x}_proj" for x in ("gate", "up", "down")
    ]
    base = {f"layers.0.{name}.weight" for name in layer} | {"fc.weight", "norm.weight"}
    norms = {f"fc_norm.{k}.weight" for k in range(3)}
    expected = {
        "whole": base | norms,
        "reduced": base | norms,
        "bare-features": base,
        "own-rows": base | norms | {"lm_head.weight"},
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
