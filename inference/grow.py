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
from drafthead.inference import built
from drafthead.inference.built import Level, Path
from drafthead.inference.costs import Costs, Growth, measure
from drafthead.inference.feed import Feed
from drafthead.inference.governor import Governor
from drafthead.inference.sampling import Sampler
from drafthead.inference.stopping import Stop, by_confidence
from drafthead.inference.target import Target
from drafthead.inference.tree import UNTUNED, Shape, Static, Tree, TreeShape
from drafthead.inference.tuning import folder_of, tuned
from drafthead.inference.verify import RULES

logger = logging.getLogger(__name__)

_NOTICED: WeakSet[DraftHead] = WeakSet()
"""Heads whose positions were said to be at an end: once is enough."""


class HeadDrafter:
    """A draft head, or a sibling, growing trees of one shape."""

    def __init__(self, head: DraftHead, shape: TreeShape, costs: Costs | None = None) -> None:
        """`costs`: of this target, batch and shape. An `auto:` tree stops by them, and with them
        drafts of any shape rest where they do not pay (`governor`).

        Raises ValueError for a shape that this head cannot draft, naming the node.
        """
        check_shape(shape, head)
        if costs is None and isinstance(shape, Shape) and shape.by_cost:
            raise ValueError(
                f"tree {shape}: an auto tree needs the costs it stops by; "
                "use drafting(head, shape, target), which measures them"
            )
        self.head = head
        self.shape = shape
        self.costs = costs
        self.name = head.drafter
        # What never drafts needs no states.
        self.layers = tuple(head.contract.layers) if shape.nodes else ()
        self.nodes = shape.nodes
        self._ids = head.draft_ids

    def open(self, batch: int, capacity: int) -> None:
        if not self.nodes:
            return
        # A wide tree expands more nodes than it verifies, and the head must remember them all.
        room = capacity + max(0, self.shape.expanded - self.nodes)
        self._state: HeadState = self.head.open(batch, room)
        self._feed = Feed(batch, bool(self.layers), self._ids.device)
        self._governor = None if self.costs is None else Governor(self.costs)
        self._steps = 0
        """Draft steps of this round beyond the first guesses."""

    def start(self, row: int) -> None:
        if not self.nodes:
            return
        self._state.start(row)
        self._feed.start(row)
        if self._governor:
            self._governor.start(row)

    def observe(self, row: int, ids: Sequence[int], features: Tensor | None) -> None:
        if not self.nodes:
            return
        self._feed.add(row, ids, features)
        if self._governor:
            self._governor.observe(row, ids)

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
        if max(limits, default=0) < 1 or (self._governor and self._governor.resting()):
            return [Tree()] * len(ids)
        self._steps = 0
        trees = self._drafted(positions, limits, sampler)
        if self._governor:
            drafted = {row: trees[row] for row, limit in enumerate(limits) if limit > 0}
            self._governor.drafted(drafted, positions, self._steps)
        return trees

    def _drafted(
        self, positions: Sequence[int], limits: Sequence[int], sampler: Sampler
    ) -> list[Tree]:
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
        features, next_ids, counts = self._feed.take(fed)
        return self.head.extend(self._state, features, next_ids, counts)

    def _expand(self, ids: Tensor, parents: Tensor) -> Tensor:
        """Go on from draft nodes (B, m), given by target ids and parents; logits (B, m, Vd)."""
        self._steps += 1
        return self.head.expand(self._state, ids, parents)

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
                logits = self._expand(ids, parents)
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
        return built.of_paths(plan.paths, tokens, possible, laws, limits, self.name)

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
        growth = self._growth(shape, limits)
        values = logits.new_zeros(B, 1, dtype=torch.float32)  # of the nodes expanded at this level
        parents = torch.full((B, 1), -1, device=logits.device)  # their candidate numbers
        found: list[Level] = []
        for level in range(max(limits)):
            places = [p + level for p in positions]
            tokens, owners, values = self._level(logits, parents, values, width, places, sampler)
            values = values.masked_fill(deepest <= level, -torch.inf)
            seen = sum(part[0].shape[1] for part in found)
            found.append((tokens, owners, values))
            if level + 1 == max(limits) or not (
                growth is None or growth.goes_on([part[2] for part in found])
            ):
                break
            values, kept = values.topk(min(width, values.shape[1]), dim=-1)
            parents = kept + seen
            # Of the nodes expanded so far, the owners of these are the previous level's.
            expanded = kept // width + (level - 1) * width if level else torch.full_like(kept, -1)
            logits = self._expand(tokens.gather(1, kept), expanded)
        count = shape.nodes if growth is None else growth.verified([part[2] for part in found])[0]
        return built.of_candidates(found, count, self.name)

    def _level(
        self,
        logits: Tensor,
        parents: Tensor,
        values: Tensor,
        width: int,
        places: Sequence[int],
        sampler: Sampler,
    ) -> Level:
        """The best `width` children of each of m nodes, given by logits (B, m, Vd), candidate
        numbers (B, m) and values (B, m); `places` are the children's positions.
        """
        scores, _ = self._scores(logits, places, sampler)
        best, index = _top(scores, width)  # (B, m, width)
        best = best - scores.logsumexp(dim=-1, keepdim=True)
        confidence = self.head.confidence(self._state)
        if confidence is not None:
            best = by_confidence(best, confidence)
        # A head whose logits are not finite drafts badly; it must not break the tree.
        best = best.nan_to_num(nan=-torch.inf, neginf=-torch.inf)
        owners = parents[..., None].expand_as(index)
        return self._ids[index].flatten(1), owners.flatten(1), (values[..., None] + best).flatten(1)

    def _growth(self, shape: Shape, limits: Sequence[int]) -> Growth | None:
        if not shape.by_cost:
            return None
        assert self.costs is not None
        return Growth(shape.width, shape.nodes, sum(limit > 0 for limit in limits), self.costs)


