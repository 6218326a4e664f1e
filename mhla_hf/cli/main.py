# SPDX-License-Identifier: Apache-2.0
"""The command table of `mhla-hf`. Commands import what is heavy when they run, so that `--help` is quick."""

import typer

from .. import __version__
from . import convert, doctor, look, recover, share
from .errors import FriendlyGroup


app = typer.Typer(
    cls=FriendlyGroup,
    name="mhla-hf",
    help="Multi-Head Linear Attention for diffusers and transformers.\n\nStart here: demo → recover → inspect → push.",
    epilog="Paper: https://arxiv.org/abs/2601.07832. Exit codes: 0 done, 1 error, 2 wrong usage, "
    "130 stopped by Ctrl-C.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"mhla-hf {__version__}")
        raise typer.Exit()


@app.callback()
def main(
    version: bool = typer.Option(False, "--version", help="Show the version.", callback=_show_version, is_eager=True),
    debug: bool = typer.Option(
        False, "--debug", help="Show the traceback of an error; may also stand after the command."
    ),
) -> None:
    pass


_COMMANDS = {
    "Convert": (
        convert.convert_command,
        convert.import_official_command,
        convert.unconvert_command,
        convert.models_command,
    ),
    "Recover and train": (recover.recover_command, recover.calibrate_command, recover.select_layers_command),
    "Look and measure": (look.demo_command, look.inspect_command, look.app_command),
    "Share": (share.card_command, share.push_command, share.check_lora_command),
    "Check": (doctor.doctor_command, doctor.env_command),
}
"""The commands by their panels of `mhla-hf --help`, in their order."""

for _panel, _commands in _COMMANDS.items():
    for _command in _commands:
        _name = _command.__name__.removesuffix("_command").replace("_", "-")
        app.command(_name, rich_help_panel=_panel)(_command)
app.command("serve", rich_help_panel="Share", **share.SERVE)(share.serve_command)
app.add_typer(recover.training, name="train", rich_help_panel="Recover and train")
app.add_typer(look.benchmarks, name="bench", rich_help_panel="Look and measure")


if __name__ == "__main__":
    app()
