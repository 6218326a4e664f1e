# SPDX-License-Identifier: Apache-2.0
"""Launches of kernels: plans, tile sizes, arguments that several kernels share, and the precision of products.

Triton binds, classifies and hashes every argument of every launch, which takes 15 to 30 µs. [`launch`] does it once:
a *plan* is the compiled kernel together with the arguments that need no look, and later launches start it directly.
What a plan may hold:

- Its key has everything that a compilation can depend on: the kernel and the device, the type and the 16-byte
  alignment of every tensor, its strides where the kernel takes them, which tensors are None, and the values of all
  other arguments.
- Plans hold no tensor and no address. Tensors come with each launch, and so do counts that change while all else
  stays, such as the first line of a group: Triton must not specialise a kernel for those (`COUNTS`).
- Rules that a host function derives from shapes and types are cached by themselves (`functools.cache`), from plain
  values, never from tensors. What a user may change between two calls is an argument of such a function, never looked
  up in it: whether TF32 is allowed, for one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch

from ..backends import tf32_is_allowed


# Programs below which the slots of a block are shared out: a few for each multiprocessor of a large GPU.
FEW_PROGRAMS = 512
# Elements of a tile that a program accumulates: 128 x 128 in float32 is half of a multiprocessor's registers.
MAX_TILE = 128 * 128


class Rows(NamedTuple):
    """A token tensor `[B, T, H, D]` as kernels take it; they read its strides by `device_functions.row_strides`.

    Attributes:
        data: The tensor; its last axis is dense.
        stride_batch: Stride of a batch entry.
        stride_token: Stride of a token.
        stride_head: Stride of a head.
        aligned: 1 where every row of every head starts at a multiple of 16 bytes, so that loads may be that wide.
            Triton finds this out only for strides that are multiples of 16 elements. Then each stride has half of 16
            bytes added, which kernels round off: the compiler sees a multiple of 16 bytes, and recompiles nothing
            for a stride that is a multiple of more.
    """

    data: torch.Tensor
    stride_batch: int
    stride_token: int
    stride_head: int
    aligned: int | None


def as_rows(tokens: torch.Tensor | None) -> Rows | None:
    """Rows of `[B, T, H, D]`, copied only where the last axis is not dense; None stays None."""
    if tokens is None:
        return None
    batch, token, head, channel = tokens.stride()
    if channel != 1 and tokens.shape[3] != 1:
        tokens = tokens.contiguous()
        batch, token, head, _ = tokens.stride()
    unit = 16 // tokens.element_size()
    if (batch | token | head) % unit or tokens.data_ptr() % 16:
        return Rows(tokens, batch, token, head, None)
    half = unit // 2
    return Rows(tokens, batch + half, token + half, head + half, 1)


class Setup:
    """A kernel, and all of its arguments that are no tensors and do not change from launch to launch.

    Functions that derive these from shapes and types alone keep their setups, by `functools.lru_cache`.

    Args:
        kernel: Made by `triton.jit`. Its parameters are tensors first, then counts that change from launch to launch,
            which have to be in its `do_not_specialize` and less than 2³¹, then everything else.
        **keywords: All other arguments, hashable, and Triton's options such as `num_warps`. No tensors.
    """

    __slots__ = ("kernel", "keywords")

    def __init__(self, kernel: Any, **keywords: Any) -> None:
        self.kernel, self.keywords = kernel, keywords

    def prepare(self, *tensors: torch.Tensor | tuple[Any, ...] | None) -> Launch:
        """The launch for some tensors; see [`prepare`]."""
        return Launch(self, tensors)


# Setups that functions keep, each.
MAX_SETUPS = 512
# Plans kept, over all kernels. Beyond that, all are rebuilt: sizes have been many, and most will not come back.
MAX_PLANS = 4096
_plans: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}
_setups: dict[tuple[Any, ...], Setup] = {}


def _metadata(argument: Any) -> Any:
    """Everything of a tensor, or of a tuple with tensors, that a compilation can depend on."""
    if argument is None:
        return None
    if isinstance(argument, Rows):
        data, *strides = argument
        return data.dtype, argument.aligned or data.data_ptr() % 16 == 0, *strides
    if isinstance(argument, torch.Tensor):
        return argument.dtype, argument.data_ptr() % 16 == 0
    return tuple(map(_metadata, argument)) if isinstance(argument, tuple) else argument


class Launch:
    """A kernel with all its arguments but the grid and the counts that change from launch to launch; see [`prepare`].

    Calling it launches the kernel: with the grid, and with the counts in the order of the kernel's parameters.
    """

    __slots__ = ("device", "key", "plan", "setup", "tensors")

    def __init__(self, setup: Setup, tensors: tuple[Any, ...]) -> None:
        first = tensors[0]
        self.device = (first if isinstance(first, torch.Tensor) else first[0]).get_device()
        self.setup, self.tensors = setup, tensors
        self.key = setup, self.device, *map(_metadata, tensors)
        self.plan = _plans.get(self.key)

    def __call__(self, grid: int | tuple[int, int, int], *counts: int) -> None:
        grid = (grid, 1, 1) if isinstance(grid, int) else grid
        if _listener.launches is not None:
            _listener.launches.append((self, grid, counts))
        if self.device >= 0 and self.device != torch.cuda.current_device():
            with torch.cuda.device(self.device):
                self._start(grid, counts)
        elif self.plan is not None:
            self.plan[0][grid](*self.tensors, *counts, *self.plan[1])
        else:
            self._start(grid, counts)

    def _start(self, grid: tuple[int, int, int], counts: tuple[int, ...]) -> None:
        """The first launch: by Triton, which returns what it has compiled. Triton's interpreter returns nothing."""
        kernel, keywords = self.setup.kernel, self.setup.keywords
        compiled = kernel[grid](*self.tensors, *counts, **keywords)
        # Triton for AMD looks at the sizes of tensors, too.
        if compiled is None or torch.version.hip is not None:
            return
        names = kernel.arg_names[len(self.tensors) + len(counts) :]
        self.plan = compiled, tuple(keywords[name] for name in names)
        if len(_plans) >= MAX_PLANS:
            _plans.clear()
            _setups.clear()
        _plans[self.key] = self.plan


