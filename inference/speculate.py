"""Drafting as a decoding method of Hugging Face's `generate(custom_generate=speculate(head))`.

The callable that `speculate` returns has the signature `generate` expects, so logits processors,
stopping criteria, generation configs and `return_dict_in_generate` act as users know them, in
batches padded on the left too. What cannot be honoured is refused by name (`requests`, `warps`).

Calls on one model take turns, whichever thread they come from: a run listens to the model's layers,
which would hear another's. A drafter, unlike a head, also keeps what belongs to one run, so give
each thread its own where they use several models.

Three arguments of `generate` never reach a decoding method, nor does a trace of them: `streamer`
and `tokenizer`, which `speculate` takes instead, and `assistant_model`.

At temperature > 0 the text is the target's own distribution, decided by `seed` alone: the same
seed gives the same text whichever head drafts it, or none. It is not the draw that
`do_sample=True` makes from a torch seed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import RLock
from typing import Any, Protocol
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.generation.utils import GenerateDecoderOnlyOutput

from drafthead.heads.base import DraftHead
from drafthead.heads.contract import ContractError
from drafthead.inference.costs import Costs
from drafthead.inference.decoder import Decoder, check_prompt
from drafthead.inference.drafters import Drafter, heads_of
from drafthead.inference.grow import HeadDrafter, check_rule_of, check_shape, drafting
from drafthead.inference.noise import Noise
from drafthead.inference.requests import output, refuse, rows_of
from drafthead.inference.row import Row
from drafthead.inference.sampling import Sampler
from drafthead.inference.target import Target
from drafthead.inference.tree import TreeShape, parse_shape
from drafthead.inference.verify import RULES
from drafthead.inference.warps import UnsupportedSamplingError, Warps

logger = logging.getLogger(__name__)


class Streamer(Protocol):
    """What transformers' streamers offer."""

    def put(self, value: Tensor) -> None: ...

    def end(self) -> None: ...


_COMPARED: WeakKeyDictionary[PreTrainedModel, WeakSet[DraftHead]] = WeakKeyDictionary()
"""Heads whose contract was compared with a model: done once, as it reads all its parameters."""

Plan = tuple[TreeShape, Costs | None]
"""A shape, and the costs that its drafts stop or rest by."""

_TURNS: WeakKeyDictionary[PreTrainedModel, RLock] = WeakKeyDictionary()
"""Held while a model is decoded; by the same thread again where a processor decodes, too."""


