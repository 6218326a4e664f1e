# SPDX-License-Identifier: Apache-2.0
"""The softmax window beside MHLA against a dense form, whose mask is made from the tokens' coordinates."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F

from mhla_hf import MHLA, MHLAConfig
from mhla_hf.layers.fused import PairwiseRotary
from mhla_hf.layers.state import TokenSequence


HIDDEN, HEADS, SHARED, WIDTH = 12, 4, 2, 6


def dense_mask(grid: tuple[int, ...], window: str, size: tuple[int, ...], prefix: int = 0) -> torch.Tensor:
    """BoolTensor `[T, T]`: which token sees which, token by token."""
    places = [tuple(c // s for c, s in zip(token, size)) for token in itertools.product(*map(range, grid))]

    def sees(i: tuple[int, ...], j: tuple[int, ...]) -> bool:
        if window == "block":
            return i == j
        near = [abs(a - b) <= 1 for a, b in zip(i, j)]
        if window == "adjacent":
            return all(near)
        return i[1:] == j[1:] or (i[0] == j[0] and all(near[1:]))

    mask = torch.ones(prefix + len(places), prefix + len(places), dtype=torch.bool)
    mask[prefix:, prefix:] = torch.tensor([[sees(i, j) for j in places] for i in places])
    return mask


def dense_window(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, scale: float
) -> torch.Tensor:
    """Softmax attention under a mask `[T, T]` or `[B, T, T]`; rows that see nothing get zeros."""
    key, value = (x.repeat_interleave(query.shape[2] // x.shape[2], dim=2) for x in (key, value))
    logits = torch.einsum("bthk,bshk->bhts", query, key) * scale
    mask = mask[None] if mask.dim() == 2 else mask
    mask = mask[:, None]
    weights = logits.masked_fill(~mask, float("-inf")).softmax(-1).masked_fill(~mask.any(-1, keepdim=True), 0)
    return torch.einsum("bhts,bshv->bthv", weights, value)


def make_layer(seed: int = 0, *, prefix: int = 0, shared: int = SHARED, **options: object) -> MHLA:
    layer = MHLA(
        MHLAConfig.from_dict(options), hidden_size=HIDDEN, num_heads=HEADS, num_key_value_heads=shared, head_dim=WIDTH,
        num_prefix_tokens=prefix,
    ).double()  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(torch.rand(parameter.shape, generator=generator, dtype=torch.float64) * 0.3)
    return layer


def make_tokens(length: int, seed: int = 0, batch: int = 2, shared: int = SHARED) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(batch, length, heads, WIDTH, generator=generator, dtype=torch.float64).requires_grad_()
        for heads in (HEADS, shared, shared)
    ]


def assert_same_with_gradients(layer: MHLA, tokens: list[torch.Tensor], mask: torch.Tensor, **where: object) -> None:
    """The layer's output, and the gradients of tokens and gains, are those of its MHLA part and the dense window."""
    parts = layer.attention_parts(*tokens, **where)
    scale = where.get("scaling") or WIDTH**-0.5
    rotary = where.get("rotary") or (lambda x: x)
    expected_window = dense_window(rotary(tokens[0]), rotary(tokens[1]), tokens[2], mask, scale)
    torch.testing.assert_close(parts.window, expected_window, rtol=1e-10, atol=1e-10)
    output = layer(*tokens, **where)
    expected = layer.window_gain[0] * parts.attended + layer.window_gain[1] * expected_window
    if parts.positional is not None:
        expected = expected + parts.positional
    torch.testing.assert_close(output, expected, rtol=1e-10, atol=1e-10)
    weight = torch.linspace(-1, 1, output.numel(), dtype=torch.float64).view_as(output).sin()
    inputs = [*tokens, *layer.parameters()]
    found = torch.autograd.grad((output * weight).sum(), inputs, allow_unused=True)
    wanted = torch.autograd.grad((expected * weight).sum(), inputs, allow_unused=True)
    for got, want in zip(found, wanted):
        assert (got is None) == (want is None)
        if got is not None:
            torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


