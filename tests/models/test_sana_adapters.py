# SPDX-License-Identifier: Apache-2.0
"""The shared adapter checks on SANA."""

from tests.models.adapter_checks import AdapterChecks
from tests.models.sana_case import SanaCase


class TestSanaAdapter(SanaCase, AdapterChecks):
    fuses_by_model = False
