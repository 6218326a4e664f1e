# SPDX-License-Identifier: Apache-2.0
"""Sizes of the presets: against published ones, against the formula of the operator, and in the documentation."""

from __future__ import annotations

import pytest
import torch

from benchmarks.presets import PAGE, example_inputs, make_model, mhla_layers, operator_shape, size_of, with_tables
from mhla_hf.layers.joint import JointMHLA
from mhla_hf.presets import PRESETS


pytestmark = pytest.mark.slow


# Millions of parameters and billions of multiply-adds of the softmax model, as published; see docs/presets.md. DeiT's
# are of 224 pixels, and the language model's with gates.
PUBLISHED = {
    "deit-t": (5.7, None),
    "deit-s": (22, None),
    "dit-s-2-256": (33, 6.06),
    "dit-b-2-256": (130, 23.01),
    "dit-l-2-256": (458, 80.71),
    "dit-xl-2-256": (675, 118.64),
    "dit-xl-2-512": (675, 524.60),
    "sana-0.6b": (590, None),
    "wan2.1-1.3b": (1420, None),
    "wan2.1-14b": (14300, None),
    "hunyuan-video": (13000, None),
    "hunyuan-video-1.5": (8300, None),
    "flux.1-dev": (12000, None),
    "sd3.5-large": (8100, None),
    "ltx-video-13b": (13000, None),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_sizes(name):
    parameters, operations = PUBLISHED[name]
    size = size_of(name)
    assert (size.parameters[0] - size.copies) / 1e6 == pytest.approx(parameters, rel=0.02)
    if operations is not None:
        assert size.operations[0] / 1e9 == pytest.approx(operations, rel=1e-3)


def test_models_that_have_gates_are_as_large_with_them():
    for name, parameters in (("mhla-lm-340m", 340), ("vlt-t", 15), ("vlt-s", 26), ("deit-t", 5.7)):
        assert size_of(name).parameters[1] / 1e6 == pytest.approx(parameters, rel=0.05)


@pytest.mark.parametrize("name", PRESETS)
def test_counted_operations_follow_the_formula(name):
    size = size_of(name)
    with torch.device("meta"):
        model = make_model(name)
    shape, layers = operator_shape(model), mhla_layers(model)
    assert (size.tokens, size.blocks) == (shape.tokens, layers[0].mixing.shape[-1])
    heads, slots = len(layers) * shape.heads, shape.layout().token_table("cpu").numel()
    linear, blocks = (
        heads * count * shape.width * (2 * shape.width + (shape.chunk or 0)) for count in (shape.tokens, slots)
    )
    pairs = size.blocks**2 // (2 if shape.causal else 1)
    mhla = blocks + heads * pairs * shape.width**2
    if shape.causal:
        # The cache sums the blocks that it keeps by themselves.
        mhla += heads * shape.tokens * shape.width**2
    else:
        # Where blocks are small, weights for all pairs of tokens take fewer operations than their summaries.
        mhla = min(mhla, 2 * heads * shape.tokens**2 * shape.width)
    if layers[0].config.text == "softmax" and isinstance(layers[0], JointMHLA):
        # Softmax over the text and the blocks' mean keys, its vectors widened, in place of that over the text.
        names = ("encoder_hidden_states", "encoder_hidden_states_2", "image_embeds")
        text = sum(value.shape[1] for name, value in example_inputs(model).items() if name in names)
        mhla += 2 * heads * shape.tokens * ((text + size.blocks) * (shape.width + 8) - text * shape.width)
    width = shape.heads * shape.width
    gate = width**2 if layers[0].gate is not None else 0
    convolution = width * layers[0].config.lepe_kernel ** 2 if layers[0].lepe is not None else 0
    counted = size.operations[2] - (size.operations[1] - linear) - len(layers) * size.tokens * (gate + convolution)
    # The formula leaves out normalisers.
    assert counted == pytest.approx(mhla, rel=0.05)


def test_the_documentation_has_the_tables():
    text = PAGE.read_text(encoding="utf-8")
    assert with_tables(text) == text, "run: python -m benchmarks.presets --write"
