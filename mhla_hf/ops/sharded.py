# SPDX-License-Identifier: Apache-2.0
"""Non-causal MHLA whose tokens are spread over several processes: one sum of block summaries over them.

A convolution over their grid takes the tokens that it reaches from its neighbours.

Shape letters: B batch, T tokens of all processes, L tokens of this one, H feature heads, K query/key width, V value
width, M blocks, R blocks that this process has tokens of.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from ..layouts.blocks import BlockLayout, cached
from .operands import Operands, autocast_type
from .sums import mix_summaries, repeat_heads


@dataclass(frozen=True)
class TokenShard:
    """The run of consecutive tokens that a process holds, out of tokens that a group of processes holds in order.

    Runs are as even as `torch.tensor_split` makes them, the longer ones first. They need not end where blocks do.

    Attributes:
        group: The processes.
        num_tokens: Tokens T of all of them.
    """

    group: dist.ProcessGroup
    num_tokens: int

    @property
    def runs(self) -> list[tuple[int, int]]:
        """First token of each process, and the one after its last."""
        count = self.group.size()
        length, longer = divmod(self.num_tokens, count)
        return list(pairwise(index * length + min(index, longer) for index in range(count + 1)))

    @property
    def run(self) -> tuple[int, int]:
        """First token of this process, and the one after its last."""
        return self.runs[self.group.rank()]

    def check_length(self, length: int) -> None:
        """Raises `ValueError` unless this process holds `length` tokens."""
        start, stop = self.run
        if length != stop - start:
            raise ValueError(
                f"This process holds tokens {start} to {stop} of {self.num_tokens}, but query has {length}. Split the "
                "sequence as the model's own plan for context parallelism does."
            )


class _SumOverProcesses(torch.autograd.Function):
    """Sum over a group. Every process uses the sum for tokens of its own, so gradients are summed as well."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        total = tensor.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return _SumOverProcesses.apply(gradient, ctx.group), None


class _Exchange(torch.autograd.Function):
    """Sends runs of rows, one to each process of a group, and concatenates those received; so do gradients, back."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.sizes = sent, received, group
        output = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(output, rows.contiguous(), received, sent, group=group)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:  # type: ignore[override]
        sent, received, group = ctx.sizes
        return _Exchange.apply(gradient, received, sent, group), None, None, None


def tokens_with_neighbors(tokens: torch.Tensor, shard: TokenShard, reach: int) -> tuple[torch.Tensor, int]:
    """This process' tokens and those of others that are near them in the sequence.

    Args:
        tokens: `[B, L, C]`.
        shard: The tokens of this process.
        reach: Number of neighbours on either side, in tokens.

    Returns:
        Tokens `[B, L + neighbours, C]`, and which of all T tokens is the first of them.
    """
    start, stop = shard.run
    wanted = [(max(first - reach, 0), min(last + reach, shard.num_tokens)) for first, last in shard.runs]
    sent = [(min(max(first, start), stop), min(max(last, start), stop)) for first, last in wanted]
    first, last = wanted[shard.group.rank()]
    received = [max(min(end, last) - max(begin, first), 0) for begin, end in shard.runs]
    rows = tokens.transpose(0, 1)
    rows = torch.cat([rows[begin - start : end - start] for begin, end in sent])
    rows = _Exchange.apply(rows, [end - begin for begin, end in sent], received, shard.group)
    return rows.transpose(0, 1), first


def sharded_convolution(
    convolution: torch.nn.Module, tokens: torch.Tensor, grid: Sequence[int], shard: TokenShard
) -> torch.Tensor:
    """Convolve over a token grid at the tokens of this process, with those of its neighbours that it reaches.

    Half a kernel of slices along the grid's first axis comes from either side, not the whole sequence.

    Args:
        convolution: A size-preserving convolution with odd kernels, over as many axes as the grid has.
        tokens: `[B, L, C]`.
        grid: The token grid of all processes.
        shard: The tokens of this process.

    Returns:
        `[B, L, C]`.
    """
    start, stop = shard.run
    margins = [size // 2 for size in convolution.kernel_size]  # type: ignore[union-attr, arg-type]
    reach = sum(margin * math.prod(grid[axis + 1 :]) for axis, margin in enumerate(margins))
    nearby, first = tokens_with_neighbors(tokens, shard, reach)
    # Whole slices along the first axis, those that begin or end outside of what is needed filled up with zeros.
    size = math.prod(grid[1:])
    before = first % size
    count = math.ceil((before + nearby.shape[1]) / size)
    padded = F.pad(nearby, (0, 0, before, count * size - before - nearby.shape[1]))
    image = padded.transpose(1, 2).unflatten(2, (count, *grid[1:]))
    begin = start - first + before
    return convolution(image).flatten(2).transpose(1, 2)[:, begin : begin + stop - start]


def attend_sharded(
    operands: Operands,
    mixing: torch.Tensor,
    layout: BlockLayout,
    shard: TokenShard,
    summary_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """MHLA of one process' queries to the tokens of all processes, without checks.

    Each process adds its own keys and values up by blocks; one all-reduce adds those up over the processes. The key
    sums of the normaliser travel with the summaries as one more channel of the values. `normalizer="block_query"`
    pairs tokens of different blocks, and needs a second all-reduce of one number for each token and head.

    The tensor that travels is `[B, H_kv, M, K, V + 1]`. Gradients of tokens are complete. Those of `mixing`, and of
    whatever else all processes hold alike, are each process' own part: their sum is the gradient.

    Args:
        operands: The tokens of this process, `[B, L, ...]`, and the normaliser.
        mixing: `[M, M]` or `[H, M, M]`, the same in all processes.
        layout: Blocks of all T tokens.
        shard: The tokens of this process.
        summary_dtype: Dtype of the summaries that travel; by default float32 (float64 for float64 values), as in sums.

    Returns:
        `[B, L, H, V]` in the dtype of the values.
    """
    query, key, value = operands.tokens
    entry, dtype, num_heads, width = operands.entry, operands.dtype, query.shape[2], value.shape[3]
    touched = cached(_touched_blocks, layout, *shard.run, query.device)
    table = cached(_token_table, layout, *shard.run, query.device)
    with torch.autocast(autocast_type(query.device), enabled=False):
        own_mixing = mixing.to(dtype)[..., touched, :]
        query_blocks, key_blocks, value_blocks = (_group(tokens, table, dtype) for tokens in (query, key, value))
        summary = key_blocks.transpose(-1, -2) @ value_blocks
        if entry.divides:
            if operands.normalizer_key is not key:
                key_blocks = _group(operands.normalizer_key, table, dtype)
            summary = torch.cat([summary, key_blocks.sum(dim=-2).unsqueeze(-1)], dim=-1)
        shape = (*summary.shape[:2], layout.num_blocks, *summary.shape[3:])
        summary = summary.new_zeros(shape).index_copy(2, touched, summary)
        summary = _SumOverProcesses.apply(summary.to(summary_dtype or dtype), shard.group).to(dtype)
        mixed = mix_summaries(own_mixing, summary if entry.mixes_sums else summary[..., :width], num_heads)
        output = _ungroup(query_blocks @ mixed[..., :width], layout, shard)
        if entry.divides:
            if operands.normalizer_query is not query:
                query_blocks = _group(operands.normalizer_query, table, dtype)
            if entry.mixes_sums:
                product = _ungroup(query_blocks @ mixed[..., width:], layout, shard)
            else:
                key_sum = repeat_heads(summary[:, :, touched, :, width:], num_heads, 1)
                own = _ungroup(query_blocks @ key_sum, layout, shard)
                product = _aligned_product(own, own_mixing, layout, shard)
            output = output / entry.divisor(product, operands.eps)
        return output.to(value.dtype)


def _aligned_product(
    own: torch.Tensor, own_mixing: torch.Tensor, layout: BlockLayout, shard: TokenShard
) -> torch.Tensor:
    """Mixes each token's product with its own block's key sum over the tokens at its position of every block.

    Args:
        own: Those products `[B, L, H, 1]`.
        own_mixing: `[..., R, M]`.
        layout: Blocks of equal shape.
        shard: The tokens of this process.

    Returns:
        `[B, L, H, 1]`.
    """
    start, stop = shard.run
    batch, _, heads, _ = own.shape
    everything = own.new_zeros(batch, shard.num_tokens, heads)
    everything = torch.cat([everything[:, :start], own.squeeze(-1), everything[:, stop:]], dim=1)
    everything = _SumOverProcesses.apply(everything, shard.group)
    products = layout.to_head_blocks(everything.unsqueeze(-1)).squeeze(-1)
    places = cached(_places_in_blocks, layout, start, stop, own.device)
    return (own_mixing @ products).flatten(2).index_select(2, places).transpose(1, 2).unsqueeze(-1)


def _group(tokens: torch.Tensor, table: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`[B, L, H, D]` to `[B, H, R, N, D]`, zeros in empty slots."""
    by_head = tokens.transpose(1, 2)
    slots = table.flatten()
    gathered = by_head.index_select(2, slots.clamp(max=tokens.shape[1] - 1))
    return gathered.masked_fill_((slots == tokens.shape[1])[:, None], 0).to(dtype).unflatten(2, table.shape)


