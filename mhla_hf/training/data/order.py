# SPDX-License-Identifier: Apache-2.0
"""Data order: samples, noise, noise levels and dropped conditions as a function of the seed and the step.

Every draw of a sample comes from a generator seeded by (seed, stage, running number of the sample), and the running
number follows from step, micro-step and process rank. Nothing depends on the history of a random generator, so a
resumed run sees what an uninterrupted one would have, and two models trained with one seed see the same data. The
running number does not depend on how samples are shared out, so neither do the draws: two processes with batch 2 see
what one process with batch 4 sees.

Without buckets an epoch is one permutation of the data set. With them each bucket has its own permutations,
read one after another, and the batches of all processes of a step come from one bucket. The order of the buckets is
drawn so that each gets its share of every epoch up to a batch, and no sample is left out.

Hashes identify data and weights, so that a run is not resumed with others.
"""

from __future__ import annotations

import bisect
import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open


# Larger files are sampled to identify them.
_READ_WHOLE = 4 * 2**20
_PIECE, _PIECES = 4096, 1024


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
    buckets = getattr(dataset, "buckets", None) or [0]
    return [buckets.index(bucket) for bucket in dict.fromkeys(buckets)]


def stable_seed(*parts: Any) -> int:
    """A 63-bit seed from plain values, the same on every machine and in every process."""
    digest = hashlib.sha256("/".join(str(part) for part in parts).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def file_fingerprint(path: Path) -> str:
    """Hash a file's size and its content; of large files only samples.

    Of each tensor of a large safetensors file the first, middle and last row are read: training changes every part of
    a tensor, so a few megabytes identify a text encoder of eleven gigabytes.
    """
    size = path.stat().st_size
    digest = hashlib.sha256(f"{size};".encode())
    if path.suffix == ".safetensors" and size > _READ_WHOLE:
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():
                    _add_rows(digest, name, file)
            return digest.hexdigest()[:16]
        except SafetensorError:  # Damaged: identified like any other file.
            pass
    with path.open("rb") as data:
        for begin in range(0, size, max(size // _PIECES, _PIECE) if size > _READ_WHOLE else _PIECE):
            data.seek(begin)
            digest.update(data.read(_PIECE))
    return digest.hexdigest()[:16]


def _add_rows(digest: Any, name: str, file: Any) -> None:
    part = file.get_slice(name)
    shape = part.get_shape()
    digest.update(f"{name}:{part.get_dtype()}{shape};".encode())
    for row in sorted({0, shape[0] // 2, shape[0] - 1}) if shape and shape[0] else ():
        add_tensor(digest, part[row : row + 1], samples=_PIECES)


def folder_fingerprint(folder: Path) -> str:
    """Hash the names and contents of a component's files; hidden ones do not count."""
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = path.relative_to(folder)
        if not any(part.startswith(".") for part in name.parts):
            digest.update(f"{name.as_posix()}:{file_fingerprint(path)};".encode())
    return digest.hexdigest()[:16]


def model_fingerprint(model: Any, without: Collection[str] = ()) -> str:
    """Hash the names, shapes and some values of a model's parameters.

    Args:
        model: Object with `named_parameters`.
        without: Names of parameters that do not count.
    """
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        if name not in without:
            digest.update(f"{name}:{tuple(parameter.shape)};".encode())
            # The shards of other processes cannot be read from one alone.
            if not hasattr(parameter, "device_mesh"):
                add_tensor(digest, parameter, samples=64)
    return digest.hexdigest()[:16]


def samples_fingerprint(dataset: Any, samples: int = 8) -> str:
    """Return the fingerprint that a data set has, or hash its size and some of its samples.

    Of tensors that differ each time they are read, as augmented ones do, the shapes alone count.

    Args:
        dataset: See `LatentSamples`; other values than tensors may be among them.
        samples: Number of samples to read.
    """
    if callable(fingerprint := getattr(dataset, "fingerprint", None)):
        return fingerprint()
    digest = hashlib.sha256(f"{len(dataset)};".encode())
    for index in evenly_spaced(range(len(dataset)), samples):
        again = dataset[index]
        for name, value in sorted(dataset[index].items()):
            if not isinstance(value, torch.Tensor):
                digest.update(f"{name}:{value!r:.100};".encode())
                continue
            digest.update(f"{name}:{tuple(value.shape)};".encode())
            if torch.equal(value, again[name]):
                add_tensor(digest, value, samples=1024)
    return digest.hexdigest()[:16]


def evenly_spaced(items: Sequence[Any], count: int) -> list[Any]:
    """Pick up to `count` evenly spaced items, including both ends."""
    if len(items) <= count:
        return list(items)
    return [items[round(number * (len(items) - 1) / (count - 1))] for number in range(count)]


def add_tensor(digest: Any, tensor: torch.Tensor, samples: int) -> None:
    """Add some values of a tensor to a hash."""
    values = tensor.detach().reshape(-1)
    chosen = values[:: max(1, len(values) // samples)]
    # `contiguous` leaves a stride of 0, of an expanded timestep, to a single value.
    dense = chosen.cpu().clone(memory_format=torch.contiguous_format)
    digest.update(dense.view(torch.uint8).numpy().tobytes())


@lru_cache(maxsize=4)
def _permutation(size: int, seed: int, stage: str, epoch: int) -> list[int]:
    generator = torch.Generator().manual_seed(stable_seed(seed, stage, "order", epoch))
    return torch.randperm(size, generator=generator).tolist()
