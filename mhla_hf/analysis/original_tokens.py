# SPDX-License-Identifier: Apache-2.0
"""From calls of the softmax and plain linear layers of other models to the attention matrices of their samples.

Shape letters: B batch, T tokens, R query tokens, H heads, H_kv key/value heads, K query/key width, V value width.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ..ops.mixing import repeat_heads
from .matrices import linear_matrix, softmax_matrix
from .tokens import LINEAR_EPS, check_tokens, count_seen, of_heads


@dataclass(frozen=True)
class _Tokens:
    """Queries and keys of one sample, `[1, T, H, K]`."""

    query: torch.Tensor
    key: torch.Tensor

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.query.shape[1]

    @property
    def num_heads(self) -> int:
        """H."""
        return self.query.shape[2]


@dataclass(frozen=True)
class SoftmaxTokens(_Tokens):
    """One sample of a softmax layer's call, without padding, in float64; makes its attention matrix.

    Attributes:
        query: `[1, T, H, K]`, as the model hands them to softmax.
        key: `[1, T, H, K]`, likewise.
        scaling: Scale of q·k; `None` for K^-1/2.
        causal: Whether token t sees j ≤ t only, where no `bias` says what it sees.
        bias: Added to the logits, -infinity for tokens out of sight, `[1 or H, T, T]`; `None` for nothing.
    """

    scaling: float | None = None
    causal: bool = False
    bias: torch.Tensor | None = None

    kind = "softmax"

    def attention_matrix(self, *, head: int | None = None, rows: torch.Tensor | None = None) -> torch.Tensor:
        """The attention matrix, see [`LayerTokens.matrix`][mhla_hf.analysis.LayerTokens]."""
        heads = slice(None) if head is None else slice(head, head + 1)
        rows = None if rows is None else rows.to(self.query.device)
        bias = self.bias
        if bias is not None:
            bias = bias[heads] if bias.shape[0] > 1 else bias
            bias = bias if rows is None else bias[:, rows]
        matrix = softmax_matrix(
            self.query[:, :, heads],
            self.key[:, :, heads],
            scale=self.scaling,
            causal=self.causal,
            bias=bias,
            rows=rows,
        )[0]
        return matrix if head is None else matrix[0]

    def visible(self, rows: torch.Tensor | None = None) -> torch.Tensor | None:
        """Number of tokens that each row sees, `[R]`; `None` for all T."""
        if self.bias is not None:
            seen = (self.bias[0] > float("-inf")).sum(-1)
            return seen if rows is None else seen[rows.to(seen.device)]
        return count_seen(self.num_tokens, rows) if self.causal else None


@dataclass(frozen=True)
class LinearTokens(_Tokens):
    """One sample of a layer of diffusers that computes plain linear attention, as SANA's, in float64.

    Attributes:
        query: Feature-mapped queries `[1, T, H, K]`.
        key: Feature-mapped keys `[1, T, H, K]`.
        normalizer_query: Queries of the normaliser, where they differ (without rotary embedding).
        normalizer_key: Keys of the normaliser, likewise.
    """

    normalizer_query: torch.Tensor | None = None
    normalizer_key: torch.Tensor | None = None

    kind = "linear"
    causal = False

    def attention_matrix(self, *, head: int | None = None, rows: torch.Tensor | None = None) -> torch.Tensor:
        """The attention matrix, see [`LayerTokens.matrix`][mhla_hf.analysis.LayerTokens]."""
        heads = slice(None) if head is None else slice(head, head + 1)
        rows = None if rows is None else rows.to(self.query.device)
        matrix = linear_matrix(**of_heads(vars(self), heads), eps=LINEAR_EPS, rows=rows)[0]
        return matrix if head is None else matrix[0]

    def visible(self, rows: torch.Tensor | None = None) -> torch.Tensor | None:
        """`None`: every row sees all T tokens."""
        return None


@torch.no_grad()
def softmax_tokens(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    **unused: Any,
) -> Iterator[SoftmaxTokens]:
    """The samples of one call of `torch.nn.functional.scaled_dot_product_attention`, whose arguments these are.

    They come one by one, since masks of long inputs in float64 are large.

    Args:
        query: `[B, H, T, K]`.
        key: `[B, H_kv, T, K]`.
        value: `[B, H_kv, T, V]`.
        attn_mask: What each token sees, or what is added to the logits, broadcast to `[B, H, T, T]`.
        dropout_p: Ignored, like all that follow but `is_causal` and `scale`.

    Yields:
        Each sample; tokens that do not see themselves are padding, and left out. None at all for attention to other
        tokens.

    Raises:
        ValueError: If a sample is padding alone.
    """
    count, length = query.shape[0], query.shape[2]
    if key.shape[2] != length:
        return
    query, key = query.transpose(1, 2), key.transpose(1, 2)
    for index in range(count):
        keep: slice | torch.Tensor = slice(None)
        bias = None
        if attn_mask is not None:
            mask = attn_mask.reshape((1,) * (4 - attn_mask.dim()) + attn_mask.shape)
            mask = mask[index if mask.shape[0] > 1 else 0].expand(-1, length, length)
            bias = _as_bias(mask)
            valid = (bias.diagonal(dim1=-2, dim2=-1) > float("-inf")).any(0)
            check_tokens(valid, index)
            if not valid.all():
                keep = valid
                bias = bias[:, valid][:, :, valid]
            if not bias.any():
                bias = None
        own = slice(index, index + 1)
        queries, keys = query[own, keep].double(), repeat_heads(key[own, keep].double(), query.shape[2], 2)
        yield SoftmaxTokens(queries, keys, scale, is_causal, bias)


def _as_bias(mask: torch.Tensor) -> torch.Tensor:
    if mask.dtype == torch.bool:
        return torch.zeros(mask.shape, dtype=torch.double, device=mask.device).masked_fill(~mask, float("-inf"))
    # Masks hold the least number of their type, or half of it, in place of infinity.
    return mask.double().masked_fill(mask <= torch.finfo(mask.dtype).min / 4, float("-inf"))
