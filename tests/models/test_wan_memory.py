# SPDX-License-Identifier: Apache-2.0
"""The shared memory checks on Wan transformers."""

from tests.models.in_place_checks import InPlaceChecks
from tests.models.memory_checks import MemoryChecks
from tests.models.wan_case import WanCase


class TestWanMemory(WanCase, MemoryChecks):
    pass


class TestWanInPlace(WanCase, InPlaceChecks):
    pass
