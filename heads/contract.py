"""The contract between a head and its target: what is read, what is borrowed, of which weights.

Made once from the live target (`describe`), stored with features, checkpoints and exports, compared
wherever one of them is read (`Contract.check`). It knows no head and loads no model.

Layer ids follow one convention: id L is the residual stream entering layer L (counted from 0), that
is the output of layer L - 1; the id equal to the number of layers is the stream that leaves the
last layer, before the final norm. Id -1 (`LAST`) is that stream after the final norm, what the
output rows see.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

LAST = -1
"""The layer id of what the target's output rows see, after its final norm."""

ADAPTER = "drafthead"
"""What PEFT calls the adapter that a head puts into a live target."""

SAMPLES = 64
"""Elements of each parameter that enter the fingerprint."""

MULTIPLIERS = ("logit_scale",)
DIVISORS = ("logits_scaling",)
MULTIPLIED_BY_SCALING = {"hyperclovax"}
"""Model types that multiply by `logits_scaling`, where Granite divides."""


Whole = Callable[[list[nn.Parameter]], AbstractContextManager[None]]
"""Holds parameters whole inside its block; for a model whose parameters are spread over ranks."""


def as_held(_parameters: list[nn.Parameter]) -> AbstractContextManager[None]:
    """The `Whole` of an ordinary model: its parameters are whole anyway."""
    return nullcontext()


class ContractError(ValueError):
    """Head and target do not fit together."""


class LogitTransform(NamedTuple):
    """What a target does to the product of a state and its output rows."""

    scale: float
    softcap: float | None

    def __call__(self, logits: Tensor) -> Tensor:
        """Scale, then cap with cap * tanh(x / cap); the same tensor when neither is set."""
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits


class Contract(BaseModel):
    """What a head was trained against. Frozen; unknown keys are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    target: str
    """Hub id or folder name, never a path."""
    revision: str | None = None
    fingerprint: str | None
    """Of the weights; None for a drafter that depends on none of them."""
    model_type: str
    hidden_size: int
    vocab_size: int
    """Rows of the embedding, padding included: not the tokenizer's size."""
    num_layers: int
    layers: tuple[int, ...]
    """Captured states, ascending (see the module's convention); none: the head reads tokens."""
    tokenizer: str | None
    """sha256 of the tokenizer's content; None where none was given."""
    template: str | None
    """sha256 of the chat template and its keyword arguments."""
    template_kwargs: dict[str, Any] = {}
    dtype: str
    embedding: str
    """Parameter name of the input embedding (V, D)."""
    output: str
    """Parameter name of the output rows (V, D): the embedding's when they are tied."""
    norm: str | None
    """Parameter name of the final norm's weight (D,), if the target has one."""
    norm_offset: float = 0.0
    """Added to the stored norm weight before use: 1 in Gemma's convention."""
    logit_scale: float = 1.0
    logit_softcap: float | None = None

    @property
    def transform(self) -> LogitTransform:
        return LogitTransform(self.logit_scale, self.logit_softcap)

    def differences(self, other: Contract) -> list[str]:
        """One line for each fact that would make a head of `self` wrong on `other`.

        Name, revision and dtype are not compared (the same weights under another name are the same
        target), nor a fingerprint, tokenizer or template that one side does not know.
        """
        lines = []
        for field in COMPARED:
            mine, theirs = getattr(self, field), getattr(other, field)
            if mine != theirs and not (field in OPTIONAL and None in (mine, theirs)):
                lines.append(f"{field} is {_short(theirs)}, the head expects {_short(mine)}")
        return lines

    def check(self, other: Contract) -> None:
        """Raise ContractError, naming both targets, unless the head was made for `other`."""
        lines = self.differences(other)
        if lines:
            raise ContractError(
                f"the head was made for target {self.target!r} and does not fit {other.target!r}: "
                + "; ".join(lines)
            )


COMPARED = (
    "model_type",
    "hidden_size",
    "vocab_size",
    "num_layers",
    "layers",
    "fingerprint",
    "tokenizer",
    "template",
    "template_kwargs",
    "logit_scale",
    "logit_softcap",
)
OPTIONAL = {"fingerprint", "tokenizer", "template"}


