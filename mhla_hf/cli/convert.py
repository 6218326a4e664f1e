# SPDX-License-Identifier: Apache-2.0
"""`mhla-hf convert`, `unconvert`, `import-official` and `models`."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ..config import MHLAConfig, automatic_measure, automatic_share
from ..utils.locations import PIPELINE_INDEX, check_data, find_directory, is_weight_file
from . import options as common
from .options import Overwrite, Quiet, argument, given, option, options_of, with_options
from .output import JsonFile, say, show_table, write_first_card, write_report


if TYPE_CHECKING:
    from ..conversion import ConversionReport

_ORIGINAL_WEIGHTS = "Original weights of Wan"
_COMPONENTS = "Pipelines of several transformers"


class _Conversion:
    component: str | None = option(
        "The transformer to convert, such as transformer_2; of a file, its name in --base.", panel=_COMPONENTS
    )
    base: str | None = option("Pipeline that the file belongs to: directory or Hub id.", panel=_ORIGINAL_WEIGHTS)
    config: Path | None = option(
        "Directory of the model's config.json, if --base is not given.", panel=_ORIGINAL_WEIGHTS
    )
    variant: str | None = option("Only these weight files, such as fp16.", panel=common.WEIGHTS)
    subfolder: str | None = option("Only this folder of SOURCE.", panel="Hub")


class _Written:
    dtype: common.Dtype = None
    max_shard_size: str | None = option("Largest weight file, such as 2GB. Default: 5GB.", panel=common.WEIGHTS)
    overwrite: Overwrite = False


_WRITTEN = [*options_of(_Written), *common.HUB]
_CONVERSION = [*options_of(_Conversion), *_WRITTEN]


@with_options(common.CONVERSION, _CONVERSION)
def convert_command(
    source: str = argument(
        "SOURCE", "Directory of a pipeline or model, Hub id owner/name, or original Wan weights (.safetensors, .gguf)."
    ),
    output: Path = argument("OUTPUT", "Directory to write."),
    *,
    layers: common.Layers = None,
    mhla: str | None = option(
        'Options as JSON or a JSON file, also by component: {"transformer": {"blocks": [3,5,10]}, '
        '"transformer_2": null}. Those not named, or null, stay softmax; other options hold for all.',
        panel=_COMPONENTS,
    ),
    calibrate: bool = option("Fit the result to the original, as calibrate does.", "--calibrate", default=False),
    data: str | None = option(
        "Samples for --calibrate and --layers auto:..., as for mhla-hf calibrate.", callback=check_data
    ),
    json_file: JsonFile = None,
    quiet: Quiet = False,
    **options: Any,
) -> None:
    """Convert a model or pipeline to MHLA.

    SOURCE may be a pipeline, a model of diffusers or transformers, or a file with original weights of Wan. Conversion
    keeps every weight but changes the attention: run mhla-hf calibrate or mhla-hf recover next.

    Examples:

        mhla-hf convert Wan-AI/Wan2.1-T2V-1.3B-Diffusers wan-mhla --blocks 3,5,10 --layers 2/3 --dtype bfloat16
        mhla-hf convert Qwen/Qwen3-0.6B qwen3-mhla --block-size 128 --layers 2/3
    """
    fields = common.mhla_options(mhla, options)
    share = None if layers is None else automatic_share(layers)
    if share is None:
        MHLAConfig(layers=layers)
    if data is not None and not calibrate and share is None:
        raise ValueError("data has no effect without --calibrate or --layers auto:...")
    if calibrate and data is None and options["base"] is None and _is_bare(source, options):
        raise ValueError("data must be given for --calibrate: SOURCE has no pipeline that could make samples.")

    from ..conversion import convert_pretrained
    from .recover import run_calibration, run_selection

    hub = {**given(options, common.HUB), "subfolder": options["subfolder"]}
    if calibrate and data is not None and not is_weight_file(source):
        from ..models.directory import ModelDirectory
        from ..recovery.data import check_samples

        check_samples(ModelDirectory.open(source, options["component"], **hub), data)
    if share == 1:
        layers = "all"
    elif share is not None:
        selection = {"component": options["component"], "probe": {"data": data}, "hub": hub, "keep": float(1 - share)}
        selection["by"] = automatic_measure(str(layers))
        layers = run_selection(source, fields, quiet, **selection).option
    report = convert_pretrained(
        source,
        output,
        fields,
        layers=layers,
        progress=not quiet,
        finish=write_first_card,
        **given(options, _CONVERSION),
    )
    if not quiet:
        _show(report)
    if calibrate:
        run_calibration(output, None, quiet, data=data)
    _write_record(json_file, output)


def _is_bare(source: str, options: Mapping[str, Any]) -> bool:
    """Whether a location, which is downloaded from the Hub, is a model without a pipeline."""
    if is_weight_file(source):
        return True
    folder, _ = find_directory(source, subfolder=options["subfolder"], **given(options, common.HUB))
    return not (folder / PIPELINE_INDEX).is_file()


class _Unconversion:
    original: str | None = option(
        "Softmax original of a calibrated or trained model: directory or Hub id. Default: the one that "
        "conversion.json names."
    )
    overwrite: Overwrite = False


_UNCONVERSION = [*options_of(_Unconversion), *common.HUB]


@with_options(_UNCONVERSION)
def unconvert_command(
    model: str = argument("MODEL", "Directory of an MHLA pipeline or model, or Hub id owner/name."),
    output: Path = argument("OUTPUT", "Directory to write."),
    *,
    json_file: JsonFile = None,
    quiet: Quiet = False,
    **options: Any,
) -> None:
    """Write the softmax original of an MHLA model or pipeline.

    A model that is only converted still has the pretrained weights. Those of a calibrated or trained one are taken
    from its original.

    Examples:

        mhla-hf unconvert wan-mhla wan-softmax
        mhla-hf unconvert qwen3-mhla qwen3-softmax --original Qwen/Qwen3-0.6B
    """
    from ..conversion import unconvert_pretrained

    report = unconvert_pretrained(model, output, progress=not quiet, **given(options, _UNCONVERSION))
    if not quiet:
        models = ", ".join(f"{name} ({part.target_class})" for name, part in report.components.items())
        say(f"Wrote {report.destination}: {models} without MHLA.")
    _write_record(json_file, output)


class _Official:
    base: str | None = option("Wan pipeline to take the other components from: directory or Hub id.")
    num_heads: int | None = option("Number of heads; needed only if heads are not 128 wide.")


_OFFICIAL = [*common.conversion_options("blocks", "grid", "normalizer"), *options_of(_Official), *_WRITTEN]


@with_options(_OFFICIAL)
def import_official_command(
    source: Path = argument("SOURCE", "Safetensors file, directory of shards, or torch file."),
    output: Path = argument("OUTPUT", "Directory to write."),
    *,
    json_file: JsonFile = None,
    quiet: Quiet = False,
    **options: Any,
) -> None:
    """Convert a Wan-MHLA checkpoint of the paper's authors.

    It becomes a transformer of diffusers, or with --base a complete pipeline.

    Examples:

        mhla-hf import-official wan_mhla.pt wan-mhla --base Wan-AI/Wan2.1-T2V-1.3B-Diffusers
    """
    checked = given(options, _OFFICIAL)

    from ..conversion import import_official

    report = import_official(source, output, progress=not quiet, finish=write_first_card, **checked)
    if not quiet:
        _show(report)
    _write_record(json_file, output)


def models_command(
    name: str | None = argument("NAME", "Show models whose name, kind or classes contain NAME.", default=None),
    refused: bool = option("List models that MHLA does not support, and why.", "--refused", default=False),
    presets: bool = option("List the names that from_preset knows.", "--presets", default=False),
    json_output: bool = option("Print JSON instead of tables.", "--json", default=False),
) -> None:
    """List the supported models.

    Types of transformers are listed by their `model_type`, with the kind of model and what differs there.

    Examples:

        mhla-hf models
        mhla-hf models wan
    """
    import dataclasses

    from ..models.registry import ModelFamily, describe, refused_families, supported_models
    from ..presets import PRESETS

    if presets and refused:
        raise typer.BadParameter("give --presets or --refused, not both")
    found: Mapping[str, Any] = PRESETS if presets else refused_families() if refused else supported_models()
    tables: dict[str, list[dict[str, str]]] = {}
    shown = []
    for key, entry in found.items():
        if presets:
            title, cells = "presets", {"preset": key, "model": entry.description}
        else:
            title = "diffusers" if isinstance(entry, ModelFamily) else "transformers"
            cells = {"model": key, "kind": entry.kind, "reason" if refused else "note": describe(entry)}
        if (name or "").lower() in " ".join(cells.values()).lower():
            tables.setdefault(title, []).append(cells)
            derived = {"mhla_class": entry.mhla_class} if isinstance(entry, ModelFamily) else {}
            shown.append({"name": key} | dataclasses.asdict(entry) | derived)
    if json_output:
        typer.echo(json.dumps(shown, indent=2))
        return
    for title, rows in tables.items():
        show_table(rows, title=f"{title}: {len(rows)}")
    if not shown:
        listed = "presets" if presets else "refused models" if refused else "supported models"
        others = "" if presets or refused else f"; mhla-hf models {name} --refused searches those without MHLA"
        typer.echo(f"No entry of the {listed} contains {name!r}{others}.")


def _write_record(json_file: Path | None, directory: Path) -> None:
    """Write what the directory records of its conversion."""
    from ..models.directory import CONVERSION_RECORD
    from ..utils.files import read_json

    if json_file is not None:
        write_report(json_file, read_json(directory / CONVERSION_RECORD, CONVERSION_RECORD))


def _show(report: "ConversionReport") -> None:
    from ..conversion.writing import advice
    from ..models.registry import MHLA_CLASSES
    from ..recovery.recipes import default_settings
    from ..utils.messages import format_bytes

    rows = []
    for name, part in report.components.items():
        # Options of a model with several towers are by tower.
        towers = {"": part.mhla} if "block_size" in part.mhla else part.mhla
        for weights in part.weight_sets:
            rows.append(
                {
                    "component": name if weights.variant is None else f"{name} ({weights.variant})",
                    "MHLA layers": f"{len(part.mhla_layers)} of {part.num_layers}",
                    "blocks": "\n".join(_blocks(options) for options in towers.values()),
                    "copied": f"{weights.copied_parameters:,}",
                    "new parameters": f"{part.initialised_parameters:,}",
                }
            )
    show_table(rows)
    for part in report.components.values():
        if part.warning:
            say(f"Warning: {part.warning}", style="yellow")
    say(f"Wrote {report.destination} ({format_bytes(report.bytes_written)}); conversion.json records the sources.")
    if (next_step := advice(report)) is not None:
        say(next_step)
    for part in report.components.values():
        family = MHLA_CLASSES.get(part.target_class)
        better = default_settings()["defaults"].get(family and family.training, {}).get("mhla", {})
        if "feature_map" in better and all(part.mhla.get(name) != value for name, value in better.items()):
            say(f"mhla-hf recover starts from options that recover better: here --mhla '{json.dumps(better)}'.")
            break


def _blocks(options: Mapping[str, Any]) -> str:
    """Blocks of some options and the grid that they are made for, for a table."""
    blocks, size, grid = ("×".join(map(str, options[name] or ())) for name in ("blocks", "block_size", "grid"))
    return (blocks or f"of {size} tokens") + (f" on {grid}" if grid else "")
