# SPDX-License-Identifier: Apache-2.0
"""The shared adapter checks on Wan transformers."""

from tests.models.adapter_checks import AdapterChecks
from tests.models.wan_case import WanCase


class TestWanAdapter(WanCase, AdapterChecks):
    pass
