"""A smaller causal LM of the target's tokenizer that drafts: the classic draft model.

Two ways to one: the first layers of the target itself, trained to follow it like any head
(`type: sibling`), or any smaller model of the same tokenizer (`Sibling.of`, `load_sibling`). Either
is a plain Hugging Face causal LM, saved as such, and drafts through the same `Target` and `Store`
that verify: it reads tokens alone, none of the target's states (arXiv 2211.17192, 2302.01318).

Shapes: B batch, T positions, D width, V vocabulary, Vd draft vocabulary, M supervised positions,
n committed tokens, m draft nodes, S slots.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, cast

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from drafthead.heads.base import (
    DraftHead,
    HeadSettings,
    HeadState,
    Prediction,
    TeacherBatch,
    as_it_is,
    register,
)
from drafthead.heads.contract import (
    Contract,
    ContractError,
    describe,
    logit_transform,
    outline,
)
from drafthead.inference.masks import visible
from drafthead.inference.target import Target, load_target

CATCH_UP = 16
"""Most tokens that rows take in together; a row with more takes them alone, as it does a prompt."""


@register("sibling")
class SiblingSettings(HeadSettings):
    """What a user chooses about a sibling cut from the target."""

    reads_states: ClassVar[bool] = False

    type: Literal["sibling"] = "sibling"
    unroll_steps: Literal[1] = 1
    """Fixed: it reads the tokens of its own drafts, so training sees what decoding does."""
    keep_layers: int = Field(default=10, ge=1)
    """First layers of the target that it starts from and keeps."""
    start_logit_scale: float = Field(default=0.3, gt=0)
    """First weight of the final norm over the target's: below 1 the first guesses are modest."""

    def build(
        self, contract: Contract, target: PreTrainedConfig, draft_ids: Tensor | None
    ) -> Sibling:
        if self.keep_layers > contract.num_layers:
            raise ValueError(
                f"head.keep_layers: {self.keep_layers} asked for, the target has "
                f"{contract.num_layers}"
            )
        config = cut_config(target, self.keep_layers)
        lm: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for module in (lm.get_input_embeddings(), lm.get_output_embeddings()):
            module.requires_grad_(False)
        return Sibling(SiblingConfig.of(self, contract), lm)


class SiblingConfig(PreTrainedConfig):
    """Settings and contract; the model's own config is what is saved."""

    model_type = "drafthead_sibling"

    settings: dict[str, Any] | None = None
    contract: dict[str, Any] | None = None

    @classmethod
    def of(cls, settings: SiblingSettings, contract: Contract) -> SiblingConfig:
        return cls(
            settings=settings.model_dump(mode="json"), contract=contract.model_dump(mode="json")
        )


def cut_config(target: PreTrainedConfig, layers: int) -> PreTrainedConfig:
    """A copy of a target's text config with its first `layers` layers only."""
    config = copy.deepcopy(target.get_text_config())
    before = config.num_hidden_layers
    for name, value in config.to_dict().items():
        if isinstance(value, list) and len(value) == before:  # one entry a layer: layer_types, …
            setattr(config, name, value[:layers])
    config.num_hidden_layers = layers
    return config


