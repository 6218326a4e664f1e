# SPDX-License-Identifier: Apache-2.0
"""Flow matching as Wan and SANA are trained: pure functions of tensors.

A clean latent x_0 and noise eps are joined by a straight line, x_t = (1 - sigma) x_0 + sigma eps, and the model
predicts its direction eps - x_0 (Lipman et al., "Flow Matching for Generative Modeling", 2023). Noise levels are
logit-normal (Esser et al., "Scaling Rectified Flow Transformers", 2024), then shifted as the sampler shifts them.

Shapes: B batch, C channels, then F frames (videos only), H height and W width of latents.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


NUM_TRAIN_TIMESTEPS = 1000


def shift_sigmas(sigmas: torch.Tensor, flow_shift: float) -> torch.Tensor:
    """Shift noise levels towards 1: s sigma / (1 + (s - 1) sigma), as diffusers' flow schedulers do.

    Args:
        sigmas: Noise levels in [0, 1], any shape.
        flow_shift: s; 1 changes nothing, Wan uses 3 at 480p and 5 at 720p.

    Returns:
        Shifted noise levels, same shape and dtype.
    """
    return flow_shift * sigmas / (1 + (flow_shift - 1) * sigmas)


def unshift_sigmas(sigmas: torch.Tensor, flow_shift: float) -> torch.Tensor:
    """Invert `shift_sigmas`."""
    return shift_sigmas(sigmas, 1.0 / flow_shift)


def sigmas_from_uniform(
    uniform: torch.Tensor,
    *,
    logit_mean: float = 0.0,
    logit_std: float = 1.0,
    flow_shift: float = 1.0,
    sigma_range: tuple[float, float] = (0.0, 1.0),
) -> torch.Tensor:
    """Map uniform draws to shifted logit-normal noise levels by the inverse distribution function.

    Working from uniform draws makes stratified draws, and draws conditioned on a range, exact.

    Args:
        uniform: Draws in [0, 1), any shape; float64 is best.
        logit_mean: Mean of logit(sigma) before the shift.
        logit_std: Standard deviation of logit(sigma) before the shift, above 0.
        flow_shift: See `shift_sigmas`.
        sigma_range: The draws are conditioned on the shifted noise level lying here; Wan 2.2's two transformers are
            trained on [boundary, 1] and [0, boundary].

    Returns:
        Noise levels, fp32, same shape as `uniform`.

    Raises:
        ValueError: If `sigma_range` is not an increasing pair within [0, 1].
    """
    low, high = sigma_range
    if not 0 <= low < high <= 1:
        raise ValueError(f"sigma_range must be an increasing pair within [0, 1], got {sigma_range}")
    # Rounding can push a bound of 1 past 1, where the logit is not defined.
    bounds = unshift_sigmas(torch.tensor([low, high], dtype=torch.float64), flow_shift).clamp(0, 1)
    quantiles = torch.special.ndtr((torch.logit(bounds) - logit_mean) / logit_std).tolist()
    # A draw of exactly 0 would map to minus infinity.
    position = uniform.double().clamp(1e-12, 1 - 1e-12) * (quantiles[1] - quantiles[0]) + quantiles[0]
    sigmas = torch.sigmoid(logit_mean + logit_std * torch.special.ndtri(position))
    return shift_sigmas(sigmas, flow_shift).clamp(low, high).float()


def sample_sigmas(
    batch_size: int,
    *,
    generator: torch.Generator | None = None,
    logit_mean: float = 0.0,
    logit_std: float = 1.0,
    flow_shift: float = 1.0,
    sigma_range: tuple[float, float] = (0.0, 1.0),
) -> torch.Tensor:
    """Draw noise levels; see `sigmas_from_uniform` for the arguments.

    Returns:
        Noise levels `[B]`, fp32, on the CPU.
    """
    uniform = torch.rand(batch_size, generator=generator, dtype=torch.float64)
    return sigmas_from_uniform(
        uniform, logit_mean=logit_mean, logit_std=logit_std, flow_shift=flow_shift, sigma_range=sigma_range
    )


def add_noise(latents: torch.Tensor, noise: torch.Tensor, sigmas: torch.Tensor) -> torch.Tensor:
    """x_t = (1 - sigma) x_0 + sigma eps.

    Args:
        latents: Clean latents x_0 `[B, C, ...]`.
        noise: eps, same shape.
        sigmas: Noise levels `[B]`.

    Returns:
        x_t, same shape and dtype as `latents`.

    Raises:
        ValueError: If the shapes do not fit.
    """
    if noise.shape != latents.shape or sigmas.shape != latents.shape[:1]:
        raise ValueError(
            f"noise must have the shape of latents, {tuple(latents.shape)}, and sigmas its first axis; got "
            f"{tuple(noise.shape)} and {tuple(sigmas.shape)}"
        )
    sigmas = sigmas.to(latents).reshape(-1, *[1] * (latents.ndim - 1))
    return (1 - sigmas) * latents + sigmas * noise


def flow_matching_target(latents: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """Target of the model: eps - x_0, the direction from data to noise."""
    return noise - latents


def timesteps_from_sigmas(sigmas: torch.Tensor) -> torch.Tensor:
    """Timesteps as the flow schedulers of diffusers count them: 1000 sigma, same shape, fp32."""
    return sigmas.float() * NUM_TRAIN_TIMESTEPS


def flow_matching_losses(prediction: torch.Tensor, latents: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """Mean squared error of each sample `[B]`, in fp32."""
    error = prediction.float() - flow_matching_target(latents, noise).float()
    return error.square().flatten(1).mean(1)


def flow_matching_loss(prediction: torch.Tensor, latents: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """Mean squared error between the prediction and eps - x_0, a scalar in fp32.

    Args:
        prediction: Model output `[B, C, ...]`.
        latents: Clean latents x_0, same shape.
        noise: eps, same shape.
    """
    return F.mse_loss(prediction.float(), flow_matching_target(latents, noise).float())
