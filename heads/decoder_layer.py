"""The ordinary decoder layer, in halves: before and after the attention.

Training and decoding call the same halves; only the attention between them differs, because the
visible keys are held otherwise. EAGLE-1 has it without its first norm, as published.

Shapes: B batch, n slots, D width, H query heads, Hkv key/value heads, d head width.
"""

from __future__ import annotations

from torch import Tensor, nn

from drafthead.heads.blocks import Attention, GatedMLP, RMSNorm, rotate
from drafthead.heads.geometry import HeadConfig


class DecoderLayer(nn.Module):
    """x + attention(norm(x)), then + MLP(norm(.)); both norms over the stream of width D."""

    def __init__(self, config: HeadConfig, input_norm: bool = True) -> None:
        """`input_norm`: whether what attention reads is normed first."""
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        if input_norm:
            self.input_layernorm = RMSNorm(width, eps)
        self.self_attn = Attention(width, width, heads, kv_heads, config.head_dim)
        self.post_attention_layernorm = RMSNorm(width, eps)
        self.mlp = GatedMLP(width, config.intermediate_size, config.hidden_act)
        self._input_norm = input_norm

    def silence(self) -> None:
        """Start both branches at zero: the layer gives back its stream until it has learnt."""
        self.self_attn.o_proj.weight.zero_()
        self.mlp.down_proj.weight.zero_()

    def inputs(self, stream: Tensor) -> Tensor:
        """(B, n, D) → (B, n, D), what attention reads."""
        return self.input_layernorm(stream) if self._input_norm else stream

    def queries(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """(B, n, D) → (B, H, n, d)."""
        return rotate(self.self_attn.split(self.self_attn.q_proj(x)), cos, sin)

    def keys_values(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """(B, n, D) → keys and values (B, Hkv, n, d)."""
        attn = self.self_attn
        return rotate(attn.split(attn.k_proj(x)), cos, sin), attn.split(attn.v_proj(x))

    def finish(self, attended: Tensor, stream: Tensor) -> Tensor:
        """Attention's result (B, H, n, d) and the stream as it came (B, n, D) → (B, n, D)."""
        stream = stream + self.self_attn.join(attended)
        out: Tensor = stream + self.mlp(self.post_attention_layernorm(stream))
        return out
