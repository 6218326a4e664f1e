# SPDX-License-Identifier: Apache-2.0
"""Calls of the operators whose kernels are compiled: the sizes that are measured, and other widths and types.

Tensors are on the meta device, so that sizes cost nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from mhla_hf import BlockLayout, mhla_attention
from mhla_hf.bench import SHAPES
from mhla_hf.ops import empty_state, mhla_step
from mhla_hf.ops.triton import (
    fits_fused_kernels,
    fits_hedgehog_kernels,
    fused_mhla_attention,
    hedgehog_features,
)
from mhla_hf.ops.triton.small import MAX_WIDTH


# Widths of heads, none of them with kernels of its own: rows that are not aligned, language models, DiT-XL/2, Wan, and
# the widest there is.
WIDTHS = (20, 64, 72, 128, 256)

Stages = Iterator[str]


def tokens(batch: int, length: int, heads: int, width: int, dtype: torch.dtype, trains: bool) -> torch.Tensor:
    """`[B, T, H, D]` as a projection leaves it."""
    projected = torch.empty(batch, length, heads * width, dtype=dtype, device="meta", requires_grad=trains)
    return projected.unflatten(-1, (heads, width))


def weights(*shape: int, trains: bool = False, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Mixing weights, or weights of a norm."""
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=trains)


def differentiate(output: torch.Tensor, *inputs: torch.Tensor) -> None:
    """The backward pass, for dense gradients of the outputs."""
    torch.autograd.grad(output, inputs, torch.empty_like(output))