# A launch, its grid and its counts.
Launched = tuple[Launch, tuple[int, int, int], tuple[int, ...]]


class _Listener(threading.local):
    launches: list[Launched] | None = None


_listener = _Listener()


@contextmanager
def listen() -> Iterator[list[Launched]]:
    """Collects the launches of this thread, with their grids and counts."""
    before, _listener.launches = _listener.launches, []
    try:
        yield _listener.launches
    finally:
        _listener.launches = before


def prepare(kernel: Any, *tensors: torch.Tensor | tuple[Any, ...] | None, **keywords: Any) -> Launch:
    """A kernel and its arguments, ready to be launched several times with other grids and counts.

    Args:
        kernel: See [`Setup`].
        *tensors: Tensors, [`Rows`] and other tuples with tensors in them, and None, in the order of its parameters.
            The first one is there, on the device of all.
        **keywords: See [`Setup`].

    Returns:
        The launch, to be called with a grid and the counts. It keeps the tensors, so it should not outlive the call.
    """
    key = kernel, tuple(keywords), tuple(keywords.values())
    setup = _setups.get(key)
    if setup is None:
        setup = _setups[key] = Setup(kernel, **keywords)
    return Launch(setup, tensors)


def launch(kernel: Any, grid: int | tuple[int, int, int], *tensors: Any, **keywords: Any) -> None:
    """Launches a kernel without changing counts once; arguments as in [`prepare`]."""
    prepare(kernel, *tensors, **keywords)(grid)


