# SPDX-License-Identifier: Apache-2.0
"""The picture at the top of the README: recovered quality, time of a whole model, and time of the operator.

    python -m benchmarks.overview

It reads `demo.json` and `long_inputs.json` of `benchmarks/results` and measures nothing. `demo.json` is the report of
one run of the demo, whose pictures `docs/scripts/make_images.py` draws. Times of the whole model are the paper's.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from PIL import Image
from PIL.PngImagePlugin import PngInfo

from benchmarks.recovery import COLORS, STAGES
from mhla_hf.demo.config import TITLES
from mhla_hf.utils.figures import new_figure, save_figure
from mhla_hf.utils.files import read_json


RESULTS = Path(__file__).resolve().parent / "results"
IMAGE = Path(__file__).resolve().parents[1] / "docs" / "images" / "overview.png"

LOSSES = "loss above softmax in percent"
"""Key of the text in a PNG file that holds what the picture shows of the demo; a test compares it with the README."""

PAPER_SECONDS = {"softmax": 166, "MHLA in two\nthirds of\nthe layers": 103, "linear": 82, "MHLA": 81}
"""Seconds for a video of 81 frames of 480 × 800 with Wan2.1-T2V-1.3B, from MHLA's paper (arXiv 2601.07832)."""

ATTENTION = {"softmax": "softmax", "mhla": "MHLA", "linear": "linear"}
"""Kinds of attention of `long_inputs.json` that the right panel shows."""

_COLORS = {**COLORS, "mhla_window": COLORS["window"], "softmax": "#444444"}
_GREY = "#666666"
_STAGES = {
    "converted": "converted",
    "calibrate": "calibrated",
    "match": "layers matched",
    "blockwise": "blocks matched",
    "distill": "distilled",
}
# Length whose times the title of the right panel gives.
_TOKENS = 8192
# The README shows 1,440 pixels on about 900: letters of 14 points are as large there as the text around.
_WIDTH, _HEIGHT = 12.0, 5.0
_TEXT, _SMALL = 12.5, 11


