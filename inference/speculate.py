"""Drafting as a decoding method of Hugging Face's `generate(custom_generate=speculate(head))`.

The callable that `speculate` returns has the signature `generate` expects, so warpers, stopping
criteria, generation configs and `return_dict_in_generate` act as users know them. What cannot be
honoured is refused by name. `generate` never passes a streamer on, so `speculate` takes it.

At temperature > 0 the text is the target's own distribution, decided by `seed` alone: the same
seed gives the same text whichever head drafts it, or none. It is not the draw that
`do_sample=True` makes from a torch seed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    MaxLengthCriteria,
    PreTrainedModel,
    StoppingCriteriaList,
)
from transformers.generation.utils import GenerateDecoderOnlyOutput

from drafthead.heads.base import DraftHead
from drafthead.heads.contract import ContractError, describe
from drafthead.inference.decoder import Decoder, Row, check_prompt
from drafthead.inference.drafters import Drafter, HeadDrafter, head_of
from drafthead.inference.noise import Noise
from drafthead.inference.sampling import Sampler, UnsupportedSamplingError, Warps
from drafthead.inference.target import Target
from drafthead.inference.tree import Shape

logger = logging.getLogger(__name__)


class Streamer(Protocol):
    """What transformers' streamers offer."""

    def put(self, value: Tensor) -> None: ...

    def end(self) -> None: ...


IGNORED = ("attention_mask", "position_ids", "logits_to_keep", "cache", "use_cache")
"""What `generate` prepares for a forward that the decoder makes itself."""

REFUSED = ("output_attentions", "output_hidden_states")

_COMPARED: WeakKeyDictionary[PreTrainedModel, WeakSet[DraftHead]] = WeakKeyDictionary()
"""Heads whose contract was compared with a model: done once, as it reads all its parameters."""


def speculate(
    drafter: DraftHead | Drafter | None,
    *,
    tree: Shape | str = "chain:4",
    rule: str = "coupled",
    seed: int | None = None,
    streams: Sequence[int] | None = None,
    streamer: Streamer | None = None,
) -> Callable[..., Tensor | GenerateDecoderOnlyOutput]:
    """Make a decoding method of a bound head, any drafter, or None: plain keyed decoding.

    tree: how a head drafts, `chain:K` or `tree:DEPTHxWIDTH:NODES`; rule: `coupled` (default) or
    `rejection` (chains), both exact; seed: drawn from torch's generator where not given; streams:
    one number per row that keys its noise, the row's index in the batch by default. Stop strings
    go into `stopping_criteria` (`StopStringCriteria`): with `stop_strings` `generate` raises.
    """
    shape = Shape.parse(tree) if isinstance(tree, str) else tree
    made = HeadDrafter(drafter, shape) if isinstance(drafter, DraftHead) else drafter
    if made is not None and not hasattr(made, "propose"):
        raise ValueError(f"speculate: give a bound head, a drafter or None, not {made!r}")
    head = head_of(made)

    def method(
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        **prepared: Any,
    ) -> Tensor | GenerateDecoderOnlyOutput:
        _refuse(generation_config, prepared)
        if head is not None:
            _check_fit(head, model)
        mask = prepared.get("attention_mask")
        rows = _rows(input_ids, mask, stopping_criteria, generation_config)
        _check_positions(prepared.get("position_ids"), mask, rows)
        warps = Warps(logits_processor)
        with _evaluating(model):
            target = Target(model)
            for row in rows:
                check_prompt(target, row.ids, row.limit)
            noise = None
            if generation_config.do_sample:
                key = int(torch.randint(2**62, ())) if seed is None else seed
                keys = range(len(rows)) if streams is None else streams
                noise = [Noise(key, s, target.vocab_size, target.device) for s in keys]
                if len(noise) != len(rows):
                    raise ValueError(f"streams: {len(noise)} given for {len(rows)} rows")
            _run(target, Sampler(warps, noise, rule), made, rows, streamer, input_ids)
        return _output(rows, input_ids, warps, generation_config)

    return method


def _refuse(config: GenerationConfig, prepared: dict[str, Any]) -> None:
    """Name what cannot be honoured, before any work."""
    if (config.num_beams or 1) > 1:
        raise UnsupportedSamplingError("num_beams > 1 cannot be drafted for: set num_beams=1")
    for name in REFUSED:
        if getattr(config, name, None) or prepared.pop(name, None):
            raise UnsupportedSamplingError(
                f"{name}=True is not available while drafting: leave it out"
            )
    cache = prepared.get("cache")
    if cache is not None and cache.get_seq_length() > 0:
        raise UnsupportedSamplingError(
            "a filled cache cannot be taken over: pass the whole prompt instead"
        )
    for name, value in prepared.items():
        if name not in IGNORED and value is not None:
            raise UnsupportedSamplingError(f"{name} is not supported while drafting: leave it out")


