# SPDX-License-Identifier: Apache-2.0
"""Matching of blocks: what they get and aim at, and that a run that was stopped goes on."""

import copy
from contextlib import suppress

import pytest
import torch

import mhla_hf
from mhla_hf.training import TrainingConfig
from mhla_hf.training.matching import blocks as module
from mhla_hf.training.matching.blocks import blocks_with_mhla, match_blocks
from mhla_hf.training.matching.layers import evaluating, first_output, trunk_for
from mhla_hf.training.matching.teacher import SharedTeacher
from tests.integrations.transformers.mhla_models import default_options
from tests.layers.test_original import DIFFUSERS, models


CONFIG = TrainingConfig(max_steps=1, learning_rate=1e-3, lr_schedule="cosine", adam_beta2=0.99, weight_decay=0.0)
NAMES = ["wan", "dit", "llama", "bert", "vit"]


def converted(name):
    softmax, _, batch = models(name)
    options = DIFFUSERS[name]().options if name in DIFFUSERS else default_options(name)
    model = mhla_hf.convert(softmax, {**options, "feature_map": "hedgehog", "rope": "before_feature_map"}).eval()
    teacher = SharedTeacher(model)
    teacher.keep()
    return model, teacher, batch


@pytest.mark.parametrize("name", NAMES)
def test_calls_are_those_of_the_model(name):
    """Computed alone, a block gives what it gives in the model, and the last one what the model gives."""
    model, teacher, batch = converted(name)
    with torch.no_grad(), evaluating(model):
        found = blocks_with_mhla(model, batch)
        expected = first_output(trunk_for(model, batch), batch, padding=True)
        original = teacher.compute(lambda model: first_output(trunk_for(model, batch), batch, padding=True))
        calls = [block.record(batch, teacher, torch.float32) for block in found]
        for block, call, following in zip(found, calls, calls[1:]):
            output = block(call.arguments, call.hidden_states)
            torch.testing.assert_close(output, following.hidden_states, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(found[-1](calls[-1].arguments, calls[-1].hidden_states), expected)
        torch.testing.assert_close(calls[-1].output, original)
    assert not torch.allclose(expected, original, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", NAMES)
def test_only_blocks_learn(name, tmp_path):
    model, teacher, batch = converted(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    found = [block.name for block in blocks_with_mhla(model, batch)]
    steps = [0] * (len(found) - 1) + [8]
    report = match_blocks(
        model, lambda number: batch, num_batches=2, steps=steps, teacher=teacher, config=CONFIG, output=tmp_path
    )
    assert list(report) == found[-1:] and report[found[-1]]["last_tenth"] < report[found[-1]]["first"]
    changed = {key for key, value in model.state_dict().items() if not torch.equal(value, before[key])}
    assert changed and all(key.startswith(f"{found[-1]}.") for key in changed)
    assert not model.training and all(parameter.requires_grad for parameter in model.parameters())


def matched(output, stop=None):
    """The weights after a run, which was stopped at a step and begun again, and the number of steps taken."""
    model, teacher, batch = converted("bert")
    start, seen = copy.deepcopy(model.state_dict()), []

    def progress(name, step, loss):
        seen.append(name)
        if len(seen) == stop:
            raise KeyboardInterrupt

    arguments = {"num_batches": 2, "steps": [0, 3, 4], "teacher": teacher, "config": CONFIG, "output": output}
    for _ in range(1 if stop is None else 2):
        model.load_state_dict(start)
        with suppress(KeyboardInterrupt):
            match_blocks(model, lambda _: batch, progress=progress, **arguments)
    return dict(model.state_dict()), len(seen)


def test_a_stopped_run_repeats_its_block(tmp_path):
    whole, steps = matched(tmp_path / "whole")
    parts, more = matched(tmp_path / "parts", stop=5)
    assert (steps, more) == (7, 9)
    assert all(torch.equal(parts[name], value) for name, value in whole.items())


def test_other_models_are_refused(monkeypatch):
    model, _, batch = converted("bert")
    monkeypatch.setattr(module, "mhla_layers", lambda model: [type("Layer", (), {"name": "attention"})()])
    with pytest.raises(ValueError, match="attention is in no list of blocks"):
        blocks_with_mhla(model, batch)
