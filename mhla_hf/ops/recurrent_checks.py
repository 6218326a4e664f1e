# SPDX-License-Identifier: Apache-2.0
"""Checks of what moves a decoding state on: a few comparisons of shapes, which a decoding step does not notice."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ..utils.messages import check_choice
from . import BACKENDS
from .checks import check_eps, check_mixing, check_sequence_normalizer, check_tokens
from .numerics import accumulation_dtype


if TYPE_CHECKING:
    from .recurrent import MHLAState


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
    check_sequence_normalizer(normalizer, " for decoding token by token")
    check_choice("backend", backend, BACKENDS)
    check_eps(eps)
    check_tokens(query, key, value, normalizer_query, normalizer_key)
    # Summaries carry z as a column. That the two agree is known by now.
    if normalizer_query is not None and normalizer_query.shape[3] != query.shape[3]:
        raise ValueError(
            f"normalizer_query has width {normalizer_query.shape[3]}, but a state keeps sums of {query.shape[3]} wide "
            "keys."
        )
    check_mixing(mixing, query.shape[2], query.device)
    check_valid(valid, key)
    check_state(state, key, value, mixing, query.shape[2])


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
    columns, device = value.shape[3] + 1, key.device
    mixed = state.prefix.shape[1] if state.prefix.dim() == 4 else 0
    if mixing.dim() == 3 and mixing.shape[0] != 1:
        allowed = [mixing.shape[0]]
    else:
        allowed = [heads] if num_heads is None else [heads, num_heads]
    if mixed not in allowed:
        raise ValueError(
            f"state.prefix has shape {tuple(state.prefix.shape)}, but these heads and mixing weights need "
            f"{' or '.join(map(str, dict.fromkeys(allowed)))} heads: make the state with num_mixing_heads."
        )
    blocks = state.summaries.shape[2] if state.summaries.dim() == 5 else 0
    _check_field("summaries", state.summaries, (batch, heads, blocks, width, columns), device)
    _check_field("current", state.current, (batch, heads, width, columns), device)
    _check_field("prefix", state.prefix, (batch, mixed, width, columns), device)
    _check_field("upcoming", state.upcoming, (batch, mixed, width, columns), device)
    _check_field("position", state.position, (batch,), device)
    dtype = accumulation_dtype(value.dtype)
    if state.current.dtype != dtype:
        raise ValueError(f"state.current is {state.current.dtype}, but {value.dtype} values are summed up in {dtype}.")


def _check_field(name: str, tensor: torch.Tensor, shape: tuple[int, ...], device: torch.device) -> None:
    if tensor.shape != shape:
        raise ValueError(
            f"state.{name} has shape {tuple(tensor.shape)}, but these tokens need {shape}: a state serves one batch, "
            "its heads and their widths."
        )
    if tensor.device != device:
        raise ValueError(f"state.{name} is on {tensor.device}, but key is on {device}.")
