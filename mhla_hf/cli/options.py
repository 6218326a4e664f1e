# SPDX-License-Identifier: Apache-2.0
"""Options that several commands share, under one name with one text: single ones, and groups of them."""

import inspect
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import Field, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from ..config import CHOICES
from ..ops.feature_maps import FEATURE_MAPS
from ..ops.normalizers import NORMALIZERS
from .help import DIRECTORY


DTYPES = ("float32", "bfloat16", "float16")

LAYOUT = "Blocks"
OPERATOR = "Operator"
_SAMPLES = "Samples of a pipeline"
# Limits of numbers from here on are not worth mentioning.
_ENDLESS = 10**6
_SIDES = "F,H,W"
_AXES = ("blocks", "block_size", "grid", "window_size")


@dataclass(frozen=True)
class Option:
    """One option of the command line, shared by several commands.

    Attributes:
        kind: Type of its values; `bool` makes a flag.
        help: Its line of `--help`.
        panel: Its part of the help.
        field: The field of `MHLAConfig` it sets, if that has another name.
        default: Value if it is not given.
        flag: Its name on the command line, if that is not the parameter's.
        metavar: What stands for its value in the help, if not its type.
        choices: Values that a shell completes.
    """

    kind: Any
    help: str
    panel: str | None = None
    field: str | None = None
    default: Any = None
    flag: str | None = None
    metavar: str | None = None
    choices: Iterable[str] = ()

    def parameter(self, name: str, panel: str | None = None) -> inspect.Parameter:
        """Returns the keyword parameter `name` that typer makes the option from.

        Args:
            name: Name of the command's parameter.
            panel: Another part of the help to put it in.
        """
        flag = self.flag or f"--{re.sub('_+', '-', name)}"
        option = typer.Option(
            flag,
            help=self.help,
            metavar=self.metavar,
            rich_help_panel=panel or self.panel,
            autocompletion=completion(self.choices) if self.choices else None,
        )
        kind = self.kind if self.default is not None else self.kind | None
        return inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=self.default, annotation=Annotated[kind, option]
        )


def completion(values: Iterable[str] | Callable[[], Iterable[str]]) -> Callable[[str], list[str]]:
    """Completes the value of an option in a shell, after a comma the last one of several.

    Args:
        values: The values, or a function that finds them.
    """

    def complete(incomplete: str) -> list[str]:
        before, comma, start = incomplete.rpartition(",")
        found = values() if callable(values) else values
        return [f"{before}{comma}{value}" for value in found if value.startswith(start)]

    return complete


_SEED = "Seed of all random numbers."
_DEVICE = "cpu, cuda, or one of several GPUs such as cuda:1. Default: a GPU if there is one."
_DEVICES = ("auto", "cpu", "cuda")

Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print no progress and no summary.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the output directory if it exists.")]
Seed = Annotated[int, typer.Option(help=_SEED)]
Device = Annotated[
    str | None,
    typer.Option(
        help=_DEVICE,
        metavar="NAME",
        autocompletion=completion(_DEVICES),
    ),
]
DeviceOrAuto = Annotated[
    str,
    typer.Option(
        help="auto, which is a GPU if there is one, or cpu.",
        metavar="NAME",
        autocompletion=completion(("auto", "cpu")),
    ),
]
Component = Annotated[
    str | None,
    typer.Option(
        help="The transformer, in pipelines that have several, such as transformer_2.",
        metavar="NAME",
        autocompletion=completion(("transformer", "transformer_2")),
    ),
]


