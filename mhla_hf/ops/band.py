# SPDX-License-Identifier: Apache-2.0
"""Mixing of any number of blocks by M × M stored weights: a band of M blocks and one running sum, in linear time.

With L = M - 1, blocks i, b ≤ L take the stored weight m_ib, and all others that of their distance d = |i - b|: looking
back w_d = m_{L,L-d}, looking ahead m_{0,d}; beyond distance L, w_L g^(d-L), where the decay g is 1 for a constant
tail. Looking back, that makes

    P_i = Σ_{b<i} m_ib S_b = Σ_{1≤d<L} w_d S_{i-d} + w_L E_{i-L},    E_j = Σ_{b≤j} g^(j-b) S_b        for i ≥ L.

Blocks are mixed in chunks of C ≥ M. The rows of chunk k read chunks k - 1 and k, and E at the last block before those:
one product with weights `[C, 1 + 2 C]` a chunk. E goes from chunk to chunk by a scan, in log2 c steps that look back
alone. Documents are contiguous, so one at most reaches from before these chunks into chunk k: E never holds more than
that one. It is a sum of that document's blocks alone, not a difference of two sums, which would lose digits and let a
NaN into other documents.

Shape letters: B batch, H query heads, H_kv key/value heads, S heads of the weights (1 or H), H_m heads of a mixture
(H where S is, else H_kv), n blocks, M stored blocks, C blocks of a chunk, c chunks, D numbers of a summary.
"""

# No postponed annotations here: torch.library reads them from the functions themselves.

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.flop_counter import register_flop_formula

from ..layouts.blocks import BlockLayout, indices, is_open
from ..layouts.sequences import SequenceLayout
from .operands import first_blocks
from .sums import mix_summaries, repeat_heads


# Chunks have at least as many blocks, for the sake of matrix products.
MIN_CHUNK_BLOCKS = 16


