# SPDX-License-Identifier: Apache-2.0
"""The shared adapter checks on DiT."""

from tests.models.adapter_checks import AdapterChecks
from tests.models.dit_case import DiTCase


class TestDiTAdapter(DiTCase, AdapterChecks):
    fuses_by_model = False
