# SPDX-License-Identifier: Apache-2.0
"""What a card says of a model: its files, configurations and records, and tables of quality and speed in Markdown.

Records may come from earlier versions or from strangers. They are reduced here to the fields that the card reads, in
the types that it expects; a field that is missing or has another type counts as not recorded.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path, PureWindowsPath
from typing import Any

from huggingface_hub import EvalResult

from ..config import MHLAConfig, default_window_size
from ..models.directory import CONVERSION_RECORD, TRAINING_RECORD, ModelDirectory
from ..models.registry import MHLA_CLASSES, TRANSFORMERS_FAMILIES
from ..recovery.report import REPORT, TITLES
from ..utils.files import read_json
from ..utils.locations import is_hub_id
from ..utils.messages import format_bytes, one_line, pluralize, shorten_text
from .checks import LAYER_COUNTS


LONGEST = 120
"""Longest text that is taken from a record."""

_MOST = 10**15
_MACHINE = {"device": str, "threads": int, "cuda": str, "torch": str, "date": str}
_STAGE = {"steps": int, "batch_size": int, "learning_rate": float, "mhla_learning_rate": float}
_STAGES = ("calibrate", "match", "distill", "finetune")
_CONVERSION = {
    "command": str,
    "source": {"location": str},
    "calibration": dict,
    "recovery": dict,
    "components": {...: {"mhla_layers": [int], "num_layers": int}},
}
RECOVERY = {
    "family": str,
    "seed": int,
    "data": {"kind": str, "origin": str, "samples": int, "held_out": int, "draws": int, "length": int, "shape": [int]},
    "figures": {...: {...: float}},
    "stages": {...: {"steps": int}},
    "recipe": {"data": dict, "mhla": {"blocks": [int], "window": str}, **dict.fromkeys(_STAGES, _STAGE)},
    "seconds": {...: {"seconds": float, "cpu_seconds": float}},
    "machine": _MACHINE,
}
_COUNTS = ("transfer_steps", "distill_steps", "max_steps", "batch_size", "gradient_accumulation_steps", "seed")
_RATES = [f"{name}learning_rate" for name in ("", "mhla_", "transfer_", "distill_", "finetune_")]
_TEXTS = ("train", "mixed_precision", "teacher")
_TRAINING = {
    "source": {"location": str},
    "config": {**dict.fromkeys(_COUNTS, int), **dict.fromkeys(_RATES, float), **dict.fromkeys(_TEXTS, str)},
    "world_size": int,
    "dataset_size": int,
    "final_losses": {...: float},
}
_NAMES = ("dtype", "model", "contestant", "attention", "shape", "direction", "normalizer", "reason")
BENCHMARK = {
    "benchmark": str,
    "task": str,
    "machine": _MACHINE,
    "options": {"model": str, "layers": int, "hidden_size": int, "cache": str, "dtype": str},
    "results": [
        {
            **dict.fromkeys(_NAMES, str),
            **dict.fromkeys(("context", "tokens", "parameters"), int),
            **dict.fromkeys(("seconds", "milliseconds", "peak_memory_bytes", "speedup_over_ordinary"), float),
            **dict.fromkeys(("mhla", "softmax"), {"cache_bytes": float, "seconds_per_token": float}),
        }
    ],
}
"""Reports of benchmarks; see [`known`]."""

_ROTARY = ("rope_parameters", "rope_theta", "rope_scaling", "rotary_dim", "rotary_pct")
_MOST_LAYERS = 10**5

_AXES = {1: "tokens", 2: "rows × columns", 3: "frames × rows × columns"}
# Headings, formats and the Hub's metrics of the figures of quality; the first that is known is explained in the text.
_FIGURES: dict[str, tuple[str, str, str | None]] = {
    "loss": ("loss", "{:.4f}", "loss"),
    "bits_per_byte": ("bits per byte", "{:.4f}", "bits_per_byte"),
    "cosine": ("cosine to the original", "{:.4f}", "cosine_similarity"),
    "agreement": ("same class as the original", "{:.1%}", "agreement"),
    "above_softmax_percent": ("above the original", "{:+.2f} %", None),
}
_OUTPUTS = {
    "causal": "mean-pooled last hidden states",
    "encoder": "mean-pooled last hidden states",
    "vision": "outputs (logits of classifiers, else mean-pooled last hidden states)",
}
_LOSSES = {"wan": "flow-matching loss", "sana": "flow-matching loss", "dit": "noise-prediction loss"}
# Figures of the original on the same data agree to rounding.
_SAME = 1e-4
_BENCHMARKS = ("decode", "model", "train", "op", "generation")
# Families whose sizes carry another family's name in benchmarks.
_SIZES_OF = {"pixart": "dit", "sana-video": "sana"}

# Characters that begin markup. For those that Markdown has no backslash for, HTML does.
_SPECIAL = re.compile(r"[\\`*\[\]#!]|(?<![^\W_])_|_(?![^\W_])|[&<>|$~@]|(?<=:)//|(?<=www)\.", re.IGNORECASE)
_BACKSLASHED = set("\\`*[]#!_")


@dataclass(frozen=True)
class Tower:
    """Layers of a model that share their options.

    Attributes:
        name: Key in the configuration of a model with several towers, else empty.
        options: Their MHLA options.
        layers: Indices of the MHLA layers; empty if unknown.
        num_layers: Number of layers; `None` if unknown.
        has_rotary: Whether the attention has rotary embeddings.
    """

    name: str
    options: MHLAConfig
    layers: list[int]
    num_layers: int | None
    has_rotary: bool


@dataclass(frozen=True)
class ModelPart:
    """An MHLA model of the directory.

    Attributes:
        directory: Its folder and configuration.
        family: Name of its family.
        kind: Kind of model in words, such as `"video model"`.
        towers: Its layers; a single entry except for models with several towers.
        parameters: Number of its parameters; 0 if the weights cannot be read.
        new_parameters: Number of those that the conversion added.
    """

    directory: ModelDirectory
    family: str
    kind: str
    towers: list[Tower]
    parameters: int
    new_parameters: int


@dataclass(frozen=True)
class Records:
    """Everything known about a model.

    Attributes:
        parts: Its MHLA models.
        conversion: `conversion.json`, see [`known`].
        recovery: `report.json` of a recovery.
        training: `training.json`.
        is_converted: Whether a conversion is on record.
        is_trained: Whether a training after the conversion is on record.
        is_calibrated: Whether a calibration is on record.
    """

    parts: list[ModelPart]
    conversion: dict[str, Any]
    recovery: dict[str, Any]
    training: dict[str, Any]
    is_converted: bool
    is_trained: bool
    is_calibrated: bool


def known(value: Any, shape: Any) -> Any:
    """Reduce JSON to the fields and types of a shape.

    Args:
        value: The JSON.
        shape: `str`, `int` (at least 0), `float` (finite) or `dict` (any object); a list with the shape of its
            entries; or a dict with the shape of each field, where the key `...` stands for any name.

    Returns:
        JSON of that shape. Missing values are `""`, `None`, `[]` and `{}`.
    """
    if isinstance(shape, dict):
        given = value if isinstance(value, dict) else {}
        if ... in shape:
            return {one_line(name, LONGEST): known(entry, shape[...]) for name, entry in given.items()}
        return {name: known(given.get(name), inner) for name, inner in shape.items()}
    if isinstance(shape, list):
        return [known(entry, shape[0]) for entry in value] if isinstance(value, list) else []
    if shape is str:
        return one_line(value, LONGEST) if isinstance(value, str) else ""
    if shape is dict:
        return value if isinstance(value, dict) else {}
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    if shape is int:
        return value if isinstance(value, int) and 0 <= value < _MOST else None
    return value if -_MOST < value < _MOST else None


def read_records(directory: Path) -> Records:
    """Read the records of a directory.

    Raises:
        ValueError: If it has no MHLA model, or a file is damaged; the message names it.
    """
    parts = ModelDirectory.read(directory).select_mhla()
    files = {name: directory / name for name in (CONVERSION_RECORD, REPORT, TRAINING_RECORD)}
    contents = {name: read_json(path, "the record") if path.is_file() else {} for name, path in files.items()}
    conversion, training = known(contents[CONVERSION_RECORD], _CONVERSION), known(contents[TRAINING_RECORD], _TRAINING)
    recovery = known(contents[REPORT], RECOVERY)
    if not is_recovery(recovery):
        recovery = known(conversion["recovery"], RECOVERY)
    stages = set(recovery["figures"]) if is_recovery(recovery) else set()
    return Records(
        [_read_part(part, conversion["components"].get(part.component, {})) for part in parts],
        conversion,
        recovery,
        training,
        is_converted=bool(contents[CONVERSION_RECORD]),
        is_trained=bool(contents[TRAINING_RECORD]) or bool(stages & {"match", "distill", "finetune"}),
        is_calibrated=bool(conversion["calibration"]) or "calibrate" in stages,
    )


def is_recovery(report: Mapping[str, Any]) -> bool:
    """Return whether JSON of the shape `RECOVERY` is the report of a recovery."""
    return bool(report["family"] and report["figures"])


def _read_part(directory: ModelDirectory, record: dict[str, Any]) -> ModelPart:
    if directory.is_transformers:
        family = str(directory.config["model_type"])
        kind = TRANSFORMERS_FAMILIES[family].kind if family in TRANSFORMERS_FAMILIES else ""
        kind = kind if kind not in ("", "vision", "multi-modal") else f"{kind} model".strip()
    else:
        own = MHLA_CLASSES[directory.class_name]
        family, kind = own.name, f"{own.kind} model"
    try:
        counts = {entry.name: math.prod(entry.shape) for entry in directory.weight_sets()[0].entries()}
    # Damaged weights are reported by the checks.
    except (OSError, ValueError):
        counts = {}
    new = sum(count for name, count in counts.items() if ".mhla." in name)
    return ModelPart(directory, family, kind, _read_towers(directory, record, family), sum(counts.values()), new)


def _read_towers(directory: ModelDirectory, record: dict[str, Any], family: str) -> list[Tower]:
    config = directory.config
    configs = {name: value for name, value in config.items() if isinstance(value, dict) and "mhla" in value}
    if isinstance(config.get("mhla"), dict) or not configs:
        configs = {"": config}
    towers = []
    for name, own in configs.items():
        try:
            options = MHLAConfig.from_dict(own.get("mhla") or {})
        except (TypeError, ValueError) as error:
            where = directory.folder / "config.json"
            raise ValueError(f"{where}: mhla: {shorten_text(str(error), 300)}") from None
        total = next((own[key] for key in LAYER_COUNTS if isinstance(own.get(key), int)), None)
        layers = list(options.layers) if isinstance(options.layers, tuple) else []
        if len(configs) == 1:
            # The record also knows which layers cannot be MHLA, such as those with sliding windows.
            layers, total = layers or record.get("mhla_layers", []), record.get("num_layers") or total
        if not layers and not record and total is not None and not directory.is_transformers:
            layers = list(range(total)) if total < _MOST_LAYERS else []
        if None in layers or (total is not None and max(layers, default=-1) >= total):
            layers, total = [], None
        has_rotary = family in ("wan", "sana-video") or any(own.get(key) is not None for key in _ROTARY)
        towers.append(Tower(name, options, layers, total, has_rotary))
    return towers


# Options


def blocks(options: MHLAConfig) -> str | None:
    blocks, size, grid = options.blocks, options.block_size, options.grid
    if options.is_sequence and size is not None:
        length = f"; mixing weights for {pluralize(grid[0], 'token')}" if grid is not None else ""
        return f"{pluralize(size[0], 'token')} each{length}, continued by distance for longer sequences"
    if blocks is None and size is not None and grid is not None:
        blocks = tuple(-(-length // step) for length, step in zip(grid, size))
    if blocks is None:
        return f"{sizes(size)} tokens each" if size else None
    total = f", {math.prod(blocks):,} in all" if len(blocks) > 1 else ""
    where = f", on a grid of {sizes(grid)} tokens" if grid is not None else ""
    return f"{sizes(blocks)} ({_AXES.get(len(blocks), 'axes')}){total}{where}"


def window_size(options: MHLAConfig) -> tuple[int, ...] | None:
    """Return the blocks of a softmax window, as far as the options give them."""
    axes = len(options.blocks or options.block_size or options.grid or ())
    if options.window is None or options.window_size is not None or options.is_sequence or not axes:
        return options.window_size
    return default_window_size(options.window, axes)


# Quality


def machine(facts: dict[str, Any]) -> str:
    """Format device, version of torch and date of a measurement."""
    threads = pluralize(facts["threads"], "CPU thread") if facts["threads"] and not facts["cuda"] else ""
    torch = f"torch {facts['torch']}" if facts["torch"] else ""
    return ", ".join(plain(part) for part in (facts["device"], threads, torch, facts["date"]) if part)


def quality_table(records: Records, others: Mapping[str, dict[str, Any]]) -> dict[str, Any] | None:
    """Return the table of held-out quality and a sentence about it; `None` without a figure.

    Raises:
        ValueError: If another recovery was measured on other data.
    """
    report = records.recovery
    states = _states(report)
    if not states:
        return None
    titles = {**TITLES, "converted": "converted, before recovery"}
    titles["softmax"] = f"original, {records.parts[0].directory.original_attention} attention"
    *_, last = states
    rows = [
        {"model": f"**this model**, {titles[name]}" if name == last else titles[name], **_cells(state)}
        for name, state in states.items()
    ]
    for title, other in others.items():
        mine, theirs = (each["figures"].get("softmax", {}) for each in (report, other))
        mine = {key: value for key, value in mine.items() if value is not None}
        same = (other["data"], other["family"]) == (report["data"], report["family"])
        if not same or not all(
            math.isclose(value, theirs.get(key) or 0, rel_tol=_SAME) for key, value in mine.items()
        ):
            raise ValueError(
                f"{one_line(title, LONGEST)} was measured on other data than this model and cannot stand beside it: "
                "give the report of a recovery of the same original, with the same data."
            )
        if figures := list(_states(other).values()):
            rows.append({"model": plain(title), **_cells(figures[-1])})
    return {"table": table(rows), "sentence": _quality_sentence(report, states)}


def eval_results(records: Records, task: str | None, dataset: str | None) -> list[EvalResult]:
    """Return the model's figures of quality as the Hub lists them."""
    states, data = _states(records.recovery), records.recovery["data"]
    if task is None or not states or list(states)[-1] in ("softmax", "converted"):
        return []
    identifier = data["origin"].partition(":")[0]
    listed = is_hub_id(identifier)
    final = list(states.values())[-1]
    return [
        EvalResult(
            task_type=task,
            dataset_type=identifier if listed else "held-out",
            dataset_name=dataset or (data["origin"] if listed else f"Held-out {data['kind'] or 'samples'}"),
            metric_type=metric,
            metric_name=(_LOSSES.get(records.recovery["family"], "loss") if key == "loss" else heading).capitalize(),
            metric_value=float(f"{final[key]:.5g}"),
        )
        for key, (heading, _, metric) in _FIGURES.items()
        if metric is not None and final.get(key) is not None
    ]


