# SPDX-License-Identifier: Apache-2.0
"""The part of a model card about quality, beside the original and other recoveries.

What is missing, not a number or not finite leaves its cell, row or table out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from huggingface_hub import EvalResult

from ..recovery.report import TITLES
from ..utils.locations import is_hub_id
from ..utils.messages import one_line, pluralize
from .markdown import LONGEST, count, number, plain, show, sizes, table
from .records import Records, entry


@dataclass(frozen=True)
class Figure:
    """A figure of quality.

    Attributes:
        heading: Heading of its column.
        form: Format of its values.
        metric: Its identifier among the Hub's metrics, if it is listed as a result.
        sentence: What it is.
    """

    heading: str
    form: str
    metric: str | None
    sentence: str


_FIGURES = {
    "loss": Figure("loss", "{:.4f}", "loss", "the loss of the training objective; lower is better"),
    "bits_per_byte": Figure("bits per byte", "{:.4f}", "bits_per_byte", "bits per byte of text; lower is better"),
    "above_softmax_percent": Figure("above the original", "{:+.2f} %", None, ""),
    "cosine": Figure(
        "cosine to the original",
        "{:.4f}",
        "cosine_similarity",
        "cosine similarity to the original's output; 1 is best",
    ),
    "agreement": Figure("same class as the original", "{:.1%}", "agreement", ""),
}
_LOSSES = {"wan": "flow-matching loss", "sana": "flow-matching loss", "dit": "noise-prediction loss"}
_COSINES = {
    "causal": "mean-pooled last hidden states",
    "encoder": "mean-pooled last hidden states",
    "vision": "outputs (logits of classifiers, else mean-pooled last hidden states)",
}
_DONE = {"calibrate": "calibrated", "match": "matched", "distill": "distilled", "finetune": "fine-tuned"}
# Figures of the original on the same data agree to rounding.
_SAME = 1e-4


def quality_section(records: Records, comparisons: Mapping[str, dict[str, Any]]) -> dict[str, Any] | None:
    """The table of held-out quality, for the template; `None` without a figure.

    Args:
        records: What is known about the model.
        comparisons: Reports of other recoveries of the same model with the same data, by title.

    Raises:
        ValueError: If a comparison is of other data.
    """
    report = records.recovery
    states = _states(report)
    if not states:
        return None
    original = records.parts[0].original_attention
    titles = {"softmax": f"original, {original} attention", "converted": "converted, before recovery"}
    last = list(states)[-1]
    rows = []
    for name, figures in states.items():
        title = titles.get(name, _DONE.get(name, name))
        rows.append(_row(f"**this model**, {title}" if name == last else title, figures))
    for title, other in comparisons.items():
        _check_same_data(report, other, title)
        found = _states(other)
        rows += [_row(plain(title), list(found.values())[-1])] if found else []
    shown = table(rows, [figure.heading for figure in _FIGURES.values()])
    return {"table": shown, "sentence": _quality_sentence(report, states)} if shown else None


def eval_results(records: Records, task: str | None, dataset: str | None = None) -> list[EvalResult]:
    """The model's figures of quality as the Hub lists them; none without a task."""
    report, data = records.recovery, entry(records.recovery, "data")
    states = _states(report)
    if task is None or not states or list(states)[-1] in ("softmax", "converted"):
        return []
    origin, kind = entry(data, "origin", kind=str), entry(data, "kind", kind=str)
    identifier = origin.partition(":")[0] if is_hub_id(origin.partition(":")[0]) else "held-out"
    held_out = f"Held-out {one_line(kind or 'samples', LONGEST)}"
    name = dataset or (held_out if identifier == "held-out" else one_line(origin, LONGEST))
    return [
        EvalResult(
            task_type=task,
            dataset_type=identifier,
            dataset_name=name,
            metric_type=figure.metric,
            metric_name=_loss_name(report).capitalize() if key == "loss" else figure.heading.capitalize(),
            metric_value=float(f"{value:.5g}"),
        )
        for key, figure in _FIGURES.items()
        if figure.metric is not None and (value := number(list(states.values())[-1].get(key))) is not None
    ]


def _states(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Figures of the states of a model that have any, in order."""
    figures = entry(report, "figures")
    states = {name: entry(figures, name) for name in TITLES if entry(figures, name)}
    return {name: state for name, state in states.items() if any(number(state.get(key)) for key in _FIGURES)}


def _row(title: str, figures: dict[str, Any]) -> dict[str, str | None]:
    return {
        "model": title,
        **{figure.heading: show(figures.get(key), figure.form) for key, figure in _FIGURES.items()},
    }


def _check_same_data(report: dict[str, Any], other: dict[str, Any], title: str) -> None:
    mine, theirs = entry(report, "figures", "softmax"), entry(other, "figures", "softmax")
    same = entry(report, "data") == entry(other, "data") and report.get("family") == other.get("family")
    for key, value in mine.items():
        first, second = number(value), number(theirs.get(key))
        same = same and (first is None or (second is not None and math.isclose(first, second, rel_tol=_SAME)))
    if not same:
        raise ValueError(
            f"{one_line(title, LONGEST)} was measured on other data than this model and cannot stand beside it: give "
            "the report of a recovery of the same original, with the same data."
        )


def _quality_sentence(report: dict[str, Any], states: dict[str, dict[str, Any]]) -> str:
    data = entry(report, "data")
    found = {key for state in states.values() for key in state if number(state[key]) is not None}
    key = next(name for name in ("loss", "bits_per_byte", "cosine", "agreement", *_FIGURES) if name in found)
    what = _FIGURES[key].sentence
    if key == "loss":
        what = f"{_loss_name(report)}; lower is better"
    elif key == "cosine" and report.get("family") in _COSINES:
        what = f"mean cosine similarity of {_COSINES[report['family']]} to the original's; 1 is best"
    held_out, draws, seed = (count(data.get(name)) for name in ("held_out", "draws", "seed"))
    seed = count(report.get("seed"))
    where = f", on {pluralize(held_out, 'held-out sample')}" if held_out else ", on held-out samples"
    if draws and held_out:
        where += f" with {pluralize(draws, 'noise draw')} each, the same for all models"
    parts = [f"{what[0].upper()}{what[1:]}" if what else "Quality"]
    first, separator, rest = parts[0].partition(";")
    text = f"{first}{where}{separator}{rest}."
    return text + (f" One run, seed {seed}." if seed is not None else "")


def _loss_name(report: dict[str, Any]) -> str:
    return _LOSSES.get(entry(report, "family", kind=str), "loss")


def comparison_title(report: dict[str, Any], own: dict[str, Any]) -> str:
    """Title of another recovery, by its recipe.

    Args:
        report: The other recovery.
        own: The model's.
    """
    recipe, options = entry(report, "recipe"), entry(report, "recipe", "mhla")
    blocks = sizes(options.get("blocks"))
    parts = ["MHLA" if blocks is None else f"MHLA, {blocks} blocks"]
    if blocks is not None and set(blocks) <= {"1", "×"}:
        parts = ["linear attention (one block)"]
    if entry(options, "window", kind=str):
        parts.append(f"a softmax window ({options['window']})")
    # Recipes list everything that they set.
    alike = all(recipe.get(name) == entry(own, "recipe").get(name) for name in ("data", *_DONE))
    return f"{' and '.join(parts)}, recovered {'alike' if alike else 'with other settings'}"