def field_help(item: Field, *, default: bool = True) -> str:
    """The help of an option that is made from the field of an option dataclass: its text, values, range and default.

    Args:
        item: The field.
        default: Whether its default is named.
    """
    rules = item.metadata
    text, mark, rest = rules["help"].partition(" Default:")
    if "choices" in rules:
        text += f" One of: {', '.join(rules['choices'])}."
    # That a number of steps is not negative goes without saying.
    limits = [f"at least {rules['minimum']}"] if rules.get("minimum", 0) > 1 else []
    if "below" in rules or 0 < rules.get("maximum", 0) <= 1:
        limits = [f"above {rules['above']}" if "above" in rules else f"at least {rules.get('minimum', 0)}"]
    limits += [
        f"{words} {rules[rule]:,}"
        for rule, words in (("maximum", "at most"), ("below", "below"))
        if rules.get(rule, _ENDLESS) < _ENDLESS
    ]
    if limits:
        text += f" {' and '.join(limits).capitalize()}."
    if default and item.default not in (None, (), ""):
        rest, mark = f" {item.default if isinstance(item.default, str) else json.dumps(item.default)}.", " Default:"
    return text + mark + rest


def listed(names: Iterable[str]) -> str:
    """Names as they are listed in a sentence: `"a, b or c"`."""
    *first, last = names
    return f"{', '.join(first)} or {last}" if first else last


def described(table: Mapping[str, Any]) -> str:
    """The entries of a table of formulas for the help of an option."""
    return "; ".join(f"{name}: {entry.formula}" for name, entry in table.items())


def _choice(name: str, help: str, field: str | None = None) -> Option:
    return Option(str, help, OPERATOR, field, metavar="NAME", choices=CHOICES[name])


OPTIONS: dict[str, Option] = {
    "blocks": Option(
        str, "Number of blocks: frames,height,width, such as 3,5,10; height,width for images.", LAYOUT, metavar=_SIDES
    ),
    "block_size": Option(
        str, "Tokens of a block instead, such as 7,6,5; one number for texts.", LAYOUT, metavar=_SIDES
    ),
    "grid": Option(
        str,
        "Tokens the weights are for: frames,height,width; one number (a length) for texts.",
        LAYOUT,
        metavar=_SIDES,
    ),
    "layers": Option(
        str,
        "Which layers become MHLA: all, indices such as 1,2,4, or a fraction: 2/3 keeps 0, 3, 6, … softmax; convert "
        "and recover also take auto:2/3, which keeps those that matter most.",
        LAYOUT,
        metavar="LAYERS",
        choices=("all", "1/2", "2/3", "3/4", "auto:"),
    ),
    "feature_map": _choice("feature_map", f"φ(x). {described(FEATURE_MAPS)}."),
    "rope": _choice("rope", f"Where rotary embeddings act: {listed(CHOICES['rope'])}."),
    "normalizer": _choice("normalizer", f"Divisor of token t of block i. {described(NORMALIZERS)}."),
    "mixing_init": _choice(
        "mixing_init", f"Initial weights of blocks, by their distance: {listed(CHOICES['mixing_init'])}."
    ),
    "mixing_heads": _choice("mixing_heads", f"Mixing matrices of a layer: {listed(CHOICES['mixing_heads'])}."),
    "mixing_constraint": _choice(
        "mixing_constraint", f"Constraint of the mixing weights: {listed(CHOICES['mixing_constraint'])}."
    ),
    "mixing_range": Option(float, "Blocks at which the locality bias reaches its floor.", OPERATOR),
    "output_norm": Option(bool, "RMSNorm on each head's output.", OPERATOR),
    "gate": Option(bool, "SiLU output gate.", OPERATOR, "output_gate"),
    "lepe": Option(
        int, "Kernel size of a depthwise convolution of the values; an odd number.", OPERATOR, "lepe_kernel"
    ),
    "window": _choice("window", f"Exact softmax near each token beside MHLA: {listed(CHOICES['window'])}."),
    "window_size": Option(
        str,
        "Tokens of a block of the window: frames,height,width, such as 1,3,3; one number for texts.",
        OPERATOR,
        metavar=_SIDES,
    ),
    "window_gains": _choice("window_gains", f"Learned gains of MHLA and window: {listed(CHOICES['window_gains'])}."),
}
"""Options of a conversion, by the name of the command's parameter."""


HUB: dict[str, Option] = {
    "revision": Option(str, "Branch, tag or commit.", "Hub", metavar="NAME"),
    "token": Option(str, "Access token. Default: that of hf auth login.", "Hub", metavar="TEXT"),
    "cache_dir": Option(Path, "Cache folder for downloads.", "Hub", metavar=DIRECTORY),
}
"""Options of sources on the Hub."""

