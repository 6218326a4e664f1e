# SPDX-License-Identifier: Apache-2.0
"""Block layouts: every token in one block, tokens in and out of blocks, and resampling of mixing matrices."""

from __future__ import annotations

import itertools
import math
import operator
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mhla_hf import BlockLayout, resample_mixing
from mhla_hf.layouts.blocks import choose_blocks
from mhla_hf.layouts.resampling import interpolation_matrix


AXES = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=3)


@settings(max_examples=100, deadline=None)
@given(axes=AXES, by_size=st.booleans())
def test_every_token_is_in_one_block_and_comes_back(axes, by_size):
    grid, tiles = [max(axis) for axis in axes], [min(axis) for axis in axes]
    layout = BlockLayout(grid, block_size=tiles) if by_size else BlockLayout(grid, blocks=tiles)
    tokens = torch.arange(layout.num_tokens * 2, dtype=torch.float64).reshape(1, -1, 2) + 1
    grouped = layout.to_blocks(tokens)
    assert grouped.shape == (1, layout.num_blocks, layout.max_block_tokens, 2)
    assert torch.equal(layout.from_blocks(grouped), tokens)
    assert int((grouped[..., 0] != 0).sum()) == layout.num_tokens
    counts = (grouped[0, ..., 0] != 0).sum(-1)
    assert torch.equal(counts, layout.block_tokens)
    assert int(layout.block_tokens.min()) >= 1


@settings(max_examples=100, deadline=None)
@given(axes=AXES, by_size=st.booleans(), prefix=st.sampled_from([0, 0, 1, 12]))
def test_slots_of_blocks_hold_their_tokens_in_row_major_order(axes, by_size, prefix):
    """Counted out token by token from the lengths of the tiles."""
    grid, tiles = [max(axis) for axis in axes], [min(axis) for axis in axes]
    option = {"block_size": tiles} if by_size else {"blocks": tiles}
    layout = BlockLayout(grid, num_prefix_tokens=prefix, **option)
    slots: list[list[int]] = [list(range(prefix))] if prefix else []
    slots += [[] for _ in range(layout.num_blocks - len(slots))]
    tile_of = [[tile for tile, length in enumerate(lengths) for _ in range(length)] for lengths in layout.tile_lengths]
    for token, place in enumerate(itertools.product(*map(range, grid))):
        block = 0
        for axis, position in enumerate(place):
            block = block * layout.blocks[axis] + tile_of[axis][position]
        slots[block + layout.num_prefix_blocks].append(prefix + token)
    empty = [layout.num_tokens] * layout.max_block_tokens
    expected = [(tokens + empty)[: layout.max_block_tokens] for tokens in slots]
    assert layout.token_table(torch.device("cpu")).tolist() == expected


@settings(max_examples=100, deadline=None)
@given(axes=AXES, by_size=st.booleans(), prefix=st.sampled_from([0, 0, 1, 12]))
def test_block_order_puts_the_same_tokens_into_the_same_slots(axes, by_size, prefix):
    grid, tiles = [max(axis) for axis in axes], [min(axis) for axis in axes]
    option = {"block_size": tiles} if by_size else {"blocks": tiles}
    rows = BlockLayout(grid, num_prefix_tokens=prefix, **option)
    ordered = BlockLayout(grid, num_prefix_tokens=prefix, block_order=True, **option)
    tokens = torch.randn(2, rows.num_tokens, 3, 2, dtype=torch.float64)
    moved = rows.to_block_order(tokens)
    assert torch.equal(rows.from_block_order(moved), tokens)
    assert torch.equal(rows.to_block_order(tokens.transpose(1, 2), axis=2), moved.transpose(1, 2))
    assert torch.equal(ordered.to_blocks(moved), rows.to_blocks(tokens))
    assert torch.equal(ordered.to_head_blocks(moved), rows.to_head_blocks(tokens))
    assert torch.equal(ordered.from_blocks(ordered.to_blocks(moved)), moved)
    for name in ("block_of_token", "position_in_block"):
        of_rows, of_ordered = getattr(rows, name), getattr(ordered, name)
        assert torch.equal(rows.to_block_order(of_rows[None])[0], of_ordered)
    assert ordered.block_of_token.tolist() == sorted(ordered.block_of_token.tolist())
    table, cpu = ordered.token_table(torch.device("cpu")), torch.device("cpu")
    places = torch.cat(
        [rows.from_block_order(torch.arange(rows.num_tokens)[None])[0], torch.tensor([rows.num_tokens])]
    )
    assert torch.equal(table, places[rows.token_table(cpu).long()].int())


