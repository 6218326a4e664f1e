# SPDX-License-Identifier: Apache-2.0
"""The model card of an MHLA model, from its configurations and the records in its directory.

Records may come from strangers: numbers and texts are taken from them one by one, of the type that is expected there,
and the template escapes texts.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PureWindowsPath
from typing import Any

import yaml
from huggingface_hub import EvalResult, ModelCard, ModelCardData

from ..config import MHLAConfig
from ..models.directory import CONVERSION_RECORD, TRAINING_RECORD, ModelDirectory
from ..models.registry import FAMILIES, MHLA_CLASSES, mhla_class_for
from ..models.stub import TAGS
from ..recovery.recipes import STAGES
from ..recovery.report import BESIDE, LABELS, PLOT, REPORT, TITLES, with_present_names
from ..utils import model_cards
from ..utils.compat.transformers import task_classes
from ..utils.files import atomic_file, read_json
from ..utils.locations import is_hub_id
from ..utils.messages import format_bytes, one_line, pluralize, shorten_text, shorten_value


_TEMPLATE = Path(__file__).parent / "templates" / "model_card.md.jinja"
_PLACEHOLDER = "path/or/repository"
_SAMPLES = ("sample.gif", "sample.png", "sample.jpg", "sample.webp")
# Longest text, and largest number, that are taken from a record.
_LONGEST, _MOST = 120, 10**15
_NUMBER = (int, float)

# In the names of diffusers' pipelines; the others generate from text.
_PIPELINE_TASKS = {
    "ImageToVideo": "image-to-video",
    "VideoToVideo": "video-to-video",
    "Img2Img": "image-to-image",
    "Inpaint": "image-to-image",
    "DiT": "unconditional-image-generation",
}
# Entries of configurations that hold the number of layers.
_LAYER_COUNTS = ("num_layers", "num_hidden_layers", "n_layer", "n_layers", "depth")
_MHLA_LAYER = re.compile(r"(.+)\.mhla\.")
_TRAINING_OPTIONS = (
    "train", "transfer_steps", "distill_steps", "max_steps", "learning_rate", "mhla_learning_rate", "batch_size",
    "gradient_accumulation_steps", "mixed_precision", "seed",
)  # fmt: skip
# The fields that tell rows apart in reports of `mhla-hf bench`.
_CASES = {"op": ("shape", "direction", "contestant", "normalizer"), "model": ("model", "contestant", "attention")}

# Characters that begin markup. For those that Markdown has no backslash for, HTML does.
_SPECIAL = re.compile(r"[\\`*\[\]#!]|(?<![^\W_])_|_(?![^\W_])|[&<>|$~@]|(?<=:)//|(?<=www)\.", re.IGNORECASE)
_BACKSLASHED = set("\\`*[]#!_")


@dataclass(frozen=True, kw_only=True)
class CardText:
    """What no file says about a model, for its card.

    Attributes:
        name: Name of the model.
        summary: Paragraphs about it, in Markdown.
        prompt: A prompt that suits it.
        arguments: Further arguments of the pipeline's call in the example.
        license: Identifier of the licence, such as `apache-2.0`, where no card states one.
    """

    name: str | None = None
    summary: str = ""
    prompt: str | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    license: str | None = None

    def __post_init__(self) -> None:
        if self.license is not None and not re.fullmatch(r"[A-Za-z0-9.+_-]+", self.license):
            raise ValueError(f"license={shorten_value(self.license)} must be an identifier such as apache-2.0.")


@dataclass(frozen=True)
class Records:
    """What the files in a directory say of how its model was made; contents are empty where a file is missing.

    Attributes:
        conversion: Contents of `conversion.json`.
        recovery: The report of a recovery, from `report.json` or `conversion.json`.
        training: Contents of `training.json`.
    """

    conversion: dict[str, Any]
    recovery: dict[str, Any]
    training: dict[str, Any]

    @classmethod
    def read(cls, directory: Path) -> Records:
        """Read the records of a directory.

        Raises:
            ValueError: If a file is damaged; the message names it.
        """
        files = [directory / name for name in (CONVERSION_RECORD, REPORT, TRAINING_RECORD)]
        conversion, report, training = (read_json(path, "the record") if path.is_file() else {} for path in files)
        recovery = report if isinstance(report.get("figures"), dict) else entry(conversion, "recovery", kind=dict)
        return cls(conversion, with_present_names(recovery or {}), training)

    @property
    def is_trained(self) -> bool:
        """`True` if a training after the conversion is on record."""
        figures = {*(entry(self.recovery, "figures", kind=dict) or {})} - {*_discarded(self.recovery)}
        return bool(self.training) or any(STAGES[name].memory for name in figures if name in STAGES)


def entry(record: Any, *names: str, kind: Any = _NUMBER) -> Any:
    """Return a nested entry of JSON if it is of a type, and not too large; else `None`.

    Args:
        record: The JSON.
        names: The keys that lead to the entry.
        kind: The type, or a tuple of types.
    """
    for name in names:
        record = record.get(name) if isinstance(record, dict) else None
    if not isinstance(record, kind) or isinstance(record, bool):
        return None
    if isinstance(record, str):
        return one_line(record, _LONGEST)
    return None if isinstance(record, _NUMBER) and not -_MOST < record < _MOST else record


def model_card(
    directory: str | Path,
    *,
    text: CardText | None = None,
    repo_id: str | None = None,
    benchmarks: Sequence[str | Path] = (),
) -> ModelCard:
    """Make the model card of a directory.

    It says what was converted and how it was trained, from `conversion.json`, `report.json` and `training.json`, and
    the quality that a recovery measured; speed and memory from `benchmarks`. What was not recorded or measured is left
    out. Names and texts from these files are escaped.

    Args:
        directory: A pipeline or model, converted or trained by this package.
        text: What no file says.
        repo_id: Repository in the examples.
        benchmarks: JSON files of `mhla-hf bench op` and `mhla-hf bench model`.

    Raises:
        ValueError: If the directory has no MHLA model, or a file is damaged or of another kind.

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
    opened = ModelDirectory.read(directory)
    models = opened.select_mhla()
    records = Records.read(directory)
    data = card_data(directory)
    data.license = data.license or text.license
    origin = (entry(records.recovery, "data", "origin", kind=str) or "").partition(":")[0]
    data.datasets = [origin] if is_hub_id(origin) else None
    location = data.base_model or next((_public_location(found["location"]) for found in opened.origins()), "")
    title = text.name or (f"{location.rpartition('/')[2]} with MHLA" if location else "A model with MHLA")
    recovery = _recovery_facts(records.recovery)
    quality = _quality(records.recovery)
    beside = _quality(records.recovery, "beside", BESIDE)
    kept = [state for state in quality if state not in recovery["discarded"]]
    data.eval_results = _eval_results(data.pipeline_tag, {state: quality[state] for state in kept}, origin) or None
    data.model_name = one_line(title, _LONGEST) if data.eval_results else None
    sample = next((name for name in _SAMPLES if (directory / name).is_file()), None)
    if text.prompt is not None:
        output = {} if sample is None else {"output": {"url": sample}}
        data["widget"] = [{"text": one_line(text.prompt, 1000), **output}]
    card = ModelCard.from_template(
        data,
        str(_TEMPLATE),
        title=title,
        text=text,
        location=location,
        models=[{**describe_model(model), "towers": _tower_options(model)} for model in models],
        attention=models[0].original_attention,
        is_official=records.conversion.get("command") == "import-official",
        is_untrained=bool(records.conversion) and not records.is_trained and not recovery["stages"],
        sample=sample,
        plot=PLOT if (directory / PLOT).is_file() else None,
        use=_usage(models[0], data, repo_id or _PLACEHOLDER, text),
        recovery=recovery,
        state=TITLES[kept[-1]] if kept else "",
        beside=beside,
        training=_training_facts(records.training),
        quality=[
            {"model": {**TITLES, **BESIDE}[state], **{LABELS[key]: figures.get(key) for key in LABELS}}
            for state, figures in {**quality, **beside}.items()
        ],
        speed=[_speed(Path(path).expanduser()) for path in benchmarks],
        plain=plain,
        code=code,
        is_hub_id=is_hub_id,
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
    if not overwrite and model_cards.is_own_card(directory):
        return None
    path = directory / model_cards.CARD if output is None else Path(output)
    if path.is_symlink():
        raise ValueError(f"{path} is a link, as in the Hub's cache; copy the directory, or give output (--output).")
    card = model_card(directory, **options)
    with atomic_file(path) as temporary:
        card.save(temporary)
    return path


def card_for_repository(directory: Path, repo_id: str, benchmarks: Sequence[str | Path] = ()) -> str:
    """Return the card for a repository that a directory is pushed to, where the user has not written one.

    A generated card is kept, with the name of the repository in its examples: it may contain texts and measurements
    that are not in the directory. With new benchmarks it is generated again.
    """
    written = model_cards.read_card(directory)
    if written is None or benchmarks or not model_cards.is_generated(written):
        return str(model_card(directory, repo_id=repo_id, benchmarks=benchmarks))
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
    try:
        theirs = ModelCard(present)
    except (ValueError, yaml.YAMLError):
        return None
    if theirs.text.strip():
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
    library = "transformers" if model.is_transformers else "diffusers"
    if _is_sentence_model(model):
        library = "sentence-transformers"
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


def _is_sentence_model(model: ModelDirectory) -> bool:
    return model.is_transformers and (model.root / "modules.json").is_file()


def _task(model: ModelDirectory) -> str | None:
    if _is_sentence_model(model):
        path = model.root / "config_sentence_transformers.json"
        kind = read_json(path, "the configuration").get("model_type") if path.is_file() else None
        return "sentence-similarity" if kind in (None, "SentenceTransformer") else None
    if model.is_transformers:
        return next((task for task, names in task_classes().items() if model.class_name in names), None)
    # A transformer of diffusers alone generates nothing.
    if model.index is None or not model.is_mhla:
        return None
    named = (task for words, task in _PIPELINE_TASKS.items() if words in str(model.index.get("_class_name")))
    return next(named, f"text-to-{MHLA_CLASSES[model.class_name].kind}")


# The model


def describe_model(model: ModelDirectory, tensors: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return facts about a model, in JSON.

    Args:
        model: The model, MHLA or not.
        tensors: Type and shape of its tensors by name; read from the headers of its weights by default.

    Returns:
        `name` of the component (`"model"` without a pipeline), `class_name`, `mhla_layers` (those with MHLA weights)
        and `num_layers` (`None` where the configuration has no such entry), `options` of MHLA (`None` for softmax),
        `parameters` and `nbytes` of its tensors, `mhla_parameters` among them, and `dtypes`, the number of tensors by
        type.
    """
    config = model.config
    if tensors is None:
        try:
            tensors = {found.name: (found.dtype, found.shape) for found in model.weight_sets()[0].entries()}
        # Damaged weights are reported by the checks.
        except (OSError, ValueError):
            tensors = {}
    counts = {name: math.prod(shape) for name, (_, shape) in tensors.items()}
    types = Counter(str(dtype).removeprefix("torch.") for dtype, _ in tensors.values())
    return {
        "name": model.component,
        "class_name": model.class_name,
        "mhla_layers": len({match[1] for match in map(_MHLA_LAYER.match, tensors) if match}),
        "num_layers": _layer_count(model),
        "options": config["mhla"] if isinstance(config.get("mhla"), dict) else None,
        "parameters": sum(counts.values()),
        "mhla_parameters": sum(count for name, count in counts.items() if ".mhla." in name),
        "dtypes": dict(types.most_common()),
        "nbytes": sum(dtype.itemsize * counts[name] for name, (dtype, _) in tensors.items()),
    }


def _layer_count(model: ModelDirectory) -> int | None:
    """Return the number of layers in a configuration, or `None` where it does not tell."""
    if model.class_name not in {**FAMILIES, **MHLA_CLASSES}:
        return next((model.config[key] for key in _LAYER_COUNTS if isinstance(model.config.get(key), int)), None)
    try:
        count = mhla_class_for(model.class_name).layer_count(model.config)
    # Values of other types are reported by the checks.
    except TypeError:
        return None
    return count if isinstance(count, int) else None


def _tower_options(model: ModelDirectory) -> dict[str, dict[str, Any]]:
    """Return the MHLA options that a card shows, by the name of the tower; empty for a model without towers."""
    config = model.config
    towers = {name: part for name, part in config.items() if isinstance(part, dict) and "mhla" in part}
    if isinstance(config.get("mhla"), dict) or not towers:
        towers = {"": config}
    options = {}
    for name, part in towers.items():
        try:
            found = MHLAConfig.from_dict(part.get("mhla") or {})
        except (TypeError, ValueError) as error:
            where = model.folder / "config.json"
            raise ValueError(f"{where}: mhla: {shorten_text(str(error), 300)}") from None
        shown = {"feature_map", "normalizer", *found.changed()}
        options[name] = {option: value for option, value in found.to_dict().items() if option in shown}
    return options


def _usage(model: ModelDirectory, data: ModelCardData, location: str, text: CardText) -> dict[str, Any]:
    """Return what the example of the template is made of."""
    task = str(data.pipeline_tag)
    # It becomes code. Models of transformers may name no class, or be a stranger's.
    is_named = not model.is_transformers or (model.config.get("architectures") and model.class_name.isidentifier())
    inputs: list[str] = []
    if task == "unconditional-image-generation":
        inputs = ["class_labels=[0]"]
    elif task in ("text-to-video", "text-to-image"):
        inputs = [_literal(text.prompt or "A lighthouse on a cliff at sunset")]
        inputs += [f"{name}={value!r}" for name, value in text.arguments.items()]
    return {
        "kind": "sentences" if _is_sentence_model(model) else model.kind,
        "task": task,
        "where": _literal(location),
        "class_name": model.class_name if is_named else "AutoModel",
        "inputs": inputs,
        "has_tokenizer": (model.root / "tokenizer_config.json").is_file(),
        "prompt": _literal(text.prompt or "Once upon a time"),
    }


# Recovery and training


def _quality(
    report: dict[str, Any], part: str = "figures", states: Iterable[str] = TITLES
) -> dict[str, dict[str, float]]:
    """Return the held-out figures of each state of a model that has any, in order."""
    figures = {state: {key: entry(report, part, state, key) for key in LABELS} for state in states}
    known = {
        state: {key: value for key, value in found.items() if value is not None} for state, found in figures.items()
    }
    return {state: found for state, found in known.items() if found}


def _eval_results(task: str | None, quality: Mapping[str, dict[str, float]], dataset: str) -> list[EvalResult]:
    """Return the figures of the last state as the Hub lists them."""
    if task is None or not set(quality) - {"softmax", "converted"}:
        return []
    return [
        EvalResult(
            task_type=task,
            dataset_type=dataset if is_hub_id(dataset) else "held-out",
            dataset_name=dataset if is_hub_id(dataset) else "Held-out samples",
            metric_type=key,
            metric_name=LABELS[key].capitalize(),
            metric_value=float(f"{value:.5g}"),
        )
        for key, value in list(quality.values())[-1].items()
        if key != "above_softmax_percent"
    ]


def _recovery_facts(report: dict[str, Any]) -> dict[str, Any]:
    """Return the stages of a recovery, and sentences about its data and machine."""
    ran = entry(report, "figures", kind=dict) or {}
    stages = [
        {
            "stage": name,
            "steps": entry(report, "recipe", name, "steps") or entry(report, "stages", name, "steps"),
            "learning rate": entry(report, "recipe", name, "learning_rate"),
            "seconds": entry(report, "seconds", name, "seconds"),
            "CPU seconds": entry(report, "seconds", name, "cpu_seconds"),
        }
        for name in STAGES
        if name in ran
    ]
    counts = {"sample": "samples", "held-out sample": "held_out"}
    found = {noun: entry(report, "data", name, kind=int) for noun, name in counts.items()}
    return {
        "stages": stages,
        "discarded": _discarded(report),
        "is_unchanged": bool(stages) and len(_discarded(report)) == len(stages),
        "descriptions": {name: stage.description for name, stage in STAGES.items()},
        "data": [pluralize(count, noun) for noun, count in found.items() if count is not None],
        "origin": entry(report, "data", "origin", kind=str),
        "seed": entry(report, "seed", kind=int),
        "machine": [found for name in ("device", "date") if (found := entry(report, "machine", name, kind=str))],
    }


def _discarded(report: dict[str, Any]) -> list[str]:
    """Return the stages of a recovery whose result was left out."""
    found = entry(report, "discarded", kind=list) or []
    return [name for name in STAGES if name in found]


def _training_facts(record: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a training by name."""
    found = {name: entry(record, "config", name, kind=(*_NUMBER, str)) for name in _TRAINING_OPTIONS}
    return {name: value for name, value in found.items() if value not in (None, "", 0)}


# Speed


def _speed(path: Path) -> dict[str, Any]:
    """Return what a report of `mhla-hf bench` was measured with, and the rows of those contestants that ran.

    Raises:
        ValueError: If it is no such report, or nothing was measured.
    """
    report = read_json(path, "the benchmark")
    benchmark = entry(report, "benchmark", kind=str)
    rows = [
        {
            **{name: entry(row, name, kind=str) for name in _CASES.get(benchmark, ())},
            "tokens": entry(row, "tokens", kind=int),
            "dtype": entry(report, "options", "dtype", kind=str),
            "milliseconds": entry(row, "milliseconds"),
            # The ordinary attention of some models is linear.
            "speed / softmax": entry(row, "speedup_over_softmax"),
            "speed / ordinary": entry(row, "speedup_over_ordinary"),
            "peak memory": (memory := entry(row, "peak_memory_bytes")) and format_bytes(memory),
        }
        for row in entry(report, "results", kind=list) or []
        if entry(row, "milliseconds") is not None
    ]
    if benchmark not in _CASES or not rows:
        raise ValueError(f"{path} has no measurement of mhla-hf bench op or mhla-hf bench model (--json).")
    threads = entry(report, "machine", "threads", kind=int)
    device, torch, date = (entry(report, "machine", name, kind=str) for name in ("device", "torch", "date"))
    machine = (device, threads and pluralize(threads, "CPU thread"), torch and f"torch {torch}", date)
    compiler = entry(report, "options", "compile_backend", kind=str)
    return {"benchmark": benchmark, "compiler": compiler, "machine": list(filter(None, machine)), "rows": rows}


# Markdown


def plain(text: object) -> str:
    """Escape untrusted text, so that Markdown shows it literally, addresses included."""

    def escape(found: re.Match[str]) -> str:
        first, rest = found[0][0], found[0][1:]
        return (f"\\{first}" if first in _BACKSLASHED else f"&#{ord(first)};") + rest

    return _SPECIAL.sub(escape, one_line(text, _LONGEST))


def code(text: object) -> str:
    """Return a code span, which may stand in a table; empty for an empty text."""
    text = one_line(text, _LONGEST).replace("`", "'").replace("|", "¦").strip()
    return f"`{text}`" if text else ""


def _public_location(location: str) -> str:
    """Return a Hub id, or the last part of a path: the rest is private."""
    return location if is_hub_id(location) else PureWindowsPath(location).name


def _literal(text: object) -> str:
    """Format a Python string on one line."""
    return json.dumps(one_line(text, 1000), ensure_ascii=False)
