# SPDX-License-Identifier: Apache-2.0
"""The `Accelerator` of a run, what it may not be, and its tracker."""

from __future__ import annotations

import json
import os
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path

from accelerate import Accelerator, DistributedType, PartialState
from accelerate.utils import (
    DistributedDataParallelKwargs,
    FullyShardedDataParallelPlugin,
    InitProcessGroupKwargs,
    ProjectConfiguration,
)

from . import zero3
from .config import TrainingConfig
from .rendezvous import wait_for_processes


PROJECT = "mhla-hf"
# Other processes wait while the main one makes validation samples or copies a pipeline.
TIMEOUT = timedelta(hours=4)


def make_accelerator(config: TrainingConfig) -> Accelerator:
    """An `Accelerator` for the options; launched by `accelerate launch`, it joins the other processes.

    Raises:
        ValueError: If the tracker or DeepSpeed is asked for and not installed.
        OSError: If other processes of the run do not come; see `wait_for_processes`.
    """
    if config.report_to != "none":
        if find_spec(config.report_to) is None:
            raise ValueError(f"report_to={config.report_to!r} needs that package: pip install {config.report_to}")
        if config.output is None:
            raise ValueError(f"report_to={config.report_to!r} needs output, the directory to log to")
    project = None
    if config.output is not None:
        project = ProjectConfiguration(project_dir=config.output, logging_dir=str(Path(config.output) / "logs"))
    if zero3.is_asked_for() and find_spec("deepspeed") is None:
        raise ValueError("distributed_type: DEEPSPEED needs that package: pip install deepspeed")
    # Held until the process group is made.
    meeting = wait_for_processes(config.startup_timeout)
    accelerator = Accelerator(
        cpu=config.device == "cpu",
        mixed_precision="no" if zero3.is_asked_for() else config.mixed_precision,
        log_with=None if config.report_to == "none" else config.report_to,
        project_config=project,
        kwargs_handlers=[
            # Gradients need no second copy.
            DistributedDataParallelKwargs(gradient_as_bucket_view=True),
            InitProcessGroupKwargs(timeout=TIMEOUT),
        ],
    )
    del meeting
    _shard_on_cpus(accelerator)
    zero3.set_options(accelerator, config)
    return accelerator


def _shard_on_cpus(accelerator: Accelerator) -> None:
    """Lets CPU processes shard where FSDP 2 is asked for, which accelerate (1.15) does for GPUs alone."""
    asked = os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true"
    if not asked or accelerator.distributed_type != DistributedType.MULTI_CPU:
        return
    plugin = FullyShardedDataParallelPlugin()
    if accelerator.mixed_precision != "no":
        plugin.set_mixed_precision(accelerator.mixed_precision)
    accelerator.state.fsdp_plugin = plugin
    # The state keeps its own copy of what the process state says.
    for state in (accelerator.state, PartialState()):
        state.distributed_type = DistributedType.FSDP


def open_trackers(accelerator: Accelerator, config: TrainingConfig) -> None:
    """Opens the tracker, if there is one, with the options as its hyperparameters."""
    if config.report_to == "none":
        return
    plain = {
        name: value if isinstance(value, (int, float, str, bool)) else json.dumps(value)
        for name, value in config.to_dict().items()
        if value is not None
    }
    accelerator.init_trackers(PROJECT, config=plain)


def check_distribution(accelerator: Accelerator, config: TrainingConfig) -> None:
    """Refuses ways of running that would fail hours later.

    Raises:
        ValueError: For FSDP 1 and others, and what sharded models cannot do here; the message names the option.
    """
    kind = accelerator.distributed_type
    if kind in (DistributedType.NO, DistributedType.MULTI_GPU, DistributedType.MULTI_CPU):
        return
    if kind == DistributedType.DEEPSPEED:
        zero3.check_options(accelerator, config)
    elif kind != DistributedType.FSDP:
        raise ValueError(f"training under {kind.value} is not supported; use one process, DDP, FSDP 2 or DeepSpeed")
    elif not getattr(accelerator, "is_fsdp2", False):
        raise ValueError("training under FSDP 1 is not supported; set fsdp_version: 2 in accelerate's configuration")
    name = "DeepSpeed" if kind == DistributedType.DEEPSPEED else "FSDP"
    for option in ("transfer_steps", "distill_steps"):
        if getattr(config, option):
            raise ValueError(f"{option} must be 0 under {name}: run that stage first, without sharding")
    if config.train == "lora":
        raise ValueError(f"train='lora' does not run under {name}; use DDP, or train full")
    if config.validation_prompts:
        raise ValueError(f"validation_prompts do not run under {name}: generate from a checkpoint's pipeline instead")
