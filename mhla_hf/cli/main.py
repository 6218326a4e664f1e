# SPDX-License-Identifier: Apache-2.0
"""The command table of `mhla-hf`. Commands import what is heavy when they run, so that `--help` is quick."""

from collections.abc import Callable
from typing import Any

import typer

from .. import __version__
from . import bench, convert, doctor, look, recover, share, train
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


def _add(name: str, panel: str, command: Callable[..., None] | typer.Typer, *examples: str, **settings: Any) -> None:
    """Add a command or a group of commands, with command lines to copy at the end of its help."""
    if isinstance(command, typer.Typer):
        app.add_typer(command, name=name, rich_help_panel=panel)
        return
    epilog = "\n".join(["Examples:" if len(examples) > 1 else "Example:", *examples]) if examples else None
    app.command(name, rich_help_panel=panel, epilog=epilog, **settings)(command)


_add(
    "convert",
    CONVERT,
    convert.convert_command,
    "mhla-hf convert Wan-AI/Wan2.1-T2V-1.3B-Diffusers wan-mhla --blocks 3,5,10 --layers 2/3 --dtype bfloat16",
    "mhla-hf convert Qwen/Qwen3-0.6B qwen3-mhla --block-size 128 --layers 2/3",
)
_add(
    "import-official",
    CONVERT,
    convert.import_official_command,
    "mhla-hf import-official wan_mhla.pt wan-mhla --base Wan-AI/Wan2.1-T2V-1.3B-Diffusers",
)
_add(
    "unconvert",
    CONVERT,
    convert.unconvert_command,
    "mhla-hf unconvert wan-mhla wan-softmax",
    "mhla-hf unconvert qwen3-mhla qwen3-softmax --original Qwen/Qwen3-0.6B",
)
_add("models", CONVERT, convert.models_command, "mhla-hf models", "mhla-hf models wan")

_add(
    "recover",
    RECOVER,
    recover.recover_command,
    "mhla-hf recover Wan-AI/Wan2.1-T2V-1.3B-Diffusers wan-mhla --data videos/ --recipe wan-1.3b-hybrid",
    "mhla-hf recover Qwen/Qwen3-0.6B qwen3-mhla --data code/ --keep 25%",
)
_add(
    "calibrate",
    RECOVER,
    recover.calibrate_command,
    "mhla-hf calibrate wan-mhla",
    "mhla-hf calibrate minilm-mhla --data texts/",
)
_add(
    "select-layers",
    RECOVER,
    recover.select_layers_command,
    "mhla-hf select-layers Qwen/Qwen3-0.6B --block-size 128 --data texts/ --keep 25%",
)
_add("train", RECOVER, train.app)

_add("demo", LOOK, look.demo_command)
_add(
    "inspect",
    LOOK,
    look.inspect_command,
    "mhla-hf inspect wan-mhla --html report.html --original Wan-AI/Wan2.1-T2V-1.3B-Diffusers",
    "mhla-hf inspect qwen3-mhla --prompt 'import this' --json figures.json",
)
_add("bench", LOOK, bench.app)
_add("app", LOOK, look.app_command, "mhla-hf app demo-output/mhla", "mhla-hf app you/wan-mhla --export-space space")

_add(
    "card",
    SHARE,
    share.card_command,
    "mhla-hf card wan-mhla",
    "mhla-hf card wan-mhla --benchmark decode.json --output -",
)
_add(
    "push",
    SHARE,
    share.push_command,
    "mhla-hf push wan-mhla you/wan-mhla --private",
    "mhla-hf push qwen3-mhla you/qwen3-mhla --benchmark decode.json --create-pr",
)
_add("check-lora", SHARE, share.check_lora_command, "mhla-hf check-lora wan-mhla my-lora.safetensors")
_add(
    "serve",
    SHARE,
    share.serve_command,
    "mhla-hf serve qwen3-mhla",
    "mhla-hf serve qwen3-mhla --port 8001 --dtype bfloat16",
    context_settings=share.PASSED_ON,
    options_metavar="MODEL [OPTIONS]",
)

_add(
    "doctor",
    CHECK,
    doctor.doctor_command,
    "mhla-hf doctor wan-mhla",
    "mhla-hf doctor user/wan-mhla --json report.json",
    "mhla-hf doctor --kernels",
)
_add("env", CHECK, doctor.env_command)


if __name__ == "__main__":
    app()
