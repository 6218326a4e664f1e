# SPDX-License-Identifier: Apache-2.0
"""Where the weights of a LoRA go in a model, and by how much they change it."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
from torch import nn

from .reading import LoraFile


KINDS = ("MHLA layer", "softmax layer", "other module", "MHLA parameter", "nothing")
"""What a weight can be for; the first two are self-attention."""


@dataclass(frozen=True)
class Target:
    """Where a weight of a LoRA goes.

    Attributes:
        kind: One of [`KINDS`].
        layer: Number of the layer; `None` outside of layers.
        reason: Why it goes nowhere; empty where it does.
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
        """Where each weight goes, by its name."""
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
                reason = "" if there is not None and there.shape == tensor.shape else self._missing(name, there)
            layer = re.search(r"\.(\d+)\.", name)
            found[name] = Target("nothing" if reason else self._kind(module), int(layer[1]) if layer else None, reason)
        return found

    def changes(self, lora: LoraFile, targets: dict[str, Target]) -> dict[str, torch.Tensor]:
        """What the LoRA adds to parameters, by name; float32, on the parameter's device.

        Args:
            lora: The LoRA.
            targets: See [`ModelTargets.find`].
        """
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

    def _missing(self, name: str, there: torch.Tensor | None) -> str:
        return "no such parameter" if there is None else f"the parameter is {_sizes(there)}"

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
    """Whether a weight is stored as `[in, out]`, as in GPT-2's."""
    return type(module).__name__ == "Conv1D"


def _numberless(name: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "#", name)


def _sizes(tensor: torch.Tensor) -> str:
    return "×".join(map(str, tensor.shape))
