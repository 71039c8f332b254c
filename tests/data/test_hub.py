"""A data set of the Hub is read from a server that speaks its protocol, and then from the cache."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hub_server import Hub, serving

CARD = """---
configs:
- config_name: small
  data_files:
  - {split: train, path: small/train.jsonl}
  - {split: test, path: small/test.jsonl}
- config_name: big
  data_files: big/a.jsonl
---
"""


def chats(*answers: str) -> bytes:
    turns = [
        [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": answer}]
        for answer in answers
    ]
    return "".join(json.dumps({"messages": messages}) + "\n" for messages in turns).encode()


FILES = {
    "README.md": CARD.encode(),
    "small/train.jsonl": chats("One", "Two", "Three"),
    "small/test.jsonl": chats("Test"),
    "big/a.jsonl": chats("Big"),
}


@pytest.fixture
def endpoint() -> Iterator[str]:
    """One data set, `org/name`; every other one is not there."""
    hub = Hub()
    hub.add("org/name", FILES, kind="datasets")
    with serving(hub) as address:
        yield address


READ = """
import json, sys
from drafthead.data.conversations import read_conversations
from drafthead.data.sources import content_of
found = {}
for name in sys.argv[1:]:
    try:
        rows, _ = read_conversations(name)
        found[name] = [[row.id, row.messages[1].content] for row in rows]
        found[name] += [json.dumps(content_of(name))]
    except ValueError as error:
        found[name] = str(error)
print(json.dumps(found))
"""


def read(names: list[str], cache: Path, **settings: str) -> dict[str, Any]:
    """Read in a process of its own: the libraries look at these settings when imported."""
    given = {"HF_HOME": str(cache), "HF_HUB_DISABLE_XET": "1", **settings}
    done = subprocess.run(
        [sys.executable, "-c", READ, *names],
        env={**os.environ, **given},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.slow
def test_a_data_set_of_the_hub_is_read_by_split_and_again_when_offline(
    endpoint: str, tmp_path: Path
) -> None:
    small = "hub:org/name/small"
    names = [f"{small}:test", f"{small}@main", f"{small}:train[:2]"]
    bad = ["hub:org/name", f"{small}:dev", "hub:org/other"]
    found = read([*names, *bad], tmp_path, HF_HUB_OFFLINE="0", HF_ENDPOINT=endpoint)
    assert found[names[0]][:-1] == [["name-test-1", "Test"]]
    whole = [[f"name-train-{i}", text] for i, text in enumerate(("One", "Two", "Three"), 1)]
    assert found[names[1]][:-1] == whole
    assert [text for _, text in found[names[2]][:-1]] == ["One", "Two"]
    assert len({found[name][-1] for name in names}) == 3, "other rows have another key"
    assert "Config name is missing" in found[bad[0]]
    assert 'Unknown split "dev"' in found[bad[1]]
    assert "no such data set on the Hub" in found[bad[2]]
    assert all("\n" not in found[name] for name in bad)
    again = read([names[0]], tmp_path, HF_HUB_OFFLINE="1", HF_ENDPOINT=endpoint)
    assert again[names[0]] == found[names[0]]
