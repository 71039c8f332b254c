"""The unroll's attention against a plain twin, rotary against transformers, ragged writes."""

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from drafthead.heads.blocks import (
    GatedMLP,
    RMSNorm,
    Rotary,
    active_slots,
    masked_attention,
    rotate,
    take_slots,
    unroll_attention,
    write_rows,
)


def plain_attention(q: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
    """The same by its definition: all keys of all steps side by side under one mask."""
    n, groups = q.shape[2], q.shape[1] // keys[0].shape[1]
    mask = [torch.ones(n, n, dtype=torch.bool).tril()]
    mask += [torch.eye(n, dtype=torch.bool)] * (len(keys) - 1)
    k, v = (torch.cat(xs, 2).repeat_interleave(groups, 1) for xs in (keys, values))
    scores = q @ k.transpose(2, 3) / q.shape[-1] ** 0.5
    return scores.masked_fill(~torch.cat(mask, 1), float("-inf")).softmax(-1) @ v


@pytest.mark.parametrize("heads", [(4, 2), (3, 3), (4, 1)])
@pytest.mark.parametrize("later", [0, 1, 3])
@pytest.mark.parametrize("chunk", [4, 256])
@pytest.mark.parametrize("slots", [None, [[0, 3, 4, 8, 10], [1, 2, 9, 0, 4]]])
def test_unroll_attention_equals_its_plain_twin(
    heads: tuple[int, int], later: int, chunk: int, slots: list[list[int]] | None
) -> None:
    torch.manual_seed(0)
    n, d = 11, 8
    q, *keys_values = (
        torch.randn(2, h, n, d, dtype=torch.float64, requires_grad=True)
        for h in (heads[0], *[heads[1]] * (2 * later + 2))
    )
    keys, values = keys_values[: later + 1], keys_values[later + 1 :]
    plain = plain_attention(q, keys, values)
    at = torch.tensor(slots) if slots else torch.arange(n).expand(2, n)

    def pick(x: Tensor) -> Tensor:
        return x.gather(2, at[:, None, :, None].expand(-1, x.shape[1], -1, d))

    own_keys, own_values = ([xs[0], *map(pick, xs[1:])] for xs in (keys, values))
    where = at if slots else None
    ours = unroll_attention(pick(q), own_keys, own_values, where, chunk=chunk)
    torch.testing.assert_close(ours, pick(plain), atol=1e-6, rtol=0)  # its softmax is fp32
    weight = torch.randn_like(ours)
    got = torch.autograd.grad((ours * weight).sum(), [q, *keys_values])
    expected = torch.autograd.grad((pick(plain) * weight).sum(), [q, *keys_values])
    for mine, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=0)


@pytest.mark.parametrize("chunk", [3, 256])
def test_unroll_attention_looks_across_no_start(chunk: int) -> None:
    torch.manual_seed(0)
    n, lengths = 11, [4, 1, 6]
    q, *keys_values = (torch.randn(1, h, n, 8, dtype=torch.float64) for h in (4, 2, 2, 2, 2))
    keys, values = keys_values[:2], keys_values[2:]
    starts = torch.tensor([[0] * 4 + [4] + [5] * 6])
    ours = unroll_attention(q, keys, values, starts=starts, chunk=chunk)
    parts = zip(*(x.split(lengths, 2) for x in (q, *keys_values)), strict=True)
    alone = [plain_attention(p[0], list(p[1:3]), list(p[3:])) for p in parts]
    torch.testing.assert_close(ours, torch.cat(alone, 2), atol=1e-6, rtol=0)


def test_slots_are_packed_row_by_row() -> None:
    wanted = torch.tensor([[0, 1, 0, 1, 1], [0, 0, 1, 0, 0]], dtype=torch.bool)
    slots = active_slots(wanted)
    assert slots[0].tolist() == [1, 3, 4]
    assert slots[1, 0] == 2
    assert not wanted[1, slots[1, 1:]].any()
    x = torch.randn(2, 5, 3)
    assert take_slots(x, slots).equal(torch.stack([x[b, slots[b]] for b in range(2)]))
    assert active_slots(torch.zeros(2, 4, dtype=torch.bool)).shape == (2, 0)


def test_unroll_attention_keeps_memory_linear_in_length() -> None:
    def saved(n: int) -> int:
        q, k = (
            torch.randn(1, 2, n, 8, requires_grad=True),
            torch.randn(1, 2, n, 8, requires_grad=True),
        )
        sizes: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            out = unroll_attention(q, [k, k], [k, k], chunk=32)
        out.sum().backward()
        return sum(sizes.values())

    assert saved(512) <= 2 * saved(256) + 1024


def test_unroll_attention_of_no_slots() -> None:
    empty = torch.zeros(1, 2, 0, 8)
    assert unroll_attention(empty, [empty], [empty]).shape == (1, 2, 0, 8)


