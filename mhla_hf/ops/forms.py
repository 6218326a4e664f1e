# SPDX-License-Identifier: Apache-2.0
"""`mhla_attention`, and its three forms in plain torch: dense (the oracle), block-parallel, and causal in chunks.

The dense form is slow on purpose, O(T²) in time and memory: one plain tensor expression for each formula, in the dtype
of its inputs. All other forms are tested against it. The block-parallel form is three batched matrix products, linear
in the number of tokens. In the chunked form finished chunks contribute whole, a token's own chunk up to the token.

Shape letters: B batch, T tokens, H feature heads, K query/key width, V value width, M blocks, N tokens of a block.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ..layouts.blocks import BlockLayout, is_open
from ..layouts.sequences import SequenceLayout
from ..utils.messages import check_choice
from .backends import choose_backend, log_fallback
from .band import StoredMixing, extend_mixing, numerator_and_product, prefix_and_own, sequence_mixing
from .definitions import OPERATOR_BACKENDS
from .normalizers import PRODUCTS
from .operands import (
    Operands,
    autocast_type,
    check_attention,
    divide,
    finite_tokens,
    first_blocks,
    head_blocks,
    records_gradients,
    spoil_tokens,
)
from .plans import decide, decided, is_capturing, is_plain, kind_of, planned
from .recurrent import PART_CHUNKS, empty_state, extend
from .sums import BlockMixing, mix_summaries, repeat_heads


# Numbers of a head that are computed apart on a CPU: below, calls from Python cost more than copies.
_MIN_HEAD = 3 * 2**16


def mhla_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mixing: torch.Tensor,
    layout: BlockLayout | SequenceLayout,
    *,
    mixing_decay: torch.Tensor | None = None,
    normalizer_query: torch.Tensor | None = None,
    normalizer_key: torch.Tensor | None = None,
    normalizer: str = "query",
    causal: bool = False,
    eps: float = 1e-6,
    backend: str = "auto",
) -> torch.Tensor:
    """Multi-Head Linear Attention (arXiv 2601.07832, section 3).

    S_b = Σ_{j in b} φ(k_j) v_jᵀ, z_b = Σ_{j in b} φ(k_j), S̃_i = Σ_b m_ib S_b, z̃_i = Σ_b m_ib z_b and
    o_t = φ(q_t)ᵀ S̃_{b(t)} / (φ(q_t)ᵀ z̃_{b(t)} + eps). Linear in T while M² ≤ T; for sequences and causal attention,
    whose blocks may be more than M, whatever T is, but for kernels that look both ways. Sums run in float32 at least.
    Causal attention in plain torch over a [`BlockLayout`] runs in parts where no gradient is recorded, so that memory
    beside inputs and outputs does not grow with T.

    Args:
        query: Feature-mapped (and rotated, where there is RoPE) queries `[B, T, H, K]`.
        key: Feature-mapped (and rotated) keys `[B, T, H_kv, K]`; H_kv is H or a divisor of it (grouped queries).
        value: Values `[B, T, H_kv, V]`.
        mixing: Mixing weights, `[M, M]` or `[H, M, M]`. Causal layouts and sequences may have more blocks than M: see
            [`mhla_hf.ops.extend_mixing`].
        layout: Blocks of the T tokens: a [`BlockLayout`], which for causal attention is 1-D and made with
            `block_size`, or a `SequenceLayout` for padded or packed sequences, whose padding gets zeros.
        mixing_decay: For sequences and causal attention, `[]`, `[1]` or `[H]`: factor of the weights for every block
            of distance that the M × M weights do not reach, from 0 (none of them) to 1 (`None`).
        normalizer_query: Queries `[B, T, H, K]` for the denominator, where they differ from `query` (unrotated ones).
        normalizer_key: Keys `[B, T, H_kv, K]` for the denominator, likewise.
        normalizer: `"query"`, `"block_query"` (blocks of equal shape only, unless `causal`) or `"none"`.
        causal: Token t sees j ≤ t only; earlier blocks contribute whole.
        eps: Added to the denominator.
        backend: `"auto"`, `"torch"` (block-parallel or chunked), `"triton"` (the same by kernels) or `"naive"` (the
            dense oracle, for a [`BlockLayout`]); see [`mhla_hf.ops.choose_backend`].

    Returns:
        `[B, T, H, V]` in the dtype of `value`.

    Raises:
        ValueError: If an argument has a wrong shape, dtype, device or value; the message names the argument.

    Examples:
        >>> import torch
        >>> from mhla_hf import BlockLayout, mhla_attention
        >>> layout = BlockLayout(grid=(4, 6), blocks=(2, 3))
        >>> query, key, value = torch.rand(3, 1, layout.num_tokens, 2, 8)
        >>> mixing = torch.full((6, 6), 1 / 6)  # equal weights are vanilla linear attention
        >>> mhla_attention(query, key, value, mixing, layout).shape
        torch.Size([1, 24, 2, 8])
    """
    tensors = query, key, value, mixing, mixing_decay, normalizer_query, normalizer_key
    options = layout, normalizer, causal, eps, backend
    kind = None
    if type(layout) is BlockLayout and is_plain(tensors):
        # True equals 1, and is not allowed everywhere.
        kind = kind_of(tensors, "mhla_attention", *options, type(causal), type(eps), torch.is_grad_enabled())
    if kind is None or records_gradients(*tensors):
        return _attend(*tensors, *options, kind)
    return planned(kind, _attend, tensors, *options, kind)


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mixing: torch.Tensor,
    mixing_decay: torch.Tensor | None,
    normalizer_query: torch.Tensor | None,
    normalizer_key: torch.Tensor | None,
    layout: BlockLayout | SequenceLayout,
    normalizer: str,
    causal: bool,
    eps: float,
    backend: str,
    kind: Any = None,
) -> torch.Tensor:
    """[`mhla_attention`], whose arguments are checked unless those of a call of this kind have been."""
    operands = Operands(query, key, value, normalizer_query, normalizer_key, normalizer, eps)
    chosen = decided(kind)
    if chosen is None:
        check_choice("backend", backend, OPERATOR_BACKENDS)
        check_attention(operands, mixing, layout, causal, mixing_decay)
        if backend == "naive":
            if isinstance(layout, SequenceLayout):
                raise ValueError("backend='naive' takes a BlockLayout, not a SequenceLayout.")
            return attend_naively(operands, mixing, layout, causal, mixing_decay)
        family = "causal" if causal else "block"
        chosen = choose_backend(backend, query, key, value, normalizer_query, family=family, normalizer=normalizer)
        if kind is not None and not is_capturing((query,)):
            decide(kind, chosen)
    blocks: torch.Tensor | StoredMixing | BlockMixing = mixing
    if causal or isinstance(layout, SequenceLayout):
        stored = StoredMixing.of(mixing, mixing_decay, operands.dtype)
        blocks = stored if causal else sequence_mixing(stored, layout)
    return attend_on(chosen, operands, blocks, layout, causal=causal)


def attend_on(
    backend: str,
    operands: Operands,
    mixing: torch.Tensor | StoredMixing | BlockMixing,
    layout: BlockLayout | SequenceLayout,
    *,
    causal: bool,
) -> torch.Tensor:
    """Compute the linear form of the operator, whose arguments have been checked.

    Args:
        backend: `"torch"` or `"triton"`, as [`mhla_hf.ops.choose_backend`] chose.
        operands: The tokens and the normaliser.
        mixing: Weights of the layout's own blocks, `[..., M, M]`, or how these are mixed; where causal the stored
            ones.
        layout: The blocks.
        causal: Whether to look back only.

    Returns:
        `[B, T, H, V]` in the dtype of the values; zero for padding. A NaN or Inf in a key or value of packed documents
        makes the outputs of its head and document NaN, those after it alone where causal.
    """
    bad = None
    if not causal and first_blocks(layout) is not None:
        # Weights of zero between documents do not stop a NaN.
        key, normalizer_key, value, bad = finite_tokens(operands)
        normalizer_key = key if operands.pair[1] is None else normalizer_key
        operands = replace(operands, key=key, normalizer_key=normalizer_key, value=value)
    if backend == "triton" and causal and operands.entry.kernel is None:
        log_fallback(f"the causal kernels do not have normalizer={operands.normalizer!r}")
    elif backend == "triton":
        # Imported here alone: Triton need not be installed.
        from .triton.block import triton_block_mhla_attention
        from .triton.causal import triton_causal_mhla_attention

        if isinstance(mixing, StoredMixing):
            return triton_causal_mhla_attention(operands, mixing, layout)
        mixing = mixing if isinstance(mixing, torch.Tensor) else mixing.matrix()
        return spoil_tokens(triton_block_mhla_attention(operands, mixing, layout), bad, layout, causal=False)
    if isinstance(mixing, StoredMixing):
        return attend_by_chunk(operands, mixing, layout)
    return spoil_tokens(attend_by_block(operands, mixing, layout), bad, layout, causal=False)


def attend_naively(
    operands: Operands,
    mixing: torch.Tensor,
    layout: BlockLayout,
    causal: bool,
    mixing_decay: torch.Tensor | None = None,
) -> torch.Tensor:
    """MHLA as a dense matrix product, in the dtype of the tokens, which is one.

    o = A v with A_tj = m_{b(t),b(j)} · φ(q_t)·φ(k_j), rows divided by the normaliser; j ≤ t only where causal.

    Args:
        operands: The tokens and the normaliser.
        mixing: `[M, M]` or `[H, M, M]`; where causal, see [`mhla_hf.ops.extend_mixing`] for blocks past the end.
        layout: Blocks of the T tokens.
        causal: Whether to look back only.
        mixing_decay: See [`mhla_attention`].

    Returns:
        `[B, T, H, V]`.
    """
    query, entry = operands.query, operands.entry
    tokens = operands.key, operands.value, operands.normalizer_key
    key, value, normalizer_key = (repeat_heads(tensor, query.shape[2], 2) for tensor in tokens)
    # m_{b(t),b(j)} for every pair of tokens, `[..., T, T]`.
    block = layout.block_of_token.to(query.device)
    if causal:
        mixing = extend_mixing(mixing, layout.num_blocks, causal=True, mixing_decay=mixing_decay)
    token_mixing = mixing.to(query.dtype)[..., block[:, None], block[None, :]]
    weights = token_mixing * torch.einsum("bthk,bjhk->bhtj", query, key)
    bad = ~value.isfinite().all(dim=-1, keepdim=True)
    if causal:
        weights, value = weights.tril(), value.masked_fill(bad, 0)
    numerator = torch.einsum("bhtj,bjhv->bthv", weights, value)
    if causal:
        # A zero weight does not stop the NaN of a later value.
        numerator = numerator.masked_fill(bad.cumsum(dim=1) > 0, float("nan"))
    if not entry.divides:
        return numerator
    product_of = PRODUCTS[operands.normalizer].dense
    product = product_of(operands.normalizer_query, normalizer_key, token_mixing, layout, causal)
    return numerator / entry.divisor(product.transpose(1, 2).unsqueeze(-1), operands.eps)


def attend_by_block(
    operands: Operands, mixing: torch.Tensor | BlockMixing, layout: BlockLayout | SequenceLayout
) -> torch.Tensor:
    """MHLA by block summaries.

    S_b = Σ φ(k) vᵀ and z_b = Σ φ(k) for each block, S̃_i = Σ_b m_ib S_b and z̃_i = Σ_b m_ib z_b, then
    o_t = φ(q_t)ᵀ S̃ / (φ(q_t)ᵀ z̃ + eps) (paper, section 3). Sums over tokens are in float32 at least, which cannot
    overflow for fp16 inputs at any practical length.

    Args:
        operands: The tokens and the normaliser.
        mixing: Weights of the layout's own blocks, `[..., M, M]`, or how these are mixed.
        layout: The blocks.

    Returns:
        `[B, T, H, V]` in the dtype of the values; zero for padding.
    """
    dtype, count = operands.dtype, operands.key.shape[2]
    if isinstance(mixing, torch.Tensor):
        mixing = mixing.to(dtype)
    # Autocast would silently run the products in half precision, `.to(float32)` or not.
    with torch.autocast(autocast_type(operands.query.device), enabled=False):
        # Weights of documents are those of batch entries.
        if not isinstance(mixing, torch.Tensor) or mixing.dim() > 3 or not _gains_by_head(operands.key):
            return _attend_by_block(operands, mixing, layout)
        # Each key/value head with its query heads.
        tokens = [[None] * count if x is None else x.chunk(count, 2) for x in (*operands.tokens, *operands.pair)]
        weights = mixing.chunk(count) if mixing.dim() > 2 and len(mixing) > 1 else [mixing] * count
        heads = [
            _attend_by_block(Operands(*head, operands.normalizer, operands.eps), own, layout)  # type: ignore[call-arg]
            for *head, own in zip(*tokens, weights)
        ]
        return torch.cat(heads, dim=2)


def _gains_by_head(key: torch.Tensor) -> bool:
    """Whether to compute one key/value head after the other: the caches of a CPU hold what is copied of one."""
    head = key.shape[0] * key.shape[1] * key.shape[3]
    return key.device.type == "cpu" and not torch.compiler.is_compiling() and key.shape[2] > 1 and head >= _MIN_HEAD


def _attend_by_block(
    operands: Operands, mixing: torch.Tensor | BlockMixing, layout: BlockLayout | SequenceLayout
) -> torch.Tensor:
    """The same in the dtype of the sums, for some of the heads."""
    (query, key, value), dtype, entry = operands.tokens, operands.dtype, operands.entry
    query_blocks, key_blocks, value_blocks = (head_blocks(x, layout, dtype) for x in (query, key, value))
    if isinstance(mixing, torch.Tensor) and _pairs_cost_less(query_blocks, value_blocks):
        output = _attend_by_pair(query_blocks, key_blocks, value_blocks, mixing)
    else:
        # Without a name for the summaries, which would keep them beside their mixtures.
        output = query_blocks @ mix_summaries(mixing, key_blocks.transpose(-1, -2) @ value_blocks, query.shape[2])
    product = None
    if entry.divides:
        if operands.normalizer_query is not query:
            query_blocks = head_blocks(operands.normalizer_query, layout, dtype)
        if operands.normalizer_key is not key:
            key_blocks = head_blocks(operands.normalizer_key, layout, dtype)
        product = PRODUCTS[operands.normalizer].block(query_blocks, key_blocks.sum(dim=-2), mixing)
    return divide(operands, output, product, layout).to(value.dtype)


def _pairs_cost_less(query: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether all pairs of tokens cost less than summaries, as they do where tokens are few or blocks small.

    Multiply-adds are counted, and every number that is written as 24 of them, as measured on a CPU.
    """
    (blocks, tokens, width), value_width = query.shape[-3:], value.shape[-1]
    if is_open(blocks):
        return False
    pairs, summaries = (blocks * tokens) ** 2, blocks * width * value_width
    cost, other = pairs * (width + value_width + 48), summaries * (2 * tokens + blocks + 48)
    # Nor do they take more memory than summaries and their mixtures.
    return cost < other and pairs <= 2 * summaries


