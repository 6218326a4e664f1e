# SPDX-License-Identifier: Apache-2.0
"""The MHLA layers of a model: run with their original attention, recorded, and called separately.

A freshly converted model holds all weights of its original. With the outputs of its `mhla` modules replaced by what
softmax attention gives, it *is* the original, so one model is both student and teacher.

Shapes: B batch, T tokens, D width of the model, H heads, V value width.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from accelerate.utils import send_to_device
from torch import nn

from ...layers.mhla import MHLA
from ...layers.original import original_attention
from ...layers.weight_record import is_softmax
from ...utils.compat import forward_parameters
from ...utils.compat.transformers import CACHE_NAMES


Batch = Mapping[str, Any]
"""Keyword arguments of a model's `forward`."""

Changes = dict[torch.Tensor, torch.Tensor]
"""New values of parameters, in their dtype."""


class Trainable:
    """A part of a model that trains alone, towards what the original has in its place: a layer or a block.

    Attributes:
        name: Its name in the model.
        mhla: Its MHLA layer, a submodule called `mhla`; a part without one does not train.
        projection: The linear map of the heads alone; `None` for none.
    """

    name: str
    mhla: MHLA | None
    projection: nn.Module | None

    def __call__(self, arguments: CallArguments, hidden_states: torch.Tensor) -> torch.Tensor:
        """The output that is compared with the original's `[B, T, D]`."""
        raise NotImplementedError

    def modules(self) -> dict[str, nn.Module]:
        """Its modules, by their names in the model."""
        raise NotImplementedError

    def parameters(self) -> dict[str, nn.Parameter]:
        """Parameters of `modules`, by their names in the model."""
        return {
            f"{name}.{own}": parameter
            for name, module in self.modules().items()
            for own, parameter in module.named_parameters()
        }


@dataclass(frozen=True)
class AttentionLayer(Trainable):
    """An attention layer whose attention is MHLA.

    Attributes:
        name: Name of the attention module in the model.
        attention: The module of the host model that has `mhla`.
        mhla: The MHLA module.
        projection_name: Name of the linear map right after the heads; empty for none.
        projection: That map, an `nn.Linear` or a `Conv1D` of transformers; `None` for none.
    """

    name: str
    attention: nn.Module
    mhla: MHLA
    projection_name: str = ""
    projection: nn.Module | None = None

    @property
    def projects_outside(self) -> bool:
        """True if the output projection is not part of the attention module, as in BERT."""
        return self.projection is not None and not self.projection_name.startswith(f"{self.name}.")

    @property
    def streams(self) -> tuple[str, ...]:
        """See [`one_sequence`]."""
        return self.mhla.streams

    def __call__(self, arguments: CallArguments, hidden_states: torch.Tensor) -> torch.Tensor:
        """Output of the layer `[B, T, D]` after its projection.

        Args:
            arguments: From [`record_calls`].
            hidden_states: `[B, T, D]`.
        """
        args, kwargs = arguments.with_hidden_states(hidden_states)
        output = one_sequence(self.attention(*args, **kwargs), self.streams)
        if self.projects_outside:
            assert self.projection is not None
            output = self.projection(output)
        return output

    def project(self, heads: torch.Tensor) -> torch.Tensor:
        """The output projection of heads `[..., H·V]`; the heads themselves where there is none."""
        return heads if self.projection is None else self.projection(heads)

    def modules(self) -> dict[str, nn.Module]:
        """The attention module and, where it is not part of that, the output projection, by name."""
        outside = {self.projection_name: self.projection} if self.projects_outside and self.projection else {}
        return {self.name: self.attention, **outside}


class CallArguments(NamedTuple):
    """Arguments of an attention module, or a block, besides its hidden states.

    Attributes:
        args: Positional arguments; `None` in place of the hidden states.
        kwargs: Keyword arguments; `None` in place of the hidden states.
        place: Index or name of the hidden states' argument.
        num_beside: Tokens beside the grid, at the start of the hidden states, which are an argument of their own.
        beside: Name of that argument.
        width: Its width.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    place: int | str
    num_beside: int = 0
    beside: str = ""
    width: int = 0

    def with_hidden_states(self, hidden_states: torch.Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of a call with these hidden states."""
        if self.num_beside:
            beside, grid = hidden_states[:, : self.num_beside, : self.width], hidden_states[:, self.num_beside :]
            return self.args, {**self.kwargs, "hidden_states": grid, self.beside: beside}
        if isinstance(self.place, str):
            return self.args, {**self.kwargs, self.place: hidden_states}
        args = list(self.args)
        args[self.place] = hidden_states
        return tuple(args), dict(self.kwargs)


