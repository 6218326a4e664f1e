# SPDX-License-Identifier: Apache-2.0
"""Which weights of a LoRA made for a softmax model apply to the MHLA model converted from it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .models.directory import ModelDirectory
from .models.registry import family_for
from .training.layers import mhla_layers
from .utils.compat.diffusers import takes_lora
from .utils.messages import shorten_list, shorten_text
from .utils.tensor_files import read_entries


KINDS = ("MHLA layer", "other module", "MHLA parameter", "nothing")
"""Kinds of targets."""
_PEFT_PREFIX = "base_model.model."
_TOKENS = "trainable_tokens_delta"
_Shapes = dict[str, list[int]]


@dataclass(frozen=True)
class Target:
    """Target of a weight of a LoRA.

    Attributes:
        kind: Part of the model, one of `KINDS`.
        reason: Why the weight does not apply; empty if it does.
    """

    kind: str
    reason: str = ""


@dataclass(frozen=True)
class LoraReport:
    """Result of checking a LoRA.

    Attributes:
        model: Location of the model, as given.
        component: The model's name in its pipeline.
        lora: The LoRA's file.
        weights: Target of each of its weights, by peft's name, such as `blocks.0.attn1.to_q.lora_A.weight`.
        others: Weights in the file for other models of a pipeline.
        loader: What loads it: the pipeline's `load_lora_weights`, the model's `load_lora_adapter`, or `PeftModel`.
    """

    model: str
    component: str
    lora: str
    weights: dict[str, Target]
    others: tuple[str, ...] = ()
    loader: str = ""

    @property
    def counts(self) -> dict[str, int]:
        """Number of weights of each kind."""
        kinds = [target.kind for target in self.weights.values()]
        return {kind: kinds.count(kind) for kind in KINDS}

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types."""
        return {**asdict(self), "counts": self.counts}


def check_lora(model: str | Path, lora: str | Path, *, component: str | None = None, **hub: Any) -> LoraReport:
    """Find the weights of a LoRA that apply to an MHLA model, by their names and shapes; no weights are loaded.

    Args:
        model: Directory or Hub id of an MHLA pipeline or model.
        lora: Directory or .safetensors file of a LoRA, of peft or in any format that diffusers loads.
        component: The pipeline's transformer to check, if it has several.
        **hub: `revision`, `token` and `cache_dir` of a model on the Hub.

    Raises:
        ValueError: If the model is not MHLA, the LoRA cannot be read, or none of its weights applies.
    """
    directory = ModelDirectory.open(model, **hub)
    part = directory.select_mhla(component)[0]
    path = _weight_file(Path(lora).expanduser())
    shapes, others, left, loader = _read_lora(path, part)
    targets = _find_targets(part.build(), shapes)
    targets |= {name: Target("nothing", "diffusers leaves it out") for name in left}
    lost = {name: target.reason for name, target in targets.items() if target.reason}
    if len(lost) == len(targets):
        raise ValueError(
            f"None of the {len(targets)} weights of LoRA {path} applies to {model}, for example {min(lost)}: "
            f"{lost[min(lost)]}."
        )
    return LoraReport(str(model), part.component, str(path), targets, others, loader)


def _weight_file(location: Path) -> Path:
    files = [location] if location.suffix == ".safetensors" else sorted(location.glob("*.safetensors"))
    if not location.exists():
        raise ValueError(f"LoRA {location} does not exist: give a directory or a .safetensors file.")
    if len(files) != 1:
        found = shorten_list(path.name for path in files) if files else "no .safetensors file"
        raise ValueError(f"LoRA {location} has {found}: name the file to check.")
    return files[0]


def _read_lora(path: Path, part: ModelDirectory) -> tuple[dict[str, list[int]], tuple[str, ...], list[str], str]:
    """Shapes of the weights for a model by peft's names, names for other models, names left out, and what loads it."""
    shapes = {entry.name: list(entry.shape) for entry in read_entries(path)}
    if not any("lora" in name or _TOKENS in name for name in shapes):
        raise ValueError(f"LoRA {path} holds no LoRA weights, but {shorten_list(shapes)}.")
    if part.is_transformers:
        return {name.removeprefix(_PEFT_PREFIX): shape for name, shape in shapes.items()}, (), [], "PeftModel"
    import diffusers

    names, own = family_for(part.class_name).pipelines, f"{part.component}."
    # SANA's names are those of diffusers and peft alone.
    classes = [cls for name in (*names, "SanaPipeline") if hasattr(cls := getattr(diffusers, name), "lora_state_dict")]
    weights, left = _converted_by_diffusers(path, shapes, classes[0])
    parts = {name.partition(".")[0] for name in weights}
    parts = {name for name in parts if re.fullmatch(r"(transformer|text_encoder|unet)(_\d+)?", name)}
    # The loader of pipelines reads one prefix, whichever transformer it loads into; models read any, unconverted.
    is_read = "transformer" in parts and (own == "transformer." or own[:-1] not in parts)
    if is_read and classes[0].__name__ in names and takes_lora(classes[0], weights):
        prefix = "transformer."
        loader = "load_lora_weights" + ("" if prefix == own else f"(..., load_into_{part.component}=True)")
    else:
        starts = (own, "transformer.", _PEFT_PREFIX)
        prefix = next((each for each in starts if any(name.startswith(each) for name in shapes)), "")
        loader = f"{own}load_lora_adapter(..., prefix={prefix[:-1] or None!r})"
        if prefix == _PEFT_PREFIX and path.with_name("adapter_config.json").is_file():
            # diffusers would not read alpha there.
            loader = "PeftModel"
        weights, left = _peft_names(shapes), []
    others = tuple(sorted(name for name in weights if parts and not name.startswith(prefix)))
    if len(others) == len(weights) or (not prefix and parts):
        raise ValueError(f"LoRA {path} has nothing for {part.component}, only weights of {shorten_list(parts)}.")
    found = {name.removeprefix(prefix): shape for name, shape in weights.items() if name not in others}
    return found, others, left, loader


