"""Answers through a server that speaks OpenAI's protocol: vLLM, SGLang, or any other.

The same conversations, part file and report as `regenerate`, with the server in the target's place.
Conversations run side by side in threads, each turn one request; the client repeats a request that
fails for a passing reason (429, 5xx, a lost connection), waiting longer each time. Where the server
stays away, what is finished is kept and the run ends with one line; the same command goes on later.

vLLM tells the ids that it emitted, which are kept; of other servers there is only the text. It also
applies what the model's generation config suggests unless a request says otherwise, so requests do.

Which server answers is no part of what answers depend on: its address may change between runs.
"""

from __future__ import annotations

import logging
import os
import queue
import re
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from transformers import PreTrainedTokenizerBase

from drafthead.data.conversations import Prompt
from drafthead.data.loops import loops
from drafthead.heads.contract import template_hash, tokenizer_hash
from drafthead.inference.answers import (
    DROPPED,
    Answer,
    Answering,
    Report,
    Talk,
    answer_all,
    begun,
)

if TYPE_CHECKING:
    from openai import OpenAI

log = logging.getLogger(__name__)

RETRIES = 8
"""Waits of 0.5 s, 1 s, 2 s, ... 8 s: some 40 seconds before a server counts as gone."""
TIMEOUT = 600.0
"""Seconds for one answer."""
REFUSED = 32
"""Requests refused at the start, none answered, after which the request itself must be wrong."""
PLAIN = {"min_p": 0.0, "repetition_penalty": 1.0}
"""Against what a model's generation config suggests: a head learns the target's own law."""
KEEPS_IDS = ("vllm",)
EXTENDED = ("vllm", "sglang")
"""Servers, as `/models` names them, that tell ids on demand; that know `PLAIN` and `top_k`."""
CUT_SHORT = ("length", "abort", "content_filter")
"""Reasons to finish after which the target's own end of turn is missing."""


@dataclass(frozen=True)
class Endpoint:
    """Where to ask, and whom; the key is read from OPENAI_API_KEY, which local servers ignore."""

    url: str
    """As `http://127.0.0.1:8000/v1`."""
    model: str
    """As the server calls it."""
    retries: int = RETRIES
    timeout: float = TIMEOUT

    def client(self) -> OpenAI:
        """A client; ValueError where the package is missing or this is no address."""
        try:
            from openai import OpenAI
        except ImportError as error:
            raise ValueError(
                "--endpoint needs the package openai: pip install 'drafthead[endpoint]'"
            ) from error
        if not re.match(r"https?://[^/]", self.url):
            raise ValueError(
                f"--endpoint {self.url!r}: give an address, as http://localhost:8000/v1"
            )
        key = os.environ.get("OPENAI_API_KEY") or "none"
        return OpenAI(
            base_url=self.url, api_key=key, max_retries=self.retries, timeout=self.timeout
        )


def answer_by_server(
    endpoint: Endpoint,
    prompts: Sequence[Prompt],
    out: Path,
    answering: Answering,
    template_kwargs: Mapping[str, Any] | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    drop: Iterable[str] = DROPPED,
) -> Report:
    """Have all turns of all prompts answered; `answering.batch` conversations at a time.

    tokenizer: the target's, if known: then a part file is tied to it and to its template.
    Raises ValueError for a server that is gone, does not know the model or refuses everything.
    """
    template = dict(template_kwargs or {})
    drawn = {k: v for k, v in asdict(answering).items() if k != "batch"}
    header = {"made": drawn, "model": endpoint.model, "template_kwargs": template}
    if tokenizer is not None:
        header |= {
            "tokenizer": tokenizer_hash(tokenizer),
            "template": template_hash(tokenizer, template),
        }
    made = {"target": endpoint.model, **drawn, "template_kwargs": template}
    server = _Server(endpoint, answering, template, out)
    return answer_all(server, prompts, out, header, made, drop=drop, progress=progress)


class _Told(BaseModel):
    """Base of what is read of a server's answer: the client hands it on unchecked."""

    model_config = ConfigDict(from_attributes=True)


class _Said(_Told):
    content: str | None = None
    reasoning_content: Any = None
    reasoning: Any = None


