# SPDX-License-Identifier: Apache-2.0
"""Chooses the families whose tests are fast ones."""

import pytest

from .tiny_models import FAMILIES


# Rotary embeddings, norms of queries and keys, sliding windows, no rotary embeddings, encoders, images.
FAST = ("llama", "qwen3", "gemma3", "gpt2", "bert", "vit")


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.parent.name == "transformers" and hasattr(item, "callspec"):
            name = item.callspec.params.get("name")
            if name in FAMILIES and name not in FAST:
                item.add_marker(pytest.mark.slow)
