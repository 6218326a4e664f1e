# SPDX-License-Identifier: Apache-2.0
"""Batches: latents with noise and noise levels, and the sources of data that recoveries read.

Every draw of a sample comes from a generator seeded by (seed, stage, running number of the sample), see
`mhla_hf.training.data.order`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Protocol, cast

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten, treespec_dumps, treespec_loads
from torch.utils.data import Subset

from ...families.objectives import LatentBatch, Objective, Tensors
from ...utils.files import atomic_file
from ..layers import Batch
from .order import DataOrder, samples_fingerprint, stable_seed


# At most this share of the samples is held out.
_HELD_OUT_SHARE = 5
# Noise draws of held-out latents in all, and of each sample at most.
_DRAWS, _MOST_DRAWS = 96, 16


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


def make_batch(
    dataset: LatentSamples,
    order: DataOrder,
    step: int,
    micro_step: int,
    objective: Objective,
    condition_dropout: float = 0.0,
    null_condition: Tensors | None = None,
) -> LatentBatch:
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
    draws = [
        (order.dataset_index(number), stable_seed(order.seed, order.stage, "sample", number), 0)
        for number in order.sample_numbers(step, micro_step)
    ]
    return _assemble(dataset, draws, objective, condition_dropout, null_condition)


def _assemble(
    dataset: LatentSamples,
    draws: Sequence[tuple[int, int, int]],
    objective: Objective,
    condition_dropout: float = 0.0,
    null_condition: Tensors | None = None,
    strata: int = 1,
) -> LatentBatch:
    """Build a batch of given samples; other arguments as in `make_batch`.

    Args:
        draws: Index, seed and stratum of each sample.
        strata: Number of equal parts of [0, 1); the uniform draw behind a noise level lies in the sample's own.
    """
    latents, noise, uniform, conditions = [], [], [], []
    for index, seed, stratum in draws:
        sample = dataset[index]
        generator = torch.Generator().manual_seed(seed)
        uniform.append((stratum + torch.rand((), generator=generator, dtype=torch.float64)) / strata)
        dropped = bool(torch.rand((), generator=generator) < condition_dropout)
        clean = _plain(sample["latents"])
        latents.append(clean)
        noise.append(torch.randn(clean.shape, generator=generator))
        conditions.append(null_condition if dropped and null_condition is not None else sample)
    return LatentBatch(
        torch.stack(latents),
        torch.stack(noise),
        objective.noise_levels(torch.stack(uniform)),
        {name: torch.stack([_plain(each[name]) for each in conditions]) for name in objective.condition_names},
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


def evaluation_batches(
    dataset: LatentSamples,
    objective: Objective,
    *,
    seed: int = 0,
    batch_size: int = 8,
    draws_per_sample: int = 1,
    max_samples: int | None = None,
) -> list[LatentBatch]:
    """Fixed batches to evaluate on: a pure function of the arguments.

    Noise levels are stratified: the draws together cover the distribution evenly, which leaves the mean loss far
    less noisy than independent draws. Captions and classes are never dropped.

    Args:
        dataset: Held-out samples.
        objective: Draws the noise levels.
        seed: Seed of noise and noise levels.
        batch_size: Samples per batch.
        draws_per_sample: Noise draws of each sample.
        max_samples: Use the first samples only.

    Raises:
        ValueError: If there is no sample.
    """
    count = len(dataset) if max_samples is None else min(len(dataset), max_samples)
    if count < 1:
        raise ValueError("the data set to evaluate on is empty")
    total = count * draws_per_sample
    generator = torch.Generator().manual_seed(stable_seed(seed, "evaluation", "strata"))
    strata = torch.randperm(total, generator=generator).tolist()
    buckets = getattr(dataset, "buckets", None) or [0] * count
    by_bucket: dict[int, list[int]] = {}
    for number in range(total):
        by_bucket.setdefault(buckets[number % count], []).append(number)
    draws = [
        [(number % count, stable_seed(seed, "evaluation", number), strata[number]) for number in numbers]
        for members in by_bucket.values()
        for numbers in chunks(members, batch_size)
    ]
    return [_assemble(dataset, part, objective, strata=total) for part in draws]


class BatchSource:
    """Samples of one data set, in batches.

    Args:
        seed: Seed of their order.
        fingerprint: Hash that identifies the samples.
        indices: Indices of the samples to train on.
        held_out_indices: Indices of the others.

    Attributes:
        kind: Kind of the data, for `describe`.
        facts: Further entries of `describe`.
    """

    kind: ClassVar[str]

    def __init__(
        self, seed: int, fingerprint: str, indices: Sequence[int] = (), held_out_indices: Sequence[int] = ()
    ) -> None:
        self.seed, self.fingerprint = seed, fingerprint
        self.indices, self.held_out_indices = indices, held_out_indices
        self.facts: dict[str, Any] = {}

    def __len__(self) -> int:
        """Number of samples to train on."""
        return len(self.indices)

    def batch(self, stage: str, step: int, batch_size: int, rank: int = 0, world_size: int = 1) -> Batch:
        """Return the batch of a step, on the CPU; a pure function of the seed and the arguments.

        Args:
            stage: Name of the stage; the order depends on it.
            step: From 0.
            batch_size: Samples of this process.
            rank: Number of this process.
            world_size: Number of processes.
        """
        return self._make(self.batch_indices(stage, step, batch_size, rank, world_size))

    def batch_indices(
        self, stage: str, step: int, batch_size: int, rank: int = 0, world_size: int = 1
    ) -> Sequence[int]:
        """Return the indices of the samples in the batch of these arguments."""
        order = self._order(stage, batch_size, rank, world_size)
        return [self.indices[order.dataset_index(number)] for number in order.sample_numbers(step)]

    def held_out(self, batch_size: int) -> list[Batch]:
        """Return all held-out samples, always in the same batches."""
        return [self._make(part) for part in chunks(self.held_out_indices, batch_size)]

    def describe(self) -> dict[str, Any]:
        """Describe the data as plain JSON values."""
        return {"kind": self.kind, "samples": len(self), "held_out": len(self.held_out_indices), **self.facts}

    def batches(self, stage: str, count: int, batch_size: int) -> list[Batch]:
        """Return the first batches of a stage."""
        return [self.batch(stage, step, batch_size) for step in range(count)]

    _make: Callable[[Sequence[int]], Batch]
    """Makes a batch of some samples, where `batch` and `held_out` do not make theirs otherwise."""

    def _order(self, stage: str, batch_size: int, rank: int = 0, world_size: int = 1) -> DataOrder:
        order = DataOrder(dataset_size=len(self), batch_size=batch_size, seed=self.seed, stage=stage)
        return replace(order, rank=rank, world_size=world_size)


class Latents(BatchSource):
    """Noisy latents with their conditions, as a diffusion model's objective hands them to it.

    Args:
        dataset: The samples, of a cache for instance; some of them are held out.
        objective: Draws noise levels, adds noise and knows the arguments of `forward`.
        model: The transformer; its configuration alone counts, and the type of its weights.
        held_out: Most samples to hold out, or a data set of such.
        seed: Seed of their order, of noise and noise levels.
        condition_dropout: Share of samples that lose their caption or class, where the data set has `null_condition`.
        draws: Noise draws of each held-out sample that quality is measured on; by default enough to make 96,
            and 16 of a sample at most.
    """

    kind = "latents"

    def __init__(
        self,
        dataset: LatentSamples,
        objective: Objective,
        model: nn.Module,
        held_out: int | LatentSamples,
        seed: int = 0,
        condition_dropout: float = 0.1,
        draws: int | None = None,
    ) -> None:
        self.null_condition = getattr(dataset, "null_condition", None)
        objective.check_data(model, dataset[0], self.null_condition)
        self.objective, self.model = objective, model
        self.condition_dropout = condition_dropout if self.null_condition is not None else 0.0
        self.samples: LatentSamples
        self.held_out_samples: LatentSamples
        if isinstance(held_out, int):
            parts = drawn_held_out(len(dataset), held_out)
            self.samples, self.held_out_samples = (Subset(cast(Any, dataset), part) for part in parts)
        else:
            self.samples, self.held_out_samples = dataset, held_out
        indices = range(len(self.samples)), range(len(self.held_out_samples))
        super().__init__(seed, samples_fingerprint(dataset), *indices)
        self.draws = draws or min(_MOST_DRAWS, math.ceil(_DRAWS / len(self.held_out_samples)))
        self.facts = {"shape": list(self.samples[0]["latents"].shape), "draws": self.draws}

    def batch(self, stage: str, step: int, batch_size: int, rank: int = 0, world_size: int = 1) -> Batch:
        order = self._order(stage, batch_size, rank, world_size)
        dropping = (self.condition_dropout, self.null_condition)
        return self.inputs(make_batch(self.samples, order, step, 0, self.objective, *dropping))

    def held_out(self, batch_size: int) -> list[Batch]:
        """Held-out samples with noise levels that cover their distribution evenly."""
        return [self.inputs(batch) for batch in self.held_out_latents(batch_size)]

    def held_out_latents(self, batch_size: int, draws: int = 1) -> list[LatentBatch]:
        """The held-out samples before noise is added.

        Args:
            batch_size: Batch size.
            draws: Noise draws of each sample.
        """
        return evaluation_batches(self.held_out_samples, self.objective, batch_size=batch_size, draws_per_sample=draws)

    def inputs(self, batch: LatentBatch) -> Batch:
        """Return the arguments of the model's `forward` for a batch."""
        return self.objective.inputs_of(self.model, batch, cast(Any, self.model).dtype)


