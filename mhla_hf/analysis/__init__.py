# SPDX-License-Identifier: Apache-2.0
"""What MHLA layers attend to: attention matrices, their statistics, and pictures of them.

Names are loaded when first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..utils.lazy import lazy_names


_PUBLIC_NAMES = {"mixing_figure": "plots", "plot_mixing": "plots"}

__all__ = ["mixing_figure", "plot_mixing"]

if TYPE_CHECKING:
    from .plots import mixing_figure, plot_mixing


__getattr__, __dir__ = lazy_names(__name__, _PUBLIC_NAMES)
