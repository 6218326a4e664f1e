# SPDX-License-Identifier: Apache-2.0
"""`mhla-hf bench`: time, memory and quality on this machine, MHLA against other attention."""

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from ..config import CHOICES
from .help import DIRECTORY, FILE
from .options import DTYPES, Device, Quiet, completion, listed
from .output import JsonFile, write_report


app = typer.Typer(help="Measure speed, memory and quality on this machine.", no_args_is_help=True)

PlotFile = Annotated[
    Path | None, typer.Option("--plot", help="Draw a PNG file of the figures; needs matplotlib.", metavar=FILE)
]

_RANDOM = "Random model"
_MHLA = "MHLA"
_VARIANTS = ("ordinary", "mhla-torch", "mhla-triton")

Dtype = Annotated[
    str | None,
    typer.Option(
        help=f"{listed(DTYPES)}. Default: bfloat16 on a GPU, float32 on a CPU.",
        metavar="NAME",
        autocompletion=completion(DTYPES),
    ),
]
Quick = Annotated[bool, typer.Option("--quick", help="Measure a few sizes for a few rounds, to see that it works.")]
Compile = Annotated[bool, typer.Option("--compile", help="Compile the transformer blocks of all contestants.")]
Models = Annotated[
    str | None,
    typer.Option(
        help="Models, separated by commas, such as wan,dit-512. Default: those that suit the device.", metavar="NAMES"
    ),
]
Variants = Annotated[
    str | None,
    typer.Option(
        help=f"Contestants, separated by commas: {', '.join(_VARIANTS)}. Default: all.",
        metavar="NAMES",
        autocompletion=completion(_VARIANTS),
    ),
]
Seconds = Annotated[
    float | None, typer.Option(help="Approximate time for all runs of one size, in seconds.", metavar="SECONDS")
]


@app.callback()
def bench() -> None:
    pass


@app.command("op")
def operator_command(
    shapes: Annotated[
        str | None,
        typer.Option(
            help="Shapes, separated by commas, such as wan,causal-32k. Default: those that suit the device.",
            metavar="NAMES",
        ),
    ] = None,
    contestants: Annotated[
        str | None,
        typer.Option(
            help="Contestants, separated by commas, such as mhla-triton,softmax-cudnn. Default: all usual ones.",
            metavar="NAMES",
        ),
    ] = None,
    dtype: Dtype = None,
    device: Device = None,
    backward: Annotated[bool, typer.Option(help="Measure forward and backward together as well.")] = True,
    seconds: Seconds = None,
    quick: Quick = False,
    json_file: JsonFile = None,
    plot_file: PlotFile = None,
    quiet: Quiet = False,
) -> None:
    """Measure the operator alone against other attention.

    Sizes are those of models. Contestants take turns and inputs change from run to run; times are medians. The floor
    is the time of a copy of queries, keys, values and outputs, and of their gradients with a backward pass.
    """
    from ..benchmarks.operator import OperatorOptions, measure_operator
    from .bench_tables import show_operator

    options: dict[str, Any] = {
        "dtype": dtype,
        "device": device,
        "backward": backward,
        "quick": quick,
        "seconds": seconds,
    }
    options |= {"shapes": _names(shapes), "contestants": _names(contestants)}
    _measure(measure_operator, OperatorOptions, options, show_operator, json_file, plot_file, quiet)


@app.command("model")
def model_command(
    models: Models = None,
    contestants: Variants = None,
    dtype: Dtype = None,
    device: Device = None,
    compiled: Compile = False,
    seconds: Seconds = None,
    quick: Quick = False,
    json_file: JsonFile = None,
    plot_file: PlotFile = None,
    quiet: Quiet = False,
) -> None:
    """Measure the forward pass of whole models.

    Models with random weights and their own attention compete with MHLA in the same run.
    """
    options = {"step": "forward", "dtype": dtype, "device": device, "quick": quick, "seconds": seconds}
    _measure_models(options, models, contestants, compiled, json_file, plot_file, quiet)


