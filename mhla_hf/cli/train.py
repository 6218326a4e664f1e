# SPDX-License-Identifier: Apache-2.0
"""`mhla-hf train`: a command per family of models, and `cache`; their options are fields of the option dataclasses."""

import dataclasses
import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ..training.config import CacheConfig, TrainingConfig
from ..training.families import FAMILIES, check_options, option_families
from ..utils.json_files import read_json
from .options import OPTIONS, mhla_fields, option_parameters


if TYPE_CHECKING:
    from ..training.data.folders import DataSample
    from ..training.loading import PipelineSource

app = typer.Typer(help="Fine-tune MHLA models.", no_args_is_help=True)

_TYPES: dict[str, Any] = {"bool": bool, "int": int, "float": float, "tuple": list[str]}
_NAMES = {"validation_prompts": "--validation-prompt"}


def _parameter(name: str, kind: Any, help: str, panel: str) -> inspect.Parameter:
    """A keyword parameter that typer reads as an option without a default: None says that it was not given."""
    declaration = _NAMES.get(name, f"--{name.replace('_', '-')}")
    if kind is bool:
        declaration = f"{declaration}/--no-{name.replace('_', '-')}"
    option = typer.Option(None, declaration, help=help, rich_help_panel=panel)
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=option, annotation=kind | None)


def _parameters(cls: type, panel: str, family: str | None = None) -> list[inspect.Parameter]:
    """One option per field of an option dataclass; of one family, those that its models have."""
    parameters = []
    for item in dataclasses.fields(cls):
        if family is not None and family not in option_families(item.name):
            continue
        kind = next((kind for prefix, kind in _TYPES.items() if str(item.type).startswith(prefix)), str)
        text = item.metadata["help"]
        if "choices" in item.metadata:
            text += f" One of: {', '.join(item.metadata['choices'])}."
        if item.default not in (None, ()):
            text += f" Default: {json.dumps(item.default)}."
        parameters.append(_parameter(item.name, kind, text, panel))
    return parameters


def _with_options(*parameters: inspect.Parameter) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Gives a function that takes keyword options the signature that typer makes a command from."""

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        function.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        function.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return function

    return decorate


_CONFIG = _parameter(
    "config", Path, "JSON file of options, such as a run's training_config.json; the command line wins.", "Run"
)


def _training_command(family: str) -> Callable[..., None]:
    """The command that trains models of one family."""

    @_with_options(
        *_parameters(TrainingConfig, "Training", family),
        *option_parameters("Conversion on load"),
        *_parameters(CacheConfig, "Data", family),
        _CONFIG,
        _parameter("cache_only", bool, "Stop after the cache step.", "Data"),
    )
    def command(**options: Any) -> None:
        given = _given(options)
        cache_only = given.pop("cache_only", False)
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
        _train(family, config, cache_config, cache_only, source)

    script = f"accelerate launch conversion/train_{family}.py ..."
    command.__doc__ = f"{FAMILIES[family].help}\n\nLaunch it with `{script}` for several processes."
    return command


def _train(
    family: str,
    config: TrainingConfig,
    cache_config: CacheConfig,
    cache_only: bool,
    source: "PipelineSource | None",
) -> None:
    from ..training.data.cache_building import make_cache
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
        make_cache(config, cache_config, accelerator, _digit_videos, source)
    if cache_only:
        return

    from ..training.trainer import DiffusionTrainer

    result = DiffusionTrainer(config, accelerator=accelerator, source=source).run()
    if accelerator.is_main_process:
        for stage, losses in result.losses.items():
            if losses:
                typer.echo(f"{stage}: loss {losses[0]:.6f} -> {losses[-1]:.6f} in {len(losses)} steps")
        typer.echo(f"pipeline: {result.pipeline}")
    accelerator.end_training()


COMMANDS = {family: _training_command(family) for family in FAMILIES}
"""The commands by the name of their family."""


@_with_options(
    *(
        parameter
        for parameter in _parameters(TrainingConfig, "Run")
        if parameter.name in ("model", "cache", "device", "startup_timeout", "progress")
    ),
    *_parameters(CacheConfig, "Data"),
    _CONFIG,
)
def cache_command(**options: Any) -> None:
    """Encode videos or images and their captions once, for training to read. Can be interrupted and run again."""
    cache_options, training_options = _split(_given(options))
    config, cache_config = TrainingConfig(**training_options), CacheConfig(**cache_options)
    if config.cache is None:
        raise ValueError("cache must be given: the directory to write")
    if cache_config.data is None:
        raise ValueError("data must be given: a folder of videos or images, or 'digits'")

    from ..training.data.cache_building import make_cache
    from ..training.processes import make_accelerator

    make_cache(config, cache_config, make_accelerator(config), _digit_videos)


for _family, _command in COMMANDS.items():
    app.command(_family)(_command)
app.command("cache")(cache_command)


def _given(options: dict[str, Any]) -> dict[str, Any]:
    """The options on the command line, over those of `--config`."""
    given = {name: value for name, value in options.items() if value is not None and value != []}
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
    from ..config import MHLAConfig
    from ..conversion.options import parse_layers
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


def _digit_videos(config: CacheConfig) -> "list[DataSample]":
    """The videos of the demo, in the size that the options ask for."""
    from ..training.data.digits import MovingDigits, MovingDigitsConfig
    from ..training.data.folders import DataSample

    assert config.num_frames is not None and config.height is not None and config.num_samples is not None
    appearance = MovingDigitsConfig(
        num_frames=config.num_frames, size=config.height, digit_size=max(8, round(config.height * 28 / 64))
    )
    videos = MovingDigits("train", config.num_samples, config=appearance)

    def sample(index: int) -> DataSample:
        return DataSample(f"digits:{index}", videos[index].caption, lambda: videos[index].tensor())

    return [sample(index) for index in range(len(videos))]
