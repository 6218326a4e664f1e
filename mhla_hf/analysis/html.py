# SPDX-License-Identifier: Apache-2.0
"""The report of an inspection as one HTML page, with all pictures inside and nothing to download."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..layouts.blocks import BlockLayout
from ..utils.files import atomic_file
from ..utils.messages import how_to_install, shorten_text
from . import charts
from .directories import InspectionReport
from .findings import LayerInspection, ModelInspection
from .grids import check_block, frames_shown, middle_block, weights_on_grid
from .mixing import mean_distance
from .pictures import data_uri, heat_map, tiles


_TEMPLATES = Path(__file__).parent / "templates"
# Heads drawn of a layer at most, and pictures of heads of a model: pages stay small.
_MOST_HEADS, _MOST_HEAD_PICTURES = 8, 64
# Width of a frame's picture, about, and pixels of a cell at most.
_PICTURE, _MOST_PIXELS = 160, 16
# Tokens of a sequence that are drawn at most.
_MOST_PLACES = 1024
_KINDS = {"original": "softmax", "mhla": "MHLA", "linear": "linear"}
_LONGEST_PROMPT = 200


def write_html(report: InspectionReport, path: str | Path, *, block: int | None = None) -> None:
    """Writes the page, complete or not at all.

    Args:
        report: The inspection.
        path: File to write.
        block: As in [`render_html`][mhla_hf.analysis.render_html].

    Raises:
        ValueError: As there.
    """
    page = render_html(report, block=block)
    with atomic_file(Path(path)) as temporary:
        temporary.write_text(page, encoding="utf-8")


def render_html(report: InspectionReport, *, block: int | None = None) -> str:
    """Renders an inspection as a self-contained HTML page, which runs no scripts.

    Args:
        report: The inspection.
        block: Number of the block whose weights are laid out on the token grid; by default the one in the middle.

    Raises:
        ValueError: If jinja2 or Pillow is missing, or a model has no such block.
    """
    try:
        import PIL  # noqa: F401
        from jinja2 import Environment, FileSystemLoader, StrictUndefined
    except ImportError as error:
        raise ValueError(f"HTML reports need jinja2 and Pillow: {how_to_install('report')}") from error
    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    template = environment.get_template("inspection.html.jinja")
    return template.render(
        report=report,
        title=shorten_text(str(report.origin.get("location", report.location))),
        prompts=[shorten_text(prompt, _LONGEST_PROMPT) for prompt in report.prompts],
        models=[_model(model, block) for model in report.models],
    )


def _model(model: ModelInspection, block: int | None) -> dict[str, Any]:
    layers = model.mhla_layers
    heads = _heads_shown(layers)
    original = model.layers[0].original
    kinds = {**_KINDS, "original": "softmax" if original == "softmax" else f"original ({original})"}
    return {
        "model": model,
        "causal": bool(model.options["causal"]),
        "facts": _facts(model, kinds),
        "layers": [_layer(layer, block, heads) for layer in layers],
        "layouts": _layouts(layers, block),
        "kinds": kinds,
        "decay": _decay(layers),
        "movement": charts.bars(
            {
                str(layer.index): {
                    "mhla": _mean(layer.mixing.movement),
                    "pattern": _mean(layer.mixing.pattern_movement),
                }
                for layer in layers
                if layer.mixing is not None
            }
        ),
        "statistics": _statistics(layers),
        "errors": charts.bars(
            {str(layer.index): {"mhla": layer.output_error["mean"]} for layer in layers if layer.output_error},
            digits=3,
        ),
        "rows": [_row(layer) for layer in layers],
    }


def _facts(model: ModelInspection, kinds: Mapping[str, str]) -> list[tuple[str, str]]:
    """What stands on top of the page: names and values."""
    layers = model.mhla_layers
    converted = sum(layer.kind == "mhla" for layer in model.layers)
    options = model.options
    # Towers of a model have layouts of their own.
    layouts = list(dict.fromkeys((layer.mixing.layout, layer.mixing.grid) for layer in layers if layer.mixing))
    grids = [f"{_times(grid) if grid else 'not stored'}{_prefix(layout)}" for layout, grid in layouts]
    patterns = [_mean(layer.mixing.pattern_movement) for layer in layers if layer.mixing]
    facts = [
        ("MHLA layers", f"{converted} of {len(model.layers)}"),
        ("blocks", "; ".join(_blocks(layout) for layout, _ in layouts)),
        ("token grid", "; ".join(grids)),
        ("feature map", str(options["feature_map"])),
        ("mixing weights", "one matrix per head" if options["mixing_heads"] == "per_head" else "shared by all heads"),
        ("change of the pattern", _percent(_mean(patterns))),
    ]
    ranks = {kind: _over_layers(layers, kind, "effective_rank") for kind in _KINDS}
    if all(value is not None for value in ranks.values()):
        # Only where there was a probe.
        facts += [(f"effective rank, {name}", f"{ranks[kind]:.1f}") for kind, name in kinds.items()]
    errors = [layer.output_error["mean"] for layer in layers if layer.output_error]
    if errors:
        facts.append(("output error of a layer", _percent(_mean(errors))))
    if model.output_error:
        facts.append(("output error of the model", _percent(model.output_error["mean"])))
    if options["lepe_kernel"]:
        facts.append(("LePE", f"kernel {options['lepe_kernel']}"))
    if options["window"]:
        gains = [layer.gains for layer in layers if layer.gains]
        facts.append(("softmax window", f"{options['window']}, mean gain {_mean([gain[1] for gain in gains]):.2f}"))
    return facts


def _blocks(layout: BlockLayout) -> str:
    total = f" = {math.prod(layout.blocks)}" if len(layout.blocks) > 1 else ""
    return f"{_times(layout.blocks)}{total}"


def _over_layers(layers: list[LayerInspection], kind: str, statistic: str) -> float | None:
    values = [layer.attention.statistics[kind][statistic]["mean"] for layer in layers if layer.attention]
    return _mean(values) if values else None


def _statistics(layers: list[LayerInspection]) -> dict[str, Any]:
    """Bars of each statistic: by layer, one for each kind of attention."""
    found = {}
    for statistic, digits, top in (
        ("effective_rank", 1, None),
        ("rank", 0, None),
        ("relative_entropy", 2, 1.0),
        ("top_share", 2, 1.0),
    ):
        rows = {
            str(layer.index): {kind: layer.attention.statistics[kind][statistic]["mean"] for kind in _KINDS}
            for layer in layers
            if layer.attention
        }
        found[statistic] = charts.bars(rows, digits=digits, top=top) if rows else []
    return found


def _decay(layers: list[LayerInspection]) -> dict[str, Any] | None:
    lines: dict[str, tuple[Sequence[float], Sequence[float]]] = {}
    for layer in layers:
        assert layer.mixing is not None
        initial, decay = layer.mixing.initial_decay, layer.mixing.decay
        # All start alike, unless their options differ.
        lines.setdefault("initial", (initial.distance, initial.mean))
        lines[f"layer {layer.index}"] = (decay.distance, decay.mean)
    if max(len(distances) for distances, _ in lines.values()) < 2:
        return None
    return charts.curves(lines, dashed=["initial"])


def _layouts(layers: list[LayerInspection], block: int | None) -> list[dict[str, Any]]:
    """Each layout of the layers once, with the layers that have it."""
    found: dict[tuple[BlockLayout, tuple[int, ...] | None], list[int]] = {}
    for layer in layers:
        assert layer.mixing is not None
        found.setdefault((layer.mixing.layout, layer.mixing.grid), []).append(layer.index)
    pictures = []
    for (layout, grid), indices in found.items():
        chosen = middle_block(layout) if block is None else check_block(block, layout)
        blocks = torch.arange(layout.num_blocks)
        places = torch.stack(torch.unravel_index(blocks - layout.num_prefix_blocks, layout.blocks), dim=-1)
        # Neighbours differ, whichever axis they are neighbours along.
        shade = (places % 2).sum(-1) % 2 + (2 * (places[:, 0] % 2) if len(layout.grid) == 3 else 0)
        pictures.append(
            {
                "layers": ", ".join(map(str, indices)),
                "words": f"{_times(layout.blocks)} blocks on {_times(grid or ())} tokens{_prefix(layout)}"
                if grid
                else f"{_times(layout.blocks)} blocks, of a token grid that is not stored",
                "block": chosen,
                "is_sequence": len(layout.grid) == 1,
                "frames": [
                    (label, data_uri(tiles(np.stack([shades, numbers]), chosen, scale=_scale(layout))), alt)
                    for label, shades, numbers, alt in _on_frames(layout, chosen, shade, blocks)
                ],
            }
        )
    return pictures


def _on_frames(layout: BlockLayout, chosen: int, *weights: torch.Tensor) -> list[tuple[Any, ...]]:
    """Label, weights on the tokens, and description of each frame that is drawn."""
    on_tokens = [weights_on_grid(each, layout).numpy() for each in weights]
    if len(layout.grid) == 1 and layout.grid[0] > _MOST_PLACES:
        places = np.linspace(0, layout.grid[0] - 1, _MOST_PLACES).round().astype(int)
        on_tokens = [each[:, :, places] for each in on_tokens]
    frames = frames_shown(layout, chosen)
    names = [f"frame {frame}" if len(layout.grid) == 3 else "" for frame in frames]
    return [(name, *(each[frame] for each in on_tokens), name or "tokens") for name, frame in zip(names, frames)]


def _layer(layer: LayerInspection, block: int | None, heads: int) -> dict[str, Any]:
    summary = layer.mixing
    assert summary is not None
    layout = summary.layout
    chosen = middle_block(layout) if block is None else check_block(block, layout)
    mixing = summary.mean_matrix
    own = torch.eye(layout.num_blocks)[chosen]
    limit = mixing[chosen].abs().max().item()
    return {
        "index": layer.index,
        "name": layer.name,
        "block": chosen,
        "blocks": layout.num_blocks,
        "is_sequence": len(layout.grid) == 1,
        "mark": _mark(layout, chosen) if len(layout.grid) == 1 else None,
        "limit": f"{mixing.abs().max().item():.3g}",
        "row_limit": f"{limit:.3g}",
        "matrix": data_uri(heat_map(mixing.numpy(), mixing.abs().max().item())),
        "frames": [
            (label, data_uri(heat_map(weights, limit, scale=_scale(layout), outlined=inside > 0)), alt)
            for label, weights, inside, alt in _on_frames(layout, chosen, mixing[chosen], own)
        ],
        "heads": [data_uri(heat_map(head.numpy())) for head in summary.matrix[:heads]] if heads else [],
        "num_heads": len(summary.matrix) if summary.matrix.dim() == 3 else 1,
        "moved": _percent(_mean(summary.pattern_movement)),
        "negative": _percent(summary.negative_share),
        "distance": f"{mean_distance(summary.matrix, layout):.2f}",
        "initial_distance": f"{mean_distance(summary.initial, layout):.2f}",
    }


def _mark(layout: BlockLayout, block: int) -> tuple[float, float]:
    """Where a block of a sequence begins and how long it is, in percent of the sequence."""
    inside = weights_on_grid(torch.eye(layout.num_blocks)[block], layout).flatten().nonzero().flatten()
    length = layout.grid[0]
    return round(100 * inside[0].item() / length, 3), round(100 * len(inside) / length, 3)


def _heads_shown(layers: list[LayerInspection]) -> int:
    """Heads of each layer that are drawn: as many for all as pages have room for."""
    counts = [len(layer.mixing.matrix) for layer in layers if layer.mixing and layer.mixing.matrix.dim() == 3]
    if not counts or max(counts) < 2:
        return 0
    return min(max(counts), _MOST_HEADS, _MOST_HEAD_PICTURES // len(counts))


def _row(layer: LayerInspection) -> dict[str, Any]:
    assert layer.mixing is not None
    return {
        "index": layer.index,
        "name": layer.name,
        "movement": f"{_mean(layer.mixing.movement):.3f}",
        "pattern": f"{_mean(layer.mixing.pattern_movement):.3f}",
        "negative": _percent(layer.mixing.negative_share),
        "row_sum": f"{layer.mixing.row_sum:.2f}",
        "attention": layer.attention,
        "error": _spread(layer.output_error, 3) if layer.output_error else "",
        "statistics": {
            kind: {
                "effective_rank": _spread(values["effective_rank"], 1),
                "rank": _spread(values["rank"], 0),
                "entropy": _spread(values["entropy"], 2),
                "relative_entropy": _spread(values["relative_entropy"], 2),
                "top_share": _spread(values["top_share"], 2),
            }
            for kind, values in (layer.attention.statistics if layer.attention else {}).items()
        },
    }


def _scale(layout: BlockLayout) -> int:
    """Pixels of a token along each side."""
    if len(layout.grid) == 1:
        return 1
    return max(3, min(_MOST_PIXELS, _PICTURE // max(layout.grid[-2:])))


def _spread(value: Mapping[str, float], digits: int) -> str:
    return f"{value['mean']:.{digits}f} ± {value['std']:.{digits}f}"


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def _percent(value: float) -> str:
    return f"{100 * value:.{0 if value >= 0.1 else 1}f}\N{NO-BREAK SPACE}%"


def _times(axes: tuple[int, ...]) -> str:
    return " × ".join(map(str, axes))


def _prefix(layout: BlockLayout) -> str:
    return f" + {layout.num_prefix_tokens} before" if layout.num_prefix_tokens else ""
