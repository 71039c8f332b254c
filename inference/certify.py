"""The losslessness certificate of a head and a target: the list of checks, and what it comes to.

All but one run in `float32`, where equality can be asked for (in `float64` where the target is
tiny); that one runs in the dtype that serves. Whatever a check compares with is the target's own:
transformers' loop, plain forwards, a fresh prefill. Controls run the same checks with a fault.
"""

from __future__ import annotations

import gc
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from drafthead.heads.contract import fingerprint
from drafthead.inference import checks_faults as faults
from drafthead.inference.checks_drafters import Scripted
from drafthead.inference.checks_law import ALPHA, Case, Law, by_guess, cases_of, check_law, law_of
from drafthead.inference.checks_remembered import Remembered
from drafthead.inference.checks_seed import SETTINGS, by_slot, by_stream, check_seeds
from drafthead.inference.checks_store import check_store
from drafthead.inference.checks_subject import Check, Subject, shapes_for
from drafthead.inference.checks_text import by_both, by_decoder, check_texts, truths
from drafthead.inference.drafters import Drafter
from drafthead.inference.grow import HeadDrafter
from drafthead.inference.lineup import fitted, opened
from drafthead.inference.openings import first_turns
from drafthead.inference.rounding import Rounding, Truth, rounding
from drafthead.inference.sampling import Sampler
from drafthead.inference.store import Store
from drafthead.inference.target import load_target
from drafthead.inference.verify import RULES

EXACT_RULES = tuple(name for name, rule in RULES.items() if rule.exact)
TINY = 20_000_000
"""Up to so many weights the exact checks run in float64."""
SHORTEST = 4
"""Tokens of a text in which a draft can be kept and what follows be wrong."""
CANDIDATES = 24
"""Prompts, over all categories, of which the shortest are taken: time goes into tokens written."""


@dataclass(frozen=True)
class Size:
    """How much is checked: under four minutes of CPU for a target of 135M."""

    prompts: int = 4
    new_tokens: int = 24
    seed_tokens: int = 10
    draws: int = 1000
    """Sampled texts of each rule."""


@dataclass(frozen=True)
class Asked:
    """What to certify."""

    target: str
    head: Path
    dtype: str
    """The dtype that serves."""
    prompts: tuple[str, ...] = ("samples/test",)
    rules: tuple[str, ...] = EXACT_RULES
    seed: int = 0
    size: Size = field(default_factory=Size)


@dataclass(frozen=True)
class Planted:
    """A fault that shows in sampled texts; without it, its case is one of those checked."""

    name: str
    case: Case


PLANTED = (
    Planted("likely tokens called draws", by_guess("rejection", guess=faults.SoftGuess)),
    Planted("one stream of numbers for all", by_guess("block", noise=faults.OneStream)),
)


class Bench:
    """A subject on the bench: what several checks share is made once, when first asked for."""

    def __init__(self, subject: Subject, size: Size, rules: Sequence[str] = EXACT_RULES) -> None:
        self.subject, self.size = subject, size
        self.cases = [case for case in cases_of(subject.head) if case.rule in rules]
        self.planted = [fault for fault in PLANTED if fault.case.rule in rules]
        self._laws: dict[int, Check] = {}

    @cached_property
    def truths(self) -> list[Truth]:
        """ValueError where the texts are so short that a fault could not show in them."""
        found = truths(self.subject, self.size.new_tokens)
        longest = max(len(truth.new) for truth in found)
        if longest < min(SHORTEST, self.size.new_tokens):
            raise ValueError(
                f"the target's answers to these prompts end with their token {longest} at the "
                "latest, too soon to check drafts in them: give prompts with longer answers"
            )
        return found

    @cached_property
    def rounding(self) -> Rounding:
        return rounding(self.subject.target, self.truths)

    @cached_property
    def drafters(self) -> dict[str, Drafter]:
        return self.subject.drafters()

    @cached_property
    def scripted(self) -> Drafter:
        texts = [truth.ids for truth in self.truths]
        return Scripted(texts, self.subject.target.vocab_size)

    @cached_property
    def law(self) -> Law:
        longest = max(self.subject.prompts, key=len)
        return law_of(self.subject.target, longest, self.size.draws)

    @cached_property
    def known(self) -> Remembered:
        layers = self.subject.head.contract.layers
        return Remembered(self.subject.target, self.law.prompt, layers)

    def law_check(self, number: int) -> Check:
        """The check of one of the cases; controls ask for it again."""
        if number not in self._laws:
            self._laws[number] = self.law_of(self.cases[number], number)
        return self._laws[number]

    def law_of(self, case: Case, number: int) -> Check:
        draws = self.size.draws
        return check_law(self.subject, self.known, self.law, case, draws, self.alpha, number)

    @property
    def alpha(self) -> float:
        return ALPHA / (len(self.cases) + len(self.planted))