def _ungroup(blocks: torch.Tensor, layout: BlockLayout, shard: TokenShard) -> torch.Tensor:
    """Undoes [`_group`]: `[B, L, H, D]`."""
    slots = cached(_token_slots, layout, *shard.run, blocks.device)
    return blocks.flatten(2, 3).index_select(2, slots).transpose(1, 2)


def _touched_blocks(layout: BlockLayout, start: int, stop: int, device: torch.device) -> torch.Tensor:
    """The blocks that have tokens from `start` to `stop`, LongTensor `[R]`."""
    return layout.block_of_token[start:stop].unique().to(device)


def _token_table(layout: BlockLayout, start: int, stop: int, device: torch.device) -> torch.Tensor:
    """Tokens of each of those blocks, counted from `start`; L where there are fewer. LongTensor `[R, N]`."""
    _, block, counts = layout.block_of_token[start:stop].unique(return_inverse=True, return_counts=True)
    order = block.argsort(stable=True)
    block = block[order]
    place = torch.arange(stop - start) - (counts.cumsum(0) - counts)[block]
    table = torch.full((len(counts), int(counts.max())), stop - start)
    table[block, place] = order
    return table.to(device)


def _token_slots(layout: BlockLayout, start: int, stop: int, device: torch.device) -> torch.Tensor:
    """Place of each token in the flattened [`_token_table`], LongTensor `[L]`."""
    table = _token_table(layout, start, stop, device).flatten()
    slots = torch.empty(stop - start + 1, dtype=torch.long, device=device)
    slots[table] = torch.arange(len(table), device=device)
    return slots[:-1]


def _places_in_blocks(layout: BlockLayout, start: int, stop: int, device: torch.device) -> torch.Tensor:
    """Slot of each token in `[R, N]`, blocks whole, LongTensor `[L]`."""
    _, block = layout.block_of_token[start:stop].unique(return_inverse=True)
    return (block * layout.max_block_tokens + layout.position_in_block[start:stop]).to(device)
