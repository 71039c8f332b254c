"""Whether a rendered answer shows all of its tool calls. It knows no template."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping


def shows_call(text: str, call: Mapping[str, object]) -> bool:
    """Say whether the text holds the call's name and all keys and values of its arguments."""
    return all(_shows(text, leaf) for leaf in _leaves(call))


def _leaves(call: Mapping[str, object]) -> Iterator[str]:
    """Yield the texts that a rendered call must show: its name, its arguments' keys and values."""
    function = call["function"]
    assert isinstance(function, Mapping)
    open_values: list[object] = [function["name"], function["arguments"]]
    while open_values:
        value = open_values.pop()
        if isinstance(value, Mapping):
            open_values += [*value.keys(), *value.values()]
        elif isinstance(value, list):
            open_values += value
        elif isinstance(value, str | int | float) and not isinstance(value, bool):
            yield str(value)


def _shows(text: str, leaf: str) -> bool:
    """Say whether the text holds the leaf, plainly or as JSON writes it."""
    written = (json.dumps(leaf, ensure_ascii=ascii_only)[1:-1] for ascii_only in (False, True))
    return leaf in text or any(form in text for form in written)