def _check_fit(head: DraftHead, model: PreTrainedModel) -> None:
    """Refuse a model of another shape or device than the head's; warn once of other weights."""
    contract, config = head.contract, model.config.get_text_config()
    shape = (config.hidden_size, config.num_hidden_layers, config.vocab_size)
    made_for = (contract.hidden_size, contract.num_layers, contract.vocab_size)
    if shape != made_for:
        raise ContractError(
            f"the head was made for target {contract.target!r}, whose (hidden_size, num_layers, "
            f"vocab_size) are {made_for}; this model's are {shape}"
        )
    if head.device != model.device:
        raise ValueError(
            f"the head is on {head.device}, the model on {model.device}: "
            "move it with head.to(model.device) before speculate(head)"
        )
    compared = _COMPARED.setdefault(model, WeakSet())
    if head in compared:
        return
    compared.add(head)
    try:
        this = describe(model, None, contract.layers, contract.template_kwargs)
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


def _check_positions(positions: Tensor | None, mask: Tensor | None, rows: Sequence[Row]) -> None:
    """Refuse positions of the caller's own: here a row's real tokens are counted from 0."""
    if positions is None or positions.dim() != 2:
        return
    for index, row in enumerate(rows):
        own = positions[index % len(positions)]
        own = own if mask is None else own[mask[index].bool()]
        if own.tolist() != list(range(len(row.ids))):
            raise UnsupportedSamplingError(
                "position_ids other than 0, 1, 2, … are not supported while drafting: leave it out"
            )


@contextmanager
def _evaluating(model: PreTrainedModel) -> Iterator[None]:
    """Leave the model's modules in the mode they were in; decoding is done in eval mode."""
    training = [module for module in model.modules() if module.training]
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _rows(
    input_ids: Tensor,
    mask: Tensor | None,
    criteria: StoppingCriteriaList,
    config: GenerationConfig,
) -> list[Row]:
    """One row per prompt, without its padding, which only stopping criteria go on to see."""
    limits = [c.max_length for c in criteria if isinstance(c, MaxLengthCriteria)]
    others = StoppingCriteriaList(c for c in criteria if not isinstance(c, MaxLengthCriteria))
    width = input_ids.shape[1]
    limit = min(limits, default=config.max_length) - width
    rows = []
    for index, tokens in enumerate(input_ids):
        ids = (tokens if mask is None else tokens[mask[index].bool()]).tolist()
        padding = tokens.tolist()[: width - len(ids)]

        def stop(so_far: Sequence[int], padding: list[int] = padding) -> bool:
            if not others:
                return False
            seen = torch.tensor([[*padding, *so_far]], device=input_ids.device)
            return bool(others(seen, None).all())

        wants = config.return_dict_in_generate and (config.output_scores or config.output_logits)
        rows.append(Row(ids, len(ids), limit, stop, logits=[] if wants else None))
    return rows


def _run(
    target: Target,
    sampler: Sampler,
    drafter: Drafter | None,
    rows: list[Row],
    streamer: Streamer | None,
    input_ids: Tensor,
) -> None:
    capacity = max(len(row.ids) + row.limit for row in rows)
    decoder = Decoder(target, sampler, drafter, batch=len(rows), capacity=capacity)
    shown = [len(row.ids) for row in rows]
    if streamer is not None:
        if len(rows) > 1:
            raise UnsupportedSamplingError("a streamer shows one row: pass a batch of one")
        streamer.put(input_ids.cpu())

    def show() -> None:
        if streamer is not None:
            streamer.put(torch.tensor(rows[0].ids[shown[0] :]))
            shown[0] = len(rows[0].ids)

    for slot, row in enumerate(rows):
        decoder.start(slot, row)
    show()
    while decoder.running:
        decoder.round()
        show()
    if streamer is not None:
        streamer.end()


def _output(
    rows: list[Row], input_ids: Tensor, warps: Warps, config: GenerationConfig
) -> Tensor | GenerateDecoderOnlyOutput:
    """Sequences padded on the right; scores and logits of the target behind each emitted token."""
    ends = config.eos_token_id
    pad = config.pad_token_id
    if pad is None:  # as `generate` does
        pad = ends[0] if isinstance(ends, list) and ends else ends
    length = max(len(row.new_ids) for row in rows)
    new = input_ids.new_full((len(rows), length), 0 if pad is None else int(pad))
    for index, row in enumerate(rows):
        new[index, : len(row.new_ids)] = torch.tensor(row.new_ids)
    sequences = torch.cat([input_ids, new], dim=1)
    if not config.return_dict_in_generate:
        return sequences
    logits = [row.logits for row in rows if row.logits is not None]
    steps: tuple[Tensor, ...] | None = None
    if logits:
        # A row that ended early repeats its last logits, as there is nothing behind its padding.
        plain = Warps()  # at least fp32, as `generate` gives them
        steps = tuple(
            plain(torch.stack([r[min(i, len(r) - 1)] for r in logits])) for i in range(length)
        )
    scored = None if steps is None else tuple(warps(step) for step in steps)
    return GenerateDecoderOnlyOutput(
        sequences=sequences,  # type: ignore[arg-type]
        scores=scored if config.output_scores else None,  # type: ignore[arg-type]
        logits=steps if config.output_logits else None,  # type: ignore[arg-type]
    )
