"""The frozen target: prefill, verify and features over an unmodified Hugging Face model.

It knows nothing of drafters or rules. Captured layers follow one convention everywhere: id L is
the residual stream entering layer L (so the output of layer L - 1), and id n, the number of
layers, is what leaves the last layer before the final norm.

Shapes: B batch, T positions, n tokens of one forward, D hidden width, V vocabulary, L layers.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from drafthead.heads.contract import Contract, check_layers, describe, logit_transform
from drafthead.inference.store import Store
from drafthead.inference.tree import Tree, ancestors, rows_of

DTYPES = ("bfloat16", "float16", "float32", "float64")

ATTENTION = ("sdpa", "eager")
"""Attention implementations whose 4-D masks are known to be right."""


class UnsupportedTargetError(ValueError):
    """The model cannot be decoded without loss here; the message names why."""


@dataclass(frozen=True)
class Output:
    """What one forward gives: logits (B, n, V), and features (B, n, L * D) if asked for."""

    logits: Tensor
    features: Tensor | None


class Target:
    """A causal language model as the decoder sees it."""

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None
    ) -> None:
        self.model = model.eval()
        self.tokenizer = tokenizer
        self.config = model.config.get_text_config()
        self.vocab_size: int = self.config.vocab_size
        self.num_layers: int = self.config.num_hidden_layers
        self._refuse_unsupported()
        self._layers = _decoder_layers(model, self.num_layers)

    @property
    def device(self) -> torch.device:
        return torch.device(self.model.device)

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self.model.dtype
        return dtype

    @property
    def context(self) -> int:
        """Most positions the model was made for.

        With `longrope`, those of its short table: a text that passes on to the long one has all its
        keys made anew, which a store of keys cannot follow.
        """
        most = int(self.config.max_position_embeddings)
        rope = getattr(self.config, "rope_parameters", None) or {}
        if rope.get("rope_type") == "longrope":
            most = min(most, int(rope["original_max_position_embeddings"]))
        return most

    def _refuse_unsupported(self) -> None:
        name = self.config.model_type
        attention = self.config._attn_implementation
        if attention not in ATTENTION:
            raise UnsupportedTargetError(
                f"{name}: attention {attention!r} has no tree mask here; "
                "load it with attn_implementation='sdpa'"
            )
        kinds = _attention_kinds(self.config)
        if self.model._is_stateful and kinds == {"full_attention"}:
            kinds = {"recurrent state"}
        if kinds != {"full_attention"}:
            other = ", ".join(sorted(kinds - {"full_attention"}))
            raise UnsupportedTargetError(
                f"{name}: {other} cannot be rolled back here; use a full-attention model"
            )
        if getattr(self.config, "alibi", False):
            raise UnsupportedTargetError(
                f"{name}: ALiBi counts slots, not a tree's positions; use another model"
            )
        if "position_ids" not in inspect.signature(self.model.forward).parameters:
            raise UnsupportedTargetError(
                f"{name}: its forward takes no position_ids, which a tree needs; use another model"
            )

    def contract(
        self, layers: Sequence[int], template_kwargs: Mapping[str, Any] | None = None
    ) -> Contract:
        """What a head that reads these layers must be able to rely on."""
        return describe(self.model, self.tokenizer, tuple(layers), dict(template_kwargs or {}))

    def unembed(self, hidden: Tensor) -> Tensor:
        """(…, D) states after the final norm → (…, V) logits, with the target's scale and cap."""
        rows: nn.Module = self.model.get_output_embeddings()
        return logit_transform(self.config)(rows(hidden))

    # Decoding

    def open(self, batch: int, capacity: int) -> Store:
        """Make an empty store: `batch` rows of at most `capacity` tokens, draft nodes included."""
        return Store(self.num_layers, batch, capacity)

    @torch.no_grad()
    def prefill(
        self, store: Store, row: int, ids: Sequence[int], layers: Sequence[int] = ()
    ) -> Output:
        """Run a prompt into one row and commit it.

        Gives logits (1, 1, V) of the next token and features (1, T, L * D).
        """
        store.clear(row)
        store.rows = slice(row, row + 1)
        store.check_room(len(ids))
        tokens = torch.tensor([list(ids)], device=self.device)
        positions = torch.arange(len(ids), device=self.device)[None]
        with self._capture(layers) as captured:
            logits = self.model(
                tokens, position_ids=positions, cache=store, use_cache=True, logits_to_keep=1
            ).logits
        store.commit([range(len(ids))])
        return Output(logits, torch.cat(captured, dim=-1) if captured else None)

    @torch.no_grad()
    def verify(
        self, store: Store, roots: Sequence[int], trees: Sequence[Tree], layers: Sequence[int] = ()
    ) -> Output:
        """Run every row's root and tree in one forward; logits (B, n, V), the first the root's.

        Follow with `store.commit`.
        """
        store.rows = slice(0, store.batch)
        tokens, depths = (t.to(self.device) for t in rows_of(trees, roots))
        store.check_room(tokens.shape[1])
        offsets = torch.tensor(store.offsets, device=self.device)
        with self._capture(layers) as captured:
            logits = self.model(
                tokens,
                attention_mask=self._mask(store.offsets, ancestors(trees)),
                position_ids=offsets[:, None] + depths,
                cache=store,
                use_cache=True,
            ).logits
        return Output(logits, torch.cat(captured, dim=-1) if captured else None)

    def _mask(self, offsets: Sequence[int], tree: Tensor) -> Tensor:
        """(B, 1, n, S): a row's committed slots and its tree's ancestors.

        Bool for sdpa, additive for eager; the other kind is silently wrong in each.
        """
        B, n, _ = tree.shape
        mask = torch.zeros(B, 1, n, max(offsets) + n, dtype=torch.bool)
        for row, offset in enumerate(offsets):
            mask[row, :, :, :offset] = True
            mask[row, :, :, offset : offset + n] = tree[row]
        if self.config._attn_implementation == "eager":
            additive = torch.zeros(mask.shape, dtype=self.dtype)
            return additive.masked_fill_(~mask, torch.finfo(self.dtype).min).to(self.device)
        return mask.to(self.device)

    # Training

    @torch.no_grad()
    def states(self, ids: Tensor, layers: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Right-padded ids (B, T) → features (B, T, L * D) and the output rows' input (B, T, D)."""
        with self._capture(layers) as captured:
            last = self.model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state
        return torch.cat(captured, dim=-1), last

    @contextmanager
    def _capture(self, layers: Sequence[int]) -> Iterator[list[Tensor]]:
        """Collect the states of these layer ids, ascending, during one forward."""
        captured: list[Tensor] = []
        if not layers:
            yield captured
            return
        check_layers(layers, self.num_layers)

        def keep(_module: nn.Module, _inputs: object, output: Any) -> None:
            captured.append(output[0] if isinstance(output, tuple) else output)

        handles = [self._layers[layer - 1].register_forward_hook(keep) for layer in layers]
        try:
            yield captured
        finally:
            for handle in handles:
                handle.remove()


def _decoder_layers(model: PreTrainedModel, count: int) -> nn.ModuleList:
    """The decoder layers: the one list of modules with as many entries as the config says."""
    lists = [
        m for m in model.get_decoder().modules() if isinstance(m, nn.ModuleList) and len(m) == count
    ]
    if not lists:
        raise UnsupportedTargetError(
            f"{model.config.model_type}: no list of {count} decoder layers found"
        )
    return lists[0]


def _attention_kinds(config: PreTrainedConfig) -> set[str]:
    """Kinds of attention among the layers, as `layer_types` names them; also where it is absent."""
    if kinds := getattr(config, "layer_types", None):  # a property in some configs
        return set(kinds)
    fields = config.to_dict()
    window = fields.get("sliding_window")  # one window for every layer, as in Mistral
    sliding = window is not None and window < fields.get("max_position_embeddings", 0)
    if sliding or "local" in (fields.get("attention_layers") or ()):
        return {"sliding_attention"}
    return {"full_attention"}


def serving_dtype() -> str:
    """bfloat16 where this machine computes in it, else float32."""
    if torch.cuda.is_available() or torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return "bfloat16"
    return "float32"


def load_target(name: str | Path, dtype: str = "float32", revision: str | None = None) -> Target:
    """Load model and tokenizer of a folder or Hub id; what is missing or broken is one line."""
    with _loading(str(name)) as path:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path,
            dtype=getattr(torch, dtype),
            revision=revision,
            attn_implementation="sdpa",
            output_loading_info=True,
        )
        model, info = loaded
        if missing := sorted(info["missing_keys"]):  # transformers would leave them random
            raise ValueError(f"its weights lack {len(missing)} tensors, {missing[0]} among them")
    return Target(model, load_tokenizer(name, revision))


def load_tokenizer(name: str | Path, revision: str | None = None) -> PreTrainedTokenizerBase:
    """Load only the tokenizer, with the same errors."""
    with _loading(str(name)) as path:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(path, revision=revision)
    return tokenizer


@contextmanager
def _loading(path: str) -> Iterator[str]:
    if not Path(path).is_dir() and ("/" not in path or path.startswith((".", "/", "~"))):
        raise FileNotFoundError(
            f"target {path!r}: no such folder, and not a Hub id (ORG/NAME); "
            "`drafthead fetch-demo DIR` makes the embedded one"
        )
    try:
        yield path
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        first = (str(error) or repr(error)).splitlines()[0]
        raise OSError(f"target {path!r} cannot be loaded: {first}") from error
