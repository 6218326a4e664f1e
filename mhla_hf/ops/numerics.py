# SPDX-License-Identifier: Apache-2.0
"""What the forms share: accumulation dtype, blocks of heads, grouped heads, and the check of the normaliser's name."""

from __future__ import annotations

import torch

from ..config import NORMALIZERS
from ..layouts.blocks import BlockLayout
from ..layouts.sequences import SequenceLayout
from ..utils.messages import shorten_value


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype that summaries and normalisers are accumulated in: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def check_normalizer(normalizer: str, allowed: tuple[str, ...] = NORMALIZERS, why: str = "") -> None:
    """Raises `ValueError` unless `normalizer` is one of `allowed`; `why` says what the others lack."""
    if not isinstance(normalizer, str) or normalizer not in allowed:
        raise ValueError(f"normalizer={shorten_value(normalizer)} is not one of {', '.join(map(repr, allowed))}{why}.")


def records_gradients(*tensors: torch.Tensor | None) -> bool:
    """Whether autograd records what is computed from any of these tensors."""
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)


def normalizer_pair(
    query: torch.Tensor,
    key: torch.Tensor,
    normalizer_query: torch.Tensor | None,
    normalizer_key: torch.Tensor | None,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Query and key of the normaliser; `None` for both where they are query and key themselves."""
    same_query = normalizer_query is None or normalizer_query is query
    same_key = normalizer_key is None or normalizer_key is key
    if same_query and same_key:
        return None, None
    return query if same_query else normalizer_query, key if same_key else normalizer_key


def head_blocks(
    tokens: torch.Tensor, layout: BlockLayout | SequenceLayout, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """`[B, T, H, D]` to `[B, H, M, N, D]` in another type, zeros in empty slots."""
    if isinstance(layout, BlockLayout):
        return layout.to_head_blocks(tokens, dtype)
    return layout.to_blocks(tokens if dtype is None else tokens.to(dtype)).permute(0, 3, 1, 2, 4)


def from_head_blocks(blocks: torch.Tensor, layout: BlockLayout | SequenceLayout) -> torch.Tensor:
    """Undoes [`head_blocks`]: `[B, T, H, D]`."""
    return layout.from_blocks(blocks.permute(0, 2, 3, 1, 4))


def repeat_heads(tensor: torch.Tensor, num_heads: int, dim: int) -> torch.Tensor:
    """Gives each query head its key/value head (grouped-query attention).

    Args:
        tensor: Has H_kv heads on axis `dim`.
        num_heads: H, a multiple of H_kv.
        dim: The axis of heads.

    Returns:
        The tensor with H heads on that axis, each of its heads H / H_kv times in a row; itself when H = H_kv.
    """
    repeats = num_heads // tensor.shape[dim]
    return tensor if repeats == 1 else tensor.repeat_interleave(repeats, dim=dim)


def mix_summaries(mixing: torch.Tensor, summary: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Σ_b m_ib S_b for every row i of `mixing` and every query head.

    Args:
        mixing: `[..., I, M]`; the axes before the last two are none, `[H]`, `[B, 1]` or `[B, H]`.
        summary: `[B, H_kv, M, K, V]`.
        num_heads: H.

    Returns:
        `[B, H, I, K, V]`. A mixing matrix that all heads share is applied before the heads are repeated.
    """
    per_head = mixing.dim() > 2 and mixing.shape[-3] != 1
    if per_head:
        summary = repeat_heads(summary, num_heads, 1)
    mixed = (mixing @ summary.flatten(-2)).unflatten(-1, summary.shape[-2:])
    return repeat_heads(mixed, num_heads, 1)