class _Choice(_Told):
    message: _Said
    finish_reason: str | None = None
    token_ids: list[int] | None = None


class _Usage(_Told):
    completion_tokens: int | None = None


class _Reply(_Told):
    choices: list[_Choice] = Field(min_length=1)
    usage: _Usage | None = None


class _RefusedError(Exception):
    """The server will not answer this request: too long a prompt, or one it cannot read."""


@dataclass
class _Server:
    """Answers talks in threads."""

    endpoint: Endpoint
    answering: Answering
    template_kwargs: Mapping[str, Any]
    out: Path
    extras: dict[str, Any] = field(default_factory=dict)
    """What requests to this kind of server say besides OpenAI's own arguments."""

    def __call__(self, talks: Sequence[Talk]) -> Iterator[Talk]:
        if not talks:
            return
        client = self.endpoint.client()
        self.extras = self._extras(self._kind(client))
        crew = _Crew(self, client, talks)
        held: list[Talk] = []
        """Refused before anything was answered: the request may be wrong, not the prompt."""
        answered = False
        for talk in crew.finished():
            answered = answered or bool(talk.answers)
            held.append(talk)
            if answered:
                yield from held
                held = []
            elif len(held) >= REFUSED:
                break
        if held:
            raise ValueError(
                f"{self.endpoint.url} refused all of {len(held)} requests: {crew.refusal}"
            )

    def _kind(self, client: OpenAI) -> str:
        """Who serves, as the server says; empty where it does not. Refuses an unknown model."""
        import openai

        try:
            # Few retries: who mistypes an address should not wait to learn it.
            listed = client.with_options(max_retries=min(2, self.endpoint.retries)).models.list()
            models = {str(model.id): model.owned_by for model in listed.data or []}
        except openai.NotFoundError:  # not every server lists its models
            return ""
        except (AttributeError, TypeError) as error:
            raise ValueError(f"{self.endpoint.url}: no OpenAI server; is /v1 missing?") from error
        except (openai.OpenAIError, ValueError) as error:
            raise self.failure(error) from error
        if models and self.endpoint.model not in models:
            raise self._unknown(sorted(models))
        return models.get(self.endpoint.model) or ""

    def _unknown(self, models: Sequence[str]) -> ValueError:
        known = f"it has {', '.join(models[:5])}" if models else "see its list of models"
        return ValueError(
            f"{self.endpoint.url} has no model {self.endpoint.model!r}: {known}; give it as --model"
        )

    def _extras(self, kind: str) -> dict[str, Any]:
        extras: dict[str, Any] = {}
        if kind in EXTENDED:
            extras |= PLAIN | {"top_k": self.answering.top_k or -1}
        elif self.answering.top_k:
            extras |= {"top_k": self.answering.top_k}
        if kind in KEEPS_IDS:
            extras |= {"return_token_ids": True}
        if self.template_kwargs:
            extras |= {"chat_template_kwargs": dict(self.template_kwargs)}
        return extras

    def ask(self, client: OpenAI, talk: Talk) -> Answer:
        """One turn. Raises _RefusedError where the server will not answer it, ValueError where it
        cannot be asked anything.
        """
        import openai

        messages: list[Any] = [{"role": m.role, "content": m.content} for m in talk.messages]
        seed = self.answering.seed
        try:
            given = client.chat.completions.create(
                model=self.endpoint.model,
                messages=messages,
                temperature=self.answering.temperature,
                top_p=self.answering.top_p,
                max_tokens=self.answering.max_new_tokens,
                seed=openai.omit if seed is None else _seed(seed, talk),
                extra_body=self.extras,
            )
        except openai.NotFoundError as error:
            raise self._unknown([]) from error
        except (openai.BadRequestError, openai.UnprocessableEntityError) as error:
            raise _RefusedError(_reason(error)) from error
        except (openai.OpenAIError, ValueError) as error:  # or an answer that is no JSON
            raise self.failure(error) from error
        return self._read(given)

    def _read(self, given: object) -> Answer:
        try:
            reply = _Reply.model_validate(given)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"])) or "its answer"
            raise ValueError(
                f"{self.endpoint.url}: no OpenAI server; {where}: {first['msg']}"
            ) from error
        choice, said = reply.choices[0], reply.choices[0].message
        if said.reasoning_content or said.reasoning:
            raise ValueError(
                f"{self.endpoint.url} takes thoughts out of its answers, and a head needs all that "
                "was emitted: start the server without a reasoning parser"
            )
        # Half of a surrogate pair, which JSON can carry, could not be written to a file.
        text = (said.content or "").encode("utf-8", "replace").decode()
        ids = choice.token_ids
        usage = reply.usage or _Usage()
        tokens = (usage.completion_tokens or 0) if ids is None else len(ids)
        if choice.finish_reason not in CUT_SHORT:
            return Answer(text, "stop", tokens, ids)
        units: Sequence[object] = ids or re.findall(r"\w+|[^\w\s]", text)
        return Answer(text.rstrip("\ufffd"), "loop" if loops(units) else "length", tokens, ids)

    def failure(self, error: Exception) -> ValueError:
        """One line for a server that cannot be asked, and how to go on."""
        import openai

        if isinstance(error, openai.AuthenticationError | openai.PermissionDeniedError):
            return ValueError(f"{self.endpoint.url} wants a key: set OPENAI_API_KEY")
        if isinstance(error, openai.APITimeoutError):
            reason = f"no answer within {self.endpoint.timeout:g} s"
        elif isinstance(error, openai.APIStatusError):
            reason = f"status {error.status_code} ({_reason(error)})"
        elif isinstance(error, openai.APIConnectionError):
            reason = "no connection"
        else:
            reason = _reason(error)
        again = f" What is finished is in {self.out.name}.part: the same command goes on"
        return ValueError(
            f"{self.endpoint.url}: {reason}, tried again in vain; is the server up?"
            + (again if begun(self.out) else "")
        )


