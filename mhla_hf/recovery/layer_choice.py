# SPDX-License-Identifier: Apache-2.0
"""Which layers stay softmax: those that MHLA comes least close to after calibration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction

from torch import nn

from .calibration import calibrate_model
from .layers import Batch


def layer_errors(model: nn.Module, batches: Sequence[Batch]) -> list[float]:
    """Error of each MHLA layer's output after calibration, in the order of the layers; the model is calibrated."""
    return [layer.error_after for layer in calibrate_model(model, batches).layers]


def choose_layers(errors: Mapping[int, float], share: str, num_layers: int) -> list[int]:
    """The layers that become MHLA.

    Args:
        errors: Error of each layer that can be MHLA, by its index.
        share: Of all layers, such as `3/4`.
        num_layers: How many layers the model has; those that cannot be MHLA count as softmax.

    Returns:
        Indices, at least one.

    Raises:
        ValueError: If the share is not above 0 and at most 1.
    """
    part, _, whole = share.partition("/")
    if int(whole) == 0 or not 0 < Fraction(int(part), int(whole)) <= 1:
        raise ValueError(f"layers=auto:{share} must be a fraction above 0 and at most 1.")
    count = max(1, round(Fraction(int(part), int(whole)) * num_layers))
    best = sorted(errors, key=lambda index: (errors[index], index))
    return sorted(best[:count])
