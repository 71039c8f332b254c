"""Bring a run's parts together: rows, frozen target, head, objective and feature sources.

Everything that can be refused is refused before the target is loaded. It runs no step.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from drafthead.data.chat import ChatFormat, Row, build_rows, rows_key
from drafthead.data.conversations import read_conversations
from drafthead.data.embedded import EMBEDDED, data_path, default_target, fetch_target
from drafthead.heads.base import DraftHead
from drafthead.heads.contract import default_layers
from drafthead.heads.vocabulary import count_tokens, draft_vocabulary
from drafthead.inference.evaluate import end_ids
from drafthead.inference.target import Target, load_tokenizer
from drafthead.train.config import DataConfig, RunConfig, TargetConfig
from drafthead.train.engine import Engine
from drafthead.train.objective import Objective
from drafthead.train.teacher import Features, OnlineFeatures, choose_features, plan
from drafthead.train.timing import Stopwatch

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Assembly:
    """What the loop works with."""

    target: Target
    head: DraftHead
    objective: Objective
    train: Features
    train_batches: int
    """Micro-batches of one epoch, over all ranks."""
    heldout: Features | None
    heldout_batches: int
    content: str
    """Names the files' content and all that makes rows of it."""

    @property
    def trainable(self) -> dict[str, nn.Parameter]:
        """The head's trained parameters by name: all that an optimiser may hold."""
        return {name: p for name, p in self.head.named_parameters() if p.requires_grad}

    def announce(self) -> None:
        """Say what is trained and what is not (F29)."""
        counts = {name: p.numel() for name, p in self.trainable.items()}
        frozen = sum(p.numel() for p in self.head.parameters()) - sum(counts.values())
        target = sum(p.numel() for p in self.target.model.parameters())
        logger.info("training %d weights of the head", sum(counts.values()))
        logger.info("frozen: %d weights of the target, %d of the head", target, frozen)
        logger.debug("trainable: %s", counts)


def assemble(config: RunConfig, engine: Engine, watch: Stopwatch) -> Assembly:
    """Read and tokenise, load the target, build and bind the head; ValueError or OSError."""
    folder = target_folder(config.target, engine)
    tokenizer = load_tokenizer(folder, config.target.revision)
    data = config.data
    chat = ChatFormat(tokenizer, data.template_kwargs)
    train_rows = read_rows(data.train, data, chat, data.positions)
    heldout_rows = read_rows(data.heldout, data, chat, data.heldout_positions)
    files = [data_path(name) for name in (*data.train, *data.heldout)]
    target = engine.load_target(folder, target_dtype(config.target, engine), config.target.revision)
    check_ids([*train_rows, *heldout_rows], target)
    head = build_head(config, target, train_rows)
    device = engine.device
    head.to(device)  # type: ignore[arg-type]
    with torch.autocast(device.type, torch.bfloat16, enabled=engine.bf16):
        head.bind(target.model)  # borrowed rows are held in the dtype that the run computes in
    head.train()
    training = config.training
    objective = Objective(head, target.vocab_size, training.depth_decay, engine.bf16, watch)
    layers = head.contract.layers

    def source(rows: Sequence[Row]) -> OnlineFeatures:
        lengths = [len(row.ids) for row in rows]
        batches = plan(lengths, training.tokens_per_batch, training.seed)
        return OnlineFeatures(target, rows, batches, layers)

    train = source(train_rows)
    heldout = source(heldout_rows) if heldout_rows else None
    budget = training.feature_bytes
    return Assembly(
        target=target,
        head=head,
        objective=objective,
        train=choose_features(train, training.features, budget),
        train_batches=len(train.batches),
        heldout=choose_features(heldout, training.features, budget) if heldout else None,
        heldout_batches=len(heldout.batches) if heldout else 0,
        content=",".join(rows_key(file, chat, data.max_length) for file in files),
    )


def target_folder(config: TargetConfig, engine: Engine) -> str | Path:
    """What to load the target from; the embedded one is fetched once, by rank 0."""
    if config.name != EMBEDDED:
        return config.name
    if engine.is_main:
        fetch_target(default_target(), progress=logger.info)
    engine.wait()
    return default_target()


def target_dtype(config: TargetConfig, engine: Engine) -> str:
    """The dtype name to load the target in; `auto` follows the run's precision."""
    if config.dtype != "auto":
        return config.dtype
    return "bfloat16" if engine.bf16 else "float32"


def read_rows(
    names: Sequence[str], data: DataConfig, chat: ChatFormat, cap: int | None
) -> list[Row]:
    """Conversations of all files as rows, the first ones up to `cap` positions.

    Raises ValueError, naming data.max_length, when nothing supervised is left (F04).
    """
    if not names:
        return []
    conversations = []
    for name in names:
        found, skips = read_conversations(data_path(name), data.strict)
        conversations += found
        if skips.total:
            logger.warning("%s: %s", name, skips.summary())
    rows, skips = build_rows(conversations, chat, data.max_length)
    if skips.total:
        logger.warning("%s: %s", ", ".join(names), skips.summary())
    if cap is not None:
        rows = first_rows(rows, cap)
    logger.info(
        "%s: %d rows, %d positions, %d of them supervised",
        ", ".join(names),
        len(rows),
        sum(len(row.ids) for row in rows),
        sum(sum(row.mask) for row in rows),
    )
    return rows


def first_rows(rows: Sequence[Row], positions: int) -> list[Row]:
    """Rows from the start with at most this many positions together; at least one row."""
    kept: list[Row] = []
    used = 0
    for row in rows:
        used += len(row.ids)
        if kept and used > positions:
            break
        kept.append(row)
    return kept


def check_ids(rows: Sequence[Row], target: Target) -> None:
    """Refuse rows that this target has no embedding or no position for."""
    highest = max(max(row.ids) for row in rows)
    if highest >= target.vocab_size:
        raise ValueError(
            f"target.name: token id {highest} does not fit its vocabulary of {target.vocab_size}; "
            "the tokenizer belongs to another model"
        )
    longest = max(len(row.ids) for row in rows)
    if longest > target.context:
        raise ValueError(
            f"data.max_length: a row has {longest} tokens, the target was made for {target.context}"
        )


def build_head(config: RunConfig, target: Target, rows: Sequence[Row]) -> DraftHead:
    """Make the untrained head, the same on every rank: the seed decides its weights.

    A head whose settings have `layers` or `draft_vocab_size` is served by them; one without the
    first reads the default layers, if it reads any, one without the second drafts over the whole
    vocabulary.
    """
    asked = config.head.model_dump()
    layers: tuple[int, ...] = ()
    if config.head.reads_states:
        layers = asked.get("layers") or default_layers(target.num_layers)
    contract = target.contract(layers, config.data.template_kwargs)
    contract = contract.model_copy(update={"revision": config.target.revision})
    size = asked.get("draft_vocab_size")
    draft_ids: Tensor | None = None
    if size is not None:
        counts = count_tokens((row.ids for row in rows), target.vocab_size)
        # A head that could not propose what ends an answer would miss every end.
        draft_ids = draft_vocabulary(counts, size, end_ids(target))
        covered = counts[draft_ids].sum().item() / max(1, counts.sum().item())
        logger.info("draft vocabulary: %d tokens, %.1f %% of the tokens", size, 100 * covered)
    torch.manual_seed(config.training.seed)
    head = config.head.build(contract, target.config, draft_ids)
    head.tokenizer = target.tokenizer
    return head
