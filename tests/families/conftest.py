# SPDX-License-Identifier: Apache-2.0
"""Chooses the shared checks that are fast tests: all of them for DiT and Wan, those marked `smoke` for the others."""

import pytest


def pytest_collection_modifyitems(items):
    for item in items:
        if getattr(item.cls, "thorough", True) or not item.function.__module__.endswith("_checks"):
            continue
        first_case = not hasattr(item, "callspec") or not any(item.callspec.indices.values())
        if not (first_case and item.get_closest_marker("smoke")):
            item.add_marker(pytest.mark.slow)
