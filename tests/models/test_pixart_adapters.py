# SPDX-License-Identifier: Apache-2.0
"""The shared adapter checks on PixArt."""

from tests.models.adapter_checks import AdapterChecks
from tests.models.pixart_case import PixArtCase


class TestPixArtAdapter(PixArtCase, AdapterChecks):
    pass
