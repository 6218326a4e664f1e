# SPDX-License-Identifier: Apache-2.0
"""The small JSON files of a pipeline directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..sources import PIPELINE_INDEX


def read_index(directory: Path) -> dict[str, Any]:
    """Reads `model_index.json` of a pipeline directory."""
    return json.loads((directory / PIPELINE_INDEX).read_text(encoding="utf-8"))


def scheduler_config(directory: Path) -> dict[str, Any]:
    """Reads the configuration of a pipeline's scheduler; empty if it has none."""
    path = directory / "scheduler" / "scheduler_config.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
