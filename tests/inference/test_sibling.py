"""A smaller causal LM as drafter: its steps, its vocabulary, its limits, and what it may not be."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from drafts import endless, ids_of, keyed, own_greedy, prompt_of, rows_of_run
from families import EAGER_ONLY, FAMILIES, TOLERANCE
from tiny import tiny_head, tiny_target, tiny_tokenizer
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, MambaConfig, MambaForCausalLM, PreTrainedModel

from drafthead.heads import load_head
from drafthead.heads.contract import ContractError, describe
from drafthead.inference.decoder import decode
from drafthead.inference.drafters import LookupDrafter, MergedDrafter
from drafthead.inference.grow import HeadDrafter
from drafthead.inference.sampling import Sampler
from drafthead.inference.sibling import CATCH_UP, Sibling, load_sibling
from drafthead.inference.target import Target
from drafthead.inference.tree import Tree, parse_shape

SHAPES = ("chain:3", "static:0,1,2,0.0,0.1,1.0,0.0.0", "tree:3x3:8")


def alien(target: Target, model: PreTrainedModel) -> Sibling:
    """Any model as a sibling, tokenizer unseen."""
    return Sibling.of(model.double(), None, target, check=False)


def half_right(target: Target) -> Sibling:
    """The target's own model with one layer changed: often right, not always."""
    model = endless().double()
    with torch.no_grad():
        model.model.layers[3].mlp.down_proj.weight.mul_(0.3)
    return alien(target, model)


class Steps:
    """A sibling's steps over texts of its own rows, and a plain forward to hold them against."""

    def __init__(
        self, sibling: Sibling, texts: Sequence[Sequence[int]], capacity: int = 80
    ) -> None:
        self.sibling = sibling
        self.texts = [list(text) for text in texts]
        self.state = sibling.open(len(texts), capacity)
        self.nodes: list[list[tuple[int, ...]]] = []
        self.tolerance = TOLERANCE[sibling.lm.config._attn_implementation]

    def extend(self, new: Sequence[Sequence[int]]) -> Tensor:
        for text, tokens in zip(self.texts, new, strict=True):
            text.extend(tokens)
        return self._extend([list(tokens) for tokens in new])

    def begin(self) -> Tensor:
        return self._extend(self.texts)

    def _extend(self, new: Sequence[Sequence[int]]) -> Tensor:
        ids = torch.zeros(len(new), max(map(len, new)), dtype=torch.long)
        for row, tokens in enumerate(new):
            ids[row, : len(tokens)] = torch.tensor(tokens, dtype=torch.long)
        counts = torch.tensor([len(tokens) for tokens in new])
        self.nodes = [[] for _ in new]
        return self.sibling.extend(self.state, ids[..., None][..., :0].double(), ids, counts)

    def expand(self, ids: Sequence[Sequence[int]], parents: Sequence[Sequence[int]]) -> Tensor:
        for row, (tokens, above) in enumerate(zip(ids, parents, strict=True)):
            for token, parent in zip(tokens, above, strict=True):
                path = self.nodes[row][parent] if parent >= 0 else ()
                self.nodes[row].append((*path, token))
        return self.sibling.expand(self.state, torch.tensor(ids), torch.tensor(parents))

    def plain(self, row: int, path: Sequence[int] = ()) -> Tensor:
        with torch.no_grad():
            logits: Tensor = self.sibling.lm(torch.tensor([[*self.texts[row], *path]])).logits
        return logits[0, -1, :512]

    def check(self, roots: Tensor) -> None:
        for row in range(len(self.texts)):
            torch.testing.assert_close(roots[row], self.plain(row), atol=self.tolerance, rtol=0)

    def check_nodes(self, logits: Tensor) -> None:
        m = logits.shape[1]
        for row, nodes in enumerate(self.nodes):
            for at, path in enumerate(nodes[-m:]):
                expected = self.plain(row, path)
                torch.testing.assert_close(logits[row, at], expected, atol=self.tolerance, rtol=0)


