"""What is known of a target without its weights: config, tokenizer, ends, files.

So a run can be refused before a target is loaded, and trained from stored states without one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils.hub import cached_file

from drafthead.heads.borrowed import borrow
from drafthead.heads.contract import Contract, logit_transform, template_hash, tokenizer_hash
from drafthead.inference.target import context_of, load_tokenizer

SAMPLES = 4096
"""Elements of each borrowed tensor that enter its mark."""
INDEX, WEIGHTS = "model.safetensors.index.json", "model.safetensors"


@dataclass(frozen=True)
class Outline:
    """A target's small files."""

    name: str | Path
    """Folder or Hub id."""
    revision: str | None
    config: PreTrainedConfig
    """Of its text model."""
    tokenizer: PreTrainedTokenizerBase
    ends: list[int]
    """The ids that end an answer, ascending."""

    @property
    def vocab_size(self) -> int:
        return int(self.config.vocab_size)

    @property
    def num_layers(self) -> int:
        return int(self.config.num_hidden_layers)

    @property
    def width(self) -> int:
        return int(self.config.hidden_size)

    @property
    def context(self) -> int:
        """Most positions the model was made for."""
        return context_of(self.config)

    def facts(self, template_kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The fields of the target's contract that need no weights."""
        scale, softcap = logit_transform(self.config)
        return {
            "model_type": self.config.model_type,
            "hidden_size": self.width,
            "num_layers": self.num_layers,
            "tokenizer": tokenizer_hash(self.tokenizer),
            "template": template_hash(self.tokenizer, template_kwargs),
            "template_kwargs": dict(template_kwargs),
            "logit_scale": scale,
            "logit_softcap": softcap,
        }

    def files(self, names: Collection[str] | None) -> Path:
        """The folder with the safetensors that hold these tensors, or all where None.

        Of a Hub id, only those files are downloaded.
        """
        if Path(self.name).is_dir():
            return Path(self.name)
        index = self._cached(INDEX)
        if index is None:
            whole = self._cached(WEIGHTS)
            if whole is None:
                raise OSError(f"target {str(self.name)!r}: no {WEIGHTS} to read without loading it")
            return whole.parent
        places: dict[str, str] = json.loads(index.read_text())["weight_map"]
        wanted = places if names is None else names
        for file in sorted({places[name] for name in wanted if name in places}):
            self._cached(file)
        return index.parent

    def _cached(self, file: str) -> Path | None:
        found = cached_file(
            str(self.name),
            file,
            revision=self.revision,
            _raise_exceptions_for_missing_entries=False,
        )
        return None if found is None else Path(found)


def outline_of(name: str | Path, revision: str | None) -> Outline:
    """Read a target's small files; what is missing or broken is one line."""
    tokenizer = load_tokenizer(name, revision)
    try:
        whole = AutoConfig.from_pretrained(name, revision=revision)
    except (OSError, ValueError) as error:
        first = (str(error) or repr(error)).splitlines()[0].rstrip(" :")
        raise OSError(f"target {str(name)!r} cannot be loaded: {first}") from error
    try:
        generation = GenerationConfig.from_pretrained(str(name), revision=revision or "main")
    except OSError:  # most targets of older releases have none
        generation = GenerationConfig.from_model_config(whole)
    declared = generation.eos_token_id
    ends = {declared} if isinstance(declared, int) else set(declared or ())
    if tokenizer.eos_token_id is not None:
        ends.add(tokenizer.eos_token_id)
    return Outline(name, revision, whole.get_text_config(), tokenizer, sorted(ends))


def borrowed_mark(source: PreTrainedModel | Path, contract: Contract) -> str:
    """Hash a sample of the tensors that heads borrow: the same of a live target and of its files.

    Tells most other targets of the same shape where only those tensors can be read.
    """
    parts = borrow(source, contract, None, check=False)
    tensors = [parts.embedding, parts.rows]
    if parts.norm is not None and not contract.norm_offset:  # else rounded once more
        tensors.append(parts.norm)
    digest = hashlib.sha256()
    for tensor in tensors:
        flat = tensor.reshape(-1)
        index = torch.arange(SAMPLES, device=flat.device) * flat.numel() // SAMPLES
        # In the target's dtype first: the files may hold a wider one.
        sample = flat[index].to(getattr(torch, contract.dtype)).to(torch.bfloat16)
        digest.update(sample.cpu().view(torch.int16).numpy().tobytes())
    return digest.hexdigest()
