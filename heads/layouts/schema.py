"""What one version of one consumer takes for one kind of head, and what a checkpoint breaks of it.

Schemas are YAML files beside this module, written from what the consumers load and not from our
own layouts, so that a slip in a layout shows. A schema says what is there and what holds, in Jinja
expressions over the config's fields; whatever it does not name is a problem.

    define:   {captured: "num_aux_hidden_states or 3"}            names for later expressions
    aliases:  {"midlayer.": "layers.0."}                          other beginnings of tensor names
    config:   {hidden_size: {type: int}, bias: {is: false}, …}    see `_field`
    rules:    [{holds: "…", else: "what is wrong"}]
    tensors:  [{name: "layers.{i}.x", each: "range(…)", shape: [hidden_size], dtype: float}]
    zeros:    [names of tensors that have to be zeros]
    weights:  names that the file of tensors can have

A field or tensor has `when`, the condition under which it must be there (and may not otherwise), or
`optional: true`.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import torch
import yaml
from jinja2 import UndefinedError
from jinja2.environment import TemplateExpression
from jinja2.sandbox import ImmutableSandboxedEnvironment
from torch import Tensor

from drafthead.heads.layouts.layout import LayoutError, Stored

SCHEMAS = Path(__file__).parent / "schemas"
BESIDE = {"README.md", ".gitattributes", "LICENSE"}
"""Files that may lie beside a checkpoint's own."""

TYPES: dict[str, tuple[type, ...]] = {
    "int": (int,),
    "float": (float, int),
    "bool": (bool,),
    "str": (str,),
    "list": (list,),
    "dict": (dict,),
}
DTYPES: dict[str, set[torch.dtype]] = {"int64": {torch.int64}, "bool": {torch.bool}}

Schema = Mapping[str, Any]

_environment = ImmutableSandboxedEnvironment()
_environment.filters["plus"] = lambda numbers, by: [number + by for number in numbers]


def schema_names() -> list[str]:
    """Every consumer, version and kind of head that has a schema."""
    return sorted(path.stem for path in SCHEMAS.glob("*.yaml"))


@cache
def load_schema(name: str) -> Schema:
    """Read a schema by its name; LayoutError lists the known ones."""
    if name not in schema_names():
        raise LayoutError(f"no schema {name!r} (known: {', '.join(schema_names())})")
    loaded: Schema = yaml.safe_load((SCHEMAS / f"{name}.yaml").read_text())
    return loaded


def demand(stored: Stored, consumers: tuple[str, ...]) -> None:
    """LayoutError, naming consumer and all problems, unless each would load it as it is meant."""
    for name in consumers:
        problems = check(stored, load_schema(name))
        if problems:
            raise LayoutError(f"{name}: {'; '.join(problems)}")


def check_folder(folder: str | Path, stored: Stored, schema: Schema) -> list[str]:
    """Problems of what was read from a folder, and of files that do not belong there."""
    known = {"config.json", *_weights(schema), *BESIDE}
    stray = sorted(path.name for path in Path(folder).iterdir() if path.name not in known)
    return check(stored, schema) + [f"file {name} does not belong there" for name in stray]


def check(stored: Stored, schema: Schema) -> list[str]:
    """What is wrong with a checkpoint for this consumer, a line each; none if it is right."""
    config = stored.config
    names = dict(config)
    for name, expression in schema.get("define", {}).items():
        names[name] = _value(expression, names)
    problems = []
    if stored.weights not in _weights(schema):
        problems.append(f"tensors are in {stored.weights}, not {' or '.join(_weights(schema))}")
    problems += _fields(config, schema.get("config", {}), names)
    if not problems:  # expressions below would stumble over fields that are not there
        problems += [
            rule["else"] for rule in schema.get("rules", ()) if not _value(rule["holds"], names)
        ]
        problems += _named(_plain(stored.tensors, schema), schema["tensors"], names)
        problems += [
            f"tensor {name} is not zeros, as it is dropped"
            for name in schema.get("zeros", ())
            if name in stored.tensors and bool(stored.tensors[name].any())
        ]
    problems += _dtypes(stored)
    problems += [
        f"config.{where} = {text!r} is a place of this machine"
        for where, text in _texts(config)
        if _is_local(text)
    ]
    return problems


def _weights(schema: Schema) -> list[str]:
    return list(schema.get("weights", ["model.safetensors"]))


def _value(expression: object, names: Mapping[str, Any]) -> Any:
    """An expression's value, None where fields are missing or too odd for it to have one.

    Plain numbers and lists of a YAML file stand for themselves.
    """
    if not isinstance(expression, str):
        return expression
    try:
        return _compiled(expression)(**names)
    except (UndefinedError, TypeError, ValueError, ArithmeticError):
        return None


@cache
def _compiled(expression: str) -> TemplateExpression:
    return _environment.compile_expression(expression)


