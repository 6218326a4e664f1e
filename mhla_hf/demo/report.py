# SPDX-License-Identifier: Apache-2.0
"""What the demo writes in the end: pictures, videos, the report, and the pipeline with its model card."""

from __future__ import annotations

import platform
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..files import atomic_directory, atomic_file, write_json
from ..json_files import read_json
from ..training import EvaluationResult
from ..training.loading import load_student
from ..training.videos import write_video
from .config import DemoConfig
from .figures import (
    FRAMES_PER_SECOND,
    STAGE_TITLES,
    STAGES,
    TITLES,
    frame_strip,
    plot_losses,
    plot_mixing,
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
    results: dict[str, Any],
    progress: DemoProgress,
) -> dict[str, Any]:
    """Write everything that the demo shows into its output directory.

    Args:
        config: The options.
        base: The softmax pipeline.
        pipelines: Pipeline directories by model.
        videos: `[prompts, F, H, W, 3]` uint8 by model.
        results: Evaluations, losses and seconds of the run.
        progress: The display.

    Returns:
        The report, as in `report.json`.
    """
    with progress.stage("Write report, pictures and pipeline"):
        report = build_report(config, base, pipelines, results)
        output = config.output
        losses = {name: result["losses"] for name, result in results["variants"].items()}
        above = {
            name: {stage: entry["held_out"][stage]["above_softmax_percent"] for stage in STAGES}
            for name, entry in report["variants"].items()
        }
        plot_losses(output / "loss.png", losses, above)
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
    config: DemoConfig, base: Path, pipelines: Mapping[str, Path], results: dict[str, Any]
) -> dict[str, Any]:
    """Collect the figures of a run; see `write_outputs` for the arguments."""
    from .runner import parameters_of

    softmax: EvaluationResult = results["softmax"]
    work = config.output / "work"
    counts = parameters_of(work, {"softmax": "softmax", "mhla": "mhla-finetune", "linear": "linear-finetune"})
    variants = {}
    for name, result in results["variants"].items():
        held_out = {stage: _compare(result["evaluations"][stage], softmax) for stage in STAGES}
        variants[name] = {
            "held_out": held_out,
            "parameters": counts[name],
            "seconds_per_step": result["seconds_per_step"],
            "final_training_loss": {stage: float(np.mean(v[-10:])) for stage, v in result["losses"].items()},
            "generation_seconds": results["generation_seconds"][name],
        }
    difference, error = results["variants"]["linear"]["evaluations"]["finetune"].difference(
        results["variants"]["mhla"]["evaluations"]["finetune"]
    )
    record = base / "pretraining.json"
    return {
        "seed": config.seed,
        "seconds": results["seconds"],
        "options": config.identity(),
        "base_pretraining": read_json(record, "the record") if record.is_file() else None,
        "softmax": {
            "held_out_loss": softmax.loss,
            "parameters": counts["softmax"],
            "generation_seconds": results["generation_seconds"]["softmax"],
        },
        "variants": variants,
        "linear_above_mhla": {
            "loss": difference,
            "standard_error": error,
            "percent_of_softmax": 100 * difference / softmax.loss,
        },
        "held_out_samples": len(softmax.losses),
        "versions": versions(),
        "machine": machine(),
        "notes": [],
    }


def _compare(result: EvaluationResult, softmax: EvaluationResult) -> dict[str, float]:
    difference, error = result.difference(softmax)
    return {
        "loss": result.loss,
        "above_softmax_percent": 100 * difference / softmax.loss,
        "standard_error_percent": 100 * error / softmax.loss,
    }


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
    softmax, options = report["softmax"]["held_out_loss"], report["options"]
    lines = [
        "# MHLA on moving digits",
        "",
        f"A small Wan pipeline with softmax attention ({report['softmax']['parameters']:,} parameters) was converted",
        "twice: to MHLA and to vanilla linear attention, which is MHLA with a single block. Both copies are alike in",
        f"everything else ({converted_layers(options)}) and had the same",
        f"training: {options['transfer_steps']} steps of matching attention outputs at batch "
        f"{options['transfer_batch_size']}, then {options['steps']} of",
        f"fine-tuning at batch {options['batch_size']}, on the same videos, noise and noise levels.",
        "",
        "## Held-out loss",
        "",
        f"Flow matching on scans of digits that no training saw; {report['held_out_samples']} draws, the same for all",
        f"models. Softmax: {softmax:.4f}. In brackets the standard error of the paired difference.",
        "",
        "| model | " + " | ".join(STAGE_TITLES[stage] for stage in STAGES) + " | above softmax in the end |",
        "|---|" + "---|" * (len(STAGES) + 1),
    ]
    for name, entry in report["variants"].items():
        losses = " | ".join(f"{entry['held_out'][stage]['loss']:.4f}" for stage in STAGES)
        last = entry["held_out"][STAGES[-1]]
        percent = f"{last['above_softmax_percent']:+.2f} % (± {last['standard_error_percent']:.2f})"
        lines.append(f"| {TITLES[name]} | {losses} | {percent} |")
    lines += ["", "Per cent above softmax:", "", "| model | " + " | ".join(STAGE_TITLES[s] for s in STAGES) + " |"]
    lines.append("|---|" + "---|" * len(STAGES))
    for name, entry in report["variants"].items():
        cells = " | ".join(f"{entry['held_out'][stage]['above_softmax_percent']:+.2f} %" for stage in STAGES)
        lines.append(f"| {TITLES[name]} | {cells} |")
    between = report["linear_above_mhla"]
    lines += [
        "",
        f"Linear attention ends {between['percent_of_softmax']:.2f} % of the softmax loss above MHLA "
        f"(standard error {100 * between['standard_error'] / softmax:.2f} %).",
        "",
        "## Cost",
        "",
        "| model | parameters | s per matching step | s per fine-tuning step | s to generate |",
        "|---|---|---|---|---|",
        f"| softmax | {report['softmax']['parameters']:,} | | | {report['softmax']['generation_seconds']:.1f} |",
    ]
    for name, entry in report["variants"].items():
        seconds = entry["seconds_per_step"]
        steps = " | ".join(f"{seconds[stage]:.2f}" if stage in seconds else "" for stage in ("transfer", "finetune"))
        lines.append(f"| {TITLES[name]} | {entry['parameters']:,} | {steps} | {entry['generation_seconds']:.1f} |")
    lines += [
        "",
        "At 320 tokens linear attention saves no time; it does at the tens of thousands of tokens of a real video.",
        "",
        "## Files",
        "",
        "- `mhla/`: the MHLA pipeline, ready for the Hub",
        "- `side_by_side.mp4`, `side_by_side.gif`, `frames.png`: softmax, MHLA and linear from the same noise",
        "- `loss.png`, `mixing.png`, `report.json`",
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
    model = load_student(directory)
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
