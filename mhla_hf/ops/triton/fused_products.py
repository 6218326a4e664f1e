# SPDX-License-Identifier: Apache-2.0
"""Sums and products of projected rows, whose features are computed inside of the kernels; both directions use them.

    φ(x) = feature map of scaling · norm(x), plus feature_eps;  ψ(x) = φ(x), rotated
    products_b = factor Σ_{t in b} ψ(x_t) (scale_t v_t)ᵀ,  sums_b = Σ_{t in b} weight_t φ(x_t)
    output_t   = norm(factor · ψ(x_t)ᵀ matrix_{b(t)} / (φ(x_t)·vector_{b(t)} + eps)) · silu(gate_t)

Everything that `block` leaves to torch runs inside: RMSNorm across heads, scaling, feature map, rotary embedding;
output norm and gate. Nothing but projections, the gate and the output passes through memory, once each.

Rotary embeddings turn neighbouring pairs of channels. The kernels keep even channels and odd ones apart: as rows of a
summary they may stand in any order, as long as keys and queries agree.

Programs run over (block, column tile, line), a line being a head of a batch entry, with lines next to each other:
those that run at the same time read the same rows of the rotary tables, and neighbouring bytes of q, k and v.

Shape letters: B batch, T tokens, H heads of the rows, G heads of the summaries (H or a divisor), K and V widths,
M blocks, N slots of a block.
"""

# No postponed annotations here: Triton reads `tl.constexpr` from the functions themselves.

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from .device_functions import (
    COUNTS,
    denominators,
    dense_head_rows,
    divide,
    head_rows,
    load_matrix,
    load_rows,
    product,
    slot_tokens,
    store_rows,
    to_matrix,
    to_tf32,
)
from .feature_maps import feature_map
from .launching import (
    MAX_TILE,
    as_rows,
    column_tile,
    multiplies_from_shared_memory,
    padded,
    product_precision,
    token_tile,
    warps,
)


class Features(NamedTuple):
    """The way from projected queries or keys to features, as all kernels take it.

    Attributes:
        norm_weight: Weight of an RMSNorm across heads, `[H · K]`; None for no norm.
        inverse_norm: 1 / rms of each token from [`inverse_norm`]; read only where there is a norm.
        cosine: Table of rotary embeddings for neighbouring pairs of channels, float32 `[T, K / 2]`, dense; or None.
        sine: The same.
        scaling: Factor of the rows before the feature map.
        feature_eps: Added to the features.
    """

    norm_weight: torch.Tensor | None
    inverse_norm: torch.Tensor | None
    cosine: torch.Tensor | None
    sine: torch.Tensor | None
    scaling: float
    feature_eps: float


def fits_fused_kernels(width: int, value: int, rotary: bool, dtype: torch.dtype) -> bool:
    """Whether heads of these widths fit the fused kernels, which hold a whole summary beside the tokens.

    For float16 it is held twice, to be multiplied exactly: wide ones would find no room in smaller GPUs.
    """
    room = MAX_TILE if dtype == torch.bfloat16 else MAX_TILE // 4
    return padded(width) * padded(value) <= room and not (rotary and width % 2)


def heads_together(tokens: torch.Tensor) -> torch.Tensor:
    """The tensor, copied only where the heads of a token do not lie side by side."""
    together = tokens.stride(-1) == 1 and tokens.stride(2) == tokens.shape[3]
    return tokens if together else tokens.contiguous()


def fused_options(
    rows: torch.Tensor, features: Features, table: torch.Tensor, groups: int, value: int, tile: int, most_tokens: int
) -> dict[str, Any]:
    """Arguments that all fused kernels share.

    Args:
        rows: `[B, T, H, K]`.
        features: See [`Features`].
        table: Token of each slot, int32 `[M, N]`.
        groups: G.
        value: V.
        tile: Columns of a summary that a program takes.
        most_tokens: Limit of the tokens that it reads at a time.
    """
    _, num_tokens, heads, width = rows.shape
    blocks, slots = table.shape
    return {
        "features": features,
        "table": table,
        "num_tokens": num_tokens,
        "num_blocks": blocks,
        "slots": slots,
        "HEADS": groups,
        "REPEATS": heads // groups,
        "WIDTH": width,
        "VALUE": value,
        # Even and odd channels are multiplied apart, 16 of each at least.
        "BLOCK_WIDTH": padded(width) if features.cosine is None else max(32, padded(width)),
        "BLOCK_VALUE": tile,
        "BLOCK_TOKENS": min(token_tile(slots, width), most_tokens),
        "num_stages": 2,
    }


