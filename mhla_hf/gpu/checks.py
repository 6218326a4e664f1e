# SPDX-License-Identifier: Apache-2.0
"""What Triton's interpreter cannot show: rounding, races, offsets, streams, graphs, each at the sizes of models."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ..bench import Inputs, failure_reason, free_memory
from ..layouts.blocks import BlockLayout
from ..ops import mhla_attention
from .cases import DEVICE, ON_GPU, KernelCase, Tensors, kernel_cases
from .report import Report
from .timing import device_milliseconds, host_milliseconds, synchronize


LIMITS = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 3e-5}
"""Relative errors of outputs and gradients that are allowed, by the type of the tokens."""

_FORWARD, _SMALL_HEADS = "wan query", "dit-512 query train"
_EVERY_KIND = ("wan query train", "wan fused train", "wan hedgehog train", "dit-512 query train", "causal-2k query")


@dataclass(frozen=True)
class Outcome:
    """One thing that was checked: its name, whether it is as it should be, and figures."""

    name: str
    passed: bool
    detail: str = ""


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Length of the difference over the length of the expected tensor."""
    actual, expected = actual.double(), expected.double()
    return ((actual - expected).norm() / expected.norm().clamp(min=1e-30)).item()


def _case(name: str) -> KernelCase:
    return next(kernel_cases([name]))


def _same(first: Tensors, second: Tensors) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def _cast(inputs: Inputs, dtype: torch.dtype) -> Inputs:
    weights = torch.float64 if dtype == torch.float64 else torch.float32
    query, key, value, mixing, gradient = (x.to(weights if x is inputs.mixing else dtype) for x in inputs)
    return Inputs(query, key, value, mixing, gradient)


def _attention(*tokens: torch.Tensor, layout: BlockLayout, **options: Any) -> torch.Tensor:
    query, key, value, mixing = tokens
    return mhla_attention(query, key, value, mixing, layout, **options)


def values() -> Iterator[Outcome]:
    """Outputs and all gradients against float64: ragged blocks, few blocks, odd widths, texts; all types."""
    if ON_GPU:
        layouts = [BlockLayout((40, 30), blocks=(8, 9)), BlockLayout((40, 30), blocks=(2, 2))]
        layouts.append(BlockLayout((4490,), block_size=(64,)))
    else:
        layouts = [BlockLayout((5, 7), blocks=(2, 3)), BlockLayout((5, 7), blocks=(2, 1))]
        layouts.append(BlockLayout((40,), block_size=(16,)))
    widths = (128, 72, 64) if ON_GPU else (16, 24, 16)
    half = (torch.bfloat16, torch.float16) if ON_GPU else (torch.float16,)
    for layout, width in zip(layouts, widths):
        for dtype in (*half, torch.float32):
            for normalizer in ("none", "query"):
                yield _compare(dtype, layout, width, normalizer)


def _compare(dtype: torch.dtype, layout: BlockLayout, width: int, normalizer: str) -> Outcome:
    causal = len(layout.grid) == 1
    generator = torch.Generator(DEVICE).manual_seed(width)
    random: dict[str, Any] = {"generator": generator, "device": DEVICE}
    size = (2, layout.num_tokens, 2, width)
    tokens = [torch.rand(size, **random), torch.rand(size, **random), torch.randn(size, **random)]
    mixing = torch.rand(layout.num_blocks, layout.num_blocks, **random) / layout.num_blocks
    tokens = [x.to(dtype) for x in tokens]
    results = []
    for kind, backend in ((dtype, "triton"), (torch.float64, "torch")):
        weights = mixing.to(torch.float64 if kind == torch.float64 else torch.float32)
        leaves = [x.to(kind, copy=True).requires_grad_() for x in (*tokens, weights)]
        leaves[3] = weights.detach().clone().requires_grad_()
        output = _attention(*leaves, layout=layout, normalizer=normalizer, causal=causal, backend=backend)
        # Gradients should fit into float16, which has neither much smaller nor much larger numbers than 1.
        loss = output.double().square().sum() / (layout.num_tokens if normalizer == "none" else 1)
        results.append([output.detach(), *torch.autograd.grad(loss, leaves)])
    errors = [relative_error(a, b) for a, b in zip(*results)]
    name = f"{str(dtype)[6:]}, heads of {width}, {layout.num_blocks} blocks of {layout.grid}, {normalizer}"
    return Outcome(name, max(errors) < LIMITS[dtype], " ".join(f"{error:.1e}" for error in errors))


