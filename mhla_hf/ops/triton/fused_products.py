# SPDX-License-Identifier: Apache-2.0
"""Sums and products of projected rows, whose features are computed inside of the kernels; both directions use them.

    φ(x) = feature map of scaling · norm(x), plus feature_eps;  ψ(x) = φ(x), rotated
    products_b = Σ_{t in b} ψ(x_t) (scale_t v_t)ᵀ,  sums_b = Σ_{t in b} weight_t φ(x_t)
    output_t   = norm(ψ(x_t)ᵀ matrix_{b(t)} / (φ(x_t)·vector_{b(t)} + eps)) · silu(gate_t)

Everything that `block` leaves to torch runs inside: RMSNorm across heads, scaling, feature map, rotary embedding;
output norm and gate. Nothing but projections, the gate and the output passes through memory, once each.

Rotary embeddings turn neighbouring pairs of channels. Their table has the cosine and the sine of a pair side by side,
so that a row of it is read and held like a row of tokens: rotating moves nothing between threads.

Programs run over (block, column tile, line), a line being a head of a batch entry, with lines next to each other:
those that run at the same time read the same rows of the rotary table, and neighbouring bytes of q, k and v.

Loads run ahead of products. The compiler's pipeline keeps the rows of the next tile of tokens in flight, provided that
their addresses are known: so the slots' entries in the table are read one tile before. What enters no product, such
as gates, is loaded one tile ahead explicitly.

Shape letters: B batch, T tokens, H heads of the rows, G heads of the summaries (H or a divisor), K and V widths,
M blocks, M' of them with empty ones (`launching.row_count`), N slots of a block.
"""

# No postponed annotations here: Triton reads `tl.constexpr` from the functions themselves.

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ..plans import current_stream, is_capturing
from .device_functions import (
    COUNTS,
    add_product,
    denominators,
    dense_head_rows,
    factors,
    head_rows,
    inverse_rms,
    load_matrix,
    load_rows,
    place_of_program,
    row_product,
    store_rows,
    tile_scale,
    to_tf32,
)
from .feature_maps import feature_map
from .launching import (
    MAX_TILE,
    as_rows,
    launch,
    multiplies_from_shared_memory,
    padded,
    product_precision,
    row_count,
    row_precision,
    warps,
)
from .outer import Sums


class Features(NamedTuple):
    """The way from projected queries or keys to features, as all kernels take it.

    Attributes:
        norm_weight: Weight of an RMSNorm across heads, `[H · K]`; None for no norm.
        inverse_norm: 1 / rms of each token from [`inverse_norm`]; read only where there is a norm.
        rotary: Table of rotary embeddings from [`rotary_table`], `[T, K]`, dense; None for no rotation.
        scaling: Factor of the rows before the feature map.
        feature_eps: Added to the features.
    """

    norm_weight: Tensor | None
    inverse_norm: Tensor | None
    rotary: Tensor | None
    scaling: float
    feature_eps: float


# Tables made from a tensor of cosines, for as long as that lives: its sines, what both were like, and the table.
_tables = WeakTensorKeyDictionary()


def rotary_table(cosine: Tensor, sine: Tensor, dtype: torch.dtype) -> Tensor:
    """Cosine and sine of each pair of channels side by side, as kernels read them; made once for all layers.

    Every head reads the table: in float32 it would be as many bytes of L2 as keys and values together. Beside
    bfloat16 it is float16, which changes numbers up to 1 by 2⁻¹² at most. The features that it turns are rounded for
    their product by 2⁻⁹ of their size.

    Args:
        cosine: For neighbouring pairs of channels, any shape with T rows of K / 2 numbers.
        sine: The same.
        dtype: Dtype of the tokens.

    Returns:
        `[T, K]`, float16 for bfloat16 tokens and float32 for others.
    """
    dtype = torch.float16 if dtype == torch.bfloat16 else torch.float32
    # Changes of inference tensors go unnoticed, and a CUDA graph has to read what its own inputs hold.
    if torch.compiler.is_compiling() or cosine.is_inference() or sine.is_inference() or is_capturing((cosine,)):
        return _make_table(cosine, sine, dtype)
    state = cosine._version, sine._version, dtype, current_stream(cosine.get_device())
    found = _tables.get(cosine)
    if found is not None and found[0] is sine and found[1] == state:
        return found[2]
    # Tensors made in inference mode could not take part in training later.
    with torch.inference_mode(False):
        table = _make_table(cosine, sine, dtype)
    _tables[cosine] = sine, state, table
    return table


