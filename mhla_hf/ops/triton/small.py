# SPDX-License-Identifier: Apache-2.0
"""Block-parallel MHLA of short sequences, in one launch for each direction.

A program owns a head of keys and values in a batch entry, from tokens to outputs:

    1  S_b = Σ φ(k) vᵀ, z_b = Σ φ(k)                                     reads keys and values
    2  S̃_i = Σ_b m_ib S_b, z̃_i = Σ_b m_ib z_b                            a tile of columns at a time
    3  o_t = φ(q_t)ᵀ S̃_b(t) / (φ(q_t)·z̃_b(t) + eps)                      reads queries

and backward, with the names of `block_gradient`,

    1, 2  as forward
    3  dq_t = S̃ g'_t + δ_t z̃,  D_i = Σ q g'ᵀ in place of S̃_i            reads queries and gradients
    4  dS = mᵀ D in place of D,  dm = D · S
    5  dk_t = dS v_t + dz,  dv_t = dSᵀ k_t                                reads keys and values

Summaries pass from step to step through global memory, most of it in the L2 cache. A program reads its own alone, so
that none waits for another.

S, S̃, D and dS are float16 times a power of two of their own: they keep 11 bits, as TF32 does, for tokens of any size,
in half of the memory of float32. The power of a block goes into the weights that it meets, whose rows have a power
each, too; so mixing is one product. Rows of tokens that meet such matrices become float16 times a power of two, which
is exact for half precision down to 2⁻²⁴ of a row's largest number.

Where weights differ between R query heads of one key head, each has its own mixed summaries: R · M *rows* of mixed
summaries for M blocks.

Shape letters: B batch, T tokens, H heads, G heads of keys and values (H or a divisor), K and V widths, M blocks, N
slots of a block, R rows of mixed summaries for a block.
"""

# No postponed annotations here: torch.library and Triton read them from the functions themselves.

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ..backends import kernels_pass
from .block_gradient import block_flops
from .device_functions import (
    COUNTS,
    denominator_gradient,
    denominators,
    dense_head_rows,
    divide,
    head_rows,
    load_matrix,
    load_rows,
    power_of_two,
    slot_tokens,
    store_rows,
    tile_scale,
)
from .launching import (
    OVERTAKES_ROWS,
    as_rows,
    ceil_divide,
    dense_like,
    empty_denominators,
    launch,
    line_groups,
    multiplies_by_wgmma,
    multiplies_exactly,
    padded,
    table_sizes,
    token_tensor,
)
from .mixing import count_mixed_heads, sum_gradients
from .operators import operator


# Programs that keep a large GPU busy.
MIN_LINES = 100
# One program works through all tokens of a line. Larger sequences need more programs.
MAX_TOKENS, MAX_WIDTH = 2048, 128
# Rows of mixed summaries by width: a program multiplies all of a line's weights at a time, and should find most of its
# summaries in the L2 cache.
MAX_ROWS, MAX_WIDE_ROWS = 64, 32
# Columns of summaries that are mixed at a time.
FORWARD_COLUMNS, BACKWARD_COLUMNS = 256, 128


def fits_small_kernels(width: int, device: torch.device) -> bool:
    """Returns whether these kernels take heads of some width on a device."""
    return width <= MAX_WIDTH and _is_suited(device)


@torch.compiler.assume_constant_result
def _is_suited(device: torch.device) -> bool:
    # Elsewhere registers are too few for all steps in one kernel, or, on compute capability 10, Triton 3.6 does not
    # compile it.
    return multiplies_by_wgmma(device)


