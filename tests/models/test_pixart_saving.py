# SPDX-License-Identifier: Apache-2.0
"""Saving and loading of PixArt."""

from tests.models.pixart_case import PixArtCase
from tests.models.saving_checks import SavingChecks


class TestPixArtSaving(PixArtCase, SavingChecks):
    pass
