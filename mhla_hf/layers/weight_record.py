# SPDX-License-Identifier: Apache-2.0
"""The record of a converted model's pretrained weights, and the way back to softmax.

A freshly converted model has all weights of its original: it can be turned back, and be its own teacher. Calibration,
matching and training by any optimizer change that. A converted model therefore has a record of its weights, which its
MHLA layers refer to: checksums of the pretrained tensors, and the values of those that calibration or matching
replaced. What changes outside of the attention that MHLA replaced, such as new tokens or another head, belongs to the
original as well as to the MHLA model, and keeps its value in both.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn as nn

from ..utils.messages import shorten_list
from .mhla import MHLA


_Checksums = Mapping[torch.dtype, int]

STATES = ("converted", "calibrated", "matched", "trained")
"""What was done to a model last, and the values of `STATE_KEY`."""

STATE_KEY = "_mhla_state"
"""Entry of `config.json` that holds the state. Models saved without it count as trained."""

_ROUNDINGS = (torch.float32, torch.bfloat16, torch.float16)
# Values of a tensor that are read at a time, so that rounding takes little memory.
_READ_AT_ONCE = 2**22
# Modules of an attention that ends outside of the module that computes it, as BERT's does.
_INNER_ATTENTION = re.compile(r"(?<=attention\.)(self|attention)\.$")
# Modules that adapters, compiling and sharding put around others.
_WRAPPERS = ("base_layer", "original_module", "_orig_mod", "_fsdp_wrapped_module")


@dataclass(frozen=True)
class WeightRecord:
    """Provenance of a converted model's weights, keyed by full parameter name without adapter prefixes.

    Attributes:
        state: One of [`STATES`].
        pretrained: Checksums of the pretrained tensors; `None` for those that cannot be read (offloaded or sharded).
            Empty for a model that was loaded after some had changed.
        current: Checksums of all tensors after the step that `state` names.
        values: Pretrained values, on the CPU, of tensors that calibration or matching replaced.
        fitted: What stood in place of those while the model is switched to softmax; `None` while it is not.
    """

    state: str
    pretrained: Mapping[str, _Checksums | None] = field(default_factory=dict)
    current: Mapping[str, _Checksums | None] = field(default_factory=dict)
    values: Mapping[str, torch.Tensor] = field(default_factory=dict)
    fitted: Mapping[str, torch.Tensor] | None = None

    def __deepcopy__(self, memo: Any) -> WeightRecord:
        # Never changed in place: copies of a model, and of its layers by adapters, share the values.
        return self


class _Weights:
    """The tensors of a model by name, and their record.

    Args:
        model: The model, a part of it, or a wrapper around it.
    """

    def __init__(self, model: nn.Module) -> None:
        self.record: WeightRecord | None
        self.layers = {
            original_name(name): module for name, module in model.named_modules() if isinstance(module, MHLA)
        }
        name, layer = next(iter(self.layers.items()))
        self.record, whole = layer.record or (None, name)
        if len({id(layer.record[0]) if layer.record else None for layer in self.layers.values()}) > 1:
            # Several converted models: what is known of one tells nothing of the others.
            self.record = None
        # Names of a part of the whole model lack a prefix; those of a wrapper around it have one more.
        self.ahead = whole.removesuffix(name) if whole.endswith(name) else ""
        self.behind = name.removesuffix(whole) if name.endswith(whole) else ""
        # Quantised weights are not trained, and are not looked at.
        self.tensors: dict[str, torch.Tensor] = {
            own: parameter
            for own, parameter in base_parameters(model).items()
            if own.startswith(self.behind) and _is_plain(parameter)
        }
        prefixes = {self.whole(name.rpartition("mhla")[0]) for name in self.layers}
        # Names as they stand in the whole model.
        self.inside = tuple(_INNER_ATTENTION.sub("", prefix) for prefix in prefixes)

    def whole(self, name: str) -> str:
        """Returns the name in the whole model of a tensor or layer."""
        return f"{self.ahead}{name.removeprefix(self.behind)}"

    def replaced(self, known: Iterable[str]) -> list[str]:
        """Returns which tensors of those in `known` belong to attention that MHLA replaced, or were fitted to it."""
        fitted = self.record.values if self.record else {}
        names = {own: self.whole(own) for own in self.tensors}
        near = {own for own, name in names.items() if name in fitted or name.startswith(self.inside)}
        return [own for own, name in names.items() if own in near and name in known]

    def is_changed(self, name: str, known: Mapping[str, _Checksums | None]) -> bool:
        """Returns whether a tensor is not as it was by its checksums; those that cannot be read count as changed."""
        sums = known[self.whole(name)]
        return sums is None or not _is_unchanged(self.tensors[name], sums)

    def checksums(self) -> dict[str, _Checksums | None]:
        """Returns the checksums of all tensors, by their names in the whole model."""
        with ThreadPoolExecutor() as pool:
            return dict(zip(map(self.whole, self.tensors), pool.map(_checksums, self.tensors.values())))

    def attach(self, record: WeightRecord) -> None:
        """Lets all layers refer to a record."""
        for name, layer in self.layers.items():
            layer.record = record, self.whole(name)


def record_weights(model: nn.Module, state: str = "converted", softmax: bool = False) -> None:
    """Starts the record of a model whose weights are those that `state` names.

    Reads every tensor once, unless the model was trained. Does nothing for a model on the meta device.

    Args:
        model: The whole model.
        state: One of [`STATES`]; the weights of a `"converted"` model are the pretrained ones, and any other value
            counts as `"trained"`.
        softmax: Whether the model computes softmax attention.
    """
    weights = _Weights(model)
    weights.ahead = weights.behind = ""
    state = state if state in STATES else "trained"
    if any(layer.mixing.is_meta for layer in weights.layers.values()):
        return
    current = {} if state == "trained" else weights.checksums()
    pretrained = {name: sums for name, sums in current.items() if ".mhla." not in name} if state == STATES[0] else {}
    weights.attach(WeightRecord(state, pretrained, current, fitted={} if softmax else None))


def record_step(model: nn.Module, state: str, values: Mapping[str, torch.Tensor]) -> None:
    """Notes that calibration or matching has changed a model.

    Args:
        model: The model, or a part or wrapper of it.
        state: `"calibrated"` or `"matched"`.
        values: Copies of the values that were replaced, by their names in `model` without adapters. Those that are not
            pretrained are left out.
    """
    weights = _Weights(model)
    record = weights.record
    if record is None or record.state == "trained":
        return
    sums, given = weights.checksums(), {weights.whole(name): value for name, value in values.items()}
    touched = {*map(weights.whole, weights.replaced(sums)), *(given.keys() & sums.keys())}
    if all(record.current.get(name) == sums[name] for name in touched):
        return
    kept, pretrained = dict(record.values), dict(record.pretrained)
    for name, value in given.items():
        if pretrained.get(name) and name not in kept:
            if not name.startswith(weights.inside):
                # What stood there before the step, whoever put it there.
                pretrained[name] = _checksums(value)
            if _is_unchanged(value, pretrained[name] or {}):
                kept[name] = value.to("cpu")
    current = {**record.current, **sums}
    weights.attach(replace(record, state=state, pretrained=pretrained, current=current, values=kept))


def original_values(model: nn.Module, purpose: str) -> dict[str, torch.Tensor]:
    """Returns the pretrained values of the tensors that have changed in what MHLA replaced.

    Args:
        model: The model, or a part or wrapper of it.
        purpose: What they are for, for the error.

    Returns:
        Values on the CPU, by their names in `model` without adapters; none where it is switched to softmax.

    Raises:
        ValueError: If the value of a changed tensor is not known.
    """
    weights, name = _Weights(model), type(model).__name__
    record = weights.record
    if record is not None and record.fitted is not None:
        return {}
    if record is None or not record.pretrained:
        saved = "" if record is None else f": it was {record.state} before it was saved"
        raise ValueError(
            f"Cannot {purpose}: the pretrained weights of this {name} are not known{saved}. Use the softmax original."
        )
    changed = [own for own in weights.replaced(record.pretrained) if weights.is_changed(own, record.pretrained)]
    # The present value of what was fitted outside of attention, and changed after that, is of neither model.
    lost = [own for own in changed if weights.whole(own) not in record.values]
    fitted = [own for own in changed if own not in lost and not weights.whole(own).startswith(weights.inside)]
    lost += [own for own in fitted if weights.is_changed(own, record.current)]
    # Those that were quantised after they had been replaced.
    read = {weights.whole(own) for own in weights.tensors}
    lost += [name for name in record.values if name.startswith(weights.ahead) and name not in read]
    if lost:
        raise ValueError(
            f"Cannot {purpose}: {len(lost)} pretrained weight(s) of this {name} have changed since its "
            f"conversion, or are offloaded, sharded or quantised ({shorten_list(lost)}). Use the softmax original."
        )
    return {own: record.values[weights.whole(own)] for own in changed}


def is_softmax(model: nn.Module) -> bool:
    """Returns whether a model with MHLA layers is switched to softmax attention."""
    record = _Weights(model).record
    return record is not None and record.fitted is not None


@torch.no_grad()
def switch_to_softmax(model: nn.Module) -> None:
    """Gives a model its pretrained weights back, and keeps those of MHLA for [`switch_to_mhla`].

    Args:
        model: The whole model.

    Raises:
        ValueError: If they are not known, or the model has adapters or is part of another; nothing is changed then.
    """
    check_adapters(model)
    values, weights = original_values(model, "use softmax attention"), _whole(model)
    assert weights.record is not None
    fitted = {weights.whole(name): weights.tensors[name].detach().to("cpu", copy=True) for name in values}
    for name, value in values.items():
        weights.tensors[name].copy_(value)
    weights.attach(replace(weights.record, fitted=fitted))


@torch.no_grad()
def switch_to_mhla(model: nn.Module) -> None:
    """Reverses [`switch_to_softmax`]. Weights that were trained with softmax meanwhile are the original from then on.

    Args:
        model: The whole model; nothing is done where it is not switched to softmax.

    Raises:
        ValueError: If it is part of another.
    """
    if not is_softmax(model):
        return
    weights = _whole(model)
    record = weights.record
    assert record is not None and record.fitted is not None
    own = {weights.whole(name): name for name in weights.tensors}
    if any(weights.is_changed(name, record.pretrained) for name in weights.replaced(record.pretrained)):
        record_weights(model)
        return
    for name, value in record.fitted.items():
        weights.tensors[own[name]].copy_(value)
    weights.attach(replace(record, fitted=None))


def _whole(model: nn.Module) -> _Weights:
    weights = _Weights(model)
    if weights.ahead:
        raise ValueError(f"This {type(model).__name__} is part of a converted model: switch the whole model.")
    return weights


def weights_state(model: nn.Module) -> str:
    """Returns what was done to a model last, one of [`STATES`]; a change of MHLA or what it replaced is training."""
    weights = _Weights(model)
    record = weights.record
    if record is None or record.state == "trained":
        return "trained"
    known = weights.replaced(record.current)
    return "trained" if any(weights.is_changed(name, record.current) for name in known) else record.state


def check_adapters(model: nn.Module) -> None:
    """Refuses adapters, which are trained beside the weights that can be restored.

    Raises:
        ValueError: If the model has any.
    """
    if len(dict(model.named_parameters())) > len(base_parameters(model)):
        raise ValueError(
            f"Cannot restore softmax attention: this {type(model).__name__} has adapters. Merge them into its "
            "weights, or delete them."
        )


def values_of_original(model: nn.Module, original: nn.Module) -> dict[str, torch.Tensor]:
    """Returns the weights of the softmax model that a model was converted from.

    Args:
        model: The whole model, of any state.
        original: The softmax model.

    Returns:
        Tensors of `original` by the names that they have in both.

    Raises:
        ValueError: If the original has MHLA layers, lacks a weight, or has one of another shape.
    """
    if any(isinstance(module, MHLA) for module in original.modules()):
        raise ValueError("original has MHLA layers: load the softmax model that this one was converted from.")
    found = dict(original.named_parameters(remove_duplicate=False))
    own = {name: tensor for name, tensor in _Weights(model).tensors.items() if ".mhla." not in name}
    wrong = [name for name, tensor in own.items() if name not in found or found[name].shape != tensor.shape]
    if wrong:
        raise ValueError(
            f"original lacks {len(wrong)} weight(s) of this {type(model).__name__}, or has them in another shape "
            f"({shorten_list(wrong)}): it must be the model that this one was converted from."
        )
    return {name: found[name] for name in own}


@torch.no_grad()
def take_original(model: nn.Module, values: Mapping[str, torch.Tensor]) -> None:
    """Gives a model the values of [`values_of_original`]; its record starts over."""
    tensors = _Weights(model).tensors
    for name, value in values.items():
        tensors[name].copy_(value)
    record_weights(model)


def original_name(name: str) -> str:
    """Returns the name that a parameter or module had before an adapter wrapped it."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def base_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Returns the parameters of a model by the names that they have without adapters, whose own are left out."""
    return {
        original_name(name): parameter
        for name, parameter in model.named_parameters()
        if ".lora_" not in name and ".modules_to_save." not in name
    }


