# SPDX-License-Identifier: Apache-2.0
"""Sharing models: checks of directories, model cards, and pushing to the Hub."""

from typing import TYPE_CHECKING

from ..utils import lazy_names


if TYPE_CHECKING:
    from .card import CardText as CardText
    from .card import card_data as card_data
    from .card import model_card as model_card
    from .card import write_card as write_card
    from .checks import Problem as Problem
    from .checks import check_directory as check_directory
    from .push import push_directory as push_directory

__getattr__, __dir__, __all__ = lazy_names(__name__)
