# SPDX-License-Identifier: Apache-2.0
"""The parts of a model card about the model itself: its layers and options, and its limits."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from ..config import MHLAConfig
from ..layouts.windows import default_window_size
from ..ops.feature_maps import FEATURE_MAPS
from ..ops.normalizers import NORMALIZERS
from ..training.loading import PipelineSource
from ..utils.messages import pluralize
from .markdown import code, count, plain, ranges, sizes, table
from .records import ModelPart, Records, Tower, entry


_AXES = {1: "tokens", 2: "rows × columns", 3: "frames × rows × columns"}
_WINDOWS = {
    "block": "within its block",
    "adjacent": "within its block and the adjacent ones",
    "cross": "in the blocks around it in its frames, and at its place in all frames",
}


def layers_sentence(part: ModelPart) -> str | None:
    """Which layers are MHLA, such as `layers 1, 2 and 4 of 5`; `None` where that is not known."""
    if len(part.towers) > 1:
        return None
    tower = part.towers[0]
    if tower.layers is None or tower.num_layers is None:
        return None
    if len(tower.layers) == tower.num_layers:
        return "all of its layers" if tower.num_layers > 1 else "its only layer"
    return f"{len(tower.layers)} of its {tower.num_layers} layers"


def describe_part(part: ModelPart) -> dict[str, Any]:
    """Facts about one MHLA model, for the template: its folder, parameters, and a table of options for each tower."""
    parameters = None
    if part.parameters is not None:
        added = "" if not part.new_parameters else f", {part.new_parameters:,} of them added by MHLA"
        parameters = f"{part.parameters:,} parameters{added}"
    return {
        "folder": code(part.component.name),
        "class_name": code(part.component.class_name),
        "parameters": parameters,
        "towers": [
            {"name": code(tower.name) if tower.name else "", "table": _options_table(part, tower)}
            for tower in part.towers
        ],
    }


def _options_table(part: ModelPart, tower: Tower) -> str:
    return table([{"option": name, "value": value} for name, value in _options(part, tower) if value])


def _options(part: ModelPart, tower: Tower) -> Iterator[tuple[str, str | None]]:
    options = tower.options
    yield "MHLA layers", _layers(part, tower)
    yield "blocks", _blocks(options)
    yield "attention", "causal" if options.causal else None
    yield "feature map φ", f"{code(options.feature_map)}: {plain(FEATURE_MAPS[options.feature_map].formula)}"
    if tower.has_rotary:
        yield "rotary embedding", "before φ" if options.rope == "before_feature_map" else "after φ"
    yield "normaliser", f"{code(options.normalizer)}: {plain(NORMALIZERS[options.normalizer].formula)}"
    heads = "one matrix for each head" if options.mixing_heads == "per_head" else "one matrix for all heads of a layer"
    constraint = ", kept positive" if options.mixing_constraint == "nonnegative" else ""
    yield "mixing weights", f"{heads}{constraint}, initialised as {code(options.mixing_init)}"
    yield "softmax window", _window(options)
    yield "output gate", "SiLU of a linear map of the hidden states" if options.output_gate else None
    yield "output norm", "RMSNorm over each head" if options.output_norm else None
    if options.lepe_kernel is not None:
        yield "depthwise convolution of the values (LePE)", f"kernel {options.lepe_kernel}"


def _layers(part: ModelPart, tower: Tower) -> str | None:
    if tower.layers is None:
        return None
    others = f"the others keep {part.original_attention} attention"
    if tower.num_layers is None:
        return f"{ranges(tower.layers)}; {others}"
    if len(tower.layers) == tower.num_layers:
        return f"all {tower.num_layers}"
    return f"{ranges(tower.layers)} of {tower.num_layers} (counted from 0); {others}"


def _blocks(options: MHLAConfig) -> str | None:
    blocks, size, grid = options.blocks, options.block_size, options.grid
    if blocks is None and size is None:
        return None
    if options.is_sequence:
        assert size is not None
        length = f"; mixing weights for {pluralize(grid[0], 'token')}" if grid is not None else ""
        return f"{pluralize(size[0], 'token')} each{length}, continued by distance for longer sequences"
    if blocks is None and size is not None and grid is not None:
        blocks = tuple(-(-length // step) for length, step in zip(grid, size))
    if blocks is None:
        return f"{sizes(size)} tokens each"
    text = f"{sizes(blocks)} ({_AXES.get(len(blocks), 'axes')})"
    if len(blocks) > 1:
        text += f", {math.prod(blocks):,} in all"
    return text if grid is None else f"{text}, on a grid of {sizes(grid)} tokens"


def _window(options: MHLAConfig) -> str | None:
    if options.window is None:
        return None
    axes = 1 if options.is_sequence else len(options.blocks or options.block_size or options.grid or ())
    size = options.window_size
    if size is None and axes and not options.is_sequence:
        size = default_window_size(options.window, axes)
    extent = "" if size is None else f", blocks of {sizes(size)} tokens"
    gains = "head" if options.window_gains == "per_head" else "channel"
    return f"exact softmax of each token {_WINDOWS[options.window]}{extent}; a pair of gains for each {gains}"


def limits(records: Records, is_measured: bool, is_timed: bool) -> list[str]:
    """Limits of the model, one sentence each.

    Args:
        records: What is known about the model.
        is_measured: Whether the card has figures of quality.
        is_timed: Whether it has figures of this model's speed.
    """
    sentences = []
    for part in records.parts:
        own = f"{code(part.component.name)}: " if len(records.parts) > 1 else ""
        sentences += [own + text for tower in part.towers if (text := _size_limit(records, part, tower))]
    if not is_measured:
        sentences.append("The quality of this model has not been measured.")
    if not is_timed:
        sentences.append("The speed and the memory of this model itself have not been measured.")
    if is_measured:
        sentences.append(
            "Quality was measured by the figures above alone: neither by benchmarks of the task nor by people."
        )
    sentences.append(
        "The Triton kernels need an NVIDIA GPU of compute capability 8.0 or newer; elsewhere plain PyTorch computes "
        "the same, up to rounding."
    )
    sentences.append("Limits, biases and terms of use of the base model apply here too.")
    return list(dict.fromkeys(sentences))


def _size_limit(records: Records, part: ModelPart, tower: Tower) -> str | None:
    options = tower.options
    if options.grid is None:
        return None
    if options.is_sequence:
        length = pluralize(options.grid[0], "token")
        return (
            f"The mixing weights are for {length}. Longer texts run too, with weights that go by distance; quality "
            "there has not been measured."
        )
    pixels = sample_size(records, part, tower)
    made = "" if pixels is None else f" ({pixels})"
    return (
        f"The blocks were chosen for a grid of {sizes(options.grid)} tokens{made}; quality at other sizes has not "
        "been measured."
    )


def sample_size(records: Records, part: ModelPart, tower: Tower) -> str | None:
    """Size of the images or videos that the token grid stands for; `None` where that is not known."""
    size = call_size(records, part, tower)
    if size is None:
        return None
    frame = f"{size['height']}×{size['width']} pixels"
    return frame if "num_frames" not in size else f"{size['num_frames']} frames of {frame}"


def call_size(records: Records, part: ModelPart, tower: Tower) -> dict[str, int] | None:
    """The same as arguments of the pipeline."""
    grid = tower.options.grid
    if grid is None or records.source.pipeline is None or part.component.is_transformers or len(grid) < 2:
        return None
    try:
        found = PipelineSource(records.source.root, part.component.name).sizes
    # Families without training have no sizes here, and other pipelines none that can be read.
    except (ValueError, KeyError, TypeError):
        return None
    height, width = (
        length * patch * found.spatial_factor for length, patch in zip(grid[-2:], found.patch_size, strict=True)
    )
    size = {"height": height, "width": width}
    if len(grid) == 3:
        patch = entry(part.component.config, "patch_size", kind=list)
        frames = grid[0] * (patch[0] if patch and count(patch[0]) else 1)
        size["num_frames"] = (frames - 1) * found.temporal_factor + 1
    return size
