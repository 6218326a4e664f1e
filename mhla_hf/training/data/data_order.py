# SPDX-License-Identifier: Apache-2.0
"""Which samples each step sees: a pure function of the seed and the step, also where samples lie in buckets.

Without buckets an epoch is one permutation of the data set. With them every bucket has permutations of its own, read
one after another, and batches of all processes together take from one bucket: the turns of the buckets are drawn so
that each has its share of every epoch, as exactly as whole batches allow, and nothing is left out at its end.
"""

from __future__ import annotations

import bisect
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch


@dataclass(frozen=True, kw_only=True)
class DataOrder:
    """Which samples each (step, micro-step, rank) takes: a fresh permutation of the data set every epoch.

    Attributes:
        dataset_size: Number of samples.
        batch_size: Samples per process and micro-step.
        seed: Seed of the run.
        stage: Name of the stage; each has an order of its own.
        accumulation_steps: Micro-steps per step.
        world_size: Number of processes.
        rank: Number of this one.
        buckets: The bucket of every sample, from 0; None where all have one size.
    """

    dataset_size: int
    batch_size: int
    seed: int
    stage: str
    accumulation_steps: int = 1
    world_size: int = 1
    rank: int = 0
    buckets: Sequence[int] | None = None

    def sample_numbers(self, step: int, micro_step: int = 0) -> list[int]:
        """Running numbers of the samples of a micro-batch; `step` counts from 0."""
        first = ((step * self.accumulation_steps + micro_step) * self.world_size + self.rank) * self.batch_size
        return list(range(first, first + self.batch_size))

    def dataset_index(self, number: int) -> int:
        """Where in the data set a sample with this running number comes from."""
        if len(self._members) > 1:
            return self._index_in_bucket(number)
        epoch, position = divmod(number, self.dataset_size)
        return _permutation(self.dataset_size, self.seed, self.stage, epoch)[position]

    @cached_property
    def _members(self) -> list[list[int]]:
        """The samples of each bucket; of one bucket, it does not matter which."""
        if self.buckets is None:
            return []
        members: dict[int, list[int]] = {}
        for index, bucket in enumerate(self.buckets):
            members.setdefault(bucket, []).append(index)
        return [members[bucket] for bucket in sorted(members)]

    @cached_property
    def _remembered(self) -> dict[Any, list]:
        """Turns of an epoch and permutations of buckets."""
        return {}

    def _index_in_bucket(self, number: int) -> int:
        together = self.batch_size * self.world_size
        turn, position = divmod(number, together)
        bucket, batch = self._turn(turn)
        members = self._members[bucket]
        epoch, place = divmod(batch * together + position, len(members))
        if (bucket, epoch) not in self._remembered:
            self._remembered.pop((bucket, epoch - 2), None)
            name = f"{self.stage}/bucket {bucket}"
            generator = _generator(self.seed, name, epoch)
            self._remembered[bucket, epoch] = torch.randperm(len(members), generator=generator).tolist()
        return members[self._remembered[bucket, epoch][place]]

    def _turn(self, turn: int) -> tuple[int, int]:
        """The bucket whose turn it is, and how many batches it has had before."""
        together, most = self.batch_size * self.world_size, len(self._members)
        # After as many epochs each bucket has had all the whole batches that its samples make.
        last = (turn + most + 1) * together // self.dataset_size + 1
        epoch = bisect.bisect_right(range(last + 1), turn, key=lambda epoch: sum(self._batches(epoch))) - 1
        if epoch not in self._remembered:
            self._remembered.pop(epoch - 2, None)
            first, behind = self._batches(epoch), self._batches(epoch + 1)
            turns = [(bucket, batch) for bucket in range(most) for batch in range(first[bucket], behind[bucket])]
            generator = _generator(self.seed, f"{self.stage}/buckets", epoch)
            mixed = torch.randperm(len(turns), generator=generator).tolist()
            self._remembered[epoch] = [turns[place] for place in mixed]
        return self._remembered[epoch][turn - sum(self._batches(epoch))]

    def _batches(self, epochs: int) -> list[int]:
        """How many whole batches each bucket makes in so many epochs."""
        together = self.batch_size * self.world_size
        return [epochs * len(members) // together for members in self._members]


def first_of_buckets(dataset: Any) -> list[int]:
    """The first sample of every bucket of a data set; of one without buckets its first."""
    buckets = getattr(dataset, "buckets", None)
    if buckets is None:
        return [0]
    first: dict[int, int] = {}
    for index, bucket in enumerate(buckets):
        first.setdefault(bucket, index)
    return list(first.values())


def stable_seed(*parts: Any) -> int:
    """A 63-bit seed from plain values, the same on every machine and in every process."""
    digest = hashlib.sha256("/".join(str(part) for part in parts).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def _generator(seed: int, stage: str, epoch: int) -> torch.Generator:
    return torch.Generator().manual_seed(stable_seed(seed, stage, "order", epoch))


@lru_cache(maxsize=4)
def _permutation(size: int, seed: int, stage: str, epoch: int) -> list[int]:
    return torch.randperm(size, generator=_generator(seed, stage, epoch)).tolist()
