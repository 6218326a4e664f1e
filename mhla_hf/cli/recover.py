# SPDX-License-Identifier: Apache-2.0
"""`mhla-hf recover`, `calibrate`, `select-layers` and `train`, whose options are fields of dataclasses."""

import dataclasses
import inspect
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer

from ..config import MHLAConfig, check_shares
from ..models.registry import TRAINED, trained_family
from ..recovery.recipes import FORMER, SECTIONS, STAGES, check_arguments, recipe_names
from ..training.config import (
    MATCHING,
    MATCHING_FLAGS,
    CacheConfig,
    TrainingConfig,
    check_options,
    option_families,
    refuse_matching,
)
from ..utils.files import read_json
from ..utils.locations import check_data
from ..utils.options import check_names
from . import options as common
from .options import Device, Overwrite, Quiet, argument, given, option, options_from, options_of, with_options
from .output import JsonFile, progress_bars, say, show_table, write_first_card, write_report


if TYPE_CHECKING:
    from ..recovery.calibration import CalibrationReport
    from ..recovery.recover import RecoveryReport
    from ..recovery.selection import SelectionReport

_RECIPE = "Recipe"
# Options of the data have no prefix, as they are named elsewhere.
_SECTIONS = {
    name: options_from(cls, f"{_RECIPE}: {name}", prefix="" if name == "data" else f"{name}_", default=False)
    for name, cls in SECTIONS.items()
} | {FORMER: options_from(SECTIONS["blockwise"], prefix=f"{FORMER}_", hidden=True)}


class _Run:
    data: str | None = option(
        "Folder of videos or images with captions or classes; for text a folder of .txt, .md, .rst or .py files, a "
        ".jsonl file or the id of a data set; 'digits'; or 'generated' for samples of the original.",
        callback=check_data,
    )
    prompts: Path | None = option("Text file with one prompt per line, for --data generated.", exists=True)
    recipe: str | None = option(
        "YAML file, or name of a recipe: fast is ReLU, which is faster and recovers less; paper has the settings of "
        f"the paper; {', '.join(recipe_names())} are each for one model. Default: that of the model's family."
    )
    layers: common.Layers = None
    keep: str | None = option(
        "Share of layers that stays softmax, such as 25%: those that matter most.", metavar="N%", panel=_RECIPE
    )
    by: Literal["lookup", "error"] | None = option(
        "How --keep tells them: by lookup of repeated text, the default for language models, or by error.",
        metavar="NAME",
        panel=_RECIPE,
    )
    budget: float | None = option("Factor on the steps of all stages, such as 0.5 or 2.", panel=_RECIPE)
    dtype: common.Dtype = None
    component: common.Component = None
    resume: bool = option("Resume the run in OUTPUT.", "--resume", default=False)
    seed: common.Seed = 0
    device: Device = "auto"
    save_every: int = option("Steps between checkpoints.", default=100)
    keep_stages: bool = option("Keep the result of every stage in OUTPUT/work.", "--keep-stages", default=False)


_MHLA = common.conversion_options("blocks", "block_size", "window")
_RUN = [*options_of(_Run), *_MHLA, *common.HUB]


@with_options(_RUN, *_SECTIONS.values())
def recover_command(
    source: str = argument("SOURCE", "Pipeline of diffusers or model of transformers: directory or Hub id."),
    output: Path = argument("OUTPUT", "Directory to write."),
    *,
    stages: str | None = option(
        f"Stages to run, separated by commas: {', '.join(STAGES)}. Default: those of the recipe.",
        metavar="NAMES",
        panel=_RECIPE,
    ),
    json_file: JsonFile = None,
    quiet: Quiet = False,
    **options: Any,
) -> None:
    """Convert a model and recover the quality of the original.

    The model is calibrated, matched layer by layer and block by block, distilled and fine-tuned, as its recipe says. A
    run that was stopped continues with --resume. OUTPUT becomes a directory for from_pretrained, with a report.

    Examples:

        mhla-hf recover Wan-AI/Wan2.1-T2V-1.3B-Diffusers wan-mhla --data videos/ --recipe wan-1.3b-hybrid
        mhla-hf recover Qwen/Qwen3-0.6B qwen3-mhla --data code/ --keep 25%
    """
    names = None if stages is None else [name.strip() for name in stages.split(",")]
    changes = {
        f"{section}.{name.removeprefix(f'{section}_')}": value
        for section, group in _SECTIONS.items()
        for name, value in given(options, group).items()
    }
    run = given(options, _RUN)
    MHLAConfig.from_dict(given(options, _MHLA))
    recipe, layers, keep, budget, by = (run.get(name) for name in ("recipe", "layers", "keep", "budget", "by"))
    check_arguments(recipe, layers, keep, budget, names, changes, by)

    from ..recovery.recover import recover
    from ..utils.model_cards import CARD

    report = recover(source, output, stages=names, changes=changes, progress=not quiet, **run)
    if os.environ.get("RANK", "0") != "0":
        # Only the first of several processes writes.
        return
    if not (report.output / CARD).exists():
        # A finished run that is resumed keeps its card.
        write_first_card(report.output)
    write_report(json_file, report.to_dict())
    if not quiet:
        _show_recovery(report)