def _attend_by_pair(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mixing: torch.Tensor) -> torch.Tensor:
    """The numerator of MHLA from the pairs of all tokens, for small blocks; `[B, H, M, N, V]`.

    Args:
        query: `[B, H, M, N, K]`.
        key: `[B, H_kv, M, N, K]`.
        value: `[B, H_kv, M, N, V]`.
        mixing: `[..., M, M]`.
    """
    shape = query.shape[:4]
    query, key, value = (tokens.flatten(2, 3) for tokens in (query, key, value))
    key, value = (repeat_heads(tokens, query.shape[1], 1) for tokens in (key, value))
    products = (query @ key.transpose(-1, -2)).unflatten(-1, shape[2:]).unflatten(2, shape[2:])
    weights = products * mixing[..., :, None, :, None]
    return (weights.flatten(4).flatten(2, 3) @ value).unflatten(2, shape[2:])


def attend_by_chunk(operands: Operands, mixing: StoredMixing, layout: BlockLayout | SequenceLayout) -> torch.Tensor:
    """Causal MHLA, block by block and with blocks mixed in chunks.

    o_t = φ(q_t)ᵀ (Σ_{b<i} m_ib S_b + m_ii Σ_{j≤t, j in i} φ(k_j) v_jᵀ), divided by the same expression with z.
    T need not be a multiple of the block size. A NaN or Inf in a key or value makes the outputs of its head NaN from
    that token on, and leaves the tokens before it (and other documents) alone. One in a query stays with its token;
    under `"block_query"`, whose sum has the queries of earlier blocks in it, it reaches the tokens at the same
    position of later blocks.

    Args:
        operands: The tokens and the normaliser.
        mixing: The stored weights, in the dtype of the sums; see [`mhla_hf.ops.extend_mixing`] for longer texts.
        layout: A 1-D layout made with `block_size`, or a [`SequenceLayout`].

    Returns:
        `[B, T, H, V]` in the dtype of the values; zero for padding.
    """
    query, key, value = operands.tokens
    dtype, entry = operands.dtype, operands.entry
    if _runs_in_parts(operands, mixing, layout):
        assert isinstance(layout, BlockLayout)
        state = empty_state(
            key.shape[0], key.shape[2], key.shape[3], value.shape[3], layout.max_block_tokens, mixing.num_blocks,
            num_mixing_heads=query.shape[2] if mixing.is_per_head else key.shape[2], dtype=dtype, device=key.device,
        )  # fmt: skip
        return extend(operands, mixing, state, None)[0]
    first = first_blocks(layout)
    with torch.autocast(autocast_type(query.device), enabled=False):
        *clean, bad = finite_tokens(operands)
        key, normalizer_key, value = (head_blocks(x, layout, dtype) for x in clean)
        normalizer_query = query_blocks = head_blocks(query, layout, dtype)
        pair = None
        if operands.pair[0] is not None:
            normalizer_query = head_blocks(operands.normalizer_query, layout, dtype)
            pair = normalizer_query, normalizer_key
        product: torch.Tensor | None = None
        if entry.mixes_sums and entry.divides:
            output, product, _ = numerator_and_product(query_blocks, key, value, pair, mixing, first)
        else:
            output = prefix_and_own(query_blocks, key, value, mixing, first)[0]
            if entry.divides:
                product = PRODUCTS[operands.normalizer].chunked(normalizer_query, normalizer_key, mixing, first)
        output = divide(operands, output, product, layout)
    return spoil_tokens(output, bad, layout).to(operands.value.dtype)


def _runs_in_parts(operands: Operands, mixing: StoredMixing, layout: BlockLayout | SequenceLayout) -> bool:
    """Whether a decoding state is carried through the text, so that not all summaries exist at a time."""
    if not isinstance(layout, BlockLayout) or not operands.entry.mixes_sums or torch.compiler.is_compiling():
        return False
    is_long = layout.num_blocks > PART_CHUNKS * mixing.chunk_blocks
    same_width = operands.normalizer_query.shape == operands.query.shape
    return (
        is_long
        and same_width
        and not records_gradients(*operands.tokens, *operands.pair, mixing.weights, mixing.decay)
    )