@pytest.mark.parametrize("name", FAMILIES)
def test_steps_of_ragged_rows_equal_a_plain_forward_of_each_path(name: str) -> None:
    """Three rounds: two levels of draft nodes, then what was committed, drafts forgotten."""
    target = Target(endless())
    model = FAMILIES[name]()
    model.set_attn_implementation("eager" if name in EAGER_ONLY else "sdpa")
    steps = Steps(alien(target, model), [prompt_of(19), prompt_of(1), prompt_of(7)])
    roots = steps.begin()
    for committed in (([8, 9, 10], [11], [12, 13]), ([4], [5, 6, 7, 8], list(range(3, 30)))):
        steps.check(roots)
        first = steps.expand([[5, 6], [7, 8], [9, 10]], [[-1, -1]] * 3)
        steps.check_nodes(first)
        below = [[1, 0, -1], [0, 1, 1], [1, 1, 0]]
        steps.check_nodes(steps.expand([[20, 21, 22]] * 3, below))
        steps.check_nodes(steps.expand([[30], [31], [32]], [[3], [2], [4]]))
        roots = steps.extend(committed)
    steps.check(roots)


def proposals(
    drafter: HeadDrafter, texts: Sequence[Sequence[int]], sampler: Sampler | None = None
) -> list[Tree]:
    """What is drafted after a first round that committed three tokens in each row."""
    sampler = sampler or Sampler()
    drafter.open(len(texts), 80)
    for row, text in enumerate(texts):
        drafter.start(row)
        drafter.observe(row, text[:-3], None)
    drafter.propose([text[:-3] for text in texts], [9] * len(texts), sampler)
    for row, text in enumerate(texts):
        drafter.observe(row, text, None)
    return drafter.propose(texts, [9] * len(texts), sampler)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("sampled", [False, True])
def test_f53_drafts_of_ragged_rows_equal_those_of_each_row_alone(
    target64: Target, shape: str, sampled: bool
) -> None:
    drafter = HeadDrafter(half_right(target64), parse_shape(shape))
    texts = [prompt_of(length) for length in (4, 22, 9)]

    def sampler(rows: Sequence[int]) -> Sampler:
        return keyed(target64, streams=rows, temperature=0.8) if sampled else Sampler()

    together = proposals(drafter, texts, sampler(range(3)))
    for row, text in enumerate(texts):
        (alone,) = proposals(drafter, [text], sampler([row]))
        assert (alone.tokens, alone.parents) == (together[row].tokens, together[row].parents)
    assert {tree.source for tree in together} == {"sibling"}


def test_f53_a_row_begun_anew_drafts_as_if_it_were_the_first(target64: Target) -> None:
    """Longer than what was there, and shorter; the row beside it goes on."""
    drafter = HeadDrafter(half_right(target64), parse_shape("tree:3x3:8"))
    texts = [prompt_of(22), prompt_of(6)]
    for length in (9, 40):
        anew = prompt_of(length, seed=1)
        proposals(drafter, texts)
        drafter.start(0)
        drafter.observe(0, anew, None)
        again = drafter.propose([anew, texts[1]], [9, 9], Sampler())
        assert again == [*proposals(drafter, [anew]), *proposals(drafter, texts[1:])]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("sampled", [False, True])
def test_a_sibling_that_is_the_target_is_always_right(
    target64: Target, shape: str, sampled: bool
) -> None:
    drafter = HeadDrafter(alien(target64, endless()), parse_shape(shape))
    prompts = [prompt_of(1), prompt_of(6), prompt_of(30)]
    sampler = keyed(target64, 3) if sampled else Sampler()
    texts = ids_of(target64, prompts, sampler)
    rows, _ = decode(target64, prompts, sampler, drafter, max_new_tokens=24)
    assert [row.ids for row in rows] == texts
    for row in rows:
        left = 23  # the prefill gave one
        for made in row.rounds:
            # The last token is the target's own; a best-first tree may prefer width.
            least = 1 if shape.startswith("tree") else 3
            assert min(least, left - 1) <= made.accepted <= 3
            left -= made.emitted


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["gpt2", "gemma3", "mixtral"])
def test_an_alien_sibling_changes_no_text(target64: Target, shape: str, name: str) -> None:
    drafter = HeadDrafter(alien(target64, FAMILIES[name]()), parse_shape(shape))
    prompts = [prompt_of(3), prompt_of(17)]
    texts = [own_greedy(target64, prompt, 24) for prompt in prompts]
    assert ids_of(target64, prompts, Sampler(), drafter, 24) == texts


