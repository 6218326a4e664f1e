# SPDX-License-Identifier: Apache-2.0
"""`BlockLayout`: which block every token of a 1-D, 2-D or 3-D grid belongs to, and moving tokens in and out of blocks.

Tensors that follow from sizes alone are made once and remembered, see [`cached`].

Shape letters: B batch, T tokens, M blocks, N tokens of the largest block; `...` any further axes.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from numbers import Integral
from threading import Lock
from typing import Any, TypeVar

import torch
import torch.nn.functional as F

from ..utils.messages import shorten_value
from . import MAX_TOKENS


MAX_TILES = 2**22
"""Blocks on an axis: a text of four million tokens in blocks of one."""
MAX_TABLES = 256

Made = TypeVar("Made")

_tables: OrderedDict[tuple[Any, ...], Any] = OrderedDict()
# Tables that a CUDA graph reads, which are kept for as long as the process runs: the graph knows their addresses only.
_captured: dict[tuple[Any, ...], Any] = {}
_lock = Lock()


def cached(function: Callable[..., Made], *arguments: Any) -> Made:
    """`function(*arguments)`, remembered: tables are made once for their sizes and device, not once for each layer.

    The function returns a tensor, a tuple of tensors, or an object without tensors. torch.compile traces the function
    itself. A CUDA graph that is being captured uses what is remembered; what is not, it makes for itself, as its
    memory is the graph's.
    """
    if torch.compiler.is_compiling():
        return function(*arguments)
    key = function, *arguments
    capturing = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
    with _lock:
        found = _captured.get(key)
        if found is None and (found := _tables.get(key)) is not None:
            if capturing:
                _captured[key] = _tables.pop(key)
            else:
                _tables.move_to_end(key)
    if found is not None:
        return found
    if capturing:
        return function(*arguments)
    # Tensors made in inference mode could not take part in training later.
    with torch.inference_mode(False):
        made = function(*arguments)
    for tensor in made if isinstance(made, tuple) else (made,):
        if isinstance(tensor, torch.Tensor) and type(tensor) is not torch.Tensor:
            # Such as those of FakeTensorMode, which have no values for whoever asks for them next.
            return made
        if isinstance(tensor, torch.Tensor) and tensor.is_cuda:
            # Whoever asks for it next may do so on another stream.
            torch.cuda.current_stream(tensor.device).synchronize()
    with _lock:
        made = _tables.setdefault(key, made)
        if len(_tables) > MAX_TABLES:
            _tables.popitem(last=False)
    return made


def is_remembered(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is one of those that [`cached`] remembers, which nobody changes."""
    with _lock:
        tables = [*_tables.values(), *_captured.values()]
    return any(tensor is part for made in tables for part in (made if isinstance(made, tuple) else (made,)))


def indices(count: int, device: torch.device) -> torch.Tensor:
    """The numbers from 0 to `count` - 1, LongTensor, remembered."""
    return cached(_indices, count, device)


def _indices(count: int, device: torch.device) -> torch.Tensor:
    return torch.arange(count, device=device)