def _make_table(cosine: Tensor, sine: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.stack((cosine, sine), dim=-1).reshape(-1, 2 * cosine.shape[-1]).to(dtype)


def fits_fused_kernels(width: int, value: int, rotary: bool, dtype: torch.dtype) -> bool:
    """Whether heads of these widths fit the fused kernels, which hold a whole summary beside the tokens.

    For float16 it is held twice, to be multiplied exactly: wide ones would find no room in smaller GPUs.
    """
    room = MAX_TILE if dtype == torch.bfloat16 else MAX_TILE // 4
    return padded(width) * padded(value) <= room and not (rotary and width % 2)


def fused_options(
    rows: Tensor, columns: int, table: Tensor, map_name: str, heads: int, tile: int, matrices: torch.dtype
) -> dict[str, Any]:
    """Arguments that all fused kernels share.

    Where products read both factors from shared memory, four warps have registers enough, and two or three programs
    fit on a multiprocessor: one loads while another multiplies. Elsewhere one factor goes through registers, which
    takes eight warps; the compiler would give bfloat16 more than half of the registers then, without need.

    Args:
        rows: `[B, T, H, K]`.
        columns: V.
        table: Token of each slot, int32 `[M, N]`.
        map_name: `kernel` of an entry of [`mhla_hf.ops.FEATURE_MAPS`].
        heads: Heads of the matrices in a batch entry.
        tile: Columns of a matrix that a program takes.
        matrices: Dtype of the factors that rows meet.
    """
    width, slots = rows.shape[3], table.shape[1]
    options = {
        "num_tokens": rows.shape[1],
        "num_blocks": table.shape[0],
        "slots": slots,
        "heads": heads,
        "REPEATS": rows.shape[2] // heads,
        "WIDTH": width,
        "VALUE": columns,
        "BLOCK_WIDTH": padded(width),
        "BLOCK_VALUE": tile,
        # With more, most kernels spill registers.
        "BLOCK_TOKENS": 16,
        "FEATURE_MAP": map_name,
        "PRECISION": product_precision(rows.dtype, matrices),
        "num_warps": warps(width, tile),
        "num_stages": 3,
    }
    if rows.dtype == torch.bfloat16:
        if multiplies_from_shared_memory(rows.device):
            options |= {"PRECISION": row_precision(rows.dtype, matrices, False), "num_warps": 4}
            if matrices == torch.float32:
                # Two halves of each factor, and more rows on their way would spill registers.
                options["num_stages"] = 2
        else:
            options["maxnreg"] = 128
    return options


def row_warps(size: int) -> int:
    """Warps of a program that holds one row of `size` channels."""
    return 4 if size <= 4096 else 8


def inverse_norm(tokens: Tensor, eps: float | None) -> Tensor:
    """1 / sqrt(mean of squares + eps) over the heads and channels of each token.

    Args:
        tokens: `[B, T, H, K]`.
        eps: None for no norm.

    Returns:
        float32 `[B, T]`, empty without a norm.
    """
    if eps is None:
        return tokens.new_empty(0, dtype=torch.float32)
    # Reads the tokens once, and sums their squares in float32.
    norm = torch.linalg.vector_norm(tokens, dim=(2, 3), dtype=torch.float32)
    return (norm.square() / tokens.shape[2:].numel() + eps).rsqrt()


@triton.jit
def slot_entries(block_table, slot, slots, num_tokens):
    """Entries of some slots of a block in its table, `num_tokens` for slots without a token."""
    return tl.load(block_table + slot, mask=slot < slots, other=num_tokens)


@triton.jit
def entry_tokens(entries, num_tokens):
    """Tokens of [`slot_entries`], and which of them there are."""
    present = entries < num_tokens
    return tl.where(present, entries, 0).to(tl.int64), present


@triton.jit
def channel_scales(features, head, column, WIDTH: tl.constexpr, BLOCK_WIDTH: tl.constexpr):
    """Factors of a head's channels before the feature map: scaling, and the weights of a norm."""
    scales = tl.full((BLOCK_WIDTH,), 1.0, tl.float32) * features.scaling
    if features.norm_weight is not None:
        scales *= tl.load(features.norm_weight + head * WIDTH + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    return scales


@triton.jit
def normed_rows(rows, features, scales, batch, tokens, present, num_tokens, column, WIDTH: tl.constexpr):
    """scaling · norm(x) of some rows of one head, float32."""
    values = load_rows(rows, tokens, present, column, WIDTH).to(tl.float32)
    if features.norm_weight is not None:
        inverse = tl.load(features.inverse_norm + batch * num_tokens + tokens, mask=present, other=0.0)
        values = values * inverse[:, None]
    return values * scales[None, :]


@triton.jit
def features_of(normed, features, present, column, WIDTH: tl.constexpr, FEATURE_MAP: tl.constexpr):
    """φ of normed rows, zero where there is no token or no column."""
    values = feature_map(normed, FEATURE_MAP) + features.feature_eps
    return tl.where(present[:, None] & (column < WIDTH)[None, :], values, 0.0)


@triton.jit
def rotary_rows(features, tokens, present, column, WIDTH: tl.constexpr):
    """Rows of the rotary table; None without one."""
    rows = None
    if features.rotary is not None:
        rows = load_rows((features.rotary, WIDTH), tokens, present, column, WIDTH)
    return rows


@triton.jit
def rotate(values, rotary, SIGN: tl.constexpr, TOKENS: tl.constexpr, BLOCK_WIDTH: tl.constexpr):
    """Rows turned by those of the rotary table, backwards for a SIGN of -1; themselves where that is None."""
    if rotary is not None:
        even, odd = tl.split(tl.reshape(values, (TOKENS, BLOCK_WIDTH // 2, 2)))
        cosine, sine = tl.split(tl.reshape(rotary.to(tl.float32), (TOKENS, BLOCK_WIDTH // 2, 2)))
        sine *= SIGN
        turned = tl.join(even * cosine - odd * sine, even * sine + odd * cosine)
        values = tl.reshape(turned, (TOKENS, BLOCK_WIDTH))
    return values


@triton.jit(do_not_specialize=COUNTS)
def fused_outer_kernel(
    rows, value, scale, weight, features, table, products, matrix_scales, sums,
    first_line, lines, num_tokens, num_blocks, slots,
    heads, REPEATS: tl.constexpr, WIDTH: tl.constexpr, VALUE: tl.constexpr, BLOCK_WIDTH: tl.constexpr,
    BLOCK_VALUE: tl.constexpr, BLOCK_TOKENS: tl.constexpr, FEATURE_MAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The sums of the head of this file; zeros for empty blocks.

    heads is the number of heads of `products`, for a group of lines from `first_line` on `[lines, M', WIDTH, VALUE]`,
    which are to be multiplied with powers of two, `matrix_scales` `[lines, M']`, if these are given; each sums
    REPEATS heads of the rows. `scale` and `weight` are `[B, T, heads · REPEATS]`, or None for 1; `sums` are
    `[lines, M', WIDTH]`, or None for none.
    """
    batch, head, block, _, matrix = place_of_program(1, num_blocks, first_line, lines, heads, 1)
    column, slot = tl.arange(0, BLOCK_WIDTH), tl.arange(0, BLOCK_TOKENS)
    value_column = tl.arange(0, BLOCK_VALUE)
    # Empty blocks after the others have no row in the table.
    stop = tl.where(block < num_blocks, slots, 0)
    result = tl.zeros((BLOCK_WIDTH, BLOCK_VALUE), tl.float32)
    # One sum for each 16th token: adding them up takes a barrier, which is left for the end.
    total = tl.zeros((16, BLOCK_WIDTH), tl.float32)
    block_table = table + block * slots
    for repeat in range(REPEATS):
        row_head = head * REPEATS + repeat
        head_of_rows, head_of_values = head_rows(rows, batch, row_head), head_rows(value, batch, row_head)
        scales = channel_scales(features, row_head, column, WIDTH, BLOCK_WIDTH)
        entries = slot_entries(block_table, slot, stop, num_tokens)
        for offset in range(0, stop, BLOCK_TOKENS):
            tokens, present = entry_tokens(entries, num_tokens)
            entries = slot_entries(block_table, offset + BLOCK_TOKENS + slot, stop, num_tokens)
            per_token = (batch * num_tokens + tokens) * (heads * REPEATS) + row_head
            normed = normed_rows(head_of_rows, features, scales, batch, tokens, present, num_tokens, column, WIDTH)
            rotary = rotary_rows(features, tokens, present, column, WIDTH)
            values = load_rows(head_of_values, tokens, present, value_column, VALUE)
            mapped = features_of(normed, features, present, column, WIDTH, FEATURE_MAP)
            if sums is not None:
                weighted = mapped
                if weight is not None:
                    weighted *= tl.load(weight + per_token, mask=present, other=0.0)[:, None]
                total += tl.sum(tl.reshape(weighted, (BLOCK_TOKENS // 16, 16, BLOCK_WIDTH)), axis=0)
            if scale is not None:
                values = values.to(tl.float32) * tl.load(scale + per_token, mask=present, other=0.0)[:, None]
                if PRECISION == "tf32":
                    values = to_tf32(values)
            turned = rotate(mapped, rotary, 1, BLOCK_TOKENS, BLOCK_WIDTH)
            result = add_product(result, tl.trans(turned), values, PRECISION)
    pointers = products + matrix * (WIDTH * VALUE) + column[:, None] * VALUE + value_column[None, :]
    if matrix_scales is not None:
        power, inverse = tile_scale(result)
        tl.store(matrix_scales + matrix, power)
        result = (result * inverse).to(tl.float16)
    tl.store(pointers, result, mask=(column < WIDTH)[:, None] & (value_column < VALUE)[None, :])
    if sums is not None:
        tl.store(sums + matrix * WIDTH + column, tl.sum(total, axis=0), mask=column < WIDTH)


def fused_outer(
    rows: Tensor, value: Tensor, features: Features, map_name: str, table: Tensor, heads: int, lines: tuple[int, int],
    *, dtype: torch.dtype, total: bool, scale: Tensor | None = None, weight: Tensor | None = None,
) -> Sums:  # fmt: skip
    """Σ ψ(x_t) (scale_t value_t)ᵀ and Σ weight_t φ(x_t) over the tokens of each block of a group of lines.

    Args:
        rows: Projected queries or keys x, `[B, T, H, K]`.
        value: `[B, T, H, V]`.
        features: See [`Features`].
        map_name: `kernel` of an entry of [`mhla_hf.ops.FEATURE_MAPS`].
        table: Token of each slot, int32 `[M, N]`.
        heads: G; H / G heads in a row are summed.
        lines: The first line of the group and its number of lines, L.
        dtype: Dtype of the products, see [`outer.Sums`].
        total: Whether to sum features too.
        scale: float32 `[B, T, H]`; 1 if not given.
        weight: float32 `[B, T, H]`; 1 if not given.

    Returns:
        The products `[L, M', K, V]` and the sums, see [`outer.Sums`].
    """
    width, columns, blocks = rows.shape[3], value.shape[3], row_count(table.shape[0])
    products = rows.new_empty(lines[1], blocks, width, columns, dtype=dtype)
    scales = rows.new_empty(1, lines[1], blocks, dtype=torch.float32) if dtype == torch.float16 else None
    sums = rows.new_empty(lines[1], blocks, width, dtype=torch.float32) if total else None
    right_type = rows.dtype if scale is None else torch.float32
    launch(
        fused_outer_kernel, lines[1] * blocks, as_rows(rows), as_rows(value), scale, weight, features, table,
        products, scales, sums, lines=lines,
        **fused_options(rows, columns, table, map_name, heads, padded(columns), right_type),
    )  # fmt: skip
    return Sums(products, scales, sums, None)


@triton.jit(do_not_specialize=COUNTS)
def fused_attend_kernel(
    query, gate, output_weight, features, table, matrices, matrix_scales, vectors, output,
    first_line, lines, eps, output_eps, num_tokens, num_blocks, slots,
    heads, REPEATS: tl.constexpr, WIDTH: tl.constexpr, VALUE: tl.constexpr, BLOCK_WIDTH: tl.constexpr,
    BLOCK_VALUE: tl.constexpr, BLOCK_TOKENS: tl.constexpr, FEATURE_MAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The output of the head of this file, without norm, divisor or gate where its tensor is None.

    heads is the number of heads of `matrices`, for a group of lines from `first_line` on `[lines, M', WIDTH, VALUE]`,
    to be multiplied with `matrix_scales` `[lines, M']` if these are given; REPEATS heads of the rows share one. One
    program holds all columns of a head's output, for its norm.
    """
    batch, row_head, block, _, matrix = place_of_program(1, num_blocks, first_line, lines, heads, REPEATS)
    column, slot = tl.arange(0, BLOCK_WIDTH), tl.arange(0, BLOCK_TOKENS)
    value_column = tl.arange(0, BLOCK_VALUE)
    block_table = table + block * slots
    entries = slot_entries(block_table, slot, slots, num_tokens)
    weights = load_matrix(matrices + matrix * (WIDTH * VALUE), column, value_column, VALUE, 1, WIDTH, VALUE)
    weights = factors(weights, PRECISION)
    factor = 1.0
    if matrix_scales is not None:
        factor = tl.load(matrix_scales + matrix)
    scales = channel_scales(features, row_head, column, WIDTH, BLOCK_WIDTH)
    if vectors is not None:
        sums = tl.load(vectors + matrix * WIDTH + column, mask=column < WIDTH, other=0.0)
    if output_weight is not None:
        norm_scale = tl.load(output_weight + value_column, mask=value_column < VALUE, other=0.0).to(tl.float32)
    queries = head_rows(query, batch, row_head)
    outputs = dense_head_rows(output, batch, row_head, num_tokens, heads * REPEATS, VALUE)
    if gate is not None:
        gate_rows = head_rows(gate, batch, row_head)
        tokens, present = entry_tokens(entries, num_tokens)
        next_gates = load_rows(gate_rows, tokens, present, value_column, VALUE)
    for offset in range(0, slots, BLOCK_TOKENS):
        tokens, present = entry_tokens(entries, num_tokens)
        entries = slot_entries(block_table, offset + BLOCK_TOKENS + slot, slots, num_tokens)
        if gate is not None:
            gates = next_gates.to(tl.float32)
            next_tokens, next_present = entry_tokens(entries, num_tokens)
            next_gates = load_rows(gate_rows, next_tokens, next_present, value_column, VALUE)
        normed = normed_rows(queries, features, scales, batch, tokens, present, num_tokens, column, WIDTH)
        rotary = rotary_rows(features, tokens, present, column, WIDTH)
        mapped = features_of(normed, features, present, column, WIDTH, FEATURE_MAP)
        turned = rotate(mapped, rotary, 1, BLOCK_TOKENS, BLOCK_WIDTH)
        result = row_product(turned, weights, PRECISION)
        row_factor = tl.full((BLOCK_TOKENS,), 1.0, tl.float32) * factor
        if vectors is not None:
            row_factor /= tl.where(present, denominators(mapped, sums, eps), 1.0)
        result *= row_factor[:, None]
        if output_weight is not None:
            mean_square = tl.sum(result * result, axis=1) / VALUE
            result = result * inverse_rms(mean_square, output_eps, present)[:, None] * norm_scale[None, :]
        if gate is not None:
            result = result * gates * tl.sigmoid(gates)
        store_rows(outputs, tokens, present, value_column, result, VALUE)


def fused_attend(
    query: Tensor, matrices: Tensor, scales: Tensor | None, vectors: Tensor | None, features: Features, map_name: str,
    table: Tensor, heads: int, lines: tuple[int, int], output: Tensor, *, eps: float = 0.0, gate: Tensor | None = None,
    output_weight: Tensor | None = None, output_eps: float = 0.0, is_gradient: bool = False,
) -> None:  # fmt: skip
    """Computes norm(ψ(q)ᵀ matrix / (φ(q)·vector + eps)) · silu(gate) for a group of lines.

    Args:
        query: Projected rows, `[B, T, H, K]`.
        matrices: Mixed summaries, or gradients of summaries, `[L, M', K, V]`, dense.
        scales: What float16 matrices are to be multiplied with, float32 `[L, M']`.
        vectors: Mixed sums, float32 `[L, M', K]`, dense; None does not divide.
        features: See [`Features`].
        map_name: `kernel` of an entry of [`mhla_hf.ops.FEATURE_MAPS`].
        table: Token of each slot, int32 `[M, N]`.
        heads: Heads of the matrices; H / heads of the rows share one.
        lines: The first line of the group and its number of lines, L.
        output: To be written, `[B, T, H, V]`, dense.
        eps: Added to the denominator.
        gate: `[B, T, H, V]`; None for no gate.
        output_weight: Weight of the RMSNorm of each head's output, `[V]`; None for no norm.
        output_eps: Epsilon of that norm.
        is_gradient: Whether all bits of float16 matrices count beside bfloat16 rows.
    """
    columns, matrix_type = matrices.shape[3], torch.float32 if is_gradient else matrices.dtype
    launch(
        fused_attend_kernel, lines[1] * table.shape[0] * query.shape[2] // heads,
        as_rows(query), as_rows(gate), output_weight, features, table, matrices, scales,
        vectors, output, lines=lines, eps=eps, output_eps=output_eps,
        **fused_options(query, columns, table, map_name, heads, padded(columns), matrix_type),
    )  # fmt: skip
