# SPDX-License-Identifier: Apache-2.0
"""The processes of a run: their meeting, the `Accelerator` that they share, its tracker, and signals that stop them.

Processes are started by `accelerate launch` or torchrun. `accelerate launch --cpu` starts one process only, whatever
`--num_processes` says (accelerate 1.15, `simple_launcher`); with `--multi_gpu` it starts them all, on CPUs too where
the run asks for `device="cpu"`.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import torch
from accelerate import Accelerator, DistributedType, PartialState
from accelerate.utils import (
    DistributedDataParallelKwargs,
    FullyShardedDataParallelPlugin,
    InitProcessGroupKwargs,
    ProjectConfiguration,
)
from torch import distributed

from ..utils.machine import choose_device
from . import sharding
from .config import TrainingConfig


Key = TypeVar("Key")

PROJECT = "mhla-hf"
# Other processes wait while the main one makes validation samples or copies a pipeline.
TIMEOUT = timedelta(hours=4)

_ADDRESS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_WORLD_SIZES = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
_POLL_SECONDS = 0.1
# Set by `accelerate launch` and torchrun.
_LAUNCHER_MARKS = ("ACCELERATE_MIXED_PRECISION", "TORCHELASTIC_RUN_ID")
_SET_PARENT_DEATH_SIGNAL = 1
# One Ctrl-C can arrive twice: from the terminal, and from a launcher that hands it on.
_ONE_PRESS_SECONDS = 0.2


def make_accelerator(config: TrainingConfig) -> Accelerator:
    """An `Accelerator` for the options; under a launcher, it joins the other processes.

    Raises:
        ValueError: If the tracker or DeepSpeed is asked for and not installed, or the launcher has started one process
            of several.
        OSError: If other processes of the run do not come; see `wait_for_processes`.
    """
    end_with_launcher()
    if config.report_to != "none":
        if find_spec(config.report_to) is None:
            raise ValueError(f"report_to={config.report_to!r} needs that package: pip install {config.report_to}")
        if config.output is None:
            raise ValueError(f"report_to={config.report_to!r} needs output, the directory to log to")
    project = None
    if config.output is not None:
        project = ProjectConfiguration(project_dir=config.output, logging_dir=str(Path(config.output) / "logs"))
    if sharding.uses_deepspeed() and find_spec("deepspeed") is None:
        raise ValueError("distributed_type: DEEPSPEED needs that package: pip install deepspeed")
    _check_launcher()
    # Held until the process group is made.
    meeting = wait_for_processes(config.startup_timeout)
    accelerator = Accelerator(
        cpu=config.device != "auto" and choose_device(config.device).type == "cpu",
        mixed_precision="no" if sharding.uses_deepspeed() else config.mixed_precision,
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
    sharding.set_deepspeed_options(accelerator, config)
    return accelerator


def _check_launcher() -> None:
    """Refuses to be the only one of several processes.

    Raises:
        ValueError: The message says how to start them all.
    """
    # Accelerate sets the address only if it was asked for several processes.
    alone = "MASTER_ADDR" in os.environ and not any(name in os.environ for name in _WORLD_SIZES)
    if alone and os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true"):
        raise ValueError(
            "`accelerate launch --cpu` starts one process, whatever --num_processes says: launch with --multi_gpu in "
            "place of --cpu and give device='cpu' (--device cpu) to the run, or use torchrun --nproc_per_node N; for "
            "several machines use torchrun or MPI"
        )


def wait_for_processes(minutes: float) -> distributed.TCPStore | None:
    """Waits until every process of the run has come this far; does nothing for a single one, or under MPI.

    A process group would wait for as long as one of its collectives may take, which is hours.

    Args:
        minutes: How long to wait.

    Returns:
        The store that they met at. Keep it until the process group is made, which then uses the same server.

    Raises:
        TimeoutError: If some did not come; the message says which.
        OSError: If the first process could not be reached, or cannot listen.
    """
    if not distributed.is_available() or distributed.is_initialized():
        return None
    if any(name not in os.environ for name in _ADDRESS) or int(os.environ["WORLD_SIZE"]) < 2:
        return None
    rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = _open_store(rank, count, minutes)
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    keys = [f"mhla_hf/{attempt}/{number}" for number in range(count)]
    deadline = time.monotonic() + 60 * minutes
    try:
        store.set(keys[rank], "here")
        while not store.check(keys):
            if time.monotonic() > deadline:
                missing = [str(number) for number, key in enumerate(keys) if not store.check([key])]
                raise TimeoutError(
                    f"process {', '.join(missing[:8])} of {count} did not start within {minutes:g} minutes "
                    "(startup_timeout); see what it printed, and start all processes again"
                )
            time.sleep(_POLL_SECONDS)
    except distributed.DistError as error:
        raise ConnectionError(f"process {rank} lost the first process before the run began ({error})") from error
    return store


def _open_store(rank: int, count: int, minutes: float) -> distributed.TCPStore:
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    # Under torchrun its agent listens; several stores of one process can share one server.
    listens = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True)
    try:
        return distributed.TCPStore(
            host, port, count, listens, timedelta(minutes=minutes), wait_for_workers=False, multi_tenant=True
        )
    except distributed.DistError as error:
        if listens:
            raise OSError(f"port {port} of {host} cannot be used by the run ({error}); choose another one") from error
        raise TimeoutError(
            f"process {rank} of {count} did not reach the first one at {host}:{port} within {minutes:g} minutes "
            "(startup_timeout); see what that one printed, and start all processes again"
        ) from error


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


def check_distribution(accelerator: Accelerator, config: TrainingConfig) -> None:
    """Refuses ways of running that would fail hours later.

    Raises:
        ValueError: For FSDP 1 and others, and what sharded models cannot do here; the message names the option.
    """
    kind = accelerator.distributed_type
    if kind in (DistributedType.NO, DistributedType.MULTI_GPU, DistributedType.MULTI_CPU):
        return
    if kind == DistributedType.DEEPSPEED:
        sharding.check_deepspeed_options(accelerator, config)
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


def open_trackers(accelerator: Accelerator, config: TrainingConfig) -> None:
    """Opens the tracker, if there is one, with the options as its hyperparameters."""
    if config.report_to == "none":
        return
    plain: dict[str, Any] = {
        name: value if isinstance(value, (int, float, str, bool)) else json.dumps(value)
        for name, value in config.to_dict().items()
        if value is not None
    }
    accelerator.init_trackers(PROJECT, config=plain)


class TrainingStopped(KeyboardInterrupt):
    """A run that a signal has ended after a step.

    Args:
        message: State of the run and how to resume it; empty in all processes but the first.
        number: The signal.

    Attributes:
        exit_code: Exit code of a command, 130 after Ctrl-C.
    """

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message)
        self.exit_code = 128 + number


class Processes:
    """The processes of `torch.distributed`, or this one alone.

    Attributes:
        rank: Number of this process.
        size: Number of processes.
    """

    def __init__(self) -> None:
        joined = distributed.is_available() and distributed.is_initialized()
        self.rank = distributed.get_rank() if joined else 0
        self.size = distributed.get_world_size() if joined else 1

    def share_of(self, items: Sequence[Key]) -> list[Key]:
        """Those of some items that belong to this process; `owner` is their other side."""
        return list(items[self.rank :: self.size])

    def owner(self, number: int) -> int:
        """The process that the item of a number belongs to."""
        return number % self.size

    def all(self, value: Any) -> list[Any]:
        """The values of all processes."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        distributed.all_gather_object(values, value)
        return values

    def send(self, tensor: torch.Tensor, owner: int) -> None:
        """Gives all processes the owner's values, in place."""
        if self.size == 1:
            return
        device = "cuda" if distributed.get_backend() == "nccl" else "cpu"
        values = tensor.data.to(device).contiguous()
        distributed.broadcast(values, owner)
        tensor.data.copy_(values)

    @contextmanager
    def together(self) -> Iterator[None]:
        """A context that ends in all processes or, if one of them has an error or was told to stop, in none."""
        error: BaseException | None = None
        try:
            yield
        except (Exception, TrainingStopped) as raised:
            error = raised
        number = error.exit_code - 128 if isinstance(error, TrainingStopped) else 0
        states = self.all(None if error is None else (str(error), number))
        if error is not None:
            raise error
        for rank, state in enumerate(states):
            if state is not None and state[1]:
                raise TrainingStopped("", state[1])
            if state is not None:
                raise RuntimeError(f"process {rank} has failed: {state[0]}")


