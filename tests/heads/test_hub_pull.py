"""Pulling heads over real HTTP: whole or not at all, from any break on, and no pickle."""

from __future__ import annotations

import errno
import json
import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hub_client import asked_by_this_process, content, published, raised
from hub_server import Failure, Hub
from huggingface_hub import file_download
from tiny import tiny_head, tiny_target

from drafthead.heads import load_head
from drafthead.heads.eagle3 import Eagle3Head
from drafthead.heads.hub import HubError, fetched, pull, push
from drafthead.heads.published import Content

NAME = "org/head"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("heads") / "head"
    tiny_head(tiny_target()).save_pretrained(found)
    return found


@pytest.fixture
def files(folder: Path) -> dict[str, Content]:
    return published(folder)


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    found = Hub()
    with asked_by_this_process(found, tmp_path / "cache"):
        yield found


def test_what_is_pulled_is_what_was_pushed_by_revision(
    hub: Hub, files: dict[str, Content], folder: Path, tmp_path: Path
) -> None:
    first = push(files, NAME)
    push(files | {"README.md": b"---\n---\nlater\n"}, NAME, update=True)
    done = pull(NAME, tmp_path / "first", revision=first.commit)
    found = {path.name: path.read_bytes() for path in (tmp_path / "first").iterdir()}
    assert found == content(files)
    assert done.commit == first.commit
    pull(NAME, tmp_path / "new" / "later")
    assert (tmp_path / "new" / "later" / "README.md").read_text().endswith("later\n")
    mine, theirs = load_head(folder).state_dict(), load_head(tmp_path / "first").state_dict()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    with pytest.raises(HubError, match="exists; name a new folder"):
        pull(NAME, tmp_path / "first")
    with pytest.raises(HubError, match="has no such revision"):
        pull(NAME, tmp_path / "second", revision="never")


class Mark:
    """Unpickled, it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[Path]]:
        return Path.touch, (self.path,)


def test_f73_pickles_and_code_are_never_fetched_nor_run(
    hub: Hub, files: dict[str, Content], tmp_path: Path
) -> None:
    marker = tmp_path / "marker"
    planted = pickle.dumps(Mark(marker))
    config = json.loads(content(files)["config.json"])
    config["auto_map"] = {"AutoModel": "modeling.Head", "AutoConfig": "modeling.Config"}
    code = f"import pathlib; pathlib.Path({str(marker)!r}).touch()\n".encode()
    bad = {"pytorch_model.bin": planted, "tuning.pt": planted, "modeling.py": code,
           "checkpoint/model.safetensors": b"", "training_args.bin": planted}  # fmt: skip
    hub.add(NAME, content(files) | {"config.json": json.dumps(config).encode()} | bad)
    done = pull(NAME, tmp_path / "out")
    assert set(done.left) == set(bad)
    head = load_head(tmp_path / "out")
    assert isinstance(head, Eagle3Head)
    assert isinstance(load_head(fetched(f"hub:{NAME}")), Eagle3Head)
    assert not any(name in request for request in hub.requests for name in bad)
    assert not marker.exists()
    hub.add("org/pickled", {"config.json": b"{}", "pytorch_model.bin": planted})
    with pytest.raises(HubError, match=r"holds no head \(it holds pytorch_model.bin\).*never a pi"):
        pull("org/pickled", tmp_path / "none")
    assert not (tmp_path / "none").exists()
    assert not any("/resolve/" in request for request in hub.requests if "org/pickled" in request)


@pytest.mark.parametrize("how", ["500", "cut"])
def test_a_pull_broken_at_any_request_leaves_nothing_and_goes_on(
    how: Failure, hub: Hub, files: dict[str, Content], tmp_path: Path
) -> None:
    hub.add(NAME, content(files))
    pull(NAME, tmp_path / "whole")
    count = len(hub.requests)
    for at in range(count):
        hub.heal()
        hub.down_from, hub.how = at, how
        out = tmp_path / f"out-{at}"
        with pytest.raises(HubError, match="the same command goes on where it was"):
            pull(NAME, out)
        assert not out.exists()
        hub.heal()
        pull(NAME, out)
        assert {path.name: path.read_bytes() for path in out.iterdir()} == content(files)
    assert not list(tmp_path.glob(".*"))


def test_a_file_that_breaks_off_half_way_or_does_not_fit_is_fetched_the_next_time(
    hub: Hub, files: dict[str, Content], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add(NAME, content(files))
    hub.how, hub.half = "cut", True
    with pytest.raises(HubError, match=r"peer closed connection.*the same command goes on where"):
        pull(NAME, tmp_path / "out")
    hub.half = False
    full = OSError(errno.ENOSPC, "No space left on device")
    with monkeypatch.context() as patch:
        patch.setattr(file_download, "http_get", lambda *_, **__: raised(full))
        with pytest.raises(HubError, match=r"org/head: the disk is full; make room, and the same"):
            pull(NAME, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    pull(NAME, tmp_path / "out")
    assert {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()} == content(files)


def test_where_a_pull_may_go(
    hub: Hub, files: dict[str, Content], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add(NAME, content(files))
    for name in ("empty", "here"):
        (tmp_path / name).mkdir()
    (tmp_path / "link").symlink_to("empty")
    pull(NAME, tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "empty" / "config.json").is_file()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(HubError, match="exists; name a new folder"):
        pull(NAME, Path())
    (tmp_path / "here" / "file").touch()
    for out in (tmp_path / "here", tmp_path / "here" / "file", tmp_path / "link"):
        with pytest.raises(HubError, match="exists; name a new folder"):
            pull(NAME, out)


def test_what_came_damaged_is_not_kept(hub: Hub, files: dict[str, Content], tmp_path: Path) -> None:
    there = hub.add(NAME, content(files)).at("main")[1]
    good = there["model.safetensors"]
    flipped = good.data[:-1] + bytes([good.data[-1] ^ 1])

    class Flipped(type(good)):  # type: ignore[misc]
        sha256, blob = good.sha256, good.blob

    there["model.safetensors"] = Flipped(flipped, lfs=True)
    with pytest.raises(HubError, match=r"org/head: model\.safetensors came damaged"):
        pull(NAME, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    there["model.safetensors"] = good
    pull(NAME, tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == good.data
    there["model.safetensors"] = type(good)(b"torn", lfs=True)
    with pytest.raises(ValueError, match=r"^org/head/model\.safetensors: not a safetensors file"):
        pull(NAME, tmp_path / "torn")
    assert not list(tmp_path.glob("*torn*"))
