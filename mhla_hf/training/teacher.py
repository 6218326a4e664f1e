# SPDX-License-Identifier: Apache-2.0
"""Teachers: the student itself with its original attention and original weights, or a second model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.func import functional_call

from ..layers.weight_record import original_name, original_values, values_of_original
from .layers import AttentionLayer, Batch, LayerCall, base_model, evaluating, mhla_layers, original_heads, record_calls
from .processes import is_fully_sharded, shard_like


class SharedTeacher:
    """The model that a converted model was made from, computed by the converted model itself.

    Called like the model, it runs the model without gradients, in evaluation mode, with the original attention in
    place of MHLA, LoRA switched off, and original values in place of the parameters that were changed since or will
    be. Only those values are stored besides the model.

    Args:
        model: The converted model. Its weights may change from now on; those named in `keep` before that are kept.
        weights: Original values of parameters, by the names that they have in the original model. Only those that
            differ from the model's are kept. By default those that the model's own record has
            ([`mhla_hf.layers.original`]).

    Raises:
        ValueError: If the model has no MHLA layers, a weight is not one of the model's, or the model was trained and
            the original values are not known.
    """

    def __init__(self, model: nn.Module, weights: Mapping[str, torch.Tensor] | None = None) -> None:
        self.model = model
        self.layers = mhla_layers(model)
        self.weights: dict[str, torch.Tensor] = {}
        parameters = self._parameters()
        if weights is None:
            weights = original_values(model, "run the model with its original attention")
        for name, value in weights.items():
            parameter = parameters.get(name)
            if parameter is None or parameter.shape != value.shape:
                raise ValueError(
                    f"the model has no {name[:200]} of shape {tuple(value.shape)}, as the original should."
                )
            value = value.detach().to(parameter)
            if not torch.equal(value, parameter):
                self.weights[name] = value

    @property
    def config(self) -> Any:
        """The model's configuration."""
        return self.model.config

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The teacher's weights, by the names that they have in the original model."""
        for name, parameter in self._parameters().items():
            yield name, self.weights.get(name, parameter)

    def keep(self, names: Iterable[str] | None = None) -> None:
        """Store the values of parameters that are about to change, unless they are stored already.

        Args:
            names: Names in the model; None for all. Those of MHLA and LoRA have no part in the teacher.
        """
        parameters = self._parameters()
        for name in parameters if names is None else map(original_name, names):
            if name in parameters and name not in self.weights:
                self.weights[name] = parameters[name].detach().clone()

    def to(self, device: torch.device | str) -> SharedTeacher:
        """Move the stored weights to the device that the model is on."""
        self.weights = {name: value.to(device) for name, value in self.weights.items()}
        return self

    def shard(self) -> None:
        """Shard the stored weights as the model's parameters are, for `in_shards`."""
        parameters = self._parameters()
        self.weights = {name: shard_like(value, parameters[name]) for name, value in self.weights.items()}

    @contextmanager
    def in_shards(self, root: nn.Module) -> Iterator[None]:
        """A context in which a sharded model, called through its root, computes what the teacher does.

        Args:
            root: The module that was sharded.
        """
        parameters = self._parameters()
        kept = {name: parameters[name].detach().clone() for name in self.weights}

        def put(values: Mapping[str, torch.Tensor]) -> None:
            for name, value in values.items():
                parameters[name].copy_(value)
            # What is gathered now has the values of before.
            for module in root.modules():
                if is_fully_sharded(module):
                    module.reshard()  # type: ignore[operator]

        with self.active():
            put(self.weights)
            try:
                yield
            finally:
                put(kept)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The original model's output."""
        return self.compute(lambda model: model(*args, **kwargs))

    def compute(self, function: Callable[[Any], Any]) -> Any:
        """Call a function on the original model.

        Args:
            function: Called with the model, or parts of it, while it is the original.
        """
        weights = {f"model.{name}": value for name, value in self._by_present_names().items()}
        with self.active():
            return functional_call(_Call(self.model), weights, (function,))

    def record(
        self,
        layers: Sequence[AttentionLayer],
        batch: Batch,
        only: Collection[str] | None = None,
        keep: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.detach,
    ) -> dict[str, LayerCall]:
        """Input and output of each layer of the original model on a batch; arguments as in `layers.record_calls`."""
        return self.compute(lambda model: record_calls(model, layers, batch, only=only, keep=keep))

    @contextmanager
    def active(self) -> Iterator[None]:
        """A context in which the model computes what the teacher does, but for the stored weights."""
        with evaluating(self.model), torch.no_grad(), _without_adapters(self.model):
            with original_heads(self.layers):
                yield

    def _by_present_names(self) -> dict[str, torch.Tensor]:
        """The stored weights by their names in the model, which LoRA changes."""
        there = dict(self.model.named_parameters())
        names = {original_name(name): name for name in there}
        return {names[name]: value for name, value in self.weights.items()}

    def _parameters(self) -> dict[str, nn.Parameter]:
        """The model's parameters that the original has too, by the names that they have there."""
        inside = tuple(f"{layer.name}.mhla." for layer in self.layers)
        return {
            original_name(name): parameter
            for name, parameter in self.model.named_parameters()
            if not name.startswith(inside) and ".lora_" not in name
        }


