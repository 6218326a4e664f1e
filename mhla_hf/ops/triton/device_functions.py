# SPDX-License-Identifier: Apache-2.0
"""Device functions of all kernels: token rows behind a table of slots, matrix products, and non-finite numbers.

Token tensors `[B, T, H, D]` reach kernels as [`launching.Rows`], a tensor and its strides; inside a kernel, the rows
of one head are a pair of pointer and token stride. PRECISION names the factors of a product: `"bf16"`, `"fp16"`, or
float32 through `"tf32"` or, exactly, `"tf32x3"`. `"bf16x2"` is bfloat16 on the left and float32 on the right, which
is split into two bfloat16 halves: as many operations as TF32, five more bits, and no demands on how factors lie in
shared memory, which TF32 makes.
"""

# No postponed annotations here: Triton reads `tl.constexpr` from the functions themselves.
import triton
import triton.language as tl


# Arguments that change with the tokens given. Kernels are not recompiled where one happens to be 1 or a multiple of
# 16; strides of rows stay out of this, since wide loads need to know of them.
COUNTS = (
    "heads", "num_tokens", "num_blocks", "slots", "splits", "split_slots", "first_line", "lines",
    "count", "share", "shares", "tiles", "table_stride_batch", "valid_stride_batch", "mixing_stride_batch",
    "mixing_stride_head", "mixing_stride_diagonal", "mixing_stride_repeat", "mixing_stride_row",
    "mixing_stride_column",
)  # fmt: skip


# Summaries have room for a multiple of this number of blocks: 16 bytes of bfloat16, see [`mixing.Mixing`].
ROW_UNIT = tl.constexpr(8)


