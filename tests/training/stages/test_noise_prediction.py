# SPDX-License-Identifier: Apache-2.0
"""Noise prediction: the schedule against diffusers' own scheduler, the losses against their definition."""

import math

import pytest
import torch
from diffusers import (
    DDIMScheduler,
    DDPMScheduler,
    DPMSolverMultistepScheduler,
    FlowMatchEulerDiscreteScheduler,
)

from mhla_hf.families.noise_prediction import (
    NoiseSchedule,
    add_noise,
    noise_prediction_losses,
    posterior_mean,
    variational_bounds,
)


def schedule(**options) -> NoiseSchedule:
    return NoiseSchedule.from_config(DDPMScheduler(**options).config)


def batch(count: int = 4, channels: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    clean = torch.rand(count, channels, 8, 8, generator=generator) * 2 - 1
    return clean, torch.randn(clean.shape, generator=generator)


def perfect_output(noise: torch.Tensor, interpolation: float) -> torch.Tensor:
    return torch.cat([noise, torch.full_like(noise, interpolation)], dim=1)


@pytest.mark.parametrize(("scheduler", "beta_schedule"), [(DDPMScheduler, "linear"), (DDIMScheduler, "scaled_linear")])
def test_noise_is_added_as_the_schedulers_add_it(scheduler, beta_schedule):
    scheduler = scheduler(beta_schedule=beta_schedule)
    clean, noise = batch()
    timesteps = torch.tensor([0, 3, 500, 999])
    ours = add_noise(clean, noise, timesteps, NoiseSchedule.from_config(scheduler.config))
    assert torch.allclose(ours, scheduler.add_noise(clean, noise, timesteps), atol=1e-5)


@pytest.mark.parametrize("timestep", [1, 500])
def test_the_posterior_is_that_of_ddpm(timestep):
    scheduler = DDPMScheduler(variance_type="fixed_small", clip_sample=False)
    ours = NoiseSchedule.from_config(scheduler.config)
    assert ours.posterior_variance[timestep] == pytest.approx(float(scheduler._get_variance(timestep)), rel=1e-3)
    clean, noise = batch()
    timesteps = torch.full((4,), timestep)
    noisy = add_noise(clean, noise, timesteps, ours)
    # A deterministic generator, so that the scheduler's own noise can be taken off again.
    stepped = scheduler.step(noise, timestep, noisy, generator=torch.Generator().manual_seed(1)).prev_sample
    drawn = torch.randn(noise.shape, generator=torch.Generator().manual_seed(1))
    mean = stepped - scheduler._get_variance(timestep).sqrt() * drawn
    # The scheduler's float32 rounds 1 - abar, which is small at the first steps.
    assert torch.allclose(posterior_mean(clean, noisy, timesteps, ours), mean, atol=1e-3 if timestep < 10 else 2e-5)


@pytest.mark.parametrize("interpolation", [-1.0, 0.5])
@pytest.mark.parametrize("timestep", [1, 500])
def test_the_learned_variance_is_that_of_ddpm(timestep, interpolation):
    """With the right mean the divergence of two normal distributions depends on the ratio of variances alone."""
    scheduler = DDPMScheduler(variance_type="learned_range")
    ours = NoiseSchedule.from_config(scheduler.config)
    clean, noise = batch(2)
    timesteps = torch.full((2,), timestep)
    noisy = add_noise(clean.double(), noise.double(), timesteps, ours)
    bounds = variational_bounds(perfect_output(noise, interpolation), noisy, clean, timesteps, ours)
    predicted = torch.tensor(interpolation)
    log_ratio = float(scheduler._get_variance(timestep, predicted_variance=predicted)) - math.log(
        float(scheduler._get_variance(timestep, variance_type="fixed_small"))
    )
    expected = 0.5 * (log_ratio - 1 + math.exp(-log_ratio)) / math.log(2)
    assert torch.allclose(bounds, torch.full((2,), expected), atol=2e-4, rtol=2e-3)


@pytest.mark.parametrize("level", [-1.0, 0.6])
def test_the_last_step_is_the_likelihood_of_a_grey_level(level):
    ours = schedule()
    pixel = round((level + 1) / 2 * 255) / 255 * 2 - 1
    clean, noise = torch.full((1, 1, 2, 2), pixel), torch.randn(1, 1, 2, 2)
    zero = torch.zeros(1, dtype=torch.long)
    noisy = add_noise(clean, noise, zero, ours)
    bound = variational_bounds(perfect_output(noise, -1.0), noisy, clean, zero, ours)
    half = 1 / 255 * math.exp(-0.5 * float(ours.posterior_log_variance[0]))
    inside = math.erf(half / math.sqrt(2))
    probability = inside if abs(pixel) < 0.999 else (1 + inside) / 2
    assert float(bound) == pytest.approx(-math.log2(probability), rel=1e-2, abs=1e-3)


@pytest.mark.parametrize("timestep", [0, 500])
def test_the_bound_trains_the_variances_alone(timestep):
    ours = schedule()
    clean, noise = batch(2)
    timesteps = torch.full((2,), timestep)
    noisy = add_noise(clean, noise, timesteps, ours)
    output = torch.cat([noise + 0.1, torch.zeros_like(noise)], dim=1).requires_grad_()
    variational_bounds(output, noisy, clean, timesteps, ours).sum().backward()
    assert output.grad[:, :3].abs().max() == 0
    assert output.grad[:, 3:].abs().max() > 0
    assert output.grad.isfinite().all()

    full = output.detach().clone().requires_grad_()
    noise_prediction_losses(full, noise, noisy, clean, timesteps, ours).sum().backward()
    assert torch.allclose(full.grad[:, :3], torch.full_like(noise, 0.2 / noise[0].numel()), rtol=1e-4)
    # T = 1000 terms of weight 1e-3.
    assert torch.allclose(full.grad[:, 3:], output.grad[:, 3:])


@pytest.mark.parametrize(
    ("config", "match"),
    [
        (DDPMScheduler(prediction_type="v_prediction").config, "prediction_type='v_prediction'"),
        (DDIMScheduler(rescale_betas_zero_snr=True).config, "rescale_betas_zero_snr"),
        (DPMSolverMultistepScheduler(use_flow_sigmas=True).config, "use_flow_sigmas"),
        (FlowMatchEulerDiscreteScheduler().config, "needs a scheduler with betas"),
    ],
    ids=["velocity", "zero signal", "flow sigmas", "flow matching"],
)
def test_schedulers_of_other_predictions_are_refused(config, match):
    with pytest.raises(ValueError, match=match):
        NoiseSchedule.from_config(config)
