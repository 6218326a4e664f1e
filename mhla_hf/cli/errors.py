# SPDX-License-Identifier: Apache-2.0
"""The frame of every command: errors in one line with their exit code, `--debug`, and the look of `--help`."""

from __future__ import annotations

import inspect
import os
import re
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
"""Set to 1, every error shows its traceback, as with the option `--debug`."""

FAILED, WRONG_USAGE, STOPPED = 1, 2, 130
"""Exit codes."""

# Mistakes and damaged files, as libraries call them that are not imported here.
_EXPECTED = {"HTTPError", "SafetensorError"}
_OUT_OF_MEMORY = ("out of memory", "allocate memory", "not enough memory")
# Options that lower the memory of a command, those that cost least first.
_MEMORY_OPTIONS = (
    "--batch-size", "--match-batch-size", "--distill-batch-size", "--finetune-batch-size", "--match-cache",
    "--memory-limit", "--sizes", "--num-frames", "--height", "--width", "--max-length", "--max-tokens", "--contexts",
    "--shapes", "--models",
)  # fmt: skip
# Names of arguments in Python where the command line has another.
_CALLED = {"destination": "output", "directory": "model", "base": "original"}
_VERBS = "must|is|are|was|has|have|had|names|name|needs|need|cannot|could|already|selects|makes|takes|does|do"


@contextmanager
def friendly_errors(command: Any = None, debug: bool = False) -> Iterator[None]:
    """Print errors as one red line; mark bugs as unexpected.

    After Ctrl-C, one line says what was saved and how to continue, if anything was.

    Args:
        command: The command that runs; errors name its options.
        debug: Whether errors are raised on, with their traceback.

    Raises:
        typer.Exit: In place of an error: with code 2 if it is about an option, else with 1; with 130 after Ctrl-C.
    """
    try:
        yield
    except (BrokenPipeError, typer.Exit, typer.Abort):
        raise
    except KeyboardInterrupt as stop:
        # The processes of a run stop together; the first prints the line for all.
        if os.environ.get("RANK", "0") == "0":
            message = " ".join(str(stop).split()) or "stopped"
            Console(stderr=True, soft_wrap=True).print(f"[bold]{escape(message)}[/]", highlight=False)
        raise typer.Exit(getattr(stop, "exit_code", STOPPED)) from stop
    except Exception as error:
        # Typer shows its own usage errors.
        if debug or os.environ.get(DEBUG_VARIABLE, "0") not in ("", "0") or hasattr(error, "exit_code"):
            raise
        message, code = _describe(error, command)
        _print_error(message)
        raise typer.Exit(code) from error


def _describe(error: Exception, command: Any) -> tuple[str, int]:
    """The line for an error, and the exit code."""
    kinds, text = {kind.__name__ for kind in type(error).__mro__}, str(error)
    full = isinstance(error, (RuntimeError, OSError)) and any(words in text for words in _OUT_OF_MEMORY)
    if full or isinstance(error, MemoryError):
        known = {name for parameter in getattr(command, "params", ()) for name in parameter.opts}
        options = [name for name in _MEMORY_OPTIONS if name in known][:4]
        advice = f"; lower {', '.join(options)}" if options else "; a smaller model or input takes less"
        return f"out of memory{advice} ({shorten_text(text, 200) or type(error).__name__})", FAILED
    if isinstance(error, RuntimeError) and ("Connection closed by peer" in text or "Connection reset by peer" in text):
        # Gloo's words; NCCL waits until the launcher ends the process.
        process = os.environ.get("RANK", "0")
        return f"process {process} has lost another process of the run, whose own error says why", FAILED
    if isinstance(error, (ValueError, OSError, FloatingPointError, ImportError)) or kinds & _EXPECTED:
        named, is_about_option = _name_options(text, command)
        wrong = is_about_option and isinstance(error, ValueError)
        return named or type(error).__name__, WRONG_USAGE if wrong else FAILED
    shown = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return (
        f"unexpected {shorten_text(shown, _LENGTH - 200)} (run again with --debug for the traceback, and report it "
        "with the output of mhla-hf env)",
        FAILED,
    )


