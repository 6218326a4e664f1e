# SPDX-License-Identifier: Apache-2.0
"""Sizes of the presets: parameters, and multiply-adds with softmax, linear attention and MHLA.

python -m benchmarks.presets            # prints all tables
python -m benchmarks.presets --write    # replaces those of docs/presets.md
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from mhla_hf import from_preset
from mhla_hf.presets import PRESETS


WAN_LATENTS = (21, 60, 100)
"""Latent frames, height and width of 81 frames of 480 × 800."""

_TEXT_TOKENS = {"SanaTransformer2DModel": 300, "WanTransformer3DModel": 512}


def make_model(name: str, mhla: Any = None, **overrides: Any) -> nn.Module:
    """The model of a preset with fresh weights on the current device; arguments as for `from_preset`."""
    import transformers

    made = from_preset(name, mhla=mhla, **overrides)
    if isinstance(made, nn.Module):
        return made
    head = {"LlamaConfig": "LlamaForCausalLM", "DeiTConfig": "DeiTForImageClassification"}[PRESETS[name].model]
    return getattr(transformers, head)._from_config(made)


def example_inputs(
    model: Any, *, tokens: int | None = None, latents: tuple[int, int, int] = WAN_LATENTS
) -> dict[str, torch.Tensor]:
    """Random arguments of `forward` for one text, image or video, on the model's device.

    Args:
        model: The model of a preset.
        tokens: Length of a text; the longest by default.
        latents: Latent frames, height and width of a video.
    """
    config, place = model.config, {"device": model.device, "dtype": model.dtype}
    kind = type(model).__name__.removeprefix("MHLA")
    if kind == "LlamaForCausalLM":
        shape = (1, tokens or config.max_position_embeddings)
        return {"input_ids": torch.randint(config.vocab_size, shape, device=model.device)}
    if kind == "DeiTForImageClassification":
        return {"pixel_values": torch.randn(1, config.num_channels, config.image_size, config.image_size, **place)}
    side = config.get("sample_size")
    size = latents if side is None else (side, side)
    inputs = {
        "hidden_states": torch.randn(1, config.in_channels, *size, **place),
        "timestep": torch.full((1,), 500, device=model.device),
    }
    if kind in _TEXT_TOKENS:
        width = config.get("text_dim") or config.caption_channels
        inputs["encoder_hidden_states"] = torch.randn(1, _TEXT_TOKENS[kind], width, **place)
    else:
        inputs["class_labels"] = torch.randint(config.num_embeds_ada_norm, (1,), device=model.device)
    return inputs
