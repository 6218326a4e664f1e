# SPDX-License-Identifier: Apache-2.0
"""Resumable training state of the pretraining stages: weights as safetensors, optimiser state without pickled code."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from ..utils.files import atomic_file
from ..utils.tensor_files import read_tensors
from ..utils.write_errors import clear_write_errors


def save_checkpoint(directory: Path, step: int, tensors: Mapping[str, torch.Tensor], state: dict[str, Any]) -> None:
    """Write `directory` anew; a kill at any moment leaves the previous checkpoint or the new one.

    Args:
        directory: Where the checkpoint is kept; replaced if it exists.
        step: Steps done.
        tensors: Weights by name.
        state: What `torch.load(weights_only=True)` can read: optimiser state dictionaries, numbers, strings.
    """
    fresh = directory.with_name(directory.name + ".new")
    old = directory.with_name(directory.name + ".old")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    weights = {name: tensor.detach().contiguous().cpu() for name, tensor in tensors.items()}
    try:
        with clear_write_errors(directory):
            save_file(weights, fresh / "weights.safetensors")
            torch.save({"step": step, **state}, fresh / "state.pt")
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        raise
    shutil.rmtree(old, ignore_errors=True)
    if directory.exists():
        os.replace(directory, old)
    os.replace(fresh, directory)
    shutil.rmtree(old, ignore_errors=True)


def load_checkpoint(directory: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]] | None:
    """Read what `save_checkpoint` wrote.

    Returns:
        The weights and the state (with its `"step"`), or None if there is no checkpoint.
    """
    if not directory.exists():
        # The kill came between the two renames of `save_checkpoint`.
        directory = directory.with_name(directory.name + ".old")
        if not directory.exists():
            return None
    remedy = f"remove {directory} to start again"
    try:
        state = torch.load(directory / "state.pt", map_location="cpu", weights_only=True)
    except Exception as error:  # Of many types, by where the file is damaged.
        raise ValueError(f"{directory / 'state.pt'} cannot be read ({type(error).__name__}); {remedy}") from error
    return read_tensors(directory / "weights.safetensors", remedy), state


def write_safetensors(path: Path, tensors: Mapping[str, torch.Tensor], metadata: dict[str, str] | None = None) -> None:
    """Write tensors under a temporary name, then move the file into place."""
    with atomic_file(path) as temporary:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, temporary, metadata)
