"""Where rows come from: files, folders and data sets of the Hub, read row by row with their places.

| source | what it is |
| --- | --- |
| `a.jsonl`, `a.jsonl.gz`, `a.json` | one object a line; one array of objects |
| `a.parquet` | one row each; a null of a table is an absent key |
| `FOLDER` | what `datasets` wrote by `save_to_disk`, or the files above (not `.json`) in it |
| `data/train-*.parquet` | all files that fit |
| `hub:ORG/NAME[/CONFIG][@REVISION][:SPLIT]` | a data set of the Hub; no split: `train` |

It knows nothing of what a row holds. `pyarrow` and `datasets` are imported when they are needed.
"""

from __future__ import annotations

import codecs
import gzip
import hashlib
import json
import logging
import re
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, cast

HUB = "hub:"
_HUB_NAME = re.compile(
    r"(?P<repo>[\w.-]+/[\w.-]+)(/(?P<config>[\w.-]+))?(@(?P<revision>[\w./-]+))?(:(?P<split>\S+))?"
)
_TABLE, _LINES = (".parquet",), (".jsonl", ".jsonl.gz")
_SPLIT = re.compile(r"(train|test|validation|valid|val|dev|eval)(?![a-z])", re.I)
_BATCH = 64
"""Rows of a table that are Python objects at once: some hold megabytes."""


class RowError(ValueError):
    """One row that cannot be used; the text is the reason under which it is counted."""


@dataclass(frozen=True)
class Entry:
    """One row as it was found.

    `value` is an object, the bytes of a line of JSON, or a RowError where it could not be read.
    """

    path: str
    place: str
    """Line number, or "item 3" of an array, "row 3" of a table; all from 1."""
    default_id: str
    value: object


def entries(source: str | Path) -> Iterator[Entry]:
    """Yield every row of a source in order, bad ones too.

    Raises ValueError or OSError (one line) where the source as a whole cannot be read.
    """
    name = str(source)
    if is_hub(name):
        repo, _, _, split = _hub_parts(name)
        stem = f"{repo.split('/')[1]}-{split}"
        yield from _table_entries(name, stem, _table_batches(_from_hub(name)))
        return
    folder = _saved_folder(Path(source))
    if folder is not None:
        yield from _table_entries(name, folder.name, _table_batches(_from_disk(folder)))
        return
    for path in files_of(source):
        yield from _file_entries(path)


def is_hub(name: str) -> bool:
    """Whether a source is a data set of the Hub."""
    return name.startswith(HUB)


def exists(source: str | Path) -> bool:
    """Whether a source is there; for the Hub, whether the name is one."""
    return is_hub(str(source)) or Path(source).exists() or bool(_matches(Path(source)))


def files_of(source: str | Path) -> list[Path]:
    """Return the files that hold a source's rows, in the order in which they are read."""
    name, path = str(source), Path(source)
    if is_hub(name):
        return [Path(file["filename"]) for file in _from_hub(name).cache_files]
    if folder := _saved_folder(path):
        return [Path(file["filename"]) for file in _from_disk(folder).cache_files]
    if path.is_dir():
        return _row_files(path)
    files = _matches(path) or [path]
    if not files[0].exists():
        raise FileNotFoundError(
            f"{source}: no such file or folder; a data set of the Hub is written hub:ORG/NAME"
        )
    return files


def content_of(source: str | Path) -> list[list[str]]:
    """Return [name, sha256] of each of a source's files: with other rows it is another list."""
    # A split such as `train[:100]` is part of a file, which its name says.
    found = [[str(source), ""]] if is_hub(str(source)) else []
    for path in files_of(source):
        with path.open("rb") as file:
            found.append([path.name, hashlib.file_digest(file, "sha256").hexdigest()])
    return found


# Files