GRIDS = [
    ("block", (24,), (6,)),
    ("block", (63,), (8,)),
    ("adjacent", (63,), (8,)),
    ("adjacent", (5,), (9,)),
    ("block", (6, 8), (3, 4)),
    ("block", (5, 7), (2, 3)),
    ("adjacent", (5, 7), (2, 3)),
    ("adjacent", (8, 3), (2, 5)),
    ("block", (5, 4, 7), (2, 2, 3)),
    ("adjacent", (5, 4, 7), (2, 2, 3)),
    ("adjacent", (1, 6, 1), (2, 2, 3)),
    ("cross", (4, 6, 6), (1, 2, 2)),
    ("cross", (5, 5, 7), (2, 2, 3)),
    ("cross", (1, 5, 5), (1, 2, 2)),
    ("cross", (3, 2, 3), (4, 5, 6)),
]


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("window, grid, size", GRIDS, ids=lambda value: str(value).replace(" ", ""))
def test_grids_agree_with_the_dense_form(window, grid, size, seed):
    blocks = tuple(min(2, length) for length in grid)
    layer = make_layer(seed, blocks=blocks, window=window, window_size=size, window_gains="per_channel", lepe_kernel=3)
    length = torch.tensor(grid).prod().item()
    assert_same_with_gradients(layer, make_tokens(length, seed), dense_mask(grid, window, size), grid=grid)


