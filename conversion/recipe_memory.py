# SPDX-License-Identifier: Apache-2.0
"""Memory and steps of a recovery, for the `expected` section of recipes.

They are computed from the sizes of the converted model, which may be on the meta device.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import nn

from mhla_hf.recovery.recipes import VIDEO, Expected, Recipe
from mhla_hf.training.data.texts import PASSAGE_LENGTH, ROW_LENGTH
from mhla_hf.training.matching.layers import AttentionLayer, mhla_layers


# Numbers of fp32 for each parameter that trains: its gradient and AdamW's two moments.
_TRAINING_BYTES = 12
_FP32_BYTES = 4
# Activations are kept in bfloat16: a layer's input and its output.
_KEPT_BYTES = 2 * 2
_GIGABYTE = 10**9
# Of the VAE of Wan.
_PIXELS_PER_LATENT, _FRAMES_PER_LATENT = 8, 4


def expected(recipe: Recipe, model: nn.Module) -> Expected:
    """Computes the memory and steps of a recipe with a model.

    - Weights: four bytes for each parameter.
    - Training: 12 more for each parameter that trains (gradient, two moments of AdamW), which is a layer at a time in
      matching, and everything in distillation and fine-tuning; distillation also keeps the original of what changes.
    - Cache: input and output of every converted layer for all tokens of `match.batches`, in bfloat16.

    Not in it: the activations of a forward and backward pass, text encoders and VAEs, which run before training, and
    what libraries themselves take.

    Args:
        recipe: The recipe.
        model: The converted model.
    """
    layers = mhla_layers(model)
    count = sum(parameter.numel() for parameter in model.parameters())
    training = [0]
    cache = steps = 0
    if recipe.match is not None:
        training.append(max(_layer_parameters(layer) for layer in layers) * _TRAINING_BYTES)
        samples = min(recipe.match.batches * recipe.match.batch_size, recipe.data.samples)
        if recipe.match.cache != "none":
            widths = sum(_width(layer) for layer in layers)
            cache = samples * tokens_of(recipe, model) * widths * _KEPT_BYTES
        steps += recipe.match.steps
    if recipe.distill is not None:
        training.append(count * (_TRAINING_BYTES + _FP32_BYTES))
        steps += recipe.distill.steps
    if recipe.finetune is not None:
        training.append(count * _TRAINING_BYTES)
        steps += recipe.finetune.steps
    return Expected(
        weights_gb=_rounded(count * _FP32_BYTES),
        training_gb=_rounded(max(training)),
        cache_gb=_rounded(cache),
        steps=steps,
    )


def tokens_of(recipe: Recipe, model: nn.Module) -> int:
    """Tokens of one sample in the sizes that a recipe asks for, as a layer sees them; of passages, at most."""
    config: Any = model.config
    if recipe.family in ("causal", "encoder"):
        return recipe.data.max_length or (ROW_LENGTH if recipe.family == "causal" else PASSAGE_LENGTH)
    if recipe.family == "vision":
        return (_side(config.image_size) // _side(config.patch_size)) ** 2 + 1
    reference: tuple[int, ...] = type(model).reference_grid(config)  # type: ignore[attr-defined]
    if recipe.family in VIDEO:
        frames, height, width = reference
        patch = config["patch_size"]
        sides = patch[1:] if isinstance(patch, (list, tuple)) else (patch, patch)
        data = recipe.data
        if data.num_frames is not None:
            frames = (data.num_frames - 1) // _FRAMES_PER_LATENT + 1
        height = height if data.height is None else data.height // (_PIXELS_PER_LATENT * sides[0])
        width = width if data.width is None else data.width // (_PIXELS_PER_LATENT * sides[1])
        return frames * height * width
    return math.prod(reference)


def _layer_parameters(layer: AttentionLayer) -> int:
    return sum(parameter.numel() for parameter in layer.parameters().values())


def _width(layer: AttentionLayer) -> int:
    """Width of the hidden states that a layer takes: columns of the first of its matrices."""
    matrices: Mapping[str, nn.Parameter] = dict(layer.attention.named_parameters())
    return next(
        parameter.shape[1]
        for name, parameter in matrices.items()
        if parameter.ndim == 2 and not name.startswith("mhla.")
    )


def _side(size: Any) -> int:
    return int(size[0] if isinstance(size, (list, tuple)) else size)


def _rounded(count: int) -> float:
    """Gigabytes with two significant digits, or two decimals."""
    gigabytes = count / _GIGABYTE
    return float(f"{gigabytes:.2g}") if gigabytes >= 0.1 else round(gigabytes, 3)
