# SPDX-License-Identifier: Apache-2.0
"""Flow matching, data order, options and learning rates: pure functions."""

import json
import math

import pytest
import torch

from mhla_hf.families.objectives import (
    add_noise,
    flow_matching_target,
    shift_sigmas,
    timesteps_from_sigmas,
    unshift_sigmas,
)
from mhla_hf.training import TrainingConfig, WanObjective
from mhla_hf.training.data.batches import make_batch
from mhla_hf.training.data.order import DataOrder
from mhla_hf.training.evaluation import evaluation_batches
from mhla_hf.training.parameters import learning_rate_factor


def samples(count: int = 7, channels: int = 2) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        {
            "latents": torch.randn(channels, 2, 4, 4, generator=generator),
            "prompt_embeds": torch.randn(3, 5, generator=generator),
        }
        for _ in range(count)
    ]


def test_noise_joins_data_and_noise_by_a_straight_line():
    latents, noise = torch.randn(2, 3, 2, 4, 4), torch.randn(2, 3, 2, 4, 4)
    assert torch.equal(add_noise(latents, noise, torch.tensor([0.0, 1.0]))[0], latents[0])
    assert torch.equal(add_noise(latents, noise, torch.tensor([0.0, 1.0]))[1], noise[1])
    step = 1e-3
    sigmas = torch.tensor([0.3, 0.6], dtype=torch.float64)
    latents, noise = latents.double(), noise.double()
    derivative = (add_noise(latents, noise, sigmas + step) - add_noise(latents, noise, sigmas)) / step
    assert torch.allclose(derivative, flow_matching_target(latents, noise), atol=1e-6)


@pytest.mark.parametrize("shift", [0.5, 1.0, 3.0, 5.0])
def test_shift_is_that_of_the_schedulers_and_invertible(shift):
    from diffusers import FlowMatchEulerDiscreteScheduler

    scheduler = FlowMatchEulerDiscreteScheduler(num_train_timesteps=1000, shift=shift)
    plain = torch.arange(1000, 0, -1) / 1000
    assert torch.allclose(shift_sigmas(plain, shift), scheduler.sigmas[:1000], atol=1e-6)
    assert torch.allclose(unshift_sigmas(shift_sigmas(plain, shift), shift), plain, atol=1e-6)
    assert torch.equal(timesteps_from_sigmas(torch.tensor([0.25])), torch.tensor([250.0]))


def test_every_epoch_sees_every_sample_once():
    order = DataOrder(dataset_size=7, batch_size=2, seed=3, stage="finetune")
    numbers = [number for step in range(14) for number in order.sample_numbers(step)]
    assert numbers == list(range(28))
    epochs = [[order.dataset_index(number) for number in numbers[first : first + 7]] for first in range(0, 28, 7)]
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs)
    assert epochs[0] != epochs[1]


def test_batches_do_not_depend_on_how_they_are_shared_out():
    data, objective = samples(), WanObjective(flow_shift=3.0)
    dropping = {"condition_dropout": 0.5, "null_condition": {"prompt_embeds": torch.zeros(3, 5)}}
    shared = {"dataset_size": 7, "seed": 0, "stage": "finetune"}
    whole = make_batch(data, DataOrder(batch_size=8, **shared), 2, 0, objective, **dropping)
    parts = [
        make_batch(
            data,
            DataOrder(batch_size=2, accumulation_steps=2, world_size=2, rank=rank, **shared),
            2,
            micro_step,
            objective,
            **dropping,
        )
        for micro_step in range(2)
        for rank in range(2)
    ]
    for name in ("latents", "noise", "levels"):
        assert torch.equal(getattr(whole, name), torch.cat([getattr(part, name) for part in parts])), name
    prompts = [part.condition["prompt_embeds"] for part in parts]
    assert torch.equal(whole.condition["prompt_embeds"], torch.cat(prompts))


