# SPDX-License-Identifier: Apache-2.0
"""Whole models with random weights: a forward pass, or a step of training, with their own attention and with MHLA."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
import torch.nn as nn

from ..conversion.options import parse_dtype
from ..models.registry import mhla_class_for
from .contestants import CONTESTANTS, check_environment
from .machine import choose_device, machine_facts
from .memory import peak_memory
from .model_cases import ModelCase, choose_models
from .shapes import OperatorShape
from .timing import Timing, failure_reason, free_memory, time_in_turns


ORDINARY = "ordinary"
"""The diffusers class as it is."""

VARIANTS = (ORDINARY, "mhla-torch", "mhla-triton")
"""What is measured: the ordinary model, and its MHLA version by each backend."""

PASSES = ("forward", "train")

_SETS = 3


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """What [`measure_models`] measures.

    Args:
        step: `"forward"`, without gradients, or `"train"`: forward, backward and what `optimizer` says.
        models: Names of `MODEL_CASES`; None for those that suit the device.
        contestants: Names of `VARIANTS`.
        dtype: Type of weights and inputs; None for bfloat16 on a GPU and float32 on a CPU.
        device: Where to run; None for a GPU if there is one.
        compile_backend: Compile every transformer block with this backend of torch.compile; None for not doing so.
        checkpointing: Whether training keeps only the blocks' inputs and computes the rest again.
        optimizer: Whether a step of training ends with one of AdamW.
        seconds: About how long the timed rounds of one model take.
        least_rounds: Rounds at least, however long they take.
        quick: A few models and rounds.

    Raises:
        ValueError: If a name is unknown or a number is not positive.
    """

    step: str = "forward"
    models: tuple[str, ...] | None = None
    contestants: tuple[str, ...] = VARIANTS
    dtype: str | None = None
    device: str | None = None
    compile_backend: str | None = None
    checkpointing: bool = True
    optimizer: bool = False
    seconds: float = 15.0
    least_rounds: int = 3
    quick: bool = False

    def __post_init__(self) -> None:
        if self.step not in PASSES:
            raise ValueError(f"step={self.step!r} must be one of {', '.join(PASSES)}.")
        for name in ("seconds", "least_rounds"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)} must be positive.")
        for name in self.contestants:
            if name not in VARIANTS:
                raise ValueError(f"contestants={name!r} must be one of {', '.join(VARIANTS)}.")
        choose_models(self.models, choose_device(self.device), self.quick)
        parse_dtype(self.dtype or "float32")


def measure_models(
    options: ModelOptions,
    progress: Callable[[str], None] | None = None,
    cases: Sequence[ModelCase] | None = None,
) -> dict[str, Any]:
    """Measures time and memory of whole models.

    Args:
        options: What to measure.
        progress: Is told what comes next.
        cases: In place of those that the options name.

    Returns:
        A report ready for JSON: `machine`, `options`, `models` and `results`, one row for each model and contestant.
        Rows of contestants that did not run have `reason` and no figures.

    Raises:
        ValueError: If the environment decides which backend MHLA takes.
    """
    check_environment()
    device = choose_device(options.device)
    dtype = parse_dtype(options.dtype or ("bfloat16" if device.type == "cuda" else "float32"))
    assert dtype is not None
    chosen = choose_models(options.models, device, options.quick) if cases is None else list(cases)
    rows: list[dict[str, Any]] = []
    for case in chosen:
        if progress is not None:
            progress(f"{case.name}, {options.step}")
        rows += _measure_case(case, options, dtype, device)
        free_memory(device)
    return {
        "benchmark": "model" if options.step == "forward" else "train",
        "machine": machine_facts(device),
        "options": {**asdict(options), "device": device.type, "dtype": str(dtype).removeprefix("torch.")},
        "models": {case.name: asdict(case) for case in chosen},
        "results": rows,
    }


def _measure_case(
    case: ModelCase, options: ModelOptions, dtype: torch.dtype, device: torch.device
) -> list[dict[str, Any]]:
    if options.compile_backend is not None:
        torch.compiler.reset()
    inputs = [case.inputs(dtype, device, seed) for seed in range(_SETS)]
    rows, runs = [], {}
    for name in options.contestants:
        row: dict[str, Any] = {"model": case.name, "tokens": case.tokens, "contestant": name, "reason": None}
        row["attention"] = case.attention if name == ORDINARY else "mhla"
        rows.append(row)
        try:
            row["reason"] = _obstacle(name, dtype, device)
            if row["reason"] is None:
                model = _make_model(case, name, options, dtype, device)
                row["parameters"] = sum(parameter.numel() for parameter in model.parameters())
                runs[name] = _runner(model, inputs, options)
        except Exception as error:  # What a contestant cannot do is a result, whatever it raises.
            row["reason"] = failure_reason(error)
            free_memory(device)
    seconds = options.seconds / (10 if options.quick else 1)
    least = min(2, options.least_rounds) if options.quick else options.least_rounds
    times = time_in_turns(runs, device, seconds=seconds, least=least, alone=True)
    for row in rows:
        timing = times.get(row["contestant"], row["reason"])
        if not isinstance(timing, Timing):
            row["reason"] = timing
            continue
        row["milliseconds"] = 1e3 * timing.median
        row["milliseconds_20"], row["milliseconds_80"] = 1e3 * timing.low, 1e3 * timing.high
        row["runs"] = timing.runs
        try:
            row["peak_memory_bytes"] = peak_memory(partial(runs[row["contestant"]], 0), device)
        except Exception as error:  # A figure that cannot be had must not cost the others.
            row["peak_memory_bytes"], row["peak_memory_reason"] = None, failure_reason(error)
    ordinary = next((row.get("milliseconds") for row in rows if row["contestant"] == ORDINARY), None)
    for row in rows:
        if row["reason"] is None:
            row["speedup_over_ordinary"] = None if ordinary is None else ordinary / row["milliseconds"]
    return rows


def _obstacle(name: str, dtype: torch.dtype, device: torch.device) -> str | None:
    if name == ORDINARY:
        return None
    # The narrowest problem: what stands in its way stands in every model's.
    shape = OperatorShape(name="", group="", batch=1, heads=1, width=16, grid=(16,))
    return CONTESTANTS[name].obstacle(shape, dtype, device)


def _make_model(
    case: ModelCase, name: str, options: ModelOptions, dtype: torch.dtype, device: torch.device
) -> nn.Module:
    import diffusers

    torch.manual_seed(0)
    with torch.device(device):
        if name == ORDINARY:
            model = getattr(diffusers, case.model_class)(**case.sizes)
        else:
            mhla = {**case.mhla, "backend": name.removeprefix("mhla-")}
            model = mhla_class_for(case.model_class)(**case.sizes, mhla=mhla)
    _cast(model, dtype)
    training = options.step == "train"
    model.train(training).requires_grad_(training)
    if training and options.checkpointing:
        model.enable_gradient_checkpointing()
    if options.compile_backend is not None:
        for block in _transformer_blocks(model):
            block.compile(backend=options.compile_backend, dynamic=False)
    return model


def _cast(model: Any, dtype: torch.dtype) -> None:
    """Casts parameters as `from_pretrained` does, which leaves those in float32 that a class keeps so."""
    kept = set(model._keep_in_fp32_modules or ())
    for name, parameter in model.named_parameters():
        if kept.isdisjoint(name.split(".")):
            parameter.data = parameter.data.to(dtype)


def _transformer_blocks(model: nn.Module) -> nn.ModuleList:
    return model.blocks if hasattr(model, "blocks") else model.transformer_blocks


def _runner(
    model: nn.Module, inputs: Sequence[dict[str, torch.Tensor]], options: ModelOptions
) -> Callable[[int], torch.Tensor | None]:
    if options.step == "forward":
        return partial(_forward, model, inputs)
    optimizer = None
    if options.optimizer:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    return partial(_train, model, inputs, optimizer)


@torch.no_grad()
def _forward(model: nn.Module, inputs: Sequence[dict[str, torch.Tensor]], turn: int) -> torch.Tensor:
    return model(**inputs[turn % len(inputs)], return_dict=False)[0]


def _train(
    model: nn.Module,
    inputs: Sequence[dict[str, torch.Tensor]],
    optimizer: torch.optim.Optimizer | None,
    turn: int,
) -> None:
    """A step; gradients are gone after it, so that each contestant's are in memory only while it runs."""
    output = model(**inputs[turn % len(inputs)], return_dict=False)[0]
    output.float().square().mean().backward()
    if optimizer is not None:
        optimizer.step()
    model.zero_grad(set_to_none=True)
