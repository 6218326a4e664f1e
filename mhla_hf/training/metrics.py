# SPDX-License-Identifier: Apache-2.0
"""`metrics.jsonl`: one line per optimizer step, consistent across kills and resumed runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..utils.files import atomic_file, clear_write_errors
from ..utils.json_files import check_fields, parse_json
from .checkpoints import STAGES, Position


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics file; a half-written last line, which a kill can leave, is dropped.

    Raises:
        ValueError: If another line is damaged; the message names it.
    """
    if not path.is_file():
        return []
    lines = path.read_bytes().split(b"\n")
    rows = []
    for number, line in enumerate(lines[:-1], start=1):
        where = f"line {number} of {path} (remove the file to start another)"
        try:
            row = check_fields(parse_json(line.decode(), where), where, required={"stage": str, "step": int})
        except UnicodeDecodeError as error:
            raise ValueError(f"{where} is not UTF-8 text ({error.reason} at byte {error.start}).") from None
        if row["stage"] not in STAGES:
            raise ValueError(f"{where}: 'stage' must be one of {', '.join(STAGES)}.")
        rows.append(row)
    return rows


class Metrics:
    """The rows of the metrics so far, in memory.

    Args:
        rows: Those of earlier steps.
    """

    def __init__(self, rows: Sequence[dict[str, Any]] = ()) -> None:
        self.rows = list(rows)

    def append(self, row: dict[str, Any]) -> None:
        """Adds a row, with at least `stage`, `step` and `loss`."""
        self.rows.append(row)


class MetricsFile(Metrics):
    """Appends rows to a metrics file.

    Args:
        path: The file.
        position: Position that the run resumes from; rows of later steps are cut off. None starts an empty file.
    """

    def __init__(self, path: Path, position: Position | None = None) -> None:
        kept = []
        if position is not None:
            key = (position.stage_index, position.step)
            kept = [row for row in read_metrics(path) if (STAGES.index(row["stage"]), row["step"]) <= key]
        with atomic_file(path) as temporary:
            temporary.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")
        super().__init__(kept)
        self.path = path
        self._file = path.open("a", encoding="utf-8")

    def append(self, row: dict[str, Any]) -> None:
        """Writes one row and hands it to the operating system, so that a killed process loses none.

        Raises:
            OSError: If there is no room for it.
        """
        super().append(row)
        with clear_write_errors(self.path):
            self._file.write(json.dumps(row) + "\n")
            self._file.flush()

    def close(self) -> None:
        """Closes the file. Only a row whose writing has failed, which `append` has said, can be lost now."""
        with suppress(OSError):
            self._file.close()