@app.command("train")
def train_command(
    models: Models = None,
    contestants: Variants = None,
    dtype: Dtype = None,
    device: Device = None,
    compiled: Compile = False,
    checkpointing: Annotated[
        bool, typer.Option(help="Checkpoint gradients: keep the inputs of transformer blocks only.")
    ] = True,
    optimizer: Annotated[bool, typer.Option("--optimizer", help="End each step with one of AdamW.")] = False,
    seconds: Seconds = None,
    quick: Quick = False,
    json_file: JsonFile = None,
    plot_file: PlotFile = None,
    quiet: Quiet = False,
) -> None:
    """Measure a training step of whole models.

    Models with random weights and their own attention compete with MHLA in the same run.
    """
    options = {"step": "train", "dtype": dtype, "device": device, "quick": quick, "seconds": seconds}
    options |= {"checkpointing": checkpointing, "optimizer": optimizer}
    _measure_models(options, models, contestants, compiled, json_file, plot_file, quiet)


@app.command("decode")
def decode_command(
    model: Annotated[
        str | None,
        typer.Argument(help="Directory or Hub id of a causal language model. Default: a Llama with random weights."),
    ] = None,
    hidden_size: Annotated[int, typer.Option(help="Width of the hidden states.", rich_help_panel=_RANDOM)] = 256,
    layers: Annotated[int, typer.Option(help="Number of layers.", rich_help_panel=_RANDOM)] = 4,
    heads: Annotated[int, typer.Option(help="Number of query heads.", rich_help_panel=_RANDOM)] = 4,
    kv_heads: Annotated[
        int | None,
        typer.Option(help="Number of key and value heads. Default: as many as --heads.", rich_help_panel=_RANDOM),
    ] = None,
    block_size: Annotated[
        int | None, typer.Option(help="Tokens of a block. Default: the model's.", rich_help_panel=_MHLA)
    ] = None,
    feature_map: Annotated[
        str | None,
        typer.Option(
            help=f"φ(x): {listed(CHOICES['feature_map'])}. Default: the model's.",
            metavar="NAME",
            rich_help_panel=_MHLA,
            autocompletion=completion(CHOICES["feature_map"]),
        ),
    ] = None,
    contexts: Annotated[
        str, typer.Option(help="Tokens in the cache before decoding starts, separated by commas.", metavar="NUMBERS")
    ] = "2048,8192,32768",
    dtype: Annotated[
        str | None,
        typer.Option(
            help=f"{listed(DTYPES)}, or several separated by commas. Default: bfloat16 on a GPU, float32 on a CPU.",
            metavar="NAMES",
            autocompletion=completion(DTYPES),
        ),
    ] = None,
    cache: Annotated[
        str,
        typer.Option(
            help="KV cache: dynamic (which copies itself for every token) or static (made at once).",
            metavar="NAME",
            autocompletion=completion(("dynamic", "static")),
        ),
    ] = "dynamic",
    tokens: Annotated[int, typer.Option(help="Timed tokens.")] = 128,
    warmup: Annotated[int, typer.Option(help="Tokens before them that are not timed.")] = 8,
    batch_size: Annotated[int, typer.Option(help="Sequences side by side.")] = 1,
    device: Device = None,
    json_file: JsonFile = None,
    plot_file: PlotFile = None,
    quiet: Quiet = False,
) -> None:
    """Measure decoding: the MHLA cache against the KV cache.

    Memory of the caches and seconds per decoded token are given for each context.

    The MHLA cache is filled by random tokens that run through the model in parts, the KV cache with random keys and
    values; prompts are not timed. Times are medians; all caches take turns token by token.
    """
    options = {
        "model": model, "hidden_size": hidden_size, "layers": layers, "heads": heads, "kv_heads": kv_heads,
        "block_size": block_size, "feature_map": feature_map, "contexts": _numbers(contexts, "contexts"),
        "dtypes": _names(dtype), "cache": cache, "tokens": tokens, "warmup": warmup, "batch_size": batch_size,
        "device": device,
    }  # fmt: skip
    from ..benchmarks import DecodeOptions, measure_decoding
    from .bench_tables import show_decoding

    _measure(measure_decoding, DecodeOptions, options, show_decoding, json_file, plot_file, quiet)


