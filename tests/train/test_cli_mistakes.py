"""Mistakes of users: each is one line with exit code 2, made before any work, and costs nothing."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from command import Call, Place, assert_one_line, write_config
from tiny_runs import three_layers, write_target


def files(*folders: Path) -> dict[Path, bytes]:
    """All files below and their content, but for the notes of what a run was asked."""
    found = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    return {p: p.read_bytes() for p in found if p.name not in ("config.yaml", "run.json")}


@pytest.fixture
def wrong(place: Place, tmp_path: Path) -> dict[str, Path]:
    """Things that are not what they should be."""
    (tmp_path / "file").write_text("not a folder")
    (tmp_path / "empty").mkdir()
    write_target(tmp_path / "other", three_layers(seed=7))
    shutil.copytree(place.target, tmp_path / "template")
    template = tmp_path / "template" / "chat_template.jinja"
    template.write_text(template.read_text().replace("small", "large"))
    for name, source in (("cut_head", place.head), ("cut_target", place.target)):
        shutil.copytree(source, tmp_path / name)
        weights = tmp_path / name / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-1000])
    long = {"id": "endless", "turns": ["word " * 400]}
    (tmp_path / "long.jsonl").write_text(json.dumps(long) + "\n")
    write_config(tmp_path / "typo.yaml", place.root, place.target, max_step=3)
    (tmp_path / "broken.yaml").write_text("data: {train: [\n")
    good = (place.root / "train.jsonl").read_text().splitlines()[0]
    bad = {"messages": [{"role": "user", "content": "alone"}]}
    (tmp_path / "mixed.jsonl").write_text(f"{good}\n{json.dumps(bad)}\n")
    (tmp_path / "latin.yaml").write_bytes(b"out: \xe9\n")
    return {path.name.split(".")[0]: path for path in tmp_path.iterdir()}


EVALUATE = "evaluate --head {head} --target {target} --prompts {prompts} --dtype float32"
REGENERATE = "regenerate {prompts} --out {tmp}/out.jsonl --target {target}"
GENERATE = "generate --head {head} --target {target} --prompt hello --dtype float32"
TRAIN = "train --config {config} out={tmp}/fresh"

MISTAKES: dict[str, tuple[str, list[str]]] = {
    "config missing": ("train --config {tmp}/none.yaml", ["none.yaml", "no such config file"]),
    "config no preset": ("train --config smolm2-eagle3", ["did you mean", "smollm2-eagle3"]),
    "config not YAML": ("train --config {broken}", ["broken.yaml"]),
    "config is a folder": ("train --config {empty}", ["empty: no such config file"]),
    "config not text": ("train --config {latin}", ["latin.yaml: ", "utf-8"]),
    "config key": (
        "train --config {typo} out={tmp}/fresh",
        ["training.max_step: unknown setting; did you mean 'max_steps'?"],
    ),
    "override key": (f"{TRAIN} trainin.seed=1", ["trainin: ", "did you mean 'training'?"]),
    "override form": (f"{TRAIN} faster", ["'faster'", "a.b=c"]),
    "override value": (f"{TRAIN} training.max_steps=few", ["training.max_steps", "'few'"]),
    "no data": (f"{TRAIN} data.train=[]", ["data.train: ", "at least 1 item"]),
    "data row, strict": (
        f"{TRAIN} data.strict=true data.train={{mixed}}",
        ["mixed.jsonl:2: no assistant message"],
    ),
    "data missing": (f"{TRAIN} data.train=none.jsonl", ["none.jsonl: no such data file"]),
    "evaluate: prompts missing": (
        EVALUATE.replace("{prompts}", "{tmp}/none.jsonl"),
        ["none.jsonl: no such data file", "samples/NAME"],
    ),
    "regenerate: prompts missing": (
        "regenerate {tmp}/none.jsonl --out {tmp}/out.jsonl --target {target}",
        ["none.jsonl: no such data file"],
    ),
    "evaluate: head missing": (
        EVALUATE.replace("{head}", "{tmp}/none"),
        ["none: no config.json; expected the folder of a head"],
    ),
    "generate: head missing": (GENERATE.replace("{head}", "{tmp}/none"), ["none: no config.json"]),
    "evaluate: other target": (
        EVALUATE.replace("{target}", "{other}"),
        ["was made for target 'tiny' and does not fit 'other'", "fingerprint"],
    ),
    "generate: other target": (
        GENERATE.replace("{target}", "{other}"),
        ["was made for target 'tiny' and does not fit 'other'", "fingerprint"],
    ),
    "evaluate: other template": (EVALUATE.replace("{target}", "{template}"), ["template is"]),
    "generate: other template": (GENERATE.replace("{target}", "{template}"), ["template is"]),
    "evaluate: long prompt": (
        EVALUATE.replace("{prompts}", "{long}"),
        ["prompt 'endless'", "context of 256", "max_new_tokens"],
    ),
    "generate: long prompt": (f"{GENERATE} --max-new-tokens 256", ["context of 256"]),
    "generate: no prompt": (
        "generate --target {target} --dtype float32",
        ["no prompt", "--prompt TEXT"],
    ),
    "train: out below a file": ("train --config {config} out={file}/run", ["file/run"]),
    "evaluate: out below a file": (f"{EVALUATE} --out {{file}}/result", ["{file}"]),
    "evaluate: out is a file": (f"{EVALUATE} --out {{file}}", ["{file}", "name a folder"]),
    "evaluate: large batch": (f"{EVALUATE} --batch 1 --batch 99", ["batch 99", "smaller batch"]),
    "evaluate: group": (
        f"{EVALUATE} --by colour",
        ["--by 'colour'", "category, language"],
    ),
    "evaluate: against without a head": (
        "evaluate --target {target} --prompts {prompts} --dtype float32 --against int8",
        ["--against", "give one with --head"],
    ),
    "evaluate: heads of one name": (
        f"{EVALUATE} --head {{head}}",
        ["--head", "NAME=FOLDER"],
    ),
    "regenerate: out below a file": (
        "regenerate {prompts} --out {file}/out.jsonl --target {target}",
        ["{file}"],
    ),
    "regenerate: over its own prompts": (
        "regenerate {prompts} --out {prompts} --target {target}",
        ["{prompts}: is there already", "--out"],
    ),
    "demo: out below a file": ("demo --out {file}/demo", ["{file}/demo"]),
    "fetch-demo: below a file": ("fetch-demo {file}/model", ["{file}", "name a folder"]),
    "evaluate: dtype": (f"{EVALUATE} --dtype float12", ["--dtype 'float12'", "bfloat16"]),
    "generate: dtype": (f"{GENERATE} --dtype float12", ["--dtype 'float12'", "bfloat16"]),
    "regenerate: dtype": (
        "regenerate {prompts} --out {tmp}/out.jsonl --target {target} --dtype float12",
        ["--dtype 'float12'", "bfloat16"],
    ),
    "regenerate: endpoint without a model": (
        f"{REGENERATE} --endpoint http://localhost:1/v1",
        ["--endpoint and --model go together"],
    ),
    "regenerate: endpoint that drafts": (
        f"{REGENERATE} --endpoint http://localhost:1/v1 --model m --head {{head}}",
        ["--head drafts for a target that runs here", "--endpoint"],
    ),
    "regenerate: no address": (
        f"{REGENERATE} --endpoint localhost:1 --model m",
        ["--endpoint 'localhost:1'", "http://localhost:8000/v1"],
    ),
    "regenerate: no server": (
        f"{REGENERATE} --endpoint http://127.0.0.1:1/v1 --model m",
        ["http://127.0.0.1:1/v1: no connection", "is the server up?"],
    ),
    "regenerate: drop": (f"{REGENERATE} --drop bad", ["--drop 'bad'", "loop, cut, empty, or none"]),
    "regenerate: template arguments": (
        f"{REGENERATE} --template-kwargs thinking",
        ["--template-kwargs 'thinking'", "name=value"],
    ),
    "regenerate: head of another target": (
        f"{REGENERATE} --dtype float32 --head {{head}}".replace("{target}", "{other}"),
        ["was made for target 'tiny' and does not fit 'other'"],
    ),
    "train: dtype": (f"{TRAIN} target.dtype=float12", ["target.dtype", "'bfloat16'"]),
    "evaluate: tree": (f"{EVALUATE} --tree chain", ["tree 'chain'", "chain:DEPTH"]),
    "generate: tree": (f"{GENERATE} --tree tree:4x4", ["tree 'tree:4x4'", "tree:4x4:12"]),
    "generate: tree of nothing": (f"{GENERATE} --tree chain:0", ["depth 0", "at least 1"]),
    "generate: wide tree": (f"{GENERATE} --tree tree:2x400:800", ["width 400", "256"]),
    "evaluate: rule and tree": (
        f"{EVALUATE} --rule rejection --tree tree:3x2:6 --temperature 1",
        ["'rejection' cannot verify tree:3x2:6", "static:PATHS", "'coupled'"],
    ),
    "generate: rule and tree": (
        f"{GENERATE} --rule rejection --tree tree:3x2:6",
        ["'rejection' cannot verify tree:3x2:6"],
    ),
    "generate: rule": (f"{GENERATE} --rule fast", ["rule 'fast'", "coupled, rejection"]),
    "run exists": ("train --config {config}", ["holds a run already", "--resume"]),
    "resumed: nothing there": (f"{TRAIN} --resume", ["no checkpoint to resume"]),
    "evaluate: cut head": (
        EVALUATE.replace("{head}", "{cut_head}"),
        ["cut_head/model.safetensors: not a safetensors file"],
    ),
    "generate: cut head": (GENERATE.replace("{head}", "{cut_head}"), ["not a safetensors file"]),
    "generate: target as head": (
        GENERATE.replace("{head}", "{target}"),
        ["model_type 'llama' is no head", "eagle3"],
    ),
    "evaluate: empty target": (
        EVALUATE.replace("{target}", "{empty}"),
        ["'{empty}' cannot be loaded"],
    ),
    "generate: empty target": (
        GENERATE.replace("{target}", "{empty}"),
        ["'{empty}' cannot be loaded"],
    ),
    "train: empty target": (f"{TRAIN} target.name={{empty}}", ["'{empty}' cannot be loaded"]),
    "generate: cut target": (
        "generate --target {cut_target} --prompt hello",
        ["cut_target' cannot be loaded"],
    ),
    "generate: no such target": (
        "generate --target nowhere --prompt hello",
        ["target 'nowhere': no such folder, and not a Hub id"],
    ),
    "generate: Hub id offline": (
        "generate --target some-org/some-model --prompt hello",
        ["target 'some-org/some-model' cannot be loaded"],
    ),
    "train: Hub id offline": (
        f"{TRAIN} target.name=some-org/some-model",
        ["target 'some-org/some-model' cannot be loaded"],
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line_that_says_what_and_where_and_costs_nothing(
    mistake: str,
    place: Place,
    wrong: dict[str, Path],
    call: Call,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    names = {**vars(place), "head": place.head, **wrong, "tmp": tmp_path}
    line, parts = MISTAKES[mistake]
    before = files(place.root, tmp_path)
    done = call(*(word.format(**names) for word in line.split()))
    assert_one_line(done, [part.format(**names) for part in parts])
    assert files(place.root, tmp_path) == before


def test_a_run_is_not_resumed_with_other_data_and_stays_as_it_was(
    place: Place, call: Call, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(place.run, run)
    kept = [run / "checkpoints/last.safetensors", *(run / "head").iterdir(), run / "metrics.jsonl"]
    before = [path.read_bytes() for path in kept]
    done = call("train", "--config", place.config, "--resume", f"out={run}", "data.max_length=100")
    assert_one_line(done, ["last.safetensors", "other settings of data", "another `out`"])
    assert [path.read_bytes() for path in kept] == before
