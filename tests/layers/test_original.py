# SPDX-License-Identifier: Apache-2.0
"""A converted model run with its original attention computes what the softmax model does, in every family."""

import copy

import pytest
import torch

import mhla_hf
from mhla_hf.training.matching.layers import find_projections, mhla_layers, original_heads, record_calls, run
from tests.integrations.transformers.mhla_models import default_options, served_names
from tests.integrations.transformers.tiny_models import FAMILIES, inputs, softmax_model
from tests.models.cases import DiTCase, PixArtCase, SanaCase, SanaVideoCase, WanCase, WanImageToVideoCase


DIFFUSERS = {
    "wan": WanCase,
    "wan_image_to_video": WanImageToVideoCase,
    "dit": DiTCase,
    "pixart": PixArtCase,
    "sana": SanaCase,
    "sana_video": SanaVideoCase,
}
NAMES = [*DIFFUSERS, *served_names()]


def models(name: str):
    """A softmax model, its converted copy and a batch."""
    if name in DIFFUSERS:
        case = DIFFUSERS[name]()
        softmax, batch = case.make(case.upstream), case.inputs(case.upstream_size)
        batch["return_dict"] = False
        options = dict(case.options)
    else:
        softmax, options = softmax_model(name), default_options(name)
        batch = inputs(name)
    converted = mhla_hf.convert(copy.deepcopy(softmax), {**options, "feature_map": "relu", "mixing_init": "linear"})
    return softmax, converted.eval(), batch


def kept(tensor: torch.Tensor, batch: dict) -> torch.Tensor:
    mask = batch.get("attention_mask")
    return tensor if mask is None or mask.dim() != 2 or tensor.dim() < 3 else tensor[mask.bool()]


@pytest.mark.parametrize("name", NAMES)
def test_equals_the_softmax_model(name):
    softmax, converted, batch = models(name)
    with torch.no_grad():
        expected = run(softmax, batch)[0]
        assert not torch.allclose(kept(run(converted, batch)[0], batch), kept(expected, batch), atol=1e-4)
        with original_heads(converted, mhla_layers(converted)):
            got = run(converted, batch)[0]
    torch.testing.assert_close(kept(got, batch), kept(expected, batch), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_layers_called_by_themselves(name):
    _, converted, batch = models(name)
    layers = find_projections(converted, mhla_layers(converted), batch)
    assert all(layer.projection is not None for layer in layers)
    calls = record_calls(converted, layers, batch)
    assert list(calls) == [layer.name for layer in layers]
    with torch.no_grad(), original_heads(converted, layers):
        for layer in layers:
            call = calls[layer.name]
            again = layer(call.arguments, call.hidden_states)
            valid = slice(None) if call.valid is None else call.valid
            torch.testing.assert_close(again[valid], call.output[valid])


def test_kinds_of_families():
    assert {FAMILIES[name].kind for name in served_names()} == {"causal", "encoder", "vision"}
