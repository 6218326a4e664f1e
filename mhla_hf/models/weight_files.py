# SPDX-License-Identifier: Apache-2.0
"""Files of models: names and complete sets of weights, and configurations as they are stored."""

from __future__ import annotations

import logging
import os
import pickle
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError

from ..utils.compat.transformers import saves_adapters_aside
from ..utils.files import read_weight_map
from ..utils.locations import EXPORT_FILES
from ..utils.messages import shorten_list, shorten_text
from ..utils.tensor_files import TensorEntry, check_safetensors, read_entries


logger = logging.getLogger(__name__)

PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
"""Suffixes of files that may hold pickles."""

STUB_MODULE = "modeling_mhla"
"""Name of the file beside a model's `config.json` that loads it by `trust_remote_code=True` (`mhla_hf.models.stub`).

Not that of the package: Python would find it first where the repository is the working directory.
"""

UNREADABLE_FOR_SOFTMAX = {"dtype": "MHLA weights: import mhla_hf before you load them"}
"""The entry of `config.json` by which softmax classes fail.

diffusers ignores entries and weights that a class does not know, with a warning. But it passes an unknown `dtype` on
to the class's constructor, which refuses it. So one is written, for programs that never import this package; the
warning before the error shows its text. MHLA classes drop it when they read the file. With this package imported, the
softmax classes hand MHLA checkpoints over (`mhla_hf.integrations.diffusers`).
"""

ADAPTERS_OUT = (
    "which a saved model cannot hold. Take them out and save it again: by unload_lora_weights() of the pipeline, "
    "after fuse_lora() to keep their effect, or by merge_and_unload() of peft."
)
"""End of the errors for weights with adapters."""

# Lists of layers by the names of diffusers and of authors. HunyuanVideo's refiner of the text has blocks of its own.
_LAYER = re.compile(r"(?:^|(?<!refiner)\.)((?:(?:single_)?transformer_|single_|double_|vace_)?blocks)\.([0-9]{1,9})\.")
# Modules that adapters put around those that they change.
_IN_ADAPTERS = re.compile(r"\.(base_layer|original_module)\.")
_OTHER_FORMATS = (*PICKLES, ".msgpack", ".h5", ".onnx")
# Exceptions of libraries for damaged weights, and for configurations whose fields have other types.
_DAMAGE = (AttributeError, EOFError, KeyError, RuntimeError, SafetensorError, StrictDataclassError, TypeError)
# What follows the stem of a list of shards, of a file that holds all weights, and of one of several files.
_INDEX = r"\.safetensors\.index(?:\.(?P<variant>[^.]+))?\.json"
_SINGLE = r"(?:\.(?P<variant>[^.]+))?\.safetensors"
_SHARD = r".*-\d{5}-of-\d{5}.*\.safetensors"


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
        """Read the headers of every file; `ValueError` for damaged files, and for a tensor in two of them."""
        found: dict[str, TensorEntry] = {}
        for path in self.files:
            for entry in read_entries(path):
                if entry.name in found:
                    raise ValueError(f"{path} holds {shorten_text(entry.name)}, which another file holds, too.")
                found[entry.name] = entry
        check_no_adapters(found, self.index or self.files[0])
        return list(found.values())


@dataclass(frozen=True)
class FileNames:
    """Names of a library for the weight files of a model.

    Attributes:
        stem: Beginning of the names.
        exports: Whether repositories hold the same weights for other programs, too.
    """

    stem: str
    exports: bool = False

    def find(self, folder: Path, variant: str | None = None) -> list[WeightSet]:
        """Find the sets of weights in a folder.

        Args:
            folder: The model's folder.
            variant: Only this variant; `None` for every set.

        Raises:
            ValueError: If there are none, only pickles, shards without an index, or not the variant asked for.
        """
        sets = []
        names = {path.name: path for path in sorted(folder.iterdir())}
        for name, path in names.items():
            if match := re.fullmatch(f"{self.stem}{_INDEX}", name):
                sets.append(WeightSet(match["variant"], tuple(read_weight_map(path)), path))
        listed = {path for weights in sets for path in weights.files}
        for name, path in names.items():
            if path in listed:
                continue
            if re.fullmatch(f"{self.stem}{_SHARD}", name):
                raise ValueError(f"{path} is one of several shards, but no index in {folder} lists it.")
            if match := re.fullmatch(f"{self.stem}{_SINGLE}", name):
                sets.append(WeightSet(match["variant"], (path,)))
        if not sets:
            pickles = [name for name, path in names.items() if path.suffix in _OTHER_FORMATS]
            problem = f"no {self.stem}*.safetensors; weights in other formats are not read"
            if pickles:
                problem = f"its weights only as {shorten_list(pickles)}; those can run code when read"
            raise ValueError(
                f"{folder} has {problem}. Load the model with from_pretrained and write it with save_pretrained first."
            )
        if variant is not None:
            found = [weights.variant or "(none)" for weights in sets]
            sets = [weights for weights in sets if weights.variant == variant]
            if not sets:
                raise ValueError(f"variant={variant!r} is not in {folder}, which has {shorten_list(found)}.")
        return sets

    def match(self, path: Path) -> bool:
        """Return whether a file belongs to the model's weights, in any format."""
        return bool(
            any(re.fullmatch(f"{self.stem}{pattern}", path.name) for pattern in (_INDEX, _SINGLE, _SHARD))
            or path.suffix in _OTHER_FORMATS
            or ".bin.index" in path.name
            or (self.exports and any(path.match(pattern) for pattern in EXPORT_FILES))
        )


