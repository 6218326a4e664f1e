# SPDX-License-Identifier: Apache-2.0
"""The shared memory checks on DiT."""

from tests.models.dit_case import DiTCase
from tests.models.in_place_checks import InPlaceChecks
from tests.models.memory_checks import MemoryChecks


class TestDiTMemory(DiTCase, MemoryChecks):
    offloads_blocks = False


class TestDiTInPlace(DiTCase, InPlaceChecks):
    pass
