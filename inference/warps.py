"""What is done to logits before a token is chosen: the logits processors of a run, in order.

A node of a tree is processed as if the tokens on the path to it had been emitted. Processors fall
into four groups, by exact type, as a subclass may do anything:

- those that look at scores alone, which drafters may apply to their own logits too;
- those that count tokens, and are shown the padding in front, because the limits they were made
  with (`min_length`, the prompt's width) count it, as `generate` does;
- those that look at which tokens there are, and are shown the real ones only: a padded row gets
  the penalties of its own single run, and a pad token in front is never a repetition;
- all others, which are refused: those with state of their own (watermarks), with another forward
  (guidance) or an encoder, and whatever is not transformers' own.

transformers has no presence or frequency penalty. `InfNanRemoveLogitsProcessor` changes nothing
here, as logits of a committed token that are not finite are an error (`sampling`).

Shapes: m rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    ExponentialDecayLengthPenalty,
    ForcedBOSTokenLogitsProcessor,
    ForcedEOSTokenLogitsProcessor,
    InfNanRemoveLogitsProcessor,
    LogitNormalization,
    LogitsProcessor,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopHLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from drafthead.inference.history import History

HISTORY_FREE = (
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TopHLogitsWarper,
    MinPLogitsWarper,
    TypicalLogitsWarper,
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    InfNanRemoveLogitsProcessor,
    LogitNormalization,
)
"""Processors that look at scores alone, and name no token: they fit a draft vocabulary, too."""

ASKED_BY = {
    "UnbatchedClassifierFreeGuidanceLogitsProcessor": "guidance_scale",
    "WatermarkLogitsProcessor": "watermarking_config",
    "SynthIDTextWatermarkLogitsProcessor": "watermarking_config",
    "EncoderRepetitionPenaltyLogitsProcessor": "encoder_repetition_penalty",
    "EncoderNoRepeatNGramLogitsProcessor": "encoder_no_repeat_ngram_size",
}
"""Settings of `generate` behind processors that are refused."""

Step = Callable[[Any, Tensor, History, Sequence[int]], Tensor]
"""Apply a processor to scores (m, V) of the token after a history and a path."""


def _by_length(
    processor: LogitsProcessor, scores: Tensor, history: History, path: Sequence[int]
) -> Tensor:
    processed: Tensor = processor(history.padded(path).expand(len(scores), -1), scores)
    return processed


def _by_text(
    processor: LogitsProcessor, scores: Tensor, history: History, path: Sequence[int]
) -> Tensor:
    processed: Tensor = processor(history.text(path).expand(len(scores), -1), scores)
    return processed


def _by_repetition(
    processor: RepetitionPenaltyLogitsProcessor,
    scores: Tensor,
    history: History,
    path: Sequence[int],
) -> Tensor:
    """Its `prompt_ignore_length` counts the padding, and may differ by row."""
    ignored = processor.prompt_ignore_length
    if isinstance(ignored, Tensor):
        ignored = int(ignored[history.index])
    # A copy without it: the row's own tokens are cut here, and there is one row.
    own = RepetitionPenaltyLogitsProcessor(processor.penalty)
    ids = history.padded(path)[:, max(history.padding, ignored or 0) :]
    processed: Tensor = own(ids.expand(len(scores), -1), scores)
    return processed


def _by_prefix(
    processor: PrefixConstrainedLogitsProcessor,
    scores: Tensor,
    history: History,
    path: Sequence[int],
) -> Tensor:
    """Its function is told the prompt's number, not the row's: prompts may be repeated. It may keep
    the tokens it is shown, which a look at another branch would change.
    """
    prompt = history.index // processor._num_beams
    allowed = processor._prefix_allowed_tokens_fn
    own = PrefixConstrainedLogitsProcessor(lambda _, ids: allowed(prompt, ids.clone()), 1)
    return _by_text(own, scores, history, path)


BY_HISTORY: dict[type[LogitsProcessor], Step] = {
    RepetitionPenaltyLogitsProcessor: _by_repetition,
    PrefixConstrainedLogitsProcessor: _by_prefix,
    NoRepeatNGramLogitsProcessor: _by_text,
    NoBadWordsLogitsProcessor: _by_text,
    SequenceBiasLogitsProcessor: _by_text,
    MinLengthLogitsProcessor: _by_length,
    MinNewTokensLengthLogitsProcessor: _by_length,
    ForcedBOSTokenLogitsProcessor: _by_length,
    ForcedEOSTokenLogitsProcessor: _by_length,
    ExponentialDecayLengthPenalty: _by_length,
    SuppressTokensAtBeginLogitsProcessor: _by_length,
    SuppressTokensLogitsProcessor: _by_length,  # looks at none, but names tokens of the target
}


class UnsupportedSamplingError(ValueError):
    """A sampling setting cannot be honoured while drafting; the message names it."""


class Warps:
    """The logits processors of a run, in order."""

    def __init__(self, processors: Iterable[LogitsProcessor] = ()) -> None:
        self._processors = list(processors)
        for processor in self._processors:
            if type(processor) not in HISTORY_FREE and type(processor) not in BY_HISTORY:
                name = type(processor).__name__
                setting = f" ({ASKED_BY[name]})" if name in ASKED_BY else ""
                raise UnsupportedSamplingError(
                    f"{name}{setting} cannot be honoured while drafting: leave it out, or generate "
                    "without custom_generate"
                )
        self.looks_back = any(type(p) in BY_HISTORY for p in self._processors)
        """Whether the same logits may be processed differently after different tokens."""

    @classmethod
    def of(cls, temperature: float, top_k: int = 0, top_p: float = 1.0) -> Warps:
        """The usual three, in transformers' order; 0 and 1.0 switch the truncations off."""
        if not temperature > 0:
            raise UnsupportedSamplingError(
                f"temperature is {temperature}: give a number above 0, or decode greedily"
            )
        if top_k < 0:
            raise UnsupportedSamplingError(f"top_k is {top_k}: give a count, 0 for all tokens")
        if not 0 < top_p <= 1:
            raise UnsupportedSamplingError(
                f"top_p is {top_p}: give a share above 0 and at most 1, 1 for all tokens"
            )
        made: list[LogitsProcessor] = []
        if temperature != 1.0:
            made.append(TemperatureLogitsWarper(float(temperature)))
        if top_k > 0:
            made.append(TopKLogitsWarper(top_k))
        if top_p < 1.0:
            made.append(TopPLogitsWarper(top_p))
        return cls(made)

    def __bool__(self) -> bool:
        """Whether there is anything to do."""
        return bool(self._processors)

    def __call__(
        self, logits: Tensor, history: History | None = None, path: Sequence[int] = ()
    ) -> Tensor:
        """(m, V) raw logits of the token after a history and a path → (m, V) warped, in at least
        fp32, where the logits are.

        `history` may be left out only where nothing `looks_back`.
        """
        scores = _precise(logits)
        if self.looks_back:
            assert history is not None
            scores = scores.to(history.device)  # where `generate` made the processors' own tensors
        for processor in self._processors:
            step = BY_HISTORY.get(type(processor))
            if step is None:
                scores = processor(None, scores)
            else:
                assert history is not None
                scores = step(processor, scores, history, path)
        return scores.to(logits.device)

    def history_free(self, logits: Tensor) -> Tensor:
        """(m, Vd) a drafter's logits → (m, Vd), by the processors that look at scores alone."""
        scores = _precise(logits)
        for processor in self._processors:
            if type(processor) in HISTORY_FREE:
                scores = processor(None, scores)
        return scores


def _precise(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()
