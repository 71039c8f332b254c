"""A certificate passes what is sound, whatever the head is worth, and names what is broken."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
import torch
from drafts import endless, prompt_of
from tiny import tiny_head
from torch import Tensor

from drafthead.inference import certify, sampling, target, verify
from drafthead.inference.certify import Bench, Job, Size, check_rules, exact_jobs
from drafthead.inference.checks_drafters import OwnGuess
from drafthead.inference.checks_law import Law, check_law, law_of
from drafthead.inference.checks_remembered import LENGTH, Remembered
from drafthead.inference.checks_subject import Check, Subject, written
from drafthead.inference.checks_text import check_texts, first_gap
from drafthead.inference.drafters import Drafter, LookupDrafter
from drafthead.inference.grow import HeadDrafter
from drafthead.inference.noise import Noise
from drafthead.inference.rounding import MARGIN, Rounding, Truth, _moved, one_by_one, rounding
from drafthead.inference.row import Row
from drafthead.inference.sampling import Sampler
from drafthead.inference.store import Store
from drafthead.inference.target import Target
from drafthead.inference.tree import Static, ancestors, parse_shape
from drafthead.inference.warps import Warps

PROMPTS = [prompt_of(n) for n in (5, 9, 12)]
SIZE = Size(prompts=3, new_tokens=10, seed_tokens=5, draws=300)


def subject_of(dtype: torch.dtype = torch.float64, seed: int = 1, scale: float = 1.0) -> Subject:
    model = endless(num_layers=3)
    head = tiny_head(model, layers=(1, 2, 3), seed=seed)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.mul_(scale)
    made = Target(model.to(dtype))
    head.to(dtype)  # type: ignore[arg-type]
    head.bind(made.model, check=False)
    return Subject(made, head, PROMPTS)


@pytest.fixture(scope="module")
def bench() -> Bench:
    """What passes, in float64; its texts are made once."""
    return Bench(subject_of(), SIZE)


JOBS = exact_jobs(Bench(subject_of(), SIZE))


def run(bench: Bench, *jobs: Job) -> dict[str, Check]:
    return {check.name: check for check in (job(bench) for job in jobs)}


@pytest.mark.parametrize("job", range(len(JOBS)))
def test_a_sound_decoder_passes_and_every_planted_fault_is_seen(bench: Bench, job: int) -> None:
    """Greedy, seeds, laws, store; and controls, which pass where their check fails."""
    check = exact_jobs(bench)[job](bench)
    assert check.passed, check
    assert check.figure
    assert check.detail


def test_all_kinds_of_checks_and_controls_are_in_a_certificate(bench: Bench) -> None:
    assert len(JOBS) == len(exact_jobs(bench)) == 15
    assert [case.rule for case in bench.cases].count("rejection") == 3
    coupled = Bench(bench.subject, SIZE, ("coupled",))
    assert {case.rule for case in coupled.cases} == {"coupled"}
    assert not coupled.planted


@pytest.mark.parametrize(("seed", "scale"), [(9, 1.0), (1, 0.0)], ids=["another", "dead"])
def test_a_bad_head_is_lossless_too(seed: int, scale: float) -> None:
    found = run(Bench(subject_of(seed=seed, scale=scale), SIZE), certify.greedy, certify.stored)
    assert all(check.passed for check in found.values()), found


# Broken decoders


def failing(bench: Bench, *jobs: Job) -> set[str]:
    return {name for name, check in run(bench, *jobs).items() if not check.passed}


def test_the_token_after_a_draft_from_the_wrong_node_is_named(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Text is wrong, and so are samples; the store holds what it should of that text."""

    def wrong(
        tokens: Sequence[int], parents: Sequence[int], choice_after: Callable[[list[int]], int]
    ) -> tuple[list[int], int]:
        path, token = verify.walk(tokens, parents, choice_after)
        return path, choice_after(path[:-1]) if path else token

    monkeypatch.setattr(sampling, "walk", wrong)
    jobs = (certify.greedy, certify.seeds, certify.stored)
    assert failing(bench, *jobs) == {"greedy text", "same seed, same text"}


