# SPDX-License-Identifier: Apache-2.0
"""Saving and loading of SANA."""

from tests.models.sana_case import SanaCase
from tests.models.saving_checks import SavingChecks


class TestSanaSaving(SanaCase, SavingChecks):
    pass
