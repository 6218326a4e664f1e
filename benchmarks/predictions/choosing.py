# SPDX-License-Identifier: Apache-2.0
"""The tables of docs/choosing.md: what options cost at the Wan shape, and what they recover on small models.

What kernels compute is predicted as in docs/kernels.md. What torch computes is counted in readings and writings of a
tensor as large as the queries, by its operations one after the other, or with chains of elementwise ones fused, as
`torch.compile` does. The rest of the model is what was measured.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mhla_hf.benchmarks.shapes import SHAPES

from .stages import MEMORY_RATE, PRODUCT_RATES, Problem, Stage, fused_forward, hedgehog_forward


RECOVERY = Path(__file__).resolve().parents[1] / "results" / "recovery.json"

# Wan2.1-1.3B, 31,500 tokens, bfloat16, on an H200: with softmax by cuDNN, and without any token mixing.
SOFTMAX_SECONDS, REST_SECONDS, LAYERS = 0.572, 0.219, 30

_WAN = SHAPES["wan"]
_TENSOR = 2 * _WAN.batch * _WAN.tokens * _WAN.heads * _WAN.width


@dataclass(frozen=True, kw_only=True)
class TorchPart:
    """A part of a layer that torch computes.

    Attributes:
        title: Name in tables.
        eager: Readings and writings of tokens, operation by operation.
        compiled: The same with elementwise operations fused.
        products: Operations of matrix products.
    """

    title: str
    eager: float
    compiled: float
    products: float = 0.0

    def seconds(self, compiled: bool) -> float:
        """Least time."""
        moved = (self.compiled if compiled else self.eager) * _TENSOR
        return max(moved / MEMORY_RATE, self.products / PRODUCT_RATES["bf16"])


def _window_products(seen: int) -> float:
    return 4.0 * _WAN.rows * _WAN.tokens * seen * _WAN.width


# A window sees queries and keys after norm and rotation, which a kernel writes. In the end another one adds up MHLA,
# the window and LePE.
_BEFORE, _SUM = 4.0, 3.0
# Scores of the cross window: 21 places of 9 tokens and the 8 blocks around, for each token and head of 128 channels.
_SCORES = (21 * 9 + 8 * 9) / 128

PARTS: dict[str, TorchPart] = {
    # A copy with channels first, the convolution, and a sum, which beside a window reads one tensor more.
    "lepe": TorchPart(title="LePE of 3 × 3 × 3", eager=2 + 2 + 3, compiled=2 + 2 + 2),
    "lepe beside a window": TorchPart(title="LePE beside a window", eager=2 + 2 + 1, compiled=2 + 2 + 1),
    # q, k and v in blocks, attention, its output back in order.
    "block": TorchPart(
        title='window `"block"` (21, 3, 3)',
        eager=_BEFORE + 6 + 4 + 2 + _SUM,
        compiled=_BEFORE + 6 + 4 + 2 + _SUM,
        products=_window_products(189),
    ),
    # Padded and by place: scaled queries, keys and values, and keys and values of the 8 blocks around, 40; two
    # products each for the scores and with the values, 27; scores joined and masked, softmax, 14; the rest
    # is copies of transposed tensors and sums.
    "cross": TorchPart(
        title='window `"cross"` (1, 3, 3)',
        eager=_BEFORE + 100 + _SUM,
        compiled=_BEFORE + 6 + 18 + 27 + 3 * _SCORES + 2 + _SUM,
        products=_window_products(21 * 9 + 8 * 9),
    ),
}
"""By the name in a [`Choice`]."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Options between which a user chooses.

    Attributes:
        title: Name in the table.
        hedgehog: Whether the feature map is learned, with RoPE before it; otherwise fixed, with RoPE after it.
        per_head: Whether every head has mixing weights of its own.
        window: A key of [`PARTS`], or None.
        lepe: Whether there is a convolution of the values.
        blocks: Blocks along each axis in place of the shape's.
        measured: Variant of `benchmarks/recovery.py` that has these options, by model.
    """

    title: str
    hedgehog: bool
    per_head: bool
    window: str | None = None
    lepe: bool = True
    blocks: tuple[int, ...] | None = None
    measured: Mapping[str, str]

    def kernels(self) -> Problem:
        """What kernels compute of a layer."""
        features = 2 if self.hedgehog else 1
        # Before hedgehog features, rows are normed and rotated as a window has them.
        own = self.window is None or not self.hedgehog
        shape = replace(_WAN, blocks=self.blocks or _WAN.blocks)
        options = {"normalizer": "query", "gate": False, "norms": own, "rotary": own}
        return Problem(shape=shape, per_head=self.per_head, features=features, **options)

    def parts(self) -> list[TorchPart]:
        """What torch computes of a layer."""
        lepe = "lepe" if self.window is None else "lepe beside a window"
        return [PARTS[name] for name in (lepe if self.lepe else None, self.window) if name is not None]

    def kernel_seconds(self, cached: bool) -> float:
        """Least time of the kernels."""
        problem = self.kernels()
        return sum(problem.seconds(stage, False, cached) for stage in _kernels(problem))

    def layer_seconds(self, compiled: bool) -> float:
        """Least time of a layer between its projections; summaries go through memory."""
        return self.kernel_seconds(cached=False) + sum(part.seconds(compiled) for part in self.parts())

    def speedup(self, compiled: bool, softmax_layers: int = 0) -> float:
        """How many times as fast as the softmax model the whole model is, with some layers kept softmax."""
        own = (LAYERS - softmax_layers) * self.layer_seconds(compiled)
        kept = softmax_layers / LAYERS * (SOFTMAX_SECONDS - REST_SECONDS)
        return SOFTMAX_SECONDS / (REST_SECONDS + kept + own)


def _kernels(problem: Problem) -> list[Stage]:
    return hedgehog_forward(problem) if problem.features > 1 else fused_forward(problem)


def _choices() -> list[Choice]:
    found = []
    for ending, suffix, window, lepe in (
        (", no LePE", "_bare", None, False),
        ("", "", None, True),
        (", block window", "_block", "block", True),
        (", cross window", "_window", "cross", True),
    ):
        for hedgehog in (False, True):
            for per_head in (False, True):
                title = f"{'hedgehog' if hedgehog else 'ReLU'}, {'per head' if per_head else 'shared'}{ending}"
                variant = ("mhla" if hedgehog else "relu") + ("" if per_head else "_shared") + suffix
                measured = {"digits": {"mhla_window": "window"}.get(variant, variant)}
                if hedgehog and per_head and suffix in ("_bare", "_window"):
                    # Of texts, which have no LePE, the window is that of adjacent blocks.
                    measured["minilm"] = "mhla" if window is None else "window"
                found.append(
                    Choice(
                        title=title, hedgehog=hedgehog, per_head=per_head, window=window, lepe=lepe, measured=measured
                    )
                )
    found.append(Choice(title="exp, per head", hedgehog=False, per_head=True, measured={"digits": "exp"}))
    linear = {"digits": "linear", "minilm": "linear"}
    one_block = Choice(
        title="hedgehog, one block (linear attention)", hedgehog=True, per_head=True, blocks=(1, 1, 1), measured=linear
    )
    return [*found, one_block]


CHOICES: list[Choice] = _choices()
"""Every combination of feature map, mixing weights, LePE and window, plain ReLU first; and linear attention."""


def parts_table() -> str:
    """A table of what each part of a layer costs by itself."""
    lines = ["| part of a layer | computed by | MB | time, at best |", "|---|---|---|---|"]
    for title, features, per_head in (
        ("ReLU, shared mixing weights", 1, False),
        ("ReLU, mixing weights per head", 1, True),
        ("hedgehog, shared mixing weights", 2, False),
        ("hedgehog, mixing weights per head", 2, True),
    ):
        problem = Problem(shape=_WAN, normalizer="query", per_head=per_head, features=features, gate=False)
        stages = _kernels(problem)
        moved, cached = (sum(problem.memory(stage, False, part) for stage in stages) for part in (False, True))
        slow, fast = (sum(problem.seconds(stage, False, part) for stage in stages) for part in (False, True))
        lines.append(f"| {title} | kernels | {cached / 1e6:,.0f}–{moved / 1e6:,.0f} | {_range(fast, slow)} |")
    for part in PARTS.values():
        counts = [f"{count * _TENSOR / 1e6:,.0f}" for count in (part.compiled, part.eager)]
        moved = "–".join(dict.fromkeys(counts))
        lines.append(f"| {part.title} | torch | {moved} | {_range(part.seconds(True), part.seconds(False))} |")
    softmax = (SOFTMAX_SECONDS - REST_SECONDS) / LAYERS
    lines.append(f"| softmax over everything | torch | | {1e3 * softmax:.1f} ms, measured |")
    return "\n".join(lines)


def _range(least: float, most: float) -> str:
    texts = [f"{1e6 * value:.0f}" if most < 1e-3 else f"{1e3 * value:.2f}" for value in (least, most)]
    return f"{'–'.join(dict.fromkeys(texts))} {'µs' if most < 1e-3 else 'ms'}"


def choices_table(summary: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> str:
    """A table of all choices with their speed and what they recover.

    Args:
        summary: `summary` of `benchmarks/results/recovery.json`.
    """
    plain = CHOICES[0]
    lines = [
        "| options | layer | × plain ReLU | model, × softmax | two thirds of the layers | demo's Wan | MiniLM |",
        "|---|---|---|---|---|---|---|",
    ]
    for choice in CHOICES:
        seconds = [choice.layer_seconds(compiled) for compiled in (True, False)]
        ratios = [own / plain.layer_seconds(compiled) for own, compiled in zip(seconds, (True, False))]
        whole, hybrid = ([choice.speedup(compiled, kept) for compiled in (True, False)] for kept in (0, LAYERS // 3))
        cells = [
            choice.title,
            f"{_both([1e3 * value for value in seconds])} ms",
            *(_both(values) for values in (ratios, whole, hybrid)),
            _figure(summary, "digits", choice, "+{:.1f} %"),
            _figure(summary, "minilm", choice, "{:.3f}"),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _both(values: Sequence[float]) -> str:
    texts = [f"{value:.1f}" if value >= 10 else f"{value:.2f}" for value in values]
    return texts[0] if texts[0] == texts[1] else "–".join(sorted(texts, key=float))


def _figure(summary: Mapping[str, Any], model: str, choice: Choice, text: str) -> str:
    """Figure after the last stage, with its range over seeds where there are several."""
    row = summary.get(model, {}).get(choice.measured.get(model, ""))
    if row is None:
        return "–"
    last = [row[stage] for stage in ("converted", "calibrate", "match", "distill") if stage in row][-1]
    return text.format(last)


def recovery_summary() -> dict[str, Any]:
    """Means of the recoveries that were measured."""
    return json.loads(RECOVERY.read_text(encoding="utf-8"))["summary"]