def _show_recovery(report: "RecoveryReport") -> None:
    from ..recovery.report import BESIDE, LABELS, TITLES

    names = dict.fromkeys(name for figures in report.figures.values() for name in figures)
    cells = []
    for state, figures in {**report.figures, **report.beside}.items():
        seconds = report.seconds.get(state, {}).get("cpu_seconds")
        row = {LABELS.get(name, name): _figure(name, figures.get(name)) for name in names}
        row["unchanged"] = report.left_alone(state)
        row["CPU seconds"] = None if seconds is None else f"{seconds:.0f}"
        cells.append({"model": {**TITLES, **BESIDE}[state], **row})
    show_table(cells, title="Held-out quality")
    say(f"Model: {report.output}; figures: {report.output / 'report.json'}")
    for note in report.notes():
        say(f"{note}.")


def _figure(name: str, value: float | None) -> str | None:
    return None if value is None else f"{value:+.1f}" if name.endswith("percent") else f"{value:.4f}"


class _Calibration:
    force: bool = option("Calibrate even if already trained or calibrated.", "--force", default=False)
    overwrite: Overwrite = False
    fit_steps: int = option(
        "Training steps per layer for feature maps and mixing weights; 0 for none.", default=300, min=0
    )


_CALIBRATION = [*common.PROBE_OPTIONS, *options_of(_Calibration)]


@with_options(_CALIBRATION)
def calibrate_command(
    model: Path = argument("MODEL", "Directory that mhla-hf convert wrote."),
    output: Path | None = argument("OUTPUT", "Directory to write. Default: change MODEL in place.", default=None),
    *,
    json_file: JsonFile = None,
    quiet: Quiet = False,
    **options: Any,
) -> None:
    """Fit a converted model to its original, layer by layer.

    Feature maps, mixing weights and the bias of a window learn from a few samples for some seconds; convolutions and
    output projections are solved for in closed form.

    Examples:

        mhla-hf calibrate wan-mhla
        mhla-hf calibrate minilm-mhla --data texts/
    """
    write_report(json_file, run_calibration(model, output, quiet, **given(options, _CALIBRATION)).to_dict())


def run_calibration(model: Path, output: Path | None, quiet: bool, **options: Any) -> "CalibrationReport":
    """Calibrate a directory, write its card and show the errors; options of the function."""
    from ..recovery.calibration import calibrate_directory

    with progress_bars(not quiet) as progress:
        report = calibrate_directory(model, output=output, progress=partial(progress, "calibrating"), **options)
    write_first_card(output or model)
    if quiet:
        return report
    cells = [
        {
            "layer": layer.name,
            "error before": f"{layer.error_before:.4f}",
            "error after": f"{layer.error_after:.4f}",
            "changed": ", ".join(layer.changed) or layer.note,
        }
        for layer in report.layers
    ]
    show_table(cells)
    say(
        f"Wrote {output or model}: held-out error of the layers' outputs {report.error_before:.4f} before, "
        f"{report.error_after:.4f} after, relative to their variance ({report.seconds:.1f} s)."
    )
    return report


