# SPDX-License-Identifier: Apache-2.0
"""`convert_pretrained`: an ordinary directory of diffusers or transformers becomes an MHLA one, tensor by tensor."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from ..config import MHLAConfig
from ..models.options import options_by_component
from ..models.source import Component, Source, read_source
from ..utils.destinations import Destination, claim_destination
from ..utils.files import write_json
from ..utils.locations import find_directory
from ..utils.source_files import list_files
from ..utils.tensor_files import check_safetensors, write_shards
from .options import parse_dtype, parse_size
from .planning import ComponentPlan, plan_component
from .provenance import ConversionReport, describe_file
from .staging import byte_progress, check_apart, check_space, copy_file


def convert_pretrained(
    source: str | Path,
    destination: str | Path,
    mhla: MHLAConfig | Mapping[str, Any] | None = None,
    *,
    component: str | None = None,
    base: str | Path | None = None,
    config: str | Path | None = None,
    layers: str | Iterable[int] | None = None,
    dtype: str | torch.dtype | None = None,
    variant: str | None = None,
    subfolder: str | None = None,
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | Path | None = None,
    local_files_only: bool = False,
    max_shard_size: int | str | None = None,
    overwrite: bool = False,
    progress: bool = True,
) -> ConversionReport:
    """Converts a diffusers pipeline, or a model of diffusers or transformers, to MHLA.

    Language models, encoders (those of sentence-transformers too) and vision models become what
    `from_pretrained(source, attn_implementation="mhla", mhla=...)` gives and plain `from_pretrained` loads again.

    Weights stream from the source's files to new ones, so memory stays at one tensor whatever the size of the model.
    Projections, norms and feed-forward layers are taken over; the MHLA parameters start from their initial values, so
    the result needs fine-tuning (but SANA's, which computes what it did before). Everything else is copied (the other
    parts of a pipeline, tokenizers, generation settings, the modules of sentence-transformers), except the old weights
    in other formats. `destination` appears when it is complete.

    Args:
        source: A pipeline directory, a model directory, or a Hub id `owner/name`. A pipeline's `transformer_2`
            (Wan 2.2) is converted as well. Also original softmax weights of Wan: a safetensors file (under the names
            of Wan's authors, of ComfyUI or of diffusers), a GGUF file, the address of such a file on the Hub, or the
            authors' directory of shards. Tensors quantised in GGUF (`pip install "mhla-hf[gguf]"`) are dequantised, to
            bfloat16 unless `dtype` is given.
        destination: The directory to write.
        mhla: The options; the model's defaults for what is not given. For a pipeline also a dict of options by
            component (`{"transformer": {...}, "transformer_2": {...}}`), for a model of several towers one by tower
            (`{"vision_config": {...}}`). Components and towers that are not named, and components named with `None`,
            stay softmax and are copied as they are.
        component: The only component to convert (`"transformer"` or `"transformer_2"`); the others are copied. Of
            original weights, which component of `base` they are for (by default `"transformer"`).
        base: For original weights, the pipeline (directory or Hub id) they belong to: its other components are copied,
            and `destination` becomes a pipeline. Without it, `destination` is a model alone.
        config: For original weights, the directory (or file) of the model's `config.json`. By default that of `base`,
            else it is read off the weights, where heads are taken to be 128 wide as in every published Wan.
        layers: Which layers become MHLA, in place of `mhla.layers`: `"all"`, indices (`"1,2,4"` or integers), or a
            fraction such as `"2/3"`; see [`parse_layers`][mhla_hf.conversion.options.parse_layers]. Under `"all"`
            and fractions, layers with a sliding window stay softmax.
        dtype: Cast the weights: float32, bfloat16 or float16. Modules that the library keeps in fp32 keep their type.
            By default nothing is cast, and new parameters get the type most weights have.
        variant: Convert only the weights of this variant (`"fp16"`); by default all sets of weights found, each under
            the name it had.
        subfolder: Convert only this folder of `source`.
        revision: Branch, tag or commit of a Hub repository.
        token: Access token for the Hub.
        cache_dir: Where downloads go.
        local_files_only: Do not use the network.
        max_shard_size: Largest weight file, in bytes or as `"5GB"`. By default the source's files keep their sizes;
            where there are several, the new parameters get one of their own.
        overwrite: Replace an existing destination.
        progress: Show a progress bar on standard error.

    Returns:
        What was done; the same is written as `conversion.json`.

    Raises:
        ValueError: If the source cannot be read or converted (not supported, converted already, quantised, pickles
            only, damaged or incomplete weights), an option is wrong, or the destination is taken or too small.

    Examples:
        >>> from mhla_hf import convert_pretrained
        >>> from mhla_hf.demo import base_pipeline_directory
        >>> report = convert_pretrained(
        ...     base_pipeline_directory(), "digits-mhla", {"blocks": [5, 4, 4]}, layers="2/3", progress=False
        ... )
        >>> report.components["transformer"].mhla_layers
        [1, 2, 4]
    """
    started = time.monotonic()
    destination = Path(destination).expanduser()
    dtype, max_bytes = parse_dtype(dtype), parse_size(max_shard_size)
    hub: dict[str, Any] = {
        "revision": revision,
        "token": token,
        "cache_dir": cache_dir,
        "local_files_only": local_files_only,
    }
    original_only = {"base": base, "config": config}
    # It reads files by what writes through this module.
    from .single_file import find_weights, is_original_directory, plan_original

    local = Path(source).expanduser()
    with claim_destination(destination, overwrite=overwrite) as claimed:
        check_apart(claimed, local if local.exists() else None)
        original = find_weights(source, hub)
        if original is None:
            root, origin = find_directory(source, subfolder=subfolder, **hub)
        else:
            _check_unused({"subfolder": subfolder}, f"{source} is a file")
            root, origin = original
        if original is not None or is_original_directory(root):
            _check_unused({"variant": variant}, f"{source} holds original weights")
            plan, base_source, origin = plan_original(
                root,
                str(source),
                origin,
                mhla,
                (layers, dtype, max_bytes),
                component=component,
                hub=hub,
                **original_only,
            )
            check_apart(claimed, root, None if base_source is None else base_source.root)
            report = ConversionReport("convert", destination, origin)
            write_result(base_source, [plan], report, claimed, progress=progress, started=started)
            return report
        _check_unused(original_only, f"{source} has other files and a configuration of its own")
        check_apart(claimed, root)
        found = read_source(root, str(source), origin)
        chosen = _choose(found, mhla, component)
        plans = [
            _plan(part, chosen[part.name], layers, dtype, variant, max_bytes)
            for part in found.components
            if part.name in chosen
        ]
        report = ConversionReport("convert", destination, found.origin)
        write_result(found, plans, report, claimed, progress=progress, started=started)
        return report


def _check_unused(options: Mapping[str, Any], reason: str) -> None:
    """Refuses options that would have no effect on a source."""
    for name, value in options.items():
        if value is not None:
            raise ValueError(f"{name}={str(value)!r} has no effect: {reason}.")


def _choose(
    source: Source, mhla: MHLAConfig | Mapping[str, Any] | None, component: str | None
) -> dict[str, MHLAConfig | Mapping[str, Any] | None]:
    """The components that become MHLA, with their options."""
    names = [part.name for part in source.components]
    if component is not None and component not in names:
        raise ValueError(
            f"component={component!r} is not a component of {source.location} that can be MHLA: {', '.join(names)}."
        )
    if any(part.is_transformers for part in source.components):
        return dict.fromkeys(names, mhla)
    chosen = options_by_component(mhla, names)
    if component is None:
        return chosen
    if component not in chosen:
        raise ValueError(f"component={component!r} is to become MHLA, but mhla has options for other components only.")
    return {component: chosen[component]}


def _plan(component: Component, mhla: MHLAConfig | Mapping[str, Any] | None, *options: Any) -> ComponentPlan:
    """Each library is imported only for its own models."""
    if component.is_transformers:
        from .transformers_planning import plan_transformers_model

        return plan_transformers_model(component, mhla, *options)
    return plan_component(component, mhla, *options)


def write_result(
    source: Source | None,
    plans: list[ComponentPlan],
    report: ConversionReport,
    destination: Destination,
    *,
    progress: bool,
    started: float,
) -> None:
    """Writes converted models and everything else of their directory.

    Args:
        source: Where the other files come from; `None` writes a model directory with nothing else.
        plans: The models. In a pipeline each goes to its folder, otherwise the only one to the root.
        report: Completed here, and written as `conversion.json`.
        destination: Where to.
        progress: Show a progress bar.
        started: `time.monotonic()` of the beginning.

    Raises:
        ValueError: If the disk is too small, or others filled the destination meanwhile.
    """
    is_pipeline = source is not None and source.pipeline is not None
    others, skipped = ([], []) if source is None else other_files(source, {plan.name for plan in plans})
    for path in others:
        if source is not None and path.suffix == ".safetensors":
            check_safetensors(source.root / path)
    copied_bytes = sum((source.root / path).stat().st_size for path in others) if source is not None else 0
    written_bytes = sum(weights.nbytes for plan in plans for weights in plan.weights)
    check_space(destination.path, copied_bytes + written_bytes)
    hashed_bytes = sum(path.stat().st_size for plan in plans for weights in plan.weights for path in weights.sources)
    total = copied_bytes + written_bytes + hashed_bytes
    with destination.staging() as staging, byte_progress(total, progress) as (describe, advance):
        for path in others:
            assert source is not None
            describe(f"copying {path.parts[0]}")
            copy_file(source.root / path, staging / path, advance)
        report.copied_files = [path.as_posix() for path in others]
        report.skipped_files = [path.as_posix() for path in skipped]
        for plan in plans:
            folder = staging / plan.name if is_pipeline else staging
            describe(f"converting {plan.name}")
            for weights in plan.weights:
                noted = weights.report
                noted.files = write_shards(
                    folder, weights.shards, stem=plan.names.stem, variant=noted.variant, on_bytes=advance
                )
            write_json(folder / "config.json", plan.config, sort_keys=False)
            describe(f"hashing {plan.name}")
            for weights in plan.weights:
                weights.report.source_files = {path.name: describe_file(path, advance) for path in weights.sources}
            plan.report.weight_sets = [weights.report for weights in plan.weights]
            report.components[plan.name] = plan.report
        if source is not None and source.pipeline is not None:
            replaced = {plan.name: ["diffusers", plan.config["_class_name"]] for plan in plans}
            write_json(staging / "model_index.json", {**source.pipeline, **replaced}, sort_keys=False)
        describe("done")
        report.bytes_written = copied_bytes + written_bytes
        report.seconds = time.monotonic() - started
        report.save(staging)


def other_files(source: Source, replaced: set[str]) -> tuple[list[Path], list[Path]]:
    """Files of a source to copy as they are: all but what is written anew.

    Args:
        source: The pipeline or model directory.
        replaced: Names of the components whose weights and configuration are written anew.

    Returns:
        Those, and the files left out since they hold the old weights in formats that are not written.
    """
    components = [component for component in source.components if component.name in replaced]
    files: list[Path] = []
    skipped: list[Path] = []
    for path in list_files(source.root):
        if path.name in ("model_index.json", "conversion.json") and len(path.parts) == 1:
            continue
        owner = next((item for item in components if item.folder == (source.root / path).parent), None)
        if owner is not None and path.name == "config.json":
            continue
        if owner is not None and owner.names.match(path):
            if path.suffix not in (".safetensors", ".json") or not path.name.startswith(owner.names.stem):
                skipped.append(path)
            continue
        exported = [item for item in components if item.names.is_export(path)]
        (skipped if exported else files).append(path)
    return files, skipped