@app.command("quality")
def quality_command(
    setting: Annotated[
        str,
        typer.Option(
            help="small (two CPU cores), large (a GPU) or smoke (seconds; its figures mean nothing).",
            metavar="NAME",
            autocompletion=completion(("small", "large", "smoke")),
        ),
    ] = "small",
    output: Annotated[Path, typer.Option(help="Directory of the JSON file and the images.", metavar=DIRECTORY)] = Path(
        "."
    ),
    work: Annotated[
        Path | None,
        typer.Option(
            help="Directory of finished trainings, to resume from. Default: runs/quality_dit-SETTING.",
            metavar=DIRECTORY,
        ),
    ] = None,
    seeds: Annotated[
        str | None, typer.Option(help="Seeds, separated by commas, such as 0,1,2.", metavar="NUMBERS")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Training steps.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Images per step.")] = None,
    guidance: Annotated[float | None, typer.Option(help="Guidance of the images that are shown; 1 for none.")] = None,
    device: Device = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads. Default: torch's choice.")] = None,
    jobs: Annotated[int, typer.Option(help="Trainings at a time, each with its share of the cores.")] = 1,
    quiet: Quiet = False,
) -> None:
    """Train small DiTs that differ in attention alone, and compare.

    MHLA, softmax and linear attention learn handwritten digits from the same weights, data and noise. Reported are the
    loss on held-out digits, the Fréchet distance of samples on features of a small classifier, how often that sees the
    class asked for, how far samples are from the scans of training, and sample images. Needs a checkout of the
    repository.
    """
    from ..utils.imports import import_from_checkout

    given: dict[str, Any] = {"steps": steps, "batch_size": batch_size, "guidance_scale": guidance}
    given["seeds"] = None if seeds is None else _numbers(seeds, "seeds")
    comparison = import_from_checkout("benchmarks.quality_dit.command", "mhla-hf bench quality")
    comparison.compare(setting, output, work, given, device=device, threads=threads, jobs=jobs, quiet=quiet)


def _measure_models(
    options: dict[str, Any],
    models: str | None,
    contestants: str | None,
    compiled: bool,
    json_file: Path | None,
    plot_file: Path | None,
    quiet: bool,
) -> None:
    from ..benchmarks.models import ModelOptions, measure_models
    from .bench_tables import show_models

    options |= {"models": _names(models), "contestants": _names(contestants)}
    options["compile_backend"] = "inductor" if compiled else None
    _measure(measure_models, ModelOptions, options, show_models, json_file, plot_file, quiet)


def _measure(
    measure: Callable[..., dict[str, Any]],
    options_class: Callable[..., Any],
    options: dict[str, Any],
    show: Callable[[dict[str, Any]], None],
    json_file: Path | None,
    plot_file: Path | None,
    quiet: bool,
) -> None:
    """Measures with the options that are not None, prints the table, and writes the files.

    Raises:
        ValueError: If a file is a directory, or a plot is wanted without matplotlib; before anything is measured.
    """
    if plot_file is not None and plot_file.is_dir():
        raise ValueError(f"plot={str(plot_file)!r} is a directory; give a file.")
    if plot_file is not None and find_spec("matplotlib") is None:
        raise ValueError("plot needs matplotlib (pip install matplotlib).")

    def announce(case: str) -> None:
        if not quiet:
            typer.echo(f"measuring {case}", err=True)

    given = {name: value for name, value in options.items() if value is not None}
    report = measure(options_class(**given), announce)
    show(report)
    write_report(json_file, report)
    if plot_file is not None:
        from ..benchmarks.plots import plot_report

        plot_report(report, plot_file)


def _numbers(text: str, name: str) -> tuple[int, ...]:
    """Parses numbers separated by commas.

    Raises:
        ValueError: If `text` is anything else; the message calls it `name`.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and len(part) < 10 for part in parts):
        raise ValueError(f"{name}={text!r:.100} must be numbers below 10⁹ separated by commas, such as 2048,8192.")
    return tuple(int(part) for part in parts)


def _names(text: str | None) -> tuple[str, ...] | None:
    return None if text is None else tuple(name.strip() for name in text.split(","))
