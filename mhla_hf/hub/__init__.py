# SPDX-License-Identifier: Apache-2.0
"""Sharing models: checks of directories, model cards, and pushing to the Hub."""

from typing import TYPE_CHECKING

from ..utils.lazy import lazy_names


if TYPE_CHECKING:
    from .checks import check_directory as check_directory
    from .metadata import card_data as card_data
    from .problems import Problem as Problem
    from .push import push_directory as push_directory

_PUBLIC_NAMES = {
    "Problem": "problems",
    "card_data": "metadata",
    "check_directory": "checks",
    "push_directory": "push",
}

__all__ = sorted(_PUBLIC_NAMES)

__getattr__, __dir__ = lazy_names(__name__, _PUBLIC_NAMES)
