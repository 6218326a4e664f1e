# SPDX-License-Identifier: Apache-2.0
"""A web application that compares MHLA with the original attention.

Names are loaded when first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..utils.imports import lazy_names


_PUBLIC_NAMES = {"Limits": "limits", "create_app": "serving", "export_space": "space", "serve": "serving"}

__all__ = ["Limits", "create_app", "export_space", "serve"]

if TYPE_CHECKING:
    from .limits import Limits
    from .serving import create_app, serve
    from .space import export_space


__getattr__, __dir__ = lazy_names(__name__, _PUBLIC_NAMES)
