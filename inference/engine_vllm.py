"""Have vLLM decode with exported drafts, and write down what it drafted; run by vLLM's own Python.

`python -I engine_vllm.py JOBS.json OUT.json`, by the Python of an environment that has vLLM (0.32)
and nothing of drafthead: this file imports neither it nor anything beside it. `-I`, as modules
beside it have the names of packages that vLLM imports.

JOBS.json is a list of jobs, one engine each, one after the other:

    {"target": FOLDER, "draft": FOLDER, "method": "eagle3", "depth": 3, "dtype": "float32",
     "prompts": [[ids], …], "new_tokens": 64, "stop_ids": [], "as_it_is": false}

OUT.json gets, in that order and anew after each of them, {"version", "jobs"}; a job that failed is
{"error": LINE}, else

    {"tokens": [[ids], …],          new ones of each prompt, as the engine gave them
     "rounds": [[[emitted, [drafted ids]], …], …],
                                    of each prompt: how many tokens it had so far, what was drafted
                                    after them (the first: after the prompt's own first token)
     "drafts", "drafted", "accepted": counts by the engine's metrics, "accepted_by_depth": [...],
     "mended": what of the engine was not left as it is; empty with "as_it_is": true in the job}

The text is greedy. CPU or not is the engine's own matter, but for one fault that only its CPU
kernels have (`context_norm`).
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SETTINGS = {
    # The engine in this process: its parts can be reached, and it ends with the process.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "passive",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
"""Environment variables, where they are not set."""

COUNTERS = ("num_drafts", "num_draft_tokens", "num_accepted_tokens", "num_accepted_tokens_per_pos")

SLOTS = 8
"""Sequences at a time."""


class Recorder:
    """Stands between the engine's V1 model runner, the one it has on a CPU, and its draft step."""

    def __init__(self, runner: Any) -> None:
        self.runner, self.step = runner, runner.propose_draft_token_ids
        self.emitted: dict[str, int] = {}
        self.rounds: dict[str, list[tuple[int, list[int]]]] = {}
        runner.propose_draft_token_ids = self

    def __call__(self, scheduled: Any, sampled: Any, *rest: Any) -> Any:
        drafted = self.step(scheduled, sampled, *rest)
        waiting = self.runner.discard_request_mask.np  # the prompt is not read to its end yet
        for row, request in enumerate(self.runner.input_batch.req_ids):
            if waiting[row]:
                continue
            tokens = [int(token) for token in sampled[row]]
            count = self.emitted.get(request, 0) + sum(token >= 0 for token in tokens)
            self.emitted[request] = count
            ids = [int(token) for token in drafted[row]]
            self.rounds.setdefault(request, []).append((count, ids))
        return drafted

    def take(self, request: str) -> list[tuple[int, list[int]]]:
        """The rounds of a request; the engine adds to the names that it gives out."""
        names = [name for name in self.rounds if name.split("-")[0] == request]
        if len(names) != 1:
            raise RuntimeError(f"request {request!r} is one of {sorted(self.rounds)}: which?")
        return self.rounds[names[0]]


@contextmanager
def context_norm(mended: bool) -> Iterator[str]:
    """Have the context keys of each DFlash layer normed by that layer's own weights; what it did.

    vLLM 0.32 norms those of all layers in one call, with weights (layers, head width), meant to be
    taken layer by layer; its CPU kernel takes the first layer's for all of them.
    """
    if not mended:
        yield ""
        return
    module = importlib.import_module("vllm.model_executor.models.qwen3_dflash")
    model = module.DFlashQwen3Model
    as_it_was = model._normalize_context_k

    def by_layer(self: Any, keys: Any) -> Any:
        normed = keys.new_empty(keys.shape)
        for out, given, weight in zip(normed, keys, self._k_norm_weights, strict=True):
            module.ops.rms_norm(out, given, weight, self._rms_norm_eps)
        return normed

    model._normalize_context_k = by_layer
    try:
        yield "context keys normed by each layer's own weights, which vLLM's CPU kernel does not"
    finally:
        model._normalize_context_k = as_it_was