class LayerCall(NamedTuple):
    """One call of an attention layer, without gradients. Tokens beside a grid, as those of text, come before its own.

    Attributes:
        arguments: Its arguments besides the hidden states.
        hidden_states: `[B, T, D]`.
        output: After the output projection `[B, T, D]`.
        valid: BoolTensor `[B, T]`, False for padding; `None` for no padding.
        num_beside: Number of tokens beside the grid.
    """

    arguments: CallArguments
    hidden_states: torch.Tensor
    output: torch.Tensor
    valid: torch.Tensor | None
    num_beside: int = 0


def mhla_layers(model: nn.Module) -> list[AttentionLayer]:
    """List the attention layers of a model that have an `mhla` submodule, in the order of its modules.

    Their projections are not known yet: see [`find_projections`].

    Raises:
        ValueError: If there is none, or they are switched to softmax.
    """
    layers = [
        AttentionLayer(name, module, module._modules["mhla"])
        for name, module in model.named_modules()
        # Diffusers models have a configuration entry of this name, which they warn about.
        if isinstance(module._modules.get("mhla"), MHLA)
    ]
    if not layers:
        raise ValueError(
            f"This {type(model).__name__} has no MHLA layers: convert it first (mhla_hf.convert, mhla-hf convert)."
        )
    if is_softmax(model):
        raise ValueError(
            f"This {type(model).__name__} computes softmax attention now: switch back with "
            "model.set_attn_implementation('mhla') first."
        )
    return layers


@torch.no_grad()
def find_projections(model: nn.Module, layers: Sequence[AttentionLayer], batch: Batch) -> list[AttentionLayer]:
    """Find the output projection of each layer: the linear map whose input is the output of the heads.

    Args:
        model: The model.
        layers: See [`mhla_layers`].
        batch: A batch to run, on the model's device.

    Returns:
        The layers with their projections, where there are such.
    """
    found: dict[str, str] = {}
    pending: list[tuple[str, torch.Tensor]] = []
    with ExitStack() as hooks:

        def attended(name: str) -> Callable[..., None]:
            def hook(module: nn.Module, args: Any, output: torch.Tensor) -> None:
                pending[:] = [(name, output.detach())]

            return hook

        def projecting(name: str) -> Callable[..., None]:
            def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
                if not pending or not args or not isinstance(args[0], torch.Tensor):
                    return
                layer, heads = pending.pop()
                tokens = heads.flatten(2)
                if args[0].shape == tokens.shape and torch.equal(args[0].to(tokens), tokens):
                    found[layer] = name

            return hook

        for layer in layers:
            hooks.callback(layer.mhla.register_forward_hook(attended(layer.name)).remove)
        inside = tuple(f"{layer.name}.mhla." for layer in layers)
        for name, module in model.named_modules():
            if is_linear(module) and not name.startswith(inside):
                hooks.callback(module.register_forward_pre_hook(projecting(name)).remove)
        run(trunk_for(model, batch), batch)
    modules = dict(model.named_modules())
    return [
        AttentionLayer(layer.name, layer.attention, layer.mhla, found[layer.name], modules[found[layer.name]])
        if layer.name in found
        else layer
        for layer in layers
    ]


Observer = Callable[[AttentionLayer, tuple[Any, ...], dict[str, Any], torch.Tensor, torch.Tensor], None]
"""Called with the layer, the arguments of its `mhla`, what that returned, and the heads of the original attention."""


