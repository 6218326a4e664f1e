# SPDX-License-Identifier: Apache-2.0
"""The softmax window beside MHLA: each token attends exactly to those of its own block and of blocks near it.

The output is a · window + (1 - a) · MHLA, with the share a = Z_w / (Z_w + Z_r) that softmax attention to all tokens
gives to the window: Z is the sum of exp(scale · q·k) over the tokens of the window, and over all others. Z_r is
estimated by landmarks, means of keys, as exp(b) Σ_m n_m exp(scale · q·mean_m) with a learned b for each head. On a
grid these are the means of MHLA's blocks, and n_m the number of tokens of a block that are not in the window; in a
sequence the one mean of all keys outside the window. The estimate with b = 0 takes part in the softmax of the window
as a key for all other tokens, so that its weights tell the share. To that end tokens are widened by channels, as many
as make all widths equal and a multiple of 8, which fused kernels ask for. With r = log(Z_r) / scale in two parts,
since half precision would round it too much in one:

    query (r_high, r_low, ..., q)    key (0, 0, ..., k)    value (1, 0, ..., v)
                                         (1, 1, ..., 0)          (0, 1, ..., 0)

The window has its own layout. The tokens are grouped by its blocks, and the queries of a block meet the keys of
the blocks that it sees in one call of PyTorch's fused attention: the cost is T · L for L tokens in a window, that is
2 B T H L (K + V) operations.

A window of own blocks needs no mask, and so PyTorch can take FlashAttention: blocks that are cut short at the end of
an axis are computed apart from full ones, in 2 calls for each such axis. Each of q, k, v and the output is copied
twice, widened and by blocks, which reads and writes 8 B T W (H + H_kv) numbers; the attention itself reads and writes
a quarter as many. For Wan at 31,500 tokens (`docs/kernels.md`) and blocks of (21, 3, 3) these are 1.6 GB and 411 MB in
bfloat16, and 38 GFLOP.

An `"adjacent"` window copies the keys and values of 3 blocks for each axis, 27 for videos, and needs a mask.

A `"cross"` window of a video has the blocks around a token in its own frames, and its own place in all frames. All
queries of a place share the keys of that place, which need no copies, and the queries of a block those of the eight
blocks around it. One softmax goes over the scores of both. Copying what each block sees in one piece would copy every
key once for each frame as well. With L tokens in a window these are B T H L numbers of scores, which pass through
memory eight times, and 8 copies of keys and values: for that Wan and blocks of (1, 3, 3), 190 MB of scores and 1.5 GB
of copies in bfloat16.

Shape letters: B batch, T tokens, H heads, H_kv key/value heads, g = H / H_kv, K query/key width, V value width, W
width of widened tokens, M blocks of the window, N tokens of the largest one, S blocks that a block sees, itself
included; F, P, Q blocks of a video along frames, height and width, X tokens before the grid.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F

from ..layouts.blocks import BlockLayout, cached, indices, tiles_of
from ..ops.operands import from_head_blocks, head_blocks


Tokens = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Widened queries `[B, T, H, W]`, keys `[B, T, H_kv, W]` and values `[B, T, H_kv, W]` of a grid."""
Prefix = tuple[torch.Tensor, torch.Tensor]
"""Widened keys and values `[B, X, H_kv, W]` that every token sees as well."""

# Numbers of keys copied at a time; that many again are values. Half a gigabyte each in bfloat16.
MAX_COPIED = 2**28
# Logarithm of the number of tokens that a landmark stands for where there are none.
NOTHING = -1e3


