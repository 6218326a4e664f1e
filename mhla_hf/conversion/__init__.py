# SPDX-License-Identifier: Apache-2.0
"""From other people's weights to MHLA directories: `convert_pretrained` and `import_official`."""

from .convert import convert_pretrained
from .official import import_official
from .report import ConversionReport


__all__ = ["ConversionReport", "convert_pretrained", "import_official"]
