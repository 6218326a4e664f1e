# SPDX-License-Identifier: Apache-2.0
"""Sizes at which the operator is measured."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, TypeVar

import torch

from ..layouts.blocks import BlockLayout, choose_blocks


Case = TypeVar("Case", bound=Any)

SMALL = "-small"
"""Suffix of the names of sizes for a CPU."""


@dataclass(frozen=True, kw_only=True)
class OperatorShape:
    """One problem: self-attention of T tokens with H heads of width K = V.

    Args:
        name: Name for `--shapes`.
        group: Group of shapes that form one curve over T.
        batch: B.
        heads: H.
        width: K and V.
        grid: Tokens along each axis.
        blocks: Blocks along each axis; as many as [`choose_blocks`] gives if left out.
        chunk: Tokens of a block of causal attention, in place of `blocks`; None for attention in both directions.
        quick: Whether `--quick` measures it.
    """

    name: str
    group: str
    batch: int
    heads: int
    width: int
    grid: tuple[int, ...]
    blocks: tuple[int, ...] | None = None
    chunk: int | None = None
    quick: bool = False

    @property
    def tokens(self) -> int:
        """T."""
        return math.prod(self.grid)

    @property
    def causal(self) -> bool:
        """True where tokens look back only."""
        return self.chunk is not None

    @property
    def rows(self) -> int:
        """B · H, independent attention problems."""
        return self.batch * self.heads

    def layout(self) -> BlockLayout:
        """Block layout of the tokens."""
        return _layout(self.grid, self.blocks, self.chunk)

    def tensor_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of each of q, k, v and o."""
        return self.batch * self.tokens * self.heads * self.width * dtype.itemsize

    def least_bytes(self, dtype: torch.dtype, backward: bool) -> int:
        """Lower bound of the bytes moved: q, k, v and o once, and with a backward pass their gradients once.

        A backward pass of its own exceeds it, since it reads q, k and v again.
        """
        return (8 if backward else 4) * self.tensor_bytes(dtype)

    def flops(self, family: str, backward: bool) -> int:
        """Floating-point operations that a family of attention needs.

        softmax: 4 B H T² K, half of it for causal attention, and 2.5 times as much again for the backward pass, which
        makes the scores once more (FlashAttention-2, arXiv 2307.08691, section 4.1). linear: 2 B H T K V for the
        summaries of keys and values and as much for the queries' products with them. mhla: the same, and 2 B H M² K V
        for mixing, half of it for causal attention (arXiv 2601.07832, section 3). Both have, where they are causal in
        chunks of C tokens, 2 B H T C K more for the tokens of one chunk among each other, half of two products.
        Backward passes of these compute two products for each of the forward pass. Feature maps, normalisers and
        softmax itself count nothing.
        """
        if family == "softmax":
            forward = 4 * self.rows * self.tokens**2 * self.width // (2 if self.causal else 1)
            return forward * 7 // 2 if backward else forward
        forward = 4 * self.rows * self.tokens * self.width**2
        if self.chunk is not None:
            forward += 2 * self.rows * self.tokens * self.chunk * self.width
        if family == "mhla":
            mixing = 2 * self.rows * self.layout().num_blocks ** 2 * self.width**2
            forward += mixing // (2 if self.causal else 1)
        return 3 * forward if backward else forward


@cache
def _layout(grid: tuple[int, ...], blocks: tuple[int, ...] | None, chunk: int | None) -> BlockLayout:
    if chunk is not None:
        return BlockLayout(grid=grid, block_size=(chunk,))
    return BlockLayout(grid=grid, blocks=blocks or choose_blocks(grid))


