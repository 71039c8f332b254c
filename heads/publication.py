"""All that is published of a head, made from its folder: files, the model card, what was measured.

It asks no Hub.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from drafthead.heads.card import RunFacts, card, read_certificate, read_evaluation
from drafthead.heads.card_measured import json_of
from drafthead.heads.load import WEIGHTS, load_head
from drafthead.heads.published import (
    CARD,
    CERTIFICATE,
    CONFIG,
    EVALUATION,
    INDEX,
    TUNING,
    Content,
    is_published,
    places,
    untraced,
)

TEXTS = ("sample", "samples")
"""Keys of an evaluation that hold what was written for the prompts, which may be private."""


def publication(
    folder: Path,
    *,
    evaluation: Path | None = None,
    certificate: Path | None = None,
    run: Path | None = None,
    target: str | None = None,
    licence: str | None = None,
    repo: str | None = None,
    name: str | None = None,
) -> dict[str, Content]:
    """All that is published of a head's folder, by the name it gets.

    evaluation, certificate: the file or its folder; those in the head's folder by default. run: the
    folder of the training run, by default the one that the head lies in, if it does. The rest is
    for the card (`heads.card`); target: the Hub's id of the target, or the folder that it lies
    in. Raises ValueError, one line, for a folder that is no sound head and records of another one.
    """
    load_head(folder)
    if traces := list(places(json_of(folder / CONFIG))):
        raise ValueError(
            f"{folder / CONFIG}: {traces[0]!r} is a place on this machine, which is not published"
        )
    found: dict[str, Content] = {name: folder / name for name in (CONFIG, *_weights(folder))}
    records: dict[str, Any] = {}
    if (measured := _chosen(folder, evaluation, EVALUATION)) is not None:
        read = read_evaluation(measured)
        records[EVALUATION] = {key: value for key, value in read.items() if key not in TEXTS}
    if (certified := _chosen(folder, certificate, CERTIFICATE)) is not None:
        records[CERTIFICATE] = read_certificate(certified)
    if (folder / TUNING).is_file():
        records[TUNING] = json_of(folder / TUNING)
    records = {file: untraced(record) for file, record in records.items()}
    here = target is not None and Path(target).is_dir()
    text = card(
        folder,
        evaluation=records.get(EVALUATION),
        certificate=records.get(CERTIFICATE),
        run=RunFacts.beside(folder) if run is None else RunFacts.read(run),
        licence=licence,
        repo=repo,
        base_model=None if here else target,
        target=target if here else None,
        name=name,
    )
    found[CARD] = untraced(text).encode(errors="replace")
    for file, record in records.items():
        told = json.dumps(record, indent=2, ensure_ascii=False) + "\n"
        found[file] = told.encode(errors="replace")  # names of files need not be Unicode
    return found


def _weights(folder: Path) -> list[str]:
    """Names of the safetensors that hold the head, and of their index; ValueError for others."""
    if not (folder / INDEX).is_file():
        return [WEIGHTS]
    names = sorted(set(json_of(folder / INDEX)["weight_map"].values()))
    if odd := [name for name in names if not is_published(name)]:
        raise ValueError(f"{folder / INDEX}: {odd[0]!r} is not called as shards are")
    return [INDEX, *names]


def _chosen(folder: Path, given: Path | None, name: str) -> Path | None:
    """The record that is published: the one given, else the head's own where there is one."""
    if given is not None:
        return given
    return folder / name if (folder / name).is_file() else None