def _file_entries(path: Path) -> Iterator[Entry]:
    stem = path.name.split(".")[0]
    if path.name.endswith(".json"):
        for number, value in enumerate(_array(path), start=1):
            yield Entry(str(path), f"item {number}", f"{stem}-{number}", value)
    elif path.name.endswith(_TABLE):
        yield from _table_entries(str(path), stem, _parquet_batches(path))
    elif path.name.endswith(_LINES):
        for number, line in _lines(path):
            yield Entry(str(path), str(number), f"{stem}-{number}", line)
    else:
        raise ValueError(
            f"{path}: unknown kind of file; use .jsonl, .jsonl.gz, .json or .parquet, a folder of "
            "them or of `datasets`, or hub:ORG/NAME"
        )


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield (number from 1, content) of each line that is not blank, without a byte-order mark."""
    try:
        with gzip.open(path) if path.name.endswith(".gz") else path.open("rb") as file:
            for number, line in enumerate(cast(BinaryIO, file), start=1):
                text = (line.removeprefix(codecs.BOM_UTF8) if number == 1 else line).strip()
                if text:
                    yield number, text
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"{path}: damaged gzip file ({error})") from error


def _array(path: Path) -> list[object]:
    try:
        value = json.loads(path.read_bytes().decode("utf-8-sig"))
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{path}:{error.lineno}: not one JSON array ({error.msg}); "
            "a file with one object a line is named .jsonl"
        ) from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not one JSON array ({error})") from error
    if not isinstance(value, list):
        raise ValueError(f"{path}: holds {kind(value)}; a .json file holds one array of rows")
    return value


def _matches(path: Path) -> list[Path]:
    """Return the files that a pattern such as `data/train-*.parquet` names."""
    if not re.search(r"[*?[]", path.name) or path.exists():
        return []
    return sorted(path.parent.glob(path.name))


def _row_files(folder: Path) -> list[Path]:
    """Return a folder's files of rows by name; ValueError for none, or where splits would mix."""
    files = sorted(
        path
        for path in folder.iterdir()
        if path.name.endswith((*_TABLE, *_LINES)) and not path.name.startswith(".")
    )
    if not files:
        raise ValueError(f"{folder}: holds no .parquet, .jsonl or .jsonl.gz file")
    splits = {match[1] for path in files if (match := _SPLIT.match(path.name))}
    if len(splits) > 1:
        first = sorted(splits)[-1]
        raise ValueError(
            f"{folder}: holds several splits ({', '.join(sorted(splits))}); "
            f"name the files of one, such as '{folder}/{first}*'"
        )
    return files


# Tables: pyarrow and datasets are untyped, hence Any


def _table_entries(name: str, stem: str, batches: Iterator[Any]) -> Iterator[Entry]:
    number = 0
    for batch in batches:
        for value in _rows(batch):
            number += 1
            yield Entry(name, f"row {number}", f"{stem}-{number}", value)


def _rows(batch: Any) -> Iterator[object]:
    """Yield the rows of a record batch or table; one that is no text costs itself only."""
    try:
        rows = _objects(batch)
    except (ValueError, ArithmeticError) as error:
        if batch.num_rows == 1:
            yield RowError("not UTF-8 text" if isinstance(error, UnicodeError) else str(error))
            return
        for index in range(batch.num_rows):
            yield from _rows(batch.slice(index, 1))
        return
    yield from rows


def _objects(batch: Any) -> list[object]:
    """Return a table's rows as objects: nulls are absent keys, columns of JSON are parsed."""
    decoders = [(column.name, _decoder(column.type)) for column in batch.schema]
    rows = []
    for row in batch.to_pylist(maps_as_pydicts="lossy"):
        for name, decode in decoders:
            if decode is not None and row[name] is not None:
                row[name] = decode(row[name])
        rows.append(without_nulls(row))
    return rows


def _decoder(kind: Any) -> Callable[[Any], Any] | None:
    """Return what parses the JSON inside values of an Arrow type; None where there is none.

    `datasets` stores columns of mixed types as JSON; pyarrow gives them as texts.
    """
    import pyarrow as pa  # type: ignore[import-untyped]

    if isinstance(kind, pa.JsonType):
        return _from_json
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        inner = _decoder(kind.value_type)
        if inner is not None:
            return lambda items: [None if item is None else inner(item) for item in items]
    if pa.types.is_struct(kind):
        fields = {field.name: _decoder(field.type) for field in kind}
        if any(fields.values()):
            return lambda value: {
                key: decode(item) if (decode := fields[key]) and item is not None else item
                for key, item in value.items()
            }
    return None


