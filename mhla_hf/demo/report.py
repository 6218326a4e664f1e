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

from ..analysis import plot_mixing
from ..hub import CardText, write_card
from ..training.data.digits import MovingDigitsConfig
from ..training.data.videos import write_video
from ..training.loading import PipelineSource
from ..utils.destinations import atomic_directory
from ..utils.files import atomic_file, write_json
from ..utils.json_files import read_json
from ..utils.machine import machine_facts
from ..utils.messages import how_to_install
from ..utils.tensor_files import read_header
from .config import DemoConfig
from .figures import (
    FRAMES_PER_SECOND,
    STAGE_TITLES,
    TITLES,
    frame_strip,
    plot_recovery,
    side_by_side,
    write_gif,
)


_TEMPLATES = Path(__file__).parent / "templates"

_SUMMARY = (
    "A very small text-to-video pipeline, whose videos of {appearance.num_frames} frames of "
    "{appearance.size}×{appearance.size} pixels show moving handwritten digits. It demonstrates the conversion from "
    "softmax attention and has no other use."
)
_NOTE = (
    'Captions are "a *digit* moves *direction*", up to four of them joined by "and"; digits are `zero` to `nine`, '
    "directions `left`, `right`, `up`, `down`."
)


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
    report = _build_report(config, base, pipelines, results, generation_seconds, seconds)
    output = config.output
    plot_recovery(output / "recovery.png", report["variants"])
    _plot_mixing(output / "mixing.png", pipelines["mhla"])
    laid_out = side_by_side(videos, config.prompts)
    write_gif(output / "side_by_side.gif", laid_out)
    written = write_video(output / "side_by_side.mp4", laid_out, fps=FRAMES_PER_SECOND)
    if written.suffix != ".mp4":
        report["notes"].append(f"No mp4: {how_to_install('video')}.")
    with atomic_file(output / "frames.png") as temporary:
        Image.fromarray(frame_strip(videos)).save(temporary, format="PNG")
    with atomic_directory(output / "mhla") as temporary:
        shutil.copytree(pipelines["mhla"], temporary, dirs_exist_ok=True)
        shutil.copyfile(output / "side_by_side.gif", temporary / "sample.gif")
        _write_card(temporary, report, results)
    with atomic_file(output / "report.md") as temporary:
        temporary.write_text(_render_report(report), encoding="utf-8")
    write_json(output / "report.json", report)
    return report


def _build_report(
    config: DemoConfig,
    base: Path,
    pipelines: Mapping[str, Path],
    results: Mapping[str, dict[str, Any]],
    generation_seconds: Mapping[str, float],
    seconds: float,
) -> dict[str, Any]:
    variants = {
        name: {
            "held_out": {stage: result["figures"][stage] for stage in STAGE_TITLES},
            "cpu_seconds": {
                stage: result["seconds"][stage]["cpu_seconds"] for stage in STAGE_TITLES if stage in result["seconds"]
            },
            "parameters": _count_parameters(pipelines[name]),
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
            "parameters": _count_parameters(base),
            "generation_seconds": generation_seconds["softmax"],
        },
        "variants": variants,
        "held_out_samples": config.held_out_videos * config.draws,
        "machine": machine_facts(torch.device("cpu")),
        "notes": [],
    }


def _count_parameters(pipeline: Path) -> int:
    """Number of parameters of a pipeline's transformer, from the header of its weight file."""
    shapes, _ = read_header(pipeline / "transformer" / "diffusion_pytorch_model.safetensors")
    return sum(math.prod(entry["shape"]) for entry in shapes.values())


def _render_report(report: dict[str, Any]) -> str:
    """The report as Markdown."""
    from jinja2 import Template

    return Template((_TEMPLATES / "report.md.jinja").read_text(encoding="utf-8")).render(_facts(report)) + "\n"


def _write_card(directory: Path, report: dict[str, Any], results: Mapping[str, dict[str, Any]]) -> None:
    """Writes the model card of the MHLA pipeline, with the figures of the other copies."""
    appearance, options = MovingDigitsConfig(), report["options"]
    made = f"{len(options['prompts'])} videos, {options['inference_steps']} denoising steps."
    generation = {
        "benchmark": "generation",
        "task": f"{made} At the 320 tokens of a video linear attention saves no time.",
        "machine": report["machine"],
        "results": [
            {"model": TITLES[name], "parameters": entry["parameters"], "seconds": entry["generation_seconds"]}
            for name, entry in {"softmax": report["softmax"], **report["variants"]}.items()
        ],
    }
    text = CardText(
        name="Moving digits, Wan with MHLA",
        summary=_SUMMARY.format(appearance=appearance),
        note=_NOTE,
        training="All data are videos made from the scans in scikit-learn's `load_digits`; the softmax pipeline was "
        "trained on such videos as well.",
        dataset="Moving digits of scikit-learn's load_digits, held-out scans",
        prompt=options["prompts"][0],
        arguments={"num_inference_steps": options["inference_steps"], "guidance_scale": options["guidance"]},
        sample_caption="Softmax, MHLA, MHLA with a window, and linear attention side by side",
        license="apache-2.0",
    )
    comparisons = {f"{TITLES[name]}, recovered alike": result for name, result in results.items() if name != "mhla"}
    write_card(directory, benchmarks=[generation], comparisons=comparisons, text=text, overwrite=True)


def _facts(report: dict[str, Any]) -> dict[str, Any]:
    """Variables of the templates: the report, names of models and stages, and the conversion in words."""
    options, mhla = report["options"], report["recipe"]["mhla"]
    layers = "every layer" if options["layers"] == "all" else f"layers {options['layers']}; the others stay softmax"
    if mhla.get("lepe_kernel") is not None:
        layers += f"; depthwise convolution of the values, kernel {mhla['lepe_kernel']}"
    return {
        **report,
        "layers": f"{layers}; feature map {mhla.get('feature_map', 'relu')}",
        "stages": STAGE_TITLES,
        "titles": TITLES,
        "models": list(report["variants"]),
    }


def _plot_mixing(path: Path, directory: Path) -> None:
    model: Any = PipelineSource(directory).load_model()
    modules = model.mhla_modules()
    layout = next(iter(modules.values())).layout_for(model.mhla_config.grid)
    plot_mixing(path, {layer: module.mixing_matrix(layout) for layer, module in modules.items()}, layout)