def grid_window_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    window: str,
    window_size: Sequence[int],
    layout: BlockLayout,
    *,
    scale: float | None = None,
) -> torch.Tensor:
    """Softmax attention of the tokens of a grid to those of their windows and to landmarks for all others.

    Tokens before the grid (class and register tokens) are in the window of every token and see all of them.

    Args:
        query: `[B, T, H, K]`, rotated and normed as the model's own attention has it.
        key: `[B, T, H_kv, K]`.
        value: `[B, T, H_kv, V]`.
        window: `"block"`, `"adjacent"` or `"cross"`.
        window_size: Tokens of a block along each axis.
        layout: Blocks of the landmarks, with the grid and the number of tokens before it.
        scale: Scale of q·k; `None` for K^-1/2.

    Returns:
        `[B, T, H, W]` in the dtype of `value`: first the weights of the window's tokens together and that of all
        landmarks, last the sum `[B, T, H, V]` of the window's values by their weights. See [`join_window`].
    """
    step = _heads_at_once(key, window, len(layout.grid))
    if step < key.shape[2]:
        groups = query.shape[2] // key.shape[2]
        parts = zip(query.split(step * groups, dim=2), key.split(step, dim=2), value.split(step, dim=2))
        outputs = [grid_window_attention(*part, window, window_size, layout, scale=scale) for part in parts]
        return torch.cat(outputs, dim=2)
    scale = query.shape[3] ** -0.5 if scale is None else scale
    size, before = tuple(window_size), layout.num_prefix_tokens
    tokens = widened(query, key, value, _rest(query, key, window, size, layout, scale), scale)
    landmarks = (x.expand(query.shape[0], 1, key.shape[2], -1) for x in landmark_token(tokens[1], scale))
    prefix = [torch.cat([x[:, :before], landmark], dim=1) for x, landmark in zip(tokens[1:], landmarks)]
    attend = {"block": _attend_own_blocks, "adjacent": _attend_adjacent, "cross": _attend_cross}[window]
    query, key, value = (x[:, before:] for x in tokens)
    output = attend((query, key, value), size, layout.grid, (prefix[0], prefix[1]), scale)
    if before:
        queries, keys, values = (x.transpose(1, 2).unsqueeze(2) for x in (tokens[0][:, :before], *tokens[1:]))
        first = attend_blocks(queries, keys, values, None, scale)
        output = torch.cat([first.squeeze(2).transpose(1, 2), output], dim=1)
    return output


