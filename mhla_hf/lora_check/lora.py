# SPDX-License-Identifier: Apache-2.0
"""LoRA files of peft, diffusers and kohya, read under the names of peft, and the modules of a model they apply to."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn

from ..utils.json_files import Types, check_fields, read_json
from ..utils.messages import shorten_list, shorten_text, shorten_value
from ..utils.tensor_files import read_header, read_tensors


PEFT_CONFIG = "adapter_config.json"
_PEFT_WEIGHTS = "adapter_model.safetensors"
_PEFT_PREFIX = "base_model.model."
_LARGEST_ALPHA = 2**20
# What scales the product of the two matrices. Nothing else of the files' options is used.
_FIELDS: dict[str, Types] = {
    "r": int,
    "lora_alpha": (int, float),
    "alpha_pattern": (dict, type(None)),
    "use_rslora": (bool, type(None)),
    "use_dora": (bool, type(None)),
    "peft_type": (str, type(None)),
}


@dataclass(frozen=True)
class LoraFile:
    """A LoRA as it was read.

    Attributes:
        path: The file of its weights.
        weights: Tensors by names of peft, relative to the model: `blocks.0.attn1.to_q.lora_A.weight`.
        others: Names in the file of weights for other models of a pipeline.
        options: Fields of peft's configuration that scale the weights; empty where none was saved.
    """

    path: Path
    weights: dict[str, torch.Tensor]
    others: tuple[str, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)

    def modules(self) -> dict[str, dict[str, torch.Tensor]]:
        """Matrices `lora_A.weight` and `lora_B.weight`, and biases, by the module that they are for."""
        found: dict[str, dict[str, torch.Tensor]] = {}
        for name, tensor in self.weights.items():
            if ".lora_" in name:
                module, _, rest = name.partition(".lora_")
                found.setdefault(module, {})[f"lora_{rest}"] = tensor
        return found

    def scale(self, module: str, rank: int) -> float:
        """Scale applied to the product of a module's matrices of a rank."""
        stored = self.weights.get(f"{module}.alpha")
        patterns = self.options.get("alpha_pattern") or {}
        matching = [alpha for name, alpha in patterns.items() if f".{module}".endswith(f".{_plain(name)}")]
        alpha = float(stored) if stored is not None else float((matching or [self.options.get("lora_alpha", rank)])[0])
        return alpha / (rank**0.5 if self.options.get("use_rslora") else rank)


def read_lora(location: str | Path, *, component: str, family: str | None) -> LoraFile:
    """Reads a LoRA.

    Args:
        location: A directory of peft or diffusers, or a .safetensors file.
        component: Name of the model in its pipeline; weights for other components are left out.
        family: Name of the model's family in diffusers; `None` for models of transformers.

    Raises:
        ValueError: If there is none, the file is damaged, holds other adapters or none, or is for another library.
    """
    path = _weight_file(Path(location).expanduser())
    try:
        names = list(read_header(path)[0])
    except (OSError, SafetensorError) as error:
        raise ValueError(f"LoRA {path} cannot be read as safetensors: {shorten_text(str(error), 200)}") from error
    if not any("lora" in name for name in names):
        raise ValueError(f"LoRA {path} holds no LoRA weights, but {shorten_list(names)}.")
    if any("dora_scale" in name or "lora_magnitude_vector" in name for name in names):
        raise ValueError(f"LoRA {path} is a DoRA adapter, whose changes depend on the weights: those are not checked.")
    config = path.with_name(PEFT_CONFIG)
    if config.is_file():
        options = _options(read_json(config, "the adapter's configuration"), str(config))
        weights = read_tensors(path, "copy or download it again")
        lora = LoraFile(path, {name.removeprefix(_PEFT_PREFIX): weights[name] for name in names}, (), options)
    elif family is None:
        raise ValueError(f"LoRA {path} has no {PEFT_CONFIG} beside it, which says how its weights are scaled.")
    else:
        lora = _read_diffusers(path, component, family)
    for name, tensor in lora.weights.items():
        if not tensor.isfinite().all() or (name.endswith(".alpha") and tensor.numel() != 1):
            raise ValueError(f"LoRA {path} is damaged: {name} is not finite, or not one number where it has to be.")
    return lora