PROBE: dict[str, Option] = {
    "data": Option(
        str,
        "Texts (a folder, a JSONL file, a data set's id), images (a folder or digits), or the cache of a training. "
        "Pipelines need none: they make samples.",
        "Probe",
    ),
    "samples": Option(int, "Number of samples.", "Probe", default=32),
    "batch_size": Option(int, "Samples of a batch, of --data.", "Probe", default=4),
    "seed": Option(int, _SEED, "Probe", default=0),
    "device": Option(str, _DEVICE, metavar="NAME", choices=_DEVICES),
    "prompts": Option(list[str], "Prompt of a sample; may be repeated.", _SAMPLES, flag="--prompt", metavar="TEXT"),
}
"""Options of the samples that models are calibrated on."""

SIZES: dict[str, Option] = {
    "height": Option(int, "Height in pixels. Default: that of the grid that the blocks are for.", _SAMPLES),
    "width": Option(int, "Width in pixels. Default: that of the grid that the blocks are for.", _SAMPLES),
    "num_frames": Option(int, "Frames of a video. Default: those of that grid.", _SAMPLES),
    "steps": Option(int, "Denoising steps of a sample. Default: 8.", _SAMPLES),
}
"""Options of the samples that a pipeline makes."""


def option_parameters(panel: str | None = None) -> list[inspect.Parameter]:
    """Returns [`OPTIONS`] as keyword parameters of a command, all in one panel of the help if that is given."""
    return [option.parameter(name, panel) for name, option in OPTIONS.items()]


def with_options(
    *groups: Mapping[str, Option], last: bool = False
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Adds groups of options to a command in place of its `**` parameter.

    Args:
        *groups: The options by their parameters.
        last: Whether they come after the command's own keyword parameters in the help, and not before.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(command).parameters.values()
        added = [option.parameter(name) for group in groups for name, option in group.items()]
        arguments = [parameter for parameter in own if parameter.kind == inspect.Parameter.POSITIONAL_OR_KEYWORD]
        options = [parameter for parameter in own if parameter.kind == inspect.Parameter.KEYWORD_ONLY]
        parameters = arguments + (options + added if last else added + options)
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return command

    return decorate


def given(options: Mapping[str, Any], group: Mapping[str, Option]) -> dict[str, Any]:
    """Returns the options of a group that are given."""
    return {name: options[name] for name in group if options[name] is not None and options[name] != []}


def options_for_components(text: str | None, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Options from `--mhla` over those from the other options of the command line.

    Args:
        text: JSON of options, or of options by component (or tower); `null` leaves a component as it is. Also the
            name of a file that holds such JSON.
        fields: Fields of `MHLAConfig` from the other options, which hold for every component.

    Returns:
        Options, or options by component.

    Raises:
        ValueError: If the text is neither JSON of an object nor the name of a file of it.
    """
    if text is None:
        return dict(fields)
    from ..models.options import merge_options
    from ..utils.json_files import check_fields, parse_json, read_json

    if text.lstrip().startswith(("{", "[")):
        content = check_fields(parse_json(text, "--mhla"), "--mhla")
    else:
        content = read_json(Path(text).expanduser(), "the file of --mhla")
    by_component = {name: value for name, value in content.items() if isinstance(value, dict)}
    if not by_component:
        return merge_options(fields, content)
    return {**content, **{name: merge_options(fields, value) for name, value in by_component.items()}}


def mhla_fields(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns fields of `MHLAConfig` from the options of a conversion.

    Args:
        options: Values by name; `None` and flags that are off count as not given, others than [`OPTIONS`] are left
            out. `layers` depends on the model and is left to the caller.

    Raises:
        ValueError: If `blocks`, `block_size` or `grid` are not one to three numbers.
    """
    from ..conversion.options import parse_axes

    fields = {}
    for name, option in OPTIONS.items():
        value = options.get(name)
        if value is not None and value is not False and name != "layers":
            fields[option.field or name] = parse_axes(value, name, None) if name in _AXES else value
    return fields
