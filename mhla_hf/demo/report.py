# SPDX-License-Identifier: Apache-2.0
"""Results of the demo: pictures, the report, and the card of the MHLA pipeline."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from safetensors import safe_open

from ..analysis import mixing_figure, mixing_summary, reference_layout
from ..hub import CardText, write_card
from ..models.source import read_source
from ..recovery.report import TITLES as STATES
from ..training.matching.layers import mhla_layers
from ..utils.figures import save_figure
from ..utils.files import atomic_file, write_json
from ..utils.machine import machine_facts
from . import DemoConfig


TITLES = {"softmax": "softmax", "mhla": "MHLA", "mhla_window": "MHLA + window", "linear": "linear"}
STAGE_TITLES = {stage: STATES[stage] for stage in ("converted", "calibrate", "match", "distill")}

_TEMPLATE = Path(__file__).parent / "templates" / "report.md.jinja"
_FRAMES_PER_SECOND, _SCALE = 8, 4

_SUMMARY = """A very small text-to-video pipeline, whose videos of 17 frames of 64×64 pixels show moving handwritten
digits. It demonstrates the conversion from softmax attention and has no other use."""
_NOTE = """Captions are "a *digit* moves *direction*", up to four of them joined by "and"; digits are `zero` to `nine`,
directions `left`, `right`, `up`, `down`."""
_TRAINING = """All data are videos made from the scans in scikit-learn's `load_digits`; the softmax pipeline was
trained on them as well."""


def write_outputs(
    config: DemoConfig,
    videos: Mapping[str, np.ndarray],
    results: Mapping[str, dict[str, Any]],
    generation_seconds: Mapping[str, float],
    seconds: float,
) -> dict[str, Any]:
    """Write pictures, report and model card into the output directory.

    Args:
        config: Options of the demo.
        videos: `[prompts, F, H, W, 3]` uint8 by model.
        results: Reports of the recoveries by variant.
        generation_seconds: Seconds to generate the videos, by model.
        seconds: Seconds of this run of the demo.

    Returns:
        The report, as in `report.json`.
    """
    output = config.directory
    variants = {
        name: {
            "held_out": {stage: result["figures"][stage] for stage in STAGE_TITLES},
            "cpu_seconds": {stage: taken["cpu_seconds"] for stage, taken in result["seconds"].items()},
            "parameters": _count_parameters(output / name),
            "generation_seconds": generation_seconds[name],
        }
        for name, result in results.items()
    }
    report = {
        "seconds": seconds,
        "options": config.to_dict(),
        "recipe": results["mhla"]["recipe"],
        "softmax": {
            "held_out_loss": results["mhla"]["figures"]["softmax"]["loss"],
            "parameters": _count_parameters(config.base_directory),
            "generation_seconds": generation_seconds["softmax"],
        },
        "variants": variants,
        "machine": machine_facts(torch.device("cpu")),
    }
    _plot_mixing(output / "mixing.png", output / "mhla")
    frames = side_by_side(videos, config.prompts)
    for path in (output / "side_by_side.gif", output / "mhla" / "sample.gif"):
        _write_gif(path, frames)
    card = CardText(
        name="Moving digits, Wan with MHLA",
        summary=_SUMMARY,
        note=_NOTE,
        training=_TRAINING,
        dataset="Moving digits of scikit-learn's load_digits, held-out scans",
        prompt=config.prompts[0],
        arguments={"num_inference_steps": config.inference_steps, "guidance_scale": config.guidance},
        sample_caption="Softmax, MHLA, MHLA with a window, and linear attention side by side",
        license="apache-2.0",
    )
    comparisons = {f"{TITLES[name]}, recovered alike": result for name, result in results.items() if name != "mhla"}
    write_card(output / "mhla", comparisons=comparisons, text=card, overwrite=True)
    template = jinja2.Template(_TEMPLATE.read_text(encoding="utf-8"), keep_trailing_newline=True)
    with atomic_file(output / "report.md") as temporary:
        text = template.render(report, stages=STAGE_TITLES, titles=TITLES, layers=config.layers)
        temporary.write_text(text, encoding="utf-8")
    write_json(output / "report.json", report)
    return report


def side_by_side(videos: Mapping[str, np.ndarray], prompts: Sequence[str]) -> list[Image.Image]:
    """Frames with all videos and labels: a row for each caption, a column for each model.

    Args:
        videos: `[prompts, F, H, W, 3]` uint8 by model.
        prompts: The captions.
    """
    count, length, height, width, _ = next(iter(videos.values())).shape
    cell, gap, bar = (width * _SCALE, height * _SCALE), 16, 32
    font = ImageFont.load_default(size=18)
    size = (len(videos) * (cell[0] + gap) + gap, count * (cell[1] + bar) + bar + gap)
    frames = []
    for frame in range(length):
        canvas = Image.new("RGB", size, (38, 38, 42))
        draw = ImageDraw.Draw(canvas)
        for column, (name, video) in enumerate(videos.items()):
            left = gap + column * (cell[0] + gap)
            draw.text((left + cell[0] / 2, bar / 2), TITLES[name], "white", font, anchor="mm")
            for row in range(count):
                image = Image.fromarray(video[row, frame]).resize(cell, Image.Resampling.BICUBIC)
                canvas.paste(image, (left, bar + row * (cell[1] + bar)))
        for row, prompt in enumerate(prompts):
            middle = bar + row * (cell[1] + bar) + cell[1] + bar / 2
            draw.text((size[0] / 2, middle), prompt, (200, 200, 205), font, anchor="mm")
        frames.append(canvas)
    return frames


def _write_gif(path: Path, frames: Sequence[Image.Image]) -> None:
    from diffusers.utils import export_to_gif

    # One palette for all frames: with separate ones the background flickers.
    palette = frames[len(frames) // 2].quantize(128)
    images = [frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in frames]
    with atomic_file(path) as temporary:
        export_to_gif(images, str(temporary), fps=_FRAMES_PER_SECOND)


def _plot_mixing(path: Path, pipeline: Path) -> None:
    layers = mhla_layers(read_source(pipeline).component().load())
    matrices: Any = {layer.name.split(".")[1]: mixing_summary(layer.mhla).matrix for layer in layers}
    save_figure(mixing_figure(matrices, reference_layout(layers[0].mhla)), path)


def _count_parameters(pipeline: Path) -> int:
    """Number of parameters of a pipeline's transformer, from the header of its weight file."""
    with safe_open(pipeline / "transformer" / "diffusion_pytorch_model.safetensors", "pt") as file:
        return sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())
