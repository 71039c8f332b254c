"""Our EAGLE-3 step against speculators': `python tests/bench/trainer.py --speculators PYTHON`.

PYTHON has the package `speculators` (0.9.0) in an environment of its own, with torch of the same
version. Both sides train from one file of states, with the same first weights, draft vocabulary,
mask and AdamW; their steps are interleaved, one thread each, in CPU time. speculators runs with
sdpa and its eager loss, as it does on a CPU. Loss values are compared as mean divergence by depth.
Without --speculators only ours runs; --peak shows how memory grows with the length of a row.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch

STEPS, DECAY, RATE = 3, 0.8, 1e-4
"""Unroll steps, weight of each further one, and the learning rate."""
DRAFT_IDS = 8192


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--speculators", help="Python of an environment that has the package.")
    parser.add_argument("--data", nargs="+", default=["samples/train"])
    parser.add_argument("--target", help="Folder of the target; default: the embedded one.")
    parser.add_argument("--length", type=int, default=1024, help="Slots of a row.")
    parser.add_argument("--rows", type=int, default=4, help="Different rows, taken in turn.")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4, help="Steps of a repeat.")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), nargs="+", default=["fp32", "bf16"])
    parser.add_argument("--peak", type=int, nargs="*", default=[], help="Lengths; only memory.")
    parser.add_argument("--worker", nargs=3, metavar=("SIDE", "FOLDER", "DTYPE"))
    args = parser.parse_args()
    if args.worker:
        work(*args.worker)
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for length in args.peak or [args.length]:
            make_inputs(folder, args.target, args.data, length, args.rows)
            for dtype in args.dtype:
                if args.peak:
                    side = Side("ours", sys.executable, folder, dtype)
                    print(f"{dtype} T = {length}: peak {side.run(2)['peak'] / 2**30:.3f} GiB")
                    side.close()
                else:
                    compare(folder, dtype, args.speculators, args.repeats, args.steps, length)


def compare(
    folder: Path, dtype: str, python: str | None, repeats: int, steps: int, length: int
) -> None:
    """Run both sides in turn and print row slots per CPU second, their ratio, and the losses."""
    sides = [Side("ours", sys.executable, folder, dtype)]
    sides += [Side("speculators", python, folder, dtype)] if python else []
    first = [side.run(1) for side in sides]  # warms up, on equal weights
    done: list[list[dict[str, Any]]] = [[] for _ in sides]
    for _ in range(repeats):
        for side, results in zip(sides, done, strict=True):
            results.append(side.run(steps))
    speeds = [[steps * length / result["cpu"] for result in results] for results in done]
    for side, start, results, speed in zip(sides, first, done, speeds, strict=True):
        losses = [" ".join(f"{x:.4f}" for x in r["losses"]) for r in (start, results[-1])]
        print(
            f"{dtype} {side.name:12} {median(speed):6.0f} row slots / CPU s "
            f"({min(speed):.0f}-{max(speed):.0f}); divergence by depth: first {losses[0]}, "
            f"last {losses[1]}; peak {results[-1]['peak'] / 2**30:.2f} GiB"
        )
    if python:
        ratios = sorted(ours / theirs for ours, theirs in zip(*speeds, strict=True))
        print(f"{dtype} ratio {median(ratios):.2f} ({ratios[0]:.2f}-{ratios[-1]:.2f})")
    for side in sides:
        side.close()


class Side:
    """One trainer in a process of its own, which steps when it is told to."""

    def __init__(self, name: str, python: str, folder: Path, dtype: str) -> None:
        self.name = name
        self.process = subprocess.Popen(
            [python, __file__, "--worker", name, str(folder), dtype],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, steps: int) -> dict[str, Any]:
        """Its CPU seconds for these steps, the losses of the last one, its peak of bytes."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{steps}\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith("{"):
                result: dict[str, Any] = json.loads(line)
                return result
        raise SystemExit(f"{self.name}: the worker died; its error stands above")

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def work(side: str, folder: str, dtype: str) -> None:
    """A worker: reads counts of steps, answers with what they cost."""
    torch.manual_seed(0)
    data = torch.load(Path(folder) / "inputs.pt")
    step = (ours if side == "ours" else speculators)(data, dtype == "bf16", Path(folder))
    at = 0
    for line in sys.stdin:
        began = time.process_time()
        for _ in range(int(line)):
            losses = step(data["rows"][at % len(data["rows"])])
            at += 1
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        cost = {"cpu": time.process_time() - began, "losses": losses, "peak": peak}
        print(json.dumps(cost), flush=True)


def ours(data: dict[str, Any], bf16: bool, folder: Path) -> Any:
    """Our step: the objective, and the engine's clipping and AdamW."""
    from drafthead.heads.base import TeacherBatch
    from drafthead.heads.load import load_head
    from drafthead.train.config import load_config
    from drafthead.train.engine import Engine
    from drafthead.train.objective import Objective
    from drafthead.train.timing import Stopwatch

    precision = "bf16" if bf16 else "fp32"
    overrides = [f"training.precision={precision}", "optimiser.betas=[0.9,0.999]"]
    config = load_config("smollm2-eagle3", [*overrides, "optimiser.weight_decay=0.01"])
    engine = Engine(config)
    head = load_head(folder / "head")
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        head.bind(Path(data["target"]))
    head.train()
    objective = Objective(head, head.contract.vocab_size, DECAY, bf16, Stopwatch())
    model = engine.prepare(objective, dict(head.named_parameters()), config.optimiser)

    def step(row: dict[str, Any]) -> list[float]:
        names = ("ids", "mask", "features", "last_hidden", "top", "starts")
        batch = TeacherBatch(**{name: row[name] for name in names})
        count = float(objective.countable(batch).sum())
        outcome = model(batch, count)
        engine.backward(outcome.loss)
        engine.step(RATE)
        sums = outcome.sums.tolist()
        return [
            depth[0] / depth[2] - entropy
            for depth, entropy in zip(sums, row["entropy"], strict=True)
        ]

    return step


def speculators(data: dict[str, Any], bf16: bool, folder: Path) -> Any:
    """Their step, as their trainer makes it: autocast, loss, clipping, AdamW."""
    from safetensors.torch import load_file
    from speculators.losses import resolve_loss_config  # type: ignore[import-not-found]
    from speculators.models.eagle3 import Eagle3DraftModel  # type: ignore[import-not-found]
    from transformers import AutoConfig

    t2d = torch.zeros(data["vocab_size"], dtype=torch.bool)
    t2d[data["draft_ids"]] = True
    model = Eagle3DraftModel.from_training_args(
        AutoConfig.from_pretrained(data["target"], num_hidden_layers=1),
        t2d=t2d,
        d2t=data["draft_ids"] - torch.arange(len(data["draft_ids"])),
        verifier_name_or_path=data["target"],
        target_layer_ids=data["layers"],
        num_layers=1,
        norm_before_residual=False,
        draft_attn_impl="sdpa",
        ttt_steps=STEPS,
        draft_vocab_size=len(data["draft_ids"]),
    ).float()
    known = load_file(folder / "head" / "model.safetensors")
    known = {name: tensor for name, tensor in known.items() if name not in ("d2t", "t2d")}
    unknown = model.load_state_dict(known, strict=False).unexpected_keys
    assert not unknown, unknown
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained == known.keys(), sorted(trained ^ known.keys())[:5]
    # Our states are after the final norm already, which theirs would put on again.
    model.verifier_norm = torch.nn.Identity()
    options = resolve_loss_config("kl_div", "eager")
    optimiser = torch.optim.AdamW(model.named_parameters(), lr=RATE, weight_decay=0.01)
    model.train()

    def step(row: dict[str, Any]) -> list[float]:
        T = row["ids"].shape[1]
        dtype = torch.bfloat16 if bf16 else torch.float32
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
            _, loss, metrics = model(
                hidden_states=row["features"][:, : T - 1].to(dtype),
                input_ids=row["ids"][:, 1:],
                document_ids=row["documents"][:, : T - 1],
                loss_mask=row["their_mask"][:, : T - 1],
                position_ids=(torch.arange(T) - row["starts"])[:, : T - 1] + 1,
                verifier_last_hidden_states=row["last_hidden"][:, 1:].to(dtype),
                ttt_steps=STEPS,
                ttt_step_loss_decay=DECAY,
                loss_config=options,
            )
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        return [float(metrics[f"loss_{i}_sum"]) / DECAY**i for i in range(STEPS)]

    return step


def make_inputs(folder: Path, name: str | None, files: list[str], length: int, count: int) -> None:
    """Write rows of states, each filled with whole conversations, and an untrained head."""
    from drafthead.data.chat import ChatFormat, build_rows
    from drafthead.data.conversations import read_conversations
    from drafthead.data.embedded import data_path, default_target, fetch_target
    from drafthead.heads.base import settings_class
    from drafthead.heads.contract import default_layers
    from drafthead.heads.vocabulary import count_tokens, draft_vocabulary
    from drafthead.inference.evaluate import end_ids
    from drafthead.inference.target import load_target
    from drafthead.train.checkpoint import save_head
    from drafthead.train.teacher import OnlineFeatures

    torch.manual_seed(0)
    place = name or str(fetch_target(default_target()))
    target = load_target(place, "bfloat16")
    assert target.tokenizer is not None
    talks = [talk for file in files for talk in read_conversations(data_path(file))[0]]
    rows, _ = build_rows(talks[: 40 * count], ChatFormat(target.tokenizer), length)
    layers = default_layers(target.num_layers)
    counts = count_tokens((row.ids for row in rows), target.vocab_size)
    draft_ids = draft_vocabulary(counts, DRAFT_IDS, end_ids(target))
    settings = settings_class("eagle3").model_validate(
        {"type": "eagle3", "draft_vocab_size": DRAFT_IDS, "norm_features": False}
    )
    head = settings.build(target.contract(layers), target.config, draft_ids)
    head.bind(target.model)
    save_head(head, folder / "head")
    known = torch.zeros(target.vocab_size, dtype=torch.bool)
    known[draft_ids] = True
    made = []
    waiting = iter(rows)
    for _ in range(count):
        chosen, used = [], 0
        for row in waiting:
            if used + len(row.ids) > length:
                break
            chosen.append(row)
            used += len(row.ids)
        parts = [
            OnlineFeatures(target, chosen, [(i,)], layers).batch(0) for i in range(len(chosen))
        ]
        made.append(one_row(parts, known, head, length))
    torch.save(
        {
            "rows": made,
            "draft_ids": draft_ids,
            "vocab_size": target.vocab_size,
            "target": place,
            "layers": list(layers),
        },
        folder / "inputs.pt",
    )


def one_row(parts: list[Any], known: torch.Tensor, head: Any, length: int) -> dict[str, Any]:
    """Lay conversations end to end into `length` slots, the rest padding; masks of both sides."""
    lengths = [part.ids.shape[1] for part in parts]
    pad = length - sum(lengths)

    def laid(name: str) -> torch.Tensor:
        whole = torch.cat([getattr(part, name)[0] for part in parts])
        return torch.cat((whole, whole.new_zeros(pad, *whole.shape[1:])))[None]

    sizes = torch.tensor([*lengths, pad])
    first = sizes.cumsum(0) - sizes
    row = {name: laid(name) for name in ("ids", "mask", "features", "last_hidden", "top")}
    # Both sides leave out what no draft could match: theirs knows no such rule.
    row["mask"][:, 1:] &= known[row["top"]][:, :-1]
    row["starts"] = first.repeat_interleave(sizes)[None]
    row["documents"] = torch.arange(len(sizes)).repeat_interleave(sizes)[None]
    row["documents"][:, length - pad :] = -1
    ahead = torch.zeros_like(row["mask"])
    ahead[:, :-2] = row["mask"][:, 2:]
    row["their_mask"] = ahead
    law = head.teacher_logits(row["last_hidden"][0]).float().log_softmax(-1)
    entropy = -(law.exp() * law).sum(-1)
    row["entropy"] = []
    for depth in range(STEPS):
        at = torch.zeros_like(row["mask"][0])
        at[1 + depth : -1] = row["mask"][0, 2 + depth :]  # as slot 0 cannot draft token 1
        row["entropy"].append(entropy[at].mean().item())
    return row


if __name__ == "__main__":
    main()
