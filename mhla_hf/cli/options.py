# SPDX-License-Identifier: Apache-2.0
"""Groups of options that several commands share: of conversions, the Hub, and probes."""

import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from ..config import CHOICES
from ..ops.feature_maps import FEATURE_MAPS
from ..ops.normalizers import NORMALIZERS


LAYOUT = "Blocks"
OPERATOR = "Operator"
_SAMPLES = "Samples of a pipeline"
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
    """

    kind: Any
    help: str
    panel: str | None = None
    field: str | None = None
    default: Any = None
    flag: str | None = None

    def parameter(self, name: str, panel: str | None = None) -> inspect.Parameter:
        """Returns the keyword parameter `name` that typer makes the option from.

        Args:
            name: Name of the command's parameter.
            panel: Another part of the help to put it in.
        """
        flag = self.flag or f"--{re.sub('_+', '-', name)}"
        option = typer.Option(flag, help=self.help, rich_help_panel=panel or self.panel)
        kind = self.kind if self.default is not None else self.kind | None
        return inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=self.default, annotation=Annotated[kind, option]
        )


def listed(names: Iterable[str]) -> str:
    """Names as they are listed in a sentence: `"a, b or c"`."""
    *first, last = names
    return f"{', '.join(first)} or {last}" if first else last


def described(table: Mapping[str, Any]) -> str:
    """The entries of a table of formulas for the help of an option."""
    return "; ".join(f"{name}: {entry.formula}" for name, entry in table.items())


OPTIONS: dict[str, Option] = {
    "blocks": Option(str, "Number of blocks: frames,height,width, such as 3,5,10; height,width for images.", LAYOUT),
    "block_size": Option(str, "Tokens of a block instead, such as 7,6,5; one number for texts.", LAYOUT),
    "grid": Option(str, "Tokens the weights are for: frames,height,width; one number (a length) for texts.", LAYOUT),
    "layers": Option(
        str,
        "Which layers become MHLA: all, indices such as 1,2,4, or a fraction: 2/3 keeps 0, 3, 6, … softmax; convert "
        "also takes auto:2/3, which keeps those that matter most.",
        LAYOUT,
    ),
    "feature_map": Option(str, f"φ(x). {described(FEATURE_MAPS)}.", OPERATOR),
    "rope": Option(str, f"{listed(CHOICES['rope'])}.", OPERATOR),
    "normalizer": Option(str, f"Divisor of token t of block i. {described(NORMALIZERS)}.", OPERATOR),
    "mixing_init": Option(str, f"{listed(CHOICES['mixing_init'])}.", OPERATOR),
    "mixing_heads": Option(str, f"{listed(CHOICES['mixing_heads'])}.", OPERATOR),
    "mixing_constraint": Option(str, f"{listed(CHOICES['mixing_constraint'])}.", OPERATOR),
    "mixing_range": Option(float, "Blocks at which the locality bias reaches its floor.", OPERATOR),
    "output_norm": Option(bool, "RMSNorm on each head's output.", OPERATOR),
    "gate": Option(bool, "SiLU output gate.", OPERATOR, "output_gate"),
    "lepe": Option(int, "Kernel size of a depthwise convolution of the values.", OPERATOR, "lepe_kernel"),
    "window": Option(str, f"Exact softmax near each token beside MHLA: {listed(CHOICES['window'])}.", OPERATOR),
    "window_size": Option(
        str, "Tokens of a block of the window: frames,height,width, such as 1,3,3; one number for texts.", OPERATOR
    ),
    "window_gains": Option(str, f"Learned gains of MHLA and window: {listed(CHOICES['window_gains'])}.", OPERATOR),
}
"""Options of a conversion, by the name of the command's parameter."""


HUB: dict[str, Option] = {
    "revision": Option(str, "Branch, tag or commit.", "Hub"),
    "token": Option(str, "Access token; by default the stored one.", "Hub"),
    "cache_dir": Option(Path, "Cache folder for downloads.", "Hub"),
}
"""Options of sources on the Hub."""

PROBE: dict[str, Option] = {
    "data": Option(
        str,
        "Texts (a folder, a JSONL file, a data set's id), images (a folder or digits), or the cache of a training. "
        "Pipelines need none: they make samples.",
        "Probe",
    ),
    "samples": Option(int, "Samples of the probe.", "Probe", default=32),
    "batch_size": Option(int, "Samples of a batch, of --data.", "Probe", default=4),
    "seed": Option(int, "Seed of the probe.", "Probe", default=0),
    "device": Option(str, "Such as cpu or cuda."),
    "prompts": Option(list[str], "Prompt of a sample; repeat it for several.", _SAMPLES, flag="--prompt"),
}
"""Options of the samples that models are calibrated on."""

SIZES: dict[str, Option] = {
    "height": Option(int, "Pixels.", _SAMPLES),
    "width": Option(int, "Pixels.", _SAMPLES),
    "num_frames": Option(int, "Frames of videos.", _SAMPLES),
    "steps": Option(int, "Denoising steps.", _SAMPLES),
}
"""Options of the samples that a pipeline makes."""


def option_parameters(panel: str | None = None) -> list[inspect.Parameter]:
    """Returns [`OPTIONS`] as keyword parameters of a command, all in one panel of the help if that is given."""
    return [option.parameter(name, panel) for name, option in OPTIONS.items()]


def with_options(*groups: Mapping[str, Option]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Adds groups of options to a command in place of its `**` parameter, before its own keyword parameters."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(command).parameters.values()
        added = [option.parameter(name) for group in groups for name, option in group.items()]
        parameters = [
            *(parameter for parameter in own if parameter.kind == inspect.Parameter.POSITIONAL_OR_KEYWORD),
            *added,
            *(parameter for parameter in own if parameter.kind == inspect.Parameter.KEYWORD_ONLY),
        ]
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
