# SPDX-License-Identifier: Apache-2.0
"""Figures of the demo: losses, and videos side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..recovery.report import TITLES as STATES
from ..utils.figures import new_figure, save_figure
from ..utils.files import atomic_file


TITLES = {"softmax": "softmax", "mhla": "MHLA", "mhla_window": "MHLA + window", "linear": "linear"}
COLORS = {"softmax": "#444444", "mhla": "#1f77b4", "mhla_window": "#2ca02c", "linear": "#d95f02"}
STAGE_TITLES = {stage: STATES[stage] for stage in ("converted", "calibrate", "match", "distill")}
FRAMES_PER_SECOND = 8


def plot_recovery(path: Path, variants: Mapping[str, Mapping[str, Any]]) -> None:
    """Plots how far the held-out loss is above softmax against the CPU time spent.

    Args:
        path: PNG file to write.
        variants: Entries of the variants in the demo's report, by name.
    """
    figure = new_figure(8.5, 4.2)
    axis = figure.subplots()
    for variant, entry in variants.items():
        seconds = np.cumsum([entry["cpu_seconds"].get(stage, 0.0) for stage in STAGE_TITLES])
        above = [entry["held_out"][stage]["above_softmax_percent"] for stage in STAGE_TITLES]
        if variant == next(iter(variants)):
            for place, title in zip(zip(seconds, above), STAGE_TITLES.values()):
                axis.annotate(title, place, xytext=(4, 8), textcoords="offset points", fontsize=8)
        axis.plot(seconds, above, color=COLORS[variant], marker="o", label=TITLES[variant])
        axis.annotate(
            f"{above[-1]:+.1f} %",
            (seconds[-1], above[-1]),
            xytext=(6, 0),
            textcoords="offset points",
            color=COLORS[variant],
        )
    axis.set(xlabel="CPU seconds", ylabel="held-out loss above softmax, %", yscale="log")
    axis.margins(x=0.12)
    axis.legend(frameon=False)
    save_figure(figure, path)


def side_by_side(videos: Mapping[str, np.ndarray], prompts: Sequence[str], scale: int = 4) -> np.ndarray:
    """Lays out videos with labels: a row for each caption, a column for each model.

    Args:
        videos: `[prompts, F, H, W, 3]` uint8 by model.
        prompts: The captions.
        scale: Magnification.

    Returns:
        `[F, height, width, 3]` uint8; height and width are multiples of 16, as video codecs prefer.
    """
    from PIL import Image, ImageDraw, ImageFont

    count, length, height, width, _ = next(iter(videos.values())).shape
    cell, gap, bar = (width * scale, height * scale), 16, 32
    font = ImageFont.load_default(size=18)
    total = (len(videos) * (cell[0] + gap) + gap, count * (cell[1] + bar) + bar + gap)
    total = tuple(-(-side // 16) * 16 for side in total)
    frames = []
    for frame in range(length):
        canvas = Image.new("RGB", total, (38, 38, 42))
        draw = ImageDraw.Draw(canvas)
        for column, (name, video) in enumerate(videos.items()):
            left = gap + column * (cell[0] + gap)
            draw.text((left + cell[0] / 2, bar / 2), TITLES.get(name, name), "white", font, anchor="mm")
            for row in range(count):
                image = Image.fromarray(video[row, frame]).resize(cell, Image.Resampling.BICUBIC)
                canvas.paste(image, (left, bar + row * (cell[1] + bar)))
        for row, prompt in enumerate(prompts):
            middle = bar + row * (cell[1] + bar) + cell[1] + bar / 2
            draw.text((total[0] / 2, middle), prompt, (200, 200, 205), font, anchor="mm")
        frames.append(np.asarray(canvas))
    return np.stack(frames)


def write_gif(path: Path, frames: np.ndarray) -> None:
    """Writes frames `[F, H, W, 3]` uint8 as an endless GIF."""
    from diffusers.utils import export_to_gif
    from PIL import Image

    # One palette for all frames: separate ones make the background flicker.
    palette = Image.fromarray(frames[len(frames) // 2]).quantize(128)
    images = [Image.fromarray(frame).quantize(palette=palette, dither=Image.Dither.NONE) for frame in frames]
    with atomic_file(path) as temporary:
        export_to_gif(images, str(temporary), fps=FRAMES_PER_SECOND)


def frame_strip(videos: Mapping[str, np.ndarray], every: int = 2) -> np.ndarray:
    """Lays out every `every`-th frame of all videos: `[models x prompts x H, frames x W, 3]` uint8."""
    rows = []
    for prompt in range(len(next(iter(videos.values())))):
        for video in videos.values():
            rows.append(np.concatenate(list(video[prompt, ::every]), axis=1))
    return np.concatenate(rows, axis=0)
