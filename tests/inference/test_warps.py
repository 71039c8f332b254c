"""Which processors are honoured, and what they are shown."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    MinLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
)
from transformers.generation import logits_process

from drafthead.inference.history import History
from drafthead.inference.warps import (
    BY_HISTORY,
    HISTORY_FREE,
    UnsupportedSamplingError,
    Warps,
)

V = 13


def scores_of(rows: int = 1, seed: int = 0) -> Tensor:
    return torch.randn(rows, V, generator=torch.Generator().manual_seed(seed), dtype=torch.double)


def test_every_processor_of_transformers_is_honoured_or_refused_on_purpose() -> None:
    """A new one must be read before it joins either side."""
    known = {
        kind
        for kind in vars(logits_process).values()
        if isinstance(kind, type) and issubclass(kind, LogitsProcessor)
    }
    refused = {kind.__name__ for kind in known - {LogitsProcessor, *HISTORY_FREE, *BY_HISTORY}}
    assert refused == {
        "AlternatingCodebooksLogitsProcessor",
        "BarkEosPrioritizerLogitsProcessor",
        "ClassifierFreeGuidanceLogitsProcessor",
        "DiaClassifierFreeGuidanceLogitsProcessor",
        "DiaEOSChannelFilterLogitsProcessor",
        "DiaEOSDelayPatternLogitsProcessor",
        "EncoderNoRepeatNGramLogitsProcessor",
        "EncoderRepetitionPenaltyLogitsProcessor",
        "SynthIDTextWatermarkLogitsProcessor",
        "UnbatchedClassifierFreeGuidanceLogitsProcessor",
        "WatermarkLogitsProcessor",
        "WhisperNoSpeechDetection",
        "WhisperTimeStampLogitsProcessor",
    }


def test_a_subclass_is_refused_in_one_line() -> None:
    class Temperature(TemperatureLogitsWarper):  # type: ignore[misc]
        pass

    class Penalty(RepetitionPenaltyLogitsProcessor):  # type: ignore[misc]
        pass

    for processor in (Temperature(0.5), Penalty(1.3)):
        with pytest.raises(UnsupportedSamplingError, match="cannot be honoured") as caught:
            Warps([processor])
        assert type(processor).__name__ in str(caught.value)
        assert "\n" not in str(caught.value)


BY_TEXT: dict[str, Callable[[], Any]] = {
    "repetition": lambda: RepetitionPenaltyLogitsProcessor(1.3),
    "n-grams": lambda: NoRepeatNGramLogitsProcessor(2),
    "bad words": lambda: NoBadWordsLogitsProcessor([[3, 4], [4, 3, 5]]),
    "bias": lambda: SequenceBiasLogitsProcessor({(3, 4): 2.0, (5,): -1.0, (4, 3, 7): 3.0}),
}


@pytest.mark.parametrize("name", BY_TEXT)
def test_f52_a_node_is_processed_as_if_its_path_had_been_emitted(name: str) -> None:
    """Paths of other branches, and looks at them in any order, leave nothing behind."""
    warps, truth = Warps([BY_TEXT[name]()]), BY_TEXT[name]()
    history = History([3, 4, 4, 3], capacity=12)
    scores = scores_of(2)
    for path in ([], [4, 3], [4], [5, 4, 3, 4], [4, 4], []):
        ids = torch.tensor([[3, 4, 4, 3, *path]] * 2)
        assert torch.equal(warps(scores, history, path), truth(ids, scores))
    history.append(5)
    ids = torch.tensor([[3, 4, 4, 3, 5, 3]] * 2)
    assert torch.equal(warps(scores, history, [3]), truth(ids, scores))
    assert torch.equal(scores, scores_of(2)), "the logits are not changed"


@pytest.mark.parametrize("name", BY_TEXT)
def test_f54_which_tokens_there_are_is_told_by_real_ones_alone(name: str) -> None:
    warps = Warps([BY_TEXT[name]()])
    bare, padded = History([3], capacity=8), History([3], capacity=8, padding=[3, 6, 5, 4])
    for path in ([], [4], [4, 3]):
        assert torch.equal(warps(scores_of(), padded, path), warps(scores_of(), bare, path))
    ids = torch.tensor([[3, 6, 5, 4, 3]])
    shown = BY_TEXT[name]()(ids, scores_of())
    assert not torch.equal(shown, warps(scores_of(), padded)), "the padding would have told"


def test_lengths_count_the_padding() -> None:
    """As `generate` counts it: its limits are made from the padded width."""
    processor = MinLengthLogitsProcessor(6, 7)
    warps = Warps([processor])
    for pads, path, banned in ((0, [], True), (0, [1, 2], False), (2, [], False), (1, [], True)):
        history = History([3, 4, 4, 3], capacity=8, padding=[9] * pads)
        assert (warps(scores_of(), history, path)[0, 7] == -torch.inf) == banned


@pytest.mark.parametrize("ignored", [3, torch.tensor([99, 3, 99])])
def test_a_penalty_may_leave_out_the_prompt_of_a_row(ignored: Any) -> None:
    """Counted from the padded start, as transformers counts it."""
    warps = Warps([RepetitionPenaltyLogitsProcessor(1.3, prompt_ignore_length=ignored)])
    history = History([3, 4, 5], capacity=8, padding=[9], index=1)
    truth = RepetitionPenaltyLogitsProcessor(1.3)
    for path in ([], [6], [6, 7]):
        wanted = truth(torch.tensor([[5, *path]]), scores_of())
        assert torch.equal(warps(scores_of(), history, path), wanted)
    short = History([], capacity=8, padding=[9], index=1)
    assert torch.equal(warps(scores_of(), short), scores_of())


def test_processors_keep_their_order() -> None:
    history = History([3, 4], capacity=4)
    made = [RepetitionPenaltyLogitsProcessor(5.0), TopKLogitsWarper(2)]
    for processors in (made, made[::-1]):
        wanted = scores_of()
        for processor in processors:
            wanted = processor(history.text(), wanted)
        assert torch.equal(Warps(processors)(scores_of(), history), wanted)


def test_drafters_get_what_looks_at_scores_alone() -> None:
    """Their vocabulary may be another, so nothing that names a token of the target's."""
    free = [TemperatureLogitsWarper(0.5), TopKLogitsWarper(3)]
    bound = [RepetitionPenaltyLogitsProcessor(1.3), SuppressTokensLogitsProcessor([1])]
    mixed = Warps([bound[0], free[0], bound[1], free[1]])
    assert mixed.looks_back
    assert not Warps(free).looks_back
    assert torch.equal(mixed.history_free(scores_of(3)), Warps(free)(scores_of(3)))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": 0}, "temperature is 0: give a number above 0"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"temperature": 1.0, "top_k": -1}, "top_k is -1: give a count"),
        ({"temperature": 1.0, "top_p": 0.0}, "top_p is 0.0: give a share"),
        ({"temperature": 1.0, "top_p": 1.5}, "top_p is 1.5: give a share"),
    ],
)
def test_settings_out_of_range_are_refused_in_one_line(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedSamplingError, match=message) as caught:
        Warps.of(**settings)
    assert "\n" not in str(caught.value)


def test_whole_numbers_are_temperatures_too() -> None:
    assert torch.equal(Warps.of(2)(scores_of()), scores_of() / 2)


def test_scores_are_at_least_single_precision() -> None:
    assert Warps.of(0.5)(scores_of().bfloat16()).dtype == torch.float32
    assert Warps.of(0.5)(scores_of()).dtype == torch.float64
