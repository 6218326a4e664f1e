# SPDX-License-Identifier: Apache-2.0
"""Calibration: the streamed fit is the dense one, errors never rise, and failures leave the model as it was."""

import copy
import dataclasses
import json

import pytest
import torch

import mhla_hf
from mhla_hf.matching.ridge import Moments, as_matrix
from mhla_hf.recovery import calibration
from mhla_hf.recovery.fits import HeadsFit
from mhla_hf.training.layers import find_projections, mhla_layers, original_heads, run
from tests.integrations.transformers.mhla_models import default_options
from tests.integrations.transformers.tiny_models import inputs, softmax_model
from tests.layers.test_original import DIFFUSERS


def converted(name: str, **options):
    """A converted model and how to make a batch of it."""
    if name in DIFFUSERS:
        case = DIFFUSERS[name]()
        model, defaults = case.make(case.upstream), dict(case.options)
        example = {**case.inputs(case.upstream_size), "return_dict": False}
    else:
        model, defaults, example = softmax_model(name), default_options(name), inputs(name)
    return mhla_hf.convert(model, {**defaults, "feature_map": "elu", **options}).eval(), example


def probe(example, count=4, seed=0):
    """Batches like an example, of other numbers."""
    generator = torch.Generator().manual_seed(seed)

    def other(name, value):
        if not isinstance(value, torch.Tensor):
            return value
        if value.is_floating_point():
            return torch.randn(value.shape, generator=generator, dtype=torch.float32).to(value.dtype)
        if name == "input_ids":
            return torch.randint(1, int(value.max()) + 1, value.shape, generator=generator)
        return value

    return [{name: other(name, value) for name, value in example.items()} for _ in range(count)]


def output_errors(model, batches):
    """Relative error of each layer's output, from the activations themselves."""
    layers = find_projections(model, mhla_layers(model), batches[0])
    kept = {layer.name: [] for layer in layers}

    def observe(layer, args, kwargs, output, heads):
        valid = kwargs["sequence"].valid if kwargs.get("sequence") is not None else None
        valid = torch.ones(output.shape[:2], dtype=torch.bool) if valid is None else valid
        kept[layer.name].append((output.flatten(2)[valid].double(), heads.flatten(2)[valid].double()))

    with torch.no_grad(), original_heads(layers, observe):
        for batch in batches:
            run(model, batch)
    return layers, {name: [torch.cat(part) for part in zip(*pairs)] for name, pairs in kept.items()}


