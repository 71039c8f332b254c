"""Where the seconds go: a stopwatch with named, nesting parts. It knows nothing of training."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Stopwatch:
    """Adds up seconds by part; a part inside another is taken out of the outer one."""

    def __init__(self, settle: Callable[[], None] | None = None) -> None:
        """`settle` waits for work that runs beside the clock (a GPU's queue)."""
        self.seconds: dict[str, float] = {}
        self._settle = settle or (lambda: None)
        self._inner = [0.0]

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count the time inside the block as `name`."""
        self._settle()
        start = time.perf_counter()
        self._inner.append(0.0)
        try:
            yield
        finally:
            self._settle()
            spent = time.perf_counter() - start
            inside = self._inner.pop()
            self._inner[-1] += spent
            self.seconds[name] = self.seconds.get(name, 0.0) + spent - inside

    def shares(self) -> dict[str, float]:
        """Each part's share of all counted seconds."""
        total = sum(self.seconds.values())
        return {name: spent / total for name, spent in self.seconds.items()} if total else {}
