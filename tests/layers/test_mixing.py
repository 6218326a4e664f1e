# SPDX-License-Identifier: Apache-2.0
"""Initial mixing weights, how they are stored, what goes on past them, and resampling that does not make them."""

from __future__ import annotations

import math

import pytest
import torch

from mhla_hf import MHLA, BlockLayout, MHLAConfig, mhla_attention
from mhla_hf.config import MIXING_INITS
from mhla_hf.layers import effective_mixing, initial_mixing, mixing_parameter_value
from mhla_hf.layers import mhla as mhla_module
from mhla_hf.layers.mixing import ResampledMixing
from mhla_hf.layers.state import DecodingState, TokenSequence
from mhla_hf.layouts.resampling import axis_interpolation


@pytest.mark.parametrize("kind", MIXING_INITS)
@pytest.mark.parametrize("blocks", [(1,), (4,), (2, 3), (3, 5, 10)], ids=str)
@pytest.mark.parametrize("reach", [None, 2.0])
def test_rows_sum_to_one_and_the_own_block_leads(kind, blocks, reach):
    mixing = initial_mixing(MHLAConfig(mixing_init=kind, mixing_range=reach), blocks)
    count = math.prod(blocks)
    assert mixing.shape == (count, count)
    torch.testing.assert_close(mixing.sum(1), torch.ones(count))
    assert mixing.min() >= 0
    assert (mixing.diagonal() >= mixing.amax(1) - 1e-7).all()


def test_the_papers_locality_bias():
    mixing = initial_mixing(MHLAConfig(), (4,))
    # Distances of row 1 are 1, 0, 1, 2 and its farthest is 2; of row 0 they are 0, 1, 2, 3.
    torch.testing.assert_close(mixing[1], torch.tensor([0.5, 1.0, 0.5, 0.0]) / 2)
    torch.testing.assert_close(mixing[0], torch.tensor([1.0, 2 / 3, 1 / 3, 0.0]) / 2)


def test_a_range_lets_the_bias_bottom_out():
    mixing = initial_mixing(MHLAConfig(mixing_range=2.0), (6,))
    torch.testing.assert_close(mixing[0] / mixing[0, 0], torch.tensor([1.0, 0.5, 0.01, 0.01, 0.01, 0.01]))


def test_uniform_and_local():
    assert torch.equal(initial_mixing(MHLAConfig(mixing_init="uniform"), (2, 2)), torch.full((4, 4), 0.25))
    assert torch.equal(initial_mixing(MHLAConfig(mixing_init="local"), (2, 2)), torch.full((4, 4), 0.25))
    local = initial_mixing(MHLAConfig(mixing_init="local"), (4,))
    torch.testing.assert_close(local[0], torch.tensor([0.5, 0.5, 0.0, 0.0]))


@pytest.mark.parametrize("kind", MIXING_INITS)
def test_causal_rows_look_back_only(kind):
    mixing = initial_mixing(MHLAConfig(mixing_init=kind, causal=True, block_size=4), (5,))
    assert torch.equal(mixing, mixing.tril())
    torch.testing.assert_close(mixing.sum(1), torch.ones(5))
    if kind == "uniform":
        torch.testing.assert_close(mixing[3], torch.tensor([0.25, 0.25, 0.25, 0.25, 0.0]))


@pytest.mark.parametrize("blocks", [(1,), (4,), (3, 5, 10)], ids=str)
def test_nonnegative_weights_start_the_same_and_none_is_dead(blocks):
    config = MHLAConfig(mixing_constraint="nonnegative")
    weights = initial_mixing(config, blocks)
    count = weights.shape[0]
    parameter = mixing_parameter_value(config, weights).requires_grad_()
    effective = effective_mixing(config, parameter)
    torch.testing.assert_close(effective, weights.clamp(min=0.01 / count), rtol=1e-4, atol=1e-5 / count)
    effective.sum().backward()
    # The farthest pair starts at zero in the paper's bias and must learn as well.
    assert parameter.grad.min() > 0.09
    far_below = effective_mixing(config, torch.full((2, 2), -1.0))
    assert (far_below >= 0).all()


@pytest.mark.parametrize(
    "options, blocks",
    [
        ({"causal": True, "block_size": 4, "mixing_init": "uniform"}, (200,)),
        ({"mixing_init": "local", "mixing_range": 0.5}, (3, 5, 10)),
    ],
)
def test_nonnegative_weights_far_above_the_mean_stay_finite(options, blocks):
    config = MHLAConfig(mixing_constraint="nonnegative", **options)
    weights = initial_mixing(config, blocks)
    effective = effective_mixing(config, mixing_parameter_value(config, weights))
    torch.testing.assert_close(effective, weights.clamp(min=0.01 / weights.shape[0]), rtol=1e-4, atol=1e-6)


