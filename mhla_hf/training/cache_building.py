# SPDX-License-Identifier: Apache-2.0
"""Making a cache: what it depends on, encoding each process's share of the videos, and marking it complete."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from ..files import remove_leftovers, write_json
from .cache import FORMAT_VERSION, MANIFEST, NULL_PROMPT, read_manifest, read_tensors, write_tensors
from .config import CacheConfig
from .encoding import encode_prompt, encode_videos
from .videos import VideoSample


logger = logging.getLogger(__name__)


def cache_settings(pipeline_directory: Path, config: CacheConfig) -> dict[str, Any]:
    """What a cache depends on, besides the videos: sizes, types, and the encoders by the hashes of their files."""
    settings = config.to_dict()
    settings["data"] = settings["data"] if config.data in (None, "digits") else str(Path(str(config.data)).resolve())
    settings["vae"] = component_fingerprint(pipeline_directory / "vae")
    settings["text_encoder"] = component_fingerprint(pipeline_directory / "text_encoder")
    settings["tokenizer"] = component_fingerprint(pipeline_directory / "tokenizer")
    return settings


def component_fingerprint(folder: Path) -> str:
    """A hash over the small files of a component and over the headers of its weights.

    Headers hold names, shapes and offsets; the first and last mebibyte of the tensors stand for the rest, so that
    eleven gigabytes of text encoder need not be read.
    """
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        size = path.stat().st_size
        digest.update(f"{path.relative_to(folder).as_posix()}:{size};".encode())
        with path.open("rb") as file:
            digest.update(file.read(1 << 20))
            if size > 1 << 20:
                file.seek(-(1 << 20), 2)
                digest.update(file.read())
    return digest.hexdigest()[:16]


def start_cache(
    directory: Path, settings: dict[str, Any], samples: Sequence[VideoSample] = (), *, main_process: bool = True
) -> bool:
    """Opens a cache for writing.

    Args:
        directory: The cache.
        settings: See `cache_settings`.
        samples: The videos; a finished cache of other ones is opened again, and keeps what has not changed.
        main_process: Whether to write; other processes only check.

    Returns:
        Whether there is work to do: False if a finished cache of the same settings and videos is there.

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
            logger.info("cache: the videos or captions of %s have changed; encoding what is new", directory)
            if main_process:
                write_json(directory / MANIFEST, {**manifest, "complete": False})
    elif main_process:
        write_json(directory / MANIFEST, {"format_version": FORMAT_VERSION, "settings": settings, "complete": False})
    return True


def build_cache(
    directory: Path,
    pipeline: Any,
    samples: Sequence[VideoSample],
    config: CacheConfig,
    *,
    rank: int = 0,
    world_size: int = 1,
    progress: bool = True,
) -> None:
    """Encodes this process's share of the videos, skipping those already there.

    Args:
        directory: A cache that `start_cache` opened.
        pipeline: A `WanPipeline`; its VAE, text encoder and tokenizer are used, on the device they are on.
        samples: All videos.
        config: The options.
        rank: Number of this process; it takes every `world_size`-th video.
        world_size: Number of processes.
        progress: Show a progress bar.
    """
    from tqdm.auto import tqdm

    (directory / "samples").mkdir(parents=True, exist_ok=True)
    dtype = getattr(torch, config.cache_dtype)
    if rank == 0:
        write_tensors(
            directory / NULL_PROMPT, {"prompt_embeds": encode_prompt(pipeline, "", config.max_sequence_length)}, dtype
        )
    numbers = range(rank, len(samples), world_size)
    known_prompts: dict[str, torch.Tensor] = {}
    for number in tqdm(numbers, desc="caching", unit="video", disable=not progress):
        sample, path = samples[number], directory / "samples" / f"{number:06d}.safetensors"
        if _saved_key(path) == _identity(sample):
            continue
        video = sample.load()
        if video is None:
            logger.warning("cache: %s has fewer than %d frames and is left out", sample.key, config.num_frames)
            path.unlink(missing_ok=True)
            continue
        if sample.caption not in known_prompts:
            known_prompts = {sample.caption: encode_prompt(pipeline, sample.caption, config.max_sequence_length)}
        tensors = {
            "latents": encode_videos(pipeline.vae, video[None])[0],
            "prompt_embeds": known_prompts[sample.caption],
        }
        write_tensors(
            path, tensors, dtype, {"key": _identity(sample), "source": sample.key, "caption": sample.caption}
        )


def finish_cache(directory: Path, samples: Sequence[VideoSample]) -> None:
    """Marks a cache complete, once every process has built its share.

    Raises:
        ValueError: If no video was long enough.
    """
    manifest = read_manifest(directory)
    names = [f"{number:06d}.safetensors" for number in range(len(samples))]
    present = [name for name in names if (directory / "samples" / name).is_file()]
    if not present:
        raise ValueError(f"data: none of the {len(samples)} videos has num_frames frames")
    for path in (directory / "samples").glob("*.safetensors"):
        if path.name not in names:
            path.unlink()
    remove_leftovers(directory / "samples")
    shape = list(read_tensors(directory / "samples" / present[0])["latents"].shape)
    write_json(
        directory / MANIFEST,
        {
            **manifest,
            "samples": present,
            "skipped": [sample.key for sample, name in zip(samples, names) if name not in present],
            "latent_shape": shape,
            "samples_digest": samples_digest(samples),
            "complete": True,
        },
    )


def samples_digest(samples: Sequence[VideoSample]) -> str:
    """A hash over the identities of all videos, in order."""
    return hashlib.sha256("".join(_identity(sample) for sample in samples).encode()).hexdigest()


def _identity(sample: VideoSample) -> str:
    return hashlib.sha256(f"{sample.key}\n{sample.caption}".encode()).hexdigest()


def _saved_key(path: Path) -> str | None:
    if not path.is_file():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            return (file.metadata() or {}).get("key")
    except SafetensorError:
        return None
