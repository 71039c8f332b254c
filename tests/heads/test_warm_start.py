"""The closed-form start: exact where it can be, better than chance, and no tensor of its own."""

import pytest
import torch
from tiny import greedy_batches, tiny_head, tiny_target
from toy_head import ToySettings

from drafthead.heads.base import TeacherBatch
from drafthead.heads.contract import describe
from drafthead.heads.eagle3 import Eagle3Head, Eagle3Settings
from drafthead.heads.warm_start import SHARPNESS, Moments, low_rank, self_looking

LAYERS = (2, 4, 5)


def overlap(head: Eagle3Head, batches: list[TeacherBatch]) -> float:
    """Mean sum of min(p, q) at the first depth."""
    totals = []
    with torch.no_grad():
        for batch in batches:
            prediction = next(iter(head.unroll(batch, 1)))
            truth = head.teacher_logits(batch.last_hidden.flatten(0, 1)[prediction.teacher])
            both = torch.minimum(prediction.logits.softmax(-1), truth.softmax(-1))
            totals.append(both.sum(-1).mean())
    return float(torch.stack(totals).mean())


def test_the_regression_recovers_a_linear_law() -> None:
    torch.manual_seed(0)
    law, inputs = torch.randn(12, 5), torch.randn(4000, 12)
    moments = Moments()
    for part in inputs.chunk(3):
        moments.add(part, part @ law)
    assert moments.n == 4000
    torch.testing.assert_close(moments.solve().float(), law, atol=0.02, rtol=0.02)


def test_a_map_of_low_rank_is_kept_and_a_truncated_one_is_the_best_there_is() -> None:
    torch.manual_seed(0)
    inputs = torch.randn(3000, 10, dtype=torch.float64) @ torch.randn(10, 10, dtype=torch.float64)
    square = inputs.T @ inputs
    law = torch.randn(10, 3, dtype=torch.float64) @ torch.randn(3, 8, dtype=torch.float64)
    first, second = low_rank(law, square, 3)
    torch.testing.assert_close(first @ second, law)

    full = torch.randn(10, 8, dtype=torch.float64)
    ours = low_rank(full, square, 3)
    u, s, v = torch.linalg.svd(full, full_matrices=False)
    naive = u[:, :3] * s[:3] @ v[:3]  # the best in weights, not on these inputs
    error = [(inputs @ (m - full)).square().sum() for m in (ours[0] @ ours[1], naive)]
    assert error[0] < error[1]


def test_spare_value_columns_stay_empty() -> None:
    torch.manual_seed(0)
    law = torch.randn(6, 4, dtype=torch.float64)
    first, second = low_rank(law, torch.eye(6, dtype=torch.float64), 9)
    assert first.shape == (6, 9)
    assert second.shape == (9, 4)
    torch.testing.assert_close(first @ second, law)


def test_it_beats_a_random_start_on_unseen_text_and_adds_no_tensor() -> None:
    target = tiny_target()
    batches = greedy_batches(target, 12, LAYERS)
    settings = Eagle3Settings(draft_vocab_size=None, warm_start=1)
    head = settings.build(describe(target, None, LAYERS, {}), target.config, None)
    head.bind(target)
    before, names = overlap(head, batches[10:]), list(head.state_dict())
    head.warm_start(batches[:10])
    assert list(head.state_dict()) == names
    assert 1 - overlap(head, batches[10:]) < 0.75 * (1 - before)


def test_a_head_without_one_and_batches_without_labels_are_refused() -> None:
    target = tiny_target()
    toy = ToySettings(warm_start=1).build(describe(target, None, (1,), {}), target.config, None)
    with pytest.raises(ValueError, match=r"head\.warm_start: toy has no closed-form start"):
        toy.warm_start([])
    with pytest.raises(ValueError, match="no supervised position"):
        tiny_head(target).warm_start([])


def test_f25_a_head_wider_than_the_stream_looks_at_itself_too() -> None:
    look = self_looking(2, 12, 8)
    assert look.shape == (2, 12, 8)
    torch.testing.assert_close(look.mT @ look, SHARPNESS**2 * torch.eye(8).expand(2, 8, 8))