def state(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_same_state(model, before):
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name


@pytest.mark.parametrize("centred", [True, False])
def test_moments_equal_sums_over_all_rows(centred):
    torch.manual_seed(0)
    rows = torch.randn(3, 500, 6) + 100
    moments = Moments(3, 6)
    for part in rows.split(130, dim=1):
        moments.add(part[:2])
        moments.add(part[2:], first=2)
    wide = rows.double()
    shift = wide.mean(1, keepdim=True) if centred else 0.0
    expected = (wide - shift).mT @ (wide - shift)
    assert moments.count == 500
    torch.testing.assert_close(moments.mean, wide.mean(1))
    torch.testing.assert_close(moments.products(centred), expected, rtol=1e-5, atol=1e-3)
    coefficients, intercept = torch.randn(3, 2, 6, dtype=torch.float64), torch.randn(3, 2, dtype=torch.float64)
    errors = (wide @ coefficients.mT + intercept[:, None]).square().sum(1)
    torch.testing.assert_close(moments.squared_sums(coefficients, intercept), errors, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("name", ["wan", "gpt2", "bert"])
def test_projection_equals_a_dense_solution(name):
    """The ridge solved over all rows at once, by `lstsq` in float64, with the penalty as rows of their own."""
    model, example = converted(name)
    model = model.double() if name == "gpt2" else model
    batches = probe(example)
    layers, rows = output_errors(model, batches)
    before = {layer.name: as_matrix(layer.projection).clone() for layer in layers}
    report = mhla_hf.calibrate(model, batches, fit_steps=0)
    checked = 0
    for layer, entry in zip(layers, report.layers, strict=True):
        if entry.projection_ridge is None:
            continue
        checked += 1
        output, heads = rows[layer.name]
        # One batch of four is held out.
        held = (torch.arange(len(batches)) % 4 == 1).repeat_interleave(len(output) // len(batches))
        held_rows, fitted_rows = output[held], output[~held]
        assert (entry.tokens, entry.held_out_tokens) == (len(fitted_rows), len(held_rows))
        old = before[layer.name].detach().double()
        bias = layer.projection.bias is not None
        error = (heads - output)[~held] @ old.T
        centre = fitted_rows.mean(0) if bias else 0.0
        inner, target = fitted_rows - centre, error - (error.mean(0) if bias else 0.0)
        strength = entry.projection_ridge * inner.square().sum(0).mean()
        penalty = strength.sqrt() * torch.eye(inner.shape[1], dtype=torch.float64)
        change = torch.linalg.lstsq(
            torch.cat([inner, penalty]), torch.cat([target, target.new_zeros(inner.shape[1], target.shape[1])])
        ).solution.T
        new = as_matrix(layer.projection).detach().double()
        torch.testing.assert_close(new, old + change, rtol=2e-3, atol=2e-4)
        left = (heads - output)[held] @ old.T - held_rows @ (new - old).T
        if bias:
            left = left - (error.mean(0) - fitted_rows.mean(0) @ (new - old).T)
        scale = (heads[held] @ old.T - (heads[held] @ old.T).mean(0)).square().sum()
        assert entry.error_after == pytest.approx(float(left.square().sum() / scale), rel=1e-2)
        original = ((heads - output)[held] @ old.T).square().sum() / scale
        assert entry.error_before == pytest.approx(float(original), rel=1e-3)
    assert checked


def dense_heads(model, batches):
    """Columns of every channel for the convolution, from the activations themselves."""
    (layer,) = mhla_layers(model)
    columns = []

    def observe(layer, args, kwargs, output, heads):
        parts = layer.mhla.attention_parts(*args, **kwargs)
        identity = copy.deepcopy(layer.mhla.lepe)
        near = []
        for place in range(identity.weight[0].numel()):
            with torch.no_grad():
                identity.weight.zero_().view(len(identity.weight), -1)[:, place] = 1
                identity.bias.zero_()
            image = args[2].flatten(2).transpose(1, 2).unflatten(2, kwargs["grid"])
            near.append(identity(image).flatten(2).transpose(1, 2))
        left = heads - layer.mhla.join(dataclasses.replace(parts, positional=None))
        columns.append(torch.stack([*near, left.flatten(2)], -1).double())

    with torch.no_grad(), original_heads([layer], observe):
        for batch in batches:
            run(model, batch)
    return layer, torch.cat(columns)


@pytest.mark.parametrize("window", [None, "block"])
def test_convolution_equals_a_dense_solution(window):
    options = {} if window is None else {"window": window, "window_size": [3, 1, 2]}
    model, example = converted("wan", layers=[1], lepe_kernel=3, **options)
    batches = probe(example, 8)
    layer, columns = dense_heads(model, batches)
    held = (torch.arange(len(batches)) % 4 == 1).repeat_interleave(len(columns) // len(batches))
    fit = HeadsFit(layer, {})
    for call in calibration._Probe(model, [layer], batches, lambda: None).calls([layer.name])[layer.name]:
        fit.observe(call)
    changes, strength = fit.solve()
    rows = columns[~held].flatten(0, 1).transpose(0, 1)
    means = rows.mean(1)
    rows = rows - means[:, None]
    found = changes[layer.mhla.lepe.weight].flatten(1).double()
    for channel, (near, target) in enumerate(zip(rows[..., :-1], rows[..., -1])):
        scale = near.square().sum(0).mean() * strength
        # The penalties are rows of their own.
        penalised = torch.cat([near, scale.sqrt() * torch.eye(near.shape[1], dtype=torch.float64)])
        expected = torch.linalg.lstsq(penalised, torch.cat([target, target.new_zeros(near.shape[1])])).solution
        torch.testing.assert_close(found[channel], expected, rtol=5e-3, atol=2e-4)
    bias = means[:, -1] - (found * means[:, :-1]).sum(-1)
    torch.testing.assert_close(changes[layer.mhla.lepe.bias].double(), bias, rtol=5e-3, atol=2e-4)


SETTINGS = {
    "wan": {"lepe_kernel": 3, "feature_map": "hedgehog", "rope": "before_feature_map"},
    "dit": {"lepe_kernel": 3},
    "sana": {"layers": [1]},
    "llama": {"feature_map": "hedgehog"},
    "qwen3": {"window": "adjacent"},
    "bert": {"window": "block", "window_size": 3},
    "vit": {"lepe_kernel": 3, "window": "block", "window_size": [2, 2]},
}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, torch.float32) for name in SETTINGS), ("dit", torch.bfloat16), ("bert", torch.bfloat16)],
    ids=str,
)
def test_held_out_error_never_rises(name, dtype):
    model, example = converted(name, **SETTINGS[name])
    model = model.to(dtype)
    batches = [
        {key: value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value
         for key, value in batch.items()}
        for batch in probe(example, 6)
    ]  # fmt: skip
    before = state(model)
    report = mhla_hf.calibrate(model, batches, fit_steps=30)
    assert [layer.name for layer in report.layers] == [layer.name for layer in mhla_layers(model)]
    assert any(layer.changed for layer in report.layers)
    for layer in report.layers:
        assert layer.error_after < layer.error_before if layer.changed else layer.note
    names = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}
    assert names and all(tensor.dtype == before[name].dtype for name, tensor in model.state_dict().items())
    own = tuple(f"{layer.name}." for layer in mhla_layers(model)) if "bert" not in name else ("",)
    assert all(changed.startswith(own) for changed in names), names
    layers, rows = output_errors(model, batches)
    assert all(torch.isfinite(output).all() for output, _ in rows.values())
    json.dumps(report.to_dict())


