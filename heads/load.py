"""Load a head from its folder: config.json and safetensors, nothing else and nothing missing.

Any head defined so far can be loaded; its class is found by the `model_type` of its config. Nothing
in the folder is executed or unpickled.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedConfig

from drafthead.heads.base import DraftHead

WEIGHTS = "model.safetensors"
OTHER_CODE = ("attn_implementation", "_attn_implementation", "quantization_config")
"""What transformers would load a kernel of the Hub or a quantising library for."""


def load_head(folder: str | Path, dtype: torch.dtype | None = None) -> DraftHead:
    """Return the unbound head; dtype: that of the file by default.

    Raises ValueError (one line) for a folder without config or safetensors, an unknown model_type,
    and tensors that are missing, surplus or of another shape than the config says.
    """
    folder = Path(folder)
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(f"{folder}: no config.json; expected the folder of a head")
    try:
        stored = json.loads(path.read_text())
        model_type = stored["model_type"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: not the config of a head ({error!r})") from error
    if foreign := [name for name in OTHER_CODE if stored.get(name)]:
        raise ValueError(f"{path}: {foreign[0]} asks for other code; no head has that, delete it")
    known = _known()
    if model_type not in known:
        raise ValueError(
            f"{path}: model_type {model_type!r} is no head (known: {', '.join(sorted(known))}); "
            "of a draft head in the format of an engine `drafthead import` makes one; "
            "a causal language model drafts as a sibling: give it with --sibling"
        )
    head_class, config_class = known[model_type]
    shapes = _stored_shapes(folder)
    try:
        config = config_class.from_pretrained(folder)
        with torch.device("meta"):
            expected = {k: tuple(v.shape) for k, v in head_class(config).state_dict().items()}
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))  # nowhere, for a mistake of several settings
        problem = first["msg"].removeprefix("Value error, ")
        raise ValueError(": ".join(filter(None, (str(path), where, problem)))) from error
    except (AttributeError, ImportError, KeyError, RuntimeError, TypeError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{path}: not the config of a head ({reason})") from error
    problems = [f"missing {name}" for name in expected if name not in shapes]
    problems += [f"surplus {name}" for name in shapes if name not in expected]
    problems += [
        f"{name} has shape {shapes[name]}, not {shape}"
        for name, shape in expected.items()
        if name in shapes and shapes[name] != shape
    ]
    if problems:
        raise ValueError(f"{folder}: tensors do not match config.json: {'; '.join(problems)}")
    head: DraftHead = head_class.from_pretrained(
        folder, config=config, dtype=dtype or "auto", use_safetensors=True, local_files_only=True
    )
    head.eval()  # type: ignore[no-untyped-call]
    return head


def _known() -> dict[str, tuple[type[DraftHead], type[PreTrainedConfig]]]:
    """All heads defined so far, with their config classes, by `model_type`.

    But for those that are stored as plain models, as a sibling is.
    """
    found = list(DraftHead.__subclasses__())
    for head in found:  # grows while it is walked
        found += head.__subclasses__()
    kinds = {h: h.config_class for h in found if h.export is DraftHead.export and h.config_class}
    return {kind.model_type: (head, kind) for head, kind in kinds.items() if kind.model_type}


def _stored_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Read the names and shapes of all tensors of the folder, over all shards."""
    index = folder / f"{WEIGHTS}.index.json"
    files = {WEIGHTS}
    if index.is_file():
        try:
            files = set(json.loads(index.read_text())["weight_map"].values())
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{index}: not an index of safetensors ({error!r})") from error
    shapes = {}
    for name in sorted(files):
        file = folder / name
        if not file.is_file():
            raise ValueError(
                f"{folder}: no {name}; heads are loaded from safetensors only, never from a pickle"
            )
        try:
            with safe_open(file, framework="pt") as tensors:
                for key in tensors.keys():  # noqa: SIM118  (a safetensors handle is no mapping)
                    shapes[key] = tuple(tensors.get_slice(key).get_shape())
        except SafetensorError as error:
            raise ValueError(f"{file}: not a safetensors file ({error})") from error
    return shapes
