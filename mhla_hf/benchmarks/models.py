# SPDX-License-Identifier: Apache-2.0
"""Whole models with random weights: a forward pass, or a step of training, with their own attention and with MHLA."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
import torch.nn as nn

from ..models.registry import mhla_class_for
from .contestants import CONTESTANTS
from .model_cases import ModelCase, choose_models
from .shapes import OperatorShape
from .speed import SpeedOptions, check_environment, fill_rows
from .timing import failure_reason, free_memory


ORDINARY = "ordinary"
"""The diffusers class as it is."""

VARIANTS = (ORDINARY, "mhla-torch", "mhla-triton")
"""What is measured: the ordinary model, and its MHLA version by each backend."""

PASSES = ("forward", "train")

_SETS = 3


@dataclass(frozen=True, kw_only=True)
class ModelOptions(SpeedOptions):
    """What [`measure_models`] measures; further options are those of [`SpeedOptions`].

    Args:
        step: `"forward"`, without gradients, or `"train"`: forward, backward and what `optimizer` says.
        models: Names of `MODEL_CASES`; None for those that suit the device.
        contestants: Names of `VARIANTS`.
        compile_backend: Compile every transformer block with this backend of torch.compile; None for not doing so.
        checkpointing: Whether training keeps only the blocks' inputs and computes the rest again.
        optimizer: Whether a step of training ends with one of AdamW.

    Raises:
        ValueError: If a name is unknown or a number is not positive.
    """

    step: str = "forward"
    models: tuple[str, ...] | None = None
    contestants: tuple[str, ...] = VARIANTS
    compile_backend: str | None = None
    checkpointing: bool = True
    optimizer: bool = False
    seconds: float = 15.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.step not in PASSES:
            raise ValueError(f"step={self.step!r} must be one of {', '.join(PASSES)}.")
        for name in self.contestants:
            if name not in VARIANTS:
                raise ValueError(f"contestants={name!r} must be one of {', '.join(VARIANTS)}.")
        choose_models(self.models, self.place()[0], self.quick)


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
    device, dtype = options.place()
    chosen = choose_models(options.models, device, options.quick) if cases is None else list(cases)
    rows: list[dict[str, Any]] = []
    for case in chosen:
        if progress is not None:
            progress(f"{case.name}, {options.step}")
        rows += _measure_case(case, options, dtype, device)
        free_memory(device)
    sizes = {case.name: asdict(case) for case in chosen}
    return options.report("model" if options.step == "forward" else "train", rows, models=sizes)


def _measure_case(
    case: ModelCase, options: ModelOptions, dtype: torch.dtype, device: torch.device
) -> list[dict[str, Any]]:
    if options.compile_backend is not None:
        torch.compiler.reset()
    inputs, failure = [], None
    try:
        inputs = [case.inputs(dtype, device, seed) for seed in range(_SETS)]
    except RuntimeError as error:  # Of memory, which may suffice for the next model.
        failure = failure_reason(error)
    rows: dict[str, dict[str, Any]] = {}
    runs = {}
    for name in options.contestants:
        row: dict[str, Any] = {"model": case.name, "tokens": case.tokens, "contestant": name, "reason": None}
        row["attention"] = case.attention if name == ORDINARY else "mhla"
        rows[name] = row
        try:
            row["reason"] = failure or _obstacle(name, dtype, device)
            if row["reason"] is None:
                model = _make_model(case, name, options, dtype, device)
                row["parameters"] = sum(parameter.numel() for parameter in model.parameters())
                runs[name] = _runner(model, inputs, options)
        except Exception as error:  # What a contestant cannot do is a result, whatever it raises.
            row["reason"] = failure_reason(error)
            free_memory(device)
    # Eager models are bound by launches often enough: those are part of what users wait for.
    fill_rows(rows, runs, device, options, alone=True)
    ordinary = rows.get(ORDINARY, {}).get("milliseconds")
    for row in rows.values():
        if row["reason"] is None:
            row["speedup_over_ordinary"] = None if ordinary is None else ordinary / row["milliseconds"]
    return list(rows.values())


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
