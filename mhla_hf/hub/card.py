# SPDX-License-Identifier: Apache-2.0
"""The model card of an MHLA model, from the records in its directory and reports of measurements."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import ModelCard, ModelCardData

from ..models.directory import ModelDirectory
from ..models.registry import MHLA_CLASSES
from ..models.stub import TAGS
from ..ops.tables import FEATURE_MAPS, NORMALIZERS
from ..recovery.report import PLOT
from ..training.families import family_of_class
from ..utils import model_cards
from ..utils.compat.transformers import task_classes
from ..utils.files import atomic_file, read_json
from ..utils.locations import is_hub_id
from ..utils.messages import one_line, shorten_value
from . import records as recorded


_TEMPLATE = Path(__file__).parent / "templates" / "model_card.md.jinja"
_PLACEHOLDER = "path/or/repository"
_SAMPLES = ("sample.gif", "sample.png", "sample.jpg", "sample.webp")
_FAMILY_NAMES = {"wan": "Wan", "sana": "SANA", "sana-video": "SANA-Video", "dit": "DiT", "pixart": "PixArt"}
_METADATA = re.compile(r"\A\s*---\s*\n.*?\n---\s*(?:\n|\Z)", re.DOTALL)
_LICENSE = re.compile(r"[A-Za-z0-9][A-Za-z0-9.+_-]{0,99}")

# In the names of diffusers' pipelines; the others generate from text.
_PIPELINE_TASKS = {
    "ImageToVideo": "image-to-video",
    "VideoToVideo": "video-to-video",
    "Img2Img": "image-to-image",
    "Inpaint": "image-to-image",
    "DiT": "unconditional-image-generation",
}
_SENTENCE_TASKS = {
    "SparseEncoder": "feature-extraction",
    "MultiVectorEncoder": "feature-extraction",
    "CrossEncoder": "text-ranking",
}
_AUTO_CLASSES = (
    "ForCausalLM", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering",
    "ForImageClassification",
)  # fmt: skip
_AUTO_BY_TASK = {"image-text-to-text": "ForImageTextToText", "automatic-speech-recognition": "ForSpeechSeq2Seq"}
_PROCESSORS = {
    "AutoTokenizer": ("tokenizer_config.json", "tokenizer.json"),
    "AutoImageProcessor": ("preprocessor_config.json", "processor_config.json"),
    "AutoProcessor": ("processor_config.json", "preprocessor_config.json"),
}


@dataclass(frozen=True, kw_only=True)
class CardText:
    """What no file says about a model, for its card. Texts are Markdown.

    Attributes:
        name: Name of the model.
        summary: A paragraph about it.
        note: A sentence about its use.
        training: A sentence or more about how the original was trained.
        dataset: Name of the data that quality was measured on.
        prompt: A prompt that suits it.
        arguments: Further arguments of the pipeline's call in the example.
        sample_caption: Caption of the sample in the directory (`sample.gif`, `sample.png`, …).
        license: Identifier of the licence, such as `apache-2.0`, where no card states one.

    Raises:
        ValueError: If `license` is not an identifier.
    """

    name: str | None = None
    summary: str | None = None
    note: str | None = None
    training: str | None = None
    dataset: str | None = None
    prompt: str | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    sample_caption: str = "Samples"
    license: str | None = None

    def __post_init__(self) -> None:
        if self.license is not None and not _LICENSE.fullmatch(self.license):
            raise ValueError(
                f"license={shorten_value(self.license)} must be an identifier of letters, digits and . + - _, such as "
                "apache-2.0, or other."
            )


def model_card(
    directory: str | Path,
    *,
    benchmarks: Sequence[str | Path | Mapping[str, Any]] = (),
    comparisons: Mapping[str, Mapping[str, Any]] | None = None,
    text: CardText | None = None,
    repo_id: str | None = None,
    destination: str | Path | None = None,
) -> ModelCard:
    """Make the model card of a directory.

    It says what was converted and how it was trained, from `conversion.json`, `report.json` and `training.json`, and
    what was measured: quality from the recovery's report, speed and memory from reports of `mhla-hf bench`. What was
    not recorded or measured is left out. Names and texts from these files are escaped.

    Args:
        directory: A pipeline or model, converted or trained by this package.
        benchmarks: JSON files of `mhla-hf bench`, or their contents. Also `report.json` of other recoveries of the
            same original with the same data, such as linear attention, for rows in the table of quality.
        comparisons: Such reports by the title of their row.
        text: What no file says.
        repo_id: Repository in the examples.
        destination: Final path of a directory that has yet to be moved there.

    Raises:
        ValueError: If the directory has no MHLA model, a file is damaged or no such report, or a recovery was
            measured on other data.

    Examples:
        >>> from mhla_hf import convert_pretrained
        >>> from mhla_hf.demo import base_pipeline_directory
        >>> from mhla_hf.hub import model_card
        >>> report = convert_pretrained(
        ...     base_pipeline_directory(), "digits-mhla-card", {"blocks": [5, 4, 4]}, progress=False
        ... )
        >>> model_card("digits-mhla-card").data.tags
        ['mhla', 'linear-attention', 'wan']
    """
    directory = Path(directory).expanduser()
    text = text or CardText()
    records = recorded.read_records(directory)
    part = records.parts[0]
    measured, others = recorded.read_benchmarks(benchmarks, records.recovery)
    compared = {title: recorded.known(report, recorded.RECOVERY) for title, report in (comparisons or {}).items()}
    quality = recorded.quality_table(records, {**compared, **others})
    speed = [{**report, "results": recorded.measured_rows(report, part)} for report in measured]
    sample = next((name for name in _SAMPLES if (directory / name).is_file()), None)
    data = card_data(directory)
    data.license = data.license or text.license
    origin = records.recovery["data"]["origin"].partition(":")[0]
    data.datasets = [origin] if is_hub_id(origin) else None
    data.eval_results = recorded.eval_results(records, data.pipeline_tag, text.dataset) or None
    title = text.name or _title(records, data.base_model, Path(destination or directory))
    data.model_name = one_line(title, recorded.LONGEST) if data.eval_results else None
    if text.prompt is not None:
        output = {} if sample is None else {"output": {"url": sample}}
        data["widget"] = [{"text": one_line(text.prompt, 1000), **output}]
    card = ModelCard.from_template(
        data,
        str(_TEMPLATE),
        title=title,
        text=text,
        records=records,
        base=data.base_model,
        location=recorded.public_location(
            records.conversion["source"]["location"] or records.training["source"]["location"]
        ),
        family=_FAMILY_NAMES.get(part.family, part.family),
        starts_as_original=all(_starts_as_original(part) for part in records.parts),
        sample=sample,
        plot=PLOT if (directory / PLOT).is_file() else None,
        use=_usage(records, data, repo_id or _PLACEHOLDER, text),
        sample_size=_sample_size,
        quality=quality,
        speed=speed,
        feature_maps=FEATURE_MAPS,
        normalizers=NORMALIZERS,
        **dict(inspect.getmembers(recorded, inspect.isfunction)),
    )
    return ModelCard(model_cards.mark_generated(re.sub(r"\n{3,}", "\n\n", re.sub(r" +\n", "\n", str(card)))))


def write_card(
    directory: str | Path, *, output: str | Path | None = None, overwrite: bool = False, **options: Any
) -> Path | None:
    """Write the model card of a directory.

    Args:
        directory: See [`model_card`].
        output: The file; by default `README.md` in the directory.
        overwrite: Also replace a card that the user wrote or edited.
        **options: Arguments of [`model_card`].

    Returns:
        The file, or `None` where the user's own card was kept.

    Raises:
        ValueError: See [`model_card`].
    """
    directory = Path(directory).expanduser()
    path = directory / model_cards.CARD if output is None else Path(output)
    if not overwrite and model_cards.is_own_card(directory):
        return None
    if path.is_symlink() or (path.exists() and not path.is_file()):
        raise ValueError(
            f"{path} is a link or no file, as in the Hub's cache; copy the directory, or write to another file "
            "(--output)."
        )
    card = model_card(directory, **options)
    with atomic_file(path) as temporary:
        card.save(temporary)
    return path


def card_for_repository(directory: Path, repo_id: str, benchmarks: Sequence[str | Path] = ()) -> str:
    """Return the card for a repository that a directory is pushed to, where the user has not written one.

    A generated card is kept, with the name of the repository in its examples: it may contain texts and reports that
    are not in the directory. With new reports it is generated again.
    """
    written = model_cards.read_card(directory)
    if written is None or benchmarks or not model_cards.is_generated(written):
        return str(model_card(directory, benchmarks=benchmarks, repo_id=repo_id))
    return model_cards.mark_generated(
        model_cards.without_mark(written).replace(_literal(_PLACEHOLDER), _literal(repo_id))
    )


def replacing_card(generated: str, present: str | None) -> str | None:
    """Return the card that replaces the one in a repository; `None` if a person wrote or edited that one.

    The Hub's website gives new repositories a card of metadata alone, such as the licence, which are added.

    Args:
        generated: The new card.
        present: Text of the one in the repository; `None` if it cannot be read.
    """
    if present is None or model_cards.is_generated(present):
        return None if present is None else generated
    if _METADATA.sub("", present).strip():
        return None
    try:
        theirs = ModelCard(present)
    except (ValueError, yaml.YAMLError):
        return None
    card = ModelCard(model_cards.without_mark(generated))
    for name, value in theirs.data.to_dict().items():
        if card.data.get(name) is None:
            card.data[name] = value
    return model_cards.mark_generated(str(card))


# Metadata


def card_data(directory: str | Path) -> ModelCardData:
    """Return the metadata of the card for a model's directory.

    Unknown fields stay `None`: the base model of a directory that was converted from another directory, a licence
    that no card states, the task of a model without a head that the libraries know one for.

    Args:
        directory: A pipeline or model, converted or trained by this package.

    Raises:
        ValueError: If it is neither, or its files are damaged.
    """
    opened = ModelDirectory.read(Path(directory))
    model = next(iter(opened.mhla_models), opened)
    family = model.config["model_type"] if model.is_transformers else model.class_name
    base = next((origin["location"] for origin in model.origins() if is_hub_id(origin["location"])), None)
    library = "diffusers"
    if model.is_transformers:
        library = "sentence-transformers" if (model.root / "modules.json").is_file() else "transformers"
    carried: dict[str, Any] = model_cards.carried_metadata(model.root)
    if base is not None:
        carried["base_model_relation"] = "finetune"
    return ModelCardData(
        library_name=library,
        pipeline_tag=_task(model),
        base_model=base,
        tags=[*TAGS, MHLA_CLASSES[family].name if family in MHLA_CLASSES else family],
        **carried,
    )


def _task(model: ModelDirectory) -> str | None:
    if model.is_transformers:
        if (model.root / "modules.json").is_file():
            path = model.root / "config_sentence_transformers.json"
            kind = read_json(path, "the configuration").get("model_type") if path.is_file() else None
            return _SENTENCE_TASKS.get(str(kind), "sentence-similarity")
        return next((task for task, names in task_classes().items() if model.class_name in names), None)
    # A transformer of diffusers alone generates nothing.
    if model.index is None or not model.is_mhla:
        return None
    named = (task for words, task in _PIPELINE_TASKS.items() if words in str(model.index.get("_class_name")))
    return next(named, f"text-to-{MHLA_CLASSES[model.class_name].kind}")


def _title(records: recorded.Records, base_model: Any, directory: Path) -> str:
    if base_model is not None:
        return f"{base_model.partition('/')[2]} with MHLA"
    root = directory.expanduser().resolve()
    # Trainings write into a folder of their output, and a snapshot in the Hub's cache is named by its commit.
    name = root.parent.name if records.training["config"] and root.name in ("pipeline", "model") else root.name
    return "A model with MHLA" if re.fullmatch(r"[0-9a-f]{40}|", name) else name


def _starts_as_original(part: recorded.ModelPart) -> bool:
    family = MHLA_CLASSES.get(part.directory.class_name)
    return family is not None and bool(family.load_class().starts_as_upstream(part.towers[0].options))


# The model


def _usage(records: recorded.Records, data: ModelCardData, location: str, text: CardText) -> dict[str, Any]:
    """Return what the examples of the template are made of."""
    part = records.parts[0]
    task, name = str(data.pipeline_tag), part.directory.class_name
    kind = "sentences" if data.library_name == "sentence-transformers" else part.directory.kind
    inputs = {"unconditional-image-generation": ["class_labels=[0]"]}.get(task, [])
    if task in ("text-to-video", "text-to-image"):
        size = _call_size(part, part.towers[0]) or {}
        inputs = [_literal(text.prompt or "A lighthouse on a cliff at sunset")]
        inputs += [f"{name}={value!r}" for name, value in {**size, **text.arguments}.items()]
    processor = "AutoTokenizer"
    if "image" in task:
        processor = "AutoProcessor" if "text" in task else "AutoImageProcessor"
    has_processor = any((part.directory.root / file).is_file() for file in _PROCESSORS[processor])
    auto_class = next((end for end in _AUTO_CLASSES if name.endswith(end)), _AUTO_BY_TASK.get(task, ""))
    return {
        "kind": kind,
        "task": task,
        "where": _literal(location),
        "class_name": name,
        "inputs": inputs,
        "auto_class": f"AutoModel{auto_class}",
        "processor": processor if has_processor else "",
        "prompt": _literal(text.prompt or "Once upon a time"),
    }


def _sample_size(part: recorded.ModelPart, tower: recorded.Tower) -> str | None:
    """Return the size of the images or videos that the token grid stands for; `None` if unknown."""
    size = _call_size(part, tower)
    if size is None:
        return None
    frame = f"{size['height']}×{size['width']} pixels"
    return frame if "num_frames" not in size else f"{size['num_frames']} frames of {frame}"


def _call_size(part: recorded.ModelPart, tower: recorded.Tower) -> dict[str, int] | None:
    """Return the same as arguments of the pipeline."""
    grid = tower.options.grid
    if grid is None or part.directory.index is None or len(grid) < 2:
        return None
    try:
        found = family_of_class(part.directory.class_name).sizes(part.directory)
    # Families without training have no sizes here.
    except (ValueError, KeyError, TypeError):
        return None
    sides = [length * patch * found.spatial_factor for length, patch in zip(grid[-2:], found.patch_size, strict=True)]
    size = {"height": sides[0], "width": sides[1]}
    if len(grid) == 3:
        (patch, *_) = recorded.known(part.directory.config.get("patch_size"), [int]) or [1]
        size["num_frames"] = (grid[0] * (patch or 1) - 1) * found.temporal_factor + 1
    return size


def _literal(text: object) -> str:
    """Format a Python string on one line."""
    return json.dumps(one_line(text, 1000), ensure_ascii=False)
