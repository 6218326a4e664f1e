# SPDX-License-Identifier: Apache-2.0
"""`mhla-hf demo`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from .options import DIRECTORY, Quiet, Seed
from .output import JsonFile, write_report


_TRAINING = "Training"
_GENERATION = "Generation"


def run_command(
    output: Annotated[Path, typer.Argument(help="Directory to write.")] = Path("demo-output"),
    base: Annotated[
        Path | None,
        typer.Option(
            help="Directory of a pretrained softmax pipeline. Default: the one in the package.", metavar=DIRECTORY
        ),
    ] = None,
    from_scratch: Annotated[
        bool,
        typer.Option("--from-scratch", help="Pretrain the base pipeline first; over an hour on a CPU."),
    ] = False,
    seed: Seed = 0,
    resume: Annotated[
        bool, typer.Option("--resume/--no-resume", help="Resume a stopped demo, or start again.")
    ] = True,
    match_steps: Annotated[
        int | None, typer.Option(help="Steps that match each layer's output to softmax.", rich_help_panel=_TRAINING)
    ] = None,
    distill_steps: Annotated[
        int | None, typer.Option(help="Steps that match the model's prediction.", rich_help_panel=_TRAINING)
    ] = None,
    train_videos: Annotated[int | None, typer.Option(help="Videos to train on.", rich_help_panel=_TRAINING)] = None,
    held_out_videos: Annotated[
        int | None, typer.Option(help="Videos of held-out scans to compare on.", rich_help_panel=_TRAINING)
    ] = None,
    prompt: Annotated[
        list[str] | None,
        typer.Option(
            help="Caption to generate, such as 'a three moves left'; may be repeated.",
            metavar="TEXT",
            rich_help_panel=_GENERATION,
        ),
    ] = None,
    inference_steps: Annotated[int | None, typer.Option(help="Denoising steps.", rich_help_panel=_GENERATION)] = None,
    guidance: Annotated[float | None, typer.Option(help="Guidance scale.", rich_help_panel=_GENERATION)] = None,
    json_file: JsonFile = None,
    quiet: Quiet = False,
) -> None:
    """Convert, recover and compare a small video model on a CPU.

    A Wan pipeline of moving digits becomes MHLA, MHLA with a softmax window, and linear attention. OUTPUT gets a
    report, videos, figures and the recovered pipeline.
    """
    from ..demo.config import DemoConfig

    given: dict[str, Any] = {
        "match_steps": match_steps,
        "distill_steps": distill_steps,
        "train_videos": train_videos,
        "held_out_videos": held_out_videos,
        "prompts": tuple(prompt) if prompt else None,
        "inference_steps": inference_steps,
        "guidance": guidance,
    }
    config = DemoConfig(
        output=output,
        base=base,
        from_scratch=from_scratch,
        seed=seed,
        resume=resume,
        progress=not quiet,
        **{name: value for name, value in given.items() if value is not None},
    )
    from ..demo.runner import run_demo

    report = run_demo(config)
    write_report(json_file, report)
    if not quiet:
        _show(config.output, report)


def _show(output: Path, report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    from ..demo.figures import STAGE_TITLES, TITLES

    table = Table(title="Held-out loss, and how far above softmax")
    table.add_column("model")
    for title in STAGE_TITLES.values():
        table.add_column(title, justify="right")
    table.add_row("softmax", *[""] * (len(STAGE_TITLES) - 1), f"{report['softmax']['held_out_loss']:.4f}")
    for name, entry in report["variants"].items():
        cells = entry["held_out"].values()
        table.add_row(TITLES[name], *[f"{c['loss']:.4f} ({c['above_softmax_percent']:+.1f} %)" for c in cells])
    console = Console()
    console.print(table)
    console.print(f"Report, videos and figures: {output}", highlight=False)
    console.print(f"The MHLA pipeline: {output / 'mhla'}", highlight=False)
