# SPDX-License-Identifier: Apache-2.0
"""Attention of any model on a probe: matrices are those that the layers compute, and recording changes nothing."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from transformers import Trainer, TrainingArguments

import mhla_hf
from mhla_hf.analysis import (
    AttentionTracker,
    TrackingCallback,
    attention_matrices,
    attention_statistics,
)
from mhla_hf.analysis.tracking import attention_modules
from mhla_hf.training.layers import mhla_layers, run
from tests.families.cases import DiTCase, PixArtCase, WanCase
from tests.integrations.transformers.mhla_models import default_options
from tests.integrations.transformers.tiny_models import inputs, names, softmax_model


DIFFUSERS = {"wan": WanCase, "dit": DiTCase, "pixart": PixArtCase}


def deit(mhla: dict | None = None):
    model = softmax_model("deit")
    return mhla_hf.convert(model, {"blocks": [2, 2], **mhla}) if mhla is not None else model


@pytest.mark.parametrize("name", names())
def test_matrices_of_softmax_models_of_transformers(name):
    """They are the weights that eager attention returns."""
    model = softmax_model(name).eval()
    batch = inputs(name) if "pixel_values" in inputs(name) else inputs(name, padding="left")
    expected_model = copy.deepcopy(model)
    expected_model.set_attn_implementation("eager")
    with torch.no_grad():
        expected = run(expected_model, {**batch, "output_attentions": True}).attentions
    model.set_attn_implementation("sdpa")
    found = attention_matrices(model, batch)
    assert len(found) == len(expected) == 3
    for matrices, weights in zip(found.values(), expected):
        for index, matrix in enumerate(matrices):
            mask = batch.get("attention_mask")
            valid = torch.ones(weights.shape[-1], dtype=torch.bool) if mask is None else mask[index].bool()
            torch.testing.assert_close(
                matrix.float(), weights[index][:, valid][:, :, valid], atol=2e-6, rtol=1e-4, msg=name
            )


@pytest.mark.parametrize("name", DIFFUSERS)
def test_matrices_of_models_of_diffusers(name):
    """Times the values, they are what goes into the output projection."""
    case = DIFFUSERS[name]()
    model, batch = case.make(case.upstream).eval(), case.inputs(case.upstream_size)
    found = attention_matrices(model, batch)
    seen = {}

    def keep(key):
        return lambda module, args, output: seen.__setitem__(key, (args[0], output))

    modules = dict(attention_modules(model))
    assert list(found) == list(modules)
    for layer, module in modules.items():
        module.to_v.register_forward_hook(keep((layer, "value")))
        module.to_out[0].register_forward_hook(keep((layer, "output")))
    with torch.no_grad():
        run(model, batch)
    for layer, matrices in found.items():
        value, attended = seen[layer, "value"][1], seen[layer, "output"][0]
        for index, matrix in enumerate(matrices):
            heads = value[index].double().unflatten(-1, (matrix.shape[0], -1))
            product = torch.einsum("htj,jhv->thv", matrix, heads).flatten(1)
            torch.testing.assert_close(product.float(), attended[index], atol=1e-5, rtol=1e-4)


def test_figures_are_those_of_the_matrices():
    batch = inputs("deit")
    model = deit({"feature_map": "elu"}).eval()
    matrices = attention_matrices(model, batch)
    tracker = AttentionTracker(batch)
    row = tracker.record(model, 7)
    assert tracker.history == [row] and row["step"] == 7 and row["seconds"] > 0
    json.dumps(row, allow_nan=False)
    for name, layer in row["layers"].items():
        expected = attention_statistics(torch.cat(matrices[name]))
        for statistic, values in expected.items():
            assert layer[statistic] == pytest.approx(values.mean().item(), rel=1e-9), statistic
        assert layer["rank"] <= layer["rank_bound"] <= layer["tokens"] == layer["rows"] == 18
    figures = tracker.figures(row)
    assert figures["attention_rank"] == pytest.approx(sum(each["rank"] for each in row["layers"].values()) / 3)


@pytest.mark.parametrize("options", (None, {}), ids=("softmax", "mhla"))
def test_training_is_bitwise_the_same_with_it(options):
    """Dropout, training mode and gradients are left alone."""

    def train(tracker):
        torch.manual_seed(0)
        model = deit(options)
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.1
        model.train()
        for parameter in list(model.parameters())[:2]:
            parameter.requires_grad_(False)
        before = [parameter.requires_grad for parameter in model.parameters()]
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for step in range(3):
            loss = model(**inputs("deit")).last_hidden_state.square().mean()
            loss.backward()
            if tracker is not None:
                state = torch.get_rng_state()
                gradients = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
                tracker.record(model, step)
                assert torch.equal(torch.get_rng_state(), state)
                for parameter, gradient in zip(model.parameters(), gradients):
                    assert (parameter.grad is None) if gradient is None else torch.equal(parameter.grad, gradient)
            optimizer.step()
            optimizer.zero_grad()
        assert all(module.training for module in model.modules())
        assert [parameter.requires_grad for parameter in model.parameters()] == before
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in mhla_modules(model))
        return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])

    def mhla_modules(model):
        return [] if options is None else [layer.mhla for layer in mhla_layers(model)]

    tracker = AttentionTracker(inputs("deit"))
    assert torch.equal(train(None), train(tracker))
    assert [row["step"] for row in tracker.history] == [0, 1, 2]
    # Dropout is off in the probe: what it gives is the model's alone.
    model = deit(options).train()
    first, second = (AttentionTracker(inputs("deit")).record(model, 0)["layers"] for _ in range(2))
    assert first == second


def test_wrapped_and_compiled_models():
    batch = inputs("deit")
    model = deit({}).eval()
    expected = AttentionTracker(batch).record(model, 0)["layers"]
    compiled = torch.compile(copy.deepcopy(model), backend="eager")
    assert AttentionTracker(batch).record(compiled, 0)["layers"] == expected
    # Without devices, or a machine that has a GPU would move the model there.
    parallel = torch.nn.DataParallel(copy.deepcopy(model), device_ids=[])
    assert AttentionTracker(batch).record(parallel, 0)["layers"] == expected


def test_attention_that_is_not_finite_is_recorded_as_such():
    model = deit({}).eval()
    with torch.no_grad():
        model.layers[1].attention.mhla.mixing.fill_(float("nan"))
    tracker = AttentionTracker(inputs("deit"))
    row = tracker.record(model, 0)
    assert row["layers"]["layers.0.attention"]["rank"] > 0
    assert row["layers"]["layers.1.attention"]["rank"] is None
    json.dumps(row, allow_nan=False)
    assert "attention_rank" in tracker.figures(row)


def classifier(batches: int = 8):
    torch.manual_seed(0)
    model = softmax_model("bert")
    generator = torch.Generator().manual_seed(0)
    data = [
        {"input_ids": tokens, "labels": tokens}
        for tokens in torch.randint(3, 64, (4 * batches, 20), generator=generator)
    ]
    return mhla_hf.convert(model, default_options("bert")), data


def train(folder, *, steps, callback=True, resume=None, **options):
    model, data = classifier()
    arguments = TrainingArguments(
        str(folder), max_steps=steps, per_device_train_batch_size=4, save_steps=2, logging_steps=1, use_cpu=True,
        report_to=[], disable_tqdm=True, **options,
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=data)
    tracker = AttentionTracker({"input_ids": torch.stack([row["input_ids"] for row in data[:2]])}, every=2)
    if callback:
        trainer.add_callback(TrackingCallback(tracker, trainer))
    trainer.train(resume_from_checkpoint=resume)
    return trainer, tracker


def test_trainer_of_transformers(tmp_path):
    plain, _ = train(tmp_path / "plain", steps=4, callback=False)
    trainer, tracker = train(tmp_path / "tracked", steps=4)
    for one, other in zip(plain.model.parameters(), trainer.model.parameters()):
        assert torch.equal(one, other)
    assert [row["step"] for row in tracker.history] == [0, 2, 4]
    logged = [row for row in trainer.state.log_history if "attention_rank" in row]
    assert [row["step"] for row in logged] == [0, 2, 4]
    ranks = [layer["rank"] for layer in tracker.history[1]["layers"].values()]
    assert logged[1]["attention_rank"] == pytest.approx(sum(ranks) / len(ranks))
    losses = [[row["loss"] for row in run.state.log_history if "loss" in row] for run in (plain, trainer)]
    assert losses[0] == losses[1]


def test_history_of_a_resumed_run():
    tracker, other = AttentionTracker(inputs("deit"), layers="0"), AttentionTracker(inputs("deit"))
    for step in (0, 5, 10):
        tracker.record(deit({}).eval(), step)
    other.restore(tracker.history, 5)
    assert other.history == tracker.history[:2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every": 0}, "every=0 must be a whole number of at least 1"),
        ({"rows": 1}, "rows=1 must be a whole number of at least 2"),
    ],
)
def test_wrong_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        AttentionTracker(**{"batch": {"input_ids": None}, **options})
