# SPDX-License-Identifier: Apache-2.0
"""The part of a model card about speed and memory, from reports of `mhla-hf bench`.

What is missing, not a number or not finite leaves its cell, row or table out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from ..utils.messages import pluralize
from .card_training import machine_sentence
from .markdown import code, count, duration, number, plain, show, size, table
from .records import ModelPart, entry, public_location


# Families whose sizes are named after another in reports.
_SIZES_OF = {"pixart": "dit", "sana-video": "sana"}


def speed_sections(benchmarks: Iterable[dict[str, Any]], part: ModelPart) -> list[dict[str, Any]]:
    """Tables of speed and memory, one for each benchmark with a figure, for the template.

    Args:
        benchmarks: Reports of `mhla-hf bench`.
        part: The model.

    Returns:
        `title`, `what` was measured, `where`, the `table`, and `is_own`: whether it is about this model.
    """
    sections = []
    for report in benchmarks:
        title, what, shown = _BENCHMARKS[report["benchmark"]](report, part)
        if not shown:
            continue
        dtype = entry(report, "options", "dtype", kind=str)
        where = [machine_sentence(entry(report, "machine")), code(dtype) if dtype else None]
        is_own = report["benchmark"] == "generation" or bool(entry(report, "options", "model", kind=str))
        place = ", ".join(filter(None, where))
        sections.append({"title": title, "what": what, "where": place, "table": shown, "is_own": is_own})
    return sections


def is_benchmark(content: Any) -> bool:
    """Whether JSON is a report that [`speed_sections`] knows."""
    return (
        isinstance(content, dict)
        and isinstance(content.get("benchmark"), str)
        and content["benchmark"] in _BENCHMARKS
        and isinstance(content.get("results"), list)
    )


def _rows(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows of what was measured."""
    return [row for row in report["results"] if isinstance(row, dict) and row.get("reason") is None]


def _of_family(rows: list[dict[str, Any]], field: str, part: ModelPart) -> list[dict[str, Any]]:
    """Rows of sizes named after the family of a model; all of them where there are none."""
    name = "causal" if part.towers[0].options.causal else _SIZES_OF.get(part.family, part.family)
    return [
        row for row in rows if entry(row, field, kind=str).startswith(f"{name}-") or row.get(field) == name
    ] or rows


def _decoding(report: dict[str, Any], _: ModelPart) -> tuple[str, str, str]:
    options, mine = entry(report, "options"), "MHLA cache"
    rows = [
        {
            "type": code(entry(row, "dtype", kind=str)),
            "tokens in the cache": show(count(row.get("context")), "{:,}"),
            mine: size(entry(row, "mhla").get("cache_bytes")),
            "KV cache": size(entry(row, "softmax").get("cache_bytes")),
            "time per token, MHLA": duration(entry(row, "mhla").get("seconds_per_token")),
            "time per token, softmax": duration(entry(row, "softmax").get("seconds_per_token")),
        }
        for row in _rows(report)
    ]
    named = entry(options, "model", kind=str)
    if named:
        what = f"Measured with {code(public_location(named))}."
    else:
        layers, width = count(options.get("layers")), count(options.get("hidden_size"))
        extent = f" of {pluralize(layers, 'layer')} and width {width}" if layers and width else ""
        what = f"Measured with a Llama{extent} with random weights, not with this model."
    cache = entry(options, "cache", kind=str)
    what += f" The KV cache is {code(cache)}." if cache else ""
    return "Decoding", what, table(rows, list(rows[0])[1:] if rows else [], always=2)


def _models(report: dict[str, Any], part: ModelPart) -> tuple[str, str, str]:
    rows = [
        {
            "model": code(entry(row, "model", kind=str)),
            "attention": plain(_attention(row)),
            "tokens": show(count(row.get("tokens")), "{:,}"),
            "time": duration(_seconds(row)),
            "memory beyond weights": size(row.get("peak_memory_bytes")),
            "against the original": show(row.get("speedup_over_ordinary"), "{:.2f}×"),
        }
        for row in _of_family(_rows(report), "model", part)
    ]
    title = "Training step" if report["benchmark"] == "train" else "Forward pass"
    what = "Measured with models of the sizes named and random weights, not with this model."
    return title, what, table(rows, list(rows[0])[2:] if rows else [], always=3)


def _operator(report: dict[str, Any], part: ModelPart) -> tuple[str, str, str]:
    families = {"mhla": "MHLA", "softmax": "softmax", "linear": "linear"}
    best: dict[tuple[str, str], dict[str, float]] = {}
    tokens: dict[str, int | None] = {}
    # Reports have no figures of the authors' other normaliser.
    normalizer = part.towers[0].options.normalizer
    wanted = normalizer if normalizer in ("query", "none") else "none"
    for row in _of_family(_rows(report), "shape", part):
        name = entry(row, "contestant", kind=str).removeprefix("fla-")
        family = next((known for known in families if name.split("-")[0] == known), None)
        seconds = _seconds(row)
        if family is None or "path" in name or row.get("normalizer") not in (None, wanted) or not seconds:
            continue
        key = (entry(row, "shape", kind=str), entry(row, "direction", kind=str))
        tokens[key[0]] = count(row.get("tokens"))
        times = best.setdefault(key, {})
        times[family] = min(seconds, times.get(family, seconds))
    rows = [
        {
            "size": code(shape),
            "tokens": show(tokens[shape], "{:,}"),
            "direction": plain(direction),
            **{title: duration(times.get(family)) for family, title in families.items()},
            "softmax / MHLA": f"{times['softmax'] / times['mhla']:.2f}×"
            if {"softmax", "mhla"} <= set(times)
            else None,
        }
        for (shape, direction), times in best.items()
        if "mhla" in times
    ]
    what = "The attention operator alone at the sizes of models, each by its fastest implementation."
    return "Operator", what, table(rows, ["tokens", *families.values(), "softmax / MHLA"], always=3)


def _generation(report: dict[str, Any], _: ModelPart) -> tuple[str, str, str]:
    rows = [
        {
            "model": plain(entry(row, "model", kind=str)),
            "parameters": show(count(row.get("parameters")), "{:,}"),
            "time": duration(row.get("seconds")),
        }
        for row in _rows(report)
    ]
    return "Generation", plain(entry(report, "task", kind=str)), table(rows, ["parameters", "time"])


def _attention(row: dict[str, Any]) -> str:
    name, kind = entry(row, "contestant", kind=str), entry(row, "attention", kind=str)
    return f"original ({kind})" if name == "ordinary" else name.replace("mhla-", "MHLA, ")


def _seconds(row: dict[str, Any]) -> float | None:
    milliseconds = number(row.get("milliseconds"))
    return None if milliseconds is None or milliseconds <= 0 else milliseconds / 1e3


_BENCHMARKS: dict[str, Callable[[dict[str, Any], ModelPart], tuple[str, str, str]]] = {
    "decode": _decoding,
    "model": _models,
    "train": _models,
    "op": _operator,
    "generation": _generation,
}
