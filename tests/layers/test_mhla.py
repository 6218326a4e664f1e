# SPDX-License-Identifier: Apache-2.0
"""The MHLA module: its options against the dense definition, its initial values, other grids, and bad input."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from mhla_hf import MHLA, BlockLayout, MHLAConfig, mhla_attention
from mhla_hf.layers.mhla import GATE_IDENTITY_BIAS


GRID = (3, 4, 5)
HIDDEN, HEADS, WIDTH = 12, 2, 6


def make_layer(dtype: torch.dtype = torch.float64, **options: object) -> MHLA:
    options = {"blocks": (2, 2, 3), **options}
    config = MHLAConfig.from_dict({key: value for key, value in options.items() if value is not None})
    return MHLA(config, hidden_size=HIDDEN, num_heads=HEADS, head_dim=WIDTH).to(dtype)


def make_tokens(grid: tuple[int, ...] = GRID, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.tensor(grid).prod().item()
    tensors = {
        name: torch.randn(2, tokens, HEADS, WIDTH, generator=generator, dtype=torch.float64)
        for name in ("query", "key", "value")
    }
    tensors["hidden_states"] = torch.randn(2, tokens, HIDDEN, generator=generator, dtype=torch.float64)
    return tensors


def rotate(tokens: torch.Tensor) -> torch.Tensor:
    """A rotary embedding over the token axis, adjacent pairs."""
    angle = torch.arange(tokens.shape[1], dtype=tokens.dtype)[:, None, None] * torch.tensor([1.0, 0.3, 0.05])
    even, odd = tokens[..., 0::2], tokens[..., 1::2]
    return torch.stack((even * angle.cos() - odd * angle.sin(), even * angle.sin() + odd * angle.cos()), -1).flatten(
        -2
    )


def test_rope_after_the_feature_map_leaves_the_normalizer_unrotated():
    layer, tokens = make_layer(), make_tokens()
    query, key = tokens["query"].relu(), tokens["key"].relu()
    expected = mhla_attention(
        rotate(query), rotate(key), tokens["value"], layer.mixing, BlockLayout(GRID, (2, 2, 3)),
        normalizer_query=query, normalizer_key=key, backend="naive",
    )  # fmt: skip
    torch.testing.assert_close(layer(**tokens, grid=GRID, rotary=rotate), expected, rtol=1e-10, atol=1e-10)


def test_rope_before_the_feature_map_is_used_everywhere():
    layer, tokens = make_layer(rope="before_feature_map"), make_tokens()
    query, key = rotate(tokens["query"]).relu(), rotate(tokens["key"]).relu()
    layout = BlockLayout(GRID, (2, 2, 3))
    expected = mhla_attention(query, key, tokens["value"], layer.mixing, layout, backend="naive")
    torch.testing.assert_close(layer(**tokens, grid=GRID, rotary=rotate), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    "name, function",
    [
        ("relu", torch.relu),
        ("elu", lambda tokens: F.elu(tokens) + 1),
        ("exp", torch.exp),
        ("identity", lambda tokens: tokens),
        ("hedgehog", lambda tokens: torch.cat([tokens, -tokens], -1).softmax(-1)),
    ],
)
@pytest.mark.parametrize("eps", [0.0, 1e-2])
def test_feature_maps(name, function, eps):
    layer, tokens = make_layer(feature_map=name, feature_map_eps=eps, normalizer="none"), make_tokens()
    query, key = function(tokens["query"]) + eps, function(tokens["key"]) + eps
    layout = BlockLayout(GRID, (2, 2, 3))
    expected = mhla_attention(query, key, tokens["value"], layer.mixing, layout, normalizer="none", backend="naive")
    torch.testing.assert_close(layer(**tokens, grid=GRID), expected, rtol=1e-10, atol=1e-10)


def test_hedgehog_rotates_each_half_of_its_features():
    layer, tokens = make_layer(feature_map="hedgehog", normalizer="none"), make_tokens()

    def features(states: torch.Tensor) -> torch.Tensor:
        mapped = torch.cat([states, -states], -1).softmax(-1)
        return torch.cat([rotate(mapped[..., :WIDTH]), rotate(mapped[..., WIDTH:])], -1)

    layout = BlockLayout(GRID, (2, 2, 3))
    query, key = features(tokens["query"]), features(tokens["key"])
    expected = mhla_attention(query, key, tokens["value"], layer.mixing, layout, normalizer="none", backend="naive")
    torch.testing.assert_close(layer(**tokens, grid=GRID, rotary=rotate), expected, rtol=1e-10, atol=1e-10)


def test_fresh_gate_and_convolution_leave_the_output_unchanged():
    plain, tokens = make_layer(), make_tokens()
    dressed = make_layer(output_gate=True, lepe_kernel=3)
    expected = plain(**tokens, grid=GRID)
    # Initial values are float32, and so is the rounding of the gate's bias.
    torch.testing.assert_close(dressed(**tokens, grid=GRID), expected, rtol=1e-7, atol=1e-7)
    assert F.silu(torch.tensor(GATE_IDENTITY_BIAS, dtype=torch.float64)).item() == pytest.approx(1.0, abs=1e-15)


def test_output_norm_gate_and_convolution_in_this_order():
    layer, tokens = make_layer(output_norm=True, output_gate=True, lepe_kernel=3), make_tokens()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn_like(parameter))
    layout = BlockLayout(GRID, (2, 2, 3))
    query, key = tokens["query"].relu(), tokens["key"].relu()
    attended = mhla_attention(query, key, tokens["value"], layer.mixing, layout, backend="naive")
    normed = attended * (attended.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * layer.output_norm.weight
    gate = tokens["hidden_states"] @ layer.gate.weight.T + layer.gate.bias
    gated = normed * (gate * gate.sigmoid()).reshape(2, -1, HEADS, WIDTH)
    image = tokens["value"].reshape(2, *GRID, HEADS * WIDTH).permute(0, 4, 1, 2, 3)
    weight, bias = layer.lepe.weight, layer.lepe.bias
    convolved = F.conv3d(image, weight, bias, padding=1, groups=HEADS * WIDTH).permute(0, 2, 3, 4, 1)
    expected = gated + convolved.reshape(2, -1, HEADS, WIDTH)
    torch.testing.assert_close(layer(**tokens, grid=GRID), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"feature_map": "hedgehog", "mixing_heads": "per_head", "mixing_constraint": "nonnegative"},
        {"output_norm": True, "output_gate": True, "lepe_kernel": 3, "normalizer": "none"},
    ],
    ids=["plain", "hedgehog", "full"],
)
@pytest.mark.parametrize("grid", [GRID, (1, 2, 7)], ids=["own-grid", "other-grid"])
def test_gradcheck_of_every_parameter_and_input(options, grid):
    torch.manual_seed(3)
    layer = MHLA(
        MHLAConfig(blocks=(1, 2, 2), **options), hidden_size=3, num_heads=2, head_dim=2
    ).double()  # fmt: skip
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    names = [name for name, _ in layer.named_parameters()]
    grid = (1, 2, 3) if grid == GRID else (1, 1, 5)
    tokens = torch.tensor(grid).prod().item()
    inputs = [torch.rand(1, tokens, 2, 2, dtype=torch.float64) + 0.1 for _ in range(3)]
    inputs.append(torch.randn(1, tokens, 3, dtype=torch.float64))
    inputs = [tensor.requires_grad_() for tensor in inputs]

    def attend(query, key, value, hidden_states, *parameters):
        arguments = {"query": query, "key": key, "value": value, "hidden_states": hidden_states, "grid": grid}
        return torch.func.functional_call(layer, dict(zip(names, parameters)), (), arguments)

    assert torch.autograd.gradcheck(attend, (*inputs, *layer.parameters()))


def test_forward_writes_no_parameter():
    layer, tokens = make_layer(mixing_constraint="nonnegative", output_norm=True), make_tokens()
    before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    layer(**tokens, grid=GRID).sum().backward()
    assert all(torch.equal(tensor, before[name]) for name, tensor in layer.state_dict().items())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_in_half_precision_out(dtype):
    layer = make_layer(dtype, output_norm=True, output_gate=True, lepe_kernel=3)
    reference = make_layer(torch.float64, output_norm=True, output_gate=True, lepe_kernel=3)
    reference.load_state_dict(layer.state_dict())
    tokens = {name: tensor.to(dtype) for name, tensor in make_tokens().items()}
    output = layer(**tokens, grid=GRID)
    assert output.dtype == dtype
    expected = reference(**{name: tensor.double() for name, tensor in tokens.items()}, grid=GRID)
    assert ((output.double() - expected).norm() / expected.norm()).item() < 8 * torch.finfo(dtype).eps


def test_unnormalised_half_precision_is_rounded_after_the_output_norm():
    layer = make_layer(torch.float16, normalizer="none", output_norm=True)
    tokens = {name: (tensor * 300).half() for name, tensor in make_tokens().items()}
    assert layer(**tokens, grid=GRID).isfinite().all()


def test_initial_parameters_and_their_shapes():
    options = {"feature_map": "hedgehog", "output_norm": True, "output_gate": True, "lepe_kernel": 3}
    layer = make_layer(mixing_heads="per_head", **options)
    assert layer.mixing.shape == (2, 12, 12) and layer.lepe.weight.shape == (12, 1, 3, 3, 3)
    for name, parameter in layer.named_parameters():
        assert torch.equal(parameter.float(), layer.initial_tensor(name))
    with pytest.raises(AttributeError, match="gate"):
        layer.initial_tensor("gate")


@pytest.mark.parametrize(
    "options, grid, blocks",
    [
        ({}, (3, 4, 5), (2, 2, 3)),
        ({}, (1, 9, 40), (1, 2, 3)),
        ({"grid": (4, 4, 6)}, (7, 7, 11), (2, 2, 3)),
        ({"grid": (4, 4, 6)}, (8, 4, 6), (4, 2, 3)),
        ({"grid": (4, 4, 6)}, (4, 4, 3), (2, 2, 2)),
        ({"grid": (4, 4, 6), "resize": "blocks"}, (8, 8, 12), (2, 2, 3)),
        ({"grid": (4, 4, 6), "resize": "block_size"}, (6, 4, 6), (3, 2, 3)),
        ({"blocks": None, "block_size": (2, 2, 2), "grid": (4, 4, 5)}, (4, 4, 5), (2, 2, 3)),
        ({"blocks": None, "block_size": (2, 2, 2), "grid": (4, 4, 5)}, (5, 4, 9), (2, 2, 3)),
        ({"blocks": None, "block_size": (2, 2, 2), "grid": (4, 4, 5)}, (9, 4, 5), (5, 2, 3)),
    ],
)
def test_the_layout_at_another_grid(options, grid, blocks):
    layer, tokens = make_layer(**options), make_tokens(grid)
    layout = layer.layout_for(grid)
    assert layout.blocks == blocks
    output = layer(**tokens, grid=grid)
    mixing = layer.mixing_matrix(layout)
    query, key = tokens["query"].relu(), tokens["key"].relu()
    expected = mhla_attention(query, key, tokens["value"], mixing, layout, backend="naive")
    torch.testing.assert_close(output, expected, rtol=1e-10, atol=1e-10)


def test_bad_input_is_named():
    layer, tokens = make_layer(output_gate=True), make_tokens()
    with pytest.raises(ValueError, match="grid=.* has 40 tokens, but query has 60"):
        layer(**tokens, grid=(2, 4, 5))
    with pytest.raises(ValueError, match="axes"):
        layer(**tokens, grid=(60,))
    with pytest.raises(ValueError, match="hidden_states"):
        layer(tokens["query"], tokens["key"], tokens["value"], grid=GRID)


def test_a_causal_layer_keeps_its_block_size_at_any_length():
    config = MHLAConfig(block_size=(4,), grid=(16,), causal=True, mixing_init="uniform")
    layer = MHLA(config, hidden_size=HIDDEN, num_heads=HEADS, head_dim=WIDTH).double()
    for length in (3, 16, 30):
        tokens = make_tokens((length,))
        query, key = tokens["query"].relu(), tokens["key"].relu()
        layout = BlockLayout((length,), block_size=(4,))
        options = {"causal": True, "backend": "naive"}
        expected = mhla_attention(query, key, tokens["value"], layer.mixing, layout, **options)
        torch.testing.assert_close(layer(**tokens, grid=(length,)), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("grid", [(6, 8), (5, 7)], ids=str)
@pytest.mark.parametrize("options", [{}, {"normalizer": "none"}, {"lepe_kernel": 3}], ids=str)
def test_half_precision_tokens_lose_nothing_against_float32(options, grid, dtype, monkeypatch):
    """Tokens that go into the operator as they are give what those converted first do, bit for bit."""
    torch.manual_seed(0)
    config = MHLAConfig(blocks=(2, 2), backend="torch", **options)
    layer = MHLA(config, hidden_size=8, num_heads=2, head_dim=8, default_grid=grid).to(dtype)
    tokens = [torch.randn(2, grid[0] * grid[1], 2, 8, dtype=dtype, requires_grad=True) for _ in range(3)]
    results = {}
    for name in ("as they are", "converted"):
        output = layer(*tokens, grid=grid)
        results[name] = [output, *torch.autograd.grad(output.float().square().sum(), tokens)]
        monkeypatch.setattr("mhla_hf.layers.mhla.token_dtype", lambda *args, **kwargs: torch.float32)
    assert all(torch.equal(*pair) for pair in zip(*results.values(), strict=True))


def test_autocast_leaves_resampled_mixing_weights_as_they_are():
    layer = make_layer(torch.float32, resize="blocks")
    with torch.no_grad():
        layer.mixing.copy_(torch.rand(layer.mixing.shape, generator=torch.Generator().manual_seed(0)))
    layout = BlockLayout((6, 4, 5), blocks=(4, 2, 3))
    expected = layer.mixing_matrix(layout)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = layer.mixing_matrix(layout)
    assert actual.dtype == torch.float32 and torch.equal(actual, expected)
