"""Extraction: the store holds the target's own states, whatever befalls the run that writes it."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from command import COMMAND, write_config
from stores import all_states, kept_files
from tiny import tiny_target
from tiny_runs import MakeConfig, three_layers, write_chats, write_target
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaForCausalLM,
    PreTrainedModel,
)

import drafthead.data.states
from drafthead.data.shards import write_shard
from drafthead.data.states import StateStore, shard_path
from drafthead.inference.target import load_target
from drafthead.train.config import RunConfig
from drafthead.train.extract import Extracted, extract
from drafthead.train.loop import run
from drafthead.train.teacher import FeatureError


def exact(make_config: MakeConfig, target: Path, layers: tuple[int, ...], **data: Any) -> RunConfig:
    """A config whose store holds fp32."""
    return make_config(
        target={"name": str(target)},
        data={"states_dtype": "float32", "max_length": 96, **data},
        head={"type": "eagle3", "layers": layers, "unroll_steps": 2},
        training={"tokens_per_batch": 96},
    )


def test_f14_the_store_holds_the_streams_that_the_convention_names(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    """Bit-equal in fp32 to hooks on the layers; ids first, middle and last of six."""
    folder = write_target(tmp_path / "six", tiny_target(num_layers=6))
    layers = (1, 3, 6)
    config = exact(make_config, folder, layers)
    write_chats(Path(config.data.train[0]), [12] * 4, question=8)
    extract(config, tmp_path / "states")
    model = load_target(folder).model
    assert isinstance(model, LlamaForCausalLM)
    alone = [s for s in all_states(tmp_path / "states", layers) if len(s.ids) > 48]
    assert len(alone) >= 4, "rows that no other shares a batch with"
    for states in alone:
        entering: list[torch.Tensor] = []
        hooks = [
            layer.register_forward_hook(lambda m, a, out, seen=entering: seen.append(out))
            for layer in model.model.layers
        ]
        with torch.no_grad():
            model(states.ids[None].long())
        for hook in hooks:
            hook.remove()
        for layer in layers:  # the stream entering layer L is what layer L - 1 gives
            assert torch.equal(states.layers[layer], entering[layer - 1][0]), layer
    manifest = StateStore(tmp_path / "states").manifest
    assert manifest.layers == layers
    assert "entering layer L" in manifest.layer_ids


@pytest.mark.parametrize("layers", [(-2, 2, 3), (1, 2, 4), (2, 2, 3), (0, 1, 2)])
def test_f14_ids_outside_the_convention_are_refused_before_the_target_is_loaded(
    make_config: MakeConfig, tmp_path: Path, layers: tuple[int, ...]
) -> None:
    config = make_config(head={"type": "eagle3", "layers": layers})
    (Path(config.target.name) / "model.safetensors").stat()
    with pytest.raises(ValueError, match=r"must be distinct ascending ids in 1\.\.3"):
        extract(config, tmp_path / "states")
    assert not (tmp_path / "states").exists()


def rescaled(model: PreTrainedModel) -> PreTrainedModel:
    """Norm weights away from one and larger output rows, so that norm, scale and cap all show."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
        model.get_output_embeddings().weight.mul_(20)  # type: ignore[union-attr, operator]
    return model


SMALL: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
    "max_position_embeddings": 256,
}
MODELS = {
    "llama": lambda: tiny_target(num_layers=2),
    "soft cap": lambda: rescaled(
        Gemma2ForCausalLM(Gemma2Config(**SMALL, head_dim=16, final_logit_softcapping=1.5))
    ),
    "logit scale": lambda: rescaled(CohereForCausalLM(CohereConfig(**SMALL))),
}


