# SPDX-License-Identifier: Apache-2.0
"""The cache of latents and conditions, as training reads it: videos, pictures and captions are encoded only once.

A cache is a directory with `cache.json` (what made it), `null_condition.safetensors` (the condition of a sample
without caption or class) and one `samples/<number>.safetensors` per video or picture. Every file is written under a
temporary name and moved, and `cache.json` is marked complete last, so the step can be killed and run again.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from ..files import atomic_file


FORMAT_VERSION = 2
MANIFEST = "cache.json"
NULL_CONDITION = "null_condition.safetensors"
# Stored without their padding.
_PADDED = ("prompt_embeds", "prompt_attention_mask")


class LatentDataset:
    """The samples of a finished cache; `LatentSamples` says what is in them.

    Text is stored without its padding and padded with zeros when read: Wan's pipeline pads so, and SANA's masks it.

    Args:
        directory: The cache.

    Attributes:
        manifest: The content of `cache.json`.
        null_condition: What a sample without caption or class holds besides latents.

    Raises:
        ValueError: If the cache does not exist, is unfinished, of another format, or lacks a file.
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        self.manifest = read_manifest(self.directory)
        if not self.manifest.get("complete"):
            raise ValueError(f"cache {directory} is unfinished: run the cache step again")
        self.files = [self.directory / "samples" / name for name in self.manifest["samples"]]
        if not self.files:
            raise ValueError(f"cache {directory} has no samples")
        missing = [path.name for path in self.files if not path.is_file()]
        if missing:
            raise ValueError(f"cache {directory} lacks {len(missing)} samples, for instance {missing[0]}")
        self.null_condition = self._padded(read_tensors(self.directory / NULL_CONDITION))

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self._padded(read_tensors(self.files[index]))

    @property
    def settings(self) -> dict[str, Any]:
        """The options of the cache step that made it, and hashes of the encoders."""
        return self.manifest["settings"]

    @property
    def latent_shape(self) -> tuple[int, ...]:
        """`[C, F, H, W]` of videos, `[C, H, W]` of pictures."""
        return tuple(self.manifest["latent_shape"])

    def _padded(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: self._pad(tensor) if name in _PADDED else tensor for name, tensor in tensors.items()}

    def _pad(self, tensor: torch.Tensor) -> torch.Tensor:
        padding = self.settings["max_sequence_length"] - tensor.shape[0]
        return torch.cat([tensor, tensor.new_zeros(padding, *tensor.shape[1:])])


def read_manifest(directory: Path) -> dict[str, Any]:
    """Reads `cache.json`.

    Raises:
        ValueError: If there is none, or its format is another one.
    """
    path = directory / MANIFEST
    if not path.is_file():
        raise ValueError(f"cache {directory} does not exist: run the cache step first, or pass data")
    manifest = json.loads(path.read_text(encoding="utf-8"))
    if manifest.get("format_version") != FORMAT_VERSION:
        raise ValueError(
            f"cache {directory} has format {manifest.get('format_version')}, this version reads {FORMAT_VERSION}; "
            "remove it and run the cache step again"
        )
    return manifest


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Reads one of a cache's tensor files.

    Raises:
        ValueError: If it is missing or damaged.
    """
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise ValueError(
            f"cache file {path} cannot be read: {error}; remove it and run the cache step again"
        ) from error


def write_tensors(
    path: Path, tensors: dict[str, torch.Tensor], dtype: torch.dtype, metadata: dict[str, str] | None = None
) -> None:
    """Writes one of a cache's tensor files, numbers that are not whole in the type that the cache keeps."""
    stored = {
        name: tensor.to("cpu", dtype if tensor.is_floating_point() else torch.int64).contiguous()
        for name, tensor in tensors.items()
    }
    with atomic_file(path) as temporary:
        save_file(stored, temporary, metadata=metadata)
