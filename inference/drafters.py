"""Drafters: a trained head, prompt n-gram lookup, and both merged, behind one protocol.

A drafter sees committed tokens and the target's features, proposes a tree per row, and never
decides anything: whatever it proposes, the acceptance rule keeps the output the target's own.

Shapes: B rows, n newly committed tokens, L * D captured features, Vd draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from drafthead.heads.base import DraftHead, HeadState
from drafthead.inference.sampling import Sampler
from drafthead.inference.tree import Shape, Tree, chain


class Drafter(Protocol):
    """What the decoder needs of a drafter; rows are numbered as in the batch."""

    name: str
    layers: tuple[int, ...]
    """Target layers whose features `observe` wants, ascending; empty for none."""
    nodes: int
    """Most nodes of one tree: the decoder reserves that many slots."""

    def open(self, batch: int, capacity: int) -> None:
        """Start anew for `batch` rows of at most `capacity` tokens, draft nodes included."""

    def start(self, row: int) -> None:
        """Forget what a row held: another sequence begins there."""

    def observe(self, row: int, ids: Sequence[int], features: Tensor | None) -> None:
        """Take newly committed tokens.

        `ids` is the row so far; its last token, the root, the target has not run yet. `features`
        (n, L * D) are the states of the n tokens before it that were not observed before.
        """

    def propose(
        self, ids: Sequence[Sequence[int]], depths: Sequence[int], sampler: Sampler
    ) -> list[Tree]:
        """One tree per row, at most `depths[row]` deep; an empty tree where nothing is proposed."""


class HeadDrafter:
    """A trained head, growing a chain or a best-first tree (arXiv 2406.16858)."""

    name = "head"

    def __init__(self, head: DraftHead, shape: Shape) -> None:
        if shape.width > len(head.draft_ids):
            raise ValueError(
                f"tree width {shape.width} exceeds the draft vocabulary of {len(head.draft_ids)}"
            )
        self.head = head
        self.shape = shape
        self.layers = tuple(head.contract.layers)
        self.nodes = shape.nodes
        self._ids = head.draft_ids

    def open(self, batch: int, capacity: int) -> None:
        # A wide tree expands more nodes than it verifies, and the head must remember them all.
        expanded = self.shape.width * (self.shape.depth - 1)
        room = capacity + max(0, expanded - self.nodes)
        self._state: HeadState = self.head.open(batch, room)
        self._features: list[list[Tensor]] = [[] for _ in range(batch)]
        self._pending: list[list[int]] = [[] for _ in range(batch)]

    def start(self, row: int) -> None:
        self._state.start(row)
        self._features[row], self._pending[row] = [], []

    def observe(self, row: int, ids: Sequence[int], features: Tensor | None) -> None:
        assert features is not None
        self._features[row].append(features)
        self._pending[row].extend(ids[len(ids) - len(features) :])

    @torch.no_grad()
    def propose(
        self, ids: Sequence[Sequence[int]], depths: Sequence[int], sampler: Sampler
    ) -> list[Tree]:
        depth = min(max(depths), self.shape.depth)
        if depth < 1:
            return [Tree()] * len(ids)
        logits = self._extend()
        positions = [len(row) for row in ids]
        if self.shape.is_chain:
            trees = self._chain(logits, positions, depth, sampler)
        else:
            trees = self._grow(logits, positions, depth, sampler)
        return [_cut(tree, limit) for tree, limit in zip(trees, depths, strict=True)]

    def _extend(self) -> Tensor:
        """Give the head the true features since its last draft; (B, Vd) logits after the roots."""
        counts = [len(pending) for pending in self._pending]
        n, device = max(counts), self._ids.device
        next_ids = torch.zeros(len(counts), n, dtype=torch.long)
        rows = []
        for row, (pending, features) in enumerate(zip(self._pending, self._features, strict=True)):
            next_ids[row, : len(pending)] = torch.tensor(pending, dtype=torch.long)
            rows.append(torch.cat(features) if features else None)
        width = next(r.shape[1] for r in rows if r is not None)
        like = next(r for r in rows if r is not None)
        if len(rows) == 1:
            stacked = like[None]
        else:
            stacked = like.new_zeros(len(rows), n, width)
            for row, value in enumerate(rows):
                if value is not None:
                    stacked[row, : len(value)] = value
        self._features = [[] for _ in counts]
        self._pending = [[] for _ in counts]
        return self.head.extend(self._state, stacked, next_ids.to(device), torch.tensor(counts))

    def _scores(
        self, logits: Tensor, position: Sequence[int], sampler: Sampler
    ) -> tuple[Tensor, list[Tensor | None]]:
        """Scores (B, m, Vd) of the tokens at each row's position, and the laws q if needed."""
        pairs = [
            sampler.draft_scores(row, logits[row], self._ids, position[row])
            for row in range(len(logits))
        ]
        return torch.stack([scores for scores, _ in pairs]), [law for _, law in pairs]

    def _chain(
        self, logits: Tensor, positions: Sequence[int], depth: int, sampler: Sampler
    ) -> list[Tree]:
        tokens: list[Tensor] = []
        laws: list[list[Tensor]] = [[] for _ in positions]
        for step in range(depth):
            scores, law = self._scores(logits[:, None], [p + step for p in positions], sampler)
            tokens.append(self._ids[scores[:, 0].argmax(-1)])  # (B,)
            for row, q in enumerate(law):
                if q is not None:
                    laws[row].append(q[0])
            if step + 1 < depth:
                parents = torch.full((len(positions), 1), step - 1)
                logits = self.head.expand(self._state, tokens[-1][:, None], parents)[:, 0]
        drawn = torch.stack(tokens, dim=1).tolist()
        return [
            chain(row, self._full(law) if law else None, self.name)
            for row, law in zip(drawn, laws, strict=True)
        ]

    def _full(self, laws: list[Tensor]) -> Tensor:
        """K laws (Vd,) over the draft vocabulary → (K, V) over the target's, 0 elsewhere."""
        draft = torch.stack(laws)
        full = draft.new_zeros(len(draft), self.head.contract.vocab_size)
        return full.index_copy_(1, self._ids, draft)

    def _grow(
        self, logits: Tensor, positions: Sequence[int], depth: int, sampler: Sampler
    ) -> list[Tree]:
        """Levels of `width` expanded nodes, then the `nodes` best of all candidates.

        A node's value is the log of its draft probability along the path; it never grows downwards,
        and equal values keep the earlier candidate, so the best ones always form a tree.
        """
        if sampler.needs_proposals:
            raise ValueError("rule 'rejection' verifies chains only: use tree='chain:K'")
        B, width = len(positions), self.shape.width
        logits = logits[:, None]  # (B, 1, Vd)
        values = torch.zeros(B, 1)  # of the nodes expanded at this level
        parents = torch.full((B, 1), -1)  # their candidate numbers
        found: list[
            tuple[Tensor, Tensor, Tensor]
        ] = []  # tokens, parents, values, each (B, m * width)
        seen = 0
        for level in range(depth):
            scores, _ = self._scores(logits, [p + level for p in positions], sampler)
            best, index = scores.log_softmax(-1).topk(width, dim=-1)  # (B, m, width)
            # A head whose logits are not finite drafts badly; it must not break the tree.
            values = (values[..., None] + best.nan_to_num(nan=-torch.inf)).flatten(1)
            tokens = self._ids[index].flatten(1)
            owners = parents[..., None].expand_as(index).flatten(1)
            found.append((tokens, owners, values))
            if level + 1 < depth:
                values, kept = values.topk(min(width, values.shape[1]), dim=-1, sorted=True)
                parents = kept + seen
                # Of the nodes expanded so far, the owners of these are the previous level's.
                expanded = (
                    kept // width + (level - 1) * width if level else torch.full_like(kept, -1)
                )
                logits = self.head.expand(self._state, tokens.gather(1, kept), expanded)
            seen += tokens.shape[1]
        return self._best(found)

    def _best(self, found: list[tuple[Tensor, Tensor, Tensor]]) -> list[Tree]:
        tokens, owners, values = (torch.cat(part, dim=1) for part in zip(*found, strict=True))
        order = values.argsort(dim=1, descending=True, stable=True)[:, : self.shape.nodes]
        trees = []
        for row, chosen in enumerate(order.sort(dim=1).values.tolist()):
            number = {candidate: node for node, candidate in enumerate(chosen)} | {-1: -1}
            row_tokens, row_owners = tokens[row].tolist(), owners[row].tolist()
            trees.append(
                Tree(
                    [row_tokens[c] for c in chosen],
                    [number[row_owners[c]] for c in chosen],
                    source=self.name,
                )
            )
        return trees


