# SPDX-License-Identifier: Apache-2.0
"""`mhla-hf train`: a command per family of models, and `cache`; their options are fields of the option dataclasses."""

import dataclasses
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ..training.config import UNCONVERTED, CacheConfig, TrainingConfig
from ..training.families import FAMILIES, check_options, option_families
from ..utils.json_files import read_json
from .card import write_first_card
from .help import DIRECTORY, FILE
from .options import OPTIONS, completion, field_help, mhla_fields, option_parameters
from .output import JsonFile, write_report


if TYPE_CHECKING:
    from ..training.loading import PipelineSource

app = typer.Typer(help="Fine-tune MHLA models.", no_args_is_help=True)

_TYPES: dict[str, Any] = {"bool": bool, "int": int, "float": float, "tuple": list[str]}
_NAMES = {"validation_prompts": "--validation-prompt"}


_METAVARS = {
    **dict.fromkeys(("output", "cache"), DIRECTORY),
    **dict.fromkeys(("model", "teacher"), "MODEL"),
    "data": "FOLDER",
    "prompts": FILE,
    "mhla": "JSON",
    "buckets": "SIZES",
    "validation_prompts": "TEXT",
    "validation_negative_prompt": "TEXT",
}
# The first field of each part of the help.
_PANELS = {
    "model": "Run",
    "train": "Stages",
    "learning_rate": "Optimizer",
    "ema_decay": "Averaged weights",
    "flow_shift": "Noise levels",
    "mixed_precision": "Machine",
    "resume": "Checkpoints",
    "validation_prompts": "Validation",
    "startup_timeout": "Machine",
}
_NEGATION = "no_"


def _parameter(name: str, kind: Any, help: str, panel: str, **settings: Any) -> inspect.Parameter:
    """A keyword parameter that typer reads as an option without a default: None says that it was not given."""
    declaration = _NAMES.get(name, f"--{name.replace('_', '-')}")
    option = typer.Option(None, declaration, help=help, rich_help_panel=panel, **settings)
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=option, annotation=kind | None)


def _parameters(cls: type, panel: str, family: str | None = None) -> list[inspect.Parameter]:
    """One option per field of an option dataclass; of one family, those that its models have."""
    parameters = []
    for item in dataclasses.fields(cls):
        if cls is TrainingConfig and family is not None:
            panel = _PANELS.get(item.name, panel)
        if family is not None and family not in option_families(item.name):
            continue
        kind = next((kind for prefix, kind in _TYPES.items() if str(item.type).startswith(prefix)), str)
        settings: dict[str, Any] = {"metavar": _METAVARS.get(item.name)}
        if "choices" in item.metadata:
            settings = {"metavar": "NAME", "autocompletion": completion(item.metadata["choices"])}
        parameters.append(_parameter(item.name, kind, field_help(item), panel, **settings))
        if kind is bool:
            # An option of its own: beside it, the longest of them would leave the help no room.
            parameters.append(_negation(item.name, panel))
    return parameters


def _negation(name: str, panel: str) -> inspect.Parameter:
    shown = name.replace("_", "-")
    return _parameter(f"{_NEGATION}{name}", bool, f"Switch --{shown} off.", panel)