def _weight_file(location: Path) -> Path:
    if location.is_file():
        if location.suffix != ".safetensors":
            raise ValueError(f"LoRA {location} is not a .safetensors file; weights in other formats are not read.")
        return location
    if not location.is_dir():
        raise ValueError(f"LoRA {location} is neither a directory nor a file.")
    files = sorted(path for path in location.glob("*.safetensors") if path.is_file())
    preferred = [path for path in files if path.name in (_PEFT_WEIGHTS, "pytorch_lora_weights.safetensors")]
    files = preferred or files
    if len(files) != 1:
        found = shorten_list(path.name for path in files) if files else "no .safetensors file"
        raise ValueError(f"LoRA {location} has {found}: name the file to check.")
    return files[0]


def _read_diffusers(path: Path, component: str, family: str) -> LoraFile:
    from diffusers.loaders.lora_pipeline import SanaLoraLoaderMixin, WanLoraLoaderMixin
    from diffusers.utils import convert_unet_state_dict_to_peft

    loader = WanLoraLoaderMixin if family == "wan" else SanaLoraLoaderMixin
    try:
        weights, metadata = loader.lora_state_dict(str(path), use_safetensors=True, return_lora_metadata=True)
    except (KeyError, IndexError, AttributeError, TypeError, ValueError) as error:
        reason = shorten_text(f"{type(error).__name__}: {error}", 200)
        raise ValueError(f"LoRA {path} has names that diffusers cannot convert ({reason}).") from error
    metadata = dict(metadata or {})
    parts = {name.partition(".")[0] for name in weights}
    parts = {part for part in parts if re.fullmatch(r"(transformer|text_encoder|unet)(_\d+)?", part)}
    others: list[str] = []
    if parts:
        # Each transformer of Wan 2.2 may have a file of its own, whose names say nothing of the second.
        prefix = "transformer." if component not in parts and parts == {"transformer"} else f"{component}."
        others = sorted(name for name in weights if not name.startswith(prefix))
        weights = {name.removeprefix(prefix): weights[name] for name in weights if name.startswith(prefix)}
        metadata = {name.removeprefix(prefix): metadata[name] for name in metadata if name.startswith(prefix)}
        if not weights:
            raise ValueError(f"LoRA {path} has nothing for {component}, only weights of {shorten_list(parts)}.")
    if not any(".lora_A." in name for name in weights):
        weights = convert_unet_state_dict_to_peft(weights)
    return LoraFile(path, dict(weights), tuple(others), _options(metadata, f"the metadata of {path}"))


def _options(fields: Mapping[str, Any], where: str) -> dict[str, Any]:
    check_fields(dict(fields), where, optional=_FIELDS)
    kind = fields.get("peft_type") or "LORA"
    if kind != "LORA":
        raise ValueError(f"{where} is of a {shorten_text(kind)} adapter; only LoRA is checked.")
    if fields.get("use_dora"):
        raise ValueError(f"{where} is of a DoRA adapter, whose changes depend on the weights: those are not checked.")
    for pattern, alpha in (fields.get("alpha_pattern") or {}).items():
        # To peft they are regular expressions; those of others can take for ever.
        if not re.fullmatch(r"[\w.]+", _plain(pattern)):
            raise ValueError(f"{where}: 'alpha_pattern' has {shorten_text(pattern)}, which is no name of a module.")
        _check_number(alpha, f"{where}: 'alpha_pattern'")
    _check_number(fields.get("lora_alpha", 1), f"{where}: 'lora_alpha'")
    return {name: fields[name] for name in _FIELDS if name in fields}


def _check_number(value: Any, where: str) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= _LARGEST_ALPHA:
        raise ValueError(f"{where} must be a number of at most {_LARGEST_ALPHA}, not {shorten_value(value)}.")


def _plain(pattern: str) -> str:
    """A name that was written as a regular expression for itself."""
    return pattern.removeprefix("^").removesuffix("$").replace("\\.", ".")


KINDS = ("MHLA layer", "softmax layer", "other module", "MHLA parameter", "nothing")
"""Kinds of targets; the first two are self-attention."""


@dataclass(frozen=True)
class Target:
    """Target of a weight of a LoRA.

    Attributes:
        kind: One of [`KINDS`].
        layer: Number of the layer; `None` outside of layers.
        reason: Why it has no place in the model; empty if it has one.
    """

    kind: str
    layer: int | None
    reason: str = ""


