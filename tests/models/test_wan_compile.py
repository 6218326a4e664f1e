# SPDX-License-Identifier: Apache-2.0
"""The shared compile checks on Wan transformers."""

from tests.models.compile_checks import CompileChecks
from tests.models.wan_case import WanCase


class TestWanCompile(WanCase, CompileChecks):
    smallest = {"num_layers": 1}