def _converted_by_diffusers(path: Path, shapes: Mapping[str, list[int]], loader: Any) -> tuple[_Shapes, list[str]]:
    """Shapes by the names that a pipeline's loader makes of a file's, and the names that it leaves out."""
    # Gradients tell which weights the results are made of.
    sources = {name: torch.ones((), requires_grad=True) for name in shapes}
    try:
        weights = {name: source * torch.ones(shapes[name]) for name, source in sources.items()}
        result = loader.lora_state_dict(weights, return_alphas=True)
    except (KeyError, IndexError, AttributeError, TypeError, ValueError) as error:
        reason = shorten_text(f"{type(error).__name__}: {error}", 200)
        raise ValueError(f"LoRA {path} has names that diffusers cannot convert ({reason}).") from error
    found, alphas = result if isinstance(result, tuple) else (result, None)
    made = [torch.as_tensor(value).sum() for value in (*found.values(), *(alphas or {}).values())]
    total = sum(made, torch.ones((), requires_grad=True))
    gradients = torch.autograd.grad(total, list(sources.values()), allow_unused=True)
    used = {name for name, gradient in zip(sources, gradients) if gradient is not None}
    # Scales are read as numbers.
    scaled = {f"{name.rsplit('.', parts)[0]}.alpha" for name in used for parts in (1, 2)}
    return _peft_names({name: list(value.shape) for name, value in found.items()}), sorted({*shapes} - used - scaled)


def _peft_names(shapes: Mapping[str, list[int]]) -> dict[str, list[int]]:
    from diffusers.utils import convert_unet_state_dict_to_peft

    is_named = any(".lora_A." in name for name in shapes)
    return dict(shapes if is_named else convert_unet_state_dict_to_peft(dict(shapes)))


def _find_targets(model: nn.Module, shapes: Mapping[str, list[int]]) -> dict[str, Target]:
    modules = dict(model.named_modules())
    parameters = {name: list(parameter.shape) for name, parameter in model.named_parameters()}
    attentions = tuple(f"{layer.name}." for layer in mhla_layers(model))
    pairs: dict[str, dict[str, list[int]]] = {}
    for name, shape in shapes.items():
        module, is_lora, rest = name.partition(".lora_")
        if is_lora:
            pairs.setdefault(module, {})[f"lora_{rest}"] = shape
    # Half of a pair changes nothing.
    reasons = {module: _obstacle(modules.get(module), parts) for module, parts in pairs.items()}
    found = {}
    for name, shape in shapes.items():
        module = name.partition(".lora_")[0].removesuffix(".alpha")
        reason = reasons.get(module)
        if reason is None:
            # A parameter that an adapter saves in full, as of `modules_to_save`, or of an embedding; rows of that.
            module = re.sub(r"\.(token_adapter|base_layer)(?=\.)", "", module.replace(_TOKENS, "weight"))
            wanted = parameters.get(module, [0])
            fits = shape == wanted or (_TOKENS in name and shape[1:] == wanted[1:] and shape[0] <= wanted[0])
            reason = "" if fits else f"no such parameter of size {_sizes(shape)}"
        part = 1 if not module.startswith(attentions) else 2 if ".mhla." in module else 0
        found[name] = Target(KINDS[3 if reason else part], reason)
    return found


def _obstacle(module: nn.Module | None, parts: Mapping[str, list[int]]) -> str:
    """Why the two matrices of a LoRA do not fit a module, or an empty string."""
    if module is None:
        return "no such module"
    weight = getattr(module, "weight", None)
    if not isinstance(weight, torch.Tensor) or weight.dim() < 2:
        return f"a {type(module).__name__} has no matrix to add to"
    is_embedding = isinstance(module, nn.Embedding)
    pair = ("lora_embedding_A", "lora_embedding_B") if is_embedding else ("lora_A.weight", "lora_B.weight")
    if not set(pair) <= parts.keys():
        return f"only {', '.join(sorted(parts))} of the pair {' and '.join(pair)}"
    down, up = (parts[name] for name in pair)
    # The Conv1D of GPT-2 stores [in, out], and an embedding [tokens, out].
    outputs, *inputs = reversed(weight.shape) if is_embedding or type(module).__name__ == "Conv1D" else weight.shape
    fits = down[1:] == inputs and up[:2] == [outputs, down[0]] and down[0] > 0
    return "" if fits else f"matrices {_sizes(up)} and {_sizes(down)} for a weight {_sizes(weight.shape)}"


def _sizes(shape: Iterable[int]) -> str:
    return "×".join(map(str, shape))
