"""Measure drafters on prompts, side by side: acceptance, speed against plain decoding, identity.

Every drafter, plain decoding first among them, answers the same ids with the same settings, prompt
by prompt in turn, so that a machine that slows down slows all of them. Speed counts the tokens and
the seconds of the rounds: prefill and its token are left out on every side, and each side is warmed
up before. The baseline is this same loop without a draft, which is the fastest plain loop here.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from drafthead.data.chat import ChatFormat
from drafthead.data.conversations import Message, Prompt
from drafthead.inference.decoder import Decoder, check_prompt
from drafthead.inference.drafters import Drafter
from drafthead.inference.metrics import Acceptance, Round, acceptance
from drafthead.inference.noise import Noise
from drafthead.inference.row import Row, stop_at
from drafthead.inference.sampling import Sampler
from drafthead.inference.target import Target
from drafthead.inference.warps import Warps

log = logging.getLogger(__name__)

PLAIN = "plain"


@dataclass(frozen=True)
class Settings:
    """How the prompts are answered."""

    max_new_tokens: int = 64
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    rule: str = "coupled"
    lossy: bool = False
    """Allow a rule that changes the text; it must then be one."""

    def sampler(self, stream: int, target: Target) -> Sampler:
        """A sampler for one row whose noise is keyed by `stream`."""
        if self.temperature == 0:
            return Sampler(rule=self.rule, lossy=self.lossy)
        warps = Warps.of(self.temperature, self.top_k, self.top_p)
        noise = Noise(self.seed, stream, target.vocab_size, target.device)
        return Sampler(warps, [noise], self.rule, self.lossy)


@dataclass
class Answer:
    """One answered turn."""

    prompt: str
    category: str
    ids: list[int]
    prompt_length: int
    rounds: list[Round]
    seconds: float
    """Wall clock of the rounds; prefill is not in it."""
    cpu_seconds: float
    parts: dict[str, float]
    gaps: list[float] | None = None
    """Between the target's two best logits behind each new token, where they were asked for."""

    @property
    def new_ids(self) -> list[int]:
        return self.ids[self.prompt_length :]

    @property
    def timed_tokens(self) -> int:
        """Tokens the rounds emitted: all new ones but the prefill's."""
        return sum(r.emitted for r in self.rounds)


def answer(
    target: Target,
    drafter: Drafter | None,
    ids: Sequence[int],
    settings: Settings,
    *,
    stream: int = 0,
    name: str = "",
    category: str = "",
    keep_gaps: bool = False,
) -> Answer:
    """Answer one prompt and time its rounds."""
    limit = settings.max_new_tokens
    check_prompt(target, ids, limit)
    row = Row(list(ids), limit, stop_at(end_ids(target)), logits=[] if keep_gaps else None)
    sampler = settings.sampler(stream, target)
    decoder = Decoder(target, sampler, drafter, capacity=len(ids) + limit)
    decoder.start(0, row)
    _settle(target)
    wall, cpu = time.perf_counter(), time.process_time()
    while decoder.running:
        decoder.round()
    _settle(target)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    parts = {part: s for part, s in decoder.seconds.items() if part != "prefill"}
    gaps = None if row.logits is None else [_gap(logits) for logits in row.logits]
    return Answer(name, category, row.ids, row.prompt, row.rounds, wall, cpu, parts, gaps)


def _gap(logits: Tensor) -> float:
    best = logits.float().topk(2).values
    return float(best[0] - best[1])


def end_ids(target: Target) -> list[int]:
    """The ids that end an answer: the generation config's, with the tokenizer's own."""
    config = target.model.generation_config
    declared = config.eos_token_id if config else None
    ends = {declared} if isinstance(declared, int) else set(declared or ())
    if target.tokenizer is not None and target.tokenizer.eos_token_id is not None:
        ends.add(target.tokenizer.eos_token_id)
    return sorted(ends)


