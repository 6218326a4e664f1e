# SPDX-License-Identifier: Apache-2.0
"""Paths that tests share."""

import json
from pathlib import Path


ROOT = Path(__file__).resolve().parents[1]
GOLDEN = ROOT / "tests" / "golden"


def forget_path(directory: Path) -> None:
    """Takes the path of the original out of the record of a conversion, as if it came from another machine."""
    record = json.loads((directory / "conversion.json").read_text())
    del record["source"]["path"]
    (directory / "conversion.json").write_text(json.dumps(record))
