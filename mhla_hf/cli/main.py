# SPDX-License-Identifier: Apache-2.0
"""The command table of `mhla-hf`. Commands import what is heavy when they run, so that `--help` is quick."""

from collections.abc import Callable

import typer

from .. import __version__
from . import convert, doctor, look, recover, share
from .errors import FriendlyGroup


CONVERT, RECOVER, LOOK, SHARE, CHECK = "Convert", "Recover and train", "Look and measure", "Share", "Check"
"""Panels of `mhla-hf --help`, in their order."""

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


_COMMANDS: dict[str, dict[str, Callable[..., None] | typer.Typer]] = {
    CONVERT: {
        "convert": convert.convert_command,
        "import-official": convert.import_official_command,
        "unconvert": convert.unconvert_command,
        "models": convert.models_command,
    },
    RECOVER: {
        "recover": recover.recover_command,
        "calibrate": recover.calibrate_command,
        "select-layers": recover.select_layers_command,
        "train": recover.training,
    },
    LOOK: {
        "demo": look.demo_command,
        "inspect": look.inspect_command,
        "app": look.app_command,
        "bench": look.benchmarks,
    },
    SHARE: {
        "card": share.card_command,
        "push": share.push_command,
        "check-lora": share.check_lora_command,
        "serve": share.serve_command,
    },
    CHECK: {"doctor": doctor.doctor_command, "env": doctor.env_command},
}
for _panel, _group in _COMMANDS.items():
    for _name, _command in _group.items():
        if isinstance(_command, typer.Typer):
            app.add_typer(_command, name=_name, rich_help_panel=_panel)
        else:
            app.command(_name, rich_help_panel=_panel, **(share.SERVE if _name == "serve" else {}))(_command)


if __name__ == "__main__":
    app()
