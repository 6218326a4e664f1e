# SPDX-License-Identifier: Apache-2.0
"""The processes of a run: the `Accelerator` that they share, tensors in shards, signals that stop them, data workers.

FSDP 2 makes `DTensor`s of parameters.

Processes are started by `accelerate launch` or torchrun. `accelerate launch --cpu` starts one process only, whatever
`--num_processes` says (accelerate 1.15, `simple_launcher`); with `--multi_gpu` it starts them all, on CPUs too where
the run asks for `device="cpu"`.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import psutil
import torch
from accelerate import Accelerator, DistributedType, PartialState
from accelerate.utils import (
    DistributedDataParallelKwargs,
    FullyShardedDataParallelPlugin,
    InitProcessGroupKwargs,
    ProjectConfiguration,
    recursively_apply,
)
from torch import distributed, nn
from torch.utils.data import DataLoader

from ..utils.compat import set_process_timeout
from ..utils.machine import choose_device
from ..utils.messages import one_line
from .config import TrainingConfig
from .data.order import DataOrder


Key = TypeVar("Key")
Value = TypeVar("Value")

# Other processes wait while the main one makes validation samples or copies a pipeline.
TIMEOUT = timedelta(hours=4)
# At first they wait for all to start, of which one may have ended already.
STARTUP_TIMEOUT = timedelta(minutes=10)

_DEEPSPEED = "DeepSpeed is not supported: shard with FSDP 2 (conversion/accelerate/fsdp2.yaml), or use DDP"
_WORLD_SIZES = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
# One Ctrl-C can arrive twice: from the terminal, and from a launcher that forwards it.
_ONE_PRESS_SECONDS = 0.2


def make_accelerator(config: TrainingConfig) -> Accelerator:
    """Make an `Accelerator` for the options; under a launcher, join the other processes.

    Raises:
        ValueError: If the tracker is not installed, `accelerate launch --cpu` was to start several processes, or
            DeepSpeed is asked for.
        TimeoutError: If other processes of the run do not start.
    """
    if config.report_to != "none" and find_spec(config.report_to) is None:
        raise ValueError(f"report_to={config.report_to!r} needs that package: pip install {config.report_to}")
    project = None
    if config.output is not None:
        project = ProjectConfiguration(project_dir=config.output, logging_dir=str(Path(config.output) / "logs"))
    # Accelerate sets the address only if it was asked for several processes.
    alone = "MASTER_ADDR" in os.environ and not any(name in os.environ for name in _WORLD_SIZES)
    if alone and os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true"):
        raise ValueError(
            "`accelerate launch --cpu` starts one process, whatever --num_processes says: launch with --multi_gpu and "
            "give device='cpu' (--device cpu) to the run, or use torchrun --nproc_per_node N"
        )
    if os.environ.get("ACCELERATE_USE_DEEPSPEED", "").lower() == "true":
        raise ValueError(_DEEPSPEED)
    try:
        accelerator = Accelerator(
            cpu=config.device != "auto" and choose_device(config.device).type == "cpu",
            mixed_precision=config.mixed_precision,
            log_with=None if config.report_to == "none" else config.report_to,
            project_config=project,
            kwargs_handlers=[
                # Gradients need no second copy.
                DistributedDataParallelKwargs(gradient_as_bucket_view=True),
                InitProcessGroupKwargs(timeout=STARTUP_TIMEOUT),
            ],
        )
    except distributed.DistError as error:
        minutes = STARTUP_TIMEOUT.total_seconds() / 60
        raise TimeoutError(
            f"the processes of the run did not find one another within {minutes:g} minutes; see what each printed, "
            f"and start all of them again ({one_line(error, 200)})"
        ) from error
    if has_joined():
        set_process_timeout(TIMEOUT)
    _shard_on_cpus(accelerator)
    return accelerator


def _shard_on_cpus(accelerator: Accelerator) -> None:
    """Enable FSDP 2 for CPU processes; accelerate (1.15) supports it on GPUs only."""
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
    """Refuse configurations that would fail hours later.

    Raises:
        ValueError: For DeepSpeed, FSDP 1 and others, and what sharded models cannot do; the message names
            the option.
    """
    kind = accelerator.distributed_type
    if kind in (DistributedType.NO, DistributedType.MULTI_GPU, DistributedType.MULTI_CPU):
        return
    if kind == DistributedType.DEEPSPEED:
        raise ValueError(_DEEPSPEED)
    problems = {
        "use one process, DDP or FSDP 2 (fsdp_version: 2)": not getattr(accelerator, "is_fsdp2", False),
        "train='lora' cannot be used; use DDP, or train full": config.train == "lora",
        "validation_prompts cannot be used; generate from a checkpoint's pipeline": config.validation_prompts,
    }
    for problem, occurs in problems.items():
        if occurs:
            raise ValueError(f"under {kind.value}, {problem}")


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Gather a tensor on the CPU if it is sharded over processes, all of which must call this."""
    gather = getattr(tensor, "full_tensor", None)
    return (gather() if gather is not None else tensor).detach().cpu().contiguous()


