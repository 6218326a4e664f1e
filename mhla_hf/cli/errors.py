# SPDX-License-Identifier: Apache-2.0
"""Errors become one line and exit code 1; their traceback is shown on request."""

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
from .help import tidy_help


# Messages are short; this is for those of libraries, and for long paths.
_LENGTH = 800
DEBUG_VARIABLE = "MHLA_HF_DEBUG"
"""Set to 1, or with the option `--debug`, every error shows its traceback."""

# Mistakes and damaged files, as libraries call them that are not imported here.
_EXPECTED = {"HTTPError", "SafetensorError"}
_OUT_OF_MEMORY = ("out of memory", "allocate memory", "not enough memory")
# Options that lower the memory of a command, those that cost least first.
_MEMORY_OPTIONS = (
    "--batch-size", "--match-batch-size", "--distill-batch-size", "--finetune-batch-size", "--match-cache",
    "--transfer-cache", "--memory-limit", "--num-frames", "--data-num-frames", "--height", "--width", "--data-height",
    "--data-width", "--max-length", "--data-max-length", "--max-tokens", "--contexts", "--shapes", "--models",
)  # fmt: skip


@contextmanager
def friendly_errors(command: Any = None, debug: bool = False) -> Iterator[None]:
    """Shows every error as one red line on standard error, those that are nobody's mistake as unexpected ones.

    After Ctrl-C, one line says what was saved and how to go on, where there is anything to say.

    Args:
        command: The command that runs; its options are named where memory runs out.
        debug: Whether errors are raised on, with their traceback.

    Raises:
        typer.Exit: With code 1, in place of an error; with code 130 after Ctrl-C.
    """
    try:
        yield
    except (BrokenPipeError, typer.Exit, typer.Abort):
        raise
    except KeyboardInterrupt as stop:
        # The processes of a run stop together, and the first speaks for all.
        if os.environ.get("RANK", "0") == "0":
            message = " ".join(str(stop).split()) or "stopped"
            Console(stderr=True, soft_wrap=True).print(f"[bold]{escape(message)}[/]", highlight=False)
        raise typer.Exit(getattr(stop, "exit_code", 130)) from stop
    except Exception as error:
        # Usage errors of typer, which shows them itself.
        if debug or _debugging() or hasattr(error, "exit_code"):
            raise
        _print_error(_message(error, command))
        raise typer.Exit(1) from error


def _debugging() -> bool:
    return os.environ.get(DEBUG_VARIABLE, "0") not in ("", "0")


def _message(error: Exception, command: Any) -> str:
    """The line for an error."""
    kinds, text = {kind.__name__ for kind in type(error).__mro__}, str(error)
    full = isinstance(error, (RuntimeError, OSError)) and any(words in text for words in _OUT_OF_MEMORY)
    if full or isinstance(error, MemoryError):
        known = {name for parameter in getattr(command, "params", ()) for name in parameter.opts}
        options = [name for name in _MEMORY_OPTIONS if name in known][:4]
        advice = f"; lower {', '.join(options)}" if options else "; a smaller model or input takes less"
        return f"out of memory{advice} ({shorten_text(text, 200) or type(error).__name__})"
    if isinstance(error, RuntimeError) and ("Connection closed by peer" in text or "Connection reset by peer" in text):
        # Gloo's words for it; NCCL waits until the launcher ends the process.
        process = os.environ.get("RANK", "0")
        return f"process {process} has lost another process of the run, whose own error says why"
    if isinstance(error, (ValueError, OSError, FloatingPointError, ImportError)) or kinds & _EXPECTED:
        return text or type(error).__name__
    shown = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return (
        f"unexpected {shorten_text(shown, _LENGTH - 200)} (run again with --debug for the traceback, and report it "
        "with what mhla-hf env prints)"
    )


def _print_error(message: str) -> None:
    # Names and texts of others' files stand in some messages: neither pages of them nor a terminal's control codes.
    line = " ".join(message.split())
    message = shorten_text(
        "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in line), _LENGTH
    )
    Console(stderr=True, soft_wrap=True).print(f"[bold red]error:[/] [red]{escape(message)}[/]", highlight=False)


class _Friendly:
    """Shows errors by [`friendly_errors`] and knows `--debug`, which may stand anywhere on the command line."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        tidy_help(self)
        options, end, values = _split(args)
        ctx.meta[DEBUG_VARIABLE] = "--debug" in options
        command: Any = self
        for word in options:
            command = getattr(command, "commands", {}).get(word, command)
        ctx.meta["command"] = command
        words = [word for word in options if word != "--debug"] + end + values
        with friendly_errors(command, ctx.meta[DEBUG_VARIABLE]):
            return super().parse_args(ctx, words)  # type: ignore[misc]

    def invoke(self, ctx: Any) -> Any:
        with friendly_errors(ctx.meta["command"], ctx.meta[DEBUG_VARIABLE]):
            return super().invoke(ctx)  # type: ignore[misc]


def _split(args: list[str]) -> tuple[list[str], list[str], list[str]]:
    """Divides a command line at `--`, after which nothing is an option."""
    place = args.index("--") if "--" in args else len(args)
    return args[:place], args[place : place + 1], args[place + 1 :]


class FriendlyGroup(_Friendly, TyperGroup):
    """A group of commands whose errors are one line, those of groups inside it included."""


class FriendlyCommand(_Friendly, TyperCommand):
    """A single command, for scripts that have only one, with the same."""


def run_script(command: Callable[..., None]) -> None:
    """Runs one command function as a whole program.

    Args:
        command: A function whose parameters are typer options.
    """
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command(cls=FriendlyCommand)(command)
    app()