@pytest.mark.parametrize("name", MODELS)
def test_f16_logits_rebuilt_from_the_store_are_the_targets(
    make_config: MakeConfig, tmp_path: Path, name: str
) -> None:
    """The manifest says post-norm, and so it is: with the head's own unembedding, no norm more."""
    folder = write_target(tmp_path / "target", MODELS[name]())
    config = exact(make_config, folder, (1,), positions=300)
    extract(config, tmp_path / "states")
    target = load_target(folder)
    store = StateStore(tmp_path / "states")
    assert store.manifest.norm.startswith("last_hidden is post-norm")
    compared = 0
    for states in all_states(tmp_path / "states", (1,))[:3]:
        with torch.no_grad():
            logits = target.model(states.ids[None].long()).logits[0]
            rebuilt = target.unembed(states.last_hidden)
        torch.testing.assert_close(rebuilt.softmax(-1), logits.softmax(-1), atol=1e-5, rtol=0)
        at = torch.zeros_like(states.mask)
        at[:-1] = states.mask[1:]
        assert torch.equal(states.top[at].long(), logits.argmax(-1)[at])
        torch.testing.assert_close(states.log_norm[at], logits.logsumexp(-1)[at], atol=1e-4, rtol=0)
        assert not states.top[~at].any()
        compared += len(states.ids)
    assert compared >= 20


def test_f17_states_are_found_by_content_whatever_batch_they_came_from(
    make_config: MakeConfig, tmp_path: Path, target_folder: Path
) -> None:
    """Alone, in batches, in another order, from another file: equal to 1e-5, by sequence."""
    config = exact(make_config, target_folder, (1, 3))
    shuffled = tmp_path / "shuffled.jsonl"
    lines = Path(config.data.train[0]).read_text().splitlines()
    lines += [lines[0], lines[0].replace("row-0", "again")]  # equal rows are one sequence
    shuffled.write_text("\n".join(reversed(lines)) + "\n")
    other = config.model_copy(
        update={
            "data": config.data.model_copy(update={"train": (str(shuffled),)}),
            "training": config.training.model_copy(update={"tokens_per_batch": 400, "seed": 5}),
        }
    )
    extract(config, tmp_path / "one")
    extract(other, tmp_path / "two")
    one, two = StateStore(tmp_path / "one"), StateStore(tmp_path / "two")
    digests = [digest for shard in one.shards.values() for digest in shard.digests]
    assert not two.missing(digests)
    assert len(digests) == one.manifest.rows == two.manifest.rows
    model = load_target(target_folder)
    for digest in digests:
        left, right = one.read(digest, (1, 3)), two.read(digest, (1, 3))
        assert left is not None
        assert right is not None
        alone, last = model.states(left.ids[None].long(), (1, 3))
        assert torch.equal(left.ids, right.ids)
        for states in (left, right):
            stored = torch.cat([states.layers[1], states.layers[3]], dim=-1)
            torch.testing.assert_close(stored, alone[0], atol=1e-5, rtol=0)
            torch.testing.assert_close(states.last_hidden, last[0], atol=1e-5, rtol=0)


def overflowing(value: float) -> PreTrainedModel:
    """A target whose MLP passes what fp16 can hold, in every row."""
    model = three_layers()
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.mul_(value)
        model.model.layers[1].mlp.up_proj.weight.mul_(value)
    return model


