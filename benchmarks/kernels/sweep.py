# SPDX-License-Identifier: Apache-2.0
"""Sweeps of launch options: every kernel of a case alone, then the best of all together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import product
from typing import Any

from mhla_hf.bench import failure_reason
from mhla_hf.gpu.cases import ON_GPU, KernelCase, Tensors, kernel_cases
from mhla_hf.gpu.examination import LIMITS, Report, relative_error

from .timing import device_milliseconds


WARPS, STAGES, TOKEN_TILES = (4, 8), (1, 2, 3, 4), (16, 32, 64)
"""Values that are tried of `num_warps`, `num_stages`, and of `BLOCK_TOKENS` where a kernel has it."""

Options = dict[str, Any]


class Overrides:
    """Options that launches take in place of their own.

    Attributes:
        options: Options by the kernel's name.
        seen: Own options of every kernel that was launched.
    """

    def __init__(self) -> None:
        self.options: dict[str, Options] = {}
        self.seen: dict[str, Options] = {}

    def use(self, choice: Mapping[str, Options]) -> None:
        """Has launches take these options from now on."""
        from mhla_hf.ops import plans

        self.options = dict(choice)
        # What was compiled with other options.
        plans.forget()


@contextmanager
def overridden_launches() -> Iterator[Overrides]:
    """Has every launch of a kernel take what the overrides say of it."""
    from mhla_hf.ops.triton import launching

    overrides, original = Overrides(), launching.first_launch

    def first_launch(kernel: Any, grid: Any, *arguments: Any, **keywords: Any) -> Any:
        overrides.seen.setdefault(kernel.__name__, keywords)
        return original(kernel, grid, *arguments, **{**keywords, **overrides.options.get(kernel.__name__, {})})

    overrides.use({})
    launching.first_launch = first_launch
    try:
        yield overrides
    finally:
        overrides.use({})
        launching.first_launch = original


def candidates(seen: Mapping[str, Options]) -> list[dict[str, Options]]:
    """Overrides to try, of one kernel each, that differ from its own options.

    Args:
        seen: Own options of every kernel.
    """
    tried: dict[str, list[Options]] = {}
    for kernel, own in seen.items():
        tiles = [tile for tile in TOKEN_TILES if tile <= own["BLOCK_TOKENS"]] if "BLOCK_TOKENS" in own else [None]
        tried[kernel] = []
        for warps, stages, tile in product(WARPS, STAGES, tiles):
            options = {"num_warps": warps, "num_stages": stages, **({} if tile is None else {"BLOCK_TOKENS": tile})}
            if any(own.get(name) != value for name, value in options.items()):
                tried[kernel].append(options)
    # Interpreted, one of each shows that it goes through.
    most = None if ON_GPU else 1
    return [{name: options} for name, choices in tried.items() for options in choices[:most]]


def sweep_cases(cases: Iterable[KernelCase], report: Report) -> None:
    """Times every case with every candidate, and with the best of every kernel together, into a report.

    A row has `case`, `overrides`, `milliseconds` and the relative `error` of all outputs against those of the own
    options: a candidate that changes results is none.
    """
    for case in cases:
        if report.is_late(case.name):
            continue
        with overridden_launches() as overrides:
            expected = case.run()
            own = _measured(case, expected, overrides, {}, report)
            best: dict[str, tuple[float, Options]] = {}
            for choice in candidates(overrides.seen):
                if report.is_late(f"{case.name} {choice}"):
                    break
                milliseconds = _measured(case, expected, overrides, choice, report)
                ((kernel, options),) = choice.items()
                if milliseconds < best.get(kernel, (own,))[0]:
                    best[kernel] = milliseconds, options
            if best and not report.is_late(f"{case.name}, the best together"):
                together = {kernel: options for kernel, (_, options) in best.items()}
                _measured(case, expected, overrides, together, report)


def _measured(
    case: KernelCase, expected: Tensors, overrides: Overrides, choice: dict[str, Options], report: Report
) -> float:
    """Milliseconds of a case with some overrides; infinity where it fails or gives something else."""
    row: dict[str, Any] = {"case": case.name, "overrides": choice, "milliseconds": None}
    overrides.use(choice)
    try:
        errors = [relative_error(a, b) for a, b in zip(case.run(), expected, strict=True)]
        row["error"] = max(errors)
        row["milliseconds"] = device_milliseconds(case.run, rounds=15)
        # Gradients of mixing weights are sums of many products, in another order.
        wrong = row["error"] > LIMITS[expected[0].dtype]
        text = f"{row['milliseconds']:.4f} ms" + (f", WRONG: error {row['error']:.1e}" if wrong else "")
    except Exception as error:  # What fails is a result, and others go on.
        row["reason"], wrong = failure_reason(error), True
        text = row["reason"]
    finally:
        overrides.use({})
    report.add(row, f"{case.name}, {choice or 'own options'}: {text}")
    return float("inf") if wrong else row["milliseconds"]


def run_candidates(names: list[str] | None, quick: bool, part: int, parts: int) -> None:
    """Runs one share of what sweeps of some cases launch, so that they find it compiled."""
    for case in kernel_cases(names, quick=quick):
        with overridden_launches() as overrides:
            case.run()
            for choice in candidates(overrides.seen)[part::parts]:
                overrides.use(choice)
                # The sweep itself says why one fails.
                with suppress(Exception):
                    case.run()
