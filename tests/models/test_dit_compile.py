# SPDX-License-Identifier: Apache-2.0
"""The shared compile checks on DiT."""

from tests.models.compile_checks import CompileChecks
from tests.models.dit_case import DiTCase


class TestDiTCompile(DiTCase, CompileChecks):
    smallest = {"num_layers": 1}
