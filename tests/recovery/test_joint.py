# SPDX-License-Identifier: Apache-2.0
"""Recovery of models with joint attention: their original, calibration, and what is refused so far."""

from __future__ import annotations

import copy

import pytest
import torch

import mhla_hf
from mhla_hf.analysis import inspect_model
from mhla_hf.layers.original import original_attention
from mhla_hf.recovery import match_layers
from mhla_hf.training.matching.layers import mhla_layers, original_heads
from tests.models.cases import FluxCase, HunyuanVideo15Case, HunyuanVideoCase, QwenImageCase
from tests.models.model_case import captured, relative_error


CASES = [HunyuanVideoCase(), HunyuanVideo15Case(), QwenImageCase(), FluxCase()]


def named(case):
    return type(case).__name__


@torch.no_grad()
def sharpen(model):
    """Random layers attend to all alike, which every estimate gets right: larger queries and keys."""
    blocks = [*model.transformer_blocks, *getattr(model, "single_transformer_blocks", ())]
    for attention in (block.attn for block in blocks):
        for name in ("norm_q", "norm_k", "norm_added_q", "norm_added_k"):
            if getattr(attention, name, None) is not None:
                getattr(attention, name).weight.mul_(2.5)
    return model


@pytest.mark.parametrize("case", CASES, ids=named)
def test_the_original_is_the_softmax_model(case):
    stock = case.make()
    model = mhla_hf.convert(copy.deepcopy(stock), case.options)
    with original_heads(model, mhla_layers(model)):
        output = case.run(model, 2, batch=2)
    assert relative_error(output, case.run(stock, 2, batch=2)) < 1e-5


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("case", [HunyuanVideoCase(), FluxCase()], ids=named)
def test_calibration(case, seed):
    model = mhla_hf.convert(sharpen(case.make(seed=seed)), {**case.options, "feature_map": "hedgehog"})
    batches = [case.inputs(seed=number, batch=2) for number in range(8)]
    report = mhla_hf.calibrate(model, batches, fit_steps=40)
    assert all("text_bias" in layer.changed for layer in report.layers)
    assert report.error_after < 0.8 * report.error_before


@pytest.mark.parametrize("case", [HunyuanVideo15Case(), QwenImageCase()], ids=named)
def test_the_bias_in_closed_form(case):
    """With it the estimates are right in the mean: of logarithms, over the queries that it was fitted on."""
    model = sharpen(case.make_mhla())
    module = model.mhla_modules()[1]
    with captured(module) as calls, torch.no_grad():
        model(**case.inputs(2, batch=2))
    query, key, _ = calls[0].arguments
    rotary, grid = calls[0].keywords["rotary"], calls[0].keywords["grid"]
    query, key = rotary(query).double(), rotary(key).double()
    bias = module.landmark_error(query, key, grid=grid)
    block, scale = module.layout_for(grid).block_of_token, query.shape[3] ** -0.5
    exact = torch.einsum("bthk,bshk->bths", query, key).mul(scale).exp().sum(-1)
    means = torch.stack([key[:, block == number].mean(1) for number in range(int(block.max()) + 1)], dim=1)
    counts = torch.bincount(block)
    estimate = (torch.einsum("bthk,bmhk->bthm", query, means).mul(scale).exp() * counts).sum(-1)
    torch.testing.assert_close(bias, (exact / estimate).log(), rtol=1e-9, atol=1e-9)
    # Jensen: the mean of a block never estimates too much.
    assert (bias >= 0).all() and bias.mean() > 0.01


def test_what_is_refused_so_far():
    case = FluxCase()
    model, batches = case.make_mhla(), [case.inputs()] * 2
    with pytest.raises(ValueError, match="layers with joint attention cannot be matched yet"):
        match_layers(model, batches, steps=1)
    with pytest.raises(ValueError, match="Attention matrices of joint attention are not computed yet"):
        inspect_model(model, batches)
    assert len(inspect_model(model, []).mhla_layers) == 4
    block = case.make_mhla(text="block")
    with captured(block.mhla_modules()[0]) as calls:
        case.run(block)
    with pytest.raises(ValueError, match="The original of layers with text='block' is not computed yet"):
        original_attention(block.mhla_modules()[0], *calls[0].arguments, **calls[0].keywords)