def evaluate(
    target: Target,
    prompts: Sequence[Prompt],
    drafters: Mapping[str, Drafter],
    settings: Settings,
    *,
    template_kwargs: dict[str, Any] | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, list[Answer]]:
    """Answers by drafter name, plain decoding's under `plain`; later turns follow its replies."""
    if PLAIN in drafters:
        raise ValueError(f"{PLAIN!r} is the baseline's name: call the drafter something else")
    assert target.tokenizer is not None
    chat = ChatFormat(target.tokenizer, template_kwargs)
    sides: list[tuple[str, Drafter | None]] = [(PLAIN, None), *drafters.items()]
    answers: dict[str, list[Answer]] = {name: [] for name, _ in sides}
    turns = sum(len(p.turns) for p in prompts)
    done = 0
    for index, prompt in enumerate(prompts):
        messages: list[Message] = []
        for number, turn in enumerate(prompt.turns, start=1):
            messages += prompt.opening if number == 1 else [Message("user", turn)]
            ids = chat.prompt_ids(messages)
            if number > 1 and len(ids) + settings.max_new_tokens > target.context:
                log.warning("%s: its turn %d no longer fits the context", prompt.id, number)
                break
            if not done:
                _warm_up(target, sides, ids, settings)
            # Another side goes first each time, so that none always finds the caches warm.
            for name, drafter in (*sides[done % len(sides) :], *sides[: done % len(sides)]):
                keep = name == PLAIN and settings.temperature == 0
                answers[name].append(
                    answer(
                        target,
                        drafter,
                        ids,
                        settings,
                        stream=index,
                        name=prompt.id,
                        category=prompt.category,
                        keep_gaps=keep,
                    )
                )
            done += 1
            progress(done, turns)
            messages.append(Message("assistant", text_of(target, answers[PLAIN][-1])))
    return answers


def _warm_up(
    target: Target,
    sides: Sequence[tuple[str, Drafter | None]],
    ids: Sequence[int],
    settings: Settings,
) -> None:
    short = replace(settings, max_new_tokens=min(8, settings.max_new_tokens))
    for _, drafter in sides:
        answer(target, drafter, ids, short)


def text_of(target: Target, given: Answer) -> str:
    """What an answer says, without special tokens."""
    assert target.tokenizer is not None
    return str(target.tokenizer.decode(given.new_ids, skip_special_tokens=True))


def _settle(target: Target) -> None:
    """Wait for the device, so that a clock read afterwards is true."""
    if target.device.type == "cuda":
        torch.cuda.synchronize(target.device)


# Records


def record(
    name: str, answers: Sequence[Answer], plain: Sequence[Answer], identical: dict[str, Any] | None
) -> dict[str, Any]:
    """One drafter's figures, as every report shows them."""
    figures = _acceptance(answers)
    wall, cpu = speed(answers)
    plain_wall, plain_cpu = speed(plain)
    categories = sorted({a.category for a in answers})
    return {
        "name": name,
        "tokens_per_s": wall,
        "cpu_tokens_per_s": cpu,
        "speedup": wall / plain_wall,
        "cpu_speedup": cpu / plain_cpu,
        "tau": figures.tau,
        "tau_interval": list(figures.tau_interval),
        "cut": figures.cut,
        "survival": list(figures.survival),
        "conditional": list(figures.conditional),
        "accepted_per_drafted": figures.accepted_share,
        "rounds": figures.rounds,
        "identical": identical,
        "agreement": agreement(answers, plain),
        "round_ms": round_parts(answers),
        "by_source": _by_source(answers),
        "by_category": {c: _category(c, answers, plain) for c in categories},
    }


def plain_record(plain: Sequence[Answer]) -> dict[str, Any]:
    """The baseline's figures."""
    wall, cpu = speed(plain)
    return {
        "name": PLAIN,
        "tokens_per_s": wall,
        "cpu_tokens_per_s": cpu,
        "round_ms": round_parts(plain),
        "new_tokens": sum(len(a.new_ids) for a in plain),
    }


