# SPDX-License-Identifier: Apache-2.0
"""Quality of MHLA: small DiTs trained from scratch on handwritten digits, which differ in their attention alone."""

from .options import SETTINGS, VARIANTS, QualityOptions


__all__ = ["SETTINGS", "VARIANTS", "QualityOptions"]