def _from_json(text: str) -> object:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    # A text such as "42" is stored as it is, not in quotes: only these can be told from a text.
    return value if isinstance(value, dict | list | str) else text


def without_nulls(value: object) -> object:
    """Return the value with the keys left out, at any depth, that hold null."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    return value


def _parquet_batches(path: Path) -> Iterator[Any]:
    import pyarrow as pa
    import pyarrow.parquet as pq  # type: ignore[import-untyped]

    try:
        file = pq.ParquetFile(path)
        yield from file.iter_batches(batch_size=_BATCH)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{path}: damaged or no parquet file ({_one_line(error)})") from error


def _table_batches(dataset: Any) -> Iterator[Any]:
    yield from dataset.with_format("arrow").iter(batch_size=_BATCH)


def _saved_folder(path: Path) -> Path | None:
    """Return the folder if `datasets` saved one data set there; ValueError for several splits."""
    if (path / "dataset_dict.json").is_file():
        splits = sorted(part.parent.name for part in path.glob("*/state.json"))
        if len(splits) == 1:
            return path / splits[0]
        raise ValueError(
            f"{path}: holds {len(splits)} splits; name one: "
            + ", ".join(str(path / split) for split in splits)
        )
    return path if (path / "state.json").is_file() else None


@lru_cache(maxsize=8)
def _from_disk(folder: Path) -> Any:
    datasets = _datasets(str(folder))
    try:
        return datasets.load_from_disk(str(folder))
    except Exception as error:  # its readers raise all kinds of errors
        raise ValueError(f"{folder}: damaged folder of `datasets` ({_one_line(error)})") from error


def _hub_parts(name: str) -> tuple[str, str | None, str | None, str]:
    """Return repository, configuration, revision and split of a name; ValueError for no name."""
    parts = _HUB_NAME.fullmatch(name.removeprefix(HUB))
    if parts is None:
        raise ValueError(f"{name}: write hub:ORG/NAME[/CONFIG][@REVISION][:SPLIT]")
    return parts["repo"], parts["config"], parts["revision"], parts["split"] or "train"


@lru_cache(maxsize=8)
def _from_hub(name: str) -> Any:
    """Load a data set from the Hub, or from its cache when offline."""
    repo, config, revision, split = _hub_parts(name)
    if Path(repo).exists():
        raise ValueError(f"{name}: `datasets` would read the folder {repo} that is here")
    datasets = _datasets(name)
    try:
        with _quiet("huggingface_hub"):  # it tells of every retry, twice
            return datasets.load_dataset(repo, config, revision=revision, split=split)
    except ConnectionError as error:
        raise ValueError(
            f"{name}: the Hub cannot be reached, and the data set is not in the local cache; "
            "fetch it where there is a network, or name a file or folder"
        ) from error
    except datasets.exceptions.DatasetNotFoundError as error:
        raise ValueError(
            f"{name}: no such data set on the Hub, or one that needs a login (`hf auth login`)"
        ) from error
    except Exception as error:  # readers of all formats, each with errors of its own
        raise ValueError(f"{name}: {_one_line(error)}") from error


@contextmanager
def _quiet(library: str) -> Iterator[None]:
    """Keep a library's warnings to itself inside the block."""
    logger = logging.getLogger(library)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _datasets(name: str) -> Any:
    try:
        import datasets  # type: ignore[import-untyped]
    except ImportError as error:
        raise ValueError(f"{name}: reading it needs `pip install 'drafthead[datasets]'`") from error
    return datasets


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def kind(value: object) -> str:
    """Name the type of a value in a message."""
    names = {bool: "a boolean", int: "a number", float: "a number", str: "a text"}
    names |= {list: "a list", dict: "an object", type(None): "null"}
    return names.get(type(value), f"a {type(value).__name__}")
