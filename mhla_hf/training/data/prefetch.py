# SPDX-License-Identifier: Apache-2.0
"""Building the next micro-batch while the accelerator works on this one."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from .batches import TrainingBatch


class Prefetcher:
    """Hands out micro-batches; a context manager.

    Args:
        make: Builds the batch of (step, micro-step); a pure function.
        micro_steps: Micro-steps per step.
        steps: Steps of the stage.
        ahead: Build the next batch in a thread meanwhile.
    """

    def __init__(
        self, make: Callable[[int, int], TrainingBatch], *, micro_steps: int, steps: int, ahead: bool
    ) -> None:
        self.make = make
        self.micro_steps = micro_steps
        self.steps = steps
        self.pool = ThreadPoolExecutor(max_workers=1) if ahead else None
        self.pending: tuple[tuple[int, int], Future[TrainingBatch]] | None = None

    def __enter__(self) -> Prefetcher:
        return self

    def __exit__(self, *_: object) -> None:
        if self.pool is not None:
            self.pool.shutdown(wait=True, cancel_futures=True)

    def __call__(self, step: int, micro_step: int) -> TrainingBatch:
        """The batch of (step, micro-step)."""
        if self.pool is None:
            return self.make(step, micro_step)
        if self.pending is not None and self.pending[0] == (step, micro_step):
            batch = self.pending[1].result()
        else:
            batch = self.make(step, micro_step)
        following = divmod(step * self.micro_steps + micro_step + 1, self.micro_steps)
        self.pending = None
        if following[0] < self.steps:
            self.pending = (following, self.pool.submit(self.make, *following))
        return batch