class Sibling(DraftHead):
    """The model `lm` as a draft head; its embedding and output rows stay as they were given."""

    config_class = SiblingConfig
    config: SiblingConfig
    settings: SiblingSettings
    base_model_prefix = ""
    supports_gradient_checkpointing = True
    drafter: ClassVar[str] = "sibling"
    goes_on: ClassVar[bool] = False

    def __init__(self, config: SiblingConfig, lm: PreTrainedModel) -> None:
        super().__init__(config)
        self.contract = Contract.model_validate(config.contract)
        self.settings = SiblingSettings.model_validate(config.settings)
        self.lm = lm
        as_target = Target(lm)
        self._context = as_target.context
        self._words = min(self.contract.vocab_size, as_target.vocab_size)
        """Ids that both know: either may have padded its vocabulary further."""
        self.register_state_dict_post_hook(_without_frozen)  # type: ignore[no-untyped-call]
        self._is_bound = False

    def _embedding(self) -> nn.Module:
        return self.lm.get_input_embeddings()

    def _output(self) -> nn.Module:
        module: nn.Module = self.lm.get_output_embeddings()
        return module

    @property
    def draft_ids(self) -> Tensor:
        return torch.arange(self._words, device=self.lm.device)

    @property
    def positions(self) -> int:
        return self._context

    @classmethod
    def of(
        cls,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None,
        target: Target,
        check: bool = True,
    ) -> Sibling:
        """Let a smaller causal LM draft for a target of the same tokenizer.

        Raises ValueError where the tokenizers differ, or one of them is not known; `check=False`
        takes any model: harmless, but its drafts are useless. Raises UnsupportedTargetError for a
        model that cannot be rolled back.
        """
        if check:
            _check_tokenizers(model, tokenizer, target)
        contract = outline(target.model, target.tokenizer)
        layers = model.config.get_text_config().num_hidden_layers
        settings = SiblingSettings(keep_layers=layers)
        sibling = cls(SiblingConfig.of(settings, contract), model)
        sibling.tokenizer = tokenizer
        sibling.eval()  # type: ignore[no-untyped-call]
        return sibling

    @torch.no_grad()
    def bind(self, source: PreTrainedModel | Path, check: bool = True) -> None:
        """Copy the target's first layers and all around them; its embedding and output rows in the
        dtype that this computes in.
        """
        if not isinstance(source, PreTrainedModel):
            source = AutoModelForCausalLM.from_pretrained(source, config=self.lm.config)
        elif check:
            self.contract.check(describe(source, None, (), self.contract.template_kwargs))
        theirs = source.get_decoder().state_dict()
        ours = self.lm.get_decoder()
        for name, tensor in ours.state_dict().items():
            if name not in theirs or theirs[name].shape != tensor.shape:
                raise ContractError(
                    f"{type(source).__name__} has no {name} of shape {tuple(tensor.shape)}, which "
                    f"the sibling made for {self.contract.target!r} starts from"
                )
            tensor.copy_(theirs[name])
        self._output().load_state_dict(source.get_output_embeddings().state_dict())
        for module in (self._embedding(), self._output()):
            module.to(self._compute_dtype())
        self._scale_norm(self.settings.start_logit_scale)
        self.lm.generation_config = copy.deepcopy(source.generation_config)
        self._is_bound = True

    def _scale_norm(self, scale: float) -> None:
        """Scale what the final norm gives: a state from half-way up is no sure guess yet."""
        if self.contract.norm is None:
            return
        norm = self.lm.get_decoder().get_submodule(self.contract.norm.split(".")[-2])
        offset = self.contract.norm_offset
        norm.weight.copy_((norm.weight + offset) * scale - offset)
        if getattr(norm, "bias", None) is not None:
            norm.bias.mul_(scale)

    def _compute_dtype(self) -> torch.dtype:
        device = self.lm.device.type
        if torch.is_autocast_enabled(device):
            return torch.get_autocast_dtype(device)
        return next(p.dtype for p in self.parameters() if p.requires_grad)

    def teacher_logits(self, last_hidden: Tensor) -> Tensor:
        if not self._is_bound:
            raise ValueError(
                f"sibling of {self.contract.target!r} is not bound: call bind(target), of which "
                "it is a part, first"
            )
        output = self._output()
        dtype = cast(Tensor, output.weight).dtype
        return self.contract.transform(output(last_hidden.to(dtype)))

    # Training

    def unroll(self, batch: TeacherBatch, steps: int) -> Iterator[Prediction]:
        """See the base class; one forward serves all depths.

        Where a draft is followed at depth i, the tokens below it are the text's, so its logits are
        those of depth 0 at i positions later.
        """
        out = self.lm.get_decoder()(input_ids=batch.ids, use_cache=False)
        rows, slots = batch.supervised(1).nonzero(as_tuple=True)
        states = out.last_hidden_state[rows, slots]
        logits = logit_transform(self.lm.config)(self._output()(states))[:, : self._words]
        teacher = rows * batch.ids.shape[1] + slots
        for depth in range(steps):
            fits = slots >= depth  # its round began at or after the first token
            made, at = (logits, teacher) if fits.all() else (logits[fits], teacher[fits])
            yield Prediction(made, as_it_is, at)  # made once, for all depths

    # Decoding

    @torch.no_grad()
    def open(self, batch: int, capacity: int) -> SiblingState:
        return SiblingState(Target(self.lm), batch, capacity + CATCH_UP, self._words)

    @torch.no_grad()
    def extend(
        self, state: HeadState, features: Tensor, next_ids: Tensor, counts: Tensor
    ) -> Tensor:
        """See the base class; `features` has no columns, and a row's first token comes, too."""
        assert isinstance(state, SiblingState)
        state.start_round()
        together = counts.tolist()
        for row, count in enumerate(together):
            alone = next_ids[row : row + 1, :count]
            if count and not state.lengths[row]:
                state.prefill(row, alone[0].tolist())
            elif count > CATCH_UP:
                state.take_in(slice(row, row + 1), alone, [count])
            else:
                continue
            together[row] = 0
        if any(together):
            state.take_in(slice(0, len(together)), next_ids[:, : max(together)], together)
        return state.last.clone()

    @torch.no_grad()
    def expand(self, state: HeadState, ids: Tensor, parents: Tensor) -> Tensor:
        assert isinstance(state, SiblingState)
        return state.add(ids, parents.to(ids.device))

    # Storing

    def export(self) -> PreTrainedModel:
        """The plain causal LM, whole, in the dtype of its target."""
        lm = copy.deepcopy(self.lm)
        lm.to(getattr(torch, self.contract.dtype))
        return lm

    def save_pretrained(self, folder: str | Path, **options: Any) -> None:  # type: ignore[override]
        """Write a plain causal LM's folder, with the tokenizer where there is one."""
        self.export().save_pretrained(folder, **options)
        if self.tokenizer is not None:
            self.tokenizer.save_pretrained(folder)