def test_without_a_constraint_the_parameter_is_the_matrix():
    config, weights = MHLAConfig(), torch.randn(3, 3)
    assert mixing_parameter_value(config, weights) is weights
    assert effective_mixing(config, weights) is weights


CAUSAL = {"causal": True, "block_size": (4,), "grid": (20,)}


def make_layer(num_prefix_tokens: int = 0, **options) -> MHLA:
    """Four heads, two of keys and values."""
    return MHLA(
        MHLAConfig(**options), hidden_size=8, num_heads=4, head_dim=3, value_head_dim=2, num_key_value_heads=2,
        num_prefix_tokens=num_prefix_tokens,
    )  # fmt: skip


@pytest.mark.parametrize("constraint", ["none", "nonnegative"])
@pytest.mark.parametrize("kind", MIXING_INITS)
def test_a_weight_for_each_distance_starts_as_the_last_row(kind, constraint):
    config = MHLAConfig(mixing_init=kind, mixing_constraint=constraint, mixing_storage="distance", **CAUSAL)
    row = initial_mixing(config, (5,))[-1].clamp(min=0 if constraint == "none" else 0.01 / 5)
    parameter = mixing_parameter_value(config, initial_mixing(config, (5,)))
    assert parameter.shape == (5,)
    expected = torch.zeros(5, 5)
    for i in range(5):
        expected[i, : i + 1] = row[4 - i :]
    torch.testing.assert_close(effective_mixing(config, parameter), expected, rtol=1e-4, atol=1e-6)
    per_head = effective_mixing(config, parameter.expand(3, 5))
    torch.testing.assert_close(per_head, expected.expand(3, 5, 5), rtol=1e-4, atol=1e-6)


def test_every_pair_at_a_distance_teaches_its_weight():
    config = MHLAConfig(mixing_storage="distance", **CAUSAL)
    parameter = torch.rand(2, 5, requires_grad=True)
    effective_mixing(config, parameter).sum().backward()
    assert torch.equal(parameter.grad, torch.tensor([5.0, 4.0, 3.0, 2.0, 1.0]).expand(2, 5))


@pytest.mark.parametrize("heads, shape", [("shared", ()), ("per_head", (4,))])
def test_parameters_by_distance_and_of_a_tail(heads, shape):
    layer = make_layer(mixing_heads=heads, mixing_storage="distance", mixing_tail="decay", **CAUSAL)
    assert layer.mixing.shape == (*shape, 5) and layer.mixing_decay.shape == (shape or (1,))
    assert layer.mixing_matrix().shape == (*shape, 5, 5)
    stored = layer.stored_mixing()
    assert stored.weights.shape == (*(shape or (1,)), 5, 5) and stored.decay.shape == (shape or (1,))
    assert make_layer(mixing_heads=heads, **CAUSAL).mixing_decay is None


@pytest.mark.parametrize("half_life", [None, 0.01, 0.5, 8.0, 1000.0, 1e6])
def test_a_tail_halves_at_first_over_its_half_life(half_life):
    layer = make_layer(mixing_tail="decay", mixing_tail_half_life=half_life, **CAUSAL).double()
    decay = layer.stored_mixing().decay
    torch.testing.assert_close(decay ** (half_life or 8.0), torch.full_like(decay, 0.5), rtol=1e-4, atol=0)


@pytest.mark.parametrize("mode", [{"causal": True}, {"resize": "extend"}], ids=str)
@pytest.mark.parametrize("tail", ["constant", "decay", "none"])
def test_weights_of_a_layout_that_is_longer_than_the_stored_ones(tail, mode):
    layer = make_layer(block_size=(4,), grid=(12,), mixing_tail=tail, **mode)
    matrix = layer.mixing_matrix(BlockLayout((40,), block_size=(4,)))
    assert matrix.shape == (10, 10)
    factor = {"constant": 1.0, "decay": 0.5 ** (1 / 8), "none": 0.0}[tail]
    stored = layer.mixing
    expected = [stored[2, 0] * factor ** (7 - d) for d in range(7)] + [stored[2, 0], stored[2, 1], stored[2, 2]]
    torch.testing.assert_close(matrix[9], torch.stack(expected), rtol=1e-5, atol=1e-7)
    ahead = [stored[0, 0], stored[0, 1], *(stored[0, 2] * factor**d for d in range(7))]
    ahead = torch.zeros(9) if layer.config.causal else torch.stack(ahead)
    ahead[0] = stored[2, 2]
    torch.testing.assert_close(matrix[3, 3:], ahead[:7], rtol=1e-5, atol=1e-7)
    assert torch.equal(matrix[:3, :3], stored.tril() if layer.config.causal else stored)