def test_even_blocks_in_order_are_views():
    layout = BlockLayout((4, 6), blocks=(2, 3), block_order=True)
    tokens = torch.randn(2, 24, 3)
    assert layout.to_blocks(tokens).data_ptr() == tokens.data_ptr()
    assert layout.from_blocks(layout.to_blocks(tokens)).data_ptr() == tokens.data_ptr()


@pytest.mark.parametrize("option", [{"blocks": (3,)}, {"block_size": (8,)}])
def test_grids_of_any_length_compile(option):
    """In one graph, with lengths that the compiler takes for variable from the second one on."""
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda tokens: BlockLayout(tokens.shape[1:2], **option).to_blocks(tokens), backend="eager", fullgraph=True
    )
    for length in (20, 23, 24, 22):
        tokens = torch.rand(1, length, 2)
        assert torch.equal(compiled(tokens), BlockLayout((length,), **option).to_blocks(tokens))


def test_block_of_token_is_row_major():
    layout = BlockLayout(grid=(2, 4), blocks=(1, 2))
    assert layout.block_of_token.tolist() == [0, 0, 1, 1, 0, 0, 1, 1]
    assert layout.position_in_block.tolist() == [0, 1, 0, 1, 2, 3, 2, 3]
    assert layout.centers.tolist() == [[0.5, 0.5], [0.5, 1.5]]


def test_tiles_by_count_are_balanced_and_tiles_by_size_are_full():
    assert BlockLayout((52,), blocks=(10,)).tile_lengths == ((5, 5, 5, 5, 6, 5, 5, 5, 5, 6),)
    assert BlockLayout((52,), block_size=(5,)).tile_lengths == ((5,) * 10 + (2,),)
    assert BlockLayout((5,), block_size=(9,)).tile_lengths == ((5,),)


def test_the_wan_grid_keeps_its_last_columns():
    layout = BlockLayout((21, 30, 52), blocks=(3, 5, 10))
    assert (layout.num_tokens, layout.num_blocks, layout.is_uniform) == (32760, 150, False)
    assert int(layout.block_tokens.sum()) == 32760


def test_layouts_are_values():
    first, second = BlockLayout((4, 6), blocks=(2, 3)), BlockLayout((4, 6), block_size=(2, 2))
    assert first == second and hash(first) == hash(second)
    assert first != BlockLayout((4, 6), blocks=(2, 2))
    ordered = BlockLayout((4, 6), blocks=(2, 3), block_order=True)
    assert first != ordered and "block_order=True" in repr(ordered) and "block_order" not in repr(first)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"grid": (4,)}, "exactly one"),
        ({"grid": (4,), "blocks": (2,), "block_size": (2,)}, "exactly one"),
        ({"grid": (4,), "blocks": (5,)}, "blocks"),
        ({"grid": (4,), "blocks": (2, 2)}, "axes"),
        ({"grid": (4, 4, 4, 4), "blocks": (2,)}, "grid"),
        ({"grid": (0,), "blocks": (1,)}, "grid"),
        ({"grid": (4.0,), "blocks": (1,)}, "grid"),
        ({"grid": (None,), "blocks": (1,)}, "grid"),
        ({"grid": 4, "blocks": (1,)}, "grid"),
        ({"grid": (4,), "block_size": (0,)}, "block_size"),
    ],
)
def test_bad_layouts_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        BlockLayout(**arguments)


def test_tokens_of_another_length_are_refused():
    with pytest.raises(ValueError, match="tokens has 5"):
        BlockLayout((4,), blocks=(2,)).to_blocks(torch.zeros(1, 5, 1))