class SiblingState(HeadState):
    """The sibling's own store, and who sees whom among the draft nodes of this round.

    Row b's committed slots are those of its tokens, the root the last of them; behind them lie its
    nodes in the order of expansion, until the next round drops them.
    """

    def __init__(self, target: Target, batch: int, capacity: int, words: int) -> None:
        self.target = target
        self.store = target.open(batch, capacity)
        self.lengths = self.store.lengths
        self.words = words
        device = target.device
        self.row = torch.arange(batch, device=device)[:, None]
        self.last = torch.zeros(batch, words, dtype=target.dtype, device=device)
        """(B, Vd) logits after each row's root."""
        self.start_round()

    def start_round(self) -> None:
        """Drop all draft nodes."""
        batch = self.store.batch
        self.store.drafted = 0
        # Index 0 is the root, which every node sees with the committed slots.
        self.depths = self.row.new_zeros(batch, 1)  # (B, 1 + N)
        self.ancestors = self.row.new_zeros(batch, 1, 0, dtype=torch.bool)  # (B, 1 + N, N)

    def prefill(self, row: int, ids: list[int]) -> None:
        """Begin a row."""
        self.last[row] = self.target.prefill(self.store, row, ids).logits[0, 0, : self.words]

    def take_in(self, rows: slice, tokens: Tensor, counts: Sequence[int]) -> None:
        """Commit the first counts[b] of tokens (B, n) in these rows."""
        store, n = self.store, tokens.shape[1]
        store.rows = rows
        lengths = torch.tensor(store.offsets, device=self.row.device)
        causal = torch.ones(n, n, dtype=torch.bool, device=lengths.device).tril()
        seen = visible(lengths, causal.expand(len(counts), n, n), max(store.offsets) + n)
        positions = lengths[:, None] + torch.arange(n, device=lengths.device)
        logits = self._run(tokens, positions, seen)
        store.commit([range(count) for count in counts])
        for index, row in enumerate(range(store.batch)[rows]):
            if counts[index]:
                self.last[row] = logits[index, counts[index] - 1]

    def add(self, ids: Tensor, parents: Tensor) -> Tensor:
        """Run m nodes (B, m) below their parents, -1 the root; logits (B, m, Vd)."""
        store, m = self.store, ids.shape[1]
        nodes = self.ancestors.shape[2]
        low, high = (int(bound) for bound in parents.aminmax())
        if low < -1 or high >= nodes:
            raise ValueError(f"parents {low}..{high}: this round has {nodes} nodes; -1 is the root")
        own = torch.eye(m, dtype=torch.bool, device=parents.device).expand(len(ids), m, m)
        tree = torch.cat((self.ancestors[self.row, parents + 1], own), dim=2)  # (B, m, N + m)
        depths = self.depths[self.row, parents + 1] + 1
        self.ancestors = torch.cat((F.pad(self.ancestors, (0, m)), tree), dim=1)
        self.depths = torch.cat((self.depths, depths), dim=1)
        store.rows = slice(0, store.batch)
        lengths = torch.tensor(self.lengths, device=parents.device)
        seen = visible(lengths, tree, max(store.offsets) + m)
        logits = self._run(ids, lengths[:, None] - 1 + depths, seen)
        store.drafted += m
        return logits

    def _run(self, tokens: Tensor, positions: Tensor, seen: Tensor) -> Tensor:
        # Past a row's end there are only fillers: they need some position that the model has.
        positions = positions.clamp(0, self.target.context - 1)
        return self.target.run(self.store, tokens, positions, seen)[..., : self.words]


def load_sibling(folder: str | Path, target: Target, dtype: str, check: bool = True) -> Sibling:
    """Load any smaller causal LM, a trained sibling's folder or a Hub id, to draft for a target.

    Raises as `load_target` and `Sibling.of` do.
    """
    loaded = load_target(folder, dtype, role="sibling")
    loaded.model.to(target.device)
    return Sibling.of(loaded.model, loaded.tokenizer, target, check)


def _check_tokenizers(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, target: Target
) -> None:
    """Refuse a model to which the target's ids mean something else."""
    name = model.name_or_path or model.config.model_type
    if tokenizer is None or target.tokenizer is None:
        whose = f"sibling {name!r}" if tokenizer is None else "the target"
        raise ValueError(
            f"the tokenizer of {whose} is not known: give it, so that both can be compared"
        )
    # What an id means is all that counts: text is made into ids by the target's tokenizer alone.
    if tokenizer.get_vocab() != target.tokenizer.get_vocab():
        raise ValueError(
            f"sibling {name!r} has another tokenizer than the target: take a smaller model of the "
            "target's own family, or train one with `drafthead train --config smollm2-sibling`"
        )


def _without_frozen(head: nn.Module, state: dict[str, Any], prefix: str, _facts: Any) -> None:
    """Leave the frozen tensors, which are the target's, out of what a head calls its own."""
    for name, parameter in head.named_parameters(remove_duplicate=False):
        if not parameter.requires_grad:
            state.pop(prefix + name, None)
