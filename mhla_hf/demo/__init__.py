# SPDX-License-Identifier: Apache-2.0
"""The demo: moving handwritten digits, a small Wan pipeline pretrained on them, and its life as an MHLA pipeline.

Names are loaded when first used, so that the command line can read the options quickly.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..utils.lazy import lazy_names


_PUBLIC_NAMES = {
    "DemoConfig": "config",
    "MovingDigits": "digits",
    "MovingDigitsConfig": "digits",
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
    from .config import DemoConfig, base_pipeline_directory
    from .digits import MovingDigits, MovingDigitsConfig
    from .pretraining import PretrainingConfig, pretrain
    from .runner import run_demo


__getattr__, __dir__ = lazy_names(__name__, _PUBLIC_NAMES)
