# SPDX-License-Identifier: Apache-2.0
"""Means over seeds, and differences within seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from .options import VARIANTS


METRICS = ("held_out_loss", "frechet_distance", "class_accuracy")
"""Figures of a run that are summed up; the first two are better when smaller."""

BASELINES = ("softmax", "linear")
"""What every other variant is compared with."""

# Points that a curve of losses is kept with.
CURVE_POINTS = 50


def curve(losses: Sequence[float]) -> dict[str, list[float]]:
    """Means of consecutive losses, `loss`, and the steps that they end at, `step`; at most `CURVE_POINTS`."""
    window = -(-len(losses) // CURVE_POINTS)
    ends = [min(end + window, len(losses)) for end in range(0, len(losses), window)]
    means = [statistics.fmean(losses[start:end]) for start, end in zip([0, *ends], ends)]
    return {"step": [float(end) for end in ends], "loss": means}


def summarize(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Sums up the runs of all variants and seeds.

    Args:
        runs: Each with `variant`, `seed` and `METRICS`.

    Returns:
        `summary[variant][metric]` with `mean` and `standard_deviation` over seeds, and
        `differences[variant][baseline][metric]` with the `mean` of the variant's figure less the baseline's of the
        same seed, and its `standard_error`. With one seed deviations and errors are None.
    """
    figures = {
        (variant, metric): [run[metric] for run in sorted(runs, key=_seed) if run["variant"] == variant]
        for variant in VARIANTS
        for metric in METRICS
    }
    summary = {
        variant: {metric: _mean_and_deviation(figures[variant, metric]) for metric in METRICS} for variant in VARIANTS
    }
    differences = {
        variant: {
            baseline: {metric: _paired(figures[variant, metric], figures[baseline, metric]) for metric in METRICS}
            for baseline in BASELINES
            if baseline != variant
        }
        for variant in VARIANTS
    }
    return {"summary": summary, "differences": differences}


def _seed(run: Mapping[str, Any]) -> int:
    return run["seed"]


def _mean_and_deviation(values: Sequence[float]) -> dict[str, float | None]:
    deviation = statistics.stdev(values) if len(values) > 1 else None
    return {"mean": statistics.fmean(values), "standard_deviation": deviation}


def _paired(values: Sequence[float], baselines: Sequence[float]) -> dict[str, float | None]:
    figures = _mean_and_deviation([value - baseline for value, baseline in zip(values, baselines, strict=True)])
    deviation = figures["standard_deviation"]
    error = None if deviation is None else deviation / math.sqrt(len(values))
    return {"mean": figures["mean"], "standard_error": error}
