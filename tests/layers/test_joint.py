# SPDX-License-Identifier: Apache-2.0
"""MHLA beside text against naive forms in float64, whose sums go over all pairs of tokens."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from mhla_hf import MHLA, MHLAConfig
from mhla_hf.layers import JointMHLA, PairwiseRotary, TextTokens, attend_jointly


HEADS, WIDTH, VALUE_WIDTH, HIDDEN, TEXT = 2, 6, 5, 12, 5
# Grids and blocks; of the second, blocks divide no axis.
GRIDS = {"divided": ((4, 6), (2, 3)), "ragged": ((3, 5, 4), (2, 3, 3)), "one axis": ((7,), (3,))}


def make_layer(blocks: tuple[int, ...], seed: int = 0, **options: object) -> JointMHLA:
    layer = JointMHLA(
        MHLAConfig(blocks=blocks, **options), hidden_size=HIDDEN, num_heads=HEADS, head_dim=WIDTH,
        value_head_dim=VALUE_WIDTH,
    ).double()  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(torch.rand(parameter.shape, generator=generator, dtype=torch.float64) * 0.3)
    return layer


def of_grid(layer: JointMHLA) -> MHLA:
    """`MHLA` with the parameters of a layer, whose own tests have the naive form."""
    plain = MHLA(layer.config, hidden_size=HIDDEN, num_heads=HEADS, head_dim=WIDTH, value_head_dim=VALUE_WIDTH)
    for name in (*plain._parameters, *plain._modules):
        setattr(plain, name, getattr(layer, name))
    plain.mixing_matrix = layer.mixing_matrix
    return plain


def make_rotary(tokens: int, generator: torch.Generator) -> PairwiseRotary:
    angle = torch.randn(1, tokens, 1, WIDTH // 2, generator=generator, dtype=torch.float64)
    return PairwiseRotary(angle.cos(), angle.sin())


def make_tokens(
    tokens: int, seed: int = 0, padded: bool = True, rotates_text: bool = True
) -> tuple[list[torch.Tensor], TextTokens, dict[str, object]]:
    """Queries, keys and values of a grid, its text (of the second sample two tokens are padding), and options."""
    generator = torch.Generator().manual_seed(seed)
    grid, text = (
        [
            torch.randn(2, count, HEADS, width, generator=generator, dtype=torch.float64).requires_grad_()
            for width in (WIDTH, WIDTH, VALUE_WIDTH)
        ]
        for count in (tokens, TEXT)
    )
    states = [torch.randn(2, count, HIDDEN, generator=generator, dtype=torch.float64) for count in (tokens, TEXT)]
    valid = torch.tensor([[True] * TEXT, [True] * (TEXT - 2) + [False] * 2]) if padded else None
    rotary = make_rotary(tokens, generator)
    text_rotary = make_rotary(TEXT, generator) if rotates_text else None
    return grid, TextTokens(*text, states[1], valid, text_rotary), {"rotary": rotary, "hidden_states": states[0]}


def rotate(rotary: PairwiseRotary | None, tokens: torch.Tensor) -> torch.Tensor:
    return tokens if rotary is None else rotary(tokens)


def all_logits(grid: list[torch.Tensor], text: TextTokens, rotary: PairwiseRotary | None) -> torch.Tensor:
    """Logits of softmax attention `[B, H, X + T, X + T]`, minus infinity for padding."""
    query, key = (
        torch.cat([rotate(text.rotary, ahead), rotate(rotary, tokens)], dim=1)
        for ahead, tokens in ((text.query, grid[0]), (text.key, grid[1]))
    )
    logits = torch.einsum("bthk,bshk->bhts", query, key) * WIDTH**-0.5
    if text.valid is None:
        return logits
    seen = torch.cat([text.valid, text.valid.new_ones(2, len(grid[0][0]))], dim=1)
    return logits.masked_fill(~seen[:, None, None], -math.inf)


def naive(
    layer: JointMHLA,
    grid: list[torch.Tensor],
    text: TextTokens,
    share: torch.Tensor,
    attended: torch.Tensor,
    rotary: PairwiseRotary | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Grid and text from the share of the text `[B, T, H, 1]` and what attends to the grid `[B, T, H, V]`."""
    logits = all_logits(grid, text, rotary)
    exact = torch.einsum("bhts,bshv->bthv", logits.softmax(-1), torch.cat([text.value, grid[2]], dim=1))
    to_text = torch.einsum("bhts,bshv->bthv", logits[:, :, TEXT:, :TEXT].softmax(-1), text.value)
    return share * to_text + (1 - share) * attended, exact[:, :TEXT]


