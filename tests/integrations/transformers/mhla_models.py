# SPDX-License-Identifier: Apache-2.0
"""Tiny MHLA models: a tiny softmax model of a family, converted, its MHLA parameters off their initial values."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import pytest
import torch
from packaging.version import Version
from transformers.integrations.peft import MIN_PEFT_VERSION
from transformers.models.dinov2 import modeling_dinov2

from mhla_hf.integrations.transformers.attaching import convert_transformers_model
from mhla_hf.layers.mhla import MHLA

from .tiny_models import FAMILIES, inputs, names, softmax_model


# MHLA by itself: windows, which language models have by default, are those of `window_model`.
TEXT_OPTIONS: dict[str, Any] = {"block_size": 4, "mixing_heads": "per_head", "grid": [24], "window": None}
IMAGE_OPTIONS: dict[str, Any] = {"blocks": [2, 2], "mixing_heads": "per_head"}


# Older versions of transformers drop keyword arguments on the way to DINOv2's attention.
UNSERVED = ("dinov2", "dinov2_with_registers") if hasattr(modeling_dinov2, "Dinov2SelfAttention") else ()

NEEDS_ADD_ADAPTER = pytest.mark.skipif(
    Version(version("peft")) < Version(MIN_PEFT_VERSION), reason="transformers' add_adapter wants a newer peft"
)


def served_names(*kinds: str) -> list[str]:
    """Names of the families that this version of transformers lets MHLA serve."""
    return [name for name in names(*kinds) if name not in UNSERVED]


def default_options(name: str) -> dict[str, Any]:
    """Blocks small enough for tiny inputs; six rows of mixing weights for texts, fewer than long texts have blocks."""
    return dict(IMAGE_OPTIONS if FAMILIES[name].kind == "vision" else TEXT_OPTIONS)


@torch.no_grad()
def unsettle(model: torch.nn.Module, seed: int = 0) -> None:
    """Moves every MHLA parameter off its initial value, as training would."""
    generator = torch.Generator().manual_seed(seed)
    for module in mhla_modules(model):
        for parameter in module.parameters():
            parameter.add_(torch.rand(parameter.shape, generator=generator) * 0.2)


def mhla_modules(model: torch.nn.Module) -> list[MHLA]:
    return [module for module in model.modules() if isinstance(module, MHLA)]


def mhla_model(name: str, *, sizes: dict[str, Any] | None = None, **options: Any) -> Any:
    """A converted model in evaluation mode; `options` are laid over [`default_options`]."""
    model = softmax_model(name, **(sizes or {}))
    convert_transformers_model(model, {**default_options(name), **options})
    unsettle(model)
    return model


def first_output(model: torch.nn.Module, **kwargs: Any) -> torch.Tensor:
    """Logits or last hidden state."""
    return model(**kwargs)[0]


WINDOWS = [
    {"window": "adjacent", "window_size": 3, "sink_tokens": 0},
    {"window": "block", "window_size": 5, "sink_tokens": 0},
    {"window": "adjacent", "window_size": 3, "sink_tokens": 2},
]


def window_model(name: str = "llama", window: int = 0, **options):
    """A model with another bias for each head of its windows."""
    model = mhla_model(name, **{**WINDOWS[window], **options})
    for module in mhla_modules(model):
        with torch.no_grad():
            module.window_bias.copy_(torch.linspace(-1, 1, len(module.window_bias)))
    return model


__all__ = [
    "FAMILIES",
    "default_options",
    "first_output",
    "inputs",
    "mhla_model",
    "mhla_modules",
    "softmax_model",
    "window_model",
]