def test_masked_attention_equals_its_plain_twin() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 4, 3, 8), torch.randn(2, 2, 7, 8), torch.randn(2, 2, 7, 8)
    mask = torch.rand(2, 3, 7) < 0.5
    mask[..., 0] = True
    scores = q @ k.repeat_interleave(2, 1).transpose(2, 3) / 8**0.5
    expected = scores.masked_fill(~mask[:, None], float("-inf")).softmax(-1) @ v.repeat_interleave(
        2, 1
    )
    torch.testing.assert_close(masked_attention(q, k, v, mask), expected)
    torch.testing.assert_close(
        masked_attention(q, k, v, None), scores.softmax(-1) @ v.repeat_interleave(2, 1)
    )


def test_rms_norm_keeps_the_dtype_of_its_input() -> None:
    norm = RMSNorm(8, 1e-6)
    x = torch.randn(3, 8)
    torch.testing.assert_close(norm(x), torch.nn.functional.rms_norm(x, (8,), norm.weight, 1e-6))
    assert norm(x.bfloat16()).dtype == torch.bfloat16


def test_rotation_equals_transformers() -> None:
    config = LlamaConfig(
        hidden_size=32,
        num_attention_heads=2,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
    )
    x, positions = torch.randn(1, 2, 9, 16), torch.arange(9)[None]
    cos, sin = LlamaRotaryEmbedding(config)(x, positions)
    expected, _ = apply_rotary_pos_emb(x, x, cos, sin)
    tables = Rotary(16, config.rope_parameters).tables(9, x.device, x.dtype)
    torch.testing.assert_close(rotate(x, *(t[:9] for t in tables)), expected)


def test_f56_linear_scaling_stretches_positions() -> None:
    plain = Rotary(8, {"rope_type": "default", "rope_theta": 100.0})
    linear = Rotary(8, {"rope_type": "linear", "factor": 2.0, "rope_theta": 100.0})
    where = torch.device("cpu"), torch.float32
    torch.testing.assert_close(plain.tables(9, *where)[0][4], linear.tables(9, *where)[0][8])


def test_f56_unknown_scaling_is_refused() -> None:
    with pytest.raises(ValueError, match="'dynamic' is not supported"):
        Rotary(8, {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 100.0})


def test_f55_tables_grow_and_survive_inference_mode() -> None:
    rotary = Rotary(8, {"rope_theta": 100.0})
    with torch.inference_mode():
        short = rotary.tables(4, torch.device("cpu"), torch.float32)
    long = rotary.tables(5000, torch.device("cpu"), torch.float32)
    assert len(long[0]) >= 5000
    torch.testing.assert_close(long[0][: len(short[0])], short[0])
    x = torch.randn(1, 1, 4, 8, requires_grad=True)
    rotate(x, short[0][:4], short[1][:4]).sum().backward()


@pytest.mark.parametrize("offsets", [[2, 2], [0, 3]])
def test_write_rows(offsets: list[int]) -> None:
    buffer, new = torch.zeros(2, 1, 6, 2), torch.ones(2, 1, 3, 2)
    write_rows(buffer, new, offsets)
    for row, start in enumerate(offsets):
        expected = torch.zeros(6)
        expected[start : start + 3] = 1
        assert buffer[row, 0, :, 0].equal(expected)


@pytest.mark.parametrize("counts", [None, [3, 3, 3], [2, 2, 2], [1, 3, 0]])
@pytest.mark.parametrize("offsets", [[4, 4, 4], [0, 7, 3]])
def test_write_rows_writes_what_a_loop_over_slots_writes(
    offsets: list[int], counts: list[int] | None
) -> None:
    torch.manual_seed(0)
    buffer, new = torch.randn(3, 2, 10, 4), torch.randn(3, 3, 2, 4).transpose(1, 2)
    expected = buffer.clone()
    for row, offset in enumerate(offsets):
        for slot in range(3 if counts is None else counts[row]):
            expected[row, :, offset + slot] = new[row, :, slot]
    write_rows(buffer, new, offsets, counts)
    assert torch.equal(buffer, expected)


def test_write_rows_by_counts() -> None:
    buffer = torch.zeros(2, 1, 4, 1)
    write_rows(buffer, torch.ones(2, 1, 3, 1), [2, 0], [2, 0])  # the padding would not fit
    assert buffer[:, 0, :, 0].tolist() == [[0, 0, 1, 1], [0, 0, 0, 0]]


def test_write_rows_refuses_overflow() -> None:
    with pytest.raises(ValueError, match="7 slots needed, 6 held"):
        write_rows(torch.zeros(1, 1, 6, 2), torch.ones(1, 1, 3, 2), [4])


def test_an_unknown_activation_is_one_line() -> None:
    with pytest.raises(ValueError, match="hidden_act: 'swoosh' is unknown"):
        GatedMLP(8, 8, "swoosh")
