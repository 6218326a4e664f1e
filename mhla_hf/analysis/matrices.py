# SPDX-License-Identifier: Apache-2.0
"""Attention matrices written out: MHLA, softmax and plain linear attention on the same queries and keys.

They take O(R · T) memory a head for R of the T query tokens, in the dtype of their inputs.

Shape letters: B batch, T tokens, R query tokens, H heads, H_kv key/value heads, K query/key width, M blocks.
"""

from __future__ import annotations

import torch

from ..layouts.blocks import BlockLayout
from ..layouts.sequences import extend_mixing
from ..ops.checks import check_attention
from ..ops.mixing import repeat_heads
from ..ops.numerics import Operands, from_head_blocks, head_blocks
from ..utils.messages import shorten_value


_CAUSAL_BLOCK_SIZE = 64


def mhla_matrix(
    query: torch.Tensor,
    key: torch.Tensor,
    mixing: torch.Tensor,
    layout: BlockLayout,
    *,
    normalizer_query: torch.Tensor | None = None,
    normalizer_key: torch.Tensor | None = None,
    normalizer: str = "query",
    causal: bool = False,
    eps: float = 1e-6,
    rows: torch.Tensor | None = None,
) -> torch.Tensor:
    """The matrix that MHLA multiplies the values by: m_{b(t),b(j)} · φ(q_t)·φ(k_j) over the normaliser of token t.

    Args:
        query: Feature-mapped queries `[B, T, H, K]`.
        key: Feature-mapped keys `[B, T, H_kv, K]`.
        mixing: `[M, M]` or `[H, M, M]`.
        layout: Blocks of the T tokens.
        normalizer_query: Queries of the normaliser, where they differ (without rotary embedding).
        normalizer_key: Keys of the normaliser, likewise.
        normalizer: Name of the normaliser, see [`MHLAConfig`][mhla_hf.MHLAConfig].
        causal: Token t sees j ≤ t only.
        eps: Added to the normaliser.
        rows: Query tokens whose rows are wanted, LongTensor `[R]`; `None` for all T.

    Returns:
        `[B, H, R, T]` in the dtype of `query`.

    Raises:
        ValueError: If an argument has a wrong shape, dtype, device or value; the message names the argument.

    Examples:
        >>> import torch
        >>> from mhla_hf import BlockLayout
        >>> from mhla_hf.analysis import mhla_matrix
        >>> features = torch.ones(1, 6, 1, 4)
        >>> mhla_matrix(features, features, torch.eye(2), BlockLayout(grid=(6,), blocks=(2,)))[0, 0, 0]
        tensor([0.3333, 0.3333, 0.3333, 0.0000, 0.0000, 0.0000])
    """
    operands = Operands(query, key, key, normalizer_query, normalizer_key, normalizer, eps)
    check_attention(operands, mixing, layout, causal)
    rows = _checked_rows(rows, query)
    if causal:
        mixing = extend_mixing(mixing, layout.num_blocks, causal=True)
    mixing = mixing.to(query.dtype)
    block = layout.block_of_token.to(query.device)
    weights = _scores(query, key, rows) * mixing[..., block[rows][:, None], block]
    if causal:
        weights = weights * _seen(rows, query.shape[1])
    divisor = _divisor(operands, mixing, layout, causal)
    return weights if divisor is None else weights / divisor[:, rows].transpose(1, 2)


def mhla_divisor(
    query: torch.Tensor,
    key: torch.Tensor,
    mixing: torch.Tensor,
    layout: BlockLayout,
    *,
    normalizer_query: torch.Tensor | None = None,
    normalizer_key: torch.Tensor | None = None,
    normalizer: str = "query",
    causal: bool = False,
    eps: float = 1e-6,
) -> torch.Tensor | None:
    """What the rows of [`mhla_matrix`][mhla_hf.analysis.mhla_matrix] are divided by.

    Args:
        query: As there, like the other arguments.

    Returns:
        `[B, T, H, 1]` in the dtype of `query`, `eps` included; `None` for the normaliser `"none"`.

    Raises:
        ValueError: As there.
    """
    operands = Operands(query, key, key, normalizer_query, normalizer_key, normalizer, eps)
    check_attention(operands, mixing, layout, causal)
    mixing = extend_mixing(mixing, layout.num_blocks, causal=True) if causal else mixing
    return _divisor(operands, mixing.to(query.dtype), layout, causal)