@settings(max_examples=60, deadline=None)
@given(grid=st.lists(st.integers(1, 60), min_size=1, max_size=3))
def test_chosen_blocks_keep_mixing_cheaper_than_the_tokens(grid):
    blocks = choose_blocks(grid)
    layout = BlockLayout(grid, blocks=blocks)
    assert layout.num_blocks**2 <= layout.num_tokens
    # No other numbers that keep to it have smaller blocks and fewer empty slots.
    size, slots = _diagonal(grid, blocks), layout.num_blocks * layout.max_block_tokens
    for others in itertools.product(*(range(1, count + 3) for count in blocks)):
        if math.prod(others) ** 2 <= layout.num_tokens and all(map(operator.le, others, grid)):
            other = BlockLayout(grid, blocks=others)
            other_slots = other.num_blocks * other.max_block_tokens
            assert (_diagonal(grid, others), other_slots) == (size, slots) or not (
                _diagonal(grid, others) <= size and other_slots <= slots
            )


def _diagonal(grid, blocks):
    return sum(Fraction(length, count) ** 2 for length, count in zip(grid, blocks))


@pytest.mark.parametrize(
    "grid, blocks",
    [
        ((16, 16), (4, 4)),
        ((32, 32), (8, 4)),
        ((64, 64), (8, 8)),
        ((14, 14), (4, 3)),
        ((9, 20, 20), (3, 5, 4)),
        ((21, 30, 50), (3, 5, 10)),
        ((21, 30, 52), (3, 6, 9)),
        ((21, 45, 80), (3, 9, 10)),
        ((1, 4), (1, 2)),
        ((17,), (4,)),
    ],
)
def test_chosen_blocks_divide_the_grid_where_they_can(grid, blocks):
    assert choose_blocks(grid) == blocks


@pytest.mark.parametrize("source, target", [((4,), (6,)), ((6,), (4,)), ((2, 3), (3, 3)), ((3, 5, 10), (1, 5, 11))])
def test_equal_weights_resample_to_equal_weights(source, target):
    count, wanted = torch.tensor(source).prod().item(), torch.tensor(target).prod().item()
    resampled = resample_mixing(torch.full((count, count), 1 / count), source, target)
    torch.testing.assert_close(resampled, torch.full((wanted, wanted), 1 / wanted))


def test_resampling_to_the_same_blocks_changes_nothing():
    mixing = torch.rand(2, 6, 6)
    assert resample_mixing(mixing, (2, 3), (2, 3)) is mixing


def test_resampling_keeps_locality_and_has_gradients():
    mixing = torch.eye(4, dtype=torch.float64, requires_grad=True)
    resampled = resample_mixing(mixing, (4,), (8,))
    assert resampled.shape == (8, 8)
    assert torch.equal(resampled.argmax(dim=1) // 2, torch.arange(8) // 2)
    assert resampled[0, 7] == 0
    resampled.sum().backward()
    assert mixing.grad.gt(0).all()


@pytest.mark.parametrize("source, target", [((2,), (4,)), ((3, 1), (4,)), ((3,), (2, 2)), ((3,), (2**15,))])
def test_resampling_names_what_does_not_fit(source, target):
    with pytest.raises(ValueError, match="source_blocks|target_blocks"):
        resample_mixing(torch.eye(3), source, target)


def test_training_goes_on_after_inference_mode():
    layout = BlockLayout((5, 13), blocks=(2, 3))
    with torch.inference_mode():
        layout.from_blocks(layout.to_blocks(torch.ones(1, 65, 1)))
        resample_mixing(torch.ones(7, 7), (7,), (9,))
    tokens = torch.ones(1, 65, 1, requires_grad=True)
    mixing = torch.ones(7, 7, requires_grad=True)
    (layout.from_blocks(layout.to_blocks(tokens)).sum() + resample_mixing(mixing, (7,), (9,)).sum()).backward()
    assert torch.equal(tokens.grad, torch.ones_like(tokens))


def test_interpolation_is_exact_for_linear_functions_inside():
    matrix = interpolation_matrix((8,), (5,))
    torch.testing.assert_close(matrix.sum(1), torch.ones(5))
    relative = (torch.arange(8) + 0.5) / 8
    torch.testing.assert_close((matrix @ relative)[1:-1], ((torch.arange(5) + 0.5) / 5)[1:-1], rtol=0, atol=0.01)
