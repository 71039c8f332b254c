"""Drafts grown from a head's draft steps: chains, static trees, and best-first trees.

A head that gives `confidence` says how likely its drafts are accepted: best-first trees grow by it,
and `stop:` chains end by it (see `stopping`).

Ratio rules verify draws. Siblings of a static tree are drawn without replacement, by Gumbel top-k
on noise of the draft's own, and carry the law they were drawn from; which nodes there are depends
on nothing drawn. A best-first tree (arXiv 2406.16858) keeps the tokens that came out likely, so it
is no draw, and ratio rules refuse it; greedy and coupled decoding verify whatever is proposed.

Shapes: B rows, n newly committed tokens, L * D captured features, Vd draft vocabulary, V target
vocabulary, m nodes of one level.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from weakref import WeakSet

import torch
from torch import Tensor

from drafthead.heads.base import DraftHead, HeadState
from drafthead.inference.costs import Costs, Payoff, measure, worth_growing, worth_verifying
from drafthead.inference.sampling import Sampler
from drafthead.inference.stopping import Stop, by_confidence
from drafthead.inference.target import Target
from drafthead.inference.tree import Shape, Static, Tree, TreeShape
from drafthead.inference.verify import RULES

logger = logging.getLogger(__name__)

_NOTICED: WeakSet[DraftHead] = WeakSet()
"""Heads whose positions were said to be at an end: once is enough."""

Path = tuple[int, ...]
Level = tuple[Tensor, Tensor, Tensor]
"""Candidates of one level, each (B, m * width): tokens, parents (candidate numbers), values."""


class HeadDrafter:
    """A draft head, or a sibling, growing trees of one shape."""

    def __init__(self, head: DraftHead, shape: TreeShape, costs: Costs | None = None) -> None:
        """`costs`: of these target and batch, which `auto:` stops by (`costs.measure`).

        Raises ValueError for a shape that this head cannot draft, naming the node.
        """
        check_shape(shape, head)
        by_cost = isinstance(shape, Shape) and shape.by_cost
        if by_cost != (costs is not None):
            raise ValueError(
                f"tree {shape}: an auto tree, and no other, needs the costs it stops by; "
                "use drafting(head, shape, target), which measures them"
            )
        self.head = head
        self.shape = shape
        self.costs = costs
        self.name = head.drafter
        self.layers = tuple(head.contract.layers)
        self.nodes = shape.nodes
        self._ids = head.draft_ids

    def open(self, batch: int, capacity: int) -> None:
        # A wide tree expands more nodes than it verifies, and the head must remember them all.
        room = capacity + max(0, self.shape.expanded - self.nodes)
        self._state: HeadState = self.head.open(batch, room)
        self._features: list[list[Tensor]] = [[] for _ in range(batch)]
        self._pending: list[list[int]] = [[] for _ in range(batch)]
        self._seen = [0] * batch
        self._payoff = Payoff()

    def start(self, row: int) -> None:
        self._state.start(row)
        self._features[row], self._pending[row], self._seen[row] = [], [], 0

    def observe(self, row: int, ids: Sequence[int], features: Tensor | None) -> None:
        if not self.layers:  # it reads tokens alone, the first one included
            self._pending[row].extend(ids[self._seen[row] :])
            self._seen[row] = len(ids)
            return
        assert features is not None
        self._features[row].append(features)
        self._pending[row].extend(ids[len(ids) - len(features) :])

    @torch.no_grad()
    def propose(
        self, ids: Sequence[Sequence[int]], depths: Sequence[int], sampler: Sampler
    ) -> list[Tree]:
        if (
            sampler.needs_proposals
            and not isinstance(self.shape, Static)
            and not self.shape.is_chain
        ):
            raise ValueError(
                f"tree {self.shape}: its shape depends on what is drawn, which the rule "
                f"{sampler.rule!r} cannot verify; use a chain or static tree, or rule='coupled'"
            )
        positions = [len(row) for row in ids]
        limits = [self._limit(*row) for row in zip(positions, depths, strict=True)]
        if max(limits, default=0) < 1 or self._payoff.resting():
            return [Tree()] * len(ids)
        logits = self._extend([self.head.goes_on or self._room(p) > 0 for p in positions])
        if isinstance(self.shape, Static):
            return self._fixed(self.shape, logits, positions, limits, sampler)
        if self.shape.is_chain:
            stop = None if self.shape.stop is None else Stop(self.shape.stop, limits)
            plan = Static.chain(max(limits))
            return self._fixed(plan, logits, positions, limits, sampler, stop)
        return self._best_first(self.shape, logits, positions, limits, sampler)

    def _limit(self, position: int, depth: int) -> int:
        """How deep to draft below a root at position - 1 that can use `depth` tokens."""
        depth, room = max(0, min(depth, self.shape.depth)), self._room(position)
        if 0 < depth > room and (self.head.goes_on or room < 1) and self.head not in _NOTICED:
            _NOTICED.add(self.head)
            logger.warning(
                "the %s was made for %s positions: past them %s, the text stays the target's",
                self.name,
                self.head.positions,
                "drafts may get worse" if self.head.goes_on else "nothing is drafted",
            )
        return depth if self.head.goes_on else max(0, min(depth, room))

    def _room(self, position: int) -> int:
        """Deepest draft below a root at position - 1 that stays within the head's positions.

        The head runs what was committed, without the first token where it reads states, and every
        level of the draft but the last.
        """
        most = self.head.positions
        if most is None:
            return self.shape.depth
        return most - (position - bool(self.layers)) + 1

    def _extend(self, fed: Sequence[bool]) -> Tensor:
        """Give the head what was committed since its last draft; (B, Vd) logits after the roots."""
        rows = range(len(fed))
        pending = [self._pending[row] if fed[row] else [] for row in rows]
        n, device = max(map(len, pending)), self._ids.device
        next_ids = torch.zeros(len(pending), n, dtype=torch.long)
        for row, tokens in enumerate(pending):
            next_ids[row, : len(tokens)] = torch.tensor(tokens, dtype=torch.long)
        features = self._stacked(n, device)
        for row in rows:
            if fed[row]:
                self._features[row], self._pending[row] = [], []
        counts = torch.tensor([len(tokens) for tokens in pending])
        return self.head.extend(self._state, features, next_ids.to(device), counts)

    def _stacked(self, n: int, device: torch.device) -> Tensor:
        """(B, n, L * D) features of all rows, padded on the right; L = 0 where none are read."""
        rows = [torch.cat(features) if features else None for features in self._features]
        like = next((row for row in rows if row is not None), None)
        if like is None:
            return torch.zeros(len(rows), n, 0, device=device)
        if len(rows) == 1:
            return like[None]
        stacked = like.new_zeros(len(rows), n, like.shape[1])
        for row, value in enumerate(rows):
            if value is not None:
                stacked[row, : len(value)] = value
        return stacked

    def _scores(
        self, logits: Tensor, positions: Sequence[int], sampler: Sampler
    ) -> tuple[Tensor, list[Tensor | None]]:
        """Scores (B, m, Vd) of the tokens at each row's position, and the laws (m, V) if needed."""
        pairs = [
            sampler.draft_scores(row, logits[row], self._ids, position)
            for row, position in enumerate(positions)
        ]
        return torch.stack([scores for scores, _ in pairs]), [self._full(law) for _, law in pairs]

    def _full(self, law: Tensor | None) -> Tensor | None:
        """A law (m, Vd) over the draft vocabulary → (m, V) over the target's, 0 elsewhere."""
        size = self.head.contract.vocab_size
        if law is None or law.shape[1] == size:
            return law
        return law.new_zeros(len(law), size).index_copy_(1, self._ids, law)

    # Chains and static trees

    def _fixed(
        self,
        plan: Static,
        logits: Tensor,
        positions: Sequence[int],
        limits: Sequence[int],
        sampler: Sampler,
        stop: Stop | None = None,
    ) -> list[Tree]:
        B, logits = len(positions), logits[:, None]  # (B, 1, Vd)
        order: dict[Path, int] = {(): -1}  # of expansion
        tokens: dict[Path, Tensor] = {}  # (B,) each
        possible: dict[Path, Tensor] = {}  # (B,) bool each
        laws: list[dict[Path, Tensor | None]] = [{} for _ in positions]
        for level, inner in enumerate(plan.inner):
            if level == max(limits):
                break
            if level:
                parents = torch.tensor([[order[path[:-1]] for path in inner]]).expand(B, -1)
                ids = torch.stack([tokens[path] for path in inner], dim=1)
                order |= {path: len(order) - 1 + i for i, path in enumerate(inner)}
                logits = self.head.expand(self._state, ids, parents)
            confidence = self.head.confidence(self._state) if stop else None
            if stop and confidence is not None:
                limits = stop.before(level, confidence[:, 0])
                if level == max(limits):
                    break
            scores, drawn_from = self._scores(logits, [p + level for p in positions], sampler)
            best, index = _top(scores, max(map(plan.children, inner)))
            if stop and confidence is None:
                shares = logits[:, 0].float().softmax(-1).gather(1, index[:, 0])
                limits = stop.after(level, shares[:, 0])
            found = self._ids[index]
            for i, path in enumerate(inner):
                for row, law in enumerate(drawn_from):
                    laws[row][path] = None if law is None else law[i]
                for rank in range(plan.children(path)):
                    tokens[*path, rank] = found[:, i, rank]
                    possible[*path, rank] = best[:, i, rank] > -torch.inf
        if not tokens:  # stopped before the first
            return [Tree()] * B
        return self._built(plan, tokens, possible, laws, limits)

    def _built(
        self,
        plan: Static,
        tokens: dict[Path, Tensor],
        possible: dict[Path, Tensor],
        laws: list[dict[Path, Tensor | None]],
        limits: Sequence[int],
    ) -> list[Tree]:
        """Every row's tree: no deeper than it can use, and no token that has no chance."""
        paths = [path for path in plan.paths if path in tokens]
        drawn = torch.stack([tokens[path] for path in paths], dim=1).tolist()
        chance = torch.stack([possible[path] for path in paths], dim=1).tolist()
        trees = []
        for row, limit in enumerate(limits):
            number: dict[Path, int] = {(): -1}
            row_tokens: list[int] = []
            parents: list[int] = []
            proposals: list[Tensor | None] = []
            for i, path in enumerate(paths):
                if len(path) > limit or not chance[row][i] or path[:-1] not in number:
                    continue
                number[path] = len(row_tokens)
                row_tokens.append(drawn[row][i])
                parents.append(number[path[:-1]])
                proposals.append(laws[row][path[:-1]])
            fixed = all(law is None for law in proposals)
            trees.append(Tree(row_tokens, parents, [] if fixed else proposals, self.name))
        return trees

    # Best-first trees

    def _best_first(
        self,
        shape: Shape,
        logits: Tensor,
        positions: Sequence[int],
        limits: Sequence[int],
        sampler: Sampler,
    ) -> list[Tree]:
        """Levels of `width` expanded nodes, then the best of all candidates.

        A node's value is the log of its draft probability along the path, or, from a head that says
        so, of its chance. It never grows downwards, and equal values keep the earlier candidate, so
        the best ones always form a tree.
        """
        B, width, logits = len(positions), shape.width, logits[:, None]  # (B, 1, Vd)
        deepest = torch.tensor(limits, device=logits.device)[:, None]
        values = logits.new_zeros(B, 1, dtype=torch.float32)  # of the nodes expanded at this level
        parents = torch.full((B, 1), -1, device=logits.device)  # their candidate numbers
        found: list[Level] = []
        for level in range(max(limits)):
            scores, _ = self._scores(logits, [p + level for p in positions], sampler)
            best, index = _top(scores, width)  # (B, m, width)
            confidence = self.head.confidence(self._state)
            if confidence is None:
                best = best - scores.logsumexp(dim=-1, keepdim=True)
            else:
                best = by_confidence(best - scores.logsumexp(dim=-1, keepdim=True), confidence)
            # A head whose logits are not finite drafts badly; it must not break the tree.
            best = best.nan_to_num(nan=-torch.inf, neginf=-torch.inf)
            values = (values[..., None] + best).flatten(1)
            values = values.masked_fill(deepest <= level, -torch.inf)
            tokens, owners = self._ids[index].flatten(1), parents[..., None].expand_as(index)
            seen = sum(part[0].shape[1] for part in found)
            found.append((tokens, owners.flatten(1), values))
            if level + 1 == max(limits) or not self._goes_on(shape, found, limits):
                break
            values, kept = values.topk(min(width, values.shape[1]), dim=-1)
            parents = kept + seen
            # Of the nodes expanded so far, the owners of these are the previous level's.
            expanded = kept // width + (level - 1) * width if level else torch.full_like(kept, -1)
            logits = self.head.expand(self._state, tokens.gather(1, kept), expanded)
        return self._best(shape, found, limits)

    def _goes_on(self, shape: Shape, found: Sequence[Level], limits: Sequence[int]) -> bool:
        """Whether another level pays; what it gives is guessed from the share the last caught."""
        if self.costs is None:
            return True
        count, tokens, spent = self._verified(shape, found, limits)
        *above, last = found
        before = _mass(above[-1], shape.width) if above else float(sum(x > 0 for x in limits))
        caught = float(last[2].exp().sum()) / before if before else 0.0
        gain = _mass(last, shape.width) * caught
        seconds = spent + self.costs.verify(count + 1)
        return worth_growing(gain, tokens, seconds, self.costs.step)

    def _verified(
        self, shape: Shape, found: Sequence[Level], limits: Sequence[int]
    ) -> tuple[int, float, float]:
        """Nodes a row worth verifying so far, tokens expected of all rows, seconds of drafting."""
        assert self.costs is not None
        chances = torch.cat([level[2] for level in found], dim=1).exp()
        by_rank = chances.sort(dim=1, descending=True).values.sum(dim=0)[: shape.nodes].tolist()
        rows = sum(limit > 0 for limit in limits)
        spent = self.costs.extend + (len(found) - 1) * self.costs.step
        count = worth_verifying(by_rank, rows, spent, self.costs)
        return count, rows + sum(by_rank[:count]), spent

    def _best(self, shape: Shape, found: Sequence[Level], limits: Sequence[int]) -> list[Tree]:
        count = shape.nodes
        if self.costs is not None:
            count, promised, spent = self._verified(shape, found, limits)
            rows = sum(limit > 0 for limit in limits)
            rate = promised / (spent + self.costs.verify(count + 1))
            self._payoff.note(rate, rows / self.costs.verify(1))
        tokens, owners, values = (torch.cat(part, dim=1) for part in zip(*found, strict=True))
        order = values.argsort(dim=1, descending=True, stable=True)[:, :count].sort(dim=1).values
        possible = (values.gather(1, order) > -torch.inf).tolist()
        trees = []
        for row, candidates in enumerate(order.tolist()):
            chosen = [c for c, fine in zip(candidates, possible[row], strict=True) if fine]
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


