# SPDX-License-Identifier: Apache-2.0
"""The shared memory checks on PixArt."""

from tests.models.in_place_checks import InPlaceChecks
from tests.models.memory_checks import MemoryChecks
from tests.models.pixart_case import PixArtCase


class TestPixArtMemory(PixArtCase, MemoryChecks):
    pass


class TestPixArtInPlace(PixArtCase, InPlaceChecks):
    pass
