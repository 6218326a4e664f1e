# SPDX-License-Identifier: Apache-2.0
"""Checks a LoRA made for a softmax model against the MHLA model that was made from it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..conversion.source import Component, Source, download_or_find, read_source
from ..models.registry import FAMILIES, MHLA_CLASSES, family_for, is_mhla_class
from ..training.loading import check_weights, damage_named, recorded_sources
from ..training.matching.layers import mhla_layers
from ..utils.files import path_inside
from ..utils.messages import shorten_list, shorten_text
from ..utils.sources import is_hub_id
from .probing import changed, cosine, diffusion_probes, movement, outputs, probe_grid, transformers_probes
from .reading import LoraFile, read_lora
from .report import LoraReport, ModuleChange, ProbeResult
from .targets import ModelTargets, Target


# Pipelines that were made from one another.
_MOST_RECORDS = 8


def check_lora(
    model: str | Path,
    lora: str | Path,
    *,
    original: str | Path | None = None,
    component: str | None = None,
    samples: int = 4,
    max_tokens: int = 2048,
    seed: int = 0,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | Path | None = None,
) -> LoraReport:
    """Says which weights of a LoRA apply to an MHLA model, and how far they move its output and the original's.

    One model is in memory at a time. The original is the softmax pipeline or model that `conversion.json` (or
    `training.json`) names, a Hub repository or a folder beside the model; without it, only the MHLA model is probed.

    Args:
        model: Directory or Hub id of an MHLA pipeline or model.
        lora: Directory or .safetensors file of a LoRA, of peft or as diffusers reads them.
        original: The softmax original.
        component: The pipeline's transformer to check, where it has several.
        samples: Random inputs to run; 0 runs nothing.
        max_tokens: Most tokens of an input. Larger grids of the model are halved along their longest axes.
        seed: Seed of the inputs and their noise levels.
        device: Where models run.
        dtype: Type of their weights.
        revision: Branch, tag or commit of the model on the Hub.
        token: Access token for the Hub.
        cache_dir: Where downloads go.

    Raises:
        ValueError: If the model is not MHLA, the LoRA cannot be read, or none of its weights has a place.
    """
    for name, value, least in (("samples", samples, 0), ("max_tokens", max_tokens, 1)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"{name}={value!r} must be an integer of at least {least}.")
    hub = {"token": token, "cache_dir": cache_dir}
    source = _open(model, revision=revision, **hub)
    part = _choose(source, component)
    family = None if part.is_transformers else family_for(part.class_name).name
    weights = read_lora(lora, component=part.name, family=family)
    loaded = _load(part, device, dtype)
    layers = [layer.name for layer in mhla_layers(loaded)]
    modules = ModelTargets(loaded, layers)
    targets = modules.find(weights)
    _check_some_apply(targets, weights, str(model))
    report = LoraReport(str(model), part.name, str(weights.path), targets, weights.others)
    changes = modules.changes(weights, targets)
    report.modules = _module_changes(modules, changes, targets, weights)
    if not samples:
        report.original = "not looked for, as there are no samples"
        return report
    probes, report.grid = _probes(loaded, part, family, samples, seed, max_tokens)
    plain, moved = _run(loaded, changes, probes)
    differences = [after - before for before, after in zip(plain, moved)]
    sizes = movement(plain, moved)
    levels = [level for level, _ in probes]
    del loaded, modules, changes
    found, report.original = _find_original(source, part, original, hub)
    if found is None:
        report.probes = [ProbeResult(level, size) for level, size in zip(levels, sizes)]
        return report
    softmax = _load(found, device, dtype)
    modules = ModelTargets(softmax, layers)
    changes = modules.changes(weights, modules.find(weights))
    plain, moved = _run(softmax, changes, probes)
    report.has_original = True
    for level, size, difference, before, after in zip(levels, sizes, differences, plain, moved):
        expected = after - before
        report.probes.append(
            ProbeResult(
                level,
                size,
                float(expected.norm() / before.norm()),
                float(difference.norm() / expected.norm()) if expected.any() else None,
                cosine(difference, expected),
            )
        )
    return report


def _run(model: nn.Module, changes: Mapping[str, torch.Tensor], probes: Any) -> tuple[list[Any], list[Any]]:
    """Outputs without and with a LoRA."""
    plain = outputs(model, probes)
    with changed(model, changes):
        return plain, outputs(model, probes)


def _open(location: str | Path, **hub: Any) -> Source:
    root, origin = download_or_find(location, **hub)
    return read_source(root, str(location), origin, {**FAMILIES, **MHLA_CLASSES}, transformers=True)


def _choose(source: Source, component: str | None) -> Component:
    """The component to check: the one asked for, or the first that is MHLA."""
    names = [part.name for part in source.components]
    if component is not None and component not in names:
        raise ValueError(f"component={component!r} is not in {source.location}, which has {shorten_list(names)}.")
    wanted = [part for part in source.components if component in (None, part.name)]
    for part in wanted:
        if is_mhla_class(part.class_name) or (part.is_transformers and _says_mhla(part.config)):
            return part
    raise ValueError(
        f"{source.location} has no MHLA model ({shorten_list(part.class_name for part in wanted)}): "
        "convert it first with `mhla-hf convert`."
    )


def _says_mhla(config: Mapping[str, Any]) -> bool:
    """Whether a model of transformers, or one of its towers, is stored as MHLA."""
    return any("mhla" in part for part in (config, *config.values()) if isinstance(part, dict))


def _load(part: Component, device: str | torch.device, dtype: torch.dtype) -> Any:
    check_weights(part.folder)
    with damage_named(part.folder):
        if part.is_transformers:
            import transformers

            model_class: Any = getattr(transformers, part.class_name, None)
            is_model = isinstance(model_class, type) and issubclass(model_class, transformers.PreTrainedModel)
            if not is_model:
                raise ValueError(f"{part.folder} is a {shorten_text(part.class_name)}, which transformers lacks.")
            model = model_class.from_pretrained(part.folder, dtype=dtype)
        elif is_mhla_class(part.class_name):
            model = family_for(part.class_name).load_class().from_pretrained(part.folder, torch_dtype=dtype)
        else:
            import diffusers

            model = getattr(diffusers, part.class_name).from_pretrained(part.folder, torch_dtype=dtype)
    return model.to(device).eval().requires_grad_(False)


def _check_some_apply(targets: Mapping[str, Target], lora: LoraFile, model: str) -> None:
    lost = {name: target.reason for name, target in targets.items() if target.reason}
    if len(lost) == len(targets):
        name = min(lost)
        raise ValueError(
            f"None of the {len(targets)} weights of LoRA {lora.path} has a place in {model}, for example {name}: "
            f"{lost[name]}."
        )


def _module_changes(
    modules: ModelTargets, changes: Mapping[str, torch.Tensor], targets: Mapping[str, Target], lora: LoraFile
) -> dict[str, ModuleChange]:
    found = {}
    for module in lora.modules():
        name = f"{module}.weight"
        if name not in changes:
            continue
        target = targets[f"{module}.lora_A.weight"]
        change, weight = (float(tensor.float().norm()) for tensor in (changes[name], modules.tensors[name]))
        found[module] = ModuleChange(target.kind, target.layer, change / max(weight, 1e-30), change, weight)
    return found


def _probes(
    model: Any, part: Component, family: str | None, samples: int, seed: int, max_tokens: int
) -> tuple[list[Any], tuple[int, ...] | None]:
    if family is None:
        return list(transformers_probes(model, samples, seed, max_tokens)), None
    grid = tuple(model.config_grid(part.config) or model.mhla_config.grid or model.default_grid)
    if family != "dit":
        # Its softmax model takes pictures of one size.
        grid = probe_grid(grid, max_tokens)
    return list(diffusion_probes(family, model.config, grid, samples, seed)), grid


def _find_original(
    source: Source, part: Component, original: str | Path | None, hub: dict[str, Any]
) -> tuple[Component | None, str]:
    """The softmax model behind an MHLA one, and where it is; or why it was not found.

    Raises:
        ValueError: If the given one is not the original of such a model.
    """
    if original is not None:
        found = _softmax_part(_open(original, **hub), part)
        if found is None:
            raise ValueError(f"original {original} has no softmax model for {part.name}.")
        return found, str(original)
    waiting = [(source.root, location) for location in recorded_sources(source.root)]
    if not waiting:
        return None, f"unknown: {source.location} has no record of its conversion; name it with --original"
    first = waiting[0][1]
    for _ in range(_MOST_RECORDS):
        if not waiting:
            break
        owner, location = waiting.pop(0)
        try:
            opened = _open(location if is_hub_id(location) else _beside(owner, location), **hub)
        except (OSError, ValueError):
            continue
        found = _softmax_part(opened, part)
        if found is not None:
            return found, location
        waiting += [(opened.root, further) for further in recorded_sources(opened.root)]
    return None, f"not found: {first} is neither on the Hub nor beside {source.location}; name it with --original"


def _beside(owner: Path, location: str) -> Path:
    """The folder that a record names, which must be beside the one with the record: others' records lead nowhere."""
    folder = owner.resolve().parent
    name = str(Path(location).relative_to(folder)) if Path(location).is_absolute() else location
    return path_inside(folder, name, f"the record of {owner}")


def _softmax_part(source: Source, part: Component) -> Component | None:
    """The softmax model of the same class and name among a source's, or the only one there is."""
    named = [candidate for candidate in source.components if candidate.name == part.name]
    for candidate in named or source.components[:1]:
        if part.is_transformers:
            same = candidate.class_name == part.class_name and not _says_mhla(candidate.config)
        else:
            same = candidate.class_name == family_for(part.class_name).upstream
        if same:
            return candidate
    return None
