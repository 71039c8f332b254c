"""Makes the folders beside it, and what their maker drafts with them: tests read both.

It runs in an environment of its own (`pip install torch==2.13.0 speculators==0.9.0`, and no
torchvision), and knows nothing of drafthead: `python make.py` here. Heads are random; their target
is an embedding, tied to the output rows, of which `seen.safetensors` holds a copy.
"""

import os
import shutil
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file
from speculators import SpeculatorModel, SpeculatorsConfig, VerifierConfig
from speculators.models.dflash import DFlashSpeculatorConfig
from speculators.models.dspark import DSparkSpeculatorConfig
from speculators.models.eagle3 import Eagle3SpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config

HERE = Path(__file__).parent
VOCABULARY, KEPT, WIDTH, TOKENS, LAYERS = 48, 20, 16, 12, [2, 4, 5]
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 24,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
}


def common(kind: str, tokens: int) -> dict[str, object]:
    verifier = VerifierConfig(name_or_path="target", architectures=["LlamaForCausalLM"])
    return {
        "speculators_config": SpeculatorsConfig(
            algorithm=kind,
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=tokens)],
            default_proposal_method="greedy",
            verifier=verifier,
        )
    }


def eagle3(layers: int, kept: int, **flags: bool) -> Eagle3SpeculatorConfig:
    layer = LlamaConfig(num_hidden_layers=layers, **SIZES)
    layer._attn_implementation = "eager"
    return Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=kept,
        eagle_aux_hidden_state_layer_ids=LAYERS,
        **flags,
        **common("eagle3", 3),
    )


def block(kind: str, kept: int, **more: object) -> DFlashSpeculatorConfig:
    layer = Qwen3Config(num_hidden_layers=2, **SIZES)
    layer._attn_implementation = "eager"
    made = {"dflash": DFlashSpeculatorConfig, "dspark": DSparkSpeculatorConfig}[kind]
    return made(
        transformer_layer_config=layer,
        draft_vocab_size=kept,
        aux_hidden_state_layer_ids=LAYERS,
        block_size=4,
        mask_token_id=7,
        **more,
        **common(kind, 4 if kind == "dspark" else 3),
    )


CONFIGS = {
    "eagle3": eagle3(2, KEPT, norm_before_residual=True, fc_norm=True, norm_output=True),
    "eagle3-whole": eagle3(1, VOCABULARY, norm_before_fc=True),
    "dflash": block("dflash", KEPT),
    "dspark": block("dspark", VOCABULARY, markov_rank=6),
}


def made(config: object) -> SpeculatorModel:
    model = SpeculatorModel.registered_model_class_from_config(config)(config)
    if model.use_draft_vocab:
        kept = torch.arange(KEPT) * 2 + 1
        t2d = torch.zeros(VOCABULARY, dtype=torch.bool)
        t2d[kept] = True
        model.load_vocab_mappings(t2d, kept - torch.arange(KEPT))
    for name, weight in model.named_parameters():
        noise = torch.randn_like(weight)
        near_one = weight.dim() == 1 and not name.endswith("bias")
        weight.data = 1 + 0.2 * noise if near_one else 1.5 * weight.shape[-1] ** -0.5 * noise
    model._load_verifier_weights(overwrite_embed_tokens=True, overwrite_lm_head=True)
    return model.eval()


@torch.no_grad()
def chains(model: SpeculatorModel, features: Tensor, ids: Tensor) -> dict[str, Tensor]:
    """(3, T - 1, Vd): at step i and slot t the logits of token t + 2 + i."""
    seen: list[Tensor] = []
    model.lm_head.register_forward_hook(lambda module, inputs, output: seen.append(output[0]))
    documents = torch.zeros(1, TOKENS - 1, dtype=torch.long)
    model(features[:, :-1], ids[:, 1:], documents, ttt_steps=3)
    return {"logits": torch.stack(seen)}


@torch.no_grad()
def blocks(model: SpeculatorModel, features: Tensor, ids: Tensor) -> dict[str, Tensor]:
    """(A,) anchors' positions and (A, 4, Vd) logits of their blocks."""
    ones, none = torch.ones(1, TOKENS), torch.zeros(1, TOKENS, dtype=torch.long)
    hidden, logits, _, _, at = model._backbone_forward(
        features, ids, ones, torch.zeros(1, TOKENS, WIDTH), none, max_anchors=4
    )
    at, logits = at.view(4, 4), logits.view(4, 4, -1)
    if hasattr(model, "markov_head"):
        before = ids[0, at.clamp(max=TOKENS - 1)]
        logits = logits + model.markov_head.block_bias(
            prev_token_ids=before, hidden_states=hidden.view(4, 4, -1)
        )
    return {"logits": logits, "anchors": at[:, 0].contiguous()}


def main() -> None:
    torch.manual_seed(0)
    torch._dynamo.config.disable = True
    seen = {"ids": torch.randint(VOCABULARY, (1, TOKENS))}
    seen["features"] = torch.randn(1, TOKENS, len(LAYERS) * WIDTH)
    with tempfile.TemporaryDirectory() as place:
        os.chdir(place)
        plain = LlamaConfig(num_hidden_layers=1, tie_word_embeddings=True, **SIZES)
        target = LlamaForCausalLM(plain)
        torch.nn.init.normal_(target.model.embed_tokens.weight)
        target.save_pretrained("target")
        seen["embedding"] = target.model.embed_tokens.weight.data.clone()
        for name, config in CONFIGS.items():
            model = made(config)
            shutil.rmtree(HERE / name, ignore_errors=True)
            model.save_pretrained(HERE / name)
            for extra in {*(HERE / name).iterdir()} - {
                HERE / name / "config.json",
                HERE / name / "model.safetensors",
            }:
                extra.unlink()
            drafted = chains if name.startswith("eagle3") else blocks
            drafts = drafted(model, seen["features"], seen["ids"])
            seen |= {f"{name}.{part}": x for part, x in drafts.items()}
    save_file({name: x.contiguous() for name, x in seen.items()}, HERE / "seen.safetensors")


main()
