# SPDX-License-Identifier: Apache-2.0
"""The models of the MHLA paper by name, with fresh weights: classes of transformers and diffusers, none of our own."""

from .building import from_preset
from .table import PRESETS, Preset


__all__ = ["PRESETS", "Preset", "from_preset"]