def test_batches_ignore_the_global_random_state_and_follow_the_seed():
    data, order = samples(), DataOrder(dataset_size=7, batch_size=2, seed=0, stage="finetune")
    torch.manual_seed(1)
    first = make_batch(data, order, 5, 0, WanObjective())
    state = torch.get_rng_state()
    torch.manual_seed(2)
    again = make_batch(data, order, 5, 0, WanObjective())
    assert torch.equal(first.noise, again.noise) and torch.equal(first.levels, again.levels)
    torch.manual_seed(1)
    assert torch.equal(torch.get_rng_state(), state)
    other = DataOrder(dataset_size=7, batch_size=2, seed=0, stage="distill")
    assert not torch.equal(first.noise, make_batch(data, other, 5, 0, WanObjective()).noise)


def test_evaluation_draws_are_stratified_and_fixed():
    batches = evaluation_batches(samples(), WanObjective(), batch_size=4, draws_per_sample=3, seed=1)
    sigmas = torch.cat([batch.levels for batch in batches]).double()
    assert len(sigmas) == 21
    quantiles = torch.special.ndtr(torch.logit(sigmas)).sort().values
    assert ((quantiles * 21).floor() == torch.arange(21)).all()
    again = evaluation_batches(samples(), WanObjective(), batch_size=21, draws_per_sample=3, seed=1)
    assert torch.equal(again[0].levels.double(), sigmas)
    with pytest.raises(ValueError, match="empty"):
        evaluation_batches([], WanObjective())


def test_learning_rate_schedules():
    def factors(schedule):
        return [learning_rate_factor(step, schedule=schedule, warmup_steps=4, total_steps=12) for step in range(12)]

    assert factors("constant") == [0.25, 0.5, 0.75] + [1.0] * 9
    assert factors("linear")[4] == 1 and factors("linear")[8] == 0.5
    assert factors("cosine")[8] == pytest.approx(0.5)
    assert learning_rate_factor(20, schedule="cosine", warmup_steps=4, total_steps=12) == pytest.approx(0)
    # A warm-up over all steps ends at the peak.
    assert learning_rate_factor(3, schedule="linear", warmup_steps=4, total_steps=4) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"train": "some"}, "train='some' is not one of 'mhla', 'lora', 'full'"),
        ({"learning_rate": math.nan}, "learning_rate must be a finite number"),
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"gradient_checkpointing": "yes"}, "gradient_checkpointing must be true or false"),
        ({"max_steps": 0}, "nothing to train"),
        ({"mhla": "none", "train": "mhla"}, "mhla='none' converts nothing"),
        ({"transfer_steps": 3}, "transfer_steps is no option of training any more: .*mhla-hf recover"),
        ({"mhla": "{"}, "mhla is not valid JSON"),
        ({"mhla": "there-is-no-such-file"}, "mhla must be a JSON object"),
        ({"validation_prompts": (3,)}, "validation_prompts must be texts"),
    ],
    ids=lambda value: value.split()[0] if isinstance(value, str) else next(iter(value)),
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        TrainingConfig(**options)


def test_options_survive_json(tmp_path):
    path = tmp_path / "mhla.json"
    path.write_text('{"blocks": [1, 2, 2]}')
    config = TrainingConfig(mhla=str(path), validation_prompts="a three", output=tmp_path, distill_steps=2)
    assert config.mhla == {"blocks": [1, 2, 2]} and config.validation_prompts == ("a three",)
    stored = json.loads(json.dumps(config.to_dict()))
    assert TrainingConfig.from_dict(stored) == config
    assert config.replace(seed=4).seed == 4
    with pytest.raises(ValueError, match="Unknown TrainingConfig option stepz"):
        TrainingConfig.from_dict({"stepz": 1})
    with pytest.raises(ValueError, match="transfer_cache is no option of training .*mhla_hf.recover"):
        TrainingConfig.from_dict({"transfer_cache": "none"})
