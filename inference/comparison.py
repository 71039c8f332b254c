"""What an evaluation is asked for: target, drafters, prompts, and the grid that is measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from drafthead.heads.base import DraftHead
from drafthead.inference.answering import Settings
from drafthead.inference.lineup import loaded
from drafthead.inference.log import Cell
from drafthead.inference.target import Target


@dataclass(frozen=True)
class Comparison:
    """What to evaluate."""

    target: str
    dtype: str
    head: Path | Mapping[str, Path] | None = None
    """Folder of one, which is called `head`, or several by name."""
    sibling: str | Mapping[str, str] | None = None
    """Folder or Hub id of a smaller model that drafts, too, or several by name."""
    prompts: tuple[str, ...] = ("samples/test",)
    """Prompt files; `samples/NAME` is an embedded one."""
    trees: tuple[str, ...] = ()
    """Heads and siblings draft with each; the first also serves in their merged drafters. Without
    any, each drafts what was tuned for it, else a chain (`grow.drafting`)."""
    lookup: bool = True
    """Whether prompt lookup drafts as well, alone and merged with each head."""
    limit: int | None = None
    """Most prompts, taken from the categories in turn."""
    identity: int = 4
    """Prompts on which every drafter is compared with plain decoding in float32."""
    identity_tokens: int = 32
    settings: Settings = field(default_factory=Settings)
    temperatures: tuple[float, ...] = ()
    """Without any, that of the settings."""
    batches: tuple[int, ...] = (1,)
    repeats: int = 1
    against: str | None = None
    """Another target on which the heads are tried, too (`drift`)."""

    @property
    def heads(self) -> dict[str, Path]:
        if self.head is None:
            return {}
        return dict(self.head) if isinstance(self.head, Mapping) else {"head": self.head}

    @property
    def siblings(self) -> dict[str, str]:
        if self.sibling is None:
            return {}
        return {"sibling": self.sibling} if isinstance(self.sibling, str) else dict(self.sibling)

    @property
    def cells(self) -> list[Cell]:
        """The grid in the order in which it is measured: all of it, then all of it again."""
        temperatures = self.temperatures or (self.settings.temperature,)
        return [
            Cell(repeat, temperature, batch)
            for repeat in range(1, self.repeats + 1)
            for temperature in dict.fromkeys(temperatures)
            for batch in dict.fromkeys(self.batches)
        ]

    def at(self, temperature: float) -> Settings:
        return replace(self.settings, temperature=temperature)


def models(asked: Comparison, dtype: str) -> tuple[Target, dict[str, DraftHead]]:
    """Target, and what drafts for it by name, heads first."""
    return loaded(asked.target, dtype, asked.heads, asked.siblings)
