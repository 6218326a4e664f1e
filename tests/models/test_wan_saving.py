# SPDX-License-Identifier: Apache-2.0
"""Saving and loading of Wan transformers."""

from tests.models.saving_checks import SavingChecks
from tests.models.wan_case import WanCase


class TestWanSaving(WanCase, SavingChecks):
    pass