def shared_teacher(model: nn.Module, teacher: nn.Module | SharedTeacher | None = None) -> SharedTeacher:
    """A teacher in a converted model itself, with the weights of the model that it was converted from.

    Args:
        model: The converted model.
        teacher: The original, of the class that transformers or diffusers has; None for the model's own record.

    Raises:
        ValueError: If the teacher is the model itself or has MHLA layers, or lacks a parameter, or is None for a model
            that was trained.
    """
    if isinstance(teacher, SharedTeacher):
        return teacher
    if teacher is None:
        return SharedTeacher(model)
    # A head that one of the two lacks has no part in it.
    trunk = base_model(model)
    prefix = next(f"{name}." if name else "" for name, module in model.named_modules() if module is trunk)
    weights = values_of_original(trunk, base_model(teacher))
    return SharedTeacher(model, {f"{prefix}{name}": value for name, value in weights.items()})


class _Call(nn.Module):
    """Pass a model to a function."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, function: Callable[[Any], Any]) -> Any:
        return function(self.model)


@contextmanager
def _without_adapters(model: nn.Module) -> Iterator[None]:
    """Switch the adapters of a model off, if it has any."""
    if not getattr(model, "peft_config", None):
        yield
        return
    # Switching them changes which of them take gradients.
    takes_gradients = {parameter: parameter.requires_grad for parameter in model.parameters()}
    model.disable_adapters()  # type: ignore[operator]
    try:
        yield
    finally:
        model.enable_adapters()  # type: ignore[operator]
        for parameter, takes in takes_gradients.items():
            parameter.requires_grad_(takes)


Teacher: TypeAlias = nn.Module | SharedTeacher
"""Called like the model."""


def share_weights(model: nn.Module, teacher: nn.Module) -> Teacher:
    """A teacher that stores only what the model does not have: the weights that differ, or will.

    Args:
        model: The converted model, before it trains.
        teacher: The model it was converted from.

    Returns:
        A teacher in the model itself; the one handed in where another configuration or other shapes leave nothing to
        share.
    """
    student, unrelated = _entries(model), ("architectures", "dtype", "torch_dtype", "transformers_version")
    for name, value in _entries(teacher).items():
        if not name.startswith("_") and name not in unrelated and student.get(name) != value:
            return teacher
    try:
        shared = SharedTeacher(model, dict(teacher.named_parameters()))
    except ValueError:
        return teacher
    shared.keep(name for name, parameter in model.named_parameters() if parameter.requires_grad)
    return shared


def compute_with(teacher: Teacher, function: Callable[[Any], Any]) -> Any:
    """Call a function on the teacher's model, without gradients.

    Args:
        teacher: The teacher.
        function: Called with its model.
    """
    if isinstance(teacher, SharedTeacher):
        return teacher.compute(function)
    with torch.no_grad():
        return function(teacher)


def _entries(model: nn.Module) -> Mapping[str, Any]:
    """The configuration of a model of either library."""
    config: Any = model.config
    return config if isinstance(config, Mapping) else config.to_dict()
