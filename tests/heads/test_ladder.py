"""Every kind of head: the unroll is what decoding does, labels are right, files hold all of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from calls import generate
from drafts import own_greedy, prompt_of
from ladder import LADDER, ladder_batch, ladder_head, rollout
from tiny import tiny_target
from torch import Tensor
from transformers import LlamaForCausalLM

from drafthead.heads.base import TeacherBatch
from drafthead.heads.borrowing import BorrowingHead
from drafthead.heads.load import load_head
from drafthead.inference.target import Target

CLOSE = {"atol": 1e-5, "rtol": 0.0}  # statistics of norms are fp32
every_head = pytest.mark.parametrize("name", LADDER)


@pytest.fixture(scope="module")
def target() -> LlamaForCausalLM:
    return tiny_target().double()  # type: ignore[no-any-return]


def random_ids(B: int, T: int, seed: int = 5) -> Tensor:
    return torch.randint(0, 512, (B, T), generator=torch.Generator().manual_seed(seed))


def depth_of(head: BorrowingHead) -> int:
    """Deep enough to pass what a head of any depth was trained for."""
    return min(head.max_depth or 4, 4)


@every_head
def test_f36_unroll_equals_the_decoders_chain(name: str, target: LlamaForCausalLM) -> None:
    head, T = ladder_head(name, target), 14
    batch, steps = ladder_batch(head, target, random_ids(2, T)), depth_of(head)
    with torch.no_grad():
        depths = list(head.unroll(batch, steps))
    assert len(depths) == steps
    for row, slot in ((0, 0), (1, 1), (0, T // 2), (1, T - 2 - steps)):  # first and last included
        decoded = rollout(head, batch, row, slot, steps)
        assert decoded.std() > 0.05  # the comparison is about something
        for depth, prediction in enumerate(depths):
            at = (prediction.teacher == row * T + slot + 1 + depth).nonzero().item()
            torch.testing.assert_close(prediction.logits[int(at)], decoded[depth], **CLOSE)


@every_head
def test_f36_tree_nodes_equal_their_own_chains(name: str, target: LlamaForCausalLM) -> None:
    head, n = ladder_head(name, target), 7
    batch = ladder_batch(head, target, random_ids(1, n + 1))
    levels = [([11, 12, 13], [-1, -1, -1]), ([21, 22, 23, 24], [0, 2, 0, 1]), ([31, 32], [4, 3])]
    given = batch.features[:, :n], batch.ids[:, 1:], torch.tensor([n])
    state = head.open(1, 32)
    head.extend(state, *given)
    tokens: list[int] = []
    parents: list[int] = []
    for new, below in levels[: depth_of(head) - 1]:
        logits = head.expand(state, torch.tensor([new]), torch.tensor([below]))[0]
        tokens, parents = tokens + new, parents + below
        for node in range(len(tokens) - len(new), len(tokens)):
            path, at = [], node
            while at >= 0:
                path.insert(0, tokens[at])
                at = parents[at]
            alone = head.open(1, 32)
            head.extend(alone, *given)
            for i, token in enumerate(path):
                last = head.expand(alone, torch.tensor([[token]]), torch.tensor([[i - 1]]))[0, 0]
            torch.testing.assert_close(logits[node - len(tokens)], last, **CLOSE)


def ragged_rounds(
    head: BorrowingHead, batch: TeacherBatch, rows: Sequence[int], rounds: Sequence[Sequence[int]]
) -> list[Tensor]:
    """Several rounds of extend and a small tree; rounds: how many positions each row commits."""
    state = head.open(len(rows), 40)
    done, out = [0] * len(rows), []
    for counts in rounds:
        n, width = max(counts), batch.features.shape[-1]
        features = batch.features.new_full((len(rows), n, width), 7.0)  # padding shows if read
        ids = torch.full((len(rows), n), 3)
        for b, (row, start, count) in enumerate(zip(rows, done, counts, strict=True)):
            features[b, :count] = batch.features[row, start : start + count]
            ids[b, :count] = batch.ids[row, start + 1 : start + count + 1]
        out.append(head.extend(state, features, ids, torch.tensor(counts)))
        done = [a + b for a, b in zip(done, counts, strict=True)]
        nodes = torch.tensor([[row + 5, row + 6] for row in rows])
        out.append(head.expand(state, nodes, torch.tensor([[-1, -1]] * len(rows)))[:, 1])
    return out


@every_head
def test_f36_ragged_rows_equal_single_rows(name: str, target: LlamaForCausalLM) -> None:
    """Rounds of several rows, some of which commit nothing; what was drafted leaves no trace."""
    head = ladder_head(name, target)
    batch = ladder_batch(head, target, random_ids(3, 14))
    rounds = [(4, 1, 7), (1, 3, 2), (2, 2, 1), (3, 0, 1)]
    together = ragged_rounds(head, batch, [0, 1, 2], rounds)
    for row in range(3):
        counts = [(r[row],) for r in rounds if r[row]]
        alone = ragged_rounds(head, batch, [row], counts)
        mine = [out[row] for i, out in enumerate(together) if rounds[i // 2][row]]
        for expected, got in zip(alone, mine, strict=True):
            torch.testing.assert_close(got, expected[0], **CLOSE)


@every_head
def test_f41_a_rounds_drafts_leave_nothing_behind(name: str, target: LlamaForCausalLM) -> None:
    head = ladder_head(name, target)
    batch = ladder_batch(head, target, random_ids(1, 12))
    state, start = head.open(1, 40), 0
    for count in (3, 1, 4, 2):
        end = start + count
        features, ids = batch.features[:, start:end], batch.ids[:, start + 1 : end + 1]
        logits = head.extend(state, features, ids, torch.tensor([count]))
        torch.testing.assert_close(logits, rollout(head, batch, 0, end - 1, 1), **CLOSE)
        head.expand(state, torch.tensor([[9, 10]]), torch.tensor([[-1, -1]]))
        start = end


@every_head
def test_a_row_can_be_given_to_another_sequence(name: str, target: LlamaForCausalLM) -> None:
    head = ladder_head(name, target)
    batch = ladder_batch(head, target, random_ids(2, 12))
    state = head.open(2, 20)
    head.extend(state, batch.features[:, :9], batch.ids[:, 1:10], torch.tensor([9, 5]))
    head.expand(state, torch.tensor([[4], [4]]), torch.tensor([[-1], [-1]]))
    state.start(1)
    ids, features = batch.ids[[0, 0], 1:5], batch.features[[0, 0], :4]
    logits = head.extend(state, features, ids, torch.tensor([0, 4]))
    torch.testing.assert_close(logits[1:], rollout(head, batch, 0, 3, 1), **CLOSE)
    torch.testing.assert_close(logits[:1], rollout(head, batch, 0, 8, 1), **CLOSE)


@every_head
def test_packed_rows_do_not_see_each_other(name: str, target: LlamaForCausalLM) -> None:
    head = ladder_head(name, target)
    assert head.packs
    ids = random_ids(3, 12)
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[0, 9:] = mask[2, 5:] = False
    mask[:, :2] = False
    batch, steps = ladder_batch(head, target, ids, mask), depth_of(head)
    pairs = zip(head.unroll(batch, steps), head.unroll(batch.packed(), steps), strict=True)
    for apart, packed in pairs:
        assert len(apart.teacher) == len(packed.teacher) > 0
        torch.testing.assert_close(packed.logits, apart.logits, **CLOSE)


@every_head
def test_f05_labels_are_the_supervised_tokens_and_no_others(
    name: str, target: LlamaForCausalLM
) -> None:
    """Depth i at slot t is about token t + 2 + i, and needs neither it nor what comes after it."""
    head, ids = ladder_head(name, target), random_ids(1, 20)
    place = torch.arange(20)[None]
    batch = ladder_batch(head, target, ids, (place >= 10) & (place <= 14))
    steps = depth_of(head)
    for prediction in head.unroll(batch, steps):
        assert (prediction.teacher + 1).tolist() == [10, 11, 12, 13, 14]
    early = replace(batch, mask=place <= 4)
    reachable = [(p.teacher + 1).tolist() for p in head.unroll(early, steps)]
    assert reachable == [[2, 3, 4], [3, 4], [4], []][:steps]
    features = batch.features.clone().requires_grad_()
    for depth, prediction in enumerate(head.unroll(replace(batch, features=features), steps)):
        slot = int(prediction.teacher[2]) - 1 - depth
        (grad,) = torch.autograd.grad(prediction.logits[2].sum(), features, retain_graph=True)
        touched = grad[0].abs().amax(-1) > 0
        assert touched[slot]
        assert not touched[slot + 1 :].any()
        changed = ids.clone()
        changed[0, slot + 2 + depth :] += 1
        other = list(head.unroll(replace(batch, ids=changed % 512), depth + 1))[depth]
        torch.testing.assert_close(other.logits[2], prediction.logits[2], **CLOSE)


@every_head
def test_f38_every_part_is_trained_and_every_depth_trains(
    name: str, target: LlamaForCausalLM
) -> None:
    head = ladder_head(name, target).train()
    batch, steps = ladder_batch(head, target, random_ids(2, 16)), depth_of(head)
    silent = {n for n, p in head.named_parameters() if p.requires_grad}
    for depth in range(steps):
        torch.manual_seed(0)
        prediction = list(head.unroll(batch, steps))[depth]
        head.zero_grad()
        value = prediction.logits.logsumexp(-1).sum() + sum(
            extra.sum() for extra in prediction.auxiliary.values()
        )
        if prediction.confidence is not None:
            value = value + prediction.confidence.square().sum()
        value.backward()
        moved = {n for n, p in head.named_parameters() if p.grad is not None and p.grad.any()}
        assert moved
        silent -= moved
    assert silent == set()


@every_head
def test_f27_every_weight_gets_a_gradient_where_nothing_is_supervised(
    name: str, target: LlamaForCausalLM
) -> None:
    """Ranks that sum gradients must sum the same ones: zeros, not none."""
    head, ids = ladder_head(name, target).train(), random_ids(2, 8)
    batch = ladder_batch(head, target, ids, torch.zeros_like(ids, dtype=torch.bool))
    for given in (batch, batch.packed()):
        head.zero_grad()
        total = torch.zeros((), dtype=torch.float64)
        for prediction in head.unroll(given, head.settings.unroll_steps):
            assert len(prediction.teacher) == 0
            total = total + prediction.logits.sum() + prediction.hidden.sum()
            total = total + sum(extra.sum() for extra in prediction.auxiliary.values())
            if prediction.confidence is not None:
                total = total + prediction.confidence.sum()
        total.backward()
        assert [n for n, p in head.named_parameters() if p.requires_grad and p.grad is None] == []


@every_head
def test_f38_one_chat_is_learnt_at_every_depth(name: str) -> None:
    """From its own start, in single precision: the text's token is the first choice everywhere."""
    target = tiny_target()
    head, place = ladder_head(name, target, fresh=True), torch.arange(20)[None]
    ids = 3 * random_ids(1, 20, seed=3).remainder(170)  # in every draft vocabulary
    batch = ladder_batch(head, target, ids, place >= 8)
    optimiser = torch.optim.AdamW(head.parameters(), lr=5e-3)
    rights = [0.0]
    for _ in range(250):
        losses, rights = [], []
        for prediction in head.unroll(batch, head.settings.unroll_steps):
            logits, labels = prediction.logits, ids.flatten()[prediction.teacher + 1]
            rights.append((head.draft_ids[logits.argmax(-1)] == labels).float().mean().item())
            losses.append(F.cross_entropy(logits, torch.searchsorted(head.draft_ids, labels)))
        if min(rights) == 1.0:
            break
        optimiser.zero_grad()
        torch.stack(losses).sum().backward()
        optimiser.step()
    assert rights == [1.0] * head.settings.unroll_steps