@dataclass(slots=True)
class Stage:
    """A launch over lines, which an operator repeats for one group of lines after the other.

    Attributes:
        run: The launch, whose counts are its first line and its number of lines.
        programs: Programs of a line.
        repeats: Lines of the launch for each line of a group.
    """

    run: Launch
    programs: int
    repeats: int = 1

    def __call__(self, first_line: int, lines: int) -> None:
        lines *= self.repeats
        self.run(lines * self.programs, first_line * self.repeats, lines)


def ceil_divide(number: int, divisor: int) -> int:
    """Quotient, rounded up. `triton.cdiv` may be called in kernels too, and takes 2 µs for that."""
    return -(-number // divisor)


# Lines of a group, in place of those that [`lines_of_group`] would choose.
GROUP_LINES: int | None = None
# Share of the second-level cache that summaries of a group, plain and mixed, may take.
CACHE_SHARE = 0.5
# Programs of a launch for each multiprocessor, under which groups are larger.
GROUP_PROGRAMS = 2
# Summaries of a group, plain and mixed, that do not fit the cache.
SCRATCH_BYTES = 512 << 20


def lines_of_group(lines: int, line_bytes: int, line_programs: int, device: torch.device) -> int:
    """Number of lines whose summaries are computed, mixed and used before those of the next lines.

    Summaries S and S̃ pass between the launches of an operator. If those of a group stay in the second-level cache, and
    the next group takes their place, they never travel to memory. Tokens stream through the same cache, so that about
    half of it is left for them. Groups too small for the GPU cost more than they save: a launch has to have about two
    programs for each multiprocessor. Where so many lines do not fit the cache at all, groups are as large as
    `SCRATCH_BYTES` allows, which keeps the memory that an operator takes from growing with the batch.

    Args:
        lines: Lines of all, B · G.
        line_bytes: Bytes of a line's summaries, plain and mixed.
        line_programs: Programs of a line in the launch that has fewest.
        device: Device of the tokens.
    """
    if GROUP_LINES is not None:
        return min(GROUP_LINES, lines)
    if device.type != "cuda":
        return lines
    cache_bytes, multiprocessors = cache_and_multiprocessors(device)
    fitting = int(cache_bytes * CACHE_SHARE) // line_bytes
    most = max(fitting, ceil_divide(GROUP_PROGRAMS * multiprocessors, line_programs))
    if most * line_bytes > cache_bytes:
        most = max(most, SCRATCH_BYTES // line_bytes)
    # Of one size, as far as possible.
    return ceil_divide(lines, ceil_divide(lines, most))


def run_groups(stages: Sequence[Callable[[int, int], Any]], lines: int, group: int) -> None:
    """Runs all stages for one group of lines after the other.

    Args:
        stages: [`Stage`] and others that take the first line of a group and its number of lines.
        lines: Lines of all.
        group: Lines of a group, see [`lines_of_group`].
    """
    for first_line in range(0, lines, group):
        for stage in stages:
            stage(first_line, min(group, lines - first_line))


@cache
def cache_and_multiprocessors(device: torch.device) -> tuple[int, int]:
    """Bytes of a GPU's second-level cache, and its number of multiprocessors."""
    properties = torch.cuda.get_device_properties(device)
    return properties.L2_cache_size, properties.multi_processor_count


@cache
def compute_capability(device: torch.device) -> tuple[int, int]:
    """Compute capability of a GPU, which torch looks up on every call."""
    return torch.cuda.get_device_capability(device)


def table_sizes(table: torch.Tensor, tokens: torch.Tensor) -> dict[str, int]:
    """Kernel arguments beside a table of slots, `[B, M, N]` or `[M, N]` for all batch entries, of `[B, T, H, D]`."""
    return {
        "num_tokens": tokens.shape[1],
        "num_blocks": table.shape[-2],
        "table_stride_batch": table.stride(0) if table.dim() == 3 else 0,
        "slots": table.shape[-1],
    }


def table_shape(table: torch.Tensor) -> tuple[int, int, int]:
    """M, N, and the stride of a batch entry of a table of slots, 0 where all share it."""
    return *table.shape[-2:], table.stride(0) if table.dim() == 3 else 0


def product_precision(tokens: torch.dtype, summaries: torch.dtype) -> str:
    """PRECISION of matrix products between token rows and summaries, see `device_functions`.

    bfloat16 where both are. Otherwise float32, see [`multiplies_exactly`].
    """
    if tokens == summaries == torch.bfloat16:
        return "bf16"
    return "tf32x3" if multiplies_exactly(tokens) else "tf32"


def row_precision(rows: torch.dtype, matrices: torch.dtype, exact: bool) -> str:
    """PRECISION of products of rows as tokens have them with float32 or bfloat16 matrices."""
    if rows == torch.bfloat16:
        return "bf16" if matrices == torch.bfloat16 else "bf16x2"
    return "tf32x3" if exact else "tf32"


def padded(width: int) -> int:
    """Width inside of a kernel: the next power of two, 16 at least (the smallest matrix product)."""
    return max(16, 1 << (width - 1).bit_length())


def column_tile(width: int, columns: int) -> int:
    """Columns that one program takes of a matrix `[width, columns]`."""
    return min(padded(columns), max(16, MAX_TILE // padded(width)))


def token_tile(slots: int, width: int) -> int:
    """Tokens that a program reads at a time."""
    return min(padded(slots), 64 if padded(width) <= 128 else 32)


def warps(width: int, columns: int) -> int:
    """Warps of a program that holds `[width, columns]`: with fewer, large tiles would spill registers."""
    return 8 if padded(width) * padded(columns) > 64 * 64 else 4


def stages(precision: str, from_shared_memory: bool) -> int:
    """Stages of the compiler's pipeline: with three, the next rows are on their way while these are multiplied.

    Where a program has no room for them, another one on the multiprocessor has to fill the gap.
    """
    return 3 if precision in ("bf16", "fp16") and from_shared_memory else 2


def split_slots(slots: int, tile: int, programs: int) -> tuple[int, int]:
    """Shares out the slots of a block, or the columns of a summary, among more programs where there are few.

    Args:
        slots: Slots or columns that one program would work through.
        tile: How many it takes at a time.
        programs: Number of programs.

    Returns:
        Number of shares, and slots of each, a multiple of `tile`.
    """
    tiles = ceil_divide(slots, tile)
    shares = max(1, min(tiles, ceil_divide(FEW_PROGRAMS, max(programs, 1))))
    share = ceil_divide(tiles, shares)
    return ceil_divide(tiles, share), share * tile


def multiplies_exactly(tokens: torch.dtype) -> bool:
    """Whether float32 factors beside tokens of this type keep their 24 bits, by three products through TF32.

    The 11 bits that TF32 keeps are enough beside bfloat16, which has 8. float16 has 11 itself. float32 tokens follow
    torch's setting, see [`tf32_is_allowed`].
    """
    return tokens == torch.float16 or (tokens == torch.float32 and not tf32_is_allowed())


def round_matrices_(sums: torch.Tensor) -> None:
    """Rounds float32 sums to the nearest numbers of TF32, as the kernels do theirs, see `to_matrix`."""
    bits = (sums.view(torch.int32) + 0x1000) & -0x2000
    sums.copy_(torch.where(sums.isnan(), sums, bits.view(torch.float32)))


def as_factor(sums: torch.Tensor, tokens: torch.dtype) -> torch.Tensor:
    """float32 sums as kernels multiply rows of a type with them: rounded, in place, where that goes through TF32."""
    if tokens == torch.float32 and not multiplies_exactly(tokens):
        round_matrices_(sums)
    return sums


def summary_dtype(tokens: torch.dtype) -> torch.dtype:
    """Dtype of summaries: float32, or bfloat16 for bfloat16 tokens.

    Sums of float16 would leave its range. Summaries in bfloat16 take half the memory traffic; outputs keep the error
    of their own rounding, but gradients, where terms cancel, would have up to three times theirs.
    """
    return torch.bfloat16 if tokens == torch.bfloat16 else torch.float32


def multiplies_from_shared_memory(device: torch.device) -> bool:
    """Whether matrix products read both factors from shared memory (compute capabilities 9 and 10: wgmma, tcgen05).

    Elsewhere one factor goes through the registers of every warp, which leaves them less room for the rest.
    """
    return device.type != "cuda" or compute_capability(device)[0] in (9, 10)


def is_padded(width: int) -> bool:
    """Whether kernels pad rows of this width, and rows are so wide that registers for their masks are short."""
    return 64 < width != padded(width)


def token_tensor(
    tokens: torch.Tensor, table: torch.Tensor, width: int, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """A tensor `[B, T, H, width]` to write; zeros where the layout may leave tokens out (padding)."""
    shape = (*tokens.shape[:-1], width)
    return tokens.new_zeros(shape, dtype=dtype) if table.dim() == 3 else tokens.new_empty(shape, dtype=dtype)


def dense_like(tensor: torch.Tensor) -> torch.Tensor:
    """An uninitialised tensor of the same shape, dense in memory."""
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


def product_flops(tokens: torch.Size, columns: int) -> int:
    """Floating-point operations of one product of every row of `[B, T, H, K]` with a matrix: 2 B T H K V."""
    return 2 * tokens.numel() * columns


class MatrixTiles(NamedTuple):
    """Launch of a kernel that multiplies each token's row with the matrix of its block.

    Attributes:
        programs: Of a line of the matrices.
        columns: Columns of a matrix that a program takes.
        precision: PRECISION of the products.
        options: Arguments that such kernels share.
    """

    programs: int
    columns: int
    precision: str
    options: dict[str, Any]


def matrix_tiles(
    batch: int,
    num_tokens: int,
    heads: int,
    groups: int,
    width: int,
    columns: int,
    table: tuple[int, int, int],
    rows: torch.dtype,
    matrices: torch.dtype,
    exact: bool,
    from_shared_memory: bool,
) -> MatrixTiles:
    """Launch of a kernel that multiplies rows `[B, T, H, width]` with matrices of G heads.

    Args:
        batch: B.
        num_tokens: T.
        heads: H.
        groups: G.
        width: Width of the rows.
        columns: Columns of a matrix.
        table: See [`table_shape`].
        rows: Dtype of the rows.
        matrices: Dtype of the matrices.
        exact: See [`multiplies_exactly`].
        from_shared_memory: See [`multiplies_from_shared_memory`].
    """
    blocks, slots, stride = table
    columns_tile, tokens_tile = column_tile(width, columns), token_tile(slots, width)
    if exact:
        # Both halves of the factors have to find room.
        columns_tile = columns_tile if from_shared_memory else min(columns_tile, MAX_TILE // 2 // padded(width))
        tokens_tile = min(tokens_tile, max(16, 2048 // padded(width)))
    elif matrices == torch.float32 and not from_shared_memory:
        # These GPUs have less shared memory, too: a tile of the matrices takes two thirds of it.
        fewest = 16 if rows == torch.float32 else 32
        tokens_tile = min(tokens_tile, max(fewest, 4096 // padded(width)))
    programs = heads // groups * blocks * ceil_divide(columns, columns_tile)
    # Over all lines: groups are made so large that there is no need.
    splits, share = split_slots(slots, tokens_tile, batch * groups * programs)
    precision = row_precision(rows, matrices, exact)
    options = {
        "num_tokens": num_tokens,
        "num_blocks": blocks,
        "table_stride_batch": stride,
        "slots": slots,
        "splits": splits,
        "split_slots": share,
        "HEADS": groups,
        "REPEATS": heads // groups,
        "WIDTH": width,
        "COLUMNS": columns,
        "BLOCK_WIDTH": padded(width),
        "BLOCK_COLUMNS": columns_tile,
        "BLOCK_TOKENS": tokens_tile,
        "PRECISION": precision,
        "num_warps": warps(width, columns_tile),
        "num_stages": stages(precision, from_shared_memory),
    }
    return MatrixTiles(programs * splits, columns_tile, precision, options)
