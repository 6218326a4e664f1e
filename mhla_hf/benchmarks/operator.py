# SPDX-License-Identifier: Apache-2.0
"""The operator by itself: MHLA, softmax and other linear attention at the sizes of models, and the floor below all.

The floor of a shape is the time that a copy takes to move q, k, v and o once (and their gradients once, where there is
a backward pass), at the bandwidth that is measured first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

from ..utils.machine import last_cache_bytes
from .contestants import CONTESTANTS, Contestant, Inputs, choose_contestants, make_inputs
from .shapes import OperatorShape, choose_shapes
from .speed import SpeedOptions, check_environment, fill_rows
from .timing import COPY_BYTES, copy_bandwidth, failure_reason, free_memory


DIRECTIONS = ("forward", "forward+backward")
# Sets of inputs that take turns: enough to be larger than the cache twice over, and no more than this.
_MOST_SETS = 32


@dataclass(frozen=True, kw_only=True)
class OperatorOptions(SpeedOptions):
    """What [`measure_operator`] measures; further options are those of [`SpeedOptions`].

    Args:
        shapes: Names of `SHAPES`; None for those that suit the device.
        contestants: Names of `CONTESTANTS`; None for the usual ones.
        backward: Whether to measure forward and backward together too.
        compile_backend: Of torch.compile, for the contestant that is compiled.

    Raises:
        ValueError: If a name is unknown or a number is not positive.
    """

    shapes: tuple[str, ...] | None = None
    contestants: tuple[str, ...] | None = None
    backward: bool = True
    compile_backend: str = "inductor"

    def __post_init__(self) -> None:
        super().__post_init__()
        choose_shapes(self.shapes, self.place()[0], self.quick)
        choose_contestants(self.contestants)


def measure_operator(
    options: OperatorOptions,
    progress: Callable[[str], None] | None = None,
    shapes: Sequence[OperatorShape] | None = None,
) -> dict[str, Any]:
    """Measures time and memory of all contestants at all shapes.

    Args:
        options: What to measure.
        progress: Is told what comes next.
        shapes: In place of those that the options name.

    Returns:
        A report ready for JSON: `machine`, `options`, `copy_bandwidth` (bytes per second), `shapes`, and `results`:
        one row for each shape, direction, contestant and normaliser, see `benchmarks/README.md`. Rows of contestants
        that did not run have `reason` and no figures.

    Raises:
        ValueError: If the environment decides which backend MHLA takes.
    """
    check_environment()
    device, dtype = options.place()
    chosen = choose_shapes(options.shapes, device, options.quick) if shapes is None else list(shapes)
    contestants = choose_contestants(options.contestants)
    if progress is not None:
        progress("copy bandwidth")
    bandwidth = copy_bandwidth(device, COPY_BYTES[device.type] // (4 if options.quick else 1))
    rows: list[dict[str, Any]] = []
    for shape in chosen:
        for direction in DIRECTIONS[: 2 if options.backward else 1]:
            if progress is not None:
                progress(f"{shape.name}, {direction}")
            rows += _measure_shape(shape, direction, contestants, dtype, device, bandwidth, options)
            free_memory(device)
    sizes = {
        shape.name: {**asdict(shape), "tokens": shape.tokens, "num_blocks": shape.layout().num_blocks}
        for shape in chosen
    }
    return options.report("op", rows, copy_bandwidth=bandwidth, shapes=sizes)


def _measure_shape(
    shape: OperatorShape,
    direction: str,
    contestants: Sequence[Contestant],
    dtype: torch.dtype,
    device: torch.device,
    bandwidth: float,
    options: OperatorOptions,
) -> list[dict[str, Any]]:
    backward = direction != "forward"
    rows: dict[str, dict[str, Any]] = {}
    runs = {}
    if any(contestant.compiled for contestant in contestants):
        # Otherwise shapes would add up to more versions of a function than torch.compile keeps.
        torch.compiler.reset()
    sets, failure = [], None
    try:
        sets = _input_sets(shape, dtype, device, backward)
    except RuntimeError as error:  # Of memory, which may suffice for the next shape.
        failure = failure_reason(error)
    for contestant in contestants:
        obstacle = failure or contestant.obstacle(shape, dtype, device)
        for normalizer in contestant.normalizers:
            row: dict[str, Any] = {"shape": shape.name, "tokens": shape.tokens, "direction": direction}
            row.update(contestant=contestant.name, normalizer=normalizer, reason=obstacle)
            name = f"{contestant.name}/{normalizer}"
            rows[name] = row
            if obstacle is None:
                runs[name] = partial(_run, contestant, sets, shape, normalizer, backward, options.compile_backend)
    fill_rows(rows, runs, device, options)
    measured = [row for row in rows.values() if row["reason"] is None]
    for row in measured:
        family = CONTESTANTS[row["contestant"]].family
        row.update(_figures(shape, family, row["milliseconds"] / 1e3, dtype, backward, bandwidth))
        softmax = [other["milliseconds"] for other in measured if _is_softmax_beside(other, row)]
        row["speedup_over_softmax"] = min(softmax) / row["milliseconds"] if softmax else None
    return list(rows.values())


def _is_softmax_beside(other: dict[str, Any], row: dict[str, Any]) -> bool:
    """Whether `other` is softmax attention that does as much as `row`: the operator, or a whole path."""
    contestant = CONTESTANTS[other["contestant"]]
    return contestant.family == "softmax" and contestant.whole_path == CONTESTANTS[row["contestant"]].whole_path


def _input_sets(shape: OperatorShape, dtype: torch.dtype, device: torch.device, backward: bool) -> list[Inputs]:
    """Sets of inputs that are together larger than the cache twice over."""
    count = min(_MOST_SETS, max(2, -(-2 * last_cache_bytes(device) // (3 * shape.tensor_bytes(dtype)))))
    sets = [make_inputs(shape, dtype, device, seed) for seed in range(count)]
    return [inputs.differentiable() for inputs in sets] if backward else sets


def _run(
    contestant: Contestant,
    sets: Sequence[Inputs],
    shape: OperatorShape,
    normalizer: str | None,
    backward: bool,
    compile_backend: str,
    turn: int,
) -> tuple[torch.Tensor | None, ...]:
    """One run with one of the sets; the output, and the gradients where they are asked for."""
    inputs = sets[turn % len(sets)]
    with torch.set_grad_enabled(backward):
        output = contestant.attend(inputs, shape, normalizer, compile_backend)
    if not backward:
        return (output,)
    wanted = (*inputs.tokens, inputs.mixing, inputs.gate)
    return output.detach(), *torch.autograd.grad(output, wanted, inputs.gradient, allow_unused=True)


def _figures(
    shape: OperatorShape, family: str, seconds: float, dtype: torch.dtype, backward: bool, bandwidth: float
) -> dict[str, float]:
    least_bytes = shape.least_bytes(dtype, backward)
    floor = least_bytes / bandwidth
    return {
        "teraflops_per_second": shape.flops(family, backward) / seconds / 1e12,
        "gigabytes_per_second": least_bytes / seconds / 1e9,
        "floor_milliseconds": 1e3 * floor,
        "share_of_floor": floor / seconds,
    }
