# SPDX-License-Identifier: Apache-2.0
"""Finds what there is to convert: a directory or Hub repository, its transformers, and the files of their weights."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..sources import PIPELINE_INDEX, local_directory
from .tensors import SafetensorsReader, read_json


WEIGHTS_STEM = "diffusion_pytorch_model"
_INDEX = re.compile(rf"{WEIGHTS_STEM}\.safetensors\.index(?:\.(?P<variant>[^.]+))?\.json")
_SINGLE = re.compile(rf"{WEIGHTS_STEM}(?:\.(?P<variant>[^.]+))?\.safetensors")
_SHARD = re.compile(rf"{WEIGHTS_STEM}.*-\d{{5}}-of-\d{{5}}.*\.safetensors")
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".msgpack", ".h5", ".onnx")


@dataclass(frozen=True)
class WeightSet:
    """The files that hold one complete set of a model's weights.

    Attributes:
        variant: Part of the file names such as `fp16`; `None` for the main set.
        files: The safetensors files.
        index: The file that lists them; `None` for a single file.
    """

    variant: str | None
    files: tuple[Path, ...]
    index: Path | None = None

    def open(self) -> list[SafetensorsReader]:
        """Opens every file; errors as in [`SafetensorsReader`], and `ValueError` for a tensor in two of them."""
        readers = [SafetensorsReader(path) for path in self.files]
        seen: dict[str, Path] = {}
        for reader in readers:
            for name in reader.shapes:
                if name in seen:
                    raise ValueError(f"{name} is both in {seen[name]} and in {reader.path}.")
                seen[name] = reader.path
        return readers


@dataclass(frozen=True)
class Component:
    """A model directory: its `config.json` and where it is.

    Attributes:
        name: The component's name in the pipeline; `"transformer"` for a directory without a pipeline.
        folder: The directory.
        config: Contents of `config.json`.
    """

    name: str
    folder: Path
    config: dict[str, Any]

    @property
    def class_name(self) -> str:
        """The diffusers class that the config is for."""
        return self.config["_class_name"]

    def weight_sets(self, variant: str | None = None) -> list[WeightSet]:
        """Finds the weights.

        Args:
            variant: Only this variant; `None` for every set there is.

        Raises:
            ValueError: If there are none, only pickles, shards without an index, or not the variant asked for.
        """
        sets = []
        listed: set[str] = set()
        for path in sorted(self.folder.iterdir()):
            match = _INDEX.fullmatch(path.name)
            if match:
                weight_map = read_json(path, "the index").get("weight_map")
                if not isinstance(weight_map, dict) or not weight_map:
                    raise ValueError(f"the index {path} has no weight_map.")
                names = sorted(set(weight_map.values()))
                listed.update(names)
                sets.append(WeightSet(match["variant"], tuple(self.folder / name for name in names), path))
        for path in sorted(self.folder.glob("*.safetensors")):
            if path.name in listed:
                continue
            if _SHARD.fullmatch(path.name):
                raise ValueError(f"{path} is one of several shards, but no index in {self.folder} lists it.")
            match = _SINGLE.fullmatch(path.name)
            if match:
                sets.append(WeightSet(match["variant"], (path,)))
        if not sets:
            pickles = [path.name for path in sorted(self.folder.iterdir()) if path.suffix in _PICKLES]
            if pickles:
                raise ValueError(
                    f"{self.folder} has its weights only as {', '.join(pickles)}; those can run code when read. "
                    "Save the model with safe_serialization=True first."
                )
            raise ValueError(f"{self.folder} has no {WEIGHTS_STEM}*.safetensors.")
        if variant is not None:
            found = [weights.variant or "(none)" for weights in sets]
            sets = [weights for weights in sets if weights.variant == variant]
            if not sets:
                raise ValueError(f"variant={variant!r} is not in {self.folder}, which has {', '.join(found)}.")
        return sets

    def is_weight_file(self, path: Path) -> bool:
        """Whether a file of the folder belongs to the model's weights, whatever the format."""
        name = path.name
        return bool(
            _INDEX.fullmatch(name)
            or _SINGLE.fullmatch(name)
            or _SHARD.fullmatch(name)
            or path.suffix in _PICKLES
            or ".bin.index" in name
        )


@dataclass(frozen=True)
class Source:
    """A pipeline or model directory, local or downloaded.

    Attributes:
        location: What the user gave.
        root: The directory.
        pipeline: Contents of `model_index.json`; `None` for a model directory.
        components: The pipeline's models whose class is wanted, or the one model.
        origin: A directory's name, or a Hub repository with the revision asked for and the commit found.
    """

    location: str
    root: Path
    pipeline: dict[str, Any] | None
    components: tuple[Component, ...]
    origin: dict[str, Any] = field(default_factory=dict)


