# SPDX-License-Identifier: Apache-2.0
"""Conversion of original Wan weights (one file, quantised ones in GGUF too, or a folder of shards) to MHLA."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..config import MHLAConfig
from ..models.options import from_stored, options_by_component
from ..models.registry import family_for, is_mhla_class
from ..models.single_file import find_single_file, is_url, read_config
from ..models.source import Component, Source, open_source, vae_compression
from ..utils.gguf_file import SUFFIX as GGUF_SUFFIX
from ..utils.gguf_file import GGUFFile
from ..utils.json_files import read_json
from ..utils.locations import PIPELINE_INDEX
from ..utils.tensor_files import TensorEntry
from .checkpoint_files import TORCH_SUFFIXES, UPSTREAM, open_checkpoint
from .diffusers_planning import StoredWeights, plan_component
from .planning import ComponentPlan, PlanOptions


# The class that the configurations in the repositories of Wan's authors name.
_AUTHORS_CLASS = "WanModel"
_SUFFIXES = (".safetensors", GGUF_SUFFIX, *TORCH_SUFFIXES)


def find_weights(source: str | Path, hub: Mapping[str, Any]) -> tuple[Path, dict[str, Any]] | None:
    """Returns the weight file that a source names, and its origin; `None` for a directory or repository.

    Raises:
        ValueError: If it has the name of a weight file and does not exist, or cannot be downloaded.
    """
    path = Path(source).expanduser()
    if path.is_dir() or not (is_url(source) or path.suffix in _SUFFIXES):
        return None
    path = find_single_file(source, **hub)
    return path, {"location": str(source) if is_url(source) else path.resolve().name}


def is_original_directory(folder: Path) -> bool:
    """True for a directory with a model of Wan's authors: `config.json` for their own class, and shards."""
    path = folder / "config.json"
    if not path.is_file() or (folder / PIPELINE_INDEX).exists():
        return False
    return read_json(path, "the model's configuration").get("_class_name") == _AUTHORS_CLASS


def plan_original(
    path: Path,
    location: str,
    origin: Mapping[str, Any],
    mhla: MHLAConfig | Mapping[str, Any] | None,
    options: PlanOptions,
    *,
    component: str | None,
    base: str | Path | None,
    config: str | Path | None,
    hub: Mapping[str, Any],
) -> tuple[ComponentPlan, Source | None, dict[str, Any]]:
    """Plans the conversion of original weights before anything is written.

    Args:
        path: The file, or the directory of shards.
        location: Location as the user gave it.
        origin: Origin of the file, for the record.
        mhla: As for `convert_pretrained`, as are all others; so are the errors.

    Returns:
        The plan, the pipeline that it is put into (`None` for a model alone), and the origin with what was found.
    """
    name = component or "transformer"
    chosen = options_by_component(mhla, [name])
    weights, kinds = _read_weights(path, location)
    origin = {**origin, "stored_as": kinds} if kinds else dict(origin)
    source = None
    if base is not None:
        source = read_base(base, name, hub)
        origin["base"] = source.origin
    part = _component(path, name, weights, config, source)
    compression = None if source is None else vae_compression(source.root)
    return plan_component(part, chosen[name], options, [weights], compression), source, origin


def _read_weights(path: Path, location: str) -> tuple[StoredWeights, dict[str, int]]:
    """Opens weights under the names of diffusers, and counts their tensors by GGUF's types."""
    groups: list[list[TensorEntry]]
    files: tuple[Path, ...]
    kinds: dict[str, int] = {}
    if path.suffix == GGUF_SUFFIX:
        file = GGUFFile(path)
        groups, files, kinds = [file.entries()], (path,), file.kinds
    else:
        groups, files = open_checkpoint(path)
    seen = [entry.name for group in groups for entry in group]
    if any(".cross_attn.kv_linear." in key for key in seen):
        raise ValueError(
            f"{location} holds original weights of SANA, which the command does not convert: load it with "
            "MHLASanaTransformer2DModel.from_single_file(file, config=...) and write it with save_pretrained."
        )
    try:
        names = family_for(UPSTREAM).load_class().original_names(seen)
    except ValueError as error:
        raise ValueError(f"{location}: {error}") from error
    targets = {original: target for target, original in names.items()}
    renamed = [
        [replace(entry, name=targets[entry.name]) for entry in group if entry.name in targets] for group in groups
    ]
    return StoredWeights(None, files, renamed, location, names), kinds


def read_base(base: str | Path, name: str, hub: Mapping[str, Any]) -> Source:
    """Opens the pipeline, a directory or Hub id, that a component is put into.

    Raises:
        ValueError: If it is not a pipeline with such a component.
    """
    source = replace(open_source(base, **hub), location=f"base {base}")
    if source.pipeline is None:
        raise ValueError(f"base {base} is not a pipeline directory with a {name}.")
    source.component(name)
    return source


def _component(
    path: Path, name: str, weights: StoredWeights, config: str | Path | None, base: Source | None
) -> Component:
    """The softmax model, with the given configuration, the base's, or one read off the weights."""
    folder = path
    if config is not None:
        path = Path(config).expanduser()
        if path.is_dir():
            path = (path / name if (path / PIPELINE_INDEX).is_file() else path) / "config.json"
        found, where, folder = read_json(path, "the model's configuration"), str(path), path.parent
    elif base is not None:
        original = base.component(name)
        found, folder = original.config, original.folder
        where = f"{name} of {base.location}"
    else:
        how = "--config (config=), or the pipeline it belongs to as --base (base=)"
        found = read_config(family_for(UPSTREAM).load_class(), weights.shapes, weights.where, how)
        where = ""
    class_name = found.get("_class_name", UPSTREAM)
    if class_name != UPSTREAM and not (is_mhla_class(class_name) and family_for(class_name).upstream == UPSTREAM):
        raise ValueError(f"{where} is of a {class_name}; original weights of {UPSTREAM} alone are converted.")
    from diffusers import __version__

    # The options of an expert that was MHLA before are its own, not those of the one that takes its place.
    kept = {key: value for key, value in from_stored(found).items() if key != "mhla"}
    return Component(name, folder, {"_diffusers_version": __version__, **kept, "_class_name": UPSTREAM})
