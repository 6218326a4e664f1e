# SPDX-License-Identifier: Apache-2.0
"""Sources of a run: the pipeline or model that it starts from, found once, then read, checked, loaded and exported."""

from __future__ import annotations

import json
import os
import shutil
from abc import ABC, abstractmethod
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from accelerate import init_empty_weights

from ..models.registry import current_class, mhla_class_for
from ..models.source import TRAINING_RECORD, Component, Source, find_original, read_source
from ..models.weight_files import check_weights, damage_named
from ..utils.destinations import atomic_directory
from ..utils.files import Types, list_files, read_json, write_json
from ..utils.locations import PIPELINE_INDEX, download_pipeline, download_repository, find_directory, find_pipeline
from ..utils.model_cards import CARD, is_own_card
from .config import COMPONENTS, UNCONVERTED, TrainingConfig
from .families import Family, Objective, check_options, family_of, family_of_class
from .families.base import PipelineSizes
from .parameters import check_takes_adapters


if TYPE_CHECKING:
    from typing_extensions import Self

_NULL = type(None)
_INDEX_FIELDS: dict[str, Types] = {"id2label": (dict, _NULL), "boundary_ratio": (float, _NULL)}
_CHANNELS: dict[str, Types] = {"in_channels": int, "out_channels": (int, _NULL)}
_SCHEDULER_NUMBERS = ("flow_shift", "shift", "beta_start", "beta_end")
_SCHEDULER_FIELDS: dict[str, Types] = {
    "_class_name": str,
    "prediction_type": str,
    "beta_schedule": str,
    "num_train_timesteps": int,
    "trained_betas": (list, _NULL),
    **dict.fromkeys(_SCHEDULER_NUMBERS, (float, _NULL)),
}
_MOST_TIMESTEPS = 100_000
_LAYER_COUNTS = ("num_layers", "num_hidden_layers", "num_decoder_layers", "layers_per_block")


class TrainingSource(ABC):
    """The pipeline or model directory that a run starts from.

    Its files are read when they are first needed and remembered: one source serves a whole run.

    Args:
        directory: The directory.
        component: Name of the transformer to train, of a pipeline.
        teacher_location: Directory or Hub id of the ordinary model to match. None takes the source itself if it is
            ordinary, else the one that it was converted from.
    """

    kind: ClassVar[str]

    def __init__(self, directory: Path, component: str = "transformer", teacher_location: str | None = None) -> None:
        self.directory, self.component, self.teacher_location = Path(directory), component, teacher_location

    @classmethod
    def find(
        cls,
        location: str,
        component: str = "transformer",
        teacher_location: str | None = None,
        argument: str = "model",
    ) -> Self:
        """Find a directory, or download a Hub repository.

        Args:
            location: A directory or a Hub id.
            component: See the class.
            teacher_location: See the class.
            argument: Name of the argument that gives the location, for errors.

        Raises:
            ValueError: If there is no pipeline or model.
        """
        return cls(cls._locate(location, argument), component, teacher_location)

    @classmethod
    @abstractmethod
    def _locate(cls, location: str, argument: str) -> Path: ...

    @staticmethod
    @abstractmethod
    def _download(repository: str) -> Path: ...

    @property
    @abstractmethod
    def model(self) -> Component:
        """The model to train.

        Raises:
            ValueError: If the directory has none that can be trained here.
        """

    def export(self, destination: Path, model: Any, record: dict[str, Any]) -> None:
        """Write a copy of the directory with the trained model in it.

        The model card is not copied where it is about the original, or was generated for the model before training.

        Args:
            destination: Directory to make; written under a temporary name, then moved.
            model: The trained model, whole and without LoRA.
            record: Contents of `training.json`.

        Raises:
            ValueError: If links in the directory lead out of it, see `list_files`.
        """
        excluded = {TRAINING_RECORD}
        if not (self.model.is_mhla and is_own_card(self.directory)):
            excluded.add(CARD)
        with atomic_directory(destination) as temporary:
            for path in list_files(self.directory):
                # Version-control and download bookkeeping of the source does not belong to the copy.
                if self._is_replaced(path) or path.parts[0] in excluded or path.parts[0].startswith("."):
                    continue
                (temporary / path).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(self.directory / path, temporary / path)
            self._write(temporary, model)
            write_json(temporary / TRAINING_RECORD, record)

    @abstractmethod
    def _is_replaced(self, path: Path) -> bool: ...

    @abstractmethod
    def _write(self, directory: Path, model: Any) -> None: ...

    def load_model(self, mhla: dict | str | None = None) -> torch.nn.Module:
        """Load the model to train, with fp32 weights.

        Args:
            mhla: MHLA options for an ordinary source, which is converted on load; `none` leaves it as it is.

        Raises:
            ValueError: If an ordinary source comes without options or an MHLA one with them, files are damaged, or
                the model cannot be trained here, such as an image-to-video one.
        """
        self._check_conversion(mhla)
        return self.model.load(mhla if isinstance(mhla, dict) else None)

    def _check_conversion(self, mhla: dict | str | None) -> None:
        if self.model.is_mhla and mhla is not None:
            raise ValueError(f"mhla: {self.directory} is MHLA already; its options are fixed")
        if not self.model.is_mhla and mhla is None:
            raise ValueError(
                f"model: {self.directory} is an ordinary {self.kind}; say how to convert it (mhla, blocks, ...), "
                "convert it first with `mhla-hf convert`, or pass mhla='none' to train it as it is"
            )

    @cached_property
    def teacher(self) -> Component:
        """The ordinary model behind this one; see `find_original` for where it is looked for.

        Raises:
            ValueError: If it is unknown, gone, elsewhere or MHLA itself.
        """
        if self.teacher_location is not None:
            given = self.find(self.teacher_location, self.component, argument="teacher").model
            if given.is_mhla:
                raise ValueError(
                    f"teacher: {self.teacher_location} is MHLA itself; it must be an ordinary {self.kind}"
                )
            return given
        if not self.model.is_mhla:
            return self.model
        source = Source(str(self.directory), self.directory, None, (self.model,))
        found = find_original(source, self.model, self._download)
        if found is None:
            named = ", ".join(map(str, source.records()[:1])) or f"an unknown {self.kind}"
            raise ValueError(
                f"teacher must be given: {self.directory} comes from {named}, which is neither on the Hub nor in a "
                "folder beside it nor at a path recorded on this machine"
            )
        return found[1]


