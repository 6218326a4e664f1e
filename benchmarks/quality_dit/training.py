# SPDX-License-Identifier: Apache-2.0
"""Training of one model, its held-out loss and its samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler

from mhla_hf.families.noise_prediction import no_label_dropout
from mhla_hf.families.objectives import flow_matching_losses, timesteps_from_sigmas, unshift_sigmas
from mhla_hf.training.data.order import stable_seed

from ..optimization import descend, follow_cosine, make_optimizers
from .data import EVALUATION_BATCH, NUM_CLASSES, Digits, NoisyBatch, held_out_batches, training_batch
from .options import QualityOptions


QUARTERS = 4


def train(
    model: Any, digits: Digits, options: QualityOptions, seed: int, advance: Callable[[int], None]
) -> list[float]:
    """Trains a model in place.

    Args:
        model: A DiT, on the device to train on.
        digits: Training split.
        options: Steps, batches and learning rate.
        seed: Seed of the order of the images and of the noise.
        advance: Called with 1 after each step.

    Returns:
        The loss of every step.

    Raises:
        FloatingPointError: If the loss is not finite.
    """
    optimizers = make_optimizers(model, matrix_rate=options.matrix_learning_rate, other_rate=options.learning_rate)
    losses: list[torch.Tensor] = []
    model.train()
    with no_label_dropout(model):
        for step in range(options.steps):
            follow_cosine(optimizers, step, warmup_steps=options.warmup_steps, steps=options.steps)
            batch = training_batch(digits, options, seed, step).to(model.device)
            loss = batch_losses(model, batch, options).mean()
            descend(model, optimizers, loss)
            losses.append(loss.detach())
            advance(1)
    model.eval()
    values = torch.stack(losses).tolist()
    if not torch.tensor(values).isfinite().all():
        raise FloatingPointError(f"The loss of {type(model).__name__} with seed {seed} is no longer finite.")
    return values


def batch_losses(model: Any, batch: NoisyBatch, options: QualityOptions) -> torch.Tensor:
    """Mean squared error of the predicted direction from image to noise, for each image, `[B]`, fp32."""
    prediction = _predict(model, batch.noisy, batch.sigmas, batch.labels, options)
    return flow_matching_losses(prediction, batch.clean, batch.noise)


@torch.no_grad()
def held_out_losses(model: Any, digits: Digits, options: QualityOptions) -> dict[str, Any]:
    """Loss on held-out images, over all noise levels and over each quarter of their draws, little noise first.

    Returns:
        `held_out_loss`, a number, and `held_out_loss_by_quarter`, a list of four.
    """
    losses, uniform = [], []
    for batch in held_out_batches(digits, options):
        losses.append(batch_losses(model, batch.to(model.device), options).cpu())
        uniform.append(unshift_sigmas(batch.sigmas, options.flow_shift))
    loss, quarter = torch.cat(losses), (torch.cat(uniform) * QUARTERS).long()
    return {
        "held_out_loss": loss.mean().item(),
        "held_out_loss_by_quarter": [loss[quarter == number].mean().item() for number in range(QUARTERS)],
    }


@torch.no_grad()
def sample(
    model: Any, labels: torch.Tensor, options: QualityOptions, *, guidance_scale: float = 1.0, name: str = "samples"
) -> torch.Tensor:
    """Samples images by Euler steps; the initial noise is the same for every model.

    Args:
        model: A trained model.
        labels: Their classes `[N]`.
        options: Number of steps.
        guidance_scale: 1 for none.
        name: Other names give other initial noise.

    Returns:
        `[N, 1, S, S]` in [-1, 1], on the CPU.
    """
    generator = torch.Generator().manual_seed(stable_seed("quality", name))
    noise = torch.randn(len(labels), 1, options.image_size, options.image_size, generator=generator)
    batches = []
    for start, classes in zip(noise.split(EVALUATION_BATCH), labels.split(EVALUATION_BATCH)):
        batches.append(_sample_batch(model, start.to(model.device), classes.to(model.device), options, guidance_scale))
    return torch.cat(batches).cpu().clamp(-1, 1)


def _sample_batch(
    model: Any, images: torch.Tensor, labels: torch.Tensor, options: QualityOptions, guidance_scale: float
) -> torch.Tensor:
    scheduler = FlowMatchEulerDiscreteScheduler(shift=options.flow_shift)
    scheduler.set_timesteps(options.sampling_steps, device=images.device)
    guided = guidance_scale > 1
    classes = torch.cat([labels, torch.full_like(labels, NUM_CLASSES)]) if guided else labels
    for timestep, sigma in zip(scheduler.timesteps, scheduler.sigmas):
        inputs = torch.cat([images, images]) if guided else images
        velocity = _predict(model, inputs, sigma.expand(len(inputs)), classes, options)
        if guided:
            with_class, without = velocity.chunk(2)
            velocity = without + guidance_scale * (with_class - without)
        images = scheduler.step(velocity, timestep, images).prev_sample
    return images


def _predict(
    model: Any, noisy: torch.Tensor, sigmas: torch.Tensor, labels: torch.Tensor, options: QualityOptions
) -> torch.Tensor:
    dtype = getattr(torch, options.dtype)
    with torch.autocast(noisy.device.type, dtype, enabled=dtype != torch.float32):
        prediction = model(noisy, timestep=timesteps_from_sigmas(sigmas), class_labels=labels, return_dict=False)[0]
    return prediction.float()
