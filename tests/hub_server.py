"""A small Hub on this machine that speaks its protocol over real HTTP, and fails on request.

It answers what huggingface_hub asks for models and data sets: create, information, tree, branch,
settings, upload (LFS and regular), commit and download, with tokens. Every repository keeps all its
commits, and every request is noted, so that tests can tell what happened.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal
from urllib.parse import parse_qs, unquote, urlsplit

Failure = Literal["500", "cut", "late"]
"""How a request fails: an answer that says so, none at all, or none after the work was done."""

TOKEN = "hf_secretOfOrg"
ATTRIBUTES = b"*.safetensors filter=lfs diff=lfs merge=lfs -text\n"


class Refusal(Exception):  # noqa: N818  (an answer, not an error of the server)
    """What the server says instead of an answer."""

    def __init__(self, status: int, said: str, code: str | None = None) -> None:
        super().__init__(said)
        self.status, self.said, self.code = status, said, code


@dataclass(frozen=True)
class Stored:
    """A file as a commit holds it."""

    data: bytes
    lfs: bool = False

    @property
    def blob(self) -> str:
        """The id that git gives the content."""
        return hashlib.sha1(b"blob %d\0" % len(self.data) + self.data).hexdigest()

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.data).hexdigest()

    def facts(self) -> dict[str, Any]:
        found: dict[str, Any] = {"size": len(self.data), "oid": self.blob, "blobId": self.blob}
        if self.lfs:
            found["lfs"] = {"sha256": self.sha256, "oid": self.sha256, "size": len(self.data)}
            found["lfs"]["pointerSize"] = 134
        return found


@dataclass
class Repository:
    """The commits of one repository: what each holds, and where the branches are."""

    private: bool = False
    commits: dict[str, dict[str, Stored]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)

    def put(self, branch: str, files: Mapping[str, Stored]) -> str:
        """Make a commit; its id."""
        sha = hashlib.sha1(f"{id(self)} {len(self.commits)}".encode()).hexdigest()
        self.commits[sha] = dict(files)
        self.branches[branch] = sha
        return sha

    def at(self, revision: str) -> tuple[str, dict[str, Stored]]:
        sha = self.branches.get(revision, revision)
        if sha not in self.commits:
            raise Refusal(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return sha, self.commits[sha]


@dataclass
class Hub:
    """All that the server holds; tests read it, and change it while it runs."""

    repositories: dict[tuple[str, str], Repository] = field(default_factory=dict)
    """By kind (`models`, `datasets`, `spaces`) and name."""
    objects: dict[str, bytes] = field(default_factory=dict)
    """What was sent by LFS, by its sha256."""
    tokens: dict[str, str] = field(default_factory=lambda: {TOKEN: "org"})
    """Who each token may write for."""
    requests: list[str] = field(default_factory=list)
    """`METHOD path` of all requests."""
    down_from: int | None = None
    """The number of the request from which on all fail; None: it works."""
    how: Failure = "500"
    half: bool = False
    """Whether the connection ends in the middle of each file."""
    lock: threading.RLock = field(default_factory=threading.RLock)

    def add(
        self,
        name: str,
        files: Mapping[str, bytes],
        kind: str = "models",
        private: bool = False,
    ) -> Repository:
        """Put a repository there, as its owner had made it elsewhere."""
        found = self.repositories.setdefault((kind, name), Repository(private))
        found.put("main", {path: _stored(path, data) for path, data in files.items()})
        return found

    def files(self, name: str, revision: str = "main") -> dict[str, bytes]:
        """What a model's repository holds, but for git's own file."""
        _, files = self.repositories["models", name].at(revision)
        return {path: f.data for path, f in files.items() if path != ".gitattributes"}

    def commits(self, name: str) -> int:
        """The commits of a model's repository but the one that made it."""
        return len(self.repositories["models", name].commits) - 1

    def heal(self) -> None:
        """Work again, and count the requests anew."""
        self.down_from = None
        self.requests.clear()

    def empty(self) -> None:
        """Be as a new one."""
        self.heal()
        self.repositories.clear()
        self.objects.clear()

    def failing(self) -> Failure | None:
        """How this request, which is the last of `requests`, fails."""
        if self.down_from is None:
            return None
        return self.how if len(self.requests) > self.down_from else None


