"""Peak memory, forecast and measured: python tests/bench/memory.py [--shape llama32-1b]

Each row is a process of its own that trains two steps; its peak resident set (VmHWM) less what it
held after its imports is compared with `forecast`. One thread, so that kernels need no more.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

SEED = 0
WORDS = "the quick brown fox jumps over lazy dogs while seven wizards mix brews of poison"


def resident(key: str) -> float:
    """MB of this process: VmRSS now, VmHWM at its peak."""
    found = re.search(rf"{key}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) / 1e3


def settings(root: Path, target: str, length: int, tokens: int, precision: str) -> dict[str, Any]:
    """Rows that all fill `length` positions, an answer almost whole."""
    rng = random.Random(SEED)
    rows = []
    for index in range(max(4, 2 * tokens // length)):
        answer = " ".join(rng.choices(WORDS.split(), k=length + 50))
        messages = [{"role": "user", "content": "go"}, {"role": "assistant", "content": answer}]
        rows.append(json.dumps({"id": f"r{index}", "messages": messages}))
    (root / "rows.jsonl").write_text("\n".join(rows) + "\n")
    return {
        "target": {"name": target},
        "data": {"train": str(root / "rows.jsonl"), "max_length": length},
        "head": {"type": "eagle3"},
        "training": {
            "precision": precision,
            "tokens_per_batch": tokens,
            "max_steps": 2,
            "features": "online",
        },
        "out": str(root / "run"),
    }


def child(given: dict[str, Any]) -> None:
    """Train and tell the peak; the parent has set one thread."""
    import transformers.models.llama.modeling_llama  # noqa: F401  else an import counts as memory

    from drafthead.train import loop
    from drafthead.train.config import RunConfig

    before = resident("VmRSS")
    loop.run(RunConfig.model_validate(given))
    print(json.dumps({"measured": resident("VmHWM") - before, "imports": before}))


def forecasted(given: dict[str, Any]) -> float:
    """MB, by the same settings and rows."""
    from drafthead.train.config import RunConfig
    from drafthead.train.estimate import forecast
    from drafthead.train.hardware import Hardware
    from drafthead.train.planning import data_facts, target_config

    config = RunConfig.model_validate(given)
    machine = Hardware("CPU", 1, 2**40, 1e12, 1e10, 1e10, is_cpu=True)
    found = forecast(config, target_config(config.target.name), machine, data=data_facts(config))
    return found.asked.device / 1e6


def random_target(name: str, root: Path, tokenizer: Path) -> Path:
    """A model of a shipped shape with random weights in bfloat16, and another's tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM

    from drafthead.data.embedded import preset_path
    from drafthead.train.planning import target_config

    folder = root / "target"
    config = target_config(name, preset_path(f"targets/{name}.json"))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (tokenizer / file).is_file():
            shutil.copy(tokenizer / file, folder)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", help="folder of a model; default: the embedded one")
    parser.add_argument("--shape", help="a file of configs/targets: random weights instead")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 2048, 4096])
    parser.add_argument("--length", type=int, default=1024, help="positions of a row")
    parser.add_argument("--precision", nargs="+", default=["bf16", "fp32"])
    parser.add_argument("--child", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.child:
        child(json.loads(asked.child))
        return
    from drafthead.data.embedded import default_target, fetch_target

    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        target = asked.target or str(fetch_target(default_target()))
        if asked.shape:
            target = str(random_target(asked.shape, root, Path(target)))
        print(f"{'precision':>9} {'positions':>9} {'forecast MB':>12} {'measured MB':>12} ratio")
        for precision in asked.precision:
            for tokens in asked.tokens:
                shutil.rmtree(root / "run", ignore_errors=True)
                given = settings(root, target, asked.length, tokens, precision)
                command = [sys.executable, __file__, "--child", json.dumps(given)]
                threads = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
                done = subprocess.run(
                    command, capture_output=True, text=True, env={**os.environ, **threads}
                )
                if done.returncode:
                    sys.exit(done.stderr[-2000:])
                measured = json.loads(done.stdout.splitlines()[-1])["measured"]
                forecast = forecasted(given)
                print(
                    f"{precision:>9} {tokens:>9} {forecast:>12.0f} {measured:>12.0f} "
                    f"{forecast / measured:.2f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
