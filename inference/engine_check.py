"""Whether a serving engine drafts with an export what the head drafts here: drafts, texts and tau.

The engine runs in a Python of its own (`engine_vllm`), both sides decode greedily in float32 by
chains of one depth, and everything is compared: the first draft of every prompt, every later draft
that both made after the same text, the texts, and tau. It knows no layout: the head is given, and
the folder that was made of it.
"""

from __future__ import annotations

import copy
import json
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from drafthead.heads.base import DraftHead
from drafthead.inference.answering import end_ids
from drafthead.inference.decoder import decode
from drafthead.inference.grow import HeadDrafter
from drafthead.inference.lineup import fitted
from drafthead.inference.sampling import Sampler
from drafthead.inference.target import Target, load_target
from drafthead.inference.tree import Static, Tree

DRIVER = Path(__file__).with_name("engine_vllm.py")
DEPTH = 3
"""Of the chains of a head that drafts to any depth."""
TOLERANCE = 0.03
"""Of tau, relative: what may differ where a near tie is rounded the other way."""
SLOTS = 8
"""Sequences that are decoded together, on both sides."""
PATIENCE = 60
"""Seconds in which a Python says what it has."""

Drafts = list[tuple[int, list[int]]]
"""Of one prompt: how many new tokens it had, and what was drafted after them."""


class EngineError(ValueError):
    """The engine is not there, or did not do its work; one line that names its log."""


@dataclass(frozen=True)
class Job:
    """What one engine is to decode."""

    target: str
    """The target's folder."""
    draft: str
    """The folder of the export."""
    method: str
    """The engine's name for the kind of draft: eagle, eagle3, medusa, dflash, dspark."""
    depth: int
    """Tokens of a draft."""
    prompts: list[list[int]]
    new_tokens: int
    stop_ids: list[int] = field(default_factory=list)
    dtype: str = "float32"
    as_it_is: bool = False
    """Whether a fault of the engine's own is left in (see `engine_vllm`)."""


@dataclass(frozen=True)
class Decoded:
    """What one side made of the prompts."""

    tokens: list[list[int]]
    """The new ones of each prompt."""
    drafts: list[Drafts]
    rounds: int
    """Verifying forwards of all prompts: for the engine, by its own counter."""
    mended: str = ""
    """Fault of the engine's own that was kept out of the comparison."""

    @property
    def tau(self) -> float:
        """Tokens per round; the first token of a prompt takes none."""
        emitted = sum(len(new) - 1 for new in self.tokens)
        return emitted / self.rounds if self.rounds else 1.0


@dataclass(frozen=True)
class EngineResult:
    """How far an engine and the head here agree."""

    prompts: int
    first_drafts_equal: int
    """Prompts whose first draft is the same, token for token."""
    drafts: int
    """Drafts that both sides made after the same text, the first ones included."""
    drafts_equal: int
    texts_equal: int
    """Prompts whose text is the target's own greedy text."""
    engine_tau: float
    our_tau: float
    mended: str = ""
    """Fault of the engine's own that was kept out of the comparison."""

    @property
    def passed(self) -> bool:
        """Every first draft and text equal, and tau within TOLERANCE."""
        near = abs(self.engine_tau / self.our_tau - 1) <= TOLERANCE
        return self.first_drafts_equal == self.texts_equal == self.prompts and near

    def line(self) -> str:
        """All of it for a terminal."""
        return (
            f"engine {'agrees' if self.passed else 'DISAGREES'}: first drafts "
            f"{self.first_drafts_equal} of {self.prompts} equal, all drafts {self.drafts_equal} of "
            f"{self.drafts}, texts {self.texts_equal} of {self.prompts}; "
            f"tau {self.our_tau:.3f} here, {self.engine_tau:.3f} there"
            f"{f' (mended: {self.mended})' if self.mended else ''}"
        )


def check(
    target_folder: str,
    head: DraftHead,
    exported: Path,
    python: Path,
    prompts: list[list[int]],
    new_tokens: int,
    method: str,
) -> EngineResult:
    """Decode the prompts with the export in the engine and with the head here, and compare.

    head: with the weights that were exported, rounded as they were; it is left as it is. python: of
    the engine's environment. Drafts are as deep as the head can, or DEPTH. Raises EngineError.
    """
    depth = head.max_depth or DEPTH
    if new_tokens < depth + 2:
        raise ValueError(f"{new_tokens} new tokens hold no whole draft of {depth}: ask for more")
    target = load_target(target_folder, "float32")
    ends = end_ids(target)
    job = Job(target_folder, str(exported), method, depth, prompts, new_tokens, ends)
    (answer,) = run_engine(python, [job])
    if isinstance(answer, str):
        raise EngineError(answer)
    mine = fitted(copy.deepcopy(head).to(torch.float32), target)  # type: ignore[arg-type]
    return compared(chained(target, mine, prompts, depth, new_tokens, ends), answer)


