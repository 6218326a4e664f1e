# SPDX-License-Identifier: Apache-2.0
"""Results of the demo: images, videos, the report, and the pipeline with its model card."""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from ..training.data.videos import write_video
from ..training.loading import PipelineSource
from ..utils.files import atomic_directory, atomic_file, write_json
from ..utils.json_files import read_json
from ..utils.machine import machine_facts
from ..utils.tensor_files import read_header
from .config import DemoConfig
from .figures import (
    FRAMES_PER_SECOND,
    STAGE_TITLES,
    TITLES,
    frame_strip,
    plot_mixing,
    plot_recovery,
    side_by_side,
    write_gif,
)
from .model_card import converted_layers, markdown_table, model_card


_TEXT = """# MHLA on moving digits

A small Wan pipeline with softmax attention ({softmax[parameters]:,} parameters) was converted three times: to MHLA, to
MHLA with a softmax window beside it, and to vanilla linear attention, which is MHLA with a single block. Everything
else is the same in all copies ({layers}),
and so is their recovery: calibration in closed form, {match[steps]} steps of matching each layer's output alone, and
{distill[steps]} steps of distilling the model's prediction, on the same videos, noise and noise levels.

## Held-out loss

Flow matching on scans of digits that no training used; {held_out_samples} draws, the same for all models.
Softmax: {softmax[held_out_loss]:.4f}. The others, and how far they are above it:

{losses}

## Cost

{costs}

At 320 tokens linear attention saves no time; it does at the tens of thousands of tokens of a real video.

## Files

- `mhla/`: the MHLA pipeline, ready for the Hub
- `side_by_side.mp4`, `side_by_side.gif`, `frames.png`: all models from the same noise
- `recovery.png`, `mixing.png`, `report.json`
- `work/`: results of each stage, from which a stopped demo resumes; it can be deleted

## Run

Seed {seed}, {seconds:.0f} s in all, on {machine[device]} with {machine[threads]} threads.
Versions: {versions}.
{notes}
"""


def write_outputs(
    config: DemoConfig,
    base: Path,
    pipelines: Mapping[str, Path],
    videos: Mapping[str, np.ndarray],
    results: Mapping[str, dict[str, Any]],
    generation_seconds: Mapping[str, float],
    seconds: float,
) -> dict[str, Any]:
    """Writes all results into the output directory.

    Args:
        config: Options of the demo.
        base: The softmax pipeline.
        pipelines: Pipeline directories by model.
        videos: `[prompts, F, H, W, 3]` uint8 by model.
        results: Reports of the recoveries by variant.
        generation_seconds: Seconds to generate the videos, by model.
        seconds: Seconds of the whole demo.

    Returns:
        The report, as in `report.json`.
    """
    report = build_report(config, base, pipelines, results, generation_seconds, seconds)
    output = config.output
    plot_recovery(output / "recovery.png", report["variants"])
    _plot_mixing(output / "mixing.png", pipelines["mhla"])
    laid_out = side_by_side(videos, config.prompts)
    write_gif(output / "side_by_side.gif", laid_out)
    written = write_video(output / "side_by_side.mp4", laid_out, fps=FRAMES_PER_SECOND)
    if written.suffix != ".mp4":
        report["notes"].append("No mp4: pip install 'mhla-hf[video]'.")
    with atomic_file(output / "frames.png") as temporary:
        Image.fromarray(frame_strip(videos)).save(temporary, format="PNG")
    with atomic_directory(output / "mhla") as temporary:
        shutil.copytree(pipelines["mhla"], temporary, dirs_exist_ok=True)
        shutil.copyfile(output / "side_by_side.gif", temporary / "sample.gif")
        model_card(report).save(temporary / "README.md")
    with atomic_file(output / "report.md") as temporary:
        temporary.write_text(render_report(report), encoding="utf-8")
    write_json(output / "report.json", report)
    return report


def build_report(
    config: DemoConfig,
    base: Path,
    pipelines: Mapping[str, Path],
    results: Mapping[str, dict[str, Any]],
    generation_seconds: Mapping[str, float],
    seconds: float,
) -> dict[str, Any]:
    """Collects the figures of a run; arguments as for `write_outputs`."""
    variants = {
        name: {
            "held_out": {stage: result["figures"][stage] for stage in STAGE_TITLES},
            "cpu_seconds": {
                stage: result["seconds"][stage]["cpu_seconds"] for stage in STAGE_TITLES if stage in result["seconds"]
            },
            "parameters": count_parameters(pipelines[name]),
            "generation_seconds": generation_seconds[name],
        }
        for name, result in results.items()
    }
    record = base / "pretraining.json"
    return {
        "seed": config.seed,
        "seconds": seconds,
        "options": config.identity(),
        "recipe": results["mhla"]["recipe"],
        "base_pretraining": read_json(record, "the record") if record.is_file() else None,
        "softmax": {
            "held_out_loss": results["mhla"]["figures"]["softmax"]["loss"],
            "parameters": count_parameters(base),
            "generation_seconds": generation_seconds["softmax"],
        },
        "variants": variants,
        "held_out_samples": config.held_out_videos * config.draws,
        "machine": machine_facts(torch.device("cpu")),
        "notes": [],
    }


def count_parameters(pipeline: Path) -> int:
    """Number of parameters of a pipeline's transformer, from the header of its weight file."""
    shapes, _ = read_header(pipeline / "transformer" / "diffusion_pytorch_model.safetensors")
    return sum(math.prod(entry["shape"]) for entry in shapes.values())


def render_report(report: dict[str, Any]) -> str:
    """The report as Markdown."""
    losses, costs = [], []
    for name, entry in report["variants"].items():
        cells = [f"{held['loss']:.4f} ({held['above_softmax_percent']:+.1f} %)" for held in entry["held_out"].values()]
        losses.append([TITLES[name], *cells, f"{sum(entry['cpu_seconds'].values()):.0f}"])
    for name, entry in {"softmax": report["softmax"], **report["variants"]}.items():
        costs.append([TITLES[name], f"{entry['parameters']:,}", f"{entry['generation_seconds']:.1f}"])
    packages = ("python", "mhla-hf", "torch", "diffusers", "transformers")
    return _TEXT.format(
        **{name: report[name] for name in ("softmax", "held_out_samples", "seed", "seconds", "machine")},
        layers=converted_layers(report["options"], report["recipe"]),
        match=report["recipe"]["match"],
        distill=report["recipe"]["distill"],
        losses=markdown_table(("model", *STAGE_TITLES.values(), "CPU s"), losses),
        costs=markdown_table(("model", "parameters", "s to generate"), costs),
        versions=", ".join(f"{name} {report['machine'][name]}" for name in packages),
        notes="\n".join(report["notes"]),
    )


def _plot_mixing(path: Path, directory: Path) -> None:
    model = PipelineSource(directory).load_model()
    modules = model.mhla_modules()
    layout = next(iter(modules.values())).layout_for(model.mhla_config.grid)
    plot_mixing(path, {layer: module.mixing_matrix(layout) for layer, module in modules.items()}, layout)