def join_window(attended: torch.Tensor, window: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Add up MHLA and a window by their shares.

    Args:
        attended: `[B, T, H, V]`.
        window: What the functions of this module return, `[B, T, H, W]`.
        bias: Bias b of the landmark of each head, `[H]`, or of each query, `[B, T, H]`; minus infinity gives the
            window alone.

    Returns:
        `[B, T, H, V]` in the dtype of `window` or a wider one.
    """
    dtype = torch.promote_types(bias.dtype, torch.float32)
    own, rest = window[..., :2].to(dtype).split(1, dim=-1)
    # Rescale so that the larger of e^b and 1 is 1: no overflow, and no underflow to 0 in float32.
    bias = bias.to(dtype).clamp(max=80)[..., None]
    factor, rest = (-bias.clamp(min=0)).exp(), rest * bias.clamp(max=0).exp()
    whole = own * factor + rest
    # Padding has no weights.
    whole = whole + (whole == 0)
    largest = torch.finfo(window.dtype).max
    own, rest = ((part / whole).clamp(max=largest).to(window.dtype) for part in (factor, rest))
    return own * window[..., -attended.shape[3] :] + rest * attended


def to_rows(layout: BlockLayout, *tokens: torch.Tensor) -> list[torch.Tensor]:
    """Tokens `[B, T, ...]` row by row, as windows and convolutions need them."""
    return [layout.from_block_order(x) if layout.block_order else x for x in tokens]


def from_rows(layout: BlockLayout, tokens: torch.Tensor) -> torch.Tensor:
    """Undo [`to_rows`]."""
    return layout.to_block_order(tokens) if layout.block_order else tokens


def _heads_at_once(key: torch.Tensor, window: str, axes: int) -> int:
    """Number of key/value heads computed together, so that the keys copied for their windows take little memory."""
    if torch.compiler.is_compiling():
        return key.shape[2]
    copies = {"block": 1, "cross": 9}.get(window, 3**axes)
    return max(1, MAX_COPIED // (copies * key.shape[0] * key.shape[1] * key.shape[3]))


def widened(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rest: torch.Tensor, scale: float) -> Tokens:
    """Tokens with the channels that the share needs before their own, in any layout.

    Args:
        query: `[..., K]`.
        key: `[..., K]`.
        value: `[..., V]`.
        rest: Logarithm of what softmax attention gives to the tokens outside the window of each query, `[...]`.
        scale: Scale of q·k.
    """
    width = -(-(2 + max(query.shape[-1], value.shape[-1])) // 8) * 8
    rest = rest.unsqueeze(-1) / (scale * _unit(scale))
    high = rest.to(query.dtype)
    query = _filled(width, high, (rest - high).to(query.dtype), query)
    value = _filled(width, value.new_ones(1).expand(*value.shape[:-1], 1), value)
    return query, _filled(width, key), value


def _filled(width: int, *channels: torch.Tensor) -> torch.Tensor:
    """Channels `[..., *]` side by side, with zeros before the last ones that make them `width` channels."""
    missing = width - sum([x.shape[-1] for x in channels])
    zeros = channels[-1].new_zeros(1).expand(*channels[-1].shape[:-1], missing)
    return torch.cat([*channels[:-1], zeros, channels[-1]], dim=-1)


def _unit(scale: float) -> float:
    """The power of two nearest to 1 / scale: by it the logarithm of a landmark's weight keeps its size in fp16."""
    return 2.0 ** round(-math.log2(scale))


def landmark_token(key: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The widened key and value `[W]` for all tokens outside the window: zero in the tokens' own channels.

    Args:
        key: Any widened keys `[..., W]`.
        scale: Scale of q·k.
    """
    missing = key.shape[-1] - 2
    return F.pad(key.new_full((2,), _unit(scale)), (0, missing)), F.pad(key.new_ones(1), (1, missing))


def _rest(
    query: torch.Tensor, key: torch.Tensor, window: str, size: tuple[int, ...], layout: BlockLayout, scale: float
) -> torch.Tensor:
    """Logarithm of what landmarks estimate softmax attention to give to the tokens outside the window, `[B, T, H]`."""
    dtype = torch.promote_types(key.dtype, torch.float32)
    outside, counts = cached(_tokens_outside, window, size, layout, dtype, query.device)
    means = (head_blocks(key, layout).sum(3, dtype=dtype) / counts[:, None]).to(key.dtype)
    logits = query.transpose(1, 2).unflatten(1, (key.shape[2], -1)) @ (scale * means).mT.unsqueeze(2)
    return (logits.to(dtype) + outside).logsumexp(-1).flatten(1, 2).transpose(1, 2)


def _tokens_outside(
    window: str, size: tuple[int, ...], layout: BlockLayout, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logarithms of the number of tokens of each block outside the window of each token `[T, M]`, and of all `[M]`."""
    overlaps = []
    for axis, (length, side) in enumerate(zip(layout.grid, size)):
        place = torch.arange(length, device=device) // side
        apart = (place[:, None] - place).abs()
        tile = F.one_hot(tiles_of(layout, axis, device)[0], layout.blocks[axis]).to(dtype)
        # Tokens of each tile in the same block of the window, in that and those beside it, and on the whole axis.
        overlaps.append([(apart <= reach).to(dtype) @ tile for reach in (0, 1, length)])

    def count(*reaches: int) -> torch.Tensor:
        return functools.reduce(torch.kron, [own[reach] for own, reach in zip(overlaps, reaches)])

    axes = len(layout.grid)
    inside = count(*[0 if window == "block" else 1] * axes)
    if window == "cross":
        inside = count(2, 0, 0) + count(0, 1, 1) - count(0, 0, 0)
    outside = F.pad(count(*[2] * axes) - inside, (layout.num_prefix_blocks, 0, layout.num_prefix_tokens, 0))
    return torch.where(outside > 0, outside.log(), NOTHING), layout.block_tokens.to(device)


def _with_prefix(prefix: Prefix, *blocks: torch.Tensor) -> list[torch.Tensor]:
    """Keys and values `[B, H_kv, M, L, W]` after those that every token sees."""
    return [
        torch.cat([x.transpose(1, 2).unsqueeze(2).expand(-1, -1, y.shape[2], -1, -1), y], dim=3)
        for x, y in zip(prefix, blocks)
    ]


def _attend_adjacent(
    tokens: Tokens, size: tuple[int, ...], grid: tuple[int, ...], prefix: Prefix, scale: float
) -> torch.Tensor:
    """Attention of the tokens of a grid to their blocks and those beside them, and to the keys and values before."""
    query, key, value = tokens
    layout = cached(BlockLayout, grid, None, size)
    seen = cached(blocks_seen, tuple(layout.blocks), (-1, 0, 1), query.device)
    mask = cached(slots_seen, layout, (-1, 0, 1), query.device).flatten(-2).unsqueeze(-2)
    # Append globally visible tokens as extra blocks after the dummy block, so that a single gather suffices.
    count, size_of_block = prefix[0].shape[1], mask.shape[-1] // seen.shape[1]
    extra = -(-count // size_of_block)
    seen = torch.cat([seen, layout.num_blocks + 1 + indices(extra, seen.device).expand(len(seen), extra)], dim=1)
    mask = F.pad(F.pad(mask, (0, count), value=True), (0, extra * size_of_block - count))
    keys, values = (
        of_seen(head_blocks(x, layout), seen, y.transpose(1, 2)).flatten(3, 4) for x, y in zip((key, value), prefix)
    )
    return from_head_blocks(attend_blocks(head_blocks(query, layout), keys, values, mask, scale), layout)


def _attend_own_blocks(
    tokens: Tokens, size: tuple[int, ...], grid: tuple[int, ...], prefix: Prefix, scale: float
) -> torch.Tensor:
    """Attention of the tokens of a grid to their own blocks, without masks, and to the keys and values before."""
    query, key, value = tokens
    size = tuple([min(side, length) for side, length in zip(size, grid)])
    output = query.new_empty(query.shape[0], *grid, query.shape[2], value.shape[3])
    cuts = [_cuts(length, side) for length, side in zip(grid, size)]
    for part in itertools.product(*cuts):
        places = (slice(None), *[slice(start, stop) for start, stop, _ in part])
        sides = [side for _, _, side in part]
        views = [_own_blocks(x.unflatten(1, grid)[places], sides) for x in tokens]
        # Heads first, and the blocks and their tokens each as one axis.
        counts, tail = views[0].shape[2 : 2 + len(sides)], views[0].shape[2 + len(sides) : -1]
        blocks = [x.flatten(2, 1 + len(sides)).flatten(3, -2) for x in views]
        blocks[1:] = _with_prefix(prefix, *blocks[1:])
        attended = attend_blocks(blocks[0], blocks[1], blocks[2], None, scale)
        _own_blocks(output[places], sides).copy_(attended.unflatten(3, tail).unflatten(2, counts))
    return output.flatten(1, -3)


def _cuts(length: int, side: int) -> list[tuple[int, int, int]]:
    """Parts of an axis with blocks of one size: first and last position, and size."""
    full = length // side * side
    return [(0, full, side)] + ([(full, length, length - full)] if full < length else [])


def _own_blocks(tokens: torch.Tensor, sides: Sequence[int]) -> torch.Tensor:
    """A view of `[B, *grid, H, D]` by head and block, `[B, H, *counts, *sides, D]`."""
    axes = len(sides)
    for axis in reversed(range(axes)):
        tokens = tokens.unflatten(1 + axis, (-1, sides[axis]))
    return tokens.permute(0, 2 * axes + 1, *range(1, 2 * axes, 2), *range(2, 2 * axes + 1, 2), 2 * axes + 2)


def attend_blocks(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> torch.Tensor:
    """Attention inside each block: `[B, H, M, N, W]` from queries of that shape and keys `[B, H_kv, M, L, W]`.

    The mask is `[B or 1, 1, M, N or 1, L]`. Query heads that share their keys stand side by side as tokens.
    """
    groups = query.shape[1] // key.shape[1]
    batch, heads, blocks, tokens, width = query.shape
    if groups > 1:
        query = query.unflatten(1, (-1, groups)).transpose(2, 3).flatten(3, 4)
        if mask is not None and mask.shape[3] > 1:
            mask = mask.repeat(1, 1, 1, groups, 1)
    query, key, value = (x.flatten(0, 1) for x in (query, key, value))
    if mask is not None:
        mask = mask[:, 0] if mask.shape[0] == 1 else mask.expand(-1, heads // groups, -1, -1, -1).flatten(0, 1)
    output = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)
    output = output.unflatten(0, (batch, -1))
    if groups > 1:
        output = output.unflatten(3, (groups, tokens)).transpose(2, 3).flatten(1, 2)
    return output


def of_seen(blocks: torch.Tensor, seen: torch.Tensor, others: torch.Tensor | None = None) -> torch.Tensor:
    """The blocks that each block sees: `[B, H, M, S, N, ...]` from `[B, H, M, N, ...]`, zero for missing ones.

    Block M is the missing one; other tokens `[B, H, X, ...]` follow it in blocks of their own.
    """
    if seen.shape[1] == 1:
        return blocks.unsqueeze(3)
    padded = F.pad(blocks, [0, 0] * (blocks.dim() - 3) + [0, 1])
    if others is not None:
        others = F.pad(others, [0, 0] * (others.dim() - 3) + [0, -others.shape[2] % blocks.shape[3]])
        padded = torch.cat(
            [padded, others.expand(blocks.shape[0], *others.shape[1:]).unflatten(2, (-1, blocks.shape[3]))], 2
        )
    return padded.index_select(2, seen.flatten()).unflatten(2, seen.shape)


def slots_seen(layout: BlockLayout, offsets: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Mask of the slots with a token in the blocks that each block sees, BoolTensor `[1, 1, M, S, N]`."""
    filled = layout.token_table(device) < layout.num_tokens
    return of_seen(filled[None, None], blocks_seen(tuple(layout.blocks), offsets, device))


def blocks_seen(blocks: tuple[int, ...], offsets: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """The blocks at some offsets along each axis from each block, LongTensor `[M, S]`; M where there is none."""
    steps = torch.cartesian_prod(*[torch.tensor(offsets, device=device)] * len(blocks)).view(-1, len(blocks))
    stride = count = math.prod(blocks)
    number = torch.arange(count, device=device)
    seen = torch.zeros(count, len(steps), dtype=torch.long, device=device)
    exists = seen == 0
    for axis, length in enumerate(blocks):
        stride = stride // length
        place = (number // stride % length)[:, None] + steps[:, axis]
        exists = exists & (place >= 0) & (place < length)
        seen = seen * length + place
    return torch.where(exists, seen, count)


def _attend_cross(
    tokens: Tokens, size: tuple[int, ...], grid: tuple[int, ...], prefix: Prefix, scale: float
) -> torch.Tensor:
    """Attention of the tokens of a video to those of their cross windows, and to the keys and values before."""
    query, key, value = tokens
    batch, _, heads, _ = query.shape
    groups = heads // key.shape[2]
    # Slots that a block has beyond the grid would be computed like tokens.
    size = tuple([min(side, length) for side, length in zip(size, grid)])
    # Query heads that share their keys stand side by side as tokens: [B · H_kv, P, Q, F, g · N, K].
    queries = _by_place(query * scale, grid, size)
    queries = queries.unflatten(0, (-1, groups)).movedim(1, 4).flatten(4, 5)
    keys, values = (_by_place(x, grid, size) for x in (key, value))
    rows = queries.flatten(3, 4)
    scores = [
        (rows @ keys.flatten(3, 4).transpose(-1, -2)).view(*queries.shape[:5], -1),
        queries @ _around(keys).transpose(-1, -2),
    ]
    before = [x.transpose(1, 2).flatten(0, 1)[:, None, None, None] for x in prefix]
    scores.append(queries @ before[0].transpose(-1, -2))
    widths = [part.shape[-1] for part in scores]
    mask = cached(_cross_mask, grid, size, query.device)
    mask = F.pad(mask, (0, sum(widths) - mask.shape[-1]), value=True)
    logits = torch.cat(scores, dim=-1).masked_fill_(~mask, float("-inf"))
    # Sums of half precision run in float32 inside, and only what comes out is rounded.
    weights = logits.softmax(dim=-1).to(value.dtype).split(widths, dim=-1)
    output = (weights[0].flatten(3, 4) @ values.flatten(3, 4)).view(*queries.shape[:5], -1)
    output = output + weights[1] @ _around(values) + weights[2] @ before[1]
    output = output.unflatten(4, (groups, -1)).movedim(4, 1).flatten(0, 1)
    return _from_places(output, batch, grid, size)


def _by_place(tokens: torch.Tensor, grid: Sequence[int], size: Sequence[int]) -> torch.Tensor:
    """Groups `[B, T, H, D]` by block, frames innermost: `[B · H, P, Q, F, N, D]`, zero where blocks leave the grid."""
    tokens = tokens.unflatten(1, tuple(grid))
    missing = [-length % side for length, side in zip(grid, size)]
    tokens = F.pad(tokens, (0, 0, 0, 0, 0, missing[2], 0, missing[1], 0, missing[0]))
    for axis, side in zip((1, 3, 5), size):
        tokens = tokens.unflatten(axis, (-1, side))
    return tokens.permute(0, 7, 3, 5, 1, 2, 4, 6, 8).flatten(5, 7).flatten(0, 1)


def _from_places(grouped: torch.Tensor, batch: int, grid: Sequence[int], size: Sequence[int]) -> torch.Tensor:
    """Undoes [`_by_place`]: `[B, T, H, D]`."""
    tokens = grouped.unflatten(0, (batch, -1)).unflatten(5, tuple(size)).permute(0, 4, 5, 2, 6, 3, 7, 1, 8)
    tokens = tokens.flatten(5, 6).flatten(3, 4).flatten(1, 2)
    return tokens[:, : grid[0], : grid[1], : grid[2]].flatten(1, 3)


def _around(blocks: torch.Tensor) -> torch.Tensor:
    """The eight blocks around each block in its frames: `[Z, P, Q, F, 8 · N, D]` from `[Z, P, Q, F, N, D]`."""
    height, width = blocks.shape[1:3]
    padded = F.pad(blocks, (0, 0, 0, 0, 0, 0, 1, 1, 1, 1))
    places = [(down, right) for down in range(3) for right in range(3) if (down, right) != (1, 1)]
    return torch.cat([padded[:, i : i + height, j : j + width] for i, j in places], dim=4)


def _cross_mask(grid: tuple[int, ...], size: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Mask of the keys of a block: its own place in all frames, then the blocks around it."""
    there = _by_place(torch.ones(1, math.prod(grid), 1, 1, device=device), grid, size)
    place = there.flatten(3, 4).unsqueeze(3).expand(-1, -1, -1, there.shape[3], -1, -1)
    return torch.cat([place, _around(there)], dim=4).squeeze(-1).unsqueeze(4) > 0
