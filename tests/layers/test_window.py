# SPDX-License-Identifier: Apache-2.0
"""The softmax window beside MHLA against a dense form, whose mask is made from the tokens' coordinates."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
import torch.nn.functional as F

from mhla_hf import MHLA, MHLAConfig
from mhla_hf.layers import JointMHLA
from mhla_hf.layers.fused import PairwiseRotary
from mhla_hf.layers.sequence_window import empty_window_state, extend_window, sequence_window_attention
from mhla_hf.layers.state import TokenSequence
from mhla_hf.layers.window import grid_window_attention, join_window
from mhla_hf.layouts.blocks import BlockLayout

from .test_joint import assert_equal_with_gradients


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
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    beyond: torch.Tensor,
    scale: float,
    bias: torch.Tensor,
    block_of_token: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax attention under a mask `[T, T]` or `[B, T, T]`, and its share; rows that see nothing get zeros.

    `beyond` is a mask of the tokens that each token's landmarks stand for: one for their mean, or one for each block.
    """
    bias = bias[:, None, None] if bias.dim() == 1 else bias.transpose(1, 2).unsqueeze(-1)
    key, value = (x.repeat_interleave(query.shape[2] // x.shape[2], dim=2) for x in (key, value))
    logits = torch.einsum("bthk,bshk->bhts", query, key) * scale
    mask, beyond = (x[None, None] if x.dim() == 2 else x[:, None] for x in (mask, beyond))
    logits = logits.masked_fill(~mask, float("-inf"))
    weights = logits.softmax(-1).masked_fill(~mask.any(-1, keepdim=True), 0)
    window = torch.einsum("bhts,bshv->bthv", weights, value)
    query, key = query.transpose(1, 2), key.transpose(1, 2)
    if block_of_token is None:
        count = beyond.sum(-1, keepdim=True).to(key)
        products = (query * (beyond.to(key) @ key / count.clamp(min=1))).sum(-1, keepdim=True)
    else:
        members = F.one_hot(block_of_token).to(key)
        count = beyond.to(key) @ members
        products = query @ (members.T @ key / members.sum(0)[:, None]).mT
    rest = (count * torch.exp(products * scale + bias)).sum(-1, keepdim=True)
    inside = logits.exp().sum(-1, keepdim=True).masked_fill(~mask.any(-1, keepdim=True), 1)
    return window, (inside / (inside + rest)).transpose(1, 2)


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


def biases(layer: MHLA, query: torch.Tensor) -> torch.Tensor:
    """Of each head, or of each query before its rotation."""
    if layer.window_query is None:
        return layer.window_bias
    return layer.window_bias + torch.einsum("bthk,hk->bth", query, layer.window_query)


def assert_same_with_gradients(
    layer: MHLA, tokens: list[torch.Tensor], mask: torch.Tensor, beyond: torch.Tensor | None = None, **where: object
) -> None:
    """The layer's output, and all gradients, are those of its MHLA part and the dense window.

    Landmarks stand for all that is not in the window where `beyond` does not say for what.
    """
    parts = layer.attention_parts(*tokens, **where)
    scale = where.get("scaling") or WIDTH**-0.5
    rotary = where.get("rotary") or (lambda x: x)
    rotated = rotary(tokens[0]), rotary(tokens[1]), tokens[2]
    beyond = ~mask if beyond is None else beyond
    blocks = layer.layout_for(where["grid"]).block_of_token if "grid" in where else None
    window, share = dense_window(*rotated, mask, beyond, scale, biases(layer, tokens[0]), blocks)
    output = layer(*tokens, **where)
    expected = share * window + (1 - share) * parts.attended
    if parts.positional is not None:
        expected = expected + parts.positional
    torch.testing.assert_close(output, expected, rtol=1e-10, atol=1e-10)
    assert_equal_with_gradients((output,), (expected,), [*tokens, *layer.parameters()])


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
    layer = make_layer(seed, blocks=blocks, window=window, window_size=size, lepe_kernel=3)
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
    layer = make_layer(blocks=(1, 2, 2), window="cross", window_size=size, rope=rope, window_share="query")
    assert_same_with_gradients(layer, make_tokens(48), dense_mask(grid, "cross", size), grid=grid, rotary=rotary)


def sequence_masks(
    window: str, size: int, causal: bool, valid: torch.Tensor, documents: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """What each token sees, and what its landmark stands for, BoolTensors `[B, T, T]`, token by token.

    Positions count the valid tokens of a document.
    """
    batch, length = valid.shape
    mask = torch.zeros(batch, length, length, dtype=torch.bool)
    beyond = torch.zeros_like(mask)
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
            beyond[b, i, j] = not near and (not causal or distance > 0)
    return mask, beyond


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
    masks = sequence_masks(window, 5, causal, known, torch.zeros(2, 21, dtype=torch.long))
    tokens = make_tokens(21, shared=shared)
    assert_same_with_gradients(layer, tokens, *masks, sequence=TokenSequence(causal, valid), scaling=0.7)


@pytest.mark.parametrize("causal", [False, True], ids=["encoder", "causal"])
@pytest.mark.parametrize("padding", [None, "holes", "right-padded"])
def test_documents_do_not_see_each_other(causal, padding):
    documents = torch.tensor([[0] * 7 + [1] * 2 + [2] * 12, [0] * 10 + [1] * 11])
    layer = make_layer(block_size=4, grid=24, causal=causal, resize="extend", window="adjacent", window_size=3)
    valid = None if padding is None else VALID[padding]
    masks = sequence_masks("adjacent", 3, causal, VALID["full"] if valid is None else valid, documents)
    assert_same_with_gradients(layer, make_tokens(21), *masks, sequence=TokenSequence(causal, valid, documents, 3))


def assert_spoils_its_document_alone(layer, sequence, place, token):
    """A bad number in the document from token 9 on, whose earlier tokens do not see it where it is causal."""
    tokens = list(make_tokens(21))
    clean = layer(*tokens, sequence=sequence)
    tokens[place] = tokens[place].detach().clone()
    tokens[place][0, token, 0, 1] = float("nan")
    output = layer(*tokens, sequence=sequence)
    spoilt = torch.zeros(2, 21, HEADS, dtype=torch.bool)
    spoilt[0, token if sequence.causal else 9 :, : HEADS // SHARED] = True
    assert torch.equal(output.isnan().all(dim=-1), spoilt)
    torch.testing.assert_close(output[~spoilt], clean[~spoilt])


@pytest.mark.parametrize("place", [1, 2], ids=["key", "value"])
@pytest.mark.parametrize("window", ["block", "adjacent"])
@pytest.mark.parametrize("causal", [False, True], ids=["encoder", "causal"])
def test_a_bad_token_stays_in_its_document(causal, window, place):
    documents = torch.tensor([[0] * 7 + [1] * 2 + [2] * 12, [0] * 10 + [1] * 11])
    layer = make_layer(block_size=4, grid=24, causal=causal, resize="extend", window=window, window_size=3)
    assert_spoils_its_document_alone(layer, TokenSequence(causal, None, documents, 3), place, 11)


def test_the_bias_is_a_number_for_each_head_of_a_window():
    options = {"hidden_size": HIDDEN, "num_heads": HEADS, "num_key_value_heads": SHARED, "head_dim": WIDTH}
    plain = MHLA(MHLAConfig(blocks=(1, 2, 2)), **options)
    assert "window_bias" not in dict(plain.named_parameters())
    assert plain.double().attention_parts(*make_tokens(48), grid=(3, 4, 4)).window is None
    assert MHLA(MHLAConfig(blocks=(1, 2, 2), window_share="query"), **options).window_query is None
    other = MHLA(MHLAConfig(blocks=(1, 2, 2), window="cross"), **options)
    assert other.window_query is None
    assert torch.equal(other.window_bias, torch.zeros(HEADS)) and other.window_size == (1, 3, 3)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("window, grid, size", GRIDS, ids=lambda value: str(value).replace(" ", ""))
def test_the_share_is_that_of_softmax_where_blocks_are_tokens(window, grid, size, seed):
    layer = make_layer(blocks=grid, window=window, window_size=size)
    length = torch.tensor(grid).prod().item()
    tokens = make_tokens(length, seed)
    key = tokens[1].repeat_interleave(HEADS // SHARED, 2)
    weights = (torch.einsum("bthk,bshk->bths", tokens[0], key) / WIDTH**0.5).softmax(-1)
    expected = (weights * dense_mask(grid, window, size)[:, None]).sum(-1)
    torch.testing.assert_close(layer.attention_parts(*tokens, grid=grid).window[..., 0], expected)


@pytest.mark.parametrize("window, grid, size", GRIDS[4:], ids=lambda value: str(value).replace(" ", ""))
def test_the_window_is_alone_with_a_bias_of_minus_infinity(window, grid, size):
    layer = make_layer(blocks=(1,) * len(grid), window=window, window_size=size)
    tokens = make_tokens(torch.tensor(grid).prod().item())
    with torch.no_grad():
        layer.window_bias.fill_(float("-inf"))
    mask = dense_mask(grid, window, size)
    expected, _ = dense_window(*tokens, mask, ~mask, WIDTH**-0.5, layer.window_bias)
    torch.testing.assert_close(layer(*tokens, grid=grid), expected)


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
    assert torch.equal(layer(*tokens, grid=(3, 4, 4), identity=True), value)


@pytest.mark.parametrize(
    "window, size, sinks",
    [("block", 4, 0), ("adjacent", 3, 0), ("adjacent", 1, 0), ("block", 4, 3), ("adjacent", 2, 2)],
)
@pytest.mark.parametrize("seed", range(4))
def test_a_random_walk_of_the_state_agrees_with_recomputation(window, size, sinks, seed):
    random, rewindable = torch.Generator().manual_seed(seed), 7

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=random))

    state = empty_window_state(*make_tokens(1)[1:], window, size, rewindable, sinks)
    options = {"scale": 0.6, "sink_tokens": sinks}
    # What each row has seen, and how many of its last tokens may be taken back.
    seen = [[x[0, :0] for x in make_tokens(1)] for _ in range(2)]
    left, last = 0, None
    for index in range(60):
        action = number(0, 5)
        if action == 0 and last is not None and last.shape[1] <= left:
            # The last tokens, or some of them, and in their place others.
            kept = torch.rand(last.shape, generator=random) < 0.5 if number(0, 2) else None
            state, left = state.rewound(last, kept), left - last.shape[1]
            for row, tokens in enumerate(seen):
                count = int(last[row].sum())
                places = torch.arange(len(tokens[0]))
                stay = places < len(tokens[0]) - count
                if kept is not None:
                    stay[len(stay) - count :] = kept[row][last[row]]
                seen[row] = [x[stay] for x in tokens]
            last = None
        elif action == 1:
            order = torch.tensor([1, 0])
            names = ("keys", "values", "position", "left", "num_left")
            state = dataclasses.replace(state, **{name: getattr(state, name)[order] for name in names})
            seen, last = seen[::-1], None if last is None else last[order]
        else:
            length = 1 if action < 4 else number(2, 25)
            tokens = [x.detach() for x in make_tokens(length, seed=1000 * seed + index)]
            valid = torch.rand(2, length, generator=random) < 0.8 if number(0, 2) else None
            output, state = extend_window(*tokens, state, window, size, valid=valid, scale=0.6)
            last = torch.ones(2, length, dtype=torch.bool) if valid is None else valid
            left = min(left + length, rewindable)
            for row in range(2):
                new = [x[row, last[row]] for x in tokens]
                seen[row] = [torch.cat(pair) for pair in zip(seen[row], new)]
                if len(new[0]):
                    whole = [x[None] for x in seen[row]]
                    expected = sequence_window_attention(*whole, window, size, TokenSequence(True), **options)
                    for part in (slice(0, 2), slice(-WIDTH, None)):
                        found = output[row, last[row]][..., part]
                        torch.testing.assert_close(found, expected[0, -len(new[0]) :, :, part], rtol=1e-9, atol=1e-9)
                assert not output[row, ~last[row]].any()


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
        ({"window_share": "token"}, "window_share='token' is not one of 'head', 'query'"),
        ({"window_size": 4}, r"window_size=\(4,\) needs window, one of 'block', 'adjacent', 'cross'"),
        ({"window": "block", "window_size": 0}, "window_size must be at least 1, got 0"),
        ({"window": "block", "window_size": (200, 200)}, "window_size=.* has more than 16384 tokens in a block"),
        (
            {"window": "cross", "blocks": (2, 2)},
            "window='cross' needs the three axes of a video .*layout has 2",
        ),
        ({"window": "cross", "causal": True, "block_size": 4}, "window='cross' needs the three axes"),
        ({"window": "cross", "window_size": (2, 2)}, "window='cross' needs the three axes"),
        ({"sink_tokens": 1}, "sink_tokens=1 needs window, one of 'block', 'adjacent', 'cross': .* error of a layer"),
        ({"window": "block", "sink_tokens": -1}, "sink_tokens must be at least 0, got -1"),
        (
            {"window": "block", "sink_tokens": 1, "eps": 0, "feature_map": "hedgehog"},
            "eps=0.0 must be at least .* with sink_tokens",
        ),
        (
            {"window": "adjacent", "causal": True, "block_size": 8, "window_size": 4, "sink_tokens": 5},
            r"sink_tokens=5 must be at most a block of the window, window_size=\(4,\)",
        ),
        ({"window": "block", "window_size": (2, 2), "blocks": (2, 2, 2)}, "window_size=.*one entry for each axis.*3"),
        ({"window": "block", "window_size": (2, 2), "block_size": 4, "resize": "extend"}, "window_size=.* has 1"),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message) as error:
        MHLAConfig.from_dict(options)
    assert "\n" not in str(error.value) and len(str(error.value)) < 300


def test_options_that_do_not_fit_the_model_are_refused():
    widths = {"hidden_size": 4, "num_heads": 2, "head_dim": 2}
    with pytest.raises(ValueError, match="sink_tokens=3 is more than the 2 tokens that are before the grid"):
        MHLA(MHLAConfig(window="block", blocks=(2,), sink_tokens=3), num_prefix_tokens=2, **widths)
    with pytest.raises(ValueError, match="sink_tokens=1 is more than the 0 tokens that are before the grid"):
        JointMHLA(MHLAConfig(window="block", blocks=(2,), sink_tokens=1, text="block"), **widths)
    causal = MHLA(MHLAConfig(window="block", block_size=2, grid=4, causal=True, sink_tokens=1), **widths)
    with pytest.raises(ValueError, match="Sinks of a sequence need sequence"):
        causal(*torch.zeros(3, 1, 4, 2, 2), grid=(4,))
    with pytest.raises(ValueError, match="window='cross' needs the three axes"):
        MHLA(MHLAConfig(window="cross"), hidden_size=4, num_heads=2, head_dim=2, default_grid=(4, 4))


def test_taking_the_window_away_takes_its_size_with_it():
    config = MHLAConfig(window="adjacent", window_size=(2, 2), sink_tokens=1)
    assert config.replace(window=None).window_size is None and config.replace(window=None).sink_tokens == 0
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
    assert layer.window_bias.grad.abs().sum() > 0
    torch.compiler.reset()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("window", "size"), [("block", 6), ("adjacent", 4)])
def test_large_logits_fit_into_half_precision(window, size, dtype):
    """Unscaled logits of 73,728 are beyond fp16; divided by the root of the width they are not."""
    tokens = torch.randn(3, 1, 24, 2, 128, generator=torch.Generator().manual_seed(0)).to(dtype)
    layout = BlockLayout((24,), blocks=(4,))
    output = grid_window_attention(tokens[0] + 24, tokens[1] + 24, tokens[2], window, (size,), layout)
    assert output.isfinite().all()
    torch.testing.assert_close(output[..., :2].float().sum(-1), torch.ones(1, 24, 2), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("bias", [-torch.inf, -100.0, -12.0, 0.0, 12.0, 100.0])
def test_shares_are_finite_at_any_bias(bias, dtype):
    """The sum lies between the two parts, also where one of them has no weight at all."""
    attended, value = torch.full((1, 3, 2, 4), 3.0), torch.full((1, 3, 2, 4), 5.0)
    own = torch.tensor([1.0, 0.5, 0.125]).view(1, 3, 1, 1).expand(1, 3, 2, 1)
    window = torch.cat([own, 1 - own, own * value], dim=-1)
    output = join_window(attended.to(dtype), window.to(dtype), torch.full((2,), bias)).float()
    share = 1 / (1 + (((1 - own) / own).log() + bias).exp())
    torch.testing.assert_close(output, share * value + (1 - share) * attended, rtol=2e-3, atol=2e-3)
