# SPDX-License-Identifier: Apache-2.0
"""The operator alone: MHLA, softmax and linear attention at the sizes of models, and the floor set by memory.

The floor of a shape is the time of a copy of q, k, v and o (and of their gradients with a backward pass) at the
bandwidth that is measured first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import cycle
from typing import Any

import torch

from ..utils.machine import last_cache_bytes
from .attention import Inputs, make_inputs
from .contestants import CONTESTANTS, Contestant, choose_contestants
from .measuring import (
    COPY_BYTES,
    SpeedOptions,
    check_environment,
    copy_bandwidth,
    failure_reason,
    fill_rows,
    free_memory,
)
from .shapes import SHAPES, OperatorShape, choose_cases


DIRECTIONS = ("forward", "forward+backward")
_MOST_SETS = 32


@dataclass(frozen=True, kw_only=True)
class OperatorOptions(SpeedOptions):
    """Options of [`measure_operator`], besides those of [`SpeedOptions`].

    Args:
        shapes: Names of `SHAPES`; None for those that suit the device.
        contestants: Names of `CONTESTANTS`; None for the usual ones.
        backward: Measure forward and backward together as well.
        compile_backend: Backend of torch.compile, for the contestant that is compiled.

    Raises:
        ValueError: If a name is unknown or a number is not positive.
    """

    shapes: tuple[str, ...] | None = None
    contestants: tuple[str, ...] | None = None
    backward: bool = True
    compile_backend: str = "inductor"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.cases()
        choose_contestants(self.contestants)

    def cases(self) -> list[OperatorShape]:
        """The shapes to measure."""
        return choose_cases("shapes", SHAPES, self.shapes, self.place()[0], self.quick)


def measure_operator(
    options: OperatorOptions,
    progress: Callable[[str], None] = lambda case: None,
    shapes: Sequence[OperatorShape] | None = None,
) -> dict[str, Any]:
    """Measures time and memory of all contestants at all shapes.

    Args:
        options: Options of the measurement.
        progress: Called with the name of each case before it is measured.
        shapes: Shapes in place of those that the options name.

    Returns:
        A report ready for JSON: `machine`, `options`, `copy_bandwidth` (bytes per second), `shapes`, and `results`:
        one row for each shape, direction, contestant and normaliser, see `benchmarks/README.md`. Rows of contestants
        that did not run have `reason` and no figures.

    Raises:
        ValueError: If an environment variable overrides MHLA's backend.
    """
    check_environment()
    device, dtype = options.place()
    chosen = options.cases() if shapes is None else list(shapes)
    progress("copy bandwidth")
    bandwidth = copy_bandwidth(device, COPY_BYTES[device.type] // (4 if options.quick else 1))
    rows: list[dict[str, Any]] = []
    for shape in chosen:
        for direction in DIRECTIONS[: 2 if options.backward else 1]:
            progress(f"{shape.name}, {direction}")
            rows += _measure_shape(shape, direction, dtype, device, bandwidth, options)
            free_memory(device)
    sizes = {
        shape.name: {**asdict(shape), "tokens": shape.tokens, "num_blocks": shape.layout().num_blocks}
        for shape in chosen
    }
    return options.report("op", rows, copy_bandwidth=bandwidth, shapes=sizes)


def _measure_shape(
    shape: OperatorShape,
    direction: str,
    dtype: torch.dtype,
    device: torch.device,
    bandwidth: float,
    options: OperatorOptions,
) -> list[dict[str, Any]]:
    backward = direction != "forward"
    contestants = choose_contestants(options.contestants)
    if any(contestant.compiled for contestant in contestants):
        # Otherwise shapes would add up to more versions of a function than torch.compile keeps.
        torch.compiler.reset()
    rows: dict[str, dict[str, Any]] = {}
    runs = {}
    sets, failure = [], None
    try:
        sets = _input_sets(shape, dtype, device, backward)
    except RuntimeError as error:  # Out of memory, which may suffice for the next shape.
        failure = failure_reason(error)
    for contestant in contestants:
        obstacle = failure or contestant.obstacle(shape, dtype, device)
        for normalizer in contestant.normalizers:
            name = f"{contestant.name}/{normalizer}"
            rows[name] = {
                "shape": shape.name,
                "tokens": shape.tokens,
                "direction": direction,
                "contestant": contestant.name,
                "normalizer": normalizer,
                "reason": obstacle,
            }
            if obstacle is None:
                arguments = (shape, normalizer, options.compile_backend)
                runs[name] = partial(_run, contestant, arguments, cycle(sets), backward)
    fill_rows(rows, runs, device, options)
    measured = [row for row in rows.values() if row["reason"] is None]
    moved = shape.least_bytes(dtype, backward)
    for row in measured:
        seconds, contestant = row["milliseconds"] / 1e3, CONTESTANTS[row["contestant"]]
        row["teraflops_per_second"] = shape.flops(contestant.family, backward) / seconds / 1e12
        row["gigabytes_per_second"] = moved / seconds / 1e9
        row["floor_milliseconds"] = 1e3 * moved / bandwidth
        row["share_of_floor"] = moved / bandwidth / seconds
        peers = [other["milliseconds"] for other in measured if _is_softmax_peer(other, contestant)]
        row["speedup_over_softmax"] = min(peers) / row["milliseconds"] if peers else None
    return list(rows.values())


def _is_softmax_peer(row: dict[str, Any], contestant: Contestant) -> bool:
    """True for a row of softmax attention with the same extent: the operator, or a whole path."""
    other = CONTESTANTS[row["contestant"]]
    return other.family == "softmax" and other.whole_path == contestant.whole_path


def _input_sets(shape: OperatorShape, dtype: torch.dtype, device: torch.device, backward: bool) -> list[Inputs]:
    """Inputs to take turns: on a CPU together twice the size of its cache, which a GPU's timer overwrites anyway."""
    count = 1
    if device.type == "cpu":
        count = min(_MOST_SETS, max(2, -(-2 * last_cache_bytes() // (3 * shape.tensor_bytes(dtype)))))
    sets = [make_inputs(shape, dtype, device, seed) for seed in range(count)]
    return [inputs.differentiable() for inputs in sets] if backward else sets


def _run(
    contestant: Contestant, arguments: tuple[Any, ...], sets: Iterator[Inputs], backward: bool
) -> tuple[torch.Tensor | None, ...]:
    """One run with the next inputs; returns the output, and with a backward pass the gradients."""
    inputs = next(sets)
    with torch.set_grad_enabled(backward):
        output = contestant.attend(inputs, *arguments)
    if not backward:
        return (output,)
    wanted = (*inputs.tokens, inputs.mixing, inputs.gate)
    return output.detach(), *torch.autograd.grad(output, wanted, inputs.gradient, allow_unused=True)
