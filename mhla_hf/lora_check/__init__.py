# SPDX-License-Identifier: Apache-2.0
"""What a LoRA made for a softmax model does on the MHLA model that was made from it."""

from .checking import check_lora
from .report import LoraReport


__all__ = ["LoraReport", "check_lora"]
