"""First turns of prompt files as ids: what a few decodings are made with, where figures of whole
conversations are not asked for (tune, certify, the self-test of an export).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from drafthead.data.chat import ChatFormat
from drafthead.inference.compare import prompts_of, spread
from drafthead.inference.decoder import check_prompt
from drafthead.inference.target import Target


def first_turns(
    target: Target,
    names: Sequence[str],
    count: int,
    new_tokens: int,
    template: Mapping[str, Any],
    say: Callable[[str], None],
    *,
    last: bool = False,
) -> list[list[int]]:
    """Ids of at most `count` prompts of these files, taken from their categories in turn.

    One that leaves no room for `new_tokens` is left out, and the next stands in; `say` is told.
    last: from the end of the files, where an evaluation begins with the others. Raises ValueError
    where no prompt is left.
    """
    assert target.tokenizer is not None
    chat = ChatFormat(target.tokenizer, dict(template))
    known = prompts_of(names, say)
    if not known:
        raise ValueError(f"{', '.join(names)}: no prompts to decode")
    found: list[list[int]] = []
    left: list[str] = []
    for prompt in spread(known[::-1] if last else known, len(known)):
        try:
            ids = chat.prompt_ids(prompt.opening)
            check_prompt(target, ids, new_tokens)
        except ValueError as error:
            left.append(f"prompt {prompt.id!r}: {error}")
            continue
        found.append(ids)
        if len(found) == count:
            break
    if not found:
        raise ValueError(f"no prompt can be decoded: {left[0]}")
    if left:
        say(f"left out: {len(left)} of the prompts ({left[0]})")
    return found
