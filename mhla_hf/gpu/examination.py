# SPDX-License-Identifier: Apache-2.0
"""`mhla-hf doctor --gpu`: verify and time the Triton kernels.

The checks cover what Triton's interpreter cannot show: rounding, races, offsets, streams and graphs, at the sizes of
models. The report is written after every row, so that an interrupted run leaves what it has found.
"""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..bench import (
    SHAPES,
    BenchOptions,
    Inputs,
    OperatorShape,
    failure_reason,
    free_memory,
    measure_operator,
    time_in_rounds,
)
from ..layouts.blocks import BlockLayout
from ..ops import mhla_attention
from ..ops.backends import ENVIRONMENT_VARIABLE, SELF_TEST_VARIABLE
from ..ops.diagnosis import check_kernels
from ..utils.files import write_json
from ..utils.machine import machine_facts, synchronize
from .cases import DEVICE, DTYPE, ON_GPU, KernelCase, Tensors, kernel_cases


SECONDS, COMPILATION_SECONDS, CASE_SECONDS = 280.0, 120.0, 0.5
"""Time after which nothing new is begun, for compilation, and for the contestants of one size and direction."""
SIZES = ("wan", "dit-512", "causal-2k", "causal-32k")
"""Names of `bench.SHAPES` that are timed."""
# Two of the smaller ones fit into the cache of an H100, and take longer to copy than to launch.
_COPIED_BYTES = {"memory": 1 << 30, "l2_cache": 16 << 20}
_KERNELS, _PEERS = "mhla-triton", {"mhla-torch": "torch", "softmax-flash": "flash", "softmax-cudnn": "cudnn"}

LIMITS = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 3e-5}
"""Relative errors of outputs and gradients that are allowed, by the type of the tokens."""

_FORWARD, _SMALL_HEADS = "wan query", "dit-512 query train"
_EVERY_KIND = ("wan query train", "wan fused train", "wan hedgehog train", "dit-512 query train", "causal-2k query")

NO_GPU = "No GPU was found, and nothing ran on one: kernels were interpreted on the CPU, and nothing was timed."
_PROPERTIES = ("major", "minor", "multi_processor_count", "L2_cache_size", "total_memory")


class Report:
    """Rows with the machine that they were found on.

    Args:
        name: Name of the command.
        path: JSON file to write after every row; None for none.
        seconds: Time after which nothing new is begun.
        show: Called with a line for each row.
    """

    def __init__(
        self, name: str, path: Path | None, seconds: float, show: Callable[[str], None] = partial(print, flush=True)
    ) -> None:
        self.path, self.stop, self.show = path, time.monotonic() + seconds, show
        facts = machine_facts(DEVICE)
        if ON_GPU:
            properties = torch.cuda.get_device_properties(DEVICE)
            facts |= {name: getattr(properties, name, None) for name in _PROPERTIES}
        self.content: dict[str, Any] = {
            "benchmark": f"kernels {name}",
            "machine": facts,
            "options": {"dtype": str(DTYPE).removeprefix("torch."), "interpreted": not ON_GPU},
            **({} if ON_GPU else {"note": NO_GPU}),
            "results": [],
            "left_out": [],
        }

    @property
    def results(self) -> list[dict[str, Any]]:
        """Rows so far."""
        return self.content["results"]

    def is_late(self, what: str) -> bool:
        """True once the time budget is spent; records the skipped part."""
        if time.monotonic() < self.stop:
            return False
        self.show(f"{what}: no time left")
        self.content["left_out"].append(what)
        self.write()
        return True

    def took(self, part: str, start: float) -> None:
        """Notes and shows how long a part took since `start`, by `time.monotonic`."""
        seconds = time.monotonic() - start
        self.content.setdefault("seconds", {})[part] = round(seconds, 1)
        self.show(f"    {part} took {seconds:.1f} s")

    def add(self, row: dict[str, Any], line: str) -> None:
        """Adds a row, writes the file and shows a line."""
        self.results.append(row)
        self.show(line)
        self.write()

    def write(self) -> None:
        """Writes the file."""
        if self.path is not None:
            write_json(self.path, self.content)


class Outcome(NamedTuple):
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
    synchronize(DEVICE)
    for stream in [torch.cuda.Stream() for _ in range(3)]:
        with torch.cuda.stream(stream):
            results += [case.run() for _ in range(5)]
    synchronize(DEVICE)
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
        synchronize(DEVICE)
        times = _times(replay=graph.replay, calls=case.run)
        yield Outcome(f"graph of {name}", _same(actual, expected), times)


