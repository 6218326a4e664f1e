# SPDX-License-Identifier: Apache-2.0
"""Making a cache: what it depends on, encoding each process's share of the samples, and marking it complete."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from ...utils.files import remove_leftovers, write_json
from ...utils.tensor_files import read_header
from ..config import DIGITS, GENERATED, CacheConfig
from .cache import FORMAT_VERSION, MANIFEST, NULL_CONDITION, damaged_file, read_manifest, saved_key, write_tensors
from .encoding import Encoder
from .fingerprints import folder_fingerprint
from .samples import DataSample, UnusableSampleError


logger = logging.getLogger(__name__)


def cache_settings(
    pipeline_directory: Path, config: CacheConfig, folders: Iterable[str], num_classes: int = 0
) -> dict[str, Any]:
    """What a cache depends on, besides the samples.

    Args:
        pipeline_directory: The pipeline that encodes.
        config: The options.
        folders: Parts of the pipeline that matter; see `Encoder.folders`. They are told by the hashes of their files.
        num_classes: How many classes the model has; 0 if it is conditioned on text.
    """
    settings = config.to_dict()
    named = config.data in (None, DIGITS, GENERATED)
    settings["data"] = settings["data"] if named else str(Path(str(config.data)).resolve())
    settings["num_classes"] = num_classes
    # Caches without these options are as they were before there were such.
    for name in ("buckets", "generated_steps", "generated_guidance"):
        if settings[name] is None:
            del settings[name]
    # The samples hold what they say, wherever the file is.
    del settings["prompts"]
    return {**settings, **{folder: folder_fingerprint(pipeline_directory / folder) for folder in folders}}


def start_cache(
    directory: Path, settings: dict[str, Any], samples: Sequence[DataSample] = (), *, main_process: bool = True
) -> bool:
    """Opens a cache for writing.

    Args:
        directory: The cache.
        settings: See `cache_settings`.
        samples: What to encode; a finished cache of other ones is opened again, and keeps what has not changed.
        main_process: Whether to write; other processes only check.

    Returns:
        Whether there is work to do: False if a finished cache of the same settings and samples is there.

    Raises:
        ValueError: If a cache made with other settings is there; the error names them.
    """
    if (directory / MANIFEST).is_file():
        manifest = read_manifest(directory)
        different = sorted(
            name for name in {*settings, *manifest["settings"]} if settings.get(name) != manifest["settings"].get(name)
        )
        if different:
            old = manifest["settings"]
            changes = ", ".join(f"{name} {old.get(name)!r} not {settings.get(name)!r}" for name in different)
            raise ValueError(f"cache {directory} was made with {changes}; remove it or choose another cache")
        if manifest.get("complete"):
            if not samples or manifest.get("samples_digest") == samples_digest(samples):
                return False
            logger.info("cache: the samples or captions of %s have changed; encoding what is new", directory)
            if main_process:
                write_json(directory / MANIFEST, {**manifest, "complete": False})
    elif main_process:
        write_json(directory / MANIFEST, {"format_version": FORMAT_VERSION, "settings": settings, "complete": False})
    return True


def build_cache(
    directory: Path,
    encoder: Encoder,
    samples: Sequence[DataSample],
    *,
    rank: int = 0,
    world_size: int = 1,
    progress: bool = True,
) -> None:
    """Encodes this process's share of the samples, skipping those already there; unusable ones are left out.

    Args:
        directory: A cache that `start_cache` opened.
        encoder: Encodes them.
        samples: All samples.
        rank: Number of this process; it takes every `world_size`-th sample.
        world_size: Number of processes.
        progress: Show a progress bar.
    """
    from tqdm.auto import tqdm

    (directory / "samples").mkdir(parents=True, exist_ok=True)
    dtype = getattr(torch, encoder.config.cache_dtype)
    if rank == 0:
        write_tensors(directory / NULL_CONDITION, encoder.null_condition(), dtype)
    numbers = range(rank, len(samples), world_size)
    for number in tqdm(numbers, desc="caching", unit="sample", disable=not progress):
        sample, path = samples[number], directory / "samples" / f"{number:06d}.safetensors"
        if saved_key(path) == _identity(sample):
            continue
        try:
            media = sample.load()
        except UnusableSampleError as error:
            logger.warning("cache: left out: %s", error)
            path.unlink(missing_ok=True)
            continue
        tensors = {"latents": encoder.latents(media), **encoder.condition(sample.condition)}
        metadata = {"key": _identity(sample), "source": sample.key, "condition": str(sample.condition)}
        write_tensors(path, tensors, dtype, metadata)


def finish_cache(directory: Path, samples: Sequence[DataSample]) -> None:
    """Marks a cache complete, once every process has built its share.

    Raises:
        ValueError: If none of the samples could be used.
    """
    manifest = read_manifest(directory)
    names = [f"{number:06d}.safetensors" for number in range(len(samples))]
    present = [name for name in names if (directory / "samples" / name).is_file()]
    if not present:
        raise ValueError(f"data: none of the {len(samples)} samples could be used; the warnings say why")
    for path in (directory / "samples").glob("*.safetensors"):
        if path.name not in names:
            path.unlink()
    remove_leftovers(directory / "samples")
    made = set(present)
    skipped = [sample.key for sample, name in zip(samples, names) if name not in made]
    if skipped:
        logger.warning(
            "cache: %d of %d samples were left out; 'skipped' in %s lists them",
            len(skipped), len(samples), directory / MANIFEST,
        )  # fmt: skip
    paths = [directory / "samples" / name for name in present]
    # Without buckets all have one size, which reading them checks.
    shapes = [_latent_shape(path) for path in (paths if "buckets" in manifest["settings"] else paths[:1])]
    every = sorted(set(shapes))
    sorted_in = {"buckets": [every.index(shape) for shape in shapes], "latent_shapes": every}
    write_json(
        directory / MANIFEST,
        {
            **manifest,
            "samples": present,
            "skipped": skipped,
            "latent_shape": shapes[0],
            **(sorted_in if "buckets" in manifest["settings"] else {}),
            "classes": {sample.class_name: sample.condition for sample in samples if sample.class_name is not None},
            "samples_digest": samples_digest(samples),
            "complete": True,
        },
    )


def _latent_shape(path: Path) -> tuple[int, ...]:
    try:
        return tuple(read_header(path)[0]["latents"]["shape"])
    except (OSError, SafetensorError, KeyError) as error:
        raise damaged_file(path, error) from error


def samples_digest(samples: Sequence[DataSample]) -> str:
    """A hash over the identities of all samples, in order."""
    return hashlib.sha256("".join(_identity(sample) for sample in samples).encode()).hexdigest()


def _identity(sample: DataSample) -> str:
    return hashlib.sha256(f"{sample.key}\n{sample.condition}".encode()).hexdigest()
