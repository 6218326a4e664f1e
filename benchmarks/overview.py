# SPDX-License-Identifier: Apache-2.0
"""The picture at the top of the README, drawn from measured results: recovered quality, and time against tokens.

    python -m benchmarks.overview

It reads `recovery.json` and `long_inputs.json` of `benchmarks/results` and measures nothing.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.recovery import COLORS, TITLES, points, stages_of
from mhla_hf.utils.figures import new_figure, save_figure
from mhla_hf.utils.files import read_json


RESULTS = Path(__file__).resolve().parent / "results"
IMAGE = Path(__file__).resolve().parents[1] / "docs" / "images" / "overview.png"

MODEL = "digits"
"""Model of `recovery.json` that the left panel shows."""

ATTENTION = {"softmax": "softmax", "mhla": "MHLA", "linear": "linear"}
"""Kinds of attention of `long_inputs.json` that the right panel shows."""

_COLORS = {**COLORS, "softmax": "#444444"}
_GREY = "#666666"
_STAGES = {
    "converted": "converted",
    "calibrate": "calibrated",
    "match": "layers matched",
    "blocks": "blocks matched",
    "distill": "distilled",
}
# Longest inputs, from which the growth of the time is fitted.
_GROWTH_POINTS = 4
# The README shows 1,440 pixels on about 900: letters of 14 points are as large there as the text around.
_WIDTH, _HEIGHT = 12.0, 5.4
_TEXT, _TITLE, _SMALL = 14, 15, 11.5


def recovery_lines(report: Mapping[str, Any]) -> dict[str, list[tuple[float, float]]]:
    """CPU seconds, and loss above softmax in %, after each stage: means over the seeds, by variant."""
    lines = {}
    for variant in TITLES:
        runs = [points(run) for name, run in report["results"].items() if name.startswith(f"{MODEL}/{variant}/")]
        lines[variant] = [
            (statistics.fmean(seconds), statistics.fmean(quality))
            for seconds, quality in (zip(*stage, strict=True) for stage in zip(*runs, strict=True))
        ]
    return lines


def time_lines(report: Mapping[str, Any]) -> dict[str, list[tuple[int, float]]]:
    """Tokens, and milliseconds of a forward pass that looks both ways, by kind of attention."""
    return {
        name: sorted(
            (row["tokens"], row["forward_milliseconds"])
            for row in report["summary"]["rows"]
            if (row["attention"], row["direction"]) == (name, "bidirectional")
            and row["forward_milliseconds"] is not None
        )
        for name in ATTENTION
    }


def draw(recovery: Mapping[str, Any], long_inputs: Mapping[str, Any], path: Path) -> None:
    """Draws both panels.

    Args:
        recovery: `recovery.json`.
        long_inputs: `long_inputs.json`.
        path: PNG file to write.
    """
    from matplotlib import rc_context

    with rc_context({"font.size": _TEXT, "axes.titlesize": _TITLE, "axes.titleweight": "bold"}):
        figure = new_figure(_WIDTH, _HEIGHT)
        left, right = figure.subplots(1, 2)
        stages = stages_of(next(run for name, run in recovery["results"].items() if name.startswith(f"{MODEL}/mhla/")))
        _draw_recovery(left, recovery_lines(recovery), [_STAGES[stage] for stage in stages])
        _draw_times(right, time_lines(long_inputs))
        for axis in (left, right):
            axis.spines[["top", "right"]].set_visible(False)
            axis.grid(alpha=0.25)
        machine = long_inputs["machine"]
        figure.supxlabel(
            f"Left: the demo's video model, {recovery['machine']}, {recovery['date']}. "
            f"Right: one attention operator, {machine['device']}, {machine['date']}.",
            fontsize=_SMALL,
            color=_GREY,
        )
        figure.get_layout_engine().set(wspace=0.06, h_pad=0.08)
        save_figure(figure, path)


def _draw_recovery(axis: Any, lines: Mapping[str, list[tuple[float, float]]], stages: list[str]) -> None:
    from matplotlib.ticker import NullLocator, PercentFormatter

    for variant, line in lines.items():
        seconds, quality = zip(*line, strict=True)
        axis.plot(seconds, quality, color=_COLORS[variant], marker="o", linewidth=2.5, markersize=7)
        _label(axis, f"{TITLES[variant]}  +{quality[-1]:.1f} %", line[-1], _COLORS[variant])
    # The stages are named at the highest line.
    highest = max(lines.values(), key=lambda line: line[-1][1])
    for place, stage in zip(highest[:-1], stages):
        _label(axis, stage, place, _GREY, offset=(10, 7), fontsize=_SMALL, fontweight="normal")
    last = max(line[-1][0] for line in lines.values())
    best = min(line[-1][1] for line in lines.values())
    axis.set(
        yscale="log",
        xlim=(-0.04 * last, 1.9 * last),
        xlabel="training, seconds on one CPU core",
        ylabel="loss above softmax",
    )
    axis.set_title(
        f"With a window, a small video model comes to\n{best:.0f} % above softmax's loss in {last:.0f} seconds",
        loc="left",
    )
    axis.set_yticks([3, 10, 30, 100, 300])
    axis.yaxis.set_major_formatter(PercentFormatter(decimals=0))
    axis.yaxis.set_minor_locator(NullLocator())
    axis.set_xticks([tick for tick in range(0, 1000, 50) if tick <= last + 10])


def _draw_times(axis: Any, lines: Mapping[str, list[tuple[int, float]]]) -> None:
    from matplotlib.ticker import FuncFormatter, NullLocator

    for name, line in lines.items():
        tokens, milliseconds = zip(*line, strict=True)
        axis.plot(tokens, milliseconds, color=_COLORS[name], marker="o", linewidth=2.5, markersize=7)
        growth = 2 ** statistics.linear_regression(*zip(*_logarithms(line[-_GROWTH_POINTS:]))).slope
        if name == "softmax":
            _label(axis, "softmax", line[-1], _COLORS[name], offset=(9, 8))
            slope = f"{growth:.1f} × as long for\ntwice the tokens"
            _label(axis, slope, line[-1], _COLORS[name], offset=(9, -17), fontsize=_SMALL)
        else:
            # These end close to each other.
            offset = (9, 11 if name == "mhla" else -7)
            _label(axis, f"{ATTENTION[name]}  {growth:.1f} ×", line[-1], _COLORS[name], offset=offset)
    softmax, mhla = dict(lines["softmax"]), dict(lines["mhla"])
    longest = max(softmax.keys() & mhla.keys())
    above, below = softmax[longest], mhla[longest]
    arrow = {"arrowstyle": "<->", "color": _GREY, "linewidth": 1.5, "shrinkA": 8, "shrinkB": 8}
    axis.annotate("", (longest, below), xytext=(longest, above), arrowprops=arrow)
    ratio = round(above / below, -1 if above > 100 * below else 0)
    _label(axis, f"{ratio:.0f} ×", (longest, (above * below) ** 0.5), "black", fontsize=20)
    axis.set(xscale="log", yscale="log", xlabel="tokens", ylabel="time of attention, forward")
    axis.set_title(f"One operator, one CPU core: 1/{ratio:.0f}\nof softmax's time at {longest:,} tokens", loc="left")
    ticks = sorted({tokens for line in lines.values() for tokens, _ in line})[::-2][::-1]
    axis.set_xlim(right=5 * ticks[-1])
    axis.set_xticks(ticks, [f"{tick // 1024}K" if tick >= 1024 else str(tick) for tick in ticks])
    axis.xaxis.set_minor_locator(NullLocator())
    axis.yaxis.set_minor_locator(NullLocator())
    axis.yaxis.set_major_formatter(FuncFormatter(_duration))


def _logarithms(line: list[tuple[int, float]]) -> list[tuple[float, float]]:
    return [(math.log(tokens), math.log(milliseconds)) for tokens, milliseconds in line]


def _label(axis: Any, text: str, place: tuple[float, float], color: str, **options: Any) -> None:
    """Text to the right of a point."""
    options = {"offset": (9, 0), "fontweight": "bold", **options}
    axis.annotate(
        text, place, xytext=options.pop("offset"), textcoords="offset points", va="center", color=color, **options
    )


def _duration(milliseconds: float, _: int) -> str:
    return f"{milliseconds / 1e3:g} s" if milliseconds >= 1e3 else f"{milliseconds:g} ms"


def main(arguments: list[str] | None = None) -> None:
    """Draws the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS, help="directory of long_inputs.json")
    parser.add_argument("--image", type=Path, default=IMAGE, help="PNG file to write")
    options = parser.parse_args(arguments)
    # Recoveries take longest and are often left as they are.
    recovery = next(file for file in (options.results / "recovery.json", RESULTS / "recovery.json") if file.is_file())
    draw(
        read_json(recovery, "the recoveries:"),
        read_json(options.results / "long_inputs.json", "the measurement of long inputs:"),
        options.image,
    )
    print(f"wrote {options.image}")


if __name__ == "__main__":
    main()
