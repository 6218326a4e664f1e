# SPDX-License-Identifier: Apache-2.0
"""The demo: a small Wan pipeline of moving handwritten digits, converted to MHLA, recovered and compared.

Names are loaded on first use, so that the command line reads the options quickly.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..utils.imports import lazy_names


if TYPE_CHECKING:
    from ..training.data.digits import MovingDigits as MovingDigits
    from ..training.data.digits import MovingDigitsConfig as MovingDigitsConfig
    from .config import DemoConfig as DemoConfig
    from .config import base_pipeline_directory as base_pipeline_directory
    from .pretraining import PretrainingConfig as PretrainingConfig
    from .pretraining import pretrain as pretrain
    from .runner import run_demo as run_demo

__getattr__, __dir__, __all__ = lazy_names(__name__)
