# SPDX-License-Identifier: Apache-2.0
"""`mhla_step`: decodes one token of every batch entry. Shape letters as in `recurrent.py`.

No step reads a value back from the device, and its cost does not grow with the length: the mixed prefix of the next
block is summed up a few finished blocks a token, while the current block fills.
"""

from __future__ import annotations

import torch

from ..layouts.sequences import mixing_at
from ..layouts.tables import indices
from .backends import choose_backend
from .mixing import mix_summaries, repeat_heads
from .numerics import Operands, autocast_type, records_gradients
from .recurrent import MHLAState, check_recurrent, serves_kernels


def mhla_step(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mixing: torch.Tensor,
    state: MHLAState,
    *,
    valid: torch.Tensor | None = None,
    normalizer_query: torch.Tensor | None = None,
    normalizer_key: torch.Tensor | None = None,
    normalizer: str = "query",
    eps: float = 1e-6,
    backend: str = "auto",
) -> tuple[torch.Tensor, MHLAState]:
    """Decodes one token for each batch entry in O(K·V), whatever came before.

    Arguments as in [`mhla_hf.ops.mhla_extend`], with T = 1, but these.

    Args:
        state: The state after the tokens before, with room for one block more than those finished. Its summaries are
            written to, unless gradients are recorded.
        valid: BoolTensor `[B, 1]`; the state of an entry whose token is padding stays as it is.
        backend: See [`mhla_hf.ops.choose_backend`]; the kernel, which does the whole step in one launch, serves where
            no gradient is recorded.

    Returns:
        The output `[B, 1, H, V]` in the dtype of `value`, and the state after this token.

    Raises:
        ValueError: If more than one token is given, or as in [`mhla_hf.ops.mhla_extend`].
    """
    operands = Operands(query, key, value, normalizer_query, normalizer_key, normalizer, eps)
    check_recurrent(operands, mixing, state, valid, backend)
    if query.shape[1] != 1:
        raise ValueError(f"mhla_step takes one token, got query with {query.shape[1]}; use mhla_extend for several.")
    backend = choose_backend(
        backend, query, key, value, normalizer_query, normalizer_key, products=False, family="decode"
    )
    return step(operands, mixing, state, valid, backend)


def step(
    operands: Operands, mixing: torch.Tensor, state: MHLAState, valid: torch.Tensor | None, backend: str
) -> tuple[torch.Tensor, MHLAState]:
    """[`mhla_step`] without its checks, on a chosen backend."""
    (query, key, value), entry = operands.tokens, operands.entry
    dtype, size, num_heads = state.current.dtype, state.block_size, query.shape[2]
    mixing = mixing.to(dtype)
    # The kernel files every block that is full.
    if backend == "triton" and state.num_blocks > 0 and serves_kernels(operands, mixing, state):
        return _step_by_kernel(operands, mixing, state, valid)
    counted = torch.ones_like(state.position) if valid is None else valid[:, 0].long()
    block, offset = state.position // size, state.position % size
    with torch.autocast(autocast_type(query.device), enabled=False):
        state = _start_block(state, mixing, block, (offset == 0) & (block > 0) & counted.bool())
        key, plain_key, value_row = (x.to(dtype).transpose(1, 2) for x in (key, operands.plain_key, value))
        added = torch.cat([key.transpose(-1, -2) @ value_row, plain_key.transpose(-1, -2)], dim=-1)
        keep = counted.bool()[:, None, None, None]
        current = state.current + torch.where(keep, added, 0)
        own = _weights(mixing, block, block)
        mixed = repeat_heads(state.prefix, num_heads, 1) + own * repeat_heads(current, num_heads, 1)
        output = query.to(dtype).transpose(1, 2) @ mixed[..., :-1]
        if entry.divides:
            plain_query = operands.plain_query.to(dtype).transpose(1, 2)
            output = output / entry.divisor(plain_query @ mixed[..., -1:], operands.eps)
        upcoming = state.upcoming + torch.where(keep, _upcoming_share(state, mixing, block, offset), 0)
        output = output.masked_fill(~keep, 0)
    state = MHLAState(state.summaries, current, state.prefix, upcoming, state.position + counted, size)
    return output.transpose(1, 2).to(value.dtype), state


def _step_by_kernel(
    operands: Operands, mixing: torch.Tensor, state: MHLAState, valid: torch.Tensor | None
) -> tuple[torch.Tensor, MHLAState]:
    # Imported here alone: Triton need not be installed.
    from .triton.decode import decode_token

    # The kernel writes where a dense tensor would have the block.
    summaries = state.summaries.contiguous()
    output, current, prefix, upcoming, position = decode_token(
        *operands.tokens, *operands.pair, valid, mixing, summaries, state.current, state.prefix, state.upcoming,
        state.position, state.block_size, operands.entry.divides, operands.eps,
    )  # fmt: skip
    return output, MHLAState(summaries, current, prefix, upcoming, position, state.block_size)


def _weights(mixing: torch.Tensor, row: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
    """One weight for each batch entry: `[B, 1 or H, 1, 1]`."""
    return mixing_at(mixing, row[:, None, None], column[:, None, None])


def _start_block(state: MHLAState, mixing: torch.Tensor, block: torch.Tensor, starting: torch.Tensor) -> MHLAState:
    """Files the full current block of the batch entries that are `starting` a block `[B]`."""
    if state.num_blocks == 0:
        return state
    before = (block - 1).clamp(min=0)
    start = starting[:, None, None, None]
    # Entries that start no block write back what stands there.
    entries = indices(block.shape[0], block.device)
    slot = before.clamp(max=state.num_blocks - 1)
    filed = torch.where(start, state.current.to(state.summaries.dtype), state.summaries[entries, :, slot])
    # Written in place unless autograd still needs what stood there.
    write = state.summaries.index_put if records_gradients(filed, state.summaries) else state.summaries.index_put_
    all_heads = indices(state.summaries.shape[1], block.device)[None, :]
    summaries = write((entries[:, None], all_heads, slot[:, None]), filed)
    heads = state.prefix.shape[1]
    own = _weights(mixing, block, before) * repeat_heads(state.current, heads, 1)
    current = torch.where(start, 0, state.current)
    prefix = torch.where(start, state.upcoming + own, state.prefix)
    upcoming = torch.where(start, 0, state.upcoming)
    return MHLAState(summaries, current, prefix, upcoming, state.position, state.block_size)


def _upcoming_share(state: MHLAState, mixing: torch.Tensor, block: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
    """This token's share of the next block's prefix: finished blocks b with b ≡ offset modulo the block size.

    Every finished block comes up exactly once while a block fills.
    """
    if state.num_blocks == 0:
        return torch.zeros_like(state.upcoming)
    strides = -(-state.num_blocks // state.block_size)
    if torch.compiler.is_compiling():
        # One more than needed: a single one would be compiled in, and others recompiled.
        strides = strides + 1
    index = offset[:, None] + state.block_size * indices(strides, block.device)
    weights = mixing_at(mixing, (block + 1)[:, None, None], index[:, None, :])
    weights = torch.where((index < block[:, None])[:, None, None], weights, 0)
    entries = indices(block.shape[0], block.device)[:, None]
    chosen = state.summaries[entries, :, index.clamp(max=state.num_blocks - 1)].transpose(1, 2)
    return mix_summaries(weights, chosen.to(state.current.dtype), state.prefix.shape[1]).squeeze(2)
