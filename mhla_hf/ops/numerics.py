# SPDX-License-Identifier: Apache-2.0
"""Shared by the forms of the operator: operands, accumulation dtype, and tokens in blocks by head."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..layouts.blocks import BlockLayout
from ..layouts.sequences import SequenceLayout
from .normalizers import NORMALIZERS, Normalizer


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype that summaries and normalisers are accumulated in: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def autocast_type(device: torch.device) -> str:
    """Returns the type of device to turn autocast off for; the meta device, which has no autocast, counts as a CPU."""
    return "cpu" if device.type == "meta" else device.type


def records_gradients(*tensors: torch.Tensor | None) -> bool:
    """Returns whether autograd records results of any of these tensors."""
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)


@dataclass(frozen=True)
class Operands:
    """The tokens and the normaliser that every form of the operator takes; see [`mhla_hf.ops.mhla_attention`].

    Attributes:
        query: Feature-mapped queries `[B, T, H, K]`.
        key: Feature-mapped keys `[B, T, H_kv, K]`.
        value: Values `[B, T, H_kv, V]`.
        normalizer_query: Queries for the denominator, where they differ.
        normalizer_key: Keys for the denominator, likewise.
        normalizer: Name of the normaliser.
        eps: Added to the denominator.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    normalizer_query: torch.Tensor | None = None
    normalizer_key: torch.Tensor | None = None
    normalizer: str = "query"
    eps: float = 1e-6

    @property
    def tokens(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Query, key and value."""
        return self.query, self.key, self.value

    @property
    def plain_query(self) -> torch.Tensor:
        """Queries for the denominator."""
        return self.query if self.normalizer_query is None else self.normalizer_query

    @property
    def plain_key(self) -> torch.Tensor:
        """Keys for the denominator."""
        return self.key if self.normalizer_key is None else self.normalizer_key

    @property
    def pair(self) -> tuple[torch.Tensor, torch.Tensor] | tuple[None, None]:
        """Query and key for the denominator; `None` for both where they are query and key themselves."""
        pair = self.plain_query, self.plain_key
        return (None, None) if pair[0] is self.query and pair[1] is self.key else pair

    @property
    def entry(self) -> Normalizer:
        """The normaliser."""
        return NORMALIZERS[self.normalizer]

    @property
    def dtype(self) -> torch.dtype:
        """Dtype that sums are accumulated in."""
        return accumulation_dtype(self.value.dtype)


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
