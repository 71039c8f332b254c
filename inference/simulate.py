"""Chain rounds simulated on answers the target gave greedily: what decoding should come to.

The head is unrolled over the text, as in training, and rounds are walked along it, as in decoding.
Training and decoding compute the same thing exactly if this agrees with what was decoded.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from drafthead.heads.base import DraftHead, TeacherBatch
from drafthead.inference.metrics import Acceptance, Round, acceptance, walk_rounds
from drafthead.inference.target import Target


def simulate(
    head: DraftHead, target: Target, answers: Sequence[tuple[Sequence[int], int]], depth: int
) -> Acceptance:
    """Simulated figures of a chain of `depth` on answers, each (ids, prompt length) of greedy text.

    On the very texts that were decoded, in the same dtype, they differ from the decoded figures by
    rounding only.
    """
    return acceptance([rounds_of(head, target, ids, prompt, depth) for ids, prompt in answers])


@torch.no_grad()
def rounds_of(
    head: DraftHead, target: Target, ids: Sequence[int], prompt: int, depth: int
) -> list[Round]:
    """The rounds of a chain of `depth` along one greedy text behind its prompt."""
    tokens = torch.tensor([list(ids)], device=target.device)
    features, last_hidden = target.states(tokens, head.contract.layers)
    return chain_rounds(head, batch_of(tokens, prompt, features, last_hidden), prompt, depth)


def batch_of(ids: Tensor, prompt: int, features: Tensor, last_hidden: Tensor) -> TeacherBatch:
    """One greedy text, ids (1, T), of which all behind the prompt is supervised."""
    mask = torch.arange(ids.shape[1], device=ids.device)[None] >= prompt
    # Greedy text is the target's choice itself, so `top` is not looked at.
    return TeacherBatch(ids, mask, features, last_hidden, top=ids)


@torch.no_grad()
def chain_rounds(head: DraftHead, batch: TeacherBatch, prompt: int, depth: int) -> list[Round]:
    """The same along a batch of one text, (1, T)."""
    tokens = batch.ids
    matches = np.zeros((tokens.shape[1], depth), dtype=bool)  # by position of the round's root
    for k, prediction in enumerate(head.unroll(batch, depth)):
        label = prediction.teacher + 1
        draft = head.draft_ids[prediction.logits.argmax(-1)]
        matches[(label - 1 - k).cpu().numpy(), k] = (draft == tokens[0, label]).cpu().numpy()
    new = tokens.shape[1] - prompt - 1  # the first new token comes from the prefill
    rounds, left = [], new
    for accepted in walk_rounds(matches, prompt, new):
        emitted = min(accepted + 1, left)
        drafted = min(depth, left - 1)
        rounds.append(Round(drafted, accepted, emitted, "simulated", drafted))
        left -= emitted
    return rounds