def test_a_sibling_that_was_not_asked_for_long_takes_in_all_that_it_missed(
    target64: Target,
) -> None:
    """Merged with lookup on a text that repeats itself, in one row of two."""
    prompts = [prompt_of(5) * 4, prompt_of(9)]
    sibling = HeadDrafter(half_right(target64), parse_shape("chain:3"))
    sibling.open(2, 120)
    rows = [prompt_of(2 * CATCH_UP + 9), prompt_of(12)]
    for row, text in enumerate(rows):
        sibling.start(row)
        sibling.observe(row, text[:4], None)
    sibling.propose([text[:4] for text in rows], [3, 3], Sampler())
    sibling.observe(0, rows[0], None)
    sibling.observe(1, rows[1], None)
    late = sibling.propose(rows, [3, 3], Sampler())
    fresh = proposals(sibling, rows)
    assert [tree.tokens for tree in late] == [tree.tokens for tree in fresh]
    merged = MergedDrafter(LookupDrafter(4), sibling)
    texts = [own_greedy(target64, prompt, 40) for prompt in prompts]
    assert ids_of(target64, prompts, Sampler(), merged, 40) == texts


def test_a_full_row_has_room_beside_one_that_catches_up(target64: Target) -> None:
    """What is padded to the longest of the batch must not reach past the store."""
    model = endless(num_layers=2)
    full, late = prompt_of(39), prompt_of(4)
    steps = Steps(alien(target64, model), [full, late], capacity=40)
    steps.check(steps.begin())
    steps.check(steps.extend([[7], prompt_of(30)]))
    steps.check(steps.extend([[], [5]]))


# What it may not be


def test_f59_a_sibling_of_another_tokenizer_is_refused(target32: Target) -> None:
    known = Target(endless(), tiny_tokenizer())
    same, other = tiny_tokenizer(), tiny_tokenizer(corpus=[text[::-1] for text in CORPUS_OF_OTHERS])
    assert len(same) == len(other), "equal sizes must not pass for equal tokenizers"
    assert isinstance(Sibling.of(endless(num_layers=2), same, known), Sibling)
    with pytest.raises(ValueError, match=r"another tokenizer than the target: take a smaller"):
        Sibling.of(endless(num_layers=2), other, known)
    with pytest.raises(ValueError, match=r"the tokenizer of sibling 'llama' is not known"):
        Sibling.of(endless(num_layers=2), None, known)
    with pytest.raises(ValueError, match=r"the tokenizer of the target is not known"):
        Sibling.of(endless(num_layers=2), same, target32)


CORPUS_OF_OTHERS = (
    "The rain in Spain stays mainly in the plain, or so the old teacher said every morning.",
    "Numbers, letters and signs may be cut otherwise: whatever is frequent becomes one piece.",
    "Engines, bridges, ladders; mountains, valleys, oceans; kitchens, gardens, balconies.",
    "Nothing here resembles what anybody else has trained upon, which is the whole purpose.",
    "Quarterly reports describe turnover, liabilities, equity, provisions and depreciation.",
    "Violins, trumpets, clarinets, oboes, bassoons, timpani: an orchestra tunes its strings.",
    "Zebras, giraffes, elephants, crocodiles and flamingos gather where the river widens.",
)


@pytest.mark.parametrize(("target_size", "sibling_size"), [(544, 512), (512, 544)])
def test_f60_vocabularies_padded_differently_share_the_ids_that_both_have(
    target_size: int, sibling_size: int
) -> None:
    target = Target(endless(vocab_size=target_size).double(), tiny_tokenizer())
    model = endless(vocab_size=sibling_size).double()
    with torch.no_grad():  # the padding rows of the larger one are the likeliest
        if sibling_size > target_size:
            model.lm_head.weight[target_size:] = 5 * model.lm_head.weight[40]
    sibling = Sibling.of(model, tiny_tokenizer(), target)
    assert sibling.draft_ids.tolist() == list(range(512))
    for shape in SHAPES:
        text = own_greedy(target, prompt_of(6), 16)
        drafter = HeadDrafter(sibling, parse_shape(shape))
        assert ids_of(target, [prompt_of(6)], Sampler(), drafter, 16) == [text]


