# SPDX-License-Identifier: Apache-2.0
"""Time of attention against the number of tokens on this machine, measured once with the sizes of the model."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ..bench import OperatorShape, attend, make_inputs, time_in_rounds
from ..training.matching.layers import mhla_layers
from ..utils.figures import figure_image, new_figure
from ..utils.machine import machine_facts
from .models import Comparison
from .work import Control, Progress


# Softmax attention over more takes too long on the one, or too much memory on the other.
_MOST_TOKENS = {"cpu": 8192, "cuda": 65536}
_LEAST_TOKENS = 256
_SECONDS = 2.0
_STYLES = {"softmax": ("#444444", "softmax"), "linear": ("#d95f02", "linear"), "mhla": ("#1f77b4", "MHLA")}


@dataclass(frozen=True)
class SpeedResult:
    """Times of one attention layer.

    Attributes:
        tokens: Numbers of tokens.
        milliseconds: Times at each of them, by kind of attention.
        caption: What was measured, and where.
    """

    tokens: Sequence[int]
    milliseconds: Mapping[str, Sequence[float]]
    caption: str

    def table(self) -> str:
        """The caption and a table of the times as Markdown; the ratio is that of softmax to MHLA."""
        rows = zip(self.tokens, *(self.milliseconds[name] for name in _STYLES), strict=True)
        lines = [
            f"| {tokens:,} | {softmax:,.2f} | {linear:,.2f} | {mhla:,.2f} | {softmax / mhla:,.1f} |"
            for tokens, softmax, linear, mhla in rows
        ]
        head = f"| tokens | {' | '.join(label for _, label in _STYLES.values())} | ratio |"
        return "\n".join(
            [f"{self.caption} Milliseconds, and softmax over MHLA:", "", head, "|---:|---:|---:|---:|---:|", *lines]
        )

    def picture(self) -> Any:
        """The curves, as a PIL image."""
        figure = new_figure(6.4, 4.2)
        axis = figure.subplots()
        for name, (color, label) in _STYLES.items():
            axis.plot(self.tokens, self.milliseconds[name], color=color, marker="o", label=label)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xticks(self.tokens, [f"{tokens:,}" for tokens in self.tokens])
        axis.set_xticks([], minor=True)
        axis.yaxis.set_major_formatter(lambda value, _: f"{value:,.6g}")
        axis.set(xlabel="tokens", ylabel="milliseconds, one layer forward")
        axis.grid(alpha=0.3)
        axis.legend(frameon=False)
        return figure_image(figure)


class SpeedMeter:
    """Measures the attention of a model's layers once, for all visitors.

    Args:
        comparison: Its MHLA model gives heads, width and blocks.
        most_tokens: Longest sequence; by default one that suits the device.
        seconds: Approximate time for each length.
    """

    def __init__(self, comparison: Comparison, most_tokens: int | None = None, seconds: float = _SECONDS) -> None:
        self._comparison = comparison
        self._most = most_tokens or _MOST_TOKENS[comparison.device.type]
        self._seconds = seconds
        self._lock = threading.Lock()
        self.result: SpeedResult | None = None

    def measure(self, control: Control) -> SpeedResult:
        """Measures, or returns what was measured before.

        Args:
            control: Gets the progress; stops the measurement between two lengths.
        """
        with self._lock, self._comparison.lock:
            if self.result is None:
                self.result = self._measured(control)
            return self.result

    def shapes(self) -> list[OperatorShape]:
        """Sizes to measure: the model's own heads and blocks at growing lengths."""
        mhla = mhla_layers(next(iter(self._comparison.mhla_models().values())))[0].mhla
        config = mhla.config
        common: dict[str, Any] = {"batch": 1, "heads": mhla.num_heads, "width": mhla.head_dim}
        if config.causal or len(mhla.blocks) == 1:
            chunk = config.block_size[0] if config.block_size else 64
            lengths = [_LEAST_TOKENS << power for power in range(12)]
            kind: dict[str, Any] = {"chunk": chunk} if config.causal else {}
            return [
                OperatorShape(grid=(length,), **kind, **common)
                for length in lengths
                if length <= self._most and length >= chunk
            ]
        grid = list(mhla.blocks)
        found: list[OperatorShape] = []
        while math.prod(grid) <= self._most or not found:
            if math.prod(grid) >= min(_LEAST_TOKENS, self._most):
                found.append(OperatorShape(grid=tuple(grid), blocks=tuple(mhla.blocks), **common))
            # Height and width in turns.
            grid[-1 if grid[-1] <= grid[-2] else -2] *= 2
        return found

    def _measured(self, control: Control) -> SpeedResult:
        shapes = self.shapes()
        device = self._comparison.device
        operator = "mhla-triton" if device.type == "cuda" else "mhla-torch"
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        times: dict[str, list[float]] = {name: [] for name in _STYLES}
        for done, shape in enumerate(shapes):
            control.check()
            control.progress = Progress(f"Measuring attention over {shape.tokens:,} tokens", done, len(shapes))
            inputs = make_inputs(shape, dtype, device, seed=0)
            names = zip(_STYLES, ("softmax", "linear", operator), strict=True)
            runs = {kind: partial(attend, name, inputs, shape, "query") for kind, name in names}
            for kind, figures in time_in_rounds(runs, device, seconds=self._seconds).items():
                if isinstance(figures, str):
                    raise ValueError(f"{kind} attention could not be measured: {figures}")
                times[kind].append(figures["milliseconds"])
        machine = machine_facts(device)
        heads = f"{shapes[0].heads} heads of width {shapes[0].width}"
        caption = f"One attention layer of {heads}, {str(dtype).removeprefix('torch.')}, on {machine['device']}"
        if device.type == "cpu":
            caption += f" with {machine['threads']} of its threads"
        return SpeedResult([shape.tokens for shape in shapes], times, f"{caption}, {machine['date']}.")
