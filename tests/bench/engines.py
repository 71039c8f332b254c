"""Trained heads of SmolLM2 in vLLM and here, side by side, as a Markdown table.

`python tests/bench/engines.py --engine-python .venv-vllm/bin/python`: every head is exported in
float32, decoded by the engine and by our chains on the same prompts, and compared. A head over a
reduced vocabulary that the format does not know is written over the whole one, where it can be.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before torch is imported

import torch

from drafthead.data.chat import ChatFormat
from drafthead.data.embedded import default_target, fetch_target
from drafthead.heads import load_head
from drafthead.heads.base import DraftHead
from drafthead.heads.borrowing import BorrowingHead
from drafthead.heads.layouts.files import write_folder
from drafthead.heads.layouts.layout import Layout, LayoutError, layout_of
from drafthead.heads.layouts.whole import whole_vocabulary
from drafthead.inference.compare import prompts_of, spread
from drafthead.inference.engine_check import (
    DEPTH,
    Decoded,
    Job,
    chained,
    compared,
    run_engine,
)
from drafthead.inference.evaluate import end_ids
from drafthead.inference.lineup import fitted
from drafthead.inference.target import Target, load_target

RUNS = Path("runs/bench-heads")
KINDS = ("eagle3", "eagle", "hass", "medusa", "block-dflash")
"""Of the runs of `make bench-heads` whose heads vLLM can draft with on a CPU."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engine-python", type=Path, required=True)
    parser.add_argument("--heads", type=Path, nargs="*", help="folders; those of the bench else")
    parser.add_argument("--prompts", nargs="*", default=["samples/test"])
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--new-tokens", type=int, default=64)
    asked = parser.parse_args()

    target = load_target(fetch_target(default_target(), progress=print), "float32")
    assert target.tokenizer is not None
    chat = ChatFormat(target.tokenizer)
    chosen = spread(prompts_of(asked.prompts, print), asked.count)
    prompts = [chat.prompt_ids(prompt.opening) for prompt in chosen]
    with tempfile.TemporaryDirectory(prefix="drafthead-engines-") as scratch:
        heads: dict[str, DraftHead] = {}
        jobs: dict[str, Job] = {}
        for name, folder in folders(asked.heads).items():
            head, layout = expressible(load_head(folder, torch.float32), target)
            draft = write_folder(layout.write(head, torch.float32), Path(scratch) / name)
            heads[name] = head
            jobs[name] = Job(
                str(default_target()),
                str(draft),
                method_of(layout),
                head.max_depth or DEPTH,
                prompts,
                asked.new_tokens,
                end_ids(target),
            )
        print(f"{len(prompts)} prompts x {asked.new_tokens} tokens, float32, greedy", flush=True)
        print(
            "| head | chain | first drafts equal | all drafts equal | texts equal | tau here |",
            end="",
        )
        print(" tau in vLLM |\n|---|---|---|---|---|---|---|", flush=True)
        answers = run_engine(asked.engine_python, list(jobs.values()))
        for (name, job), answer in zip(jobs.items(), answers, strict=True):
            print(row(name, job, target, heads[name], answer), flush=True)


def folders(given: list[Path] | None) -> dict[str, Path]:
    """Folders of heads by name: those given, or the reference head and the newest of the bench."""
    if given:
        return {f"{number}-{named(path)}": path for number, path in enumerate(given)}
    found = {"reference": Path("configs/reference")}
    for kind in KINDS:
        runs = sorted(RUNS.glob(f"{kind}-run@*/train/head"), key=lambda p: p.stat().st_mtime)
        if runs:
            found[kind] = runs[-1]
    return found


def named(path: Path) -> str:
    """Of the run that a head is of, RUN/train/head, or of its own folder."""
    return path.parts[-3].split("@")[0] if path.parts[-2:] == ("train", "head") else path.name


def expressible(head: DraftHead, target: Target) -> tuple[DraftHead, Layout]:
    """The bound head, over the whole vocabulary if need be, and its layout for vLLM."""
    head = fitted(head, target)
    try:
        return head, layout_of("vllm", head)
    except LayoutError:
        assert isinstance(head, BorrowingHead)
        head = fitted(whole_vocabulary(head), target)
        return head, layout_of("vllm", head)


def method_of(layout: Layout) -> str:
    """vLLM's name for the kind of draft: the last part of its schema's."""
    (known,) = (name for name in layout.consumers if name.startswith("vllm-"))
    return known.rsplit("-", 1)[1]


def row(name: str, job: Job, target: Target, head: DraftHead, answer: Decoded | str) -> str:
    """One line of the table."""
    if isinstance(answer, str):
        return f"| {name} | {job.depth} | {answer} |"
    ours = chained(target, head, job.prompts, job.depth, job.new_tokens, job.stop_ids)
    found = compared(ours, answer)
    return (
        f"| {name} | {job.depth} | {found.first_drafts_equal} of {found.prompts} "
        f"| {found.drafts_equal} of {found.drafts} | {found.texts_equal} of {found.prompts} "
        f"| {found.our_tau:.3f} | {found.engine_tau:.3f} |"
    )


if __name__ == "__main__":
    main()
