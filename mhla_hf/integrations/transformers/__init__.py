# SPDX-License-Identifier: Apache-2.0
"""MHLA as an attention implementation of transformers, registered as soon as transformers is imported."""

from __future__ import annotations

from ...utils.compat import extend, extend_method
from .patch import build_pipeline, install, install_configuration, prefill, refuse


def register_with_transformers() -> None:
    """Make `attn_implementation="mhla"` work, now or as soon as transformers' models are imported.

    Unsupported versions of transformers refuse it with the supported range.
    """
    extend("transformers", "transformers.configuration_utils", install_configuration)
    extend("transformers", "transformers.modeling_utils", install, otherwise=refuse)
    extend_method("transformers", "pipelines.base", "Pipeline", "__init__", build_pipeline)
    extend_method("transformers", "generation.utils", "GenerationMixin", "_prefill", prefill)
