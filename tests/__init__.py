# SPDX-License-Identifier: Apache-2.0
"""Paths that tests share."""

from pathlib import Path


ROOT = Path(__file__).resolve().parents[1]
GOLDEN = ROOT / "tests" / "golden"