def row_warps(size: int) -> int:
    """Warps of a program that holds one row of so many channels."""
    return 4 if size <= 4096 else 8


@triton.jit(do_not_specialize=COUNTS)
def inverse_root_mean_square_kernel(
    tokens, result, num_tokens, stride_batch, stride_token, eps, WIDTH: tl.constexpr, BLOCK_WIDTH: tl.constexpr
):
    """1 / sqrt(mean of squares + eps) of each row of `[B, T, WIDTH]`, float32 `[B, T]`; one program a row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK_WIDTH)
    start = tokens + (row // num_tokens) * stride_batch + (row % num_tokens) * stride_token
    values = tl.load(start + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    tl.store(result + row, 1.0 / tl.sqrt(tl.sum(values * values, axis=0) / WIDTH + eps))


def inverse_norm(tokens: torch.Tensor, eps: float) -> torch.Tensor:
    """1 / sqrt(mean of squares + eps) over the heads and channels of each token, float32 `[B, T]`."""
    tokens = heads_together(tokens)
    batch, num_tokens, heads, width = tokens.shape
    result = tokens.new_empty(batch, num_tokens, dtype=torch.float32)
    size = heads * width
    with torch.cuda.device_of(tokens):
        inverse_root_mean_square_kernel[(batch * num_tokens,)](
            tokens,
            result,
            num_tokens,
            tokens.stride(0),
            tokens.stride(1),
            eps,
            WIDTH=size,
            BLOCK_WIDTH=padded(size),
            num_warps=row_warps(size),
        )
    return result


@triton.jit
def line_of_program(lines, HEADS: tl.constexpr, REPEATS: tl.constexpr):
    """Place in a line, batch entry, head of the rows, and head of the summaries that REPEATS of the rows' share."""
    program, line = tl.program_id(0).to(tl.int64) // lines, tl.program_id(0).to(tl.int64) % lines
    row_head = line % (HEADS * REPEATS)
    return program, line // (HEADS * REPEATS), row_head, row_head // REPEATS


@triton.jit
def normed_rows(rows, features, batch, head, tokens, present, num_tokens, column, WIDTH: tl.constexpr):
    """scaling · norm(x) of some rows of one head, float32."""
    values = load_rows(rows, tokens, present, column, WIDTH).to(tl.float32)
    if features.norm_weight is not None:
        inverse = tl.load(features.inverse_norm + batch * num_tokens + tokens, mask=present, other=0.0)
        weight = tl.load(features.norm_weight + head * WIDTH + column, mask=column < WIDTH, other=0.0).to(tl.float32)
        values = values * inverse[:, None] * weight[None, :]
    return values * features.scaling


@triton.jit
def features_of(normed, features, present, column, WIDTH: tl.constexpr, FEATURE_MAP: tl.constexpr):
    """φ of normed rows, zero where there is no token or no column."""
    values = feature_map(normed, FEATURE_MAP) + features.feature_eps
    return tl.where(present[:, None] & (column < WIDTH)[None, :], values, 0.0)


@triton.jit
def rotary_rows(features, tokens, present, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr):
    """Rows of the tables of cosines and sines `[T, HALF]`."""
    pair = tl.arange(0, BLOCK_HALF)
    places = tokens[:, None] * HALF + pair[None, :]
    mask = present[:, None] & (pair < HALF)[None, :]
    cosines = tl.load(features.cosine + places, mask=mask, other=0.0)
    return cosines, tl.load(features.sine + places, mask=mask, other=0.0)


@triton.jit
def rotate(values, cosine, sine, TOKENS: tl.constexpr, BLOCK_HALF: tl.constexpr):
    """Even and odd channels of rows, rotated."""
    even, odd = tl.split(tl.reshape(values, (TOKENS, BLOCK_HALF, 2)))
    return even * cosine - odd * sine, even * sine + odd * cosine


