# SPDX-License-Identifier: Apache-2.0
"""Measurements of attention over very long inputs: time and memory, rounding error, and where it breaks down.

Attention goes by these names: `softmax` (torch's own), `linear` (plain linear attention), `mhla` (blocks as many as
the square root of the number of tokens), `mhla_fixed` (a fixed number of blocks) and, looking back only, `mhla_chunk`
(blocks of a fixed size, weights for a fixed number of them).

Shape letters: B batch, T tokens, R query tokens, H heads, K = V width, M blocks.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from mhla_hf import BlockLayout, MHLAConfig, mhla_attention
from mhla_hf.analysis import mhla_matrix, softmax_matrix
from mhla_hf.bench import (
    EPS,
    Inputs,
    OperatorShape,
    attend,
    free_memory,
    make_inputs,
    peak_memory,
    run_operator,
    time_in_rounds,
)
from mhla_hf.layers.mixing import initial_mixing
from mhla_hf.utils.machine import synchronize


# Looking both ways the tokens are those of a video: frames, rows and columns.
GRIDS = {
    256: (4, 8, 8),
    512: (8, 8, 8),
    1024: (4, 16, 16),
    2048: (8, 16, 16),
    4096: (8, 16, 32),
    8192: (8, 32, 32),
    16384: (16, 32, 32),
    32768: (16, 32, 64),
    65536: (16, 64, 64),
    131072: (32, 64, 64),
    262144: (32, 64, 128),
    524288: (32, 128, 128),
}
FIXED_BLOCKS = (4, 4, 4)
FIXED_CHUNK = 64
# Blocks that there are weights for where a text has as many as it needs.
STORED_BLOCKS = 32
# Runs that should take longer than this are timed one by one, in fewer rounds the longer they take.
_SLOW_SECONDS = 0.15
_ONCE_SECONDS = 2.0


def contestant_shapes(tokens: int, heads: int, width: int, causal: bool) -> dict[str, OperatorShape]:
    """The kinds of attention over some tokens, each with its blocks.

    Args:
        tokens: T, one of `GRIDS`.
        heads: H.
        width: K.
        causal: Whether tokens look back only; they are a sequence then, and a video otherwise.
    """
    grid = GRIDS[tokens]
    base = OperatorShape(1, heads, width, grid, _root_blocks(grid))
    if not causal:
        return {"softmax": base, "linear": base, "mhla": base, "mhla_fixed": replace(base, blocks=FIXED_BLOCKS)}
    base = replace(base, grid=(tokens,), blocks=None, chunk=FIXED_CHUNK)
    root = 2 ** math.ceil(math.log2(tokens) / 2)
    return {
        "softmax": base,
        "linear": base,
        "mhla": replace(base, chunk=root),
        "mhla_fixed": replace(base, chunk=tokens // math.prod(FIXED_BLOCKS)),
        "mhla_chunk": base,
    }


def _root_blocks(grid: tuple[int, ...]) -> tuple[int, ...]:
    """As many blocks of equal shape as M² ≤ T allows; all axes are powers of two."""
    blocks = [1] * len(grid)
    while (2 * math.prod(blocks)) ** 2 <= math.prod(grid):
        axis = max(range(len(grid)), key=lambda index: grid[index] / blocks[index])
        blocks[axis] *= 2
    return tuple(blocks)


def measure(
    *,
    times: Mapping[str, Any],
    errors: Mapping[str, Any],
    breakdown: Mapping[str, Any],
    device: torch.device,
) -> dict[str, Any]:
    """All measurements one after the other: side by side they would disturb each other's times.

    Args:
        times: Options of [`measure_times`].
        errors: Options of [`measure_errors`].
        breakdown: Options of [`measure_breakdown`].
        device: Device to run on.

    Returns:
        What these functions return, by the same names.
    """
    return {
        "times": measure_times(**times, device=device),
        "errors": measure_errors(**errors, device=device),
        "breakdown": measure_breakdown(**breakdown, device=device),
    }


def measure_times(
    *,
    lengths: Sequence[int],
    heads: int,
    width: int,
    dtype: str,
    seconds: float,
    longest_seconds: float,
    device: torch.device,
) -> dict[str, Any]:
    """Time and memory of all kinds of attention, in turns at each length.

    Args:
        lengths: Numbers of tokens, ascending.
        heads: H.
        width: K.
        dtype: Type of the tokens.
        seconds: Approximate time at each length and direction, where the runs are short.
        longest_seconds: A kind of attention is left out where one run should take longer, going by the length before.
        device: Device to run on.

    Returns:
        `rows`: one for each kind of attention, direction and length, with `forward_milliseconds`,
        `forward_backward_milliseconds`, `memory_bytes` (peak of the forward pass beyond inputs and output) and
        `forward_backward_memory_bytes`; `None` where it was left out, or where it or a shorter run
        failed, for the reason in `failed`.
    """
    rows: list[dict[str, Any]] = []
    expected: dict[tuple[str, bool, bool], float] = {}
    reasons: dict[tuple[str, bool], str] = {}
    for tokens in lengths:
        for causal in (False, True):
            shapes = contestant_shapes(tokens, heads, width, causal)
            at_length = {
                name: {
                    "attention": name,
                    "direction": "causal" if causal else "bidirectional",
                    "tokens": tokens,
                    "grid": list(shape.grid),
                    "blocks": shape.layout().num_blocks if name.startswith("mhla") else None,
                }
                for name, shape in shapes.items()
            }
            for backward in (False, True):
                inputs = _inputs(shapes, getattr(torch, dtype), device)
                runs = {name: partial(_run, name, inputs[name], shape, backward) for name, shape in shapes.items()}
                predicted = {name: expected.get((name, causal, backward), 0.0) for name in shapes}
                figures, failed = _measure(runs, predicted, device, seconds=seconds / 2, longest=longest_seconds)
                reasons |= {(name, causal): reason for name, reason in failed.items()}
                prefix = "forward_backward_" if backward else ""
                for name, (milliseconds, memory) in figures.items():
                    at_length[name]["forward_backward_milliseconds" if backward else "forward_milliseconds"] = (
                        milliseconds
                    )
                    at_length[name][f"{prefix}memory_bytes"] = memory
                    # Twice the tokens are at most four times the work.
                    seconds_once = math.inf if milliseconds is None else milliseconds / 1e3
                    expected[name, causal, backward] = 4 * seconds_once
                free_memory(device)
            for name, row in at_length.items():
                if (name, causal) in reasons:
                    row["failed"] = reasons[name, causal]
            rows += at_length.values()
    return {"rows": rows}


def _inputs(shapes: dict[str, OperatorShape], dtype: torch.dtype, device: torch.device) -> dict[str, Inputs]:
    """The same tokens for all, each with the mixing weights of its blocks."""
    inputs: dict[str, Inputs] = {}
    first: Inputs | None = None
    for name, shape in shapes.items():
        if first is None:
            first = made = make_inputs(shape, dtype, device, seed=0)
        else:
            config = MHLAConfig(causal=shape.causal, block_size=None if shape.chunk is None else (shape.chunk,))
            blocks = (STORED_BLOCKS,) if name == "mhla_chunk" else shape.layout().blocks
            made = first._replace(mixing=initial_mixing(config, blocks).to(device))
        inputs[name] = made
    return inputs


def _run(name: str, inputs: Inputs, shape: OperatorShape, backward: bool) -> tuple[torch.Tensor | None, ...]:
    kind = name if name in ("softmax", "linear") else "mhla-auto"
    return run_operator(lambda inputs: attend(kind, inputs, shape, "query"), inputs, backward)


def _measure(
    runs: dict[str, Callable[[], Any]],
    predicted: dict[str, float],
    device: torch.device,
    *,
    seconds: float,
    longest: float,
) -> tuple[dict[str, tuple[float | None, int | None]], dict[str, str]]:
    """Milliseconds and bytes of each run, `None` for those that were left out or failed, and reasons of the latter."""
    figures: dict[str, tuple[float | None, int | None]] = dict.fromkeys(runs, (None, None))
    failed: dict[str, str] = {}
    quick = {name: run for name, run in runs.items() if predicted[name] <= _SLOW_SECONDS}
    for name, timed in time_in_rounds(quick, device, seconds=seconds).items():
        if isinstance(timed, str):
            failed[name] = timed
        else:
            figures[name] = timed["milliseconds"], peak_memory(quick[name], device)
    slow = {name: run for name, run in runs.items() if _SLOW_SECONDS < predicted[name] <= longest}
    taken: dict[str, list[float]] = {name: [] for name in slow}
    # The first round finds the memory too: softmax attention of many tokens is too long to run it for that alone.
    memory = {name: peak_memory(partial(_timed, run, taken[name], device), device) for name, run in slow.items()}
    for _ in range(2):
        for name, run in slow.items():
            if predicted[name] <= _ONCE_SECONDS:
                _timed(run, taken[name], device)
    return {**figures, **{name: (statistics.median(taken[name]), memory[name]) for name in slow}}, failed


def _timed(run: Callable[[], Any], taken: list[float], device: torch.device) -> Any:
    synchronize(device)
    start = time.perf_counter()
    kept = run()
    synchronize(device)
    taken.append(1e3 * (time.perf_counter() - start))
    return kept


def measure_errors(
    *, lengths: Sequence[int], width: int, dtypes: Sequence[str], num_rows: int, device: torch.device
) -> dict[str, Any]:
    """Rounding error of all kinds of attention against float64, on a sample of query tokens.

    Args:
        lengths: Numbers of tokens.
        width: K.
        dtypes: Types of the tokens. The reference has the same rounded tokens.
        num_rows: R.
        device: Device to run on.

    Returns:
        `rows`: one for each kind of attention, direction, length and type, with `error`, the mean of ‖o - o₆₄‖ / ‖o₆₄‖
        over the sampled tokens, or `None` if an output is not finite.
    """
    rows = []
    for tokens in lengths:
        wanted = torch.linspace(0, tokens - 1, num_rows).round().long().to(device)
        for causal in (False, True):
            shapes = contestant_shapes(tokens, 1, width, causal)
            for dtype in dtypes:
                inputs = _inputs(shapes, getattr(torch, dtype), device)
                for name, shape in shapes.items():
                    exact = _sampled_reference(name, inputs[name], shape, wanted)
                    output = _sampled(name, inputs[name], shape, wanted).double()
                    error = ((output - exact).norm(dim=-1) / exact.norm(dim=-1)).mean().item()
                    rows.append(
                        {
                            "attention": name,
                            "direction": "causal" if causal else "bidirectional",
                            "tokens": tokens,
                            "dtype": dtype,
                            "error": error if math.isfinite(error) else None,
                        }
                    )
    return {"rows": rows}


def _sampled(name: str, inputs: Inputs, shape: OperatorShape, rows: torch.Tensor) -> torch.Tensor:
    """Outputs of some tokens, `[B, R, H, V]`."""
    if name != "softmax":
        return _run(name, inputs, shape, False)[0][:, rows]
    # Tokens of softmax attention do not depend on the other queries.
    query, key, value = (x.transpose(1, 2) for x in (inputs.query[:, rows], inputs.key, inputs.value))
    mask = torch.arange(shape.tokens, device=rows.device) <= rows[:, None] if shape.causal else None
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask).transpose(1, 2)


def _sampled_reference(name: str, inputs: Inputs, shape: OperatorShape, rows: torch.Tensor) -> torch.Tensor:
    query, key, value = (x.double() for x in inputs[:3])
    if name == "softmax":
        matrix = softmax_matrix(query, key, causal=shape.causal, rows=rows)
    else:
        # Equal weights are linear attention.
        mixing = torch.ones_like(inputs.mixing) if name == "linear" else inputs.mixing
        matrix = mhla_matrix(query, key, mixing, shape.layout(), causal=shape.causal, eps=EPS, rows=rows)
    return (matrix @ value.transpose(1, 2)).transpose(1, 2)


def measure_breakdown(
    *,
    lengths: Sequence[int],
    width: int,
    block_tokens: int,
    scales: Sequence[float],
    many_blocks: Sequence[Sequence[int]],
    seconds: float,
    device: torch.device,
) -> dict[str, Any]:
    """Where long inputs break something.

    Args:
        lengths: Numbers of tokens, of `GRIDS`.
        width: K.
        block_tokens: Number of tokens for `eps` and `many_blocks`.
        scales: Factors of queries and keys, for `eps`.
        many_blocks: Blocks of each axis, from few to many.
        seconds: Approximate time of `many_blocks`.
        device: Device to run on.

    Returns:
        `magnitudes`: root mean square of the outputs for values of 1 without a normaliser, for the fixed number of
        blocks, the square root, and blocks of fixed size. `eps`: for each scale, the mean output for values of 1 with
        ReLU features. `many_blocks`: time and memory of the forward pass for each number of blocks.
    """
    generator = torch.Generator(device).manual_seed(0)
    magnitudes = []
    for tokens in lengths:
        query, key = F.elu(torch.randn(2, 1, tokens, 1, width, generator=generator, device=device)) + 1
        for name, shape in _bidirectional_blocks(tokens, width).items():
            magnitudes.append(
                {
                    "attention": name,
                    "tokens": tokens,
                    "blocks": shape.layout().num_blocks,
                    "output": _ones_through(query, key, shape.layout(), "none").square().mean().sqrt().item(),
                }
            )
    query, key = torch.randn(2, 1, block_tokens, 1, width, generator=generator, device=device).relu()
    layout = BlockLayout(grid=GRIDS[block_tokens], blocks=FIXED_BLOCKS)
    eps = [
        {"scale": scale, "output": _ones_through(scale * query, scale * key, layout, "query").mean().item()}
        for scale in scales
    ]
    return {
        "magnitudes": magnitudes,
        "eps": eps,
        "many_blocks": _many_blocks(block_tokens, width, many_blocks, seconds, device),
    }


def _bidirectional_blocks(tokens: int, width: int) -> dict[str, OperatorShape]:
    shapes = contestant_shapes(tokens, 1, width, causal=False)
    grid = GRIDS[tokens]
    size = replace(shapes["mhla"], blocks=tuple(max(1, length // 4) for length in grid))
    return {"mhla": shapes["mhla"], "mhla_fixed": shapes["mhla_fixed"], "mhla_chunk": size}


def _ones_through(
    query: torch.Tensor, key: torch.Tensor, layout: BlockLayout, normalizer: str, eps: float = EPS
) -> torch.Tensor:
    """Output for values of 1, which a normaliser ought to leave at 1."""
    mixing = initial_mixing(MHLAConfig(), layout.blocks).to(query.device)
    value = torch.ones_like(query[..., :1])
    return mhla_attention(query, key, value, mixing, layout, normalizer=normalizer, eps=eps)


def _many_blocks(
    tokens: int, width: int, choices: Sequence[Sequence[int]], seconds: float, device: torch.device
) -> list[dict[str, Any]]:
    base = OperatorShape(1, 1, width, GRIDS[tokens])
    shapes = {math.prod(blocks): replace(base, blocks=tuple(blocks)) for blocks in choices}
    named = {str(count): shape for count, shape in shapes.items()}
    inputs = _inputs(named, torch.float32, device)
    runs = {name: partial(_run, "mhla", inputs[name], shape, False) for name, shape in named.items()}
    timed = time_in_rounds(runs, device, seconds=seconds)
    return [
        {
            "tokens": tokens,
            "blocks": int(name),
            "forward_milliseconds": None if isinstance(figures, str) else figures["milliseconds"],
            "memory_bytes": None if isinstance(figures, str) else peak_memory(runs[name], device),
        }
        for name, figures in timed.items()
    ]
