# SPDX-License-Identifier: Apache-2.0
"""The cache of latents and text embeddings, as training reads it: videos and captions are encoded only once.

A cache is a directory with `cache.json` (what made it), `null_prompt.safetensors` (the embeddings of the empty
prompt) and one `samples/<number>.safetensors` per video. Every file is written under a temporary name and moved, and
`cache.json` is marked complete last, so the step can be killed and run again.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from ..files import atomic_file


FORMAT_VERSION = 1
MANIFEST = "cache.json"
NULL_PROMPT = "null_prompt.safetensors"


class LatentDataset:
    """The samples of a finished cache: `{"latents": [C, F, H, W], "prompt_embeds": [L, D]}`.

    Text embeddings are stored without their padding and padded with zeros when read, as Wan's pipeline pads them.

    Args:
        directory: The cache.

    Attributes:
        manifest: The content of `cache.json`.
        null_condition: The condition of the empty prompt: `prompt_embeds` `[L, D]`.

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
        self.max_sequence_length = int(self.manifest["settings"]["max_sequence_length"])
        self.null_condition = {"prompt_embeds": self._pad(read_tensors(self.directory / NULL_PROMPT)["prompt_embeds"])}

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tensors = read_tensors(self.files[index])
        return {"latents": tensors["latents"], "prompt_embeds": self._pad(tensors["prompt_embeds"])}

    @property
    def latent_shape(self) -> tuple[int, int, int, int]:
        """`[C, F, H, W]` of the samples."""
        return tuple(self.manifest["latent_shape"])

    @property
    def text_dim(self) -> int:
        """Width of the text embeddings."""
        return int(self.null_condition["prompt_embeds"].shape[-1])

    def check_model(self, model: torch.nn.Module) -> None:
        """Checks that the samples fit a Wan transformer.

        Raises:
            ValueError: If channels, text width or patch size do not fit.
        """
        channels, _, *size = self.latent_shape
        if channels != model.config.in_channels:
            raise ValueError(
                f"cache {self.directory} has {channels} latent channels, the model takes {model.config.in_channels}"
            )
        if self.text_dim != model.config.text_dim:
            raise ValueError(
                f"cache {self.directory} has text embeddings of width {self.text_dim}, the model takes "
                f"{model.config.text_dim}"
            )
        if any(length % patch for length, patch in zip(size, model.config.patch_size[1:])):
            raise ValueError(f"cache {self.directory} has latents of {size}, not multiples of the model's patches")

    def _pad(self, embeddings: torch.Tensor) -> torch.Tensor:
        padding = self.max_sequence_length - embeddings.shape[0]
        return torch.cat([embeddings, embeddings.new_zeros(padding, embeddings.shape[1])])


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
            f"cache {directory} has format {manifest.get('format_version')}, this version reads {FORMAT_VERSION}"
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
    """Writes one of a cache's tensor files, in the type that the cache keeps."""
    stored = {name: tensor.to("cpu", dtype).contiguous() for name, tensor in tensors.items()}
    with atomic_file(path) as temporary:
        save_file(stored, temporary, metadata=metadata)