def test_f40_a_store_that_keeps_refused_slots_is_named(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    sound = Store.commit
    monkeypatch.setattr(
        Store, "commit", lambda store, paths: sound(store, [range(len(path)) for path in paths])
    )
    assert "store after rounds" in failing(bench, certify.greedy, certify.stored)


def test_a_store_of_the_wrong_length_is_named(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    sound = Store.commit
    monkeypatch.setattr(
        Store, "commit", lambda store, paths: sound(store, [[*path, 0] for path in paths])
    )
    assert failing(bench, certify.stored) == {"store after rounds"}


def test_a_mask_that_shows_siblings_is_named(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault that a tiny target's text may survive; its keys and values do not."""
    monkeypatch.setattr(target, "ancestors", lambda trees: torch.ones_like(ancestors(trees)).tril())
    assert failing(bench, certify.stored) == {"store after rounds"}


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_f50_a_wrong_residual_is_named_where_drafts_are_kept_and_refused(
    bench: Bench, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the target's own guesses, as this head's drafts are never kept."""
    monkeypatch.setattr(verify, "residual", lambda p, q, weight=1.0: p)
    (case,) = [c for c in bench.cases if c.rule == rule and c.drafts.startswith("own")]
    check = check_law(bench.subject, bench.known, bench.law, case, 600, 1e-3)
    assert not check.passed
    assert check.name.startswith(f"law of samples: {rule}")


def test_f51_a_top_k_that_is_not_honoured_is_named(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Texts that the target cannot write are counted as such."""
    law = bench.law
    (case,) = [c for c in bench.cases if c.rule == "coupled"]
    monkeypatch.setattr(Law, "warps", Warps())
    check = check_law(bench.subject, bench.known, law, case, 100, 1e-3)
    assert not check.passed
    assert "none that the target can write" in check.detail


def test_answers_that_end_at_once_are_no_subject() -> None:
    """Nothing can be drafted in them, so a fault would not show either."""
    subject = subject_of()
    subject.target.model.generation_config.eos_token_id = list(range(512))
    with pytest.raises(ValueError, match="end with their token 1 at the latest"):
        _ = Bench(subject, SIZE).truths


# Ties


def text_of(logits: Tensor) -> Truth:
    return Truth([1, 2], logits.argmax(-1).tolist(), logits)


def test_f39_a_difference_is_forgiven_within_the_measured_rounding_only() -> None:
    """The gap is that of the token emitted, so that a wild token at a tie is no tie."""
    subject = subject_of(torch.float32)
    logits = torch.zeros(4, 512)
    logits[torch.arange(4), torch.tensor([5, 6, 7, 8])] = 3.0
    logits[2, 9] = 3.0 - 1e-3
    text = text_of(logits)
    near, wild, short = [5, 6, 9, 1], [5, 6, 11, 8], [5, 6, 7]
    assert first_gap([5, 6, 7, 8], text) is None
    assert first_gap(near, text) == (2, pytest.approx(1e-3, rel=1e-3))
    assert first_gap(wild, text) == (2, 3.0)
    assert first_gap(short, text) == (3, math.inf)

    def passes(new: list[int], tie: float, of: Subject = subject) -> bool:
        measured, drafters = Rounding(tie / MARGIN, 0.0), {"lookup": LookupDrafter(2)}
        check = check_texts("x", of, [text], measured, drafters, lambda *_: [new])
        assert ("gap" in check.figure) == (new != text.new)
        return check.passed

    assert passes(text.new, 0.0)
    assert passes(near, 2e-3)
    assert not passes(near, 5e-4)
    assert not passes(wild, 2e-3)
    assert not passes(short, 2e-3)
    assert not passes(near, 2e-3, of=subject_of()), "float64 has no ties"


def test_rounding_is_measured_without_our_own_forwards(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a broken mask would widen the bound that should show it."""
    monkeypatch.delattr(Target, "run")
    monkeypatch.delattr(Target, "prefill")
    measured = rounding(bench.subject.target, bench.truths)
    assert 0 < measured.states < 1e-12
    assert measured.apart < 1e-5  # `generate` keeps logits in float32
    for own in bench.truths:
        again = one_by_one(bench.subject.target, own.prompt, own.new)
        assert again.ids == own.ids
        assert torch.allclose(again.logits.float(), own.logits.float(), atol=1e-5)


def test_rounding_is_how_far_two_tokens_move_against_each_other() -> None:
    """What moves all logits alike changes no choice, nor does a token that is no candidate."""
    one = torch.tensor([[5.0, 4.0, 1.0], [3.0, 2.5, 0.0]])
    assert _moved(one, one + 7) == 0.0
    assert _moved(one, one + torch.tensor([0.0, 0.0, 0.5])) == 0.0
    assert _moved(one, one + torch.tensor([-0.25, 0.5, 0.0])) == 0.75


def test_half_precision_is_bounded_by_its_own_rounding() -> None:
    """A bound that is wide enough for bfloat16, and no wider than its rounding."""
    bench = Bench(subject_of(torch.bfloat16), SIZE)
    assert 1e-3 < bench.rounding.tie < 0.5
    assert all(check.passed for check in run(bench, *certify.SERVING_JOBS).values())


# Laws


def test_remembered_contexts_are_the_targets_own(bench: Bench) -> None:
    """Logits and features of each text equal a plain forward's, in whatever order they came."""
    own, layers = bench.subject.target, (1, 2, 3)
    known = Remembered(own, PROMPTS[0], layers)
    texts = [(7,), (7, 3), (8, 1, 4), (), (7, 3, 9), (8,)]
    for asked in (texts[:2], texts):
        for text, (logits, features) in zip(asked, known.after(asked), strict=True):
            ids = torch.tensor([[*PROMPTS[0], *text]])
            torch.testing.assert_close(logits, own.model(ids).logits[0, -1], atol=1e-9, rtol=0)
            assert features is not None
            states = own.states(ids, layers)[0][0, -1]
            torch.testing.assert_close(features, states, atol=1e-9, rtol=0)


@pytest.mark.parametrize("rule", ["coupled", "rejection", "block"])
def test_texts_of_a_remembered_target_are_those_of_the_target(bench: Bench, rule: str) -> None:
    """Stream by stream, with the head's drafts and the target's own guesses."""
    own, law = bench.subject.target, bench.law
    known = Remembered(own, law.prompt, (1, 2, 3))

    def texts(of: Target, drafter: Drafter) -> list[list[int]]:
        noise = [Noise(4, stream, of.vocab_size) for stream in range(24)]
        sampler = Sampler(law.warps, noise, rule)
        rows = written(of, [law.prompt] * 24, sampler, drafter, 6, stop=long_enough)
        return [row.new_ids for row in rows]

    by_head = HeadDrafter(bench.subject.head, parse_shape("chain:2"))
    for drafter in (by_head, OwnGuess(known, Static.chain(2), law.temperature, 0.9)):
        assert texts(known, drafter) == texts(own, drafter)


def long_enough(row: Row) -> bool:
    return len(row.ids) - row.prompt >= LENGTH


def test_the_law_is_the_targets_after_warps(bench: Bench) -> None:
    """Sums to 1; one text's chance, token by token from plain forwards."""
    own = bench.subject.target
    law = law_of(own, PROMPTS[2], 300)
    assert len(law.chances) == 27
    assert sum(law.chances.values()) == pytest.approx(1, abs=1e-12)
    text, ids, chance = next(iter(law.chances)), list(law.prompt), 1.0
    for token in text:
        logits = own.model(torch.tensor([ids])).logits[0, -1] / law.temperature
        best = logits.topk(3)
        assert token in best.indices
        chance *= float((logits[token] - best.values.logsumexp(0)).exp())
        ids.append(token)
    assert law.chances[text] == pytest.approx(chance, rel=1e-9)


def test_lossy_and_unknown_rules_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"rule 'typical' is lossy: .* nothing to certify"):
        check_rules(["coupled", "typical"])
    with pytest.raises(ValueError, match="rule 'best': choose one of coupled, rejection, block"):
        check_rules(["best"])
