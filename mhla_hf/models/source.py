# SPDX-License-Identifier: Apache-2.0
"""`Source`: a pipeline or model directory as users name it, its models, and the original that they were made from."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..utils.files import check_fields, list_files, path_inside, read_json
from ..utils.locations import PIPELINE_INDEX, download_repository, find_directory, is_hub_id, recorded_directory
from ..utils.messages import shorten_list, shorten_text
from .registry import FAMILIES, LEGACY_CLASS, MHLA_CLASSES, current_class, family_for, is_mhla_class
from .weight_files import DIFFUSERS_FILES, TRANSFORMERS_FILES, FileNames, WeightSet, check_weights, damage_named


CONVERSION_RECORD, TRAINING_RECORD = "conversion.json", "training.json"
# Links in a chain of records: pipelines that were made from one another.
_MOST_RECORDS = 8
_MOST_COMPRESSION = 1024


@dataclass(frozen=True)
class Component:
    """A model directory: its `config.json` and its weights.

    Attributes:
        name: Name of the component in the pipeline; `"transformer"` for a directory without a pipeline, `"model"` for
            a model of transformers.
        folder: The directory.
        config: Contents of `config.json`.
    """

    name: str
    folder: Path
    config: dict[str, Any]

    @property
    def is_transformers(self) -> bool:
        """`True` if the model is one of transformers, not of diffusers."""
        return "_class_name" not in self.config

    @property
    def class_name(self) -> str:
        """Class of the model, by its present name where an old checkpoint has another.

        The `model_type` for a model of transformers without the name of a class.
        """
        if not self.is_transformers:
            return current_class(self.config["_class_name"], self.config)
        architectures = self.config.get("architectures")
        return architectures[0] if architectures else self.config["model_type"]

    @property
    def softmax_class_name(self) -> str:
        """Class of the softmax model behind it, or of itself."""
        is_class = self.is_mhla and not self.is_transformers
        return family_for(self.class_name).upstream if is_class else self.class_name

    @property
    def is_mhla(self) -> bool:
        """`True` if the model, or one of its towers, was saved as MHLA."""
        if not self.is_transformers:
            return is_mhla_class(self.class_name)
        parts = [self.config, *(entry for entry in self.config.values() if isinstance(entry, Mapping))]
        return any(part.get("mhla") is not None or part.get("attn_implementation") == "mhla" for part in parts)

    @property
    def original_attention(self) -> str:
        """Attention of the softmax or linear model behind it: `"linear"` for SANA's, else `"softmax"`."""
        is_linear = not self.is_transformers and family_for(self.class_name).load_class().upstream_is_linear
        return "linear" if is_linear else "softmax"

    @property
    def names(self) -> FileNames:
        """Names of the weight files."""
        return TRANSFORMERS_FILES if self.is_transformers else DIFFUSERS_FILES

    def weight_sets(self, variant: str | None = None) -> list[WeightSet]:
        """Finds the weights; see [`FileNames.find`][mhla_hf.models.weight_files.FileNames.find]."""
        return self.names.find(self.folder, variant)

    def load_class(self) -> Any:
        """Imports the class that the weights were saved from.

        Raises:
            ValueError: If the installed library does not have it.
        """
        if not self.is_transformers:
            if self.is_mhla:
                return family_for(self.class_name).load_class()
            import diffusers

            return getattr(diffusers, self.class_name)
        import transformers

        found = getattr(transformers, self.class_name, None)
        if found is None and not self.config.get("architectures"):
            found = transformers.MODEL_MAPPING.get(type(self.load_config()), None)
        if not (isinstance(found, type) and issubclass(found, transformers.PreTrainedModel)):
            raise ValueError(
                f"{self.folder} is a {shorten_text(self.class_name)}, which transformers {transformers.__version__} "
                "does not have; code that comes with a model is not run."
            )
        return found

    def load_config(self, **changes: Any) -> Any:
        """Loads the configuration of a model of transformers.

        Args:
            **changes: Values in place of the stored ones.

        Raises:
            ValueError: If `config.json` holds values that the configuration class does not take.
        """
        from transformers import AutoConfig

        try:
            return AutoConfig.from_pretrained(self.folder, trust_remote_code=False, **changes)
        # The error for a wrong entry depends on the model's configuration class.
        except Exception as error:
            reason = shorten_text(str(error) or type(error).__name__, 300)
            raise ValueError(f"{self.folder / 'config.json'} cannot be read: {reason}") from error

    def load(self, mhla: Mapping[str, Any] | None = None, *, dtype: torch.dtype = torch.float32) -> nn.Module:
        """Loads the model as it was saved, or converted to MHLA.

        Args:
            mhla: Options to convert a softmax model with; `None` loads it as it is.
            dtype: Type of the weights.

        Raises:
            ValueError: If files are damaged, or the options do not suit the model.
        """
        check_weights(self.folder)
        converted: dict[str, Any] = {} if mhla is None else {"mhla": dict(mhla)}
        with damage_named(self.folder):
            if self.is_transformers:
                if converted:
                    converted["attn_implementation"] = "mhla"
                return self.load_class().from_pretrained(self.folder, dtype=dtype, **converted)
            model_class = self.load_class() if mhla is None else family_for(self.class_name).load_class()
            return model_class.from_pretrained(self.folder, torch_dtype=dtype, **converted)


