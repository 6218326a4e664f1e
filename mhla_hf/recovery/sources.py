# SPDX-License-Identifier: Apache-2.0
"""What a recovery begins with: a softmax model, or one that was calibrated, and its original."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..config import MHLAConfig
from ..layers.weight_record import STATE_KEY, record_step
from ..models.directory import CONVERSION_RECORD, ModelDirectory
from ..models.registry import TRAINED, family_for
from ..models.weight_files import check_weights
from ..training.layers import AttentionLayer
from ..training.libraries import check_pipeline
from ..training.parameters import load_model
from ..utils.files import read_json
from ..utils.locations import is_hub_id
from ..utils.messages import shorten_list
from .data import family_of_transformers
from .recipes import FAMILIES, TEXT


def find_model(location: str | Path, component: str | None = None, **hub: Any) -> tuple[ModelDirectory, str]:
    """Find the model to recover, without loading weights.

    Args:
        location: A pipeline of diffusers or a model of transformers, directory or Hub id.
        component: Which transformer of a pipeline; `transformer` by default.
        **hub: Options of [`ModelDirectory.open`][mhla_hf.models.directory.ModelDirectory.open].

    Returns:
        The model and its family; see `recipes.FAMILIES`.

    Raises:
        ValueError: If it is no such thing, has no version with MHLA, is MHLA already, or of a kind that takes its
            inputs from several places.
    """
    part = ModelDirectory.open(location, component, **hub)
    if part.kind == "diffusers" or (part.kind == "pipeline" and part.is_mhla):
        problem = "is a transformer alone; give the pipeline that it belongs to"
        if part.is_mhla:
            problem = "is MHLA already; recover from the model that it was converted from"
        raise ValueError(f"{location} {problem}")
    family = family_of_transformers(part) if part.is_transformers else family_for(part.class_name).training
    if family not in FAMILIES:
        raise ValueError(
            f"{location} is a {part.class_name}, which recover cannot make samples for yet; give recorded batches to "
            "mhla_hf.calibrate and mhla_hf.recovery.match_layers"
        )
    if family in TRAINED:
        check_pipeline(part)
    check_weights(part.folder)
    return part, family


def find_start(
    location: str | Path, component: str | None = None, **hub: Any
) -> tuple[ModelDirectory, str, ModelDirectory | None]:
    """Find the model to recover, or the original of one that was calibrated and nothing else.

    Args:
        location: See [`find_model`]; or a directory that `mhla-hf calibrate` wrote, or `recover` by that stage alone.
        component: See there.
        **hub: See there.

    Returns:
        The model, its family, and the calibrated model if `location` is one.

    Raises:
        ValueError: As [`find_model`], and if the original of a calibrated model is not where its record says.
    """
    opened = ModelDirectory.open(location, component, **hub)
    if not opened.is_mhla or opened.config.get(STATE_KEY) != "calibrated":
        return *find_model(location, component, **hub), None
    # A revision is that of the calibrated model's repository.
    hub = {name: value for name, value in hub.items() if name != "revision"}
    original = opened.find_original(**hub)
    if original is None:
        raise ValueError(f"{location} is MHLA already, and its original is not found; recover from that")
    source = original.location if is_hub_id(original.location) else original.root
    return *find_model(source, component, **hub), opened


def _is_equal(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two weights are the same, or one is the other in a narrower type."""
    second = second.to(first.device)
    kinds = (torch.float32, torch.bfloat16, torch.float16)
    return first.shape == second.shape and any(torch.equal(first.to(kind), second.to(kind)) for kind in kinds)


def options_of(calibrated: ModelDirectory, family: str) -> dict[str, Any]:
    """Return the changes of a recipe that convert a model as a converted one was.

    Args:
        calibrated: The converted model.
        family: Its family; texts do not have all options.
    """
    options = MHLAConfig.from_dict(calibrated.config["mhla"]).to_dict()
    layers = options.pop("layers", None)
    left_out = ("causal", "blocks") if family in TEXT else ("causal",)
    changed = {f"mhla.{name}": value for name, value in options.items() if name not in left_out}
    return {**changed, "layers": "all" if layers is None else ",".join(map(str, layers))}


def take_calibrated(model: nn.Module, calibrated: ModelDirectory, layers: Sequence[AttentionLayer]) -> dict[str, Any]:
    """Give a converted model the weights of its calibrated copy.

    Args:
        model: The converted model; changed in place.
        calibrated: The copy.
        layers: Its layers, with their projections.

    Returns:
        The report of that calibration; empty where there is none.
    """
    values, own, before = dict(load_model(calibrated).named_parameters()), dict(model.named_parameters()), {}
    fitted = {
        name
        for layer in layers
        for name in layer.parameters()
        if ".mhla." in name or name.startswith(f"{layer.projection_name}.")
    }
    wrong = sorted(values.keys() ^ own.keys())
    wrong = wrong or [name for name in own if name not in fitted and not _is_equal(own[name], values[name])]
    if wrong:
        raise ValueError(
            f"{calibrated.location} was not calibrated from the original that was found for it, or was trained: "
            f"{len(wrong)} weight(s) differ ({shorten_list(wrong)}); recover from its original"
        )
    with torch.no_grad():
        for name in fitted:
            before[name] = own[name].detach().clone()
            own[name].copy_(values[name])
    record_step(model, "calibrated", before)
    path = calibrated.root / CONVERSION_RECORD
    return read_json(path, "the record").get("calibration") or {} if path.is_file() else {}