def shard_like(value: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Shard an unsharded tensor as another one is, on its device and in its type."""
    value = value.to(device=tensor.device, dtype=tensor.dtype)
    if not hasattr(tensor, "device_mesh"):
        return value
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value, tensor.device_mesh, tensor.placements)  # type: ignore[attr-defined]


def unsharded(model: nn.Module) -> nn.Module:
    """Return the model, or an unsharded copy on the CPU if it is sharded. Every process must call it."""
    if not any(hasattr(each, "full_tensor") for each in model.parameters()):
        return model
    state = {name: full_tensor(tensor) for name, tensor in model.state_dict().items()}
    # fully_shard derives a class from the model's; the first base that is not FSDP's is the one to save.
    cls: Any = next(base for base in type(model).__mro__ if not base.__name__.startswith("FSDP"))
    make = getattr(cls, "from_config", None) or cls._from_config
    copy = make(model.config)
    copy.load_state_dict(state)
    if hasattr(model, "generation_config"):
        copy.generation_config = model.generation_config
    return copy


def is_fully_sharded(module: nn.Module) -> bool:
    """True for a module that FSDP 2 has sharded; does not import FSDP, which some builds of torch lack."""
    return any(base.__name__ == "FSDPModule" for base in type(module).__mro__)


class TrainingStopped(KeyboardInterrupt):
    """Raised when a signal has ended a run after a step.

    Args:
        message: State of the run and how to resume it; empty in all processes but the first.
        number: The signal.

    Attributes:
        exit_code: Exit code of a command, 130 after Ctrl-C.
    """

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message)
        self.exit_code = 128 + number

    def __reduce__(self) -> tuple[Any, ...]:
        # From a worker process to the one that waits for it.
        return type(self), (str(self), self.exit_code - 128)


def join_processes(device: str) -> Accelerator | None:
    """Join the other processes of a launcher.

    Args:
        device: Name of the device; `auto` is the GPU of this process if there is one.

    Returns:
        The processes, which compute in float32; None for one alone.

    Raises:
        ValueError: As [`make_accelerator`].
        TimeoutError: If others do not start.
    """
    launched = "MASTER_ADDR" in os.environ or any(int(os.environ.get(name, 1)) > 1 for name in _WORLD_SIZES)
    if not launched and not has_joined():
        return None
    accelerator = make_accelerator(TrainingConfig(device=device, mixed_precision="no"))
    return None if accelerator.distributed_type == DistributedType.NO else accelerator


def available_memory() -> int:
    """This process' share of the bytes that are available on the machine."""
    return psutil.virtual_memory().available // int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def has_joined() -> bool:
    """Whether this process is in a group of `torch.distributed`."""
    return distributed.is_available() and distributed.is_initialized()


class Processes:
    """The processes of `torch.distributed`, or this one alone.

    Args:
        alone: This process alone, also where there are others.

    Attributes:
        rank: Number of this process.
        size: Number of processes.
    """

    def __init__(self, alone: bool = False) -> None:
        joined = not alone and has_joined()
        self.rank = distributed.get_rank() if joined else 0
        self.size = distributed.get_world_size() if joined else 1

    def share_of(self, items: Sequence[Key]) -> list[Key]:
        """Return the items that belong to this process; `owner` is the inverse."""
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

    def decide(self, function: Callable[[], Value]) -> Value:
        """Call a function in the first process; all return what it returned, or end with its error."""
        value: Any = None
        with self.together():
            if self.rank == 0:
                value = function()
        return self.all(value)[0]

    def in_turn(self, function: Callable[[], Value]) -> Value:
        """Call a function in the first process and then, when the files that it writes are there, in the others."""
        value: Any = None
        for turn in (True, False) if self.size > 1 else (True,):
            with self.together():
                if (self.rank == 0) is turn:
                    value = function()
        return value

    def map(self, function: Callable[[Key], Value], items: Sequence[Key]) -> list[Value]:
        """Call a function for each item in the process that it belongs to; all return the values of all, in order."""
        with self.together():
            mine = [function(item) for item in self.share_of(items)]
        shares = self.all(mine)
        return [shares[self.owner(number)][number // self.size] for number in range(len(items))]

    def share(self, value: Any, owner: int) -> Any:
        """Return the owner's nested dicts and sequences of tensors, on the CPU; the values of others do not matter."""
        if self.size == 1:
            return value
        described = [recursively_apply(lambda tensor: tensor.to("meta"), value)]
        distributed.broadcast_object_list(described, owner)
        if self.rank != owner:
            value = recursively_apply(partial(torch.empty_like, device="cpu"), described[0])
        recursively_apply(partial(self.send, owner=owner), value)
        return value

    def send(self, tensor: torch.Tensor, owner: int) -> None:
        """Broadcast the owner's values to all processes, in place."""
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
                raise ConnectionError(f"process {rank} has failed: {state[0]}")


class StopSignals:
    """Context manager that records Ctrl-C and SIGTERM, so that the loop can stop after the step.

    A second Ctrl-C raises `KeyboardInterrupt`. A signal that the process ignores stays ignored. Outside the
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
        elif number == signal.SIGINT and now - self._time > _ONE_PRESS_SECONDS:
            raise KeyboardInterrupt


def read_batches(
    make_batch: Callable[[DataOrder, int, int], Any], order: DataOrder, first: int, steps: int, workers: int
) -> Generator[Any]:
    """Read the micro-batches of the steps from `first` to `steps`.

    Args:
        make_batch: Makes one from the data order, the step and the micro-step; a pure function.
        order: The data order.
        first: The first step.
        steps: Number of steps of the stage.
        workers: Number of processes that make batches ahead; 0 makes them here.
    """
    micro_steps = range(order.accumulation_steps)
    loader: DataLoader[Any] = DataLoader(
        [(step, micro_step) for step in range(first, steps) for micro_step in micro_steps],  # type: ignore[arg-type]
        batch_size=None,
        collate_fn=partial(_make_at, make_batch, order),
        num_workers=workers,
        worker_init_fn=_ignore_stop_signals,
        # The loader draws a number, which must not come from the generator of the model's dropout.
        generator=torch.Generator(),
    )
    yield from loader


def _make_at(make_batch: Callable[[DataOrder, int, int], Any], order: DataOrder, place: tuple[int, int]) -> Any:
    return make_batch(order, *place)


def _ignore_stop_signals(worker: int) -> None:
    """Ignore SIGINT and SIGTERM in data workers, so that the current step can finish."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
