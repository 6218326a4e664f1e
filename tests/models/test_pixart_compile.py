# SPDX-License-Identifier: Apache-2.0
"""The shared compile checks on PixArt."""

from tests.models.compile_checks import CompileChecks
from tests.models.pixart_case import PixArtCase


class TestPixArtCompile(PixArtCase, CompileChecks):
    smallest = {"num_layers": 1}
