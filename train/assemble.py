"""Bring a run's parts together: rows, teacher, head and objective.

Everything that can be refused is refused before the target is loaded. It runs no step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from drafthead.data.batches import plan
from drafthead.data.chat import ChatFormat, Row, build_rows, rows_key
from drafthead.data.conversations import Conversation, Tokenised, read_conversations
from drafthead.data.embedded import EMBEDDED, data_path, default_target, fetch_target
from drafthead.heads.base import DraftHead
from drafthead.heads.contract import Contract, check_layers
from drafthead.heads.vocabulary import count_tokens, draft_vocabulary
from drafthead.inference.target import Target
from drafthead.train.checkpoint import load_weights
from drafthead.train.config import DataConfig, RunConfig, TargetConfig
from drafthead.train.engine import Engine
from drafthead.train.objective import Objective
from drafthead.train.outline import Outline, outline_of
from drafthead.train.samples import Sample, samples_of
from drafthead.train.sources import Teacher, Texts, teacher
from drafthead.train.start import begin_from, put
from drafthead.train.teacher import Features
from drafthead.train.timing import Stopwatch

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Assembly:
    """What the loop works with."""

    teacher: Teacher
    head: DraftHead
    objective: Objective
    train: Features
    train_batches: int
    """Micro-batches of one epoch, over all ranks."""
    heldout: Features | None
    heldout_batches: int
    content: str
    """Names the files' content and all that makes rows of it."""
    samples: list[Sample]
    """Prompts of the rows, as training rendered them."""

    @property
    def target(self) -> Target | None:
        """The target, if it is loaded."""
        return self.teacher.target

    @property
    def trainable(self) -> dict[str, nn.Parameter]:
        """The head's trained parameters by name: all that an optimiser may hold."""
        return {name: p for name, p in self.head.named_parameters() if p.requires_grad}

    def announce(self) -> None:
        """Say what is trained and what is not (F29)."""
        counts = {name: p.numel() for name, p in self.trainable.items()}
        frozen = sum(p.numel() for p in self.head.parameters()) - sum(counts.values())
        target = self.target
        weights = target.num_weights if target else 0
        logger.info("training %d weights of the head", sum(counts.values()))
        logger.info("frozen: %d weights of the target, %d of the head", weights, frozen)
        logger.debug("trainable: %s", counts)


def assemble(
    config: RunConfig,
    engine: Engine,
    watch: Stopwatch,
    known: Callable[[str], None] = lambda content: None,
    begun: Mapping[str, Tensor] | None = None,
) -> Assembly:
    """Read and tokenise, load the target if need be, build and bind the head.

    `known` is told the content of the data before the target is loaded, and may refuse it. `begun`:
    weights of a run that goes on, which has no more need of `training.start`. Raises ValueError or
    OSError.
    """
    check_live(config, engine)
    outline = outline_of(target_folder(config.target, engine), config.target.revision)
    layers = head_layers(config, outline.num_layers)
    texts = read_texts(config.data, outline, config.training.agreement_prompts)
    known(texts.content)
    taught = teacher(config, engine, outline, texts, layers)
    head = build_head(config, outline, taught.contract, texts.train)
    given: Mapping[str, Tensor] = begun or {}
    if begun is not None:
        load_weights(head, begun)
    elif config.training.start is not None:
        given = begin_from(config.training.start, head)
    device = engine.device
    head.to(device)  # type: ignore[arg-type]
    with torch.autocast(device.type, torch.bfloat16, enabled=engine.bf16):
        head.bind(taught.source)  # borrowed rows are held in the dtype that the run computes in
    put(given, head)
    if taught.target is not None:
        head.adapt(taught.target.model, resting=True)  # sources go on giving what it was before
    head.train()
    training = config.training

    def features(rows: Sequence[Row]) -> tuple[Features | None, int]:
        if not rows:
            return None, 0
        batches = plan([len(row.ids) for row in rows], training.tokens_per_batch, training.seed)
        return taught.features(config, rows, batches), len(batches)

    train, train_batches = features(texts.train)
    heldout, heldout_batches = features(texts.heldout)
    assert train is not None, "rows without any are refused"
    vocab_size = outline.vocab_size
    return Assembly(
        teacher=taught,
        head=head,
        objective=Objective(head, vocab_size, training.depth_decay, engine.bf16, watch, training),
        train=train,
        train_batches=train_batches,
        heldout=heldout,
        heldout_batches=heldout_batches,
        content=texts.content,
        samples=texts.samples,
    )