def speculate(
    drafter: DraftHead | Drafter | None,
    *,
    tree: TreeShape | str | None = None,
    rule: str = "coupled",
    lossy: bool = False,
    seed: int | None = None,
    streams: Sequence[int] | None = None,
    streamer: Streamer | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> Callable[..., Tensor | GenerateDecoderOnlyOutput]:
    """Make a decoding method of a bound head, any drafter, or None: plain keyed decoding.

    tree: how a head drafts, as `parse_shape` reads it; by default what `drafthead tune` chose for
    the head's folder, this machine and the number of rows, resting where that does not pay, or else
    a short chain; rule: one of `verify.RULES`; lossy: allow one that is not exact; seed: drawn from
    torch's generator where not given; streams: one number per row of the output that keys its
    noise, 0, 1, 2, … by default, so that the `num_return_sequences` of a prompt differ; streamer:
    gets each token as its round ends, and `end()` even where decoding fails, as a reader in another
    thread may wait for it; tokenizer: what `generate(stop_strings=…)` needs.

    Stopping criteria are shown each row alone and get no scores; one that looks at other rows
    cannot be told and sees none.
    """
    Sampler(rule=rule, lossy=lossy)  # refuses what cannot be
    if not RULES[rule].exact:
        logger.warning("rule %r is lossy: the text is not the target's own", rule)
    shape = _shape_for(drafter, tree, rule)
    measured: WeakKeyDictionary[PreTrainedModel, dict[int, Plan]] = WeakKeyDictionary()
    """Shapes and the costs they go by, once for each model and number of rows."""

    def method(
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        # Named, so that `generate` hands it over instead of asking for the tokenizer it drops.
        stop_strings: str | list[str] | None = None,
        **prepared: Any,
    ) -> Tensor | GenerateDecoderOnlyOutput:
        with _shown(streamer, input_ids) as show, _turn(model), _evaluating(model):
            target = Target(model)
            refuse(generation_config, prepared)
            warps = Warps(logits_processor)
            criteria = [*stopping_criteria, *_stopping_at(stop_strings, tokenizer)]
            mask, positions = prepared.get("attention_mask"), prepared.get("position_ids")
            rows = rows_of(input_ids, mask, positions, criteria, generation_config)
            for row in rows:
                check_prompt(target, row.ids, row.limit)
            known = measured.setdefault(model, {})
            drafts = _made(drafter, shape, target, len(rows), rule, known)
            noise = _noise(generation_config, target, len(rows), seed, streams)
            _run(target, Sampler(warps, noise, rule, lossy), drafts, rows, show)
            return output(rows, input_ids, warps, generation_config)

    return method


def _shape_for(
    drafter: DraftHead | Drafter | None, tree: TreeShape | str | None, rule: str
) -> TreeShape | None:
    """The shape that is asked for, if this drafter can draft it and the rule can verify it."""
    shape = parse_shape(tree) if isinstance(tree, str) else tree
    if isinstance(drafter, DraftHead):
        if shape is not None:
            check_shape(shape, drafter)
            check_rule_of(shape, rule)
    elif drafter is not None and not hasattr(drafter, "propose"):
        raise ValueError(f"speculate: give a bound head, a drafter or None, not {drafter!r}")
    return shape


def _made(
    drafter: DraftHead | Drafter | None,
    shape: TreeShape | None,
    target: Target,
    batch: int,
    rule: str,
    known: dict[int, Plan],
) -> Drafter | None:
    """A head's drafter is made for one run and goes with it, states and all; its plan is kept.

    Heads are compared with the target before any of them is run.
    """
    for head in [drafter] if isinstance(drafter, DraftHead) else heads_of(drafter):
        _check_fit(head, target)
        head.adapt(target.model)
    if not isinstance(drafter, DraftHead):
        return drafter
    if batch not in known:
        made = drafting(drafter, shape, target, batch, rule)
        known[batch] = (made.shape, made.costs)
    return HeadDrafter(drafter, *known[batch])


def _stopping_at(
    strings: str | list[str] | None, tokenizer: PreTrainedTokenizerBase | None
) -> list[StopStringCriteria]:
    if not strings:
        return []
    if tokenizer is None:
        raise ValueError(
            "stop_strings need the tokenizer, which generate() does not pass on: "
            "give it to speculate(tokenizer=...)"
        )
    return [StopStringCriteria(tokenizer, strings)]


def _noise(
    config: GenerationConfig,
    target: Target,
    rows: int,
    seed: int | None,
    streams: Sequence[int] | None,
) -> list[Noise] | None:
    """One stream of noise per row; none where nothing is sampled."""
    if not config.do_sample:
        return None
    key = int(torch.randint(2**62, ())) if seed is None else seed
    keys = range(rows) if streams is None else streams
    if len(keys) != rows:
        raise ValueError(f"streams: {len(keys)} given for {rows} rows")
    return [Noise(key, stream, target.vocab_size, target.device) for stream in keys]


def _check_fit(head: DraftHead, target: Target) -> None:
    """Refuse a model of another shape or device than the head's; warn once of other weights."""
    contract = head.contract
    shape = (target.config.hidden_size, target.num_layers, target.vocab_size)
    made_for = (contract.hidden_size, contract.num_layers, contract.vocab_size)
    if shape != made_for:
        raise ContractError(
            f"the head was made for target {contract.target!r}, whose (hidden_size, num_layers, "
            f"vocab_size) are {made_for}; this model's are {shape}"
        )
    if head.device != target.device:
        raise ValueError(
            f"the head is on {head.device}, the model on {target.device}: "
            f"move it with head.to({str(target.device)!r}) before speculate(head)"
        )
    compared = _COMPARED.setdefault(target.model, WeakSet())
    if head in compared:
        return
    compared.add(head)
    try:
        this = target.contract(contract.layers, contract.template_kwargs)
    except ContractError:  # weights held elsewhere: nothing to compare
        return
    if lines := contract.differences(this):
        logger.warning(
            "the head was made for target %r and this is %r (%s): the text stays this model's, "
            "drafts may be useless",
            contract.target,
            this.target,
            "; ".join(lines),
        )


def _turn(model: PreTrainedModel) -> RLock:
    """What to hold while decoding this model."""
    return _TURNS.setdefault(model, RLock())


@contextmanager
def _evaluating(model: PreTrainedModel) -> Iterator[None]:
    """Leave the model's modules in the mode they were in; decoding is done in eval mode."""
    training = [module for module in model.modules() if module.training]
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _run(
    target: Target,
    sampler: Sampler,
    drafter: Drafter | None,
    rows: list[Row],
    show: Callable[[Row], None],
) -> None:
    """Decode all rows to their ends, showing the first one's new tokens after each round."""
    capacity = max(len(row.ids) + row.limit for row in rows)
    decoder = Decoder(target, sampler, drafter, batch=len(rows), capacity=capacity)
    for slot, row in enumerate(rows):
        decoder.start(slot, row)
    show(rows[0])
    while decoder.running:
        decoder.round()
        show(rows[0])


@contextmanager
def _shown(streamer: Streamer | None, input_ids: Tensor) -> Iterator[Callable[[Row], None]]:
    """Put the prompt (1, W), then those of a row's new tokens that were not put yet, one by one as
    `generate` does; end the streamer in any case.
    """
    if streamer is None:
        yield lambda row: None
        return
    shown = 0

    def show(row: Row) -> None:
        nonlocal shown
        for token in row.ids[row.prompt + shown :]:
            streamer.put(torch.tensor([token]))
        shown = len(row.ids) - row.prompt

    try:
        if len(input_ids) > 1:
            raise UnsupportedSamplingError("a streamer shows one row: pass a batch of one")
        streamer.put(input_ids.cpu())
        yield show
    finally:
        streamer.end()
