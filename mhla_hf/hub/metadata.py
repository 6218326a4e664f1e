# SPDX-License-Identifier: Apache-2.0
"""Metadata of a model's card on the Hub, read off its directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData

from ..models.registry import MHLA_CLASSES
from ..models.source import Component, Source, read_source
from ..models.stub import TAGS
from ..utils.compat.transformers import task_classes
from ..utils.json_files import read_json
from ..utils.locations import is_hub_id
from ..utils.model_cards import CARD, license_in, read_card_metadata, source_cards


_SENTENCE_MODULES = "modules.json"
# In names of diffusers' pipelines. The others make images or videos from texts.
_PIPELINE_INPUTS = {
    "ImageToVideo": "image-to-video",
    "VideoToVideo": "video-to-video",
    "Img2Img": "image-to-image",
    "Inpaint": "image-to-image",
    "DiT": "unconditional-image-generation",
}


def card_data(directory: Path) -> ModelCardData:
    """Returns the metadata of the card for a model's directory.

    Fields that are not known stay `None`: the base model of a directory that was converted from another directory, a
    licence that no card states, the task of a model without a head that the libraries know one for.

    Args:
        directory: A pipeline or model, converted or trained by this package.

    Raises:
        ValueError: If it is neither, or its files are damaged.
    """
    source = read_source(directory)
    part = next((part for part in source.components if part.is_mhla), source.components[0])
    base = _base_model(source)
    return ModelCardData(
        library_name=_library(source, part),
        pipeline_tag=_pipeline_tag(source, part),
        base_model=base,
        tags=[*TAGS, family_name(part)],
        **(_license(directory) if base is None else {"base_model_relation": "finetune", **_license(directory)}),
    )


def family_name(part: Component) -> str:
    """Returns the family of a model: the short name of one of diffusers, the `model_type` of one of transformers."""
    if part.is_transformers:
        return str(part.config["model_type"])
    return MHLA_CLASSES[part.class_name].name if part.is_mhla else part.class_name


def _library(source: Source, part: Component) -> str:
    if not part.is_transformers:
        return "diffusers"
    return "sentence-transformers" if (source.root / _SENTENCE_MODULES).is_file() else "transformers"


def _pipeline_tag(source: Source, part: Component) -> str | None:
    if part.is_transformers:
        return _sentence_task(source.root) or _task(part.class_name)
    # A transformer of diffusers alone makes nothing.
    if source.pipeline is None or not part.is_mhla:
        return None
    name = str(source.pipeline.get("_class_name"))
    named = (tag for words, tag in _PIPELINE_INPUTS.items() if words in name)
    return next(named, f"text-to-{MHLA_CLASSES[part.class_name].kind}")


def _sentence_task(directory: Path) -> str | None:
    """The task by which sentence-transformers tags its kinds of models; `None` for other directories."""
    if not (directory / _SENTENCE_MODULES).is_file():
        return None
    path = directory / "config_sentence_transformers.json"
    kind = read_json(path, "the configuration").get("model_type") if path.is_file() else None
    tasks = {"SparseEncoder": "feature-extraction", "MultiVectorEncoder": "feature-extraction"}
    return {**tasks, "CrossEncoder": "text-ranking"}.get(str(kind), "sentence-similarity")


def _task(class_name: str) -> str | None:
    """The task of a class of transformers, by the tables of transformers."""
    return next((task for task, names in task_classes().items() if class_name in names), None)


def _base_model(source: Source) -> str | None:
    return next((location for location in source.records() if is_hub_id(location)), None)


def _license(directory: Path) -> dict[str, Any]:
    """The licence stated by the card of a directory, or by that of its source as a record kept it."""
    cards = [read_card_metadata(directory / CARD), *reversed(source_cards(directory))]
    return next(filter(None, map(license_in, cards)), {})