@triton.jit
def matrix_of_block(line, block, num_blocks):
    """Place of a block's matrix among `[lines, M', ...]`; M' is `launching.row_count(num_blocks)`."""
    return line * ((num_blocks + ROW_UNIT - 1) // ROW_UNIT * ROW_UNIT) + block


@triton.jit
def place_of_program(parts, num_blocks, first_line, lines, heads, REPEATS: tl.constexpr):
    """Batch entry, head of the rows, block and part of the block of this program, and its matrix.

    Launches run over a group of *lines*: `lines` of them from `first_line` on. A line is a head of a batch entry,
    batch · heads + head, and has a matrix for each block; REPEATS heads of the rows share it. The matrix returned is
    counted within the group, see [`matrix_of_block`].

    Lines run fastest: heads lie side by side in the row of a token, so programs that run at the same time read
    neighbouring bytes. Parts come next, since those of a block read the same rows, and blocks last.
    """
    program = tl.program_id(0)
    row_lines = lines * REPEATS
    row_line, rest = program % row_lines, program // row_lines
    part, block = rest % parts, (rest // parts).to(tl.int64)
    place = (first_line * REPEATS + row_line).to(tl.int64)
    matrix = matrix_of_block(row_line // REPEATS, block, num_blocks)
    return place // (heads * REPEATS), place % (heads * REPEATS), block, part, matrix


@triton.jit
def row_strides(rows):
    """Strides of batch entry, token and head of rows, in elements."""
    UNIT: tl.constexpr = 128 // rows.data.dtype.element_ty.primitive_bitwidth
    if len(rows) == 5:
        # Rounded off to a multiple of 16 bytes, which the compiler takes note of.
        strides = (
            rows.stride_batch // UNIT * UNIT, rows.stride_token // UNIT * UNIT, rows.stride_head // UNIT * UNIT
        )  # fmt: skip
    else:
        strides = (rows.stride_batch, rows.stride_token, rows.stride_head)
    return strides


@triton.jit
def head_rows(rows, batch, head):
    """Pointer and token stride of one head of [`launching.Rows`]."""
    stride_batch, stride_token, stride_head = row_strides(rows)
    return rows.data + batch * stride_batch + head * stride_head, stride_token


@triton.jit
def dense_head_rows(data, batch, head, num_tokens, heads, WIDTH: tl.constexpr):
    """Pointer and token stride of one head of a dense tensor `[B, T, heads, WIDTH]`."""
    return data + (batch * num_tokens * heads + head) * WIDTH, heads * WIDTH


@triton.jit
def slot_tokens(block_table, slot, stop, num_tokens):
    """Tokens of some slots of a block, and which of the slots hold one; `block_table` points to the block's slots."""
    inside = slot < stop
    tokens = tl.load(block_table + slot, mask=inside, other=num_tokens)
    present = inside & (tokens < num_tokens)
    return tl.where(present, tokens, 0).to(tl.int64), present


@triton.jit
def load_rows(rows, tokens, present, column, WIDTH: tl.constexpr):
    """Rows of one head, zero where there is no token or no column."""
    pointers = rows[0] + tokens[:, None] * rows[1] + column[None, :]
    return tl.load(pointers, mask=present[:, None] & (column < WIDTH)[None, :], other=0.0)


@triton.jit
def store_rows(rows, tokens, present, column, values, WIDTH: tl.constexpr):
    """Writes rows of one head in the type of its tensor."""
    pointers = rows[0] + tokens[:, None] * rows[1] + column[None, :]
    tl.store(pointers, values.to(rows[0].dtype.element_ty), mask=present[:, None] & (column < WIDTH)[None, :])


@triton.jit
def load_matrix(start, row, column, stride_row, stride_column, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """A tile of a matrix, zero outside."""
    pointers = start + row[:, None] * stride_row + column[None, :] * stride_column
    return tl.load(pointers, mask=(row < ROWS)[:, None] & (column < COLUMNS)[None, :], other=0.0)


@triton.jit
def load_summary(
    summaries, matrix, lines, num_blocks, row, column,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STORED: tl.constexpr, TRANSPOSE: tl.constexpr,
):  # fmt: skip
    """A tile of the matrix of a block, or with TRANSPOSE of its transpose, zero outside of its ROWS × COLUMNS.

    `summaries` are `[tiles, lines, M', K, STORED]`: matrices `[K, V]` in tiles of columns, see [`outer.Sums`].
    """
    key, value = (column, row) if TRANSPOSE else (row, column)
    tile_start = matrix_of_block((value // STORED).to(tl.int64) * lines, matrix, num_blocks)
    K: tl.constexpr = COLUMNS if TRANSPOSE else ROWS
    start = summaries + tile_start * (K * STORED) + value % STORED
    if TRANSPOSE:
        pointers = start[:, None] + key[None, :] * STORED
    else:
        pointers = start[None, :] + key[:, None] * STORED
    return tl.load(pointers, mask=(row < ROWS)[:, None] & (column < COLUMNS)[None, :], other=0.0)


@triton.jit
def power_of_two(size):
    """The largest power of two that is not above a size, from 2^-100 to 2^126, and one over it."""
    bits = tl.minimum(tl.maximum(size.to(tl.int32, bitcast=True) & 0x7F800000, 27 << 23), 253 << 23)
    return bits.to(tl.float32, bitcast=True), ((254 << 23) - bits).to(tl.float32, bitcast=True)


@triton.jit
def tile_scale(tile):
    """[`power_of_two`] of the largest number of a tile. One that is not finite takes no scale from the others."""
    size = tl.abs(tile)
    largest = tl.max(tl.max(size, axis=1), axis=0)
    # NaN is lost on the way or is not: either is found.
    if (largest < float("inf")) == 0:
        largest = tl.max(tl.max(tl.where(size < float("inf"), size, 0.0), axis=1), axis=0)
    return power_of_two(largest)


@triton.jit
def to_tf32(values):
    """float32 rounded to the nearest number of TF32. Tensor cores would cut the last 13 bits off, towards zero."""
    bits = (values.to(tl.int32, bitcast=True) + 0x1000) & -0x2000
    return tl.where(values == values, bits.to(tl.float32, bitcast=True), values)


@triton.jit
def halves(values):
    """Two tiles of bfloat16 whose sum float32 values are, but for the last 8 of their 24 bits."""
    high = values.to(tl.bfloat16)
    return high, (values - high.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def factors(matrix, PRECISION: tl.constexpr):
    """A matrix as [`row_product`] takes it, prepared for all rows: two halves for `"bf16x2"`, rounded for others."""
    if PRECISION == "bf16x2":
        pair = halves(matrix.to(tl.float32))
    elif PRECISION == "tf32":
        rounded = to_tf32(matrix.to(tl.float32))
        pair = (rounded, rounded)
    elif PRECISION == "bf16":
        rounded = matrix.to(tl.bfloat16)
        pair = (rounded, rounded)
    else:
        pair = (matrix, matrix)
    return pair


@triton.jit
def row_product(rows, matrix, PRECISION: tl.constexpr):
    """rows @ matrix in float32, for a matrix prepared by [`factors`]; see [`product`]."""
    if PRECISION == "bf16x2":
        result = raw_product(rows, matrix[0], "bf16") + raw_product(rows, matrix[1], "bf16")
    else:
        result = product(rows, matrix[0], PRECISION)
    return result


@triton.jit
def product(left, right, PRECISION: tl.constexpr):
    """left @ right in float32.

    For TF32, a float32 `left` is rounded. So should a float32 `right` be, see [`factors`].
    """
    # Half precision is exact in TF32.
    if PRECISION == "tf32" and left.dtype == tl.float32:
        left = to_tf32(left)
    return raw_product(left, right, PRECISION)


@triton.jit
def raw_product(left, right, PRECISION: tl.constexpr):
    """[`product`], but a float32 `left` is cut off for TF32.

    For rows of float32 tokens, which go past the registers then: where they meet many others, these would be too few.
    """
    TYPE: tl.constexpr = tl.bfloat16 if PRECISION == "bf16" else tl.float16 if PRECISION == "fp16" else tl.float32
    return tl.dot(left.to(TYPE), right.to(TYPE), input_precision="tf32x3" if PRECISION == "tf32x3" else "tf32")


@triton.jit
def add_product(total, left, right, PRECISION: tl.constexpr):
    """total + left @ right; see [`product`]."""
    if PRECISION == "bf16x2":
        high, low = halves(right)
        # One after the other: the sum of both products would take as many registers as the total.
        total += raw_product(left, high, "bf16")
        total += raw_product(left, low, "bf16")
    else:
        total += product(left, right, PRECISION)
    return total


@triton.jit
def token_product(left, right, PRECISION: tl.constexpr):
    """[`raw_product`] of token rows, in their own type where they share one, which float32 sums hold exactly."""
    if left.dtype == tl.bfloat16 and right.dtype == tl.bfloat16:
        result = raw_product(left, right, "bf16")
    elif left.dtype == tl.float16 and right.dtype == tl.float16:
        result = raw_product(left, right, "fp16")
    else:
        result = raw_product(left, right, "tf32x3" if PRECISION == "tf32x3" else "tf32")
    return result


@triton.jit
def denominators(queries, key_sum, eps):
    """Divisors of rows for the normaliser with `kernel` 1 in `mhla_hf.ops.NORMALIZERS`: φ(q)·z̃ + eps."""
    return tl.sum(queries.to(tl.float32) * key_sum[None, :], axis=1) + eps


@triton.jit
def denominator_gradient(rows, gradient, inverse):
    """Gradients of [`denominators`], of which `inverse` is one over: -(row · gradient) / denominator.

    For outputs and their gradients, or for queries and the part of their gradients that comes from numerators.
    """
    return -inverse * tl.sum(rows.to(tl.float32) * gradient.to(tl.float32), axis=1)


@triton.jit
def divide(rows, divisors, present):
    """The rows over their divisors; absent tokens have none."""
    return rows / tl.where(present, divisors, 1.0)[:, None]


@triton.jit
def inverse_rms(mean_square, eps, present):
    """1 / sqrt(mean square + eps) of some tokens; 1 for absent ones, whose squares are 0 and eps may be, too."""
    return 1.0 / tl.sqrt(tl.where(present, mean_square + eps, 1.0))


@triton.jit
def all_finite(tile):
    """Whether no number of a float32 tile is NaN or infinite. A maximum of numbers may lose NaN, that of bits not."""
    sizes = tile.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return tl.max(tl.max(sizes, axis=1), axis=0) < 0x7F800000


@triton.jit
def first_bad_slot(head, tokens, present, column, WIDTH: tl.constexpr, slot, slots):
    """The first of the slots whose row of one head is not finite; `slots` if there is none."""
    finite = tl.abs(load_rows(head, tokens, present, column, WIDTH).to(tl.float32)) < float("inf")
    return tl.min(tl.min(tl.where(finite, slots, slot[:, None]), axis=1), axis=0).to(tl.int32)
