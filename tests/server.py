"""A small server that speaks OpenAI's protocol over real HTTP, and fails on request.

It answers from the conversation alone, so that what it says can be compared: `said` gives the text.
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


def said(messages: Sequence[Mapping[str, str]]) -> str:
    """What the server says to these messages."""
    return f"Reply {len(messages)} to: {messages[-1]['content']}"


@dataclass
class Behaviour:
    """What the server does; tests change it while it runs."""

    model: str = "tiny"
    owner: str = "vllm"
    failures: list[Any] = field(default_factory=list)
    """What the next chat requests get, one each: a status, `cut` (half a body), `drop` (no answer),
    `text` (no JSON), a list or dictionary (sent as it is), or None (an answer)."""
    refused: str = ""
    """Chats whose last message contains this get status 400."""
    finish: str = "stop"
    content: str | None = None
    """Said instead of `said`."""
    message: dict[str, Any] = field(default_factory=dict)
    """More keys of each answer's message."""
    seconds: float = 0.0
    """How long an answer takes."""
    models: bool = True
    """Whether `/models` is there."""
    key: str | None = None
    requests: list[dict[str, Any]] = field(default_factory=list)
    """Bodies of all chat requests."""
    statuses: Counter[int] = field(default_factory=Counter)
    at_once: int = 0
    most_at_once: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


def answer_to(body: Mapping[str, Any], does: Behaviour) -> dict[str, Any]:
    text = said(body["messages"]) if does.content is None else does.content
    ids = [*text.encode(), 2]
    choice: dict[str, Any] = {
        "index": 0,
        "finish_reason": does.finish,
        "message": {"role": "assistant", "content": text, **does.message},
    }
    if body.get("return_token_ids"):
        choice["token_ids"] = ids if does.finish == "stop" else ids[:-1]
    usage = {"prompt_tokens": 9, "completion_tokens": len(ids), "total_tokens": 9 + len(ids)}
    told = {"id": "chat-1", "object": "chat.completion", "created": 1, "model": does.model}
    return told | {"choices": [choice], "usage": usage}


class _Handler(BaseHTTPRequestHandler):
    does: Behaviour
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: Any) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        if not self.does.models:
            self._send(404, {"error": {"message": "no such page"}})
        elif self._let_in():
            card = {"id": self.does.model, "object": "model", "owned_by": self.does.owner}
            self._send(200, {"object": "list", "data": [card | {"created": 1}]})

    def do_POST(self) -> None:
        does = self.does
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with does.lock:
            does.requests.append(body)
            does.at_once += 1
            does.most_at_once = max(does.most_at_once, does.at_once)
            failure = does.failures.pop(0) if does.failures else None
        try:
            time.sleep(does.seconds)
            if self._let_in():
                self._answer(body, failure)
        except BrokenPipeError:  # a client that did not wait
            self.close_connection = True
        finally:
            with does.lock:
                does.at_once -= 1

    def _let_in(self) -> bool:
        if self.does.key is None or self.headers["Authorization"] == f"Bearer {self.does.key}":
            return True
        self._send(401, {"error": {"message": "a key is needed"}})
        return False

    def _answer(self, body: Mapping[str, Any], failure: Any) -> None:
        if body["model"] != self.does.model:
            self._send(404, {"error": {"message": f"The model {body['model']} does not exist."}})
        elif self.does.refused and self.does.refused in body["messages"][-1]["content"]:
            self._send(400, {"error": {"message": "the prompt is longer than the context"}})
        elif failure == "drop":
            self.close_connection = True
            self.connection.close()
        elif isinstance(failure, int):
            self._send(failure, {"error": {"message": "not now"}})
        elif isinstance(failure, list | dict):
            self._send(200, failure)
        elif failure == "text":
            self._send(200, "<html>", kind="text/html")
        else:
            self._send(200, answer_to(body, self.does), cut=failure == "cut")

    def _send(
        self, status: int, body: Any, *, cut: bool = False, kind: str = "application/json"
    ) -> None:
        with self.does.lock:
            self.does.statuses[status] += 1
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Retry-After-Ms", "20")  # so that tests need not wait as long as users
        self.end_headers()
        self.wfile.write(data[: len(data) // 2] if cut else data)
        if cut:
            self.wfile.flush()
            self.close_connection = True


@contextmanager
def serving(does: Behaviour) -> Iterator[str]:
    """Serve in a thread; the address for `--endpoint`."""
    handler = type("Handler", (_Handler,), {"does": does})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