def serves_by_small_kernels(query: Tensor, key: Tensor, value: Tensor, mixing: Tensor, normalizer: str) -> bool:
    """Returns whether these kernels serve some tokens, by their shapes, type and device, and pass their test.

    Args:
        query: `[B, T, H, K]`.
        key: `[B, T, G, K]`.
        value: `[B, T, G, V]`.
        mixing: `[M, M]`, `[1 or H, M, M]` or `[B, 1 or H, M, M]`.
        normalizer: The normaliser, without a pair of its own.
    """
    batch, tokens, heads, width = query.shape
    groups, columns = value.shape[2:]
    rows = mixing.shape[-1] * count_mixed_heads(mixing.shape, heads, groups) // groups
    widest = max(width, columns)
    # Rows and matrices of float16 would cost float16 tokens more than plain torch's rounding.
    exact = multiplies_exactly(value.dtype)
    if batch * groups < MIN_LINES or tokens > MAX_TOKENS or exact or not fits_small_kernels(widest, query.device):
        return False
    return rows <= (MAX_ROWS if widest <= 64 else MAX_WIDE_ROWS) and kernels_pass(
        "small", query, value, normalizer=normalizer
    )


@triton.jit
def barrier():
    """Shows all threads of the program what each has written to global memory.

    Triton's compiler sees to that for shared memory alone.
    """
    tl.debug_barrier()


@triton.jit
def element(vector, place, index):
    """One number of a vector that lies in registers."""
    return tl.sum(tl.where(place == index, vector, 0.0), axis=0)


@triton.jit
def row_weights(weights):
    """Weights as float16, and a power of two for each row that these are multiplied with."""
    size = tl.abs(weights)
    scales, inverse = power_of_two(tl.max(tl.where(size < float("inf"), size, 0.0), axis=1))
    return (weights * inverse[:, None]).to(tl.float16), scales


@triton.jit
def half_rows(rows):
    """Rows as float16, and a power of two for each that they are multiplied with."""
    scale = tl.full((rows.shape[0],), 1.0, tl.float32)
    if rows.dtype != tl.float16:
        wide = rows.to(tl.float32)
        largest = tl.max(tl.abs(wide), axis=1)
        # An infinity leaves the other numbers as large as they are.
        scale, inverse = power_of_two(tl.where(largest < float("inf"), largest, 1.0))
        rows = (wide * inverse[:, None]).to(tl.float16)
    return rows, scale


@triton.jit
def store_matrix(start, row, column, values, rows, columns):
    """Writes a tile of a dense matrix."""
    pointers = start + row[:, None] * columns + column[None, :]
    tl.store(pointers, values.to(start.dtype.element_ty), mask=(row < rows)[:, None] & (column < columns)[None, :])