@dataclass(frozen=True)
class Source:
    """A pipeline or model directory, local or downloaded.

    Attributes:
        location: The location as the user gave it.
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

    @property
    def mhla_components(self) -> list[Component]:
        """The components that were saved as MHLA."""
        return [part for part in self.components if part.is_mhla]

    def component(self, name: str | None = None) -> Component:
        """Returns the component of a name, or the first one.

        Raises:
            ValueError: If there is no such component.
        """
        names = [part.name for part in self.components]
        if name is None:
            return self.components[0]
        if name not in names:
            raise ValueError(
                f"component={name!r:.100} is not a component of {self.location} that can be MHLA: {', '.join(names)}."
            )
        return self.components[names.index(name)]

    def records(self) -> list[str]:
        """Returns the locations that the directory was made from, as its own records name them."""
        return [origin["location"] for origin in self.origins()]

    def origins(self) -> list[dict[str, Any]]:
        """Returns the entries of its own records on what the directory was made from, with a `location` each."""
        records = [self.root / name for name in (CONVERSION_RECORD, TRAINING_RECORD)]
        contents = [
            read_json(record, "the record", optional={"source": dict}) for record in records if record.exists()
        ]
        origins = [content.get("source", {}) for content in contents]
        return [origin for origin in origins if origin.get("location") and isinstance(origin["location"], str)]


def open_source(location: str | Path, wanted: Mapping[str, Any] | None = None, **hub: Any) -> Source:
    """Opens a directory or Hub repository.

    Args:
        location: A directory, or a Hub id `owner/name`.
        wanted: See [`read_source`].
        **hub: `revision`, `token`, `cache_dir`, `local_files_only` and `subfolder` as in
            [`find_directory`][mhla_hf.utils.locations.find_directory].

    Raises:
        ValueError: See [`find_directory`][mhla_hf.utils.locations.find_directory] and [`read_source`].
    """
    root, origin = find_directory(location, **hub)
    return read_source(root, str(location), origin, wanted)


def read_source(
    root: Path,
    location: str | None = None,
    origin: dict[str, Any] | None = None,
    wanted: Mapping[str, Any] | None = None,
) -> Source:
    """Reads the configurations of a directory.

    Args:
        root: The directory.
        location: Name of the directory in errors, its path by default.
        origin: See [`Source`].
        wanted: Names of the diffusers model classes of interest, as keys; by default the softmax and MHLA classes of
            every family. Models of transformers always are.

    Raises:
        ValueError: If it is neither a pipeline nor a model, has no model of a wanted class, is quantised, or links and
            names in it lead out of it.
    """
    wanted = {**FAMILIES, **MHLA_CLASSES} if wanted is None else wanted
    location, origin = str(root) if location is None else location, origin or {}
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
            classes[name] = _read_component(name, path_inside(root, name, str(index_path)), location).class_name
        names = [name for name, class_name in classes.items() if class_name in wanted]
        if not names:
            models = shorten_list(f"{name} ({class_name})" for name, class_name in classes.items())
            raise ValueError(
                f"{location} has no model that can be converted; it has {models}. Supported: {supported}."
            )
        folders = {name: path_inside(root, name, str(index_path)) for name in names}
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
    component = _read_component("transformer", root, location, transformers=True)
    if component.is_transformers:
        component = replace(component, name="model")
    elif component.class_name not in wanted:
        raise ValueError(
            f"{location} is a {shorten_text(component.class_name)}, which cannot be converted. Supported: {supported}."
        )
    return Source(location, root, None, (component,), origin)


def vae_compression(pipeline: Path) -> tuple[int, int] | None:
    """Reads how many frames, and how many pixels of a side, one latent of a pipeline's video VAE stands for.

    Args:
        pipeline: The pipeline's directory.

    Returns:
        Both numbers; `None` where the VAE's configuration does not have them.

    Raises:
        ValueError: If the configuration is damaged.
    """
    path = path_inside(pipeline, "vae", str(pipeline)) / "config.json"
    config = read_json(path, "the VAE's configuration") if path.is_file() else {}
    temporal: Any = config.get("scale_factor_temporal", config.get("temporal_compression_ratio"))
    spatial: Any = config.get("scale_factor_spatial", config.get("spatial_compression_ratio"))
    if not all(type(value) is int and 1 <= value <= _MOST_COMPRESSION for value in (temporal, spatial)):
        return None
    return temporal, spatial


def find_original(
    source: Source, component: Component, download: Callable[[str], Path] = download_repository
) -> tuple[str, Component] | None:
    """Finds the softmax model that an MHLA model was made from, by the records of its directory and of theirs.

    A Hub repository is downloaded. A directory is looked for where a record of this machine has its path, and beside
    the one with the record: records of others are no reason to read elsewhere.

    Args:
        source: The directory of the MHLA model.
        component: The MHLA model.
        download: Downloads a Hub repository.

    Returns:
        Location and model; `None` if the records lead nowhere.
    """
    waiting = [(source.root, origin) for origin in source.origins()]
    seen = {source.root.resolve()}
    while waiting and len(seen) <= _MOST_RECORDS:
        owner, origin = waiting.pop(0)
        location, local = origin["location"], recorded_directory(origin, owner)
        try:
            root = local or (download(location) if is_hub_id(location) else _beside(owner, location))
            found = read_source(root)
            original = softmax_version(found, component)
            further = found.origins()
        except (OSError, ValueError):
            continue
        if original is not None:
            return location, original
        if root.resolve() not in seen:
            seen.add(root.resolve())
            # The sources of a source follow it, those in a first record before those in a second.
            waiting = [(root, origin) for origin in further] + waiting
    return None


def softmax_version(source: Source, component: Component) -> Component | None:
    """Returns the softmax model of the same kind and name as an MHLA model among a source's, or its only model."""
    named = [candidate for candidate in source.components if candidate.name == component.name]
    for candidate in named or source.components[:1]:
        if candidate.class_name == component.softmax_class_name and not candidate.is_mhla:
            return candidate
    return None


