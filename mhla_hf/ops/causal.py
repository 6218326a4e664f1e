# SPDX-License-Identifier: Apache-2.0
"""The chunked form of causal MHLA: finished chunks contribute whole, a token's own chunk up to the token itself.

Shape letters: B batch, T tokens, H feature heads, K query/key width, V value width, M chunks, C tokens of a chunk.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..config import NORMALIZERS
from .block import accumulation_dtype


def extend_causal_mixing(mixing: torch.Tensor, num_blocks: int) -> torch.Tensor:
    """Lower-triangular mixing weights for any number of chunks.

    With at most M chunks the leading rows and columns are used. A row past the end takes the last row's weights
    aligned by distance from the diagonal: m_ij = m_{M-1, M-1-(i-j)}. Chunks farther back than the last row reaches
    take the weight of the farthest one that it has, m_{M-1, 0}.

    Args:
        mixing: `[M, M]` or `[H, M, M]`; entries above the diagonal are ignored.
        num_blocks: Number of chunks wanted.

    Returns:
        `[num_blocks, num_blocks]` or `[H, num_blocks, num_blocks]`, zero above the diagonal.
    """
    known = mixing.shape[-1]
    if num_blocks <= known:
        return mixing[..., :num_blocks, :num_blocks].tril()
    rows = torch.arange(num_blocks, device=mixing.device)
    distance = rows[:, None] - rows[None, :]
    inside = rows[:, None] < known
    row = torch.where(inside, rows[:, None], known - 1).expand(num_blocks, num_blocks)
    column = torch.where(inside, rows[None, :].clamp(max=known - 1), (known - 1 - distance).clamp(0, known - 1))
    return mixing[..., row, column].tril()


def causal_mixing_row(mixing: torch.Tensor, index: int) -> torch.Tensor:
    """Row `index` of [`extend_causal_mixing`] up to its diagonal, `[index + 1]` or `[H, index + 1]`, alone."""
    known = mixing.shape[-1]
    if index < known:
        return mixing[..., index, : index + 1]
    distance = index - torch.arange(index + 1, device=mixing.device)
    return mixing[..., known - 1, (known - 1 - distance).clamp(min=0)]


def causal_mhla_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mixing: torch.Tensor,
    block_size: int,
    *,
    normalizer_query: torch.Tensor | None = None,
    normalizer_key: torch.Tensor | None = None,
    normalizer: str = "query",
    eps: float = 1e-6,
) -> torch.Tensor:
    """Causal MHLA in chunks of `block_size` tokens; other arguments as in [`mhla_hf.ops.mhla_attention`].

    o_t = φ(q_t)ᵀ (Σ_{b<i} m_ib S_b + m_ii Σ_{j≤t, j in i} φ(k_j) v_jᵀ), divided by the same expression with z.
    T need not be a multiple of `block_size`. A NaN or Inf in a key or value makes the outputs of its head NaN from
    that token on, and leaves the tokens before it alone.

    Returns:
        `[B, T, H, V]` in the dtype of `value`.

    Raises:
        ValueError: If `normalizer` is unknown.
    """
    if normalizer not in NORMALIZERS:
        raise ValueError(f"normalizer={normalizer!r} is not one of {', '.join(map(repr, NORMALIZERS))}.")
    length, dtype = query.shape[1], accumulation_dtype(value.dtype)
    num_blocks = -(-length // block_size)
    mixing = extend_causal_mixing(mixing.to(dtype), num_blocks)
    plain_query = query if normalizer_query is None else normalizer_query
    plain_key = key if normalizer_key is None else normalizer_key

    with torch.autocast(query.device.type, enabled=False):
        # The products below multiply what a token must not see by zero, which does not stop a NaN.
        bad = ~(key.isfinite().all(-1) & plain_key.isfinite().all(-1) & value.isfinite().all(-1))
        key, plain_key, clean_value = (x.masked_fill(bad.unsqueeze(-1), 0) for x in (key, plain_key, value))
        query, key, clean_value = (_chunks(x.to(dtype), num_blocks, block_size) for x in (query, key, clean_value))
        output = _prefix_and_own(query, key, clean_value, mixing)
        if normalizer != "none":
            plain_query = _chunks(plain_query.to(dtype), num_blocks, block_size)
            plain_key = _chunks(plain_key.to(dtype), num_blocks, block_size)
            if normalizer == "query":
                ones = plain_key.new_ones(*plain_key.shape[:-1], 1)
                denominator = _prefix_and_own(plain_query, plain_key, ones, mixing)
            else:
                denominator = _block_query_denominator(plain_query, plain_key, mixing)
            # Without the padding after the last token, whose denominator may be zero.
            output = _tokens(output, length) / (_tokens(denominator, length) + eps)
        else:
            output = _tokens(output, length)
        output = output.masked_fill(bad.cumsum(dim=1).unsqueeze(-1) > 0, float("nan"))
    return output.to(value.dtype)


def _chunks(tokens: torch.Tensor, num_blocks: int, block_size: int) -> torch.Tensor:
    """`[B, T, H, D]` to `[B, H, M, C, D]`, zeros after the last token."""
    missing = num_blocks * block_size - tokens.shape[1]
    return F.pad(tokens, (0, 0, 0, 0, 0, missing)).unflatten(1, (num_blocks, block_size)).permute(0, 3, 1, 2, 4)


def _tokens(chunks: torch.Tensor, length: int) -> torch.Tensor:
    """Undoes `_chunks`: `[B, T, H, D]`."""
    return chunks.permute(0, 2, 3, 1, 4).flatten(1, 2)[:, :length]


def _diagonal(mixing: torch.Tensor) -> torch.Tensor:
    """m_ii shaped to broadcast over `[B, H, M, C, D]`."""
    return mixing.diagonal(dim1=-2, dim2=-1)[..., None, None]


def _prefix_and_own(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mixing: torch.Tensor) -> torch.Tensor:
    """φ(q)ᵀ applied to the mixed earlier chunks plus the causal part of the own chunk: `[B, H, M, C, V]`."""
    summary = key.transpose(-1, -2) @ value
    prefix = (mixing.tril(-1) @ summary.flatten(-2)).unflatten(-1, summary.shape[-2:])
    own = (query @ key.transpose(-1, -2)).tril() @ value
    return query @ prefix + _diagonal(mixing) * own


def _block_query_denominator(query: torch.Tensor, key: torch.Tensor, mixing: torch.Tensor) -> torch.Tensor:
    """Σ_{b<i} m_ib φ(q_bw)·z_b + m_ii φ(q_iw)·Σ_{j≤t, j in i} φ(k_j): `[B, H, M, C, 1]`."""
    whole = (query @ key.sum(dim=-2, keepdim=True).transpose(-1, -2)).squeeze(-1)
    running = (query * key.cumsum(dim=-2)).sum(dim=-1, keepdim=True)
    return (mixing.tril(-1) @ whole).unsqueeze(-1) + _diagonal(mixing) * running
