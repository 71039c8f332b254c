"""A DFlash export in transformers' own `generate(assistant_model=…, speculation_type="dflash")`.

transformers 5.24 has one model of this kind, Muse Glimmer's assistant: the maths is DFlash's, two
tensors have other names, and its config says at the top what DFlash says in `dflash_config`. So it
is an implementation that shares no line with ours.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import tiny_target
from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel, PreTrainedModel
from transformers.generation.candidate_generator import DFlashTokenCandidateGenerator

from drafthead.heads.block import BlockHead, BlockSettings
from drafthead.heads.contract import describe
from drafthead.heads.layouts.files import read_folder, write_folder
from drafthead.heads.layouts.layout import layout_of
from drafthead.inference.engine_check import chained
from drafthead.inference.target import Target

NEW = 30
PROMPT = [11, 400, 35, 7, 260, 99, 18, 3]
RENAMED = {r"^fc\.": "encoder.fc.", r"^hidden_norm\.": "encoder.output_norm_enc."}

Drafts = dict[int, list[int]]


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    """Give a target that never ends and that does not say the same token for ever."""
    model = tiny_target(head_dim=32)
    model.generation_config.eos_token_id = None
    return model


@pytest.fixture(scope="module")
def head(target: PreTrainedModel) -> BlockHead:
    """Give a head that DFlash can express, its weights random and large."""
    settings = BlockSettings(
        draft_vocab_size=None,
        layers=(2, 3, 6),
        unroll_steps=4,
        num_layers=3,
        anchor_predicts=False,
        norm_features=False,
        markov_rank=0,
        confidence=False,
        mask_token_id=9,
    )
    with torch.random.fork_rng():
        torch.manual_seed(2)
        head = settings.build(describe(target, None, (2, 3, 6), {}), target.config, None)
        head.bind(target)
        with torch.no_grad():
            for parameter in head.parameters():
                spread = 0.3 if parameter.dim() < 2 else 2.0 * parameter.shape[-1] ** -0.5
                parameter.add_(spread * torch.randn_like(parameter))
    return head.eval()


@pytest.fixture(scope="module")
def exported(head: BlockHead, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("export") / "dflash"
    write_folder(layout_of("dflash", head).write(head, torch.float32), out)
    return out


@pytest.fixture
def drafted(monkeypatch: pytest.MonkeyPatch) -> Drafts:
    """Give what transformers drafts, by the number of new tokens that it drafts after."""
    found: Drafts = {}
    draft = DFlashTokenCandidateGenerator.get_candidates

    def noting(self: Any, input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        ids, logits = draft(self, input_ids, *args, **kwargs)
        if logits is not None:
            length = input_ids.shape[1]
            found[length - len(PROMPT)] = ids[0, length:].tolist()
        return ids, logits

    monkeypatch.setattr(DFlashTokenCandidateGenerator, "get_candidates", noting)
    return found


def assistant(folder: Path, shift: int = 0) -> MuseGlimmerAssistantModel:
    """The export as transformers' model; strict but for what it computes itself."""
    config = read_folder(folder).config
    inner = config["dflash_config"]
    assert config["architectures"] == ["DFlashDraftModel"]
    known = MuseGlimmerAssistantConfig().to_dict()
    taken = {name: value for name, value in config.items() if name in known}
    for name in ("model_type", "architectures", "transformers_version"):
        taken.pop(name, None)
    taken["block_size"] = config.get("block_size", inner.get("block_size"))
    taken["mask_token_id"] = inner["mask_token_id"]
    taken["target_layer_ids"] = [layer + shift for layer in inner["target_layer_ids"]]
    taken["layer_types"] = ["full_attention"] * config["num_hidden_layers"]
    model, info = MuseGlimmerAssistantModel.from_pretrained(
        folder,
        config=MuseGlimmerAssistantConfig(**taken),
        key_mapping=RENAMED,
        output_loading_info=True,
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    return model.eval()


def assisted(target: PreTrainedModel, draft: MuseGlimmerAssistantModel) -> list[int]:
    prompt = torch.tensor([PROMPT])
    out = target.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        assistant_model=draft,
        speculation_type="dflash",
        do_sample=False,
        max_new_tokens=NEW,
    )
    return out[0, len(PROMPT) :].tolist()


def test_transformers_drafts_with_an_export_what_the_head_drafts(
    target: PreTrainedModel, head: BlockHead, exported: Path, drafted: Drafts
) -> None:
    ours = chained(Target(target), head, [PROMPT], head.max_depth or 0, NEW)
    assert assisted(target, assistant(exported)) == ours.tokens[0]
    plain = target.generate(torch.tensor([PROMPT]), do_sample=False, max_new_tokens=NEW)
    assert ours.tokens[0] == plain[0, len(PROMPT) :].tolist()
    shared = [(ids, drafted[length][: len(ids)]) for length, ids in ours.drafts[0]]
    assert len(shared) > 5
    assert len({tuple(ids) for ids, _ in shared}) > 5  # drafts that say something
    assert all(mine == theirs for mine, theirs in shared)


def test_other_layers_draft_otherwise_and_leave_the_text(
    target: PreTrainedModel, head: BlockHead, exported: Path, drafted: Drafts
) -> None:
    ours = chained(Target(target), head, [PROMPT], head.max_depth or 0, NEW)
    assert assisted(target, assistant(exported, shift=1)) == ours.tokens[0]
    shared = [(ids, drafted[n][: len(ids)]) for n, ids in ours.drafts[0] if n in drafted]
    assert sum(mine == theirs for mine, theirs in shared) < len(shared) / 2
