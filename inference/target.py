"""The frozen target: prefill, verify and features over an unmodified Hugging Face model.

It knows nothing of drafters or rules. Captured layers follow one convention everywhere: id L is
the residual stream entering layer L (so the output of layer L - 1), and id n, the number of
layers, is what leaves the last layer before the final norm, LAST (-1) the same after it.

Shapes: B batch, T positions, n tokens of one forward, D hidden width, V vocabulary, L layers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils.generic import ModelOutput

from drafthead.heads.contract import (
    LAST,
    Contract,
    check_layers,
    describe,
    logit_transform,
    own_parameters,
)
from drafthead.inference.masks import UnsupportedTargetError, attention_of, visible
from drafthead.inference.placement import execution_device, unwrapped
from drafthead.inference.store import Store
from drafthead.inference.tree import Tree, ancestors, rows_of

DTYPES = ("bfloat16", "float16", "float32", "float64")


@dataclass(frozen=True)
class Output:
    """What one forward gives: logits (B, n, V), and features (B, n, L * D) if asked for."""

    logits: Tensor
    features: Tensor | None


class Target:
    """A causal language model as the decoder sees it."""

    def __init__(self, model: nn.Module, tokenizer: PreTrainedTokenizerBase | None = None) -> None:
        """`model`: of transformers, or of PEFT around one, whose adapters then stay active.

        Raises UnsupportedTargetError for one that cannot be decoded without loss.
        """
        self.model = unwrapped(model).eval()
        self.tokenizer = tokenizer
        self.config = self.model.config.get_text_config()
        self.vocab_size: int = self.config.vocab_size
        self.num_layers: int = self.config.num_hidden_layers
        self._attention = attention_of(self.model)
        self._embedding: nn.Module = self.model.get_input_embeddings()
        self._layers = _decoder_layers(self.model, self.num_layers)

    @property
    def device(self) -> torch.device:
        """Where tokens go in and logits come out, also of a model spread over several devices."""
        return execution_device(self._embedding)

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self.model.dtype
        return dtype

    @property
    def context(self) -> int:
        """Most positions the model was made for (see `context_of`)."""
        return context_of(self.config)

    @property
    def num_weights(self) -> int:
        return sum(parameter.numel() for _, parameter in own_parameters(self.model))

    @property
    def source(self) -> PreTrainedModel | Path:
        """What a head borrows from: the live model, or its folder where that is not whole."""
        model: PreTrainedModel = self.model
        return model

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
            # Without a mask the model makes its own, as for any prompt, and may skip a causal one.
            logits = self.model(
                tokens, position_ids=positions, cache=store, use_cache=True, logits_to_keep=1
            ).logits
        store.commit([range(len(ids))])
        return Output(logits, self._features(captured))

    @torch.no_grad()
    def verify(
        self, store: Store, roots: Sequence[int], trees: Sequence[Tree], layers: Sequence[int] = ()
    ) -> Output:
        """Run every row's root and tree in one forward; logits (B, n, V), the first the root's.

        Follow with `store.commit`.
        """
        store.rows = slice(0, store.batch)
        device = self.device
        tokens, depths = rows_of(trees, roots)
        lengths = torch.tensor(store.offsets, device=device)
        seen = visible(lengths, ancestors(trees).to(device), max(store.offsets) + tokens.shape[1])
        with self._capture(layers) as captured:
            logits = self.run(store, tokens, lengths[:, None] + depths.to(device), seen)
        return Output(logits, self._features(captured))

    @torch.no_grad()
    def run(self, store: Store, tokens: Tensor, positions: Tensor, seen: Tensor) -> Tensor:
        """One forward of (B, n) tokens at these positions; logits (B, n, V).

        seen: (B, n, S) bool, what each token may see of the S = max(store.offsets) + n slots, in
        which row b's tokens follow its offset. Windows are put on top of it. At least one slot a
        token, or it comes out NaN. Then commit, or add n to `store.drafted` to keep the slots.

        A token whose keys or values are not finite has logits NaN and harms no other token.
        """
        store.check_room(tokens.shape[1])
        device = self.device
        tokens, positions, seen = tokens.to(device), positions.to(device), seen.to(device)
        keys = store.place(positions) if self._attention.window else None
        dtype = self.dtype if self.config._attn_implementation == "eager" else None
        mask = self._attention.masks(seen, positions, keys, dtype)

        def forward() -> Tensor:
            logits: Tensor = self.model(
                tokens, attention_mask=mask, position_ids=positions, cache=store, use_cache=True
            ).logits
            return logits

        logits = forward()
        if logits[:, 0].amax().isfinite():  # NaN anywhere in a row's store would show here
            return logits
        with store.mending(tokens) as spoilt:
            logits = forward()
        return logits.masked_fill(spoilt[..., None], float("nan"))

    def _features(self, captured: Mapping[int, Tensor]) -> Tensor | None:
        """(B, n, L * D) of captured layers, on one device, or None if none were asked for."""
        if not captured:
            return None
        device = self.device
        return torch.cat([captured[layer].to(device) for layer in sorted(captured)], dim=-1)

    # Training

    @torch.no_grad()
    def states(self, ids: Tensor, layers: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Right-padded ids (B, T) → features (B, T, L * D) and the output rows' input (B, T, D)."""
        with self._capture(layers) as captured:
            last = self.last_hidden(ids)
        features = self._features(captured)
        return last[..., :0] if features is None else features, last

    def last_hidden(self, ids: Tensor) -> Tensor:
        """(B, T) ids → (B, T, D) states after the final norm, without a store."""
        last: Tensor = self.model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state
        return last

    @contextmanager
    def _capture(self, layers: Sequence[int]) -> Iterator[dict[int, Tensor]]:
        """Collect the states of these layer ids during one forward; the last one's, if repeated."""
        captured: dict[int, Tensor] = {}
        if not layers:
            yield captured
            return
        check_layers(layers, self.num_layers)
        here = threading.get_ident()

        def keeper(layer: int) -> Callable[[nn.Module, object, Any], None]:
            def keep(_module: nn.Module, _inputs: object, output: Any) -> None:
                if threading.get_ident() == here:  # the model may run elsewhere meanwhile
                    several = isinstance(output, tuple | ModelOutput)
                    captured[layer] = output[0] if several else output

            return keep

        last = self.model.get_decoder()
        parts = {n: last if n == LAST else self._layers[n - 1] for n in layers}
        hooked = [part.register_forward_hook(keeper(n)) for n, part in parts.items()]
        try:
            yield captured
        finally:
            for handle in hooked:
                handle.remove()


