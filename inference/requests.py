"""What `generate` hands over to a decoding method, read and given back: rows, ends, output.

What cannot be honoured is refused by name before any work is done. Settings that act before or
after decoding (`num_return_sequences`, `token_healing`) need nothing here.

Shapes: B rows, W width of the padded prompts, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    MaxLengthCriteria,
    StoppingCriteria,
    StopStringCriteria,
)
from transformers.generation.stopping_criteria import ConfidenceCriteria
from transformers.generation.utils import GenerateDecoderOnlyOutput

from drafthead.inference.history import History
from drafthead.inference.row import Row
from drafthead.inference.warps import UnsupportedSamplingError, Warps

IGNORED = ("attention_mask", "position_ids", "logits_to_keep", "cache", "use_cache")
"""What `generate` prepares for a forward that the decoder makes itself. Its cache stays empty, as
the decoder keeps its own, whatever `use_cache` says: neither can change the text."""

REFUSED = (
    "constraints",
    "force_words_ids",
    "penalty_alpha",
    "dola_layers",
    "prompt_lookup_num_tokens",
    "assistant_early_exit",
    "use_mtp",
    "is_assistant",
    "prefill_chunk_size",
    "output_attentions",
    "output_hidden_states",
)
"""Settings that ask for another way of decoding, or for what it leaves behind."""


def refuse(config: GenerationConfig, prepared: dict[str, Any]) -> None:
    """Name what cannot be honoured."""
    asked = {name: value for name in REFUSED if (value := getattr(config, name, None))}
    for name in ("num_beams", "num_beam_groups"):
        if (getattr(config, name, None) or 1) > 1:
            asked[name] = getattr(config, name)
    # A static cache, of whatever kind, makes no other text; these are asked for by the memory.
    cache = config.cache_implementation or ""
    if cache == "quantized" or cache.startswith("offloaded"):
        asked["cache_implementation"] = cache
    if prepared.get("logits_to_keep") not in (None, 1):
        asked["logits_to_keep"] = prepared["logits_to_keep"]
    for name, value in asked.items():
        raise UnsupportedSamplingError(
            f"{name}={value!r} cannot be honoured while drafting: leave it out"
        )
    if getattr(prepared.get("cache"), "_is_user_defined", False):
        raise UnsupportedSamplingError(
            "a cache cannot be taken over or handed back while drafting: leave it out, "
            "and pass the whole prompt"
        )
    for name, value in prepared.items():
        if name not in IGNORED and value is not None:
            raise UnsupportedSamplingError(f"{name} is not supported while drafting: leave it out")


def rows_of(
    input_ids: Tensor,
    mask: Tensor | None,
    positions: Tensor | None,
    criteria: Iterable[StoppingCriteria],
    config: GenerationConfig,
) -> list[Row]:
    """One row per prompt of (B, W) ids, without the padding in front of it.

    Raises ValueError for an empty batch, a mask of another shape, and for padding elsewhere than in
    front.
    """
    batch, width = input_ids.shape
    if not batch:
        raise ValueError("input_ids has no rows: give at least one prompt")
    # `generate` makes positions of the mask, and may drop the mask.
    if (mask is not None and mask.shape != input_ids.shape) or (
        positions is not None and positions.shape[-1] != width
    ):
        raise ValueError(
            "attention_mask or position_ids do not have one entry per token of input_ids, "
            f"{tuple(input_ids.shape)}: give as many"
        )
    real = torch.ones_like(input_ids, dtype=torch.bool) if mask is None else mask.bool()
    if (real[:, :-1] & ~real[:, 1:]).any():
        raise ValueError(
            "attention_mask hides tokens behind real ones: pad on the left, "
            "and pass a mask that shows every token of the prompts"
        )
    criteria = list(criteria)
    limits = [c.max_length for c in criteria if type(c) is MaxLengthCriteria]
    limit = max(1, min(limits, default=config.max_length) - width)  # one token comes in any case
    asked = bool(config.return_dict_in_generate)
    stop = _Stop(criteria, _Withheld() if asked and config.output_scores else None)
    rows = []
    for index, (tokens, shown) in enumerate(zip(input_ids, real, strict=True)):
        ids, padding = tokens[shown].tolist(), tokens[~shown].tolist()
        kept: list[Tensor] | None = None
        if asked and (config.output_scores or config.output_logits):
            kept = []
        rows.append(Row(ids, limit, stop, padding, kept, input_ids.device, index))
        if positions is not None and positions.dim() == 2:
            _check_positions(positions[index % len(positions)][shown], len(ids))
    return rows


def _check_positions(positions: Tensor, length: int) -> None:
    """Refuse positions of the caller's own: here a row's real tokens are counted from 0."""
    if positions.tolist() != list(range(length)):
        raise UnsupportedSamplingError(
            "position_ids other than 0, 1, 2, … are not supported while drafting: leave it out"
        )


class _Stop:
    """Stopping criteria, asked for one row at a time and for every token in order.

    They are shown the row with its padding, as lengths count it, but stop strings the real tokens
    alone, which a padding's text must not complete.
    """

    def __init__(self, criteria: Iterable[StoppingCriteria], scores: _Withheld | None) -> None:
        self._criteria = [c for c in criteria if type(c) is not MaxLengthCriteria]
        self._scores = scores
        for criterion in self._criteria:
            if type(criterion) is ConfidenceCriteria:
                raise UnsupportedSamplingError(
                    "ConfidenceCriteria needs scores, which stopping criteria do not get while "
                    "drafting: leave it out"
                )

    def __call__(self, row: Row) -> bool:
        verdicts = [self._verdict(criterion, row) for criterion in self._criteria]
        return any(verdicts)  # each is asked, as one may keep count

    def _verdict(self, criterion: StoppingCriteria, row: Row) -> bool:
        strings = type(criterion) is StopStringCriteria
        ids = row.history.text() if strings else row.history.padded()
        verdict = criterion(ids, self._scores)
        if isinstance(verdict, Tensor) and verdict.numel() != 1:
            raise UnsupportedSamplingError(
                f"{type(criterion).__name__} gave {verdict.numel()} verdicts for one row: "
                "while drafting, stopping criteria are shown each row alone"
            )
        return bool(verdict)


class _Withheld:
    """Stands where `generate` would show criteria the scores of all steps; any look is refused."""

    def __len__(self) -> int:
        self._refuse()

    def __getitem__(self, step: object) -> Tensor:
        self._refuse()

    def __iter__(self) -> Iterator[Tensor]:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise UnsupportedSamplingError(
            "stopping criteria do not get scores while drafting: use one that looks at tokens"
        )


def output(
    rows: Sequence[Row], input_ids: Tensor, warps: Warps, config: GenerationConfig
) -> Tensor | GenerateDecoderOnlyOutput:
    """Sequences padded on the right; scores and logits of the target behind each emitted token.

    Where a row ended before others, its last scores and logits are repeated.
    """
    ends = config.eos_token_id
    pad = config.pad_token_id
    if pad is None:  # as `generate` does
        pad = ends[0] if isinstance(ends, list) and ends else ends
    length = max(len(row.new_ids) for row in rows)
    fill = 0 if pad is None else int(pad)
    new = input_ids.new_full((len(rows), length), fill, dtype=torch.long)  # whatever the prompt's
    for index, row in enumerate(rows):
        new[index, : len(row.new_ids)] = torch.tensor(row.new_ids)
    sequences = torch.cat([input_ids, new], dim=1)
    if not config.return_dict_in_generate:
        return sequences
    scores = _steps(rows, length, warps) if config.output_scores else None
    # Raw logits, in at least fp32, as `generate` gives them.
    logits = _steps(rows, length, Warps()) if config.output_logits else None
    return GenerateDecoderOnlyOutput(
        sequences=sequences,  # type: ignore[arg-type]
        scores=scores,  # type: ignore[arg-type]
        logits=logits,  # type: ignore[arg-type]
    )


def _steps(rows: Sequence[Row], length: int, warps: Warps) -> tuple[Tensor, ...]:
    """(B, V) for each step: what the processors make of the logits, on the rows' own paths."""
    columns = [list(_processed(row, warps)) for row in rows]
    device = rows[0].history.device
    return tuple(
        torch.stack([column[min(step, len(column) - 1)] for column in columns]).to(device)
        for step in range(length)
    )


def _processed(row: Row, warps: Warps) -> Iterator[Tensor]:
    """(V,) for each emitted token, from a history that ends before it."""
    assert row.logits is not None
    prompt = row.ids[: row.prompt]
    history = History(prompt, len(row.ids), row.padding, row.history.device, row.index)
    for token, logits in zip(row.new_ids, row.logits, strict=True):
        yield warps(logits[None], history)[0]
        history.append(token)
