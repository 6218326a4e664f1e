# SPDX-License-Identifier: Apache-2.0
"""`mhla-hf train`: a command per family of models, and `cache`; their options are fields of the option dataclasses."""

import dataclasses
import inspect
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import typer

from ..training.config import UNCONVERTED, CacheConfig, TrainingConfig
from ..training.families import FAMILIES, check_options, option_families
from ..utils.files import read_json
from ..utils.messages import check_count, check_names
from .options import DIRECTORY, FILE, Quiet, argument, option, options_from, with_options
from .output import JsonFile, write_report
from .share import write_first_card


app = typer.Typer(help="Fine-tune MHLA models.", no_args_is_help=True)

# Arguments, and what `--quiet` sets.
_WITHOUT_OPTION = ("model", "output", "progress")
_METAVARS = {
    "cache": DIRECTORY,
    "teacher": "MODEL",
    "data": "FOLDER",
    "prompts": FILE,
    "mhla": "JSON",
    "buckets": "SIZES",
    "validation_prompts": "TEXT",
    "validation_negative_prompt": "TEXT",
}
_FLAGS = {
    "teacher": "--original",
    "transfer_steps": "--match-steps",
    "transfer_cache": "--match-cache",
    "transfer_learning_rate": "--match-learning-rate",
    "num_samples": "--samples",
    "validation_prompts": "--validation-prompt",
}
# The fields in each part of the help, from this one on.
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
    panels, names = {}, []
    for item in dataclasses.fields(cls):
        panel = _PANELS.get(item.name, panel) if cls is TrainingConfig else panel
        panels[item.name] = panel
        if family in (None, *option_families(item.name)) and item.name not in _WITHOUT_OPTION:
            names.append(item.name)
    return options_from(cls, panel, names, panels=panels, metavars=_METAVARS, flags=_FLAGS)


_CONFIG = option(
    "JSON file of options, such as a run's training_config.json; the command line wins.", metavar=FILE, panel="Run"
)
_MODEL_HELP = "Pipeline, MHLA or ordinary: a directory or a Hub id."


def _training_command(family: str) -> Callable[..., None]:
    """The command that trains models of one family."""

    @with_options(_options(TrainingConfig, "Training", family), _options(CacheConfig, "Data", family))
    def command(
        model: str | None = argument(_MODEL_HELP, default=None),
        output: str | None = argument("Directory of the run: checkpoints, metrics, samples, pipeline.", default=None),
        *,
        config: Path | None = _CONFIG,
        cache_only: bool = option("Stop after the cache step.", "--cache-only", default=False, panel="Data"),
        track_attention: int | None = option(
            "Record rank and entropy of attention every N steps, and warn of failure signatures.",
            metavar="N",
            panel="Run",
            check=partial(check_count, "value"),
        ),
        json_file: JsonFile = None,
        quiet: Quiet = False,
        **options: Any,
    ) -> None:
        run, cache = _read(config, model=model, output=output, progress=False if quiet else None, **options)
        for checked in (run, cache):
            check_options(checked, family)
        if run.model is None or (run.output is None and not (cache_only and run.cache is not None)):
            raise ValueError(f"{'model' if run.model is None else 'output'} must be given")
        _train(family, run, cache, cache_only, json_file, track_attention)

    script = f"accelerate launch conversion/train_{family}.py MODEL OUTPUT ..."
    command.__doc__ = f"{FAMILIES[family].help}\n\nOn several GPUs: {script}"
    return command


def _train(
    family: str,
    config: TrainingConfig,
    cache_config: CacheConfig,
    cache_only: bool,
    json_file: Path | None,
    track_every: int | None,
) -> None:
    from ..training.data.cache import make_cache
    from ..training.loading import PipelineSource
    from ..training.processes import make_accelerator

    accelerator, source = make_accelerator(config), None
    if config.model is not None:
        with accelerator.main_process_first():
            source = PipelineSource.find(config.model, config.component, config.teacher)
            source.check_family(family)
            if not cache_only:
                source.check_run(config)
    if cache_config.data is not None:
        make_cache(config, cache_config, accelerator, source)
    if cache_only:
        return

    from ..training.trainer import DiffusionTrainer

    trainer = DiffusionTrainer(config, accelerator=accelerator, source=source)
    if track_every is not None:
        from ..analysis import AttentionTracker

        trainer.tracker = AttentionTracker(trainer.probe_batch(), every=track_every)
    result = trainer.run()
    if accelerator.is_main_process:
        for stage, losses in result.losses.items():
            if losses:
                typer.echo(f"{stage}: loss {losses[0]:.6f} -> {losses[-1]:.6f} in {len(losses)} steps")
        typer.echo(f"pipeline: {result.pipeline}")
        resumed_from = None if result.resumed_from is None else str(result.resumed_from)
        figures = {"losses": result.losses, "seconds_per_step": result.seconds_per_step}
        write_report(json_file, {**figures, "pipeline": str(result.pipeline), "resumed_from": resumed_from})
        if config.mhla != UNCONVERTED and result.pipeline is not None:
            write_first_card(result.pipeline)
    accelerator.end_training()


COMMANDS = {family: _training_command(family) for family in FAMILIES}
"""The commands by the name of their family."""


@with_options(
    options_from(TrainingConfig, "Run", ("device", "startup_timeout"), metavars=_METAVARS),
    _options(CacheConfig, "Data"),
)
def cache_command(
    model: str | None = argument(_MODEL_HELP, default=None),
    output: str | None = argument("Directory of the cache.", default=None),
    *,
    config: Path | None = _CONFIG,
    quiet: Quiet = False,
    **options: Any,
) -> None:
    """Encode videos or images and their captions, for training to read.

    A cache that was interrupted continues when the command runs again.
    """
    run, cache = _read(config, model=model, cache=output, progress=False if quiet else None, **options)
    for name, value in {"model": run.model, "output": run.cache, "data": cache.data}.items():
        if value is None:
            raise ValueError(f"{name} must be given")

    from ..training.data.cache import make_cache
    from ..training.processes import make_accelerator

    make_cache(run, cache, make_accelerator(run))


for _family, _command in COMMANDS.items():
    app.command(_family)(_command)
app.command("cache")(cache_command)


def _read(path: Path | None, **options: Any) -> tuple[TrainingConfig, CacheConfig]:
    """The options of a run and its cache: those of the command line, over those of `--config`."""
    fields = {cls: [item.name for item in dataclasses.fields(cls)] for cls in (TrainingConfig, CacheConfig)}
    values = {} if path is None else read_json(path, "config")
    check_names(f"config {path}", values, sum(fields.values(), []))
    values = {name: value for name, value in values.items() if value is not None}
    values |= {name: value for name, value in options.items() if value is not None and value != []}
    made = (cls(**{name: values[name] for name in names if name in values}) for cls, names in fields.items())
    return tuple(made)  # type: ignore[return-value]
