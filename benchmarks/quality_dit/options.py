# SPDX-License-Identifier: Apache-2.0
"""Options of the comparison, and its settings."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any


VARIANTS = ("softmax", "linear", "mhla", "mhla_cpe_gate")
"""Kinds of attention to compare; `linear` is MHLA with a single block."""


@dataclass(frozen=True, kw_only=True)
class QualityOptions:
    """Options that decide the figures, besides the machine.

    Every variant of a seed starts from the same weights and sees the same images, classes, timesteps and noise in
    the same order. Nothing is chosen for one variant.

    Args:
        image_size: Side in pixels that the 8x8 scans are enlarged to.
        patch_size: Side of a token in pixels.
        hidden_size: Width of the model.
        layers: Number of transformer blocks.
        heads: Number of attention heads.
        blocks: Number of MHLA blocks along each axis of the token grid.
        lepe_kernel: Width of the convolution on the values of `mhla_cpe_gate`.
        steps: Training steps.
        batch_size: Images per step.
        matrix_learning_rate: Peak learning rate of Muon, which trains the matrices of the transformer blocks.
        learning_rate: Peak learning rate of AdamW, which trains everything else.
        warmup_steps: Steps in which both rise to the peak; then they fall to zero along a cosine.
        flow_shift: Shift of the noise levels of training and sampling towards 1; see `shift_sigmas`.
        class_dropout: Share of classes replaced by none in training, for guidance.
        seeds: One training of each variant for each of them.
        held_out_draws: Noise levels and noises for each held-out image.
        sampling_steps: Euler steps.
        guidance_scale: Guidance of the images of the grid; the Fréchet distance is of samples without guidance.
        dtype: `"float32"`, or `"bfloat16"` for autocasting; weights are float32.

    Raises:
        ValueError: If a number is out of its range, or a name unknown.
    """

    image_size: int = 32
    patch_size: int = 2
    hidden_size: int = 64
    layers: int = 4
    heads: int = 4
    blocks: int = 4
    lepe_kernel: int = 3
    steps: int = 550
    batch_size: int = 8
    matrix_learning_rate: float = 8e-3
    learning_rate: float = 4e-3
    warmup_steps: int = 20
    flow_shift: float = 3.0
    class_dropout: float = 0.1
    seeds: tuple[int, ...] = (0, 1, 2)
    held_out_draws: int = 2
    sampling_steps: int = 12
    guidance_scale: float = 1.5
    dtype: str = "float32"

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1.")
        if not 1 <= self.guidance_scale < math.inf:
            raise ValueError(f"guidance_scale={self.guidance_scale} must be finite and at least 1, which is none.")
        if not self.seeds or len(set(self.seeds)) != len(self.seeds) or min(self.seeds) < 0:
            raise ValueError(f"seeds={self.seeds} must be different numbers of at least 0.")

    @property
    def tokens_per_side(self) -> int:
        """Tokens along each axis."""
        return self.image_size // self.patch_size

    def mhla(self, variant: str) -> dict[str, Any] | None:
        """The MHLA options of a variant; None for softmax."""
        blocks = {"blocks": [self.blocks, self.blocks]}
        options: dict[str, dict[str, Any] | None] = {
            "softmax": None,
            "linear": {"blocks": [1, 1]},
            "mhla": blocks,
            "mhla_cpe_gate": {**blocks, "lepe_kernel": self.lepe_kernel, "output_gate": True},
        }
        return options[variant]


SETTINGS = {
    "small": QualityOptions(),
    "large": QualityOptions(
        image_size=64,
        hidden_size=192,
        layers=12,
        heads=6,
        steps=4000,
        batch_size=64,
        matrix_learning_rate=2e-3,
        learning_rate=1e-3,
        warmup_steps=200,
        flow_shift=6.0,
        held_out_draws=16,
        sampling_steps=50,
        dtype="bfloat16",
    ),
    "smoke": QualityOptions(
        image_size=16,
        hidden_size=16,
        layers=1,
        heads=2,
        blocks=2,
        steps=2,
        batch_size=4,
        warmup_steps=1,
        seeds=(0, 1),
        held_out_draws=1,
        sampling_steps=2,
    ),
}
"""`small` is for two CPU cores and seven minutes, `large` for a GPU; `smoke` shows that everything runs."""
