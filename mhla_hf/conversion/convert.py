# SPDX-License-Identifier: Apache-2.0
"""`convert_pretrained`: an ordinary directory of diffusers or transformers becomes an MHLA one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from ..config import MHLAConfig
from ..layers.original import STATE_KEY, STATES
from ..models.options import options_by_component, with_given
from ..models.source import (
    Component,
    Source,
    find_original,
    open_source,
    read_source,
    softmax_version,
    vae_compression,
)
from ..models.stub import softmax_config
from ..utils.destinations import claim_destination
from ..utils.locations import download_repository, find_directory, local_origin
from ..utils.messages import shorten_list, shorten_text
from .options import MAX_SHARD_BYTES, parse_dtype, parse_size
from .original_weights import find_weights, is_original_directory, plan_original
from .planning import ComponentPlan, PlanOptions, plan_component, plan_files
from .report import ComponentReport, ConversionReport
from .writing import check_apart, write_result


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
    finish: Callable[[Path], None] | None = None,
    **given: Any,
) -> ConversionReport:
    """Convert a diffusers pipeline, or a model of diffusers or transformers, to MHLA.

    Language models, encoders (those of sentence-transformers too) and vision models become what
    `from_pretrained(source, attn_implementation="mhla", mhla=...)` gives and plain `from_pretrained` loads again.

    Weights are written file by file, so memory stays at `max_shard_size` whatever the size of the model.
    Projections, norms and feed-forward layers are taken over; the MHLA parameters start from their initial values, so
    the result needs fine-tuning (but SANA's, which computes what it did before). Everything else is copied (the other
    parts of a pipeline, tokenizers, generation settings, the modules of sentence-transformers), except the old weights
    in other formats. `destination` appears when it is complete.

    Args:
        source: A pipeline directory, a model directory, or a Hub id `owner/name`. A pipeline's `transformer_2`
            (Wan 2.2) is converted as well. Also original softmax weights of Wan: a safetensors file (under the names
            of Wan's authors, of ComfyUI or of diffusers), a GGUF file, the address of such a file on the Hub, or the
            authors' directory of shards. Tensors quantised in GGUF (with the extra `gguf`) are dequantised, to
            bfloat16 unless `dtype` is given.
        destination: The directory to write.
        mhla: The options; the model's defaults for what is not given. For a pipeline also a dict of options by
            component (`{"transformer": {...}, "transformer_2": {...}}`), for a model of several towers one by tower
            (`{"vision_config": {...}}`). Components and towers that are not named, and components named with `None`,
            stay softmax and are copied unchanged.
        component: The only component to convert (`"transformer"` or `"transformer_2"`); the others are copied. Of
            original weights, which component of `base` they are for (by default `"transformer"`).
        base: For original weights, the pipeline (directory or Hub id) they belong to: its other components are copied,
            and `destination` becomes a pipeline. Without it, `destination` is a bare model.
        config: For original weights, the directory (or file) of the model's `config.json`. By default that of `base`,
            else it is read off the weights, where heads are taken to be 128 wide as in every published Wan.
        layers: Which layers become MHLA, in place of `mhla.layers`: `"all"`, indices (`"1,2,4"` or integers), or a
            fraction such as `"2/3"`; see [`parse_layers`][mhla_hf.config.parse_layers]. Under `"all"`
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
        max_shard_size: Largest weight file, in bytes or as `"5GB"`, the default. The conversion needs as much memory.
        overwrite: Replace an existing destination.
        progress: Show a progress bar on standard error.
        finish: Called with the complete directory before it moves to `destination`, to add files such as a model card.
        **given: Options of MHLA by name, such as `block_size=16`, over those in `mhla`.

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
    destination, local = Path(destination).expanduser(), Path(source).expanduser()
    mhla = with_given(mhla, given)
    dtype, max_bytes = parse_dtype(dtype), parse_size(max_shard_size) or MAX_SHARD_BYTES
    hub: dict[str, Any] = {
        "revision": revision,
        "token": token,
        "cache_dir": cache_dir,
        "local_files_only": local_files_only,
    }
    original_only = {"base": base, "config": config}
    with claim_destination(destination, overwrite=overwrite) as claimed:
        check_apart(claimed, local if local.exists() else None)
        original = find_weights(source, hub)
        if original is not None:
            _check_unused({"subfolder": subfolder}, f"{source} is a file")
        root, origin = find_directory(source, subfolder=subfolder, **hub) if original is None else original
        found: Source | None
        if original is not None or is_original_directory(root):
            _check_unused({"variant": variant}, f"{source} holds original weights")
            options = PlanOptions(max_bytes, layers, dtype)
            plan, found, origin = plan_original(
                root, str(source), origin, mhla, options, component=component, hub=hub, **original_only
            )
            plans = [plan]
            check_apart(claimed, root, None if found is None else found.root)
        else:
            _check_unused(original_only, f"{source} comes with its configuration")
            check_apart(claimed, root)
            found = read_source(root, str(source), origin)
            options = PlanOptions(max_bytes, layers, dtype, variant)
            chosen = _choose(found, mhla, component)
            compression = None if found.pipeline is None else vae_compression(root)
            plans = [
                plan_model(part, chosen[part.name], options, compression)
                for part in found.components
                if part.name in chosen
            ]
        if original is None and local.exists():
            origin = {**origin, **local_origin(root)}
        report = ConversionReport("convert", destination, origin)
        write_result(found, plans, report, claimed, progress=progress, started=started, finish=finish)
        return report


def unconvert_pretrained(
    source: str | Path,
    destination: str | Path,
    *,
    original: str | Path | None = None,
    overwrite: bool = False,
    progress: bool = True,
    **hub: Any,
) -> ConversionReport:
    """Write the softmax original of an MHLA directory.

    The weights of a model that is only converted are the pretrained ones, and are copied without those of MHLA. Of a
    model that was calibrated, matched or trained, weights and configuration are those of the original; everything else
    is that of the source in any case.

    Args:
        source: A pipeline or model directory with MHLA models, or a Hub id `owner/name`.
        destination: The directory to write.
        original: The softmax original, directory or Hub id. By default the one that the source's records name.
        overwrite: Replace an existing destination.
        progress: Show a progress bar on standard error.
        **hub: `revision`, `token`, `cache_dir` and `local_files_only`, as in [`convert_pretrained`].

    Returns:
        What was done; the same is written as `conversion.json`.

    Raises:
        ValueError: If there is no MHLA model, the original is needed and not found, or the destination is taken or too
            small.
    """
    started, destination = time.monotonic(), Path(destination).expanduser()
    with claim_destination(destination, overwrite=overwrite) as claimed:
        found = open_source(source, **hub)
        check_apart(claimed, found.root)
        parts = found.mhla_components
        if not parts:
            raise ValueError(f"{source} has no MHLA model.")
        elsewhere = {name: value for name, value in hub.items() if name in ("token", "cache_dir", "local_files_only")}
        given = None if original is None else open_source(original, **elsewhere)
        plans = [_plan_original(found, part, given, elsewhere) for part in parts]
        report = ConversionReport("unconvert", destination, found.origin)
        write_result(found, plans, report, claimed, progress=progress, started=started)
        return report


def _plan_original(source: Source, part: Component, given: Source | None, hub: Mapping[str, Any]) -> ComponentPlan:
    """Plan the softmax version of one MHLA model."""
    state, origin = part.config.get(STATE_KEY, "trained"), part
    if given is not None:
        version = softmax_version(given, part)
        if version is None:
            raise ValueError(f"original {given.location} has no softmax model for {part.name} of {source.location}.")
        origin = version
    elif state != STATES[0]:
        match = find_original(source, part, lambda repository: download_repository(repository, **hub))
        if match is None:
            raise ValueError(
                f"{part.folder} has been {shorten_text(str(state))}, and its softmax original is not found: give it "
                "(--original)."
            )
        origin = match[1]
    if origin is not part:
        _check_same_sizes(part, origin)
    report = ComponentReport(part.class_name, origin.softmax_class_name)
    weights = []
    for stored in origin.weight_sets():
        entries = stored.entries()
        report.dropped += [entry.name for entry in entries if ".mhla." in entry.name]
        kept = [entry for entry in entries if ".mhla." not in entry.name]
        weights.append(plan_files(stored.variant, stored.files, kept, [], MAX_SHARD_BYTES, origin.names.stem))
    return ComponentPlan(part.name, softmax_config(origin), weights, report, origin.names)


def _check_same_sizes(part: Component, original: Component) -> None:
    """Refuse an original of the same class that is another model."""
    shapes, expected = (
        {entry.name: entry.shape for entry in one.weight_sets()[0].entries()} for one in (part, original)
    )
    wrong = [name for name in shapes if expected.get(name, shapes[name]) != shapes[name]]
    if wrong:
        raise ValueError(
            f"{original.folder} is not the original of {part.folder}: {shorten_list(wrong)} have another shape in it."
        )


def _check_unused(options: Mapping[str, Any], reason: str) -> None:
    """Refuse options that would have no effect on a source."""
    for name, value in options.items():
        if value is not None:
            raise ValueError(f"{name}={str(value)!r} has no effect: {reason}.")


def _choose(
    source: Source, mhla: MHLAConfig | Mapping[str, Any] | None, component: str | None
) -> dict[str, MHLAConfig | Mapping[str, Any] | None]:
    """Return the components that become MHLA, with their options."""
    names = [part.name for part in source.components]
    source.component(component)
    if any(part.is_transformers for part in source.components):
        return dict.fromkeys(names, mhla)
    chosen = options_by_component(mhla, names)
    if component is None:
        return chosen
    if component not in chosen:
        raise ValueError(f"component={component!r} is to become MHLA, but mhla has options for other components only.")
    return {component: chosen[component]}


def plan_model(
    component: Component,
    mhla: MHLAConfig | Mapping[str, Any] | None,
    options: PlanOptions,
    compression: tuple[int, int] | None = None,
) -> ComponentPlan:
    """Plan the conversion of a model; errors are those of [`convert_pretrained`]."""
    # Each library is imported only for its own models.
    if component.is_transformers:
        from .transformers_planning import plan_transformers_model

        return plan_transformers_model(component, mhla, options)
    return plan_component(component, mhla, options, compression=compression)
