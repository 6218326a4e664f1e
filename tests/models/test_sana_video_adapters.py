# SPDX-License-Identifier: Apache-2.0
"""The shared adapter checks on SANA-Video."""

from tests.models.adapter_checks import AdapterChecks
from tests.models.sana_video_case import SanaVideoCase


class TestSanaVideoAdapter(SanaVideoCase, AdapterChecks):
    fuses_by_model = False
