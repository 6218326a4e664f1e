# SPDX-License-Identifier: Apache-2.0
"""Recovery of models with joint attention: their original, calibration, matching of layers and of blocks."""

from __future__ import annotations

import copy

import pytest
import torch

import mhla_hf
from mhla_hf.matching.blockwise import _Records, list_blocks, match_blocks
from mhla_hf.matching.layer_training import attention_matching_loss, layer_loss
from mhla_hf.recovery import match_layers
from mhla_hf.recovery.selection import select_layers
from mhla_hf.training.layers import find_projections, mhla_layers, original_heads
from mhla_hf.training.teacher import SharedTeacher
from tests.families.cases import ChromaCase, FluxCase, HunyuanVideo15Case, HunyuanVideoCase, QwenImageCase
from tests.families.model_case import captured, relative_error


CASES = [HunyuanVideoCase(), HunyuanVideo15Case(), QwenImageCase(), FluxCase(), ChromaCase()]


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
    with original_heads(mhla_layers(model)):
        output = case.run(model, 2, batch=2)
    assert relative_error(output, case.run(stock, 2, batch=2)) < 1e-5


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("case", [HunyuanVideoCase(), FluxCase()], ids=named)
def test_calibration(case, seed):
    model = mhla_hf.convert(sharpen(case.make(seed=seed)), {**case.options, "feature_map": "hedgehog"})
    batches = [case.inputs(seed=number, batch=2) for number in range(8)]
    report = mhla_hf.calibrate(model, batches, fit_steps=40)
    assert all({"text_bias", "normalizer_scale"} < set(layer.changed) for layer in report.layers)
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


@torch.no_grad()
@pytest.mark.parametrize("case", CASES, ids=named)
def test_layers_and_blocks_can_be_called_separately(case):
    """On recorded inputs, with the padding of the text that both leave out."""
    model, batch = case.make_mhla(), case.inputs(2, batch=2)
    layers = find_projections(model, mhla_layers(model), batch)
    calls = SharedTeacher(model).record(layers, batch)
    reference = original_heads(layers)
    for layer in layers:
        call = calls[layer.name]
        assert call.valid is None or not call.valid[1, call.num_beside - 1]
        with reference:
            output = layer(call.arguments, call.hidden_states)
        torch.testing.assert_close(output, call.output, rtol=1e-5, atol=1e-5)
        reference = original_heads(layers)
        error = layer_loss(layer, call).item()
        # That of the grid, the text being exact; changes of padding are none.
        part = attention_matching_loss(
            layer(*call[:2])[:, call.num_beside :], call.output[:, call.num_beside :]
        ).item()
        assert error == pytest.approx(part / 2, rel=1e-5) and error > 1e-3
        if call.valid is not None:
            call.output[~call.valid] = torch.nan
            assert layer_loss(layer, call).item() == error
    expected, hidden_states = case.run(model, 2, batch=2), None
    blocks = list_blocks(model, batch)
    records = _Records.start(blocks, [0], lambda number: batch, model, SharedTeacher(model))
    for index, block in enumerate(blocks):
        records.advance(block, index, records.student)
        hidden_states = records.student[0]
    torch.testing.assert_close(hidden_states, expected, rtol=1e-4, atol=1e-5)
    assert [block.name for block in blocks if block.mhla is not None] == [layer.name[:-5] for layer in layers]


@pytest.mark.parametrize("text", ["softmax", "block"])
@pytest.mark.parametrize("case", CASES, ids=named)
def test_recovery_lowers_the_error_in_every_stage(case, text, tmp_path):
    options = {**case.options, "text": text, "eps": 0.05, "mixing_heads": "per_head", "feature_map": "relu"}
    stock = sharpen(case.make())
    model = mhla_hf.convert(copy.deepcopy(stock), options)
    batches = [case.inputs(2, seed=number, batch=2) for number in range(6)]
    teacher = SharedTeacher(model)
    teacher.keep()
    errors = [output_error(case, model, stock)]
    mhla_hf.calibrate(model, batches, fit_steps=40)
    errors.append(output_error(case, model, stock))
    report = match_layers(model, batches, steps=40, teacher=teacher, learning_rate=2e-3, mhla_learning_rate=1e-2)
    errors.append(output_error(case, model, stock))
    settings = {"learning_rate": 5e-4, "mhla_learning_rate": 2e-3, "warmup_steps": 0, "lr_schedule": "constant"}
    count = len(report.losses)
    match_blocks(
        model, batches.__getitem__, num_batches=6, steps=[0] * (count - 1) + [60], teacher=teacher, **settings,
        output=tmp_path,
    )  # fmt: skip
    errors.append(output_error(case, model, stock))
    assert errors == sorted(errors, reverse=True)


@torch.no_grad()
def output_error(case, model, stock):
    return sum(relative_error(case.run(model, 2, seed=seed), case.run(stock, 2, seed=seed)) for seed in range(6)) / 6


def test_hybrids_over_both_lists_are_matched(tmp_path):
    """Layers that stay softmax are blocks as well, and layers have their numbers over both lists."""
    case = FluxCase()
    model = mhla_hf.convert(sharpen(case.make()), {**case.options, "layers": [1, 3]})
    batches = [case.inputs(2, seed=number, batch=2) for number in range(4)]
    assert [block.mhla is not None for block in list_blocks(model, batches[0])] == [False, True, False, True]
    assert list(match_layers(model, batches, steps=3).losses) == [
        "transformer_blocks.1.attn",
        "single_transformer_blocks.1.attn",
    ]
    selection = select_layers(model, batches, keep=1)
    assert [layer.index for layer in selection.layers] == [1, 3] and len(selection.mhla_layers) == 1