@pytest.mark.parametrize("grid, size, calls", [((24,), (6,), 1), ((5, 7), (2, 3), 4), ((4, 5, 6), (4, 2, 3), 2)])
def test_own_blocks_need_no_mask(grid, size, calls, monkeypatch):
    """PyTorch's FlashAttention takes none."""
    masks, attend = [], F.scaled_dot_product_attention

    def attention(*tokens, attn_mask=None, **options):
        masks.append(attn_mask)
        return attend(*tokens, attn_mask=attn_mask, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", attention)
    layer = make_layer(blocks=tuple(1 for _ in grid), window="block", window_size=size)
    layer(*make_tokens(torch.tensor(grid).prod().item()), grid=grid)
    assert masks == [None] * calls


@pytest.mark.parametrize("window", ["block", "adjacent"])
def test_prefix_tokens_see_and_are_seen_by_every_window(window):
    grid, size, prefix = (5, 4), (2, 2), 3
    layer = make_layer(blocks=(2, 2), window=window, window_size=size, prefix=prefix, lepe_kernel=3)
    mask = dense_mask(grid, window, size, prefix)
    assert_same_with_gradients(layer, make_tokens(prefix + 20), mask, grid=grid, scaling=0.3)


@pytest.mark.parametrize("window", ["block", "adjacent", "cross"])
def test_heads_are_computed_in_parts_where_they_are_large(window, monkeypatch):
    layer, tokens = make_layer(blocks=(1, 2, 2), window=window, window_size=(1, 2, 2)), make_tokens(48)
    monkeypatch.setattr("mhla_hf.layers.window.MAX_COPIED", 1)
    assert_same_with_gradients(layer, tokens, dense_mask((3, 4, 4), window, (1, 2, 2)), grid=(3, 4, 4))


@pytest.mark.parametrize("rope", ["after_feature_map", "before_feature_map"])
def test_queries_and_keys_are_rotated_whatever_the_order_for_mhla(rope):
    grid, size = (3, 4, 4), (1, 2, 2)
    angles = torch.linspace(0, 9, 48 * WIDTH // 2, dtype=torch.float64).view(1, 48, 1, WIDTH // 2)
    rotary = PairwiseRotary(angles.cos(), angles.sin())
    layer = make_layer(blocks=(1, 2, 2), window="cross", window_size=size, rope=rope)
    assert_same_with_gradients(layer, make_tokens(48), dense_mask(grid, "cross", size), grid=grid, rotary=rotary)


def sequence_mask(window: str, size: int, causal: bool, valid: torch.Tensor, documents: torch.Tensor) -> torch.Tensor:
    """BoolTensor `[B, T, T]`, token by token: positions count the valid tokens of a document."""
    batch, length = valid.shape
    mask = torch.zeros(batch, length, length, dtype=torch.bool)
    for b in range(batch):
        counts: dict[int, int] = {}
        position = []
        for t in range(length):
            document = int(documents[b, t])
            position.append(counts.get(document, 0))
            counts[document] = counts.get(document, 0) + int(valid[b, t])
        for i, j in itertools.product(range(length), repeat=2):
            if not (valid[b, i] and valid[b, j] and documents[b, i] == documents[b, j]):
                continue
            distance = position[i] // size - position[j] // size
            near = distance == 0 or (window == "adjacent" and (distance == 1 if causal else abs(distance) == 1))
            mask[b, i, j] = near and (not causal or position[j] <= position[i])
    return mask


VALID = {
    "full": torch.ones(2, 21, dtype=torch.bool),
    "left-padded": torch.arange(21) >= torch.tensor([[6], [0]]),
    "holes": torch.tensor([[True, False, True] * 7, [False] * 20 + [True]]),
    "right-padded": torch.arange(21) < torch.tensor([[4], [19]]),
}


@pytest.mark.parametrize("causal", [False, True], ids=["encoder", "causal"])
@pytest.mark.parametrize("window", ["block", "adjacent"])
@pytest.mark.parametrize("shared", [SHARED, HEADS], ids=["grouped", "ungrouped"])
@pytest.mark.parametrize("padding", [None, *VALID])
def test_sequences_agree_with_the_dense_form(causal, window, shared, padding):
    layer = make_layer(
        block_size=4, grid=24, causal=causal, resize="extend", window=window, window_size=5, shared=shared
    )
    valid = None if padding is None else VALID[padding]
    known = VALID["full"] if valid is None else valid
    mask = sequence_mask(window, 5, causal, known, torch.zeros(2, 21, dtype=torch.long))
    tokens = make_tokens(21, shared=shared)
    assert_same_with_gradients(layer, tokens, mask, sequence=TokenSequence(causal, valid), scaling=0.7)


@pytest.mark.parametrize("causal", [False, True], ids=["encoder", "causal"])
@pytest.mark.parametrize("padding", [None, "holes", "right-padded"])
def test_documents_do_not_see_each_other(causal, padding):
    documents = torch.tensor([[0] * 7 + [1] * 2 + [2] * 12, [0] * 10 + [1] * 11])
    layer = make_layer(block_size=4, grid=24, causal=causal, resize="extend", window="adjacent", window_size=3)
    valid = None if padding is None else VALID[padding]
    mask = sequence_mask("adjacent", 3, causal, VALID["full"] if valid is None else valid, documents)
    assert_same_with_gradients(layer, make_tokens(21), mask, sequence=TokenSequence(causal, valid, documents, 3))


def test_a_fresh_window_leaves_the_output_unchanged():
    tokens = make_tokens(48)
    options = {"hidden_size": HIDDEN, "num_heads": HEADS, "num_key_value_heads": SHARED, "head_dim": WIDTH}
    for gains in ("per_head", "per_channel"):
        config = MHLAConfig(blocks=(1, 2, 2))
        plain = MHLA(config, **options).double()
        other = MHLA(config.replace(window="cross", window_gains=gains), **options).double()
        assert torch.equal(plain(*tokens, grid=(3, 4, 4)), other(*tokens, grid=(3, 4, 4)))
        assert torch.equal(other.initial_tensor("window_gain")[:, 0, 0], torch.tensor([1.0, 0.0]))
    assert "window_gain" not in dict(plain.named_parameters())
    assert plain.attention_parts(*tokens, grid=(3, 4, 4)).window is None
    other = MHLA(config.replace(window="cross", window_gains="per_channel"), **options)
    assert other.window_gain.shape == (2, HEADS, WIDTH) and other.window_size == (1, 3, 3)


def test_parts_add_up_without_a_window():
    layer = make_layer(blocks=(1, 2, 2), lepe_kernel=3, output_norm=True, output_gate=True)
    tokens = make_tokens(48)
    hidden_states = torch.randn(2, 48, HIDDEN, dtype=torch.float64)
    parts = layer.attention_parts(*tokens, grid=(3, 4, 4), hidden_states=hidden_states)
    output = layer(*tokens, grid=(3, 4, 4), hidden_states=hidden_states)
    assert parts.window is None and torch.equal(parts.attended + parts.positional, output)


def test_identity_is_the_token_itself_in_both_parts():
    layer, tokens = make_layer(blocks=(1, 2, 2), window="cross"), make_tokens(48)
    value = tokens[2].repeat_interleave(HEADS // SHARED, dim=2)
    expected = layer.window_gain[0] * value + layer.window_gain[1] * value
    torch.testing.assert_close(layer(*tokens, grid=(3, 4, 4), identity=True), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_and_autocast(dtype):
    tokens = [x.detach() for x in make_tokens(48)]
    exact = make_layer(blocks=(1, 2, 2), window="cross", window_size=(1, 2, 2))
    expected = exact(*tokens, grid=(3, 4, 4)).float()
    layer = make_layer(blocks=(1, 2, 2), window="cross", window_size=(1, 2, 2)).float()
    half = [x.to(dtype) for x in tokens]
    for output in (layer(*half, grid=(3, 4, 4)), layer.to(dtype)(*half, grid=(3, 4, 4))):
        assert output.dtype == dtype
        torch.testing.assert_close(output.float(), expected, rtol=0.05, atol=0.05)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = exact.float()(*[x.float() for x in tokens], grid=(3, 4, 4))
    assert output.dtype == torch.float32
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"window": "near"}, "window='near' is not one of 'block', 'adjacent', 'cross'"),
        ({"window": ["block"]}, r"window=\['block'\] is not one of"),
        ({"window_size": 4}, r"window_size=\(4,\) needs window, one of 'block', 'adjacent', 'cross'"),
        ({"window": "block", "window_size": 0}, "window_size must be at least 1, got 0"),
        ({"window": "block", "window_size": (200, 200)}, "window_size=.* has more than 16384 tokens in a block"),
        ({"window": "block", "window_gains": "shared"}, "window_gains='shared' is not one of 'per_head', 'per_chan"),
        (
            {"window": "cross", "blocks": (2, 2)},
            "window='cross' needs the three axes of a video .*layout has 2",
        ),
        ({"window": "cross", "causal": True, "block_size": 4}, "window='cross' needs the three axes"),
        ({"window": "cross", "window_size": (2, 2)}, "window='cross' needs the three axes"),
        ({"window": "block", "window_size": (2, 2), "blocks": (2, 2, 2)}, "window_size=.*one entry for each axis.*3"),
        ({"window": "block", "window_size": (2, 2), "block_size": 4, "resize": "extend"}, "window_size=.* has 1"),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message) as error:
        MHLAConfig.from_dict(options)
    assert "\n" not in str(error.value) and len(str(error.value)) < 300


def test_options_that_do_not_fit_the_model_are_refused():
    with pytest.raises(ValueError, match="window='cross' needs the three axes"):
        MHLA(MHLAConfig(window="cross"), hidden_size=4, num_heads=2, head_dim=2, default_grid=(4, 4))


def test_taking_the_window_away_takes_its_size_with_it():
    config = MHLAConfig(window="adjacent", window_size=(2, 2))
    assert config.replace(window=None).to_dict()["window_size"] is None
    assert config.replace(window="block").window_size == (2, 2)


@pytest.mark.slow
def test_torch_compile_traces_the_window_whole_at_any_size():
    torch.compiler.reset()
    layer = make_layer(blocks=(1, 2, 2), window="cross", window_size=(2, 2, 3))
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="eager")
    for grid in ((3, 4, 5), (5, 7, 4)):
        tokens = make_tokens(grid[0] * grid[1] * grid[2])
        output = compiled(*tokens, grid=grid)
        torch.testing.assert_close(output, layer(*tokens, grid=grid), rtol=1e-10, atol=1e-10)
    F.mse_loss(output, tokens[0]).backward()
    assert layer.window_gain.grad.abs().sum() > 0
    torch.compiler.reset()
