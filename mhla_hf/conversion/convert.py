# SPDX-License-Identifier: Apache-2.0
"""`convert_pretrained`: an ordinary directory of diffusers or transformers becomes an MHLA one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from ..config import MHLAConfig
from ..layers.weight_record import STATE_KEY, STATES
from ..models.directory import ModelDirectory
from ..models.stub import softmax_config
from ..pipelines import options_by_component, with_given
from ..utils.destinations import claim_destination
from ..utils.files import read_json
from ..utils.locations import PIPELINE_INDEX, find_directory, find_file, is_weight_file, local_origin
from ..utils.machine import parse_dtype
from ..utils.messages import shorten_list
from ..utils.options import parse_size
from .planning import MAX_SHARD_BYTES, ComponentPlan, ComponentReport, PlanOptions, plan_component, plan_files
from .writing import ConversionReport, check_apart, write_result


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

    Weights are written file by file, so memory stays at `max_shard_size` for models of any size.
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
    destination, local = Path(destination).expanduser(), Path(source).expanduser()
    mhla = with_given(mhla, given)
    options = PlanOptions(parse_size(max_shard_size) or MAX_SHARD_BYTES, layers, parse_dtype(dtype), variant)
    hub: dict[str, Any] = {
        "revision": revision,
        "token": token,
        "cache_dir": cache_dir,
        "local_files_only": local_files_only,
    }
    found: ModelDirectory | None
    with claim_destination(destination, overwrite=overwrite) as claimed:
        check_apart(claimed, local)
        if is_weight_file(source):
            _check_unused({"subfolder": subfolder}, f"{source} is a file")
            root = find_file(source, **hub)
            origin: dict[str, Any] = {"location": root.resolve().name if local == root else str(source)}
        else:
            root, origin = find_directory(source, subfolder=subfolder, **hub)
        if root.is_file() or _is_original(root):
            from .official import plan_original

            _check_unused({"variant": variant}, f"{source} holds original weights")
            plan, found, kinds = plan_original(
                root, str(source), mhla, options, component=component, base=base, config=config, hub=hub
            )
            plans = [plan]
            origin |= {"stored_as": kinds} if kinds else {}
            origin |= {"base": found.origin} if found else {}
        else:
            _check_unused({"base": base, "config": config}, f"{source} comes with its configuration")
            found = ModelDirectory.read(root, location=str(source), origin=origin)
            plans = [plan_model(found.select(name), own, options) for name, own in _choose(found, mhla, component)]
        check_apart(claimed, root, None if found is None else found.root)
        if local.is_dir():
            origin |= local_origin(root)
        report = ConversionReport("convert", destination, origin)
        return write_result(found, plans, report, claimed, progress=progress, finish=finish)


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
    destination = Path(destination).expanduser()
    with claim_destination(destination, overwrite=overwrite) as claimed:
        found = ModelDirectory.open(source, **hub)
        check_apart(claimed, found.root)
        elsewhere = {name: value for name, value in hub.items() if name in ("token", "cache_dir", "local_files_only")}
        plans = [_plan_original(model, original, elsewhere) for model in found.select_mhla()]
        report = ConversionReport("unconvert", destination, found.origin)
        return write_result(found, plans, report, claimed, progress=progress)


def _plan_original(model: ModelDirectory, given: str | Path | None, hub: Mapping[str, Any]) -> ComponentPlan:
    """Plan the softmax version of one MHLA model."""
    is_needed = given is not None or model.config.get(STATE_KEY, "trained") != STATES[0]
    origin = model.original(given, **hub) if is_needed else model
    shapes, expected = (
        {entry.name: entry.shape for entry in one.weight_sets()[0].entries()} for one in (model, origin)
    )
    wrong = [name for name in shapes if expected.get(name, shapes[name]) != shapes[name]]
    if wrong:
        raise ValueError(
            f"{origin.folder} is not the original of {model.folder}: {shorten_list(wrong)} have another shape in it."
        )
    report = ComponentReport(model.class_name, model.softmax_class_name)
    weights = []
    for stored in origin.weight_sets():
        entries = stored.entries()
        report.dropped += [entry.name for entry in entries if ".mhla." in entry.name]
        kept = [entry for entry in entries if ".mhla." not in entry.name]
        weights.append(plan_files(stored.variant, kept, MAX_SHARD_BYTES, names=origin.names))
    return ComponentPlan(model.component, softmax_config(origin), weights, report, origin.names)


def _is_original(folder: Path) -> bool:
    """Tell the directory of a model of Wan's authors: `config.json` names their class."""
    path = folder / "config.json"
    if not path.is_file() or (folder / PIPELINE_INDEX).exists():
        return False
    return read_json(path, "the model's configuration").get("_class_name") == "WanModel"


def _check_unused(options: Mapping[str, Any], reason: str) -> None:
    """Refuse options that would have no effect on a source."""
    for name, value in options.items():
        if value is not None:
            raise ValueError(f"{name}={str(value)!r} has no effect: {reason}.")


def _choose(source: ModelDirectory, mhla: Any, component: str | None) -> list[tuple[str, Any]]:
    """Return the components that become MHLA, with their options."""
    chosen = dict.fromkeys(source.configs, mhla)
    if not source.is_transformers:
        chosen = options_by_component(mhla, source.configs)
    if component is None:
        return list(chosen.items())
    if component not in chosen:
        source.select(component)
        raise ValueError(f"component={component!r} is to become MHLA, but mhla has options for other components only.")
    return [(component, chosen[component])]


def plan_model(
    component: ModelDirectory, mhla: MHLAConfig | Mapping[str, Any] | None, options: PlanOptions
) -> ComponentPlan:
    """Plan the conversion of a model; errors are those of [`convert_pretrained`]."""
    if component.is_mhla:
        raise ValueError(
            f"{component.folder} is a {component.class_name} already; convert the model it was made from."
        )
    # Each library is imported only for its own models.
    if component.is_transformers:
        from .transformers_planning import plan_transformers_model

        return plan_transformers_model(component, mhla, options)
    return plan_component(component, mhla, options, compression=component.vae_compression)
