# SPDX-License-Identifier: Apache-2.0
"""The state of causal MHLA in its recurrent form: block summaries and the prefixes that are mixed from them.

Every batch entry has its own position, so that sequences of different lengths decode side by side. Nothing here reads
a value back from the device. [`mhla_hf.ops.mhla_extend`] and [`mhla_hf.ops.mhla_step`] return the state after
more tokens, [`rewind_state`] the one before the last tokens.

Shape letters: B batch, T tokens, H query heads, H_kv key/value heads, K query/key width, V value width, n finished
blocks with room in the state. Summaries carry the normaliser z as their last column, hence V + 1. H_m is H_kv where
all heads share the mixing weights, else H.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from ..layouts.blocks import check_count
from ..layouts.sequences import mixing_at
from ..layouts.tables import indices
from ..utils.messages import check_choice
from . import BACKENDS
from .checks import check_mixing, check_operands, check_sequence_normalizer, check_tokens, check_valid
from .mixing import mix_summaries
from .numerics import Operands, accumulation_dtype, records_gradients


@dataclass(frozen=True)
class MHLAState:
    """Decoding state of one causal MHLA layer. [`mhla_step`] writes into `summaries`: go on with what it returns.

    Attributes:
        summaries: Finished blocks, `[B, H_kv, n, K, V + 1]`, zeros after them.
        current: The current block's summary so far, `[B, H_kv, K, V + 1]`. A full block stays the current one until
            the next token comes.
        prefix: Σ_{b<i} m_ib S_b for the current block i, `[B, H_m, K, V + 1]`.
        upcoming: The same for block i + 1, as far as it is summed up, `[B, H_m, K, V + 1]`.
        position: Tokens seen so far, LongTensor `[B]`.
        block_size: Tokens of a block.
        is_empty: Whether no entry has seen a token, where this is known without asking the device.
    """

    summaries: torch.Tensor
    current: torch.Tensor
    prefix: torch.Tensor
    upcoming: torch.Tensor
    position: torch.Tensor
    block_size: int
    is_empty: bool = False

    @property
    def num_blocks(self) -> int:
        """Number n of finished blocks with room in the state."""
        return self.summaries.shape[2]

    def with_room(self, num_blocks: int) -> MHLAState:
        """Returns a state with room for at least `num_blocks` finished blocks."""
        check_count("num_blocks", num_blocks, minimum=0)
        missing = num_blocks - self.num_blocks
        if missing <= 0:
            return self
        return dataclasses.replace(self, summaries=F.pad(self.summaries, (0, 0, 0, 0, 0, missing)))


def empty_state(
    batch_size: int,
    num_heads: int,
    key_width: int,
    value_width: int,
    block_size: int,
    *,
    num_mixing_heads: int | None = None,
    num_blocks: int = 0,
    dtype: torch.dtype = torch.float32,
    summary_dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> MHLAState:
    """Returns the state before the first token.

    Args:
        batch_size: B.
        num_heads: H_kv.
        key_width: K.
        value_width: V.
        block_size: Tokens of a block.
        num_mixing_heads: H_m; H_kv if not given.
        num_blocks: Room for that many finished blocks.
        dtype: The accumulation dtype.
        summary_dtype: The dtype that finished blocks are kept in; `dtype` if not given.
        device: Device of the state.

    Raises:
        ValueError: If a size is not a positive integer (`num_blocks` may be 0), or a dtype is not floating point.
    """
    mixing_heads = num_heads if num_mixing_heads is None else num_mixing_heads
    sizes = {"batch_size": batch_size, "num_heads": num_heads, "key_width": key_width, "value_width": value_width}
    for name, size in {**sizes, "block_size": block_size, "num_mixing_heads": mixing_heads}.items():
        check_count(name, size)
    check_count("num_blocks", num_blocks, minimum=0)
    if mixing_heads % num_heads:
        raise ValueError(f"num_mixing_heads={mixing_heads} must be num_heads={num_heads} or a multiple of it.")
    for name, kind in (("dtype", dtype), ("summary_dtype", summary_dtype)):
        if not (isinstance(kind, torch.dtype) and kind.is_floating_point) and (name == "dtype" or kind is not None):
            raise ValueError(f"{name}={kind!r} must be a floating-point dtype.")
    shape = (key_width, value_width + 1)
    return MHLAState(
        torch.zeros(batch_size, num_heads, num_blocks, *shape, dtype=summary_dtype or dtype, device=device),
        torch.zeros(batch_size, num_heads, *shape, dtype=dtype, device=device),
        torch.zeros(batch_size, mixing_heads, *shape, dtype=dtype, device=device),
        torch.zeros(batch_size, mixing_heads, *shape, dtype=dtype, device=device),
        torch.zeros(batch_size, dtype=torch.long, device=device),
        block_size,
        is_empty=True,
    )


def rewind_state(
    state: MHLAState,
    mixing: torch.Tensor,
    key: torch.Tensor,
    normalizer_key: torch.Tensor,
    value: torch.Tensor,
    valid: torch.Tensor,
    *,
    kept: torch.Tensor | None = None,
) -> MHLAState:
    """Takes the last tokens back out of a state, all or some of them.

    Args:
        state: The state after these tokens.
        mixing: As in [`mhla_hf.ops.mhla_extend`].
        key: The tokens' feature-mapped keys `[B, T, H_kv, K]`.
        normalizer_key: The same, unrotated.
        value: Their values `[B, T, H_kv, V]`.
        valid: BoolTensor `[B, T]`, False for padding.
        kept: BoolTensor `[B, T]`, which of the valid tokens stay in the state; `None` for none of them.

    Returns:
        The state before them, or with those that are kept alone, up to rounding.

    Raises:
        ValueError: If an argument does not fit the state; the message names the argument.
    """
    check_tokens(key, key, value, None, normalizer_key)
    check_mixing(mixing, None, key.device)
    check_valid(valid, key)
    check_valid(kept, key, "kept")
    check_state(state, key, value, mixing)
    dtype, size, room = state.current.dtype, state.block_size, state.num_blocks
    # A slot for the current block, which there need not be room for yet.
    index = indices(room + 1, valid.device)
    here = index == current_block(state.position, size)[:, None]
    summaries = state.with_room(room + 1).summaries.to(dtype)
    summaries = torch.where(here[:, None, :, None, None], state.current.unsqueeze(2), summaries)
    position = state.position - valid.sum(dim=1)
    taken = _membership(valid, position, size, index).to(dtype)
    if kept is not None:
        # Tokens behind one that is taken out move up, some of them to the block before. The others cancel out.
        kept = kept & valid
        taken = taken - _membership(kept, position, size, index).to(dtype)
        position = position + kept.sum(dim=1)
    columns = torch.cat([value.to(dtype), torch.ones_like(value[..., :1], dtype=dtype)], dim=-1)
    removed = torch.einsum("btn,bthk,bthv->bhnkv", taken, key.to(dtype), columns[..., :-1])
    removed_keys = torch.einsum("btn,bthk->bhnk", taken, normalizer_key.to(dtype))
    summaries = summaries - torch.cat([removed, removed_keys.unsqueeze(-1)], dim=-1)
    current = block_summary_at(summaries, current_block(position, size))
    return settled_state(state, summaries[:, :, :room], current, position, mixing.to(dtype))


def _membership(valid: torch.Tensor, position: torch.Tensor, size: int, index: torch.Tensor) -> torch.Tensor:
    """Which of the blocks `index` each valid token belongs to where they follow `position` `[B]`: `[B, T, n]`."""
    token_block = (position[:, None] + valid.long().cumsum(dim=1) - 1).clamp(min=0) // size
    return (token_block[..., None] == index) & valid[..., None]


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


def check_recurrent(operands: Operands, mixing: Any, state: Any, valid: Any, backend: Any) -> None:
    """Checks the arguments of [`mhla_hf.ops.mhla_step`] and [`mhla_hf.ops.mhla_extend`].

    Raises:
        ValueError: If one has a wrong type, shape, dtype, device or value; the message names it.
    """
    check_sequence_normalizer(operands.normalizer, " for decoding token by token")
    check_choice("backend", backend, BACKENDS)
    check_operands(operands)
    query, key, value = operands.tokens
    # Summaries carry z as a column. That the two agree is known by now.
    if operands.plain_query.shape[3] != query.shape[3]:
        raise ValueError(
            f"normalizer_query has width {operands.plain_query.shape[3]}, but a state keeps sums of {query.shape[3]} "
            "wide keys."
        )
    check_mixing(mixing, query.shape[2], query.device)
    check_valid(valid, key)
    check_state(state, key, value, mixing, query.shape[2])


def serves_kernels(operands: Operands, mixing: torch.Tensor, state: MHLAState) -> bool:
    """Returns whether Triton kernels can move this state on: they keep no gradients and no float64."""
    per_head = mixing.dim() > 2 and mixing.shape[0] != 1
    heads = operands.query.shape[2] if per_head else state.current.shape[1]
    if state.current.dtype != torch.float32 or state.prefix.shape[1] != heads or operands.entry.kernel is None:
        return False
    held = state.summaries, state.current, state.prefix, state.upcoming
    return not records_gradients(*operands.tokens, *operands.pair, mixing, *held)


def current_block(position: torch.Tensor, block_size: int) -> torch.Tensor:
    """Index of the block that the last token went to, `[B]`."""
    return (position - 1).clamp(min=0) // block_size


def block_summary_at(summaries: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """The summary of block `index` `[B]` out of `[B, H_kv, n, K, V + 1]`: `[B, H_kv, K, V + 1]`."""
    index = index[:, None, None, None, None].expand(-1, summaries.shape[1], 1, *summaries.shape[-2:])
    return summaries.gather(2, index).squeeze(2)


def settled_state(
    state: MHLAState,
    summaries: torch.Tensor,
    current: torch.Tensor,
    position: torch.Tensor,
    mixing: torch.Tensor,
) -> MHLAState:
    """The state at `position` with these summaries of all blocks; everything derived from them is recomputed."""
    size, index = state.block_size, indices(summaries.shape[2], position.device)
    block = current_block(position, size)
    finished = index < block[:, None]
    summaries = torch.where(finished[:, None, :, None, None], summaries, 0)
    # A state before its first token has summed up nothing.
    offset = (position - block * size)[:, None]
    rows = torch.stack([block, block + 1], dim=1)
    weights = mixing_at(mixing, rows[:, :, None], index[None, None, :])
    seen = torch.stack([finished, finished & (index % size < offset)], dim=1)
    weights = torch.where(seen[:, None], weights, 0)
    # Strides do not tell how a state was made: compiled decoding would be recompiled for others.
    prefix, upcoming = (
        part.contiguous() for part in mix_summaries(weights, summaries, state.prefix.shape[1]).unbind(2)
    )
    return MHLAState(
        summaries.to(state.summaries.dtype), current.contiguous(), prefix, upcoming, position, state.block_size
    )
