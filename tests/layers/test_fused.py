# SPDX-License-Identifier: Apache-2.0
"""The fused inference path of a layer against the layer in plain torch: every step it takes over, and when it may."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn as nn

from mhla_hf import MHLAConfig
from mhla_hf.layers import MHLA, HeadNorms, PairwiseRotary

from ..ops.triton_checks import DEVICES


pytest.importorskip("triton")

GRID = (3, 5)


def make_layer(device, *, head_dim=8, heads=2, kv_heads=2, **options):
    """A layer with random weights everywhere, norms across heads, and inputs: (layer, arguments of forward)."""
    generator = torch.Generator().manual_seed(2)
    config = MHLAConfig(blocks=(2, 2), backend="triton", **options)
    layer = MHLA(
        config, hidden_size=6, num_heads=heads, head_dim=head_dim, num_key_value_heads=kv_heads, default_grid=GRID
    )
    norms = nn.RMSNorm(heads * head_dim, eps=1e-5), nn.RMSNorm(kv_heads * head_dim, eps=1e-5)
    with torch.no_grad():
        for parameter in [*layer.parameters(), *norms[0].parameters(), *norms[1].parameters()]:
            parameter.copy_(torch.rand(parameter.shape, generator=generator) + 0.2)
    angles = torch.rand(1, 15, 1, head_dim // 2, generator=generator)
    tokens = [torch.randn(2, 15, count, head_dim, generator=generator) for count in (heads, kv_heads, kv_heads)]
    arguments = {
        "grid": GRID,
        "hidden_states": torch.randn(2, 15, 6, generator=generator).to(device),
        "rotary": PairwiseRotary(angles.cos().to(device), angles.sin().to(device)),
        "norms": HeadNorms(*(norm.to(device) for norm in norms)),
    }
    return layer.to(device), [tensor.to(device) for tensor in tokens], arguments


def in_torch(layer, tokens, arguments):
    """The same layer computed without kernels."""
    plain = copy.deepcopy(layer)
    plain.config = layer.config.replace(backend="torch")
    return plain(*tokens, **arguments)


@pytest.fixture
def fused_calls(monkeypatch):
    """Counts the layers that ran in the fused kernels."""
    from mhla_hf.layers import mhla

    calls = []
    plain = mhla.fused_attention
    monkeypatch.setattr(mhla, "fused_attention", lambda *args, **kwargs: calls.append(1) or plain(*args, **kwargs))
    return calls


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"normalizer": "none", "output_norm": True, "output_gate": True, "feature_map_eps": 1e-6},
        {"feature_map": "elu", "lepe_kernel": 3, "mixing_heads": "per_head"},
        {"feature_map": "exp", "output_gate": True, "head_dim": 12},
        {"kv_heads": 1, "mixing_heads": "per_head"},
        {"kv_heads": 1, "normalizer": "none", "feature_map": "identity"},
    ],
)
@torch.no_grad()
def test_fused_layers_match_torch(options, device, fused_calls):
    layer, tokens, arguments = make_layer(device, **options)
    torch.testing.assert_close(layer(*tokens, **arguments), in_torch(layer, tokens, arguments), rtol=1e-5, atol=1e-5)
    assert len(fused_calls) == 1


@pytest.mark.parametrize("device", DEVICES)
@torch.no_grad()
def test_without_norms_and_rotary_embeddings(device, fused_calls):
    layer, tokens, arguments = make_layer(device, head_dim=9)
    arguments = {"grid": GRID, "scaling": 0.25}
    torch.testing.assert_close(layer(*tokens, **arguments), in_torch(layer, tokens, arguments), rtol=1e-5, atol=1e-5)
    assert len(fused_calls) == 1


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.no_grad()
def test_half_precision_is_no_more_than_twice_as_wrong_as_torch(dtype, device):
    layer, tokens, arguments = make_layer(device, head_dim=32, output_norm=True, output_gate=True)
    for module in (layer.gate, arguments["norms"].query, arguments["norms"].key):
        module.to(dtype)
    tokens = [tensor.to(dtype) for tensor in tokens]
    arguments["hidden_states"] = arguments["hidden_states"].to(dtype)
    kernel, plain = layer(*tokens, **arguments), in_torch(layer, tokens, arguments)
    exact_arguments = {
        "grid": GRID,
        "hidden_states": arguments["hidden_states"].double(),
        "rotary": PairwiseRotary(arguments["rotary"].cosine.double(), arguments["rotary"].sine.double()),
        "norms": HeadNorms(arguments["norms"].query.double(), arguments["norms"].key.double()),
    }
    exact = in_torch(copy.deepcopy(layer).double(), [tensor.double() for tensor in tokens], exact_arguments)
    errors = [(result.double() - exact).norm() / exact.norm() for result in (kernel, plain)]
    assert errors[0] <= 2 * errors[1]


@pytest.mark.parametrize("device", DEVICES)
def test_training_takes_the_differentiable_path(device, fused_calls):
    layer, tokens, arguments = make_layer(device, output_norm=True)
    expected = in_torch(layer, tokens, arguments)
    output = layer(*tokens, **arguments)
    assert not fused_calls
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)
    output.square().sum().backward()
    assert all(parameter.grad is not None for parameter in layer.parameters())


@pytest.mark.parametrize("device", DEVICES)
@torch.no_grad()
def test_norms_with_hooks_are_called(device, fused_calls):
    """A hook may bring the weight in from elsewhere: such a norm runs as the module it is."""
    layer, tokens, arguments = make_layer(device)
    seen = []
    arguments["norms"].query.register_forward_hook(lambda *args: seen.append(1))
    output = layer(*tokens, **arguments)
    assert seen and fused_calls
    torch.testing.assert_close(output, in_torch(layer, tokens, arguments), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
@torch.no_grad()
def test_norms_that_compute_something_else_are_called(device, fused_calls):
    class FromOne(nn.RMSNorm):
        def forward(self, tokens):
            return nn.functional.rms_norm(tokens, self.normalized_shape, 1 + self.weight, self.eps)

    layer, tokens, arguments = make_layer(device)
    arguments["norms"] = HeadNorms(*(FromOne(16).to(device) for _ in range(2)))
    output = layer(*tokens, **arguments)
    torch.testing.assert_close(output, in_torch(layer, tokens, arguments), rtol=1e-5, atol=1e-5)
    assert fused_calls


@pytest.mark.parametrize("device", DEVICES)
@torch.no_grad()
def test_compiles_in_one_graph(device):
    layer, tokens, arguments = make_layer(device, output_gate=True)
    expected = layer(*tokens, **arguments)
    torch._dynamo.reset()
    output = torch.compile(layer, fullgraph=True, backend="aot_eager")(*tokens, **arguments)
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
@torch.no_grad()
def test_a_bad_query_spoils_its_own_token_only(device):
    layer, tokens, arguments = make_layer(device)
    arguments["norms"] = None
    clean = layer(*tokens, **arguments)
    tokens[0][1, 4, 1, 3] = float("nan")
    output = layer(*tokens, **arguments)
    assert output[1, 4, 1].isnan().all()
    output[1, 4, 1] = clean[1, 4, 1]
    assert torch.equal(output, clean)