class ModelTargets:
    """The modules of a model that a LoRA can change.

    Args:
        model: The model.
        attentions: Names of its MHLA attention modules.
    """

    def __init__(self, model: nn.Module, attentions: list[str]) -> None:
        self.modules = dict(model.named_modules())
        self.tensors = dict(model.named_parameters())
        self.attentions = set(attentions)
        self.patterns = {_numberless(name) for name in attentions}

    def find(self, lora: LoraFile) -> dict[str, Target]:
        """Finds the target of each weight, by its name."""
        pairs = lora.modules()
        # One of a pair alone changes nothing.
        reasons = {module: self._obstacle(module, parts) for module, parts in pairs.items()}
        found = {}
        for name, tensor in lora.weights.items():
            module = name.partition(".lora_")[0] if ".lora_" in name else name.removesuffix(".alpha")
            if module in reasons:
                reason = reasons[module]
            else:
                # Modules that an adapter carries whole.
                there = self.tensors.get(name)
                if there is None:
                    reason = "no such parameter"
                else:
                    reason = "" if there.shape == tensor.shape else f"the parameter is {_sizes(there)}"
            layer = re.search(r"\.(\d+)\.", name)
            found[name] = Target("nothing" if reason else self._kind(module), int(layer[1]) if layer else None, reason)
        return found

    def changes(self, lora: LoraFile, targets: dict[str, Target]) -> dict[str, torch.Tensor]:
        """Additions to parameters, by name; float32, on the parameter's device. `targets` come from `find`."""
        changes = {}
        for module, parts in lora.modules().items():
            if any(targets[f"{module}.{name}"].reason for name in parts):
                continue
            weight = self.tensors[f"{module}.weight"]
            down, up = (parts[f"lora_{side}.weight"].to(weight.device).float().flatten(1) for side in "AB")
            scale = lora.scale(module, len(down))
            change = scale * (up @ down)
            changes[f"{module}.weight"] = (
                change.T if _is_transposed(self.modules[module]) else change.view(weight.shape)
            )
            if "lora_B.bias" in parts and f"{module}.bias" in self.tensors:
                changes[f"{module}.bias"] = scale * parts["lora_B.bias"].to(weight.device).float()
        for name, target in targets.items():
            if name in self.tensors and not target.reason:
                there = self.tensors[name].detach().float()
                changes[name] = lora.weights[name].to(there) - there
        return changes

    def _obstacle(self, module: str, parts: dict[str, torch.Tensor]) -> str:
        there = self.modules.get(module)
        if there is None:
            return "no such module"
        weight = getattr(there, "weight", None)
        if not isinstance(weight, torch.Tensor) or weight.dim() < 2:
            return f"a {type(there).__name__} has no matrix to add to"
        if not {"lora_A.weight", "lora_B.weight"} <= parts.keys():
            return f"only {', '.join(sorted(parts))} of the pair lora_A.weight and lora_B.weight"
        down, up = parts["lora_A.weight"], parts["lora_B.weight"]
        outputs, *inputs = reversed(weight.shape) if _is_transposed(there) else weight.shape
        pair = down.dim() > 1 < up.dim() and up.flatten(1).shape[1] == len(down) > 0
        if pair and list(down.shape[1:]) == inputs and up.shape[0] == outputs:
            return ""
        return f"matrices {_sizes(up)} and {_sizes(down)} for a weight {_sizes(weight)}"

    def _kind(self, module: str) -> str:
        if ".mhla." in module:
            return "MHLA parameter"
        parts = module.split(".")
        for length in range(len(parts), 0, -1):
            name = ".".join(parts[:length])
            if name in self.attentions:
                return "MHLA layer"
            if _numberless(name) in self.patterns and name in self.modules:
                return "softmax layer"
        return "other module"


def _is_transposed(module: nn.Module) -> bool:
    """True for a weight that is stored as `[in, out]`, as in GPT-2's."""
    return type(module).__name__ == "Conv1D"


def _numberless(name: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "#", name)


def _sizes(tensor: torch.Tensor) -> str:
    return "×".join(map(str, tensor.shape))