def _beside(owner: Path, location: str) -> Path:
    folder = owner.resolve().parent
    name = os.path.relpath(location, folder) if Path(location).is_absolute() else location
    path = path_inside(folder, name, f"the record of {owner}")
    if not path.is_dir():
        raise ValueError(f"{path} is not a directory")
    return path


def _read_component(name: str, folder: Path, location: str, *, transformers: bool = False) -> Component:
    path = folder / "config.json"
    config = read_json(path, "the model's configuration")
    if not isinstance(config.get("_class_name"), str):
        if not transformers:
            raise ValueError(f"{path} does not say which diffusers class it is for (_class_name).")
        if not isinstance(config.get("model_type"), str):
            raise ValueError(
                f"{path} does not say which diffusers class (_class_name) or which kind of transformers model "
                "(model_type) it is for."
            )
    where = f"the model's configuration {path}"
    check_fields(config, where, optional={"architectures": (list, type(None))})
    if not all(isinstance(entry, str) for entry in config.get("architectures") or []):
        raise ValueError(f"{where}: 'architectures' must be a list of class names.")
    # The weights of one tower of several may be quantised.
    for part in [config, *(entry for entry in config.values() if isinstance(entry, dict))]:
        fields = dict.fromkeys(("quantization_config", "compression_config"), (dict, type(None)))
        check_fields(part, where, optional=fields)
        quantization = part.get("quantization_config") or part.get("compression_config")
        if quantization:
            method = shorten_text(str(quantization.get("quant_method", "unknown method")))
            raise ValueError(
                f"{location}: {name} is quantised ({method}) and cannot be converted. "
                "Convert the original weights, then quantise."
            )
    return Component(name, folder, config)