def attention(
    name: str,
    normalizer: str = "query",
    *,
    heads: int | None = None,
    key_heads: int | None = None,
    trains: bool = False,
    per_head: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> Stages:
    """Attention, causal where the shape is, at one of the sizes that are measured."""
    shape = SHAPES[name]
    heads = heads or shape.heads
    yield from attend(
        shape.layout(), shape.batch, heads, shape.width, normalizer=normalizer, causal=shape.causal,
        key_heads=key_heads, trains=trains, per_head=per_head, dtype=dtype,
    )  # fmt: skip


def attend(
    layout: BlockLayout,
    batch: int,
    heads: int,
    width: int,
    *,
    normalizer: str = "query",
    causal: bool = False,
    trains: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    key_heads: int | None = None,
    per_head: bool = False,
    has_pair: bool = False,
) -> Stages:
    """Attention over the blocks of a layout."""
    key_heads = key_heads or heads
    query = tokens(batch, layout.num_tokens, heads, width, dtype, trains)
    key, value = (tokens(batch, layout.num_tokens, key_heads, width, dtype, trains) for _ in range(2))
    mixing = weights(*((heads,) if per_head else ()), *[layout.num_blocks] * 2, trains=trains)
    pair = {}
    if has_pair:
        pair = {"normalizer_query": query.detach().clone(), "normalizer_key": key.detach().clone()}
        pair = {name: tensor.requires_grad_(trains) for name, tensor in pair.items()}
    yield "forward"
    output = mhla_attention(
        query, key, value, mixing, layout, normalizer=normalizer, causal=causal, backend="triton", **pair
    )
    if trains:
        yield "backward"
        differentiate(output, query, key, value, mixing, *pair.values())


def fused(
    layout: BlockLayout,
    batch: int,
    heads: int,
    width: int,
    *,
    trains: bool = False,
    normalizer: str = "query",
    gated: bool = True,
    dtype: torch.dtype = torch.bfloat16,
) -> Stages:
    """From projections on, with norms and rotary embeddings, and a gate and a norm of the output if `gated`."""
    query, key, value, gate = (tokens(batch, layout.num_tokens, heads, width, dtype, trains) for _ in range(4))
    mixing = weights(layout.num_blocks, layout.num_blocks, trains=trains)
    norms = [weights(heads * width, trains=trains, dtype=dtype) for _ in range(2)]
    output_norm = weights(width, trains=trains, dtype=dtype)
    angles = weights(layout.num_tokens, width // 2)
    yield "forward"
    output = fused_mhla_attention(
        query, key, value, mixing, layout, feature_map="relu", feature_map_eps=0.0, normalizer=normalizer, eps=1e-6,
        scaling=1.0, rotary=(angles, angles), query_norm=(norms[0], 1e-6), key_norm=(norms[1], 1e-6),
        output_norm=(output_norm, 1e-6) if gated else None, gate=gate if gated else None,
    )  # fmt: skip
    if trains:
        yield "backward"
        differentiate(output, query, key, value, mixing, *norms, *([gate, output_norm] if gated else []))


def hedgehog(
    layout: BlockLayout,
    batch: int,
    heads: int,
    width: int,
    *,
    trains: bool = False,
    normalizer: str = "query",
    normed: bool = True,
    dtype: torch.dtype = torch.bfloat16,
) -> Stages:
    """From projections on, with hedgehog features and mixing weights of each head; norms and rotary if `normed`."""
    query, key, value = (tokens(batch, layout.num_tokens, heads, width, dtype, trains) for _ in range(3))
    maps = [weights(heads, width, width, trains=trains, dtype=dtype) for _ in range(2)]
    mixing = weights(heads, layout.num_blocks, layout.num_blocks, trains=trains)
    norms = [weights(heads * width, trains=trains, dtype=dtype) for _ in range(2 if normed else 0)]
    angles = weights(layout.num_tokens, width // 2)
    yield "forward"
    features = [
        hedgehog_features(
            rows, learned, rotary=(angles, angles) if normed else None, norm=(norm, 1e-6) if normed else None
        )
        for rows, learned, norm in zip((query, key), maps, norms or (None, None))
    ]
    output = mhla_attention(*features, value, mixing, layout, normalizer=normalizer, eps=1e-6, backend="triton")
    if trains:
        yield "backward"
        differentiate(output, query, key, value, mixing, *maps, *norms)


def generation(
    heads: int,
    width: int,
    *,
    key_heads: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    block_size: int = 64,
    per_head: bool = False,
) -> Stages:
    """One token in the state of a context of any length."""
    key_heads, stored = key_heads or heads, 32
    mixing = weights(*((heads,) if per_head else ()), stored, stored)
    state = empty_state(
        1, key_heads, width, width, block_size, stored, device="meta", summary_dtype=dtype,
        num_mixing_heads=heads if per_head else None,
    )  # fmt: skip
    query = tokens(1, 1, heads, width, dtype, False)
    key, value = (tokens(1, 1, key_heads, width, dtype, False) for _ in range(2))
    yield "decode"
    mhla_step(query, key, value, mixing, state, mixing_decay=weights(1) if per_head else None, backend="triton")


def width_case(width: int) -> Stages:
    """Everything at a width, in all types and with all kinds of normalisers: blocks and chunks of 128 tokens."""
    chunks, blocks = BlockLayout((8192,), block_size=(128,)), BlockLayout((8192,), blocks=(64,))
    short = BlockLayout((1024,), blocks=(16,)), BlockLayout((500,), blocks=(4,))
    for dtype, trains in (
        (torch.bfloat16, False), (torch.bfloat16, True), (torch.float16, True), (torch.float32, True),
    ):  # fmt: skip
        name = f"{str(dtype).removeprefix('torch.')}{' training' if trains else ''}"
        for causal, layout in ((False, blocks), (True, chunks)):
            for normalizer, has_pair in (("query", False), ("query", True), ("none", False)):
                stages = attend(
                    layout, 1, 8, width, normalizer=normalizer, causal=causal, trains=trains, dtype=dtype,
                    has_pair=has_pair,
                )  # fmt: skip
                yield from (f"{name} {stage}" for stage in stages)
        for index, layout in enumerate(short if width <= MAX_WIDTH else ()):
            for normalizer in ("query", "none"):
                stages = attend(
                    layout, 16, 16, width, normalizer=normalizer, causal=False, trains=trains, dtype=dtype,
                    key_heads=8 * (1 + index), per_head=index == 0,
                )  # fmt: skip
                yield from (f"{name} {stage}" for stage in stages)
        fits = fits_fused_kernels(width, width, True, dtype), fits_hedgehog_kernels(width, True, dtype)
        for is_fit, attend_projections in zip(fits, (fused, hedgehog)):
            for normalizer in ("query", "none") if is_fit else ():
                stages = attend_projections(blocks, 1, 8, width, trains=trains, normalizer=normalizer, dtype=dtype)
                yield from (f"{name} {stage}" for stage in stages)
        if not trains or dtype != torch.bfloat16:
            yield from (f"{name} {stage}" for stage in generation(8, width, dtype=dtype, block_size=128))


def both(run: Callable[..., Stages]) -> Stages:
    """Inference and training."""
    yield from run()
    yield from (f"training {stage}" for stage in run(trains=True))


_PLAIN = {"normalizer": "query", "causal": False, "dtype": torch.bfloat16}
_WAN, _DIT = SHAPES["wan"], SHAPES["dit-512"]

CASES: dict[str, Callable[[], Stages]] = {
    "wan": partial(both, partial(attention, "wan")),
    "wan-none": partial(both, partial(attention, "wan", "none")),
    "wan-per-head": partial(both, partial(attention, "wan", per_head=True)),
    "wan-fused": partial(both, partial(fused, _WAN.layout(), 1, _WAN.heads, _WAN.width)),
    "wan-fused-plain": partial(both, partial(fused, _WAN.layout(), 1, _WAN.heads, _WAN.width, gated=False)),
    "wan-hedgehog": partial(both, partial(hedgehog, _WAN.layout(), 1, _WAN.heads, _WAN.width)),
    "720p-24-heads": partial(both, partial(attention, "wan-720p", heads=24)),
    "dit": partial(both, partial(attention, "dit-512")),
    **{
        f"dit-{blocks[0] * blocks[1]}-blocks-{width}": partial(
            both, partial(attend, BlockLayout((32, 32), blocks=blocks), 16, 16, width)
        )
        for blocks in ((4, 4), (8, 4))
        for width in (64, 72)
    },
    "dit-ragged": partial(both, partial(attend, BlockLayout((32, 32), (6, 5)), 16, 16, 72, **_PLAIN)),
    "image": partial(both, partial(attend, BlockLayout((32, 32), (8, 4)), 16, 16, 64, **_PLAIN)),
    "image-grouped": partial(both, partial(attend, BlockLayout((32, 32), (8, 4)), 16, 16, 64, key_heads=8, **_PLAIN)),
    "sana": partial(both, partial(attention, "sana-1024")),
    "dit-fused": partial(both, partial(fused, _DIT.layout(), _DIT.batch, _DIT.heads, _DIT.width)),
    "dit-hedgehog": partial(both, partial(hedgehog, _DIT.layout(), _DIT.batch, _DIT.heads, _DIT.width, normed=False)),
    "minilm-hedgehog": partial(both, partial(hedgehog, BlockLayout((256,), block_size=(8,)), 8, 12, 32, normed=False)),
    "causal-2k": partial(both, partial(attention, "causal-2k")),
    "causal-32k": partial(both, partial(attention, "causal-32k")),
    "causal-32k-grouped": partial(both, partial(attention, "causal-32k", key_heads=4, per_head=True)),
    "decode": partial(generation, 16, 64),
    "decode-grouped": partial(generation, 16, 64, key_heads=4, per_head=True),
    **{f"width-{width}": partial(width_case, width) for width in WIDTHS},
}
"""Cases by name: generators that name each stage before they run it."""
