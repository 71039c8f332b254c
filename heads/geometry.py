"""The geometry of a stored head, written in full beside its settings and contract.

Nothing in a stored head is looked up in the target's config again.
"""

from __future__ import annotations

from typing import Any, Self

from transformers import PreTrainedConfig

from drafthead.heads.base import HeadSettings
from drafthead.heads.blocks import rope_base
from drafthead.heads.contract import Contract


class HeadConfig(PreTrainedConfig):
    """Base of the configs of heads that borrow from their target; see the module.

    The names are those of published layouts. Each head subclasses it with its own `model_type`.
    """

    vocab_size: int = 0
    draft_vocab_size: int = 0
    hidden_size: int = 0
    intermediate_size: int = 0
    num_hidden_layers: int = 1
    num_attention_heads: int = 1
    num_key_value_heads: int = 1
    head_dim: int = 0
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    initializer_range: float = 0.02
    max_position_embeddings: int = 2048
    rope_parameters: dict[str, Any] | None = None
    tie_word_embeddings: bool = False
    settings: dict[str, Any] | None = None
    contract: dict[str, Any] | None = None

    @classmethod
    def of(
        cls,
        settings: HeadSettings,
        contract: Contract,
        target: PreTrainedConfig,
        size: int,
        layers: int = 1,
        intermediate_size: int | None = None,
        rope_theta: float | None = None,
        num_key_value_heads: int | None = None,
    ) -> Self:
        """Take the target's geometry; ValueError where it has no number for a needed field.

        size: of the draft vocabulary; layers: of the head; the others: in place of the target's.
        """
        text = target.get_text_config()
        heads = text.num_attention_heads
        inner = intermediate_size or _optional(text, "intermediate_size")
        if not isinstance(inner, int):
            raise ValueError(
                f"head.intermediate_size: target {contract.model_type} has no single value; set it"
            )
        kv_heads = num_key_value_heads or _optional(text, "num_key_value_heads") or heads
        if heads % kv_heads:
            raise ValueError(
                f"head.num_key_value_heads: {kv_heads} does not divide the target's {heads} heads"
            )
        return cls(
            vocab_size=contract.vocab_size,
            draft_vocab_size=size,
            hidden_size=contract.hidden_size,
            intermediate_size=inner,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=_optional(text, "head_dim") or contract.hidden_size // heads,
            rms_norm_eps=float(_optional(text, "rms_norm_eps") or 1e-6),
            max_position_embeddings=text.max_position_embeddings,
            rope_parameters={
                "rope_type": "default",
                "rope_theta": rope_theta or rope_base(text),
            },
            settings=settings.model_dump(mode="json"),
            contract=contract.model_dump(mode="json"),
        )


def _optional(text: PreTrainedConfig, name: str) -> Any:
    """Read a field that only some model types have; None for the others."""
    return getattr(text, name, None)
