"""Processes, devices and backends: the one place where accelerate and DeepSpeed enter.

The loop above it does not know how many ranks there are or who shards what. Every gradient that
`step` applies is the sum over micro-batches and ranks of the gradients of the losses given to
`backward`; whoever wants a mean divides the loss by a global count. It knows no head and no data.
"""

from __future__ import annotations

import logging
import math
import netrc
import os
import secrets
import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator  # type: ignore[import-untyped]
from accelerate.tracking import get_available_trackers  # type: ignore[import-untyped]
from accelerate.utils import (  # type: ignore[import-untyped]
    DistributedDataParallelKwargs,
    DistributedType,
    InitProcessGroupKwargs,
)
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from drafthead.data.files import write_atomically
from drafthead.inference.target import Target, load_target
from drafthead.train import partitioned
from drafthead.train.config import OptimiserConfig, RunConfig, flat

logger = logging.getLogger(__name__)

LARGEST_LOSS = 1e18
"""From here on, a loss is as good as infinite."""

MOMENTS = ("exp_avg", "exp_avg_sq")
"""Names of AdamW's two fp32 tensors per parameter."""


class Engine:
    """One process's view of a run. Make it first: it starts the process group."""

    def __init__(self, config: RunConfig) -> None:
        if config.tracker not in ("none", *map(str, get_available_trackers())):
            raise ValueError(
                f"tracker: {config.tracker} is not installed; install it, or use tracker=none"
            )
        handlers: list[Any] = [DistributedDataParallelKwargs(broadcast_buffers=False)]
        on_cpu = not torch.cuda.is_available()
        deepspeed = os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true"
        if on_cpu and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            # Without this, accelerate counts one process on a CPU under DeepSpeed.
            handlers.append(InitProcessGroupKwargs(backend="gloo"))
        if on_cpu and deepspeed:
            partitioned.leave_sums_to_gloo()
        self._accelerator = Accelerator(
            # Without it, CPU processes are not wrapped; with it, DeepSpeed is left out: both
            # silently.
            cpu=on_cpu and not deepspeed,
            mixed_precision="no",  # autocast is entered by the objective, around what needs it
            log_with=None if config.tracker == "none" else config.tracker,
            project_dir=str(config.out),
            kwargs_handlers=handlers,
        )
        self.device: torch.device = self._accelerator.device
        self.rank: int = self._accelerator.process_index
        self.world: int = self._accelerator.num_processes
        self.sharded = self._accelerator.distributed_type == DistributedType.DEEPSPEED
        self.bf16 = wants_bf16(config.training.precision, self.device)
        self._tracker = config.tracker
        self._optimiser: torch.optim.Optimizer | None = None
        self._model: Any = None
        self._parameters: dict[str, nn.Parameter] = {}
        self._clip = config.optimiser.clip
        self._partition_target = config.training.partition_target
        self._target: partitioned.PartitionedTarget | None = None
        if self.world > 1 and self._accelerator.distributed_type == DistributedType.NO:
            raise ValueError(
                f"{self.world} processes would not share gradients; use accelerate launch"
            )
        self._plugin = self._accelerator.state.deepspeed_plugin if self.sharded else None
        self._stage = self._plugin.zero_stage if self._plugin is not None else 0
        if self.sharded:
            # DeepSpeed's own calls, once for each layer and step.
            warnings.filterwarnings(
                "ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning
            )
        if self.sharded and not self._stage:
            raise ValueError(
                "DeepSpeed without ZeRO shards nothing; set zero_optimization.stage to 1, 2 or 3"
            )
        if self._partition_target and not self.sharded:
            raise ValueError(
                "training.partition_target: only DeepSpeed partitions a target; use "
                "accelerate launch --config_file configs/accelerate/cpu-zero3.yaml, or leave it out"
            )
        # from_pretrained partitions whenever a DeepSpeed config is alive, and accelerate makes one.
        unset_hf_deepspeed_config()

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def stage(self) -> int:
        """Of ZeRO; 0 without DeepSpeed."""
        return int(self._stage)

    def load_target(self, name: str | Path, dtype: str, revision: str | None = None) -> Target:
        """Load the frozen target, in eval mode and without gradients: whole on this rank, or with
        `training.partition_target` in parts over all ranks.
        """
        if self._partition_target:
            self._target = partitioned.load_partitioned(name, dtype, revision)
            return self._target
        target = load_target(name, dtype, revision)
        target.model.requires_grad_(False)
        target.model.to(self.device)
        return target

    def together(self) -> AbstractContextManager[None]:
        """Wrap whatever runs the target, on all ranks alike; inside, each runs it as it needs to.

        A partitioned target runs on all ranks at once, so that one that needs it less (fewer
        micro-batches, or some of them kept) would leave the others waiting.
        """
        return nullcontext() if self._target is None else self._target.together()

    def prepare(
        self, model: nn.Module, parameters: Mapping[str, nn.Parameter], config: OptimiserConfig
    ) -> nn.Module:
        """Place the model, make AdamW over exactly these parameters, and return what to call.

        `parameters` must be all of the model's trainable ones, on fp32 master weights (F29, F33).
        """
        trainable = {id(p) for p in model.parameters() if p.requires_grad}
        assert trainable == {id(p) for p in parameters.values()}, "optimiser and trainable differ"
        wide = [name for name, p in parameters.items() if p.dtype != torch.float32]
        if wide:
            raise ValueError(
                f"head weights must be fp32 to train (bf16 loses small updates): {wide[0]}"
            )
        model.to(self.device)
        self._parameters = dict(parameters)
        self._optimiser = torch.optim.AdamW(
            list(parameters.values()),
            lr=config.lr,
            betas=config.betas,
            eps=config.eps,
            weight_decay=config.weight_decay,
            fused=True,
        )
        if self._plugin is not None:
            self._plugin.deepspeed_config.update(
                # Counts and scales are ours; DeepSpeed only sums, clips and shards.
                train_micro_batch_size_per_gpu=1,
                gradient_accumulation_steps=1,
                gradient_clipping=self._clip,
                # Where its state is offloaded: torch's fused AdamW is as fast there as DeepSpeed's
                # and need not be built.
                zero_force_ds_cpu_optimizer=False,
            )
            if self._stage == 3:
                zero = self._plugin.deepspeed_config["zero_optimization"]
                zero.update(partitioned.head_settings(parameters.values()))
                partitioned.set_aside_frozen(model)
            self._model, _ = self._accelerator.prepare(model, self._optimiser)
            if self._stage == 3:
                partitioned.unhook_frozen(model)
        else:
            self._model = self._accelerator.prepare(model)
        wrapped: nn.Module = self._model
        return wrapped

    def whole(self, model: nn.Module) -> AbstractContextManager[None]:
        """Hold a prepared model's parameters whole inside the block; all ranks must enter it."""
        return partitioned.gathered(model.parameters()) if self._stage == 3 else nullcontext()

    def unwrap(self, model: nn.Module) -> None:
        """Make the prepared model an ordinary one again, whole on every rank; no step follows."""
        if self._stage == 3:
            partitioned.whole_again(self._model, model)

    @contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        """Wrap forward and backward of one micro-batch; ranks add gradients at the last one."""
        if self.sharded:
            self._model.set_gradient_accumulation_boundary(is_boundary=last)
        quiet = isinstance(self._model, DistributedDataParallel) and not last
        with self._model.no_sync() if quiet else nullcontext():
            yield

    def backward(self, loss: Tensor) -> None:
        """Add this loss's gradient to the step's; the backends average over ranks, so undo that."""
        # A gradient whose square overflows has no finite norm, but for DeepSpeed, which would clip
        # it and make the step: a loss that large is none, for all backends alike (F26).
        sound = torch.where(loss.detach().abs() < LARGEST_LOSS, 1.0, math.nan)
        scaled = loss * sound * self.world
        if self.sharded:
            self._model.backward(scaled)
        else:
            scaled.backward()

    def step(self, lr: float) -> float:
        """Clip, update, clear, and return the gradient norm.

        When that is not finite nothing changes, on any rank (F26, F27).
        """
        assert self._optimiser is not None, "prepare comes first"
        if self.sharded:
            for group in self._model.optimizer.param_groups:
                group["lr"] = lr
            self._model.step()
            return math.inf if self._model.optimizer.overflow else float(self._norm())
        for group in self._optimiser.param_groups:
            group["lr"] = lr
        norm = float(nn.utils.clip_grad_norm_(self._parameters.values(), self._clip))
        if math.isfinite(norm):
            self._optimiser.step()
        self._optimiser.zero_grad(set_to_none=True)
        return norm

    def _norm(self) -> float:
        norm = self._model.get_global_grad_norm()
        return math.inf if norm is None else float(norm)

    def discard(self) -> None:
        """Forget gradients of micro-batches that no step will use."""
        if self._optimiser is not None and not self.sharded:
            self._optimiser.zero_grad(set_to_none=True)

    def optimised(self) -> list[nn.Parameter]:
        """The parameters that the optimiser holds (unsharded)."""
        assert self._optimiser is not None, "prepare comes first"
        return [p for group in self._optimiser.param_groups for p in group["params"]]

    def sum(self, values: Tensor) -> Tensor:
        """Sum a tensor over ranks; every rank must call it with the same shape."""
        if self.world == 1:
            return values
        total = values.detach().clone().to(self.device)
        torch.distributed.all_reduce(total)
        return total.to(values.device)

    def same(self, value: float) -> float:
        """Rank 0's value, on every rank: for clocks and decisions that must agree."""
        mine = value if self.is_main else 0.0
        return float(self.sum(torch.tensor(mine, dtype=torch.float64))) if self.world > 1 else mine

    def wait(self) -> None:
        """Let every rank reach this point before any goes on."""
        if self.world > 1:
            self._accelerator.wait_for_everyone()

    # Optimiser state by parameter name, whole, whoever shards it

    def optimiser_state(self) -> tuple[dict[str, Tensor], int]:
        """Moments as `exp_avg.NAME` on the CPU of rank 0, and the count of updates.

        All ranks must call it.
        """
        updates = self._updates()
        if not updates:
            return {}, 0
        moments: dict[str, Tensor] = {}
        for name, parameter in self._parameters.items():
            for key in MOMENTS:
                moment = self._moment(parameter, key)
                if self.is_main:
                    moments[f"{key}.{name}"] = moment.detach().cpu().clone()
        return moments, updates

    def load_optimiser_state(self, moments: Mapping[str, Tensor], updates: int) -> None:
        """Undo `optimiser_state`; after `prepare`, and under any number of ranks."""
        if not updates:
            return
        if self.sharded:
            partitioned.make_state(self._model.optimizer, MOMENTS, updates)
        for name, parameter in self._parameters.items():
            values = {key: moments[f"{key}.{name}"].to(self.device) for key in MOMENTS}
            if self.sharded:
                for key, value in values.items():
                    partitioned.set_moment(parameter, key, value)
            else:
                assert self._optimiser is not None, "prepare comes first"
                self._optimiser.state[parameter] = {
                    # Fused AdamW keeps its counter beside the parameter.
                    "step": torch.tensor(float(updates), device=self.device),
                    **{key: value.clone() for key, value in values.items()},
                }

    def _moment(self, parameter: nn.Parameter, key: str) -> Tensor:
        if self.sharded:
            return partitioned.moment(parameter, key)
        assert self._optimiser is not None, "prepare comes first"
        moment: Tensor = self._optimiser.state[parameter][key]
        return moment

    def _updates(self) -> int:
        assert self._optimiser is not None, "prepare comes first"
        inner = self._model.optimizer.optimizer if self.sharded else self._optimiser
        steps = [int(state["step"]) for state in inner.state.values() if "step" in state]
        return max(steps, default=0)

    # Tracking: accelerate's trackers, or none

    def start_tracking(self, config: RunConfig, resume: bool) -> None:
        """Open the tracker, for a resumed run where it was.

        wandb goes offline, and says so, when there is no key.
        """
        if self._tracker == "wandb" and "WANDB_MODE" not in os.environ and not _has_wandb_key():
            os.environ["WANDB_MODE"] = "offline"
            logger.info("wandb: no key found, logging offline to %s", config.out)
        if self._tracker == "none":
            return
        options = {}
        if self._tracker == "wandb" and self.is_main:
            name = _wandb_id(config.out, resume)
            shown = {"dir": str(config.out), "name": config.out.name, "id": name}
            options = {"wandb": {**shown, "resume": "allow"}}
        self._accelerator.init_trackers(
            "drafthead", config=flat(config.model_dump(mode="json")), init_kwargs=options
        )

    def track(self, values: Mapping[str, float], step: int) -> None:
        """Send figures to the tracker; nothing happens without one."""
        if self._tracker != "none":
            self._accelerator.log(dict(values), step=step)

    def close(self) -> None:
        """Finish the tracker and leave the other ranks; call it once, at the end."""
        if self._tracker != "none":
            for tracker in self._accelerator.trackers:
                tracker.finish()
        if torch.distributed.is_initialized():
            # Left to the interpreter's end, gloo's threads may still run then, and abort it.
            torch.distributed.destroy_process_group()


def wants_bf16(precision: str, device: torch.device) -> bool:
    """Decide `auto`: bf16 where the device computes in it and does not just emulate it."""
    if precision != "auto":
        return precision == "bf16"
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _wandb_id(out: Path, resume: bool) -> str:
    """What wandb knows a run by, which all its sittings share."""
    file = out / "wandb" / "id"
    if not (resume and file.exists()):
        file.parent.mkdir(exist_ok=True)
        write_atomically(file, secrets.token_hex(4))
    return file.read_text()


def _has_wandb_key() -> bool:
    if os.environ.get("WANDB_API_KEY"):
        return True
    try:
        return netrc.netrc().authenticators("api.wandb.ai") is not None
    except (OSError, netrc.NetrcParseError):
        return False
