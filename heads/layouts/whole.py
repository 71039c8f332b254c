"""A head that was trained over a reduced vocabulary, turned into one over all of the target's.

What a head borrows it can borrow whole: its own tensors stay as they are, the maps go. Engines that
read the target's output rows directly know no reduced vocabulary, and may rank all tokens as fast.

Shapes: V target vocabulary, Vd draft vocabulary.
"""

from __future__ import annotations

import torch

from drafthead.heads.borrowing import BorrowingHead
from drafthead.heads.layouts.layout import LayoutError

MAPS = ("d2t", "t2d")
"""What only a reduced vocabulary needs."""


def whole_vocabulary(head: BorrowingHead) -> BorrowingHead:
    """The same head over the whole vocabulary, unbound; the head itself where it is that already.

    Raises LayoutError where a trained tensor has a row for each draft token, (Vd, …): there is
    nothing trained for the others.
    """
    if not head.reduced:
        return head
    config = type(head.config).from_dict(head.config.to_dict())
    config.draft_vocab_size = config.vocab_size
    config.settings = {**(config.settings or {}), "draft_vocab_size": None}
    made = type(head)(config).to(head.dtype)  # type: ignore[arg-type]
    wanted = made.state_dict()
    given = {name: value for name, value in head.state_dict().items() if name not in MAPS}
    unlike = [name for name in given if wanted[name].shape != given[name].shape]
    if unlike:
        raise LayoutError(
            f"--whole-vocabulary: {unlike[0]} was trained for the {head.config.draft_vocab_size} "
            f"tokens of the draft vocabulary alone; leave the option out, or train with "
            "head.draft_vocab_size=null"
        )
    with torch.no_grad():
        for name, value in given.items():
            wanted[name].copy_(value)
    return made.eval()  # type: ignore[no-any-return]
