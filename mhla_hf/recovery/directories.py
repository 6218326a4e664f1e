# SPDX-License-Identifier: Apache-2.0
"""Calibration of MHLA directories: models are loaded, and the weights that changed replace those in the files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..conversion.report import FILE_NAME
from ..models.registry import MHLA_CLASSES
from ..models.source import Component, Source, read_source
from ..models.weight_files import check_weights, damage_named
from ..training.matching.layers import Batch, is_linear, mhla_layers
from ..utils.destinations import claim_destination
from ..utils.files import link_or_copy, write_json
from ..utils.json_files import read_json
from ..utils.source_files import list_files
from ..utils.tensor_files import TensorEntry, write_safetensors
from .calibration import DEFAULT_MEMORY_LIMIT, CalibrationReport, calibrate
from .probes import DEFAULT_SAMPLES, data_batches, pipeline_batches


TRAINING_RECORD = "training.json"


def calibrate_directory(
    directory: str | Path,
    *,
    output: str | Path | None = None,
    data: str | None = None,
    samples: int = DEFAULT_SAMPLES,
    batch_size: int = 4,
    seed: int = 0,
    prompts: Sequence[str] | None = None,
    memory_limit: int | str = DEFAULT_MEMORY_LIMIT,
    force: bool = False,
    overwrite: bool = False,
    device: str | None = None,
    progress: Callable[[int, int], None] | None = None,
    **call_options: Any,
) -> CalibrationReport:
    """Calibrates what a conversion wrote; see [`calibrate`][mhla_hf.calibrate].

    Weights are calibrated in fp32 and written in the types that their files have. Everything else of the directory
    stays as it is. The result takes its place at once, when it is complete.

    Args:
        directory: A converted pipeline of diffusers, or a converted model of diffusers or transformers.
        output: Another directory to write.
        data: See [`data_batches`][mhla_hf.recovery.probes.data_batches]. Pipelines need none.
        samples: Samples of the probe.
        batch_size: Samples of a batch, of `data`.
        seed: Seed of the probe.
        prompts: What a pipeline makes as its probe.
        memory_limit: See [`calibrate`][mhla_hf.calibrate].
        force: Take a model that has been trained or calibrated for one that has not.
        overwrite: Replace `output`.
        device: Where to compute; by default a GPU where there is one.
        progress: See [`calibrate`][mhla_hf.calibrate].
        **call_options: Arguments of a pipeline's call, such as `height` and `width`.

    Returns:
        What was done; the same is written to `conversion.json` under `calibration`.

    Raises:
        ValueError: If the directory is no MHLA model or was trained, data are missing, or an argument is wrong.
    """
    root = Path(directory).expanduser()
    if not root.is_dir():
        raise ValueError(f"{directory} is no directory; give one that mhla-hf convert wrote.")
    source = read_source(root, str(directory), wanted=MHLA_CLASSES)
    check_untrained(root, force)
    destination = root if output is None else Path(output).expanduser()
    with claim_destination(destination, overwrite=output is None or overwrite) as claimed:
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        models, batches = open_probe(
            source, data, device, samples=samples, batch_size=batch_size, seed=seed, prompts=prompts, **call_options
        )
        report, changed = CalibrationReport(), {}
        for name, model in models.items():
            before = {key: (value, value.clone()) for key, value in model.named_parameters() if key in _touched(model)}
            own = calibrate(model, batches[name], memory_limit=memory_limit, progress=progress)
            for layer in own.layers:
                layer.name = f"{name}.{layer.name}" if len(models) > 1 else layer.name
            report.layers += own.layers
            report.batches += own.batches
            report.seconds += own.seconds
            changed[name] = {key: value for key, (value, old) in before.items() if not torch.equal(value, old)}
        report.probe = {"data": data or "samples of the pipeline", "samples": samples, "seed": seed}
        with claimed.staging() as staging:
            _write(source, staging, changed, report)
    return report


def check_untrained(root: Path, force: bool) -> None:
    """Refuses models whose projections are no longer those of their original.

    Raises:
        ValueError: If records say so, without `force`.
    """
    if force:
        return
    record = root / FILE_NAME
    conversion = read_json(record, "the record") if record.is_file() else {}
    found = "has been trained" if (root / TRAINING_RECORD).is_file() or conversion.get("recovery") else ""
    found = found or ("has been calibrated" if conversion.get("calibration") else "")
    if found:
        raise ValueError(
            f"{root} {found}: its projections are not those of the original, which tell what to aim at. Convert the "
            "original again, or pass force=True (--force) to take it for untrained."
        )


def open_probe(
    source: Source, data: str | None, device: str, *, prompts: Sequence[str] | None, **options: Any
) -> tuple[dict[str, nn.Module], Mapping[str, Sequence[Batch]]]:
    """Loads the MHLA models of a directory in fp32, and makes batches for each.

    Raises:
        ValueError: If there are neither data nor a pipeline to make samples with.
    """
    call_options = {name: options.pop(name) for name in list(options) if name not in ("samples", "batch_size", "seed")}
    if data is None and source.pipeline is not None:
        from ..pipelines import load_pipeline

        for part in source.components:
            check_weights(part.folder)
        with damage_named(source.root):
            pipeline = load_pipeline(source.root, attn_implementation=None, torch_dtype=torch.float32)
        pipeline.to(device)
        options.pop("batch_size")
        batches = pipeline_batches(pipeline, prompts=prompts, **options, **call_options)
        return {part.name: getattr(pipeline, part.name) for part in source.components}, batches
    if data is None:
        raise ValueError(
            f"data must be given (--data): {source.root} is a model alone, which makes no samples by itself."
        )
    unused = sorted(name for name, value in {"prompts": prompts, **call_options}.items() if value is not None)
    if unused:
        raise ValueError(f"{', '.join(unused)}: of no use beside data.")
    models = {part.name: load_component(part).to(device) for part in source.components}
    probes = {
        name: data_batches(model, source.root, data, component=name, **options) for name, model in models.items()
    }
    return models, probes


def load_component(part: Component) -> nn.Module:
    """Loads an MHLA model of a directory in fp32.

    Raises:
        ValueError: If files are damaged, or the model has no MHLA layer.
    """
    model = part.load().eval()
    mhla_layers(model)
    return model


def _touched(model: nn.Module) -> set[str]:
    """Parameters that calibration may change: those of `mhla` modules and of linear maps."""
    names = {f"{layer.name}.mhla" for layer in mhla_layers(model)}
    return {
        key
        for name, module in model.named_modules()
        if is_linear(module) or name in names
        for key in (f"{name}.{own}" for own, _ in module.named_parameters())
    }


def _write(
    source: Source, staging: Path, changed: Mapping[str, Mapping[str, torch.Tensor]], report: CalibrationReport
) -> None:
    """Fills a directory like the source, with other values of some weights."""
    rewritten: set[Path] = {Path(FILE_NAME)}
    for part in source.components:
        values = changed.get(part.name) or {}
        for weights in part.weight_sets():
            readers = weights.open(floats_only=False)
            names = _stored_names(values, [name for reader in readers for name in reader.shapes], part)
            for reader in readers:
                new = {names[name]: values[name] for name in values if names[name] in reader.shapes}
                if not new:
                    continue
                relative = reader.path.relative_to(source.root)
                rewritten.add(relative)
                (staging / relative).parent.mkdir(parents=True, exist_ok=True)
                entries = [
                    TensorEntry(entry.name, entry.shape, entry.dtype, lambda value=new[entry.name]: value)  # type: ignore[misc]
                    if entry.name in new
                    else entry
                    for entry in reader.entries()
                ]
                write_safetensors(staging / relative, entries)
    for path in list_files(source.root):
        if path not in rewritten:
            (staging / path).parent.mkdir(parents=True, exist_ok=True)
            link_or_copy(source.root / path, staging / path)
    record = source.root / FILE_NAME
    content = read_json(record, "the record") if record.is_file() else {}
    write_json(staging / FILE_NAME, {**content, "calibration": report.to_dict()})


def _stored_names(values: Mapping[str, torch.Tensor], stored: Sequence[str], part: Component) -> dict[str, str]:
    """What the files call parameters: models with a head have a prefix that the files may lack, and the reverse."""
    known = set(stored)
    by_end: dict[str, str] = {}
    for name in stored:
        by_end.setdefault(name.partition(".")[2], name)
    names = {}
    for name in values:
        found = next(
            (other for other in (name, name.partition(".")[2]) if other in known),
            by_end.get(name),
        )
        if found is None:
            raise ValueError(f"{part.folder} has no weight called {name}; load the model and calibrate it in Python.")
        names[name] = found
    return names
