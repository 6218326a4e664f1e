# SPDX-License-Identifier: Apache-2.0
"""The files of a repository for a model's directory: what is uploaded, and what with other contents than there."""

from __future__ import annotations

import glob
import inspect
import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath, PureWindowsPath
from tempfile import TemporaryDirectory
from typing import Any

from ..conversion.options import parse_size
from ..conversion.writing import check_space
from ..models.source import CONVERSION_RECORD, TRAINING_RECORD, Source, read_source
from ..models.stub import stub_files
from ..models.weight_files import DIFFUSERS_FILES, TRANSFORMERS_FILES, FileNames, WeightSet
from ..utils.destinations import TEMPORARY_PREFIX, take_lock
from ..utils.files import list_files
from ..utils.json_files import parse_json, read_json, read_json_value
from ..utils.locations import PIPELINE_INDEX
from ..utils.model_cards import CARD, is_own_card
from ..utils.tensor_files import TensorEntry, plan_shards, write_shards
from .weight_checks import PICKLES


_WORKING_FILES = (
    "work/*", "checkpoint-*/*", "checkpoints/*", "*.lock", "*.tmp",
    # Of accelerate and the Trainer of transformers.
    "optimizer*.bin", "optimizer*.pt", "scheduler*.bin", "scheduler*.pt", "scaler.pt", "random_states_*.pkl",
    "rng_state*.pth", "training_args.bin", "trainer_state.json", "global_step*/*",
    # Of trackers.
    "wandb/*", "runs/*", "logs/*", "mlruns/*", "events.out.tfevents*", "*/events.out.tfevents*", "*.log",
    # Keys and tokens.
    "*.env", "*.key", "*.pem", "token", "token.txt",
)  # fmt: skip
_RECORDS = (CONVERSION_RECORD, TRAINING_RECORD, "report.json")
_ABSOLUTE = re.compile(r"(?:[A-Za-z]:[\\/]|/[^/\n]+/|~/)[^\n]*")
_LOCK = ".lock"
_CONFIGURATION = re.compile(rf"(.*/)?(\w*config\.json|{re.escape(PIPELINE_INDEX)})")
# Of configurations; some of these fields are of earlier versions of the libraries.
_LOCATIONS = frozenset({"_name_or_path", "name_or_path", "base_model_name_or_path", "tokenizer_file"})


@dataclass(frozen=True)
class Sharding:
    """Weights that are uploaded as other files than there are.

    Attributes:
        folder: The model's folder, relative to the directory.
        shards: The tensors of each file by its name.
    """

    folder: PurePosixPath
    shards: Mapping[str, Sequence[TensorEntry]]

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes of the tensors of each file by its path."""
        return {
            (self.folder / name).as_posix(): sum(entry.nbytes for entry in shard)
            for name, shard in self.shards.items()
        }


@dataclass
class Contents:
    """Files of a repository.

    Attributes:
        root: The directory that they are made from.
        files: Path of each file, or its contents where they are not those in the directory, by path in the
            repository. Without the weights that are sharded.
        shardings: Weights that are sharded.
        left_out: Working files in the directory, which are not uploaded.
        weight_names: Names of the library for weight files by the folder of each model.
    """

    root: Path
    files: dict[str, Path | bytes] = field(default_factory=dict)
    shardings: list[Sharding] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    weight_names: dict[PurePosixPath, FileNames] = field(default_factory=dict)

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes of each file by its path in the repository; of sharded weights, those of their tensors."""
        sizes = {
            name: content.stat().st_size if isinstance(content, Path) else len(content)
            for name, content in self.files.items()
        }
        for part in self.shardings:
            sizes = {**part.sizes, **sizes}
        return dict(sorted(sizes.items()))

    def replaces(self, name: str) -> bool:
        """Whether a file of the repository holds weights of a model here, under a name that is not used any more."""
        path = PurePosixPath(name)
        names = self.weight_names.get(path.parent)
        return names is not None and name not in self.files and names.match(Path(path.name))

    @contextmanager
    def written(self, on_bytes: Callable[[int], None] | None = None) -> Iterator[None]:
        """Writes the shards to disk, beside the directory, and removes them when the context ends.

        Args:
            on_bytes: Called with the number of bytes after each tensor.

        Raises:
            ValueError: If the disk has too little space for them.
        """
        if not self.shardings:
            yield
            return
        parent = self.root.resolve().parent
        check_space(parent, sum(size for part in self.shardings for size in part.sizes.values()))
        with _temporary_folder(parent, self.root.resolve().name) as folder:
            for part in self.shardings:
                target = folder / part.folder
                write_shards(target, part.shards, on_bytes or (lambda count: None))
                self.files |= {
                    (part.folder / path.name).as_posix(): path for path in target.iterdir() if path.is_file()
                }
            yield


@contextmanager
def _temporary_folder(parent: Path, name: str) -> Iterator[Path]:
    """Makes a temporary folder, and removes those of processes that were killed: weights are large."""
    prefix = f"{TEMPORARY_PREFIX}push-{name}-"
    for left in parent.glob(f"{glob.escape(prefix)}*"):
        with suppress(ValueError, OSError):
            lock = take_lock(left / _LOCK, "in use", 0)
            if lock is not None:
                shutil.rmtree(left, ignore_errors=True)
                lock.close()
    with TemporaryDirectory(prefix=prefix, dir=parent) as folder:
        lock = take_lock(Path(folder, _LOCK), "in use", 0)
        try:
            yield Path(folder, "files")
        finally:
            if lock is not None:
                lock.close()


