# SPDX-License-Identifier: Apache-2.0
"""Finds what there is to convert: a directory or Hub repository, its transformers, and the files of their weights."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..models.registry import LEGACY_CLASS, current_class, is_mhla_class
from ..utils.files import path_inside
from ..utils.json_files import check_fields, read_json
from ..utils.messages import LIST_LENGTH, shorten_list, shorten_text
from ..utils.source_files import list_files, named_file, read_weight_map
from ..utils.sources import PIPELINE_INDEX, local_directory
from .weight_files import DIFFUSERS_FILES, TRANSFORMERS_FILES, FileNames, WeightSet


_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".msgpack", ".h5", ".onnx")
# Where repositories of transformers models keep the same weights for other programs.
_EXPORT_FOLDERS = ("onnx", "openvino", "coreml", "original")
_EXPORT_FILES = ("consolidated*.safetensors", "consolidated*.json", "*.gguf", "*.ot", "*.tflite")


@dataclass(frozen=True)
class Component:
    """A model directory: its `config.json` and where it is.

    Attributes:
        name: The component's name in the pipeline; `"transformer"` for a directory without a pipeline, `"model"` for
            one of transformers.
        folder: The directory.
        config: Contents of `config.json`.
    """

    name: str
    folder: Path
    config: dict[str, Any]

    @property
    def is_transformers(self) -> bool:
        """Whether the model is one of transformers, not of diffusers."""
        return "_class_name" not in self.config

    @property
    def class_name(self) -> str:
        """The class that the weights are for, by its name of today where an old checkpoint has another.

        Of a transformers model it is the `model_type` where no class is named.
        """
        if not self.is_transformers:
            return current_class(self.config["_class_name"], self.config)
        architectures = self.config.get("architectures")
        return architectures[0] if architectures else self.config["model_type"]

    @property
    def names(self) -> FileNames:
        """What the weight files are called."""
        return TRANSFORMERS_FILES if self.is_transformers else DIFFUSERS_FILES

    def weight_sets(self, variant: str | None = None) -> list[WeightSet]:
        """Finds the weights.

        Args:
            variant: Only this variant; `None` for every set there is.

        Raises:
            ValueError: If there are none, only pickles, shards without an index, or not the variant asked for.
        """
        sets = []
        listed: set[Path] = set()
        for path in sorted(self.folder.iterdir()):
            match = self.names.index.fullmatch(path.name)
            if match:
                files = tuple(read_weight_map(path))
                listed.update(files)
                sets.append(WeightSet(match["variant"], files, path))
        for path in sorted(self.folder.glob("*.safetensors")):
            if path in listed:
                continue
            if self.names.shard.fullmatch(path.name):
                raise ValueError(f"{path} is one of several shards, but no index in {self.folder} lists it.")
            match = self.names.single.fullmatch(path.name)
            if match:
                sets.append(WeightSet(match["variant"], (path,)))
        if not sets:
            pickles = [path.name for path in sorted(self.folder.iterdir()) if path.suffix in _PICKLES]
            what = "model" if self.is_transformers else "pipeline (or the model alone)"
            remedy = f"Load the {what} with from_pretrained and write it with save_pretrained first."
            if pickles:
                raise ValueError(
                    f"{self.folder} has its weights only as {shorten_list(pickles)}; those can run code when read. "
                    f"{remedy}"
                )
            raise ValueError(
                f"{self.folder} has no {self.names.stem}*.safetensors; weights in other formats are not read. {remedy}"
            )
        if variant is not None:
            found = [weights.variant or "(none)" for weights in sets]
            sets = [weights for weights in sets if weights.variant == variant]
            if not sets:
                raise ValueError(f"variant={variant!r} is not in {self.folder}, which has {shorten_list(found)}.")
        return sets

    def is_weight_file(self, path: Path) -> bool:
        """Whether a file of the folder belongs to the model's weights, whatever the format."""
        name = path.name
        return bool(
            self.names.index.fullmatch(name)
            or self.names.single.fullmatch(name)
            or self.names.shard.fullmatch(name)
            or path.suffix in _PICKLES
            or ".bin.index" in name
            or (self.is_transformers and any(path.match(pattern) for pattern in _EXPORT_FILES))
        )

    def is_export(self, path: Path) -> bool:
        """Whether a file below the folder, relative to it, belongs to the same weights written for other programs."""
        return self.is_transformers and path.parts[0] in _EXPORT_FOLDERS


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
            f"source {location} is a file; give a directory of diffusers or transformers, a Hub id, or a file of "
            "weights (.safetensors, .gguf; for the checkpoints of MHLA's authors: mhla-hf import-official)."
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
        path = path_inside(path, subfolder, "subfolder")
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
            ignore_patterns=[
                "*.msgpack",
                "*.h5",
                "*.onnx",
                "*.onnx_data",
                "transformer*/*.bin",
                "pytorch_model*.bin",
                *_EXPORT_FILES,
                *(f"{name}/*" for name in _EXPORT_FOLDERS),
            ],
        )
    except (OSError, ValueError) as error:
        reason = shorten_text(str(error) or type(error).__name__, LIST_LENGTH)
        raise ValueError(
            f"source {repository} is neither a directory nor a Hub repository that can be read: {reason}"
        ) from error
    return Path(folder)


