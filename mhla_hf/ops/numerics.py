# SPDX-License-Identifier: Apache-2.0
"""Shared by the forms: accumulation dtype, the normaliser's pair, and tokens in blocks by head."""

from __future__ import annotations

import torch

from ..layouts.blocks import BlockLayout
from ..layouts.sequences import SequenceLayout


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype that summaries and normalisers are accumulated in: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


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