def _short(value: object) -> str:
    text = str(value)
    return text[:12] + "…" if len(text) == 64 else text


def default_layers(num_layers: int) -> tuple[int, int, int]:
    """Pick early, middle and late: (2, n // 2, n - 3), as servers of EAGLE-3 do.

    Raises ValueError for fewer than 7 layers, where they would collide.
    """
    layers = (2, num_layers // 2, num_layers - 3)
    if num_layers < 7:
        raise ValueError(
            f"head.layers: the default {layers} collides on a target of {num_layers} layers; "
            f"set it to distinct ids in 1..{num_layers}, for example "
            f"{list(range(1, min(num_layers, 3) + 1))}"
        )
    return layers


def check_layers(layers: Iterable[int], num_layers: int) -> tuple[int, ...]:
    """Return the ids as a tuple; ValueError unless strictly ascending and in 1..num_layers.

    LAST may stand before them, or alone.
    """
    ids = tuple(layers)
    ascending = all(a < b for a, b in itertools.pairwise(ids))
    inner = ids[1:] if ids[:1] == (LAST,) else ids
    if not ids or not ascending or any(not 1 <= layer <= num_layers for layer in inner):
        raise ValueError(
            f"head.layers: {list(ids)} must be distinct ascending ids in 1..{num_layers} "
            f"({num_layers} is the state that leaves the last layer; {LAST}, the same after the "
            "final norm, may come first)"
        )
    return ids


def inner_layers(layers: Iterable[int]) -> tuple[int, ...]:
    """The ids but LAST, whose state is kept with every sequence anyway."""
    return tuple(layer for layer in layers if layer != LAST)


def logit_transform(config: PreTrainedConfig) -> LogitTransform:
    """Read scale and soft cap from a target's config, in the several spellings of transformers."""
    text = config.get_text_config()
    fields = text.to_dict()
    scale = 1.0
    for name in MULTIPLIERS + DIVISORS:
        value = fields.get(name)
        if value is not None:
            divides = name in DIVISORS and text.model_type not in MULTIPLIED_BY_SCALING
            scale *= 1.0 / float(value) if divides else float(value)
    cap = fields.get("final_logit_softcapping")
    return LogitTransform(scale, None if cap is None else float(cap))


def fingerprint(model: PreTrainedModel, whole: Whole = as_held) -> str:
    """Hash a strided sample of every parameter, rounded to bf16: (hex sha256).

    The same for fp32 and bf16 loads of one bf16 file, under any folder name, and for a model that
    is spread over ranks, of which `whole` puts one parameter together at a time. What a head has
    put into the model (`DraftHead.adapt`) is left out.
    Raises ContractError where a parameter is not held in this process.
    """
    digest = hashlib.sha256()
    for name, parameter in own_parameters(model):
        with whole([parameter]):
            flat, shape = held(name, parameter).reshape(-1), tuple(parameter.shape)
            index = torch.arange(SAMPLES, device=flat.device) * flat.numel() // SAMPLES
            sample = flat[index].to(torch.bfloat16).cpu().view(torch.int16)
        digest.update(f"{name}{shape}".encode())
        digest.update(sample.numpy().tobytes())
    return digest.hexdigest()


def own_parameters(model: PreTrainedModel) -> list[tuple[str, nn.Parameter]]:
    """A target's parameters, by the names they have where no head has adapted it."""
    named = list(model.named_parameters())
    own = [(name, p) for name, p in named if f".{ADAPTER}." not in name]
    if len(own) == len(named):
        return own
    return [(name.replace(".base_layer.", "."), parameter) for name, parameter in own]


def held(name: str, parameter: Tensor) -> Tensor:
    """Return the detached parameter; ContractError if its values are elsewhere."""
    if parameter.is_meta or parameter.numel() == 0:
        raise ContractError(
            f"target parameter {name} is not in this process (partitioned or offloaded); "
            "use the target's folder instead of the live model"
        )
    return parameter.detach()


def tokenizer_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """Hash the tokenizer's content: vocabulary, merges, normaliser, special tokens."""
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ValueError(
            f"tokenizer {type(tokenizer).__name__} is not a fast one; load it with use_fast=True"
        )
    return hashlib.sha256(backend.to_str().encode()).hexdigest()


def template_hash(tokenizer: PreTrainedTokenizerBase, kwargs: Mapping[str, Any]) -> str:
    """Hash the chat template's text together with the arguments it is rendered with."""
    content = json.dumps([tokenizer.chat_template, dict(sorted(kwargs.items()))], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()


def describe(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    layers: Iterable[int],
    template_kwargs: Mapping[str, Any],
    revision: str | None = None,
    whole: Whole = as_held,
) -> Contract:
    """Write down the contract of a live target; ContractError if a head cannot borrow from it."""
    config = model.config.get_text_config()
    embedding, output = model.get_input_embeddings(), model.get_output_embeddings()
    if embedding is None or output is None:
        raise ContractError(f"target {config.model_type}: no embedding or output rows to borrow")
    layers = tuple(layers)
    # A head that reads tokens alone is a language model, whose output module is used whole.
    if layers and getattr(output, "bias", None) is not None:
        raise ContractError(
            f"target {config.model_type}: output rows with a bias are not supported; "
            "use a target whose lm_head has none"
        )
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    norm_name, norm_offset = _final_norm(model, names, whole)
    with whole([output.weight]):
        vocab_size = output.weight.shape[0]
    scale, softcap = logit_transform(config)
    return Contract(
        target=_target_name(model),
        revision=revision,
        fingerprint=fingerprint(model, whole),
        model_type=config.model_type,
        hidden_size=config.hidden_size,
        vocab_size=vocab_size,
        num_layers=config.num_hidden_layers,
        layers=check_layers(layers, config.num_hidden_layers) if layers else (),
        tokenizer=None if tokenizer is None else tokenizer_hash(tokenizer),
        template=None if tokenizer is None else template_hash(tokenizer, template_kwargs),
        template_kwargs=dict(template_kwargs),
        dtype=str(model.dtype).removeprefix("torch."),
        embedding=names[id(embedding.weight)],
        output=names[id(output.weight)],
        norm=norm_name,
        norm_offset=norm_offset,
        logit_scale=scale,
        logit_softcap=softcap,
    )


def outline(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> Contract:
    """The contract of a drafter that reads tokens alone and borrows nothing.

    It reads no weights, so it does for a target that is offloaded or partitioned, too.
    """
    config = model.config.get_text_config()
    return Contract(
        target=_target_name(model),
        fingerprint=None,
        model_type=config.model_type,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        num_layers=config.num_hidden_layers,
        layers=(),
        tokenizer=None if tokenizer is None else tokenizer_hash(tokenizer),
        template=None,
        dtype=str(model.dtype).removeprefix("torch."),
        embedding="",
        output="",
        norm=None,
    )


def _target_name(model: PreTrainedModel) -> str:
    """Shorten a path to its last part; a Hub id (one slash, no such folder) stays whole."""
    name = model.name_or_path or ""
    path = Path(name)
    is_path = path.is_absolute() or name.count("/") > 1 or name.startswith(".") or path.exists()
    if name and is_path:
        return path.resolve().name
    return name or f"unnamed {model.config.model_type}"


def _final_norm(
    model: PreTrainedModel, names: Mapping[int, str], whole: Whole
) -> tuple[str | None, float]:
    """Find the decoder's last norm among its direct children; its name and its weight's offset."""
    norms = [c for c in model.get_decoder().children() if "norm" in type(c).__name__.lower()]
    if not norms or not isinstance(getattr(norms[-1], "weight", None), Tensor):
        return None, 0.0
    norm = norms[-1]
    with whole(list(norm.parameters())), torch.no_grad():
        weight = held("of the final norm", norm.weight)
        # Alternating signs have mean 0 and square 1: any norm returns its effective weight on them.
        signs = torch.ones_like(weight)
        signs[1::2] = -1
        effective = norm.forward(signs[None])[0] * signs  # past the hooks of whoever spreads it
        bias = getattr(norm, "bias", None)
        if bias is not None:
            effective = effective - bias * signs
        offset = round((effective.float() - weight.float()).mean().item())
    return names[id(norm.weight)], float(offset)