Job = Callable[[Bench], Check]


def exact_jobs(bench: Bench) -> list[Job]:
    """The checks in float32 or float64, and their controls."""
    jobs: list[Job] = [greedy]
    if any(case.rule == "coupled" for case in bench.cases):
        jobs.append(seeds)
    jobs += [_law_job(number) for number in range(len(bench.cases))]
    jobs += [stored, wrong_node, kept_slot, seen_sibling]
    if any(case.rule == "coupled" for case in bench.cases):
        jobs.append(keyed_by_slot)
    return jobs + [_planted_job(fault) for fault in bench.planted]


SERVING_JOBS: tuple[Job, ...] = (
    lambda bench: _greedy(bench, "first differences in the serving dtype"),
    lambda bench: wrong_node(bench, ", in the serving dtype"),
)


def certify(
    asked: Asked,
    *,
    progress: Callable[[int, int], None] = lambda done, total: None,
    stage: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Run all checks; the certificate as it is written to `certificate.json`."""
    check_rules(asked.rules)
    stage = _once(stage)  # prompts are read for each dtype anew
    began, cpu = time.perf_counter(), time.process_time()
    stage(f"loading {asked.target} for exact checks")
    subject = load(asked, "float64" if asked.dtype == "float64" else "float32", stage)
    if not subject.exact and subject.target.num_weights <= TINY:
        subject = load(asked, "float64", stage)
    bench, about = Bench(subject, asked.size, asked.rules), _about(asked, subject)
    jobs, serving = exact_jobs(bench), asked.dtype != subject.dtype
    total = len(jobs) + len(SERVING_JOBS) * serving
    checks: list[Check] = []

    def work(jobs: Sequence[Job], bench: Bench) -> None:
        for job in jobs:
            checks.append(job(bench))
            progress(len(checks), total)

    work(jobs, bench)
    del subject, bench  # before the copies in the other dtype are made
    gc.collect()
    if serving:
        work(SERVING_JOBS, Bench(load(asked, asked.dtype, stage), asked.size))
    return {
        "passed": all(check.passed for check in checks),
        "checks": [asdict(check) for check in checks],
        **about,
        "seconds": round(time.perf_counter() - began, 1),
        "cpu_seconds": round(time.process_time() - cpu, 1),
    }


def _once(stage: Callable[[str], None]) -> Callable[[str], None]:
    """The same, but that it says nothing twice."""
    said: set[str] = set()

    def once(text: str) -> None:
        if text not in said:
            said.add(text)
            stage(text)

    return once


def check_rules(rules: Sequence[str]) -> None:
    """Refuse rules that are unknown, or that promise nothing to certify; ValueError."""
    for name in rules:
        if name not in RULES:
            raise ValueError(f"rule {name!r}: choose one of {', '.join(EXACT_RULES)}")
        if not RULES[name].exact:
            raise ValueError(
                f"rule {name!r} is lossy: it changes the text, so there is nothing to certify; "
                f"choose one of {', '.join(EXACT_RULES)}"
            )


def load(asked: Asked, dtype: str, stage: Callable[[str], None]) -> Subject:
    """Target, bound head and prompts; a head that adapts its target does so here."""
    head = opened(asked.head, dtype)
    target = load_target(asked.target, dtype)
    head = fitted(head, target)
    template, room = head.contract.template_kwargs, asked.size.new_tokens
    prompts = first_turns(target, asked.prompts, CANDIDATES, room, template, stage)
    shortest = sorted(prompts, key=len)[: asked.size.prompts]
    return Subject(target, head, shortest, asked.seed)


def _about(asked: Asked, subject: Subject) -> dict[str, Any]:
    """What was certified, with what."""
    head, contract = subject.head, subject.head.contract
    adapts = head.settings.adapts
    name = f"{contract.target} as adapted by the head" if adapts else contract.target
    return {
        "target": {
            "name": name,
            "folder": asked.target,
            "adapted": adapts,
            "fingerprint": contract.fingerprint,
        },
        "head": {
            "folder": str(asked.head),
            "type": head.settings.type,
            "fingerprint": fingerprint(head),
        },
        "dtypes": {"exact": subject.dtype, "serving": asked.dtype},
        "rules": list(asked.rules),
        "seed": asked.seed,
        "size": asdict(asked.size),
        "versions": {
            "python": platform.python_version(),
            "machine": f"{platform.machine()}, {torch.get_num_threads()} threads",
            **{name: version(name) for name in ("drafthead", "torch", "transformers")},
        },
    }


# The checks


def greedy(bench: Bench) -> Check:
    return _greedy(bench, "greedy text")


def _greedy(bench: Bench, name: str) -> Check:
    write = by_both(bench.subject, bench.size.new_tokens)
    drafters = {**bench.drafters, "scripted": bench.scripted}
    return check_texts(name, bench.subject, bench.truths, bench.rounding, drafters, write)


def seeds(bench: Bench) -> Check:
    return check_seeds(bench.subject, bench.rounding, bench.drafters, bench.size.seed_tokens)


def _law_job(number: int) -> Job:
    return lambda bench: bench.law_check(number)


def stored(bench: Bench) -> Check:
    head = bench.subject.head
    _, _, best = shapes_for(head)
    drafters = {f"head {best}": HeadDrafter(head, best), "scripted": bench.scripted}
    return check_store(bench.subject, bench.truths, bench.rounding, drafters)


# Controls


def wrong_node(bench: Bench, where: str = "") -> Check:
    def run(faulty: bool) -> Check:
        sampler = faults.WrongNode if faulty else Sampler
        write = by_decoder(bench.subject, bench.size.new_tokens, sampler)
        drafters = {"scripted": bench.scripted}
        return check_texts(
            "greedy text", bench.subject, bench.truths, bench.rounding, drafters, write
        )

    return faults.control(f"the target's token from the wrong node{where}", run)


def kept_slot(bench: Bench) -> Check:
    def run(faulty: bool) -> Check:
        store = faults.FirstBranch if faulty else Store
        drafters = {"scripted": bench.scripted}
        return check_store(bench.subject, bench.truths, bench.rounding, drafters, store=store)

    return faults.control("a store that keeps a refused slot", run)


def seen_sibling(bench: Bench) -> Check:
    def run(faulty: bool) -> Check:
        target = bench.subject.target
        seeing = faults.SeesSiblings(target) if faulty else target
        drafters = {"scripted": bench.scripted}
        return check_store(bench.subject, bench.truths, bench.rounding, drafters, target=seeing)

    return faults.control("a draft that sees its siblings", run)


def keyed_by_slot(bench: Bench) -> Check:
    def run(faulty: bool) -> Check:
        key = by_slot if faulty else by_stream
        tokens = bench.size.seed_tokens
        return check_seeds(bench.subject, bench.rounding, {}, tokens, SETTINGS[1:], key)

    return faults.control("noise that belongs to a place in the batch", run)


def _planted_job(fault: Planted) -> Job:
    def job(bench: Bench) -> Check:
        def run(faulty: bool) -> Check:
            names = [(case.rule, case.drafts) for case in bench.cases]
            number = names.index((fault.case.rule, fault.case.drafts))
            return bench.law_of(fault.case, number) if faulty else bench.law_check(number)

        return faults.control(f"{fault.name}, rule {fault.case.rule}", run)

    return job
