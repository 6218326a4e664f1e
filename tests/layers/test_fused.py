# SPDX-License-Identifier: Apache-2.0
"""The fused path of a layer against the layer in plain torch: every step it takes over, and when it may."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn as nn

from mhla_hf import MHLAConfig
from mhla_hf.layers import MHLA, HeadNorms, PairwiseRotary

from ..ops.triton_checks import DEVICES, buffers_full_of_nan, work_in_groups


pytest.importorskip("triton")

GRID = (3, 5)
OPTIONS = [
    {},
    {"normalizer": "none", "output_norm": True, "output_gate": True, "feature_map_eps": 1e-6},
    {"feature_map": "elu", "lepe_kernel": 3, "mixing_heads": "per_head"},
    {"feature_map": "exp", "output_gate": True, "head_dim": 12},
    {"kv_heads": 1, "mixing_heads": "per_head"},
    {"kv_heads": 1, "normalizer": "none", "feature_map": "identity"},
    {"kv_heads": 1, "window": "adjacent", "window_size": (2, 2)},
]


def make_layer(device, *, seed=2, grid=GRID, blocks=(2, 2), head_dim=8, heads=2, kv_heads=2, **options):
    """A layer with random weights everywhere, norms across heads, and inputs: (layer, arguments of forward)."""
    generator = torch.Generator().manual_seed(seed)
    config = MHLAConfig(blocks=blocks, backend="triton", **options)
    layer = MHLA(
        config, hidden_size=6, num_heads=heads, head_dim=head_dim, num_key_value_heads=kv_heads, default_grid=grid
    )
    norms = nn.RMSNorm(heads * head_dim, eps=1e-5), nn.RMSNorm(kv_heads * head_dim, eps=1e-5)
    with torch.no_grad():
        for parameter in [*layer.parameters(), *norms[0].parameters(), *norms[1].parameters()]:
            parameter.copy_(torch.rand(parameter.shape, generator=generator) + 0.2)
    angles = torch.rand(1, math.prod(grid), 1, head_dim // 2, generator=generator)
    tokens = [
        torch.randn(2, math.prod(grid), count, head_dim, generator=generator) for count in (heads, kv_heads, kv_heads)
    ]
    arguments = {
        "grid": grid,
        "hidden_states": torch.randn(2, math.prod(grid), 6, generator=generator).to(device),
        "rotary": PairwiseRotary(angles.cos().to(device), angles.sin().to(device)),
        "norms": HeadNorms(*(norm.to(device) for norm in norms)),
    }
    return layer.to(device), [tensor.to(device) for tensor in tokens], arguments


def make_half_layer(device, dtype, **options):
    """A layer whose inputs, gate and norms have half precision."""
    layer, tokens, arguments = make_layer(device, head_dim=32, output_norm=True, output_gate=True, **options)
    for module in (layer.gate, arguments["norms"].query, arguments["norms"].key):
        module.to(dtype)
    arguments["hidden_states"] = arguments["hidden_states"].to(dtype)
    return layer, [tensor.to(dtype) for tensor in tokens], arguments


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
@pytest.mark.parametrize("options", OPTIONS)
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
    layer, tokens, arguments = make_half_layer(device, dtype)
    kernel, plain = layer(*tokens, **arguments), in_torch(layer, tokens, arguments)
    with torch.enable_grad():
        exact = exact_results(layer, tokens, arguments)["output"]
    errors = [(result.double() - exact).norm() / exact.norm() for result in (kernel, plain)]
    assert errors[0] <= 2 * errors[1]


def outputs_and_gradients(layer, tokens, arguments):
    """The output of a layer, and gradients of a random sum of it, by name; the layer and its inputs are left alone."""
    layer, arguments = copy.deepcopy(layer), dict(arguments)
    norms = arguments.get("norms")
    leaves = {name: token.detach().clone().requires_grad_() for name, token in zip(("query", "key", "value"), tokens)}
    if norms is not None:
        arguments["norms"] = HeadNorms(copy.deepcopy(norms.query), copy.deepcopy(norms.key))
        leaves["query_norm"], leaves["key_norm"] = arguments["norms"].query.weight, arguments["norms"].key.weight
    output = layer(leaves["query"], leaves["key"], leaves["value"], **arguments)
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(4)).to(output)
    (output * weights).sum().backward()
    leaves.update(layer.named_parameters())
    return {"output": output.detach(), **{name: leaf.grad for name, leaf in leaves.items()}}


def exact_results(layer, tokens, arguments):
    """The same by plain torch in float64."""
    plain = copy.deepcopy(layer).double()
    plain.config = layer.config.replace(backend="torch")
    arguments = dict(arguments)
    if "norms" in arguments:
        norms = copy.deepcopy(arguments["norms"].query), copy.deepcopy(arguments["norms"].key)
        arguments["norms"] = HeadNorms(norms[0].double(), norms[1].double())
    if "rotary" in arguments:
        rotary = arguments["rotary"]
        arguments["rotary"] = PairwiseRotary(rotary.cosine.double(), rotary.sine.double())
    if "hidden_states" in arguments:
        arguments["hidden_states"] = arguments["hidden_states"].double()
    return outputs_and_gradients(plain, [tensor.double() for tensor in tokens], arguments)


def assert_close_to_exact(actual, expected):
    assert actual.keys() == expected.keys()
    for name, reference in expected.items():
        size = max(1.0, reference.abs().max().item())
        torch.testing.assert_close(actual[name].double(), reference, rtol=1e-5, atol=1e-5 * size)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("seed", [0, 1])
def test_gradients_match_torch(options, seed, device, fused_calls):
    """Of the inputs and of every parameter, with everything that is allocated full of NaN."""
    layer, tokens, arguments = make_layer(device, seed=seed, **options)
    expected = exact_results(layer, tokens, arguments)
    with buffers_full_of_nan():
        actual = outputs_and_gradients(layer, tokens, arguments)
    assert len(fused_calls) == 1
    assert_close_to_exact(actual, expected)


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("heads, kv_heads", [(2, 2), (4, 2)])
def test_gradients_of_blocks_and_shares_of_several_tiles(heads, kv_heads, device, monkeypatch, fused_calls):
    """207 tokens in blocks of 115 and 92, worked off by as few programs as there can be."""
    from mhla_hf.ops.triton import launching

    monkeypatch.setattr(launching, "FEW_PROGRAMS", 1)
    layer, tokens, arguments = make_layer(
        device, grid=(9, 23), blocks=(2, 1), heads=heads, kv_heads=kv_heads, output_norm=True, output_gate=True
    )
    expected = exact_results(layer, tokens, arguments)
    with buffers_full_of_nan():
        actual = outputs_and_gradients(layer, tokens, arguments)
    assert len(fused_calls) == 1
    assert_close_to_exact(actual, expected)


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize(
    "options",
    [
        {"mixing_heads": "per_head", "heads": 4},
        {"heads": 4, "normalizer": "none", "output_norm": True},
        {"mixing_heads": "per_head", "output_gate": True, "heads": 2, "kv_heads": 2},
    ],
)
def test_groups_of_lines_change_nothing(options, group, device, monkeypatch, fused_calls):
    """Some key heads of batch entries at a time, the last group smaller; weights of each head, or shared ones."""
    layer, tokens, arguments = make_layer(device, grid=(5, 7), blocks=(2, 3), **options)
    expected = exact_results(layer, tokens, arguments)
    whole = outputs_and_gradients(layer, tokens, arguments)
    work_in_groups(monkeypatch, group)
    with buffers_full_of_nan():
        actual = outputs_and_gradients(layer, tokens, arguments)
    # On a GPU, the library of products chooses an algorithm by how many there are.
    assert device == "cuda" or torch.equal(actual["output"], whole["output"])
    assert_close_to_exact(actual, expected)


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_inputs_and_gradients_may_lie_anyhow(device, fused_calls):
    """Queries, keys and values cut out of one projection, and an output that is summed up: a gradient of stride 0."""
    layer, tokens, arguments = make_layer(device, output_gate=True)
    together = torch.stack([token.transpose(1, 2) for token in tokens], dim=-1)
    results = []
    for backend in ("triton", "torch"):
        layer.config = layer.config.replace(backend=backend)
        leaf = together.clone().requires_grad_()
        layer(*(part.transpose(1, 2) for part in leaf.unbind(-1)), **arguments).sum().backward()
        results.append(leaf.grad)
    assert len(fused_calls) == 1
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_gradients_without_norms_and_rotary_embeddings(device, fused_calls):
    layer, tokens, _ = make_layer(device, head_dim=9)
    arguments = {"grid": GRID, "scaling": 0.25}
    expected, actual = exact_results(layer, tokens, arguments), outputs_and_gradients(layer, tokens, arguments)
    assert len(fused_calls) == 1
    for name, reference in expected.items():
        torch.testing.assert_close(actual[name].double(), reference, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("normalizer", ["query", "none"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_in_half_precision_are_no_more_than_twice_as_wrong_as_those_of_torch(dtype, normalizer, device):
    layer, tokens, arguments = make_half_layer(device, dtype, normalizer=normalizer)
    exact = exact_results(layer, tokens, arguments)
    plain = copy.deepcopy(layer)
    plain.config = layer.config.replace(backend="torch")
    results = [outputs_and_gradients(module, tokens, arguments) for module in (layer, plain)]
    for name, reference in exact.items():
        kernel, torchs = ((result[name].double() - reference).norm() / reference.norm() for result in results)
        assert kernel <= 2 * torchs, f"{name}: {kernel:.2e} against {torchs:.2e}"


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_gradients_through_one_compiled_graph(device):
    layer, tokens, arguments = make_layer(device, output_gate=True, output_norm=True)
    expected = outputs_and_gradients(layer, tokens, arguments)
    torch._dynamo.reset()
    layer.compile(fullgraph=True, backend="aot_eager")
    actual = outputs_and_gradients(layer, tokens, arguments)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_rotary_tables_that_learn_take_the_other_path(device, fused_calls):
    layer, tokens, arguments = make_layer(device)
    cosine = arguments["rotary"].cosine.clone().requires_grad_()
    arguments["rotary"] = PairwiseRotary(cosine, arguments["rotary"].sine)
    layer(*tokens, **arguments).sum().backward()
    assert not fused_calls and cosine.grad is not None


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_float16_keeps_its_gradients_where_tf32_is_allowed(device, monkeypatch):
    """Gradients of its outputs are float32, which must not go through TF32 for that."""
    from mhla_hf.ops.triton import launching

    layer, tokens, arguments = make_layer(device, head_dim=32, output_norm=True)
    tokens = [tensor.half() for tensor in tokens]
    results = []
    for allowed in (False, True):
        monkeypatch.setattr(launching, "tf32_is_allowed", lambda allowed=allowed: allowed)
        results.append(outputs_and_gradients(layer, tokens, arguments))
    for name, reference in results[0].items():
        assert torch.equal(results[1][name], reference), name


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


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@torch.no_grad()
def test_compiles_in_one_graph(device):
    layer, tokens, arguments = make_layer(device, output_gate=True)
    expected = layer(*tokens, **arguments)
    torch._dynamo.reset()
    output = torch.compile(layer, fullgraph=True, backend="aot_eager")(*tokens, **arguments)
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
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
