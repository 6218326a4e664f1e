# SPDX-License-Identifier: Apache-2.0
"""Data order and batches: samples, noise, noise levels and dropped conditions as a function of the seed and the step.

Every draw of a sample comes from a generator seeded by (seed, stage, running number of the sample), and the running
number follows from step, micro-step and process rank. Nothing depends on the history of a random generator, so a
resumed run sees what an uninterrupted one would have, and two models trained with one seed see the same data. The
running number does not depend on how samples are shared out, so neither do the draws: two processes with batch 2 see
what one process with batch 4 sees.

Without buckets an epoch is one permutation of the data set. With them each bucket has its own permutations,
read one after another, and the batches of all processes of a step come from one bucket. The order of the buckets is
drawn so that each gets its share of every epoch up to a batch, and no sample is left out.
"""

from __future__ import annotations

import bisect
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Any, Protocol

import torch
from accelerate.utils import send_to_device

from ..families import Objective, Tensors


@dataclass(frozen=True, kw_only=True)
class DataOrder:
    """Samples of each (step, micro-step, rank): a fresh permutation of the data set every epoch.

    Attributes:
        dataset_size: Number of samples.
        batch_size: Samples per process and micro-step.
        seed: Seed of the run.
        stage: Name of the stage; each has its own order.
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

    @property
    def global_batch_size(self) -> int:
        """Samples of all processes in a micro-step."""
        return self.batch_size * self.world_size

    def sample_numbers(self, step: int, micro_step: int = 0) -> list[int]:
        """Running numbers of the samples of a micro-batch; `step` counts from 0."""
        first = (step * self.accumulation_steps + micro_step) * self.global_batch_size + self.rank * self.batch_size
        return list(range(first, first + self.batch_size))

    def dataset_index(self, number: int) -> int:
        """Index in the data set of the sample with this running number."""
        if len(self._members) > 1:
            return self._index_in_bucket(number)
        epoch, position = divmod(number, self.dataset_size)
        return _permutation(self.dataset_size, self.seed, self.stage, epoch)[position]

    @cached_property
    def _members(self) -> list[list[int]]:
        """The samples of each bucket."""
        if self.buckets is None:
            return []
        members: dict[int, list[int]] = {}
        for index, bucket in enumerate(self.buckets):
            members.setdefault(bucket, []).append(index)
        return [members[bucket] for bucket in sorted(members)]

    @cached_property
    def _remembered(self) -> dict[tuple[str, int], list[int]]:
        return {}

    def _remember(self, name: str, size: int, epoch: int) -> list[int]:
        """Permutation of a bucket or of the turns of buckets; those of two epochs are kept."""
        if (name, epoch) not in self._remembered:
            self._remembered.pop((name, epoch - 2), None)
            self._remembered[name, epoch] = _permutation.__wrapped__(size, self.seed, name, epoch)
        return self._remembered[name, epoch]

    def _index_in_bucket(self, number: int) -> int:
        turn, position = divmod(number, self.global_batch_size)
        bucket, batch = self._turn(turn)
        members = self._members[bucket]
        epoch, place = divmod(batch * self.global_batch_size + position, len(members))
        return members[self._remember(f"{self.stage}/bucket {bucket}", len(members), epoch)[place]]

    def _turn(self, turn: int) -> tuple[int, int]:
        """The bucket whose turn it is, and how many batches it has had before."""
        # After this number of epochs each bucket has had all full batches that its samples fill.
        last = (turn + len(self._members) + 1) * self.global_batch_size // self.dataset_size + 1
        epoch = bisect.bisect_right(range(last + 1), turn, key=lambda epoch: sum(self._batches(epoch))) - 1
        first, end = self._batches(epoch), self._batches(epoch + 1)
        ends = list(accumulate(stop - start for start, stop in zip(first, end)))
        place = self._remember(f"{self.stage}/buckets", ends[-1], epoch)[turn - sum(first)]
        bucket = bisect.bisect_right(ends, place)
        return bucket, end[bucket] - (ends[bucket] - place)

    def _batches(self, epochs: int) -> list[int]:
        """Number of full batches of each bucket in a number of epochs."""
        return [epochs * len(members) // self.global_batch_size for members in self._members]


def first_of_buckets(dataset: Any) -> list[int]:
    """Return the first sample of every bucket of a data set, or its first where it has no buckets."""
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


@lru_cache(maxsize=4)
def _permutation(size: int, seed: int, stage: str, epoch: int) -> list[int]:
    generator = torch.Generator().manual_seed(stable_seed(seed, stage, "order", epoch))
    return torch.randperm(size, generator=generator).tolist()


class LatentSamples(Protocol):
    """A data set: a length, and samples of latents and their condition.

    Every sample has `latents`, `[C, F, H, W]` of videos and `[C, H, W]` of images, and what its family's objective
    names in `condition_names`: for Wan `prompt_embeds` `[L, D]`; for SANA `prompt_embeds` `[L, D]` and
    `prompt_attention_mask` `[L]`, 1 where there is text; for DiT `class_label` `[]`, int64.

    A data set may also have an attribute `null_condition`: the same tensors of a sample without caption or class,
    which replace those of some samples, for guidance. And one where samples differ in size, `buckets`:
    the number of each sample's bucket, from 0, whose samples all have one size.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]: ...