class LookupDrafter:
    """Prompt n-gram lookup: go on as the text did at the latest place with the same ending."""

    name = "lookup"
    layers: tuple[int, ...] = ()

    def __init__(self, length: int, longest: int = 3, shortest: int = 1) -> None:
        if length < 1 or not 1 <= shortest <= longest:
            raise ValueError(
                f"lookup of {length} tokens on {shortest} to {longest}-grams: "
                "all must be positive, the shortest first"
            )
        self.nodes = length
        self._sizes = range(longest, shortest - 1, -1)

    def open(self, batch: int, capacity: int) -> None:
        self._places: list[dict[tuple[int, ...], int]] = [{} for _ in range(batch)]
        self._indexed = [0] * batch

    def start(self, row: int) -> None:
        self._places[row], self._indexed[row] = {}, 0

    def observe(self, row: int, ids: Sequence[int], features: Tensor | None) -> None:
        """Note where each n-gram was last followed by something, which an ending is not yet."""
        for end in range(max(self._indexed[row], 1), len(ids)):
            for size in self._sizes:
                if end >= size:
                    self._places[row][tuple(ids[end - size : end])] = end
        self._indexed[row] = len(ids)

    def propose(
        self, ids: Sequence[Sequence[int]], depths: Sequence[int], sampler: Sampler
    ) -> list[Tree]:
        trees = []
        for row, (tokens, depth) in enumerate(zip(ids, depths, strict=True)):
            found = self._find(row, tokens)[: max(0, min(depth, self.nodes))]
            trees.append(chain(found, source=self.name))
        return trees

    def _find(self, row: int, ids: Sequence[int]) -> list[int]:
        for size in self._sizes:
            if len(ids) > size and (place := self._places[row].get(tuple(ids[-size:]))):
                return list(ids[place : place + self.nodes])
        return []


