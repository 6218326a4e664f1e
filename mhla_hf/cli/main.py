# SPDX-License-Identifier: Apache-2.0
"""The command table of `mhla-hf`. Commands import what is heavy when they run, so that `--help` is quick."""

import typer

from .. import __version__
from . import (
    bench,
    calibrate,
    card,
    check_lora,
    convert,
    demo,
    doctor,
    env,
    inspect,
    models,
    push,
    recover,
    serve,
    train,
)
from .app import app_command
from .errors import FriendlyGroup
from .help import CHECK, CONVERT, LOOK, RECOVER, SHARE, examples


app = typer.Typer(
    cls=FriendlyGroup,
    name="mhla-hf",
    help="Multi-Head Linear Attention for diffusers and transformers.",
    epilog="Documentation: docs/command_line.md of the repository. Exit codes: 0 done, 1 error, 2 wrong usage, "
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


app.command(
    "convert",
    rich_help_panel=CONVERT,
    epilog=examples(
        "mhla-hf convert Wan-AI/Wan2.1-T2V-1.3B-Diffusers wan-mhla --blocks 3,5,10 --layers 2/3 --dtype bfloat16",
        "mhla-hf convert Qwen/Qwen3-0.6B qwen3-mhla --block-size 128 --layers 2/3",
    ),
)(convert.convert_command)
app.command(
    "import-official",
    rich_help_panel=CONVERT,
    epilog=examples("mhla-hf import-official wan_mhla.pt wan-mhla --base Wan-AI/Wan2.1-T2V-1.3B-Diffusers"),
)(convert.import_official_command)
app.command(
    "unconvert",
    rich_help_panel=CONVERT,
    epilog=examples(
        "mhla-hf unconvert wan-mhla wan-softmax",
        "mhla-hf unconvert qwen3-mhla qwen3-softmax --original Qwen/Qwen3-0.6B",
    ),
)(convert.unconvert_command)
app.command("models", rich_help_panel=CONVERT)(models.models_command)

app.command(
    "recover",
    rich_help_panel=RECOVER,
    epilog=examples(
        "mhla-hf recover Wan-AI/Wan2.1-T2V-1.3B-Diffusers wan-mhla --data videos/ --recipe wan-1.3b-hybrid",
        "mhla-hf recover Qwen/Qwen3-0.6B qwen3-mhla --data code/ --keep 25%",
    ),
)(recover.recover_command)
app.command(
    "calibrate",
    rich_help_panel=RECOVER,
    epilog=examples("mhla-hf calibrate wan-mhla", "mhla-hf calibrate minilm-mhla --data texts/"),
)(calibrate.calibrate_command)
app.command(
    "select-layers",
    rich_help_panel=RECOVER,
    epilog=examples("mhla-hf select-layers Qwen/Qwen3-0.6B --block-size 128 --data texts/ --keep 25%"),
)(calibrate.select_layers_command)
app.add_typer(train.app, name="train", rich_help_panel=RECOVER)

app.command(
    "inspect",
    rich_help_panel=LOOK,
    epilog=examples(
        "mhla-hf inspect wan-mhla --html report.html --base Wan-AI/Wan2.1-T2V-1.3B-Diffusers",
        "mhla-hf inspect qwen3-mhla --prompt 'import this' --json figures.json",
    ),
)(inspect.inspect_command)
app.add_typer(bench.app, name="bench", rich_help_panel=LOOK)
app.command(
    "app",
    rich_help_panel=LOOK,
    epilog=examples("mhla-hf app demo-output/mhla", "mhla-hf app you/wan-mhla --export-space space"),
)(app_command)
app.command("demo", rich_help_panel=LOOK)(demo.run_command)

app.command(
    "card",
    rich_help_panel=SHARE,
    epilog=examples("mhla-hf card wan-mhla", "mhla-hf card wan-mhla --benchmark decode.json --output -"),
)(card.card_command)
app.command(
    "push",
    rich_help_panel=SHARE,
    epilog=examples(
        "mhla-hf push wan-mhla you/wan-mhla --private",
        "mhla-hf push qwen3-mhla you/qwen3-mhla --benchmark decode.json --create-pr",
    ),
)(push.push_command)
app.command(
    "check-lora",
    rich_help_panel=SHARE,
    epilog=examples("mhla-hf check-lora wan-mhla my-lora.safetensors"),
)(check_lora.check_lora_command)
app.command(
    "serve",
    rich_help_panel=SHARE,
    context_settings=serve.PASSED_ON,
    options_metavar="MODEL [OPTIONS]",
    epilog=examples("mhla-hf serve qwen3-mhla", "mhla-hf serve qwen3-mhla --port 8001 --dtype bfloat16"),
)(serve.serve_command)

app.command(
    "doctor",
    rich_help_panel=CHECK,
    epilog=examples(
        "mhla-hf doctor wan-mhla", "mhla-hf doctor user/wan-mhla --json report.json", "mhla-hf doctor --kernels"
    ),
)(doctor.doctor_command)
app.command("env", rich_help_panel=CHECK)(env.env_command)


if __name__ == "__main__":
    app()
