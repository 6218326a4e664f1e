# SPDX-License-Identifier: Apache-2.0
"""MHLA as an attention implementation of transformers, registered as soon as transformers is imported."""

from __future__ import annotations

from ..import_hooks import after_import
from .patch import install_configuration, install_models


def register_with_transformers() -> None:
    """Makes `attn_implementation="mhla"` work, now or as soon as transformers' models are imported."""
    after_import("transformers.configuration_utils", install_configuration)
    after_import("transformers.modeling_utils", install_models)
