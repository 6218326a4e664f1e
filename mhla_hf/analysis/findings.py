# SPDX-License-Identifier: Apache-2.0
"""What an inspection of a model found, layer by layer."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

from .mixing import MixingSummary, mean_distance


@dataclass
class AttentionSummary:
    """Statistics of a layer's attention matrices on the probe.

    Attributes:
        tokens: Tokens of a sample (the most, where samples differ).
        rows: Query tokens that the matrices were computed for, of one sample; ranks are at most this.
        samples: Number of samples.
        grid: Token grid of the first sample.
        blocks: Its blocks.
        rank_bound: Bound of the rank of MHLA: min(rows, Σ_b min(n_b, d)); `None` where there is none below `rows`, as
            for causal attention and under a softmax window.
        linear_bound: Bound of the rank of linear attention; `None` for causal attention.
        statistics: Mean and standard deviation over samples and heads, by kind of attention and statistic, see
            [`attention_statistics`][mhla_hf.analysis.attention_statistics].
    """

    tokens: int = 0
    rows: int = 0
    samples: int = 0
    grid: tuple[int, ...] = ()
    blocks: tuple[int, ...] = ()
    rank_bound: int | None = None
    linear_bound: int | None = None
    statistics: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)


@dataclass
class LayerInspection:
    """One attention layer.

    Attributes:
        index: Number among the model's self-attention layers.
        name: Name of the attention module.
        kind: `"mhla"`, or what the host model computes there.
        original: What the host model computes where it is not MHLA: `"softmax"`, or `"linear"` as SANA.
        mixing: What the mixing weights have learned; `None` for other layers.
        attention: Statistics on the probe; `None` without one.
        gains: Mean gains of MHLA and of the softmax window; `None` without a window.
        output_error: Mean and standard deviation over samples of ‖y − y₀‖ / ‖y₀‖: the layer's output against that of
            the base model's layer, for the inputs that it has there. `None` without a base model.
    """

    index: int
    name: str
    kind: str
    original: str = "softmax"
    mixing: MixingSummary | None = None
    attention: AttentionSummary | None = None
    gains: tuple[float, float] | None = None
    output_error: dict[str, float] | None = None

    def to_dict(self) -> dict[str, Any]:
        """Returns plain JSON types, without the mixing weights themselves."""
        facts: dict[str, Any] = {
            "index": self.index,
            "name": self.name,
            "kind": self.kind,
            "original": self.original,
        }
        if self.mixing is None:
            return facts
        summary = self.mixing
        facts["mixing"] = {
            "blocks": list(summary.layout.blocks),
            "grid": None if summary.grid is None else list(summary.grid),
            "prefix_tokens": summary.layout.num_prefix_tokens,
            "movement": summary.movement,
            "pattern_movement": summary.pattern_movement,
            "negative_share": summary.negative_share,
            "row_sum": summary.row_sum,
            "mean_distance": _finite(mean_distance(summary.matrix, summary.layout)),
            "initial_mean_distance": _finite(mean_distance(summary.initial, summary.layout)),
            "decay": asdict(summary.decay),
            "initial_decay": asdict(summary.initial_decay),
        }
        facts["attention"] = None if self.attention is None else asdict(self.attention)
        facts["gains"] = None if self.gains is None else list(self.gains)
        facts["output_error"] = self.output_error
        return facts


@dataclass
class ModelInspection:
    """One model.

    Attributes:
        component: Its name in the pipeline.
        class_name: Its class.
        options: Its MHLA options.
        layers: All self-attention layers, MHLA or not.
        batches: Batches of the probe.
        output_error: Mean and standard deviation over batches of the relative error of the whole model's output
            against the base model's; `None` without a base model.
        notes: What was left out, and why.
    """

    component: str
    class_name: str
    options: dict[str, Any]
    layers: list[LayerInspection]
    batches: int = 0
    output_error: dict[str, float] | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def mhla_layers(self) -> list[LayerInspection]:
        """Its MHLA layers."""
        return [layer for layer in self.layers if layer.mixing is not None]

    def to_dict(self) -> dict[str, Any]:
        """Returns plain JSON types, without the mixing weights themselves."""
        return {
            "component": self.component,
            "class": self.class_name,
            "options": self.options,
            "layers": [layer.to_dict() for layer in self.layers],
            "batches": self.batches,
            "output_error": self.output_error,
            "notes": self.notes,
        }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
