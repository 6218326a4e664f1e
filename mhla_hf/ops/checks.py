# SPDX-License-Identifier: Apache-2.0
"""Checks of the operator's arguments: types, shapes and devices alone, so that none waits for a device.

Every error is a `ValueError` that names the argument. torch.compile traces through all of this and leaves nothing.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from ..layouts.blocks import BlockLayout, check_flag
from ..layouts.sequences import SequenceLayout, check_mixing_shape
from ..utils.messages import check_choice, shorten_value
from .normalizers import NORMALIZERS, SEQUENCE_NORMALIZERS
from .numerics import Operands


def check_operands(operands: Operands) -> None:
    """Checks the tokens against each other, the normaliser's name and eps."""
    check_normalizer(operands.normalizer)
    check_eps(operands.eps)
    check_tokens(*operands.tokens, operands.normalizer_query, operands.normalizer_key)


def check_form(operands: Operands, mixing: Any, layout: Any) -> None:
    """Checks the arguments of one form of the operator, whose mixing weights are those of the layout's own blocks."""
    if not isinstance(layout, (BlockLayout, SequenceLayout)):
        raise ValueError(f"layout must be a BlockLayout or a SequenceLayout, got {type(layout).__name__}.")
    check_operands(operands)
    layout.check_length(operands.query.shape[1], "query")
    check_floats("mixing", mixing, operands.query.device)
    if mixing.dim() < 2 or mixing.shape[-2:] != (layout.num_blocks, layout.num_blocks):
        raise ValueError(
            f"mixing has shape {tuple(mixing.shape)}, but the layout has {layout.num_blocks} blocks: [..., M, M]."
        )


def check_attention(operands: Operands, mixing: Any, layout: Any, causal: Any) -> None:
    """Checks the arguments of [`mhla_hf.ops.mhla_attention`] beside the backend."""
    check_normalizer(operands.normalizer)
    check_flag("causal", causal)
    check_layout(layout, operands.normalizer, causal)
    check_operands(operands)
    layout.check_length(operands.query.shape[1], "query")
    check_mixing(mixing, operands.query.shape[2], operands.query.device)
    if not causal:
        check_blocks(mixing, layout)


def check_same_dtype(operands: Operands) -> None:
    """Raises `ValueError` unless all tokens have one dtype, as the dense form needs, which converts nothing."""
    for name in ("key", "value", "normalizer_query", "normalizer_key"):
        tensor, expected = getattr(operands, name), operands.query.dtype
        if tensor is not None and tensor.dtype != expected:
            raise ValueError(f"{name} is {tensor.dtype}, but query is {expected}: the dense form takes one dtype.")


def check_normalizer(normalizer: Any) -> None:
    """Raises `ValueError` unless `normalizer` is the name of one."""
    check_choice("normalizer", normalizer, NORMALIZERS)


def check_sequence_normalizer(normalizer: Any, why: str) -> None:
    """Raises `ValueError` unless `normalizer` is one that sequences can have, whose blocks are not all full."""
    check_choice("normalizer", normalizer, SEQUENCE_NORMALIZERS, why)


def check_eps(eps: Any) -> None:
    """Raises `ValueError` unless `eps` is a finite number of at least 0."""
    # Integers beyond the largest float count as infinite.
    if isinstance(eps, bool) or not isinstance(eps, (int, float)) or not 0 <= eps <= sys.float_info.max:
        raise ValueError(f"eps={shorten_value(eps)} must be a finite number of at least 0.")


def check_tokens(query: Any, key: Any, value: Any, normalizer_query: Any = None, normalizer_key: Any = None) -> None:
    """Checks the tensors of tokens against each other."""
    sizes = _token_sizes("query", query)
    device, heads, width = query.device, sizes[2], sizes[3]
    check_floats("query", query, device)
    key_sizes = _token_sizes("key", key)
    key_heads = key_sizes[2]
    _compare("key", key, key_sizes, sizes, key_heads if key_heads > 0 and heads % key_heads == 0 else heads, device)
    _check_width("key", key_sizes[3], width)
    _compare("value", value, _token_sizes("value", value), sizes, key_heads, device)
    # The denominator's pair may be as wide as it likes, as long as the two agree.
    plain_width = width
    if normalizer_query is not None:
        plain_sizes = _token_sizes("normalizer_query", normalizer_query)
        _compare("normalizer_query", normalizer_query, plain_sizes, sizes, heads, device)
        plain_width = plain_sizes[3]
        if normalizer_key is None:
            _check_width("normalizer_query", plain_width, width)
    if normalizer_key is not None:
        plain_sizes = _token_sizes("normalizer_key", normalizer_key)
        _compare("normalizer_key", normalizer_key, plain_sizes, sizes, key_heads, device)
        _check_width("normalizer_key", plain_sizes[3], plain_width)