def landmark_share(
    layer: JointMHLA, grid: list[torch.Tensor], text: TextTokens, rotary: PairwiseRotary | None, size: tuple[int, ...]
) -> torch.Tensor:
    """The share of the text by its definition, block by block, `[B, T, H, 1]`."""
    query, key = rotate(rotary, grid[0]), rotate(rotary, grid[1])
    block = layer.layout_for(size).block_of_token
    landmarks = 0.0
    for number in range(int(block.max()) + 1):
        chosen = key[:, block == number]
        logits = torch.einsum("bthk,bhk->bth", query, chosen.mean(1)) * WIDTH**-0.5
        landmarks = landmarks + chosen.shape[1] * (logits + layer.text_bias).exp()
    of_text = all_logits(grid, text, rotary)[:, :, TEXT:, :TEXT].exp().sum(-1).transpose(1, 2)
    return (of_text / (of_text + landmarks)).unsqueeze(-1)


def assert_equal_with_gradients(
    actual: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...], inputs: list[torch.Tensor]
) -> None:
    gradients = []
    for outputs in (actual, expected):
        weights = [torch.linspace(-1, 1, output.numel(), dtype=torch.float64).sin() for output in outputs]
        loss = sum((output.flatten() * weight).sum() for output, weight in zip(outputs, weights))
        gradients.append(torch.autograd.grad(loss, inputs, allow_unused=True))
    for mine, theirs in zip((*actual, *gradients[0]), (*expected, *gradients[1])):
        assert (mine is None) == (theirs is None)
        if mine is not None:
            torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("size, blocks", GRIDS.values(), ids=GRIDS)
def test_output_and_gradients_are_those_of_the_definition(size, blocks, padded, seed):
    layer = make_layer(blocks, seed, feature_map="elu", mixing_heads="per_head")
    grid, text, options = make_tokens(math.prod(size), seed, padded, rotates_text=seed != 1)
    rotary = options["rotary"]
    actual = attend_jointly(layer, *grid, text=text, grid=size, **options)
    attended = of_grid(layer)(*grid, grid=size, **options)
    expected = naive(layer, grid, text, landmark_share(layer, grid, text, rotary, size), attended, rotary)
    inputs = [*grid, text.query, text.key, text.value, *layer.parameters()]
    assert_equal_with_gradients(actual, expected, inputs)