def strides() -> Iterator[Outcome]:
    """Tokens that lie otherwise in memory: slices of one projection, odd addresses, axes in another order."""
    case = _case(_SMALL_HEADS)
    inputs, expected = case.inputs, case.run()

    def changed(name: str, *tokens: torch.Tensor) -> Outcome:
        query, key, value = tokens
        results = case.run(inputs._replace(query=query, key=key, value=value))
        error = max(relative_error(*pair) for pair in zip(results, expected, strict=True))
        return Outcome(name, error < LIMITS[expected[0].dtype], f"{error:.1e}")

    yield changed("slices of one tensor", *torch.cat(inputs[:3], dim=-1).split(case.shape.width, dim=-1))
    shifted = [torch.empty(x.numel() + 1, dtype=x.dtype, device=DEVICE)[1:].view_as(x) for x in inputs[:3]]
    yield changed("addresses off by one number", *(to.copy_(x) for to, x in zip(shifted, inputs[:3])))
    for name, axis in (("heads before tokens", 1), ("channels before tokens", 3)):
        order = (2, 1) if axis == 1 else (3, 1)
        yield changed(name, *(x.transpose(*order).contiguous().transpose(*order) for x in inputs[:3]))
    shared = [x[:, :, :1] for x in (inputs.key, inputs.value)]
    options = {"normalizer": "query", "backend": "triton"}
    one, many = (
        _attention(inputs.query, *tokens, inputs.mixing, layout=case.shape.layout(), **options)
        for tokens in (shared, [x.expand_as(inputs.key) for x in shared])
    )
    error = relative_error(one, many)
    yield Outcome("one key head for all query heads", error < LIMITS[one.dtype], f"{error:.1e}")


def repeats() -> Iterator[Outcome]:
    """The same bits every time: a difference would be a race."""
    for name in _EVERY_KIND:
        case = _case(name)
        first = case.run()
        yield Outcome(f"{name}: the same bits", all(_same(first, case.run()) for _ in range(5 if ON_GPU else 1)))
        if case.trains:
            same = torch.equal(first[0], case.run(trains=False)[0])
            yield Outcome(f"{name}: the same bits without gradients", same)


def offsets() -> Iterator[Outcome]:
    """Tensors of more than 2³¹ numbers: their last batch entry gives what it gives alone."""
    grid, batch, heads, width = ((21, 45, 80), 8, 30, 128) if ON_GPU else ((4, 6, 8), 6, 2, 16)
    layout = BlockLayout(grid, blocks=(3, 5, 10) if ON_GPU else (2, 2, 2))
    mixing = torch.rand(layout.num_blocks, layout.num_blocks, device=DEVICE) / layout.num_blocks
    dtype = torch.bfloat16 if ON_GPU else torch.float32
    tokens = [torch.rand(batch, layout.num_tokens, heads, width, device=DEVICE, dtype=dtype) for _ in range(3)]
    for normalizer in ("none", "query"):
        with torch.no_grad():
            whole, alone = (
                _attention(*part, mixing, layout=layout, normalizer=normalizer, backend="triton")[-1:]
                for part in (tokens, [x[-1:].clone() for x in tokens])
            )
        error = relative_error(whole, alone)
        numbers = f"{tokens[0].numel() / 2**31:.2f} · 2³¹ numbers, {normalizer}"
        yield Outcome(numbers, error < LIMITS[dtype] / 10, f"{error:.1e}")
        del whole, alone


