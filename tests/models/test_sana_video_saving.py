# SPDX-License-Identifier: Apache-2.0
"""Saving and loading of SANA-Video."""

from tests.models.sana_video_case import SanaVideoCase
from tests.models.saving_checks import SavingChecks


class TestSanaVideoSaving(SanaVideoCase, SavingChecks):
    pass
