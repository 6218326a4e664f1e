# SPDX-License-Identifier: Apache-2.0
"""Sources of a run: the pipeline or model that it starts from, found once, then checked, loaded and exported."""

from __future__ import annotations

import json
import shutil
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
from accelerate import init_empty_weights

from ..models.directory import TRAINING_RECORD, ModelDirectory
from ..models.registry import mhla_class_for
from ..models.weight_files import check_weights
from ..utils.destinations import atomic_directory
from ..utils.files import list_files, write_json
from ..utils.locations import PIPELINE_INDEX, find_directory, find_pipeline
from ..utils.model_cards import CARD, is_own_card
from .config import UNCONVERTED, TrainingConfig
from .families import Family, family_of_class
from .parameters import check_takes_adapters


class TrainingSource:
    """The pipeline or model directory that a run starts from.

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
    def find(cls, location: str, component: str = "transformer", teacher_location: str | None = None) -> Any:
        """Find a directory, or download a Hub repository; arguments as in the class."""
        is_pipeline = issubclass(cls, PipelineSource)
        directory = find_pipeline(location, "model") if is_pipeline else find_directory(location)[0]
        source = cls(directory, component, teacher_location)
        _ = source.model
        return source

    @cached_property
    def model(self) -> ModelDirectory:
        """The model to train.

        Raises:
            ValueError: If the directory has none that can be trained here.
        """
        is_pipeline = (self.directory / PIPELINE_INDEX).is_file()
        found = ModelDirectory.read(self.directory, self.component if is_pipeline else None)
        if isinstance(self, PipelineSource):
            family_of_class(found.class_name, f"component: {self.component} of {self.directory}").check_model(
                found.config
            )
        elif not found.is_transformers:
            raise ValueError(f"model: {self.directory} is not a model of transformers")
        return found

    @property
    def teacher(self) -> ModelDirectory:
        """The ordinary model behind this one; a ValueError says if it is unknown, gone or MHLA itself."""
        return self.model.original(self.teacher_location, "teacher")

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
        source, index = self.model, self.model.index
        excluded = {TRAINING_RECORD} | (set() if source.is_mhla and is_own_card(source.root) else {CARD})
        excluded |= set() if index is None else {source.component, PIPELINE_INDEX}
        with atomic_directory(destination) as temporary:
            for path in list_files(source.root):
                replaced = index is None and (path.name == "config.json" or source.names.match(path))
                # Version-control and download bookkeeping of the source does not belong to the copy.
                if (replaced and len(path.parts) == 1) or path.parts[0] in excluded or path.parts[0].startswith("."):
                    continue
                (temporary / path).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source.root / path, temporary / path)
            model.save_pretrained(temporary if index is None else temporary / source.component)
            if index is not None:
                index = {**index, source.component: ["diffusers", type(model).__name__]}
                (temporary / PIPELINE_INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
            write_json(temporary / TRAINING_RECORD, record)

    def load_model(self, mhla: dict | str | None = None) -> torch.nn.Module:
        """Load the model to train, with fp32 weights.

        Args:
            mhla: MHLA options for an ordinary source, which is converted on load; `none` leaves it as it is.

        Raises:
            ValueError: If an ordinary source comes without options or an MHLA one with them, or files are damaged.
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


class TransformersSource(TrainingSource):
    """A model directory of transformers."""

    kind = "model"


class PipelineSource(TrainingSource):
    """A pipeline of diffusers and the transformer of it to train."""

    kind = "pipeline"

    @property
    def family(self) -> Family:
        """The transformer's family."""
        return family_of_class(self.model.class_name)

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
        self.family.make_objective(config, self.model)
        for name in (self.component, "vae", "text_encoder"):
            check_weights(self.directory / name)
        self._check_conversion(config.mhla)
        model_class = self.model.load_class()
        if config.mhla != UNCONVERTED:
            model_class = mhla_class_for(self.model.class_name)
        if config.train == "lora":
            check_takes_adapters(model_class)
        if isinstance(config.mhla, dict):
            with init_empty_weights():
                model_class.from_config({**self.model.config, "mhla": config.mhla})
        if config.transfer_steps or config.distill_steps:
            _ = self.teacher