class RecordedCalls(BatchSource):
    """Recorded calls of a diffusion model while its pipeline generated samples; a batch is always one call.

    Args:
        calls: Keyword arguments of the model's `forward`, of all calls.
        held_out: Most calls to hold out; the last ones.
        fingerprint: Tells what they were recorded of. Their values differ a little from device to device.
        seed: Seed of their order.
    """

    kind = "calls of the pipeline's model"

    def __init__(self, calls: Sequence[Batch], held_out: int, fingerprint: str, seed: int = 0) -> None:
        super().__init__(seed, fingerprint, *last_held_out(len(calls), held_out))
        self.calls = calls

    def batch_indices(
        self, stage: str, step: int, batch_size: int, rank: int = 0, world_size: int = 1
    ) -> Sequence[int]:
        return super().batch_indices(stage, step, 1, rank, world_size)

    def held_out(self, batch_size: int) -> list[Batch]:
        return super().held_out(1)

    def _make(self, indices: Sequence[int]) -> Batch:
        return self.calls[indices[0]]

    def save(self, path: Path) -> None:
        """Write the calls to a safetensors file, for `load_calls`."""
        leaves, spec = tree_flatten(list(self.calls))
        tensors = {
            str(number): leaf.contiguous() for number, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)
        }
        values = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        with atomic_file(path) as temporary:
            save_file(tensors, temporary, {"spec": treespec_dumps(spec), "values": json.dumps(values)})


