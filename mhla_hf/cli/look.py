# SPDX-License-Identifier: Apache-2.0
"""`mhla-hf estimate`, `demo`, `inspect`, `app` and `bench`."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ..demo.config import DemoConfig
from ..presets import is_preset
from . import options as common
from .options import Device, Overwrite, Quiet, argument, given, option, options_from, options_of, with_options
from .output import JsonFile, progress_bars, say, show_table, write_report


if TYPE_CHECKING:
    from ..analysis import InspectionReport, LayerInspection
    from ..estimate import Estimate


class _Size:
    tokens: int | None = option(
        "Length of a text; also tokens of an image or video, in place of its size. Default: the model's longest."
    )
    height: int | None = option("Height in pixels. Default: the model's own.")
    width: int | None = option("Width in pixels. Default: the model's own.")
    num_frames: int | None = option("Frames of a video. Default: the model's own.")


_SIZE = options_of(_Size)


@with_options(_SIZE, common.HUB)
def estimate_command(
    model: str = argument("MODEL", "Directory or Hub id of a pipeline or model, or name of a preset.", ..., is_preset),
    *,
    component: common.Component = None,
    measure: bool = option("Time one block, with its own attention and with MHLA.", "--measure", default=False),
    device: Device = "auto",
    json_file: JsonFile = None,
    **options: Any,
) -> None:
    """Estimate what MHLA can gain, without loading weights.

    Counts the operations of one forward pass and those that MHLA would save, and the memory of weights, cache and
    recovery. MODEL may be one that MHLA does not support.

    Examples:

        mhla-hf estimate wan2.1-1.3b --height 720 --width 1280 --num-frames 81
        mhla-hf estimate Qwen/Qwen3-0.6B --tokens 32768 --measure
    """
    from ..bench import BenchOptions
    from ..estimate import estimate, find_candidate, find_grid, measure_block

    candidate = find_candidate(model, component, **given(options, common.HUB))
    grid = find_grid(candidate, **given(options, _SIZE))
    found = estimate(candidate, grid)
    _show_estimate(found)
    report = found.to_dict()
    if measure:
        report["measured"] = measure_block(candidate, grid, BenchOptions(device=device))
        show_times(report["measured"])
    write_report(json_file, report)


def _show_estimate(found: "Estimate") -> None:
    from ..utils.messages import format_bytes, pluralize

    sizes = f"{found.tokens:,} tokens ({' × '.join(f'{size:,}' for size in found.grid)})"
    say(f"{found.class_name}: {sizes}, {pluralize(found.layers, 'layer')} of softmax self-attention", style="bold")
    bounds = [
        {
            "MHLA layers": f"{row['layers']} ({row['converted']})",
            "at most": f"{row['mixing_free']:.2f}×",
            "with MHLA's operations": row["with_mhla"] and f"{row['with_mhla']:.2f}×",
        }
        for row in found.bounds()
    ]
    show_table(bounds, title=f"{found.operations / 1e12:,.3g} TFLOP, {100 * found.share:.0f} % in softmax")
    weights = " or ".join(
        f"{format_bytes(size * found.parameters)} in {name}" for name, size in (("bfloat16", 2), ("float32", 4))
    )
    say(f"Weights: {weights} ({found.parameters:,} parameters)")
    if found.kv_bytes is not None:
        state = "" if found.state_bytes is None else f", of MHLA in all layers {format_bytes(found.state_bytes)}"
        say(f"Cache in bfloat16: keys and values {format_bytes(found.kv_bytes)}{state}")
    names = {"weights": "weights", "training": "training", "records": "records", "block_records": "of blocks"}
    recipes = [
        {
            "recipe": f"{row['recipe']} (recommended)" if row["recommended"] else row["recipe"],
            "MHLA layers": row["layers"],
            "steps": f"{row['steps']:,}",
            **{title: format_bytes(row[name]) if row[name] else None for name, title in names.items()},
        }
        for row in found.training
    ]
    show_table(recipes, title="Memory of a recovery")
    if recipes:
        say(
            "Weights in float32; training adds gradients and optimizer states; activations of a step are not counted. "
            "Records are activations that are kept in memory or on the disk, those of blocks in memory."
        )
    say(found.sentence(), style="bold")


_PANELS = {"match_steps": "Training", "prompts": "Generation"}
_DEMO = [each for each in options_from(DemoConfig, panels=_PANELS) if each.name not in ("output", "progress")]


@with_options(_DEMO)
def demo_command(
    output: Path = argument("OUTPUT", "Directory to write.", default=Path("demo-output")),
    *,
    json_file: JsonFile = None,
    quiet: Quiet = False,
    **options: Any,
) -> None:
    """Convert, recover and compare a small video model on a CPU.

    A Wan pipeline of moving digits becomes MHLA, MHLA with a softmax window, and linear attention. Longer videos time
    MHLA beside softmax. OUTPUT gets a report, videos, figures and the recovered pipelines. A stopped demo resumes.
    """
    config = DemoConfig(output=str(output), progress=not quiet, **given(options, _DEMO))

    from ..demo.config import TITLES
    from ..demo.run import run_demo, stage_titles

    report = run_demo(config)
    write_report(json_file, report)
    if quiet:
        return
    columns = list(stage_titles(report).values())
    softmax = {columns[-1]: f"{report['softmax']['held_out_loss']:.4f}"}
    rows: list[dict[str, Any]] = [{"model": "softmax", **dict.fromkeys(columns), **softmax}]
    for name, entry in report["variants"].items():
        cells = (f"{cell['loss']:.4f} ({cell['above_softmax_percent']:+.1f} %)" for cell in entry["held_out"].values())
        rows.append({"model": TITLES[name], **dict(zip(columns, cells))})
    show_table(rows, title="Held-out loss, and how far above softmax")
    longer = report["long_videos"]["generation"]
    times = (f"{TITLES[name]} {seconds:.1f} s" for name, seconds in longer["seconds"].items())
    say(f"A video of {longer['frames']} frames: {', '.join(times)}")
    say(f"Report, videos and figures: {output}\nThe MHLA pipeline: {output / 'mhla'}")


class _Inspection:
    component: common.Component = None
    layers: str | None = option("Layers to inspect, such as 1,2,4. Default: all MHLA layers.")
    prompts: list[str] | None = option(
        "Prompt of a pipeline, or text; may be repeated.", "--prompt", panel=common.PROBE
    )
    images: list[Path] | None = option("Image for a vision model; may be repeated.", "--image", panel=common.PROBE)
    samples: int = option("Number of samples; 0 inspects the weights only.", default=4, panel=common.PROBE)
    tokens: int = option(
        "Largest number of rows (query tokens) of attention matrices, and of tokens of a text.",
        default=512,
        panel=common.PROBE,
    )
    seed: common.Seed = 0
    device: Device = "auto"


_INSPECTION = [*common.SIZES, *options_of(_Inspection)]


@with_options(_INSPECTION, common.HUB)
def inspect_command(
    model: str = argument("MODEL", "Directory or Hub id of an MHLA pipeline or model."),
    *,
    block: int | None = option("Block whose weights the page shows on the token grid. Default: the middle one."),
    html: Path | None = option("Write a self-contained HTML page to FILE.", dir_okay=False),
    original: str | None = option(
        "Softmax original to compare outputs with: directory or Hub id. Default: what conversion.json names, if it is "
        "on this machine."
    ),
    json_file: JsonFile = None,
    quiet: Quiet = False,
    **options: Any,
) -> None:
    """Show what MHLA has learned in each layer.

    It reports the mixing weights of each layer, and on a few samples the rank and entropy of its attention compared
    with softmax and linear attention, and the error of its output against the original model.

    Examples:

        mhla-hf inspect wan-mhla --html report.html --original Wan-AI/Wan2.1-T2V-1.3B-Diffusers
        mhla-hf inspect qwen3-mhla --prompt 'import this' --json figures.json
    """
    from ..analysis import inspect_directory, write_html

    with progress_bars(not quiet, "loading the model and its probe") as progress:
        report = inspect_directory(
            model,
            base=original,
            progress=lambda name, done, total: progress(f"inspecting {name}", done, total),
            hub=given(options, common.HUB),
            **given(options, _INSPECTION),
        )
    write_report(json_file, report.to_dict())
    if html is not None:
        write_html(report, html, block=block)
    if not quiet:
        _show_inspection(report)
        if html is not None:
            say(f"Wrote {html}")


def _show_inspection(report: "InspectionReport") -> None:
    for model in report.models:
        say(f"{model.class_name} ({model.component})", style="bold")
        for name, value in model.facts().items():
            say(f"  {name}: {value}")
        if model.is_untrained:
            say("It is untrained since its conversion: all mixing weights have their initial values.")
        show_table(map(_row, model.mhla_layers))
        for note in model.notes:
            say(note)
    say(
        "moved: relative change of the mixing weights since initialisation; pattern: the same with rows scaled to an "
        "absolute sum of 1."
    )
    if report.probe:
        kinds = "|".join(report.models[0].kinds.values())
        say(f"Probe: {report.probe}. Rank and entropy are means over heads and samples: {kinds}.")
        base = f"Output errors are relative to {report.base}." if report.base else ""
        say(base or "No original was found, so there are no output errors; --original names it.")


def _row(layer: "LayerInspection") -> dict[str, Any]:
    assert layer.mixing is not None
    movement, pattern = (sum(x) / len(x) for x in (layer.mixing.movement, layer.mixing.pattern_movement))
    found = layer.attention.statistics.values() if layer.attention else ()
    return {
        "layer": layer.index,
        "moved": f"{movement:.3f}",
        "pattern": f"{pattern:.3f}",
        "effective rank": "|".join(f"{kind['effective_rank']['mean']:.0f}" for kind in found),
        "relative entropy": "|".join(f"{kind['relative_entropy']['mean']:.2f}" for kind in found),
        "output error": f"{layer.output_error['mean']:.4f}" if layer.output_error else None,
    }


def app_command(
    model: str | None = argument(
        "MODEL",
        "An MHLA pipeline or language model: a directory or Hub id. Default: demo-output/mhla if it exists, else the "
        "demo's pipeline, converted and calibrated now.",
        default=None,
    ),
    *,
    original: str | None = option("The original: directory or Hub id. Default: what conversion.json names."),
    port: int | None = option("Port. Default: the first free one from 7860."),
    host: str | None = option("Address to listen on, such as 0.0.0.0. Default: this machine only."),
    share: bool = option("Make a public link through gradio's servers.", "--share", default=False),
    device: Device = "auto",
    dtype: str | None = option(
        f"Type of the weights: {common.listed(common.DTYPES)}. Default: bfloat16 on a GPU, float32 on a CPU."
    ),
    space: Path | None = option("Write a folder for a Space of the Hub instead.", "--export-space"),
    overwrite: Overwrite = False,
) -> None:
    """Compare an MHLA model with its original in a browser.

    The page generates with both models from the same seed, and shows their times and the mixing weights. It needs
    gradio: pip install -e '.[app]' in a clone of mhla_hf.

    Examples:

        mhla-hf app demo-output/mhla
        mhla-hf app you/wan-mhla --export-space space
    """
    from ..app import create_app, export_space, serve

    if space is not None:
        folder = export_space(space, model, original, overwrite=overwrite)
        typer.echo(f"{folder} is a Space: push it with `hf upload OWNER/NAME {folder} --repo-type space`")
        return
    serve(create_app(model, original, device=device, dtype=dtype), host=host, port=port, share=share)


# Benchmarks


class _Benchmark:
    contestants: str | None = option("Contestants, separated by commas, such as mhla-torch,softmax. Default: all.")
    dtype: str | None = option(f"{common.listed(common.DTYPES)}. Default: bfloat16 on a GPU, float32 on a CPU.")
    device: Device = "auto"
    seconds: float = option("Approximate time for all runs of one size.", default=5.0)
    quick: bool = option("Measure one size in a tenth of the time, as a smoke test.", "--quick", default=False)


_BENCHMARK = options_of(_Benchmark)


def _cases(what: str, examples: str) -> Any:
    return option(f"{what}, separated by commas, such as {examples}. Default: those that suit the device.")


@with_options(_BENCHMARK)
def op_command(
    shapes: str | None = _cases("Shapes", "wan,causal-32k"),
    json_file: JsonFile = None,
    quiet: Quiet = False,
    **options: Any,
) -> None:
    """Measure the attention operator at the sizes of models.

    Contestants take turns and inputs change from run to run; times are medians.
    """
    from ..bench import measure_operator

    _measure(measure_operator, shapes, json_file, quiet, **options)


@with_options(_BENCHMARK)
def model_command(
    models: str | None = _cases("Models", "wan,dit-512"),
    compiled: bool = option("Compile the transformer blocks.", "--compile", default=False),
    json_file: JsonFile = None,
    quiet: Quiet = False,
    **options: Any,
) -> None:
    """Measure models with random weights: own attention and MHLA."""
    from ..bench import measure_models

    backend = "inductor" if compiled else None
    _measure(partial(measure_models, compile_backend=backend), models, json_file, quiet, **options)


BENCHMARKS = {"op": op_command, "model": model_command}
"""The commands of `mhla-hf bench`."""


def _measure(
    measure: Callable[..., dict[str, Any]],
    cases: str | None,
    json_file: Path | None,
    quiet: bool,
    contestants: str | None,
    **options: Any,
) -> None:
    from ..bench import BenchOptions

    names = (None if text is None else text.split(",") for text in (cases, contestants))
    report = measure(BenchOptions(**options), *names, None if quiet else _announce)
    show_times(report)
    write_report(json_file, report)


def _announce(case: str) -> None:
    typer.echo(f"measuring {case}", err=True)


def show_times(report: dict[str, Any]) -> None:
    """Print the table of a report of `bench`, and why contestants were not measured."""
    from ..utils.messages import format_bytes

    case = ("shape", "direction", "model", "contestant", "attention", "normalizer")
    rows: list[dict[str, Any]] = []
    failures: dict[str, None] = {}
    for row in report["results"]:
        if row["reason"] is not None:
            failures[f"not measured: {row['contestant']}: {row['reason']}"] = None
            continue
        cells = {name: row[name] for name in case if name in row}
        cells["ms"] = f"{row['milliseconds']:.4g}"
        cells["memory"] = format_bytes(row["peak_memory_bytes"])
        for name in ("softmax", "ordinary"):
            speedup = row.get(f"speedup_over_{name}")
            cells[f"vs {name}"] = speedup and f"{speedup:.2f}×"
        rows.append(cells)
    show_table(rows, title=f"{report['machine']['device']}, {report['options']['dtype']}")
    for line in failures:
        say(line)
