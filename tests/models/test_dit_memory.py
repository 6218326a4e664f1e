# SPDX-License-Identifier: Apache-2.0
"""The shared memory checks on DiT."""

from tests.models.dit_case import DiTCase
from tests.models.memory_checks import MemoryChecks


class TestDiTMemory(DiTCase, MemoryChecks):
    offloads_blocks = False
