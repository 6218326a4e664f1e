# SPDX-License-Identifier: Apache-2.0
"""Saving and loading of DiT."""

from tests.models.dit_case import DiTCase
from tests.models.saving_checks import SavingChecks


class TestDiTSaving(DiTCase, SavingChecks):
    pass
