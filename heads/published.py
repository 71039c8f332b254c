"""What of a head may be published: files of which names, and texts without a trace of this machine.

Config, safetensors, the model card, and the records of what was measured; never a checkpoint, a
log, a pickle or code.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from drafthead.heads.load import WEIGHTS

CONFIG, CARD, INDEX = "config.json", "README.md", f"{WEIGHTS}.index.json"
EVALUATION, CERTIFICATE, TUNING = "evaluation.json", "certificate.json", "tuning.json"
NAMED = (CONFIG, CARD, INDEX, EVALUATION, CERTIFICATE, TUNING)

Content = Path | bytes
"""A file that is sent as it is, or what was made of it."""

_SHARD = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")
_PLACE = re.compile(
    r"(?<![\w./<~-])(?<!:(?=//))(?:file://)?"
    r"(?:(?:~|\.\.?)?/(?=[^\s/]+/)|[A-Za-z]:\\)[\w.@+~%=,/\\-]*[\w@+~%=/\\-]"
)
"""A path from the root, the home or this folder in a text; an address of the web is none."""
_START = re.compile(r"(?:file://)?(?:(?:~|\.\.?)?/[^/\n]+/|[A-Za-z]:[\\/])")


def is_published(name: str) -> bool:
    """Whether a file of this name belongs to a published head."""
    return name in NAMED or _SHARD.fullmatch(name) is not None


def untraced(value: Any) -> Any:
    """The same JSON with the last name of each path in the place of the path, keys included."""
    if isinstance(value, dict):
        found: dict[str, Any] = {}
        for key, inner in value.items():
            found[_free(untraced(key), found)] = untraced(inner)
        return found
    if isinstance(value, list):
        return [untraced(inner) for inner in value]
    if not isinstance(value, str):
        return value
    if _START.match(value) and "\n" not in value:  # whole, for a path may hold spaces
        return _last(value)
    return _PLACE.sub(lambda found: _last(found[0]), value)


def _free(name: str, taken: dict[str, Any]) -> str:
    """The name, numbered where files of two folders are called so."""
    names = (name, *(f"{name} ({number})" for number in range(2, len(taken) + 2)))
    return next(free for free in names if free not in taken)


def _last(path: str) -> str:
    kind = PureWindowsPath if "\\" in path else PurePosixPath
    return kind(path).name


def places(value: Any) -> Iterator[str]:
    """All texts of a JSON value that hold a path of this machine."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from places(key)
            yield from places(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from places(inner)
    elif isinstance(value, str) and untraced(value) != value:
        yield value
