# SPDX-License-Identifier: Apache-2.0
"""From other people's weights to MHLA directories and back."""

from .convert import convert_pretrained, unconvert_pretrained
from .official import import_official
from .writing import ConversionReport


__all__ = ["ConversionReport", "convert_pretrained", "import_official", "unconvert_pretrained"]
