# SPDX-License-Identifier: Apache-2.0
"""LTX-Video: rotary tables of every head against the dense definition, refusals, and the shared checks."""

import copy

import numpy as np
import pytest
import torch
from diffusers import ContextParallelConfig
from diffusers.models.transformers import transformer_ltx

from mhla_hf import BlockLayout, convert, load_pipeline, unconvert
from mhla_hf.conversion import convert_pretrained
from mhla_hf.hub.card import describe_model
from mhla_hf.models.directory import ModelDirectory
from tests import tiny
from tests.models.adapter_checks import AdapterChecks
from tests.models.cases import LTXCase
from tests.models.compile_checks import CompileChecks
from tests.models.memory_checks import InPlaceChecks, MemoryChecks
from tests.models.model_case import assert_same_parameters, attention_inputs, captured, relative_error
from tests.models.saving_checks import SavingChecks
from tests.models.training_checks import TrainingChecks


CASES = [LTXCase()]


def named(case):
    return type(case).__name__


def rotate(case, model, tokens, size):
    """Upstream's own rotary embedding of tokens `[B, T, H, K]`."""
    stock = case.make()
    inputs = case.inputs(size)
    grid = [inputs[name] for name in ("num_frames", "height", "width")]
    tables = stock.rope(inputs["hidden_states"], *grid, inputs["rope_interpolation_scale"])
    return transformer_ltx.apply_rotary_emb(tokens.flatten(2), tables).unflatten(2, tokens.shape[2:])


@pytest.mark.parametrize("case", CASES, ids=named)
@pytest.mark.parametrize("size", [(3, 2, 4), (1, 1, 1), (5, 3, 7), (2, 8, 2), (1, 4, 6)], ids=str)
@pytest.mark.parametrize("rope", ["after_feature_map", "before_feature_map"])
def test_every_layer_matches_the_dense_definition(rope, size, case):
    model, inputs = case.make_mhla(resize="blocks", rope=rope), case.inputs(size, batch=2)
    layout = BlockLayout(grid=size, blocks=[min(pair) for pair in zip(model.mhla_config.blocks, size)])
    block = layout.block_of_token
    for module in model.mhla_modules().values():
        with captured(module) as calls, torch.no_grad():
            model(**inputs)
        assert tuple(calls[0].keywords["grid"]) == size
        query, key, value = attention_inputs(calls[0])
        if rope == "before_feature_map":
            query, key = (rotate(case, model, tokens, size) for tokens in (query, key))
        query, key = plain = torch.relu(query), torch.relu(key)
        if rope == "after_feature_map":
            query, key = (rotate(case, model, tokens, size) for tokens in (query, key))
        mixing = module.mixing_matrix(layout).double()[block][:, block]
        pairs = mixing * torch.einsum("bthk,bjhk->bhtj", query.double(), key.double())
        sums = (mixing * torch.einsum("bthk,bjhk->bhtj", *(tokens.double() for tokens in plain))).sum(-1) + 1e-6
        expected = torch.einsum("bhtj,bjhv->bthv", pairs / sums.unsqueeze(-1), value.double())
        assert relative_error(calls[0].output, expected) < 1e-5


@pytest.mark.parametrize("case", CASES, ids=named)
def test_softmax_layers_stay_exactly(case):
    """Whichever layer is MHLA; what comes out of that one is taken away in both models."""
    for layer in range(2):
        stock = case.make()
        model = convert(copy.deepcopy(stock), {**case.options, "layers": [layer]})
        assert model.mhla_layers == [layer]
        for each in (stock, model):
            torch.nn.init.zeros_(case.mhla_class._self_attentions(each)[layer].to_out[0].weight)
        for size in range(3):
            assert torch.equal(case.run(model, size), case.run(stock, size))


@pytest.mark.parametrize("case", CASES, ids=named)
def test_grid_that_pipelines_sample_at(case):
    cls = case.mhla_class
    assert cls.reference_grid({}) == cls.reference_grid({}, (8, 32)) == cls.default_grid
    size = {"sample_frames": 4, "sample_height": 6, "sample_width": 8}
    assert cls.reference_grid({**size, "patch_size": 2}) == (4, 3, 4)


# What is refused


@pytest.mark.parametrize("case", CASES, ids=named)
def test_tokens_beside_the_grid_are_refused(case):
    model, inputs = case.make_mhla(layers=[1]), case.inputs()
    message = "and take no tokens beside the grid, such as those of keyframes; got"
    for changes in ({"num_frames": 2}, {"num_frames": None}, {"width": 5}):
        with pytest.raises(ValueError, match=message):
            model(**{**inputs, **changes})


@pytest.mark.parametrize("case", CASES, ids=named)
def test_masks_and_other_processors_are_refused(case):
    model = case.make_mhla(layers=[1])
    attention = model.transformer_blocks[1].attn1
    with pytest.raises(ValueError, match="takes neither encoder_hidden_states nor attention_mask"):
        attention(torch.randn(1, 24, 32), None, torch.ones(1, 24))
    with pytest.raises(ValueError, match="grid=None"):
        attention(torch.randn(1, 24, 32))
    with pytest.raises(ValueError, match="would ignore them"):
        model.set_attn_processor(type(model.transformer_blocks[0].attn1.processor)())
    with pytest.raises(ValueError, match="supports no context parallelism"):
        model.enable_parallelism(config=ContextParallelConfig(ring_degree=2))


# In its pipeline


def video(pipeline, **options):
    sizes = {"height": 32, "width": 64, "num_frames": 5, "num_inference_steps": 2, "max_sequence_length": 16}
    generator = torch.Generator().manual_seed(0)
    return pipeline("a seven", generator=generator, output_type="np", **{**sizes, **options}).frames[0]


def test_pipeline(tmp_path):
    options, stock = {"blocks": [3, 1, 2], "grid": [3, 2, 4], "layers": [1]}, tiny.ltx_pipeline()
    stock.save_pretrained(tmp_path / "softmax")
    report = convert_pretrained(tmp_path / "softmax", tmp_path / "mhla", options, progress=False)
    assert report.components["transformer"].num_layers == 2
    assert describe_model(ModelDirectory.read(tmp_path / "mhla"))["num_layers"] == 2
    expected = video(stock)
    in_memory = convert(stock, options)
    on_disk, fresh = type(stock).from_pretrained(tmp_path / "mhla"), load_pipeline(tmp_path / "softmax", mhla=options)
    frames = video(in_memory)
    assert np.abs(frames - expected).max() > 1e-4
    for pipeline in (on_disk, fresh):
        pipeline.set_progress_bar_config(disable=True)
        assert_same_parameters(pipeline.transformer, in_memory.transformer)
        np.testing.assert_array_equal(video(pipeline), frames)
    assert video(on_disk, height=96, width=32, num_frames=9).shape == (9, 96, 32, 3)
    np.testing.assert_array_equal(video(unconvert(on_disk)), expected)


class TestLTXModel(LTXCase, SavingChecks, TrainingChecks, AdapterChecks, MemoryChecks, InPlaceChecks):
    block_class = "LTXVideoTransformerBlock"


class TestLTXCompile(LTXCase, CompileChecks):
    pass
