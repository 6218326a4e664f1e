# SPDX-License-Identifier: Apache-2.0
"""MHLA versions of diffusers models, and the registry of them."""

from .registry import FAMILIES, ModelFamily, family_for, is_mhla_class, mhla_class_for, supported_models


__all__ = ["FAMILIES", "ModelFamily", "family_for", "is_mhla_class", "mhla_class_for", "supported_models"]
