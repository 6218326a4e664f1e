# SPDX-License-Identifier: Apache-2.0
"""`mhla-hf inspect`."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .options import FILE, HUB, SIZES, Component, Device, Hub, Quiet, Seed, Sizes, given, with_options
from .output import JsonFile, write_report


if TYPE_CHECKING:
    from ..analysis import InspectionReport, ModelInspection

_PROBE = "Probe"


@with_options(SIZES, HUB)
def inspect_command(
    model: Annotated[str, typer.Argument(help="Directory or Hub id of an MHLA pipeline or model.")],
    *,
    html: Annotated[Path | None, typer.Option(help="Write a self-contained HTML page to FILE.", metavar=FILE)] = None,
    base: Annotated[
        str | None,
        typer.Option(
            help="Softmax original to compare outputs with: directory or Hub id. Default: what conversion.json names, "
            "if it is on this machine."
        ),
    ] = None,
    component: Component = None,
    layers: Annotated[
        str | None, typer.Option(help="Layers to inspect, such as 1,2,4. Default: all MHLA layers.", metavar="LAYERS")
    ] = None,
    block: Annotated[
        int | None, typer.Option(help="Block whose weights the page shows on the token grid. Default: the middle one.")
    ] = None,
    prompts: Annotated[
        list[str] | None,
        typer.Option(
            "--prompt", help="Prompt of a pipeline, or text; may be repeated.", metavar="TEXT", rich_help_panel=_PROBE
        ),
    ] = None,
    images: Annotated[
        list[Path] | None,
        typer.Option(
            "--image", help="Image for a vision model; may be repeated.", metavar=FILE, rich_help_panel=_PROBE
        ),
    ] = None,
    samples: Annotated[
        int, typer.Option(help="Number of samples; 0 inspects the weights only.", rich_help_panel=_PROBE)
    ] = 4,
    tokens: Annotated[
        int,
        typer.Option(
            help="Largest number of rows (query tokens) of attention matrices, and of tokens of a text.",
            rich_help_panel=_PROBE,
        ),
    ] = 512,
    seed: Seed = 0,
    device: Device = "auto",
    json_file: JsonFile = None,
    quiet: Quiet = False,
    **options: Any,
) -> None:
    """Show what MHLA has learned in each layer.

    It reports the mixing weights of each layer, and on a few samples the rank and entropy of its attention compared
    with softmax and linear attention, and the error of its output against the base model.
    """
    from ..analysis import inspect_directory, write_html

    if html is not None and html.is_dir():
        raise ValueError(f"html={str(html)!r} is a directory; give a file.")
    hub = given(options, Hub)
    _refuse_damaged(model, hub)
    with _progress(not quiet) as progress:
        report = inspect_directory(
            model,
            base=base,
            component=component,
            prompts=prompts or (),
            images=images or (),
            samples=samples,
            layers=layers,
            block=block,
            tokens=tokens,
            seed=seed,
            device=device,
            progress=progress,
            **given(options, Sizes),
            **hub,
        )
    write_report(json_file, report.to_dict())
    if html is not None:
        write_html(report, html, block=block)
    if not quiet:
        _show(report, html)


def _refuse_damaged(model: str, hub: dict[str, Any]) -> None:
    """Raises `ValueError` for a directory that cannot be loaded, before a loader says so in its own words."""
    from ..hub.checks import check_directory
    from ..utils.locations import find_directory

    directory, _ = find_directory(model, **hub)
    errors = [problem for problem in check_directory(directory, values=False) if problem.level == "error"]
    if errors:
        raise ValueError(f"{model} cannot be loaded: {errors[0]} (mhla-hf doctor lists all problems)")


@contextmanager
def _progress(shown: bool) -> Iterator[Callable[[str, int, int], None]]:
    """A progress bar for each model on standard error."""
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True, quiet=not shown), disable=not shown, transient=True) as bar:
        loading: Any = bar.add_task("loading the model and its probe", total=None)
        tasks: dict[str, Any] = {}

        def tell(name: str, done: int, total: int) -> None:
            bar.update(loading, visible=False)
            if name not in tasks:
                tasks[name] = bar.add_task(f"inspecting {name}", total=total)
            bar.update(tasks[name], completed=done, total=total)

        yield tell


def _show(report: "InspectionReport", html: Path | None) -> None:
    from rich.console import Console
    from rich.markup import escape

    console = Console(soft_wrap=True, highlight=False)
    for model in report.models:
        converted = sum(layer.kind == "mhla" for layer in model.layers)
        others = [str(layer.index) for layer in model.layers if layer.kind != "mhla"]
        layouts = [(layer.mixing.layout.blocks, layer.mixing.grid) for layer in model.mhla_layers if layer.mixing]
        described = []
        for blocks, grid in dict.fromkeys(layouts):
            tokens = f" on a grid of {'×'.join(map(str, grid))} tokens" if grid else ""
            described.append(f"{'×'.join(map(str, blocks))} blocks{tokens}")
        kept = f"; {', '.join(others)} {'is' if len(others) == 1 else 'are'} {model.layers[0].original}"
        console.print(
            f"{escape(model.class_name)} ({escape(model.component)}): {converted} of {len(model.layers)} layers are "
            f"MHLA, with {' or '.join(described)}{kept if others else ''}"
        )
        if model.is_untrained:
            console.print("It is untrained since its conversion: all mixing weights have their initial values.")
        console.print(_table(model))
        for note in model.notes:
            console.print(escape(note))
        if model.output_error is not None:
            error = f"{model.output_error['mean']:.4f} ± {model.output_error['std']:.4f}"
            console.print(f"Relative error of the model's output against {escape(report.base)}: {error}")
    console.print(
        "moved: relative change of the mixing weights since initialisation; pattern: the same with rows scaled to an "
        "absolute sum of 1."
    )
    if report.probe:
        console.print(
            f"Probe: {escape(report.probe)}. Rank and entropy are means over heads and samples: "
            f"{report.models[0].layers[0].original}|MHLA|linear."
        )
        if not report.base:
            console.print("No base model was found, so there are no output errors; --base names it.")
    if html is not None:
        console.print(f"Wrote {escape(str(html))}")


def _table(model: "ModelInspection") -> Any:
    from rich.table import Table

    layers = model.mhla_layers
    with_probe, with_base = (any(getattr(layer, name) for layer in layers) for name in ("attention", "output_error"))
    columns = ["layer", "moved", "pattern"]
    columns += ["effective rank", "relative entropy"] * with_probe + ["output error"] * with_base
    table = Table(*columns)
    for layer in layers:
        assert layer.mixing is not None
        movement, pattern = (sum(x) / len(x) for x in (layer.mixing.movement, layer.mixing.pattern_movement))
        cells = [str(layer.index), f"{movement:.3f}", f"{pattern:.3f}"]
        if with_probe:
            found = layer.attention.statistics.values() if layer.attention else ()
            for statistic, digits in (("effective_rank", 0), ("relative_entropy", 2)):
                cells.append("|".join(f"{kind[statistic]['mean']:.{digits}f}" for kind in found))
        if with_base:
            cells.append(f"{layer.output_error['mean']:.4f}" if layer.output_error else "")
        table.add_row(*cells)
    return table
