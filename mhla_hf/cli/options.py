# SPDX-License-Identifier: Apache-2.0
"""Options of commands: made from the fields of dataclasses, or declared in one line each."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from ..config import MHLAConfig
from ..utils.messages import check_choice
from ..utils.options import DEVICE_HELP, check_option


FILE, DIRECTORY = "FILE", "DIRECTORY"
"""What stands for paths in the help of options."""

DTYPES = ("float32", "bfloat16", "float16")
BLOCKS, OPERATOR, WEIGHTS, PROBE, ADVANCED = "Blocks", "Operator", "Weights", "Probe", "Advanced"
"""Panels of the help that several commands have."""

_DEVICES = ("auto", "cpu", "cuda")
_SAMPLES = "Samples of a pipeline"
_GRID = "Default: that of the grid that the blocks are for."
_TYPES: dict[str, Any] = {"bool": bool, "int": int, "float": float, "tuple[str": list[str]}
# Of fields: what the command line calls them, where the value of others is a path or a text of another form.
_NAMES = {"teacher": "original", "base": "original", "num_samples": "samples"}
_METAVARS = {
    "cache": DIRECTORY,
    "base": DIRECTORY,
    "validation_negative_prompt": "TEXT",
    "teacher": "MODEL",
    "data": "FOLDER",
    "prompts": FILE,
    "mhla": "JSON",
    "sizes": "SIZES",
}


def completion(values: Iterable[str] | Callable[[], Iterable[str]]) -> Callable[[str], list[str]]:
    """Complete the value of an option in a shell, after a comma the last one of several.

    Args:
        values: The values, or a function that finds them.
    """

    def complete(incomplete: str) -> list[str]:
        before, comma, start = incomplete.rpartition(",")
        found = values() if callable(values) else values
        return [f"{before}{comma}{value}" for value in found if value.startswith(start)]

    return complete


def option(
    help: str,
    *names: str,
    default: Any = None,
    panel: str | None = None,
    choices: Iterable[str] = (),
    values: Iterable[str] | Callable[[], Iterable[str]] = (),
    check: Callable[[Any], Any] | None = None,
    **settings: Any,
) -> Any:
    """Declare an option of a command, as the default of its parameter.

    Args:
        help: Its line of `--help`.
        names: Its names on the command line, if not the parameter's.
        default: Value if it is not given.
        panel: Its part of the help.
        choices: The only values; a shell completes them.
        values: Values that a shell completes, among others.
        check: Called with a value that is given; raises `ValueError` for a wrong one.
        settings: More arguments of `typer.Option`.
    """

    def callback(value: Any) -> Any:
        try:
            if value is not None and check is not None:
                check(value)
            elif value is not None:
                check_choice("value", value, choices)
        except ValueError as error:
            # Typer names the option itself.
            raise typer.BadParameter(re.sub(r"^\w+[= ]", "", str(error))) from None
        return value

    if choices or values:
        settings = {"metavar": "NAME", "autocompletion": completion(values or choices), **settings}
    if choices or check:
        settings["callback"] = callback
    return typer.Option(default, *names, help=help, rich_help_panel=panel, **settings)


def argument(help: str, **settings: Any) -> Any:
    """Declare a positional argument of a command, which is required unless `settings` has its `default`."""
    return typer.Argument(settings.pop("default", ...), help=help, **settings)


def listed(names: Iterable[str]) -> str:
    """Join names for a sentence: `"a, b or c"`."""
    *first, last = names
    return f"{', '.join(first)} or {last}" if first else last


def field_help(item: dataclasses.Field, *, default: bool = True) -> str:
    """The help of an option made from a field: its text, values and default.

    Args:
        item: The field.
        default: Whether its default is named.
    """
    choices = item.metadata.get("choices", ())
    text, mark, rest = item.metadata["help"].partition(" Default:")
    if not all(choice in text for choice in choices):
        text += f" One of: {', '.join(choices)}."
    if default and item.default not in (None, False, (), ""):
        rest, mark = f" {item.default if isinstance(item.default, str) else json.dumps(item.default)}.", " Default:"
    return text + mark + rest


def options_from(
    cls: type,
    panel: str | None = None,
    names: Iterable[str] | None = None,
    *,
    prefix: str = "",
    panels: Mapping[str, str] | None = None,
    default: bool = True,
) -> list[inspect.Parameter]:
    """Make one option per field of a dataclass; `None` as its value means that it was not given.

    Args:
        cls: The dataclass; `metadata` of its fields has `help`, and `choices` and limits of values.
        panel: Part of the help.
        names: The fields, in their order there; by default all.
        prefix: What precedes the field's name in that of the option.
        panels: Further parts of the help, by the first field of each.
        default: Whether the help names defaults.
    """
    parameters = {}
    for item in dataclasses.fields(cls):
        rules, written = item.metadata, str(item.type)
        panel = (panels or {}).get(item.name, panel)
        kind = next((kind for start, kind in _TYPES.items() if written.startswith(start)), str)
        metavar = "F,H,W" if written.startswith("tuple[int") else _METAVARS.get(item.name)
        metavar = "NAME" if "choices" in rules else "TEXT" if kind == list[str] else metavar
        # An option that may be repeated takes one value at a time.
        called = item.name.removesuffix("s") if kind == list[str] else item.name.replace("transfer_", "match_")
        if written == "bool" and item.default:
            called = f"{called}/--no-{called}"
        setting = option(
            field_help(item, default=default),
            f"--{prefix}{_NAMES.get(called, called)}".replace("_", "-"),
            panel=ADVANCED if rules.get("advanced") else panel,
            choices=rules.get("choices", ()),
            values=rules.get("values", ()),
            check=partial(check_option, item) if "choices" in rules or kind in (int, float) else None,
            **({"metavar": metavar} if metavar else {}),
        )
        name = f"{prefix}{item.name}"
        keyword = inspect.Parameter.KEYWORD_ONLY
        parameters[item.name] = inspect.Parameter(name, keyword, default=setting, annotation=kind | None)
    return [parameters[name] for name in (parameters if names is None else names)]


def with_options(*groups: Iterable[inspect.Parameter]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command groups of options in place of its `**` parameter.

    Args:
        groups: The options.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(command).parameters.values()
        added = [parameter for group in groups for parameter in group]
        arguments = [parameter for parameter in own if parameter.kind == inspect.Parameter.POSITIONAL_OR_KEYWORD]
        options = [parameter for parameter in own if parameter.kind == inspect.Parameter.KEYWORD_ONLY]
        parameters = arguments + sorted(added + options, key=_is_advanced)
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return command

    return decorate


def _is_advanced(parameter: inspect.Parameter) -> bool:
    return getattr(parameter.default, "rich_help_panel", None) == ADVANCED


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
        name: parse_axes(value, name) if name in AXES else value
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
    from ..models.options import merge_options
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


def parse_axes(text: str, name: str) -> tuple[int, ...]:
    """Read `"3,5,10"` or `"3x5x10"` as one positive integer per axis.

    Args:
        text: Value of the option.
        name: Name of the option, for the error.

    Raises:
        ValueError: If it is not one to three positive integers.
    """
    parts = [part.strip() for part in re.split("[,x]", text)]
    # Python refuses to convert thousands of digits.
    if len(parts) > 3 or not all(part.isdecimal() and len(part) < 10 and int(part) for part in parts):
        raise ValueError(f"{name}={text:.100} must be one to three positive integers such as 3,5,10.")
    return tuple(map(int, parts))


Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print no progress and no summary.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the output directory if it exists.")]
Seed = Annotated[int, option("Seed of all random numbers.", default=...)]
Device = Annotated[str, option(DEVICE_HELP, default=..., values=_DEVICES)]
Component = Annotated[
    str | None,
    option(
        "The transformer, in pipelines that have several, such as transformer_2.",
        default=...,
        values=("transformer", "transformer_2"),
    ),
]


class _Hub:
    revision: str | None = option("Branch, tag or commit.", metavar="NAME", panel="Hub")
    token: str | None = option("Access token. Default: that of hf auth login.", metavar="TEXT", panel="Hub")
    cache_dir: str | None = option("Cache folder for downloads.", metavar=DIRECTORY, panel="Hub")


class _Sizes:
    height: int | None = option(f"Height in pixels. {_GRID}", panel=_SAMPLES)
    width: int | None = option(f"Width in pixels. {_GRID}", panel=_SAMPLES)
    num_frames: int | None = option("Frames of a video. Default: those of that grid.", panel=_SAMPLES)
    steps: int | None = option("Denoising steps of a sample. Default: 8.", panel=_SAMPLES)


class _Probe:
    data: str | None = option(
        "Texts (a folder, a JSONL file, a data set's id), images (a folder or digits), or the cache of a training. "
        "Pipelines need none: they generate samples.",
        metavar="DATA",
        panel=PROBE,
    )
    samples: int | None = option("Number of samples. Default: 32.", panel=PROBE)
    batch_size: int | None = option("Batch size for --data. Default: 4.", panel=PROBE)
    seed: Seed = 0
    device: Device = "auto"
    prompts: list[str] | None = option(
        "Prompt of a sample; may be repeated.", "--prompt", metavar="TEXT", panel=_SAMPLES
    )


HUB, SIZES, PROBE_OPTIONS = options_of(_Hub), options_of(_Sizes), [*options_of(_Probe), *options_of(_Sizes)]
"""Options of sources on the Hub, of the samples that a pipeline makes, and of the samples for calibration."""

_LAYOUT = ("blocks", "block_size", "grid")
_OPERATOR = (
    "feature_map", "rope", "normalizer", "mixing_init", "mixing_heads", "mixing_constraint", "mixing_range",
    "output_norm", "output_gate", "lepe_kernel", "window", "window_size", "window_gains",
)  # fmt: skip
AXES = (*_LAYOUT, "window_size")
"""Options of numbers along the axes of the token grid."""

CONVERSION = [
    *options_from(MHLAConfig, BLOCKS, _LAYOUT, default=False),
    *options_from(MHLAConfig, OPERATOR, _OPERATOR, default=False),
]
"""Options of a conversion."""

LAYERS = option(
    "Layers that become MHLA: all, indices such as 1,2,4, a fraction such as 2/3, or auto:2/3, which keeps those "
    "softmax that matter most.",
    metavar="LAYERS",
    panel=BLOCKS,
    values=("all", "1/2", "2/3", "3/4", "auto:"),
)

DTYPE = option(
    f"Cast the weights to {listed(DTYPES)}. Default: keep their types.",
    panel=WEIGHTS,
    choices=(*DTYPES, "fp32", "bf16", "fp16"),
    values=DTYPES,
)
