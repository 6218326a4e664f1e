# SPDX-License-Identifier: Apache-2.0
"""What the original of a converted model gives, layer by layer, recorded with the converted model itself.

The converted model holds all weights of its original. Where some of them have changed since, by calibration or
training, the original values take their place for as long as a batch is recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from ...layers.mhla import MHLA
from .layers import AttentionLayer, Batch, LayerCall, base_model, evaluating, record_calls
from .teacher import SharedTeacher, original_name


Tensors = Mapping[str, torch.Tensor]


class Recorder:
    """Records batches with the original of a converted model.

    Args:
        model: The converted model.
        layers: All its MHLA layers, with their projections.
        originals: Values that parameters had in the original, by name, where they may have changed.
        only: Names of the layers to record; `None` for all.
        autocast: Makes a context that the model runs in.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[AttentionLayer],
        originals: Tensors,
        only: Collection[str] | None = None,
        autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self.model, self.layers, self.originals = model, layers, originals
        self.only, self.autocast = only, autocast

    def __call__(
        self, batch: Batch, keep: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.detach
    ) -> dict[str, LayerCall]:
        """What each layer was called with and gave; see [`record_calls`]."""
        with evaluating(self.model), swapped(self.model, self.originals), self.autocast():
            return record_calls(self.model, self.layers, batch, only=self.only, keep=keep)


def original_values(model: nn.Module, teacher: nn.Module | SharedTeacher) -> dict[str, torch.Tensor]:
    """The teacher's values of the parameters that a converted model shares with it, by name in the converted model.

    Args:
        model: The converted model; adapters of LoRA count as switched off.
        teacher: The model that it was converted from, of the class that transformers or diffusers has; or a teacher
            in the model itself, which stores what differs alone.

    Raises:
        ValueError: If the teacher is the model itself or has MHLA layers, or lacks a parameter.
    """
    if isinstance(teacher, SharedTeacher):
        names = {original_name(name): name for name, _ in model.named_parameters()}
        values = {names[name]: value for name, value in teacher.weights.items()}
        return {**values, **_switched_off(model)}
    trunk, teacher = base_model(model), base_model(teacher)
    if teacher is trunk:
        raise ValueError("teacher is the student itself; pass teacher=None to run it with its original attention.")
    if any(isinstance(module, MHLA) for module in teacher.modules()):
        raise ValueError(
            "teacher has MHLA layers: load the original, of transformers with attn_implementation='sdpa'."
        )
    found = dict(teacher.named_parameters(remove_duplicate=False))
    values = _switched_off(model)
    # A head that one of the two lacks has no part in it.
    prefix = next(f"{name}." if name else "" for name, module in model.named_modules() if module is trunk)
    for name, parameter in trunk.named_parameters(prefix=prefix.removesuffix(".")):
        if ".mhla." in f".{name}" or ".lora_" in name:
            continue
        original = found.get(original_name(name.removeprefix(prefix)))
        if original is None or original.shape != parameter.shape:
            problem = "has no" if original is None else "has another shape of"
            raise ValueError(f"teacher {problem} {name}: it must be what this {type(model).__name__} was made from.")
        values[name] = original.detach()
    return values


def _switched_off(model: nn.Module) -> dict[str, torch.Tensor]:
    """Values with which adapters of LoRA do nothing."""
    return {name: torch.zeros_like(value) for name, value in model.named_parameters() if ".lora_B." in name}


def check_originals(model: nn.Module, originals: Tensors) -> None:
    """Checks values given for parameters.

    Raises:
        ValueError: If the model has no such parameter, or one of another shape.
    """
    parameters = dict(model.named_parameters())
    for name, value in originals.items():
        if name not in parameters:
            raise ValueError(f"original_parameters has {name[:200]}, which is no parameter of the model.")
        if value.shape != parameters[name].shape:
            raise ValueError(
                f"original_parameters has {name} of shape {tuple(value.shape)}; the model has "
                f"{tuple(parameters[name].shape)}."
            )


@contextmanager
def swapped(model: nn.Module, values: Tensors) -> Iterator[None]:
    """A context in which parameters of a model have other values; those given are not changed."""
    if not values:
        yield
        return
    parameters = {name: parameter for name, parameter in model.named_parameters() if name in values}
    before = {name: parameter.data for name, parameter in parameters.items()}
    try:
        for name, parameter in parameters.items():
            parameter.data = values[name].to(parameter.device)
        yield
    finally:
        for name, parameter in parameters.items():
            parameter.data = before[name]


@contextmanager
def only_trainable(model: nn.Module, names: Collection[str]) -> Iterator[None]:
    """A context in which only some parameters of a model require gradients."""
    before = {parameter: parameter.requires_grad for parameter in model.parameters()}
    try:
        for name, parameter in model.named_parameters():
            # Integers, as quantised weights are, cannot.
            if parameter.requires_grad != (name in names):
                parameter.requires_grad_(name in names)
        yield
    finally:
        for parameter, required in before.items():
            if parameter.requires_grad != required:
                parameter.requires_grad_(required)
