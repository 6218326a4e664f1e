# SPDX-License-Identifier: Apache-2.0
"""The shared compile checks on SANA."""

import pytest

from tests.models.compile_checks import CompileChecks
from tests.models.sana_case import SanaCase


class TestSanaCompile(SanaCase, CompileChecks):
    smallest = {"num_layers": 1}

    @pytest.mark.slow
    @pytest.mark.xfail(reason="the code generation of torch 2.13 fails on the stock SANA too", strict=False)
    def test_compiles_with_dynamic_sizes(self):
        super().test_compiles_with_dynamic_sizes()
