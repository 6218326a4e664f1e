# SPDX-License-Identifier: Apache-2.0
"""Checks of what moves a decoding state on: a few comparisons of shapes, which a decoding step does not notice."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ..config import BACKENDS
from .checks import check_eps, check_mixing, check_tokens
from .numerics import accumulation_dtype, check_normalizer


if TYPE_CHECKING:
    from .recurrent import MHLAState

_TENSORS = ("summaries", "current", "prefix", "upcoming", "position")


def check_recurrent_arguments(
    query: Any,
    key: Any,
    value: Any,
    mixing: Any,
    state: MHLAState,
    valid: Any,
    normalizer_query: Any,
    normalizer_key: Any,
    normalizer: Any,
    eps: Any,
    backend: Any,
) -> None:
    """Checks the arguments of [`mhla_hf.ops.mhla_step`] and [`mhla_hf.ops.mhla_extend`].

    Raises:
        ValueError: If one has a wrong type, shape, dtype, device or value; the message names it.
    """
    check_recurrent_normalizer(normalizer)
    if not isinstance(backend, str) or backend not in BACKENDS:
        raise ValueError(f"backend={backend!r} is not one of {', '.join(map(repr, BACKENDS))}.")
    check_eps(eps)
    check_tokens(query, key, value, normalizer_query, normalizer_key)
    width = query.shape[-1]
    for name, tensor in (("normalizer_query", normalizer_query), ("normalizer_key", normalizer_key)):
        # Summaries carry z as a column.
        if tensor is not None and tensor.shape[-1] != width:
            raise ValueError(f"{name} has width {tensor.shape[-1]}, but a state keeps sums of {width} wide keys.")
    check_mixing(mixing, query.shape[2], query.device)
    check_valid(valid, key)
    check_state(state, key, value, mixing, query.shape[2])


def check_recurrent_normalizer(normalizer: Any) -> None:
    """Raises `ValueError` for `"block_query"`, whose state would grow with every token, and for unknown names."""
    check_normalizer(normalizer, ("query", "none"), " for decoding token by token")


def check_valid(valid: Any, tokens: torch.Tensor) -> None:
    """Raises `ValueError` unless `valid` is `None` or a BoolTensor `[B, T]` beside tokens `[B, T, H, D]`."""
    if valid is None:
        return
    if not isinstance(valid, torch.Tensor) or valid.dtype != torch.bool or valid.shape != tokens.shape[:2]:
        found = f"{valid.dtype} {tuple(valid.shape)}" if isinstance(valid, torch.Tensor) else type(valid).__name__
        raise ValueError(f"valid must be a bool tensor [batch, tokens] = {tuple(tokens.shape[:2])}, got {found}.")
    if valid.device != tokens.device:
        raise ValueError(f"valid is on {valid.device}, but key is on {tokens.device}.")


def check_state(
    state: Any, key: torch.Tensor, value: torch.Tensor, mixing: torch.Tensor, num_heads: int | None = None
) -> None:
    """Checks that a state is one of these tokens' batch, heads, widths, dtype and device.

    Args:
        state: The state.
        key: `[B, T, H_kv, K]`.
        value: `[B, T, H_kv, V]`.
        mixing: `[M, M]` or `[H, M, M]`.
        num_heads: H; `None` where there are no queries.

    Raises:
        ValueError: If it is not; the message names the field.
    """
    from .recurrent import MHLAState

    if not isinstance(state, MHLAState):
        raise ValueError(f"state must be an MHLAState (see mhla_hf.ops.empty_state), got {type(state).__name__}.")
    batch, _, heads, width = key.shape
    size = (width, value.shape[-1] + 1)
    mixed = state.prefix.shape[1] if state.prefix.dim() == 4 else 0
    if len(mixing.shape) == 3 and mixing.shape[0] != 1:
        allowed = [mixing.shape[0]]
    else:
        allowed = [heads] if num_heads is None else [heads, num_heads]
    if mixed not in allowed:
        raise ValueError(
            f"state.prefix has shape {tuple(state.prefix.shape)}, but these heads and mixing weights need "
            f"{' or '.join(map(str, dict.fromkeys(allowed)))} heads: make the state with num_mixing_heads."
        )
    expected = {
        "summaries": (batch, heads, state.summaries.shape[2] if state.summaries.dim() == 5 else 0, *size),
        "current": (batch, heads, *size),
        "prefix": (batch, mixed, *size),
        "upcoming": (batch, mixed, *size),
        "position": (batch,),
    }
    for name in _TENSORS:
        tensor = getattr(state, name)
        if tensor.shape != expected[name]:
            raise ValueError(
                f"state.{name} has shape {tuple(tensor.shape)}, but these tokens need {expected[name]}: a state "
                "serves one batch, its heads and their widths."
            )
        if tensor.device != key.device:
            raise ValueError(f"state.{name} is on {tensor.device}, but key is on {key.device}.")
    dtype = accumulation_dtype(value.dtype)
    if state.current.dtype != dtype:
        raise ValueError(f"state.current is {state.current.dtype}, but {value.dtype} values are summed up in {dtype}.")
