# SPDX-License-Identifier: Apache-2.0
"""`mhla-hf demo`."""

from pathlib import Path
from typing import Any

from ..demo import DemoConfig
from .options import DIRECTORY, Quiet, argument, given, options_from, with_options
from .output import JsonFile, say, show_table, write_report


_TRAINING, _GENERATION = "Training", "Generation"
_OPTIONS = options_from(
    DemoConfig,
    names=(
        "base", "seed", "resume", "layers", "match_steps", "distill_steps", "train_videos", "held_out_videos",
        "prompts", "inference_steps", "guidance",
    ),
    panels={
        **dict.fromkeys(("match_steps", "distill_steps", "train_videos", "held_out_videos"), _TRAINING),
        **dict.fromkeys(("prompts", "inference_steps", "guidance"), _GENERATION),
    },
    flags={"prompts": "--prompt", "resume": "--resume/--no-resume"},
    metavars={"base": DIRECTORY, "prompts": "TEXT"},
)  # fmt: skip


@with_options(_OPTIONS)
def run_command(
    output: Path = argument("Directory to write.", default=Path("demo-output")),
    *,
    json_file: JsonFile = None,
    quiet: Quiet = False,
    **options: Any,
) -> None:
    """Convert, recover and compare a small video model on a CPU.

    A Wan pipeline of moving digits becomes MHLA, MHLA with a softmax window, and linear attention. OUTPUT gets a
    report, videos, figures and the recovered pipelines. A demo that was stopped resumes.
    """
    config = DemoConfig(output=str(output), progress=not quiet, **given(options, DemoConfig))

    from ..demo.report import STAGE_TITLES, TITLES
    from ..demo.run import run_demo

    report = run_demo(config)
    write_report(json_file, report)
    if quiet:
        return
    rows: list[list[str]] = [["softmax", "", "", "", f"{report['softmax']['held_out_loss']:.4f}"]]
    for name, entry in report["variants"].items():
        cells = [f"{cell['loss']:.4f} ({cell['above_softmax_percent']:+.1f} %)" for cell in entry["held_out"].values()]
        rows.append([TITLES[name], *cells])
    show_table(["model", *STAGE_TITLES.values()], rows, title="Held-out loss, and how far above softmax")
    say(f"Report, videos and figures: {output}\nThe MHLA pipeline: {output / 'mhla'}")
