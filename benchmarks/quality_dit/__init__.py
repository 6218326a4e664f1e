# SPDX-License-Identifier: Apache-2.0
"""What MHLA costs or gains in quality: small DiTs trained from scratch on handwritten digits, alike but for attention.

Names are loaded when first used, so that the options can be read without torch.
"""

from .options import SETTINGS, VARIANTS, QualityOptions


__all__ = ["SETTINGS", "VARIANTS", "QualityOptions"]