def _stored(path: str, data: bytes) -> Stored:
    return Stored(data, lfs=path.endswith(".safetensors"))


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else head and body of an answer wait for each other

    def log_message(self, *args: Any) -> None:
        """Say nothing."""

    def answer(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length)
        path = unquote(urlsplit(self.path).path)
        if path == "/api/agent-harnesses":  # asked once a process, by the client for itself
            self._refuse(Refusal(404, "Not Found"))
            return
        with self.hub.lock:
            self.hub.requests.append(f"{self.command} {path}")
            failure = self.hub.failing()
            try:
                if failure == "500":
                    # As some proxies do, with more of the request than is anybody's business.
                    raise Refusal(500, f"Internal Error ({self.headers['Authorization']})")
                if failure != "cut":
                    self._dispatch(path, body, silent=failure == "late")
            except Refusal as refusal:
                if failure != "late":
                    self._refuse(refusal)
        if failure in ("cut", "late"):
            self.close_connection = True
            self.connection.close()

    do_GET = do_HEAD = do_POST = do_PUT = answer  # noqa: N815

    # Requests

    def _dispatch(self, path: str, body: bytes, silent: bool) -> None:
        if found := re.fullmatch(
            r"/(?:(datasets|spaces)/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path
        ):
            self._download(found[1] or "models", found[2], found[3], found[4], silent)
            return
        if path.startswith("/lfs/"):  # a storage of its own, which gets no token
            said: Any = self._receive(path.removeprefix("/lfs/"), body)
        else:
            said = self._api(path, body)
        if not silent:
            self._send(200, json.dumps(said).encode(), {"Content-Type": "application/json"})

    def _api(self, path: str, body: bytes) -> Any:
        owner = self._owner()
        if path == "/api/repos/create":
            return self._create(json.loads(body), owner)
        if path == "/api/validate-yaml":
            return self._validate(json.loads(body)["content"])
        if found := re.fullmatch(r"/([^/]+/[^/]+)\.git/info/lfs/objects/(batch|verify)", path):
            self._writable("models", found[1], owner)
            return self._batch(json.loads(body)) if found[2] == "batch" else {}
        pattern = (
            r"/api/(models|datasets|spaces)/([^/]+/[^/]+)(?:/([a-z-]+)(?:/([^/]+))?(?:/(.+))?)?"
        )
        found = re.fullmatch(pattern, path)
        if found is None:
            raise Refusal(404, "Not Found")
        kind, name, verb, revision, under = found.groups()
        revision = revision or "main"
        if self.command == "GET" or verb == "paths-info":
            repository = self._readable(kind, name, owner)
            return self._look(repository, name, verb, revision, under or "", body)
        repository = self._writable(kind, name, owner)
        if verb == "preupload":
            return self._preupload(repository, revision, json.loads(body))
        if verb == "commit":
            return self._commit(repository, name, revision, body)
        if verb == "branch":
            repository.branches.setdefault(revision, repository.branches["main"])
            return {}
        if verb == "settings":
            repository.private = json.loads(body)["visibility"] == "private"
            return {}
        raise Refusal(404, "Not Found")

    def _owner(self) -> str | None:
        given = self.headers.get("Authorization")
        if given is None:
            return None
        owner = self.hub.tokens.get(given.removeprefix("Bearer "))
        if owner is None:
            raise Refusal(401, "Invalid credentials in Authorization header")
        return owner

    def _readable(self, kind: str, name: str, owner: str | None) -> Repository:
        found = self.hub.repositories.get((kind, name))
        if found is None or (found.private and owner != name.split("/")[0]):
            raise Refusal(404 if owner else 401, "Repository not found", "RepoNotFound")
        return found

    def _writable(self, kind: str, name: str, owner: str | None) -> Repository:
        found = self._readable(kind, name, owner)
        if owner != name.split("/")[0]:
            raise Refusal(403, "You don't have write access to this repository")
        return found

    def _create(self, asked: Mapping[str, Any], owner: str | None) -> Any:
        name = f"{asked['organization']}/{asked['name']}"
        if owner is None:
            raise Refusal(401, "Authentication is required")
        if owner != asked["organization"]:
            raise Refusal(
                403,
                "You don't have the rights to create a model under the namespace "
                f'"{asked["organization"]}"',
            )
        if any(taken == name for _, taken in self.hub.repositories):  # stricter than the real one
            raise Refusal(409, "You already created this repo")
        found = Repository(asked.get("visibility") == "private")
        found.put("main", {".gitattributes": Stored(ATTRIBUTES)})
        self.hub.repositories[f"{asked.get('type') or 'model'}s", name] = found
        return {"url": f"{self._address()}/{name}", "name": name}

    def _validate(self, content: str) -> Any:
        if not content.startswith("---\n"):
            return {"errors": [], "warnings": [{"message": "empty or missing yaml metadata"}]}
        return {"errors": [], "warnings": []}

    def _look(
        self, found: Repository, name: str, verb: str | None, revision: str, under: str, body: bytes
    ) -> Any:
        sha, files = found.at(revision)
        if verb in (None, "revision"):
            siblings = [{"rfilename": path, **file.facts()} for path, file in files.items()]
            told = {"id": name, "sha": sha, "private": found.private, "tags": [], "downloads": 0}
            return told | {"siblings": siblings}
        if verb == "paths-info":
            paths = json.loads(body)["paths"]
            return [_entry(path, files[path]) for path in paths if path in files]
        if verb == "tree":
            deep = "true" in parse_qs(urlsplit(self.path).query.lower()).get("recursive", [])
            return _tree(files, under, deep)
        raise Refusal(404, "Not Found")

    def _preupload(self, found: Repository, revision: str, asked: Mapping[str, Any]) -> Any:
        _, there = found.at(revision)
        answers = []
        for file in asked["files"]:
            path, mode = file["path"], "regular"
            if path.endswith(".safetensors"):
                mode = "lfs"
            old = there.get(path)
            oid = None if old is None else old.sha256 if old.lfs else old.blob
            answers.append({"path": path, "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        return {"files": answers}

    def _batch(self, asked: Mapping[str, Any]) -> Any:
        objects = []
        for one in asked["objects"]:
            found = {"oid": one["oid"], "size": one["size"]}
            if one["oid"] not in self.hub.objects:
                found["actions"] = {"upload": {"href": f"{self._address()}/lfs/{one['oid']}"}}
            objects.append(found)
        return {"transfer": "basic", "objects": objects}

    def _receive(self, oid: str, data: bytes) -> Any:
        if hashlib.sha256(data).hexdigest() != oid:
            raise Refusal(400, "the content is not that of the name")
        self.hub.objects[oid] = data
        return {}

    def _commit(self, found: Repository, name: str, revision: str, body: bytes) -> Any:
        sha, there = found.at(revision)
        files = dict(there)
        for line in body.splitlines():
            one = json.loads(line)
            value = one["value"]
            if one["key"] == "header":
                if value.get("parentCommit", sha) != sha:
                    raise Refusal(412, "A commit has happened since. Please refresh and try again.")
            elif one["key"] == "file":
                files[value["path"]] = Stored(base64.b64decode(value["content"]))
            elif one["key"] == "lfsFile":
                if value["oid"] not in self.hub.objects:
                    raise Refusal(400, "Your push was rejected: LFS pointer to a missing object")
                files[value["path"]] = Stored(self.hub.objects[value["oid"]], lfs=True)
            elif one["key"] == "deletedFile":
                del files[value["path"]]
        sha = found.put(revision, files)
        url = f"{self._address()}/{name}/commit/{sha}"
        return {"success": True, "commitOid": sha, "commitUrl": url, "hookOutput": ""}

    def _download(self, kind: str, name: str, revision: str, path: str, silent: bool) -> None:
        sha, files = self._readable(kind, name, self._owner()).at(revision)
        if path not in files:
            raise Refusal(404, "Entry not found", "EntryNotFound")
        file = files[path]
        headers = {"X-Repo-Commit": sha, "ETag": f'"{file.sha256 if file.lfs else file.blob}"'}
        data, status = file.data, 200
        if asked := re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", "")):
            start = int(asked[1])
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
            data, status = data[start:], 206
        if not silent:
            self._send(status, data, headers, short=self.hub.half)

    # Answers

    def _address(self) -> str:
        return f"http://{self.headers['Host']}"

    def _refuse(self, refusal: Refusal) -> None:
        headers = {"X-Error-Message": refusal.said, "Content-Type": "application/json"}
        if refusal.code is not None:
            headers["X-Error-Code"] = refusal.code
        self._send(refusal.status, json.dumps({"error": refusal.said}).encode(), headers)

    def _send(
        self, status: int, data: bytes, headers: Mapping[str, str], short: bool = False
    ) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data[: len(data) // 2] if short else data)
            self.close_connection = short


def _entry(path: str, file: Stored) -> dict[str, Any]:
    return {"type": "file", "path": path, **file.facts()}


def _tree(files: Mapping[str, Stored], under: str, deep: bool) -> list[dict[str, Any]]:
    start = len(under) + 1 if under else 0
    inside = [path for path in files if path.startswith(f"{under}/" if under else "")]
    shown = [_entry(path, files[path]) for path in inside if deep or "/" not in path[start:]]
    folders = {path[: path.index("/", start)] for path in inside if "/" in path[start:]}
    return shown + [{"type": "directory", "path": path, "oid": "0"} for path in sorted(folders)]


@contextmanager
def serving(hub: Hub) -> Iterator[str]:
    """Serve in a thread; the address for `HF_ENDPOINT`."""
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    server.block_on_close = False
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
