"""What readers of Llama-like draft layers cannot load, whatever the head around them is."""

from __future__ import annotations

from drafthead.heads.geometry import HeadConfig


def layer_limits(config: HeadConfig, reader: str, *, scaled: bool) -> list[str]:
    """Why `reader` cannot load these layers, a line each.

    scaled: whether it reads the rotary scaling of `rope_parameters`; SafeAILab's code does not.
    """
    found = []
    width, heads = config.hidden_size, config.num_attention_heads
    if width % heads:  # transformers 5 checks it when it reads the config
        found.append(
            f"{reader} loads no draft layer whose {heads} heads do not divide its width {width}; "
            "decode with drafthead"
        )
    if config.hidden_act != "silu":
        found.append(
            f"{reader} loads no draft layer with hidden_act {config.hidden_act!r}, only 'silu'; "
            "decode with drafthead"
        )
    rope = (config.rope_parameters or {}).get("rope_type", "default")
    if rope != "default" and not scaled:
        found.append(f"{reader} ignores the rotary scaling {rope!r}; use --format vllm or sglang")
    return found
