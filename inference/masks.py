"""Which slots each token of a forward may see, by kind of attention; pure, and no model is run.

A window counts positions, not slots: a query at position p sees keys at positions > p - window, as
in transformers. In a tree several nodes share a position, so slots would be miscounted.

Shapes: B batch, n tokens of one forward, S slots in view (the longest row's, the n included).
"""

from __future__ import annotations

import inspect
import sys
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

FULL, SLIDING = "full_attention", "sliding_attention"
"""The kinds that a tree can be masked for, as `layer_types` names them."""


WINDOW_MASK = "create_sliding_window_causal_mask"
"""What transformers' models import to make a window's mask; without it a window is not one."""


class UnsupportedTargetError(ValueError):
    """The model cannot be decoded without loss here; the message names why."""


def visible(lengths: Tensor, tree: Tensor, width: int) -> Tensor:
    """Each row's committed slots and, behind them, drafted ones as a tree allows → (B, n, S).

    lengths: (B,) committed slots; tree: (B, n, N) bool, over the N ≥ n slots behind them, of which
    the n tokens' own are the last; width: S.
    """
    B, n, N = tree.shape
    if B == 1:
        return F.pad(tree, (width - N, 0), value=True)
    own = lengths[:, None] + torch.arange(N, device=lengths.device)
    committed = torch.arange(width, device=lengths.device) < lengths[:, None]
    return committed[:, None].repeat(1, n, 1).scatter_(2, own[:, None].expand(B, n, N), tree)


def within(window: int, queries: Tensor, keys: Tensor) -> Tensor:
    """(B, n, S) bool: keys at positions (B, S) inside the window of queries at (B, n)."""
    return keys[:, None] > (queries - window)[:, :, None]


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Bool → 0 where seen, else the dtype's minimum, once: two of them added would overflow."""
    lowest = torch.finfo(dtype).min
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, lowest)


@dataclass(frozen=True)
class Attention:
    """Kinds of attention among a model's layers, and the masks that its forward takes."""

    kinds: tuple[str, ...]
    window: int | None
    """Positions that a sliding layer sees, the query's own included; None without such layers."""

    def masks(
        self, seen: Tensor, queries: Tensor, keys: Tensor | None, dtype: torch.dtype | None = None
    ) -> Tensor | dict[str, Tensor]:
        """What the model takes as `attention_mask`: (B, 1, n, S), or one for each kind of layer.

        seen: (B, n, S) bool without windows; queries (B, n) and keys (B, S): positions, the keys'
        only needed with a window. dtype: the attention's for an additive mask, as eager attention
        takes it; None for bool, as sdpa does. The other kind is silently wrong in each.
        """
        masks = {}
        for kind in self.kinds:
            mask = seen
            if kind == SLIDING:
                assert self.window is not None
                assert keys is not None
                mask = seen & within(self.window, queries, keys)
            masks[kind] = (mask if dtype is None else additive(mask, dtype))[:, None]
        return masks if len(masks) > 1 else masks[self.kinds[0]]


def attention_of(model: PreTrainedModel) -> Attention:
    """Read a model's kinds of attention; UnsupportedTargetError where a tree cannot be masked."""
    config = model.config.get_text_config()
    name = config.model_type
    implementation = config._attn_implementation
    if implementation not in ("sdpa", "eager"):
        raise UnsupportedTargetError(
            f"{name}: attention {implementation!r} has no tree mask here; "
            "load it with attn_implementation='sdpa'"
        )
    kinds = _kinds(config)
    if model._is_stateful and kinds == {FULL}:
        kinds = {"recurrent state"}
    if other := ", ".join(sorted(kinds - {FULL, SLIDING})):
        raise UnsupportedTargetError(
            f"{name}: {other} cannot be rolled back here; "
            "use a model of full or sliding-window attention"
        )
    if getattr(config, "alibi", False):
        raise UnsupportedTargetError(
            f"{name}: ALiBi counts slots, not a tree's positions; use another model"
        )
    if _looks_ahead(model):
        raise UnsupportedTargetError(
            f"{name}: its attention looks ahead (bidirectional); use a causal model"
        )
    takes = inspect.signature(model.forward).parameters
    for needed in ("position_ids", "cache"):
        if needed not in takes:
            raise UnsupportedTargetError(
                f"{name}: its forward takes no {needed}, which a tree needs; use another model"
            )
    decoder = type(model.get_decoder())
    source = inspect.getsource(decoder.forward)
    if "cache.layers" in source:  # Dory runs layers again, on copies of their entries
        raise UnsupportedTargetError(
            f"{name}: its forward reaches into the cache, which a tree's store cannot follow; "
            "use another model"
        )
    if SLIDING not in kinds:
        return Attention((FULL,), None)
    window = getattr(config, "sliding_window", None)
    if not window or not hasattr(sys.modules[decoder.__module__], WINDOW_MASK):
        raise UnsupportedTargetError(
            f"{name}: sliding_window is {window}, which its layers use in no known way; "
            "set it to null for full attention, or use another model"
        )
    # transformers' models with several kinds take a mask of each by name, but for a few.
    if len(kinds) > 1 and "dict" not in source:
        raise UnsupportedTargetError(
            f"{name}: its forward takes one mask for {' and '.join(sorted(kinds))} layers; "
            "use another model"
        )
    return Attention(tuple(sorted(kinds)), window)


def _looks_ahead(model: PreTrainedModel) -> bool:
    """Whether a token may attend to later ones, as in an encoder used as it is."""
    config = model.config.get_text_config()
    if getattr(config, "use_bidirectional_attention", None):
        return True
    modules = list(model.get_decoder().modules())
    return any(getattr(part, "is_causal", True) is False for part in (config, *modules)) or any(
        getattr(part, "is_decoder", True) is False for part in modules
    )


def _kinds(config: PreTrainedConfig) -> set[str]:
    """Kinds of attention among the layers, as `layer_types` names them; also where it is absent."""
    if kinds := getattr(config, "layer_types", None):  # a property in some configs
        return set(kinds)
    fields = config.to_dict()
    if "local" in (fields.get("attention_layers") or ()):  # GPT-Neo: banded inside the layer
        return {"local_attention"}
    window = fields.get("sliding_window")  # one window for every layer, as in Mistral
    if window is not None and window < fields.get("max_position_embeddings", 0):
        return {SLIDING}
    return {FULL}
