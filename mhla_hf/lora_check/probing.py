# SPDX-License-Identifier: Apache-2.0
"""Random inputs for any model here, and how far a change of weights moves its output."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..training.matching.layers import run


_TEXT_TOKENS, _WAN_TEXT_TOKENS, _WAN_IMAGE_TOKENS = 32, 512, 257
_LONGEST_TEXT = 256


def probe_grid(reference: Sequence[int], limit: int) -> tuple[int, ...]:
    """A token grid like a model's own, with at most `limit` tokens: its longest axis is halved until it fits."""
    grid = list(reference)
    while math.prod(grid) > limit and max(grid) > 1:
        longest = grid.index(max(grid))
        grid[longest] = (grid[longest] + 1) // 2
    return tuple(grid)


def diffusion_probes(
    family: str, config: Mapping[str, Any], grid: Sequence[int], samples: int, seed: int
) -> list[tuple[float, dict[str, Any]]]:
    """Random latents and conditions at random noise levels, for one of the models of diffusers.

    Returns:
        Noise levels in [0, 1) with keyword arguments of `forward`, batches of one.
    """
    generator = torch.Generator().manual_seed(seed)
    patch = config.get("patch_size") or 1
    patches = tuple(patch) if isinstance(patch, (list, tuple)) else (patch,) * len(grid)
    size = [count * width for count, width in zip(grid, patches)]
    if len(grid) == 3 and not isinstance(patch, (list, tuple)):
        size[0] = grid[0]
    width = config.get("text_dim") or config.get("caption_channels")
    with_image = family == "wan" and config.get("image_dim") is not None
    probes = []
    for _ in range(samples):
        level = float(torch.rand(1, generator=generator))
        inputs: dict[str, Any] = {
            "hidden_states": torch.randn(1, config["in_channels"], *size, generator=generator),
            "timestep": torch.tensor([math.floor(1000 * level)]),
        }
        if width:
            tokens = _WAN_TEXT_TOKENS if with_image else _TEXT_TOKENS
            inputs["encoder_hidden_states"] = torch.randn(1, tokens, width, generator=generator)
        if with_image:
            inputs["encoder_hidden_states_image"] = torch.randn(
                1, _WAN_IMAGE_TOKENS, config["image_dim"], generator=generator
            )
        if config.get("num_embeds_ada_norm") and family == "dit":
            inputs["class_labels"] = torch.randint(config["num_embeds_ada_norm"], (1,), generator=generator)
        if family == "pixart":
            inputs["added_cond_kwargs"] = {
                "resolution": torch.tensor([size]).float(),
                "aspect_ratio": torch.ones(1, 1),
            }
        if config.get("guidance_embeds"):
            inputs["guidance"] = torch.full((1,), 4.5)
        probes.append((level, inputs))
    return probes


def transformers_probes(model: Any, samples: int, seed: int, limit: int) -> list[tuple[float | None, dict[str, Any]]]:
    """Random texts of at most `limit` tokens, or images, for a model of transformers; as in [`diffusion_probes`].

    Raises:
        ValueError: If the model takes neither texts nor images.
    """
    generator, config = torch.Generator().manual_seed(seed), model.config
    if model.main_input_name == "input_ids":
        text = config.get_text_config()
        length = min(limit, _LONGEST_TEXT, (getattr(text, "max_position_embeddings", None) or _LONGEST_TEXT) - 2)
        shape = (1, max(length, 2))
        return [
            (None, {"input_ids": torch.randint(3, text.vocab_size, shape, generator=generator)})
            for _ in range(samples)
        ]
    if model.main_input_name == "pixel_values" and hasattr(config, "image_size"):
        side = config.image_size
        height, width = side if isinstance(side, (list, tuple)) else (side, side)
        channels = getattr(config, "num_channels", 3)
        return [
            (None, {"pixel_values": torch.randn(1, channels, height, width, generator=generator)})
            for _ in range(samples)
        ]
    raise ValueError(f"A {type(model).__name__} takes {model.main_input_name}, for which there are no random inputs.")


@torch.no_grad()
def outputs(model: nn.Module, probes: Sequence[tuple[float | None, Mapping[str, Any]]]) -> list[torch.Tensor]:
    """A model's outputs for inputs, float32 on the CPU."""
    parameter = next(model.parameters())
    found = []
    for _, inputs in probes:
        batch = {name: _moved(value, parameter) for name, value in inputs.items()}
        found.append(run(model, batch)[0].float().cpu())
    return found


def _moved(value: Any, parameter: torch.Tensor) -> Any:
    if isinstance(value, dict):
        return {name: _moved(part, parameter) for name, part in value.items()}
    if not isinstance(value, torch.Tensor):
        return value
    return value.to(parameter.device, parameter.dtype if value.is_floating_point() else None)
