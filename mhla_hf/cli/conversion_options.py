# SPDX-License-Identifier: Apache-2.0
"""The options that say how a model becomes MHLA, for every command that converts one."""

import inspect
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
_AXES = ("blocks", "block_size", "grid", "window_size")


@dataclass(frozen=True)
class ConversionOption:
    """One option of the command line.

    Attributes:
        kind: Type of its values; `bool` makes a flag.
        help: What `--help` says.
        panel: The part of the help it stands in.
        field: The field of `MHLAConfig` it sets, where that is called something else.
    """

    kind: type
    help: str
    panel: str
    field: str | None = None

    def annotation(self, name: str, panel: str | None = None) -> Any:
        """The annotation from which typer makes the option `name`, `None` where it is not given.

        Args:
            name: Name of the command's parameter.
            panel: Another part of the help to put it in.
        """
        option = typer.Option(f"--{name.replace('_', '-')}", help=self.help, rich_help_panel=panel or self.panel)
        return Annotated[self.kind | None, option]


def listed(names: Iterable[str]) -> str:
    """Names as they are listed in a sentence: `"a, b or c"`."""
    *first, last = names
    return f"{', '.join(first)} or {last}" if first else last


def described(table: Mapping[str, Any]) -> str:
    """The entries of a table of formulas for the help of an option."""
    return "; ".join(f"{name}: {entry.formula}" for name, entry in table.items())


OPTIONS: dict[str, ConversionOption] = {
    "blocks": ConversionOption(
        str, "Number of blocks: frames,height,width, such as 3,5,10; height,width for pictures.", LAYOUT
    ),
    "block_size": ConversionOption(str, "Tokens of a block instead, such as 7,6,5; one number for texts.", LAYOUT),
    "grid": ConversionOption(
        str, "Tokens the weights are for: frames,height,width; one number (a length) for texts.", LAYOUT
    ),
    "layers": ConversionOption(
        str,
        "Which layers become MHLA: all, indices such as 1,2,4, or a fraction: 2/3 keeps 0, 3, 6, … softmax; convert "
        "also takes auto:2/3, which keeps those that matter most.",
        LAYOUT,
    ),
    "feature_map": ConversionOption(str, f"φ(x). {described(FEATURE_MAPS)}.", OPERATOR),
    "rope": ConversionOption(str, f"{listed(CHOICES['rope'])}.", OPERATOR),
    "normalizer": ConversionOption(str, f"Divisor of token t of block i. {described(NORMALIZERS)}.", OPERATOR),
    "mixing_init": ConversionOption(str, f"{listed(CHOICES['mixing_init'])}.", OPERATOR),
    "mixing_heads": ConversionOption(str, f"{listed(CHOICES['mixing_heads'])}.", OPERATOR),
    "mixing_constraint": ConversionOption(str, f"{listed(CHOICES['mixing_constraint'])}.", OPERATOR),
    "mixing_range": ConversionOption(float, "Blocks at which the locality bias reaches its floor.", OPERATOR),
    "output_norm": ConversionOption(bool, "RMSNorm on each head's output.", OPERATOR),
    "gate": ConversionOption(bool, "SiLU output gate.", OPERATOR, "output_gate"),
    "lepe": ConversionOption(int, "Kernel size of a depthwise convolution of the values.", OPERATOR, "lepe_kernel"),
    "window": ConversionOption(
        str, f"Exact softmax near each token beside MHLA: {listed(CHOICES['window'])}.", OPERATOR
    ),
    "window_size": ConversionOption(
        str, "Tokens of a block of the window: frames,height,width, such as 1,3,3; one number for texts.", OPERATOR
    ),
    "window_gains": ConversionOption(
        str, f"Learned gains of MHLA and window: {listed(CHOICES['window_gains'])}.", OPERATOR
    ),
}
"""All of them by the name of the command's parameter."""


def option_parameters(panel: str | None = None) -> list[inspect.Parameter]:
    """The options as keyword parameters of a command.

    Args:
        panel: Put all of them into this part of the help.
    """
    return [
        inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=option.annotation(name, panel)
        )
        for name, option in OPTIONS.items()
    ]


def with_conversion_options(command: Callable[..., None]) -> Callable[..., None]:
    """Adds the options to a command in place of its `**` parameter; they come before its own keyword parameters."""
    own = inspect.signature(command).parameters.values()
    positional = [parameter for parameter in own if parameter.kind == inspect.Parameter.POSITIONAL_OR_KEYWORD]
    keyword = [parameter for parameter in own if parameter.kind == inspect.Parameter.KEYWORD_ONLY]
    parameters = [*positional, *option_parameters(), *keyword]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command


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


def mhla_fields(given: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of `MHLAConfig` from what was typed.

    Args:
        given: Values of [`OPTIONS`] by name; `None` and flags that are off count as not given. `layers` depends on
            the model and is left to the caller.

    Raises:
        ValueError: If `blocks`, `block_size` or `grid` are not one to three numbers.
    """
    from ..conversion.options import parse_axes

    fields = {}
    for name, value in given.items():
        if value is None or value is False or name == "layers":
            continue
        fields[OPTIONS[name].field or name] = parse_axes(value, name, None) if name in _AXES else value
    return fields