def check_live(config: RunConfig, engine: Engine) -> None:
    """Refuse what a head that changes its target cannot be trained with: it runs the target."""
    if not config.head.adapts:
        return
    training, kind = config.training, f"a head of type {config.head.type!r}"
    mode = training.features
    if mode in ("store", "fill") or (mode == "auto" and config.data.states is not None):
        raise ValueError(
            f"training.features: {kind} changes its target, which must be there and run; use "
            "training.features=online or memory"
        )
    if training.partition_target:
        raise ValueError(
            f"training.partition_target: {kind} changes its target, which must be whole on every "
            "rank; leave it out"
        )
    if engine.stage == 3:
        raise ValueError(
            f"head.type: {kind} shares weights with its target, which ZeRO stage 3 cannot take "
            "apart; use stage 1 or 2, such as configs/accelerate/cpu-zero2.yaml"
        )


def read_texts(data: DataConfig, outline: Outline, samples: int = 0) -> Texts:
    """All rows of a run, which this target can read, and prompts of so many of them."""
    chat = ChatFormat(outline.tokenizer, data.template_kwargs)
    found = [read_examples(names, data) for names in (data.train, data.heldout)]
    train = rows_of(found[0], data.train, data, chat, data.positions)
    heldout = rows_of(found[1], data.heldout, data, chat, data.heldout_positions)
    check_ids([*train, *heldout], outline)
    files = [data_path(name) for name in (*data.train, *data.heldout)]
    content = ",".join(rows_key(file, chat, data.max_length) for file in files)
    chosen = samples_of(found[1] or found[0], chat, samples, data.max_length)
    return Texts(train, heldout, content, chosen)


def head_layers(config: RunConfig, num_layers: int) -> tuple[int, ...]:
    """The layers that the head reads; none if it reads tokens alone."""
    if not config.head.reads_states:
        return ()
    return check_layers(config.head.captured(num_layers), num_layers)


def target_folder(config: TargetConfig, engine: Engine) -> str | Path:
    """What to load the target from; the embedded one is fetched once, by rank 0."""
    if config.name != EMBEDDED:
        return config.name
    if engine.is_main:
        fetch_target(default_target(), progress=logger.info)
    engine.wait()
    return default_target()


def read_rows(
    names: Sequence[str], data: DataConfig, chat: ChatFormat, cap: int | None
) -> list[Row]:
    """Conversations of all files as rows, the first ones up to `cap` positions.

    Raises ValueError, naming data.max_length, when nothing supervised is left (F04).
    """
    return rows_of(read_examples(names, data), names, data, chat, cap)


def read_examples(names: Sequence[str], data: DataConfig) -> list[Conversation | Tokenised]:
    """Conversations of all files; what was skipped is told."""
    conversations: list[Conversation | Tokenised] = []
    for name in names:
        found, skips = read_conversations(data_path(name), data.strict)
        conversations += found
        if skips.total:
            logger.warning("%s: %s", name, skips.summary())
    return conversations


def rows_of(
    conversations: Sequence[Conversation | Tokenised],
    names: Sequence[str],
    data: DataConfig,
    chat: ChatFormat,
    cap: int | None,
) -> list[Row]:
    """Rows of the conversations that these files held; see `read_rows`."""
    if not names:
        return []
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


def check_ids(rows: Sequence[Row], target: Outline) -> None:
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


def build_head(
    config: RunConfig, outline: Outline, contract: Contract, rows: Sequence[Row]
) -> DraftHead:
    """Make the untrained head, the same on every rank: the seed decides its weights.

    A head whose settings have `draft_vocab_size` is served by it; one without drafts over the whole
    vocabulary.
    """
    size = config.head.model_dump().get("draft_vocab_size")
    draft_ids: Tensor | None = None
    if size is not None:
        counts = count_tokens((row.ids for row in rows), outline.vocab_size)
        # A head that could not propose what ends an answer would miss every end.
        draft_ids = draft_vocabulary(counts, size, outline.ends)
        covered = counts[draft_ids].sum().item() / max(1, counts.sum().item())
        logger.info("draft vocabulary: %d tokens, %.1f %% of the tokens", size, 100 * covered)
    torch.manual_seed(config.training.seed)
    head = config.head.build(contract, outline.config, draft_ids)
    head.tokenizer = outline.tokenizer
    return head
