# SPDX-License-Identifier: Apache-2.0
"""Hedgehog features by their kernels, and attention with them, against the dense form in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from mhla_hf import BlockLayout, mhla_attention
from mhla_hf.layers.fused import PairwiseRotary
from mhla_hf.ops.definitions import FEATURE_MAPS

from .reference import assert_same
from .triton_checks import DEVICES, buffers_full_of_nan


pytest.importorskip("triton")
# Half a minute interpreted; layers with hedgehog features are tested every time.
pytestmark = pytest.mark.slow

HEDGEHOG = FEATURE_MAPS["hedgehog"].forward
LAYOUTS = {
    "ragged": BlockLayout((7, 9), blocks=(2, 2)),
    "one token": BlockLayout((1,), blocks=(1,)),
    "short last block": BlockLayout((63,), block_size=(20,)),
    "single tokens": BlockLayout((5,), blocks=(5,)),
}
# Heads, key/value heads, K, V, and what else there is.
CASES = {
    "plain": ((2, 2, 8, 8), {}),
    "grouped heads": ((4, 2, 12, 20), {"per_head": True, "feature_map_eps": 1e-3}),
    "grouped heads, shared weights": ((4, 2, 16, 8), {"scaling": 0.5}),
    "norms and rotary embeddings": ((2, 2, 24, 16), {"per_head": True, "norms": True, "rotary": True, "scaling": 0.7}),
    "no normaliser": ((2, 1, 16, 24), {"rotary": True, "normalizer": "none"}),
}


def make_inputs(layout, sizes, seed, *, per_head=False, norms=False, **_):
    """Projections, W near the identity, mixing weights and the weights of norms, in float64."""
    heads, groups, key_width, value_width = sizes
    generator = torch.Generator().manual_seed(seed)
    tokens, blocks = layout.num_tokens, layout.num_blocks

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    inputs = {
        "query": normal(2, tokens, heads, key_width),
        "key": normal(2, tokens, groups, key_width),
        "value": normal(2, tokens, groups, value_width),
        "query_weight": torch.eye(key_width) + 0.3 * normal(heads, key_width, key_width),
        "key_weight": torch.eye(key_width) + 0.3 * normal(groups, key_width, key_width),
        "mixing": normal(*((heads,) if per_head else ()), blocks, blocks).abs() + 0.05,
    }
    if norms:
        inputs["query_norm"] = 1 + 0.2 * normal(heads * key_width)
        inputs["key_norm"] = 1 + 0.2 * normal(groups * key_width)
    return inputs


def angles_of(layout, width):
    return torch.rand(layout.num_tokens, width // 2, generator=torch.Generator().manual_seed(5)) * 6


def in_kernels(inputs, layout, *, rotary=False, normalizer="query", scaling=1.0, feature_map_eps=0.0, **_):
    from mhla_hf.ops.triton import hedgehog_features

    angles = angles_of(layout, inputs["query"].shape[3]).to(inputs["query"].device)
    features = [
        hedgehog_features(
            inputs[name], inputs[f"{name}_weight"], scaling=scaling, feature_eps=feature_map_eps,
            rotary=(angles.cos(), angles.sin()) if rotary else None,
            norm=(inputs[f"{name}_norm"], 1e-6) if f"{name}_norm" in inputs else None,
        )
        for name in ("query", "key")
    ]  # fmt: skip
    options = {"normalizer": normalizer, "eps": 1e-6, "backend": "triton"}
    return mhla_attention(*features, inputs["value"], inputs["mixing"], layout, **options)


def in_torch(
    inputs, layout, *, rotary=False, normalizer="query", scaling=1.0, feature_map_eps=0.0, backend="naive", **_
):
    features = []
    for name in ("query", "key"):
        tokens = inputs[name]
        if f"{name}_norm" in inputs:
            weight = inputs[f"{name}_norm"]
            tokens = F.rms_norm(tokens.flatten(2), weight.shape, weight, 1e-6).unflatten(2, tokens.shape[2:])
        if rotary:
            angles = angles_of(layout, tokens.shape[3]).to(tokens)[None, :, None]
            tokens = PairwiseRotary(angles.cos(), angles.sin())(tokens)
        features.append(HEDGEHOG(tokens * scaling, inputs[f"{name}_weight"]) + feature_map_eps)
    options = {"normalizer": normalizer, "eps": 1e-6, "backend": backend}
    return mhla_attention(*features, inputs["value"], inputs["mixing"], layout, **options)


def results(attend, inputs, layout, dtype, device, **options):
    """Output and gradients of every input."""
    leaves = {
        name: tensor.to(device, torch.float32 if name == "mixing" and dtype != torch.float64 else dtype)
        for name, tensor in inputs.items()
    }
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in leaves.items()}
    output = attend(leaves, layout, **options)
    cotangent = torch.randn(output.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    gradients = torch.autograd.grad(output, list(leaves.values()), cotangent.to(output.device, output.dtype))
    named = {f"gradient of {name}": gradient.cpu() for name, gradient in zip(leaves, gradients)}
    return {"output": output.detach().cpu(), **named}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "grid, case, seed",
    [
        *(("ragged", case, 0) for case in CASES),
        *(("short last block", case, 1) for case in CASES),
        ("one token", "plain", 2),
        ("single tokens", "norms and rotary embeddings", 3),
    ],
)
def test_values_and_gradients(grid, case, seed, device):
    layout, (sizes, options) = LAYOUTS[grid], CASES[case]
    inputs = make_inputs(layout, sizes, seed, **options)
    expected = results(in_torch, inputs, layout, torch.float64, "cpu", **options)
    with buffers_full_of_nan():
        actual = results(in_kernels, inputs, layout, torch.float32, device, **options)
    assert_same(actual, expected, 2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", ["grouped heads", "norms and rotary embeddings"])
def test_half_precision_is_as_good_as_torch(case, dtype, device):
    layout, (sizes, options) = LAYOUTS["ragged"], CASES[case]
    inputs = make_inputs(layout, sizes, 3, **options)
    inputs = {name: tensor.to(torch.float32 if name == "mixing" else dtype) for name, tensor in inputs.items()}
    expected = results(in_torch, inputs, layout, torch.float64, "cpu", **options)
    actual = results(in_kernels, inputs, layout, dtype, device, **options)
    plain = results(in_torch, inputs, layout, dtype, "cpu", backend="torch", **options)
    for name, reference in expected.items():
        kernel, torchs = ((result[name].double() - reference).norm() / reference.norm() for result in (actual, plain))
        assert kernel <= torchs, f"{name}: {kernel:.2e} against {torchs:.2e}"


@pytest.mark.parametrize("device", DEVICES)
def test_exponents_do_not_overflow(device):
    """Projections of hundreds, whose exponentials float32 cannot hold, as long as features differ by less."""
    layout, sizes = LAYOUTS["ragged"], (2, 2, 8, 8)
    inputs = make_inputs(layout, sizes, 0)
    inputs["query"], inputs["key"] = 300 * inputs["query"], 300 * inputs["key"]
    expected = results(in_torch, inputs, layout, torch.float64, "cpu")
    actual = results(in_kernels, inputs, layout, torch.float32, device)
    assert all(tensor.isfinite().all() for tensor in actual.values())
    assert (actual["output"] - expected["output"]).norm() <= 1e-3 * expected["output"].norm()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype, width", [(torch.float32, 8), (torch.bfloat16, 20), (torch.float16, 16)])
def test_features_by_themselves(dtype, width, device):
    from mhla_hf.ops.triton import hedgehog_features

    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(2, 70, 3, width, generator=generator), torch.randn(3, width, width, generator=generator)
    inputs = [tensor.to(dtype) for tensor in inputs]
    cotangent = torch.randn(2, 70, 3, 2 * width, generator=generator).to(dtype)
    found = []
    for function, kind, where in ((hedgehog_features, dtype, device), (HEDGEHOG, torch.float64, "cpu")):
        leaves = [tensor.to(where, kind).detach().requires_grad_() for tensor in inputs]
        output = function(*leaves)
        gradients = torch.autograd.grad(output, leaves, cotangent.to(where, kind))
        found.append([tensor.detach().cpu().double() for tensor in (output, *gradients)])
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}[dtype]
    for actual, expected in zip(*found):
        assert (actual - expected).norm() <= tolerance * expected.norm()


@pytest.mark.parametrize("device", DEVICES)
def test_gradients_of_weights_over_several_programs(device, monkeypatch):
    """Gradients of W are the same, and the same twice, whatever the number of programs that sum them."""
    from mhla_hf.ops.triton import hedgehog, hedgehog_features

    generator = torch.Generator().manual_seed(0)
    tokens = torch.randn(1, 200, 2, 16, generator=generator).to(device)
    weight = torch.randn(2, 16, 16, generator=generator).to(device).requires_grad_()
    cotangent = torch.randn(1, 200, 2, 32, generator=generator).to(device)

    def gradient():
        return torch.autograd.grad(hedgehog_features(tokens, weight), weight, cotangent)[0]

    whole = gradient()
    monkeypatch.setattr(hedgehog, "GRADIENT_TOKENS", 50)
    parts = gradient()
    assert torch.equal(parts, gradient())
    torch.testing.assert_close(parts, whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
def test_operators_are_what_torch_expects(device):
    from mhla_hf.ops.triton import hedgehog

    layout = LAYOUTS["single tokens"]
    inputs = make_inputs(layout, (2, 1, 8, 4), 0, norms=True)
    leaves = {name: tensor.to(device, torch.float32).requires_grad_() for name, tensor in inputs.items()}
    angles = angles_of(layout, 8).to(device)
    turns = torch.stack((angles.cos(), angles.sin()), -1).flatten(1)
    tokens = leaves["query"], leaves["query_weight"]
    torch.library.opcheck(hedgehog.compute_features.overload, (*tokens, leaves["query_norm"], turns, 0.5, 1e-3, 1e-6))
    torch.library.opcheck(hedgehog.compute_features.overload, (*tokens, None, None, 1.0, 0.0, 0.0))


@pytest.mark.parametrize("device", DEVICES)
def test_operations_are_counted(device):
    """2 B T H K² forward, and three times that backward, where p is computed again."""
    from mhla_hf.ops.triton import hedgehog_features

    tokens = torch.randn(2, 63, 3, 8, device=device, requires_grad=True)
    weight = torch.randn(3, 8, 8, device=device, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        output = hedgehog_features(tokens, weight)
    assert counter.get_total_flops() == 2 * 2 * 63 * 3 * 64
    with FlopCounterMode(display=False) as counter:
        output.sum().backward()
    assert counter.get_total_flops() == 3 * 2 * 2 * 63 * 3 * 64
