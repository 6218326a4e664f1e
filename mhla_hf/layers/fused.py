# SPDX-License-Identifier: Apache-2.0
"""When a layer can run in the fused kernels, and running it there: attention over a token grid.

Shape letters: B batch, T tokens, H heads, H_kv key/value heads, K query/key width, V value width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F

from ..config import MHLAConfig
from ..layouts.blocks import BlockLayout
from ..ops import FEATURE_MAPS, NORMALIZERS
from ..ops.kernel_check import kernels_pass


@dataclass(frozen=True)
class PairwiseRotary:
    """Rotates neighbouring pairs of channels.

    Attributes:
        cosine: `[1, T, 1, K / 2]`.
        sine: The same.
    """

    cosine: torch.Tensor
    sine: torch.Tensor

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        """Rotates `[B, T, H, K]` and keeps its dtype."""
        even, odd = tokens.unflatten(-1, (-1, 2)).unbind(-1)
        rotated = torch.stack((even * self.cosine - odd * self.sine, even * self.sine + odd * self.cosine), dim=-1)
        return rotated.flatten(-2).type_as(tokens)


@dataclass(frozen=True)
class HeadNorms:
    """Norms of queries and keys over all heads of a token together, as the host model has them.

    Not a tuple: offloading hooks move the modules in the arguments of a layer, and these may have hooks of their own.

    Attributes:
        query: Norm of `[B, T, H · K]`.
        key: Norm of `[B, T, H_kv · K]`.
    """

    query: nn.Module
    key: nn.Module

    def apply(self, query: torch.Tensor, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries `[B, T, H, K]` and keys `[B, T, H_kv, K]` after their norms."""
        return _normed(query, self.query), _normed(key, self.key)

    def are_plain(self, device: torch.device) -> bool:
        """Returns whether the kernels can compute both, see [`is_plain_norm`]."""
        return is_plain_norm(self.query, device) and is_plain_norm(self.key, device)


def _normed(tokens: torch.Tensor, norm: nn.Module) -> torch.Tensor:
    return norm(tokens.flatten(2)).unflatten(2, tokens.shape[2:])


def can_fuse(
    config: MHLAConfig,
    backend: str,
    query: torch.Tensor,
    value: torch.Tensor,
    rotary: Callable[[torch.Tensor], torch.Tensor] | None,
    output_norm: nn.Module | None,
) -> bool:
    """Returns whether the fused kernels can compute a layer: no sequence, and no option that they do not know."""
    if backend != "triton" or config.is_sequence:
        return False
    from ..ops.triton import fits_fused_kernels

    return (
        FEATURE_MAPS[config.feature_map].kernel is not None
        and NORMALIZERS[config.normalizer].kernel is not None
        and (rotary is None or (config.rope == "after_feature_map" and is_plain_rotary(rotary, query)))
        and (output_norm is None or is_plain_norm(output_norm, query.device))
        and fits_fused_kernels(query.shape[-1], value.shape[-1], rotary is not None, value.dtype)
        and kernels_pass("fused", query, value)
    )


