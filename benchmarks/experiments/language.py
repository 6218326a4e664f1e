# SPDX-License-Identifier: Apache-2.0
"""Language models trained from scratch on Python source: bits per byte by position, and on longer texts."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mhla_hf.utils.figures import new_figure, save_figure

from .documentation import markdown_table
from .experiment import Case, Experiment


FUNCTION = f"{__package__}.language_model:language_case"

TITLES = {
    "softmax": "softmax",
    "linear": "linear",
    "gla": "GLA",
    "mhla": "MHLA",
    "hybrid": "hybrid of MHLA and softmax",
    "mhla-locality": "MHLA, locality initialisation",
    "mhla-per-head": "MHLA, mixing weights per head",
    "mhla-rope-before": "MHLA, RoPE before φ",
    "mhla-hedgehog": "MHLA, hedgehog features",
}
"""Contestants. `mhla` has uniform initialisation, shared mixing weights, RoPE after the feature map φ, and ReLU."""

CORE = ("softmax", "linear", "gla", "mhla", "hybrid")
COLORS = {"softmax": "#444444", "linear": "#d95f02", "gla": "#e6ab02", "mhla": "#1f77b4", "hybrid": "#9467bd"}

_MHLA: dict[str, dict[str, Any]] = {
    "linear": {},
    "mhla": {},
    "mhla-locality": {"mixing_init": "linear"},
    "mhla-per-head": {"mixing_heads": "per_head"},
    "mhla-rope-before": {"rope": "before_feature_map"},
    "mhla-hedgehog": {"feature_map": "hedgehog"},
}

SETTINGS: dict[str, dict[str, Any]] = {
    "cpu": {
        "sizes": {"width": 128, "layers": 2, "heads": 2, "intermediate": 352},
        "corpus": {"megabytes": 5.0, "held_out_megabytes": 3.0, "vocabulary": 2048, "tokenizer_megabytes": 3.0},
        "context": 2048,
        "longest": 16384,
        "batch": 1,
        "steps": 400,
        "rates": {"matrix": 5e-3, "other": 1e-2, "mixing": 1e-3},
        "dtype": "bfloat16",
        "windows": 64,
        "long_windows": 6,
    },
    "gpu": {
        "sizes": {"width": 512, "layers": 12, "heads": 8, "intermediate": 1408},
        "corpus": {"megabytes": 250.0, "held_out_megabytes": 8.0, "vocabulary": 8192, "tokenizer_megabytes": 25.0},
        "context": 2048,
        "longest": 16384,
        "batch": 32,
        "steps": 4000,
        "rates": {"matrix": 4e-3, "other": 2e-3, "mixing": 1e-3},
        "dtype": "bfloat16",
        "windows": 256,
        "long_windows": 32,
    },
    "smoke": {
        "sizes": {"width": 16, "layers": 2, "heads": 2, "intermediate": 32},
        "corpus": {"megabytes": 0.2, "held_out_megabytes": 0.05, "vocabulary": 300, "tokenizer_megabytes": 0.1},
        "context": 128,
        "longest": 512,
        "batch": 1,
        "steps": 2,
        "rates": {"matrix": 1e-2, "other": 1e-2, "mixing": 1e-3},
        "dtype": "float32",
        "windows": 1,
        "long_windows": 1,
    },
}
_SEEDS = {"cpu": 2, "gpu": 3, "smoke": 1}


def cases(setting: str) -> dict[str, Case]:
    """Every contestant, those of `CORE` with all seeds, the others with the first one."""
    shared = SETTINGS[setting]
    found = {}
    for name in TITLES:
        if name == "gla" and setting != "gpu":
            continue
        for seed in range(_SEEDS[setting] if name in CORE else 1):
            options = {
                "attention": name if name in ("softmax", "gla") else "mhla",
                "mhla": _hybrid(shared["sizes"]["layers"]) if name == "hybrid" else _MHLA.get(name, {}),
                "frozen_mixing": name == "linear",
                "seed": seed,
            }
            found[f"{name}/{seed}"] = Case(FUNCTION, {**options, **shared})
    return found


def summarize(results: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Figures of each contestant: lists have an entry for each seed, curves are means over the seeds."""
    found: dict[str, Any] = {}
    for name in TITLES:
        runs = [figures for label, figures in results.items() if label.partition("/")[0] == name]
        if runs:
            skipped = next((run["skipped"] for run in runs if "skipped" in run), None)
            found[name] = _summary(runs) if skipped is None else {"skipped": skipped}
    return found


