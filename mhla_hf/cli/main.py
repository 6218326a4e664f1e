# SPDX-License-Identifier: Apache-2.0
"""The command table of `mhla-hf`. Commands import what is heavy when they run, so that `--help` is quick."""

import typer

from .. import __version__
from . import (
    bench,
    calibrate,
    check_lora,
    convert,
    demo,
    doctor,
    models,
    recover,
    train,
)
from .errors import FriendlyGroup


app = typer.Typer(
    cls=FriendlyGroup,
    name="mhla-hf",
    help="Multi-Head Linear Attention for diffusers and transformers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"mhla-hf {__version__}")
        raise typer.Exit()


@app.callback()
def main(
    version: bool = typer.Option(False, "--version", help="Show the version.", callback=_show_version, is_eager=True),
) -> None:
    pass


app.command("convert")(convert.convert_command)
app.command("import-official")(convert.import_official_command)
app.command("recover")(recover.recover_command)
app.command("calibrate")(calibrate.calibrate_command)
app.command("select-layers")(calibrate.select_layers_command)
app.add_typer(train.app, name="train")
app.add_typer(bench.app, name="bench")
app.command("demo")(demo.run_command)
app.command("check-lora")(check_lora.check_lora_command)
app.command("doctor")(doctor.doctor_command)
app.command("models")(models.models_command)


if __name__ == "__main__":
    app()
