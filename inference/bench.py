"""What is measured and with what: the grid, and what is told beside its figures.

Everything that takes time goes through a journal's `keep`, so that a run that was stopped does it
once. It makes no figure of rounds: that is `records`' part.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from importlib.metadata import version
from typing import Any

import torch

from drafthead.data.chat import ChatFormat
from drafthead.data.conversations import Prompt
from drafthead.heads.base import DraftHead
from drafthead.heads.contract import fingerprint
from drafthead.inference.agreement import agreement_of
from drafthead.inference.comparison import Comparison, models
from drafthead.inference.costs import measure
from drafthead.inference.decoder import check_prompt
from drafthead.inference.evaluate import (
    PLAIN,
    WARM_UP,
    Answer,
    Measured,
    evaluate,
    text_of,
)
from drafthead.inference.grow import HeadDrafter
from drafthead.inference.identity import identity
from drafthead.inference.lineup import head_folder, line_up, names_of, template_of
from drafthead.inference.log import Cell, Journal
from drafthead.inference.machine import machine
from drafthead.inference.samples import samples
from drafthead.inference.target import Target
from drafthead.inference.tree import TreeShape
from drafthead.inference.tuning import as_dict, fitting, folder_of
from drafthead.inference.verify import RULES

TOLD = {
    "speed": "tokens and seconds of the rounds; prefill and its token are left out on every side",
    "warm_up": f"{WARM_UP} tokens of every side, not counted",
    "first_token": "prefill alone, which speculation does not shorten",
    "batch_seconds": "a round's seconds are shared equally by the rows that ran in it",
}
"""How the clock was read."""


class Bench:
    """What is measured, and with what."""

    def __init__(
        self,
        asked: Comparison,
        target: Target,
        heads: Mapping[str, DraftHead],
        shapes: Sequence[TreeShape],
        prompts: Sequence[Prompt],
        own: Mapping[int, Mapping[str, TreeShape]] | None = None,
    ) -> None:
        """`own`: shapes by batch and head where `shapes` is empty, in place of tuned ones."""
        self.asked, self.shapes, self.prompts = asked, shapes, prompts
        self.target, self.heads = target, dict(heads)
        self.template = template_of(heads)
        self.contract = target.contract(())
        self.weights = {name: fingerprint(head) for name, head in self.heads.items()}
        assert target.tokenizer is not None
        self.tokenizer = target.tokenizer
        rule = asked.settings.rule
        self.drafters = {
            b: line_up(
                target,
                heads,
                shapes,
                batch=b,
                rule=rule,
                own=(own or {}).get(b),
                lookup=asked.lookup,
            )
            for b in asked.batches
        }
        self.own = {
            b: {name: d.shape for name, d in found.items() if isinstance(d, HeadDrafter)}
            for b, found in self.drafters.items()
        }
        """What each head drafts, by batch and the drafter's name."""

    def release(self) -> None:
        """Give up the target and what drafts for it: there may be no room for another one."""
        vars(self).pop("target", None)
        self.heads.clear()
        self.drafters.clear()

    def header(self) -> dict[str, Any]:
        """Everything that decides the result, but for the machine and the versions."""
        asked = self.asked
        prompts = json.dumps([asdict(p) for p in self.prompts]).encode()
        return {
            "target": self.contract.fingerprint,
            "template": self.contract.template,
            "dtype": asked.dtype,
            "drafters": self.weights,
            "trees": {b: {n: str(s) for n, s in d.items()} for b, d in self.own.items()},
            "lookup": asked.lookup,
            "prompts": hashlib.sha256(prompts).hexdigest(),
            "settings": asdict(asked.settings),
            "temperatures": list(dict.fromkeys(cell.temperature for cell in asked.cells)),
            "batches": list(asked.batches),
            "repeats": asked.repeats,
            "identity": [asked.identity, asked.identity_tokens],
        }

    def measured(self, kept: Journal, progress: Callable[[int, int], None]) -> dict[Cell, Measured]:
        """The whole grid."""
        turns = sum(len(prompt.turns) for prompt in self.prompts)
        cells = self.asked.cells
        found: dict[Cell, Measured] = {}
        for number, cell in enumerate(cells):
            told = partial(_counted, progress, number * turns, len(cells) * turns)
            found[cell] = evaluate(
                self.target,
                self.prompts,
                self.drafters[cell.batch],
                self.asked.at(cell.temperature),
                batch=cell.batch,
                first=cell.repeat - 1,
                template_kwargs=self.template,
                keep=kept.below(f"{cell.repeat}/{cell.temperature}/{cell.batch}"),
                progress=told,
            )
        return found

    def described(self) -> dict[str, Any]:
        """The setting, as the result tells it."""
        asked, target = self.asked, self.target
        return {
            "target": {
                "name": self.contract.target,
                "dtype": asked.dtype,
                "parameters": target.num_weights,
                "layers": target.num_layers,
                "vocab_size": target.vocab_size,
                "fingerprint": self.contract.fingerprint,
            },
            "heads": {name: self._head(name, head) for name, head in self.heads.items()},
            "tuning": self._tunings(),
            "prompts": len(self.prompts),
            "turns": sum(len(prompt.turns) for prompt in self.prompts),
            "files": list(asked.prompts),
            "new_tokens": asked.settings.max_new_tokens,
            "settings": asdict(asked.settings)
            | {
                "temperatures": list(dict.fromkeys(c.temperature for c in asked.cells)),
                "batches": list(asked.batches),
            }
            | TOLD,
            "trees": list(dict.fromkeys(str(s) for d in self.own.values() for s in d.values())),
            "dtype": asked.dtype,
            "repeats": asked.repeats,
            "lossy": asked.settings.lossy,
            "machine": machine(target.device),
            "versions": versions(),
        }

    def _head(self, name: str, head: DraftHead) -> dict[str, Any]:
        folder = self.asked.heads.get(name)
        place = self.asked.siblings.get(name) if folder is None else head_folder(folder)
        return {
            "folder": str(place),
            "type": head.config.model_type.removeprefix("drafthead_"),
            "parameters": sum(parameter.numel() for parameter in head.parameters()),
            "fingerprint": self.weights[name],
            "contract": head.contract.model_dump(mode="json"),
        }

    def _tunings(self) -> dict[str, Any]:
        """What was tuned for each head here, by name; none for a head that was not."""
        found = {n: fitting(folder_of(h), self.target, h) for n, h in self.heads.items()}
        return {
            name: as_dict(tuning) | {"file": str(path)}
            for name, pair in found.items()
            if pair is not None
            for path, tuning in [pair]
        }

    def beside(
        self, measured: Mapping[Cell, Measured], kept: Journal, stage: Callable[[str], None]
    ) -> dict[str, Any]:
        """What is told beside the figures: simulated tau, costs of forwards, and a few texts."""
        first = next(iter(measured.values())).answers
        shown = {name: a for name, a in first.items() if name not in (PLAIN, "lookup")}
        plain = next((m.answers[PLAIN] for m in measured.values() if m.answers[PLAIN]), [])
        if not plain:
            raise ValueError(f"no prompt could be answered: {first_reason(measured)}")
        stage("timing forwards of the target, and simulating chains")
        return {
            "simulated": kept.keep("simulated", partial(self._simulated, measured)),
            "costs": {
                str(b): kept.keep(f"costs/{b}", partial(self._costs, b))
                for b in self.asked.batches
                if self.heads
            },
            "samples": samples(shown, self.tokenizer),
            "sample": text_of(self.target, plain[0]),
        }

    def _simulated(self, measured: Mapping[Cell, Measured]) -> dict[str, Any]:
        """What each head's chains should come to on the greedy answers that they decoded."""
        answers = next(
            (m.answers for c, m in measured.items() if (c.temperature, c.batch) == (0, 1)), {}
        )
        found = {}
        for name, drafter in self.drafters.get(1, {}).items():
            given = answers.get(name, [])
            if (
                isinstance(drafter, HeadDrafter)
                and is_plain_chain(drafter.shape)
                and any(a.rounds for a in given)
            ):
                found[name] = agreement_of(drafter.head, self.target, given, drafter.shape)
        return found

    def _costs(self, batch: int) -> dict[str, Any]:
        """Seconds of a forward of the target by tokens per row."""
        most = max(drafter.nodes for drafter in self.drafters[batch].values())
        head = next(iter(self.heads.values()))
        found = measure(self.target, head, batch=batch, most=most)
        return {"tokens": list(found.tokens), "seconds": list(found.seconds)}

    def texts(self, given: Answer) -> str:
        """What an answer says, without special tokens."""
        return str(self.tokenizer.decode(given.new_ids, skip_special_tokens=True))

    def identical(
        self, kept: Journal, stage: Callable[[str], None]
    ) -> dict[tuple[float, int], dict[str, Any]]:
        """By temperature and batch: how many prompts get plain decoding's ids in float32."""
        asked = self.asked
        wanted = {(c.temperature, c.batch) for c in asked.cells if same_draw(asked, c.temperature)}
        if not asked.identity or not wanted:
            return {}
        stage("comparing with plain decoding in float32")
        full: list[Bench] = []  # loaded once, and only where something is not kept

        def compared(temperature: float, batch: int) -> dict[str, Any]:
            if not full:
                full.append(self._in_float32())
            return full[0]._identity(temperature, batch)

        return {
            (t, b): kept.keep(f"identity/{t}/{b}", partial(compared, t, b))
            for t, b in sorted(wanted)
        }

    def _in_float32(self) -> Bench:
        """The same in float32, in this one's place."""
        self.release()
        return Bench(
            self.asked, *models(self.asked, "float32"), self.shapes, self.prompts, self.own
        )

    def _identity(self, temperature: float, batch: int) -> dict[str, Any]:
        asked = self.asked
        tokens = min(asked.identity_tokens, asked.settings.max_new_tokens)
        settings = replace(asked.at(temperature), max_new_tokens=tokens)
        chat = ChatFormat(self.tokenizer, self.template)
        ids: list[list[int]] = []
        for prompt in self.prompts:
            if len(ids) == asked.identity:
                break
            try:
                one = chat.prompt_ids(prompt.opening)
                check_prompt(self.target, one, tokens)
            except ValueError:  # it is among the failed
                continue
            ids.append(one)
        return identity(self.target, ids, self.drafters[batch], settings, batch=batch)

    def drifts(
        self, measured: Mapping[Cell, Measured], kept: Journal, stage: Callable[[str], None]
    ) -> dict[str, Any] | None:
        """What the heads lose on the other target, by name where there are several."""
        asked = self.asked
        if asked.against is None:
            return None
        found = {
            name: kept.keep(
                f"drift/{asked.against}/{name}", partial(self._drift, name, measured, stage)
            )
            for name in asked.heads
        }
        return found if len(found) > 1 else next(iter(found.values()))

    def _drift(
        self, name: str, measured: Mapping[Cell, Measured], stage: Callable[[str], None]
    ) -> dict[str, Any]:
        """On the answers of the first cell; with the first of several shapes."""
        from drafthead.inference.drift import drift

        assert self.asked.against is not None
        cell, first = next(iter(measured.items()))
        shapes = self.own[cell.batch]
        drafter = names_of(name, self.shapes)[0]
        self.release()  # it loads its own
        return drift(
            head_folder(self.asked.heads[name]),
            self.asked.target,
            self.asked.against,
            self.prompts,
            shapes[drafter],
            self.asked.at(cell.temperature),
            dtype=self.asked.dtype,
            batch=cell.batch,
            before=first.answers[drafter],
            stage=stage,
        )


def _counted(
    progress: Callable[[int, int], None], before: int, total: int, done: int, _: int
) -> None:
    """Tell of the turns of one cell as of all."""
    progress(before + done, total)


def same_draw(asked: Comparison, temperature: float) -> bool:
    """Whether every drafter's text is to be plain decoding's own.

    Ratio rules keep the target's law, not plain decoding's very draw from it.
    """
    rule = asked.settings.rule
    return rule == "coupled" or (temperature == 0 and RULES[rule].exact)


def first_reason(measured: Mapping[Cell, Measured]) -> str:
    """Why the first turn that failed did so."""
    failed = [failure for m in measured.values() for failure in m.failed]
    return f"prompt {failed[0].prompt!r}: {failed[0].reason}" if failed else "there is none"


def is_plain_chain(shape: TreeShape) -> bool:
    """Whether every round drafts all of a chain, which is what can be simulated."""
    return bool(shape.nodes) and shape.is_chain and getattr(shape, "stop", None) is None


def versions() -> dict[str, str]:
    """What the figures were measured with."""
    packages = ("drafthead", "torch", "transformers", "accelerate")
    return {
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {torch.get_num_threads()} threads",
        **{name: version(name) for name in packages},
    }