@triton.jit(do_not_specialize=COUNTS)
def fused_outer_kernel(
    rows, value, scale, weight, features, table, products, sums,
    factor, num_tokens, num_blocks, slots, lines,
    HEADS: tl.constexpr, REPEATS: tl.constexpr, WIDTH: tl.constexpr, VALUE: tl.constexpr, BLOCK_WIDTH: tl.constexpr,
    BLOCK_VALUE: tl.constexpr, BLOCK_TOKENS: tl.constexpr, FEATURE_MAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The sums of the head of this file.

    Even channels of ψ come first if they are rotated. HEADS is the number of heads of `products`; each sums REPEATS
    heads of the rows. `scale` and `weight` are `[B, T, HEADS · REPEATS]`, or None for 1; without `sums` there are no
    sums.
    """
    program, line = tl.program_id(0).to(tl.int64) // lines, tl.program_id(0).to(tl.int64) % lines
    batch, head = line // HEADS, line % HEADS
    COLUMN_TILES: tl.constexpr = (VALUE + BLOCK_VALUE - 1) // BLOCK_VALUE
    block, column_tile = program // COLUMN_TILES, program % COLUMN_TILES
    HALF: tl.constexpr = WIDTH // 2
    BLOCK_HALF: tl.constexpr = BLOCK_WIDTH // 2
    column = tl.arange(0, BLOCK_WIDTH)
    pair = tl.arange(0, BLOCK_HALF)
    value_column = column_tile * BLOCK_VALUE + tl.arange(0, BLOCK_VALUE)
    total = tl.zeros((BLOCK_WIDTH,), tl.float32)
    if features.cosine is not None:
        even_sum = tl.zeros((BLOCK_HALF, BLOCK_VALUE), tl.float32)
        odd_sum = tl.zeros((BLOCK_HALF, BLOCK_VALUE), tl.float32)
    else:
        whole_sum = tl.zeros((BLOCK_WIDTH, BLOCK_VALUE), tl.float32)
    block_table = table + block * slots
    for repeat in range(REPEATS):
        row_head = head * REPEATS + repeat
        head_of_rows, head_of_values = head_rows(rows, batch, row_head), head_rows(value, batch, row_head)
        for offset in range(0, slots, BLOCK_TOKENS):
            tokens, present = slot_tokens(block_table, offset + tl.arange(0, BLOCK_TOKENS), slots, num_tokens)
            per_token = (batch * num_tokens + tokens) * (HEADS * REPEATS) + row_head
            normed = normed_rows(head_of_rows, features, batch, row_head, tokens, present, num_tokens, column, WIDTH)
            mapped = features_of(normed, features, present, column, WIDTH, FEATURE_MAP)
            if sums is not None:
                if weight is not None:
                    token_weight = tl.load(weight + per_token, mask=present, other=0.0)
                    total += tl.sum(mapped * token_weight[:, None], axis=0)
                else:
                    total += tl.sum(mapped, axis=0)
            values = load_rows(head_of_values, tokens, present, value_column, VALUE)
            if scale is not None:
                token_scale = tl.load(scale + per_token, mask=present, other=0.0)
                values = values.to(tl.float32) * token_scale[:, None]
                if PRECISION == "tf32":
                    values = to_tf32(values)
            if features.cosine is not None:
                cosines, sines = rotary_rows(features, tokens, present, HALF, BLOCK_HALF)
                even, odd = rotate(mapped, cosines, sines, BLOCK_TOKENS, BLOCK_HALF)
                even_sum += product(tl.trans(even), values, PRECISION)
                odd_sum += product(tl.trans(odd), values, PRECISION)
            else:
                whole_sum += product(tl.trans(mapped), values, PRECISION)
    matrix = (batch * HEADS + head) * num_blocks + block
    start = products + matrix * (WIDTH * VALUE)
    in_value = (value_column < VALUE)[None, :]
    if features.cosine is not None:
        mask = (pair < HALF)[:, None] & in_value
        pointers = start + pair[:, None] * VALUE + value_column[None, :]
        tl.store(pointers, to_matrix(even_sum * factor, products.dtype.element_ty, PRECISION), mask=mask)
        odd = to_matrix(odd_sum * factor, products.dtype.element_ty, PRECISION)
        tl.store(pointers + HALF * VALUE, odd, mask=mask)
    else:
        pointers = start + column[:, None] * VALUE + value_column[None, :]
        whole = to_matrix(whole_sum * factor, products.dtype.element_ty, PRECISION)
        tl.store(pointers, whole, mask=(column < WIDTH)[:, None] & in_value)
    if sums is not None:
        if column_tile == 0:
            tl.store(sums + matrix * WIDTH + column, total, mask=column < WIDTH)


def fused_outer(
    rows: torch.Tensor,
    value: torch.Tensor,
    features: Features,
    map_name: str,
    table: torch.Tensor,
    groups: int,
    *,
    factor: float,
    total: bool,
    dtype: torch.dtype,
    scale: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """factor Σ ψ(x_t) (scale_t value_t)ᵀ and Σ weight_t φ(x_t) over the tokens of each block.

    Args:
        rows: Projected queries or keys x, `[B, T, H, K]`.
        value: `[B, T, H, V]`.
        features: See [`Features`].
        map_name: `kernel` of an entry of [`mhla_hf.ops.FEATURE_MAPS`].
        table: Token of each slot, int32 `[M, N]`.
        groups: G; H / G heads in a row are summed.
        factor: Factor of the products.
        total: Whether the second is wanted.
        dtype: Of the products.
        scale: float32 `[B, T, H]`; 1 if not given.
        weight: float32 `[B, T, H]`; 1 if not given.

    Returns:
        `[B, G, M, K, V]`, and float32 `[B, G, M, K]` (empty unless `total`).
    """
    rows = heads_together(rows)
    batch, _, _, width = rows.shape
    columns, blocks = value.shape[-1], table.shape[0]
    tile = column_tile(width, columns)
    # Scales take registers, and so do the masks of padded widths, and products of more than bfloat16.
    padding = 64 < width < 128
    few_registers = rows.dtype == torch.float32 or (padding and not multiplies_from_shared_memory(rows.device))
    most_tokens = 16 if few_registers else 32 if padding or scale is not None or rows.dtype != torch.bfloat16 else 64
    products = rows.new_empty(batch, groups, blocks, width, columns, dtype=dtype)
    sums = rows.new_empty((batch, groups, blocks, width) if total else (0,), dtype=torch.float32)
    with torch.cuda.device_of(rows):
        fused_outer_kernel[(blocks * triton.cdiv(columns, tile) * batch * groups,)](
            as_rows(rows),
            as_rows(value),
            scale,
            weight,
            products=products,
            sums=sums if total else None,
            factor=factor,
            lines=batch * groups,
            FEATURE_MAP=map_name,
            PRECISION=product_precision(rows.dtype, rows.dtype if scale is None else dtype),
            num_warps=warps(width, tile),
            **fused_options(rows, features, table, groups, columns, tile, most_tokens),
        )
    return products, sums


@triton.jit(do_not_specialize=COUNTS)
def fused_attend_kernel(
    query, gate, output_weight, features, table, matrices, vectors, output,
    factor, eps, output_eps, num_tokens, num_blocks, slots, lines,
    HEADS: tl.constexpr, REPEATS: tl.constexpr, WIDTH: tl.constexpr, VALUE: tl.constexpr, BLOCK_WIDTH: tl.constexpr,
    BLOCK_VALUE: tl.constexpr, BLOCK_TOKENS: tl.constexpr, FEATURE_MAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The output of the head of this file, without norm, divisor or gate where its tensor is None.

    One program holds all columns of a head's output, for its norm.
    """
    block, batch, row_head, head = line_of_program(lines, HEADS, REPEATS)
    HALF: tl.constexpr = WIDTH // 2
    BLOCK_HALF: tl.constexpr = BLOCK_WIDTH // 2
    column = tl.arange(0, BLOCK_WIDTH)
    pair = tl.arange(0, BLOCK_HALF)
    value_column = tl.arange(0, BLOCK_VALUE)
    matrix = (batch * HEADS + head) * num_blocks + block
    start = matrices + matrix * (WIDTH * VALUE)
    if features.cosine is not None:
        even_weights = load_matrix(start, pair, value_column, VALUE, 1, HALF, VALUE)
        odd_weights = load_matrix(start + HALF * VALUE, pair, value_column, VALUE, 1, HALF, VALUE)
    else:
        weights = load_matrix(start, column, value_column, VALUE, 1, WIDTH, VALUE)
    if vectors is not None:
        sums = tl.load(vectors + matrix * WIDTH + column, mask=column < WIDTH, other=0.0)
    if output_weight is not None:
        norm_scale = tl.load(output_weight + value_column, mask=value_column < VALUE, other=0.0).to(tl.float32)
    queries = head_rows(query, batch, row_head)
    outputs = dense_head_rows(output, batch, row_head, num_tokens, HEADS * REPEATS, VALUE)
    block_table = table + block * slots
    for offset in range(0, slots, BLOCK_TOKENS):
        tokens, present = slot_tokens(block_table, offset + tl.arange(0, BLOCK_TOKENS), slots, num_tokens)
        normed = normed_rows(queries, features, batch, row_head, tokens, present, num_tokens, column, WIDTH)
        mapped = features_of(normed, features, present, column, WIDTH, FEATURE_MAP)
        if features.cosine is not None:
            cosines, sines = rotary_rows(features, tokens, present, HALF, BLOCK_HALF)
            even, odd = rotate(mapped, cosines, sines, BLOCK_TOKENS, BLOCK_HALF)
            result = product(even, even_weights, PRECISION)
            result += product(odd, odd_weights, PRECISION)
        else:
            result = product(mapped, weights, PRECISION)
        result = result * factor
        if vectors is not None:
            result = divide(result, denominators(mapped, sums, eps), present)
        if output_weight is not None:
            mean_square = tl.sum(result * result, axis=1) / VALUE
            result = result * (1.0 / tl.sqrt(mean_square + output_eps))[:, None] * norm_scale[None, :]
        if gate is not None:
            gates = load_rows(head_rows(gate, batch, row_head), tokens, present, value_column, VALUE).to(tl.float32)
            result = result * gates * tl.sigmoid(gates)
        store_rows(outputs, tokens, present, value_column, result, VALUE)


def fused_products(
    query: torch.Tensor,
    matrices: torch.Tensor,
    vectors: torch.Tensor | None,
    features: Features,
    map_name: str,
    table: torch.Tensor,
    *,
    factor: float,
    eps: float = 0.0,
    gate: torch.Tensor | None = None,
    output_weight: torch.Tensor | None = None,
    output_eps: float = 0.0,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """norm(factor · ψ(q)ᵀ matrix / (φ(q)·vector + eps)) · silu(gate).

    Args:
        query: Projected rows, `[B, T, H, K]`.
        matrices: Mixed summaries, or gradients of summaries, `[B, G, M, K, V]`, dense.
        vectors: Mixed sums, float32 `[B, G, M, K]`, dense; None does not divide.
        features: See [`Features`].
        map_name: `kernel` of an entry of [`mhla_hf.ops.FEATURE_MAPS`].
        table: Token of each slot, int32 `[M, N]`.
        factor: Factor of the products.
        eps: Added to the denominator.
        gate: `[B, T, H, V]`; None for no gate.
        output_weight: Weight of the RMSNorm of each head's output, `[V]`; None for no norm.
        output_eps: Of that norm.
        dtype: Of the result; that of `query` if not given.

    Returns:
        `[B, T, H, V]`.
    """
    query = heads_together(query)
    batch, num_tokens, heads, width = query.shape
    groups, blocks, columns = matrices.shape[1], matrices.shape[2], matrices.shape[-1]
    tile = padded(columns)
    # Tokens have to find room in registers, and in shared memory beside a summary.
    small = padded(width) * tile * matrices.element_size() <= 32 * 1024
    most_tokens = 64 if small or multiplies_from_shared_memory(query.device) else 16
    if query.dtype != torch.bfloat16:
        most_tokens = 32
    output = query.new_empty(batch, num_tokens, heads, columns, dtype=dtype)
    with torch.cuda.device_of(query):
        fused_attend_kernel[(blocks * batch * heads,)](
            as_rows(query),
            as_rows(gate),
            output_weight,
            matrices=matrices,
            vectors=vectors,
            output=output,
            factor=factor,
            eps=eps,
            output_eps=output_eps,
            lines=batch * heads,
            FEATURE_MAP=map_name,
            PRECISION=product_precision(query.dtype, matrices.dtype),
            num_warps=warps(width, tile),
            **fused_options(query, features, table, groups, columns, tile, most_tokens),
        )
    return output
