# SPDX-License-Identifier: Apache-2.0
"""Attention matrices, multiplied by the values, are what layers and models compute."""

from __future__ import annotations

import copy

import pytest
import torch

import mhla_hf
from mhla_hf import MHLA, BlockLayout, MHLAConfig
from mhla_hf.analysis import layer_tokens, mhla_matrix
from mhla_hf.layers.fused import PairwiseRotary
from mhla_hf.layers.original import original_attention
from mhla_hf.layers.state import TokenSequence
from mhla_hf.ops import mhla_attention
from mhla_hf.training.layers import mhla_layers, run
from tests.integrations.transformers.mhla_models import default_options, served_names
from tests.integrations.transformers.tiny_models import inputs, softmax_model
from tests.layers.test_original import DIFFUSERS


WITHOUT_CHANNELS = {"output_gate": False, "lepe_kernel": None}
"""Options under which a layer multiplies values by a matrix over tokens and does nothing else."""


def tokens(*shape: int, count: int = 3, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=generator, dtype=torch.float64) for _ in range(count)]


def moved(layer: torch.nn.Module, seed: int = 0) -> torch.nn.Module:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if "output_norm" not in name:
                parameter.add_(torch.rand(parameter.shape, generator=generator, dtype=parameter.dtype) * 0.3)
    return layer


def converted(name: str) -> tuple[torch.nn.Module, dict]:
    """A model in float64 with mixing weights that have moved, and a batch."""
    if name in DIFFUSERS:
        case = DIFFUSERS[name]()
        model, batch = case.make(case.upstream), case.inputs(case.upstream_size)
        options = {**case.options, **WITHOUT_CHANNELS}
    else:
        model, batch, options = softmax_model(name), inputs(name), {**default_options(name), **WITHOUT_CHANNELS}
    model = mhla_hf.convert(copy.deepcopy(model), {**options, "feature_map": "elu", "output_norm": False}).double()
    for layer in mhla_layers(model):
        moved(layer.mhla)
    doubled = {
        key: value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
        for key, value in batch.items()
    }
    return model.eval(), doubled


