# SPDX-License-Identifier: Apache-2.0
"""`mhla-hf recover`, `calibrate` and `select-layers`."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ..config import CHOICES, MHLAConfig
from ..recovery.recipes import STAGES, VARIANTS, DataOptions, recipe_names
from .options import (
    CONVERSION,
    DTYPE,
    FILE,
    HUB,
    LAYERS,
    PROBE_OPTIONS,
    Component,
    Device,
    Overwrite,
    Quiet,
    Seed,
    argument,
    given,
    listed,
    mhla_options,
    option,
    options_from,
    options_of,
    with_options,
)
from .output import JsonFile, progress_bars, say, show_table, write_report
from .share import write_first_card


if TYPE_CHECKING:
    from ..recovery.calibration import CalibrationReport
    from ..recovery.recover import RecoveryReport
    from ..recovery.selection import SelectionReport

_RECIPE = "Recipe"
# Options of the data have no prefix, as they are named elsewhere.
_SECTIONS = {
    name: options_from(cls, f"{_RECIPE}: {name}", prefix="" if name == "data" else f"{name}_", default=False)
    for name, cls in ({"data": DataOptions} | STAGES).items()
}


class _Run:
    data: str | None = option(
        "Folder of videos or images with captions or classes; for text a folder of .txt, .md, .rst or .py files, a "
        ".jsonl file or the id of a data set; 'digits'; or 'generated' for samples of the original."
    )
    prompts: Path | None = option("Text file with one prompt a line, for --data generated.", metavar=FILE)
    recipe: str | None = option(
        "YAML file, or name of a recipe: fast is ReLU, which is faster and recovers less; paper has the settings of "
        "the paper. Default: that of the model's family.",
        values=lambda: [*VARIANTS, *recipe_names()],
    )
    layers: str | None = LAYERS
    keep: str | None = option(
        "Share of layers that stays softmax, such as 25%: those that matter most.", metavar="N%", panel=_RECIPE
    )
    window: str | None = option(
        f"Exact softmax attention near each token, beside MHLA: {listed(CHOICES['window'])}.",
        panel=_RECIPE,
        choices=CHOICES["window"],
    )
    budget: float | None = option("Factor on the steps of all stages, such as 0.5 or 2.", panel=_RECIPE)
    dtype: str | None = DTYPE
    component: Component = None
    resume: bool = option("Resume the run in OUTPUT.", "--resume", default=False)
    seed: Seed = 0
    device: Device = "auto"
    save_every: int = option("Steps between checkpoints.", default=100)


_BLOCKS = [each for each in CONVERSION if each.name in ("blocks", "block_size")]
_RUN = [*options_of(_Run), *_BLOCKS, *HUB]


@with_options(_RUN, *_SECTIONS.values())
def recover_command(
    source: str = argument("Pipeline of diffusers or model of transformers: directory or Hub id."),
    output: Path = argument("Directory to write."),
    *,
    stages: str | None = option(
        f"Stages to run, separated by commas: {', '.join(STAGES)}. Default: those of the recipe.",
        metavar="NAMES",
        panel=_RECIPE,
        values=STAGES,
    ),
    json_file: JsonFile = None,
    quiet: Quiet = False,
    **options: Any,
) -> None:
    """Convert a model and recover the quality of the original.

    The model is calibrated, matched, distilled and fine-tuned, as its recipe says. A run that was stopped continues
    with --resume. OUTPUT becomes a directory for from_pretrained, with a report.

    Examples:
        mhla-hf recover Wan-AI/Wan2.1-T2V-1.3B-Diffusers wan-mhla --data videos/ --recipe wan-1.3b-hybrid
        mhla-hf recover Qwen/Qwen3-0.6B qwen3-mhla --data code/ --keep 25%
    """
    changes = {
        f"{section}.{name.removeprefix(f'{section}_')}": value
        for section, group in _SECTIONS.items()
        for name, value in given(options, group).items()
    }
    run = given(options, _RUN)
    MHLAConfig.from_dict(given(options, _BLOCKS))

    from ..recovery.recover import recover
    from ..utils.model_cards import CARD

    names = None if stages is None else [name.strip() for name in stages.split(",")]
    report = recover(source, output, stages=names, changes=changes, progress=not quiet, **run)
    if not (report.output / CARD).exists():
        # A finished run that is resumed keeps its card.
        write_first_card(report.output)
    write_report(json_file, report.to_dict())
    if not quiet:
        _show_recovery(report)


def _show_recovery(report: "RecoveryReport") -> None:
    from ..recovery.report import LABELS, rows

    states = rows(report.to_dict())
    names = list(dict.fromkeys(name for _, figures, _ in states for name in figures))
    cells = [
        (
            title,
            *(f"{figures[n]:{'+.1f' if n.endswith('percent') else '.4f'}}" if n in figures else None for n in names),
            None if seconds is None else f"{seconds:.0f}",
        )
        for title, figures, seconds in states
    ]
    show_table(("model", *(LABELS.get(name, name) for name in names), "CPU seconds"), cells, title="Held-out quality")
    say(f"Model: {report.output}; figures: {report.output / 'report.json'}")


class _Calibration:
    memory_limit: str = option(
        "Memory for sums, such as 800MB; with more, calibration takes fewer passes.", metavar="SIZE", default="4GB"
    )
    force: bool = option("Calibrate even if already trained or calibrated.", "--force", default=False)
    overwrite: Overwrite = False


_CALIBRATION = [*PROBE_OPTIONS, *options_of(_Calibration)]


@with_options(_CALIBRATION)
def calibrate_command(
    model: Path = argument("Directory that mhla-hf convert wrote."),
    output: Path | None = argument("Directory to write. Default: change MODEL in place.", default=None),
    *,
    json_file: JsonFile = None,
    quiet: Quiet = False,
    **options: Any,
) -> None:
    """Fit a converted model to its original without training.

    Feature maps, convolutions, gains and output projections are solved for in closed form, from a few passes over a
    few samples.

    Examples:
        mhla-hf calibrate wan-mhla
        mhla-hf calibrate minilm-mhla --data texts/
    """
    report = run_calibration(model, output, quiet, **given(options, _CALIBRATION))
    write_report(json_file, report.to_dict())


def run_calibration(model: Path, output: Path | None, quiet: bool, **options: Any) -> "CalibrationReport":
    """Calibrate a directory with a progress bar, write its card and show the errors; options of the function."""
    from ..recovery.directories import calibrate_directory

    with progress_bars(not quiet) as progress:
        report = calibrate_directory(model, output=output, progress=partial(progress, "calibrating"), **options)
    write_first_card(output or model)
    if not quiet:
        _show_calibration(report, output or model)
    return report


def _show_calibration(report: "CalibrationReport", directory: Path) -> None:
    show_table(
        ("layer", "error before", "error after", "changed"),
        [
            (
                layer.name,
                f"{layer.error_before:.4f}",
                f"{layer.error_after:.4f}",
                ", ".join(layer.changed) or layer.note,
            )
            for layer in report.layers
        ],
    )
    say(
        f"Wrote {directory}: held-out error of the layers' outputs {report.error_before:.4f} before, "
        f"{report.error_after:.4f} after, relative to their variance ({report.seconds:.1f} s)."
    )


@with_options(CONVERSION, PROBE_OPTIONS)
def select_layers_command(
    source: str = argument("Directory of a softmax pipeline or model, or Hub id owner/name."),
    *,
    keep: str | None = option("How many layers stay softmax: a number, or a share such as 25%.", metavar="N|N%"),
    latency: str | None = option(
        "Keep as many softmax layers as this share of the softmax model's time allows, such as 80%.", metavar="N%"
    ),
    component: Component = None,
    mhla: str | None = option("Options as JSON or a JSON file, as for mhla-hf convert.", metavar="JSON"),
    plot: Path | None = option("Draw a bar chart into this PNG file; needs matplotlib.", metavar=FILE),
    json_file: JsonFile = None,
    quiet: Quiet = False,
    **options: Any,
) -> None:
    """Select the layers that should stay softmax.

    Layers are ranked by the error that calibrated MHLA leaves there. The others are printed as mhla-hf convert takes
    them: --layers 1,2,4.

    Examples:
        mhla-hf select-layers Qwen/Qwen3-0.6B --block-size 128 --data texts/ --keep 25%
    """
    fields = mhla_options(mhla, options)
    probe = given(options, PROBE_OPTIONS)
    report = run_selection(source, fields, quiet, component=component, keep=keep, latency=latency, probe=probe)
    write_report(json_file, report.to_dict())
    if plot is not None:
        draw_selection(report, plot)
    if not quiet:
        _show_selection(report)
    typer.echo(f"--layers {report.option}")


def run_selection(source: str, fields: dict[str, Any], quiet: bool, **options: Any) -> "SelectionReport":
    """Select layers with a progress bar; options of the function."""
    from ..recovery.directories import select_layers_of

    with progress_bars(not quiet) as progress:
        return select_layers_of(source, fields, progress=partial(progress, "selecting layers"), **options)


def _show_selection(report: "SelectionReport") -> None:
    show_table(
        ("layer", "error of the layer", "restored by softmax", "softmax ms", "MHLA ms", ""),
        [
            (
                layer.index,
                f"{layer.error:.4f}",
                f"{layer.restored:.4f}",
                f"{layer.softmax_ms:.2f}",
                f"{layer.mhla_ms:.2f}",
                "softmax" if layer.kept else None,
            )
            for layer in report.layers
        ],
        err=True,
    )
    say(
        f"Error of the model's output: {report.errors[0]:.4f} with every layer MHLA, {report.errors[-1]:.4f} with "
        f"this selection. Time per batch: softmax {report.softmax_ms:.1f} ms, MHLA {report.mhla_ms:.1f} ms, this "
        f"selection {report.chosen_ms:.1f} ms.",
        err=True,
    )


def draw_selection(report: "SelectionReport", path: Path) -> None:
    """Draw a bar chart of each layer's error after calibration, and of the error that keeping it softmax restores.

    Args:
        report: See `select_layers`.
        path: PNG file to write.
    """
    from ..utils.figures import new_figure, save_figure

    places = range(len(report.layers))
    figure = new_figure(max(6.0, 0.35 * len(report.layers)), 5.5)
    upper, lower = figure.subplots(2, 1, sharex=True)
    colours = ["#444444" if layer.kept else "#1f77b4" for layer in report.layers]
    upper.bar(places, [layer.error for layer in report.layers], color=colours)
    upper.set_ylabel("error of the layer")
    lower.bar(places, [layer.restored for layer in report.layers], color=colours)
    lower.set_ylabel("model error restored\nby softmax there")
    lower.axhline(0, color="black", linewidth=0.6)
    lower.set_xticks(list(places), [str(layer.index) for layer in report.layers])
    lower.set_xlabel("layer")
    kept = ", ".join(map(str, sorted(report.order))) or "none"
    upper.set_title(f"Calibrated MHLA layers; kept softmax (grey): {kept}")
    save_figure(figure, path)
