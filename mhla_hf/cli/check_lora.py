# SPDX-License-Identifier: Apache-2.0
"""`mhla-hf check-lora`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .options import HUB, Component, Hub, Quiet, given, with_options
from .output import JsonFile, write_report


if TYPE_CHECKING:
    from ..lora_check import LoraReport


@with_options(HUB)
def check_lora_command(
    model: Annotated[str, typer.Argument(help="Directory or Hub id of an MHLA pipeline or model.")],
    lora: Annotated[Path, typer.Argument(help="LoRA: a directory or .safetensors file of peft, diffusers or kohya.")],
    *,
    component: Component = None,
    json_file: JsonFile = None,
    quiet: Quiet = False,
    **options: Any,
) -> None:
    """Check which weights of a LoRA for the softmax original apply to an MHLA model."""
    from ..lora_check import check_lora

    report = check_lora(model, lora, component=component, **given(options, Hub))
    write_report(json_file, report.to_dict())
    if not quiet:
        _show(report)


def _show(report: "LoraReport") -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from ..utils.messages import shorten_text

    console = Console(soft_wrap=True)
    total, lost = len(report.weights), report.counts["nothing"]
    applied = "all" if not lost else f"{total - lost} of"
    console.print(f"{escape(report.lora)}: {applied} {total} weights apply to {report.component}.", highlight=False)
    table = Table("weights for", "count", "layers", box=SIMPLE_HEAD)
    for kind, count in report.counts.items():
        targets = [target for target in report.weights.values() if target.kind == kind]
        layers = sorted({target.layer for target in targets if target.layer is not None})
        if count:
            table.add_row(kind if kind == "nothing" else f"{kind}s", str(count), ", ".join(map(str, layers)))
    if report.others:
        table.add_row("other models of the pipeline", str(len(report.others)), "")
    console.print(table)
    examples = {target.reason: name for name, target in report.weights.items() if target.reason}
    for reason, name in list(examples.items())[:3]:
        console.print(f"  {escape(shorten_text(name))}: {escape(reason)}", highlight=False)
