# SPDX-License-Identifier: Apache-2.0
"""Several processes that share out layers, stop together, and have the same weights in the end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import distributed

from ..stopping import TrainingStopped


Key = TypeVar("Key")


class Processes:
    """The processes of `torch.distributed`, or this one alone.

    Attributes:
        rank: Number of this process.
        size: How many there are.
    """

    def __init__(self) -> None:
        self._joined = distributed.is_available() and distributed.is_initialized()
        self.rank = distributed.get_rank() if self._joined else 0
        self.size = distributed.get_world_size() if self._joined else 1

    def owner(self, number: int) -> int:
        """The process that the layer of a number belongs to."""
        return number % self.size

    def share_of(self, items: Sequence[Key]) -> list[Key]:
        """What of some items belongs to this process."""
        return list(items[self.rank :: self.size])

    def any(self, value: bool) -> bool:
        """Whether it is so in one of the processes."""
        return any(self.all(value))

    def gather(self, mine: dict[str, Any]) -> dict[str, Any]:
        """The entries of all processes."""
        return {name: value for entries in self.all(mine) for name, value in entries.items()}

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
        if self.size == 1:
            if error is not None:
                raise error
            return
        number = error.exit_code - 128 if isinstance(error, TrainingStopped) else 0
        states = self.all(None if error is None else (str(error), number))
        if error is not None:
            raise error
        for rank, state in enumerate(states):
            if state is not None and state[1]:
                raise TrainingStopped("", state[1])
            if state is not None:
                raise RuntimeError(f"process {rank} has failed: {state[0]}")

    def all(self, value: Any) -> list[Any]:
        """The values of all processes."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        distributed.all_gather_object(values, value)
        return values
