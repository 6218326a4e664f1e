# SPDX-License-Identifier: Apache-2.0
"""What a check of a LoRA found."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from .targets import KINDS, Target


@dataclass(frozen=True)
class ModuleChange:
    """How much a LoRA changes a module's weight W.

    Attributes:
        kind: What the module is part of, one of `KINDS`.
        layer: Number of its layer; `None` outside of layers.
        relative_change: Norm of the change, relative to that of W (Frobenius).
        change: Norm of the change.
        weight: Norm of W.
    """

    kind: str
    layer: int | None
    relative_change: float
    change: float
    weight: float


@dataclass(frozen=True)
class ProbeResult:
    """What the LoRA does to the output for one input.

    Attributes:
        noise_level: From 0 to 1; `None` for models without noise.
        mhla: Size of the change of the MHLA model's output, relative to the output.
        original: The same of the original.
        ratio: Size of the MHLA model's change relative to that of the original's.
        cosine: Cosine between the two changes.
    """

    noise_level: float | None
    mhla: float
    original: float | None = None
    ratio: float | None = None
    cosine: float | None = None


@dataclass
class LoraReport:
    """What a check of a LoRA found.

    Attributes:
        model: What was checked against, as it was named.
        component: The model's name in its pipeline.
        lora: The LoRA's file.
        weights: Where each of its weights goes, by name; [`Target`].
        others: Weights in the file for other models of a pipeline.
        modules: How much each module is changed, by name.
        original: Where the softmax original was found, or why there is none.
        has_original: Whether outputs were compared with it.
        grid: Tokens of the probes along each axis; `None` for models of transformers.
        probes: What the LoRA does to outputs.
    """

    model: str
    component: str
    lora: str
    weights: dict[str, Target]
    others: tuple[str, ...] = ()
    modules: dict[str, ModuleChange] = field(default_factory=dict)
    original: str = ""
    has_original: bool = False
    grid: tuple[int, ...] | None = None
    probes: list[ProbeResult] = field(default_factory=list)

    @property
    def counts(self) -> dict[str, int]:
        """How many weights go where."""
        kinds = [target.kind for target in self.weights.values()]
        return {kind: kinds.count(kind) for kind in KINDS}

    def relative_change(self, kinds: tuple[str, ...], layer: int | None = None) -> float | None:
        """Norm of the change relative to that of the weights, of all modules of some kinds together.

        Args:
            kinds: Some of `KINDS`.
            layer: Only of this layer.

        Returns:
            `None` where no such module is changed.
        """
        chosen = [
            module
            for module in self.modules.values()
            if module.kind in kinds and (layer is None or module.layer == layer)
        ]
        if not chosen:
            return None
        change, weight = (sum(getattr(module, name) ** 2 for module in chosen) ** 0.5 for name in ("change", "weight"))
        return change / weight if weight else None

    def to_dict(self) -> dict[str, Any]:
        """Returns plain JSON types."""
        return {**asdict(self), "counts": self.counts, "others": list(self.others)}
