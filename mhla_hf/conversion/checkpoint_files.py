# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of training code: safetensors shards, or files of `torch.save` read without running code."""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ..utils.files import check_entry, read_weight_map
from ..utils.messages import shorten_list, shorten_text, shorten_value
from ..utils.tensor_files import FLOAT_TYPES, SafetensorsReader, TensorEntry


UPSTREAM = "WanTransformer3DModel"
"""The diffusers class that checkpoints become."""
TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")

# Where training code keeps the weights inside a saved dict, outermost first.
_NESTED = ("state_dict", "model_state_dict", "model", "module")
_DEPTH = 8


def open_checkpoint(path: Path) -> tuple[list[list[TensorEntry]], tuple[Path, ...]]:
    """Finds the tensors of a checkpoint without reading their values.

    Args:
        path: A safetensors file, a file of `torch.save`, or a directory of either.

    Returns:
        The tensors of each file, and the files.

    Raises:
        ValueError: If there is no checkpoint, a shard is missing or damaged, or a torch file holds anything that
            could run code.
    """
    if path.is_dir():
        files = _files_in(path)
        for file in files:
            if os.path.lexists(file):
                check_entry(file, path)
    elif path.is_file():
        files = [path]
    else:
        problem = "is neither a regular file nor a folder" if path.exists() else "does not exist"
        raise ValueError(f"checkpoint {path} {problem}.")
    groups = [
        SafetensorsReader(file).entries() if file.suffix == ".safetensors" else torch_entries(file) for file in files
    ]
    return groups, tuple(files)


def _files_in(folder: Path) -> list[Path]:
    indices = sorted(folder.glob("*.safetensors.index.json"))
    if len(indices) > 1:
        raise ValueError(f"checkpoint {folder} has several indices: {shorten_list(path.name for path in indices)}.")
    if indices:
        check_entry(indices[0], folder)
        return read_weight_map(indices[0])
    files = sorted(folder.glob("*.safetensors"))
    if files:
        return files
    files = sorted(path for path in folder.iterdir() if path.suffix in TORCH_SUFFIXES)
    if len(files) != 1:
        names = shorten_list(path.name for path in files) or "none"
        raise ValueError(f"checkpoint {folder} has no safetensors files and not exactly one torch file ({names}).")
    return files


def torch_entries(path: Path) -> list[TensorEntry]:
    """Reads the tensors of a file of `torch.save`, alone or under one of the usual keys.

    Raises:
        ValueError: If it is damaged, holds anything that could run code or is no tensor, or a tensor that is
            quantised, sparse, without values, or larger than what is stored of it.
    """
    weights = _unnest(_load(path), path)
    claimed: dict[int, int] = {}
    entries = []
    for name, tensor in weights.items():
        shown = shorten_value(name)
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(f"{path} holds a {type(tensor).__name__} under {shown}; every entry must be a tensor.")
        reason = _refusal(tensor, claimed)
        if reason:
            raise ValueError(f"{path} holds {reason} under {shown}; only dense, unquantised tensors can be imported.")
        entries.append(TensorEntry(str(name), tuple(tensor.shape), tensor.dtype, lambda tensor=tensor: tensor))  # type: ignore[misc]
    return entries


def _refusal(tensor: torch.Tensor, claimed: dict[int, int]) -> str:
    """Reason to refuse a tensor, or nothing. `claimed` counts the bytes taken of each storage so far."""
    if tensor.layout != torch.strided or tensor.is_nested:
        return f"a {str(tensor.layout).removeprefix('torch.')} tensor"
    if tensor.device.type != "cpu":
        return "a tensor without values (on the meta device)"
    if tensor.dtype not in FLOAT_TYPES.values():
        return str(tensor.dtype)
    storage, size = tensor.untyped_storage(), tensor.numel() * tensor.element_size()
    # Views of one storage may share it out, but not have more of it than there is.
    claimed[storage.data_ptr()] = claimed.get(storage.data_ptr(), 0) + size
    if claimed[storage.data_ptr()] > storage.nbytes():
        return f"a tensor of shape {shorten_value(tuple(tensor.shape))} that repeats or overlaps stored numbers"
    return ""


def _load(path: Path) -> Any:
    options: dict[str, Any] = {"map_location": "cpu", "weights_only": True}
    try:
        try:
            return torch.load(path, mmap=True, **options)
        except RuntimeError as error:
            # Files older than torch 1.6 are no archives and cannot be mapped.
            if "mmap" not in str(error):
                raise
            return torch.load(path, **options)
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{path} holds more than tensors and could run code when read, or is not a torch file; "
            "save its state dict alone."
        ) from error
    # A damaged archive or pickle may end in any kind of error.
    except Exception as error:
        reason = shorten_text(str(error) or type(error).__name__, 200)
        raise ValueError(f"{path} cannot be read as a torch file ({reason}).") from error


def _unnest(content: Any, path: Path) -> Mapping[Any, Any]:
    # A dict may hold itself.
    for _ in range(_DEPTH):
        if not isinstance(content, Mapping):
            break
        inner = next((content[name] for name in _NESTED if isinstance(content.get(name), Mapping)), None)
        if inner is None:
            break
        content = inner
    if not isinstance(content, Mapping) or not any(isinstance(value, torch.Tensor) for value in content.values()):
        found = type(content).__name__
        if isinstance(content, Mapping):
            found = f"keys {shorten_list([str(key) for key in content])}"
        raise ValueError(f"{path} holds no state dict, alone or under {' or '.join(_NESTED)}; it holds {found}.")
    return content