class MergedDrafter:
    """Lookup where the text repeats itself (a long n-gram is found), the other elsewhere."""

    name = "merged"

    def __init__(self, lookup: LookupDrafter, other: Drafter) -> None:
        self._lookup = lookup
        self.other = other
        self.layers = other.layers
        self.nodes = max(lookup.nodes, other.nodes)

    def open(self, batch: int, capacity: int) -> None:
        self._lookup.open(batch, capacity)
        self.other.open(batch, capacity)

    def start(self, row: int) -> None:
        self._lookup.start(row)
        self.other.start(row)

    def observe(self, row: int, ids: Sequence[int], features: Tensor | None) -> None:
        self._lookup.observe(row, ids, None)
        self.other.observe(row, ids, features)

    def propose(
        self, ids: Sequence[Sequence[int]], depths: Sequence[int], sampler: Sampler
    ) -> list[Tree]:
        found = self._lookup.propose(ids, depths, sampler)
        if all(found):
            return found
        # Rows with a hit ask the other for nothing; it keeps their features for its next draft.
        rest = [0 if tree else depth for tree, depth in zip(found, depths, strict=True)]
        drafted = self.other.propose(ids, rest, sampler)
        return [hit or draft for hit, draft in zip(found, drafted, strict=True)]


def head_of(drafter: Drafter | None) -> DraftHead | None:
    """The head that a drafter asks, if any."""
    if isinstance(drafter, MergedDrafter):
        return head_of(drafter.other)
    return drafter.head if isinstance(drafter, HeadDrafter) else None


def _cut(tree: Tree, depth: int) -> Tree:
    """The part of a tree that is at most `depth` deep."""
    depths = tree.depths
    if not depths or max(depths) <= depth:
        return tree
    kept = [node for node, d in enumerate(depths) if d <= depth]
    number = {node: i for i, node in enumerate(kept)} | {-1: -1}
    return Tree(
        [tree.tokens[n] for n in kept],
        [number[tree.parents[n]] for n in kept],
        None if tree.proposals is None else tree.proposals[kept],
        tree.source,
    )