def drafting(
    head: DraftHead,
    shape: TreeShape | None,
    target: Target,
    batch: int = 1,
    rule: str = "coupled",
) -> HeadDrafter:
    """A drafter of this shape; what an `auto:` tree stops by is measured here first.

    None: the shape that `drafthead tune` chose for this head, target, machine and batch, with the
    costs that its drafts rest by; without one, or where `rule` cannot verify it, a chain.
    """
    costs: Costs | None = None
    if shape is None:
        found = tuned(folder_of(head), target, batch, head)
        if found and not verifies(rule, found.shape):
            logger.warning("rule %r cannot verify the tuned %s: a chain", rule, found.shape)
            found = None
        if found is None:
            depth = min(UNTUNED.depth, head.max_depth or UNTUNED.depth)
            return HeadDrafter(head, Shape(depth, 1, depth))
        shape, costs = found.shape, found.costs
        if costs is None and shape.nodes:  # a larger batch than any that was tuned
            costs = _costs(head, shape, target, batch)
    elif isinstance(shape, Shape) and shape.by_cost:
        costs = _costs(head, shape, target, batch)
    return HeadDrafter(head, shape, costs)


def _costs(head: DraftHead, shape: TreeShape, target: Target, batch: int) -> Costs:
    """Measured for the mean draft step of a shape."""
    check_shape(shape, head)
    width = max(1, shape.expanded // max(1, shape.depth - 1))
    return measure(target, head, width=width, batch=batch, most=shape.nodes)


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


def verifies(name: str, shape: TreeShape) -> bool:
    """Whether a rule can verify what is drafted in this shape."""
    rule = RULES[name]
    drawn = rule.needs_proposals and isinstance(shape, Shape)
    return shape.is_chain or not (rule.chains_only or drawn)


def check_rule_of(shape: TreeShape, name: str) -> None:
    """Refuse a rule that cannot verify what is drafted in this shape; ValueError."""
    if not verifies(name, shape):
        chains = RULES[name].chains_only
        fit = "chain:DEPTH" if chains else "chain:DEPTH or static:PATHS"
        raise ValueError(f"rule {name!r} cannot verify {shape}: use {fit}, or rule 'coupled'")


def _top(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The best `count` of (…, Vd), falling: scores and indices (…, count)."""
    if count == 1:  # much faster than topk
        best, index = scores.max(dim=-1, keepdim=True)
        return best, index
    return scores.topk(count, dim=-1)
