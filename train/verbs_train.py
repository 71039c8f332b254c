"""Verbs that train.

Each verb only reads options and shows results: the work lives in the module it calls.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from drafthead.train import terminal
from drafthead.train.options import (
    AGAIN,
    JsonOption,
    show_result,
)
from drafthead.train.terminal import advising, bars, counting, say


def estimate(
    config: Annotated[str, typer.Option(help="YAML file, or the name of a preset.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="A.B=C", help="Settings over the file's.")
    ] = None,
    hardware: Annotated[
        str | None, typer.Option(help="Such as 8xH100-80GB; default: this machine.")
    ] = None,
    gpus: Annotated[int | None, typer.Option(min=1, help="Devices, one for each rank.")] = None,
    gpu_memory: Annotated[float | None, typer.Option(min=0.1, help="GB of one.")] = None,
    flops: Annotated[float | None, typer.Option(min=1e-6, help="bf16 Tflop/s of one.")] = None,
    bandwidth: Annotated[float | None, typer.Option(min=1e-3, help="GB/s of one.")] = None,
    accelerate: Annotated[
        Path | None, typer.Option(help="Launcher's config: processes, ZeRO stage, offload.")
    ] = None,
    target_config: Annotated[
        Path | None, typer.Option(help="The target's config.json, or its folder.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Bytes, memory and hours of a training before anything of it runs; needs no weights.

    Example: drafthead estimate --config llama33-70b-eagle3 --hardware 8xH100-80GB
    """
    from drafthead.train import planning
    from drafthead.train.config import load_config
    from drafthead.train.estimate import forecast
    from drafthead.train.estimate_table import as_json as plain
    from drafthead.train.hardware import changed, parse_hardware, this_machine

    settings = load_config(config, overrides or [])
    ranks, stage, offload = planning.launch_settings(accelerate) if accelerate else (None, 0, False)
    target = planning.target_config(settings.target.name, target_config)
    machine = parse_hardware(hardware) if hardware else this_machine()
    machine = changed(machine, gpus, gpu_memory, flops, bandwidth)
    found = forecast(
        settings,
        target,
        machine,
        ranks=ranks,
        stage=stage,
        offload=offload,
        data=planning.data_facts(settings),
    )
    terminal.forecast(found, remark=as_json)
    if as_json:
        print(json.dumps(plain(found)))


def train(
    config: Annotated[str, typer.Option(help="YAML file, or the name of a preset.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="A.B=C", help="Settings over the file's.")
    ] = None,
    resume: Annotated[bool, typer.Option(help="Continue the run in `out`.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Train a head or sibling; several processes go through `accelerate launch -m drafthead.train`.

    Example: drafthead train --config smollm2-eagle3 training.max_minutes=20 out=runs/mine
    """
    from dataclasses import asdict

    from drafthead.train.config import load_config
    from drafthead.train.interrupt import Interrupted
    from drafthead.train.loop import run
    from drafthead.train.result import told

    settings = load_config(config, overrides or [])
    with advising("--resume continues where it was", when=Interrupted), bars() as shown:
        result = run(settings, resume=resume, progress=terminal.training(shown))
    if not terminal.is_main():
        return
    terminal.run_table(result.out)
    tau = "–" if result.simulated_tau is None else f"{result.simulated_tau:.3f}"
    show_result(
        as_json,
        {k: str(v) if isinstance(v, Path) else v for k, v in asdict(result).items()},
        f"{result.head}: {result.steps} steps, {result.positions} positions, "
        f"{result.positions_per_s:.0f} positions/s, simulated tau {tau}",
    )
    served = result.agreement
    if served is not None and not served.get("agrees", True):
        say(f"error: {result.head}: {told(served)}")
        raise typer.Exit(1)


def extract(
    config: Annotated[str, typer.Option(help="YAML file, or the name of a preset.")],
    out: Annotated[Path, typer.Option(help="Folder of the store.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="A.B=C", help="Settings over the file's.")
    ] = None,
    layer: Annotated[
        list[int] | None, typer.Option(help="Store this layer too; may be given several times.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Write the target's states once; train from them with data.states=DIR and no target loaded.

    The same command again goes on where it was, and checks every byte of what is there: training
    checks sizes, headers and ids alone.

    Example: drafthead extract --config smollm2-eagle3 --out states/smollm2

    Several processes: accelerate launch --config_file F -m drafthead.train.cli extract ...
    """
    from dataclasses import asdict

    from drafthead.train.config import load_config
    from drafthead.train.extract import extract as write_store

    settings = load_config(config, overrides or [])
    with advising(AGAIN), bars() as shown:
        step = counting(shown, "extracting")
        made = write_store(settings, out, layer or (), progress=step)
    if not terminal.is_main():
        return
    figures = asdict(made) | {"out": str(out), "positions_per_s": made.positions_per_s}
    show_result(
        as_json,
        figures,
        f"{out}: {made.rows} rows, {made.positions} positions, {made.bytes / 1e6:.1f} MB in "
        f"{made.shards} shards; {made.new_positions} positions new, "
        f"{made.positions_per_s:.0f} positions/s; dropped: {made.dropped}",
    )


def demo(
    out: Annotated[Path, typer.Option(help="Where results go.")] = Path("runs/demo"),
    positions: Annotated[int, typer.Option(min=1, help="Training positions.")] = 100_000,
    train_minutes: Annotated[float | None, typer.Option(help="Train this long instead.")] = None,
    prompts: Annotated[int, typer.Option(min=1)] = 12,
    new_tokens: Annotated[int, typer.Option(min=2)] = 64,
    as_json: JsonOption = False,
) -> None:
    """The whole job on the embedded model: fetch, train, evaluate, generate, report.

    Example: drafthead demo --out runs/demo
    """
    from drafthead.train.demo import ROWS, DemoSize, Watcher, demo

    size = DemoSize(
        positions=positions if train_minutes is None else None,
        minutes=train_minutes,
        prompts=prompts,
        new_tokens=new_tokens,
    )
    with advising(AGAIN), bars() as shown:
        watcher = Watcher(say, terminal.training(shown), counting(shown, "evaluating"))
        result = demo(out, size, watcher)
    say(f"\n{result['sample']}\n", "dim")
    terminal.table({name: result[name] for name in ROWS}, remark=as_json)
    say(
        f"simulated tau {result['simulated_tau']:.2f}; {result['seconds']:.0f} s in all; "
        f"{out / 'result.json'} and {out / 'report.html'} hold the figures"
    )
    if as_json:
        print(json.dumps(result, default=str))
