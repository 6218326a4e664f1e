# SPDX-License-Identifier: Apache-2.0
"""Checks a LoRA made for a softmax model against the MHLA model that was made from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cosine_similarity

from ..models.registry import family_for
from ..models.source import Component, Source, find_original, open_source, softmax_version
from ..training.matching.layers import mhla_layers, swapped_parameters
from ..utils.locations import download_repository
from ..utils.messages import shorten_list
from .lora import KINDS, LoraFile, ModelTargets, Target, read_lora
from .probing import diffusion_probes, outputs, probe_grid, transformers_probes


@dataclass(frozen=True)
class ModuleChange:
    """Change of a module's weight W by a LoRA.

    Attributes:
        kind: Part of the model, one of `KINDS`.
        layer: Number of its layer; `None` outside of layers.
        relative_change: Norm of the change, relative to that of W (Frobenius).
        change: Norm of the change.
        weight: Norm of W.
    """

    kind: str
    layer: int | None
    relative_change: float
    change: float
    weight: float


@dataclass(frozen=True)
class ProbeResult:
    """Effect of the LoRA on the output for one input.

    Attributes:
        noise_level: From 0 to 1; `None` for models without noise.
        mhla: Size of the change of the MHLA model's output, relative to the output.
        original: The same of the original.
        ratio: Size of the MHLA model's change relative to that of the original's.
        cosine: Cosine between the two changes.
    """

    noise_level: float | None
    mhla: float
    original: float | None = None
    ratio: float | None = None
    cosine: float | None = None


@dataclass
class LoraReport:
    """Result of checking a LoRA.

    Attributes:
        model: Location of the model as the user gave it.
        component: The model's name in its pipeline.
        lora: The LoRA's file.
        weights: Target of each of its weights, by name; [`Target`].
        others: Weights in the file for other models of a pipeline.
        modules: Change of each module, by name.
        original: Location of the softmax original, or why there is none.
        has_original: Whether outputs were compared with it.
        grid: Tokens of the probes along each axis; `None` for models of transformers.
        probes: Effect of the LoRA on outputs.
    """

    model: str
    component: str
    lora: str
    weights: dict[str, Target]
    others: tuple[str, ...] = ()
    modules: dict[str, ModuleChange] = field(default_factory=dict)
    original: str = ""
    has_original: bool = False
    grid: tuple[int, ...] | None = None
    probes: list[ProbeResult] = field(default_factory=list)

    @property
    def counts(self) -> dict[str, int]:
        """Number of weights of each kind."""
        kinds = [target.kind for target in self.weights.values()]
        return {kind: kinds.count(kind) for kind in KINDS}

    def relative_change(self, kinds: tuple[str, ...], layer: int | None = None) -> float | None:
        """Norm of the change relative to that of the weights, of all modules of some kinds (in a layer) together.

        Returns:
            `None` where no such module is changed.
        """
        found = [module for module in self.modules.values() if module.kind in kinds]
        chosen = [module for module in found if layer is None or module.layer == layer]
        if not chosen:
            return None
        change, weight = (sum(getattr(module, name) ** 2 for module in chosen) ** 0.5 for name in ("change", "weight"))
        return change / weight if weight else None

    def to_dict(self) -> dict[str, Any]:
        """Returns plain JSON types."""
        return {**asdict(self), "counts": self.counts, "others": list(self.others)}


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
    """Finds the weights of a LoRA that apply to an MHLA model, and how far they move its output and the original's.

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
        device: Device of the models.
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
    hub: dict[str, Any] = {"token": token, "cache_dir": cache_dir}
    source = open_source(model, revision=revision, **hub)
    part = _choose(source, component)
    family = None if part.is_transformers else family_for(part.class_name).name
    weights = read_lora(lora, component=part.name, family=family)
    loaded = _load(part, device, dtype)
    layers = [layer.name for layer in mhla_layers(loaded)]
    modules = ModelTargets(loaded, layers)
    targets = modules.find(weights)
    lost = {name: target.reason for name, target in targets.items() if target.reason}
    if len(lost) == len(targets):
        raise ValueError(
            f"None of the {len(targets)} weights of LoRA {weights.path} has a place in {model}, for example "
            f"{min(lost)}: {lost[min(lost)]}."
        )
    report = LoraReport(str(model), part.name, str(weights.path), targets, weights.others)
    changes = modules.changes(weights, targets)
    report.modules = _module_changes(modules, changes, targets, weights)
    if not samples:
        report.original = "not looked for, as there are no samples"
        return report
    probes, report.grid = _probes(loaded, part, family, samples, seed, max_tokens)
    plain, moved = _run(loaded, changes, probes)
    differences = [after - before for before, after in zip(plain, moved)]
    sizes = [float(difference.norm() / before.norm()) for difference, before in zip(differences, plain)]
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
                float(cosine_similarity(difference.flatten().double(), expected.flatten().double(), dim=0)),
            )
        )
    return report


def _run(model: nn.Module, changes: Mapping[str, torch.Tensor], probes: Any) -> tuple[list[Any], list[Any]]:
    """Outputs without and with a LoRA."""
    plain = outputs(model, probes)
    parameters = {name: parameter for name, parameter in model.named_parameters() if name in changes}
    with swapped_parameters({old: old.detach() + changes[name].to(old.dtype) for name, old in parameters.items()}):
        return plain, outputs(model, probes)


def _choose(source: Source, component: str | None) -> Component:
    """The component to check: the one asked for, or the first that is MHLA."""
    wanted = source.components if component is None else [source.component(component)]
    for part in wanted:
        if part.is_mhla:
            return part
    raise ValueError(
        f"{source.location} has no MHLA model ({shorten_list(part.class_name for part in wanted)}): "
        "convert it first with `mhla-hf convert`."
    )


def _load(part: Component, device: str | torch.device, dtype: torch.dtype) -> Any:
    return part.load(dtype=dtype).to(device).eval().requires_grad_(False)


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
        # Its softmax model takes images of one size.
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
        given = softmax_version(open_source(original, **hub), part)
        if given is None:
            raise ValueError(f"original {original} has no softmax model for {part.name}.")
        return given, str(original)
    records = source.records()
    if not records:
        return None, f"unknown: {source.location} has no record of its conversion; name it with --original"
    found = find_original(source, part, lambda repository: download_repository(repository, **hub))
    if found is None:
        return None, (f"not found: {records[0]} is neither on the Hub nor on this machine; name it with --original")
    return found[1], found[0]
