"""Results of evaluations with everything that a page has to show, made of scripted rounds."""

from __future__ import annotations

from typing import Any

import numpy as np

from drafthead.inference.metrics import Round, acceptance

CATEGORIES = {"coding": 0.75, "math_reasoning": 0.6, "translation": 0.5, "writing": 0.3}
"""Chance that a drafted token is accepted."""
DRAFTERS = {"lookup": (8, 0.35), "head": (3, 1.0), "merged": (6, 1.05)}
"""Depth, and how well it does against the category's chance."""
PLAIN_SECONDS = 0.02
PARTS = ("draft", "verify", "accept", "commit", "other")
EVIL = "</style><script>document.title='harmed'</script><b>bold</b> $x_1$ & _under"
LONG = "Donaudampfschifffahrtselektrizitätenhauptbetriebswerkbauunterbeamtengesellschaft" * 3


def rounds_of(rng: np.random.Generator, depth: int, chance: float, count: int = 40) -> list[Round]:
    """Rounds of a chain, each token accepted with this chance."""
    refused = np.column_stack([rng.random((count, depth)) >= chance, np.ones(count, dtype=bool)])
    runs = refused.argmax(axis=1)
    return [Round(depth, int(run), int(run) + 1, "head") for run in runs]


def group(prompts: list[list[Round]], speedup: float) -> dict[str, Any]:
    found = acceptance(prompts, resamples=50)
    around = [speedup * 0.93, speedup * 1.06]
    return {
        "prompts": len(prompts),
        "rounds": found.rounds,
        "tau": found.tau,
        "tau_interval": list(found.tau_interval),
        "survival": list(found.survival),
        "speedup": speedup,
        "speedup_interval": around,
        "cpu_speedup": speedup * 0.98,
        "cpu_speedup_interval": around,
    }


def speed(tokens_per_s: float, batch: int, seconds: float) -> dict[str, Any]:
    shares = (0.16, 0.78, 0.02, 0.02, 0.02)
    return {
        "tokens_per_s": tokens_per_s,
        "cpu_tokens_per_s": 0.9 * tokens_per_s,
        "first_token_ms": 41.5 * batch,
        "round_ms": {p: 1000 * seconds * s for p, s in zip(PARTS, shares, strict=True)},
    }


def record(name: str, seed: int, batch: int, temperature: float, lossy: bool) -> dict[str, Any]:
    """A drafter's record; its figures are those of its rounds, its speed is made up."""
    depth, skill = DRAFTERS[name]
    skill *= 1 - 0.2 * temperature
    rng = np.random.default_rng([seed, depth, int(10 * temperature)])
    prompts = {
        c: [rounds_of(rng, depth, min(0.9, p * skill)) for _ in range(4)]
        for c, p in CATEGORIES.items()
    }
    every = [rounds for found in prompts.values() for rounds in found]
    found = acceptance(every, resamples=100)
    cost = 1 + 0.06 * depth + 0.05 * batch
    gain = found.tau / cost
    near = [[max(0.0, s - 0.04), min(1.0, s + 0.03)] for s in found.survival]
    halves = {"en": every[::2], "de": every[1::2]}
    return {
        "name": name,
        **speed(gain * batch**0.8 / PLAIN_SECONDS, batch, PLAIN_SECONDS * cost),
        "speedup": gain,
        "speedup_interval": [gain * 0.95, gain * 1.04],
        "cpu_speedup": gain * 0.97,
        "cpu_speedup_interval": [gain * 0.92, gain * 1.01],
        "speedup_spread": [gain * 0.98, gain * 1.02],
        "median_prompt_speedup": gain * 0.99,
        "tau": found.tau,
        "tau_interval": list(found.tau_interval),
        "cut": found.cut,
        "survival": list(found.survival),
        "survival_interval": near,
        "conditional": list(found.conditional),
        "conditional_interval": near,
        "accepted_per_drafted": found.accepted_share,
        "accepted_per_verified": found.accepted / (found.drafted + found.rounds),
        "rounds": found.rounds,
        "drafted": found.drafted,
        "accepted": found.accepted,
        "emitted": found.emitted,
        "identical": None if lossy else {"equal": 4, "of": 4, "new_tokens": 32, "dtype": "float32"},
        "agreement": {"equal": 11, "of": 16, "largest_gap": 0.125},
        "by_source": {"none": {"rounds": 9, "tau": 1.0}, "head": {"rounds": 500, "tau": 1.9}}
        | ({"lookup": {"rounds": 131, "tau": 2.7}} if name == "merged" else {}),
        "by_category": {c: group(p, gain * CATEGORIES[c] / 0.55) for c, p in prompts.items()},
        "by_language": {lang: group(p, gain) for lang, p in halves.items()},
        "by_context": {
            "0-255": group(every[:8], gain * 1.02),
            "256-511": group(every[8:], gain * 0.9),
            "512-1023": None,
        },
        "repeated": {"equal": 32, "of": 32},
        "lossy": lossy,
    }


def cell(temperature: float, batch: int, lossy: bool) -> dict[str, Any]:
    plain = speed(batch**0.8 / PLAIN_SECONDS, batch, PLAIN_SECONDS)
    records = {"plain": {"name": "plain", "new_tokens": 1024, **plain}}
    for seed, name in enumerate(DRAFTERS):
        records[name] = record(name, seed, batch, temperature, lossy)
    return {"temperature": temperature, "batch": batch, "records": records}


def sample(prompt: str, drafter: str, words: str) -> dict[str, Any]:
    """Tokens of a text in rounds of growing luck."""
    tokens: list[dict[str, Any]] = []
    left, depth = 0, 0
    for i, word in enumerate(words.split(" ")):
        if not left:
            depth, left = 0, (i * 7) % 8
            tokens.append({"text": f" {word}", "depth": 0, "fell": i % 3 == 0})
            continue
        depth, left = depth + 1, left - 1
        tokens.append({"text": f" {word}", "depth": depth, "fell": False})
    return {"prompt": prompt, "category": "coding", "drafter": drafter, "tokens": tokens}


