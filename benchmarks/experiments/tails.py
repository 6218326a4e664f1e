# SPDX-License-Identifier: Apache-2.0
"""Language models on texts many times as long as those of their training, by the tail of the mixing weights."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mhla_hf.utils.figures import new_figure, save_figure

from .documentation import markdown_table
from .experiment import Case, Experiment
from .language import FUNCTION, SETTINGS, between, by_position, middle


TITLES = {
    "constant": "constant",
    "decay": "decay",
    "none": "none",
    "distance-decay": "decay, weights by distance",
    "uniform-constant": "constant, uniform initialisation",
    "uniform-decay": "decay, uniform initialisation",
    "uniform-distance-decay": "decay, weights by distance, uniform initialisation",
}
"""Contestants: `mixing_tail`, with the local initialisation and a matrix of weights where nothing else is said."""

_COLORS = {
    "constant": "#d95f02",
    "decay": "#1f77b4",
    "none": "#444444",
    "distance-decay": "#66a6d9",
    "uniform-constant": "#a6761d",
    "uniform-decay": "#9467bd",
    "uniform-distance-decay": "#c5b0d5",
}
# Over the settings of the experiment on language models.
_CHANGES: dict[str, dict[str, Any]] = {
    "cpu": {
        "sizes": {"width": 128, "layers": 2, "heads": 4, "intermediate": 320},
        "corpus": {"megabytes": 5.0, "held_out_megabytes": 3.0, "vocabulary": 512, "tokenizer_megabytes": 1.0},
        "context": 512,
        "batch": 4,
        "steps": 300,
        "dtype": "float32",
        "windows": 128,
        "long_windows": 8,
    },
    "gpu": {"longest": 65536, "long_windows": 16},
    "smoke": {"context": 64},
}
_BLOCK_SIZE = {"cpu": 16, "gpu": 64, "smoke": 8}
_SEEDS = {"cpu": 3, "gpu": 3, "smoke": 1}
# Stretches of a text whose bits per byte are reported, in multiples of the trained length.
_STRETCHES = {"4 to 8 times": (4, 8), "16 to 32 times": (16, 32)}


def _cases(setting: str) -> dict[str, Case]:
    shared = SETTINGS[setting] | _CHANGES[setting]
    found = {}
    for name in TITLES:
        kind, _, tail = name.rpartition("-")
        options = {
            "mixing_tail": tail,
            "mixing_init": "uniform" if "uniform" in kind else "linear",
            "mixing_storage": "distance" if "distance" in kind else "matrix",
            "block_size": [_BLOCK_SIZE[setting]],
        }
        for seed in range(_SEEDS[setting]):
            case = {"attention": "mhla", "mhla": options, "frozen_mixing": False, "seed": seed}
            found[f"{name}/{seed}"] = Case(FUNCTION, {**case, **shared})
    return found


def _summarize(results: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Figures of each contestant: lists have an entry for each seed, curves are means over the seeds."""
    found = {}
    for name in TITLES:
        runs = [figures for label, figures in results.items() if label.partition("/")[0] == name]
        context = runs[0]["held_out"]["edges"][-1]
        found[name] = {
            "parameters": runs[0]["parameters"],
            "training_cpu_seconds": [run["training_cpu_seconds"] for run in runs],
            "held_out_bits_per_byte": [run["held_out"]["bits_per_byte"] for run in runs],
            "longer": {
                stretch: [
                    {kind: between(run["long"][kind], first * context, last * context) for kind in _KINDS}
                    for run in runs
                ]
                for stretch, (first, last) in _STRETCHES.items()
                if last * context <= runs[0]["long"]["whole"]["edges"][-1]
            },
            **{kind: by_position([run["long"][kind] for run in runs]) for kind in _KINDS},
        }
    return found


_KINDS = ("whole", "restarted")


def _plot(report: Mapping[str, Any], path: Path) -> None:
    context = next(iter(report["cases"].values()))["options"]["context"]
    figure = new_figure(9, 4.2)
    panel = figure.subplots()
    for name, row in report["summary"].items():
        whole, restarted = row["whole"]["bits_per_byte"], row["restarted"]["bits_per_byte"]
        lost = [a - b for a, b in zip(whole, restarted)]
        panel.plot(middle(row["whole"]["edges"]), lost, "-o", markersize=3, color=_COLORS[name], label=TITLES[name])
    panel.axvline(context, color="black", linestyle="--", linewidth=1)
    panel.axhline(0, color="black", linewidth=0.6)
    panel.set_xscale("log", base=2)
    panel.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    panel.set(
        title=f"Held-out files read in whole, against restarting every {context:,} tokens",
        xlabel="tokens before",
        ylabel="more bits per byte",
    )
    panel.grid(alpha=0.3)
    panel.legend(frameon=False, title="tail of the mixing weights")
    save_figure(figure, path)


def _tables(report: Mapping[str, Any]) -> dict[str, str]:
    rows = []
    # A report's own keys are sorted.
    stretches = [stretch for stretch in _STRETCHES if stretch in next(iter(report["summary"].values()))["longer"]]
    for name, title in TITLES.items():
        row = report["summary"][name]
        lost = [[run["whole"] - run["restarted"] for run in row["longer"][stretch]] for stretch in stretches]
        cells = [f"{statistics.fmean(row['held_out_bits_per_byte']):.3f}", *map(_signed, lost)]
        rows.append([title, f"{row['parameters']:,}", *cells])
    context = next(iter(report["cases"].values()))["options"]["context"]
    header = [
        "tail",
        "parameters",
        f"{context:,} tokens, bits per byte",
        *(f"{stretch} as long" for stretch in stretches),
    ]
    return {"tails": markdown_table(header, rows)}


def _signed(values: Sequence[float]) -> str:
    return ", ".join(f"{value:+.3f}".replace("-", "−") for value in values)


EXPERIMENT = Experiment(
    title="Tails of mixing weights", cases=_cases, summarize=_summarize, plot=_plot, tables=_tables
)