def collect_contents(
    directory: Path, *, max_shard_size: int | str | None = None, card: Callable[[], str] | None = None
) -> Contents:
    """Collects the files of a repository.

    Left out are files that begin with a dot, those that training and recovery work with, and keys. Configurations
    name the stub for `trust_remote_code=True`, which is added. Absolute paths in records, and in the fields of
    configurations that say what was loaded, are shortened to their last part.

    Args:
        directory: A pipeline or model with MHLA.
        max_shard_size: Largest weight file, in bytes or as `"5GB"`; by default that of the model's library.
        card: Makes the model card, unless the user wrote one; `None` leaves it as it is.

    Raises:
        ValueError: If the directory has no MHLA model, holds pickles, or something in it is damaged.
    """
    source = read_source(directory)
    stub = stub_files(source)
    if not stub:
        raise ValueError(f"{directory} has no MHLA model; push others with push_to_hub of their library.")
    contents = Contents(directory)
    for path in list_files(directory):
        name = path.as_posix()
        if is_working_file(name):
            contents.left_out.append(name)
        else:
            contents.files[name] = directory / path
    pickles = [name for name in contents.files if name.endswith(PICKLES)]
    if pickles:
        raise ValueError(
            f"{directory / pickles[0]} is a pickle, which can run code when it is read; remove it, or keep its "
            "tensors as safetensors."
        )
    for name in contents.files:
        is_record = PurePosixPath(name).name in _RECORDS
        if is_record or _CONFIGURATION.fullmatch(name):
            content = parse_json(stub[name], name) if name in stub else read_json_value(directory / name, "the file")
            public = _shortened(content, None if is_record else _LOCATIONS)
            if is_record and isinstance(public, dict) and isinstance(public.get("source"), dict):
                # Of use on this machine alone.
                for entry in ("path", "path_code"):
                    public["source"].pop(entry, None)
            if name in stub or public != content:
                contents.files[name] = (json.dumps(public, indent=2, sort_keys=True) + "\n").encode()
    contents.files |= {name: text.encode() for name, text in stub.items() if name.endswith(".py")}
    if card is not None and not is_own_card(directory):
        contents.files[CARD] = card().encode()
    _shard(contents, source, parse_size(max_shard_size))
    return contents


def is_working_file(name: str) -> bool:
    """Whether a file, given by its path in the directory with `/`, is for running processes alone, or private."""
    hidden = any(part.startswith(".") for part in PurePosixPath(name).parts)
    return hidden or any(fnmatch(name, pattern) for pattern in _WORKING_FILES)


def _shard(contents: Contents, source: Source, max_bytes: int | None) -> None:
    """Replaces weights whose files are larger than allowed by shards."""
    for name in [name for name in contents.files if PurePosixPath(name).name == "config.json"]:
        folder = PurePosixPath(name).parent
        config = read_json(contents.root / name, "the configuration")
        if not isinstance(config.get("_class_name"), str) and not isinstance(config.get("model_type"), str):
            continue
        names = DIFFUSERS_FILES if "_class_name" in config else TRANSFORMERS_FILES
        contents.weight_names[folder] = names
        if not any((contents.root / folder).glob("*.safetensors")):
            continue
        for weights in names.find(contents.root / folder):
            _shard_set(contents, folder, names.stem, weights, max_bytes or _default_size(names))


def _shard_set(contents: Contents, folder: PurePosixPath, stem: str, weights: WeightSet, max_bytes: int) -> None:
    readers = weights.open(floats_only=False)
    # A single tensor cannot be split.
    if all(reader.path.stat().st_size <= max_bytes or len(reader.shapes) == 1 for reader in readers):
        return
    for path in (*weights.files, *([weights.index] if weights.index else [])):
        contents.files.pop(path.relative_to(contents.root).as_posix(), None)
    entries = [entry for reader in readers for entry in reader.entries()]
    shards = plan_shards(entries, max_bytes, stem=stem, variant=weights.variant)
    contents.shardings.append(Sharding(folder, shards))


def _default_size(names: FileNames) -> int:
    """The largest weight file that a library writes unless told otherwise."""
    save: Any
    if names is TRANSFORMERS_FILES:
        from transformers import PreTrainedModel

        save = PreTrainedModel.save_pretrained
    else:
        from diffusers import ModelMixin

        save = ModelMixin.save_pretrained
    size = parse_size(inspect.signature(save).parameters["max_shard_size"].default)
    assert size is not None
    return size


def _shortened(value: Any, fields: frozenset[str] | None) -> Any:
    """JSON with the last parts in place of absolute paths: all of them, or those in some fields."""
    if isinstance(value, dict):
        return {
            key: _shortened(entry, None if fields is None or key in fields else fields) for key, entry in value.items()
        }
    if isinstance(value, list):
        return [_shortened(entry, fields) for entry in value]
    if fields is None and isinstance(value, str) and _ABSOLUTE.fullmatch(value):
        return PureWindowsPath(value).name or value
    return value
