# SPDX-License-Identifier: Apache-2.0
"""Tables of model cards: options, training, quality and speed."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PureWindowsPath
from typing import Any

from huggingface_hub import EvalResult

from ..config import MHLAConfig
from ..layouts.windows import default_window_size
from ..recovery.report import TITLES
from ..utils.files import read_json
from ..utils.locations import is_hub_id
from ..utils.messages import one_line, pluralize
from .records import BENCHMARK, LONGEST, RECOVERY, ModelPart, Records, is_recovery, known


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
# Figures of the original on the same data agree to rounding.
_SAME = 1e-4
_BENCHMARKS = ("decode", "model", "train", "op", "generation")
# Families whose sizes carry another family's name in benchmarks.
_SIZES_OF = {"pixart": "dit", "sana-video": "sana"}

# Characters that begin markup. For those that Markdown has no backslash for, HTML does.
_SPECIAL = re.compile(r"[\\`*\[\]#!]|(?<![^\W_])_|_(?![^\W_])|[&<>|$~@]|(?<=:)//|(?<=www)\.", re.IGNORECASE)
_BACKSLASHED = set("\\`*[]#!_")
_UNITS = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("B", 1))


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
    titles["softmax"] = f"original, {records.parts[0].component.original_attention} attention"
    *_, last = states
    rows = [
        {"model": f"**this model**, {titles[name]}" if name == last else titles[name], **_cells(state)}
        for name, state in states.items()
    ]
    for title, other in others.items():
        mine, theirs = (each["figures"].get("softmax", {}) for each in (report, other))
        same = all((each["data"], each["family"]) == (report["data"], report["family"]) for each in (other,))
        if not same or not all(_close(value, theirs.get(key)) for key, value in mine.items()):
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
            metric_name=(_loss_name(records.recovery) if key == "loss" else heading).capitalize(),
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


def _close(first: float | None, second: float | None) -> bool:
    return first is None or (second is not None and math.isclose(first, second, rel_tol=_SAME))


def _quality_sentence(report: dict[str, Any], states: dict[str, dict[str, Any]]) -> str:
    data = report["data"]
    key = next(key for key in _FIGURES if any(state.get(key) is not None for state in states.values()))
    what, best = {
        "loss": (_loss_name(report).capitalize(), "; lower is better"),
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


def _loss_name(report: dict[str, Any]) -> str:
    losses = {"wan": "flow-matching loss", "sana": "flow-matching loss", "dit": "noise-prediction loss"}
    return losses.get(report["family"], "loss")


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
    parts: list[list[int]] = []
    for index in sorted(set(indices)):
        if parts and index == parts[-1][-1] + 1:
            parts[-1].append(index)
        else:
            parts.append([index])
    words: list[str] = []
    for part in parts:
        words += [f"{part[0]}–{part[-1]}"] if len(part) > 2 else map(str, part)
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
    if value is None or value < 0:
        return None
    unit, factor = next((unit for unit in _UNITS if value >= unit[1]), _UNITS[-1])
    return f"{value / factor:.3g} {unit}" if value < 1000 * factor else f"{value / factor:,.0f} {unit}"


def duration(seconds: float | None) -> str | None:
    """Format seconds in a unit that is easy to read."""
    if seconds is None or seconds < 0:
        return None
    if seconds < 1:
        return f"{1e3 * seconds:.3g} ms"
    if seconds < 600:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def milliseconds(value: float | None) -> str | None:
    """Format milliseconds like [`duration`]."""
    return duration(value / 1e3) if value else None


def count(value: int | None) -> str | None:
    """Format a whole number: `1,000`."""
    return shown(value, "{:,}")
