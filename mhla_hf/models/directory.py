# SPDX-License-Identifier: Apache-2.0
"""`ModelDirectory`: a model on disk or on the Hub, alone or in a pipeline, and the softmax original behind it."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from accelerate import init_empty_weights
from torch import nn

from ..utils import locations
from ..utils.files import list_files, path_inside, read_json
from ..utils.messages import shorten_list, shorten_text
from . import sizes
from .registry import FAMILIES, LEGACY_CLASS, MHLA_CLASSES, current_class, family_for, is_mhla_class
from .weight_files import DIFFUSERS_FILES, TRANSFORMERS_FILES, FileNames, WeightSet, check_weights, damage_named


CONVERSION_RECORD, TRAINING_RECORD = "conversion.json", "training.json"

# Links in a chain of records: pipelines that were made from one another.
_MOST_RECORDS = 8
# Frames, and pixels of a side, per latent where neither a VAE nor the family tells.
_USUAL_VAE = (4, 8)
# What a search for the original of a pipeline's component reads of a Hub repository: a pipeline, or the model alone.
_ORIGINAL_FILES = (
    *(locations.PIPELINE_INDEX, CONVERSION_RECORD, TRAINING_RECORD),
    *("config.json", "transformer*/config.json", "diffusion_pytorch_model*"),
)


@dataclass(frozen=True)
class ModelDirectory:
    """A model: a directory of diffusers or transformers, or one component of a pipeline's directory.

    The configurations of a directory are read once, when it is opened. `models` are the others in it.

    Attributes:
        location: The directory or Hub id as the user gave it.
        root: The pipeline's directory, or the model's.
        index: Contents of `model_index.json`; `None` for a model without a pipeline.
        configs: Contents of `config.json` of every model in the directory that is or can be MHLA, by component.
        component: Which of them this object is. Without a pipeline `"transformer"`, or `"model"` for transformers.
        origin: A directory's name, or a Hub repository with the revision asked for and the commit found.
    """

    location: str
    root: Path
    index: dict[str, Any] | None
    configs: dict[str, dict[str, Any]]
    component: str
    origin: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def open(cls, location: str | Path, component: str | None = None, **hub: Any) -> ModelDirectory:
        """Open a directory or a Hub repository, which is downloaded with every variant.

        Args:
            location: A directory, or a Hub id `owner/name`.
            component: Name of the model in a pipeline; by default the first one.
            **hub: `revision`, `token`, `cache_dir`, `local_files_only` and `subfolder` as in
                [`find_directory`][mhla_hf.utils.locations.find_directory].

        Raises:
            ValueError: If there is no such directory or repository, or [`read`] refuses it.
        """
        root, origin = locations.find_directory(location, **hub)
        return cls.read(root, component, location=str(location), origin=origin)

    @classmethod
    def read(
        cls,
        root: Path,
        component: str | None = None,
        *,
        location: str | None = None,
        origin: dict[str, Any] | None = None,
        require_supported: bool = True,
    ) -> ModelDirectory:
        """Read a directory that was found or downloaded before.

        Args:
            root: The directory.
            component: See [`open`][mhla_hf.models.directory.ModelDirectory.open].
            location: Name of the directory in errors, its path by default.
            origin: See the class.
            require_supported: Refuse models that cannot be MHLA, and those that are quantised.

        Raises:
            ValueError: If it is neither a pipeline nor a model, has no such model, or links and names in it lead out
                of it.
        """
        location = str(root) if location is None else location
        list_files(root)
        index = None
        if (root / locations.PIPELINE_INDEX).is_file():
            index, configs = read_pipeline(root, require_supported=require_supported)
            models = [f"{name} ({entry[1]})" for name, entry in index.items() if isinstance(entry, list) and entry[1:]]
            problem = f"has no model that can be converted; it has {shorten_list(models)}"
        else:
            config = read_config(root / "config.json")
            if "_class_name" not in config and "model_type" not in config:
                raise ValueError(
                    f"{root / 'config.json'} names neither its class in diffusers (_class_name) nor its kind in "
                    "transformers (model_type)."
                )
            configs = {"transformer" if "_class_name" in config else "model": config}
            class_name = current_class(config.get("_class_name", ""), config)
            if require_supported and class_name and class_name not in {**FAMILIES, **MHLA_CLASSES}:
                configs = {}
            problem = f"is a {shorten_text(class_name)}, which cannot be converted"
        if not configs:
            raise ValueError(f"{location} {problem}. Supported: {', '.join(sorted(FAMILIES))}.")
        for name, config in configs.items() if require_supported else ():
            # The weights of one tower of several may be quantised.
            for part in parts_of(config):
                quantization = part.get("quantization_config") or part.get("compression_config")
                if quantization:
                    method = quantization.get("quant_method") if isinstance(quantization, dict) else None
                    raise ValueError(
                        f"{location}: {name} is quantised ({shorten_text(str(method))}) and cannot be converted. "
                        "Convert the original weights, then quantise."
                    )
        return cls(location, root, index, configs, next(iter(configs)), origin or {}).select(component)

    # The directory.

    @property
    def models(self) -> list[ModelDirectory]:
        """Every model of the directory that is or can be MHLA."""
        return [replace(self, component=name) for name in self.configs]

    @property
    def mhla_models(self) -> list[ModelDirectory]:
        """The models that were saved as MHLA."""
        return [model for model in self.models if model.is_mhla]

    def select(self, component: str | None) -> ModelDirectory:
        """Return another model of the directory; this one for `None`.

        Raises:
            ValueError: If there is no such component.
        """
        if component is not None and component not in self.configs:
            raise ValueError(
                f"component={component!r:.100} is not a component of {self.location} that can be MHLA: "
                f"{', '.join(self.configs)}."
            )
        return replace(self, component=component or self.component)

    def select_mhla(self, component: str | None = None) -> list[ModelDirectory]:
        """Return the MHLA models of the directory, or the one of a name.

        Raises:
            ValueError: If there is no such component, or it is no MHLA model.
        """
        models = self.models if component is None else [self.select(component)]
        found = [model for model in models if model.is_mhla]
        if not found:
            raise ValueError(
                f"{self.location} has no MHLA model ({shorten_list(model.class_name for model in models)}): convert "
                "it first (mhla-hf convert)."
            )
        return found

    def origins(self) -> list[dict[str, Any]]:
        """Return what the directory's own records say it was made from: entries with a `location` each."""
        records = [self.root / name for name in (CONVERSION_RECORD, TRAINING_RECORD)]
        found = [read_json(path, "the record", optional={"source": dict}) for path in records if path.exists()]
        origins = [record.get("source", {}) for record in found]
        return [origin for origin in origins if origin.get("location") and isinstance(origin["location"], str)]

    def _vae_factors(self) -> tuple[int | None, int | None]:
        path = self.root / "vae" / "config.json"
        config = read_json(path, "the VAE's configuration") if self.index is not None and path.is_file() else {}
        return sizes.vae_factors(config, f"the configuration {path}")

    @property
    def vae_compression(self) -> tuple[int, int] | None:
        """How many frames, and how many pixels of a side, one latent of the pipeline's video VAE stands for.

        `None` without a pipeline, and where the VAE's configuration does not tell them.
        """
        frames, pixels = self._vae_factors()
        return None if frames is None or pixels is None else (frames, pixels)

    # The model.

    @property
    def kind(self) -> Literal["pipeline", "diffusers", "transformers"]:
        """`"pipeline"` for a component of a pipeline, else the library of a model alone."""
        if self.index is not None:
            return "pipeline"
        return "diffusers" if "_class_name" in self.config else "transformers"

    @property
    def is_transformers(self) -> bool:
        """`True` if the model is one of transformers, not of diffusers."""
        return self.kind == "transformers"

    @property
    def folder(self) -> Path:
        """The model's own directory."""
        return self.root if self.index is None else self.root / self.component

    @property
    def config(self) -> dict[str, Any]:
        """Contents of the model's `config.json`."""
        return self.configs[self.component]

    @property
    def class_name(self) -> str:
        """Class of the model, by its present name where an old checkpoint has another.

        The `model_type` for a model of transformers without the name of a class.
        """
        if not self.is_transformers:
            return current_class(self.config["_class_name"], self.config)
        architectures = self.config.get("architectures")
        named = architectures[0] if isinstance(architectures, list) and architectures else self.config["model_type"]
        return str(named)

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
        parts = parts_of(self.config)
        return any(part.get("mhla") is not None or part.get("attn_implementation") == "mhla" for part in parts)

    @property
    def sample_size(self) -> sizes.SampleSize:
        """What turns the size of a sample into the token grid of a diffusion transformer, supported or not.

        Raises:
            ValueError: If a configuration is damaged.
        """
        family = FAMILIES.get(self.class_name) or MHLA_CLASSES.get(self.class_name)
        frames, pixels = self._vae_factors()
        usual = _USUAL_VAE if family is None else family.vae
        patch = sizes.patch_sizes(self.load_class(), self.config, f"the configuration {self.folder / 'config.json'}")
        return sizes.SampleSize((frames or usual[0], pixels or usual[1]), patch)

    def sample_grid(self, **given: int) -> tuple[int, ...]:
        """Return the tokens along each axis of a sample; what is not given is the model's own.

        Args:
            **given: `tokens`, or `height` and `width` in pixels and `num_frames`.

        Raises:
            ValueError: If the model does not have what is given, or nothing tells the size.
        """
        size = self.sample_size
        is_video = len(size.patch) == 3
        if tokens := given.get("tokens"):
            side = next(side for side in range(math.isqrt(tokens), 0, -1) if tokens % side == 0)
            return (*(1,) * is_video, side, tokens // side)
        if "num_frames" in given and not is_video:
            raise ValueError(f"num_frames is for videos, and {self.class_name} makes images.")
        if len(given) < len(size.patch):
            given = {**size.pixels(self._own_grid(size.patch)), **given}
        found = size.grid(**given)
        if 0 in found:
            raise ValueError(f"height must be at least {size.token[0]}, the side of one token, as must width.")
        return found

    def _own_grid(self, patch: tuple[int, ...]) -> tuple[int, ...]:
        if self.class_name in {**FAMILIES, **MHLA_CLASSES}:
            return family_for(self.class_name).load_class().reference_grid(self.config, self.vae_compression)
        side = self.config.get("sample_size")
        if len(patch) == 3 or not isinstance(side, int):
            others = "width and num_frames" if len(patch) == 3 else "width"
            raise ValueError(
                f"height must be given with {others}, or tokens: the configuration does not tell the size of samples."
            )
        return (side // patch[0], side // patch[1])

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
        """Find the weights; see [`FileNames.find`][mhla_hf.models.weight_files.FileNames.find]."""
        return self.names.find(self.folder, variant)

    def load_class(self) -> Any:
        """Import the class that the weights were saved from.

        Raises:
            ValueError: If the installed library does not have it.
        """
        if not self.is_transformers:
            if self.is_mhla:
                return family_for(self.class_name).load_class()
            import diffusers

            if not hasattr(diffusers, self.class_name):
                raise ValueError(f"{self.class_name} is not in diffusers {diffusers.__version__}.")
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
        """Load the configuration of a model of transformers.

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
        """Load the model as it was saved, or converted to MHLA.

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

    def build(self) -> Any:
        """Build the model without memory for its weights, as its configuration describes it."""
        if self.is_transformers:
            config = self.load_config()
            with torch.device("meta"):
                return self.load_class()(config)
        with init_empty_weights():
            return self.load_class().from_config(dict(self.config))

    # The softmax original.

    def original(self, location: str | Path | None = None, argument: str = "original", **hub: Any) -> ModelDirectory:
        """Return the softmax model that an MHLA model was made from; of a softmax model, itself.

        Args:
            location: The directory or Hub id of the original, if the user gave it; else the records tell.
            argument: Name of the argument that gives it, for errors.
            **hub: `token`, `cache_dir` and `local_files_only`; `revision` for a given location.

        Raises:
            ValueError: If the given location has no softmax model of this class, or nothing is found.
        """
        found = self.find_original(**hub) if location is None else self._version_in(self.open(location, **hub))
        if found is not None:
            return found
        if location is not None:
            raise ValueError(f"{argument} {location} has no softmax model for {self.component} of {self.location}.")
        named = ", ".join(origin["location"] for origin in self.origins()[:1]) or "an unknown model"
        raise ValueError(
            f"{argument} must be given: {self.location} comes from {shorten_text(named, 200)}, which is neither on "
            "the Hub nor in a folder beside it nor at a path recorded on this machine."
        )

    def find_original(self, **hub: Any) -> ModelDirectory | None:
        """Find the softmax model that an MHLA model was made from, by the records of its directory and of theirs.

        A directory is looked for where a record of this machine has its path, and beside the one with the record:
        records of others are no reason to read elsewhere.
        Of a Hub repository, a pipeline's component alone is downloaded.

        Args:
            **hub: `token`, `cache_dir` and `local_files_only`, as in `snapshot_download`.

        Returns:
            The model, this one if it is softmax; `None` if the records lead nowhere.
        """
        if not self.is_mhla:
            return self
        patterns = None if self.is_transformers else [*_ORIGINAL_FILES, f"{self.component}/*"]
        waiting = [(self.root, origin) for origin in self.origins()]
        seen = {self.root.resolve()}
        while waiting and len(seen) <= _MOST_RECORDS:
            owner, origin = waiting.pop(0)
            location = origin["location"]
            try:
                root = locations.recorded_directory(origin, owner) or _beside(owner, location)
                if locations.is_hub_id(location) and not root.is_dir():
                    root = locations.download_repository(location, allow_patterns=patterns, **hub)
                found = self.read(root, location=location, origin={"location": location})
                original = self._version_in(found)
                further = found.origins()
            except (OSError, ValueError):
                continue
            if original is not None:
                return original
            if root.resolve() not in seen:
                seen.add(root.resolve())
                # The sources of a source follow it, those in a first record before those in a second.
                waiting = [(root, origin) for origin in further] + waiting
        return None

    def _version_in(self, directory: ModelDirectory) -> ModelDirectory | None:
        """The softmax model of the same kind and name in another directory, or its only model."""
        candidate = directory.select(self.component if self.component in directory.configs else None)
        fits = candidate.class_name == self.softmax_class_name and not candidate.is_mhla
        return candidate if fits else None


def find_pipeline(location: str | os.PathLike[str], **options: Any) -> Path:
    """Return the directory of a pipeline, unread; of a Hub repository, only the pipeline's own files are downloaded.

    Args:
        location: A directory or a Hub id.
        **options: Options of `DiffusionPipeline.download`; safetensors unless `use_safetensors` says otherwise.

    Raises:
        OSError: If there is no such directory or repository.
    """
    directory = Path(location).expanduser()
    return directory if directory.is_dir() else locations.download_pipeline(os.fspath(location), **options)


def read_pipeline(
    root: Path, given: Collection[str] = (), *, require_supported: bool = True
) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Read the index of a pipeline and the configurations of the models in it that are or can be MHLA.

    Args:
        root: The pipeline's directory.
        given: Components that need not be there.
        require_supported: Leave out other denoisers.

    Returns:
        The index, and the configurations by component.

    Raises:
        ValueError: If a file is damaged, or a name in the index leads out of the directory.
    """
    index = read_json(root / locations.PIPELINE_INDEX, "the pipeline's index", required={"_class_name": (str, list)})
    configs = {}
    for name, entry in index.items():
        if not isinstance(entry, list):
            continue
        folder = path_inside(root, name, str(root / locations.PIPELINE_INDEX))
        class_name = entry[-1] if entry else None
        if not isinstance(class_name, str):
            continue
        is_denoiser = not require_supported and re.search("Transformer|UNet", class_name)
        if is_denoiser or class_name in {**FAMILIES, **MHLA_CLASSES, LEGACY_CLASS: None}:
            path = folder / "config.json"
            stored = {} if name in given and not path.exists() else read_config(path)
            configs[name] = {"_class_name": class_name, **stored}
    return index, configs


def read_config(path: Path) -> dict[str, Any]:
    """Read a model's `config.json`; `ValueError` where it is damaged, or names its class by anything but a text."""
    names: dict[str, Any] = {"_class_name": str, "model_type": str, "architectures": (list, type(None))}
    return read_json(path, "the model's configuration", optional=names)


def parts_of(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return a configuration and those of its towers."""
    return [config, *(part for part in config.values() if isinstance(part, Mapping))]


def _beside(owner: Path, location: str) -> Path:
    folder = owner.resolve().parent
    name = os.path.relpath(location, folder) if Path(location).is_absolute() else location
    return path_inside(folder, name, f"the record of {owner}")