def compiled() -> Iterator[Outcome]:
    """`torch.compile(fullgraph=True)` gives the same; times beside those of the calls themselves."""
    for name in ("wan query", "wan fused", "wan hedgehog") if ON_GPU else ():
        case = _case(name)
        (expected,) = case.run()
        attention = torch.compile(case.attention(), fullgraph=True)
        call = torch.no_grad()(partial(attention, case.inputs))
        error = relative_error(call(), expected)
        times = _times(compiled=call, calls=case.run)
        yield Outcome(f"compiled {name}", error < LIMITS[expected.dtype], f"{error:.1e}, {times}")


def _times(**runs: Callable[[], Any]) -> str:
    """Median times of calls that take turns."""
    times: dict[str, Any] = time_in_rounds(runs, DEVICE, seconds=CASE_SECONDS)
    return ", ".join(f"{name} {row['milliseconds']:.3f} ms" for name, row in times.items())


CHECKS: dict[str, Callable[[], Iterator[Outcome]]] = {
    check.__name__: check for check in (values, strides, repeats, offsets, streams, scale, graphs, compiled)
}
"""All checks by name; those that need a GPU find nothing without one."""


def run_checks(names: Iterable[str], report: Report) -> bool:
    """Runs some checks into a report, and returns whether all have passed."""
    for name in names:
        if report.is_late(name):
            continue
        start = time.monotonic()
        try:
            for outcome in CHECKS[name]():
                _add(report, name, outcome.name, "passed" if outcome.passed else "failed", outcome.detail)
        except Exception as error:  # What fails is a result, and others go on.
            _add(report, name, name, "failed", failure_reason(error), traceback=traceback.format_exc())
        report.took(name, start)
        free_memory(DEVICE)
    return all(row["status"] != "failed" for row in report.results)


def examine_kernels(report: Report) -> bool:
    """Compile the kernels, check them, and time them beside plain torch and softmax attention.

    Without a GPU, kernels are interpreted at small sizes and nothing is timed. Rows have `check`, `name`, `status`
    (`"passed"`, `"failed"`, or `"slow"` for kernels that plain torch outruns), `detail`, and where something was timed
    `microseconds`, `gigabytes_per_second` and `speedup_over_` each peer that ran.

    Args:
        report: Takes the rows.

    Returns:
        Whether nothing failed.

    Raises:
        ValueError: If an environment variable chooses the backend, or the kernels do not run here.
    """
    if os.environ.get(ENVIRONMENT_VARIABLE):
        raise ValueError(f"{ENVIRONMENT_VARIABLE} is set and would choose the backend of all checks; unset it.")
    # Plain torch must not stand in for kernels that fail.
    before = os.environ.get(SELF_TEST_VARIABLE)
    os.environ[SELF_TEST_VARIABLE] = "0"
    try:
        if ON_GPU:
            start = time.monotonic()
            failures = compile_in_parallel(_run_part, COMPILATION_SECONDS)
            report.content["compilation_failures"] = failures
            report.took("compilation", start)
        start = time.monotonic()
        for row in check_kernels(DEVICE):
            errors = ", ".join(f"{name} {error:.1e}" for name, error in row["errors"].items())
            kind = f"{row['dtype']}, heads of {row['width']} × {row['repeats']}, {row['normalizer']}"
            name = f"{row['family']}, {row['direction']}, {kind}"
            _add(report, "small inputs", name, row["status"], "; ".join(filter(None, (row["reason"], errors))))
        report.took("small inputs", start)
        run_checks(CHECKS, report)
        if ON_GPU:
            start = time.monotonic()
            report.content["bytes_per_second"] = copy_rates()
            for size in SIZES:
                if not report.is_late(f"times of {size}"):
                    _time(report, size)
            report.took("times", start)
    finally:
        os.environ.pop(SELF_TEST_VARIABLE) if before is None else os.environ.update({SELF_TEST_VARIABLE: before})
    return all(row["status"] != "failed" for row in report.results)


