# SPDX-License-Identifier: Apache-2.0
"""Models that are measured whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ..presets import PRESETS


@dataclass(frozen=True, kw_only=True)
class ModelCase:
    """One diffusion transformer at one size of its input.

    Args:
        name: Name for `--models`.
        model_class: The diffusers class.
        attention: Kind of its own self-attention, `"softmax"` or `"linear"`.
        sizes: Arguments of its constructor.
        mhla: MHLA options of its MHLA version.
        batch: Inputs side by side.
        latents: `[C, ...]` of one input.
        tokens: Tokens of its self-attention.
        context: Tokens and width of the text; None without one.
        classes: Number of class labels; None without one.
        quick: Whether `--quick` measures it.
    """

    name: str
    model_class: str
    attention: str
    sizes: Mapping[str, Any]
    mhla: Mapping[str, Any] = field(default_factory=dict)
    batch: int = 1
    latents: tuple[int, ...]
    tokens: int
    context: tuple[int, int] | None = None
    classes: int | None = None
    quick: bool = False

    def inputs(self, dtype: torch.dtype, device: torch.device, seed: int) -> dict[str, torch.Tensor]:
        """Random arguments of the model's `forward`."""
        generator = torch.Generator(device).manual_seed(seed)
        random: dict[str, Any] = {"generator": generator, "device": device, "dtype": dtype}
        inputs = {
            "hidden_states": torch.randn(self.batch, *self.latents, **random),
            "timestep": torch.full((self.batch,), 500.0, device=device),
        }
        if self.context is not None:
            inputs["encoder_hidden_states"] = torch.randn(self.batch, *self.context, **random)
        if self.classes is not None:
            inputs["class_labels"] = torch.randint(self.classes, (self.batch,), generator=generator, device=device)
        return inputs


_WAN = ModelCase(
    name="wan",
    model_class="WanTransformer3DModel",
    attention="softmax",
    sizes=PRESETS["wan2.1-1.3b"].sizes,
    mhla={"blocks": (3, 5, 10)},
    latents=(16, 21, 60, 100),
    tokens=31500,
    context=(512, 4096),
    quick=True,
)
_DIT = ModelCase(
    name="dit-256",
    model_class="DiTTransformer2DModel",
    attention="softmax",
    sizes=PRESETS["dit-xl-2-256"].sizes,
    batch=16,
    latents=(4, 32, 32),
    tokens=256,
    classes=1000,
)
# Efficient-Large-Model/Sana_1600M_1024px_diffusers, transformer/config.json.
_SANA = ModelCase(
    name="sana-1024",
    model_class="SanaTransformer2DModel",
    attention="linear",
    sizes={"num_layers": 20, "sample_size": 32},
    batch=4,
    latents=(32, 32, 32),
    tokens=1024,
    context=(300, 2304),
)
_SANA_SMALL = {
    "num_attention_heads": 4,
    "attention_head_dim": 32,
    "num_layers": 2,
    "num_cross_attention_heads": 4,
    "cross_attention_head_dim": 32,
    "cross_attention_dim": 128,
    "caption_channels": 64,
    "sample_size": 32,
}

MODEL_CASES: dict[str, ModelCase] = {
    case.name: case
    for case in (
        _WAN,
        _DIT,
        replace(_DIT, name="dit-512", sizes={**_DIT.sizes, "sample_size": 64}, latents=(4, 64, 64), tokens=1024),
        _SANA,
        replace(_SANA, name="sana-2048", sizes={**_SANA.sizes, "sample_size": 64}, latents=(32, 64, 64), tokens=4096),
        replace(
            _WAN,
            name="wan-small",
            sizes={
                "num_attention_heads": 2,
                "attention_head_dim": 48,
                "ffn_dim": 256,
                "num_layers": 2,
                "text_dim": 64,
            },
            mhla={"blocks": (2, 3, 4)},
            latents=(16, 5, 32, 40),
            tokens=1600,
            context=(64, 64),
        ),
        replace(
            _DIT,
            name="dit-512-small",
            sizes={**_DIT.sizes, "num_attention_heads": 2, "num_layers": 2, "sample_size": 64},
            batch=1,
            latents=(4, 64, 64),
            tokens=1024,
            quick=True,
        ),
        replace(_SANA, name="sana-1024-small", sizes=_SANA_SMALL, batch=1, context=(64, 64), quick=True),
    )
}
"""All models by name."""
