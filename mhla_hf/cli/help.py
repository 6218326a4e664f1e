# SPDX-License-Identifier: Apache-2.0
"""The look of `--help`: panels, names of arguments, examples."""

import inspect
import re
from typing import Any

import typer


FILE, DIRECTORY = "FILE", "DIRECTORY"
"""What stands for paths in the help of options."""

CONVERT = "Convert"
RECOVER = "Recover and train"
LOOK = "Look and measure"
SHARE = "Share"
CHECK = "Check"
"""Panels of `mhla-hf --help`, in their order."""


def examples(*lines: str) -> str:
    """The end of a command's help: command lines to copy."""
    return "\n".join(["Examples:" if len(lines) > 1 else "Example:", *lines])


def tidy_help(command: Any) -> None:
    """Makes the help of a command, and of all commands below it, read alike.

    Paragraphs are wrapped by the terminal and not where the source wraps them, arguments have the capital names that
    texts call them by, and flags no type.

    Args:
        command: A command or group of typer; it is changed in place.
    """
    if command.help:
        command.help = re.sub(r"(?<!\n)\n(?!\n)", " ", inspect.cleandoc(command.help))
    for parameter in (*command.params, command.get_help_option(typer.Context(command))):
        if parameter.metavar is not None:
            continue
        if parameter.param_type_name == "argument":
            parameter.metavar = parameter.name.upper()
        elif parameter.is_flag:
            parameter.metavar = ""
    for inner in getattr(command, "commands", {}).values():
        tidy_help(inner)
