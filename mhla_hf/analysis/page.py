# SPDX-License-Identifier: Apache-2.0
"""The report of an inspection as one HTML page with all figures inside."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from ..layouts.blocks import BlockLayout
from ..utils.figures import figure_svg
from ..utils.files import atomic_file
from ..utils.messages import shorten_text
from .directories import InspectionReport
from .inspection import ModelInspection
from .plots import bars_figure, check_block, decay_figure, mixing_figure
from .statistics import MixingSummary, mean_distance


_LONGEST_PROMPT = 200
# Digits and axis limits of their charts.
_STATISTICS = (("effective_rank", 1, None), ("rank", 0, None), ("relative_entropy", 2, 1.0), ("top_share", 2, 1.0))


def write_html(report: InspectionReport, path: str | Path, *, block: int | None = None) -> None:
    """Write an inspection as a self-contained HTML page without scripts, atomically.

    Args:
        report: The inspection.
        path: File to write.
        block: Number of the block whose weights are shown on the token grid; by default the one in the middle.

    Raises:
        ValueError: If matplotlib is missing, or a model has no such block.
    """
    page = render_html(report, block=block)
    with atomic_file(Path(path)) as temporary:
        temporary.write_text(page, encoding="utf-8")


def render_html(report: InspectionReport, *, block: int | None = None) -> str:
    """Return the page that `write_html` writes."""
    loader = FileSystemLoader(Path(__file__).parent / "templates")
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"mean": _mean, "percent": _percent}
    environment.globals["mean_distance"] = mean_distance
    return environment.get_template("inspection.html.jinja").render(
        report=report,
        title=shorten_text(str(report.origin.get("location", report.location))),
        prompts=[shorten_text(prompt, _LONGEST_PROMPT) for prompt in report.prompts],
        models=[_model(model, block) for model in report.models],
    )


def _model(model: ModelInspection, block: int | None) -> dict[str, Any]:
    layers = model.mhla_layers
    mixing = {layer.index: layer.mixing for layer in layers if layer.mixing}
    attention = {layer.index: layer.attention.statistics for layer in layers if layer.attention}
    errors = {layer.index: {"error": layer.output_error["mean"]} for layer in layers if layer.output_error}
    original = model.layers[0].original
    kinds = {"original": original if original == "softmax" else f"original ({original})"}
    kinds |= {"mhla": "MHLA", "linear": "linear"}
    moved = {
        layer: {"mhla": _mean(summary.movement), "pattern": _mean(summary.pattern_movement)}
        for layer, summary in mixing.items()
    }
    statistics = {}
    if attention:
        for name, digits, limit in _STATISTICS:
            rows = {layer: {kind: found[kind][name]["mean"] for kind in kinds} for layer, found in attention.items()}
            statistics[name] = _svg(bars_figure(rows, kinds, digits=digits, limit=limit))
    first = next(iter(mixing.values())).initial_decay
    decays = {layer: summary.decay for layer, summary in mixing.items()}
    return {
        "model": model,
        "facts": _facts(model, kinds, mixing),
        "kinds": kinds,
        "layouts": _layouts(mixing, block),
        "decay": _svg(decay_figure(first, decays)) if max(len(each.mean) for each in decays.values()) > 1 else "",
        "movement": _svg(bars_figure(moved, {"mhla": "weights", "pattern": "pattern"})),
        "statistics": statistics,
        "errors": _svg(bars_figure(errors, {"error": "error"}, digits=3)) if errors else "",
    }


def _facts(model: ModelInspection, kinds: Mapping[str, str], mixing: Mapping[int, MixingSummary]) -> dict[str, str]:
    """Names and values of what stands on top of the page."""
    options, layers = model.options, model.mhla_layers
    # Towers of a model have layouts of their own.
    layouts = list(dict.fromkeys((summary.layout, summary.grid) for summary in mixing.values()))
    counts = [f" = {math.prod(layout.blocks)}" if len(layout.blocks) > 1 else "" for layout, _ in layouts]
    facts = {
        "MHLA layers": f"{sum(layer.kind == 'mhla' for layer in model.layers)} of {len(model.layers)}",
        "blocks": "; ".join(_times(layout.blocks) + count for (layout, _), count in zip(layouts, counts)),
        "token grid": "; ".join(
            f"{_times(grid) if grid else 'not stored'}{_prefix(layout)}" for layout, grid in layouts
        ),
        "feature map": str(options["feature_map"]),
        "mixing weights": "one matrix per head" if options["mixing_heads"] == "per_head" else "shared by all heads",
        "change of the pattern": _percent(_mean([_mean(summary.pattern_movement) for summary in mixing.values()])),
    }
    for kind, name in kinds.items():
        ranks = [layer.attention.statistics[kind]["effective_rank"]["mean"] for layer in layers if layer.attention]
        if ranks:
            facts[f"effective rank, {name}"] = f"{_mean(ranks):.1f}"
    errors = [layer.output_error["mean"] for layer in layers if layer.output_error]
    if errors:
        facts["output error of a layer"] = _percent(_mean(errors))
    if model.output_error:
        facts["output error of the model"] = _percent(model.output_error["mean"])
    if options["window"]:
        gain = _mean([layer.gains[1] for layer in layers if layer.gains])
        facts["softmax window"] = f"{options['window']}, mean gain {gain:.2f}"
    return facts


def _layouts(mixing: Mapping[int, MixingSummary], block: int | None) -> list[dict[str, Any]]:
    """Each layout of the layers once, with the mixing weights of the layers that have it."""
    found: dict[tuple[BlockLayout, Any], dict[int, MixingSummary]] = {}
    for layer, summary in mixing.items():
        found.setdefault((summary.layout, summary.grid), {})[layer] = summary
    entries = []
    for (layout, grid), summaries in found.items():
        chosen, blocks = check_block(block, layout), _times(layout.blocks)
        tokens = f" on {_times(grid)} tokens{_prefix(layout)}" if grid else ", of a token grid that is not stored"
        matrices = {layer: summary.mean_matrix for layer, summary in summaries.items()}
        entries.append(
            {
                "words": f"{blocks} blocks{tokens}",
                "layers": ", ".join(map(str, summaries)),
                "block": chosen,
                "mixing": _svg(mixing_figure(matrices, layout, block=chosen)),
            }
        )
    return entries


def _svg(figure: Any) -> Markup:
    # Figures hold no text of the model's author.
    return Markup(figure_svg(figure))


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def _percent(value: float) -> str:
    return f"{100 * value:.{0 if value >= 0.1 else 1}f}\N{NO-BREAK SPACE}%"


def _times(axes: tuple[int, ...]) -> str:
    return " × ".join(map(str, axes))


def _prefix(layout: BlockLayout) -> str:
    return f" + {layout.num_prefix_tokens} before" if layout.num_prefix_tokens else ""
