"""The saved head as a user would serve it, held against what training says of it.

At the end of a run the head's folder is read anew, bound to the target, and drafts for a few
held-out prompts; the head in memory is unrolled over the same texts with what training gives it:
its states, template and vocabulary. The two taus have to agree (`inference.agreement`); where they
do not, each likely cause is tested (`inference.diagnose`).
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from drafthead.data.chat import ChatFormat, Row
from drafthead.data.conversations import RowError
from drafthead.data.embedded import EMBEDDED, default_target
from drafthead.data.files import write_atomically
from drafthead.heads.base import DraftHead
from drafthead.heads.load import load_head
from drafthead.inference.agreement import Agreement, compare_rounds
from drafthead.inference.answering import end_ids
from drafthead.inference.decoder import decode
from drafthead.inference.diagnose import CAUSES, Rendered, causes, diagnose
from drafthead.inference.grow import HeadDrafter
from drafthead.inference.lineup import fitted
from drafthead.inference.metrics import Round
from drafthead.inference.row import Row as Decoded
from drafthead.inference.sampling import Sampler
from drafthead.inference.sibling import load_sibling
from drafthead.inference.simulate import chain_rounds
from drafthead.inference.target import Target, load_target
from drafthead.inference.tree import Shape
from drafthead.train.assemble import Assembly
from drafthead.train.config import RunConfig
from drafthead.train.engine import Engine
from drafthead.train.partitioned import PartitionedTarget
from drafthead.train.record import RunFolder
from drafthead.train.sources import target_dtype
from drafthead.train.teacher import DTYPE, OnlineFeatures

logger = logging.getLogger(__name__)

TOKENS = 48
"""New tokens of each prompt."""
ROOM = 2
"""A target is loaded for this only where that many times its files fit into memory."""


class UncheckedError(Exception):
    """Why the head was not checked."""


def check_served(
    config: RunConfig, engine: Engine, parts: Assembly, folder: RunFolder
) -> dict[str, Any] | None:
    """Make the check on rank 0, where the others wait; nothing but what it writes depends on it.

    Returns what `TrainResult.agreement` holds, and adds it to the run's evaluation.json.
    """
    found = None
    if engine.is_main and config.training.agreement_prompts:
        try:
            found = _checked(config, engine, parts, folder.head)
        except (UncheckedError, ValueError, OSError, RuntimeError) as error:
            found = {"left_out": " ".join(str(error).split())}
        known = json.loads(folder.evaluation.read_text()) if folder.evaluation.exists() else {}
        text = json.dumps(known | {"agreement": found}, indent=2)
        write_atomically(folder.evaluation, text + "\n")
    engine.wait()
    return found


def _checked(config: RunConfig, engine: Engine, parts: Assembly, head: Path) -> dict[str, Any]:
    """Serve the head, simulate it, and compare."""
    target = _target(config, engine, parts)
    try:
        served = _loaded(head, parts.head, target)
    except ValueError as error:  # a contract that does not fit, a folder that cannot be read
        return _refused(str(error))
    depth = parts.objective.heldout_steps
    asked = _prompts(parts, target, served)
    drafter = HeadDrafter(served, Shape(depth, 1, depth))
    decoded = _decode(target, [theirs for _, theirs in asked], drafter)
    texts = _texts(target, asked, decoded)
    # A target in parts answers only where all ranks ask it.
    parted = isinstance(parts.target, PartitionedTarget)
    source = target if parted or parts.target is None else parts.target
    simulated = [_simulated(parts, source, *text, depth) for text in texts]
    if not any(row.rounds for row in decoded):
        raise UncheckedError("every answer ended with its first token")
    found = compare_rounds(simulated, [row.rounds for row in decoded])
    cause, findings = None, []
    if not found.agrees:
        tested = diagnose(
            served,
            target,
            [(row.ids, row.prompt) for row in decoded if row.rounds],
            found.simulated_tau,
            depth,
            decoded=found.decoded_tau,
            rendered=asked,
            trained=parts.head,
        )
        named = [f"{f.cause} ({f.what}: tau {f.undone:.2f} if undone)" for f in causes(tested)]
        none = f"none of {', '.join(CAUSES)} explains it"
        cause, findings = " or ".join(named) or none, [asdict(f) for f in tested]
    return _as_json(found, depth) | {"cause": cause, "findings": findings}


def _as_json(found: Agreement, depth: int) -> dict[str, Any]:
    return {
        "decoded_tau": found.decoded_tau,
        "simulated_tau": found.simulated_tau,
        "agrees": found.agrees,
        "difference": found.difference,
        "interval": list(found.interval) if found.interval else None,
        "prompts": found.prompts,
        "new_tokens": TOKENS,
        "tree": f"chain:{depth}",
    }


def _refused(why: str) -> dict[str, Any]:
    return {
        "decoded_tau": None,
        "simulated_tau": None,
        "agrees": False,
        "cause": " ".join(why.split()),
        "findings": [],
    }


# Serving


def _target(config: RunConfig, engine: Engine, parts: Assembly) -> Target:
    """The target that is loaded, or one loaded anew from its folder."""
    live = parts.target
    if live is not None and not isinstance(live, PartitionedTarget) and not config.head.adapts:
        return live
    # The live one is in parts, or carries what the head in memory changes in it.
    name = default_target() if config.target.name == EMBEDDED else Path(config.target.name)
    if not name.is_dir():
        raise UncheckedError(f"no whole target is here, and {config.target.name!r} is no folder")
    files = sum(file.stat().st_size for file in name.glob("*.safetensors"))
    if not files:
        raise UncheckedError(f"no whole target is here, and {name} holds no weights")
    if ROOM * files > _room(engine.device):
        raise UncheckedError("no whole target is here, and one may not fit")
    target = load_target(name, target_dtype(config.target, engine), config.target.revision)
    target.model.requires_grad_(False)
    target.model.to(engine.device)
    return target


def _room(device: torch.device) -> int:
    """Bytes of memory that are free."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("MemAvailable")).split()[1]) << 10
    except (OSError, StopIteration):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")


