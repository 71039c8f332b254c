"""Extraction killed by SIGKILL comes to the same store as one that was let alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from command import write_config
from killing import KillAt, Run, count, survive
from stores import extraction
from tiny_runs import write_chats


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory, target_folder: Path) -> Path:
    """Some ten shards."""
    root = tmp_path_factory.mktemp("extract")
    write_chats(root / "train.jsonl", [9, 4, 12, 7, 10] * 4)
    write_chats(root / "heldout.jsonl", [8] * 6, seed=1)
    return write_config(root / "run.yaml", root, target_folder)


@pytest.fixture(scope="module")
def whole(config: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Run]:
    root = tmp_path_factory.mktemp("whole")
    return root, count(extraction(config).start(root), root)


@pytest.mark.parametrize("where", ["a shard half written", "a shard in place", "the manifest"])
def test_f19_a_killed_extraction_is_gone_on_with(
    config: Path, whole: tuple[Path, Run], tmp_path: Path, where: str
) -> None:
    """Shards that were finished are kept, and in the end all is as in an unbroken run."""
    root, run = whole
    shards = [
        number
        for number, point in enumerate(run.of(), start=1)
        if "states-0" in point.path and point.what in ("torn serialize_file", "after replace")
    ]
    manifests = [
        number
        for number, point in enumerate(run.of(), start=1)
        if "manifest" in point.path and point.what == "before replace"
    ]
    assert len(shards) >= 8, "fail-points around at least four shards"
    point = {
        "a shard half written": shards[len(shards) // 2 // 2 * 2],
        "a shard in place": shards[len(shards) // 2 // 2 * 2 + 1],
        "the manifest": manifests[-1],
    }[where]
    survive(extraction(config), run, root, [KillAt(point=point)], tmp_path)
