# SPDX-License-Identifier: Apache-2.0
"""The shared compile checks on PixArt."""

import pytest

from tests.models.compile_checks import CompileChecks
from tests.models.pixart_case import PixArtCase


class TestPixArtCompile(PixArtCase, CompileChecks):
    smallest = {"num_layers": 1}

    # DiT and SANA have the same layers; the traced graph is compared above.
    @pytest.mark.slow
    def test_compiles_forward_and_backward(self):
        super().test_compiles_forward_and_backward()
