# SPDX-License-Identifier: Apache-2.0
"""The shared compile checks on SANA-Video."""

import pytest

from tests.models.compile_checks import CompileChecks
from tests.models.sana_video_case import SanaVideoCase


class TestSanaVideoCompile(SanaVideoCase, CompileChecks):
    smallest = {"num_layers": 1}

    # DiT and SANA have the same layers; the traced graph is compared above.
    @pytest.mark.slow
    def test_compiles_forward_and_backward(self):
        super().test_compiles_forward_and_backward()

    @pytest.mark.slow
    @pytest.mark.xfail(reason="the code generation of torch 2.13 fails on the stock SANA-Video too", strict=False)
    def test_compiles_with_dynamic_sizes(self):
        super().test_compiles_with_dynamic_sizes()
