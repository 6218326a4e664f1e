# SPDX-License-Identifier: Apache-2.0
"""`mhla-hf check-lora`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .options import HUB, Component, Device, Hub, Quiet, Seed, completion, given, with_options
from .output import JsonFile, write_report


if TYPE_CHECKING:
    from rich.console import Console

    from ..lora_check import LoraReport


@with_options(HUB)
def check_lora_command(
    model: Annotated[str, typer.Argument(help="Directory or Hub id of an MHLA pipeline or model.")],
    lora: Annotated[Path, typer.Argument(help="LoRA: a directory or .safetensors file of peft, diffusers or kohya.")],
    *,
    original: Annotated[
        str | None,
        typer.Option(help="Softmax original: directory or Hub id. Default: what conversion.json names."),
    ] = None,
    component: Component = None,
    samples: Annotated[int, typer.Option(help="Random inputs to compare outputs on; 0 runs neither model.")] = 4,
    max_tokens: Annotated[int, typer.Option(help="Largest number of tokens of an input.")] = 2048,
    seed: Seed = 0,
    device: Device = "auto",
    dtype: Annotated[
        str,
        typer.Option(
            help="Type of the weights: float32 or bfloat16.",
            metavar="NAME",
            autocompletion=completion(("float32", "bfloat16")),
        ),
    ] = "float32",
    json_file: JsonFile = None,
    quiet: Quiet = False,
    **options: Any,
) -> None:
    """Check which weights of a LoRA apply to an MHLA model.

    The LoRA was made for the softmax original. On random inputs, the change that it makes to the outputs of both
    models is compared.
    """
    import torch

    from ..lora_check import check_lora
    from ..utils.machine import choose_device

    types = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    if dtype not in types:
        raise ValueError(f"--dtype {dtype} is not one of {', '.join(types)}.")
    report = check_lora(
        model,
        lora,
        original=original,
        component=component,
        samples=samples,
        max_tokens=max_tokens,
        seed=seed,
        device=choose_device(device),
        dtype=types[dtype],
        **given(options, Hub),
    )
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
    table = Table("weights for", "count", "change / weight", box=SIMPLE_HEAD)
    for kind, count in report.counts.items():
        if count and kind != "nothing":
            table.add_row(f"{kind}s", str(count), _number(report.relative_change((kind,))))
    if lost:
        table.add_row("nothing", str(lost), "")
    if report.others:
        table.add_row("other models of the pipeline", str(len(report.others)), "")
    applied = "all" if not lost else f"{total - lost} of"
    console.print(f"{escape(report.lora)}: {applied} {total} weights apply to {report.component}.", highlight=False)
    console.print(table)
    reasons = {name: target.reason for name, target in report.weights.items() if target.reason}
    for name, reason in list(reasons.items())[:3]:
        console.print(f"  {escape(shorten_text(name))}: {escape(reason)}", highlight=False)
    layers = sorted({module.layer for module in report.modules.values() if module.layer is not None})
    attention = ("MHLA layer", "softmax layer")
    table = Table("layer", "attention", "its change / weight", "other modules'", box=SIMPLE_HEAD)
    for layer in layers:
        kinds = {module.kind for module in report.modules.values() if module.layer == layer} & set(attention)
        names = ", ".join(sorted(kind.removesuffix(" layer") for kind in kinds))
        own, rest = report.relative_change(attention, layer), report.relative_change(("other module",), layer)
        table.add_row(str(layer), names, _number(own), _number(rest))
    if layers:
        console.print(table)
    if report.probes:
        _show_probes(report, console)


def _show_probes(report: "LoraReport", console: "Console") -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table("noise", "MHLA moves", "original moves", "MHLA / original", "cosine", box=SIMPLE_HEAD)
    for probe in report.probes:
        level = "" if probe.noise_level is None else f"{probe.noise_level:.2f}"
        values = (probe.mhla, probe.original, probe.ratio, probe.cosine)
        table.add_row(level, *map(_number, values))
    size = "" if report.grid is None else f" of {'×'.join(map(str, report.grid))} tokens"
    console.print(f"Outputs for {len(report.probes)} random inputs{size}:", highlight=False)
    console.print(table)
    console.print(f"Original: {report.original}", highlight=False, markup=False)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"
