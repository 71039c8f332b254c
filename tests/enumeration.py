"""Exact laws of random code: every outcome of every draw is followed, with its probability.

`outcomes` runs the same function again and again, each time down another branch, so that what is
enumerated is the very code that decodes, and drafting with it. Laws are float64, V tokens.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import TypeVar

import torch
from torch import Tensor

from drafthead.inference.tree import Tree
from drafthead.inference.verify import Chance, LawAfter, without

Text = tuple[int, ...]
Table = Callable[[Text], Tensor]
"""A law (V,) for every text."""
Verdict = tuple[list[int], int]
Rule = Callable[[Tree, LawAfter, Chance], Verdict]
Result = TypeVar("Result")


class Fork:
    """Chance that follows a script, then takes the first outcomes; notes the other ones."""

    def __init__(self, script: Sequence[int]) -> None:
        self.probability = 1.0
        self.others: list[tuple[int, ...]] = []
        self.asked: set[tuple[int, int]] = set()
        self._script, self._taken = script, ()

    def _branch(self, shares: Sequence[float]) -> int:
        possible = [i for i, share in enumerate(shares) if share > 0]
        if len(self._taken) < len(self._script):
            taken = self._script[len(self._taken)]
        else:
            taken = possible[0]
            self.others += [(*self._taken, other) for other in possible[1:]]
        self._taken += (taken,)
        self.probability *= shares[taken]
        return taken

    def accept(self, probability: float, depth: int, sibling: int = 0) -> bool:
        assert (depth, sibling) not in self.asked, "keyed noise would give the same number twice"
        self.asked.add((depth, sibling))
        return self._branch([1 - probability, probability]) == 1

    def draw(self, law: Tensor, depth: int) -> int:
        return self.pick(law)

    def pick(self, law: Tensor) -> int:
        """A drafter's draw."""
        return self._branch((law / law.sum()).tolist())


def outcomes(run: Callable[[Fork], Result]) -> Iterator[tuple[float, Result]]:
    """Every way `run` can go: its probability and its result."""
    scripts: list[tuple[int, ...]] = [()]
    while scripts:
        fork = Fork(scripts.pop())
        result = run(fork)
        scripts += fork.others
        yield fork.probability, result


def table(V: int, seed: int, sharpness: float = 1.3, zeros: bool = False) -> Table:
    """Laws of which no two are alike; `zeros` takes one token out of each, as top-k does."""
    known: dict[Text, Tensor] = {}

    def law(text: Text) -> Tensor:
        if text not in known:
            key = seed + sum((t + 1) * 11 ** (i + 1) for i, t in enumerate(text))
            generator = torch.Generator().manual_seed(key)
            logits = sharpness * torch.randn(V, generator=generator, dtype=torch.float64)
            if zeros:
                logits[logits.argmin()] = -math.inf
            known[text] = logits.softmax(-1)
        return known[text]

    return law


# Drafts

Law = dict[Text, float]
Nodes = Sequence[tuple[int, str]]
"""Of a tree's shape: each node's parent, and the name of the law that it is drawn from; `guess`
names none: the node is a fixed guess."""
Drafts = Callable[[Text, Fork], Tree]


def chain_of(length: int, law: str = "q") -> Nodes:
    return [(node - 1, law) for node in range(length)]


def grown(nodes: Nodes, tables: dict[str, Table], lazy: bool = False) -> Drafts:
    """Trees of a fixed shape, drawn from tables; a guess is the likeliest token of its table.

    `lazy`: a node is drawn when a rule first looks at it. A rule that looks at few nodes has few
    outcomes then, however large the tree.
    """

    def drafts(text: Text, fork: Fork) -> Tree:
        drawing = _Drawing(nodes, tables, text, fork)
        if not lazy:
            every = range(len(nodes))
            return Tree([drawing.token(n) for n in every], [p for p, _ in nodes],
                        [drawing.law(n) for n in every])  # fmt: skip
        tokens, laws = _Lazy(drawing.token, len(nodes)), _Lazy(drawing.law, len(nodes))
        parents = [parent for parent, _ in nodes]
        return SimpleNamespace(tokens=tokens, parents=parents, proposals=laws)  # type: ignore[return-value]

    return drafts


class _Drawing:
    """The draws of one tree, in whatever order its nodes are asked for."""

    def __init__(self, nodes: Nodes, tables: dict[str, Table], text: Text, fork: Fork) -> None:
        self.nodes, self.tables, self.text, self.fork = nodes, tables, text, fork
        self.tokens: dict[int, int] = {}
        self.laws: dict[tuple[int, str], Tensor] = {}

    def _path(self, node: int) -> Text:
        return self.text if node < 0 else (*self._path(self.nodes[node][0]), self.token(node))

    def law(self, node: int) -> Tensor | None:
        parent, name = self.nodes[node]
        if name == "guess":
            return None
        # One tensor for the draws of a group, and another one for each group.
        if (parent, name) not in self.laws:
            self.laws[parent, name] = self.tables[name](self._path(parent)).clone()
        return self.laws[parent, name]

    def token(self, node: int) -> int:
        if node not in self.tokens:
            parent, name = self.nodes[node]
            if name == "guess":
                token = int(self.tables[name](self._path(parent)).argmax())
            else:
                law = self.law(node)
                assert law is not None
                group = [n for n in range(node) if self.nodes[n] == (parent, name)]
                left = without(law, [self.token(n) for n in group])
                token = 0 if left is None else self.fork.pick(left)
            self.tokens[node] = token
        return self.tokens[node]


class _Lazy:
    def __init__(self, make: Callable[[int], object], length: int) -> None:
        self._make, self._length = make, length

    def __getitem__(self, node: int) -> object:
        return self._make(node)

    def __len__(self) -> int:
        return self._length


# Laws of whole texts


def played(
    drafts: Drafts, rule: Rule, p: Table, text: Text = ()
) -> Iterator[tuple[float, list[int], Text]]:
    """Every outcome of one round after a text: probability, nodes kept, tokens emitted."""

    def run(fork: Fork) -> tuple[list[int], Text]:
        tree = drafts(text, fork)

        def law_after(path: Sequence[int]) -> Tensor:
            return p((*text, *(tree.tokens[node] for node in path)))

        path, token = rule(tree, law_after, fork)
        return path, (*(tree.tokens[node] for node in path), token)

    for probability, (path, emitted) in outcomes(run):
        yield probability, path, emitted


def joint(drafts: Drafts, rule: Rule, p: Table, steps: int) -> Law:
    """The law of the first tokens emitted, by as many rounds as it takes."""
    laws: Law = defaultdict(float)
    laws[()] = 1.0
    for done in range(steps):  # every way to a text is known before rounds begin there
        for text in [x for x in laws if len(x) == done]:
            before = laws.pop(text)
            for probability, _, emitted in played(drafts, rule, p, text):
                laws[(*text, *emitted)[:steps]] += before * probability
    return laws


def plain(p: Table, V: int, steps: int) -> Law:
    """The law of the target's own text."""
    laws: Law = {(): 1.0}
    for _ in range(steps):
        laws = {
            (*text, token): share * float(p(text)[token])
            for text, share in laws.items()
            for token in range(V)
        }
    return laws


def accepted(drafts: Drafts, rule: Rule, p: Table, text: Text = ()) -> float:
    """Drafted tokens that a round keeps on average."""
    return sum(chance * len(path) for chance, path, _ in played(drafts, rule, p, text))


def distance(ours: Law, theirs: Law) -> float:
    """Total variation."""
    return sum(abs(ours.get(x, 0.0) - theirs.get(x, 0.0)) for x in {*ours, *theirs}) / 2
