# SPDX-License-Identifier: Apache-2.0
"""The files that hold a model's weights: what each library calls them, and complete sets of them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from ..utils.messages import shorten_text
from .tensors import SafetensorsReader


@dataclass(frozen=True)
class FileNames:
    """How a library calls the weight files of a model.

    Attributes:
        stem: What they begin with.
    """

    stem: str

    @property
    def index(self) -> re.Pattern[str]:
        """The list of shards."""
        return re.compile(rf"{self.stem}\.safetensors\.index(?:\.(?P<variant>[^.]+))?\.json")

    @property
    def single(self) -> re.Pattern[str]:
        """A file that holds all weights."""
        return re.compile(rf"{self.stem}(?:\.(?P<variant>[^.]+))?\.safetensors")

    @property
    def shard(self) -> re.Pattern[str]:
        """One of several files."""
        return re.compile(rf"{self.stem}.*-\d{{5}}-of-\d{{5}}.*\.safetensors")


DIFFUSERS_FILES = FileNames("diffusion_pytorch_model")
TRANSFORMERS_FILES = FileNames("model")


@dataclass(frozen=True)
class WeightSet:
    """The files that hold one complete set of a model's weights.

    Attributes:
        variant: Part of the file names such as `fp16`; `None` for the main set.
        files: The safetensors files.
        index: The file that lists them; `None` for a single file.
    """

    variant: str | None
    files: tuple[Path, ...]
    index: Path | None = None

    @property
    def where(self) -> str:
        """What holds the weights, for errors."""
        return str(self.files[0].parent)

    def called(self, name: str) -> str:
        """The name of a weight in its file, for errors."""
        return name

    def open(self, *, floats_only: bool = True) -> list[SafetensorsReader]:
        """Opens every file; errors as in [`SafetensorsReader`], and `ValueError` for a tensor in two of them."""
        readers = [SafetensorsReader(path, floats_only=floats_only) for path in self.files]
        seen: dict[str, Path] = {}
        for reader in readers:
            for name in reader.shapes:
                if name in seen:
                    raise ValueError(f"{shorten_text(name)} is both in {seen[name]} and in {reader.path}.")
                seen[name] = reader.path
        return readers
