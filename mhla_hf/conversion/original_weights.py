# SPDX-License-Identifier: Apache-2.0
"""Weights of training code: original Wan models to convert, and checkpoints that `import_official` reads."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..config import MHLAConfig
from ..models.options import from_stored, options_by_component
from ..models.registry import family_for, is_mhla_class
from ..models.single_file import GGUF_SUFFIX, find_single_file, is_url, read_config, read_weights
from ..models.source import Component, Source, open_source, vae_compression
from ..utils.files import check_entry, read_json, read_weight_map
from ..utils.locations import PIPELINE_INDEX
from ..utils.messages import shorten_list, shorten_text, shorten_value
from ..utils.tensor_files import FLOATS, TensorEntry
from .planning import ComponentPlan, PlanOptions, StoredWeights, plan_component


UPSTREAM = "WanTransformer3DModel"
"""The diffusers class that checkpoints become."""

# The class that the configurations in the repositories of Wan's authors name.
_AUTHORS_CLASS = "WanModel"
_TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
# Where training code keeps the weights inside a saved dict, outermost first.
_NESTED = ("state_dict", "model_state_dict", "model", "module")


def find_weights(source: str | Path, hub: Mapping[str, Any]) -> tuple[Path, dict[str, Any]] | None:
    """Return the weight file that a source names, and its origin; `None` for a directory or repository.

    Raises:
        ValueError: If it has the name of a weight file and does not exist, or cannot be downloaded.
    """
    path = Path(source).expanduser()
    if path.is_dir() or not (is_url(source) or path.suffix in (".safetensors", GGUF_SUFFIX, *_TORCH_SUFFIXES)):
        return None
    path = find_single_file(source, **hub)
    return path, {"location": str(source) if is_url(source) else path.resolve().name}


def is_original_directory(folder: Path) -> bool:
    """Return whether a directory holds a model of Wan's authors: `config.json` for their own class, and shards."""
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
    """Plan the conversion of original weights.

    Args:
        path: The file, or the directory of shards.
        location: Location as the user gave it.
        origin: Origin of the file, for the record.
        mhla: This and the other arguments, and errors, as for `convert_pretrained`.

    Returns:
        The plan, the pipeline that the model is put into (`None` for a model alone), and the completed origin.
    """
    name = component or "transformer"
    chosen = options_by_component(mhla, [name])
    files = _shards_in(path) if path.is_dir() else [path]
    read = [read_weights(file) for file in files]
    entries = [entry for own, _ in read for entry in own]
    if len({entry.name for entry in entries}) < len(entries):
        raise ValueError(
            f"{location} has several files with the same weights; give the one that belongs to the model."
        )
    if any(".cross_attn.kv_linear." in entry.name for entry in entries):
        raise ValueError(
            f"{location} holds original weights of SANA, which the command does not convert: load it with "
            "MHLASanaTransformer2DModel.from_single_file(file, config=...) and write it with save_pretrained."
        )
    try:
        names = family_for(UPSTREAM).load_class().original_names([entry.name for entry in entries])
    except ValueError as error:
        raise ValueError(f"{location}: {error}") from error
    targets = {original: target for target, original in names.items()}
    renamed = [replace(entry, name=targets[entry.name]) for entry in entries if entry.name in targets]
    weights = StoredWeights(None, tuple(files), renamed, location, names)
    kinds = read[0][1]
    origin = {**origin, "stored_as": kinds} if kinds else dict(origin)
    source = None
    if base is not None:
        source = read_base(base, name, hub)
        origin["base"] = source.origin
    part = _component(path, name, weights, config, source)
    compression = None if source is None else vae_compression(source.root)
    return plan_component(part, chosen[name], options, [weights], compression), source, origin


def read_base(base: str | Path, name: str, hub: Mapping[str, Any]) -> Source:
    """Open the pipeline, a directory or Hub id, that a component is put into.

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
    """Return the softmax model, with the given configuration, the base's, or one read off the weights."""
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
        found = read_config(family_for(UPSTREAM).load_class(), weights.shapes, how, weights.where)
        where = ""
    class_name = found.get("_class_name", UPSTREAM)
    if class_name != UPSTREAM and not (is_mhla_class(class_name) and family_for(class_name).upstream == UPSTREAM):
        raise ValueError(f"{where} is of a {class_name}; only original weights of {UPSTREAM} are converted.")
    from diffusers import __version__

    # The options of an expert that was MHLA before belong to that one, not to the one that takes its place.
    kept = {key: value for key, value in from_stored(found).items() if key != "mhla"}
    return Component(name, folder, {"_diffusers_version": __version__, **kept, "_class_name": UPSTREAM})


