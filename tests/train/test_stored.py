"""Training from stored states is training online: same batches, same losses, no target needed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from stores import kept_files
from tiny_runs import LAYERS, MakeConfig, events, three_layers, write_chats, write_target

import drafthead.train.engine
from drafthead.data.manifest import StoreError
from drafthead.data.shards import digest_of
from drafthead.data.states import StateStore, shard_path
from drafthead.heads.eagle import EagleSettings
from drafthead.inference.evaluate import end_ids
from drafthead.inference.target import load_target
from drafthead.train.assemble import assemble
from drafthead.train.config import ConfigError, RunConfig
from drafthead.train.engine import Engine
from drafthead.train.extract import extract
from drafthead.train.loop import run
from drafthead.train.outline import borrowed_mark, outline_of
from drafthead.train.teacher import FeatureError
from drafthead.train.timing import Stopwatch


def with_store(config: RunConfig, folder: Path, features: str, out: Path) -> RunConfig:
    data = config.data.model_copy(update={"states": folder})
    training = config.training.model_copy(update={"features": features})
    return config.model_copy(update={"data": data, "training": training, "out": out})


def losses(out: Path) -> list[float]:
    return [event["loss"] for event in events(out)]


def no_target(*_: object) -> Any:
    raise AssertionError("the target was loaded")


def test_a_head_of_the_last_state_trains_from_any_store(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layer -1 is in every store, once: of a head with other layers, and of one being filled."""
    states = tmp_path / "states"
    extract(make_config(), states)
    short = make_config(training={"max_steps": 4, "max_minutes": None})
    head = EagleSettings(draft_vocab_size=short.head.model_dump()["draft_vocab_size"])
    short = short.model_copy(update={"head": head.model_copy(update={"warm_start": 100})})
    run(short.model_copy(update={"out": tmp_path / "online"}))
    run(with_store(short, tmp_path / "filled", "fill", tmp_path / "fill"))
    monkeypatch.setattr(drafthead.train.engine, "load_target", no_target)
    run(with_store(short, states, "store", tmp_path / "store"))
    want = losses(tmp_path / "online")
    assert len(want) == 4
    for name in ("fill", "store"):
        assert losses(tmp_path / name) == pytest.approx(want, rel=1e-5)
    held = json.loads((tmp_path / "filled" / "manifest.json").read_text())["contract"]["layers"]
    assert held == []


@pytest.fixture
def long(make_config: MakeConfig) -> RunConfig:
    """More than ten steps, over two epochs, with evaluations."""
    return make_config(training={"epochs": 2, "eval_every": 5})


