"""Medusa-1 against its formula; what the generic tests of every kind of head cannot ask of it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import cast

import pytest
import torch
from drafts import prompt_of
from ladder import LADDER, ladder_batch, ladder_head
from tiny import tiny_target
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from drafthead.heads.contract import LAST
from drafthead.heads.load import load_head
from drafthead.heads.medusa import MedusaHead, MedusaOptions
from drafthead.inference.decoder import decode
from drafthead.inference.grow import HeadDrafter
from drafthead.inference.sampling import Sampler
from drafthead.inference.target import Target
from drafthead.inference.tree import parse_shape

MEDUSAS = [name for name in LADDER if name.startswith("medusa")]
every_medusa = pytest.mark.parametrize("name", MEDUSAS)


@pytest.fixture(scope="module")
def target() -> LlamaForCausalLM:
    return tiny_target().double()  # type: ignore[no-any-return]


def medusa(name: str, target: LlamaForCausalLM, *, fresh: bool = False) -> MedusaHead:
    head = ladder_head(name, target, fresh=fresh)
    assert isinstance(head, MedusaHead)
    return head


def ids_of(B: int, T: int) -> Tensor:
    return torch.randint(0, 512, (B, T), generator=torch.Generator().manual_seed(7))


def by_hand(head: MedusaHead, target: LlamaForCausalLM, states: Tensor, depth: int) -> Tensor:
    """(…, D) last states → (…, Vd) logits of one head, from its stored tensors alone."""
    stored, options = head.state_dict(), head.settings
    for block in range(options.blocks):
        place = f"medusa_head.{depth}.{block}.linear"
        inner = states @ stored[f"{place}.weight"].T + stored[f"{place}.bias"]
        states = states + inner / (1 + (-inner).exp())
    if options.own_rows:
        return states @ stored[f"medusa_head.{depth}.{options.blocks}.weight"].T
    return states @ target.lm_head.weight[head.draft_ids].T


@every_medusa
def test_f36_every_depth_is_the_formula_on_the_last_state(
    name: str, target: LlamaForCausalLM
) -> None:
    head, ids = medusa(name, target), ids_of(2, 13)
    states = target.model(ids).last_hidden_state.flatten(0, 1)
    depths = list(head.unroll(ladder_batch(head, target, ids), head.settings.unroll_steps))
    for depth, prediction in enumerate(depths):
        slots = prediction.teacher - 1 - depth  # the state that the head reads
        expected = by_hand(head, target, states[slots], depth)
        assert expected.std() > 0.05
        torch.testing.assert_close(prediction.logits, expected, atol=1e-9, rtol=0)


@every_medusa
def test_an_untrained_head_is_the_targets_own_readout(name: str, target: LlamaForCausalLM) -> None:
    head, ids = medusa(name, target, fresh=True), ids_of(1, 9)
    own = target(ids).logits[0][:, head.draft_ids]
    steps = head.settings.unroll_steps
    for depth, prediction in enumerate(head.unroll(ladder_batch(head, target, ids), steps)):
        torch.testing.assert_close(prediction.logits, own[prediction.teacher - 1 - depth])


@every_medusa
def test_f74_weights_are_those_of_the_published_layout(name: str, target: LlamaForCausalLM) -> None:
    """Blocks of one head share nothing: a count of one line tells."""
    head = medusa(name, target)
    K, J, D = head.settings.unroll_steps, head.settings.blocks, 64
    rows = len(head.draft_ids) * D if head.settings.own_rows else 0
    assert sum(p.numel() for p in head.parameters()) == K * (J * (D * D + D) + rows)
    kinds = ("linear.weight", "linear.bias")
    names = {f"medusa_head.{k}.{j}.{kind}" for k in range(K) for j in range(J) for kind in kinds}
    if head.settings.own_rows:
        names |= {f"medusa_head.{k}.{J}.weight" for k in range(K)}
    assert set(head.state_dict()) == names | ({"d2t", "t2d"} if head.reduced else set())
    assert head.contract.layers == (LAST,)


def test_f74_a_config_of_the_other_layout_is_refused(
    target: LlamaForCausalLM, tmp_path: Path
) -> None:
    folders = [tmp_path / name for name in MEDUSAS]
    for name, folder in zip(MEDUSAS, folders, strict=True):
        medusa(name, target).save_pretrained(folder)
    configs = [folder / "config.json" for folder in folders]
    texts = [config.read_text() for config in configs]
    for folder, config, other in zip(folders, configs, reversed(texts), strict=True):
        config.write_text(other)
        with pytest.raises(ValueError, match=r"tensors do not match config\.json: missing"):
            load_head(folder)


@every_medusa
def test_nodes_of_several_depths_added_at_once(name: str, target: LlamaForCausalLM) -> None:
    head, n = medusa(name, target), 6
    batch = ladder_batch(head, target, ids_of(2, n + 1))
    state = head.open(2, 20)
    counts = torch.tensor([n, 3])
    first = head.extend(state, batch.features[:, :n], batch.ids[:, 1:], counts)
    head.expand(state, torch.tensor([[5], [6]]), torch.tensor([[-1], [-1]]))
    mixed = head.expand(state, torch.tensor([[7, 8], [9, 9]]), torch.tensor([[0, -1], [-1, 0]]))
    last = batch.features[torch.arange(2), counts - 1]
    torch.testing.assert_close(first, by_hand(head, target, last, 0))
    one, two = (by_hand(head, target, last, depth) for depth in (1, 2))
    expected = [two[0], one[0], one[1], two[1]]
    torch.testing.assert_close(mixed.flatten(0, 1), torch.stack(expected))


def test_a_round_computes_each_depth_once(target: LlamaForCausalLM) -> None:
    """However many nodes a tree has there."""
    head, calls = medusa("medusa", target), Counter[nn.Module]()
    blocks = [cast(nn.Sequential, part)[0] for part in head.medusa_head]
    for block in blocks:
        block.register_forward_hook(lambda module, *_: calls.update([module]))
    drafter = HeadDrafter(head, parse_shape("tree:4x3:9"))
    rows, _ = decode(Target(target), [prompt_of(6)], Sampler(), drafter, max_new_tokens=12)
    rounds = [r for r in rows[0].rounds if r.drafted]
    assert calls[blocks[0]] == len(rounds)
    assert all(0 < calls[block] <= len(rounds) for block in blocks)


def test_what_the_heads_cannot_do_is_refused(target: LlamaForCausalLM) -> None:
    head = medusa("medusa", target)
    batch = ladder_batch(head, target, ids_of(1, 12))
    with pytest.raises(ValueError, match=r"depth 5 asked of 4 Medusa heads \(head\.unroll_steps\)"):
        next(head.unroll(batch, 5))
    state = head.open(1, 8)
    head.extend(state, batch.features[:, :3], batch.ids[:, 1:4], torch.tensor([3]))
    with pytest.raises(ValueError, match=r"parents 0\.\.0: this round has 0 nodes"):
        head.expand(state, torch.tensor([[4]]), torch.tensor([[0]]))
    with pytest.raises(ValueError, match=r"warm_start: medusa has no closed-form start"):
        head.warm_start([batch])
    options: MedusaOptions = head.settings
    with pytest.raises(ValueError, match="greater than or equal to 1"):
        type(options)(blocks=0)
