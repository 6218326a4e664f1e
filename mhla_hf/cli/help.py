# SPDX-License-Identifier: Apache-2.0
"""The look of `--help`: panels, names of arguments, examples."""

import inspect
import re
import shutil
from typing import Any

import typer
from rich.markup import escape


FILE, DIRECTORY = "FILE", "DIRECTORY"
"""What stands for paths in the help of options."""

CONVERT = "Convert"
RECOVER = "Recover and train"
LOOK = "Look and measure"
SHARE = "Share"
CHECK = "Check"
"""Panels of `mhla-hf --help`, in their order."""


# Panels of fewer columns would cut the names of options.
_PANEL_COLUMNS = 78


def examples(*lines: str) -> str:
    """The end of a command's help: command lines to copy."""
    return "\n".join(["Examples:" if len(lines) > 1 else "Example:", *lines])


class _Tidy(str):
    """A text that is ready for typer."""


def tidy_help(command: Any) -> None:
    """Makes the help of a command, and of all commands below it, read alike.

    Paragraphs are wrapped by the terminal and not where the source wraps them, brackets are brackets, arguments have
    the capital names that texts call them by, and flags no type. Narrow terminals get lists without panels.

    Args:
        command: A command or group of typer; it is changed in place.
    """
    narrow = shutil.get_terminal_size().columns < _PANEL_COLUMNS
    for described in (command, *command.params):
        # Typer takes words in brackets, such as those of `pip install -e '.[app]'`, for styles.
        if described.help and not isinstance(described.help, _Tidy):
            text = re.sub(r"(?<!\n)\n(?!\n)", " ", inspect.cleandoc(described.help))
            described.help = _Tidy(text if narrow else escape(text))
    if narrow and command.rich_markup_mode is not None:
        command.rich_markup_mode = None
        command.epilog = command.epilog and command.epilog.replace("\n", "\n\n")
    for parameter in (*command.params, command.get_help_option(typer.Context(command))):
        if parameter.metavar is not None:
            continue
        if parameter.param_type_name == "argument":
            parameter.metavar = parameter.name.upper()
        elif parameter.is_flag:
            parameter.metavar = ""
    for inner in getattr(command, "commands", {}).values():
        tidy_help(inner)