def recovery_lines(demo: Mapping[str, Any]) -> dict[str, list[tuple[float, float]]]:
    """CPU seconds so far, and loss above softmax in %, after the conversion and each stage, by copy of the demo."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for variant in ("mhla", "mhla_window", "linear"):
        copy, seconds = demo["variants"][variant], 0.0
        lines[variant] = []
        for stage in ("converted", *(stage for stage in STAGES if stage in copy["held_out"])):
            seconds += copy["cpu_seconds"][stage] if stage in STAGES else 0.0
            lines[variant].append((seconds, copy["held_out"][stage]["above_softmax_percent"]))
    return lines


def final_losses(demo: Mapping[str, Any]) -> dict[str, str]:
    """Loss above softmax after the last stage by copy, as pictures and README give it: `"+6.7"`."""
    return {variant: f"{line[-1][1]:+.1f}" for variant, line in recovery_lines(demo).items()}


def with_losses(path: Path, demo: Mapping[str, Any]) -> None:
    """Writes the losses that a picture shows into the PNG file itself."""
    information = PngInfo()
    information.add_text(LOSSES, " ".join(final_losses(demo).values()))
    image = Image.open(path)
    image.load()
    image.save(path, pnginfo=information, optimize=True)


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


def draw(demo: Mapping[str, Any], long_inputs: Mapping[str, Any], path: Path) -> None:
    """Draws the three panels.

    Args:
        demo: `demo.json`.
        long_inputs: `long_inputs.json`.
        path: PNG file to write.
    """
    from matplotlib import rc_context

    with rc_context({"font.size": _TEXT, "axes.titlesize": _TEXT, "axes.titleweight": "bold"}):
        figure = new_figure(_WIDTH, _HEIGHT)
        left, middle, right = figure.subplots(1, 3, width_ratios=[1.3, 0.8, 1])
        _draw_recovery(left, recovery_lines(demo), final_losses(demo))
        _draw_whole_model(middle)
        _draw_times(right, time_lines(long_inputs))
        for axis in (left, middle, right):
            axis.spines[["top", "right"]].set_visible(False)
            axis.grid(axis="x" if axis is middle else "both", alpha=0.25)
            axis.set_axisbelow(True)
        machine, own = long_inputs["machine"], demo["machine"]
        figure.supxlabel(
            f"Left: the demo's model of 1.3M parameters, two thirds of its layers converted, {own['device']}, "
            f"{own['date']}.\nMiddle: as MHLA's paper reports. Right: one head of width 64, float32, "
            f"{machine['device']}, {machine['threads']} threads, {machine['date']}.",
            fontsize=_SMALL,
            color=_GREY,
        )
        figure.get_layout_engine().set(wspace=0.06, h_pad=0.08)
        save_figure(figure, path)
    with_losses(path, demo)


def _draw_recovery(axis: Any, lines: Mapping[str, list[tuple[float, float]]], ends: Mapping[str, str]) -> None:
    from matplotlib.ticker import NullLocator, PercentFormatter

    for variant, line in lines.items():
        seconds, quality = zip(*line, strict=True)
        axis.plot(seconds, quality, color=_COLORS[variant], marker="o", linewidth=2.5, markersize=7)
        _label(axis, TITLES[variant], line[-1], _COLORS[variant])
    # The stages are named at the highest line.
    highest = max(lines.values(), key=lambda line: line[-1][1])
    for place, stage in zip(highest[:-1], _STAGES.values()):
        _label(axis, stage, place, _GREY, offset=(10, 7), fontsize=_SMALL, fontweight="normal")
    last = max(line[-1][0] for line in lines.values())
    axis.set(
        yscale="log",
        xlim=(-0.04 * last, 1.75 * last),
        xlabel="training, seconds on one CPU core",
        ylabel="loss above softmax",
    )
    axis.set_title(
        f"Loss above softmax after recovery:\nMHLA {ends['mhla']} %, "
        f"with a window {ends['mhla_window']} %,\nlinear attention {ends['linear']} %",
        loc="left",
    )
    axis.set_yticks([3, 10, 30, 100, 300])
    axis.yaxis.set_major_formatter(PercentFormatter(decimals=0))
    axis.yaxis.set_minor_locator(NullLocator())
    axis.set_xticks([tick for tick in range(0, 1000, 50) if tick <= last + 10])


def _draw_whole_model(axis: Any) -> None:
    names, colors = list(PAPER_SECONDS), [_COLORS[name.split()[0].lower()] for name in PAPER_SECONDS]
    bars = axis.barh(names, list(PAPER_SECONDS.values()), color=colors, height=0.62)
    # The other third of the layers stays softmax.
    bars[1].set(hatch="//", edgecolor="white")
    axis.bar_label(bars, [f"{seconds} s" for seconds in PAPER_SECONDS.values()], padding=4, fontweight="bold")
    axis.invert_yaxis()
    axis.tick_params(axis="y", length=0)
    axis.set(xlabel="seconds for a video", xlim=(0, 1.22 * max(PAPER_SECONDS.values())))
    axis.set_title("Whole model (paper):\nWan2.1-1.3B, 81 frames\nof 480 × 800", loc="left")


def _draw_times(axis: Any, lines: Mapping[str, list[tuple[int, float]]]) -> None:
    from matplotlib.ticker import FuncFormatter, NullLocator

    for name, line in lines.items():
        tokens, milliseconds = zip(*line, strict=True)
        axis.plot(tokens, milliseconds, color=_COLORS[name], marker="o", linewidth=2.5, markersize=6)
        # MHLA and linear attention end close to each other.
        place, offset, side = {
            "softmax": (line[-1], (-9, 0), "right"),
            "mhla": (line[-1], (0, 14), "center"),
            "linear": (line[len(line) // 2], (6, -16), "left"),
        }[name]
        _label(axis, ATTENTION[name], place, _COLORS[name], offset=offset, horizontalalignment=side)
    axis.set(xscale="log", yscale="log", xlabel="tokens", ylabel="forward pass")
    softmax, mhla = dict(lines["softmax"])[_TOKENS], dict(lines["mhla"])[_TOKENS]
    axis.set_title(
        f"Attention alone, measured\nat {_TOKENS:,} tokens: softmax\n{softmax:.0f} ms, MHLA {mhla:.1f} ms",
        loc="left",
    )
    ticks = sorted({tokens for line in lines.values() for tokens, _ in line})[::3]
    axis.set_xticks(ticks, [f"{tick // 1024}K" for tick in ticks])
    axis.margins(x=0.12)
    axis.set_ylim(top=5 * max(milliseconds for line in lines.values() for _, milliseconds in line))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.yaxis.set_minor_locator(NullLocator())
    axis.yaxis.set_major_formatter(FuncFormatter(_duration))


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
    draw(
        read_json(RESULTS / "demo.json", "the demo's report:"),
        read_json(options.results / "long_inputs.json", "the measurement of long inputs:"),
        options.image,
    )
    print(f"wrote {options.image}")


if __name__ == "__main__":
    main()
