# SPDX-License-Identifier: Apache-2.0
"""Figures of mixing weights and of statistics of attention, and the HTML page of an inspection that holds them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from ..layouts.blocks import BlockLayout
from ..training.data.order import evenly_spaced
from ..utils.figures import figure_svg, new_figure
from ..utils.files import atomic_file
from ..utils.messages import shorten_text
from .inspection import InspectionReport, ModelInspection, mean, percent, prefix, times
from .statistics import DistanceDecay, MixingSummary, check_block, mean_distance


COLOR_MAP = "RdBu_r"
"""Colours of weights: blue below zero, red above."""
COLORS = {"original": "#5d666f", "mhla": "#1f77b4", "linear": "#d95f02", "error": "#1f77b4", "restored": "#77b3dc"}
"""Colours of bars."""
MAX_FRAMES = 6
"""Largest number of frames of a video that are drawn."""
# Larger matrices are drawn at the resolution of the figure.
_MOST_CELLS = 256
_LONGEST_PROMPT = 200
# Digits and axis limits of their charts.
_STATISTICS = (("effective_rank", 1, None), ("rank", 0, None), ("relative_entropy", 2, 1.0), ("top_share", 2, 1.0))


def weights_on_grid(weights: torch.Tensor, layout: BlockLayout) -> torch.Tensor:
    """Give each token on the grid the weight of its block.

    Args:
        weights: One weight for each block, `[M]`.
        layout: The layout; its prefix tokens are left out.

    Returns:
        `[frames, height, width]`; images are one frame, sequences one frame of one row.
    """
    on_tokens = weights[layout.block_of_token.to(weights.device)][layout.num_prefix_tokens :]
    return on_tokens.reshape((1,) * (3 - len(layout.grid)) + layout.grid)


def frames_shown(layout: BlockLayout, block: int) -> list[int]:
    """Choose the frames of a layout that are drawn: all, or evenly spaced ones and the middle one of the block."""
    frames = layout.grid[0] if len(layout.grid) == 3 else 1
    if frames <= MAX_FRAMES:
        return list(range(frames))
    inside = weights_on_grid(torch.eye(layout.num_blocks)[block], layout).sum((1, 2)).nonzero().flatten().tolist()
    return sorted({inside[len(inside) // 2], *evenly_spaced(range(frames), MAX_FRAMES - 1)})


def mixing_figure(matrices: Mapping[int, torch.Tensor], layout: BlockLayout, *, block: int | None = None) -> Any:
    """Draw each layer's mixing matrix, and one of its rows laid out on the token grid.

    The row holds the weight of each block's summary for the queries of one block, which is outlined. It is drawn on
    the tokens of a sequence, of an image, or of some frames of a video.

    Args:
        matrices: Effective mixing `[M, M]` by layer; of `[H, M, M]` the mean over heads is drawn.
        layout: Their layout, of one to three axes.
        block: The block whose row is laid out; by default the one in the middle.

    Returns:
        A matplotlib `Figure`.

    Raises:
        ValueError: If a matrix does not fit the layout, or there is no such block.
    """
    block = check_block(block, layout)
    frames, is_sequence = frames_shown(layout, block), len(layout.grid) == 1
    widths = [1.4] + [3.2 if is_sequence else 1.0] * len(frames)
    figure = new_figure(1.6 * sum(widths) + 0.6, 1.9 * len(matrices) + 0.6)
    grid = figure.subplots(len(matrices), len(widths), squeeze=False, width_ratios=widths)
    for axes, (layer, matrix) in zip(grid, matrices.items()):
        weights = _mean_matrix(matrix, layout)
        _draw_cells(axes[0], weights, weights, stretched=is_sequence)
        axes[0].set_ylabel(f"layer {layer}")
        image = _draw_row(axes[1:], weights, layout, block, frames)
        figure.colorbar(image, ax=list(axes[1:]), fraction=0.02)
    for axis, frame in zip(grid[0][1:], frames):
        axis.set_title(f"latent frame {frame}" if len(layout.grid) == 3 else "", fontsize=9)
    grid[0][0].set_title(f"mixing matrix, {layout.num_blocks} × {layout.num_blocks}", fontsize=9)
    tokens = " × ".join(map(str, layout.grid[-2:])) + (" tokens a frame" if len(layout.grid) == 3 else " tokens")
    figure.suptitle(f"Weights of all blocks for the queries of one (outlined), on {tokens}")
    return figure


def mixing_parts(matrix: torch.Tensor, layout: BlockLayout, *, block: int | None = None) -> tuple[Any, Any]:
    """Draw the same as [`mixing_figure`] for one layer as two figures, which a page can stack on a narrow screen.

    Returns:
        The mixing matrix, and the row of `block` on the token grid.

    Raises:
        ValueError: As there.
    """
    block = check_block(block, layout)
    weights, frames, is_sequence = _mean_matrix(matrix, layout), frames_shown(layout, block), len(layout.grid) == 1
    left = new_figure(3.4, 3.7)
    axis = left.subplots()
    left.colorbar(_draw_cells(axis, weights, weights), ax=axis, location="bottom", fraction=0.05).ax.tick_params(
        labelsize=8
    )
    axis.set_title(f"mixing matrix, {layout.num_blocks} × {layout.num_blocks}", fontsize=9)
    columns = min(3, len(frames))
    rows = -(-len(frames) // columns)
    height = 1.4 if is_sequence else 0.5 + 4.4 / columns * rows * layout.grid[-2] / layout.grid[-1]
    right = new_figure(5.0, height)
    axes = right.subplots(rows, columns, squeeze=False).flatten()
    image = _draw_row(axes, weights, layout, block, frames)
    for axis, frame in zip(axes, frames):
        axis.set_title(f"latent frame {frame}" if len(layout.grid) == 3 else "on the tokens", fontsize=9)
    for axis in axes[len(frames) :]:
        axis.set_axis_off()
    right.colorbar(image, ax=list(axes), fraction=0.02).ax.tick_params(labelsize=8)
    return left, right


def decay_figure(initial: DistanceDecay, layers: Mapping[int, DistanceDecay]) -> Any:
    """Draw the mean mixing weight of each layer against the distance of two blocks; initial weights are dashed."""
    from matplotlib import colormaps

    figure = new_figure(7.2, 3.4)
    axes = _plain_axes(figure)
    axes.plot(initial.distance, initial.mean, "--", color="#888888", label="initial")
    numbers = list(layers)
    # The legend has room for a dozen: of more layers, the first and the last are named.
    named = numbers if len(numbers) < 12 else (numbers[0], numbers[-1])
    for place, (layer, decay) in enumerate(layers.items()):
        color = colormaps["viridis"](0.9 * place / max(1, len(layers) - 1))
        axes.plot(decay.distance, decay.mean, color=color, label=f"layer {layer}" if layer in named else None)
    axes.set(xlabel="distance in blocks", ylabel="mean weight")
    figure.legend(loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    return figure


def bars_figure(
    rows: Mapping[int, Mapping[str, float]], names: Mapping[str, str], *, digits: int = 2, limit: float | None = None
) -> Any:
    """Draw a group of horizontal bars for each layer.

    Args:
        rows: Values by kind, by layer.
        names: Names of the kinds, which have `COLORS`.
        digits: Digits of the labels.
        limit: Right end of the axis; by default the largest value.
    """
    figure = new_figure(5.2, 0.2 * len(rows) * (len(names) + 0.7) + 0.7)
    axes = _plain_axes(figure)
    places = np.arange(len(rows)) * (len(names) + 0.7)
    for number, (kind, name) in enumerate(names.items()):
        values = [row[kind] if math.isfinite(row[kind]) else 0.0 for row in rows.values()]
        bars = axes.barh(places + number, values, color=COLORS[kind], height=0.8, label=name)
        axes.bar_label(bars, [f"{row[kind]:.{digits}f}" for row in rows.values()], padding=3, fontsize=8)
    axes.set_yticks(places + (len(names) - 1) / 2, [f"layer {layer}" for layer in rows])
    axes.invert_yaxis()
    axes.margins(x=0.15)
    if limit is not None:
        axes.set_xlim(0, 1.15 * limit)
    if len(names) > 1:
        figure.legend(loc="outside upper left", ncols=len(names), fontsize=8, frameon=False)
    return figure


def share_figure(shares: Mapping[int, Mapping[str, Sequence[float]]], names: Mapping[str, str]) -> Any:
    """Draw the share of the text in the attention of each layer and head, a panel for each kind of attention.

    Args:
        shares: Shares of the heads by kind, by layer.
        names: Names of the kinds.
    """
    panels = {kind: np.array([layer[kind] for layer in shares.values()]) for kind in next(iter(shares.values()))}
    figure = new_figure(6.4, 0.16 * len(shares) + 1.4)
    grid = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    limit = 100 * max(panel.max() for panel in panels.values())
    for axes, (kind, panel) in zip(grid, panels.items()):
        image = axes.imshow(100 * panel, aspect="auto", cmap="Blues", vmin=0, vmax=limit, interpolation="none")
        axes.set_title(f"{names[kind]}, mean {percent(panel.mean())}", fontsize=9)
        axes.set(xlabel="head", xticks=evenly_spaced(range(panel.shape[1]), 6))
    layers = list(shares)
    ticks = evenly_spaced(range(len(layers)), 20)
    grid[0].set_yticks(ticks, [f"layer {layers[tick]}" for tick in ticks], fontsize=8)
    figure.colorbar(image, ax=list(grid), fraction=0.04, format="%g %%").ax.tick_params(labelsize=8)
    return figure


def _mean_matrix(matrix: torch.Tensor, layout: BlockLayout) -> torch.Tensor:
    if matrix.shape[-1] != layout.num_blocks:
        raise ValueError(f"matrices has {matrix.shape[-1]} blocks, but the layout has {layout.num_blocks}.")
    weights = matrix.detach().float().cpu()
    return weights.mean(dim=0) if weights.dim() == 3 else weights


def _draw_cells(axis: Any, cells: torch.Tensor, among: torch.Tensor, *, stretched: bool = False) -> Any:
    """Draw weights, with the darkest colours for the largest one of `among`."""
    limit = float(among.abs().max()) or 1.0
    shown = {"aspect": "auto" if stretched else "equal", "cmap": COLOR_MAP, "vmin": -limit, "vmax": limit}
    interpolation = "none" if len(cells) <= _MOST_CELLS else "antialiased"
    image = axis.imshow(cells.numpy(), interpolation=interpolation, **shown)
    axis.set(xticks=[], yticks=[])
    return image


def _draw_row(axes: Any, weights: torch.Tensor, layout: BlockLayout, block: int, frames: Sequence[int]) -> Any:
    """Draw the row of a block on some frames of the token grid, and return the last image."""
    own = weights_on_grid(torch.eye(layout.num_blocks)[block], layout)
    on_tokens = weights_on_grid(weights[block], layout)
    for axis, frame in zip(axes, frames):
        image = _draw_cells(axis, on_tokens[frame], on_tokens, stretched=len(layout.grid) == 1)
        _outline(axis, own[frame])
    return image


def _outline(axis: Any, inside: torch.Tensor) -> None:
    """Draw the border of a rectangle of ones."""
    from matplotlib.patches import Rectangle

    rows, columns = inside.numpy().nonzero()
    if len(rows):
        corner = (columns.min() - 0.5, rows.min() - 0.5)
        size = (np.ptp(columns) + 1, np.ptp(rows) + 1)
        axis.add_patch(Rectangle(corner, *size, fill=False, edgecolor="black", linewidth=1.8))


def _plain_axes(figure: Any) -> Any:
    axes = figure.subplots()
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    return axes


# The page of an inspection


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
    environment.filters |= {"mean": mean, "percent": percent}
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
    shares = {layer.index: found for layer in layers if layer.attention and (found := layer.attention.text_share)}
    kinds = model.kinds
    statistics = {}
    if attention:
        for name, digits, limit in _STATISTICS:
            rows = {layer: {kind: found[kind][name]["mean"] for kind in kinds} for layer, found in attention.items()}
            statistics[name] = _svg(bars_figure(rows, kinds, digits=digits, limit=limit))
    return {
        "model": model,
        "facts": model.facts(),
        "kinds": kinds,
        "layouts": _layouts(mixing, block, model.is_untrained),
        "statistics": statistics,
        "text_share": _svg(share_figure(shares, kinds)) if shares else "",
        "errors": _svg(bars_figure(errors, {"error": "error"}, digits=3)) if errors else "",
    }


def _layouts(mixing: Mapping[int, MixingSummary], block: int | None, is_untrained: bool) -> list[dict[str, Any]]:
    """Each layout of the layers once, with the mixing weights of the layers that have it."""
    found: dict[tuple[BlockLayout, Any], dict[int, MixingSummary]] = {}
    for layer, summary in mixing.items():
        found.setdefault((summary.layout, summary.grid), {})[layer] = summary
    entries = []
    for (layout, grid), summaries in found.items():
        chosen, blocks = check_block(block, layout), times(layout.blocks)
        decays = {layer: summary.decay for layer, summary in summaries.items()}
        initial = next(iter(summaries.values())).initial_decay
        tokens = f" on {times(grid)} tokens{prefix(layout)}" if grid else ", of a token grid that is not stored"
        # Untrained layers all look the same.
        drawn = dict(list(summaries.items())[:1]) if is_untrained else summaries
        # A single block has no distances.
        has_decay = len(initial.mean) > 1 and not is_untrained
        entries.append(
            {
                "words": f"{blocks} blocks{tokens}",
                "block": chosen,
                "layers": {
                    f"Layers {', '.join(map(str, summaries))}" if is_untrained else f"Layer {layer}": [
                        _svg(part) for part in mixing_parts(summary.mean_matrix, layout, block=chosen)
                    ]
                    for layer, summary in drawn.items()
                },
                "decay": _svg(decay_figure(initial, decays)) if has_decay else "",
            }
        )
    return entries


def _svg(figure: Any) -> Markup:
    # Figures hold no text of the model's author.
    return Markup(figure_svg(figure))
