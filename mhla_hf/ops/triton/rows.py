# SPDX-License-Identifier: Apache-2.0
"""What all Triton kernels share: rows of tokens through a table of slots, types, products, and what is not finite."""

# No postponed annotations here: Triton reads `tl.constexpr` from the functions themselves.
import triton
import triton.language as tl


# Arguments that change with the tokens given. Kernels are not compiled anew where one happens to be 1 or a multiple of
# 16; strides of rows stay out of this, since wide loads need to know of them.
COUNTS = (
    "num_tokens", "num_blocks", "blocks", "slots", "splits", "split_slots", "lines", "count", "share", "column_share",
    "column_shares", "table_stride_batch", "total_stride_split", "bad_stride_part", "share_stride_part",
    "valid_stride_batch", "starts_stride_batch", "mixing_stride_batch", "mixing_stride_head", "mixing_stride_diagonal",
)  # fmt: skip


@triton.jit
def place_of_program(parts, num_blocks, HEADS: tl.constexpr):
    """Batch entry, head, block and part of the block of this program, of a launch over all of them on one axis.

    Heads run fastest: they lie side by side in the row of a token, so programs that run at the same time read
    neighbouring bytes. Parts come next, since those of a block read the same rows, and batch entries last.
    """
    program = tl.program_id(0)
    head, rest = program % HEADS, program // HEADS
    part, rest = rest % parts, rest // parts
    return (rest // num_blocks).to(tl.int64), head.to(tl.int64), (rest % num_blocks).to(tl.int64), part


@triton.jit
def slot_tokens(table, batch, block, slot, stop, num_tokens, table_stride_batch, slots):
    """Tokens of some slots of a block, and which of the slots hold one."""
    inside = slot < stop
    tokens = tl.load(table + batch * table_stride_batch + block * slots + slot, mask=inside, other=num_tokens)
    present = inside & (tokens < num_tokens)
    return tl.where(present, tokens, 0).to(tl.int64), present


@triton.jit
def load_rows(start, tokens, present, stride_token, column, WIDTH: tl.constexpr):
    """Rows of a token tensor, zero where there is no token or no column."""
    pointers = start + tokens[:, None] * stride_token + column[None, :]
    return tl.load(pointers, mask=present[:, None] & (column < WIDTH)[None, :], other=0.0)


@triton.jit
def store_rows(start, tokens, present, stride_token, column, rows, WIDTH: tl.constexpr, INTERPRETED: tl.constexpr):
    pointers = start + tokens[:, None] * stride_token + column[None, :]
    narrow = to_type(rows, start.dtype.element_ty, INTERPRETED)
    tl.store(pointers, narrow, mask=present[:, None] & (column < WIDTH)[None, :])


@triton.jit
def to_type(values, TYPE: tl.constexpr, INTERPRETED: tl.constexpr):
    """Converts, to the nearest value. The interpreter would cut float32 off to bfloat16: there it is rounded first."""
    if INTERPRETED and TYPE == tl.bfloat16 and values.dtype == tl.float32:
        bits = values.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        values = tl.where(values == values, bits.to(tl.float32, bitcast=True), values)
    return values.to(TYPE)


@triton.jit
def to_tf32(values):
    """float32 rounded to the nearest number of TF32. Tensor cores would cut the last 13 bits off, towards zero."""
    bits = (values.to(tl.int32, bitcast=True) + 0x1000) & -0x2000
    return tl.where(values == values, bits.to(tl.float32, bitcast=True), values)


@triton.jit
def to_matrix(values, TYPE: tl.constexpr, PRECISION: tl.constexpr, INTERPRETED: tl.constexpr):
    """Converts what other kernels will multiply rows with: to the nearest value that their products can use."""
    if TYPE == tl.float32 and PRECISION == "tf32":
        values = to_tf32(values)
    return to_type(values, TYPE, INTERPRETED)


@triton.jit
def product(left, right, DOT_TYPE: tl.constexpr, PRECISION: tl.constexpr, INTERPRETED: tl.constexpr):
    """left @ right in float32, of factors in DOT_TYPE, or in TF32 if PRECISION says so.

    `left` is rounded to it. So should a float32 `right` be that was computed here; one that [`to_matrix`] made comes
    rounded, and goes past the registers.
    """
    # Half precision is exact in TF32.
    if DOT_TYPE == tl.float32 and PRECISION == "tf32" and left.dtype == tl.float32:
        left = to_tf32(left)
    return raw_product(left, right, DOT_TYPE, PRECISION, INTERPRETED)


@triton.jit
def raw_product(left, right, DOT_TYPE: tl.constexpr, PRECISION: tl.constexpr, INTERPRETED: tl.constexpr):
    """[`product`], but a float32 `left` is cut off if PRECISION says TF32.

    For rows of float32 tokens, which go past the registers then: where they meet many others, these would be too few.
    """
    if INTERPRETED and DOT_TYPE == tl.float32 and PRECISION == "tf32":
        left, right = _cut_to_tf32(left), _cut_to_tf32(right)
    left, right = to_type(left, DOT_TYPE, INTERPRETED), to_type(right, DOT_TYPE, INTERPRETED)
    if INTERPRETED:
        # It multiplies no bfloat16.
        left, right = left.to(tl.float32), right.to(tl.float32)
    return tl.dot(left, right, input_precision=PRECISION)


@triton.jit
def _cut_to_tf32(values):
    """What a tensor core does to float32 factors."""
    if values.dtype == tl.float32:
        values = (values.to(tl.int32, bitcast=True) & -0x2000).to(tl.float32, bitcast=True)
    return values


@triton.jit
def is_finite(rows):
    """Which numbers are neither NaN nor infinite."""
    return tl.abs(rows.to(tl.float32)) < float("inf")


@triton.jit
def finite_or_zero(rows):
    """The rows, zero where they are not finite: zero times NaN would reach sums that leave the number out."""
    return tl.where(is_finite(rows), rows, 0.0).to(rows.dtype)


@triton.jit
def first_bad_slot(rows, slot, slots):
    """The first of the slots whose row is not finite; `slots` if there is none."""
    return tl.min(tl.min(tl.where(is_finite(rows), slots, slot[:, None]), axis=1), axis=0).to(tl.int32)