@with_options(common.CONVERSION, common.PROBE_OPTIONS)
def select_layers_command(
    source: str = argument("SOURCE", "Directory of a softmax pipeline or model, or Hub id owner/name."),
    *,
    keep: str | None = option(
        "How many layers stay softmax: a number, or a share; 25% without --latency.", metavar="N|N%"
    ),
    latency: str | None = option(
        "Keep as many softmax layers as this share of the softmax model's time allows, such as 80%.", metavar="N%"
    ),
    by: Literal["lookup", "error"] | None = option(
        "Choose by lookup of repeated text, the default for language models, or by error, that for others.",
        metavar="NAME",
    ),
    component: common.Component = None,
    mhla: str | None = option("Options as JSON or a JSON file, as for mhla-hf convert."),
    plot: Path | None = option("Draw a bar chart into this PNG file; needs matplotlib.", dir_okay=False),
    json_file: JsonFile = None,
    quiet: Quiet = False,
    **options: Any,
) -> None:
    """Select the layers that should stay softmax.

    Layers are ranked by the error that calibrated MHLA leaves there, those of language models by how surely their
    heads look up repeated text. The others are printed as mhla-hf convert takes them: --layers 1,2,4.

    Examples:

        mhla-hf select-layers Qwen/Qwen3-0.6B --block-size 128 --data texts/ --keep 25%
    """
    fields = common.mhla_options(mhla, options)
    probe = given(options, common.PROBE_OPTIONS)
    check_shares(keep=keep, latency=latency)
    chosen = {"keep": keep, "latency": latency, "by": by}
    report = run_selection(source, fields, quiet, component=component, probe=probe, **chosen)
    write_report(json_file, report.to_dict())
    if not quiet:
        _show_selection(report)
    typer.echo(f"--layers {report.option}")
    if plot is not None:
        from ..analysis.plots import bars_figure
        from ..utils.figures import save_figure

        by_lookup = report.by == "lookup"
        second = "look-up by its best head" if by_lookup else "model error restored by softmax there"
        rows = {
            layer.index: {"error": layer.error, "restored": max(layer.lookup) if by_lookup else layer.restored or 0.0}
            for layer in report.layers
        }
        names = {"error": "error of the layer", "restored": second}
        save_figure(bars_figure(rows, names, digits=4), plot)


def run_selection(source: str, fields: dict[str, Any], quiet: bool, **options: Any) -> "SelectionReport":
    """Select layers with a progress bar; options of the function."""
    from ..recovery.selection import select_layers_of

    with progress_bars(not quiet) as progress:
        return select_layers_of(source, fields, progress=partial(progress, "selecting layers"), **options)


def _show_selection(report: "SelectionReport") -> None:
    cells = [
        {
            "layer": layer.index,
            "error of the layer": f"{layer.error:.4f}",
            "restored by softmax": None if layer.restored is None else f"{layer.restored:.4f}",
            "look-up of its heads": " ".join(f"{score:.2f}" for score in layer.lookup) or None,
            "softmax ms": f"{layer.softmax_ms:.2f}",
            "MHLA ms": f"{layer.mhla_ms:.2f}",
            "stays": "softmax"
            if layer.kept
            else ", ".join(f"{layer.index}.{each}" for each in layer.kept_groups) or None,
        }
        for layer in report.layers
    ]
    show_table(cells, err=True)
    say(
        f"Error of the model's output: {report.errors[0]:.4f} with every layer MHLA, {report.errors[-1]:.4f} with "
        f"this selection. Time per batch: softmax {report.softmax_ms:.1f} ms, MHLA {report.mhla_ms:.1f} ms, this "
        f"selection {report.chosen_ms:.1f} ms.",
        err=True,
    )
    if report.recall:
        bits = {name: "{:.2f} to {:.2f}".format(*pair) for name, pair in report.recall.items()}
        say(
            "Recall, bits per token of a passage when it comes the first time and again: softmax "
            f"{bits['softmax']}, MHLA {bits['mhla']}, this selection {bits['chosen']}.",
            err=True,
        )


# Training

# Arguments, and what `--quiet` sets.
_WITHOUT_OPTION = ("model", "output", "progress")
# Parts of the help, by the field that begins each.
_PANELS = {
    "model": "Run",
    "train": "Stages",
    "learning_rate": "Optimizer",
    "mixed_precision": "Machine",
    "resume": "Checkpoints",
    "validation_prompts": "Validation",
}


def _options(cls: type, panel: str, family: str | None = None) -> list[inspect.Parameter]:
    """One option per field of an option dataclass; of one family, those that its models have."""
    names = [item.name for item in dataclasses.fields(cls) if family in (None, *option_families(item.name))]
    return options_from(cls, panel, [name for name in names if name not in _WITHOUT_OPTION], panels=_PANELS)


_CONFIG = option("JSON file of options, such as a run's training_config.json; the command line wins.", panel="Run")
_MATCHING = option(
    "Refused: recover matches layers.",
    *MATCHING_FLAGS,
    hidden=True,
    callback=lambda value: refuse_matching(() if value is None else MATCHING_FLAGS),
)
_MODEL = argument("MODEL", "Pipeline, MHLA or ordinary: a directory or a Hub id.", None)