@pytest.mark.parametrize("name", [*DIFFUSERS, *served_names()])
def test_matrix_times_values_is_the_layer_of_every_family(name):
    model, batch = converted(name)
    seen = []

    def check(module, args, kwargs, output):
        original = original_attention(module, *args, **kwargs)
        value = args[2].repeat_interleave(module.num_heads // args[2].shape[2], dim=2)
        sequence = kwargs.get("sequence")
        for index, sample in enumerate(layer_tokens(module, *args, **kwargs)):
            keep = slice(None)
            if sequence is not None and sequence.valid is not None:
                keep = sequence.valid[index]
            for kind, expected in (("mhla", output), ("original", original)):
                product = torch.einsum("htj,jhv->thv", sample.matrix(kind), value[index, keep].double())
                torch.testing.assert_close(product, expected[index, keep].double(), atol=1e-5, rtol=1e-5)
        seen.append(module)

    layers = mhla_layers(model)
    hooks = [layer.mhla.register_forward_hook(check, with_kwargs=True) for layer in layers]
    with torch.no_grad():
        run(model, batch)
    for hook in hooks:
        hook.remove()
    assert set(seen) == {layer.mhla for layer in layers}


GRIDS = {
    "sequence": ((14,), {"blocks": (4,)}),
    "image": ((6, 7), {"blocks": (2, 3)}),
    "video": ((3, 4, 6), {"block_size": (1, 2, 4), "grid": (3, 4, 6)}),
}
WINDOWS = [
    ("image", {}),
    ("video", {"output_norm": True}),
    ("sequence", {"window": "block", "window_size": (5,)}),
    ("image", {"window": "adjacent", "window_size": (2, 3), "normalizer": "none"}),
    ("video", {"window": "cross", "window_size": (1, 2, 2), "mixing_heads": "per_head", "window_share": "query"}),
    ("video", {"window": "block", "output_norm": True, "feature_map": "hedgehog"}),
    ("image", {"window": "adjacent", "mixing_constraint": "nonnegative", "rope": "before_feature_map"}),
]


def layer_for(name: str, prefix: int = 0, **options: object) -> tuple[MHLA, tuple[int, ...]]:
    grid, blocks = GRIDS[name]
    config = MHLAConfig(**{"feature_map": "elu", **blocks, **options})
    return moved(
        MHLA(config, hidden_size=8, num_heads=4, num_key_value_heads=2, head_dim=6, num_prefix_tokens=prefix).double()
    ), grid


@pytest.mark.parametrize("prefix", (0, 2))
@pytest.mark.parametrize(("name", "options"), WINDOWS)
@torch.no_grad()
def test_matrix_has_window_norm_and_rotation(name, options, prefix):
    # With tokens before the grid, one of them a sink.
    sinks = int(prefix > 0 and "window" in options)
    layer, grid = layer_for(name, prefix, sink_tokens=sinks, **options)
    length = prefix + int(torch.tensor(grid).prod())
    query = tokens(2, length, 4, 6, count=1)[0]
    key, value = tokens(2, length, 2, 6, count=2, seed=1)
    angles = torch.rand(1, length, 1, 3, dtype=torch.float64)
    call = {"grid": grid, "rotary": PairwiseRotary(angles.cos(), angles.sin()), "scaling": 0.4}
    expected = layer(query, key, value, **call)
    rows = torch.tensor([length - 1, 0, 3])
    for index, sample in enumerate(layer_tokens(layer, query, key, value, **call)):
        values = value[index].repeat_interleave(2, dim=1)
        torch.testing.assert_close(torch.einsum("htj,jhv->thv", sample.matrix("mhla"), values), expected[index])
        for kind in ("original", "mhla", "linear"):
            whole = sample.matrix(kind)
            assert whole.shape == (4, length, length)
            torch.testing.assert_close(sample.matrix(kind, rows=rows), whole[:, rows])
            torch.testing.assert_close(sample.matrix(kind, head=2, rows=rows), whole[2, rows])


@pytest.mark.parametrize(
    ("window", "sinks"), ((None, 0), ("block", 0), ("adjacent", 0), ("block", 3), ("adjacent", 1))
)
@pytest.mark.parametrize("tail", ("constant", "decay", "none"))
@pytest.mark.parametrize("causal", (True, False))
@torch.no_grad()
def test_padded_sequences(causal, tail, window, sinks):
    options = {"causal": True} if causal else {"resize": "extend"}
    options |= {"mixing_tail": tail, "sink_tokens": sinks, "window_share": "query"}
    config = MHLAConfig(
        block_size=(4,), grid=(16,), feature_map="elu", window=window, window_size=window and (3,), **options
    )
    layer = moved(MHLA(config, hidden_size=8, num_heads=4, num_key_value_heads=2, head_dim=6).double())
    query = tokens(2, 21, 4, 6, count=1)[0]
    key, value = tokens(2, 21, 2, 6, count=2, seed=1)
    valid = torch.ones(2, 21, dtype=torch.bool)
    valid[0, :4] = False
    sequence = TokenSequence(causal=causal, valid=valid)
    expected = layer(query, key, value, sequence=sequence)
    samples = layer_tokens(layer, query, key, value, sequence=sequence)
    assert [sample.num_tokens for sample in samples] == [17, 21]
    for index, sample in enumerate(samples):
        values = value[index, valid[index]].repeat_interleave(2, dim=1)
        matrix = sample.matrix("mhla")
        torch.testing.assert_close(torch.einsum("htj,jhv->thv", matrix, values), expected[index, valid[index]])
        torch.testing.assert_close(sample.matrix("linear", head=1), sample.matrix("linear")[1])
        if causal:
            assert not matrix.triu(1).any()


@pytest.mark.parametrize("normalizer", ("query", "block_query", "none"))
def test_matrix_by_the_formula(normalizer):
    layout = BlockLayout(grid=(4, 6), blocks=(2, 3))
    query, key = (x.exp() for x in tokens(1, 24, 2, 5, count=2))
    value, mixing = tokens(1, 24, 2, 3, count=1)[0], torch.rand(2, 6, 6, dtype=torch.float64)
    matrix = mhla_matrix(query, key, mixing, layout, normalizer=normalizer)
    expected = mhla_attention(query, key, value, mixing, layout, normalizer=normalizer)
    torch.testing.assert_close(torch.einsum("bhtj,bjhv->bthv", matrix, value), expected)
    block = layout.block_of_token
    if normalizer == "query":
        weights = mixing[0, block[7], block] * (key[0, :, 0] @ query[0, 7, 0])
        torch.testing.assert_close(matrix[0, 0, 7], weights / (weights.sum() + 1e-6))