def streams() -> Iterator[Outcome]:
    """Several streams at a time."""
    if not ON_GPU:
        return
    case, results = _case(_FORWARD), []
    expected = case.run()
    synchronize()
    for stream in [torch.cuda.Stream() for _ in range(3)]:
        with torch.cuda.stream(stream):
            results += [case.run() for _ in range(5)]
    synchronize()
    yield Outcome("three streams at once", all(_same(result, expected) for result in results))


def scale() -> Iterator[Outcome]:
    """31,500 tokens: float16 stays finite, and bfloat16 is as exact as plain torch."""
    if not ON_GPU:
        return
    for name in ("wan none", "wan query"):
        case = _case(name)
        (expected,) = case.run(_cast(case.inputs, torch.float32), backend="torch")
        (half,) = case.run(_cast(case.inputs, torch.float16))
        in_range = expected.abs() < 6e4
        error = relative_error(half * in_range, expected * in_range)
        finite = bool(half[in_range].isfinite().all())
        yield Outcome(f"{name}, float16", finite and error < LIMITS[torch.float16], f"{error:.1e}")
        errors = [relative_error(case.run(backend=backend)[0], expected) for backend in ("triton", "torch")]
        detail = " ".join(f"{error:.2e}" for error in errors)
        yield Outcome(f"{name}, at most twice the error of plain torch", errors[0] < 2 * errors[1], detail)


def graphs() -> Iterator[Outcome]:
    """CUDA graphs give the same bits; times of a replay and of the calls themselves."""
    for name in _EVERY_KIND if ON_GPU else ():
        case = _case(name)
        expected = case.run()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                case.run()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            actual = case.run()
        graph.replay()
        synchronize()
        times = f"replay {device_milliseconds(graph.replay):.3f} ms, calls {device_milliseconds(case.run):.3f} ms"
        yield Outcome(f"graph of {name}", _same(actual, expected), times)


def compiled() -> Iterator[Outcome]:
    """`torch.compile(fullgraph=True)` gives the same; times beside those of the calls themselves."""
    for name in ("wan query", "wan fused", "wan hedgehog") if ON_GPU else ():
        case = _case(name)
        (expected,) = case.run()
        attention = torch.compile(case.attention(), fullgraph=True)
        call = torch.no_grad()(partial(attention, case.inputs))
        error = relative_error(call(), expected)
        hosts = f"host {host_milliseconds(call):.3f} ms, calls {host_milliseconds(case.run):.3f} ms"
        yield Outcome(f"compiled {name}", error < LIMITS[expected.dtype], f"{error:.1e}, {hosts}")


CHECKS: dict[str, Callable[[], Iterator[Outcome]]] = {
    check.__name__: check for check in (values, strides, repeats, offsets, streams, scale, graphs, compiled)
}
"""All checks by name; those that need a GPU find nothing without one."""


def run_checks(names: list[str], report: Report) -> bool:
    """Runs some checks into a report, and returns whether all have passed."""
    for name in names:
        if report.is_late(name):
            continue
        start = time.monotonic()
        try:
            for outcome in CHECKS[name]():
                _add(report, name, outcome)
        except Exception as error:  # What fails is a result, and others go on.
            _add(report, name, Outcome(name, False, failure_reason(error)), traceback=traceback.format_exc())
        report.took(name, start)
        free_memory(DEVICE)
    return all(row["status"] != "failed" for row in report.results)


def _add(report: Report, check: str, outcome: Outcome, **facts: str) -> None:
    status = "passed" if outcome.passed else "failed"
    row = {"check": check, "name": outcome.name, "status": status, "detail": outcome.detail, **facts}
    report.add(row, f"{'ok  ' if outcome.passed else 'FAIL'}  {outcome.name}: {outcome.detail}")
