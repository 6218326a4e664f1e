# SPDX-License-Identifier: Apache-2.0
"""The demo: moving handwritten digits, a small Wan pipeline pretrained on them, and its life as an MHLA pipeline.

Names are loaded when first used, so that the command line can read the options quickly.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any


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


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC_NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_PUBLIC_NAMES[name]}"), name)
    globals()[name] = value
    return value
