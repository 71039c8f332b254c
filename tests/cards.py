"""What model cards are made of in tests: the reference head, and records of it as files hold them.

Paths of a user called alice are in all of them; none may be in a card.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml
from evaluations import result

from drafthead.train.config import load_config
from drafthead.train.record import RunFolder
from drafthead.train.result import TrainResult

REFERENCE = Path(__file__).parents[1] / "configs" / "reference"


def evaluated() -> dict[str, Any]:
    """A scripted evaluation of the reference head."""
    found = result()
    config = json.loads((REFERENCE / "config.json").read_text())
    found["files"] = ["/home/alice/prompts/own.jsonl", "samples/test"]
    found["heads"]["head"]["folder"] = "/home/alice/runs/mine/head"
    found["heads"]["head"] |= {"parameters": 5_091_264, "contract": config["contract"]}
    return found


def certified(passed: bool = True) -> dict[str, Any]:
    return {
        "passed": passed,
        "checks": [
            {"name": "greedy text", "passed": True, "figure": "24 of 24", "detail": "/root/x"},
            {"name": "law of samples", "passed": passed, "figure": 0.41, "detail": ""},
        ],
        "target": {"name": "SmolLM2-135M-Instruct", "folder": "/home/alice/target"},
        "head": {"folder": "/home/alice/head", "type": "eagle3"},
        "dtypes": {"exact": "float32", "serving": "bfloat16"},
        "rules": ["coupled", "block"],
        "versions": {"drafthead": "0.1.0"},
    }


def a_run(folder: Path, **result: Any) -> Path:
    """The folder of a run, by the trainer's own writers."""
    config = load_config(
        "smollm2-eagle3",
        [
            "data.train=[samples/train,/home/alice/answers.jsonl,hub:org/chats/en@main:train]",
            "data.states=/home/alice/states",
            "training.start=/home/alice/runs/first/head",
            "out=/home/alice/runs/mine",
        ],
    )
    (folder / "head").mkdir(parents=True)
    RunFolder(folder).start(config, False, {"device": "CPU", "cores": 2})
    told = TrainResult(
        head=Path("/home/alice/runs/mine/head"),
        out=Path("/home/alice/runs/mine"),
        steps=2767,
        positions=1_985_406,
        seconds=4080.0,
        positions_per_s=565.0,
        shares={},
        best_step=2600,
        simulated_tau=1.5602,
        simulated_survival=(0.4,),
        skipped=0,
        dropped=0,
        agreement={"decoded_tau": 1.512, "simulated_tau": 1.498, "agrees": True, "cause": None},
    )
    (folder / "result.json").write_text(json.dumps(asdict(told) | result, default=str))
    return folder


def metadata_of(text: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(text.split("---\n")[1])
    return found