def _training_command(family: str) -> Callable[..., None]:
    """The command that trains models of one family."""

    @with_options(_options(TrainingConfig, "Training", family), _options(CacheConfig, "Data", family))
    def command(
        model: str | None = _MODEL,
        output: str | None = argument(
            "OUTPUT", "Directory of the run: checkpoints, metrics, samples, pipeline.", None
        ),
        *,
        config: Path | None = _CONFIG,
        track_attention: int | None = option(
            "Record rank and entropy of attention every N steps, and warn of failure signatures.", panel="Run", min=1
        ),
        matching: str | None = _MATCHING,
        json_file: JsonFile = None,
        quiet: Quiet = False,
        **options: Any,
    ) -> None:
        run, cache = _read(config, model=model, output=output, progress=False if quiet else None, **options)
        check_options(run, family)
        check_options(cache, family)
        accelerator, source = _open(run, cache, family, model=run.model, output=run.output)

        from ..training.libraries import DiffusionTrainer

        trainer = DiffusionTrainer(run, accelerator=accelerator, source=source)
        if track_attention is not None:
            from ..analysis import AttentionTracker

            trainer.tracker = AttentionTracker(trainer.probe_batch(), every=track_attention)
        result = trainer.run()
        if accelerator.is_main_process:
            for stage, losses in result.losses.items():
                if losses:
                    typer.echo(f"{stage}: loss {losses[0]:.6f} -> {losses[-1]:.6f} in {len(losses)} steps")
            typer.echo(f"pipeline: {result.pipeline}")
            resumed_from = None if result.resumed_from is None else str(result.resumed_from)
            write_report(
                json_file, {"losses": result.losses, "pipeline": str(result.pipeline), "resumed_from": resumed_from}
            )
        accelerator.end_training()

    command.__doc__ = (
        f"Fine-tune {TRAINED[family].title} pipelines by {TRAINED[family].trained_by}.\n\nOn several GPUs: "
        f"accelerate launch -m mhla_hf train {family} MODEL OUTPUT ..."
    )
    return command


@with_options(options_from(TrainingConfig, "Run", ("device",)), _options(CacheConfig, "Data"))
def cache_command(
    model: str | None = _MODEL,
    output: str | None = argument("OUTPUT", "Directory of the cache.", None),
    *,
    config: Path | None = _CONFIG,
    quiet: Quiet = False,
    **options: Any,
) -> None:
    """Encode videos or images and their captions, for training to read.

    A cache that was interrupted continues when the command runs again.
    """
    run, cache = _read(config, model=model, cache=output, progress=False if quiet else None, **options)
    _open(run, cache, None, model=run.model, output=run.cache, data=cache.data)


TRAINING = {**{family: _training_command(family) for family in TRAINED}, "cache": cache_command}
"""The commands of `mhla-hf train`."""


def _open(run: TrainingConfig, cache: CacheConfig, family: str | None, **required: Any) -> tuple[Any, Any]:
    """Open the pipeline of a run of a family, or of its cache alone, and make the cache; return the processes too."""
    for name, value in required.items():
        if value is None:
            raise ValueError(f"{name} must be given")
    check_data(cache.data)

    from ..training.data.latent_cache import make_cache
    from ..training.libraries import check_run, open_pipeline
    from ..training.processes import make_accelerator

    accelerator = make_accelerator(run)
    with accelerator.main_process_first():
        source = open_pipeline(str(run.model), run.component)
        if family is not None:
            if (own := trained_family(source.class_name).name) != family:
                raise ValueError(f"model is a {source.class_name}: use `mhla-hf train {own}`")
            check_run(source, run)
    if cache.data is not None:
        make_cache(run, cache, accelerator, source)
    return accelerator, source


def _read(path: Path | None, **options: Any) -> tuple[TrainingConfig, CacheConfig]:
    """The options of a run and its cache: those of the command line, over those of `--config`."""
    fields = {cls: [item.name for item in dataclasses.fields(cls)] for cls in (TrainingConfig, CacheConfig)}
    values = {} if path is None else read_json(path, "config")
    if not values.get("transfer_steps"):
        # Files of earlier versions have options of matching though there was none.
        values = {name: value for name, value in values.items() if name not in MATCHING}
    refuse_matching(values)
    check_names(f"config {path}", values, sum(fields.values(), []))
    values = {name: value for name, value in values.items() if value is not None}
    values |= {name: value for name, value in options.items() if value is not None and value != []}
    made = (cls(**{name: values[name] for name in names if name in values}) for cls, names in fields.items())
    return tuple(made)  # type: ignore[return-value]