@every_head
def test_f37_what_is_stored_is_all_that_was_trained(
    name: str, target: LlamaForCausalLM, tmp_path: Path
) -> None:
    head, batch = ladder_head(name, target), None
    head.save_pretrained(tmp_path)
    loaded = load_head(tmp_path)
    with pytest.raises(ValueError, match=r"not bound: call bind\(target\)"):
        loaded.open(1, 4)
    loaded.bind(target)
    assert type(loaded) is type(head)
    assert loaded.settings == head.settings
    batch = ladder_batch(head, target, random_ids(1, 10))
    for mine, theirs in zip(head.unroll(batch, 2), loaded.unroll(batch, 2), strict=True):
        assert torch.equal(mine.logits, theirs.logits)
    borrowed = {"embedding", "rows"}
    assert not borrowed & set(head.state_dict())
    assert set(dict(head.named_parameters())) <= set(head.state_dict())


@every_head
def test_greedy_and_seeded_text_are_the_targets_own(name: str, target: LlamaForCausalLM) -> None:
    """Chain and tree, T = 0 against transformers, T = 1 against no drafter; short prompts (F57)."""
    head, model = ladder_head(name, target), Target(target)
    depth = depth_of(head)
    for tree in (f"chain:{depth}", f"tree:{depth}x3:7"):
        for length in (1, 2, 9):
            prompt = prompt_of(length)
            out = generate(model, head, [prompt], tree=tree, max_new_tokens=12)
            assert out[0].tolist() == own_greedy(model, prompt, 12)
        sampled: dict[str, Any] = {"do_sample": True, "seed": 3, "max_new_tokens": 12}
        prompts = [prompt_of(5), prompt_of(8)]
        plain = generate(model, None, prompts, **sampled)
        assert generate(model, head, prompts, tree=tree, **sampled).equal(plain)


@every_head
def test_f58_a_chain_deeper_than_the_head_is_refused(name: str, target: LlamaForCausalLM) -> None:
    head = ladder_head(name, target)
    if head.max_depth is None:
        assert generate(Target(target), head, [prompt_of(4)], tree="chain:9").shape[1] > 4
        return
    deeper = f"chain:{head.max_depth + 1}"
    with pytest.raises(ValueError, match=f"the head drafts {head.max_depth} tokens at most"):
        generate(Target(target), head, [prompt_of(4)], tree=deeper)