def test_groups_of_layers_give_the_same(monkeypatch):
    model, example = converted("wan", lepe_kernel=3)
    other, batches, seen = copy.deepcopy(model), probe(example), []
    together = mhla_hf.calibrate(model, batches, fit_steps=20)
    monkeypatch.setattr(calibration, "_nbytes", lambda call: 1)
    monkeypatch.setattr(calibration, "_room", lambda device: len(batches))
    apart = mhla_hf.calibrate(other, batches, fit_steps=20, progress=lambda *count: seen.append(count))
    assert together.layers == apart.layers
    assert_same_state(other, state(model))
    # A layer is recorded, trained, and solved in two passes over its calls or a little less.
    count = len(together.layers) * (len(batches) + 20 + 2 * len(batches))
    assert seen[-1] == (count, count) and len(seen) >= 0.9 * count
    assert seen[:-1] == [(done, count) for done in range(1, len(seen))]


class Stopped(BaseException):
    pass


def test_batches_that_do_not_fit_are_left_out(monkeypatch):
    model, example = converted("wan", lepe_kernel=3)
    monkeypatch.setattr(calibration, "_nbytes", lambda call: 1)
    monkeypatch.setattr(calibration, "_room", lambda device: 3)
    report = mhla_hf.calibrate(model, probe(example, 6), fit_steps=0)
    assert {layer.held_out_tokens / layer.tokens for layer in report.layers} == {0.5}


@pytest.mark.parametrize("moment", [1, 8])
def test_interrupted(moment):
    model, example = converted("wan", lepe_kernel=3, feature_map="hedgehog")
    before = state(model)

    def stop(done, count):
        assert count == 4 + (2 + 2 * 4) * len(mhla_layers(model))
        if done == moment:
            raise Stopped

    with pytest.raises(Stopped):
        mhla_hf.calibrate(model, probe(example), fit_steps=2, progress=stop)
    assert_same_state(model, before)


def test_interrupted_while_it_writes(monkeypatch):
    model, example = converted("llama")
    before, written = state(model), []
    copy_ = torch.Tensor.copy_

    def stop(tensor, *args, **kwargs):
        if isinstance(tensor, torch.nn.Parameter):
            written.append(tensor)
            if len(written) == 2:
                raise KeyboardInterrupt
        return copy_(tensor, *args, **kwargs)

    batches = probe(example)
    monkeypatch.setattr(torch.Tensor, "copy_", stop)
    with pytest.raises(KeyboardInterrupt):
        mhla_hf.calibrate(model, batches)
    assert_same_state(model, before)


def test_mistakes():
    model, example = converted("llama")
    for batches, message in (
        (None, "batches must be a list of dicts"),
        ([], "batches must be a list of dicts"),
        ([torch.zeros(2)], "batches must be a list of dicts"),
        ([{name: value[:1] for name, value in example.items()}], "at least 2 samples"),
    ):
        with pytest.raises(ValueError, match=message):
            mhla_hf.calibrate(model, batches)
    with pytest.raises(ValueError, match="has no MHLA layers: convert it first"):
        mhla_hf.calibrate(softmax_model("llama"), probe(example))