def plot(report: Mapping[str, Any], path: Path) -> None:
    """Draws loss curves, bits per byte by position, longer texts, and all contestants beside each other."""
    summary = {name: row for name, row in _in_order(report["summary"]) if "skipped" not in row}
    core = {name: summary[name] for name in CORE if name in summary}
    context = next(iter(report["cases"].values()))["options"]["context"]
    figure = new_figure(11, 8)
    (curves, positions), (long, contestants) = figure.subplots(2, 2)
    for name, row in core.items():
        style = {"color": COLORS[name], "label": TITLES[name]}
        millions = [tokens / 1e6 for tokens in row["loss"]["tokens"]]
        curves.plot(millions, _smoothed(row["loss"]["bits_per_byte"]), **style)
        for axis, key, line in ((positions, "held_out", "-"), (long, "long", "-"), (long, "long_restarted", ":")):
            curve = row[key]
            axis.plot(middle(curve["edges"]), curve["bits_per_byte"], line, marker="o", markersize=3, **style)
    curves.set(title="Training (running means)", xlabel="million tokens", ylabel="bits per byte")
    curves.legend(frameon=False)
    positions.set(title=f"Held-out text, {context:,} tokens at a time", xlabel="tokens before", ylabel="bits per byte")
    long.set(
        title=f"Long held-out files; dotted: restarted every {context:,}",
        xlabel="tokens before",
        ylabel="bits per byte",
    )
    long.axvline(context, color="black", linestyle="--", linewidth=1)
    for axis in (positions, long):
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    for axis in (curves, positions, long):
        axis.grid(alpha=0.3)
    _draw_contestants(contestants, summary)
    save_figure(figure, path)


