"""The store of states: what is written is read, and nothing else is ever taken for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from drafthead.data.manifest import Manifest, StoreError, asked, made_by
from drafthead.data.shards import DTYPES, ForeignShardError, States, digest_of
from drafthead.data.states import (
    LARGEST_SHARD,
    SMALLEST_SHARD,
    ShardWriter,
    StateStore,
    begin,
    bytes_of,
    free_number,
    overhead,
    shard_path,
    shard_size,
)

WIDTH = 64
LAYERS = (1, 3)


def texts(count: int) -> list[tuple[list[int], list[bool]]]:
    return [([7, number, *range(2, 40)], [False] * 10 + [True] * 30) for number in range(count)]


def digests(count: int) -> list[bytes]:
    return [digest_of(*text) for text in texts(count)]


def manifest(count: int, dtype: str = "bfloat16", **contract: Any) -> Manifest:
    facts = {"target": "a", "fingerprint": "a" * 64, "layers": [*LAYERS], "hidden_size": WIDTH}
    return Manifest(
        made_by=made_by(),
        contract=facts | contract,
        dtype=dtype,
        borrowed="b" * 64,
        mask_policy=1,
        data="rows",
        rows=count,
        positions=40 * count,
        asked=asked(digests(count)),
    )


def states(number: int, dtype: str = "bfloat16") -> States:
    ids, mask = texts(number + 1)[number]
    generator = torch.Generator().manual_seed(number)

    def made() -> torch.Tensor:
        return torch.randn(40, WIDTH, generator=generator).to(DTYPES[dtype])

    return States(
        ids=torch.tensor(ids, dtype=torch.int32),
        mask=torch.tensor(mask),
        layers={layer: made() for layer in LAYERS},
        last_hidden=made(),
        top=torch.arange(40, dtype=torch.int32),
        log_norm=torch.arange(40, dtype=torch.float32),
    )


def write(folder: Path, held: Manifest, count: int, per_shard: int = 5) -> StateStore:
    """A store of `count` rows; the second row was dropped."""
    store = begin(folder, held, verify=False)
    writer = ShardWriter(store)
    names = digests(count)
    for shard, first in enumerate(range(0, count, per_shard)):
        numbers = range(first, min(first + per_shard, count))
        writer.write(shard, {names[n]: None if n == 1 else states(n, held.dtype) for n in numbers})
    writer.wait()
    writer.close()
    assert store.complete(names)
    return StateStore(folder)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_written_is_read_layer_by_layer(tmp_path: Path, dtype: str) -> None:
    store = write(tmp_path, manifest(12, dtype), 12)
    assert store.manifest.complete
    assert store.manifest.dropped == 1
    assert [entry.rows for entry in store.manifest.shards] == [5, 5, 2]
    for number in (11, 0, 7):
        got, want = store.read(digests(12)[number], (3,)), states(number, dtype)
        assert got is not None
        assert list(got.layers) == [3]
        assert torch.equal(got.layers[3], want.layers[3])
        for part in ("ids", "mask", "last_hidden", "top", "log_norm"):
            assert torch.equal(getattr(got, part), getattr(want, part)), part
        assert got.last_hidden.dtype == DTYPES[dtype]
    assert store.read(digests(12)[1], LAYERS) is None
    assert store.missing([*digests(13)]) == [digests(13)[12]]


def test_only_what_is_asked_for_is_read_from_the_disk(tmp_path: Path) -> None:
    """Reading one row maps the file; it copies no tensor of it."""
    store = write(tmp_path, manifest(10), 10)
    got = store.read(digests(10)[3], (1,))
    assert got is not None
    whole = got.layers[1].untyped_storage().nbytes()
    assert whole > got.layers[1].nbytes, "a view into the mapped tensor"


def test_f21_the_forecast_is_within_two_percent_of_the_files(tmp_path: Path) -> None:
    store = write(tmp_path, manifest(200), 200, per_shard=40)
    size = sum(path.stat().st_size for path in tmp_path.glob("*.safetensors"))
    lacking = 40 * 2 * WIDTH * 3  # the dropped row
    forecast = bytes_of(200 * 40, len(LAYERS), WIDTH) + overhead(200, 5, len(LAYERS))
    assert size == pytest.approx(forecast - lacking, rel=0.02)
    assert sum(entry.bytes for entry in store.manifest.shards) == size
    assert [shard_size(n) for n in (1, 2**24, 2**40)] == [SMALLEST_SHARD, 2**20, LARGEST_SHARD]


@pytest.mark.parametrize("change", [-4096, -1, 1024])
def test_f20_a_shard_of_another_size_is_refused_by_name(tmp_path: Path, change: int) -> None:
    write(tmp_path, manifest(10), 10)
    shard = shard_path(tmp_path, 1)
    content = shard.read_bytes()
    shard.write_bytes(content + b"\0" * change if change > 0 else content[:change])
    what = "longer than it was written" if change > 0 else "cut off"
    with pytest.raises(StoreError, match=rf"states-00001\.safetensors: {what}: .*extract"):
        StateStore(tmp_path)
    shard.write_bytes(b"")
    with pytest.raises(StoreError, match=r"states-00001\.safetensors: cut off after 0 bytes"):
        StateStore(tmp_path)
    shard.unlink()
    with pytest.raises(StoreError, match=r"states-00001\.safetensors: missing"):
        StateStore(tmp_path)


def test_f19_a_bad_shard_is_made_again_and_no_other_is_touched(tmp_path: Path) -> None:
    """Cut in half, or one byte altered: told by the checksum; temporary files go."""
    write(tmp_path, manifest(15), 15)
    kept = {path: path.stat().st_mtime_ns for path in tmp_path.glob("states-*")}
    half, altered = shard_path(tmp_path, 0), shard_path(tmp_path, 2)
    whole = {path: path.read_bytes() for path in (half, altered)}
    half.write_bytes(whole[half][: len(whole[half]) // 2])
    altered.write_bytes(whole[altered][:-9] + bytes([whole[altered][-9] ^ 1]) + whole[altered][-8:])
    (tmp_path / ".states-00003.safetensors.tmp").write_bytes(b"begun")
    StateStore(tmp_path, mending=True)  # sizes alone do not tell the altered one
    store = begin(tmp_path, manifest(15), verify=True)
    assert not store.manifest.complete
    assert store.missing(digests(15)) == digests(15)[:5] + digests(15)[10:]
    assert [path.name for path in sorted(tmp_path.iterdir())] == [
        "manifest.json",
        "states-00001.safetensors",
    ]
    names = digests(15)
    writer = ShardWriter(store)
    writer.write(0, {names[n]: None if n == 1 else states(n) for n in range(5)})
    writer.wait()
    assert not store.complete(names)
    writer.write(2, {names[n]: states(n) for n in range(10, 15)})
    writer.wait()
    assert store.complete(names)
    assert {path: path.read_bytes() for path in whole} == whole
    assert shard_path(tmp_path, 1).stat().st_mtime_ns == kept[shard_path(tmp_path, 1)]


def test_f24_shards_of_two_targets_never_mix(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    write(one, manifest(5), 5)
    write(other, manifest(5, target="b", fingerprint="c" * 64), 5)
    with pytest.raises(StoreError, match=r"target 'a' .* 'b': fingerprint is c+….*another folder"):
        begin(one, manifest(5, target="b", fingerprint="c" * 64), verify=False)
    foreign = shard_path(one, 7)
    foreign.write_bytes(shard_path(other, 0).read_bytes())
    for mending in (False, True):
        with pytest.raises(ForeignShardError, match=r"states-00007.* 'b' .* 'a' .*never mix"):
            StateStore(one, mending=mending)
    foreign.unlink()
    # The same weights under another name are the same target.
    begin(one, manifest(5, target="moved", revision="main"), verify=True)


def test_f24_another_dtype_or_other_layers_are_another_store(tmp_path: Path) -> None:
    write(tmp_path, manifest(5), 5)
    with pytest.raises(StoreError, match="dtype of the states is float16, the store has bfloat16"):
        begin(tmp_path, manifest(5, "float16"), verify=False)
    with pytest.raises(StoreError, match=r"layers is \[1\], the store has \[1, 3\]"):
        begin(tmp_path, manifest(5, layers=[1]), verify=False)
    with pytest.raises(StoreError, match="the set of rows"):
        begin(tmp_path, manifest(6), verify=False)


def test_a_folder_that_is_no_store_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"holds no manifest\.json.*drafthead extract"):
        StateStore(tmp_path)
    (tmp_path / "notes.txt").touch()
    with pytest.raises(StoreError, match=r"holds notes\.txt but no manifest"):
        begin(tmp_path, manifest(5), verify=False)
    held = manifest(5).model_dump(mode="json")
    for content, what in (
        ('{"format": 1}', "not a manifest of states: made_by"),
        (json.dumps(held)[:200], "not a manifest of states: Expecting"),
        (json.dumps(held | {"format": 2, "new": 0}), "format 2, this version reads 1"),
        (json.dumps(held | {"dtype": "float8"}), "not a manifest of states: dtype"),
        (json.dumps(held | {"contract": {}}), "not a manifest of states: contract .*fingerprint"),
    ):
        (tmp_path / "manifest.json").write_text(content)
        with pytest.raises(StoreError, match=what):
            StateStore(tmp_path)


def test_ranks_take_numbers_that_no_other_takes(tmp_path: Path) -> None:
    assert [free_number(tmp_path, 0, rank, 3) for rank in range(3)] == [0, 1, 2]
    shard_path(tmp_path, 4).touch()
    taken = [free_number(tmp_path, 0, rank, 3) for rank in range(3)]
    assert taken == [6, 7, 5]


def test_a_failed_write_is_told_and_leaves_nothing(tmp_path: Path) -> None:
    store = begin(tmp_path, manifest(5), verify=False)
    writer = ShardWriter(store)
    (tmp_path / "states-00000.safetensors").mkdir()
    writer.write(0, {digests(1)[0]: states(0)})
    with pytest.raises(OSError, match="states-00000"):
        writer.wait()
    writer.close()
    assert not list(tmp_path.glob(".*"))


def rewritten(path: Path, old: bytes, new: bytes) -> None:
    """Replace bytes of a shard by as many others."""
    content = path.read_bytes()
    assert old in content
    assert len(old) == len(new)
    path.write_bytes(content.replace(old, new, 1))


def i64(number: int) -> bytes:
    return number.to_bytes(8, "little")


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        (b'"layer.3"', b'"layer.4"', "its header does not fit its store"),
        (b'"BF16"', b'"F16" ', "its header does not fit its store"),
        (i64(40) + i64(80), i64(-40 % 2**64) + i64(80), "its index does not fit its states"),
        (i64(40) + i64(80), i64(41) + i64(80), "holds another sequence"),
        (b"\7\0\0\0\6\0\0\0", b"\7\0\0\0\5\0\0\0", "holds another sequence"),
    ],
)
def test_f20_altered_bytes_never_pass_as_another_rows_states(
    tmp_path: Path, old: bytes, new: bytes, what: str
) -> None:
    """Of right size, in the header, the index or the ids: refused by name, or made again."""
    write(tmp_path, manifest(10), 10)
    shard = shard_path(tmp_path, 1)
    rewritten(shard, old, new)
    with pytest.raises(StoreError, match=rf"states-00001\.safetensors: {what}.*extract"):
        StateStore(tmp_path).read(digests(10)[6], LAYERS)
    store = begin(tmp_path, manifest(10), verify=True)
    assert store.missing(digests(10)) == digests(10)[5:]
    assert not shard.exists()


def test_a_header_that_is_json_but_none_of_a_shard_is_told(tmp_path: Path) -> None:
    write(tmp_path, manifest(5), 5)
    shard_path(tmp_path, 0).write_bytes(i64(2) + b"[]")
    with pytest.raises(StoreError, match=r"states-00000\.safetensors: not a safetensors file"):
        StateStore(tmp_path)


def test_copies_of_shards_under_other_names_are_left_alone(tmp_path: Path) -> None:
    write(tmp_path, manifest(5), 5)
    for name in ("states-backup.safetensors", "states-00000 (copy).safetensors"):
        (tmp_path / name).write_bytes(b"anything")
    assert [*StateStore(tmp_path).shards] == [shard_path(tmp_path, 0)]
    assert free_number(tmp_path, 0, 0, 1) == 1
