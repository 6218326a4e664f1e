# SPDX-License-Identifier: Apache-2.0
"""Launches of kernels: groups of lines, tile sizes, arguments that several kernels share, precision of products.

Triton binds, classifies and hashes every argument of every launch, which takes 15 to 30 µs. Calls that are like one
before them launch what was compiled for that one, see [`mhla_hf.ops.plans`].
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import cache
from threading import Lock
from typing import Any, NamedTuple

import torch
import triton

from ..backends import tf32_is_allowed
from ..plans import record_launch, within
from .device_functions import ROW_UNIT


# Before 3.6, Triton gives rows that two products of a pipelined loop read one buffer too few.
OVERTAKES_ROWS = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 6)
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
    """

    data: torch.Tensor
    stride_batch: int
    stride_token: int
    stride_head: int


class AlignedRows(NamedTuple):
    """[`Rows`] of which every one starts at a multiple of 16 bytes, so that loads may be that wide.

    Triton finds this out only for strides that are multiples of 16 elements. Here each stride has half of 16 bytes
    added, which kernels round off: the compiler sees a multiple of 16 bytes, and recompiles nothing for a stride that
    is a multiple of more.

    Attributes:
        aligned: 1; kernels know these rows by their fifth field. Without it, None would be one of a tuple's members,
            and Triton 3.6 compares no such tuple with None.
    """

    data: torch.Tensor
    stride_batch: int
    stride_token: int
    stride_head: int
    aligned: int = 1


def as_rows(tokens: torch.Tensor | None) -> Rows | AlignedRows | None:
    """Rows of `[B, T, H, D]`, copied only where the last axis is not dense; None stays None."""
    if tokens is None:
        return None
    batch, token, head, channel = tokens.stride()
    if channel != 1 and tokens.shape[3] != 1:
        tokens = tokens.contiguous()
        batch, token, head, _ = tokens.stride()
    unit = 16 // tokens.element_size()
    if (batch | token | head) % unit or tokens.data_ptr() % 16:
        return Rows(tokens, batch, token, head)
    half = unit // 2
    return AlignedRows(tokens, batch + half, token + half, head + half)


def first_launch(kernel: Any, grid: tuple[int, int, int], *arguments: Any, **keywords: Any) -> Any:
    """Launches a kernel by Triton, which returns what it has compiled; its interpreter returns nothing."""
    return kernel[grid](*arguments, **keywords)


def launch(
    kernel: Any,
    programs: int,
    *tensors: torch.Tensor | tuple[Any, ...] | None,
    lines: tuple[int, int] | None = None,
    **keywords: Any,
) -> None:
    """Launches a kernel.

    Args:
        kernel: Made by `triton.jit`. Its parameters are tensors first, then the two of `lines` if it takes them, which
            have to be in its `do_not_specialize`, then everything else.
        programs: How many programs run.
        *tensors: Tensors, [`Rows`], [`AlignedRows`] and other tuples with tensors in them, and None, in the order of
            its parameters. The first one is there, on the device of all.
        lines: The first line of a group and its number of lines, see [`line_groups`].
        **keywords: All other arguments, hashable, and Triton's options such as `num_warps`. No tensors.
    """
    first = tensors[0]
    device = (first[0] if isinstance(first, tuple) else first).get_device()  # type: ignore[union-attr]
    given = *tensors, *(lines or ())

    def run() -> Any:
        # Triton compiles for the current device, and starts kernels there.
        elsewhere = device >= 0 and device != torch.cuda.current_device()
        with torch.cuda.device(device) if elsewhere else nullcontext():
            # Releases differ in whether they fuse multiplications and additions unasked.
            return first_launch(kernel, (programs, 1, 1), *given, **keywords, enable_fp_fusion=True)

    names = kernel.arg_names[len(given) :]
    record_launch(run, programs, (*given, *[keywords[name] for name in names]))


def or_empty(like: torch.Tensor, *tensors: torch.Tensor | None) -> Any:
    """The tensors, with empty ones in place of None, which operators cannot return."""
    return tuple(like.new_empty(0) if tensor is None else tensor for tensor in tensors)


