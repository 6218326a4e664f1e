# SPDX-License-Identifier: Apache-2.0
"""Changes of the files of models, as those who damage them make them, and how they are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file


def write_json(path: Path, content: object) -> None:
    """Writes a JSON file into a folder that may not exist yet."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))


def edit_json(path: Path, **changes: object) -> None:
    """Changes entries of a JSON file; `...` takes one out."""
    content = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({name: value for name, value in content.items() if value is not ...}))


def edit_weights(path: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Changes the tensors of a file by name, in place or to those that are returned."""
    tensors = load_file(path)
    changed = change(tensors)
    save_file(changed if isinstance(changed, dict) else tensors, path, {"format": "pt"})


def refused(call: Callable[[], object], *names: str) -> None:
    """The call is refused by one short line that names these."""
    with pytest.raises(ValueError) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message and len(message) < 700, message
    assert all(name in message for name in names), message
