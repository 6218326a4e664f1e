# SPDX-License-Identifier: Apache-2.0
"""Models in directories: calibrating them, selecting their layers, and writing them with new weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..layers.original import STATE_KEY, STATES, record_weights
from ..models.registry import MHLA_CLASSES
from ..models.source import CONVERSION_RECORD, Component, Source, open_source, read_source
from ..models.weight_files import check_weights, damage_named
from ..training.data.probes import DEFAULT_SAMPLES, LEAST_SAMPLES, MOST_SAMPLES, pipeline_batches
from ..training.matching.layers import Batch
from ..utils.destinations import claim_destination
from ..utils.files import link_or_copy, list_files, read_json, write_json
from ..utils.machine import choose_device
from ..utils.messages import check_count, shorten_text
from ..utils.tensor_files import FLOATS, read_entries
from .calibration import DEFAULT_MEMORY_LIMIT, CalibrationReport, calibrate
from .data import probe_batches
from .selection import SelectionReport, select_layers


def calibrate_directory(
    directory: str | Path,
    *,
    output: str | Path | None = None,
    memory_limit: int | str = DEFAULT_MEMORY_LIMIT,
    force: bool = False,
    overwrite: bool = False,
    progress: Callable[[int, int], None] | None = None,
    **probe: Any,
) -> CalibrationReport:
    """Calibrate a converted directory; see [`calibrate`][mhla_hf.calibrate].

    Weights are calibrated in fp32 and written in the types that their files have; all other files are kept. The
    directory is replaced only when the result is complete.

    Args:
        directory: A converted pipeline of diffusers, or a converted model of diffusers or transformers.
        output: Another directory to write.
        memory_limit: See [`calibrate`][mhla_hf.calibrate].
        force: Take a model that has been trained or calibrated for one that has not.
        overwrite: Replace `output`.
        progress: See [`calibrate`][mhla_hf.calibrate].
        **probe: The probe; arguments of [`open_probe`][mhla_hf.recovery.directories.open_probe].

    Returns:
        The changes; the same is written to `conversion.json` under `calibration`.

    Raises:
        ValueError: If the directory is no MHLA model or was trained, data are missing, or an argument is wrong.
    """
    root = Path(directory).expanduser()
    source = read_source(root, str(directory), wanted=MHLA_CLASSES)
    for part in () if force else source.mhla_components:
        state = part.config.get(STATE_KEY, "trained")
        if state != STATES[0]:
            raise ValueError(
                f"{part.folder} has been {shorten_text(str(state))}: its projections are not those of the original, "
                "which tell what to aim at. Convert the original again, or pass force=True (--force) to take it for "
                "untrained."
            )
    destination = root if output is None else Path(output).expanduser()
    with claim_destination(destination, overwrite=output is None or overwrite) as claimed:
        models, batches, origin = open_probe(source, source.components, **probe)
        report = CalibrationReport(probe=origin)
        for name, model in models.items():
            if force:
                record_weights(model)
            own = calibrate(model, batches[name], memory_limit=memory_limit, progress=progress)
            report.add(own, f"{name}." if len(models) > 1 else "")
        with claimed.staging() as staging:
            write_models(source, staging, models, {"calibration": report.to_dict()})
    return report


def select_layers_of(
    source: str | Path,
    mhla: Mapping[str, Any] | None = None,
    *,
    component: str | None = None,
    hub: Mapping[str, Any] | None = None,
    probe: Mapping[str, Any] | None = None,
    **options: Any,
) -> SelectionReport:
    """Select layers of a softmax model on disk; it is converted in memory, and nothing is written.

    Args:
        source: A pipeline of diffusers or a model of transformers, directory or Hub id.
        mhla: Options of the conversion.
        component: Which transformer of a pipeline.
        hub: `revision`, `token` and `cache_dir`.
        probe: The probe; arguments of [`open_probe`].
        **options: Arguments of [`select_layers`][mhla_hf.recovery.selection.select_layers].

    Raises:
        ValueError: If the source cannot be converted, data are missing, or an argument is wrong.
    """
    found = open_source(source, **(hub or {}))
    names = [part.name for part in found.components]
    if component is None and len(names) > 1:
        raise ValueError(
            f"component must be given, for {source} has {', '.join(names)}: select layers of each separately."
        )
    part = found.component(component)
    models, batches, _ = open_probe(found, [part], dict(mhla or {}), **(probe or {}))
    return select_layers(models[part.name], batches[part.name], **options)


def open_probe(
    source: Source,
    parts: Sequence[Component],
    mhla: dict[str, Any] | None = None,
    *,
    data: str | None = None,
    samples: int = DEFAULT_SAMPLES,
    batch_size: int = 4,
    seed: int = 0,
    device: str | None = None,
    **call_options: Any,
) -> tuple[dict[str, nn.Module], Mapping[str, Sequence[Batch]], dict[str, Any]]:
    """Load the models of a directory in fp32, and make batches for each.

    Args:
        source: The directory.
        parts: Its models.
        mhla: Options to convert them with; `None` for models that are MHLA.
        data: See [`probe_batches`][mhla_hf.recovery.data.probe_batches]. Pipelines need none.
        samples: Samples of the probe, from 4 (2 of `data`) to 65,536.
        batch_size: Samples of a batch, of `data`, at most 65,536.
        seed: Seed of the probe.
        device: Name of a device, by default a GPU if there is one.
        **call_options: `prompts` of a pipeline's probe, and arguments of its call, such as `height` and `width`.

    Returns:
        The models and their batches, by component, and a record of the probe.

    Raises:
        ValueError: If data are missing, or an argument is wrong.
    """
    check_count("samples", samples, LEAST_SAMPLES if data is None else 2, MOST_SAMPLES)
    check_count("batch_size", batch_size, 1, MOST_SAMPLES)
    torch_device = choose_device(device)
    origin = {"data": data or "samples of the pipeline", "samples": samples, "seed": seed}
    if data is not None:
        unused = sorted(name for name, value in call_options.items() if value is not None)
        if unused:
            raise ValueError(f"{', '.join(unused)}: of no use beside data.")
        models = {part.name: part.load(mhla).to(torch_device).eval() for part in parts}
        options: dict[str, Any] = {"samples": samples, "batch_size": batch_size, "seed": seed}
        probes = {
            name: probe_batches(model, source.root, data, component=name, **options) for name, model in models.items()
        }
        return models, probes, origin
    if source.pipeline is None:
        raise ValueError(
            f"data must be given (--data): {source.root} is a model without a pipeline, which cannot generate samples."
        )
    from ..pipelines import load_pipeline

    for part in parts:
        check_weights(part.folder)
    chosen: dict[str, Any] = {"attn_implementation": None}
    if mhla is not None:
        chosen = {"mhla": {part.name: mhla for part in parts}}
    with damage_named(source.root):
        pipeline = load_pipeline(source.root, torch_dtype=torch.float32, **chosen).to(torch_device)
    models = {part.name: getattr(pipeline, part.name) for part in parts}
    return models, pipeline_batches(pipeline, samples=samples, seed=seed, **call_options), origin


def write_models(
    source: Source, destination: Path, models: Mapping[str, nn.Module], record: Mapping[str, Any]
) -> None:
    """Write a copy of a converted directory with the weights of other models.

    Args:
        source: The converted directory, on the same disk.
        destination: Empty directory to fill.
        models: Models by component; moved to the CPU and cast to the types that their files have.
        record: Added to `conversion.json`.
    """
    parts = [part for part in source.components if part.name in models]

    def is_written(path: Path) -> bool:
        folder = (source.root / path).parent
        own = [part for part in parts if part.folder == folder]
        return path == Path(CONVERSION_RECORD) or any(
            path.name == "config.json" or part.names.match(path) for part in own
        )

    for part in parts:
        model: Any = models[part.name].to("cpu")
        files = sorted(part.folder.glob("*.safetensors"))
        _cast_as_stored(model, files)
        # The same number of files, up to the order of the weights.
        shard_size = max(path.stat().st_size for path in files)
        model.save_pretrained(destination / part.folder.relative_to(source.root), max_shard_size=shard_size)
    # After the models: `save_pretrained` would write through links, such as that to a generation_config.json.
    for path in list_files(source.root):
        if not is_written(path):
            (destination / path).parent.mkdir(parents=True, exist_ok=True)
            (destination / path).unlink(missing_ok=True)
            link_or_copy(source.root / path, destination / path)
    stored = source.root / CONVERSION_RECORD
    content = read_json(stored, "the record") if stored.is_file() else {}
    write_json(destination / CONVERSION_RECORD, {**content, **record})


def _cast_as_stored(model: nn.Module, files: Sequence[Path]) -> None:
    """Cast parameters to the types that they have in files."""
    stored = {entry.name: entry.dtype for path in files for entry in read_entries(path) if entry.dtype in FLOATS}
    # Names in the file differ from the model's where transformers maps them.
    kinds = sorted(stored.values(), key=str)
    usual = max(kinds, key=kinds.count) if kinds else torch.float32
    for name, parameter in model.named_parameters():
        fallback = torch.float32 if ".mhla." in name else usual
        parameter.data = parameter.data.to(stored.get(name, fallback))