def _name_options(text: str, command: Any) -> tuple[str, bool]:
    """Name options in a message as they are typed; returns whether the message is about one of them."""
    names: dict[str, str] = {}
    for parameter in getattr(command, "params", ()):
        shown = parameter.name.upper() if parameter.param_type_name == "argument" else parameter.opts[0]
        names |= {parameter.name: shown, parameter.opts[0].strip("-").replace("-", "_"): shown}
    names |= {name: names[own] for name, own in _CALLED.items() if own in names and name not in names}
    # "pass overwrite=True (--overwrite)", "--config (config=)"
    text = re.sub(r"\w+=[\w']+ \((--[\w-]+)\)", r"\1", text)
    text = re.sub(r"(--[\w-]+) \(\w+=\)", r"\1", text)
    if not names:
        return text, False
    known = "|".join(["--[a-z-]+", *sorted(names, key=len, reverse=True)])
    start = re.match(rf"(?:{known})(?:(?:, | and | or )(?:{known}))*(?==| (?:{_VERBS})\b|: )", text)
    if start:
        head = re.sub(known, lambda found: names.get(found[0], found[0]), start[0])
        text = head + re.sub("^=", " ", text[start.end() :])
    text = re.sub(rf"(?<![\w.-])({known})=(?=\S)", lambda found: f"{names.get(found[1], found[1])} ", text)
    return text, bool(start)


def _print_error(message: str) -> None:
    # Some messages quote names and texts of others' files: no pages of them, and no control codes of terminals.
    line = " ".join(message.split())
    message = shorten_text(
        "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in line), _LENGTH
    )
    Console(stderr=True, soft_wrap=True).print(f"[bold red]error:[/] [red]{escape(message)}[/]", highlight=False)


class _Friendly:
    """Show errors by [`friendly_errors`] and take `--debug` anywhere on the command line."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        tidy_help(self)
        # After `--`, nothing is an option.
        place = args.index("--") if "--" in args else len(args)
        options, rest = args[:place], args[place:]
        ctx.meta[DEBUG_VARIABLE] = "--debug" in options
        command: Any = self
        for word in options:
            command = getattr(command, "commands", {}).get(word, command)
        ctx.meta["command"] = command
        words = [word for word in options if word != "--debug"] + rest
        with friendly_errors(command, ctx.meta[DEBUG_VARIABLE]):
            return super().parse_args(ctx, words)  # type: ignore[misc]

    def invoke(self, ctx: Any) -> Any:
        with friendly_errors(ctx.meta["command"], ctx.meta[DEBUG_VARIABLE]):
            return super().invoke(ctx)  # type: ignore[misc]


class FriendlyGroup(_Friendly, TyperGroup):
    """A group of commands whose errors are one line, as are those of groups inside it."""


class FriendlyCommand(_Friendly, TyperCommand):
    """A single command, for scripts that have only one, with the same."""


def run_script(command: Callable[..., None]) -> None:
    """Run one command function as a program.

    Args:
        command: A function whose parameters are typer options.
    """
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command(cls=FriendlyCommand)(command)
    app()


class _Tidied(str):
    """A text that is ready for typer."""


def tidy_help(command: Any) -> None:
    """Give a command and all commands below it the same style of help.

    Lines under "Examples:" come last. The terminal wraps paragraphs, not the source; brackets are brackets; arguments
    have the capital names that texts call them by, and flags no type.

    Args:
        command: A command or group of typer; it is changed in place.
    """
    description, mark, examples = inspect.cleandoc(command.help or "").partition("\nExamples:\n")
    if mark:
        command.help, command.epilog = description, f"Examples:\n{inspect.cleandoc(examples)}"
    for described in (command, *command.params):
        # Typer takes words in brackets, such as those of `pip install -e '.[app]'`, for styles.
        if described.help and not isinstance(described.help, _Tidied):
            described.help = _Tidied(escape(re.sub(r"(?<!\n)\n(?!\n)", " ", inspect.cleandoc(described.help))))
    for parameter in (*command.params, command.get_help_option(typer.Context(command))):
        if parameter.metavar is not None:
            continue
        if parameter.param_type_name == "argument":
            parameter.metavar = parameter.name.upper()
        elif parameter.is_flag:
            parameter.metavar = ""
    for inner in getattr(command, "commands", {}).values():
        tidy_help(inner)