def faulty(job: dict[str, Any]) -> bool:
    """Whether `context_norm` matters: for DFlash of several layers, on a CPU."""
    if job["method"] != "dflash":
        return False
    config = json.loads((Path(job["draft"]) / "config.json").read_text())
    layers = config.get("transformer_layer_config", config).get("num_hidden_layers")
    on_cpu = importlib.import_module("vllm.platforms").current_platform.is_cpu()
    return bool(on_cpu and layers != 1)


def run(vllm: Any, job: dict[str, Any]) -> dict[str, Any]:
    """One engine, from its start to its end."""
    with context_norm(faulty(job) and not job.get("as_it_is", False)) as mended:
        return {**started(vllm, job), "mended": mended}


def started(vllm: Any, job: dict[str, Any]) -> dict[str, Any]:
    """Start an engine and have it decode."""
    longest = max(len(ids) for ids in job["prompts"]) + job["new_tokens"]
    context = longest + 2 * (job["depth"] + 1)  # to the end there is room for a draft
    llm = vllm.LLM(
        model=job["target"],
        skip_tokenizer_init=True,
        dtype=job["dtype"],
        enforce_eager=True,
        max_model_len=context,
        max_num_seqs=SLOTS,
        max_num_batched_tokens=SLOTS * context,
        enable_prefix_caching=False,
        async_scheduling=False,
        disable_log_stats=False,
        speculative_config={
            "method": job["method"],
            "model": job["draft"],
            "num_speculative_tokens": job["depth"],
        },
    )
    try:
        return decode(llm, job, vllm.SamplingParams)
    finally:
        del llm
        gc.collect()


def decode(llm: Any, job: dict[str, Any], sampling: Any) -> dict[str, Any]:
    """Answer the prompts, and read the counters."""
    core = llm.llm_engine.engine_core.engine_core
    recorder = Recorder(core.model_executor.driver_worker.worker.model_runner)
    before = counted(llm)
    answers = llm.generate(
        [{"prompt_token_ids": ids} for ids in job["prompts"]],
        sampling(
            temperature=0.0,
            max_tokens=job["new_tokens"],
            stop_token_ids=job["stop_ids"],
            ignore_eos=True,
            detokenize=False,
        ),
        use_tqdm=False,
    )
    after = counted(llm)
    since = {
        name: [b - a for a, b in zip(before[name], after[name], strict=True)] for name in COUNTERS
    }
    return {
        "tokens": [list(answer.outputs[0].token_ids) for answer in answers],
        "rounds": [recorder.take(answer.request_id) for answer in answers],
        "drafts": since["num_drafts"][0],
        "drafted": since["num_draft_tokens"][0],
        "accepted": since["num_accepted_tokens"][0],
        "accepted_by_depth": since["num_accepted_tokens_per_pos"],
    }


def counted(llm: Any) -> dict[str, list[int]]:
    """The engine's own counters of drafts."""
    metrics = {metric.name: metric for metric in llm.get_metrics()}
    found = {}
    for name in COUNTERS:
        metric = metrics[f"vllm:spec_decode_{name}"]
        found[name] = list(metric.values) if hasattr(metric, "values") else [metric.value]
    return found


def write(result: dict[str, Any], path: Path) -> None:
    """Whole or not at all."""
    scratch = path.with_suffix(".tmp")
    scratch.write_text(json.dumps(result))
    scratch.replace(path)


def end_with_parent() -> None:
    """End once the process that started this one has: what it would find has no reader then."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def main() -> None:
    end_with_parent()
    jobs, out = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    # By name, as nothing but an engine's own environment has it.
    vllm = importlib.import_module("vllm")
    clean_up = importlib.import_module("vllm.distributed").cleanup_dist_env_and_memory

    result: dict[str, Any] = {"version": vllm.__version__, "jobs": []}
    for job in jobs:
        try:
            made = run(vllm, job)
        except Exception as error:  # another job may well run
            traceback.print_exc()
            lines = str(error).strip().splitlines() or [""]
            made = {"error": f"{type(error).__name__}: {lines[0]}"}
        result["jobs"].append(made)
        write(result, out)
        clean_up()


if __name__ == "__main__":
    main()