@contextmanager
def original_heads(
    model: nn.Module, layers: Iterable[AttentionLayer], observer: Observer | None = None
) -> Iterator[None]:
    """A context in which MHLA layers return the heads of the original attention.

    If only parameters of `mhla` modules were changed, the model then computes what its original does.

    Args:
        model: The model; its class says whether its original attention is softmax.
        layers: All its MHLA layers.
        observer: Called for every call of an `mhla` module; without one, MHLA is not computed at all.
    """
    linear = bool(getattr(model, "upstream_is_linear", False))

    def replace(layer: AttentionLayer) -> Callable[..., torch.Tensor]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: torch.Tensor):
            heads = original_attention(layer.mhla, *args, **kwargs, linear=linear).to(output.device)
            if observer is not None:
                observer(layer, args, kwargs, output, heads)
            return heads

        return hook

    with ExitStack() as stack:
        for layer in layers:
            if observer is None:
                # Reads none of its parameters.
                forward = partial(original_attention, layer.mhla, linear=linear)
                stack.enter_context(replaced_forward(layer.mhla, forward))
            else:
                stack.callback(layer.mhla.register_forward_hook(replace(layer), with_kwargs=True).remove)
        yield


@contextmanager
def replaced_forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """A context in which a module has another forward."""
    # Libraries that move weights replace the method of the instance.
    before = module.__dict__.get("forward")
    module.forward = forward  # type: ignore[method-assign]
    try:
        yield
    finally:
        del module.forward
        if before is not None:
            module.forward = before  # type: ignore[method-assign]


@torch.no_grad()
def record_calls(
    model: nn.Module,
    layers: Sequence[AttentionLayer],
    batch: Batch,
    *,
    only: Collection[str] | None = None,
    keep: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.detach,
) -> dict[str, LayerCall]:
    """Run a batch with the original attention and record input and output of each layer.

    Args:
        model: The model.
        layers: All its MHLA layers, with their projections.
        batch: On the model's device.
        only: Names of the layers to record; `None` for all.
        keep: Makes the kept form of hidden states and outputs, for example a copy elsewhere.

    Returns:
        A call for each layer, by name.
    """
    inputs: dict[str, tuple[CallArguments, torch.Tensor]] = {}
    outputs: dict[str, torch.Tensor] = {}
    tokens: dict[str, tuple[torch.Tensor | None, int]] = {}

    def before(layer: AttentionLayer) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            # MHLA layers without text do not read masks.
            has_masks = bool(layer.streams)
            arguments, hidden_states = take_hidden_states(module, args, kwargs, layer.streams, masks=has_masks)
            recorded: Any = getattr(layer.attention, "recorded", None)
            if recorded is not None:
                arguments.kwargs.update(recorded(arguments.kwargs))
            inputs[layer.name] = arguments, keep(hidden_states)

        return hook

    def after(layer: AttentionLayer) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            outputs[layer.name] = keep(one_sequence(output, layer.streams).detach())

        return hook

    def attending(layer: AttentionLayer) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            tokens[layer.name] = valid_tokens(args, kwargs)

        return hook

    with original_heads(model, layers), ExitStack() as hooks:
        for layer in layers:
            if only is not None and layer.name not in only:
                continue
            # Ahead of hooks that add arguments: they add them again when the layer is called separately.
            handle = layer.attention.register_forward_pre_hook(before(layer), with_kwargs=True, prepend=True)
            hooks.callback(handle.remove)
            last = layer.projection if layer.projects_outside else layer.attention
            assert last is not None
            hooks.callback(last.register_forward_hook(after(layer)).remove)
            handle = layer.mhla.register_forward_pre_hook(attending(layer), with_kwargs=True)
            hooks.callback(handle.remove)
        run(trunk_for(model, batch), batch)
    return {name: LayerCall(*inputs[name], outputs[name], *tokens[name]) for name in inputs}


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """A context in which a model is in evaluation mode."""
    modes = {module: module.training for module in model.modules()}
    try:
        model.eval()
        yield
    finally:
        for module, training in modes.items():
            module.training = training


@contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """A context for training without dropout; layers that recompute their activations still do."""
    with evaluating(model):
        for module in model.modules():
            # They look at their own mode.
            module.training = bool(getattr(module, "gradient_checkpointing", False))
        yield


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


def on_device(value: Any, model: nn.Module) -> Any:
    """Tensors in nested dicts and sequences, on the device of a model's first parameter."""
    device = next((parameter.device for parameter in model.parameters() if not parameter.is_meta), "cpu")
    return send_to_device(value, device)


@contextmanager
def swapped_parameters(changes: Changes) -> Iterator[None]:
    """Give parameters other values within a context."""
    before = {parameter: parameter.data for parameter in changes}
    try:
        for parameter, value in changes.items():
            parameter.data = value
        yield
    finally:
        for parameter, value in before.items():
            parameter.data = value