def load_calls(path: Path) -> list[Batch]:
    """Read the calls that `RecordedCalls.save` wrote."""
    with safe_open(path, framework="pt") as file:
        leaves, spec = json.loads(file.metadata()["values"]), treespec_loads(file.metadata()["spec"])
        for name in file.keys():
            leaves[int(name)] = file.get_tensor(name)
    return tree_unflatten(leaves, spec)


def _held_out(count: int, wanted: int) -> int:
    """Number of samples to hold out: at least one, and at least one remains for training.

    Raises:
        ValueError: If there are fewer than two.
    """
    if count < 2:
        raise ValueError(f"data: at least 2 samples are needed, of which one is held out, got {count}")
    return max(1, min(wanted, count // _HELD_OUT_SHARE))


def last_held_out(count: int, wanted: int) -> tuple[Sequence[int], Sequence[int]]:
    """Indices of the samples to train on, and of the last ones, which are held out."""
    first = count - _held_out(count, wanted)
    return range(first), range(first, count)


def drawn_held_out(count: int, wanted: int) -> tuple[Sequence[int], Sequence[int]]:
    """Indices of the samples to train on, in a drawn order, and of those held out, from all over the data set."""
    # By a fixed draw: data sets are often in the order of names or classes, and files may be anywhere.
    shuffled = torch.randperm(count, generator=torch.Generator().manual_seed(0)).tolist()
    first = _held_out(count, wanted)
    return shuffled[first:], shuffled[:first]


def chunks(indices: Sequence[int], size: int) -> list[Sequence[int]]:
    return [indices[start : start + size] for start in range(0, len(indices), size)]


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    # Samples encoded without `no_grad` carry a graph.
    return (tensor.float() if tensor.is_floating_point() else tensor.long()).detach().cpu()
