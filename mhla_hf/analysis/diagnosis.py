# SPDX-License-Identifier: Apache-2.0
"""Failure signatures of whole models: in memory, on a probe, and of directories without running them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import extract_model_from_parallel
from safetensors import safe_open
from torch import nn

from ..conversion.planning import empty_model
from ..conversion.transformers_planning import StoredNames
from ..models.source import Component, read_source
from ..training.matching.layers import Batch, mhla_layers
from .signatures import FailureSignature, weight_signatures
from .tracking import DEFAULT_ROWS, AttentionTracker


def failure_signatures(
    model: nn.Module,
    batches: Batch | Sequence[Batch] = (),
    *,
    layers: str | Iterable[int] | None = None,
    rows: int = DEFAULT_ROWS,
) -> list[FailureSignature]:
    """Signs of failure in a model's MHLA layers, by their weights and, given a probe, by their attention.

    Args:
        model: A model of diffusers or transformers with MHLA layers, wrapped or compiled, if it is; not changed.
        batches: The probe: keyword arguments of the model's `forward`, or a list of such. Inputs of the lengths that
            the model is used at tell most. Without any, weights are all there is.
        layers: The layers that the probe is for, as numbers or text such as `"1,2,4"`; `None` for all.
        rows: See [`AttentionTracker`][mhla_hf.analysis.AttentionTracker].

    Returns:
        What was found, in the order of the layers; nothing for a sound model.

    Raises:
        ValueError: If the model has no MHLA layers, or an argument is wrong.

    Examples:
        >>> for signature in failure_signatures(model, tokenizer(text, return_tensors="pt")):  # doctest: +SKIP
        ...     print(signature)
        model.layers.3.self_attn: uniform-mixing: its mixing weights differ from equal ones by 0.41%, ...
    """
    model = extract_model_from_parallel(model, keep_torch_compile=False)
    linear = bool(getattr(model, "upstream_is_linear", False))
    found = {
        (layer.name, signature.name): signature
        for layer in mhla_layers(model)
        for signature in weight_signatures(layer.mhla, layer.name, linear=linear)
    }
    if batches:
        for each in AttentionTracker(batches, layers=layers, rows=rows).probe(model)[1]:
            # Weights that never trained may be equal; the probe says what it has seen.
            found.setdefault((each.layer, each.name), each)
    names = [layer.name for layer in mhla_layers(model)]
    return sorted(found.values(), key=lambda each: (names.index(each.layer), each.name))


def directory_signatures(root: str | Path) -> list[tuple[Path, FailureSignature]]:
    """Failure signatures of the MHLA models of a directory, by their weights alone.

    Mixing weights are read one layer at a time, and nothing else of the weights; models are built without memory for
    theirs.

    Args:
        root: A pipeline of diffusers, or a model of diffusers or transformers, that
            [`check_directory`][mhla_hf.hub.checks.check_directory] finds nothing wrong with.

    Returns:
        What was found, with the folder of the model; nothing where there is no MHLA model.

    Raises:
        ValueError: If a file is missing, damaged, or of another model than it says.
    """
    try:
        components = read_source(Path(root)).mhla_components
    except ValueError:
        # No model that can be MHLA.
        return []
    return [(component.folder, signature) for component in components for signature in _of_component(component)]


def _of_component(component: Component) -> list[FailureSignature]:
    model = _empty(component)
    linear = bool(getattr(model, "upstream_is_linear", False))
    files: dict[str, Path] = {}
    for path in component.weight_sets()[0].files:
        with safe_open(path, framework="pt") as tensors:
            files.update(dict.fromkeys(tensors.keys(), path))
    stored = {name: name for name in files}
    if component.is_transformers:
        stored = {name: file for file, name in StoredNames(model, list(files)).loaded.items()}
    found = []
    for layer in mhla_layers(model):
        name = stored.get(f"{layer.name}.mhla.mixing")
        if name is None:
            continue
        with safe_open(files[name], framework="pt") as tensors:
            mixing = tensors.get_tensor(name)
        found += weight_signatures(layer.mhla, layer.name, mixing=mixing, linear=linear)
    return found


def _empty(component: Component) -> Any:
    """The model without memory for its weights."""
    if not component.is_transformers:
        return empty_model(component.load_class(), component.config)
    config = component.load_config()
    with torch.device("meta"):
        return component.load_class()(config)
