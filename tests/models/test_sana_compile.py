# SPDX-License-Identifier: Apache-2.0
"""The shared compile checks on SANA."""

from tests.models.compile_checks import CompileChecks
from tests.models.sana_case import SanaCase


class TestSanaCompile(SanaCase, CompileChecks):
    smallest = {"num_layers": 1}
