# SPDX-License-Identifier: Apache-2.0
"""The shared memory checks on SANA-Video."""

from tests.models.in_place_checks import InPlaceChecks
from tests.models.memory_checks import MemoryChecks
from tests.models.sana_video_case import SanaVideoCase


class TestSanaVideoMemory(SanaVideoCase, MemoryChecks):
    pass


class TestSanaVideoInPlace(SanaVideoCase, InPlaceChecks):
    pass