def chained(
    target: Target,
    head: DraftHead,
    prompts: Sequence[Sequence[int]],
    depth: int,
    new_tokens: int,
    ends: Sequence[int] = (),
) -> Decoded:
    """What a bound head and its target make of the prompts, greedily by chains."""
    tokens: list[list[int]] = []
    drafts: list[Drafts] = []
    rounds = 0
    for at in range(0, len(prompts), SLOTS):
        some = prompts[at : at + SLOTS]
        drafter = _Noting(head, Static.chain(depth))
        rows, _ = decode(target, some, Sampler(), drafter, max_new_tokens=new_tokens, eos=ends)
        tokens += [row.new_ids for row in rows]
        rounds += sum(len(row.rounds) for row in rows)
        for noted, row in zip(drafter.noted, rows, strict=True):
            drafts.append([(length - row.prompt, ids) for length, ids in noted])
    return Decoded(tokens, drafts, rounds)


class _Noting(HeadDrafter):
    """Keeps what it proposed, by the length of the text so far."""

    def open(self, batch: int, capacity: int) -> None:
        super().open(batch, capacity)
        self.noted: list[Drafts] = [[] for _ in range(batch)]

    def propose(
        self, ids: Sequence[Sequence[int]], depths: Sequence[int], sampler: Sampler
    ) -> list[Tree]:
        trees = super().propose(ids, depths, sampler)
        for row, tree in enumerate(trees):
            if len(tree):
                self.noted[row].append((len(ids[row]), list(tree.tokens)))
        return trees


def compared(ours: Decoded, theirs: Decoded) -> EngineResult:
    """Set two sides' decoding of the same prompts against each other.

    Near the end a draft of ours is cut to what is still needed: as much of the engine's counts.
    """
    first = made = equal = 0
    for index, mine in enumerate(ours.drafts):
        texts, drafted = (ours.tokens[index], theirs.tokens[index]), dict(theirs.drafts[index])
        first += not mine and texts[0] == texts[1]  # a text of one token needs no draft
        for number, (length, ids) in enumerate(mine):
            if texts[0][:length] != texts[1][:length] or length not in drafted:
                continue
            same = drafted[length][: len(ids)] == ids
            made, equal, first = made + 1, equal + same, first + (same and number == 0)
    return EngineResult(
        prompts=len(ours.tokens),
        first_drafts_equal=first,
        drafts=made,
        drafts_equal=equal,
        texts_equal=sum(a == b for a, b in zip(ours.tokens, theirs.tokens, strict=True)),
        engine_tau=theirs.tau,
        our_tau=ours.tau,
        mended=theirs.mended,
    )


def check_engine(python: Path) -> None:
    """Refuse what is no Python of an environment with vLLM, before any work; EngineError."""
    look = "from importlib.util import find_spec; print(find_spec('vllm') is not None)"
    command = [*_isolated(python), "-c", look]
    try:
        seen = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=PATIENCE, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _no_python(python, error) from error
    if seen.stdout.strip() == "False":
        raise EngineError(f"{python}: a Python without vLLM; `make engine-vllm` builds one with it")
    if seen.stdout.strip() != "True":
        raise _no_python(python, None)


def _isolated(python: Path) -> list[str]:
    # Not resolved: the path of a virtual environment's Python is what says which one it is.
    return [str(python.expanduser().absolute()), "-I"]


def _no_python(python: Path, error: Exception | None) -> EngineError:
    reason = getattr(error, "strerror", None) or "it does not answer as one"
    return EngineError(
        f"{python}: no Python of an engine ({reason.lower()}); name the bin/python of an "
        "environment with vLLM; `make engine-vllm` builds one"
    )


def run_engine(python: Path, jobs: Sequence[Job]) -> list[Decoded | str]:
    """What an engine made of each job, or why it made nothing, in one line that names its log.

    Raises EngineError where the engine cannot be started.
    """
    folder = Path(tempfile.mkdtemp(prefix="drafthead-engine-"))
    asked, out, log = (folder / name for name in ("jobs.json", "out.json", "engine.log"))
    asked.write_text(json.dumps([asdict(job) for job in jobs]))
    command = [*_isolated(python), str(DRIVER), str(asked), str(out)]
    try:
        with log.open("w") as sink:
            ended = subprocess.run(command, stdout=sink, stderr=subprocess.STDOUT, check=False)
    except BaseException as error:  # interrupted, as a rule: there is nothing to look up
        shutil.rmtree(folder)
        if isinstance(error, OSError):
            raise _no_python(python, error) from error
        raise
    answers = json.loads(out.read_text())["jobs"] if out.is_file() else []
    made = [_decoded(answer, log) for answer in answers]
    if len(made) < len(jobs):
        last = (log.read_text(errors="replace").strip().splitlines() or ["no output"])[-1]
        reason = f"the engine ended with {ended.returncode} ({last.strip()[:200]}); see {log}"
        if not made:
            raise EngineError(reason)
        made += [reason] * (len(jobs) - len(made))
    if all(isinstance(answer, Decoded) for answer in made):
        shutil.rmtree(folder)  # the log is only wanted where something failed
    return made


def _decoded(answer: dict[str, Any], log: Path) -> Decoded | str:
    if "error" in answer:
        return f"the engine refused the export ({answer['error'][:300]}); see {log}"
    drafts = [[(length, ids) for length, ids in rounds] for rounds in answer["rounds"]]
    # What is drafted after the last token of a prompt is never verified.
    seen, counted = sum(max(0, len(d) - 1) for d in drafts), int(answer["drafts"])
    if seen != counted:
        return f"the engine counts {counted} verified drafts, {seen} were seen made; see {log}"
    return Decoded(answer["tokens"], drafts, counted, answer["mended"])