def speed(answers: Sequence[Answer]) -> tuple[float, float]:
    """Tokens per second of wall clock and of CPU time: all tokens over all seconds."""
    tokens = sum(a.timed_tokens for a in answers)
    seconds, cpu = sum(a.seconds for a in answers), sum(a.cpu_seconds for a in answers)
    if not tokens:
        raise ValueError("nothing to time: every answer ended with its first token")
    return tokens / seconds, tokens / cpu


def round_parts(answers: Sequence[Answer]) -> dict[str, float]:
    """Milliseconds of a mean round by part; `other` is the loop's own bookkeeping."""
    rounds = max(1, sum(len(a.rounds) for a in answers))
    parts = {p: sum(a.parts[p] for a in answers) for p in answers[0].parts}
    parts["other"] = sum(a.seconds for a in answers) - sum(parts.values())
    return {p: 1000 * s / rounds for p, s in parts.items()}


def agreement(answers: Sequence[Answer], plain: Sequence[Answer]) -> dict[str, Any]:
    """How many answers equal plain's, in the dtype served.

    `largest_gap` is the largest one between plain's two best logits where an answer first differs;
    None where none does or its gaps were not kept.
    """
    gaps: list[float] = []
    for ours, theirs in zip(answers, plain, strict=True):
        if ours.new_ids == theirs.new_ids or theirs.gaps is None:
            continue
        first = next(
            i
            for i, pair in enumerate(zip(ours.new_ids, theirs.new_ids, strict=False))
            if len({*pair}) > 1
        )
        gaps.append(theirs.gaps[first])
    equal = sum(a.new_ids == p.new_ids for a, p in zip(answers, plain, strict=True))
    return {"equal": equal, "of": len(plain), "largest_gap": max(gaps, default=None)}


def _acceptance(answers: Sequence[Answer]) -> Acceptance:
    """Figures over rounds, the turns of one prompt taken together for the interval."""
    prompts: dict[str, list[Round]] = {}
    for a in answers:
        prompts.setdefault(a.prompt, []).extend(a.rounds)
    return acceptance(list(prompts.values()))


def _category(
    category: str, answers: Sequence[Answer], plain: Sequence[Answer]
) -> dict[str, Any] | None:
    chosen = [a for a in answers if a.category == category]
    base = [a for a in plain if a.category == category]
    if not any(a.rounds for a in chosen):
        return None
    figures = _acceptance(chosen)
    (wall, cpu), (plain_wall, plain_cpu) = speed(chosen), speed(base)
    return {
        "prompts": len({a.prompt for a in chosen}),
        "tau": figures.tau,
        "tau_interval": list(figures.tau_interval),
        "speedup": wall / plain_wall,
        "cpu_speedup": cpu / plain_cpu,
    }


def _by_source(answers: Sequence[Answer]) -> dict[str, dict[str, float]]:
    """Rounds and their tau by which drafter made the draft."""
    rounds = [r for a in answers for r in a.rounds]
    sources = sorted({r.source for r in rounds})
    table = {}
    for source in sources:
        emitted = [r.emitted for r in rounds if r.source == source]
        table[source or "none"] = {"rounds": len(emitted), "tau": sum(emitted) / len(emitted)}
    return table


def identity(
    target: Target,
    prompts: Sequence[Sequence[int]],
    drafters: Mapping[str, Drafter],
    settings: Settings,
) -> dict[str, dict[str, Any]]:
    """How many prompts get plain decoding's ids, by drafter; meant for a target in fp32."""
    plain = [answer(target, None, ids, settings, stream=i).ids for i, ids in enumerate(prompts)]
    dtype = str(target.dtype).removeprefix("torch.")
    table = {}
    for name, drafter in drafters.items():
        ours = [
            answer(target, drafter, ids, settings, stream=i).ids for i, ids in enumerate(prompts)
        ]
        equal = sum(a == b for a, b in zip(ours, plain, strict=True))
        table[name] = {
            "equal": equal,
            "of": len(plain),
            "new_tokens": settings.max_new_tokens,
            "dtype": dtype,
        }
    return table