class TrainingBatch(Protocol):
    """A micro-batch as the training loop sees it.

    Attributes:
        indices: Where in the data set its samples come from, for messages.
    """

    @property
    def indices(self) -> tuple[int, ...]: ...

    def to(self, device: torch.device | str) -> Any:
        """The batch on another device."""


@dataclass(frozen=True)
class Batch:
    """One micro-batch.

    Attributes:
        latents: Clean latents `[B, C, ...]`, fp32.
        noise: Standard normal, same shape, fp32.
        levels: Noise levels `[B]`, as the objective draws them.
        condition: Captions or classes, each `[B, ...]`: fp32, or int64 for integers.
        indices: See `TrainingBatch`.
    """

    latents: torch.Tensor
    noise: torch.Tensor
    levels: torch.Tensor
    condition: dict[str, torch.Tensor]
    indices: tuple[int, ...] = ()

    def to(self, device: torch.device | str) -> Batch:
        """The batch on another device."""
        return Batch(**send_to_device(vars(self), device, non_blocking=True))


def make_batch(
    dataset: LatentSamples,
    order: DataOrder,
    step: int,
    micro_step: int,
    objective: Objective,
    condition_dropout: float = 0.0,
    null_condition: Tensors | None = None,
) -> Batch:
    """Build the micro-batch of (step, micro-step) of the process that `order` was made for.

    Args:
        dataset: The samples, of one size or in buckets.
        order: The data order.
        step: Optimizer step, from 0.
        micro_step: Micro-step within it, from 0.
        objective: Draws noise levels and names the condition.
        condition_dropout: Share of samples whose condition is replaced by `null_condition`.
        null_condition: See `LatentSamples`; needed for `condition_dropout`.

    Returns:
        The batch, on the CPU.
    """
    numbers = order.sample_numbers(step, micro_step)

    def uniform_of(generator: torch.Generator, _: int) -> torch.Tensor:
        return torch.rand((), generator=generator, dtype=torch.float64)

    return assemble_batch(
        dataset,
        [order.dataset_index(number) for number in numbers],
        [stable_seed(order.seed, order.stage, "sample", number) for number in numbers],
        uniform_of,
        objective,
        condition_dropout,
        null_condition,
    )


def assemble_batch(
    dataset: LatentSamples,
    indices: list[int],
    seeds: list[int],
    uniform_of: Callable[[torch.Generator, int], torch.Tensor],
    objective: Objective,
    condition_dropout: float = 0.0,
    null_condition: Tensors | None = None,
) -> Batch:
    """Build a batch of given samples, each with draws from its own seed; the rest as in `make_batch`.

    Args:
        indices: Indices into the data set.
        seeds: One seed per sample.
        uniform_of: Gives the uniform draw behind a sample's noise level from (generator, position in the batch).
    """
    latents, noise, uniform, conditions = [], [], [], []
    for position, (index, seed) in enumerate(zip(indices, seeds, strict=True)):
        sample = dataset[index]
        generator = torch.Generator().manual_seed(seed)
        uniform.append(uniform_of(generator, position))
        dropped = bool(torch.rand((), generator=generator) < condition_dropout)
        clean = _plain(sample["latents"])
        latents.append(clean)
        noise.append(torch.randn(clean.shape, generator=generator))
        conditions.append(null_condition if dropped and null_condition is not None else sample)
    return Batch(
        torch.stack(latents),
        torch.stack(noise),
        objective.noise_levels(torch.stack(uniform)),
        {
            name: torch.stack([_plain(condition[name]) for condition in conditions])
            for name in objective.condition_names
        },
        tuple(indices),
    )


def check_null_condition(condition_dropout: float, null_condition: Tensors | None) -> None:
    """Require a null condition when condition dropout is on.

    Raises:
        ValueError: If there is none.
    """
    if condition_dropout > 0 and null_condition is None:
        raise ValueError(
            "condition_dropout needs null_condition, what a sample without caption or class holds; or set it to 0"
        )


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    # Samples encoded without `no_grad` carry a graph.
    return (tensor.float() if tensor.is_floating_point() else tensor.long()).detach().cpu()
