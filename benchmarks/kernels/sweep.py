# SPDX-License-Identifier: Apache-2.0
"""Sweeps of launch options: lines of a group, and every kernel of a case alone; then the best of all together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import product
from typing import Any

from mhla_hf.bench import failure_reason

from .cases import ON_GPU, KernelCase, Tensors
from .checks import LIMITS, relative_error
from .report import Report
from .timing import device_milliseconds


WARPS, STAGES, TOKEN_TILES = (4, 8), (1, 2, 3, 4), (16, 32, 64)
"""Values that are tried of `num_warps`, `num_stages`, and of `BLOCK_TOKENS` where a kernel has it."""

LINES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
"""Numbers of lines that are tried for a group, beside all of a case at once."""

_GROUPS = "groups"

Options = dict[str, Any]


class Overrides:
    """Options that launches take in place of their own.

    Attributes:
        options: Options by the kernel's name, and `lines` of `"groups"`.
        seen: Own options of every kernel that was launched.
        setups: Setups with these options, by their own ones.
    """

    def __init__(self) -> None:
        self.options: dict[str, Options] = {}
        self.seen: dict[str, Options] = {}
        self.setups: dict[Any, Any] = {}

    def use(self, choice: Mapping[str, Options]) -> None:
        """Has launches take these options from now on."""
        from mhla_hf.ops.triton import launching, replay

        self.options = dict(choice)
        launching.GROUP_LINES = choice.get(_GROUPS, {}).get("lines")
        # What operators keep of earlier calls was made for other options.
        self.setups.clear()
        launching._setups.clear()
        replay._records.clear()

    def setup(self, own: Any) -> Any:
        """A setup with the options that override its own."""
        name = own.kernel.__name__
        self.seen.setdefault(name, own.keywords)
        if name not in self.options:
            return own
        if own not in self.setups:
            self.setups[own] = type(own)(own.kernel, **{**own.keywords, **self.options[name]})
        return self.setups[own]


@contextmanager
def overridden_launches() -> Iterator[Overrides]:
    """Has every launch of a kernel take what the overrides say of it."""
    from mhla_hf.ops.triton.launching import Launch

    overrides, original = Overrides(), Launch.__init__

    def initialize(launch: Launch, setup: Any, tensors: tuple[Any, ...]) -> None:
        original(launch, overrides.setup(setup), tensors)

    overrides.use({})
    Launch.__init__ = initialize  # type: ignore[method-assign]
    try:
        yield overrides
    finally:
        overrides.use({})
        Launch.__init__ = original  # type: ignore[method-assign]


def candidates(seen: Mapping[str, Options], lines: int) -> list[dict[str, Options]]:
    """Overrides to try: of the lines of a group, and of one kernel each that differ from its own options.

    Args:
        seen: Own options of every kernel.
        lines: Lines of the case.
    """
    counts = [*(count for count in LINES if count < lines), lines]
    tried: dict[str, list[Options]] = {_GROUPS: [{"lines": count} for count in counts]}
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
            for choice in candidates(overrides.seen, case.shape.batch * case.shape.heads):
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
