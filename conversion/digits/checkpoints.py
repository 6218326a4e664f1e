# SPDX-License-Identifier: Apache-2.0
"""Resumable training state in one file, read back without unpickling code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from mhla_hf.utils.files import atomic_file


def save_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Writes a checkpoint; a kill at any moment leaves the previous one or the new one.

    Args:
        path: File to write.
        state: State dictionaries, numbers and strings, as `torch.load(weights_only=True)` reads them.
    """
    # Through a file object, which is closed on errors too; torch keeps a file that it opened itself.
    with atomic_file(path) as temporary, temporary.open("wb") as file:
        torch.save(state, file)


def load_checkpoint(path: Path) -> dict[str, Any] | None:
    """Reads a checkpoint of `save_checkpoint`.

    Returns:
        The state, or None without a checkpoint.

    Raises:
        ValueError: If the file is damaged.
    """
    if not path.exists():
        return None
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # Of many types, by where the file is damaged.
        raise ValueError(
            f"{path} cannot be read ({type(error).__name__}); remove {path} to start this stage again"
        ) from error