def context_of(config: PreTrainedConfig) -> int:
    """Most positions that a model of this text config was made for.

    With `longrope`, those of its short table: a text that passes on to the long one has all its
    keys made anew, which a store of keys cannot follow.
    """
    most = int(config.max_position_embeddings)
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        most = min(most, int(rope["original_max_position_embeddings"]))
    return most


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


def serving_dtype() -> str:
    """bfloat16 where this machine computes in it, else float32."""
    if torch.cuda.is_available():
        fit = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        fit = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return "bfloat16" if fit else "float32"


def load_target(
    name: str | Path, dtype: str = "float32", revision: str | None = None, role: str = "target"
) -> Target:
    """Load model and tokenizer of a folder or Hub id; what is missing or broken is one line, which
    calls them by their role.
    """
    with _loading(str(name), role) as path:
        kind = AutoConfig.from_pretrained(path, revision=revision).model_type
        if kind.startswith("drafthead_"):
            raise ValueError("it is a draft head, no causal language model: give it with --head")
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path,
            dtype=getattr(torch, dtype),
            revision=revision,
            output_loading_info=True,
        )
        model, info = loaded
        if missing := sorted(info["missing_keys"]):  # transformers would leave them random
            raise ValueError(f"its weights lack {len(missing)} tensors, {missing[0]} among them")
    return Target(model, load_tokenizer(name, revision, role))


def load_config(
    name: str | Path, revision: str | None = None, role: str = "target"
) -> PreTrainedConfig:
    """Load only the config of the text model, with the same errors."""
    with _loading(str(name), role) as path:
        config: PreTrainedConfig = AutoConfig.from_pretrained(path, revision=revision)
    return config.get_text_config()


def load_tokenizer(
    name: str | Path, revision: str | None = None, role: str = "target"
) -> PreTrainedTokenizerBase:
    """Load only the tokenizer, with the same errors."""
    with _loading(str(name), role) as path:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(path, revision=revision)
    return tokenizer


@contextmanager
def _loading(path: str, role: str) -> Iterator[str]:
    if not Path(path).is_dir() and ("/" not in path or path.startswith((".", "/", "~"))):
        raise FileNotFoundError(
            f"{role} {path!r}: no such folder, and not a Hub id (ORG/NAME); "
            "`drafthead fetch-demo DIR` makes the embedded target"
        )
    try:
        yield path
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        first = (str(error) or repr(error)).splitlines()[0].rstrip(" :")
        raise OSError(f"{role} {path!r} cannot be loaded: {first}") from error
