# SPDX-License-Identifier: Apache-2.0
"""Training of one model, its held-out loss and its samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler

from conversion.digits.muon import Muon
from mhla_hf.training.data.batches import stable_seed
from mhla_hf.training.optimization import learning_rate_factor, set_learning_rate
from mhla_hf.training.stages.flow_matching import flow_matching_losses, timesteps_from_sigmas, unshift_sigmas
from mhla_hf.training.stages.noise_prediction import own_class_dropping_off

from .data import EVALUATION_BATCH, NUM_CLASSES, Digits, NoisyBatch, held_out_batches, training_batch
from .options import QualityOptions


# Gradients of norms above this are scaled down to it.
GRADIENT_CLIP = 1.0
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
    optimizers = make_optimizers(model, options)
    losses: list[torch.Tensor] = []
    model.train()
    with own_class_dropping_off(model):
        for step in range(options.steps):
            factor = learning_rate_factor(
                step, schedule="cosine", warmup_steps=options.warmup_steps, total_steps=options.steps
            )
            for optimizer in optimizers:
                set_learning_rate(optimizer, factor)
            batch = training_batch(digits, options, seed, step).to(model.device)
            loss = batch_losses(model, batch, options).mean()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), GRADIENT_CLIP)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            losses.append(loss.detach())
            advance(1)
    model.eval()
    values = torch.stack(losses).tolist()
    if not torch.tensor(values).isfinite().all():
        raise FloatingPointError(f"The loss of {type(model).__name__} with seed {seed} is no longer finite.")
    return values


def make_optimizers(model: Any, options: QualityOptions) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the transformer blocks, AdamW for the rest and for all that MHLA adds.

    With AdamW alone, digits take several times as many steps to become recognisable.
    """
    matrices: list[torch.nn.Parameter] = []
    others: list[torch.nn.Parameter] = []
    for name, parameter in model.transformer_blocks.named_parameters():
        hidden = parameter.ndim == 2 and ".mhla." not in name and "embedding_table" not in name
        (matrices if hidden else others).append(parameter)
    others += [parameter for name, parameter in model.named_parameters() if not name.startswith("transformer_blocks.")]
    return [
        Muon([{"params": matrices, "peak_lr": options.matrix_learning_rate}], weight_decay=0.0),
        torch.optim.AdamW([{"params": others, "peak_lr": options.learning_rate}], weight_decay=0.0),
    ]


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