class TransformersSource(TrainingSource):
    """A model directory of transformers."""

    kind = "model"
    _download = staticmethod(download_repository)

    @classmethod
    def _locate(cls, location: str, argument: str) -> Path:
        directory, _ = find_directory(location)
        _ = cls(directory).model
        return directory

    @cached_property
    def model(self) -> Component:
        found = read_source(self.directory, wanted={}).components[0]
        if not found.is_transformers:
            raise ValueError(f"model: {self.directory} is not a model of transformers")
        return found

    def _is_replaced(self, path: Path) -> bool:
        own = (self.directory / path).parent == self.model.folder
        return own and (path.name == "config.json" or self.model.names.match(path))

    def _write(self, directory: Path, model: Any) -> None:
        model.save_pretrained(directory / self.model.folder.relative_to(self.directory))


class PipelineSource(TrainingSource):
    """A pipeline of diffusers and the transformer of it to train.

    The configurations raise a ValueError where they are missing, not valid, or hold a value that training cannot use;
    it names the file.
    """

    kind = "pipeline"
    _download = staticmethod(download_pipeline)

    _locate = staticmethod(find_pipeline)

    @cached_property
    def model(self) -> Component:
        folder = self.directory / self.component
        where = "the model's configuration"
        config = read_json(folder / "config.json", where, required={"_class_name": str}, optional=_CHANNELS)
        name = current_class(config["_class_name"], config)
        family = family_of_class(name, f"component: {self.component} of {self.directory}")
        family.objective.check_config(config)
        return Component(self.component, folder, config)

    @property
    def family(self) -> Family:
        """The transformer's family."""
        return family_of_class(self.model.class_name)

    @cached_property
    def sizes(self) -> PipelineSizes:
        """Constraints on the sizes of samples."""
        return self.family.read_sizes(self)

    @cached_property
    def index(self) -> dict[str, Any]:
        """Contents of `model_index.json`."""
        path = self.directory / PIPELINE_INDEX
        index = read_json(path, "the pipeline's index", required={"_class_name": str}, optional=_INDEX_FIELDS)
        for number, names in (index.get("id2label") or {}).items():
            if not (number.isascii() and number.isdecimal() and len(number) < 10 and isinstance(names, str)):
                raise ValueError(
                    f"the pipeline's index {path}: 'id2label' must map numbers of classes to their names."
                )
        return index

    @cached_property
    def scheduler(self) -> dict[str, Any]:
        """The scheduler's configuration; empty for a pipeline without scheduler."""
        path = self.directory / "scheduler" / "scheduler_config.json"
        # A link that leads nowhere is an error, and no missing file.
        if not os.path.lexists(path):
            return {}
        config = read_json(path, "the scheduler's configuration", optional=_SCHEDULER_FIELDS)
        if not 1 <= config.get("num_train_timesteps", 1) <= _MOST_TIMESTEPS:
            raise ValueError(
                f"the scheduler's configuration {path}: 'num_train_timesteps' must be from 1 to {_MOST_TIMESTEPS:,}."
            )
        return config

    def check_family(self, family: str) -> None:
        """Check that the command for one family of models is given one of them.

        Raises:
            ValueError: If it is not; the message names the command to use instead.
        """
        if self.family.name != family:
            raise ValueError(f"model is a {self.model.class_name}: use `mhla-hf train {self.family.name}`")

    def check_run(self, config: TrainingConfig) -> None:
        """Check the options of a run against the pipeline's files, before data are encoded for it.

        Raises:
            ValueError: If options, pipeline and teacher do not fit together.
        """
        self.family.objective.from_run(config, self)
        for name in (self.component, "vae", "text_encoder"):
            check_weights(self.directory / name)
        self._check_conversion(config.mhla)
        class_name = self.model.class_name
        model_class = self.model.load_class() if config.mhla == UNCONVERTED else mhla_class_for(class_name)
        if config.train == "lora":
            check_takes_adapters(model_class)
        if isinstance(config.mhla, dict):
            with init_empty_weights():
                model_class.from_config({**self.model.config, "mhla": config.mhla})
        if config.transfer_steps or config.distill_steps:
            _ = self.teacher

    def load_encoders(self) -> Any:
        """Load the pipeline without its transformers: VAE, text encoder, tokenizer and scheduler, on the CPU.

        Raises:
            ValueError: If diffusers has no such pipeline, or its files are damaged; the message names them.
        """
        import diffusers

        index, directory = self.index, self.directory
        transformers = {name: None for name in COMPONENTS if name in index}
        loaded = set(index) - set(transformers)
        for folder in sorted(path for path in directory.iterdir() if path.is_dir() and path.name in loaded):
            tensors = check_weights(folder)
            for path in sorted(folder.glob("*.json")):
                content = read_json(path, "the pipeline's file")
                for name in _LAYER_COUNTS if tensors and path.name == "config.json" else ():
                    # A layer has a tensor at least, and building millions of layers takes hours.
                    if isinstance(content.get(name), int) and content[name] > tensors:
                        raise ValueError(
                            f"the pipeline's file {path}: {name!r} is above the {tensors} tensors beside it."
                        )
        with damage_named(directory):
            pipeline: Any = diffusers.DiffusionPipeline.from_pretrained(directory, **transformers)
        pipeline.set_progress_bar_config(disable=True)
        for component in pipeline.components.values():
            if isinstance(component, torch.nn.Module):
                component.requires_grad_(False).eval()
        return pipeline

    def _is_replaced(self, path: Path) -> bool:
        return path.parts[0] in (self.component, PIPELINE_INDEX)

    def _write(self, directory: Path, model: Any) -> None:
        model.save_pretrained(directory / self.component)
        index = {**self.index, self.component: ["diffusers", type(model).__name__]}
        (directory / PIPELINE_INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def objective_for(
    model: Any, directory: Path | PipelineSource | None = None, config: TrainingConfig | None = None
) -> Objective:
    """The objective that a model is trained and evaluated with.

    Args:
        model: The transformer.
        directory: The pipeline it comes from, as a directory or a source; its scheduler decides how samples are
            noised. None takes the defaults of the family.
        config: Options that change it; None changes nothing.

    Raises:
        ValueError: If such models cannot be trained here, an option belongs to other models, or the scheduler does
            not go with the objective.
    """
    family, config = family_of(model), config or TrainingConfig()
    family.objective.check_config(model.config)
    check_options(config, family.name)
    source = PipelineSource(directory, config.component) if isinstance(directory, Path) else directory
    return family.objective.from_run(config, source)