def _checksums(tensor: torch.Tensor) -> _Checksums | None:
    """Checksums of a tensor's values as they are, and as they are after a cast; `None` where they cannot be read."""
    dtypes = {tensor.dtype, *_ROUNDINGS}
    return None if _is_unreadable(tensor) else {dtype: _checksum(tensor, dtype) for dtype in dtypes}


def _is_unchanged(tensor: torch.Tensor, sums: _Checksums) -> bool:
    """Returns whether a tensor has the values of checksums, or those that a cast makes of them."""
    # In its own type first; values that were cast and cast back are exact in another.
    dtypes = [] if _is_unreadable(tensor) else dict.fromkeys((tensor.dtype, *_ROUNDINGS))
    return any(dtype in sums and sums[dtype] == _checksum(tensor, dtype, exact=True) for dtype in dtypes)


def _checksum(tensor: torch.Tensor, dtype: torch.dtype, exact: bool = False) -> int:
    """Checksum of a tensor's values in a type; -1 where `exact` is asked for, and the type does not hold them."""
    total = 0
    for values in tensor.detach().reshape(-1).split(_READ_AT_ONCE):
        cast = values.to(dtype)
        if exact and dtype != tensor.dtype and not torch.equal(cast.to(values.dtype), values):
            return -1
        total = zlib.crc32(cast.cpu().contiguous().view(torch.uint8).numpy().data, total)
    return total


def _is_unreadable(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor's values are elsewhere: offloaded, or in shards (DeepSpeed leaves them empty)."""
    return tensor.is_meta or hasattr(tensor, "device_mesh") or tensor.numel() == 0


def _is_plain(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor holds floats as they are: those of torchao and quanto only say that they do."""
    # A sharded tensor is plain, and unreadable.
    is_own = type(tensor.detach()) is torch.Tensor or hasattr(tensor, "device_mesh")
    return tensor.is_floating_point() and is_own
