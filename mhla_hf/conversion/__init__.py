# SPDX-License-Identifier: Apache-2.0
"""From other people's weights to MHLA directories: `convert_pretrained` and `import_official`."""

from .engine import convert_pretrained
from .official import import_official
from .provenance import ConversionReport


__all__ = ["ConversionReport", "convert_pretrained", "import_official"]
