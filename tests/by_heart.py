"""Heads that know a few texts of a tiny target by heart, so that what is wrong with one shows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from drafts import endless, own_greedy
from tiny import CORPUS, tiny_tokenizer

from drafthead.data.chat import ChatFormat
from drafthead.data.conversations import Message
from drafthead.heads.base import DraftHead, HeadSettings, TeacherBatch
from drafthead.heads.vocabulary import count_tokens, draft_vocabulary
from drafthead.inference.target import Target

TOKENS = 24
QUESTIONS = CORPUS[:4]

Text = tuple[list[int], int]


def plain_target() -> Target:
    """Six layers that do much to the stream, and a final norm of weights that differ much, so that
    one more or less of either shows.
    """
    model = endless(num_layers=6)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.mul_(4)
        generator = torch.Generator().manual_seed(1)
        weight = model.model.norm.weight
        weight.copy_(0.2 + 2.5 * torch.rand(weight.shape, generator=generator))
    return Target(model, tiny_tokenizer())


def asked(target: Target) -> list[list[int]]:
    """The ids of the questions as the target's template renders them."""
    assert target.tokenizer is not None
    chat = ChatFormat(target.tokenizer)
    return [chat.prompt_ids([Message("user", question)]) for question in QUESTIONS]


def texts_of(target: Target, prompts: Sequence[list[int]]) -> list[Text]:
    """What the target answers greedily, with the length of each prompt."""
    return [(own_greedy(target, prompt, TOKENS), len(prompt)) for prompt in prompts]


def learnt(
    target: Target,
    settings: HeadSettings,
    layers: Sequence[int],
    texts: Sequence[Text],
    *,
    depth: int = 2,
    steps: int = 40,
) -> DraftHead:
    """A head of 200 draft tokens, trained on these texts until it knows them."""
    answers = [ids[prompt:] for ids, prompt in texts]
    draft_ids = draft_vocabulary(count_tokens(answers, target.vocab_size), 200, [2])
    with torch.random.fork_rng():
        torch.manual_seed(0)
        head = settings.build(target.contract(layers), target.config, draft_ids)
        head.bind(target.model)
        batch = _batch(target, texts, head.contract.layers)
        draft_of = torch.full((target.vocab_size,), -1)
        draft_of[head.draft_ids] = torch.arange(len(head.draft_ids))
        trained = [p for p in head.parameters() if p.requires_grad]
        optimiser = torch.optim.AdamW(trained, lr=1e-2)
        for _ in range(steps):
            loss = torch.zeros(())
            for made in head.unroll(batch, depth):
                labels = draft_of[batch.ids.flatten()[made.teacher + 1]]
                loss = loss + F.cross_entropy(made.logits, labels, ignore_index=-1)
            optimiser.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
    return head.eval()  # type: ignore[no-any-return]


def _batch(target: Target, texts: Sequence[Text], layers: Sequence[int]) -> TeacherBatch:
    width = max(len(ids) for ids, _ in texts)
    ids = torch.tensor([[*text, *[0] * (width - len(text))] for text, _ in texts])
    place = torch.arange(width)[None]
    begin, end = (
        torch.tensor(ends)[:, None]
        for ends in ([prompt for _, prompt in texts], [len(text) for text, _ in texts])
    )
    features, last = target.states(ids, layers)
    return TeacherBatch(ids, (place >= begin) & (place < end), features, last, top=ids)