TEXT = (
    "A draft is a guess at what comes next, made by something small and quick.\n\n The model reads"
    " the guess in one go and keeps what it would have said itself, so that nothing is lost, and"
    " where the guess goes wrong it goes on alone. How much is gained depends on the text: code and"
    " lists repeat themselves, a poem does not. نص عربي قصير هنا and back again."
)


DRIFT = {
    "against": "runs/quantised",
    "kind": "int8",
    "shape": "chain:3",
    "remarks": [],
    "prompts": 16,
    "tau": {"tau": 2.06, "interval": [1.84, 2.29], "rounds": 640, "survival": [0.5, 0.3, 0.2]},
    "other": {"tau": 1.9, "interval": [1.7, 2.2], "rounds": 660, "survival": [0.45, 0.25, 0.15]},
    "lost": 0.16,
    "lost_interval": [0.05, 0.25],
    "lost_share": 0.078,
    "by_category": {
        "coding": {
            "prompts": 4, "tau": 2.7, "other": 2.4, "lost": 0.3, "lost_interval": [0.1, 0.5]
        }
    },
    "worth": None,
    "advice": "undecided: the head loses 7.8 % of tau, which may be more or less than 3 %",
}  # fmt: skip


def result(*, lossy: bool = False, temperatures: tuple[float, ...] = (0.0, 1.0)) -> dict[str, Any]:
    """An evaluation over two temperatures and three batches."""
    cells = [cell(t, batch, lossy) for t in temperatures for batch in (1, 4, 16)]
    sizes = [1, 2, 4, 8, 16, 32]
    head = cells[0]["records"]["head"]
    return {
        "target": {
            "name": "SmolLM2-135M-Instruct",
            "dtype": "bfloat16",
            "parameters": 134_515_008,
            "layers": 30,
            "vocab_size": 49_152,
            "fingerprint": "5e1f0c2d7a9b",
        },
        "heads": {
            "head": {
                "folder": "runs/demo/train/head",
                "type": "eagle3",
                "parameters": 11_400_000,
                "contract": {"layers": [2, 14, 26], "norm": "none"},
            }
        },
        "prompts": 16,
        "turns": 20,
        "files": ["samples/test"],
        "trees": ["chain:3"],
        "new_tokens": 64,
        "settings": {"rule": "typical" if lossy else "coupled", "seed": 0, "top_p": 1.0},
        "repeats": 3,
        "sittings": 1,
        "failed": [
            {
                "prompt": "humaneval/17",
                "turn": 2,
                "temperature": 0.0,
                "batch": 4,
                "drafter": "head",
                "reason": "does not fit the context",
            }
        ],
        "skipped": {"no user turn": 2, "tools": 3},
        "cells": cells,
        "simulated": {
            "head": {
                "tau": head["tau"] - 0.01,
                "interval": head["tau_interval"],
                "decoded_tau": head["tau"],
                "agrees": True,
            }
        },
        "costs": {
            str(b): {"tokens": sizes, "seconds": [0.02 * (1 + b * n / 60) for n in sizes]}
            for b in (1, 4, 16)
        },
        "samples": [
            sample(prompt, drafter, TEXT)
            for prompt in ("humaneval/3", "mt-bench/81")
            for drafter in ("head", "merged")
        ],
        "versions": {"python": "3.11.2", "drafthead": "0.1.0", "torch": "2.13.0"},
        "machine": {"device": "CPU", "processor": "x86_64", "cores": 2, "threads": 2},
        "lossy": lossy,
        "drift": DRIFT,
        "sample": TEXT,
    }


CERTIFICATE = {
    "passed": True,
    "checks": [
        {"name": "greedy, float64", "passed": True, "figure": "64 of 64", "detail": "ids equal"},
        {"name": "law at T = 1", "passed": True, "figure": 0.41, "detail": "p of chi-square"},
        {"name": "cache after each round", "passed": True, "figure": 1e-12, "detail": ""},
    ],
}  # fmt: skip
TUNING = {
    "format": 1,
    "dtype": "bfloat16",
    "target": "5e1f0c2d7a9b",
    "shapes": {"1": "auto:6x4:20", "4": "chain:2", "16": "off"},
    "measured": {"1": {"auto:6x4:20": 31.2, "chain:2": 28.0}, "4": {"chain:2": 80.5, "off": 77.0}},
}


def hostile() -> dict[str, Any]:
    """A result in which every text that a user or a model can choose would do harm."""
    found = result(temperatures=(0.0,))
    found["target"]["name"] = f"{EVIL} {LONG}"
    found["heads"] = {EVIL: {**found["heads"]["head"], "folder": LONG}}
    found["drift"] = {**DRIFT, "against": EVIL + LONG, "remarks": [EVIL]}
    found["failed"][0] |= {"prompt": EVIL, "reason": LONG}
    found["skipped"] = {EVIL: 1}
    found["files"] = [LONG, EVIL]
    found["sample"] = LONG + EVIL
    for one in found["samples"]:
        one["prompt"], one["category"] = EVIL, LONG
        one["tokens"][3]["text"] = EVIL
        one["tokens"][5]["text"] = LONG
    for one in found["cells"]:
        records = one["records"]
        records[EVIL] = records.pop("merged")
        records[LONG] = records.pop("lookup")
        for r in records.values():
            if "tau" in r:
                r["by_language"].pop("de")
                r["by_category"][EVIL] = r["by_category"].pop("coding")
                r["by_category"][LONG] = r["by_category"].pop("writing")
    return found
