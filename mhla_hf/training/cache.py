# SPDX-License-Identifier: Apache-2.0
"""Cached latents and text embeddings: videos and captions are encoded once, then training reads small files.

A cache is a directory with `cache.json` (what made it), `null_prompt.safetensors` (the embeddings of the empty
prompt) and one `samples/<number>.safetensors` per video. Every file is written under a temporary name and moved, and
`cache.json` is marked complete last, so the step can be killed and run again.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from ..files import atomic_file, remove_leftovers, write_json
from .config import CacheConfig
from .videos import VideoSample


logger = logging.getLogger(__name__)

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
        null_prompt_embeds: Embeddings of the empty prompt `[L, D]`.

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
        self.null_prompt_embeds = self._pad(_read(self.directory / NULL_PROMPT)["prompt_embeds"])

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tensors = _read(self.files[index])
        return {"latents": tensors["latents"], "prompt_embeds": self._pad(tensors["prompt_embeds"])}

    @property
    def latent_shape(self) -> tuple[int, int, int, int]:
        """`[C, F, H, W]` of the samples."""
        return tuple(self.manifest["latent_shape"])

    @property
    def text_dim(self) -> int:
        """Width of the text embeddings."""
        return int(self.null_prompt_embeds.shape[-1])

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


@torch.no_grad()
def encode_video(vae: torch.nn.Module, video: torch.Tensor) -> torch.Tensor:
    """Normalised latents of a video: the mean of the VAE's distribution, less the VAE's mean, over its deviation.

    Args:
        vae: An `AutoencoderKLWan`.
        video: `[3, F, H, W]` in [-1, 1].

    Returns:
        `[C, F', H', W']`, fp32, as Wan's transformer takes it.
    """
    parameter = next(vae.parameters())
    encoded = vae.encode(video[None].to(parameter.device, parameter.dtype)).latent_dist.mode().float()[0]
    mean = torch.tensor(vae.config.latents_mean, device=encoded.device).view(-1, 1, 1, 1)
    deviation = torch.tensor(vae.config.latents_std, device=encoded.device).view(-1, 1, 1, 1)
    return (encoded - mean) / deviation


@torch.no_grad()
def encode_prompt(pipeline: Any, prompt: str, max_sequence_length: int) -> torch.Tensor:
    """Text embeddings of a prompt without their padding `[l, D]`, from a `WanPipeline`."""
    embeddings, _ = pipeline.encode_prompt(
        prompt, do_classifier_free_guidance=False, max_sequence_length=max_sequence_length
    )
    used = embeddings[0].abs().sum(dim=1).nonzero()
    return embeddings[0, : int(used.max()) + 1 if len(used) else 0]


def check_video_size(pipeline: Any, config: CacheConfig, patch_size: Sequence[int]) -> None:
    """Checks that the VAE and the transformer's patches divide the wanted videos.

    Raises:
        ValueError: If they do not; the error names the option.
    """
    spatial, temporal = pipeline.vae_scale_factor_spatial, pipeline.vae_scale_factor_temporal
    for name, size, multiple in (
        ("height", config.height, spatial * patch_size[1]),
        ("width", config.width, spatial * patch_size[2]),
    ):
        if size % multiple:
            raise ValueError(f"{name} must be a multiple of {multiple} for this pipeline, got {size}")
    if (config.num_frames - 1) % temporal:
        raise ValueError(f"num_frames must be a multiple of {temporal} plus 1, got {config.num_frames}")


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
        _save(
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
        tensors = {"latents": encode_video(pipeline.vae, video), "prompt_embeds": known_prompts[sample.caption]}
        _save(path, tensors, dtype, {"key": _identity(sample), "source": sample.key, "caption": sample.caption})


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
    shape = list(_read(directory / "samples" / present[0])["latents"].shape)
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


def _save(
    path: Path, tensors: dict[str, torch.Tensor], dtype: torch.dtype, metadata: dict[str, str] | None = None
) -> None:
    stored = {name: tensor.to("cpu", dtype).contiguous() for name, tensor in tensors.items()}
    with atomic_file(path) as temporary:
        save_file(stored, temporary, metadata=metadata)


def _read(path: Path) -> dict[str, torch.Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise ValueError(
            f"cache file {path} cannot be read: {error}; remove it and run the cache step again"
        ) from error