GRIDS = {"longer": ((3,), (50,)), "shorter-axis": ((2, 3), (1, 14)), "three-axes": ((1, 2, 3), (4, 5, 3))}


@pytest.mark.parametrize("prefix", [0, 1])
@pytest.mark.parametrize("heads", [None, 4])
@pytest.mark.parametrize("source, target", GRIDS.values(), ids=GRIDS)
def test_resampled_mixing_without_its_matrix(source, target, heads, prefix):
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()

    count, wanted = math.prod(source) + prefix, math.prod(target) + prefix
    weights = normal(*([heads] if heads else []), count, count)
    summary = normal(2, 2, wanted, 3, 4)
    mixing = ResampledMixing(weights, source, target, prefix)
    matrix = torch.ones(1, 1, dtype=torch.float64)
    for axis in zip(source, target):
        matrix = torch.kron(matrix, axis_interpolation(*axis, torch.device("cpu")).double())
    matrix = torch.block_diag(torch.eye(prefix, dtype=torch.float64), matrix)
    dense = matrix @ weights @ matrix.T * (count / wanted)
    # The matrix is made from fractions in single precision.
    torch.testing.assert_close(mixing.matrix(), dense, rtol=1e-5, atol=1e-6)
    mixed = mixing.mix(summary, 4)
    expected = (dense @ summary.repeat_interleave(2, dim=1).flatten(3)).unflatten(3, (3, 4))
    torch.testing.assert_close(mixed, expected, rtol=1e-12, atol=1e-12)
    cotangent = normal(*mixed.shape).detach()
    for mine, theirs in zip(
        torch.autograd.grad(mixed, [weights, summary], cotangent),
        torch.autograd.grad(expected, [weights, summary], cotangent),
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("prefix", [0, 2])
@pytest.mark.parametrize("heads", ["shared", "per_head"])
@pytest.mark.parametrize("width", [8, 14], ids=["a-matrix", "no-matrix"])
def test_a_layer_on_a_grid_of_many_blocks(monkeypatch, width, heads, prefix):
    """Up to four times as many blocks as weights exist for are mixed by a matrix, more without it."""
    made = []
    monkeypatch.setattr(mhla_module, "ResampledMixing", lambda *args: made.append(args) or ResampledMixing(*args))
    options = {"blocks": (2, 2), "grid": (4, 4), "mixing_heads": heads, "feature_map": "relu"}
    layer = make_layer(prefix, **options).double()
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()

    with torch.no_grad():
        layer.mixing.add_(normal(*layer.mixing.shape).abs())
    length = width * width + prefix
    tokens = [normal(2, length, 4, 3), normal(2, length, 2, 3), normal(2, length, 2, 2)]
    layout = layer.layout_for((width, width))
    assert (layout.num_blocks > 4 * layer.mixing.shape[-1]) == (width == 14)
    output = layer(*tokens, grid=(width, width))
    assert len(made) == (width == 14)
    features = [x.relu() for x in tokens[:2]]
    expected = mhla_attention(*features, tokens[2], layer.mixing_matrix(layout), layout, backend="naive")
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-6)
    cotangent, leaves = normal(*output.shape).detach(), [*tokens, layer.mixing]
    for mine, theirs in zip(
        torch.autograd.grad(output, leaves, cotangent), torch.autograd.grad(expected, leaves, cotangent)
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5 * theirs.abs().max().item())


@pytest.mark.parametrize("parameters, tokens", [(torch.float64, torch.float32), (torch.float32, torch.float64)])
def test_weights_of_another_dtype_than_the_tokens(parameters, tokens):
    layer = make_layer(mixing_tail="decay", **CAUSAL)
    generator = torch.Generator().manual_seed(0)
    given = [torch.randn(1, 200, heads, width, generator=generator) for heads, width in ((4, 3), (2, 3), (2, 2))]
    sequence = TokenSequence(causal=True)
    expected = layer.float()(*given, sequence=sequence)
    actual = layer.to(parameters)(*(x.to(tokens) for x in given), sequence=sequence)
    assert actual.dtype == tokens
    torch.testing.assert_close(actual.float(), expected, rtol=1e-4, atol=1e-5)
    sequence = TokenSequence(causal=True, state=DecodingState())
    state = layer.attention_parts(*(x.to(tokens) for x in given), sequence=sequence).state
    assert state.blocks.current.dtype == tokens


def test_weights_by_distance_refuse_to_look_ahead():
    layer = make_layer(mixing_storage="distance", **CAUSAL)
    tokens = [torch.randn(1, 9, heads, width) for heads, width in ((4, 3), (2, 3), (2, 2))]
    with pytest.raises(ValueError, match="looks back only"):
        layer(*tokens, sequence=TokenSequence(causal=False))
