# SPDX-License-Identifier: Apache-2.0
"""Makes tests of model families other than DiT and Wan slow ones."""

import pytest


def pytest_collection_modifyitems(items):
    for item in items:
        case = item.callspec.params.get("case") if hasattr(item, "callspec") else None
        if item.path.parent.name == "diffusers" and not getattr(case, "thorough", True):
            item.add_marker(pytest.mark.slow)
