# SPDX-License-Identifier: Apache-2.0
"""Weight files of models: their names in each library, complete sets of them, and checks that they are whole."""

from __future__ import annotations

import os
import pickle
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError

from ..utils.files import read_weight_map
from ..utils.locations import EXPORT_FILES, EXPORT_FOLDERS
from ..utils.messages import shorten_list, shorten_text
from ..utils.tensor_files import TensorEntry, check_safetensors, read_entries


PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
"""Suffixes of files that may hold pickles."""

_OTHER_FORMATS = (*PICKLES, ".msgpack", ".h5", ".onnx")
# Exceptions of libraries for damaged weights, and for configurations whose fields have other types.
_DAMAGE = (
    AttributeError, EOFError, KeyError, RuntimeError, SafetensorError, StrictDataclassError, TypeError,
    pickle.UnpicklingError,
)  # fmt: skip


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

    def entries(self) -> list[TensorEntry]:
        """Reads the headers of every file; `ValueError` for damaged files, and for a tensor in two of them."""
        found: dict[str, TensorEntry] = {}
        for path in self.files:
            for entry in read_entries(path):
                if entry.name in found:
                    raise ValueError(f"{path} holds {shorten_text(entry.name)}, which another file holds, too.")
                found[entry.name] = entry
        return list(found.values())


@dataclass(frozen=True)
class FileNames:
    """Names of a library for the weight files of a model.

    Attributes:
        stem: Beginning of the names.
        exports: Whether repositories hold the same weights for other programs, too.
        holder: Name in errors of the object that `from_pretrained` loads.
    """

    stem: str
    exports: bool
    holder: str

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

    def find(self, folder: Path, variant: str | None = None) -> list[WeightSet]:
        """Finds the sets of weights in a folder.

        Args:
            folder: The model's folder.
            variant: Only this variant; `None` for every set.

        Raises:
            ValueError: If there are none, only pickles, shards without an index, or not the variant asked for.
        """
        sets = []
        listed: set[Path] = set()
        for path in sorted(folder.iterdir()):
            match = self.index.fullmatch(path.name)
            if match:
                files = tuple(read_weight_map(path))
                listed.update(files)
                sets.append(WeightSet(match["variant"], files, path))
        for path in sorted(folder.glob("*.safetensors")):
            if path in listed:
                continue
            if self.shard.fullmatch(path.name):
                raise ValueError(f"{path} is one of several shards, but no index in {folder} lists it.")
            match = self.single.fullmatch(path.name)
            if match:
                sets.append(WeightSet(match["variant"], (path,)))
        if not sets:
            pickles = [path.name for path in sorted(folder.iterdir()) if path.suffix in _OTHER_FORMATS]
            problem = f"no {self.stem}*.safetensors; weights in other formats are not read"
            if pickles:
                problem = f"its weights only as {shorten_list(pickles)}; those can run code when read"
            raise ValueError(
                f"{folder} has {problem}. Load the {self.holder} with from_pretrained and write it with "
                "save_pretrained first."
            )
        if variant is not None:
            found = [weights.variant or "(none)" for weights in sets]
            sets = [weights for weights in sets if weights.variant == variant]
            if not sets:
                raise ValueError(f"variant={variant!r} is not in {folder}, which has {shorten_list(found)}.")
        return sets

    def match(self, path: Path) -> bool:
        """Returns whether a file belongs to the model's weights, in any format."""
        name = path.name
        return bool(
            self.index.fullmatch(name)
            or self.single.fullmatch(name)
            or self.shard.fullmatch(name)
            or path.suffix in _OTHER_FORMATS
            or ".bin.index" in name
            or (self.exports and any(path.match(pattern) for pattern in EXPORT_FILES))
        )

    def is_export(self, path: Path) -> bool:
        """Returns whether a file, relative to the model's folder, holds the same weights for other programs."""
        return self.exports and path.parts[0] in EXPORT_FOLDERS


DIFFUSERS_FILES = FileNames("diffusion_pytorch_model", False, "pipeline (or the model alone)")
TRANSFORMERS_FILES = FileNames("model", True, "model")


def check_weights(folder: Path) -> int:
    """Checks that the safetensors files of a folder are whole, by their headers and sizes.

    Returns:
        The number of tensors in them.

    Raises:
        ValueError: If one of them is truncated or damaged; the message names it.
    """
    return sum(len(check_safetensors(path)[0]) for path in sorted(folder.glob("*.safetensors")))


def check_loaded_files(files: Iterable[str | os.PathLike[str]], location: Any, *, pickles: bool) -> None:
    """Checks the files that a library is about to load weights from.

    Args:
        files: Their paths, as the library put them together.
        location: The directory or Hub id that is loaded.
        pickles: Whether files that are no safetensors are allowed.

    Raises:
        ValueError: If one of them is no path inside the directory, damaged, or a pickle where none is allowed.
    """
    root = os.path.abspath(location) if os.path.isdir(location) else None
    for path in map(Path, files):
        # Links are followed: the Hub's cache consists of them.
        inside = root is None or Path(os.path.normpath(path.absolute())).is_relative_to(root)
        if ".." in path.parts or not inside:
            raise ValueError(
                f"{location} says that its weights are in {shorten_text(str(path), 200)}, which is no path inside it; "
                "correct the index, or download the model again."
            )
        if path.suffix == ".safetensors":
            check_safetensors(path)
        elif path.suffix in PICKLES and not pickles:
            raise ValueError(pickles_refused(path.parent, [path.name]))


def pickles_refused(folder: Path, names: Iterable[str]) -> str:
    """The message for an MHLA checkpoint without safetensors."""
    return (
        f"{folder} has its weights only as {shorten_list(names)}; those can run code when read. If you trust them, "
        "load this model alone with use_safetensors=False, and save_pretrained writes safetensors."
    )


@contextmanager
def damage_named(folder: Path) -> Iterator[None]:
    """Names the folder that is loaded from when a library meets damaged files there.

    Raises:
        ValueError: In place of exceptions that only describe the bytes.
    """
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except _DAMAGE as error:
        reason = shorten_text(str(error), 200) or type(error).__name__
        raise ValueError(f"{folder} cannot be loaded: files are damaged or of another model ({reason})") from error