def _loaded(folder: Path, trained: DraftHead, target: Target) -> DraftHead:
    """The saved head, bound as in every serving; a ValueError says why it cannot be."""
    dtype = str(target.dtype).removeprefix("torch.")
    if trained.export() is not trained:
        return load_sibling(str(folder), target, dtype)
    head = load_head(folder, target.dtype)
    head.to(target.device)  # type: ignore[arg-type]
    return fitted(head, target)


def _prompts(parts: Assembly, target: Target, served: DraftHead) -> list[Rendered]:
    """Ids of each sample as training and as serving render it, of those that leave room."""
    assert target.tokenizer is not None
    chat = ChatFormat(target.tokenizer, served.contract.template_kwargs)
    most = min(target.context, served.positions or target.context) - TOKENS - 1
    found: list[Rendered] = []
    for sample in parts.samples:
        try:
            pair = sample.trained, sample.served(chat)
        except RowError as error:
            raise UncheckedError(f"{sample.id}: {error}") from error
        if max(map(len, pair)) <= most:
            found.append(pair)
    if not found:
        raise UncheckedError(f"no prompt leaves room for {TOKENS} tokens")
    return found


def _decode(
    target: Target, prompts: Sequence[Sequence[int]], drafter: HeadDrafter | None
) -> list[Decoded]:
    ends = end_ids(target)
    rows, _ = decode(target, prompts, Sampler(), drafter, max_new_tokens=TOKENS, eos=ends)
    return rows


def _texts(
    target: Target, asked: Sequence[Rendered], decoded: Sequence[Decoded]
) -> list[tuple[list[int], int]]:
    """What the target answers to the prompts as training rendered them, each with its prompt's
    length: for those rendered alike, what was decoded.
    """
    others = [number for number, (ours, theirs) in enumerate(asked) if list(ours) != list(theirs)]
    found = [(row.ids, row.prompt) for row in decoded]
    if others:
        plain = _decode(target, [asked[number][0] for number in others], None)
        for number, row in zip(others, plain, strict=True):
            found[number] = row.ids, row.prompt
    return found


# Training


def _simulated(
    parts: Assembly, target: Target, ids: list[int], prompt: int, depth: int
) -> list[Round]:
    """Rounds along a text as training has it: its states, precision and head."""
    store = parts.teacher.store
    dtype = DTYPE if store is None else store.seal.dtype
    row = Row("", ids, [place >= prompt for place in range(len(ids))])
    source = OnlineFeatures(target, [row], [(0,)], parts.head.contract.layers, dtype)
    batch = source.batch(0)
    with torch.no_grad(), parts.objective.computing(batch) as cast:
        cast, _ = parts.head.live(cast)
        return chain_rounds(parts.head, cast, prompt, depth)
