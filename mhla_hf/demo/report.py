# SPDX-License-Identifier: Apache-2.0
"""What the demo writes in the end: pictures, videos, the report, and the pipeline with its model card."""

from __future__ import annotations

import math
import platform
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..training.data.videos import write_video
from ..training.loading import PipelineSource
from ..utils.files import atomic_directory, atomic_file, write_json
from ..utils.json_files import read_json
from ..utils.tensor_files import read_header
from .config import DemoConfig
from .figures import (
    FRAMES_PER_SECOND,
    STAGE_TITLES,
    STAGES,
    TITLES,
    frame_strip,
    plot_mixing,
    plot_recovery,
    side_by_side,
    write_gif,
)
from .model_card import converted_layers, model_card
from .progress import DemoProgress


def write_outputs(
    config: DemoConfig,
    base: Path,
    pipelines: Mapping[str, Path],
    videos: Mapping[str, np.ndarray],
    results: Mapping[str, dict[str, Any]],
    generation_seconds: Mapping[str, float],
    seconds: float,
    progress: DemoProgress,
) -> dict[str, Any]:
    """Write everything that the demo shows into its output directory.

    Args:
        config: The options.
        base: The softmax pipeline.
        pipelines: Pipeline directories by model.
        videos: `[prompts, F, H, W, 3]` uint8 by model.
        results: Reports of the recoveries by variant.
        generation_seconds: Seconds to generate the videos, by model.
        seconds: Seconds of the whole demo.
        progress: The display.

    Returns:
        The report, as in `report.json`.
    """
    with progress.stage("Write report, pictures and pipeline"):
        report = build_report(config, base, pipelines, results, generation_seconds, seconds)
        output = config.output
        plot_recovery(output / "recovery.png", {name: points(entry) for name, entry in report["variants"].items()})
        _plot_mixing(output / "mixing.png", pipelines["mhla"])
        laid_out = side_by_side(videos, config.prompts)
        write_gif(output / "side_by_side.gif", laid_out)
        written = write_video(output / "side_by_side.mp4", laid_out, fps=FRAMES_PER_SECOND)
        if written.suffix != ".mp4":
            report["notes"].append("No mp4: pip install 'mhla-hf[video]'.")
        _write_png(output / "frames.png", frame_strip(videos))
        _write_pipeline(output / "mhla", pipelines["mhla"], output / "side_by_side.gif", report)
        text = render_report(report)
        with atomic_file(output / "report.md") as temporary:
            temporary.write_text(text, encoding="utf-8")
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
    """Collect the figures of a run; see `write_outputs` for the arguments."""
    variants = {
        name: {
            "held_out": {stage: result["figures"][stage] for stage in STAGES},
            "cpu_seconds": {stage: result["seconds"][stage]["cpu_seconds"] for stage in STAGES[1:]},
            "parameters": count_parameters(pipelines[name]),
            "generation_seconds": generation_seconds[name],
        }
        for name, result in results.items()
    }
    record = base / "pretraining.json"
    softmax = results["mhla"]["figures"]["softmax"]["loss"]
    return {
        "seed": config.seed,
        "seconds": seconds,
        "options": config.identity(),
        "recipe": results["mhla"]["recipe"],
        "base_pretraining": read_json(record, "the record") if record.is_file() else None,
        "softmax": {
            "held_out_loss": softmax,
            "parameters": count_parameters(base),
            "generation_seconds": generation_seconds["softmax"],
        },
        "variants": variants,
        "held_out_samples": config.held_out_videos * config.draws,
        "versions": versions(),
        "machine": machine(),
        "notes": [],
    }


def points(entry: Mapping[str, Any]) -> list[tuple[float, float]]:
    """CPU seconds so far and per cent above softmax, for each of `STAGES`; `entry` as in the report's variants."""
    seconds, found = 0.0, []
    for stage in STAGES:
        seconds += entry["cpu_seconds"].get(stage, 0.0)
        found.append((seconds, entry["held_out"][stage]["above_softmax_percent"]))
    return found