@triton.jit
def store_summary(summary, total, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    """Writes a block's sum as float16, and returns the power of two that it is multiplied with."""
    row, column = tl.arange(0, total.shape[0]), tl.arange(0, total.shape[1])
    scale, inverse = tile_scale(total)
    store_matrix(summary, row, column, total * inverse, WIDTH, COLUMNS)
    return scale


@triton.jit
def mixed_summaries(
    key_rows, value_rows, weights, block_table, summary, mixed, sums, mixed_sums,
    num_tokens, num_blocks, slots, rows, tiles, WIDTH: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, MIXED_COLUMNS: tl.constexpr, ONE_TILE: tl.constexpr,
    DIVIDES: tl.constexpr,
):  # fmt: skip
    """Steps 1 and 2 of a line; powers of two of S and S̃."""
    place, row_place = tl.arange(0, BLOCKS), tl.arange(0, ROWS)
    row, column, slot = tl.arange(0, BLOCK_WIDTH), tl.arange(0, BLOCK_COLUMNS), tl.arange(0, BLOCK_TOKENS)
    scales = tl.zeros((BLOCKS,), tl.float32)
    for block in range(num_blocks):
        total, key_sum = tl.zeros((BLOCK_WIDTH, BLOCK_COLUMNS), tl.float32), tl.zeros((BLOCK_WIDTH, 16), tl.float32)
        for tile in range(1 if ONE_TILE else tiles):
            tokens, present = slot_tokens(block_table + block * slots, tile * BLOCK_TOKENS + slot, slots, num_tokens)
            keys = load_rows(key_rows, tokens, present, row, WIDTH)
            values = load_rows(value_rows, tokens, present, column, COLUMNS)
            total = tl.dot(tl.trans(keys), values, total, input_precision="tf32")
            if DIVIDES:
                # A product with ones, in 16 equal columns, which keys enter as they enter the other product: read into
                # registers, they would get one buffer too few from Triton 3.6, which overwrites what wgmma still
                # reads.
                ones = tl.full((BLOCK_TOKENS, 16), 1.0, tl.float32).to(keys.dtype)
                key_sum = tl.dot(tl.trans(keys), ones, key_sum, input_precision="tf32")
        scale = store_summary(summary + block * (WIDTH * COLUMNS), total, WIDTH, COLUMNS)
        scales = tl.where(place == block, scale, scales)
        if DIVIDES:
            tl.store(sums + block * WIDTH + row, tl.max(key_sum, axis=1), mask=row < WIDTH)
    loaded = load_matrix(weights, row_place, place, num_blocks, 1, rows, num_blocks)
    factors, mixed_scales = row_weights(loaded * scales[None, :])
    barrier()
    SIZE: tl.constexpr = WIDTH * COLUMNS
    for start in range(0, SIZE, MIXED_COLUMNS):
        mixed_column = start + tl.arange(0, MIXED_COLUMNS)
        tile = load_matrix(summary, place, mixed_column, SIZE, 1, num_blocks, SIZE)
        store_matrix(mixed, row_place, mixed_column, tl.dot(factors, tile), rows, SIZE)
    if DIVIDES:
        for start in range(0, WIDTH, 32):
            sums_column = start + tl.arange(0, 32)
            part = load_matrix(sums, place, sums_column, WIDTH, 1, num_blocks, WIDTH)
            store_matrix(
                mixed_sums, row_place, sums_column, tl.dot(loaded, part, input_precision="tf32x3"), rows, WIDTH
            )
    barrier()
    return scales, mixed_scales


@triton.jit(do_not_specialize=COUNTS)
def small_attend_kernel(
    query, key, value, mixing, table, output, denominator, summary, mixed, sums, mixed_sums,
    first_line, lines, num_tokens, num_blocks, table_stride_batch, slots, mixing_stride_batch, mixing_stride_head,
    heads, tiles, eps,
    REPEATS: tl.constexpr, SHARES: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, MIXED_COLUMNS: tl.constexpr, ONE_TILE: tl.constexpr,
    DIVIDES: tl.constexpr,
):  # fmt: skip
    """Outputs of the queries of one line, and denominators where DIVIDES; for a group of lines from `first_line` on.

    heads is the number of key heads; REPEATS mixed summaries for each, and SHARES query heads for each of these.
    `mixing_stride_head` is that from one key head to the next. A line's part of `summary` is `[M, WIDTH, COLUMNS]`, of
    `mixed` `[rows, WIDTH, COLUMNS]`, of `sums` `[M, WIDTH]`, of `mixed_sums`
    `[rows, WIDTH]`.
    """
    program = tl.program_id(0).to(tl.int64)
    line = first_line + program
    batch, head = line // heads, line % heads
    rows = num_blocks * REPEATS
    summary += program * num_blocks * (WIDTH * COLUMNS)
    mixed += program * rows * (WIDTH * COLUMNS)
    sums += program * num_blocks * WIDTH
    mixed_sums += program * rows * WIDTH
    block_table = table + batch * table_stride_batch
    weights = mixing + batch * mixing_stride_batch + head * mixing_stride_head
    _, mixed_scales = mixed_summaries(
        head_rows(key, batch, head), head_rows(value, batch, head), weights, block_table, summary, mixed, sums,
        mixed_sums, num_tokens, num_blocks, slots, rows, tiles, WIDTH, COLUMNS, BLOCK_WIDTH, BLOCK_COLUMNS, ROWS,
        BLOCKS, BLOCK_TOKENS, MIXED_COLUMNS, ONE_TILE, DIVIDES,
    )  # fmt: skip
    row, column, slot = tl.arange(0, BLOCK_WIDTH), tl.arange(0, BLOCK_COLUMNS), tl.arange(0, BLOCK_TOKENS)
    query_heads = heads * (REPEATS * SHARES)
    for mixed_row in range(rows):
        matrix = load_matrix(mixed + mixed_row * (WIDTH * COLUMNS), row, column, COLUMNS, 1, WIDTH, COLUMNS)
        factor = element(mixed_scales, tl.arange(0, ROWS), mixed_row)
        key_sum = tl.zeros((BLOCK_WIDTH,), tl.float32)
        if DIVIDES:
            key_sum = tl.load(mixed_sums + mixed_row * WIDTH + row, mask=row < WIDTH, other=0.0)
        block, row_head = mixed_row, head * (REPEATS * SHARES)
        if REPEATS > 1:
            block, row_head = mixed_row % num_blocks, row_head + mixed_row // num_blocks * SHARES
        for part in range(1 if ONE_TILE else tiles * SHARES):
            part_head, start = row_head + part // tiles, part % tiles * BLOCK_TOKENS
            tokens, present = slot_tokens(block_table + block * slots, start + slot, slots, num_tokens)
            queries = load_rows(head_rows(query, batch, part_head), tokens, present, row, WIDTH)
            result = tl.dot(queries, matrix.to(queries.dtype), input_precision="tf32") * factor
            if DIVIDES:
                divisors = denominators(queries, key_sum, eps)
                per_token = (batch * num_tokens + tokens) * query_heads + part_head
                tl.store(denominator + per_token, divisors, mask=present)
                result = divide(result, divisors, present)
            outputs = dense_head_rows(output, batch, part_head, num_tokens, query_heads, COLUMNS)
            store_rows(outputs, tokens, present, column, result, COLUMNS)


@triton.jit(do_not_specialize=COUNTS)
def small_gradient_kernel(
    gradient, query, key, value, mixing, table, denominator, grad_query, grad_key, grad_value, grad_mixing,
    summary, mixed, sums, mixed_sums,
    first_line, lines, num_tokens, num_blocks, table_stride_batch, slots, mixing_stride_batch, mixing_stride_head,
    heads, tiles,
    REPEATS: tl.constexpr, SHARES: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, MIXED_COLUMNS: tl.constexpr, ONE_TILE: tl.constexpr,
    DIVIDES: tl.constexpr,
):  # fmt: skip
    """Gradients of one line; arguments as of [`small_attend_kernel`].

    A line's part of `grad_mixing` is `[rows, M]`. D and then dS take the place of S̃ in `mixed`, dz̃ and then dz that of
    z̃ in `mixed_sums`.
    """
    program = tl.program_id(0).to(tl.int64)
    line = first_line + program
    batch, head = line // heads, line % heads
    rows = num_blocks * REPEATS
    SIZE: tl.constexpr = WIDTH * COLUMNS
    summary += program * num_blocks * SIZE
    mixed += program * rows * SIZE
    sums += program * num_blocks * WIDTH
    mixed_sums += program * rows * WIDTH
    grad_mixing += line * rows * num_blocks
    block_table = table + batch * table_stride_batch
    weights = mixing + batch * mixing_stride_batch + head * mixing_stride_head
    key_rows, value_rows = head_rows(key, batch, head), head_rows(value, batch, head)
    scales, mixed_scales = mixed_summaries(
        key_rows, value_rows, weights, block_table, summary, mixed, sums, mixed_sums, num_tokens, num_blocks, slots,
        rows, tiles, WIDTH, COLUMNS, BLOCK_WIDTH, BLOCK_COLUMNS, ROWS, BLOCKS, BLOCK_TOKENS, MIXED_COLUMNS,
        ONE_TILE, DIVIDES,
    )  # fmt: skip
    place, row_place = tl.arange(0, BLOCKS), tl.arange(0, ROWS)
    row, column, slot = tl.arange(0, BLOCK_WIDTH), tl.arange(0, BLOCK_COLUMNS), tl.arange(0, BLOCK_TOKENS)
    query_heads = heads * (REPEATS * SHARES)
    grad_scales = tl.zeros((ROWS,), tl.float32)
    for mixed_row in range(rows):
        matrix = load_matrix(mixed + mixed_row * SIZE, row, column, COLUMNS, 1, WIDTH, COLUMNS)
        factor = element(mixed_scales, row_place, mixed_row)
        key_sum, grad_sum = tl.zeros((BLOCK_WIDTH,), tl.float32), tl.zeros((BLOCK_WIDTH,), tl.float32)
        if DIVIDES:
            key_sum = tl.load(mixed_sums + mixed_row * WIDTH + row, mask=row < WIDTH, other=0.0)
        block, row_head = mixed_row, head * (REPEATS * SHARES)
        if REPEATS > 1:
            block, row_head = mixed_row % num_blocks, row_head + mixed_row // num_blocks * SHARES
        total = tl.zeros((BLOCK_WIDTH, BLOCK_COLUMNS), tl.float32)
        top, _ = power_of_two(0.0 * factor)
        for part in range(1 if ONE_TILE else tiles * SHARES):
            part_head, start = row_head + part // tiles, part % tiles * BLOCK_TOKENS
            tokens, present = slot_tokens(block_table + block * slots, start + slot, slots, num_tokens)
            gradients, scale = half_rows(
                load_rows(head_rows(gradient, batch, part_head), tokens, present, column, COLUMNS)
            )
            queries = load_rows(head_rows(query, batch, part_head), tokens, present, row, WIDTH).to(tl.float32)
            if DIVIDES:
                per_token = (batch * num_tokens + tokens) * query_heads + part_head
                inverse = 1.0 / tl.load(denominator + per_token, mask=present, other=1.0)
                scale *= inverse
            result = tl.dot(gradients, tl.trans(matrix)) * (scale * factor)[:, None]
            if DIVIDES:
                change = denominator_gradient(queries, result, inverse)
                result += change[:, None] * key_sum[None, :]
                grad_sum += tl.sum(queries * change[:, None], axis=0)
            to_rows = dense_head_rows(grad_query, batch, part_head, num_tokens, query_heads, WIDTH)
            store_rows(to_rows, tokens, present, row, result, WIDTH)
            # What differs from token to token is with the queries, and the sum over all tiles has one power of two.
            size = tl.max(tl.abs(queries), axis=1) * tl.abs(scale)
            largest = tl.max(tl.where(size < float("inf"), size, 0.0), axis=0)
            new_top, inverse_top = power_of_two(tl.maximum(largest, top))
            scaled = (queries * (scale * inverse_top)[:, None]).to(tl.float16)
            total = tl.dot(tl.trans(scaled), gradients, total * (top * inverse_top))
            top = new_top
        scale = store_summary(mixed + mixed_row * SIZE, total, WIDTH, COLUMNS)
        grad_scales = tl.where(row_place == mixed_row, scale * top, grad_scales)
        if DIVIDES:
            tl.store(mixed_sums + mixed_row * WIDTH + row, grad_sum, mask=row < WIDTH)
    loaded = load_matrix(weights, place, row_place, 1, num_blocks, num_blocks, rows)
    factors, block_scales = row_weights(loaded * grad_scales[None, :])
    barrier()
    products = tl.zeros((ROWS, BLOCKS), tl.float32)
    for start in range(0, SIZE, MIXED_COLUMNS):
        mixed_column = start + tl.arange(0, MIXED_COLUMNS)
        of_mixed = load_matrix(mixed, row_place, mixed_column, SIZE, 1, rows, SIZE)
        summaries = load_matrix(summary, place, mixed_column, SIZE, 1, num_blocks, SIZE)
        products = tl.dot(of_mixed, tl.trans(summaries), products)
        store_matrix(mixed, place, mixed_column, tl.dot(factors, of_mixed), num_blocks, SIZE)
    products *= grad_scales[:, None] * scales[None, :]
    if DIVIDES:
        for start in range(0, WIDTH, 32):
            sums_column = start + tl.arange(0, 32)
            of_mixed_sums = load_matrix(mixed_sums, row_place, sums_column, WIDTH, 1, rows, WIDTH)
            key_sums = load_matrix(sums, place, sums_column, WIDTH, 1, num_blocks, WIDTH)
            products = tl.dot(of_mixed_sums, tl.trans(key_sums), products, input_precision="tf32x3")
            of_sums = tl.dot(loaded, of_mixed_sums, input_precision="tf32x3")
            store_matrix(mixed_sums, place, sums_column, of_sums, num_blocks, WIDTH)
    store_matrix(grad_mixing, row_place, place, products, rows, num_blocks)
    barrier()
    for block in range(num_blocks):
        matrix = load_matrix(mixed + block * SIZE, row, column, COLUMNS, 1, WIDTH, COLUMNS)
        factor = element(block_scales, place, block)
        grad_sum = tl.zeros((BLOCK_WIDTH,), tl.float32)
        if DIVIDES:
            grad_sum = tl.load(mixed_sums + block * WIDTH + row, mask=row < WIDTH, other=0.0)
        for tile in range(1 if ONE_TILE else tiles):
            tokens, present = slot_tokens(block_table + block * slots, tile * BLOCK_TOKENS + slot, slots, num_tokens)
            values, scale = half_rows(load_rows(value_rows, tokens, present, column, COLUMNS))
            result = tl.dot(values, tl.trans(matrix)) * (scale * factor)[:, None] + grad_sum[None, :]
            to_rows = dense_head_rows(grad_key, batch, head, num_tokens, heads, WIDTH)
            store_rows(to_rows, tokens, present, row, result, WIDTH)
            keys, scale = half_rows(load_rows(key_rows, tokens, present, row, WIDTH))
            result = tl.dot(keys, matrix) * (scale * factor)[:, None]
            to_rows = dense_head_rows(grad_value, batch, head, num_tokens, heads, COLUMNS)
            store_rows(to_rows, tokens, present, column, result, COLUMNS)


def _options(
    query: Tensor, key: Tensor, value: Tensor, mixing: Tensor, table: Tensor, divides: bool, *, backward: bool
) -> dict:
    """Arguments that both kernels share."""
    heads, width, groups, columns = *query.shape[2:], *value.shape[2:]
    sizes = table_sizes(table, query)
    blocks = sizes["num_blocks"]
    repeats = count_mixed_heads(mixing.shape, heads, groups) // groups
    shares, slots = heads // groups // repeats, sizes["slots"]
    # Larger tiles of wide rows would spill registers.
    is_large = query.dtype == torch.float32 or (backward and (slots > 64 or shares > 1))
    tokens = min(padded(slots), 32 if is_large and max(width, columns) > 64 else 64)
    tiles = ceil_divide(slots, tokens)
    one_tile = tiles == shares == 1
    per_head = mixing.dim() > 2 and mixing.shape[-3] > 1
    return {
        **sizes,
        "mixing_stride_batch": mixing.stride(0) if mixing.dim() == 4 and mixing.shape[0] > 1 else 0,
        "mixing_stride_head": repeats * blocks * blocks if per_head else 0,
        "heads": groups,
        "tiles": tiles,
        "REPEATS": repeats,
        "SHARES": shares,
        "WIDTH": width,
        "COLUMNS": columns,
        "BLOCK_WIDTH": padded(width),
        "BLOCK_COLUMNS": padded(columns),
        "ROWS": padded(repeats * blocks),
        "BLOCKS": padded(blocks),
        "BLOCK_TOKENS": tokens,
        "ONE_TILE": one_tile,
        "DIVIDES": divides,
        "num_warps": 8,
        "num_stages": 1 if OVERTAKES_ROWS and divides and not one_tile else 2,
    }


@operator("mhla_hf::small_attention")
def small_attention(
    query: Tensor, key: Tensor, value: Tensor, mixing: Tensor, table: Tensor, divides: bool, eps: float
) -> tuple[Tensor, Tensor]:
    """Block-parallel MHLA of tokens that [`serves_by_small_kernels`]; see `block_attention`."""
    mixing = mixing.contiguous()
    options = _options(query, key, value, mixing, table, divides, backward=False)
    blocks, repeats, width, columns = (options[name] for name in ("num_blocks", "REPEATS", "WIDTH", "COLUMNS"))
    output = token_tensor(query, table, columns)
    denominator = empty_denominators(query, table, divides)
    # Outputs need no more bits of mixed summaries than tokens have.
    half = torch.bfloat16 if query.dtype == torch.bfloat16 else torch.float16
    # Two programs of a multiprocessor share its registers, except where float32, wide or in several tiles, takes more.
    is_large = query.dtype == torch.float32 and (max(width, columns) > 64 or not options["ONE_TILE"])
    for lines in line_groups(query.shape[0] * key.shape[2], repeats * blocks * width * columns * 2):
        summary = query.new_empty(lines[1], blocks, width, columns, dtype=torch.float16)
        mixed = summary.view(half) if repeats == 1 else query.new_empty(repeats, *summary.shape, dtype=half)
        sums, mixed_sums = (query.new_empty(n, lines[1], blocks, width, dtype=torch.float32) for n in (1, repeats))
        launch(
            small_attend_kernel, lines[1], as_rows(query), as_rows(key), as_rows(value), mixing, table, output,
            denominator, summary, mixed, sums, mixed_sums,
            lines=lines, eps=eps, MIXED_COLUMNS=FORWARD_COLUMNS, maxnreg=None if is_large else 128, **options,
        )  # fmt: skip
    return output, denominator


@torch.library.register_fake("mhla_hf::small_attention")
def _(query, key, value, mixing, table, divides, eps):
    output = query.new_empty(*query.shape[:-1], value.shape[-1])
    return output, query.new_empty(query.shape[:3] if divides else (0,), dtype=torch.float32)


@operator("mhla_hf::small_attention_backward", differentiable=False)
def small_attention_backward(
    gradient: Tensor, denominator: Tensor, query: Tensor, key: Tensor, value: Tensor, mixing: Tensor, table: Tensor,
    divides: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of query, key, value and mixing; arguments as of `block_attention_backward`."""
    mixing = mixing.contiguous()
    options = _options(query, key, value, mixing, table, divides, backward=True)
    (batch, _, groups), blocks, repeats = key.shape[:3], options["num_blocks"], options["REPEATS"]
    width, columns = options["WIDTH"], options["COLUMNS"]
    grad_query, grad_key, grad_value = (token_tensor(tokens, table, tokens.shape[3]) for tokens in (query, key, value))
    grad_mixing = query.new_empty(batch * groups, repeats, blocks, blocks, dtype=torch.float32)
    for lines in line_groups(batch * groups, (1 + repeats) * blocks * width * columns * 2):
        summary, mixed = (
            query.new_empty(n, lines[1], blocks, width, columns, dtype=torch.float16) for n in (1, repeats)
        )
        sums, mixed_sums = (query.new_empty(n, lines[1], blocks, width, dtype=torch.float32) for n in (1, repeats))
        launch(
            small_gradient_kernel, lines[1], as_rows(gradient), as_rows(query), as_rows(key), as_rows(value), mixing,
            table, denominator, grad_query, grad_key, grad_value, grad_mixing, summary, mixed, sums, mixed_sums,
            lines=lines, MIXED_COLUMNS=BACKWARD_COLUMNS, **options,
        )  # fmt: skip
    return grad_query, grad_key, grad_value, sum_gradients([grad_mixing], mixing, batch)


@torch.library.register_fake("mhla_hf::small_attention_backward")
def _(gradient, denominator, query, key, value, mixing, table, divides):
    return tuple(map(dense_like, (query, key, value, mixing)))


def _context(ctx, inputs, output):
    *tensors, ctx.divides, _ = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(output[1], *tensors)


def _backward(ctx, gradient, _):
    return *small_attention_backward(gradient, *ctx.saved_tensors, ctx.divides), None, None, None


small_attention.register_autograd(_backward, setup_context=_context)


@register_flop_formula(torch.ops.mhla_hf.small_attention)
def _flops(query, key, value, mixing, *args, **kwargs) -> int:
    return block_flops(query, key, value, mixing)


@register_flop_formula(torch.ops.mhla_hf.small_attention_backward)
def _flops_backward(gradient, denominator, *inputs, **kwargs) -> int:
    """As of `block_attention_backward`."""
    return 2 * block_flops(*inputs[:4])