def test_every_source_gives_the_same_losses(
    long: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Online, memory, store and fill (its first run, and a second one that only reads), to 1e-5."""
    states, filled = tmp_path / "states", tmp_path / "filled"
    extract(long, states)
    want: list[float] = []
    for name, mode, folder in (
        ("online", "online", None),
        ("memory", "memory", None),
        ("fill", "fill", filled),
        ("store", "store", states),
        ("again", "fill", filled),
        ("auto", "auto", filled),
    ):
        if name == "store":
            monkeypatch.setattr(drafthead.train.engine, "load_target", no_target)
        out = tmp_path / name
        result = run(replace_store(long, folder, mode, out))
        got = losses(out)
        want = want or got
        assert len(got) >= 10
        assert got == pytest.approx(want, abs=1e-5), name
        evaluations = [event["simulated_tau"] for event in events(out, "evaluation")]
        online = [event["simulated_tau"] for event in events(tmp_path / "online", "evaluation")]
        assert evaluations == pytest.approx(online, abs=1e-5), name
        assert result.dropped == 0
    store = StateStore(filled)
    assert store.manifest.complete
    assert not StateStore(states).missing(d for s in store.shards.values() for d in s.digests)


def replace_store(config: RunConfig, folder: Path | None, mode: str, out: Path) -> RunConfig:
    if folder is not None:
        return with_store(config, folder, mode, out)
    training = config.training.model_copy(update={"features": mode})
    return config.model_copy(update={"training": training, "out": out})


def test_an_interrupted_fill_is_gone_on_with(long: RunConfig, tmp_path: Path) -> None:
    """Three steps leave a valid, incomplete store; the next run keeps its shards, and fills it."""
    folder = tmp_path / "filled"
    short = long.model_copy(
        update={"training": long.training.model_copy(update={"max_steps": 3, "epochs": None})}
    )
    run(with_store(short, folder, "fill", tmp_path / "first"))
    begun = StateStore(folder)
    assert not begun.manifest.complete
    assert begun.shards
    with pytest.raises(StoreError, match=r"is not complete: it lacks \d+ of 26 rows.*fill"):
        run(with_store(long, folder, "store", tmp_path / "no"))
    before = kept_files(folder)
    run(with_store(long, folder, "fill", tmp_path / "second"))
    after = kept_files(folder)
    assert StateStore(folder).manifest.complete
    assert all(after[name] == before[name] for name in before if name != "manifest.json")
    run(long.model_copy(update={"out": tmp_path / "online"}))
    assert losses(tmp_path / "second") == pytest.approx(losses(tmp_path / "online"), abs=1e-5)
    # Extraction goes on where training left a store, too.
    third = tmp_path / "third"
    run(with_store(short, third, "fill", tmp_path / "short"))
    extract(long, third)
    run(with_store(long, third, "store", tmp_path / "from-both"))
    assert losses(tmp_path / "from-both") == pytest.approx(losses(tmp_path / "online"), abs=1e-5)


def test_a_folder_with_the_borrowed_tensors_alone_is_enough(
    long: RunConfig, tmp_path: Path, target_folder: Path
) -> None:
    """Embedding (tied to the output rows) and final norm; all else of the target is gone."""
    states = tmp_path / "states"
    extract(long, states)
    thin = tmp_path / "thin"
    thin.mkdir()
    for file in target_folder.iterdir():
        if file.suffix != ".safetensors":
            (thin / file.name).write_bytes(file.read_bytes())
    weights = load_file(target_folder / "model.safetensors")
    names = ("model.embed_tokens.weight", "model.norm.weight")
    save_file({n: weights[n] for n in names}, thin / "model.safetensors", {"format": "pt"})
    config = long.model_copy(update={"target": long.target.model_copy(update={"name": str(thin)})})
    run(with_store(config, states, "store", tmp_path / "thin-run"))
    run(long.model_copy(update={"out": tmp_path / "online"}))
    assert losses(tmp_path / "thin-run") == pytest.approx(losses(tmp_path / "online"), abs=1e-5)


def test_f23_a_store_of_another_target_is_refused_without_loading_it(
    long: RunConfig, tmp_path: Path
) -> None:
    """Other weights of the same shape, another template, another tokenizer: each by name."""
    states = tmp_path / "states"
    extract(long, states)
    other = write_target(tmp_path / "other", three_layers(seed=1))
    config = long.model_copy(update={"target": long.target.model_copy(update={"name": str(other)})})
    with pytest.raises(StoreError, match=r"made of target 'tiny'; the embedding.*of 'other'"):
        run(with_store(config, states, "store", tmp_path / "no"))
    same = write_target(tmp_path / "same", three_layers())
    config = long.model_copy(update={"target": long.target.model_copy(update={"name": str(same)})})
    run(with_store(config, states, "store", tmp_path / "moved"))
    template = same / "chat_template.jinja"
    template.write_text(template.read_text().replace("small assistant", "small helper"))
    with pytest.raises(StoreError, match=r"does not fit: template is .*the store has"):
        run(with_store(config, states, "store", tmp_path / "no"))


def test_f24_shards_copied_by_hand_are_refused_in_training(long: RunConfig, tmp_path: Path) -> None:
    states, strange = tmp_path / "states", tmp_path / "strange"
    extract(long, states)
    other = write_target(tmp_path / "other", three_layers(seed=1))
    update = {"target": long.target.model_copy(update={"name": str(other)})}
    extract(long.model_copy(update=update), strange)
    shard_path(states, 99).write_bytes(shard_path(strange, 0).read_bytes())
    for mode in ("store", "fill"):
        with pytest.raises(ValueError, match=r"states-00099.*'other'.*'tiny'.*never mix"):
            run(with_store(long, states, mode, tmp_path / "no"))


@pytest.mark.parametrize("change", [-4096, 1024])
def test_f20_a_cut_or_longer_shard_is_refused_in_training(
    long: RunConfig, tmp_path: Path, change: int
) -> None:
    states = tmp_path / "states"
    extract(long, states)
    bad = shard_path(states, 1)
    content = bad.read_bytes()
    bad.write_bytes(content[:change] if change < 0 else content + b"\0" * change)
    with pytest.raises(StoreError, match=r"states-00001\.safetensors: .*header says.*extract"):
        run(with_store(long, states, "store", tmp_path / "no"))


def poisoned(folder: Path, rows: Sequence[str], value: float) -> int:
    """Put a value into the stored states of the first so many sequences; how many there are."""
    count = 0
    for path in sorted(folder.glob("states-*")):
        tensors = load_file(path)
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata()
        for start in tensors["offsets"][:-1].tolist():
            if count < len(rows):
                tensors["layer.2"][start + 1] = value
                count += 1
        save_file(tensors, path, metadata)
    return count


@pytest.mark.parametrize("bad", [1, 15])
def test_f18_stored_rows_that_are_not_finite_are_dropped_and_too_many_stop_the_run(
    make_config: MakeConfig, tmp_path: Path, bad: int
) -> None:
    """NaN in one stored sequence of twenty: training ends with nineteen; in fifteen: it stops."""
    config = make_config(data={"heldout": ()}, training={"epochs": 2})
    states = tmp_path / "states"
    extract(config, states)
    assert poisoned(states, [""] * bad, float("nan")) == bad
    store = with_store(config, states, "store", tmp_path / "out")
    # Manifest sums tell an altered shard: a store that is still being filled has none.
    manifest = states / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"shards": []}))
    if bad == 15:
        with pytest.raises(FeatureError, match=r"data\.states.*of 20 rows"):
            run(store)
        return
    result = run(store)
    assert result.dropped == 1
    assert all(torch.isfinite(torch.tensor(losses(tmp_path / "out"))))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("computed", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16"])
def test_f22_every_dtype_of_store_target_and_head_trains(
    make_config: MakeConfig, tmp_path: Path, stored: str, computed: str, precision: str
) -> None:
    """The store's dtype is in its manifest; training computes in its own precision, whatever."""
    config = make_config(
        target={"dtype": computed},
        data={"states_dtype": stored, "heldout": ()},
        training={"precision": precision, "max_steps": 2},
    )
    states = tmp_path / "states"
    extract(config, states)
    assert StateStore(states).manifest.dtype == stored
    assert StateStore(states).manifest.contract["dtype"] == computed
    run(with_store(config, states, "store", tmp_path / "out"))
    assert len(losses(tmp_path / "out")) == 2
    assert all(0 < loss < 50 for loss in losses(tmp_path / "out"))


def test_a_store_serves_heads_that_read_fewer_layers_and_no_others(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    head = {"type": "eagle3", "layers": (1, 3), "draft_vocab_size": 256, "unroll_steps": 2}
    narrow = make_config(head=head, training={"max_steps": 4, "eval_every": 2})
    states = tmp_path / "states"
    extract(make_config(), states)
    run(with_store(narrow, states, "store", tmp_path / "store"))
    run(narrow.model_copy(update={"out": tmp_path / "online"}))
    assert losses(tmp_path / "store") == pytest.approx(losses(tmp_path / "online"), abs=1e-5)
    begun = tmp_path / "begun"
    extract(narrow, begun)
    with pytest.raises(StoreError, match=r"holds layers \[1, 3\], the head also reads \[2\]"):
        run(with_store(make_config(), begun, "store", tmp_path / "no"))


def test_a_fill_with_fewer_layers_than_the_store_was_begun_with_keeps_them_all(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    whole = make_config(training={"max_steps": 2})
    folder = tmp_path / "filled"
    run(with_store(whole, folder, "fill", tmp_path / "first"))
    head = {"type": "eagle3", "layers": (1, 3), "draft_vocab_size": 256, "unroll_steps": 2}
    narrow = make_config(head=head, training={"epochs": 1})
    run(with_store(narrow, folder, "fill", tmp_path / "second"))
    run(narrow.model_copy(update={"out": tmp_path / "online"}))
    assert losses(tmp_path / "second") == pytest.approx(losses(tmp_path / "online"), abs=1e-5)
    assert StateStore(folder).manifest.layers == LAYERS


def test_a_head_that_reads_no_states_fills_a_store_of_layers_too(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    """A sibling wants the teacher's last state alone; the store keeps what it was begun with."""
    folder = tmp_path / "filled"
    run(with_store(make_config(training={"max_steps": 1}), folder, "fill", tmp_path / "first"))
    sibling = make_config(head={"type": "sibling", "keep_layers": 2}, training={"epochs": 1})
    run(with_store(sibling, folder, "fill", tmp_path / "second"))
    run(sibling.model_copy(update={"out": tmp_path / "online"}))
    assert losses(tmp_path / "second") == pytest.approx(losses(tmp_path / "online"), abs=1e-5)
    store = StateStore(folder)
    assert store.manifest.complete
    assert store.manifest.layers == LAYERS


def test_a_contract_of_another_version_is_one_line(long: RunConfig, tmp_path: Path) -> None:
    states = tmp_path / "states"
    extract(long, states)
    for shard in states.glob("states-*"):  # their seal would tell first
        shard.unlink()
    manifest = json.loads((states / "manifest.json").read_text())
    manifest["contract"]["later"] = 1
    (states / "manifest.json").write_text(json.dumps(manifest | {"shards": []}))
    with pytest.raises(StoreError, match=r"made by drafthead .* does not read: later: [^\n]*$"):
        run(with_store(long, states, "store", tmp_path / "no"))


def test_rows_that_a_store_has_not_are_named(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, states = make_config(data={"heldout": ()}), tmp_path / "states"
    extract(config, states)
    fewer = make_config(data={"heldout": (), "positions": 300})
    run(with_store(fewer, states, "store", tmp_path / "fewer"))
    write_chats(Path(config.data.train[0]), [6] * 20, seed=9)
    with pytest.raises(StoreError, match=r"is for other rows: it lacks 20 of 20.*row-0"):
        run(with_store(config, states, "store", tmp_path / "no"))
    with monkeypatch.context() as without:
        without.setattr(drafthead.train.engine, "load_target", no_target)
        with pytest.raises(StoreError, match=r"is a store of other rows \(files, template"):
            run(with_store(config, states, "fill", tmp_path / "no"))
    with pytest.raises(StoreError, match=r"holds no manifest\.json"):
        run(with_store(config, tmp_path / "nothing", "store", tmp_path / "no"))
    assert not (tmp_path / "no").exists(), "a refused run leaves nothing"


def test_settings_of_a_store_that_have_no_effect_are_told(make_config: MakeConfig) -> None:
    states = {"states": "s", "max_bytes": 5, "states_dtype": "float16"}
    idle = make_config(data=states, training={"features": "online"}).without_effect()
    assert {"data.states", "data.max_bytes", "data.states_dtype"} <= {*idle}
    assert not make_config(data=states, training={"features": "fill"}).without_effect()
    with pytest.raises((ConfigError, ValueError), match=r"data\.states: missing"):
        make_config(training={"features": "store"})
    # Where states come from is no part of what a checkpoint is bound to.
    moved = make_config(data={"states": "elsewhere", "max_bytes": 7, "check_space": False})
    assert moved.identity() == make_config().identity()


def test_an_outline_knows_what_the_loaded_target_says(target_folder: Path) -> None:
    outline, target = outline_of(target_folder, None), load_target(target_folder)
    contract = target.contract(LAYERS, {})
    facts = contract.model_dump()
    assert outline.facts({}) == {name: facts[name] for name in outline.facts({})}
    assert outline.ends == end_ids(target)
    assert (outline.vocab_size, outline.num_layers) == (target.vocab_size, target.num_layers)
    assert outline.context == target.context
    assert borrowed_mark(target.model, contract) == borrowed_mark(target_folder, contract)
    assert outline.files({"model.norm.weight"}) == target_folder


def test_what_is_read_ahead_is_what_would_have_been_read(long: RunConfig, tmp_path: Path) -> None:
    extract(long, tmp_path / "states")
    config = with_store(long, tmp_path / "states", "store", tmp_path / "out")
    ahead = assemble(config, Engine(config), Stopwatch())
    plain = assemble(config, Engine(config), Stopwatch())
    for index in range(ahead.train_batches):
        ahead.train.expect([index, (index + 1) % ahead.train_batches])
        one, two = ahead.train.batch(index), plain.train.batch(index)
        assert torch.equal(one.features, two.features)
        assert torch.equal(one.ids, two.ids)
    assert ahead.target is None


def test_a_sequence_is_named_by_ids_and_mask() -> None:
    names = {digest_of([1, 2, 300_000], [False, True, True]), digest_of([1, 2], [False, True])}
    names |= {digest_of([1, 2, 300_000], [True, True, True])}
    assert len(names) == 3
    assert digest_of((1, 2), (False, True)) in names