def _seed(seed: int, talk: Talk) -> int:
    """A number of its own for each turn of each conversation, as servers take them."""
    return (seed + talk.index + 1_000_003 * len(talk.answers)) % 2**31


def _reason(error: Exception) -> str:
    """What the server said, in one line of bearable length."""
    body = getattr(error, "body", None)
    said = body.get("message") if isinstance(body, dict) else None
    return " ".join(str(said or error).split())[:200]


class _Crew:
    """Threads that answer conversations; the first that finds the server gone stops all."""

    def __init__(self, server: _Server, client: OpenAI, talks: Sequence[Talk]) -> None:
        self.server, self.client = server, client
        self.waiting = deque(talks)
        self.done: queue.Queue[Talk | Exception | None] = queue.Queue()
        """Finished talks and errors; None from each thread at its end."""
        self.stop = threading.Event()
        self.refusal = ""
        count = min(server.answering.batch, len(talks))
        # Daemons: a Ctrl-C must not wait for answers that nobody will write down.
        self.threads = [threading.Thread(target=self._work, daemon=True) for _ in range(count)]

    def finished(self) -> Iterator[Talk]:
        """Talks as they end; the first error, after all that was still finished."""
        for thread in self.threads:
            thread.start()
        failed: Exception | None = None
        running = len(self.threads)
        try:
            while running:
                talk = self.done.get()
                if talk is None:
                    running -= 1
                elif isinstance(talk, Exception):
                    failed = failed or talk
                    self.stop.set()
                else:
                    yield talk
        finally:
            self.stop.set()
        if failed is not None:
            raise failed

    def _work(self) -> None:
        try:
            while not self.stop.is_set():
                try:
                    talk = self.waiting.popleft()
                except IndexError:
                    return
                if self._answer(talk):
                    self.done.put(talk)
        except Exception as error:  # all of them: the thread's end must be told
            self.done.put(error)
        finally:
            self.done.put(None)

    def _answer(self, talk: Talk) -> bool:
        """All turns of a conversation; False where the run was stopped before its end."""
        while True:
            try:
                answer = self.server.ask(self.client, talk)
            except _RefusedError as error:
                if not self.refusal:
                    self.refusal = str(error)
                    log.warning("%s refused a request: %s", self.server.endpoint.url, error)
                talk.give_up("refused")
                return True
            if talk.take(answer):
                return True
            if self.stop.is_set():
                return False
