# SPDX-License-Identifier: Apache-2.0
"""The shared compile checks on SANA-Video."""

from tests.models.compile_checks import CompileChecks
from tests.models.sana_video_case import SanaVideoCase


class TestSanaVideoCompile(SanaVideoCase, CompileChecks):
    smallest = {"num_layers": 1}