def open_checkpoint(path: Path) -> tuple[list[TensorEntry], tuple[Path, ...]]:
    """Find the tensors of a checkpoint of MHLA's authors.

    Args:
        path: A safetensors file, a file of `torch.save`, or a directory of safetensors shards or one torch file.

    Returns:
        The tensors and the files.

    Raises:
        ValueError: If there is no checkpoint, a shard is missing or damaged, or a torch file holds anything that
            could run code.
    """
    files = _shards_in(path) if path.is_dir() else [path]
    if not path.is_dir() and not path.is_file():
        raise ValueError(f"checkpoint {path} is neither a regular file nor a folder.")
    entries = [
        entry
        for file in files
        for entry in (read_weights(file)[0] if file.suffix == ".safetensors" else _torch_entries(file))
    ]
    return entries, tuple(files)


def _shards_in(folder: Path) -> list[Path]:
    """Return the weight files of a folder, which must be regular files in it."""
    indices = sorted(folder.glob("*.safetensors.index.json"))
    files = sorted(folder.glob("*.safetensors"))
    if len(indices) == 1:
        check_entry(indices[0], folder)
        files = read_weight_map(indices[0])
    elif not files:
        files = sorted(path for path in folder.iterdir() if path.suffix in _TORCH_SUFFIXES)
    if len(indices) > 1 or not files or (len(files) > 1 and files[0].suffix in _TORCH_SUFFIXES):
        names = shorten_list(path.name for path in [*indices, *files]) or "none"
        raise ValueError(f"checkpoint {folder} must have safetensors files, or one torch file; it has {names}.")
    for file in files:
        check_entry(file, folder)
    return files


def _torch_entries(path: Path) -> list[TensorEntry]:
    """Read the tensors of a file of `torch.save`, alone or under one of the usual keys."""
    try:
        content = torch.load(path, mmap=True, map_location="cpu", weights_only=True)
    # A damaged archive may end in any kind of error.
    except Exception as error:
        reason = shorten_text(str(error) or type(error).__name__, 200)
        if isinstance(error, pickle.UnpicklingError):
            reason = "it holds more than tensors and could run code when read; save its state dict only"
        raise ValueError(f"{path} cannot be read as a torch file ({reason}).") from error
    # The keys may be nested; a dict may hold itself.
    for _ in range(2 * len(_NESTED)):
        found = content if isinstance(content, Mapping) else {}
        content = next((found[name] for name in _NESTED if isinstance(found.get(name), Mapping)), content)
    claimed: dict[int, int] = {}
    entries = []
    for name, tensor in content.items() if isinstance(content, Mapping) else ():
        problem = _refusal(tensor, claimed)
        if problem:
            raise ValueError(
                f"{path} holds {problem} under {shorten_value(name)}; only plain tensors can be imported."
            )
        entries.append(TensorEntry(str(name), tuple(tensor.shape), tensor.dtype, partial(torch.Tensor.detach, tensor)))
    if not entries:
        raise ValueError(f"{path} holds no state dict, alone or under {' or '.join(_NESTED)}.")
    return entries


def _refusal(value: Any, claimed: dict[int, int]) -> str:
    """Reason to refuse a value, or nothing. `claimed` counts the bytes taken of each storage so far."""
    if not isinstance(value, torch.Tensor):
        return f"a {type(value).__name__}"
    if value.layout != torch.strided or value.is_nested or value.device.type != "cpu":
        return f"a tensor that is sparse, nested or without values ({value.layout}, {value.device})"
    if value.dtype not in FLOATS:
        return str(value.dtype)
    storage = value.untyped_storage()
    # Views may share a storage, but not take more of it than there is: a small file would fill the memory.
    claimed[storage.data_ptr()] = claimed.get(storage.data_ptr(), 0) + value.nbytes
    return "a tensor that repeats stored numbers" if claimed[storage.data_ptr()] > storage.nbytes() else ""
