# SPDX-License-Identifier: Apache-2.0
"""Shared by the tests of the recurrent form's kernels: inputs, states, and their comparison."""

from __future__ import annotations

import torch
from torch.utils.flop_counter import FlopCounterMode

from mhla_hf.ops import MHLAState, empty_state


STATE = ("summaries", "current", "prefix", "upcoming", "left", "num_left", "position")
KERNEL = "mhla_hf.decode_token"


def make_inputs(
    device: str,
    length: int,
    *,
    heads: int = 2,
    key_heads: int = 1,
    per_head: bool = False,
    width: int = 5,
    rows: int = 2,
    dtype: torch.dtype = torch.float32,
    seed: int | None = None,
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Batch of 2; few rows of mixing weights, so that decoding soon crosses the end of the matrix."""
    generator = torch.Generator().manual_seed(length if seed is None else seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=dtype).to(device)

    inputs = {
        "query": normal(2, length, heads, width),
        "key": normal(2, length, key_heads, width),
        "value": normal(2, length, key_heads, 3),
        "normalizer_query": normal(2, length, heads, width).abs() + 0.05,
        "normalizer_key": normal(2, length, key_heads, width).abs() + 0.05,
    }
    return inputs, normal(*((heads, rows, rows) if per_head else (rows, rows))).abs() + 0.05


def start(inputs: dict[str, torch.Tensor], mixing: torch.Tensor, block_size: int, **options: object) -> MHLAState:
    """The empty state for these inputs; `options` are those of `empty_state`."""
    key, value = inputs["key"], inputs["value"]
    return empty_state(
        2, key.shape[2], key.shape[3], value.shape[3], block_size, mixing.shape[-1], device=key.device,
        num_mixing_heads=None if mixing.dim() == 2 else mixing.shape[0], **options,
    )  # fmt: skip


def part(inputs: dict[str, torch.Tensor], first: int, last: int) -> dict[str, torch.Tensor]:
    """The tokens from `first` on, up to `last`."""
    return {name: tensor[:, first:last] for name, tensor in inputs.items()}


def assert_same_state(actual: MHLAState, expected: MHLAState, rtol: float = 1e-4, atol: float = 1e-5) -> None:
    """Compares every tensor of two states, NaN for NaN."""
    for name in STATE:
        torch.testing.assert_close(
            getattr(actual, name), getattr(expected, name), rtol=rtol, atol=atol, equal_nan=True
        )  # fmt: skip


def kernel_counted(counter: FlopCounterMode) -> bool:
    """Whether the decoding kernel ran; by name, since it may not even be imported."""
    return KERNEL in {str(operator) for operator in counter.get_flop_counts()["Global"]}