def download_or_find(
    location: str | Path,
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | Path | None = None,
    subfolder: str | None = None,
    local_files_only: bool = False,
) -> tuple[Path, dict[str, Any]]:
    """Returns the directory for a path or Hub id, and where it came from.

    Args:
        location: A directory, or a Hub id `owner/name`.
        revision: Branch, tag or commit of a Hub repository.
        token: Access token for the Hub.
        cache_dir: Where downloads go.
        subfolder: Only this folder.
        local_files_only: Use what was downloaded before.

    Raises:
        ValueError: If it is neither a directory nor a Hub repository that can be read.
    """
    origin: dict[str, Any] = {"location": str(location)}
    if subfolder:
        origin["subfolder"] = subfolder
    if Path(location).expanduser().is_file():
        raise ValueError(
            f"source {location} is a file; give a diffusers directory or a Hub id "
            "(for the authors' checkpoints: mhla-hf import-official)."
        )
    path = local_directory(location, "source")
    if path is not None:
        # The name alone: records are published, and the rest of the path is nobody's business.
        origin["location"] = path.resolve().name
    else:
        path = _download(str(location), revision, token, cache_dir, subfolder, local_files_only)
        origin["revision"] = revision
        if re.fullmatch(r"[0-9a-f]{40}", path.name):
            origin["commit"] = path.name
    if subfolder:
        path = path / subfolder
        if not path.is_dir():
            raise ValueError(f"subfolder={subfolder!r} is not in {location}.")
    return path, origin


def _download(
    repository: str,
    revision: str | None,
    token: str | bool | None,
    cache_dir: str | Path | None,
    subfolder: str | None,
    local_files_only: bool,
) -> Path:
    # Not the pipeline's own files alone: the source may be a bare model, and every variant is converted.
    from huggingface_hub import snapshot_download

    try:
        folder = snapshot_download(
            repository,
            revision=revision,
            token=token,
            cache_dir=cache_dir,
            local_files_only=local_files_only,
            allow_patterns=None if subfolder is None else f"{subfolder}/*",
            # Other formats of the same weights, which are never read.
            ignore_patterns=["*.msgpack", "*.h5", "*.onnx", "*.onnx_data", "transformer*/*.bin"],
        )
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            f"source {repository} is neither a directory nor a Hub repository that can be read: {reason}"
        ) from error
    return Path(folder)


def read_source(root: Path, location: str, origin: dict[str, Any], wanted: Mapping[str, Any]) -> Source:
    """Looks at a directory.

    Args:
        root: The directory.
        location: What the user called it.
        origin: See [`Source`].
        wanted: Names of the model classes of interest, as keys.

    Raises:
        ValueError: If it is neither a pipeline nor a model, has no model of a wanted class, or is quantised.
    """
    index_path = root / PIPELINE_INDEX
    if index_path.is_file():
        pipeline = read_json(index_path, "the pipeline's index")
        classes = {
            name: entry[1]
            for name, entry in pipeline.items()
            if isinstance(entry, list) and len(entry) == 2 and isinstance(entry[1], str)
        }
        names = [name for name, class_name in classes.items() if class_name in wanted]
        if not names:
            models = ", ".join(f"{name} ({class_name})" for name, class_name in sorted(classes.items()))
            raise ValueError(
                f"{location} has no model that can be converted; it has {models}. "
                f"Supported: {', '.join(sorted(wanted))}."
            )
        components = tuple(_read_component(name, root / name, location) for name in names)
        for component in components:
            if component.class_name != classes[component.name]:
                raise ValueError(
                    f"{location}: model_index.json calls {component.name} a {classes[component.name]}, "
                    f"but {component.folder / 'config.json'} says {component.class_name}."
                )
        return Source(location, root, pipeline, components, origin)
    if not (root / "config.json").is_file():
        raise ValueError(f"{location} has neither model_index.json (a pipeline) nor config.json (a model).")
    component = _read_component("transformer", root, location)
    if component.class_name not in wanted:
        raise ValueError(
            f"{location} is a {component.class_name}, which cannot be converted. "
            f"Supported: {', '.join(sorted(wanted))}."
        )
    return Source(location, root, None, (component,), origin)


def _read_component(name: str, folder: Path, location: str) -> Component:
    config = read_json(folder / "config.json", "the model's configuration")
    if not isinstance(config.get("_class_name"), str):
        raise ValueError(f"{folder / 'config.json'} does not say which diffusers class it is for (_class_name).")
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method", "unknown method")
        raise ValueError(
            f"{location}: {name} is quantised ({method}) and cannot be converted. "
            "Convert the original weights, then quantise."
        )
    return Component(name, folder, config)
