# SPDX-License-Identifier: Apache-2.0
"""The demo: a small Wan pipeline of moving handwritten digits, converted to MHLA, recovered and compared.

Names are loaded on first use, so that the command line reads the options quickly.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..utils.imports import lazy_names


_PUBLIC_NAMES = {
    "DemoConfig": "config",
    "MovingDigits": ".training.data.digits",
    "MovingDigitsConfig": ".training.data.digits",
    "PretrainingConfig": "pretraining",
    "base_pipeline_directory": "config",
    "pretrain": "pretraining",
    "run_demo": "runner",
}

__all__ = [
    "DemoConfig",
    "MovingDigits",
    "MovingDigitsConfig",
    "PretrainingConfig",
    "base_pipeline_directory",
    "pretrain",
    "run_demo",
]

if TYPE_CHECKING:
    from ..training.data.digits import MovingDigits, MovingDigitsConfig
    from .config import DemoConfig, base_pipeline_directory
    from .pretraining import PretrainingConfig, pretrain
    from .runner import run_demo


__getattr__, __dir__ = lazy_names(__name__, _PUBLIC_NAMES)