class StopSignals:
    """Remembers Ctrl-C and SIGTERM, for the loop to stop after the step; a context manager.

    A second Ctrl-C raises `KeyboardInterrupt` at once. A signal that the process ignores stays ignored. Outside the
    main thread, where Python handles no signals, nothing changes.

    Attributes:
        received: The signal received; None before that.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self._time = 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                # A script's `... &` ignores the Ctrl-C that is meant for what runs in the foreground.
                if signal.getsignal(number) != signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._remember)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            # A handler that was not set from Python cannot be put back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.received is None:
            self.received, self._time = number, now
            # A launcher that the same signal ends must not take this process along.
            _set_parent_death_signal(0)
        elif number == signal.SIGINT and now - self._time > _ONE_PRESS_SECONDS:
            raise KeyboardInterrupt


def end_with_launcher() -> None:
    """Has this process stop, as by SIGTERM, when the launcher that started it dies, and save a last checkpoint.

    A launcher that is killed leaves its processes behind otherwise. Does nothing outside a launcher.
    """
    _set_parent_death_signal(signal.SIGTERM)


def _set_parent_death_signal(number: int) -> None:
    """Has Linux send a launched process a signal when its parent dies, or none for 0; other systems cannot."""
    if sys.platform.startswith("linux") and any(name in os.environ for name in _LAUNCHER_MARKS):
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, number)
