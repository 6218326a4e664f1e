# SPDX-License-Identifier: Apache-2.0
"""The shared memory checks on SANA."""

from tests.models.in_place_checks import InPlaceChecks
from tests.models.memory_checks import MemoryChecks
from tests.models.sana_case import SanaCase


class TestSanaMemory(SanaCase, MemoryChecks):
    pass


class TestSanaInPlace(SanaCase, InPlaceChecks):
    pass
