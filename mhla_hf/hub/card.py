# SPDX-License-Identifier: Apache-2.0
"""The model card of an MHLA model, from the records in its directory and reports of measurements."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import ModelCard

from ..config import MHLAConfig
from ..models.registry import MHLA_CLASSES
from ..recovery.report import PLOT
from ..utils.files import atomic_file
from ..utils.json_files import read_json
from ..utils.locations import is_hub_id
from ..utils.messages import how_to_install, one_line, shorten_value
from ..utils.model_cards import (
    CARD,
    carried_metadata,
    is_generated,
    is_own_card,
    mark_generated,
    read_card,
    without_mark,
)
from .card_attention import describe_part, layers_sentence, limits
from .card_quality import comparison_title, eval_results, quality_section
from .card_speed import is_benchmark, speed_sections
from .card_training import training_section
from .card_usage import usage
from .markdown import LONGEST, code, joined, literal, plain
from .metadata import card_data
from .records import Records, entry, is_recovery, public_location, read_records


_TEMPLATE = Path(__file__).parent / "templates" / "model_card.md.jinja"
_PLACEHOLDER = "path/or/repository"
_SAMPLES = tuple(f"sample.{ending}" for ending in ("gif", "png", "jpg", "webp"))
_FAMILY_NAMES = {"wan": "Wan", "sana": "SANA", "sana-video": "SANA-Video", "dit": "DiT", "pixart": "PixArt"}
_METADATA = re.compile(r"\A\s*---\s*\n.*?\n---\s*(?:\n|\Z)", re.DOTALL)
_LICENSE = re.compile(r"[A-Za-z0-9][A-Za-z0-9.+_-]{0,99}")
_LINKED = re.compile(r"[A-Za-z0-9._-]+/[A-Za-z0-9._-]+")


@dataclass(frozen=True, kw_only=True)
class CardText:
    """What only people know about a model, for its card. Texts are Markdown.

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
    """Makes the model card of a directory.

    It says what was converted and how it was trained, from `conversion.json`, `report.json` and `training.json`, and
    what was measured: quality from the recovery's report, speed and memory from reports of `mhla-hf bench`. What was
    not recorded or measured is left out. Names and texts from these files are escaped.

    Args:
        directory: A pipeline or model, converted or trained by this package.
        benchmarks: JSON files of `mhla-hf bench`, or their contents. Also `report.json` of other recoveries of the
            same original with the same data, linear attention for example: they stand beside this model in the table
            of quality.
        comparisons: Such reports by the title of their row.
        text: What no file says.
        repo_id: Repository in the examples.
        destination: The path that a directory still to be moved will have.

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
    if not directory.is_dir():
        raise ValueError(f"{directory} is not a directory; give one that holds a pipeline or model.")
    text = text or CardText()
    records = read_records(directory)
    measured, others = _read_benchmarks(benchmarks, records.recovery)
    others = {**{title: dict(report) for title, report in (comparisons or {}).items()}, **others}
    quality, speed = quality_section(records, others), speed_sections(measured, records.parts[0])
    data = card_data(directory)
    data.license = data.license or text.license
    data.language = carried_metadata(directory).get("language")
    origin = entry(records.recovery, "data", "origin", kind=str).partition(":")[0]
    data.datasets = [origin] if _LINKED.fullmatch(origin) else None
    data.eval_results = eval_results(records, data.pipeline_tag, text.dataset) or None
    title = text.name or _title(records, data.base_model, Path(destination or directory))
    data.model_name = one_line(title, LONGEST) if data.eval_results else None
    sample = next((name for name in _SAMPLES if (directory / name).is_file()), None)
    if text.prompt is not None:
        output = {} if sample is None else {"output": {"url": sample}}
        data["widget"] = [{"text": one_line(text.prompt, 1000), **output}]
    parts = records.parts
    plot = {"file": PLOT, "caption": "Held-out quality over CPU time"} if (directory / PLOT).is_file() else None
    card = _render(
        data,
        title=plain(title),
        summary=text.summary,
        base=_base(records, data.base_model),
        original=parts[0].original_attention,
        where=_where(records),
        others=None if records.source.pipeline is None else "The other components of the pipeline are unchanged.",
        status=_status(records),
        sample=None if sample is None else {"file": sample, "caption": text.sample_caption},
        use=usage(records, data, repo_id or _PLACEHOLDER, text.prompt, text.arguments),
        usage_note=text.note,
        parts=[describe_part(part) for part in parts],
        training_note=text.training,
        **training_section(records),
        quality=quality,
        plot=plot,
        speed=speed,
        limits=limits(records, quality is not None, any(section["is_own"] for section in speed)),
    )
    return ModelCard(mark_generated(re.sub(r"\n{3,}", "\n\n", re.sub(r" +\n", "\n", str(card)))))


def write_card(directory: str | Path, *, overwrite: bool = False, **options: Any) -> Path | None:
    """Writes the model card of a directory as `README.md`.

    Args:
        directory: See [`model_card`].
        overwrite: Also replace a card that the user wrote or edited.
        **options: Arguments of [`model_card`].

    Returns:
        The file, or `None` where the user's own card was left as it is.

    Raises:
        ValueError: See [`model_card`].
    """
    directory = Path(directory).expanduser()
    if not overwrite and is_own_card(directory):
        return None
    path = directory / CARD
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
    """Returns the card for a repository that a directory is pushed to, where the user has not written one.

    An existing card is kept, with the name of the repository in its examples: it may have been made from texts and
    reports that are not in the directory. With new reports it is generated again.
    """
    written = read_card(directory)
    if written is None or benchmarks or not is_generated(written):
        return str(model_card(directory, benchmarks=benchmarks, repo_id=repo_id))
    text = without_mark(written).replace(literal(_PLACEHOLDER), literal(repo_id))
    return str(ModelCard(mark_generated(text)))


def replacing_card(generated: str, present: str | None) -> str | None:
    """Returns the card that replaces the one in a repository; `None` if a person wrote or edited that one.

    The Hub's website gives new repositories a card of metadata alone, the licence for example: these are added.

    Args:
        generated: The new card.
        present: The text of the one in the repository; `None` if it cannot be read.
    """
    if present is None or is_generated(present):
        return None if present is None else generated
    if _METADATA.sub("", present).strip():
        return None
    try:
        theirs = ModelCard(present)
    except (ValueError, yaml.YAMLError):
        return None
    card = ModelCard(without_mark(generated))
    for name, value in theirs.data.to_dict().items():
        if card.data.get(name) is None:
            card.data[name] = value
    return mark_generated(str(card))


def _render(data: Any, **facts: Any) -> ModelCard:
    try:
        return ModelCard.from_template(data, str(_TEMPLATE), **facts)
    except ImportError as error:
        raise ModuleNotFoundError(f"model cards need jinja2: {how_to_install('report')}") from error


def _read_benchmarks(
    benchmarks: Sequence[str | Path | Mapping[str, Any]], own: dict[str, Any]
) -> tuple[list[dict[str, Any]], dict[str, dict[str, Any]]]:
    """Reports of speed, and recoveries by their titles."""
    measured: list[dict[str, Any]] = []
    recoveries: dict[str, dict[str, Any]] = {}
    for given in benchmarks:
        report = dict(given) if isinstance(given, Mapping) else read_json(Path(given).expanduser(), "the report")
        if is_benchmark(report):
            measured.append(report)
        elif is_recovery(report):
            title = first = comparison_title(report, own)
            while title in recoveries:
                title = f"{first} ({len(recoveries) + 1})"
            recoveries[title] = report
        else:
            where = "a benchmark" if isinstance(given, Mapping) else str(given)
            raise ValueError(
                f"{where} is neither a report of mhla-hf bench op, model, train or decode (--json) nor report.json of "
                "mhla-hf recover."
            )
    return measured, recoveries


def _title(records: Records, base_model: Any, directory: Path) -> str:
    if isinstance(base_model, str) and is_hub_id(base_model):
        return f"{base_model.partition('/')[2]} with MHLA"
    root = directory.expanduser().resolve()
    # Trainings write into a folder of their output, and a snapshot in the Hub's cache is named by its commit.
    name = root.parent.name if records.training and root.name in ("pipeline", "model") else root.name
    return "A model with MHLA" if re.fullmatch(r"[0-9a-f]{40}|", name) else name


def _base(records: Records, base_model: Any) -> str:
    """The base model as a link, or in words."""
    if isinstance(base_model, str) and _LINKED.fullmatch(base_model):
        return f"[{plain(base_model)}](https://huggingface.co/{base_model})"
    part = records.parts[0]
    article = "an" if part.kind[0] in "aeiou" else "a"
    text = f"{article} {part.kind} of the {_FAMILY_NAMES.get(part.family, plain(part.family))} family"
    location = entry(records.conversion or records.training, "source", "location", kind=str)
    return f"{text}, converted from {code(public_location(location))}," if location else text


def _where(records: Records) -> str | None:
    """Where the attention is MHLA: in which of several models, or in how many layers of the only one."""
    if len(records.source.components) == 1:
        return layers_sentence(records.parts[0])
    return joined(code(part.component.name) for part in records.parts)


def _status(records: Records) -> str | None:
    """What users must know before they try the model: whether its new parameters are trained."""
    conversion = records.conversion
    if conversion.get("command") == "import-official":
        location = code(entry(conversion, "source", "location", kind=str))
        return (
            f"The weights were imported from a checkpoint of the paper's code{f' ({location})' if location else ''}."
        )
    if records.is_trained or not conversion or not any(part.new_parameters for part in records.parts):
        return None
    if all(_starts_as_original(records, index) for index in range(len(records.parts))):
        return "**Not trained yet.** Its new parameters leave the output of the original as it was."
    if records.is_calibrated:
        return (
            "**Calibrated in closed form, and not trained.** Train it, or recover the original with `mhla-hf recover`."
        )
    return (
        "**The parameters that MHLA adds are not trained yet**, and the output is of no use. Train the model, or "
        "recover the original with `mhla-hf recover`."
    )


def _starts_as_original(records: Records, index: int) -> bool:
    part = records.parts[index]
    family = MHLA_CLASSES.get(part.component.class_name)
    options: MHLAConfig = part.towers[0].options
    return family is not None and bool(family.load_class().starts_as_upstream(options))
