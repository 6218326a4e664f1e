# SPDX-License-Identifier: Apache-2.0
"""The commands of `mhla-hf`, and their errors as one line. Commands import what is heavy when they run."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape
from typer.core import TyperCommand

from .. import __version__
from ..utils.messages import did_you_mean, shorten_text
from . import convert, doctor, look, recover, share


FAILED, WRONG_USAGE, STOPPED = 1, 2, 130
"""Exit codes."""

# Messages are short; this is for those of libraries, and for long paths.
_LENGTH = 800
# Mistakes and damaged files, as libraries call them that are not imported here.
_EXPECTED = {"HTTPError", "SafetensorError"}
_OUT_OF_MEMORY = re.compile("out of memory|allocate memory|not enough memory")
# As gloo, NCCL and the stores of torch.distributed say it; their classes stand for mistakes of one process, too.
_PROCESS_ENDED = re.compile(
    "gloo/transport|monitoredBarrier|remote p(roces|e)|by peer|Broken pipe|clients joined|wait timeout|was aborted"
)
# What follows the name of an option in messages about it.
_VERBS = "must|is|are|was|has|have|names|needs|cannot|already|selects|makes|takes"


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
            _print_line(str(stop) or "stopped", "bold")
        raise typer.Exit(getattr(stop, "exit_code", STOPPED)) from stop
    except Exception as error:
        # Typer shows its own usage errors.
        if debug or hasattr(error, "exit_code"):
            raise
        message, code = _describe(error, command)
        _print_line(f"error: {message}", "red")
        raise typer.Exit(code) from error


def _describe(error: Exception, command: Any) -> tuple[str, int]:
    """The line for an error, and the exit code."""
    kinds, text = {kind.__name__ for kind in type(error).__mro__}, str(error) or type(error).__name__
    is_full = isinstance(error, (RuntimeError, OSError)) and _OUT_OF_MEMORY.search(text)
    if is_full or isinstance(error, MemoryError):
        return f"out of memory; a smaller batch, input or model takes less ({text})", FAILED
    if isinstance(error, RuntimeError) and _PROCESS_ENDED.search(text):
        resume = " with --resume latest" * any(each.name == "resume" for each in getattr(command, "params", ()))
        advice = f"see what it said last, then start the same command again{resume}"
        return f"another process of this run has ended or does not answer: {advice}", FAILED
    if isinstance(error, (ValueError, OSError, FloatingPointError, ImportError)) or kinds & _EXPECTED:
        named = _name_option(text, command)
        return named or text, WRONG_USAGE if named and isinstance(error, ValueError) else FAILED
    shown = shorten_text(f"{type(error).__name__}: {error}".rstrip(": "), _LENGTH - 200)
    advice = "mhla-hf --debug COMMAND ... shows the traceback; please report it with the output of mhla-hf env"
    return f"unexpected {shown} ({advice})", FAILED


def _name_option(text: str, command: Any) -> str | None:
    """Name the option that a message begins with as it is typed; `None` if it begins with none."""
    for parameter in getattr(command, "params", ()):
        shown = parameter.opts[0] if parameter.param_type_name == "option" else parameter.name.upper()
        start = re.match(rf"(?:{parameter.name}|{shown})(?:=|(?= (?:{_VERBS})\b|: ))", text)
        if start:
            return f"{shown} {text[start.end() :].lstrip()}" if start[0].endswith("=") else shown + text[start.end() :]
    return None


def _print_line(message: str, style: str) -> None:
    # Some messages quote names and texts of others' files: no pages of them, and no control codes of terminals.
    line = "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in " ".join(message.split()))
    Console(stderr=True, soft_wrap=True).print(escape(shorten_text(line, _LENGTH)), style=style, highlight=False)


class FriendlyCommand(TyperCommand):
    """A command whose errors are one line."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse and check the arguments; an error about a value suggests the allowed one that it resembles."""
        try:
            with friendly_errors(self, ctx.find_root().params.get("debug", False)):
                return super().parse_args(ctx, args)
        except typer.BadParameter as error:
            message = error.message.removeprefix("Value error, ")
            given, *allowed = re.findall("'([^']*)'", message) if " is not one of " in message else [""]
            error.message = message + did_you_mean(given, allowed)
            raise

    def invoke(self, ctx: Any) -> Any:
        """Run the command; see [`friendly_errors`]."""
        with friendly_errors(self, ctx.find_root().params.get("debug", False)):
            return super().invoke(ctx)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"mhla-hf {__version__}")
        raise typer.Exit()


def _main(
    version: bool = typer.Option(False, "--version", help="Show the version.", callback=_show_version, is_eager=True),
    debug: bool = typer.Option(False, "--debug", help="Show the traceback of an error.", envvar="MHLA_HF_DEBUG"),
) -> None:
    pass


app = typer.Typer(
    name="mhla-hf",
    help="Multi-Head Linear Attention for diffusers and transformers.\n\nStart here: demo → recover → inspect → push.",
    epilog="Paper: https://arxiv.org/abs/2601.07832. Exit codes: 0 done, 1 error, 2 wrong usage, "
    "3 no GPU for doctor --gpu, 130 stopped by Ctrl-C.",
    callback=_main,
    rich_markup_mode="markdown",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

COMMANDS = {
    "Convert": (
        convert.convert_command,
        convert.import_official_command,
        convert.unconvert_command,
        convert.models_command,
    ),
    "Recover and train": (recover.recover_command, recover.calibrate_command, recover.select_layers_command),
    "Look and measure": (look.demo_command, look.estimate_command, look.inspect_command, look.app_command),
    "Share": (share.card_command, share.push_command, share.check_lora_command),
    "Check": (doctor.doctor_command, doctor.env_command),
}
"""The commands by their panels of `mhla-hf --help`, in their order."""

for _panel, _commands in COMMANDS.items():
    for _command in _commands:
        _name = _command.__name__.removesuffix("_command").replace("_", "-")
        app.command(_name, cls=FriendlyCommand, rich_help_panel=_panel)(_command)
app.command("serve", cls=FriendlyCommand, rich_help_panel="Share", **share.SERVE)(share.serve_command)
for _group, _panel, _help, _members in (
    ("train", "Recover and train", "Fine-tune MHLA models.", recover.TRAINING),
    ("bench", "Look and measure", "Measure time and memory on this machine.", look.BENCHMARKS),
):
    _typer = typer.Typer(name=_group, help=_help, no_args_is_help=True)
    for _name, _command in _members.items():
        _typer.command(_name, cls=FriendlyCommand)(_command)
    app.add_typer(_typer, rich_help_panel=_panel)


if __name__ == "__main__":
    app()