def count_parameters(pipeline: Path) -> int:
    """Number of parameters of a pipeline's transformer, read off its weight file."""
    shapes, _ = read_header(pipeline / "transformer" / "diffusion_pytorch_model.safetensors")
    return sum(math.prod(entry["shape"]) for entry in shapes.values())


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that matter."""
    from importlib.metadata import PackageNotFoundError, version

    from .. import __version__

    found = {"python": platform.python_version(), "mhla_hf": __version__}
    for name in ("torch", "diffusers", "transformers", "accelerate", "safetensors", "scikit-learn"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def machine() -> dict[str, Any]:
    """The machine that ran the demo."""
    import os

    return {
        "system": f"{platform.system()} {platform.machine()}",
        "cpu_count": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
    }


def render_report(report: dict[str, Any]) -> str:
    """Write the report as Markdown."""
    softmax, options, recipe = report["softmax"], report["options"], report["recipe"]
    lines = [
        "# MHLA on moving digits",
        "",
        f"A small Wan pipeline with softmax attention ({softmax['parameters']:,} parameters) was converted three",
        "times: to MHLA, to MHLA with a softmax window beside it, and to vanilla linear attention, which is MHLA with",
        f"a single block. The copies are alike in everything else ({converted_layers(options, recipe)})",
        "and were recovered alike: calibrated in closed form, then",
        f"{recipe['match']['steps']} steps of matching each layer's output by itself, then "
        f"{recipe['distill']['steps']} steps of distilling the",
        "model's prediction, on the same videos, noise and noise levels.",
        "",
        "## Held-out loss",
        "",
        f"Flow matching on scans of digits that no training saw; {report['held_out_samples']} draws, the same for all",
        f"models. Softmax: {softmax['held_out_loss']:.4f}. The others, and how far they are above it:",
        "",
        "| model | " + " | ".join(STAGE_TITLES[stage] for stage in STAGES) + " | CPU s |",
        "|---|" + "---|" * (len(STAGES) + 1),
    ]
    for name, entry in report["variants"].items():
        cells = [
            f"{figures['loss']:.4f} ({figures['above_softmax_percent']:+.1f} %)"
            for figures in (entry["held_out"][stage] for stage in STAGES)
        ]
        lines.append(f"| {TITLES[name]} | {' | '.join(cells)} | {sum(entry['cpu_seconds'].values()):.0f} |")
    lines += [
        "",
        "## Cost",
        "",
        "| model | parameters | s to generate |",
        "|---|---|---|",
        f"| softmax | {softmax['parameters']:,} | {softmax['generation_seconds']:.1f} |",
    ]
    for name, entry in report["variants"].items():
        lines.append(f"| {TITLES[name]} | {entry['parameters']:,} | {entry['generation_seconds']:.1f} |")
    lines += [
        "",
        "At 320 tokens linear attention saves no time; it does at the tens of thousands of tokens of a real video.",
        "",
        "## Files",
        "",
        "- `mhla/`: the MHLA pipeline, ready for the Hub",
        "- `side_by_side.mp4`, `side_by_side.gif`, `frames.png`: all models from the same noise",
        "- `recovery.png`, `mixing.png`, `report.json`",
        "- `work/`: results of each stage, from which a stopped demo goes on; it can be deleted",
        "",
        "## Run",
        "",
        f"Seed {report['seed']}, {report['seconds']:.0f} s in all, on {report['machine']['system']} with "
        f"{report['machine']['torch_threads']} threads.",
        "Versions: " + ", ".join(f"{name} {value}" for name, value in report["versions"].items()) + ".",
        *report["notes"],
        "",
    ]
    return "\n".join(lines)


def _plot_mixing(path: Path, directory: Path) -> None:
    model = PipelineSource(directory).load_model()
    modules = model.mhla_modules()
    grid = model.mhla_config.grid
    layout = next(iter(modules.values())).layout_for(grid)
    matrices = {layer: module.mixing_matrix(layout) for layer, module in modules.items()}
    plot_mixing(path, matrices, layout)


def _write_png(path: Path, picture: np.ndarray) -> None:
    from PIL import Image

    with atomic_file(path) as temporary:
        Image.fromarray(picture).save(temporary, format="PNG")


def _write_pipeline(destination: Path, source: Path, video: Path, report: dict[str, Any]) -> None:
    """Copy the trained pipeline and add its model card."""
    with atomic_directory(destination) as temporary:
        shutil.copytree(source, temporary, dirs_exist_ok=True)
        shutil.copyfile(video, temporary / "sample.gif")
        (temporary / "README.md").write_text(model_card(report), encoding="utf-8")