def is_plain_rotary(rotary: Callable[[torch.Tensor], torch.Tensor], query: torch.Tensor) -> bool:
    """Returns whether the kernels can rotate like this, with one row of the tables a token and no gradients."""
    # Whether gradients are being recorded makes no difference: checkpointing computes the output with and without.
    if not isinstance(rotary, PairwiseRotary) or rotary.cosine.requires_grad or rotary.sine.requires_grad:
        return False
    return rotary.cosine.shape == rotary.sine.shape == (1, query.shape[1], 1, query.shape[3] // 2)


class OutputNorm(nn.RMSNorm):
    """RMSNorm over a head's output in the dtype of the input, whatever the dtype of the weight.

    Called like any module: offloading hooks bring the weight in only then.
    """

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(tokens, self.normalized_shape, self.weight.to(tokens.dtype), self.eps)


def is_plain_norm(norm: nn.Module, device: torch.device) -> bool:
    """Returns whether a norm is an RMSNorm whose weight may be read past the module, as no hook depends on it."""
    # Classes made from RMSNorm may compute something else. So do releases of torch where there is no eps.
    known = type(norm).forward in (nn.RMSNorm.forward, OutputNorm.forward)
    if not isinstance(norm, nn.RMSNorm) or not known or norm.weight is None or norm.eps is None:
        return False
    return not has_hooks(norm) and norm.weight.device == device and norm.weight.is_contiguous()


def has_hooks(module: nn.Module) -> bool:
    """Returns whether something depends on the module being called: hooks, or another `forward` of its own."""
    hooks = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
    return any(hooks) or "forward" in vars(module)


def rotary_tables(rotary: PairwiseRotary | None) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Tables of cosines and sines; `None` without rotary embeddings."""
    # The tensors themselves: the kernels remember what they make of them.
    return None if rotary is None else (rotary.cosine, rotary.sine)


def rotated_in_kernel(
    query: torch.Tensor,
    key: torch.Tensor,
    rotary: Callable[[torch.Tensor], torch.Tensor] | None,
    norms: HeadNorms | None,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Queries and keys after their norms and rotary embedding, each by one kernel; `None` where it cannot.

    Args:
        query: `[B, T, H, K]`, before norms.
        key: `[B, T, H_kv, K]`.
        rotary: Rotates `[B, T, H, K]`.
        norms: Norms across heads; `None` where there are none.
        dtype: Of the result.
    """
    plain = rotary is not None and is_plain_rotary(rotary, query) and query.shape[3] % 2 == 0
    if not plain or not (norms is None or norms.are_plain(query.device)) or not kernels_pass("rotary", query, key):
        return None
    from ..ops.triton import rotated_tokens

    tables = rotary_tables(rotary)  # type: ignore[arg-type]
    assert tables is not None
    pair = (None, None) if norms is None else (norms.query, norms.key)
    return (
        rotated_tokens(query, tables, weight_and_eps(pair[0]), dtype),
        rotated_tokens(key, tables, weight_and_eps(pair[1]), dtype),
    )


def fused_attention(
    config: MHLAConfig,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mixing: torch.Tensor,
    layout: BlockLayout,
    *,
    rotary: PairwiseRotary | None,
    norms: HeadNorms | None,
    scaling: float | None,
    gate: torch.Tensor | None,
    output_norm: nn.RMSNorm | None,
) -> torch.Tensor:
    """A layer by the fused kernels, where [`can_fuse`] says so.

    Summaries are float32, but bfloat16 for bfloat16 tokens; sums always run in float32.
    Arguments that are not listed are those of [`MHLA.attention_parts`].

    Args:
        config: The layer's options.
        mixing: `[M, M]` or `[H, M, M]`.
        layout: The blocks.
        gate: Output of the gate's projection, `[B, T, H, V]`.
        output_norm: RMSNorm of each head's output.

    Returns:
        `[B, T, H, V]` in the dtype of `value`, normed and gated.
    """
    from ..ops.triton import fused_mhla_attention

    query_norm, key_norm = (None, None) if norms is None else (norms.query, norms.key)
    return fused_mhla_attention(
        query,
        key,
        value,
        mixing,
        layout,
        feature_map=config.feature_map,
        feature_map_eps=config.feature_map_eps,
        normalizer=config.normalizer,
        eps=config.eps,
        scaling=1.0 if scaling is None else scaling**0.5,
        rotary=rotary_tables(rotary),
        query_norm=weight_and_eps(query_norm),
        key_norm=weight_and_eps(key_norm),
        output_norm=weight_and_eps(output_norm),
        gate=gate,
    )


def weight_and_eps(norm: nn.Module | None) -> tuple[torch.Tensor, float] | None:
    return None if norm is None else (norm.weight, float(norm.eps))  # type: ignore[return-value, arg-type]