def test_f43_a_recurrent_sibling_is_refused(target32: Target) -> None:
    config = MambaConfig(
        vocab_size=512, hidden_size=32, state_size=4, num_hidden_layers=2, time_step_rank=4
    )
    with pytest.raises(ValueError, match=r"mamba: .*(rolled back|position_ids)"):
        Sibling.of(MambaForCausalLM(config), None, target32, check=False)


def test_f55_past_the_siblings_own_positions_the_target_decodes_alone(
    target64: Target, caplog: pytest.LogCaptureFixture
) -> None:
    """Learned positions end at 64: one more would be an index error."""
    config = GPT2Config(
        vocab_size=512,
        n_positions=64,
        n_embd=32,
        n_layer=2,
        n_head=2,
        bos_token_id=1,
        eos_token_id=None,
    )
    sibling = alien(target64, GPT2LMHeadModel(config))
    caplog.set_level(logging.WARNING)
    for length, deepest in ((61, 3), (62, 3), (63, 2), (64, 1), (65, 0)):
        (tree,) = proposals(HeadDrafter(sibling, parse_shape("chain:3")), [prompt_of(length)])
        assert len(tree) == deepest, "the root stands at length - 1, the last is not run"
    drafter = HeadDrafter(sibling, parse_shape("tree:4x2:6"))
    prompts = [prompt_of(50), prompt_of(3)]
    texts = [own_greedy(target64, prompt, 100) for prompt in prompts]
    rows = rows_of_run(target64, prompts, drafter, 100)
    assert [row.ids for row in rows] == texts
    notices = [r.message for r in caplog.records if "64 positions" in r.message]
    assert len(notices) == 1
    assert all(row.rounds[0].drafted and not row.rounds[-1].drafted for row in rows)


def test_a_sibling_needs_no_weights_of_its_target() -> None:
    """They may be offloaded; and any target of its tokenizer will do."""
    with torch.device("meta"):
        spread = Target(tiny_target(num_layers=8))
    sibling = Sibling.of(endless(num_layers=2), None, spread, check=False)
    contract = sibling.contract
    assert (contract.num_layers, contract.vocab_size, contract.layers) == (8, 512, ())
    contract.check(describe(endless(num_layers=8), None, (), {}))
    with pytest.raises(ContractError, match="num_layers is 6"):
        contract.check(describe(endless(num_layers=6), None, (), {}))


def test_a_folder_is_loaded_as_a_sibling(tmp_path: Path) -> None:
    target = Target(endless().double(), tiny_tokenizer())
    tiny_target(num_layers=2).save_pretrained(tmp_path / "small")
    tiny_tokenizer().save_pretrained(tmp_path / "small")
    sibling = load_sibling(tmp_path / "small", target, "float64")
    assert sibling.lm.dtype == torch.float64
    assert not sibling.training
    with pytest.raises(OSError, match=r"sibling '.*nowhere': no such folder"):
        load_sibling(tmp_path / "nowhere", target, "float64")


def test_a_head_is_no_sibling_nor_a_sibling_a_head(tmp_path: Path) -> None:
    """Each says where it goes."""
    target = Target(endless(), tiny_tokenizer())
    tiny_head(endless()).save_pretrained(tmp_path / "head")
    with pytest.raises(OSError, match=r"sibling '.*head' .*it is a draft head, .* with --head$"):
        load_sibling(tmp_path / "head", target, "float32")
    Sibling.of(endless(num_layers=2), tiny_tokenizer(), target).save_pretrained(tmp_path / "small")
    known = r"\(known: (?!.*sibling\b.*\)).*drafthead_eagle3.*\)"
    with pytest.raises(ValueError, match=rf"'llama' is no head {known}; .* with --sibling$"):
        load_head(tmp_path / "small")
