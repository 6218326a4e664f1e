# SPDX-License-Identifier: Apache-2.0
"""Matching of blocks: what they get and aim at, and that a run that was stopped goes on."""

import copy
from contextlib import suppress
from functools import partial

import pytest
import torch

import mhla_hf
from mhla_hf.matching import blockwise as module
from mhla_hf.matching.blockwise import list_blocks, match_blocks
from mhla_hf.training.layers import evaluating, first_output, mhla_layers, trunk_for
from mhla_hf.training.teacher import SharedTeacher
from tests.families.cases import FluxCase, HunyuanVideoCase, LTX2Case, WanVACECase
from tests.integrations.transformers.mhla_models import default_options
from tests.layers.test_original import DIFFUSERS, models


SETTINGS = {"learning_rate": 1e-3, "mhla_learning_rate": 1e-3, "warmup_steps": 0}
# What else goes from block to block: control hints, the audio, the text in both orders.
STREAMS = {"vace": WanVACECase(), "ltx2": LTX2Case(), "flux": FluxCase(), "hunyuan-video": HunyuanVideoCase()}
NAMES = ["wan", "dit", "llama", "bert", "vit", *STREAMS]


def converted(name):
    if name in STREAMS:
        case = STREAMS[name]
        softmax, options, batch = case.make(), case.options, case.inputs(2, batch=2)
    else:
        softmax, _, batch = models(name)
        options = DIFFUSERS[name]().options if name in DIFFUSERS else default_options(name)
    model = mhla_hf.convert(softmax, {**options, "feature_map": "hedgehog", "rope": "before_feature_map"}).eval()
    teacher = SharedTeacher(model)
    teacher.keep()
    return model, teacher, batch


@pytest.mark.parametrize("name", NAMES)
def test_blocks_one_by_one_are_the_model(name):
    """Hidden states that are carried from block to block end as the outputs of the model and of its original."""
    model, teacher, batch = converted(name)
    with torch.no_grad(), evaluating(model):
        blocks = list_blocks(model, batch)
        expected = first_output(trunk_for(model, batch), batch, padding=True)
        original = teacher.compute(lambda model: first_output(trunk_for(model, batch), batch, padding=True))
        records = module._Records.start(blocks, [3], {3: batch}.__getitem__, model, teacher)
        for index, block in enumerate(blocks):
            teacher.compute(lambda _: records.advance(block, index, records.original))  # noqa: B023
            records.advance(block, index, records.student)
    torch.testing.assert_close(records.student[3], expected)
    torch.testing.assert_close(records.original[3], original)
    assert not torch.allclose(expected, original, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", NAMES)
def test_only_blocks_learn(name, tmp_path):
    model, teacher, batch = converted(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    found = [block.name for block in list_blocks(model, batch) if block.mhla is not None]
    steps = [0] * len(mhla_layers(model))
    steps[len(found) - 1] = 8
    report = match_blocks(
        model, lambda number: batch, num_batches=2, steps=steps, teacher=teacher, output=tmp_path, **SETTINGS
    )
    assert list(report) == found[-1:] and report[found[-1]]["last_tenth"] < report[found[-1]]["first"]
    changed = {key for key, value in model.state_dict().items() if not torch.equal(value, before[key])}
    assert changed and all(key.startswith(f"{found[-1]}.") for key in changed)
    assert not model.training and all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("rate", [1e-3, 3.0])
def test_a_block_keeps_what_it_learned_only_where_its_held_out_error_falls(rate, tmp_path):
    """The next block gets what the one before gives it with the weights that it ends with."""
    model, teacher, batch = converted("bert")
    other = {name: value.flip(0) for name, value in batch.items()}
    before = copy.deepcopy(model.state_dict())
    settings = {**SETTINGS, "learning_rate": rate, "mhla_learning_rate": rate}
    arguments = {"num_batches": 3, "held_out": 1, "steps": [4, 0, 4], "teacher": teacher, "output": tmp_path}
    data = [batch, batch, other]
    report = match_blocks(model, data.__getitem__, **arguments, **settings)
    after = copy.deepcopy(model.state_dict())
    for name, figures in report.items():
        changed = {key for key in after if key.startswith(f"{name}.") and not torch.equal(after[key], before[key])}
        assert bool(changed) == (figures["held_out_after"] < figures["held_out_before"]) == (rate < 1)
    output = partial(first_output, trunk_for(model, other), other, padding=True)
    with torch.no_grad():
        target = teacher.compute(lambda _: output())
        error = (output() - target).square().mean() / target.var(unbiased=False)
    # The last block is compared at the model's output.
    expected = figures["held_out_after" if rate < 1 else "held_out_before"]
    assert error.item() == pytest.approx(expected, rel=1e-4)
    model.load_state_dict(before)
    again = match_blocks(model, data.__getitem__, progress=lambda *_: pytest.fail("a step"), **arguments, **settings)
    assert again == report and all(torch.equal(value, after[key]) for key, value in model.state_dict().items())


def matched(output, stop=None):
    """The weights after a run, which was stopped at a step and begun again, and the number of steps taken."""
    model, teacher, batch = converted("bert")
    start, seen = copy.deepcopy(model.state_dict()), []

    def progress(name, step, loss):
        seen.append(name)
        if len(seen) == stop:
            raise KeyboardInterrupt

    arguments = {"num_batches": 2, "steps": [0, 3, 4], "teacher": teacher, "output": output, **SETTINGS}
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
    monkeypatch.setattr(
        module, "mhla_layers", lambda model: [type("Layer", (), {"name": "attention", "mhla": None})()]
    )
    with pytest.raises(ValueError, match="attention: not in one list of blocks"):
        list_blocks(model, batch)


def test_blocks_that_depend_on_more_than_hidden_states_are_refused(monkeypatch):
    model, _, batch = converted("llama")
    # A model whose blocks get the sum of all that was before, as with skip connections.
    layers, total = list(model.model.layers), []
    for layer in layers[:-1]:
        layer.register_forward_hook(lambda module, args, output: total.append(output))
    norm = layers[-1].input_layernorm
    norm.register_forward_hook(lambda module, args, output: output + sum(total[-len(layers) + 1 :]) * len(total))
    with pytest.raises(ValueError, match="hand on more than hidden states"):
        match_blocks(
            model, lambda _: batch, num_batches=1, steps=[0] * (len(layers) - 1) + [1], teacher=SharedTeacher(model),
            output=None, **SETTINGS,
        )  # fmt: skip
