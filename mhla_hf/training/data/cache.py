# SPDX-License-Identifier: Apache-2.0
"""Cache of latents and conditions, and their encoder; videos, images and captions are encoded once.

A cache is a directory with `cache.json` (what made it), `null_condition.safetensors` (the condition of a sample
without caption or class) and one `samples/<number>.safetensors` per video or image. Every file is written under a
temporary name and moved, and `cache.json` is marked complete last, so the step can be killed and run again.
"""

from __future__ import annotations

import hashlib
import json
import os
from functools import lru_cache
from pathlib import Path
from typing import IO, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from ...utils.destinations import share_lock
from ...utils.files import atomic_file, path_inside
from ...utils.json_files import check_fields, read_json
from ...utils.messages import shorten_value
from ..config import LONGEST_TEXT, CacheConfig
from ..families import Family
from .fingerprints import evenly_spaced, file_fingerprint


FORMAT_VERSION = 3
MANIFEST = "cache.json"
LOCK = ".lock"
NULL_CONDITION = "null_condition.safetensors"
# Stored without their padding.
_PADDED = ("prompt_embeds", "prompt_attention_mask")
_FLOATS = ("latents", "prompt_embeds")
# Settings that are fingerprints of parts of the pipeline.
_ENCODERS = ("vae", "text_encoder", "tokenizer")
# Captions often repeat: all digits have ten between them.
_REMEMBERED_CONDITIONS = 64