def drafting(head: DraftHead, shape: TreeShape, target: Target, batch: int = 1) -> HeadDrafter:
    """A drafter of this shape; what an `auto:` tree stops by is measured here first."""
    if not (isinstance(shape, Shape) and shape.by_cost):
        return HeadDrafter(head, shape)
    check_shape(shape, head)
    costs = measure(target, head, width=shape.width, batch=batch, most=shape.nodes)
    return HeadDrafter(head, shape, costs)


def check_shape(shape: TreeShape, head: DraftHead) -> None:
    """Refuse a shape that this head cannot draft, naming the node; ValueError."""
    most, words = head.max_depth, len(head.draft_ids)
    where = f"tree {shape}"
    if most is not None and shape.depth > most:
        if isinstance(shape, Static):
            where = f"static tree: node {shape.node_at(most + 1)}"
        raise ValueError(f"{where}: depth {shape.depth}, the head drafts {most} tokens at most")
    if shape.width > words:
        if isinstance(shape, Static):
            where = f"static tree: node {shape.node_of_rank(words)}"
        raise ValueError(f"{where}: width {shape.width} exceeds the draft vocabulary of {words}")


def check_rule_of(shape: TreeShape, name: str) -> None:
    """Refuse a rule that cannot verify what is drafted in this shape; ValueError."""
    rule = RULES[name]
    drawn = rule.needs_proposals and isinstance(shape, Shape)
    if (rule.chains_only or drawn) and not shape.is_chain:
        fit = "chain:DEPTH" if rule.chains_only else "chain:DEPTH or static:PATHS"
        raise ValueError(f"rule {name!r} cannot verify {shape}: use {fit}, or rule 'coupled'")


def _top(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The best `count` of (…, Vd), falling: scores and indices (…, count)."""
    if count == 1:  # much faster than topk
        best, index = scores.max(dim=-1, keepdim=True)
        return best, index
    return scores.topk(count, dim=-1)


def _mass(level: Level, width: int) -> float:
    """The draft probability that the nodes to be expanded of a level hold, over all rows."""
    values = level[2]
    return float(values.topk(min(width, values.shape[1]), dim=-1).values.exp().sum())