def ceil_divide(number: int, divisor: int) -> int:
    """Quotient, rounded up. `triton.cdiv` may be called in kernels too, and takes 2 µs for that."""
    return -(-number // divisor)


# Bytes that the summaries of a group, plain and mixed, may take.
SCRATCH_BYTES = 512 << 20


def line_groups(lines: int, line_bytes: int) -> list[tuple[int, int]]:
    """Groups of lines whose summaries are computed, mixed and used before those of the next group.

    All lines are one group unless their summaries take too much memory, which would grow with the batch.

    Args:
        lines: Lines of all, B · G.
        line_bytes: Bytes of a line's summaries, plain and mixed.

    Returns:
        The first line and the number of lines of each group, of one size as far as possible.
    """
    groups = ceil_divide(lines, max(1, SCRATCH_BYTES // line_bytes))
    size = ceil_divide(lines, groups)
    return [(first, min(size, lines - first)) for first in range(0, lines, size)]


def repeated(lines: tuple[int, int], repeats: int) -> tuple[int, int]:
    """The lines of mixed summaries of a group, `repeats` for each line of its summaries."""
    return lines[0] * repeats, lines[1] * repeats


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


def product_precision(tokens: torch.dtype, summaries: torch.dtype) -> str:
    """PRECISION of matrix products between token rows and summaries, see `device_functions`.

    bfloat16 beside bfloat16 tokens where summaries have no more bits than float16. Otherwise float32, see
    [`multiplies_exactly`].
    """
    if tokens == torch.bfloat16 and summaries.itemsize == 2:
        return "bf16"
    return "tf32x3" if multiplies_exactly(tokens) else "tf32"


def row_precision(rows: torch.dtype, matrices: torch.dtype, exact: bool) -> str:
    """PRECISION of products of rows as tokens have them with matrices of a type."""
    if rows == torch.bfloat16:
        return "bf16x2" if matrices == torch.float32 else "bf16"
    if rows == matrices == torch.float16:
        return "fp16"
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


def stages(precision: str, from_shared_memory: bool, width: int) -> int:
    """Stages of the compiler's pipeline: with three, the next rows are on their way while these are multiplied.

    Where a program has no room for them, another one on the multiprocessor has to fill the gap. Measured on an H100.
    """
    if not from_shared_memory or precision not in ("bf16", "fp16"):
        return 2
    return 2 if is_padded(width) or padded(width) > 128 else 3


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


def summary_dtype(tokens: torch.dtype, *, in_backward: bool = False) -> torch.dtype:
    """Dtype of summaries: float16, over powers of two, except beside tokens of which more bits count.

    These are float32 tokens that are multiplied exactly, and in the backward pass, where terms cancel, float16 ones.
    """
    exact = multiplies_exactly(tokens) and (in_backward or tokens == torch.float32)
    return torch.float32 if exact else torch.float16


def row_count(blocks: int) -> int:
    """Blocks that summaries have room for, those beyond the layout's being empty; see [`mixing.Mixing`]."""
    return ceil_divide(blocks, ROW_UNIT.value) * ROW_UNIT.value


class _TF32:
    """Has torch multiply float32 matrices through TF32 while any thread is within, and as before afterwards.

    There is no such choice for a single product.
    """

    def __init__(self) -> None:
        self.lock, self.within, self.before = Lock(), 0, ""

    def __enter__(self) -> None:
        with self.lock:
            if self.within == 0:
                # torch raises an error where its older and its newer setting contradict each other.
                with suppress(RuntimeError):
                    self.before = torch.get_float32_matmul_precision()
                    torch.set_float32_matmul_precision("high")
            self.within += 1

    def __exit__(self, *_: object) -> None:
        with self.lock:
            self.within -= 1
            if self.within == 0 and self.before:
                torch.set_float32_matmul_precision(self.before)
                self.before = ""


_tf32 = _TF32()


@contextmanager
def multiplied_for(tokens: torch.dtype, device: torch.device) -> Iterator[None]:
    """Has torch multiply summaries as kernels do: not in autocast's type, and float32 as beside tokens of a type."""
    # float16 has as many bits as TF32 itself, and float32 tokens follow the setting.
    through_tf32 = device.type == "cuda" and tokens == torch.bfloat16
    with torch.autocast(device.type, enabled=False), within(_through_tf32) if through_tf32 else nullcontext():
        yield


def _through_tf32() -> Any:
    """Where it is allowed already, there is nothing to do. That may change between the calls of a plan."""
    return nullcontext() if tf32_is_allowed() else _tf32


def multiplies_from_shared_memory(device: torch.device) -> bool:
    """Whether matrix products read both factors from shared memory (compute capabilities 9 and 10: wgmma, tcgen05).

    Elsewhere one factor goes through the registers of every warp, which leaves them less room for the rest.
    """
    return device.type != "cuda" or compute_capability(device)[0] in (9, 10)


def multiplies_by_wgmma(device: torch.device) -> bool:
    """Whether matrix products read both factors from shared memory, and leave their sums in registers."""
    return device.type != "cuda" or compute_capability(device)[0] == 9


def is_padded(width: int) -> bool:
    """Whether kernels pad rows of this width, and rows are so wide that registers for their masks are short."""
    return 64 < width != padded(width)


def token_tensor(
    tokens: torch.Tensor, table: torch.Tensor, width: int, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """A tensor `[B, T, H, width]` to write; zeros where the layout may leave tokens out (padding)."""
    shape = (*tokens.shape[:-1], width)
    return tokens.new_zeros(shape, dtype=dtype) if table.dim() == 3 else tokens.new_empty(shape, dtype=dtype)


def empty_denominators(query: torch.Tensor, table: torch.Tensor, divides: bool) -> torch.Tensor:
    """float32 `[B, T, H]` to write; ones where the layout may leave tokens out, so that calls repeat to the bit."""
    make = query.new_ones if table.dim() == 3 else query.new_empty
    return make(query.shape[:3] if divides else (0,), dtype=torch.float32)


def dense_like(tensor: torch.Tensor) -> torch.Tensor:
    """An uninitialised tensor of the same shape, dense in memory."""
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


def product_flops(tokens: torch.Size, columns: int) -> int:
    """Floating-point operations of one product of every row of `[B, T, H, K]` with a matrix: 2 B T H K V."""
    return 2 * tokens.numel() * columns


class MatrixTiles(NamedTuple):
    """Launch of a kernel that multiplies each token's row with the matrix of its block.

    Attributes:
        programs: Number of programs for a line of the matrices.
        columns: Columns of a matrix that a program takes.
        options: Arguments that such kernels share.
    """

    programs: int
    columns: int
    options: dict[str, Any]


def matrix_tiles(
    rows: torch.Tensor, groups: int, columns: int, table: torch.Tensor, matrices: torch.dtype
) -> MatrixTiles:
    """Launch of a kernel that multiplies rows with matrices of G heads.

    Args:
        rows: `[B, T, H, K]`.
        groups: G, a divisor of H.
        columns: Columns of a matrix.
        table: Token of each slot, int32 `[M, N]` or `[B, M, N]`.
        matrices: Dtype of the matrices.
    """
    batch, _, heads, width = rows.shape
    sizes = table_sizes(table, rows)
    from_shared_memory = multiplies_from_shared_memory(rows.device)
    columns_tile, tokens_tile = column_tile(width, columns), token_tile(sizes["slots"], width)
    precision = row_precision(rows.dtype, matrices, multiplies_exactly(rows.dtype))
    exact, in_half = precision == "tf32x3", precision in ("bf16", "fp16")
    halves = precision == "bf16x2" and from_shared_memory
    wide_rows = halves and padded(columns) <= 128 < padded(width)
    if exact:
        # Both halves of the factors have to find room.
        columns_tile = columns_tile if from_shared_memory else min(columns_tile, MAX_TILE // 2 // padded(width))
        tokens_tile = min(tokens_tile, max(16, 2048 // padded(width)))
    elif not in_half and not from_shared_memory:
        # These GPUs have less shared memory, too: a tile of the matrices takes two thirds of it.
        fewest = 16 if rows.dtype == torch.float32 else 32
        tokens_tile = min(tokens_tile, max(fewest, 4096 // padded(width)))
    elif wide_rows:
        tokens_tile = token_tile(sizes["slots"], 128)
    elif in_half and from_shared_memory and padded(width) > 128:
        # One program then has all registers of a multiprocessor, but reads the rows once.
        columns_tile = min(padded(columns), 2 * MAX_TILE // padded(width))
    programs = heads // groups * sizes["num_blocks"] * ceil_divide(columns, columns_tile)
    # Over all lines: groups are so large that there is no need.
    splits, share = split_slots(sizes["slots"], tokens_tile, batch * groups * programs)
    options = {
        **sizes,
        "splits": splits,
        "split_slots": share,
        "heads": groups,
        "REPEATS": heads // groups,
        "WIDTH": width,
        "COLUMNS": columns,
        "BLOCK_WIDTH": padded(width),
        "BLOCK_COLUMNS": columns_tile,
        "BLOCK_TOKENS": tokens_tile,
        "PRECISION": precision,
        "num_warps": 4 if halves else warps(width, columns_tile),
        "num_stages": 1 if wide_rows else stages(precision, from_shared_memory, width),
    }
    return MatrixTiles(programs * splits, columns_tile, options)