@pytest.mark.parametrize(
    "options", [{"window": "block", "window_size": (2, 2), "lepe_kernel": 3, "output_gate": True}]
)
def test_window_convolution_and_gate_belong_to_the_grid(options):
    size = (4, 6)
    layer = make_layer((2, 3), **options)
    grid, text, options = make_tokens(math.prod(size))
    actual = attend_jointly(layer, *grid, text=text, grid=size, **options)
    attended = of_grid(layer)(*grid, grid=size, **options)
    share = landmark_share(layer, grid, text, options["rotary"], size)
    expected = naive(layer, grid, text, share, attended, options["rotary"])
    assert_equal_with_gradients(actual, expected, [*grid, text.key, text.value, *layer.parameters()])


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_one_block_with_the_true_share_is_softmax_of_two_linear_parts(seed):
    """The bias that makes the estimate of each query true; then text by softmax, the grid by linear attention."""
    layer = make_layer((1, 1), seed, mixing_init="uniform")
    layer.mixing.data.fill_(1.0)
    layer.normalizer_scale.data.fill_(1.0)
    grid, text, options = make_tokens(15, seed)
    query, key, value = grid
    rotary = options["rotary"]
    parts = layer.text_parts(*grid, text=text, grid=(3, 5), **options)
    logits = all_logits(grid, text, rotary)[:, :, TEXT:]
    whole = logits.exp().sum(-1).transpose(1, 2)
    estimate = 15 * (torch.einsum("bthk,bhk->bth", rotary(query), rotary(key).mean(1)) * WIDTH**-0.5).exp()
    bias = (logits[..., TEXT:].exp().sum(-1).transpose(1, 2) / estimate).log()
    numerator = torch.einsum("bthk,bshk->bths", rotary(query.relu()), rotary(key.relu()))
    divisor = torch.einsum("bthk,bshk->bth", query.relu(), key.relu()) + layer.config.eps
    linear = torch.einsum("bths,bshv->bthv", numerator, value) / divisor.unsqueeze(-1)
    share = (logits[..., :TEXT].exp().sum(-1).transpose(1, 2) / whole).unsqueeze(-1)
    torch.testing.assert_close(
        parts[..., :1] / (parts[..., :1] + parts[..., 1:2] * bias.exp().unsqueeze(-1)), share, rtol=1e-10, atol=1e-12
    )
    attended = of_grid(layer)(*grid, grid=(3, 5), **options)
    torch.testing.assert_close(attended, linear, rtol=1e-10, atol=1e-12)
    # The same joined by the layer, for one query at a time with its own bias.
    for index in (0, 7, 14):
        with torch.no_grad():
            layer.text_bias.copy_(bias[1, index])
        output = layer(*grid, text=text, grid=(3, 5), **options)[1, index]
        values = torch.einsum("hs,shv->hv", logits[1, :, index, :TEXT].softmax(-1), text.value[1])
        expected = share[1, index] * values + (1 - share[1, index]) * linear[1, index]
        torch.testing.assert_close(output, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("options", [{"mixing_heads": "per_head", "rope": "before_feature_map"}, {}])
@pytest.mark.parametrize("size, blocks", GRIDS.values(), ids=GRIDS)
def test_the_scale_makes_eps_relative_to_the_mean_normalizer(size, blocks, options):
    layer = make_layer(blocks, mixing_constraint="nonnegative", eps=0.25, **options)
    grid, text, where = make_tokens(math.prod(size))
    rotary = where["rotary"] if options else None
    features = [(rotate(rotary, tokens)).relu() for tokens in grid[:2]]
    block = layer.layout_for(size).block_of_token
    # Of all pairs of tokens; the scale of the layer is random.
    weights = layer.mixing_matrix(layer.layout_for(size)).expand(HEADS, -1, -1)[:, block][:, :, block]
    pairs = torch.einsum("bthk,bshk,hts->bth", *features, weights)
    mean = layer.mean_normalizer(*grid[:2], grid=size, **where)
    torch.testing.assert_close(mean, pairs.mean(1), rtol=1e-10, atol=1e-12)
    before = of_grid(layer)(*grid, grid=size, **where)
    scale = 1 / (mean.mean(0) if options else mean.mean().expand(HEADS))
    layer.normalizer_scale.data.mul_(scale if options else scale[:1])
    after = of_grid(layer)(*grid, grid=size, **where)
    expected = before * ((pairs + 0.25) / (pairs + 0.25 / scale)).unsqueeze(-1)
    torch.testing.assert_close(after, expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(layer.mean_normalizer(*grid[:2], grid=size, **where).mean().item(), 1.0)
    after.sum().backward()
    assert layer.normalizer_scale.grad.abs().max() == 0


@pytest.mark.parametrize("size", [(4, 6), (3, 5, 2)], ids=str)
def test_a_block_for_each_token_knows_the_share(size):
    layer = make_layer(size)
    layer.text_bias.data.zero_()
    grid, text, options = make_tokens(math.prod(size))
    parts = layer.text_parts(*grid, text=text, grid=size, **options)
    weights = all_logits(grid, text, options["rotary"]).softmax(-1)[:, :, TEXT:].transpose(1, 2)
    expected = torch.stack([weights[..., :TEXT].sum(-1), weights[..., TEXT:].sum(-1)], dim=-1)
    torch.testing.assert_close(parts[..., :2], expected, rtol=1e-10, atol=1e-12)
    to_text = torch.einsum("bths,bshv->bthv", weights[..., :TEXT], text.value)
    torch.testing.assert_close(parts[..., -VALUE_WIDTH:], to_text, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("options", [{}, {"text": "block"}], ids=["softmax", "block"])
def test_padded_text_equals_cut_text(options):
    layer, size = make_layer((2, 3), **options), (4, 6)
    grid, text, where = make_tokens(24)
    text = dataclasses.replace(text, valid=torch.tensor([[True] * 3 + [False] * 2] * 2))
    kept = {name: getattr(text, name)[:, :3].detach() for name in ("query", "key", "value", "hidden_states")}
    tables = PairwiseRotary(text.rotary.cosine[:, :3], text.rotary.sine[:, :3])
    cut = TextTokens(**kept, rotary=tables)
    with torch.no_grad():
        # Whatever stands there.
        text.key[:, 3:], text.value[:, 3:] = math.nan, math.inf
    padded, whole = (attend_jointly(layer, *grid, text=each, grid=size, **where) for each in (text, cut))
    torch.testing.assert_close(padded[0], whole[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(padded[1][:, :3], whole[1], rtol=1e-12, atol=1e-12)


def test_text_that_is_all_padding_leaves_the_grid_alone():
    layer, size = make_layer((2, 3)), (4, 6)
    grid, text, where = make_tokens(24)
    text = dataclasses.replace(text, valid=torch.zeros(2, TEXT, dtype=torch.bool))
    output, _ = attend_jointly(layer, *grid, text=text, grid=size, **where)
    expected = of_grid(layer)(*grid, grid=size, **where)
    torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("rotates_text", [True, False])
def test_one_block_and_one_of_text_is_linear_attention_over_all_tokens(rotates_text, seed):
    layer = make_layer((1, 1), seed, text="block")
    layer.mixing.data.fill_(1.0)
    layer.normalizer_scale.data.fill_(1.0)
    grid, text, options = make_tokens(15, seed, rotates_text=rotates_text)
    actual = attend_jointly(layer, *grid, text=text, grid=(3, 5), **options)
    query, key, value = (
        torch.cat([ahead, tokens], 1) for ahead, tokens in zip((text.query, text.key, text.value), grid)
    )
    seen = torch.cat([text.valid, text.valid.new_ones(2, 15)], dim=1)[:, None, :, None].transpose(2, 3)

    def rotated(tokens):
        return torch.cat([rotate(text.rotary, tokens[:, :TEXT]), rotate(options["rotary"], tokens[:, TEXT:])], dim=1)

    weights = torch.einsum("bthk,bshk->bhts", rotated(query.relu()), rotated(key.relu())) * seen
    divisor = (torch.einsum("bthk,bshk->bhts", query.relu(), key.relu()) * seen).sum(-1) + layer.config.eps
    expected = torch.einsum("bhts,bshv->bthv", weights / divisor.unsqueeze(-1), value)
    inputs = [*grid, text.query, text.key, text.value]
    assert_equal_with_gradients(actual, (expected[:, TEXT:], expected[:, :TEXT]), inputs)


def test_text_as_a_block_is_a_block_of_tokens_before_the_grid():
    """With every part of a layer, and as many tokens of text as a call has."""
    options = {"window": "block", "window_size": (2, 2), "lepe_kernel": 3, "output_gate": True, "output_norm": True}
    layer = make_layer((2, 3), text="block", **options)
    assert layer.text_bias is None and layer.mixing.shape == (7, 7)
    grid, text, where = make_tokens(24, padded=False)
    longer = dataclasses.replace(
        text,
        **{name: torch.cat([getattr(text, name)] * 2, dim=1) for name in ("query", "key", "value", "hidden_states")},
        rotary=None,
    )
    outputs = [attend_jointly(layer, *grid, text=each, grid=(4, 6), **where) for each in (text, longer)]
    assert [tuple(output.shape) for output in outputs[1]] == [(2, 24, HEADS, VALUE_WIDTH), (2, 10, HEADS, VALUE_WIDTH)]
    assert (outputs[0][0] - outputs[1][0]).abs().max() > 1e-3


@pytest.mark.parametrize(
    "dtype, limit", [(torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 4e-3)], ids=str
)
def test_half_precision(dtype, limit):
    """Blocks of 600 tokens, whose number half precision rounds."""
    layer, size = make_layer((2,)), (1201,)
    grid, text, options = make_tokens(1201)
    with torch.no_grad():
        expected = attend_jointly(layer, *grid, text=text, grid=size, **options)
        layer = layer.float()
        options = {"rotary": PairwiseRotary(options["rotary"].cosine.float(), options["rotary"].sine.float())}
        rounded = {name: getattr(text, name).to(dtype) for name in ("query", "key", "value")}
        tables = PairwiseRotary(text.rotary.cosine.float(), text.rotary.sine.float())
        text = TextTokens(**rounded, valid=text.valid, rotary=tables)
        actual = attend_jointly(layer, *(x.to(dtype) for x in grid), text=text, grid=size, **options)
    for mine, theirs in zip(actual, expected):
        assert mine.dtype == dtype
        assert (mine - theirs).norm() / theirs.norm() < limit


def test_identity_returns_the_values():
    for options in ({}, {"text": "block"}):
        layer = make_layer((2, 3), **options)
        grid, text, where = make_tokens(24)
        output = attend_jointly(layer, *grid, text=text, grid=(4, 6), identity=True, **where)
        assert torch.equal(output[0], grid[2])
        expected = text.value if not options else text.without_padding().value
        assert torch.equal(output[1], expected)


@pytest.mark.parametrize(
    "options",
    [{"feature_map": "hedgehog"}, {"feature_map_eps": 1e-6}, {"window": "block", "window_size": (2, 2)}],
    ids=str,
)
def test_padded_text_as_a_block_is_refused_where_zeros_would_count(options):
    layer = make_layer((2, 3), text="block", **options)
    grid, text, where = make_tokens(24)
    with pytest.raises(ValueError, match="text='block' takes padded text with feature_map='relu'"):
        attend_jointly(layer, *grid, text=text, grid=(4, 6), **where)


def test_wrong_grids_are_refused():
    for options in ({}, {"text": "block"}):
        layer = make_layer((2, 3), **options)
        grid, text, where = make_tokens(24)
        with pytest.raises(ValueError, match="has 35 tokens"):
            attend_jointly(layer, *grid, text=text, grid=(5, 7), **where)
