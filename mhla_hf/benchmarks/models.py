# SPDX-License-Identifier: Apache-2.0
"""Whole models with random weights: a forward pass or a training step, with their own attention and with MHLA."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import cycle
from typing import Any

import torch
import torch.nn as nn

from ..models.registry import mhla_class_for
from ..utils.compat.diffusers import fp32_parts
from .contestants import CONTESTANTS
from .measuring import SpeedOptions, check_environment, failure_reason, fill_rows, free_memory
from .model_cases import MODEL_CASES, ModelCase
from .shapes import OperatorShape, check_names, choose_cases


ORDINARY = "ordinary"
"""The diffusers class with its own attention."""

VARIANTS = (ORDINARY, "mhla-torch", "mhla-triton")
"""Contestants: the ordinary model, and its MHLA version by each backend."""

STEPS = ("forward", "train")

_INPUTS = 3


@dataclass(frozen=True, kw_only=True)
class ModelOptions(SpeedOptions):
    """Options of [`measure_models`], besides those of [`SpeedOptions`].

    Args:
        step: `"forward"`, without gradients, or `"train"`: forward, backward and optionally the optimizer.
        models: Names of `MODEL_CASES`; None for those that suit the device.
        contestants: Names of `VARIANTS`.
        compile_backend: Backend of torch.compile for every transformer block; None for no compilation.
        checkpointing: Gradient checkpointing of the blocks in training.
        optimizer: End a training step with one of AdamW.

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
        if self.step not in STEPS:
            raise ValueError(f"step={self.step!r} must be one of {', '.join(STEPS)}.")
        check_names("contestants", self.contestants, VARIANTS)
        self.cases()

    def cases(self) -> list[ModelCase]:
        """The models to measure."""
        return choose_cases("models", MODEL_CASES, self.models, self.place()[0], self.quick)


def measure_models(
    options: ModelOptions,
    progress: Callable[[str], None] = lambda case: None,
    cases: Sequence[ModelCase] | None = None,
) -> dict[str, Any]:
    """Measures time and memory of whole models.

    Args:
        options: Options of the measurement.
        progress: Called with the name of each case before it is measured.
        cases: Cases in place of those that the options name.

    Returns:
        A report ready for JSON: `machine`, `options`, `models` and `results`, one row for each model and contestant.
        Rows of contestants that did not run have `reason` and no figures.

    Raises:
        ValueError: If an environment variable overrides MHLA's backend.
    """
    check_environment()
    device, dtype = options.place()
    chosen = options.cases() if cases is None else list(cases)
    rows: list[dict[str, Any]] = []
    for case in chosen:
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
        inputs = [case.inputs(dtype, device, seed) for seed in range(_INPUTS)]
    except RuntimeError as error:  # Out of memory, which may suffice for the next model.
        failure = failure_reason(error)
    rows: dict[str, dict[str, Any]] = {}
    runs = {}
    for name in options.contestants:
        attention = case.attention if name == ORDINARY else "mhla"
        row: dict[str, Any] = {"model": case.name, "tokens": case.tokens, "contestant": name, "attention": attention}
        rows[name] = row
        row["reason"] = failure or _obstacle(name, dtype, device)
        if row["reason"] is None:
            try:
                model = _make_model(case, name, options, dtype, device)
            except Exception as error:  # A model that cannot be built is a result, whatever it raises.
                row["reason"] = failure_reason(error)
                free_memory(device)
                continue
            row["parameters"] = sum(parameter.numel() for parameter in model.parameters())
            runs[name] = _runner(model, cycle(inputs), options)
    fill_rows(rows, runs, device, options)
    ordinary = rows.get(ORDINARY, {}).get("milliseconds")
    for row in rows.values():
        if row["reason"] is None:
            row["speedup_over_ordinary"] = None if ordinary is None else ordinary / row["milliseconds"]
    return list(rows.values())


def _obstacle(name: str, dtype: torch.dtype, device: torch.device) -> str | None:
    if name == ORDINARY:
        return None
    # The narrowest problem: an obstacle to it is one to every model.
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
        for block in model.blocks if hasattr(model, "blocks") else model.transformer_blocks:
            block.compile(backend=options.compile_backend, dynamic=False)
    return model


def _cast(model: Any, dtype: torch.dtype) -> None:
    """Casts parameters as `from_pretrained` does: those that the class keeps in float32 stay so."""
    kept = fp32_parts(model)
    for name, parameter in model.named_parameters():
        if kept.isdisjoint(name.split(".")):
            parameter.data = parameter.data.to(dtype)


def _runner(
    model: nn.Module, inputs: Iterator[dict[str, torch.Tensor]], options: ModelOptions
) -> Callable[[], torch.Tensor | None]:
    if options.step == "forward":
        return partial(_forward, model, inputs)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6) if options.optimizer else None
    return partial(_train, model, inputs, optimizer)


@torch.no_grad()
def _forward(model: nn.Module, inputs: Iterator[dict[str, torch.Tensor]]) -> torch.Tensor:
    return model(**next(inputs), return_dict=False)[0]


def _train(
    model: nn.Module, inputs: Iterator[dict[str, torch.Tensor]], optimizer: torch.optim.Optimizer | None
) -> None:
    """A training step; frees its gradients, so that a contestant's are in memory only while it runs."""
    output = model(**next(inputs), return_dict=False)[0]
    output.float().square().mean().backward()
    if optimizer is not None:
        optimizer.step()
    model.zero_grad(set_to_none=True)