def read_source(
    root: Path, location: str, origin: dict[str, Any], wanted: Mapping[str, Any], *, transformers: bool = False
) -> Source:
    """Looks at a directory.

    Args:
        root: The directory.
        location: What the user called it.
        origin: See [`Source`].
        wanted: Names of the diffusers model classes of interest, as keys.
        transformers: Whether a model directory of transformers is of interest too.

    Raises:
        ValueError: If it is neither a pipeline nor a model, has no model of a wanted class, is quantised, or links and
            names in it lead out of it.
    """
    list_files(root)
    index_path = root / PIPELINE_INDEX
    supported = ", ".join(sorted(name for name in wanted if not is_mhla_class(name)))
    if index_path.is_file():
        pipeline = read_json(index_path, "the pipeline's index")
        classes = {
            name: entry[1]
            for name, entry in pipeline.items()
            if isinstance(entry, list) and len(entry) == 2 and isinstance(entry[1], str)
        }
        for name in [name for name, class_name in classes.items() if class_name == LEGACY_CLASS]:
            classes[name] = _read_component(name, named_file(root, name, str(index_path)), location).class_name
        names = [name for name, class_name in classes.items() if class_name in wanted]
        if not names:
            models = shorten_list(f"{name} ({class_name})" for name, class_name in classes.items())
            raise ValueError(
                f"{location} has no model that can be converted; it has {models}. Supported: {supported}."
            )
        folders = {name: named_file(root, name, str(index_path)) for name in names}
        components = tuple(_read_component(name, folder, location) for name, folder in folders.items())
        for component in components:
            if component.class_name != classes[component.name]:
                raise ValueError(
                    f"{location}: model_index.json calls {component.name} a {shorten_text(classes[component.name])}, "
                    f"but {component.folder / 'config.json'} says {shorten_text(component.class_name)}."
                )
        return Source(location, root, pipeline, components, origin)
    if not (root / "config.json").is_file():
        raise ValueError(f"{location} has neither model_index.json (a pipeline) nor config.json (a model).")
    component = _read_component("transformer", root, location, transformers=transformers)
    if component.is_transformers:
        component = replace(component, name="model")
    elif component.class_name not in wanted:
        raise ValueError(
            f"{location} is a {shorten_text(component.class_name)}, which cannot be converted. Supported: {supported}."
        )
    return Source(location, root, None, (component,), origin)


def _read_component(name: str, folder: Path, location: str, *, transformers: bool = False) -> Component:
    config = read_json(folder / "config.json", "the model's configuration")
    if not isinstance(config.get("_class_name"), str):
        if not transformers:
            raise ValueError(f"{folder / 'config.json'} does not say which diffusers class it is for (_class_name).")
        if not isinstance(config.get("model_type"), str):
            raise ValueError(
                f"{folder / 'config.json'} does not say which diffusers class (_class_name) or which kind of "
                "transformers model (model_type) it is for."
            )
    where = f"the model's configuration {folder / 'config.json'}"
    check_fields(config, where, optional={"architectures": (list, type(None))})
    if not all(isinstance(entry, str) for entry in config.get("architectures") or []):
        raise ValueError(f"{where}: 'architectures' must be a list of class names.")
    quantization = _quantization(config, where)
    if quantization:
        method = shorten_text(str(quantization.get("quant_method", "unknown method")))
        raise ValueError(
            f"{location}: {name} is quantised ({method}) and cannot be converted. "
            "Convert the original weights, then quantise."
        )
    return Component(name, folder, config)


def _quantization(config: Mapping[str, Any], where: str) -> dict[str, Any] | None:
    """How the weights, or those of one tower of several, are quantised; `None` if they are not."""
    parts = [config, *(entry for entry in config.values() if isinstance(entry, dict))]
    for part in parts:
        fields = dict.fromkeys(("quantization_config", "compression_config"), (dict, type(None)))
        check_fields(part, where, optional=fields)
    found = [part.get("quantization_config") or part.get("compression_config") for part in parts]
    return next((entry for entry in found if entry), None)