class LatentDataset:
    """The samples of a finished cache; `LatentSamples` says what is in them.

    Text is stored without its padding and padded with zeros when read: Wan's pipeline pads so, and SANA's masks it.

    Args:
        directory: The cache.

    Attributes:
        manifest: The content of `cache.json`.
        null_condition: Condition tensors of a sample without caption or class.
        buckets: Number of each sample's bucket; None where all have one size.

    Raises:
        ValueError: If the cache does not exist, is unfinished, of another format, or lacks a file, or its first sample
            cannot be read.
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        self.manifest = read_manifest(self.directory)
        if not self.manifest.get("complete"):
            raise ValueError(f"cache {directory} is unfinished: run the cache step again")
        where = f"cache file {self.directory / MANIFEST}: 'samples'"
        self.files = [path_inside(self.directory / "samples", name, where) for name in self.manifest["samples"]]
        if not self.files:
            raise ValueError(f"cache {directory} has no samples")
        # Unlike `Path.is_file`, this one takes names that are too long for files.
        missing = [path.name for path in self.files if not os.path.isfile(path)]
        if missing:
            raise ValueError(f"cache {directory} lacks {len(missing)} samples, for instance {missing[0]:.100}")
        self.buckets: list[int] | None = self.manifest.get("buckets")
        self.null_condition = self._read(self.directory / NULL_CONDITION)
        # A cache that another program wrote is wrong from its first sample on.
        self[0]

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tensors = self._read(self.files[index])
        shape = tuple(tensors["latents"].shape) if "latents" in tensors else None
        expected = self.latent_shape
        if self.buckets is not None:
            expected = tuple(self.manifest["latent_shapes"][self.buckets[index]])
        if shape != expected:
            raise ValueError(
                f"cache file {self.files[index]} has latents of shape {shape}, {MANIFEST} says {expected}; "
                "remove it and run the cache step again"
            )
        return tensors

    def sample_name(self, index: int) -> str:
        """Description of a sample for messages: number, file and source."""
        path = self.files[index]
        source = saved_metadata(path).get("source")
        return f"{index} ({path.name}{f' from {shorten_value(source)}' if source else ''})"

    @property
    def settings(self) -> dict[str, Any]:
        """The options of the cache step that made it, and hashes of the encoders."""
        return self.manifest["settings"]

    @property
    def latent_shape(self) -> tuple[int, ...]:
        """`[C, F, H, W]` of videos, `[C, H, W]` of images; with buckets that of the first sample."""
        return tuple(self.manifest["latent_shape"])

    def lock(self) -> IO[str] | None:
        """Keeps the cache step of other processes from changing the cache while it is read.

        Returns:
            Lock shared with other readers, to be kept open; `None` without support for locks or without write access.

        Raises:
            ValueError: If the cache is being changed, or has changed since it was opened.
        """
        lock = share_lock(
            self.directory / LOCK, f"cache {self.directory} is being changed by another run; wait for it"
        )
        if read_manifest(self.directory) != self.manifest:
            if lock is not None:
                lock.close()
            raise ValueError(f"cache {self.directory} has changed since it was opened; start again")
        return lock

    def fingerprint(self) -> str:
        """Hash that identifies the samples of the cache.

        It covers the settings and the identities of all samples, and of some of the files what they hold. The content
        of a sample counts only if it does not say where it comes from: encoding the same data again gives the same
        fingerprint, also on a GPU that rounds otherwise.
        """
        settings = {name: value for name, value in self.settings.items() if name not in _ENCODERS}
        digest = hashlib.sha256(json.dumps([settings, self.manifest.get("samples_digest")], sort_keys=True).encode())
        digest.update(" ".join(path.name for path in self.files).encode())
        for path in evenly_spaced(self.files, 64):
            digest.update((saved_key(path) or file_fingerprint(path)).encode())
        return digest.hexdigest()[:16]

    def _read(self, path: Path) -> dict[str, torch.Tensor]:
        tensors = read_tensors(path)
        for name in _FLOATS:
            if name in tensors and not tensors[name].is_floating_point():
                found = str(tensors[name].dtype).removeprefix("torch.")
                raise ValueError(
                    f"cache file {path} has {name} of type {found}, which must be floating-point; remove it and run "
                    "the cache step again"
                )
        length = self.settings.get("max_sequence_length")
        for name in _PADDED:
            if name in tensors:
                tensor = tensors[name]
                if length is None or tensor.ndim == 0 or len(tensor) > length:
                    raise ValueError(
                        f"cache file {path} has {name} of shape {tuple(tensor.shape)}, which does not fit "
                        f"max_sequence_length {length} of {MANIFEST}; remove it and run the cache step again"
                    )
                tensors[name] = torch.cat([tensor, tensor.new_zeros(length - len(tensor), *tensor.shape[1:])])
        return tensors


def read_manifest(directory: Path) -> dict[str, Any]:
    """Reads `cache.json`.

    Raises:
        ValueError: If there is none, its format is another one, or a field is of the wrong type or out of bounds.
    """
    path = directory / MANIFEST
    if not path.is_file():
        raise ValueError(f"cache {directory} does not exist: run the cache step first, or pass data")
    manifest = read_json(path, "cache file", required={"format_version": int})
    if manifest["format_version"] != FORMAT_VERSION:
        raise ValueError(
            f"cache {directory} has format {manifest['format_version']}, this version reads {FORMAT_VERSION}; "
            "remove it and run the cache step again"
        )
    where = f"cache file {path}"
    check_fields(
        manifest,
        where,
        required={"settings": dict, "complete": bool},
        optional={"samples_digest": str, "skipped": list, "classes": dict, "buckets": list, "latent_shapes": list},
    )
    if manifest["complete"]:
        check_fields(manifest, where, required={"samples": list, "latent_shape": list})
        if not _is_shape(manifest["latent_shape"]):
            raise ValueError(f"{where}: 'latent_shape' must be a list of positive integers.")
        _check_buckets(manifest, where)
    sizes = ("height", "width", "num_frames", "max_sequence_length")
    check_fields(manifest["settings"], f"{where}: 'settings'", optional=dict.fromkeys(sizes, (int, type(None))))
    length = manifest["settings"].get("max_sequence_length")
    if length is not None and not 1 <= length <= LONGEST_TEXT:
        shown = str(length)[:20]
        raise ValueError(f"{where}: 'max_sequence_length' must be from 1 to {LONGEST_TEXT}, and is {shown}.")
    return manifest


def _is_shape(value: Any) -> bool:
    return isinstance(value, list) and all(type(length) is int and length > 0 for length in value)


def _check_buckets(manifest: dict[str, Any], where: str) -> None:
    """Checks the fields of a manifest that describe buckets, if present."""
    if "buckets" not in manifest and "latent_shapes" not in manifest:
        return
    check_fields(manifest, where, required={"buckets": list, "latent_shapes": list})
    buckets, shapes = manifest["buckets"], manifest["latent_shapes"]
    if not all(map(_is_shape, shapes)):
        raise ValueError(f"{where}: 'latent_shapes' must be lists of positive integers.")
    if len(buckets) != len(manifest["samples"]):
        raise ValueError(f"{where}: 'buckets' must have an entry for each of the {len(manifest['samples'])} samples.")
    if not all(type(bucket) is int and 0 <= bucket < len(shapes) for bucket in buckets):
        raise ValueError(f"{where}: 'buckets' must be integers from 0 to {len(shapes) - 1}.")


def saved_metadata(path: Path) -> dict[str, str]:
    """Metadata of a sample file about its source; empty if the file is missing, damaged or has none."""
    if not path.is_file():
        return {}
    try:
        with safe_open(path, framework="pt") as file:
            return file.metadata() or {}
    except SafetensorError:
        return {}


def saved_key(path: Path) -> str | None:
    """Identity of the source stored in a sample file; `None` if there is none, as in `saved_metadata`."""
    return saved_metadata(path).get("key")


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Reads one of a cache's tensor files.

    Raises:
        ValueError: If it is missing or damaged.
    """
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise damaged_file(path, error) from error


