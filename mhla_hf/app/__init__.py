# SPDX-License-Identifier: Apache-2.0
"""A web application that compares MHLA with the original attention.

Names are loaded when first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..utils.imports import lazy_names


if TYPE_CHECKING:
    from .limits import Limits as Limits
    from .serving import create_app as create_app
    from .serving import serve as serve
    from .space import export_space as export_space

__getattr__, __dir__, __all__ = lazy_names(__name__)