def test_f18_an_overflowing_target_is_reported_with_its_dtype(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    folder = write_target(tmp_path / "loud", overflowing(3000.0))
    config = make_config(target={"name": str(folder), "dtype": "float16"})
    with pytest.raises(FeatureError, match=r"target\.dtype: states overflow in float16.*float32"):
        extract(config, tmp_path / "states")
    wide = make_config(target={"name": str(folder), "dtype": "float32"})
    assert extract(wide, tmp_path / "wide").dropped == 0


def test_f22_what_a_narrower_store_cannot_hold_is_flagged(
    make_config: MakeConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """States of 1e5 and more in bf16 do not fit a store in fp16: a warning, and a refusal."""
    folder = write_target(tmp_path / "loud", overflowing(3000.0))
    config = make_config(
        target={"name": str(folder), "dtype": "bfloat16"}, data={"states_dtype": "float16"}
    )
    with pytest.raises(FeatureError, match=r"data\.states_dtype: float16 holds no more"):
        extract(config, tmp_path / "states")
    assert "float16 ends at 65,504, bfloat16 does not" in caplog.text


def test_f19_a_bad_shard_is_redone_and_the_others_stay(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    config, whole, out = make_config(), tmp_path / "whole", tmp_path / "out"
    made = extract(config, whole)
    assert made.shards >= 5
    assert extract(config, out).new_positions == made.positions
    assert kept_files(out) == kept_files(whole)
    before = {path: path.stat().st_mtime_ns for path in out.glob("states-*")}
    bad = shard_path(out, 2)
    bad.write_bytes(bad.read_bytes()[: bad.stat().st_size // 2])
    again = extract(config, out)
    assert 0 < again.new_positions < made.positions / 2
    assert kept_files(out) == kept_files(whole)
    same = {path for path, at in before.items() if path.stat().st_mtime_ns == at}
    assert same == before.keys() - {bad}
    assert extract(config, out).new_positions == 0


def test_two_ranks_write_what_one_would(tmp_path: Path, target_folder: Path) -> None:
    write_chats(tmp_path / "train.jsonl", [5, 9, 12, 3, 8, 7] * 5)
    write_chats(tmp_path / "heldout.jsonl", [8] * 6, seed=1)
    config = write_config(tmp_path / "run.yaml", tmp_path, target_folder)
    argv = [*COMMAND, "extract", "--config", str(config), "--json", "--out"]
    one = subprocess.run([*argv, str(tmp_path / "one")], capture_output=True, text=True)
    assert one.returncode == 0, one.stderr
    assert "MB in" in one.stderr.partition("(forecast)")[0], "told before anything is written"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "-m"]
    launch = [*torchrun, *argv[2:], str(tmp_path / "two")]
    two = subprocess.run(launch, capture_output=True, text=True)
    assert two.returncode == 0, two.stderr
    assert kept_files(tmp_path / "two") == kept_files(tmp_path / "one")
    figures = json.loads(two.stdout)
    assert figures["rows"] == json.loads(one.stdout)["rows"] == 36
    assert figures["new_positions"] == figures["positions"]


def limited(root: Path, size: str, *command: str) -> subprocess.CompletedProcess[str]:
    """Run a command with a file system of this size on `root`, kept in a name space of its own."""
    script = f'mount -t tmpfs -o size={size} none "{root}" && "$@"'
    argv = ["unshare", "-Urm", "sh", "-c", script, "sh", *command]
    return subprocess.run(argv, capture_output=True, text=True, timeout=600)


@pytest.fixture
def small_disk(tmp_path: Path) -> Path:
    root = tmp_path / "disk"
    root.mkdir()
    try:
        tried = limited(root, "1m", "true")
    except FileNotFoundError:
        pytest.skip("no unshare here to make a small disk with")
    if tried.returncode:
        pytest.skip(f"no small disk can be made here: {tried.stderr.strip()}")
    return root


def test_f21_too_large_a_store_is_refused_and_a_full_disk_leaves_one_to_go_on_with(
    tmp_path: Path, small_disk: Path, target_folder: Path
) -> None:
    """A file system of 600 KB for about 1 MB of states, then with room for them."""
    write_chats(tmp_path / "train.jsonl", [9] * 30)
    write_chats(tmp_path / "heldout.jsonl", [8] * 6, seed=1)
    config = write_config(tmp_path / "run.yaml", tmp_path, target_folder)
    out = small_disk / "states"
    argv = [*COMMAND, "extract", "--config", str(config), "--out", str(out)]
    refused = limited(small_disk, "600k", *argv)
    assert refused.returncode == 2, refused
    assert "error: " in refused.stderr
    last = refused.stderr.strip().splitlines()[-1]
    for part in ("the states need", "free", "training.features=online", "data.check_space=false"):
        assert part in last, last
    script = f"""
        {" ".join(argv)} data.check_space=false; code=$?; ls -la {out} >&2
        mount -o remount,size=9m {small_disk}
        {" ".join(argv)} --json && exit $code
    """
    done = limited(small_disk, "600k", "sh", "-c", script)
    assert done.returncode == 2, done
    assert "the disk is full" in done.stderr
    assert "run the same command again" in done.stderr
    assert ".tmp" not in done.stderr
    figures = json.loads(done.stdout)
    assert 0 < figures["new_positions"] < figures["positions"], "what had been written was kept"
    assert figures["forecast_bytes"] == pytest.approx(figures["bytes"], rel=0.05)


def test_f21_a_cap_is_kept_to_before_the_target_is_loaded(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    config = make_config(data={"max_bytes": 10_000})
    with pytest.raises(ValueError, match=r"data\.max_bytes: the states come to [\d,]+ bytes"):
        extract(config, tmp_path / "states")
    assert not (tmp_path / "states").exists()


def test_f24_a_second_target_is_refused_by_name(make_config: MakeConfig, tmp_path: Path) -> None:
    first = write_target(tmp_path / "first", three_layers())
    second = write_target(tmp_path / "second", three_layers(seed=1))
    out = tmp_path / "states"
    extract(make_config(target={"name": str(first)}), out)
    with pytest.raises(ValueError, match=r"'first'.*'second'.*fingerprint.*another folder"):
        extract(make_config(target={"name": str(second)}), out)
    # The same weights under another folder name are the same target (F23).
    third = write_target(tmp_path / "third", three_layers())
    assert extract(make_config(target={"name": str(third)}), out).new_positions == 0


def test_other_rows_and_other_layers_are_refused_before_the_target_is_loaded(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    config, out = make_config(), tmp_path / "states"
    extract(config, out, layers=(2,))
    with pytest.raises(ValueError, match="is a store of other rows"):
        extract(make_config(data={"max_length": 64}), out)
    with pytest.raises(ValueError, match="is a store of other layers"):
        extract(make_config(head={"type": "eagle3", "layers": (1, 3)}), out)


def test_the_same_rows_from_other_files_are_the_same_store(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    """Renamed, reversed, some twice: what counts is what the target reads."""
    config, out = make_config(), tmp_path / "states"
    extract(config, out)
    lines = Path(config.data.train[0]).read_text().splitlines()
    other = tmp_path / "reversed.jsonl"
    other.write_text("\n".join([*reversed(lines), *lines[:3]]) + "\n")
    assert extract(make_config(data={"train": str(other)}), out).new_positions == 0
    with pytest.raises(ValueError, match="is a store of other rows"):
        extract(make_config(data={"positions": 300}), out)


def test_a_slow_disk_and_other_batches_than_before_lose_no_shard(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training left shards under the numbers that groups of these batches would have."""
    short = make_config(data={"heldout": ()}, training={"max_steps": 4})
    out = tmp_path / "states"
    begun = short.data.model_copy(update={"states": out})
    training = short.training.model_copy(update={"features": "fill"})
    run(short.model_copy(update={"data": begun, "training": training}))
    before = kept_files(out)
    assert len(before) >= 4

    def slowly(*arguments: Any) -> None:
        time.sleep(0.1)
        write_shard(*arguments)

    monkeypatch.setattr(drafthead.data.states, "write_shard", slowly)
    extract(make_config(data={"heldout": ()}, training={"tokens_per_batch": 140, "seed": 3}), out)
    store = StateStore(out)
    assert store.manifest.complete
    store.verify()
    assert not store.bad
    after = kept_files(out)
    assert all(after[name] == before[name] for name in before if name != "manifest.json")


def test_the_command_says_what_it_wrote(tmp_path: Path, call: Any, target_folder: Path) -> None:
    write_chats(tmp_path / "train.jsonl", [9] * 12)
    write_chats(tmp_path / "heldout.jsonl", [8] * 6, seed=1)
    config = write_config(tmp_path / "run.yaml", tmp_path, target_folder)
    out = tmp_path / "states"
    done = call("extract", "--config", config, "--out", out, "--layer", "2", "--json")
    assert done.code == 0, done.err
    figures = json.loads(done.out)
    made = Extracted(out, *(figures[key] for key in list(Extracted.__dataclass_fields__)[1:]))
    assert made.rows == 18
    assert made.bytes == sum(path.stat().st_size for path in out.glob("*.safetensors"))
    assert made.forecast_bytes == pytest.approx(made.bytes, rel=0.05)
    plain = call("extract", "--config", config, "--out", out)
    assert "0 positions new" in plain.out