def linear_matrix(
    query: torch.Tensor,
    key: torch.Tensor,
    *,
    normalizer_query: torch.Tensor | None = None,
    normalizer_key: torch.Tensor | None = None,
    normalizer: str = "query",
    causal: bool = False,
    eps: float = 1e-6,
    rows: torch.Tensor | None = None,
) -> torch.Tensor:
    """The matrix of plain linear attention: [`mhla_matrix`][mhla_hf.analysis.mhla_matrix] with one block.

    Args:
        query: Feature-mapped queries `[B, T, H, K]`.
        key: Feature-mapped keys `[B, T, H_kv, K]`.
        normalizer_query: As there, like the other arguments.

    Returns:
        `[B, H, R, T]`.

    Raises:
        ValueError: As there.
    """
    length = query.shape[1] if isinstance(query, torch.Tensor) and query.dim() > 1 else 1
    # The causal normaliser writes out all weights within a block; one mixing weight serves any number of blocks.
    block_size = min(length, _CAUSAL_BLOCK_SIZE) if causal else length
    return mhla_matrix(
        query,
        key,
        torch.ones(1, 1, dtype=query.dtype, device=query.device),
        BlockLayout(grid=(length,), block_size=(block_size,)),
        normalizer_query=normalizer_query,
        normalizer_key=normalizer_key,
        # With one block, the queries of all blocks at a token's position are the token's own.
        normalizer="none" if normalizer == "none" else "query",
        causal=causal,
        eps=eps,
        rows=rows,
    )


def softmax_matrix(
    query: torch.Tensor,
    key: torch.Tensor,
    *,
    scale: float | None = None,
    causal: bool = False,
    seen: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    rows: torch.Tensor | None = None,
) -> torch.Tensor:
    """The matrix of softmax attention.

    Args:
        query: Queries `[B, T, H, K]`, normed and rotated as the model has them.
        key: Keys `[B, T, H_kv, K]`, likewise.
        scale: Scale of q·k; `None` for K^-1/2.
        causal: Token t sees j ≤ t only.
        seen: Mask of the tokens that each row sees, BoolTensor `[R, T]`; `None` for all.
        bias: Added to the logits, `[R, T]` or `[H, R, T]`; `None` for nothing.
        rows: Query tokens whose rows are wanted, LongTensor `[R]`; `None` for all T.

    Returns:
        `[B, H, R, T]` in the dtype of `query`.

    Raises:
        ValueError: If `rows` names a token that is not there.
    """
    rows = _checked_rows(rows, query)
    logits = _scores(query, key, rows) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if bias is not None:
        logits = logits + bias
    if causal:
        logits = logits.masked_fill(~_seen(rows, query.shape[1]), float("-inf"))
    if seen is not None:
        logits = logits.masked_fill(~seen, float("-inf"))
    return logits.softmax(dim=-1)


def window_mask(window: str, layout: BlockLayout, *, causal: bool = False, rows: torch.Tensor) -> torch.Tensor:
    """The tokens that a softmax window beside MHLA lets each token see.

    Args:
        window: `"block"`, `"adjacent"` or `"cross"`, see [`MHLAConfig`][mhla_hf.MHLAConfig].
        layout: Layout of the window's blocks. Tokens before its grid see, and are seen by, all others.
        causal: Token t sees j ≤ t only.
        rows: Query tokens, LongTensor `[R]`.

    Returns:
        BoolTensor `[R, T]`.
    """
    block = layout.block_of_token.to(rows.device) - layout.num_prefix_blocks
    places = torch.stack(torch.unravel_index(block.clamp(min=0), layout.blocks), dim=-1)
    apart = (places[rows][:, None] - places).abs()
    if window == "block":
        seen = (apart == 0).all(-1)
    elif window == "adjacent":
        seen = (apart <= 1).all(-1)
    else:
        seen = (apart[..., 1:] == 0).all(-1) | ((apart[..., 0] == 0) & (apart[..., 1:] <= 1).all(-1))
    seen = seen | (block < 0) | (block[rows] < 0)[:, None]
    # Looking back, blocks ahead are out of sight as well.
    return seen & _seen(rows, layout.num_tokens) if causal else seen


def _divisor(operands: Operands, mixing: torch.Tensor, layout: BlockLayout, causal: bool) -> torch.Tensor | None:
    entry = operands.entry
    plain_query, plain_key = (head_blocks(x, layout) for x in (operands.plain_query, operands.plain_key))
    if causal and entry.chunked is not None:
        product = entry.chunked(plain_query, plain_key, mixing)
    elif entry.block is not None:
        product = entry.block(plain_query, plain_key.sum(dim=-2), mixing)
    else:
        return None
    return entry.divisor(from_head_blocks(product, layout), operands.eps)


def _scores(query: torch.Tensor, key: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Products of some queries with all keys, `[B, H, R, T]`."""
    key = repeat_heads(key, query.shape[2], 2)
    return query[:, rows].transpose(1, 2) @ key.permute(0, 2, 3, 1)


def _seen(rows: torch.Tensor, length: int) -> torch.Tensor:
    return torch.arange(length, device=rows.device) <= rows[:, None]


def _checked_rows(rows: torch.Tensor | None, query: torch.Tensor) -> torch.Tensor:
    length = query.shape[1]
    if rows is None:
        return torch.arange(length, device=query.device)
    if not isinstance(rows, torch.Tensor) or rows.dim() != 1 or rows.dtype != torch.long or not len(rows):
        raise ValueError(f"rows must be a tensor of torch.int64 with one axis, got {shorten_value(rows)}.")
    if rows.min() < 0 or rows.max() >= length:
        raise ValueError(f"rows must be from 0 to {length - 1}, got {int(rows.min())} to {int(rows.max())}.")
    return rows.to(query.device)
