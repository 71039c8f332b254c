"""A target that runs every context once: what thousands of short texts after one prompt need.

Shapes: B rows, n tokens of one forward, V vocabulary, L * D captured features.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from drafthead.inference.store import Store
from drafthead.inference.target import Output, Target
from drafthead.inference.tree import Tree

LENGTH = 3
"""Tokens of a text; rows that have so many are done."""
AT_ONCE = 64
"""Texts that the target is shown as one tree."""
MOST_AHEAD = LENGTH + 3
"""Tokens of the longest text that is looked at, drafts included."""

Text = tuple[int, ...]
"""What stands behind the prompt."""


class Remembered(Target):
    """Runs a text by the target's own verify pass when it is first met, and gives that again.

    It decodes rows of one prompt, with less than `LENGTH` tokens behind it and drafts behind those;
    rows that are done get zeros.
    """

    def __init__(self, target: Target, prompt: Sequence[int], layers: Sequence[int]) -> None:
        self.__dict__.update(target.__dict__)
        self.prompt, self.captured = tuple(prompt), tuple(layers)
        self._store = super().open(1, len(prompt) + AT_ONCE * MOST_AHEAD)
        super().prefill(self._store, 0, self.prompt[:-1])
        self._start = super().prefill(super().open(1, len(prompt)), 0, self.prompt, self.captured)
        self._known: dict[Text, tuple[Tensor, Tensor | None]] = {}

    def after(self, texts: Sequence[Text]) -> list[tuple[Tensor, Tensor | None]]:
        """Logits (V,) and features (L * D,) at the last token of each text behind the prompt.

        Those not seen yet are run as one tree below the prompt's last token.
        """
        new = list(dict.fromkeys(text for text in texts if text not in self._known))
        for first in range(0, len(new), AT_ONCE):
            self._run(new[first : first + AT_ONCE])
        return [self._known[text] for text in texts]

    def _run(self, texts: Sequence[Text]) -> None:
        ways = sorted({text[:end] for text in texts for end in range(1, len(text) + 1)}, key=len)
        number = {(): -1} | {text: node for node, text in enumerate(ways)}
        tree = Tree([text[-1] for text in ways], [number[text[:-1]] for text in ways])
        out = super().verify(self._store, self.prompt[-1:], [tree], self.captured)
        for text, node in number.items():
            features = None if out.features is None else out.features[0, node + 1]
            self._known[text] = out.logits[0, node + 1], features

    def open(self, batch: int, capacity: int) -> Store:
        return _Texts(self.num_layers, batch, capacity)

    def prefill(
        self, store: Store, row: int, ids: Sequence[int], layers: Sequence[int] = ()
    ) -> Output:
        assert isinstance(store, _Texts)
        store.texts[row] = ()
        return Output(self._start.logits, self._start.features if layers else None)

    def verify(
        self, store: Store, roots: Sequence[int], trees: Sequence[Tree], layers: Sequence[int] = ()
    ) -> Output:
        assert isinstance(store, _Texts)
        asked: list[list[Text]] = []
        for row, (root, tree) in enumerate(zip(roots, trees, strict=True)):
            store.run[row] = [root, *tree.tokens]
            text = (*store.texts[row], root)
            done = len(text) >= LENGTH
            asked.append([] if done else [text, *((*text, *path) for path in tree.paths)])
        self.after([text for texts in asked for text in texts])
        like, features = self.after([()])[0]
        n = 1 + max(map(len, trees))
        logits = like.new_zeros(len(roots), n, len(like))
        states = None if features is None else features.new_zeros(len(roots), n, len(features))
        for row, texts in enumerate(asked):
            for i, (at, seen) in enumerate(self.after(texts)):
                logits[row, i] = at
                if states is not None and seen is not None:
                    states[row, i] = seen
        return Output(logits, states if layers else None)


class _Texts(Store):
    """What each row has committed behind the prompt, in place of its keys and values."""

    def __init__(self, num_layers: int, batch: int, capacity: int) -> None:
        super().__init__(num_layers, batch, capacity)
        self.texts: list[Text] = [()] * batch
        self.run: list[list[int]] = [[] for _ in range(batch)]
        """Tokens of the last verify pass, the root first."""

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        for row, path in enumerate(paths):
            self.texts[row] += tuple(self.run[row][node] for node in path)