def _with_options(*parameters: inspect.Parameter) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Gives a function that takes keyword options the signature that typer makes a command from."""

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        function.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        function.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return function

    return decorate


_CONFIG = _parameter(
    "config",
    Path,
    "JSON file of options, such as a run's training_config.json; the command line wins.",
    "Run",
    metavar=FILE,
)
_TRACK = _parameter(
    "track_attention",
    int,
    "Record rank and entropy of attention every so many steps, and warn of failure signatures.",
    "Run",
    metavar="STEPS",
)
_JSON = inspect.Parameter("json_file", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=JsonFile)


def _training_command(family: str) -> Callable[..., None]:
    """The command that trains models of one family."""

    @_with_options(
        *_parameters(TrainingConfig, "Training", family),
        *option_parameters("Conversion on load"),
        *_parameters(CacheConfig, "Data", family),
        _parameter("cache_only", bool, "Stop after the cache step.", "Data"),
        _negation("cache_only", "Data"),
        _TRACK,
        _CONFIG,
        _JSON,
    )
    def command(json_file: Path | None, **options: Any) -> None:
        given = _given(options)
        cache_only = given.pop("cache_only", False)
        track_every = given.pop("track_attention", None)
        if track_every is not None and track_every < 1:
            raise ValueError(f"track_attention={track_every} must be a number of steps, at least 1.")
        shortcuts = {name: given.pop(name) for name in OPTIONS if name in given}
        cache_options, training_options = _split(given)
        source = None
        if shortcuts:
            source, training_options["mhla"] = _mhla_options(training_options, shortcuts)
        config, cache_config = TrainingConfig(**training_options), CacheConfig(**cache_options)
        for checked in (config, cache_config):
            check_options(checked, family)
        if config.output is None and not (cache_only and config.cache is not None):
            raise ValueError("output must be given: the directory of the run")
        _train(family, config, cache_config, cache_only, source, json_file, track_every)

    script = f"accelerate launch conversion/train_{family}.py ..."
    command.__doc__ = f"{FAMILIES[family].help}\n\nOn several GPUs: {script}"
    return command


def _train(
    family: str,
    config: TrainingConfig,
    cache_config: CacheConfig,
    cache_only: bool,
    source: "PipelineSource | None",
    json_file: Path | None,
    track_every: int | None,
) -> None:
    from ..training.data.cache import make_cache
    from ..training.loading import PipelineSource
    from ..training.processes import make_accelerator

    accelerator = make_accelerator(config)
    if config.model is not None:
        with accelerator.main_process_first():
            source = source or PipelineSource.find(config.model, config.component, config.teacher)
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


@_with_options(
    *(
        parameter
        for parameter in _parameters(TrainingConfig, "Run")
        if parameter.name in ("model", "cache", "device", "startup_timeout", "progress", "no_progress")
    ),
    *_parameters(CacheConfig, "Data"),
    _CONFIG,
)
def cache_command(**options: Any) -> None:
    """Encode videos or images and their captions, for training to read.

    A cache that was interrupted continues when the command runs again.
    """
    cache_options, training_options = _split(_given(options))
    config, cache_config = TrainingConfig(**training_options), CacheConfig(**cache_options)
    if config.cache is None:
        raise ValueError("cache must be given: the directory to write")
    if cache_config.data is None:
        raise ValueError("data must be given: a folder of videos or images, or 'digits'")

    from ..training.data.cache import make_cache
    from ..training.processes import make_accelerator

    make_cache(config, cache_config, make_accelerator(config))


for _family, _command in COMMANDS.items():
    app.command(_family)(_command)
app.command("cache")(cache_command)


def _given(options: dict[str, Any]) -> dict[str, Any]:
    """The options on the command line, over those of `--config`."""
    given = {name: value for name, value in options.items() if value is not None and value != []}
    for name in [name for name in given if name.startswith(_NEGATION)]:
        positive = name.removeprefix(_NEGATION)
        if given.pop(name) and given.setdefault(positive, False):
            raise ValueError(f"{positive} and {name} are both given; give one of them")
    path = given.pop("config", None)
    if path is None:
        return given
    stored = read_json(Path(path), "config")
    unknown = sorted(set(stored) - {item.name for cls in (TrainingConfig, CacheConfig) for item in _fields(cls)})
    if unknown:
        names = f"{', '.join(unknown[:10])}{', ...' if len(unknown) > 10 else ''}"
        raise ValueError(f"config {path} has unknown options: {names:.200}")
    return {**{name: value for name, value in stored.items() if value is not None}, **given}


def _fields(cls: Any) -> tuple[dataclasses.Field, ...]:
    return dataclasses.fields(cls)


def _split(given: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Divides options into those of the cache and those of the training."""
    names = {item.name for item in _fields(CacheConfig)}
    cache = {name: value for name, value in given.items() if name in names}
    return cache, {name: value for name, value in given.items() if name not in names}


def _mhla_options(
    training: dict[str, Any], shortcuts: dict[str, Any]
) -> tuple["PipelineSource | None", dict[str, Any]]:
    """MHLA options from the shortcuts `--blocks`, `--layers`, ..., and the pipeline if its layers were counted."""
    from ..config import MHLAConfig, parse_layers
    from ..training.loading import PipelineSource

    if "mhla" in training:
        raise ValueError(f"mhla cannot be combined with {', '.join(shortcuts)}: give all options in one way")
    if "model" not in training:
        raise ValueError("model must be given: a pipeline directory or a Hub id")
    source, values = None, mhla_fields(shortcuts)
    if "layers" in shortcuts:
        source = PipelineSource.find(
            training["model"], training.get("component", "transformer"), training.get("teacher")
        )
        values["layers"] = parse_layers(shortcuts["layers"], source.model.config["num_layers"])
    # Models have defaults of their own for what was not given.
    return source, MHLAConfig.from_dict(values).given_options()
