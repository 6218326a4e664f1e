# SPDX-License-Identifier: Apache-2.0
"""Checks of a model's configuration, and of the names and shapes of its weights against the model that it makes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..config import MHLAConfig
from ..conversion.planning import empty_model
from ..conversion.transformers_planning import StoredNames
from ..integrations.transformers.checks import check_layers, check_sizes
from ..models.bounds import check_layer_count, check_model_config
from ..models.registry import FAMILIES, MHLA_CLASSES, is_mhla_class
from ..models.source import Component
from ..utils.compat.diffusers import declared
from ..utils.compat.transformers import ignored_names
from ..utils.messages import shorten_list, shorten_text, shorten_value
from ..utils.tensor_files import FLOAT_TYPES
from .problems import Findings
from .weight_checks import StoredTensor


Shapes = Mapping[str, tuple[int, ...]]

# Published checkpoints often lack this head, since nothing that they were made for uses it.
_OPTIONAL = re.compile(r"(^|\.)pooler\.")


@dataclass(frozen=True)
class _Expected:
    """The tensors that a model's files should hold.

    Attributes:
        found: Shapes in the files, under the names of `shapes`.
        shapes: Shapes by name.
        integers: Tensors in the files, with their types, that are integers where the model has floats.
        optional: Names that may be missing.
        unknown: Names in the files that the model does not have.
    """

    found: Shapes
    shapes: Shapes
    integers: tuple[str, ...] = ()
    optional: frozenset[str] = frozenset()
    unknown: tuple[str, ...] = ()


def check_model(
    component: Component, model_class: Any, weights: list[tuple[Path, dict[str, StoredTensor]]], findings: Findings
) -> None:
    """Checks the configuration of a model, and that its weights are those of the model which it describes.

    Args:
        component: The model.
        model_class: The class that loads it.
        weights: See [`check_weight_sets`][mhla_hf.hub.weight_checks.check_weight_sets].
        findings: Where problems are noted.
    """
    where = component.folder / "config.json"
    if not _check_options(component, where, weights, findings):
        return
    if any(part.get("quantization_config") for part in _parts(component.config)):
        findings.warning(where, "describes quantised weights, whose names and shapes are not checked.")
        return
    with findings.noting(where), _described(where):
        model = _build(component, model_class, where, weights)
        for owner, tensors in weights:
            with findings.noting(owner):
                compare = _of_transformers if component.is_transformers else _of_diffusers
                _compare(owner, compare(model, tensors, component), component.is_mhla, findings)


def _parts(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """A configuration and those of its towers."""
    return [config, *(part for part in config.values() if isinstance(part, Mapping))]


def _check_options(
    component: Component, where: Path, weights: list[tuple[Path, dict[str, StoredTensor]]], findings: Findings
) -> bool:
    """Checks the entry `mhla` against the class and the weights; returns whether a model can be built of it."""
    given = [part["mhla"] for part in _parts(component.config) if part.get("mhla") is not None]
    with findings.noting(where):
        for options in given:
            # Of a model of several towers the entry may hold options for each.
            if not (isinstance(options, Mapping) and any(isinstance(value, Mapping) for value in options.values())):
                MHLAConfig.from_dict(options)
        has_weights = any(".mhla." in name for _, tensors in weights for name in tensors)
        is_mhla = component.is_mhla if component.is_transformers else is_mhla_class(component.class_name)
        if has_weights and not given:
            raise ValueError(
                "has no entry 'mhla', although the weights hold MHLA parameters; take config.json from the directory "
                "that the weights were written to."
            )
        if has_weights and not is_mhla:
            name = FAMILIES[component.class_name].mhla_class if component.class_name in FAMILIES else "an MHLA class"
            raise ValueError(
                f"says _class_name={component.class_name!r}, which would drop the MHLA weights; it should say {name}."
            )
        if is_mhla and weights and not has_weights:
            raise ValueError("describes an MHLA model, but the weights hold no MHLA parameters; convert it again.")
        return True
    return False


@contextmanager
def _described(where: Path) -> Iterator[None]:
    """Turns the errors of constructors, whose types depend on the model, into one."""
    try:
        yield
    except (ValueError, OSError):
        raise
    except Exception as error:
        reason = shorten_text(f"{type(error).__name__}: {error}", 300)
        raise ValueError(f"{where} does not describe a model ({reason}).") from error


def _build(component: Component, model_class: Any, where: Path, weights: Any) -> Any:
    """Builds a model without memory for its weights."""
    # A wrong size may ask for more memory than there is.
    check_sizes(component.config, str(where))
    if component.is_transformers:
        config = component.load_config()
        with torch.device("meta"):
            return model_class(config)
    if model_class.__name__ in {**FAMILIES, **MHLA_CLASSES}:
        check_model_config(model_class, component.config, str(where))
        for _, tensors in weights:
            check_layer_count(component.config.get("num_layers", 0), tensors, str(where))
    return empty_model(model_class, component.config)


def _of_diffusers(model: Any, tensors: Mapping[str, StoredTensor], component: Component) -> _Expected:
    state = model.state_dict()
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    integers = _integers(tensors, lambda name: name in state and state[name].is_floating_point())
    ignored = declared(model, "_keys_to_ignore_on_load_unexpected")
    unknown = [name for name in tensors if name not in shapes and not any(part in name for part in ignored)]
    found = {name: tensor.shape for name, tensor in tensors.items()}
    return _Expected(found, shapes, integers, unknown=tuple(unknown))


def _of_transformers(model: Any, tensors: Mapping[str, StoredTensor], component: Component) -> _Expected:
    names = StoredNames(model, list(tensors))
    ignored = ignored_names(model, "load_unexpected")
    unknown = [
        name
        for name in tensors
        if name not in names.loaded and not any(re.search(pattern, name) for pattern in ignored)
    ]
    check_layers(model, (), [names.renamed[name] for name in unknown], str(component.folder))
    state = model.state_dict()
    shapes = {**names.expected, **{file: tuple(state[name].shape) for name, file in names.fresh.items()}}
    found = {target: tensors[name].shape for name, target in names.written.items()}
    optional = names.may_be_missing | {name for name in shapes if _OPTIONAL.search(name)}
    integers = _integers(tensors, lambda name: name in names.loaded and names.is_float(name))
    return _Expected(found, shapes, integers, frozenset(optional), tuple(unknown))


def _integers(tensors: Mapping[str, StoredTensor], is_float: Callable[[str], bool]) -> tuple[str, ...]:
    others = [name for name, tensor in tensors.items() if tensor.dtype not in FLOAT_TYPES and is_float(name)]
    return tuple(f"{shorten_text(name)} ({tensors[name].dtype})" for name in others)


def _compare(owner: Path, expected: _Expected, is_mhla: bool, findings: Findings) -> None:
    missing = [name for name in expected.shapes if name not in expected.found and name not in expected.optional]
    if missing:
        findings.error(owner, f"lacks {shorten_list(missing)}; write or download the weights again.")
    shapes = [
        f"{shorten_text(name)} {shorten_value(expected.found[name])} instead of {expected.shapes[name]}"
        for name in expected.shapes
        if name in expected.found and expected.found[name] != expected.shapes[name]
    ]
    if shapes:
        findings.error(
            owner,
            f"has tensors of other shapes than config.json describes: {shorten_list(shapes)}; the two do not belong "
            "together.",
        )
    dropped = [name for name in expected.unknown if is_mhla and ".mhla." in name]
    if dropped:
        findings.error(
            owner,
            f"has trained MHLA tensors that the entry 'mhla' of config.json leaves out: {shorten_list(dropped)}; take "
            "config.json from the directory that the weights were written to.",
        )
    # Types that are loaded as numbers of another scale. Weights of MHLA are never quantised.
    untrained = [name for name in expected.integers if ".mhla." in name]
    if untrained:
        findings.error(
            owner,
            f"holds MHLA parameters that are not of a floating-point type: {shorten_list(untrained)}; take the "
            "weights as they were trained.",
        )
    other_types = [name for name in expected.integers if name not in untrained]
    if other_types:
        findings.warning(
            owner, f"holds other types in place of floating-point parameters: {shorten_list(other_types)}."
        )
    others = [name for name in expected.unknown if name not in dropped]
    if others:
        findings.warning(owner, f"has tensors that the model does not know: {shorten_list(others)}.")
