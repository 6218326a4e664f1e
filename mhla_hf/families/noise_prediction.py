# SPDX-License-Identifier: Apache-2.0
"""Noise prediction as DiT is trained: pure functions of tensors.

A clean sample x_0 and noise eps give x_t = sqrt(abar_t) x_0 + sqrt(1 - abar_t) eps, and the model predicts eps (Ho et
al., "Denoising Diffusion Probabilistic Models", 2020). With twice as many output channels it also predicts the
variance of a denoising step, trained by the variational bound (Nichol and Dhariwal, "Improved Denoising Diffusion
Probabilistic Models", arXiv 2102.09672, whose L_hybrid this is).

Shapes: B batch, C channels, T diffusion steps; the axes after the channels are free.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from diffusers import DDPMScheduler
from diffusers.models.embeddings import LabelEmbedding


# The weight of the variational bound in L_hybrid is this times T, the number of terms that one drawn step stands for.
VARIATIONAL_BOUND_WEIGHT = 1e-3
# Half the distance of two grey levels of 8-bit images in [-1, 1].
_HALF_BIN = 1 / 255
_SMALLEST_PROBABILITY = 1e-12
# Entries of a scheduler's configuration, with the values that noise prediction needs.
_NOISE_PREDICTION = {"prediction_type": "epsilon", "use_flow_sigmas": False, "rescale_betas_zero_snr": False}


@dataclass(frozen=True)
class NoiseSchedule:
    """Noise of T diffusion steps; each tensor is `[T]`, fp32.

    Attributes:
        betas: Variance that a step adds.
        alphas_cumprod: abar_t, the share of the clean sample's variance that is left.
        posterior_clean: Weight of x_0 in the mean of q(x_{t-1} | x_t, x_0).
        posterior_noisy: Weight of x_t in it.
        posterior_variance: Variance of q(x_{t-1} | x_t, x_0); 0 at t = 0.
        posterior_log_variance: Its logarithm; at t = 0 that of t = 1, as Improved DDPM clips it.
    """

    betas: torch.Tensor
    alphas_cumprod: torch.Tensor
    posterior_clean: torch.Tensor
    posterior_noisy: torch.Tensor
    posterior_variance: torch.Tensor
    posterior_log_variance: torch.Tensor

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> NoiseSchedule:
        """Builds the schedule that a diffusers scheduler samples with.

        Args:
            config: The scheduler's `config`; any class that `DDPMScheduler` can be made from.

        Raises:
            ValueError: If the scheduler has no betas, is for another prediction than the noise, or ends at a signal of
                zero, where no noise can be predicted.
        """
        if "beta_schedule" not in config:
            name = config.get("_class_name", "this scheduler")
            raise ValueError(
                f"Noise prediction needs a scheduler with betas (DDPM, DDIM, DPMSolver); {name} has none."
            )
        for name, needed in _NOISE_PREDICTION.items():
            if (config.get(name) or needed) != needed:
                raise ValueError(f"{name}={config[name]!r} of the scheduler must be {needed!r} for noise prediction.")
        betas = DDPMScheduler.from_config(config).betas.double()
        alphas_cumprod = (1 - betas).cumprod(0)
        before = torch.cat([betas.new_ones(1), alphas_cumprod[:-1]])
        noise_share = 1 - alphas_cumprod
        posterior_variance = betas * (1 - before) / noise_share
        clipped = torch.cat([posterior_variance[1:2], posterior_variance[1:]])
        tensors = {
            "betas": betas,
            "alphas_cumprod": alphas_cumprod,
            "posterior_clean": betas * before.sqrt() / noise_share,
            "posterior_noisy": (1 - before) * (1 - betas).sqrt() / noise_share,
            "posterior_variance": posterior_variance,
            "posterior_log_variance": clipped.log(),
        }
        return cls(**{name: tensor.float() for name, tensor in tensors.items()})

    @property
    def num_timesteps(self) -> int:
        """T."""
        return len(self.betas)


def timesteps_from_uniform(uniform: torch.Tensor, schedule: NoiseSchedule) -> torch.Tensor:
    """Maps uniform draws in [0, 1) to timesteps 0 to T - 1, int64, same shape; every timestep is as likely."""
    return (uniform.double() * schedule.num_timesteps).long().clamp(0, schedule.num_timesteps - 1)


def add_noise(
    clean: torch.Tensor, noise: torch.Tensor, timesteps: torch.Tensor, schedule: NoiseSchedule
) -> torch.Tensor:
    """x_t = sqrt(abar_t) x_0 + sqrt(1 - abar_t) eps.

    Args:
        clean: x_0 `[B, C, ...]`.
        noise: eps, same shape.
        timesteps: `[B]`, int64, 0 to T - 1.
        schedule: The noise schedule.

    Returns:
        x_t, same shape and dtype as `clean`.
    """
    alphas_cumprod = _at(schedule.alphas_cumprod, timesteps, clean.ndim)
    return (alphas_cumprod.sqrt() * clean + (1 - alphas_cumprod).sqrt() * noise).to(clean.dtype)


def noise_prediction_losses(
    model_output: torch.Tensor,
    noise: torch.Tensor,
    noisy: torch.Tensor,
    clean: torch.Tensor,
    timesteps: torch.Tensor,
    schedule: NoiseSchedule,
) -> torch.Tensor:
    """L_simple of each sample, plus the weighted variational bound where the model predicts variances (L_hybrid).

    Args:
        model_output: `[B, C, ...]`, the predicted noise, or `[B, 2 C, ...]` with the variances after it.
        noise: eps `[B, C, ...]`.
        noisy: x_t, same shape.
        clean: x_0, same shape.
        timesteps: `[B]`, int64.
        schedule: The noise schedule.

    Returns:
        `[B]`, fp32. The bound's gradient reaches the predicted variances only.
    """
    losses = squared_errors(model_output, noise)
    if model_output.shape[1] == noise.shape[1]:
        return losses
    bound = variational_bounds(model_output, noisy, clean, timesteps, schedule)
    return losses + VARIATIONAL_BOUND_WEIGHT * schedule.num_timesteps * bound


def squared_errors(model_output: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """L_simple: the mean squared error of the predicted noise of each sample, `[B]`, fp32.

    Args:
        model_output: `[B, C, ...]` or `[B, 2 C, ...]`; channels after the first C are left out.
        noise: eps `[B, C, ...]`.
    """
    predicted = model_output[:, : noise.shape[1]]
    return (predicted.float() - noise.float()).square().flatten(1).mean(1)


def variational_bounds(
    model_output: torch.Tensor,
    noisy: torch.Tensor,
    clean: torch.Tensor,
    timesteps: torch.Tensor,
    schedule: NoiseSchedule,
) -> torch.Tensor:
    """The term L_t of the variational bound of each sample, in bits per dimension, `[B]`, fp32.

    It is the divergence of the model's p(x_{t-1} | x_t) from q(x_{t-1} | x_t, x_0), and at t = 0 the negative
    log-likelihood of x_0 as an image of 8 bits (DiT takes the same for latents). The predicted value v stands for the
    log-variance (v + 1) / 2 log beta_t + (1 - v) / 2 log of the posterior variance. The mean is not trained by it.

    Args:
        model_output: `[B, 2 C, ...]`.
        noisy: x_t `[B, C, ...]`.
        clean: x_0, same shape.
        timesteps: `[B]`, int64.
        schedule: The noise schedule.
    """
    noisy, clean = noisy.float(), clean.float()
    posterior_log_variance = _at(schedule.posterior_log_variance, timesteps, clean.ndim)
    mean, log_variance = _denoising_step(model_output, noisy, timesteps, schedule)
    true_mean = posterior_mean(clean, noisy, timesteps, schedule)
    divergence = normal_divergence(true_mean, posterior_log_variance, mean, log_variance)
    likelihood = _image_log_likelihood(clean, mean, log_variance)
    bounds = torch.where(timesteps == 0, -likelihood.flatten(1).mean(1), divergence.flatten(1).mean(1))
    return bounds / math.log(2)


def noise_distillation_losses(
    model_output: torch.Tensor,
    target: torch.Tensor,
    noisy: torch.Tensor,
    timesteps: torch.Tensor,
    schedule: NoiseSchedule,
) -> torch.Tensor:
    """Distance of a prediction to a teacher's: L_hybrid with the teacher in place of the data.

    It is the mean squared error of the noise and, where variances are predicted, the divergence of the model's
    p(x_{t-1} | x_t) from the teacher's in bits per dimension, with the weight that the bound has in L_hybrid. As
    there, the mean is trained by the first part alone. So a variance counts where a step's variance matters, which a
    squared error of the predicted values would not do.

    Args:
        model_output: `[B, C, ...]` or `[B, 2 C, ...]`.
        target: The teacher's, same shape.
        noisy: x_t `[B, C, ...]`.
        timesteps: `[B]`, int64.
        schedule: The noise schedule.

    Returns:
        `[B]`, fp32.
    """
    channels = noisy.shape[1]
    losses = squared_errors(model_output, target[:, :channels])
    if model_output.shape[1] == channels:
        return losses
    own, teachers = (_denoising_step(output, noisy.float(), timesteps, schedule) for output in (model_output, target))
    divergence = normal_divergence(*teachers, *own)
    bits = divergence.flatten(1).mean(1) / math.log(2)
    return losses + VARIATIONAL_BOUND_WEIGHT * schedule.num_timesteps * bits


def normal_divergence(
    mean: torch.Tensor, log_variance: torch.Tensor, other_mean: torch.Tensor, other_log_variance: torch.Tensor
) -> torch.Tensor:
    """Kullback-Leibler divergence of a second normal distribution from a first one, in nats; shapes broadcast."""
    return 0.5 * (
        other_log_variance
        - log_variance
        - 1
        + (log_variance - other_log_variance).exp()
        + (mean - other_mean).square() * (-other_log_variance).exp()
    )


def posterior_mean(
    clean: torch.Tensor, noisy: torch.Tensor, timesteps: torch.Tensor, schedule: NoiseSchedule
) -> torch.Tensor:
    """Compute the mean of q(x_{t-1} | x_t, x_0) for x_0 and x_t `[B, C, ...]`, same shape; at t = 0 it is x_0."""
    clean_weight = _at(schedule.posterior_clean, timesteps, clean.ndim)
    return clean_weight * clean + _at(schedule.posterior_noisy, timesteps, clean.ndim) * noisy


@contextmanager
def no_label_dropout(model: torch.nn.Module) -> Iterator[None]:
    """Switch off the label dropout of a class-conditional model.

    diffusers' DiT embeds the label in every block, and in training mode each of these embeddings drops labels at
    random: some blocks of a sample then see its class and some do not, and no seed of a sample decides which.
    Training drops labels before the model sees them.

    Args:
        model: A model with diffusers' `LabelEmbedding`s; a model without them is left alone.
    """
    embeddings = [module for module in model.modules() if isinstance(module, LabelEmbedding)]
    probabilities = [embedding.dropout_prob for embedding in embeddings]
    try:
        for embedding in embeddings:
            embedding.dropout_prob = 0.0
        yield
    finally:
        for embedding, probability in zip(embeddings, probabilities):
            embedding.dropout_prob = probability


def _at(values: torch.Tensor, timesteps: torch.Tensor, ndim: int) -> torch.Tensor:
    """Values `[T]` at timesteps `[B]`, with axes of length 1 up to `ndim`."""
    return values.to(timesteps.device)[timesteps].reshape(-1, *[1] * (ndim - 1))


def _denoising_step(
    model_output: torch.Tensor, noisy: torch.Tensor, timesteps: torch.Tensor, schedule: NoiseSchedule
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and log-variance of p(x_{t-1} | x_t) for an output `[B, 2 C, ...]`; the mean has no gradient."""
    noise, interpolation = model_output.float().chunk(2, dim=1)
    alphas_cumprod = _at(schedule.alphas_cumprod, timesteps, noisy.ndim)
    clean = (noisy - (1 - alphas_cumprod).sqrt() * noise.detach()) / alphas_cumprod.sqrt()
    posterior = _at(schedule.posterior_log_variance, timesteps, interpolation.ndim)
    share = (interpolation + 1) / 2
    log_variance = share * _at(schedule.betas, timesteps, interpolation.ndim).log() + (1 - share) * posterior
    return posterior_mean(clean, noisy, timesteps, schedule), log_variance


def _image_log_likelihood(clean: torch.Tensor, mean: torch.Tensor, log_variance: torch.Tensor) -> torch.Tensor:
    """Log-probability of each pixel's grey level under a normal distribution; black and white take the tails."""
    inverse_deviation = (-0.5 * log_variance).exp()
    below = torch.special.ndtr((clean - _HALF_BIN - mean) * inverse_deviation)
    above = torch.special.ndtr((clean + _HALF_BIN - mean) * inverse_deviation)
    below = torch.where(clean < -0.999, torch.zeros_like(below), below)
    above = torch.where(clean > 0.999, torch.ones_like(above), above)
    return (above - below).clamp(min=_SMALLEST_PROBABILITY).log()
