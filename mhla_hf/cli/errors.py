# SPDX-License-Identifier: Apache-2.0
"""Errors of users become one line and exit code 1; everything else keeps its traceback."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape
from typer.core import TyperCommand, TyperGroup

from ..utils.messages import shorten_text


# Messages are short; this is for those of libraries, and for long paths.
_LENGTH = 800
DEBUG_VARIABLE = "MHLA_HF_DEBUG"
"""Set to 1 to see the traceback of every error."""


@contextmanager
def friendly_errors() -> Iterator[None]:
    """Shows `ValueError`, `OSError`, a diverged loss and missing optional packages as one red line on standard error.

    After Ctrl-C, one line says what was saved and how to go on, where there is anything to say.

    Raises:
        typer.Exit: With code 1, in place of such an error; with code 130 after Ctrl-C.
    """
    try:
        yield
    except BrokenPipeError:
        raise
    except KeyboardInterrupt as stop:
        # The processes of a run stop together, and the first speaks for all.
        if os.environ.get("RANK", "0") == "0":
            message = " ".join(str(stop).split()) or "stopped"
            Console(stderr=True, soft_wrap=True).print(f"[bold]{escape(message)}[/]", highlight=False)
        raise typer.Exit(getattr(stop, "exit_code", 130)) from stop
    except RuntimeError as error:
        # Gloo's words for it; NCCL waits until the launcher ends the process.
        lost = any(words in str(error) for words in ("Connection closed by peer", "Connection reset by peer"))
        if not lost or _debugging():
            raise
        process = os.environ.get("RANK", "0")
        _print_error(f"process {process} has lost another process of the run, whose own error says why")
        raise typer.Exit(1) from error
    except (ValueError, OSError, FloatingPointError, ModuleNotFoundError) as error:
        if _debugging():
            raise
        _print_error(str(error) or type(error).__name__)
        raise typer.Exit(1) from error


def _debugging() -> bool:
    return os.environ.get(DEBUG_VARIABLE, "0") not in ("", "0")


def _print_error(message: str) -> None:
    # Names and texts of others' files stand in some messages: neither pages of them nor a terminal's control codes.
    line = " ".join(message.split())
    message = shorten_text(
        "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in line), _LENGTH
    )
    Console(stderr=True, soft_wrap=True).print(f"[bold red]error:[/] [red]{escape(message)}[/]", highlight=False)


class FriendlyGroup(TyperGroup):
    """A group of commands whose errors are shown by [`friendly_errors`]; groups inside it included."""

    def invoke(self, ctx: Any) -> Any:
        with friendly_errors():
            return super().invoke(ctx)


class FriendlyCommand(TyperCommand):
    """A single command, for scripts that have only one, with the same."""

    def invoke(self, ctx: Any) -> Any:
        with friendly_errors():
            return super().invoke(ctx)


def run_script(command: Callable[..., None]) -> None:
    """Runs one command function as a whole program.

    Args:
        command: A function whose parameters are typer options.
    """
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command(cls=FriendlyCommand)(command)
    app()
