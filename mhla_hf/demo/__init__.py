# SPDX-License-Identifier: Apache-2.0
"""The demo: a small Wan pipeline of moving handwritten digits, converted to MHLA, recovered and compared.

Names are loaded when first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..utils import lazy_names


if TYPE_CHECKING:
    from ..training.data.digits import MovingDigits as MovingDigits
    from ..training.data.digits import MovingDigitsConfig as MovingDigitsConfig
    from .config import DemoConfig as DemoConfig
    from .config import base_pipeline_directory as base_pipeline_directory
    from .run import run_demo as run_demo

__getattr__, __dir__, __all__ = lazy_names(__name__)
