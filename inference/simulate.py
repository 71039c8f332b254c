"""Chain rounds simulated on answers the target gave greedily: what decoding should come to.

The head is unrolled over the text, as in training, and rounds are walked along it, as in decoding.
Training and decoding compute the same thing exactly if this agrees with what was decoded.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

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
    return acceptance([_rounds(head, target, ids, prompt, depth) for ids, prompt in answers])


@torch.no_grad()
def _rounds(
    head: DraftHead, target: Target, ids: Sequence[int], prompt: int, depth: int
) -> list[Round]:
    tokens = torch.tensor([list(ids)], device=target.device)
    features, last_hidden = target.states(tokens, head.contract.layers)
    mask = torch.arange(len(ids), device=target.device)[None] >= prompt
    # Greedy text is the target's choice itself, so `top` is not looked at.
    batch = TeacherBatch(tokens, mask, features, last_hidden, top=tokens)
    matches = np.zeros((len(ids), depth), dtype=bool)  # by position of the round's root
    for k, prediction in enumerate(head.unroll(batch, depth)):
        label = prediction.teacher + 1
        draft = head.draft_ids[prediction.logits.argmax(-1)]
        matches[(label - 1 - k).cpu().numpy(), k] = (draft == tokens[0, label]).cpu().numpy()
    new = len(ids) - prompt - 1  # the first new token comes from the prefill
    rounds, left = [], new
    for accepted in walk_rounds(matches, prompt, new):
        emitted = min(accepted + 1, left)
        rounds.append(Round(min(depth, left - 1), accepted, emitted, "simulated"))
        left -= emitted
    return rounds