@dataclass(frozen=True)
class StoredMixing:
    """Mixing weights of M blocks, extrapolated by distance beyond them.

    Attributes:
        weights: `[S, M, M]`.
        decay: g, `[S]`; `None` for 1.
    """

    weights: Tensor
    decay: Tensor | None = None

    def detach(self) -> "StoredMixing":
        """Return the same weights without their history."""
        return StoredMixing(self.weights.detach(), None if self.decay is None else self.decay.detach())

    @classmethod
    def of(cls, weights: Tensor, decay: Tensor | None = None, dtype: torch.dtype | None = None) -> "StoredMixing":
        """Return stored weights from `[M, M]` or `[S, M, M]` and a decay of no axes, `[1]` or `[H]`, in a dtype."""
        weights = (weights if weights.dim() == 3 else weights[None]).to(dtype or weights.dtype)
        if decay is None:
            return cls(weights)
        decay = decay.reshape(-1).to(weights.dtype)
        heads = max(len(decay), len(weights))
        return cls(weights.expand(heads, -1, -1), decay.expand(heads))

    @property
    def num_blocks(self) -> int:
        """M."""
        return self.weights.shape[-1]

    @property
    def is_per_head(self) -> bool:
        """Whether every query head has weights of its own."""
        return len(self.weights) > 1

    @property
    def chunk_blocks(self) -> int:
        """C: up to C blocks are mixed by a dense matrix."""
        return max(self.num_blocks, MIN_CHUNK_BLOCKS)

    def are_few(self, num_blocks: int) -> bool:
        """Return whether blocks are mixed by a matrix: up to C of them, or a number that an export leaves open."""
        return is_open(num_blocks) or num_blocks <= self.chunk_blocks

    def at(self, rows: Tensor, columns: Tensor) -> Tensor:
        """Return the weights of pairs of blocks.

        Args:
            rows: Indices of blocks of queries, LongTensor, 0 or more.
            columns: Indices of blocks of keys; broadcasts with `rows` to `[I, J]`, or to `[B, ...]` of three axes and
                more.

        Returns:
            `[S, I, J]` or `[B, S, ...]`.
        """
        rows, columns = torch.broadcast_tensors(rows, columns)
        last, distance = self.num_blocks - 1, rows - columns
        inside, back = torch.maximum(rows, columns) <= last, distance >= 0
        row = torch.where(inside, rows, torch.where(back, last, 0)).clamp(max=last)
        column = torch.where(inside, columns, torch.where(back, last - distance, -distance)).clamp(0, last)
        weights = self.weights[:, row, column]
        if self.decay is not None:
            weights = weights * self.decayed((distance.abs() - last).clamp(min=0))
        return weights if rows.dim() == 2 else weights.movedim(0, 1)

    def decayed(self, distance: Tensor) -> Tensor:
        """Return g^distance for a LongTensor of 0 or more: `[S or 1, ...]`."""
        if self.decay is None:
            return self.weights.new_ones(1, *distance.shape)
        return self.decay.view(-1, *[1] * distance.dim()) ** distance

    def matrix(self, num_blocks: int, first: Tensor | None = None) -> Tensor:
        """Return the weights of all pairs of blocks, `[S, n, n]`; with documents `[B, S, n, n]`, 0 between them.

        Args:
            num_blocks: n.
            first: The first block of each block's document, `[B, n]`; may be below 0 for blocks that are not these.
        """
        index = indices(num_blocks, self.weights.device)
        # A decay that learns gets a gradient at any length, as processes that train together need.
        learns = self.decay is not None and self.decay.requires_grad
        if first is None and not is_open(num_blocks) and num_blocks <= self.num_blocks and not learns:
            return self.weights[:, :num_blocks, :num_blocks]
        if first is None:
            return self.at(index[:, None], index[None, :])
        same = first[:, :, None] == first[:, None, :]
        return self.at((index - first)[:, :, None], (index - first)[:, None, :]).masked_fill(~same[:, None], 0)

    def own(self, num_blocks: int, first: Tensor | None = None) -> Tensor:
        """Return m_ii of every block, `[S, n]` or, with documents, `[B, S, n]`; see [`StoredMixing.matrix`]."""
        index = indices(num_blocks, self.weights.device)
        index = (index if first is None else index - first).clamp(max=self.num_blocks - 1)
        diagonal = self.weights.diagonal(dim1=-2, dim2=-1)[:, index]
        return diagonal if first is None else diagonal.movedim(0, 1)

    def mix_earlier(self, summary: Tensor, num_heads: int, first: Tensor | None = None) -> Tensor:
        """Return Σ_{b<i} m_ib S_b for every block i: `[B, H, n, ...]` from `[B, H_kv, n, ...]`.

        Args:
            summary: S.
            num_heads: H.
            first: See [`StoredMixing.matrix`].
        """
        blocks = summary.shape[2]
        if self.are_few(blocks):
            weights = self.matrix(blocks, first).tril(-1)
            mixed = mix_summaries(weights, summary.flatten(3).unsqueeze(-1), num_heads)
            return mixed.reshape(*mixed.shape[:3], *summary.shape[3:])
        return self._mix_in_chunks(summary, num_heads, *self.chunk_weights(blocks, first))

    def mix_both_ways(self, summary: Tensor, num_heads: int, first: Tensor | None, last: Tensor | None) -> Tensor:
        """Return Σ_b m_ib S_b over all blocks of a document: `[B, H, n, ...]`.

        Args:
            summary: S, `[B, H_kv, n, ...]`; n is above `chunk_blocks`.
            num_heads: H.
            first: The first block of each block's document, `[B, n]`; `None` for one document.
            last: Its last block, likewise.
        """
        blocks = summary.shape[2]
        earlier = self._mix_in_chunks(summary, num_heads, *self.chunk_weights(blocks, first))
        weights = self.chunk_weights(blocks, first, last=last, ahead=True)
        later = self._mix_in_chunks(summary.flip(2), num_heads, *weights).flip(2)
        own = self.own(blocks, first)
        own = own.reshape(*own.shape[-3:], *[1] * (summary.dim() - 3))
        return earlier + later + own * repeat_heads(summary, num_heads, 1)

    def _mix_in_chunks(self, summary: Tensor, num_heads: int, window: Tensor, carry: Tensor) -> Tensor:
        if self.is_per_head:
            summary = repeat_heads(summary, num_heads, 1)
        tensors = summary.flatten(3), window, carry
        # Custom operators have no forward-mode derivatives: they would be zero without a word.
        forward_mode = any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors)
        mixed = (run_mix_chunks if forward_mode else mix_chunks)(*tensors)
        return repeat_heads(mixed.unflatten(3, summary.shape[3:]), num_heads, 1)

    def earlier_weights(self, num_blocks: int, first: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the weights of earlier blocks as [`run_mix_chunks`] takes them.

        Those of [`StoredMixing.chunk_weights`], or for few blocks a matrix, `[B or 1, S, 1, n, n]`, and nothing to
        carry.
        """
        if not self.are_few(num_blocks):
            return self.chunk_weights(num_blocks, first)
        weights = self.matrix(num_blocks, first).tril(-1)
        return weights.reshape(-1, len(self.weights), 1, num_blocks, num_blocks), weights.new_empty(0)

    def chunk_weights(
        self, num_blocks: int, first: Tensor | None = None, *, last: Tensor | None = None, ahead: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Return what [`mix_chunks`] takes, of blocks in their order or, where `ahead`, in the opposite one.

        Returns:
            Weights of E before the last chunk, of that chunk's blocks and of those of the own one, 0 for a row's own
            block and those after it, `[B or 1, S, c, C, 1 + 2 C]`; and of E before a chunk, and of the chunk's blocks,
            in E after it, `[B or 1, S or 1, c, 1 + C]`.
        """
        chunk, device = self.chunk_blocks, self.weights.device
        count = -(-num_blocks // chunk)
        place = indices(count * chunk, device)
        # The first place of each block's document, of which no earlier chunk than the first has any.
        bound = place.new_zeros(1, num_blocks) if first is None else first
        index = place[:num_blocks] - bound
        if ahead:
            index = index.flip(-1)
            bound = torch.zeros_like(bound) if last is None else (num_blocks - 1 - last).flip(-1)
        index, bound = (
            F.pad(x, (0, count * chunk - num_blocks)).unflatten(1, (count, chunk)) for x in (index, bound.clamp(min=0))
        )
        place = place.view(count, chunk)
        columns = place[:, :1] - chunk - 1 + indices(1 + 2 * chunk, device)
        distance = place[:, :, None] - columns[:, None, :]
        seen = (distance > 0) & (columns[:, None, :] >= bound[..., None])
        others = index[..., None] - (-distance if ahead else distance)
        window = self.at(index[..., None].clamp(min=0), others.clamp(min=0)).masked_fill(~seen[:, None], 0)
        columns = place[:, :1] - 1 + indices(1 + chunk, device)
        seen = columns >= bound[..., -1:]
        carry = self.decayed(place[:, -1:] - columns)[None].masked_fill(~seen[:, None], 0)
        return window, carry


def prefix_and_own(
    query: Tensor, key: Tensor, value: Tensor, mixing: StoredMixing, first: Tensor | None, past: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """φ(q)ᵀ applied to the mixed earlier blocks plus the causal part of the own block.

    Args:
        query: `[B, H, M, N, K]`.
        key: `[B, H_kv, M, N, K]`.
        value: `[B, H_kv, M, N, V]`.
        mixing: The stored weights.
        first: The first block of each block's document, `[B, M]`; `None` for one document.
        past: Mixed summaries of tokens before these, added to the earlier blocks, `[B, H or H_kv, M, K, V]`.

    Returns:
        `[B, H, M, N, V]`, and the blocks' summaries `[B, H_kv, M, K, V]`.
    """
    num_heads, num_blocks = query.shape[1:3]
    summaries = key.transpose(-1, -2) @ value
    prefix = mixing.mix_earlier(summaries, num_heads, first)
    if past is not None:
        prefix = prefix + repeat_heads(past, num_heads, 1)
    key, value = repeat_heads(key, num_heads, 1), repeat_heads(value, num_heads, 1)
    own = (query @ key.transpose(-1, -2)).tril() @ value
    return torch.addcmul(query @ prefix, mixing.own(num_blocks, first)[..., None, None], own), summaries


def numerator_and_product(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pair: tuple[Tensor, Tensor] | None,
    mixing: StoredMixing,
    first: Tensor | None,
    past: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """[`prefix_and_own`] of the values and of a column of ones, which makes the normaliser's product and z.

    Args:
        query: `[B, H, M, N, K]`.
        key: `[B, H_kv, M, N, K]`.
        value: `[B, H_kv, M, N, V]`.
        pair: Queries and keys of the normaliser where they differ.
        mixing: The stored weights.
        first: The first block of each block's document, `[B, M]`; `None` for one document.
        past: Mixed summaries of tokens before these, `[B, H or H_kv, M, K, V + 1]`.

    Returns:
        `[B, H, M, N, V]` and `[B, H, M, N, 1]`, and the blocks' summaries `[B, H_kv, M, K, V + 1]`.
    """
    ones = value.new_ones(*value.shape[:-1], 1)
    if pair is None:
        output, summaries = prefix_and_own(query, key, torch.cat([value, ones], dim=-1), mixing, first, past)
        return *output.split((value.shape[-1], 1), dim=-1), summaries
    past, past_sums = (None, None) if past is None else (past[..., :-1], past[..., -1:])
    output, products = prefix_and_own(query, key, value, mixing, first, past)
    product, sums = prefix_and_own(*pair, ones, mixing, first, past_sums)
    return output, product, torch.cat([products, sums], dim=-1)


@dataclass(frozen=True)
class TwoSidedMixing:
    """Mixing of a sequence's blocks, more than a matrix serves well, by attention that looks both ways.

    Attributes:
        stored: The stored weights.
        num_blocks: n.
        first: The first block of each block's document, `[B, n]`; `None` for one document.
        last: Its last block, likewise.
    """

    stored: StoredMixing
    num_blocks: int
    first: Tensor | None = None
    last: Tensor | None = None

    def mix(self, summary: Tensor, num_heads: int) -> Tensor:
        """Return Σ_b m_ib S_b, `[B, H, n, K, V]` from `[B, H_kv, n, K, V]`."""
        return self.stored.mix_both_ways(summary, num_heads, self.first, self.last)

    def matrix(self) -> Tensor:
        """Return the weights of all pairs of blocks, `[S, n, n]` or, with documents, `[B, S, n, n]`."""
        return self.stored.matrix(self.num_blocks, self.first)


def extend_mixing(mixing: Tensor, num_blocks: int, *, causal: bool, mixing_decay: Tensor | None = None) -> Tensor:
    """Return the weights of `num_blocks` blocks: the leading ones, or all and then by distance.

    A pair past the end of the M × M weights takes the weight of the pair at the same distance: looking back, of the
    last row, m_{M-1, M-1-d}; looking ahead, of the first one, m_{0, d}. Farther than these rows reach, it takes their
    farthest weight, times the decay for every block more. Uniform weights so stay uniform without a decay.

    Args:
        mixing: `[M, M]` or `[H, M, M]`; for causal attention entries above the diagonal are ignored.
        num_blocks: Number of blocks wanted.
        causal: Zero above the diagonal.
        mixing_decay: See [`mhla_hf.ops.mhla_attention`].

    Returns:
        `[num_blocks, num_blocks]` or `[H, num_blocks, num_blocks]`.

    Raises:
        ValueError: If the weights are not square.
    """
    if mixing.dim() not in (2, 3) or mixing.shape[-1] != mixing.shape[-2]:
        raise ValueError(f"mixing must be [blocks, blocks] or [heads, blocks, blocks], got {tuple(mixing.shape)}.")
    weights = StoredMixing.of(mixing, mixing_decay).matrix(num_blocks)
    weights = weights.squeeze(0) if mixing.dim() == 2 and len(weights) == 1 else weights
    return weights.tril() if causal else weights


def sequence_mixing(stored: StoredMixing, layout: BlockLayout | SequenceLayout) -> Tensor | TwoSidedMixing:
    """Return how attention that looks both ways mixes the blocks of a sequence: a matrix while they are few."""
    count, first = layout.num_blocks, first_blocks(layout)
    last = None if first is None else torch.searchsorted(first, first, right=True) - 1
    if stored.are_few(count):
        return stored.matrix(count, first)
    return TwoSidedMixing(stored, count, first, last)


def _scan(terms: Tensor, decays: Tensor) -> Tensor:
    """x_k = terms_k + decays_k x_{k-1}, `[B, H_m, c, D]`: every step adds as many more terms as there are so far."""
    for level in range(max(0, terms.shape[2] - 1).bit_length()):
        shift = (0, 0, 1 << level, -(1 << level))
        terms, decays = torch.addcmul(terms, decays, F.pad(terms, shift)), decays * F.pad(decays, shift)
    return terms


def _chunk_groups(summary: Tensor, carry: Tensor) -> Tensor:
    """E before each chunk, and its blocks, `[1 + B · H_m · c, 1 + C, D]`, after a group of zeros."""
    (batch, heads, blocks, columns), (count, chunk) = summary.shape, (carry.shape[2], carry.shape[3] - 1)
    groups = summary.new_empty(batch * heads * count + 1, chunk + 1, columns)
    groups[0] = 0
    lines = groups[1:].view(batch, heads, count, chunk + 1, columns)
    full, rest = blocks // chunk, blocks % chunk
    lines[:, :, :full, 1:] = summary[:, :, : full * chunk].unflatten(2, (full, chunk))
    if rest:
        lines[:, :, full, 1 : rest + 1] = summary[:, :, full * chunk :]
        lines[:, :, full, rest + 1 :] = 0
    sums = (carry[:, :, :-1, None, 1:] @ lines[:, :, :-1, 1:]).squeeze(3)
    lines[:, :, 0, 0] = 0
    lines[:, :, 1:, 0] = _scan(sums, carry[:, :, :-1, :1])
    return groups


def _window_matrices(window: Tensor, batch: int, heads: int) -> tuple[Tensor, Tensor]:
    """Weights of the groups of the chunk before and of the own one, `[B · H_m · c, C, 1 + C]`: none for the own E."""
    _, _, count, chunk, _ = window.shape
    matrices = window.new_zeros(batch, heads, count, chunk, 2 * chunk + 2)
    matrices[..., : chunk + 1] = window[..., : chunk + 1]
    matrices[..., chunk + 2 :] = window[..., chunk + 1 :]
    before, own = matrices.flatten(0, 2).split(chunk + 1, dim=-1)
    return before, own


def run_mix_chunks(summary: Tensor, window: Tensor, carry: Tensor) -> Tensor:
    """Sums over earlier blocks, `[B, H_m, n, D]`, of summaries of that shape; see [`StoredMixing.earlier_weights`]."""
    if not carry.numel():
        return window.squeeze(2) @ summary
    (batch, heads, blocks, columns), (count, chunk) = summary.shape, (carry.shape[2], carry.shape[3] - 1)
    before, own = _window_matrices(window, batch, heads)
    groups = _chunk_groups(summary, carry)
    products = torch.bmm(before, groups[:-1])
    # Before the first chunk lies another line, whose NaN a zero weight would not stop.
    products.view(batch, heads, count, chunk, columns)[:, :, 0] = 0
    products = products.baddbmm_(own, groups[1:])
    return products.view(batch, heads, count * chunk, columns)[:, :, :blocks].contiguous()


def run_mix_chunks_backward(
    gradient: Tensor, summary: Tensor, window: Tensor, carry: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of summaries, `window` and `carry`: the same band the other way round."""
    if not carry.numel():
        of_window = (gradient @ summary.transpose(-1, -2)).unsqueeze(2).sum_to_size(window.shape)
        return window.squeeze(2).transpose(-1, -2) @ gradient, of_window, torch.empty_like(carry)
    (batch, heads, blocks, columns), (count, chunk) = summary.shape, (carry.shape[2], carry.shape[3] - 1)
    rows = F.pad(gradient, (0, 0, 0, count * chunk - blocks)).reshape(batch * heads * count, chunk, columns)
    groups, shape = _chunk_groups(summary, carry), (batch, heads, count)
    of_before, of_own = (torch.bmm(rows, of.transpose(1, 2)).unflatten(0, shape) for of in (groups[:-1], groups[1:]))
    of_before[:, :, 0] = 0
    of_window = torch.cat([of_before, of_own[..., 1:]], dim=-1).sum_to_size(window.shape)
    matrices = _window_matrices(window, batch, heads)
    before, total = (torch.bmm(weights.transpose(1, 2), rows).unflatten(0, shape) for weights in matrices)
    total[:, :, :-1] += before[:, :, 1:]
    later = _scan(total[:, :, 1:, 0].flip(2), carry[:, :, 1:, :1].flip(2)).flip(2).unsqueeze(3)
    lines = groups[1:].view(batch, heads, count, chunk + 1, columns)
    of_carry = (lines[:, :, :-1] @ later.transpose(-1, -2)).squeeze(-1)
    of_carry = F.pad(of_carry, (0, 0, 0, 1)).sum_to_size(carry.shape)
    total[:, :, :-1, 1:] += carry[:, :, :-1, 1:, None] * later
    of_summary = total[..., 1:, :].reshape(batch, heads, count * chunk, columns)[:, :, :blocks].contiguous()
    return of_summary, of_window, of_carry


mix_chunks = torch.library.custom_op("mhla_hf::mix_chunks", run_mix_chunks, mutates_args=())
mix_chunks_backward = torch.library.custom_op("mhla_hf::mix_chunks_backward", run_mix_chunks_backward, mutates_args=())


@mix_chunks.register_fake
def _(summary, window, carry):
    return torch.empty_like(summary, memory_format=torch.contiguous_format)


@mix_chunks_backward.register_fake
def _(gradient, summary, window, carry):
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (summary, window, carry))


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return mix_chunks_backward(gradient, *ctx.saved_tensors)


mix_chunks.register_autograd(_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))


@register_flop_formula(torch.ops.mhla_hf.mix_chunks)
def mixing_flops(summary, window, carry, *args, **kwargs) -> int:
    """2 B H_m n D for each of the blocks of a window, and of E; arguments are shapes."""
    return 2 * math.prod(summary) * (window[-1] + (len(carry) > 1))


@register_flop_formula(torch.ops.mhla_hf.mix_chunks_backward)
def _backward_flops(gradient, summary, window, carry, *args, **kwargs) -> int:
    return 2 * mixing_flops(summary, window, carry)
