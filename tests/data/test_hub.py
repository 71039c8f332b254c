"""A data set of the Hub is read from a server that speaks its protocol, and then from the cache."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

COMMIT = "1" * 40
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


class Hub(BaseHTTPRequestHandler):
    """One repository, `org/name`; every other one is not there."""

    protocol_version = "HTTP/1.1"

    def answer(self) -> None:
        length = int(self.headers.get("content-length") or 0)
        asked = json.loads(self.rfile.read(length)) if length else {}
        path = urlsplit(self.path).path
        if path.startswith("/datasets/org/name/resolve/"):
            self.file(path.split("/", 6)[6])
        elif path.startswith("/api/datasets/org/name/paths-info/"):
            self.json([entry(name) for name in asked["paths"] if name in FILES])
        elif path.startswith("/api/datasets/org/name/tree/"):
            self.json(self.tree("/".join(path.split("/")[7:])))
        elif path.startswith("/api/datasets/org/name"):
            files = [{"rfilename": name} for name in FILES]
            self.json({"id": "org/name", "sha": COMMIT, "siblings": files, "tags": []})
        else:
            self.say(404, b"{}", {"X-Error-Code": "RepoNotFound"})

    do_GET = do_HEAD = do_POST = answer  # noqa: N815

    def file(self, name: str) -> None:
        if name in FILES:
            self.say(200, FILES[name], {"ETag": f'"{digest(name)}"', "X-Repo-Commit": COMMIT})
        else:
            self.say(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})

    def tree(self, under: str) -> list[dict[str, Any]]:
        deep = "true" in parse_qs(urlsplit(self.path).query.lower()).get("recursive", [])
        inside = [name for name in FILES if name.startswith(f"{under}/" if under else "")]
        start = len(under) + 1 if under else 0
        files = [entry(name) for name in inside if deep or "/" not in name[start:]]
        folders = {name[: name.index("/", start)] for name in inside if "/" in name[start:]}
        return files + [{"type": "directory", "path": name, "oid": "0"} for name in sorted(folders)]

    def json(self, value: object) -> None:
        self.say(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def say(self, code: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(code)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None: ...


def digest(name: str) -> str:
    return hashlib.sha1(FILES[name]).hexdigest()


def entry(name: str) -> dict[str, Any]:
    return {"type": "file", "path": name, "size": len(FILES[name]), "oid": digest(name)}


@pytest.fixture
def endpoint() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


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