def damaged_file(path: Path, error: Exception) -> ValueError:
    """Exception for an unreadable file of a cache."""
    return ValueError(f"cache file {path} cannot be read: {error}; remove it and run the cache step again")


def write_tensors(
    path: Path, tensors: dict[str, torch.Tensor], dtype: torch.dtype, metadata: dict[str, str] | None = None
) -> None:
    """Writes one of a cache's tensor files, floating-point tensors in the dtype of the cache."""
    stored = {
        name: tensor.to("cpu", dtype if tensor.is_floating_point() else torch.int64).contiguous()
        for name, tensor in tensors.items()
    }
    with atomic_file(path) as temporary:
        save_file(stored, temporary, metadata=metadata)


class Encoder:
    """Encodes samples of one family with the encoders of its pipeline, on the device that they are on.

    Args:
        family: The family.
        pipeline: The pipeline, without its transformer.
        config: The options.
        num_classes: Number of classes of the model; 0 if it is conditioned on text.
        generated: True if samples are latents already.
    """

    def __init__(
        self, family: Family, pipeline: Any, config: CacheConfig, num_classes: int = 0, generated: bool = False
    ) -> None:
        self.family, self.pipeline, self.config, self.num_classes = family, pipeline, config, num_classes
        self.generated = generated
        self._encode_condition = lru_cache(_REMEMBERED_CONDITIONS)(
            lambda condition: family.encode_condition(pipeline, condition, config)
        )

    @torch.no_grad()
    def latents(self, media: torch.Tensor) -> torch.Tensor:
        """Latents of one sample as `DataSample.load` gives it; see `Family.encode_media`."""
        return media if self.generated else self.family.encode_media(self.pipeline, media)

    @torch.no_grad()
    def condition(self, condition: str | int) -> dict[str, torch.Tensor]:
        """Tensors of a caption or class; see `Family.encode_condition`."""
        return self._encode_condition(condition)

    @torch.no_grad()
    def null_condition(self) -> dict[str, torch.Tensor]:
        """Tensors of a sample without caption or class."""
        return self.family.encode_null_condition(self.pipeline, self.config, self.num_classes)
