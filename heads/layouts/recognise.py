"""Which layout a folder has, told by its config and tensor names.

`architectures` alone is not believed: it is often left over from the target or the training code.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from drafthead.heads.layouts.layout import LAYOUTS, Layout, LayoutError, Stored

UNREAD = {
    "mlp_speculator": "MLP speculators (fms-extras) are not read here",
    "p-eagle": "P-EAGLE heads (mask_hidden) are not read here",
    "": "no draft head is known to look like this",
}
"""Families that no layout reads, and why."""


def plain_name(name: str) -> str:
    """A tensor's name without the prefix that some trainers save, and with EAGLE-3's layer 0
    called as any other.
    """
    name = name.removeprefix("model.")
    return "layers.0." + name.removeprefix("midlayer.") if name.startswith("midlayer.") else name


def says(config: Mapping[str, Any], part: str) -> bool:
    """Whether the name of an architecture has this part."""
    return any(part in name for name in config.get("architectures") or ())


def family(stored: Stored) -> str:
    """The kind of draft head, tried in a fixed order; "" for none that is known."""
    config, names = stored.config, {plain_name(name) for name in stored.tensors}
    if "speculators_config" in config:
        return "speculators"
    if "dflash_config" in config or says(config, "DFlash"):
        return "dflash"
    if config.get("model_type") == "medusa" or "medusa_num_heads" in config:
        return "medusa"
    if "hydra_num_heads" in config:
        return "hydra"
    if config.get("model_type") == "mlp_speculator":
        return "mlp_speculator"
    if "layers.0.hidden_norm.weight" in names:
        return "p-eagle" if "mask_hidden" in names else "eagle3"
    fc = {plain_name(name): tensor for name, tensor in stored.tensors.items()}.get("fc.weight")
    if fc is not None and fc.dim() == 2 and fc.shape[1] == 2 * fc.shape[0]:
        return "eagle" if "layers.0.input_layernorm.weight" not in names else ""
    return ""


def layout_in(stored: Stored) -> Layout:
    """The first layout that recognises a folder; LayoutError saying what it has instead."""
    own = str(stored.config.get("model_type"))
    if own.startswith("drafthead_"):
        raise LayoutError(
            f"{stored.place or 'folder'}: is a head of drafthead already ({own}); use it as it is"
        )
    wrapped = family(stored) == "speculators"  # it holds any kind, whose own marks show as well
    for layout in LAYOUTS:
        if wrapped == ("speculators" in layout.formats) and layout.recognises(stored):
            return layout
    names = sorted(stored.tensors)
    shown = ", ".join(names[:4]) + (", …" if len(names) > 4 else "")
    reason = UNREAD.get(family(stored), UNREAD[""])
    raise LayoutError(f"{stored.place or 'folder'}: {reason} (tensors: {shown})")