# Heads and widths: Wan-AI/Wan2.1-T2V-1.3B and -14B, facebook/DiT-XL-2, Efficient-Large-Model/Sana_1600M (diffusers'
# defaults of `SanaTransformer2DModel`), and for causal attention those of a language model of 400 million parameters.
_WAN = OperatorShape(
    name="wan", group="Wan", batch=1, heads=12, width=128, grid=(21, 30, 50), blocks=(3, 5, 10), quick=True
)
_DIT = OperatorShape(name="dit-256", group="DiT", batch=16, heads=16, width=72, grid=(16, 16))
_SANA = OperatorShape(name="sana-1024", group="SANA", batch=4, heads=70, width=32, grid=(32, 32))
_CAUSAL = OperatorShape(name="", group="causal", batch=1, heads=16, width=64, grid=(1,), chunk=64)
# Tokens of a causal batch, where one sequence has no more than that.
_CAUSAL_TOKENS = 16384


def _causal(kilotokens: int, suffix: str = "", heads: int = 16, batch_tokens: int = _CAUSAL_TOKENS) -> OperatorShape:
    tokens = kilotokens * 1024
    batch, name = max(1, batch_tokens // tokens), f"causal-{kilotokens}k{suffix}"
    return replace(_CAUSAL, name=name, batch=batch, heads=heads, grid=(tokens,), quick=kilotokens == 2)


_WAN_SMALL = replace(_WAN, name="wan-small", heads=2, grid=(6, 20, 30), blocks=(2, 4, 6))

SHAPES: dict[str, OperatorShape] = {
    shape.name: shape
    for shape in (
        _WAN,
        replace(_WAN, name="wan-720p", grid=(21, 45, 80), quick=False),
        replace(_WAN, name="wan-720p-h24", grid=(21, 45, 80), heads=24, quick=False),
        replace(_WAN, name="wan-720p-h40", grid=(21, 45, 80), heads=40, quick=False),
        _DIT,
        replace(_DIT, name="dit-512", grid=(32, 32), quick=True),
        _SANA,
        replace(_SANA, name="sana-2048", grid=(64, 64)),
        *(_causal(kilotokens) for kilotokens in (2, 4, 8, 16, 32, 64, 128)),
        _WAN_SMALL,
        replace(_WAN_SMALL, name="wan-720p-small", heads=1, grid=(6, 24, 40), blocks=(2, 4, 8), quick=False),
        replace(_WAN_SMALL, name="wan-720p-h40-small", grid=(6, 24, 40), blocks=(2, 4, 8), quick=False),
        replace(_DIT, name="dit-256-small", batch=2, heads=4, quick=True),
        replace(_DIT, name="dit-512-small", batch=2, heads=4, grid=(32, 32)),
        replace(_SANA, name="sana-1024-small", batch=1, heads=8),
        replace(_SANA, name="sana-2048-small", batch=1, heads=8, grid=(64, 64)),
        *(_causal(kilotokens, SMALL, heads=2, batch_tokens=4096) for kilotokens in (1, 2, 4, 8)),
    )
}
"""All shapes by name."""


def check_names(argument: str, names: Sequence[str], known: Collection[str]) -> None:
    """Refuses unknown names in an argument.

    Raises:
        ValueError: If there is one.
    """
    for name in names:
        if name not in known:
            raise ValueError(f"{argument}={name!r} must be one of {', '.join(known)}.")


def choose_cases(
    argument: str, cases: Mapping[str, Case], names: Sequence[str] | None, device: torch.device, quick: bool
) -> list[Case]:
    """The cases with some names, or those that suit a device.

    Args:
        argument: Name of the argument that holds the names, for the error.
        cases: `SHAPES` or `MODEL_CASES`.
        names: Names of cases; None for all on a GPU, and the small ones on a CPU.
        device: Device that they run on.
        quick: The few quick ones only, without names.

    Raises:
        ValueError: If a name is unknown.
    """
    if names is None:
        suited = [case for name, case in cases.items() if name.endswith(SMALL) == (device.type == "cpu")]
        return [case for case in suited if case.quick or not quick]
    check_names(argument, names, cases)
    return [cases[name] for name in names]
