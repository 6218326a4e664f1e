# SPDX-License-Identifier: Apache-2.0
"""Options of commands: made from the fields of dataclasses, or declared in one line each."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import typer

from ..config import MHLAConfig
from ..utils.locations import check_data, check_exists, check_source
from ..utils.options import DEVICE_HELP


DTYPES = ("float32", "bfloat16", "float16")
BLOCKS, WEIGHTS, PROBE, ADVANCED = "Blocks", "Weights", "Probe", "Advanced"
"""Panels of the help that several commands have."""

_SAMPLES = "Samples of a pipeline"
_GRID = "Default: that of the grid that the blocks are for."
_TYPES: dict[str, Any] = {"bool": bool, "int": int, "float": float, "tuple[str": list[str]}
# Names of fields on the command line.
_NAMES = {"teacher": "original", "base": "original", "num_samples": "samples"}


def option(help: str, *names: str, default: Any = None, panel: str | None = None, **settings: Any) -> Any:
    """Declare an option of a command, as the default of its parameter.

    Args:
        help: Its line of `--help`.
        names: Its names on the command line, if not the parameter's.
        default: Value if it is not given.
        panel: Its part of the help.
        settings: More arguments of `typer.Option`.
    """
    return typer.Option(default, *names, help=help, rich_help_panel=panel, **settings)


def argument(name: str, help: str, default: Any = ..., check: Callable[[Any, str], Any] = check_source) -> Any:
    """Declare a positional argument of a command, which is required unless it has a default.

    Args:
        name: Its name in the help. What `SOURCE`, `MODEL` and `LORA` name must exist, which is checked before anything
            heavy is imported.
        help: Its help.
        default: Value if it is not given.
        check: Checks a text that need not be a path; gets the text, and its name for errors.
    """

    def checked(value: Any) -> Any:
        if name in ("SOURCE", "MODEL", "LORA") and value is not None:
            (check_exists if isinstance(value, Path) else check)(value, name.lower())
        return value

    return typer.Argument(default, metavar=name, help=help, callback=checked)


def listed(names: Iterable[str]) -> str:
    """Join names for a sentence: `"a, b or c"`."""
    *first, last = names
    return f"{', '.join(first)} or {last}" if first else last


def options_from(
    cls: type,
    panel: str | None = None,
    names: Iterable[str] | None = None,
    *,
    prefix: str = "",
    panels: Mapping[str, str] | None = None,
    default: bool = True,
    **more: Any,
) -> list[inspect.Parameter]:
    """Make one option per field of a dataclass; `None` as its value means that it was not given.

    Args:
        cls: The dataclass; `metadata` of its fields has `help`, and `choices` and limits of values.
        panel: Part of the help.
        names: The fields, in their order there; by default all.
        prefix: What precedes the field's name in that of the option.
        panels: Further parts of the help, by the first field of each.
        default: Whether the help names defaults.
        more: Arguments of every option; see [`option`].
    """
    parameters = {}
    for item in dataclasses.fields(cls):
        rules, written = item.metadata, str(item.type)
        panel = (panels or {}).get(item.name, panel)
        kind = next((kind for start, kind in _TYPES.items() if written.startswith(start)), str)
        # An option that may be repeated takes one value at a time.
        called = item.name.removesuffix("s") if kind == list[str] else item.name
        if written == "bool" and item.default:
            called = f"{called}/--no-{called}"
        settings = {"metavar": "F,H,W"} if written.startswith("tuple[int") else {}
        if "choices" in rules:
            kind, settings = Literal[rules["choices"]], {"metavar": "NAME"}
        flag = f"--{prefix}{_NAMES.get(called, called)}".replace("_", "-")
        own_panel = ADVANCED if rules["advanced"] else panel
        setting = option(_field_help(item, default), flag, panel=own_panel, **settings, **more)
        keyword = inspect.Parameter.KEYWORD_ONLY
        parameter = inspect.Parameter(f"{prefix}{item.name}", keyword, default=setting, annotation=kind | None)
        parameters[item.name] = parameter
    return [parameters[name] for name in (parameters if names is None else names)]


def _field_help(item: dataclasses.Field, default: bool) -> str:
    """The help of an option made from a field: its text, choices and, where wanted, its default."""
    choices = item.metadata.get("choices", ())
    text, mark, rest = item.metadata["help"].partition(" Default:")
    if not all(choice in text for choice in choices):
        text += f" One of: {', '.join(choices)}."
    if default and item.default not in (None, False, (), ""):
        rest, mark = f" {item.default if isinstance(item.default, str) else json.dumps(item.default)}.", " Default:"
    return text + mark + rest


def with_options(*groups: Iterable[inspect.Parameter]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command groups of options in place of its `**` parameter.

    Args:
        groups: The options.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        *own, _ = inspect.signature(command).parameters.values()
        parameters = [*own, *(parameter for group in groups for parameter in group)]
        # Panels are shown in the order of their first options.
        parameters.sort(key=lambda parameter: getattr(parameter.default, "rich_help_panel", None) == ADVANCED)
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return command

    return decorate


def options_of(cls: type) -> list[inspect.Parameter]:
    """The options that a class declares: annotated attributes whose values are made by [`option`]."""
    kinds = get_type_hints(cls, include_extras=True)
    keyword = inspect.Parameter.KEYWORD_ONLY
    return [inspect.Parameter(name, keyword, default=getattr(cls, name), annotation=kinds[name]) for name in kinds]


def given(options: Mapping[str, Any], group: Iterable[inspect.Parameter]) -> dict[str, Any]:
    """The options of a group that are given on the command line; axes become tuples.

    Args:
        options: Values of the command's parameters.
        group: The options.
    """
    values = {parameter.name: options.get(parameter.name) for parameter in group}
    return {
        name: _parse_axes(value, name) if name in AXES else value
        for name, value in values.items()
        if value is not None and value != []
    }


def mhla_options(text: str | None, options: Mapping[str, Any]) -> dict[str, Any]:
    """MHLA options from `--mhla` over those from single options, checked before anything heavy is imported.

    Args:
        text: JSON of options, or of options by component or tower, where `null` keeps a component as it is; also the
            name of a file of such JSON.
        options: Values of a command's parameters.

    Returns:
        Options, or options by component.

    Raises:
        ValueError: If the text is neither JSON of an object nor the name of a file of it, or an option is wrong.
    """
    from ..config import merge_options
    from ..utils.files import check_fields, parse_json, read_json

    fields = given(options, CONVERSION)
    MHLAConfig.from_dict(fields)
    if text is None:
        return fields
    if text.lstrip().startswith(("{", "[")):
        content = check_fields(parse_json(text, "--mhla"), "--mhla")
    else:
        content = read_json(Path(text).expanduser(), "the file of --mhla")
    by_component = {name: value for name, value in content.items() if isinstance(value, dict)}
    if not by_component:
        return merge_options(fields, content)
    return {**content, **{name: merge_options(fields, value) for name, value in by_component.items()}}


def _parse_axes(text: str, name: str) -> tuple[int, ...]:
    """Read `"3,5,10"` or `"3x5x10"` as one integer per axis.

    Raises:
        ValueError: If it is not integers.
    """
    try:
        return tuple(map(int, re.split("[,x]", text)))
    except ValueError:
        raise ValueError(f"{name}={text:.100} must be positive integers such as 3,5,10.") from None


Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print no progress and no summary.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the output directory if it exists.")]
Seed = Annotated[int, typer.Option(help="Seed of all random numbers.")]
Device = Annotated[str, typer.Option(help=DEVICE_HELP)]
Component = Annotated[
    str | None, typer.Option(help="The transformer, in pipelines that have several, such as transformer_2.")
]
Layers = Annotated[
    str | None,
    typer.Option(
        help="Layers that become MHLA: all, indices such as 1,2,4, a fraction such as 2/3, or auto:2/3, which keeps "
        "those softmax that matter most. Of language models also groups of heads: 4.0,4.2.",
        rich_help_panel=BLOCKS,
    ),
]
Dtype = Annotated[
    Literal["float32", "bfloat16", "float16", "fp32", "bf16", "fp16"] | None,
    typer.Option(
        help=f"Cast the weights to {listed(DTYPES)}. Default: keep their types.",
        metavar="NAME",
        rich_help_panel=WEIGHTS,
    ),
]


class _Hub:
    revision: str | None = option("Branch, tag or commit.", panel="Hub")
    token: str | None = option("Access token. Default: that of hf auth login.", panel="Hub")
    cache_dir: str | None = option("Cache folder for downloads.", panel="Hub")


class _Sizes:
    height: int | None = option(f"Height in pixels. {_GRID}", panel=_SAMPLES)
    width: int | None = option(f"Width in pixels. {_GRID}", panel=_SAMPLES)
    num_frames: int | None = option("Frames of a video. Default: those of the model's token grid.", panel=_SAMPLES)
    steps: int | None = option("Denoising steps of a sample. Default: 8.", panel=_SAMPLES)


class _Probe:
    data: str | None = option(
        "Texts (a folder, a JSONL file, a data set's id), images (a folder or digits), or the cache of a training. "
        "Pipelines need none: they generate samples.",
        panel=PROBE,
        callback=check_data,
    )
    samples: int | None = option("Number of samples. Default: 32.", panel=PROBE)
    batch_size: int | None = option("Batch size for --data. Default: 4.", panel=PROBE)
    seed: Seed = 0
    device: Device = "auto"
    prompts: list[str] | None = option("Prompt of a sample; may be repeated.", "--prompt", panel=_SAMPLES)


HUB, SIZES, PROBE_OPTIONS = options_of(_Hub), options_of(_Sizes), [*options_of(_Probe), *options_of(_Sizes)]
"""Options of sources on the Hub, of the samples that a pipeline makes, and of the samples for calibration."""

AXES = ("blocks", "block_size", "grid", "window_size")
"""Options of numbers along the axes of the token grid."""


def conversion_options(*names: str) -> list[inspect.Parameter]:
    """The options of `MHLAConfig` with these names."""
    layout = [name for name in names if name in AXES[:3]]
    operator = [name for name in names if name not in layout]
    return [
        *options_from(MHLAConfig, BLOCKS, layout, default=False),
        *options_from(MHLAConfig, "Operator", operator, default=False),
    ]


CONVERSION = conversion_options(
    "blocks", "block_size", "grid", "feature_map", "rope", "normalizer", "mixing_init", "mixing_heads",
    "mixing_constraint", "mixing_range", "mixing_storage", "mixing_tail", "mixing_tail_half_life", "output_norm",
    "output_gate", "lepe_kernel", "window", "window_size", "window_share", "sink_tokens", "text",
)  # fmt: skip
"""Options of a conversion."""
