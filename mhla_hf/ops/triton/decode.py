# SPDX-License-Identifier: Apache-2.0
"""The custom operator that decodes one token of every batch entry from the recurrent state, in one launch.

Shape letters: B batch, H query heads, G key heads (H or a divisor), S heads of the prefix (H, or G where all heads
share the mixing weights), K and V widths, P width of the normaliser's pair (K), n blocks that there is room for.
"""

# No postponed annotations here: torch.library reads schemas from them.

import torch
import triton
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from .decode_kernels import decode_kernel
from .launching import dense_rows, on_device


# Elements of a summary that a program mixes for the next block, and blocks that it reads at a time.
SHARE_ELEMENTS = 256
SHARE_BLOCKS = 16
# Elements of a summary that a program adds the token to and computes the output from.
STEP_ELEMENTS = 4096


@torch.library.custom_op("mhla_hf::decode_token", mutates_args=("summaries",))
def decode_token(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    plain_query: Tensor | None,
    plain_key: Tensor | None,
    valid: Tensor | None,
    mixing: Tensor,
    summaries: Tensor,
    current: Tensor,
    prefix: Tensor,
    upcoming: Tensor,
    position: Tensor,
    block_size: int,
    divides: bool,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """One token of every batch entry; see [`mhla_hf.ops.mhla_step`] and [`mhla_hf.ops.MHLAState`].

    Args:
        query: `[B, 1, H, K]`.
        key: `[B, 1, G, K]`.
        value: `[B, 1, G, V]`.
        plain_query: Queries of the normaliser where they differ, `[B, 1, H, K]`.
        plain_key: Keys of the normaliser, given together with them, `[B, 1, G, K]`.
        valid: BoolTensor `[B, 1]`, False for padding.
        mixing: float32 `[M, M]`, `[1, M, M]` or `[H, M, M]`.
        summaries: Finished blocks `[B, G, n, K, V + 1]`, n at least 1; the block that a token finishes is written to.
        current: float32 `[B, G, K, V + 1]`.
        prefix: float32 `[B, S, K, V + 1]`.
        upcoming: float32 `[B, S, K, V + 1]`.
        position: LongTensor `[B]`.
        block_size: Tokens of a block.
        divides: Whether to divide by the normaliser.
        eps: Added to the denominator.

    Returns:
        `[B, 1, H, V]` in the dtype of `value`, and the new current summary, prefix, upcoming prefix and position.
    """
    plain_query, plain_key = query if plain_query is None else plain_query, key if plain_key is None else plain_key
    query, key, value, plain_query, plain_key = map(dense_rows, (query, key, value, plain_query, plain_key))
    per_head = mixing.dim() > 2 and mixing.shape[0] != 1
    mixing, position = mixing.expand(query.shape[2], -1, -1), position.contiguous()
    current, prefix, upcoming = current.contiguous(), prefix.contiguous(), upcoming.contiguous()
    batch, heads, width, columns = current.shape
    new_current, new_prefix, new_upcoming = (torch.empty_like(tensor) for tensor in (current, prefix, upcoming))
    new_position = torch.empty_like(position)
    output = value.new_empty(batch, 1, query.shape[2], columns - 1)
    rows = triton.next_power_of_2(width)
    tile = max(8, min(32, STEP_ELEMENTS // rows))
    step_tiles = triton.cdiv(columns, tile)
    grid = (batch * heads * (step_tiles + triton.cdiv(width * columns, SHARE_ELEMENTS)),)
    with on_device(query):
        decode_kernel[grid](
            query,
            key,
            value,
            plain_query,
            plain_key,
            position if valid is None else valid,
            mixing,
            summaries,
            current,
            prefix,
            upcoming,
            position,
            output,
            new_current,
            new_prefix,
            new_upcoming,
            new_position,
            summaries.shape[2],
            mixing.shape[-1] - 1,
            *_entry_strides(query),
            *_entry_strides(key),
            *_entry_strides(value),
            *_entry_strides(plain_query),
            *_entry_strides(plain_key),
            0 if valid is None else valid.stride(0),
            *mixing.stride(),
            eps,
            BLOCK_SIZE=block_size,
            HEADS=heads,
            REPEATS=query.shape[2] // heads,
            PER_HEAD=per_head,
            WIDTH=width,
            VALUE=columns - 1,
            BLOCK_WIDTH=rows,
            BLOCK_COLUMNS=tile,
            STEP_TILES=step_tiles,
            SHARE_BLOCKS=SHARE_BLOCKS,
            SHARE_ELEMENTS=SHARE_ELEMENTS,
            HAS_VALID=valid is not None,
            DIVIDES=divides,
            INTERPRETED=not query.is_cuda,
            num_warps=4,
        )
    return output, new_current, new_prefix, new_upcoming, new_position


def _entry_strides(tokens: Tensor) -> tuple[int, int]:
    return tokens.stride(0), tokens.stride(2)


@decode_token.register_fake
def _(
    query, key, value, plain_query, plain_key, valid, mixing, summaries,
    current, prefix, upcoming, position, block_size, divides, eps,
):  # fmt: skip
    state = (torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in (current, prefix, upcoming))
    return value.new_empty(*query.shape[:-1], value.shape[-1]), *state, torch.empty_like(position)


@register_flop_formula(torch.ops.mhla_hf.decode_token)
def _decode_flops(
    query, key, value, plain_query, plain_key, valid, mixing, summaries, current, prefix, upcoming, position,
    block_size, *args, **kwargs,
) -> int:  # fmt: skip
    """2 B K V for a key head's token, 4 B K V for a query head's weighted sum and product with the query, and 2 B K V
    for each block in the share of a next prefix.
    """
    elements = current[0] * current[2] * current[3]
    share = -(-summaries[2] // block_size)
    return 2 * elements * current[1] + 4 * elements * query[2] + 2 * elements * prefix[1] * share