def compile_in_parallel(run_part: Callable[[int, int], None], seconds: float, jobs: int | None = None) -> list[str]:
    """Run shares of some work in processes of their own, and wait for them.

    Args:
        run_part: Runs one share; called with its index and the number of shares. It must be picklable.
        seconds: Time after which processes that still run are ended.
        jobs: Number of processes; that of the CPU cores by default, and one without a GPU.

    Returns:
        What went wrong, one line for each process that failed.
    """
    count = (jobs or os.cpu_count() or 1) if ON_GPU else 1
    stop = time.monotonic() + seconds
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=run_part, args=(part, count)) for part in range(count)]
    for process in processes:
        process.start()
    failures = []
    for part, process in enumerate(processes):
        process.join(max(0.0, stop - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()
            failures.append(f"process {part} was still compiling after {seconds:.0f} s")
        elif process.exitcode:
            failures.append(f"process {part} ended with code {process.exitcode}")
    return failures


def run_cases(names: list[str] | None, quick: bool, part: int, parts: int) -> None:
    """Run one share of some cases once, see [`kernel_cases`]."""
    for index, case in enumerate(kernel_cases(names, quick=quick)):
        if index % parts == part:
            case.run()


def _run_part(part: int, parts: int) -> None:
    run_cases(["wan ", *SIZES[1:]], False, part, parts)
    list(check_kernels(DEVICE, part, parts))


def _add(report: Report, check: str, name: str, status: str, detail: str, **figures: Any) -> None:
    row = {"check": check, "name": name, "status": status, "detail": detail, **figures}
    report.add(row, f"{status}  {name}: {detail}")


def copy_rates() -> dict[str, float]:
    """Bytes that copies read and write in a second: of memory, and of a tensor that stays in the L2 cache."""
    sources = {name: torch.ones(size, dtype=torch.uint8, device=DEVICE) for name, size in _COPIED_BYTES.items()}
    runs = {name: partial(torch.empty_like(source).copy_, source) for name, source in sources.items()}
    times: dict[str, Any] = time_in_rounds(runs, DEVICE, seconds=CASE_SECONDS)
    return {name: 2e3 * size / times[name]["milliseconds"] for name, size in _COPIED_BYTES.items()}


def _time(report: Report, size: str) -> None:
    """Times of one size, forward and with the backward pass, with the `query` normaliser."""
    options = BenchOptions(device=DEVICE.type, seconds=CASE_SECONDS)
    rows = measure_operator(options, [size], [_KERNELS, *_PEERS], normalizers=["query"])["results"]
    for direction in ("forward", "fwd+bwd"):
        found = {row["contestant"]: row for row in rows if row["direction"] == direction}
        reasons = [f"{name}: {row['reason']}" for name, row in found.items() if row["reason"]]
        own = found[_KERNELS]
        figures: dict[str, Any] = {}
        status = "failed"
        if own["reason"] is None:
            milliseconds = own["milliseconds"]
            figures["microseconds"] = 1e3 * milliseconds
            figures["gigabytes_per_second"] = _least_bytes(SHAPES[size], direction) / milliseconds / 1e6
            for name, peer in _PEERS.items():
                if found[name]["reason"] is None:
                    figures[f"speedup_over_{peer}"] = found[name]["milliseconds"] / milliseconds
            status = "slow" if figures.get("speedup_over_torch", 1.0) < 1 else "passed"
        _add(report, "times", f"{size}, {direction}", status, "; ".join(reasons), **figures)


def _least_bytes(shape: OperatorShape, direction: str) -> int:
    """Bytes to read and write at least: q, k, v and o; backward these, the gradient of o, and three gradients more."""
    tensors = 4 if direction == "forward" else 4 + 5 + 3
    return tensors * shape.batch * shape.tokens * shape.heads * shape.width * DTYPE.itemsize


def markdown_table(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Format the rows of a report as the lines of a Markdown table."""
    peers = [f"speedup_over_{peer}" for peer in _PEERS.values()]
    yield f"| check | | status | µs | GB/s | {' | '.join(f'{peer} / MHLA' for peer in _PEERS.values())} | |"
    yield f"|---|---|---|--:|--:|{'--:|' * len(peers)}---|"
    for row in rows:
        formats = {"microseconds": ",.0f", "gigabytes_per_second": ",.0f", **dict.fromkeys(peers, ".2f")}
        figures = [format(row[name], form) if name in row else "" for name, form in formats.items()]
        cells = [row["check"], row["name"], row["status"], *figures, row["detail"]]
        yield f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"
