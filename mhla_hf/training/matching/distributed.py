# SPDX-License-Identifier: Apache-2.0
"""Processes that divide the layers among them, stop together, and end with the same weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from accelerate import DistributedType
from torch import distributed, nn

from ..processes import TrainingStopped


Key = TypeVar("Key")


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


class OneProcess:
    """The part of `accelerate.Accelerator` that the training loop uses, for a process that trains layers by itself.

    An `Accelerator` would have all processes of `torch.distributed` train the same layer.

    Args:
        mixed_precision: `"bf16"` for autocast, `"no"` for none.

    Attributes:
        device: Where it trains.
    """

    distributed_type = DistributedType.NO
    is_main_process = is_local_main_process = True
    num_processes, process_index = 1, 0
    scaler, trackers = None, ()

    def __init__(self, mixed_precision: str) -> None:
        self.mixed_precision = mixed_precision
        self.device = torch.device("cpu")

    def prepare(self, *objects: Any) -> tuple[Any, ...]:
        """The objects as they are."""
        return objects

    def autocast(self) -> torch.autocast:
        """Autocast to bf16, where it was asked for."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.mixed_precision == "bf16")

    def no_sync(self, module: nn.Module) -> AbstractContextManager[None]:
        """Nothing: no gradients are exchanged."""
        return nullcontext()

    def backward(self, loss: torch.Tensor) -> None:
        """The backward pass."""
        loss.backward()

    def clip_grad_norm_(self, parameters: Iterable[nn.Parameter], max_norm: float) -> torch.Tensor:
        """Clips gradients, and returns their norm before."""
        return nn.utils.clip_grad_norm_(parameters, max_norm)

    def reduce(self, tensor: torch.Tensor, reduction: str) -> torch.Tensor:
        """The tensor as it is."""
        return tensor

    def wait_for_everyone(self) -> None:
        """Nothing: there is nobody to wait for."""

    def free_memory(self) -> None:
        """Nothing: nothing was prepared."""