def check_floats(name: str, tensor: Any, device: torch.device) -> None:
    """Raises `ValueError` unless a value is a dense floating-point tensor on a device."""
    is_tensor = isinstance(tensor, torch.Tensor)
    if not (is_tensor and tensor.is_floating_point() and tensor.layout == torch.strided and tensor.device == device):
        found = f"{tensor.dtype}, {tensor.layout} on {tensor.device}" if is_tensor else type(tensor).__name__
        raise ValueError(f"{name} must be a dense floating-point tensor on {device}, where query is, got {found}.")


def check_mixing(mixing: Any, num_heads: int | None, device: torch.device) -> None:
    """Checks mixing weights: `[M, M]`, or `[heads, M, M]`.

    Args:
        mixing: The weights.
        num_heads: Number of heads that is allowed beside one for all; `None` for any.
        device: Device that they have to be on.
    """
    check_floats("mixing", mixing, device)
    check_mixing_shape(mixing)
    if num_heads is not None and mixing.dim() == 3 and mixing.shape[0] not in (1, num_heads):
        raise ValueError(f"mixing has {mixing.shape[0]} heads, but query has {num_heads}.")


def check_blocks(mixing: torch.Tensor, layout: BlockLayout) -> None:
    """Raises `ValueError` unless mixing weights are those of the layout's blocks."""
    if mixing.shape[-1] != layout.num_blocks:
        raise ValueError(
            f"mixing has {mixing.shape[-1]} blocks, but the layout has {layout.num_blocks} ({layout.blocks})."
        )


def check_layout(layout: Any, normalizer: str, causal: bool) -> None:
    """Checks that a layout has the blocks that causal attention or the normaliser needs."""
    if not isinstance(layout, BlockLayout):
        raise ValueError(f"layout must be a BlockLayout, got {type(layout).__name__}.")
    if causal:
        lengths = layout.tile_lengths[0]
        if len(layout.grid) != 1 or any(length != lengths[0] for length in lengths[:-1]) or lengths[-1] > lengths[0]:
            raise ValueError(f"causal=True needs a 1-D layout made with block_size, got {layout!r}.")
    if not NORMALIZERS[normalizer].mixes_sums and not layout.is_uniform:
        raise ValueError(
            f"normalizer={normalizer!r} pairs tokens at the same position of each block and needs blocks of equal "
            f"shape, but {layout!r} has uneven ones. Use normalizer='query', or a grid that the blocks divide."
        )


def check_valid(valid: Any, tokens: torch.Tensor, name: str = "valid") -> None:
    """Raises `ValueError` unless a mask is `None` or a BoolTensor `[B, T]` beside tokens `[B, T, H, D]`."""
    if valid is None:
        return
    if not isinstance(valid, torch.Tensor) or valid.dtype != torch.bool or valid.shape != tokens.shape[:2]:
        found = f"{valid.dtype} {tuple(valid.shape)}" if isinstance(valid, torch.Tensor) else type(valid).__name__
        raise ValueError(f"{name} must be a bool tensor [batch, tokens] = {tuple(tokens.shape[:2])}, got {found}.")
    if valid.device != tokens.device:
        raise ValueError(f"{name} is on {valid.device}, but key is on {tokens.device}.")


# Sizes are taken apart once: slices of shapes cost more than all comparisons.


def _token_sizes(name: str, tensor: Any) -> tuple[int, int, int, int]:
    if not isinstance(tensor, torch.Tensor) or tensor.dim() != 4 or tensor.shape[2] < 1 or tensor.shape[3] < 1:
        found = f"shape {tuple(tensor.shape)}" if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        raise ValueError(f"{name} must be a tensor [batch, tokens, heads, width], got {found}.")
    batch, length, heads, width = tensor.shape
    return batch, length, heads, width


def _compare(
    name: str,
    tensor: torch.Tensor,
    sizes: tuple[int, int, int, int],
    query_sizes: tuple[int, int, int, int],
    heads: int,
    device: torch.device,
) -> None:
    """Checks a tensor's batch and length against those of the query, its heads, dtype and device."""
    if sizes[0] != query_sizes[0] or sizes[1] != query_sizes[1] or sizes[2] != heads:
        raise ValueError(f"{name} has [batch, tokens, heads] = {sizes[:3]}, but query has {query_sizes[:3]}.")
    check_floats(name, tensor, device)


def _check_width(name: str, width: int, expected: int) -> None:
    if width != expected:
        raise ValueError(f"{name} has width {width}, but its counterpart has {expected}.")
