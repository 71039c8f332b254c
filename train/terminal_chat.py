"""A chat at a terminal: its loop, its commands, and Ctrl-C.

Answers go to standard output; all else is a remark. What is said and answered is `inference.chat`'s
to keep, how lines are typed `lines`', how answers are shown `answer_text`'s.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

from rich.table import Table

from drafthead.inference.chat import Chat, ContextFullError, Exchange, Figures
from drafthead.inference.stream import Stream
from drafthead.train import terminal
from drafthead.train.answer_text import AnswerText, show_json
from drafthead.train.lines import Lines
from drafthead.train.terminal import say

HELP = r"""
/stats        tokens, speed and drafts of the last answer and of all of this chat
/undo         take back the last message and its answer
/retry        answer the last message anew
/clear        forget the conversation; the system prompt stays
/system       show the system prompt; /system TEXT sets it, /system - takes it away
/help         this list
/quit         leave, as Ctrl-D does
A line that ends with \ goes on in the next one; // at the beginning sends one /.
Ctrl-C stops an answer: what it said until then stays in the conversation.""".strip()
HINT = "Ctrl-C again or Ctrl-D leaves; /help lists the commands"


@dataclass(frozen=True)
class Told:
    """How answers are told, beside their text."""

    text: AnswerText
    as_json: bool
    lossy: bool
    greedy: bool
    """No temperature: a message has one answer."""
    plain_per_s: float | None = None
    """Tokens per second of plain decoding where it was measured."""


class TerminalChat:
    """One conversation, and the process around it."""

    def __init__(self, chat: Chat, start: Callable[[Sequence[int], int], Stream], told: Told):
        """`start`: begins an answer to ids, drawn from a stream of noise."""
        self.chat, self._start, self._told = chat, start, told
        self._warned = False
        self._commands: dict[str, Callable[[], None]] = {
            "/stats": self._stats,
            "/undo": self._undo,
            "/retry": self._retry,
            "/clear": self._clear,
            "/help": lambda: say(HELP, "dim"),
        }

    def once(self, said: str) -> None:
        """Answer one message; what is wrong with it, and Ctrl-C, are left to the caller."""
        stream = self._start(self.chat.ask(said), 0)
        self._show(stream)
        self._end(Exchange(said, stream.text, stream.finish), Figures.of(stream))

    def run(self, lines: Lines) -> None:
        """Answer messages until /quit, Ctrl-D, or Ctrl-C twice at the prompt."""
        say("/help lists the commands, Ctrl-D leaves", "dim")
        while True:
            try:
                said = lines.message().strip()
                self._warned = False
                if said == "/quit":
                    return None
                self._take(said)
            except EOFError:
                return terminal.notes.print()
            except KeyboardInterrupt:
                terminal.notes.print()
                if self._warned:
                    return None
                self._warned = True
                say(HINT, "dim")

    def _take(self, said: str) -> None:
        name, _, rest = said.partition(" ")
        if said.startswith("//"):
            self._answer(said[1:])
        elif not said.startswith("/"):
            if said:
                self._answer(said)
        elif name == "/system":
            self._system(rest.strip())
        elif name in self._commands and not rest:
            self._commands[name]()
        elif name in (*self._commands, "/quit"):
            say(f"{name} stands alone on its line; // at the beginning sends one /", "dim")
        else:
            say(f"unknown command {name}: /help lists them; // at the beginning sends one /", "dim")

    # Answers

    def _answer(self, said: str, noise: int = 0) -> bool:
        """Answer a message; whether it joined the conversation."""
        try:
            stream = self._start(self.chat.ask(said), noise)
        except ContextFullError as error:
            way = "/undo takes the last exchange back, /clear forgets all"
            if not self.chat.exchanges:
                way = "shorten it, or start with a lower --max-new-tokens"
            say(f"not sent: {error}; {way}")
            return False
        except ValueError as error:
            say(f"not sent: {' '.join(str(error).split())}")
            return False
        with _at_ctrl_c(_stopper(stream)):
            try:
                self._show(stream)
            except KeyboardInterrupt:
                stream.stop()
            with _at_ctrl_c(signal.SIG_IGN):  # what is left is quick; an impatient one cuts nothing
                exchange = Exchange(said, stream.text, stream.finish, noise)
                return self._end(exchange, Figures.of(stream))

    def _show(self, stream: Stream) -> None:
        for piece in stream:
            if not self._told.as_json:
                self._told.text.show(piece)

    def _end(self, exchange: Exchange, figures: Figures) -> bool:
        """Take an answer that has ended into the conversation, and tell what it took."""
        kept = self.chat.answered(exchange, figures)
        values = {"text": exchange.reply, "lossy": self._told.lossy, "finish": exchange.finish}
        if self._told.as_json:
            if kept:
                show_json(values | figures.as_dict())
        else:
            self._told.text.end()
        if not kept:
            say("stopped before its first word: the message was taken back", "dim")
        elif not self._told.as_json:
            say(self._line(exchange, figures), "dim")
        return kept

    def _line(self, exchange: Exchange, figures: Figures) -> str:
        parts = [f"{figures.tokens_per_s:.1f} tokens/s, {figures.tau:.2f} tokens per round"]
        if exchange.finish == "stopped":
            parts.append("stopped")
        elif exchange.finish == "length":
            parts.append(f"cut at {figures.new_tokens} tokens (--max-new-tokens)")
        if self._told.lossy:
            parts.append("lossy: not the target's own text")
        return "; ".join(parts)

    # Commands

    def _stats(self) -> None:
        if not self.chat.figures:
            return say("no answer yet", "dim")
        shown = Table("", "last answer", "this chat")
        last, both = self.chat.figures[-1], Figures.together(self.chat.figures)
        for row in zip(NAMES, _column(last), _column(both), strict=True):
            shown.add_row(*row)
        plain = self._told.plain_per_s or both.undrafted_per_s
        if plain and both.drafted:
            rates = (last.tokens_per_s / plain, both.tokens_per_s / plain)
            shown.add_row(f"times plain's {plain:.1f}", *(f"{rate:.2f}" for rate in rates))
        return terminal.notes.print(shown)

    def _undo(self) -> None:
        last = self.chat.undo()
        say("nothing to take back" if last is None else f"taken back: {_short(last.said)}", "dim")

    def _retry(self) -> None:
        last = self.chat.undo()
        if last is None:
            return say("nothing to answer anew", "dim")
        if self._told.greedy and last.finish != "stopped":
            say("at temperature 0 the answer is always the same; --temperature 0.7 varies it")
        elif self._answer(last.said, last.noise + (not self._told.greedy)):
            return None
        return self.chat.exchanges.append(last)

    def _clear(self) -> None:
        count = self.chat.clear()
        say(f"forgotten: {count} exchange{'' if count == 1 else 's'}", "dim")

    def _system(self, text: str) -> None:
        if not text:
            return say(self.chat.system or "no system prompt of yours", "dim")
        try:
            self.chat.use_system(None if text == "-" else text)
        except ValueError as error:
            return say(f"error: {error}")
        return say("from the next answer on", "dim")


NAMES = (
    "answers",
    "new tokens",
    "tokens/s",
    "tau (tokens per round)",
    "accepted / drafted",
    "survival by depth",
    "first token",
)


def _column(figures: Figures) -> list[str]:
    """Figures in the order of `NAMES`."""
    return [
        str(figures.answers),
        str(figures.new_tokens),
        f"{figures.tokens_per_s:.1f}",
        f"{figures.tau:.2f}",
        f"{figures.accepted} / {figures.drafted}",
        " ".join(f"{share:.2f}" for share in figures.survival) or "-",
        f"{figures.first_token_s:.2f} s",
    ]


def _short(text: str, most: int = 60) -> str:
    line = " ".join(text.split())
    return line if len(line) <= most else f"{line[: most - 1]}…"


Handler = Callable[[int, FrameType | None], None]


def _stopper(stream: Stream) -> Handler:
    """Lets Ctrl-C end a stream between two pieces; before the first, or once more, at once."""

    def stop(signum: int, frame: FrameType | None) -> None:
        if stream.stopping or not stream.text:
            raise KeyboardInterrupt
        stream.stop()

    return stop


@contextmanager
def _at_ctrl_c(handler: Handler | signal.Handlers) -> Iterator[None]:
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