def _states(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the figures of the states of a model that have any, in order."""
    figures = {name: report["figures"].get(name, {}) for name in TITLES}
    return {name: state for name, state in figures.items() if any(state.get(key) is not None for key in _FIGURES)}


def _cells(state: dict[str, Any]) -> dict[str, str | None]:
    return {heading: shown(state.get(key), form) for key, (heading, form, _) in _FIGURES.items()}


def _quality_sentence(report: dict[str, Any], states: dict[str, dict[str, Any]]) -> str:
    data = report["data"]
    key = next(key for key in _FIGURES if any(state.get(key) is not None for state in states.values()))
    what, best = {
        "loss": (_LOSSES.get(report["family"], "loss").capitalize(), "; lower is better"),
        "bits_per_byte": ("Bits per byte of text", "; lower is better"),
        "cosine": ("Cosine similarity to the original's output", "; 1 is best"),
    }.get(key, ("Quality", ""))
    if key == "cosine" and report["family"] in _OUTPUTS:
        what = f"Mean cosine similarity of {_OUTPUTS[report['family']]} to the original's"
    where = pluralize(data["held_out"], "held-out sample") if data["held_out"] else "held-out samples"
    if data["draws"] and data["held_out"]:
        where += f" with {pluralize(data['draws'], 'noise draw')} each, the same for all models"
    run = "" if report["seed"] is None else f" One run, seed {report['seed']}."
    return f"{what}, on {where}{best}.{run}"


# Speed


def read_benchmarks(
    benchmarks: Sequence[str | Path | Mapping[str, Any]], own: dict[str, Any]
) -> tuple[list[dict[str, Any]], dict[str, dict[str, Any]]]:
    """Read reports of speed, and recoveries by the titles of their rows."""
    measured: list[dict[str, Any]] = []
    recoveries: dict[str, dict[str, Any]] = {}
    for given in benchmarks:
        content = given if isinstance(given, Mapping) else read_json(Path(given).expanduser(), "the report")
        report, recovery = known(content, BENCHMARK), known(content, RECOVERY)
        if report["benchmark"] in _BENCHMARKS and "results" in content:
            measured.append(report)
        elif is_recovery(recovery):
            title = first = _comparison_title(recovery, own)
            while title in recoveries:
                title = f"{first} ({len(recoveries) + 1})"
            recoveries[title] = recovery
        else:
            where = "a benchmark" if isinstance(given, Mapping) else str(given)
            raise ValueError(
                f"{where} is neither a report of mhla-hf bench (--json) nor report.json of mhla-hf recover."
            )
    return measured, recoveries


def _comparison_title(report: dict[str, Any], own: dict[str, Any]) -> str:
    """Return the title of another recovery, by its recipe."""
    options = report["recipe"]["mhla"]
    blocks = options["blocks"]
    title = "MHLA" + (f", {sizes(blocks)} blocks" if blocks else "")
    if blocks and set(blocks) == {1}:
        title = "linear attention (one block)"
    if options["window"]:
        title += f" and a softmax window ({options['window']})"
    # Recipes list everything that they set.
    alike = {**report["recipe"], "mhla": None} == {**own["recipe"], "mhla": None}
    return f"{title}, recovered {'alike' if alike else 'with other settings'}"


def measured_rows(report: dict[str, Any], part: ModelPart) -> list[dict[str, Any]]:
    """Return the rows of a report of speed that are about models like this one."""
    rows = [row for row in report["results"] if not row["reason"]]
    if report["benchmark"] in ("decode", "generation"):
        return rows
    key = "shape" if report["benchmark"] == "op" else "model"
    name = "causal" if part.towers[0].options.causal else _SIZES_OF.get(part.family, part.family)
    rows = [row for row in rows if row[key] == name or row[key].startswith(f"{name}-")] or rows
    return _fastest(rows, part.towers[0].options.normalizer) if key == "shape" else rows


def _fastest(rows: list[dict[str, Any]], normalizer: str) -> list[dict[str, Any]]:
    """Return the shortest times of each kind of attention by size and direction."""
    best: dict[tuple[str, int | None, str], dict[str, float]] = {}
    # Reports have no figures of the authors' other normaliser.
    allowed = ("", normalizer if normalizer == "query" else "none")
    for row in rows:
        name, milliseconds = row["contestant"].removeprefix("fla-"), row["milliseconds"]
        kind = name.split("-")[0]
        if milliseconds and kind in ("mhla", "softmax", "linear") and "path" not in name:
            if row["normalizer"] in allowed:
                times = best.setdefault((row["shape"], row["tokens"], row["direction"]), {})
                times[kind] = min(milliseconds, times.get(kind, math.inf))
    fields = ("shape", "tokens", "direction")
    return [{**dict(zip(fields, key)), "times": times} for key, times in best.items() if "mhla" in times]


# Markdown


def plain(text: object) -> str:
    """Escape untrusted text, so that Markdown shows it literally, addresses included."""

    def escape(found: re.Match[str]) -> str:
        first, rest = found[0][0], found[0][1:]
        return (f"\\{first}" if first in _BACKSLASHED else f"&#{ord(first)};") + rest

    return _SPECIAL.sub(escape, one_line(text, LONGEST))


def code(text: object) -> str:
    """Return a code span, which may stand in a table; empty for an empty text."""
    text = one_line(text, LONGEST).replace("`", "'").replace("|", "¦").strip()
    return f"`{text}`" if text else ""


def public_location(location: str) -> str:
    """Return a Hub id, or the last part of a path: the rest is private."""
    return location if is_hub_id(location) else PureWindowsPath(location).name


def sizes(values: Iterable[int]) -> str:
    """Format lengths along axes: `5×4×4`."""
    return "×".join(map(str, values))


def ranges(indices: Iterable[int]) -> str:
    """Format whole numbers: `0–4, 6 and 8`."""
    words: list[str] = []
    # A number less its place is the same all along a run.
    for _, group in groupby(enumerate(sorted(set(indices))), lambda entry: entry[1] - entry[0]):
        run = [index for _, index in group]
        words += [f"{run[0]}–{run[-1]}"] if len(run) > 2 else map(str, run)
    return " and ".join(filter(None, (", ".join(words[:-1]), *words[-1:])))


def table(rows: Sequence[Mapping[str, str | None]], names: int = 1, left: int = 1) -> str:
    """Format a table, without the rows and columns that are empty.

    Args:
        rows: Cells by the heading of their column, the same headings in every row.
        names: Number of first columns that only name a row.
        left: Number of first columns that are aligned to the left.

    Returns:
        The table; empty if nothing is left of it.
    """
    headings = list(rows[0]) if rows else []
    rows = [row for row in rows if any(row[name] for name in headings[names:])]
    shown = [name for name in headings if any(row[name] for row in rows)]
    rulers = ["---:" if name in headings[left:] else "---" for name in shown]
    lines = [shown, rulers, *([row[name] or "" for name in shown] for row in rows)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines) if rows else ""


def shown(value: Any, form: str) -> str | None:
    """Format a number; `None` stays `None`."""
    return None if value is None else form.format(value)


def rate(value: float | None) -> str | None:
    """Format a learning rate: `2e-5`."""
    return f"{value:g}".replace("e-0", "e-") if value and value > 0 else None


def size(value: float | None) -> str | None:
    """Format bytes in decimal units."""
    return None if value is None or value < 0 else format_bytes(value)


def duration(seconds: float | None) -> str | None:
    """Format seconds in a unit that is easy to read."""
    if seconds is None or seconds < 0:
        return None
    units = (
        (1, 1e3, "ms", ".3g"),
        (600, 1, "s", ".3g"),
        (7200, 1 / 60, "min", ".0f"),
        (math.inf, 1 / 3600, "h", ".1f"),
    )
    factor, unit, form = next(unit[1:] for unit in units if seconds < unit[0])
    return f"{seconds * factor:{form}} {unit}"


def milliseconds(value: float | None) -> str | None:
    """Format milliseconds like [`duration`]."""
    return duration(value / 1e3) if value else None