DIFFUSERS_FILES, TRANSFORMERS_FILES = FileNames("diffusion_pytorch_model"), FileNames("model", exports=True)


def check_weights(folder: Path) -> int:
    """Check that the safetensors files of a folder are whole, and that indices of shards name files in it.

    Returns:
        The number of tensors in them.

    Raises:
        ValueError: If one of them is truncated or damaged; the message names it.
    """
    for pattern in ("*.safetensors.index*.json", "*.bin.index*.json"):
        for index in sorted(folder.glob(pattern)):
            read_weight_map(index)
    return sum(len(check_safetensors(path)[0]) for path in sorted(folder.glob("*.safetensors")))


def check_loaded_files(files: Iterable[str | os.PathLike[str]], location: Any, *, pickles: bool) -> None:
    """Check the files that a library is about to load weights from.

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


def check_no_adapters(names: Iterable[str], where: Any) -> None:
    """Refuse weights of a model that has adapters in it: their names are not those of the model.

    Args:
        names: Names of the weights.
        where: The model or its files, for the error.

    Raises:
        ValueError: If there are such names.
    """
    if found := [name for name in names if _IN_ADAPTERS.search(name)]:
        raise ValueError(f"{where} has adapters in its weights ({shorten_list(found)}), {ADAPTERS_OUT}")


def check_saved(model: Any, names: Iterable[str] | None = None) -> None:
    """Check that a model of diffusers or transformers is saved without adapters among its weights.

    Args:
        model: The model, or another component of a pipeline.
        names: Names of the weights that are saved; by default those of the model.

    Raises:
        ValueError: See [`check_no_adapters`].
    """
    if isinstance(model, torch.nn.Module) and not saves_adapters_aside(model):
        names = dict(model.named_parameters()) if names is None else names
        check_no_adapters(names, f"This {type(model).__name__}")


@contextmanager
def damage_named(folder: Path) -> Iterator[None]:
    """Name the folder that is loaded from when a library meets damaged files there.

    Raises:
        ValueError: In place of exceptions that only describe the bytes.
    """
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (*_DAMAGE, pickle.UnpicklingError) as error:
        reason = shorten_text(str(error), 200) or type(error).__name__
        raise ValueError(f"{folder} cannot be loaded: files are damaged or of another model ({reason})") from error


def to_stored(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a model's configuration as it is written: `AutoModel` of diffusers finds the stub by it."""
    return {**config, **UNREADABLE_FOR_SOFTMAX, "auto_map": {"AutoModel": f"{STUB_MODULE}.{config['_class_name']}"}}


def from_stored(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration without the entries of [`to_stored`], which files of earlier versions may lack."""
    return {
        name: value
        for name, value in config.items()
        if (name, value) not in UNREADABLE_FOR_SOFTMAX.items() and name != "auto_map"
    }


def check_layer_count(num_layers: int, names: Iterable[str], where: str) -> None:
    """Check the number of layers against the names of the weights.

    Args:
        num_layers: Number of layers that the configuration describes, in all lists of blocks together.
        names: Names of the tensors.
        where: Name of the configuration, for errors.

    Raises:
        ValueError: If the weights have more layers, or fewer.
    """
    found: dict[str, int] = {}
    for match in filter(None, map(_LAYER.search, names)):
        found[match[1]] = max(found.get(match[1], 0), int(match[2]) + 1)
    if found and sum(found.values()) != num_layers:
        raise ValueError(
            f"{where} describes {num_layers} layers, but the weights have {sum(found.values())}: the two do not "
            "belong together."
        )
