# SPDX-License-Identifier: Apache-2.0
"""Shared by the tests of all kernels: the devices they run on, and errors of half precision against float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from mhla_hf import BlockLayout, mhla_attention

from .reference import make_inputs, output_and_gradients


_ON_GPU = torch.cuda.is_available()

# Where there is a GPU, Triton compiles, and its kernels cannot take tensors on the CPU.
DEVICES = [
    pytest.param(
        "cpu", marks=pytest.mark.skipif(_ON_GPU, reason="Triton compiles its kernels here"), id="interpreted"
    ),
    pytest.param("cuda", marks=pytest.mark.gpu),
]


def cast(inputs: dict[str, torch.Tensor], device: str, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Leaves of another type on another device."""
    return {name: tensor.detach().to(device, dtype).requires_grad_() for name, tensor in inputs.items()}


def on(device: str, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same tensors on another device."""
    return {name: tensor.to(device) for name, tensor in tensors.items()}


def work_in_groups(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """Has operators work on groups of so many lines, as if there were memory for no more."""

    def line_groups(lines: int, line_bytes: int) -> list[tuple[int, int]]:
        return [(first, min(size, lines - first)) for first in range(0, lines, size)]

    for name in ("block", "block_gradient", "fused", "fused_gradient", "small"):
        monkeypatch.setattr(f"mhla_hf.ops.triton.{name}.line_groups", line_groups)


@contextmanager
def buffers_full_of_nan() -> Iterator[None]:
    """Fills what is allocated without values with NaN, so that whatever is left unwritten shows."""

    def filled(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def fill(*size: Any, **options: Any) -> torch.Tensor:
            buffer = allocate(*size, **options)
            return buffer.fill_(float("nan")) if buffer.is_floating_point() else buffer

        return fill

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "new_empty", filled(torch.Tensor.new_empty))
        patch.setattr(torch, "empty_like", filled(torch.empty_like))
        yield


def half_precision_errors(
    layout: BlockLayout,
    dtype: torch.dtype,
    device: str,
    *,
    training: bool,
    rotated: bool,
    seeds: int = 2,
    **options: object,
) -> dict[str, tuple[float, float]]:
    """Relative errors of output and gradients against float64, of the kernels and of plain torch, over some seeds.

    Inputs are rounded to `dtype` first, so that only the computation errs. The mixing weights stay float32. Without
    `training` there is the output alone, computed without recording gradients.
    """
    totals: dict[str, list[float]] = {}
    for seed in range(seeds):
        drawn = make_inputs(layout, seed=seed, rotated=rotated, key_width=32, value_width=32)
        rounded = {name: tensor.detach() for name, tensor in drawn.items()}
        rounded = {name: tensor.to(torch.float32 if name == "mixing" else dtype) for name, tensor in rounded.items()}
        expected = _results(cast(rounded, "cpu", torch.float64), layout, training, backend="naive", **options)
        for index, backend in enumerate(("triton", "torch")):
            inputs = {name: tensor.to(device).requires_grad_() for name, tensor in rounded.items()}
            actual = on("cpu", _results(inputs, layout, training, backend=backend, **options))
            for name, reference in expected.items():
                error = (actual[name].double() - reference).square().sum().item()
                totals.setdefault(name, [0.0, 0.0])[index] += error / reference.square().sum().item()
    return {name: ((kernel / seeds) ** 0.5, (plain / seeds) ** 0.5) for name, (kernel, plain) in totals.items()}


def _results(
    inputs: dict[str, torch.Tensor], layout: BlockLayout, training: bool, **options: object
) -> dict[str, torch.Tensor]:
    if training:
        return output_and_gradients(inputs, layout, **options)
    with torch.no_grad():
        return {"output": mhla_attention(**inputs, layout=layout, **options)}


def check_compiled_and_checkpointed(inputs: dict[str, torch.Tensor], layout: BlockLayout, **options: object) -> None:
    """One graph computes the same by kernels as no graph, and activation checkpointing the same bits."""
    expected = output_and_gradients(inputs, layout, backend="triton", **options)
    torch._dynamo.reset()
    compiled = torch.compile(mhla_attention, fullgraph=True, backend="aot_eager")
    checkpointed = partial(checkpoint, mhla_attention, use_reentrant=False)
    for attend, exact in ((compiled, {}), (checkpointed, {"rtol": 0, "atol": 0})):
        actual = output_and_gradients(inputs, layout, attend, backend="triton", **options)
        torch.testing.assert_close(actual, expected, **exact)