class BlockLayout:
    """A token grid cut into blocks. Every token is in exactly one block, ragged sizes included.

    Args:
        grid: Number of tokens along each axis (one to three axes), for example `(frames, height, width)`. Tokens are
            numbered in row-major order.
        blocks: Number of blocks along each axis. Tiles are balanced: their lengths differ by at most one token.
        block_size: Number of tokens of a block along each axis. Tiles are full except the last one of an axis.
        num_prefix_tokens: Tokens before those of the grid (class or register tokens of vision models). They have a
            block of their own, block 0; the blocks of the grid follow.
        block_order: Whether the tokens come block by block, row-major inside a block, as
            [`BlockLayout.to_block_order`] puts them, and not in row-major order of the grid. Where blocks are even,
            they are views then.

    Attributes:
        grid: The token grid, a tuple of ints.
        num_prefix_tokens: Tokens before it.
        block_order: Whether the tokens come block by block.
        blocks: Number of blocks along each axis, a tuple of ints.
        tile_lengths: For each axis, the lengths in tokens of its tiles.
        num_tokens: Number of tokens T, those before the grid included.
        num_prefix_blocks: 1 where there are tokens before the grid, else 0.
        num_blocks: Number of blocks M, the one before the grid included.
        max_block_tokens: Number of tokens N of the largest block.
        is_uniform: Whether all blocks have the same shape.

    Raises:
        ValueError: If not exactly one of `blocks` and `block_size` is given, or if an entry does not fit the grid.

    Examples:
        >>> from mhla_hf import BlockLayout
        >>> layout = BlockLayout(grid=(21, 30, 52), blocks=(3, 5, 10))  # 52 columns in 10 blocks of 5 or 6
        >>> layout.num_tokens, layout.num_blocks, layout.max_block_tokens
        (32760, 150, 252)
        >>> BlockLayout(grid=(7,), blocks=(3,)).block_of_token
        tensor([0, 0, 1, 1, 2, 2, 2])
    """

    __slots__ = (
        "grid", "blocks", "num_prefix_tokens", "block_order", "tile_lengths", "num_tokens", "num_prefix_blocks",
        "num_blocks", "max_block_tokens", "is_uniform", "_hash", "_sizes",
    )  # fmt: skip

    def __init__(
        self,
        grid: Sequence[int],
        blocks: Sequence[int] | None = None,
        block_size: Sequence[int] | None = None,
        num_prefix_tokens: int = 0,
        block_order: bool = False,
    ) -> None:
        check_count("num_prefix_tokens", num_prefix_tokens, minimum=0)
        self.num_prefix_tokens = num_prefix_tokens
        self.block_order = block_order
        self.grid = positive_axes("grid", grid)
        if (blocks is None) == (block_size is None):
            raise ValueError("BlockLayout takes exactly one of blocks and block_size.")
        if blocks is not None:
            counts = positive_axes("blocks", blocks, len(self.grid))
            if any(count > length for count, length in zip(counts, self.grid)):
                raise ValueError(
                    f"blocks={shorten_value(counts)} has more blocks than grid={self.grid} has tokens on an axis."
                )
            _check_tiles(f"blocks={counts}", counts)
            self.tile_lengths = tuple(_balanced_tiles(n, count) for n, count in zip(self.grid, counts))
            self._sizes: tuple[int, ...] | None = None
        else:
            sizes = positive_axes("block_size", block_size, len(self.grid))
            _check_tiles(f"block_size={sizes}", [n // size for n, size in zip(self.grid, sizes)])
            self.tile_lengths = tuple(_full_tiles(n, size) for n, size in zip(self.grid, sizes))
            self._sizes = sizes
        self.blocks = tuple(len(lengths) for lengths in self.tile_lengths)
        self._hash: int | None = None
        self.num_tokens = num_prefix_tokens + math.prod(self.grid)
        self.num_prefix_blocks = int(num_prefix_tokens > 0)
        self.num_blocks = self.num_prefix_blocks + math.prod(self.blocks)
        # Lists, not generators: torch.compile traces through here.
        longest = [max(lengths) for lengths in self.tile_lengths]
        self.max_block_tokens = max(num_prefix_tokens, math.prod(longest))
        self.is_uniform = not num_prefix_tokens and [min(lengths) for lengths in self.tile_lengths] == longest

    def _key(self) -> tuple[Any, ...]:
        return self.grid, self.tile_lengths, self.num_prefix_tokens, self.block_order

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BlockLayout) and self._key() == other._key()

    def __hash__(self) -> int:
        # Once: a long text has many tiles, and every call asks for it.
        if self._hash is None:
            self._hash = hash(self._key())
        return self._hash

    def __repr__(self) -> str:
        prefix = f", num_prefix_tokens={self.num_prefix_tokens}" if self.num_prefix_tokens else ""
        order = ", block_order=True" if self.block_order else ""
        return f"BlockLayout(grid={self.grid}, blocks={self.blocks}, is_uniform={self.is_uniform}{prefix}{order})"

    @property
    def block_of_token(self) -> torch.Tensor:
        """The block of each token, LongTensor `[T]`; blocks are numbered in row-major order of the block grid."""
        return _token_slots(self, torch.device("cpu")) // self.max_block_tokens

    @property
    def block_tokens(self) -> torch.Tensor:
        """Number of tokens N_b of each block, LongTensor `[M]`."""
        return _block_ends(self, torch.device("cpu"))[0]

    @property
    def centers(self) -> torch.Tensor:
        """Centres of the grid's blocks, in blocks, float32 `[number of them, axes]`; neighbours are 1.0 apart."""
        return block_centers(self.blocks)

    @property
    def position_in_block(self) -> torch.Tensor:
        """Row-major position of each token inside its block, LongTensor `[T]`, from 0."""
        return _token_slots(self, torch.device("cpu")) % self.max_block_tokens

    def to_blocks(self, tokens: torch.Tensor) -> torch.Tensor:
        """Groups tokens by block.

        Args:
            tokens: `[B, T, ...]`.

        Returns:
            `[B, M, N, ...]`, zero where a block has fewer than N tokens. Tokens of a block are in row-major order.

        Raises:
            ValueError: If axis 1 does not have T entries.
        """
        self.check_length(tokens.shape[1], "tokens")
        if self.is_uniform:
            grouped = self._by_block(tokens, 1)
            return grouped.reshape(tokens.shape[0], self.num_blocks, self.max_block_tokens, *tokens.shape[2:])
        # Row T is a row of zeros for the empty slots. Zeros are gathered, not multiplied in, so that a NaN or Inf
        # elsewhere stays where it is.
        padded = F.pad(tokens, [0, 0] * (tokens.dim() - 2) + [0, 1])
        index = cached(_slot_tokens, self, tokens.device)
        return padded.index_select(1, index).unflatten(1, (self.num_blocks, self.max_block_tokens))

    def to_head_blocks(self, tokens: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Groups tokens by head and block and converts them, in one copy; in block order even blocks are a view.

        Args:
            tokens: `[B, T, H, D]`.
            dtype: Type of the result; the dtype of `tokens` if not given.

        Returns:
            `[B, H, M, N, D]`, zero where a block has fewer than N tokens. Copies have dense blocks, as matrix products
            want them.

        Raises:
            ValueError: If axis 1 does not have T entries.
        """
        self.check_length(tokens.shape[1], "tokens")
        by_head = tokens.transpose(1, 2)
        dtype = tokens.dtype if dtype is None else dtype
        if self.is_uniform:
            grouped = self._by_block(by_head, 2)
            if self.block_order and dtype == tokens.dtype:
                return grouped
            if dtype != tokens.dtype:
                grouped = grouped.to(dtype, memory_format=torch.contiguous_format)
            return grouped.reshape(*by_head.shape[:2], self.num_blocks, self.max_block_tokens, by_head.shape[3])
        # Tokens are copied to their slots, so that the gradient is a selection of slots, not a sum over them.
        shape = *by_head.shape[:2], self.num_blocks * self.max_block_tokens, by_head.shape[3]
        grouped = by_head.new_zeros(shape, dtype=dtype)
        grouped.index_copy_(2, cached(_token_slots, self, tokens.device), by_head.to(dtype))
        return grouped.unflatten(2, (self.num_blocks, self.max_block_tokens))

    def _by_block(self, tokens: torch.Tensor, axis: int) -> torch.Tensor:
        """A view with the token axis split by blocks and positions: `[..., *blocks, *positions, ...]`."""
        if self.block_order:
            # Not unflatten, which goes through more of Python.
            size = self.num_blocks, self.max_block_tokens
            return tokens.view(*tokens.shape[:axis], *size, *tokens.shape[axis + 1 :])
        axes = len(self.grid)
        split = [entry for count, lengths in zip(self.blocks, self.tile_lengths) for entry in (count, lengths[0])]
        order = [*range(axis), *range(axis, axis + 2 * axes, 2), *range(axis + 1, axis + 2 * axes, 2)]
        order += range(axis + 2 * axes, tokens.dim() - 1 + 2 * axes)
        return tokens.unflatten(axis, split).permute(order)

    def from_blocks(self, grouped: torch.Tensor) -> torch.Tensor:
        """Undoes [`BlockLayout.to_blocks`].

        Args:
            grouped: `[B, M, N, ...]`.

        Returns:
            `[B, T, ...]` in the layout's order of tokens; empty slots are dropped.
        """
        if self.is_uniform and self.block_order:
            return grouped.flatten(1, 2)
        if self.is_uniform:
            axes, tail = len(self.grid), grouped.shape[3:]
            lengths = [tiles[0] for tiles in self.tile_lengths]
            order = [0, *(entry for axis in range(axes) for entry in (1 + axis, 1 + axes + axis))]
            order += range(2 * axes + 1, 2 * axes + 1 + len(tail))
            spread = grouped.reshape(grouped.shape[0], *self.blocks, *lengths, *tail).permute(order)
            return spread.reshape(grouped.shape[0], self.num_tokens, *tail)
        return grouped.flatten(1, 2).index_select(1, cached(_token_slots, self, grouped.device))

    def in_rows(self) -> BlockLayout:
        """The same blocks of tokens that come row by row."""
        if not self.block_order:
            return self
        blocks = self.blocks if self._sizes is None else None
        return cached(BlockLayout, self.grid, blocks, self._sizes, self.num_prefix_tokens)

    def to_block_order(self, tokens: torch.Tensor, axis: int = 1) -> torch.Tensor:
        """Puts tokens that are in row-major order block by block, row-major inside a block.

        Args:
            tokens: Has T tokens on axis `axis`.
            axis: The axis of tokens.
        """
        self.check_length(tokens.shape[axis], "tokens")
        return tokens.index_select(axis, cached(_tokens_by_block, self, tokens.device)[0])

    def from_block_order(self, tokens: torch.Tensor, axis: int = 1) -> torch.Tensor:
        """Undoes [`BlockLayout.to_block_order`].

        Args:
            tokens: Has T tokens on axis `axis`.
            axis: The axis of tokens.
        """
        self.check_length(tokens.shape[axis], "tokens")
        return tokens.index_select(axis, cached(_tokens_by_block, self, tokens.device)[1])

    def token_table(self, device: torch.device) -> torch.Tensor:
        """Token of each slot of each block, int32 `[M, N]`; T (one past the last token) where a slot is empty."""
        return cached(_token_table, self, device)

    def check_length(self, length: int, name: str) -> None:
        """Raises `ValueError` unless `length` is the number of tokens of the grid; `name` names the tensor."""
        if length != self.num_tokens:
            raise ValueError(f"{name} has {length} tokens, but the layout's grid {self.grid} has {self.num_tokens}.")


def block_centers(blocks: Sequence[int]) -> torch.Tensor:
    """Returns the centres of a grid of blocks, in blocks: float32 `[M, number of axes]`, first centre at 0.5."""
    axes = [torch.arange(count, dtype=torch.float32) + 0.5 for count in blocks]
    return torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1).reshape(-1, len(axes))


def choose_blocks(grid: Sequence[int]) -> tuple[int, ...]:
    """Picks a number of blocks per axis with M² ≤ T, so that mixing costs no more than the rest.

    Of all such numbers, those with the smallest Σ_a (n_a / m_a)² · (M N / T)², for n_a tokens and m_a blocks on an
    axis: the first factor is the mean squared diagonal of a block, which is small for many blocks as long as they are
    wide; the second one counts the empty slots of ragged blocks, which take time in every product. So numbers that
    divide the grid come first, unless they make long and narrow blocks.

    Args:
        grid: Number of tokens along each axis.

    Returns:
        Number of blocks along each axis.

    Examples:
        >>> from mhla_hf.layouts.blocks import choose_blocks
        >>> choose_blocks((32, 32)), choose_blocks((21, 30, 52)), choose_blocks((37, 37))
        ((8, 4), (3, 6, 9), (7, 5))
    """
    grid = positive_axes("grid", grid)
    tokens = math.prod(grid)
    if tokens > MAX_TOKENS:
        raise ValueError(f"grid={shorten_value(grid)} has more than {MAX_TOKENS} tokens.")
    choices: list[tuple[int, ...]] = [()]
    for length in grid:
        choices = [
            (*counts, count)
            for counts in choices
            for count in range(1, min(length, math.isqrt(tokens) // math.prod(counts)) + 1)
        ]

    def cost(counts: tuple[int, ...]) -> float:
        slots = math.prod(count * -(-length // count) for length, count in zip(grid, counts))
        return sum((length / count) ** 2 for length, count in zip(grid, counts)) * slots**2

    # Among equals the first axes get more.
    return min(reversed(choices), key=cost)


def is_integer(value: Any) -> bool:
    """Returns whether a value is an integer (of numpy, or a symbol of an exported model, too) and not a bool."""
    return not isinstance(value, bool) and isinstance(value, (int, torch.SymInt, Integral))


def is_open(size: int) -> bool:
    """Return whether torch.export leaves a size open: code may compute with it, but may not branch on it."""
    return isinstance(size, torch.SymInt)


def check_count(name: str, value: Any, minimum: int = 1) -> None:
    """Raises `ValueError` unless a value is an integer of at least `minimum`."""
    if not is_integer(value) or not minimum <= value < 2**62:
        raise ValueError(f"{name}={shorten_value(value)} must be an integer of at least {minimum}.")


def positive_axes(name: str, value: Any, length: int | None = None) -> tuple[int, ...]:
    """Returns one positive integer for each axis.

    Args:
        name: Name of the argument, for the error.
        value: A sequence of them.
        length: Required number of axes; `None` for one to three.

    Raises:
        ValueError: If it is anything else.
    """
    axes = tuple(value) if isinstance(value, Sequence) and not isinstance(value, (str, bytes)) else None
    if not axes or len(axes) > 3 or not all(is_integer(entry) and 1 <= entry < 2**62 for entry in axes):
        raise ValueError(f"{name}={shorten_value(value)} must be one to three positive integers, one for each axis.")
    if length is not None and len(axes) != length:
        raise ValueError(f"{name}={shorten_value(axes)} has {len(axes)} axes, but the grid has {length}.")
    return axes


def _check_tiles(name: str, counts: Sequence[int]) -> None:
    # One number for each tile is kept.
    if max(counts) > MAX_TILES:
        raise ValueError(f"{name} makes {max(counts)} tiles on an axis, which is more than {MAX_TILES}.")


def _balanced_tiles(length: int, count: int) -> tuple[int, ...]:
    edges = [index * length // count for index in range(count + 1)]
    return tuple(stop - start for start, stop in zip(edges, edges[1:]))


def _full_tiles(length: int, size: int) -> tuple[int, ...]:
    # Not divmod, which torch.compile cannot trace.
    full, rest = length // size, length % size
    return (size,) * full + ((rest,) if rest else ())


def _edges(layout: BlockLayout, axis: int, device: torch.device) -> torch.Tensor:
    """First positions of the tiles of an axis, and its length, LongTensor `[tiles + 1]`."""
    index, length = torch.arange(layout.blocks[axis] + 1, device=device), layout.grid[axis]
    if layout._sizes is None:
        return index * length // layout.blocks[axis]
    return (index * layout._sizes[axis]).clamp(max=length)


def tiles_of(layout: BlockLayout, axis: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """For each position on an axis: its tile, its offset inside the tile, and the tile's length. LongTensors."""
    length, edges = layout.grid[axis], _edges(layout, axis, device)
    position = torch.arange(length, device=device)
    if layout._sizes is None:
        tile = ((position + 1) * layout.blocks[axis] - 1) // length
    else:
        tile = position // layout._sizes[axis]
    return tile, position - edges[tile], edges[tile + 1] - edges[tile]


def _row_major(per_axis: Sequence[torch.Tensor], counts: Sequence[Any]) -> torch.Tensor:
    """Row-major index from one index per axis: LongTensor `[product of the axes' lengths]`.

    `counts` holds the size of each axis, an int or one for each position.
    """
    combined = per_axis[0].new_zeros(1)
    for index, count in zip(per_axis, counts):
        combined = (combined[:, None] * count + index).reshape(-1)
    return combined


# Index tables are computed on the device, element by element: torch.compile, which remembers none, makes a small
# kernel or two of each, and has nothing to copy from the CPU in every call.


def _token_slots(layout: BlockLayout, device: torch.device) -> torch.Tensor:
    """Slot b·N + w of each token, LongTensor `[T]`: block b, row-major position w inside it.

    Positions count in the block's own shape: a ragged block fills its first N_b slots.
    """
    if layout.block_order:
        counts, ends = _block_ends(layout, device)
        token = torch.arange(layout.num_tokens, device=device)
        block = torch.searchsorted(ends, token, right=True)
        return token + block * layout.max_block_tokens - (ends - counts)[block]
    return _row_major_slots(layout, device)


def _row_major_slots(layout: BlockLayout, device: torch.device) -> torch.Tensor:
    """The same of tokens in row-major order of the grid."""
    tiles, offsets, own_lengths = zip(*[tiles_of(layout, axis, device) for axis in range(len(layout.grid))])
    position = _row_major(offsets, own_lengths)
    block = _row_major(tiles, layout.blocks) + layout.num_prefix_blocks
    prefix = torch.arange(layout.num_prefix_tokens, device=device)
    return torch.cat([prefix, block * layout.max_block_tokens + position])


def _block_ends(layout: BlockLayout, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Number of tokens of each block, and of all blocks up to it, LongTensors `[M]`."""
    counts = torch.ones(1, dtype=torch.long, device=device)
    for axis in range(len(layout.grid)):
        counts = (counts[:, None] * _edges(layout, axis, device).diff()).reshape(-1)
    prefix = counts.new_full((layout.num_prefix_blocks,), layout.num_prefix_tokens)
    counts = torch.cat([prefix, counts])
    return counts, counts.cumsum(0)


def _tokens_by_block(layout: BlockLayout, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Token, counted row by row, of each place in block order, and the place of each token. LongTensors `[T]`."""
    tokens = _row_major_slots(layout, device).argsort()
    return tokens, torch.empty_like(tokens).index_copy_(0, tokens, torch.arange(len(tokens), device=device))


def _slot_tokens(layout: BlockLayout, device: torch.device) -> torch.Tensor:
    """Token of each slot, LongTensor `[M·N]`; T (one past the last token) where a slot is empty."""
    slot = torch.arange(layout.max_block_tokens, device=device)
    if layout.block_order:
        counts, ends = (x[:, None] for x in _block_ends(layout, device))
        return torch.where(slot < counts, ends - counts + slot, layout.num_tokens).flatten()
    block = torch.arange(math.prod(layout.blocks), device=device)[:, None]
    # What is left of block and slot once each axis, from the last one on, has taken its part.
    rest, token, stride = slot, torch.zeros_like(slot), 1
    for axis in reversed(range(len(layout.grid))):
        edges, tile = _edges(layout, axis, device), block % layout.blocks[axis]
        lengths = edges[tile + 1] - edges[tile]
        token = token + (edges[tile] + rest % lengths) * stride
        block, rest, stride = block // layout.blocks[axis], rest // lengths, stride * layout.grid[axis]
    token = torch.where(rest == 0, token, stride) + layout.num_prefix_tokens
    if layout.num_prefix_tokens:
        prefix = torch.where(slot < layout.num_prefix_tokens, slot, layout.num_tokens)
        token = torch.cat([prefix[None], token])
    return token.flatten()


def _token_table(layout: BlockLayout, device: torch.device) -> torch.Tensor:
    return _slot_tokens(layout, device).to(torch.int32).unflatten(0, (layout.num_blocks, layout.max_block_tokens))
