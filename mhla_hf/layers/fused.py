# SPDX-License-Identifier: Apache-2.0
"""One call of a layer, when kernels can compute it, and running it there: whole, or the features alone.

Shape letters: B batch, T tokens, H heads, H_kv key/value heads, K query/key width, V value width.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F

from ..config import MHLAConfig
from ..layouts.blocks import BlockLayout
from ..layouts.sequences import SequenceLayout
from ..ops.backends import kernels_pass
from ..ops.definitions import FEATURE_MAPS, NORMALIZERS
from ..ops.sharded import TokenShard
from .mixing import LearnedFeatureMap
from .state import DecodingState, TokenSequence


# Compared by identity: dynamo of torch 2.11 hashes objects that are called before they have their tensors.
@dataclass(frozen=True, eq=False)
class PairwiseRotary:
    """Rotates neighbouring pairs of channels.

    Attributes:
        cosine: `[1, T, 1, K / 2]`, which kernels take, or `[B, T, H, K / 2]`.
        sine: The same.
    """

    cosine: torch.Tensor
    sine: torch.Tensor

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        """Rotates `[B, T, H, K]` and keeps its dtype."""
        even, odd = tokens.unflatten(-1, (-1, 2)).unbind(-1)
        rotated = torch.stack((even * self.cosine - odd * self.sine, even * self.sine + odd * self.cosine), dim=-1)
        return rotated.flatten(-2).type_as(tokens)


@dataclass(frozen=True, eq=False)
class HalfRotary(PairwiseRotary):
    """Rotates the channels of the first half of a head with those of the second. Kernels do not compute it."""

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        """Rotates `[B, T, H, K]` and keeps its dtype."""
        first, second = tokens.chunk(2, dim=-1)
        rotated = (first * self.cosine - second * self.sine, first * self.sine + second * self.cosine)
        return torch.cat(rotated, dim=-1).type_as(tokens)


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
        """Return whether the kernels can compute both, see [`is_plain_norm`]."""
        return is_plain_norm(self.query, device) and is_plain_norm(self.key, device)


def _normed(tokens: torch.Tensor, norm: nn.Module) -> torch.Tensor:
    return norm(tokens.flatten(2)).unflatten(2, tokens.shape[2:])


@dataclass(frozen=True)
class Call:
    """The checked arguments of one call, see [`MHLA.attention_parts`].

    Attributes:
        query: `[B, T, H, K]`.
        key: `[B, T, H_kv, K]`.
        value: `[B, T, H_kv, V]`.
        layout: Blocks of the tokens, of all processes where there is a shard; `None` where they go on from a state.
        sequence: The sequence, where the tokens are none of a grid.
        gate: Output of the gate's projection, `[B, T, H, V]`.
        rotary: Rotates `[B, T, H, K]`.
        norms: Norms of queries and keys.
        scaling: Scale of q·k.
        shard: The tokens of this process.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    layout: BlockLayout | SequenceLayout | None
    sequence: TokenSequence | None = None
    gate: torch.Tensor | None = None
    rotary: Callable[[torch.Tensor], torch.Tensor] | None = None
    norms: HeadNorms | None = None
    scaling: float | None = None
    shard: TokenShard | None = None

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Query, key and value."""
        return self.query, self.key, self.value

    def normed(self) -> Call:
        """Return the call with its norms applied."""
        assert self.norms is not None
        query, key = self.norms.apply(self.query, self.key)
        return dataclasses.replace(self, query=query, key=key, norms=None)


@dataclass(frozen=True)
class AttentionParts:
    """The parts of a layer's output.

    Attributes:
        attended: MHLA after output norm and gate, `[B, T, H, V]`.
        window: The softmax window and the weights that tell its share, `[B, T, H, W]`; `None` without one. See
            `mhla_hf.layers.window.grid_window_attention`.
        positional: The convolution of the values, `[B, T, H, V]`; `None` without one.
        state: State after these tokens, where the sequence had one to decode from.
        text: Softmax attention to the text of joint attention and the weights that tell its share, `[B, T, H, W]`;
            `None` without text.
        query: Queries before their rotation, `[B, T, H, K]`, on which the share of a window depends; `None` without.
    """

    attended: torch.Tensor
    window: torch.Tensor | None
    positional: torch.Tensor | None
    state: DecodingState | None = None
    text: torch.Tensor | None = None
    query: torch.Tensor | None = None


def can_fuse(config: MHLAConfig, call: Call, output_norm: nn.Module | None) -> bool:
    """Return whether the fused kernels can compute a layer: no sequence, and no option that they do not know."""
    if config.is_sequence or config.sink_tokens:
        return False
    from ..ops.triton import fits_fused_kernels

    rotary, value = call.rotary, call.value
    return (
        FEATURE_MAPS[config.feature_map].kernel is not None
        and NORMALIZERS[config.normalizer].kernel is not None
        and (rotary is None or can_rotate(config, call))
        and (output_norm is None or is_plain_norm(output_norm, value.device))
        and fits_fused_kernels(call.query.shape[-1], value.shape[-1], rotary is not None, value.dtype)
        and kernels_pass("fused", call.query, value, normalizer=config.normalizer)
    )


def can_rotate(config: MHLAConfig, call: Call) -> bool:
    """Return whether the fused kernels can compute the rotation of a layer."""
    rotary = call.rotary
    return rotary is not None and config.rope == "after_feature_map" and is_plain_rotary(rotary, call.query)


def fused_attention(
    config: MHLAConfig, call: Call, mixing: torch.Tensor, output_norm: nn.RMSNorm | None
) -> torch.Tensor:
    """Compute a layer by the fused kernels, where [`can_fuse`] says so.

    Summaries are float32, but bfloat16 for bfloat16 tokens; sums always run in float32.

    Args:
        config: The layer's options.
        call: Tokens over a grid.
        mixing: `[M, M]` or `[H, M, M]`.
        output_norm: RMSNorm of each head's output.

    Returns:
        `[B, T, H, V]` in the dtype of the values, normed and gated.
    """
    from ..ops.triton import fused_mhla_attention

    if call.norms is not None and not call.norms.are_plain(call.query.device):
        call = call.normed()
    layout: Any = call.layout
    query_norm, key_norm = (None, None) if call.norms is None else (call.norms.query, call.norms.key)
    return fused_mhla_attention(
        call.query, call.key, call.value, mixing, layout, feature_map=config.feature_map,
        feature_map_eps=config.feature_map_eps, normalizer=config.normalizer, eps=config.eps,
        scaling=_root(call.scaling), rotary=rotary_tables(call.rotary), query_norm=weight_and_eps(query_norm),
        key_norm=weight_and_eps(key_norm), output_norm=weight_and_eps(output_norm), gate=call.gate,
    )  # fmt: skip


def has_features_kernel(
    config: MHLAConfig, call: Call, feature_maps: tuple[LearnedFeatureMap | None, LearnedFeatureMap | None]
) -> bool:
    """Return whether a kernel can compute the features of queries and keys of a layer: hedgehog, after any rotation.

    Args:
        config: The layer's options.
        call: The call.
        feature_maps: Feature maps of queries and keys.
    """
    query, value = call.query, call.value
    if config.feature_map != "hedgehog" or (call.rotary is not None and config.rope != "before_feature_map"):
        return False
    from ..ops.triton import fits_hedgehog_kernels

    return (
        # Sums can leave the range of float16: the operator gets float32.
        (NORMALIZERS[config.normalizer].divides or value.dtype != torch.float16)
        and all(entry is not None and not has_hooks(entry) and entry.weight.device == query.device
                for entry in feature_maps)
        and fits_hedgehog_kernels(query.shape[-1], call.rotary is not None, value.dtype)
        and kernels_pass("hedgehog", query, value)
    )  # fmt: skip


def features_by_kernel(
    config: MHLAConfig, call: Call, feature_maps: tuple[LearnedFeatureMap | None, LearnedFeatureMap | None]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the features of queries and keys where [`has_features_kernel`] says so.

    Norms and rotary embeddings that the kernel does not know come before it.

    Args:
        config: The layer's options.
        call: The call.
        feature_maps: Feature maps of queries and keys.

    Returns:
        `[B, T, H, 2K]` and `[B, T, H_kv, 2K]` in the dtype of the values.
    """
    from ..ops.triton import hedgehog_features

    is_plain = call.rotary is None or is_plain_rotary(call.rotary, call.query)
    if call.norms is not None and not (is_plain and call.norms.are_plain(call.query.device)):
        call = call.normed()
    if call.rotary is not None and not is_plain:
        call = dataclasses.replace(call, query=call.rotary(call.query), key=call.rotary(call.key), rotary=None)
    norms = (None, None) if call.norms is None else (call.norms.query, call.norms.key)
    query, key = (
        hedgehog_features(
            tokens.to(call.value.dtype), learned.weight, scaling=_root(call.scaling),
            feature_eps=config.feature_map_eps, rotary=rotary_tables(call.rotary), norm=weight_and_eps(norm),
        )
        for tokens, learned, norm in zip((call.query, call.key), feature_maps, norms)
        if learned is not None
    )  # fmt: skip
    return query, key