def run(model: nn.Module, batch: Batch) -> Any:
    """Output of a model for a batch, without a cache."""
    options: dict[str, Any] = {}
    parameters = forward_parameters(model)
    if "use_cache" in parameters or getattr(getattr(model, "config", None), "use_cache", None):
        options["use_cache"] = False
    return model(**{**options, **batch})


def first_output(model: nn.Module, batch: Batch, padding: bool = False) -> torch.Tensor:
    """The first output of a model for a batch; without padding, as rows `[N, D]`, where a mask says what that is.

    Args:
        model: The model.
        batch: Keyword arguments of its forward.
        padding: Leave padding in.
    """
    output = run(model, batch)
    output = output if isinstance(output, torch.Tensor) else first(output[0])
    mask = batch.get("attention_mask")
    if not padding and isinstance(mask, torch.Tensor) and mask.dim() == 2 and mask.shape == output.shape[:2]:
        return output[mask.bool()]
    return output


def base_model(model: nn.Module) -> nn.Module:
    """A transformers model without its head; any other model unchanged."""
    return getattr(model, "base_model", model)


def trunk_for(model: nn.Module, batch: Batch) -> nn.Module:
    """The model without its head, which may be large, if that takes all arguments of a batch."""
    trunk = base_model(model)
    taken = forward_parameters(trunk)
    return trunk if set(batch) <= set(taken) else model


def first(output: Any) -> torch.Tensor:
    """The first entry of a module's output, where it is a tuple."""
    return output[0] if isinstance(output, (tuple, list)) else output


def one_sequence(output: Any, streams: Sequence[str]) -> torch.Tensor:
    """The tokens that a module returns, `[B, T, D]`, those beside the grid before its own.

    Args:
        output: What it returns.
        streams: Names of the arguments that a pair of outputs stands for, `"hidden_states"` the grid; none for modules
            of one stream.

    Raises:
        ValueError: If the stream beside the grid is wider.
    """
    if not streams or isinstance(output, torch.Tensor):
        return first(output)
    tokens = dict(zip(streams, output))
    grid = tokens.pop("hidden_states")
    (beside,) = tokens.values()
    missing = grid.shape[2] - beside.shape[2]
    if missing < 0:
        raise ValueError("blocks whose tokens beside the grid are wider than its own: leave the stage blockwise out.")
    return torch.cat([F.pad(beside, (0, missing)), grid], dim=1)


def valid_tokens(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[torch.Tensor | None, int]:
    """Read from the arguments of an `mhla` module which tokens are not padding, and how many are text.

    Returns:
        BoolTensor `[B, T]`, text first, or `None` for no padding; and the number of tokens of text.
    """
    text, sequence = kwargs.get("text"), kwargs.get("sequence")
    if text is None:
        return None if sequence is None else sequence.valid, 0
    valid = None if text.valid is None else F.pad(text.valid, (0, args[0].shape[1]), value=True)
    return valid, text.key.shape[1]


def take_hidden_states(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    streams: Sequence[str] = (),
    masks: bool = False,
) -> tuple[CallArguments, torch.Tensor]:
    """Split the arguments of a module.

    Args:
        module: The module.
        args: Positional arguments.
        kwargs: Keyword arguments.
        streams: See [`one_sequence`]; the hidden states may be one argument all the same.
        masks: Keep masks.
    """
    left_out = () if masks else ("attention_mask", *CACHE_NAMES)
    if streams:
        args, kwargs = (), {**dict(zip(forward_parameters(module), args)), **kwargs}
    kwargs = {name: None if name in left_out else kwargs[name] for name in kwargs}
    for name in streams:
        beside = None if name == "hidden_states" else kwargs.pop(name, None)
        if beside is not None:
            tokens = one_sequence((kwargs.pop("hidden_states"), beside), ("hidden_states", name))
            return CallArguments(
                args, kwargs, "hidden_states", beside.shape[1], name, beside.shape[2]
            ), tokens.detach()
    if "hidden_states" in kwargs:
        hidden_states = kwargs["hidden_states"]
        return CallArguments(args, {**kwargs, "hidden_states": None}, "hidden_states"), hidden_states.detach()
    return CallArguments((None, *args[1:]), kwargs, 0), args[0].detach()


def is_linear(module: nn.Module) -> bool:
    """True for a linear map: `nn.Linear`, or the `Conv1D` of transformers."""
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