def _plain(tensors: Mapping[str, Tensor], schema: Schema) -> dict[str, Tensor]:
    plain: dict[str, Tensor] = {}
    for full, tensor in tensors.items():
        name = full
        for start, meant in schema.get("aliases", {}).items():
            if name.startswith(start):
                name = meant + name.removeprefix(start)
        plain[full if name in plain else name] = tensor  # a second one is one too many
    return plain


def _fields(config: Mapping[str, Any], fields: Schema, names: Mapping[str, Any]) -> list[str]:
    problems = [
        f"config.{name} is nothing that it reads"
        for name in config
        if name not in fields and name not in ("torch_dtype", "dtype")
    ]
    for name, rule in fields.items():
        wanted = bool(_value(rule.get("when", True), names))
        if name in config:
            problems += _field(name, config[name], rule, names)
            if not wanted:
                problems.append(f"config.{name} is there without {rule['when']!r}")
        elif wanted and not (rule.get("optional") or rule.get("forbidden")):
            problems.append(f"config.{name} is missing")
    return problems


def _field(name: str, value: Any, rule: Schema, names: Mapping[str, Any]) -> list[str]:
    """Keys of a rule: type, is (a value), one_of, equals (an expression), null, forbidden (why)."""
    if "forbidden" in rule:
        return [f"config.{name}: {rule['forbidden']}"]
    if value is None and rule.get("null"):
        return []
    if "type" in rule:
        types = TYPES[rule["type"]]
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            return [f"config.{name} = {value!r} is no {rule['type']}"]
    if "is" in rule and (value != rule["is"] or type(value) is not type(rule["is"])):
        return [f"config.{name} = {value!r}, not {rule['is']!r}"]
    if "one_of" in rule and value not in rule["one_of"]:
        return [f"config.{name} = {value!r}, none of {rule['one_of']!r}"]
    if "equals" in rule:
        wanted = _value(rule["equals"], names)
        if value != wanted:
            return [f"config.{name} = {value!r}, not {wanted!r} ({rule['equals']})"]
    return []


def _named(
    tensors: Mapping[str, Tensor], patterns: list[Schema], names: Mapping[str, Any]
) -> list[str]:
    problems, left = [], dict(tensors)
    for pattern in patterns:
        for i in _value(pattern.get("each", [0]), names) or ():
            here = {**names, "i": i}
            name = pattern["name"].replace("{i}", str(i))
            tensor = left.pop(name, None)
            wanted = bool(_value(pattern.get("when", True), here))
            if tensor is None:
                if wanted and not pattern.get("optional"):
                    problems.append(f"tensor {name} is missing")
                continue
            if not wanted:
                problems.append(f"tensor {name} is there without {pattern['when']!r}")
                continue
            shape = tuple(_value(size, here) for size in pattern["shape"])
            if tuple(tensor.shape) != shape:
                problems.append(f"tensor {name} has shape {tuple(tensor.shape)}, not {shape}")
            kind = pattern.get("dtype", "float")
            if tensor.dtype not in DTYPES.get(kind, {tensor.dtype}) or (
                (kind == "float") != tensor.is_floating_point()
            ):
                problems.append(f"tensor {name} is {tensor.dtype}, not {kind}")
    return problems + [f"tensor {name} is nothing that it reads" for name in left]


def _dtypes(stored: Stored) -> list[str]:
    """Problems of what the config says of the floating tensors' dtype, and of what they are."""
    floating = {n: t.dtype for n, t in stored.tensors.items() if t.is_floating_point()}
    said = {str(stored.config[key]) for key in ("torch_dtype", "dtype") if key in stored.config}
    if len(said) > 1:
        return [f"torch_dtype and dtype disagree: {', '.join(sorted(said))}"]
    found = sorted({str(dtype).removeprefix("torch.") for dtype in floating.values()})
    if len(found) > 1:
        return [f"floating tensors are of several dtypes: {', '.join(found)}"]
    if said and found and said != set(found):
        return [f"dtype is {said.pop()}, tensors are {found[0]}"]
    return []


def _texts(value: Any, where: str = "") -> Iterator[tuple[str, str]]:
    """Every string of a config, with the dotted place it has."""
    if isinstance(value, str):
        yield where, value
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield from _texts(part, f"{where}.{key}" if where else str(key))
    elif isinstance(value, list):
        for index, part in enumerate(value):
            yield from _texts(part, f"{where}.{index}")


def _is_local(text: str) -> bool:
    """Whether a string says where it was written: a path, the home folder, the machine's name."""
    if PurePosixPath(text).is_absolute() or PureWindowsPath(text).is_absolute():
        return True
    home, host = str(Path.home()), socket.gethostname()
    if text.startswith(("~", "./", "../", "file:")) or (len(home) > 1 and home in text):
        return True
    # A text that is nothing but the host's name is a word of a format: machines are called "hydra".
    return (
        text != host
        and len(host) > 2
        and bool(re.search(rf"(?<![\w-]){re.escape(host)}(?![\w-])", text))
    )