def is_plain_rotary(rotary: Callable[[torch.Tensor], torch.Tensor], query: torch.Tensor) -> bool:
    """Return whether the kernels can rotate like this, with one row of the tables a token and no gradients."""
    # Whether gradients are being recorded makes no difference: checkpointing computes the output with and without.
    if type(rotary) is not PairwiseRotary or rotary.cosine.requires_grad or rotary.sine.requires_grad:
        return False
    return rotary.cosine.shape == rotary.sine.shape == (1, query.shape[1], 1, query.shape[3] // 2)


class OutputNorm(nn.RMSNorm):
    """RMSNorm over a head's output in the dtype of the input, not of the weight.

    Called like any module: offloading hooks bring the weight in only then.
    """

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(tokens, self.normalized_shape, self.weight.to(tokens.dtype), self.eps)


def is_plain_norm(norm: nn.Module, device: torch.device) -> bool:
    """Return whether a norm is an RMSNorm whose weight may be read past the module, as no hook depends on it."""
    # Classes made from RMSNorm may compute something else. So do releases of torch where there is no eps.
    known = type(norm).forward in (nn.RMSNorm.forward, OutputNorm.forward)
    if not isinstance(norm, nn.RMSNorm) or not known or norm.weight is None or norm.eps is None:
        return False
    return not has_hooks(norm) and norm.weight.device == device and norm.weight.is_contiguous()


def has_hooks(module: nn.Module) -> bool:
    """Return whether something depends on the module being called: hooks, or another `forward` of its own."""
    hooks = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
    return any(hooks) or has_own_forward(module)


def has_own_forward(module: nn.Module) -> bool:
    """Return whether `forward` was replaced by anything but the method of the module's class, which hooks leave."""
    forward = vars(module).get("forward")
    return forward is not None and getattr(forward, "__func__", None) is not type(module).forward


def rotary_tables(rotary: Callable[[torch.Tensor], torch.Tensor] | None) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return the tables of cosines and sines of a [`PairwiseRotary`]; `None` without rotary embeddings."""
    # The tensors themselves: the kernels remember what they make of them.
    return (rotary.cosine, rotary.sine) if isinstance(rotary, PairwiseRotary) else None


def weight_and_eps(norm: nn.Module | None) -> tuple[torch.Tensor, float] | None:
    """Return what the kernels take of an RMSNorm; `None` without one."""
    return None if norm is None else (norm.weight, float(norm.eps))  # type: ignore[return-value, arg-type]


def _root(scaling: float | None) -> float:
    return 1.0 if scaling is None else scaling**0.5
