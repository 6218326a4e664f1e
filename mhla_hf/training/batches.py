# SPDX-License-Identifier: Apache-2.0
"""Which videos, noise, noise levels and dropped captions each step sees: a pure function of the seed and the step.

Every draw of a sample comes from a generator seeded by (seed, stage, running number of the sample), and the running
number follows from step, micro-step and process rank. Nothing depends on the history of a random generator, so a
resumed run sees what an uninterrupted one would have, and two models trained with one seed see the same data. The
running number does not depend on how samples are shared out, so neither do the draws: two processes with batch 2 see
what one process with batch 4 sees.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import torch

from .flow_matching import add_noise, sigmas_from_uniform


class LatentSamples(Protocol):
    """What a data set must offer: a length, and samples `{"latents": [C, F, H, W], "prompt_embeds": [L, D]}`."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]: ...


@dataclass(frozen=True, kw_only=True)
class NoiseOptions:
    """Distribution of noise levels and dropped captions; see `flow_matching.sigmas_from_uniform`."""

    logit_mean: float = 0.0
    logit_std: float = 1.0
    flow_shift: float = 1.0
    sigma_range: tuple[float, float] = (0.0, 1.0)
    text_dropout: float = 0.0

    def sigmas(self, uniform: torch.Tensor) -> torch.Tensor:
        """Noise levels from uniform draws, same shape."""
        return sigmas_from_uniform(
            uniform,
            logit_mean=self.logit_mean,
            logit_std=self.logit_std,
            flow_shift=self.flow_shift,
            sigma_range=self.sigma_range,
        )


@dataclass(frozen=True)
class FlowBatch:
    """One micro-batch: latents and noise `[B, C, F, H, W]`, sigmas `[B]`, prompt_embeds `[B, L, D]`, all fp32."""

    latents: torch.Tensor
    noise: torch.Tensor
    sigmas: torch.Tensor
    prompt_embeds: torch.Tensor

    def to(self, device: torch.device | str) -> FlowBatch:
        """The batch on another device."""
        return FlowBatch(
            *(
                tensor.to(device, non_blocking=True)
                for tensor in (self.latents, self.noise, self.sigmas, self.prompt_embeds)
            )
        )

    @property
    def noisy_latents(self) -> torch.Tensor:
        """x_t `[B, C, F, H, W]`."""
        return add_noise(self.latents, self.noise, self.sigmas)


@dataclass(frozen=True, kw_only=True)
class DataOrder:
    """Which samples each (step, micro-step, rank) takes: a fresh permutation of the data set every epoch."""

    dataset_size: int
    batch_size: int
    seed: int
    stage: str
    accumulation_steps: int = 1
    world_size: int = 1
    rank: int = 0

    def sample_numbers(self, step: int, micro_step: int = 0) -> list[int]:
        """Running numbers of the samples of a micro-batch; `step` counts from 0."""
        first = ((step * self.accumulation_steps + micro_step) * self.world_size + self.rank) * self.batch_size
        return list(range(first, first + self.batch_size))

    def dataset_index(self, number: int) -> int:
        """Where in the data set a sample with this running number comes from."""
        epoch, position = divmod(number, self.dataset_size)
        return _permutation(self.dataset_size, self.seed, self.stage, epoch)[position]


def stable_seed(*parts: Any) -> int:
    """A 63-bit seed from plain values, the same on every machine and in every process."""
    digest = hashlib.sha256("/".join(str(part) for part in parts).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


@lru_cache(maxsize=4)
def _permutation(size: int, seed: int, stage: str, epoch: int) -> list[int]:
    generator = torch.Generator().manual_seed(stable_seed(seed, stage, "order", epoch))
    return torch.randperm(size, generator=generator).tolist()


def make_batch(
    dataset: LatentSamples,
    order: DataOrder,
    step: int,
    micro_step: int,
    noise_options: NoiseOptions,
    null_prompt_embeds: torch.Tensor | None = None,
) -> FlowBatch:
    """Builds the micro-batch of (step, micro-step) of the process that `order` was made for.

    Args:
        dataset: Samples `{"latents": [C, F, H, W], "prompt_embeds": [L, D]}`, all of one size.
        order: The data order.
        step: Optimizer step, from 0.
        micro_step: Micro-step within it, from 0.
        noise_options: Distribution of noise levels and dropped captions.
        null_prompt_embeds: Embeddings of the empty prompt `[L, D]`; needed when captions are dropped.

    Returns:
        The batch, on the CPU, in fp32.

    Raises:
        ValueError: If samples differ in size, or captions are to be dropped without `null_prompt_embeds`.
    """
    numbers = order.sample_numbers(step, micro_step)

    def uniform_of(generator: torch.Generator, _: int) -> torch.Tensor:
        return torch.rand((), generator=generator, dtype=torch.float64)

    return assemble_batch(
        dataset,
        [order.dataset_index(number) for number in numbers],
        [stable_seed(order.seed, order.stage, "sample", number) for number in numbers],
        uniform_of,
        noise_options,
        null_prompt_embeds,
    )


def assemble_batch(
    dataset: LatentSamples,
    indices: list[int],
    seeds: list[int],
    uniform_of: Callable[[torch.Generator, int], torch.Tensor],
    noise_options: NoiseOptions,
    null_prompt_embeds: torch.Tensor | None = None,
) -> FlowBatch:
    """Builds a batch of given samples, each with draws from its own seed.

    Args:
        dataset: See `make_batch`.
        indices: Indices into the data set.
        seeds: One seed per sample.
        uniform_of: Gives the uniform draw behind a sample's noise level from (generator, position in the batch).
        noise_options: Distribution of noise levels and dropped captions.
        null_prompt_embeds: See `make_batch`.

    Returns:
        The batch, on the CPU, in fp32.

    Raises:
        ValueError: See `make_batch`.
    """
    if noise_options.text_dropout > 0 and null_prompt_embeds is None:
        raise ValueError("text_dropout needs null_prompt_embeds, the embeddings of the empty prompt; or set it to 0")
    latents, noise, uniform, prompts = [], [], [], []
    for position, (index, seed) in enumerate(zip(indices, seeds, strict=True)):
        sample = dataset[index]
        generator = torch.Generator().manual_seed(seed)
        uniform.append(uniform_of(generator, position))
        dropped = bool(torch.rand((), generator=generator) < noise_options.text_dropout)
        clean = sample["latents"].float().cpu()
        latents.append(clean)
        noise.append(torch.randn(clean.shape, generator=generator))
        prompt = null_prompt_embeds if dropped and null_prompt_embeds is not None else sample["prompt_embeds"]
        prompts.append(prompt.float().cpu())
    return FlowBatch(
        _stack("latents", latents),
        _stack("latents", noise),
        noise_options.sigmas(torch.stack(uniform)),
        _stack("prompt_embeds", prompts),
    )


def _stack(name: str, tensors: list[torch.Tensor]) -> torch.Tensor:
    shapes = {tuple(tensor.shape) for tensor in tensors}
    if len(shapes) > 1:
        raise ValueError(f"{name} of one batch must have one shape, got {sorted(shapes)}")
    return torch.stack(tensors)
