# SPDX-License-Identifier: Apache-2.0
"""Effect of a LoRA made for a softmax model on the MHLA model made from it."""

from .check import LoraReport, check_lora


__all__ = ["LoraReport", "check_lora"]