def tables(report: Mapping[str, Any]) -> dict[str, str]:
    """The table of `docs/results/language.md`."""
    options = next(iter(report["cases"].values()))["options"]
    context, longest = options["context"], options["longest"]
    on_gpu = report["machine"]["cuda"] is not None
    tokens = options["steps"] * options["batch"] * context / 1e6
    header = [
        f"after {tokens:.2g} million tokens",
        "parameters",
        f"context {context:,}",
        f"its last {context // 2:,} tokens",
    ]
    for start, end in ((context, longest // 2), (longest // 2, longest)):
        header += [f"tokens {start:,} to {end:,}", "restarted"]
    header.append("training")
    rows = []
    for name, row in _in_order(report["summary"]):
        if "skipped" in row:
            rows.append([TITLES[name], row["skipped"], *[""] * (len(header) - 2)])
            continue
        cells = [row["held_out_bits_per_byte"], row["last_half"]]
        cells += [row[part][kind] for part in ("to_half", "to_end") for kind in ("whole", "restarted")]
        # Other programs share a CPU, and a process waits for a GPU.
        minutes = statistics.fmean(row["training_seconds" if on_gpu else "training_cpu_seconds"]) / 60
        rows.append([TITLES[name], f"{row['parameters']:,}", *map(_spread, cells), f"{minutes:.1f} min"])
    return {"language": markdown_table(header, rows)}


def _in_order(summary: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Contestants in the order of `TITLES`, whatever the order of the names in a file."""
    return [(name, summary[name]) for name in TITLES if name in summary]


def _hybrid(layers: int) -> dict[str, Any]:
    """Softmax in every fourth layer; in the last one if there are fewer."""
    period = min(4, layers)
    return {"layers": [index for index in range(layers) if index % period != period - 1]}


def _summary(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    context, longest = runs[0]["held_out"]["edges"][-1], runs[0]["long"]["whole"]["edges"][-1]

    def long(start: int, end: int) -> dict[str, list[float]]:
        return {kind: [between(run["long"][kind], start, end) for run in runs] for kind in ("whole", "restarted")}

    curves = zip(*(run["loss"]["bits_per_byte"] for run in runs), strict=True)
    return {
        "parameters": runs[0]["parameters"],
        "tokens": runs[0]["tokens"],
        "training_seconds": [run["training_seconds"] for run in runs],
        "training_cpu_seconds": [run["training_cpu_seconds"] for run in runs],
        "held_out_bits_per_byte": [run["held_out"]["bits_per_byte"] for run in runs],
        "last_half": [between(run["held_out"], context // 2, context) for run in runs],
        "to_half": long(context, longest // 2),
        "to_end": long(longest // 2, longest),
        "loss": {"tokens": runs[0]["loss"]["tokens"], "bits_per_byte": [statistics.fmean(point) for point in curves]},
        "held_out": by_position([run["held_out"] for run in runs]),
        "long": by_position([run["long"]["whole"] for run in runs]),
        "long_restarted": by_position([run["long"]["restarted"] for run in runs]),
    }


def between(figures: Mapping[str, Any], start: int, end: int) -> float:
    """Bits per byte of predictions with more than `start` and at most `end` tokens before them and themselves."""
    chosen = [index for index, edge in enumerate(figures["edges"]) if start < edge <= end]
    return sum(figures["bits"][index] for index in chosen) / sum(figures["bytes"][index] for index in chosen)


def by_position(runs: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """Bits per byte in each bucket of positions, over all runs."""
    bits = [sum(values) for values in zip(*(run["bits"] for run in runs), strict=True)]
    size = [sum(values) for values in zip(*(run["bytes"] for run in runs), strict=True)]
    return {"edges": runs[0]["edges"], "bits_per_byte": [b / n for b, n in zip(bits, size, strict=True)]}


def _spread(values: Sequence[float]) -> str:
    """Mean and standard deviation over the seeds."""
    if len(values) == 1:
        return f"{values[0]:.3f}"
    return f"{statistics.fmean(values):.3f} ± {statistics.stdev(values):.3f}"


def _smoothed(values: Sequence[float], reach: int = 3) -> list[float]:
    """Means of each value and up to `reach` on either side."""
    return [statistics.fmean(values[max(0, place - reach) : place + reach + 1]) for place in range(len(values))]


def middle(edges: Sequence[int]) -> list[float]:
    """Where buckets of positions are on a logarithmic axis."""
    return [((edges[index - 1] if index else edge / 2) * edge) ** 0.5 for index, edge in enumerate(edges)]


def _draw_contestants(axis: Any, summary: Mapping[str, Mapping[str, Any]]) -> None:
    names = list(summary)[::-1]
    for place, name in enumerate(names):
        values = summary[name]["held_out_bits_per_byte"]
        color = COLORS.get(name, COLORS["mhla"])
        axis.plot(values, [place] * len(values), "o", color=color, alpha=0.8 if name in CORE else 0.45)
        axis.annotate(f"{statistics.fmean(values):.3f}", (max(values), place), (7, -4), textcoords="offset points")
    labels = [TITLES[name].replace(" of ", "\nof ").replace(", ", ",\n").replace("weights ", "") for name in names]
    axis.set_yticks(range(len(names)), labels, fontsize=9)
    axis.margins(x=0.25)
    axis.grid(alpha=0.3, axis="x")
    axis.set(title="Held-out text, all positions", xlabel="bits per byte")


EXPERIMENT = Experiment(title="Language modelling", cases=cases, summarize=summarize, plot=plot, tables=tables)
