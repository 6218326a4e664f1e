# SPDX-License-Identifier: Apache-2.0
"""Cache of latents and conditions: videos, images and captions are encoded once, by any number of processes.

A cache is a directory with `cache.json` (what made it), `null_condition.safetensors` (the condition of a sample
without caption or class) and one `samples/<number>.safetensors` per video or image. Every file is written under a
temporary name and moved, and `cache.json` is marked complete last, so the step can be killed and run again.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import IO, Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from ...utils.destinations import PATIENCE_SECONDS, remove_leftovers, share_lock, take_lock
from ...utils.files import atomic_file, check_fields, path_inside, read_json, write_json
from ...utils.messages import shorten_text, shorten_value
from ..config import DIGITS, GENERATED, LONGEST_TEXT, CacheConfig, TrainingConfig
from ..families import check_options
from ..families.base import PipelineSizes
from ..loading import PipelineSource
from .digits import digit_images, digit_videos
from .fingerprints import evenly_spaced, file_fingerprint, folder_fingerprint
from .folders import DataSample, UnusableSampleError
from .generated import LatentGenerator
from .images import captioned_images, class_images, pipeline_labels
from .videos import captioned_videos


logger = logging.getLogger(__name__)

FORMAT_VERSION = 3
MANIFEST = "cache.json"
LOCK = ".lock"
NULL_CONDITION = "null_condition.safetensors"
# Stored without their padding.
_PADDED = ("prompt_embeds", "prompt_attention_mask")
_FLOATS = ("latents", "prompt_embeds")
# Settings that are fingerprints of parts of the pipeline.
_ENCODERS = ("vae", "text_encoder", "tokenizer")
_FIELDS: dict[str, Any] = {"settings": dict, "complete": bool}
_OPTIONAL_FIELDS: dict[str, Any] = {
    **dict.fromkeys(("samples", "skipped", "latent_shape", "latent_shapes", "buckets"), list),
    "samples_digest": str,
    "classes": dict,
}
# Captions often repeat: all digits have ten between them.
_REMEMBERED_CONDITIONS = 64
_DIGIT_COUNT = 256


class LatentDataset:
    """The samples of a finished cache; see `LatentSamples` for their content.

    Text is stored without its padding and padded with zeros when read: Wan's pipeline pads so, and SANA's masks it.

    Args:
        directory: The cache.

    Attributes:
        manifest: The content of `cache.json`.
        null_condition: Condition tensors of a sample without caption or class.
        buckets: Number of each sample's bucket; None where all have one size.

    Raises:
        ValueError: If the cache does not exist, is unfinished, of another format, or its first sample cannot be read.
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        self.manifest = read_manifest(self.directory)
        names = self.manifest.get("samples")
        if not self.manifest["complete"] or not names:
            raise ValueError(f"cache {directory} is unfinished or empty: run the cache step again")
        where = f"cache file {self.directory / MANIFEST}: 'samples'"
        self.files = [path_inside(self.directory / "samples", name, where) for name in names]
        self.buckets: list[int] | None = self.manifest.get("buckets")
        self._shapes = self.manifest.get("latent_shapes") or [self.manifest.get("latent_shape")]
        numbers = self.buckets if self.buckets is not None else [0] * len(self.files)
        in_range = all(type(number) is int and 0 <= number < len(self._shapes) for number in numbers)
        if len(numbers) != len(self.files) or not in_range:
            raise ValueError(
                f"cache file {self.directory / MANIFEST}: 'buckets' must give each sample an entry of 'latent_shapes'"
            )
        self.null_condition = self._read(self.directory / NULL_CONDITION)
        # A cache that another program wrote is wrong from its first sample on.
        self[0]

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self._read(self.files[index], self._shapes[0 if self.buckets is None else self.buckets[index]])

    def sample_name(self, index: int) -> str:
        """Describe a sample in messages: number, file and source."""
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
        """Keep the cache step of other processes from changing the cache while it is read.

        Returns:
            Lock shared with other readers, to be kept open; `None` without support for locks or without write access.

        Raises:
            ValueError: If the cache is being changed, or has changed since it was opened.
        """
        taken = f"cache {self.directory} is being changed by another run; wait for it"
        lock = share_lock(self.directory / LOCK, taken)
        if read_manifest(self.directory) != self.manifest:
            if lock is not None:
                lock.close()
            raise ValueError(f"cache {self.directory} has changed since it was opened; start again")
        return lock

    def fingerprint(self) -> str:
        """Hash that identifies the samples of the cache.

        It covers the settings and the identities of all samples, or the content of some where these are unknown.
        Encoding the same data again gives the same fingerprint, also on a GPU that rounds differently.
        """
        settings = {name: value for name, value in self.settings.items() if name not in _ENCODERS}
        identity: Any = self.manifest.get("samples_digest")
        if identity is None:
            identity = [file_fingerprint(path) for path in evenly_spaced(self.files, 64)]
        parts = [settings, identity, [path.name for path in self.files]]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]

    def _read(self, path: Path, shape: Any = None) -> dict[str, torch.Tensor]:
        """Read a file, check it against the manifest and pad its text."""
        length, problem = self.settings.get("max_sequence_length") or 0, ""
        try:
            tensors = load_file(path)
        except (OSError, SafetensorError) as error:
            tensors, problem = {}, f"cannot be read ({shorten_text(str(error))})"
        for name, tensor in tensors.items():
            if name in _FLOATS and not tensor.is_floating_point():
                problem = f"has {name} of type {str(tensor.dtype).removeprefix('torch.')}, not floating-point"
            elif name in _PADDED and (tensor.ndim == 0 or len(tensor) > length):
                problem = f"has {name} of shape {tuple(tensor.shape)}, which does not fit max_sequence_length {length}"
            elif name in _PADDED:
                tensors[name] = torch.cat([tensor, tensor.new_zeros(length - len(tensor), *tensor.shape[1:])])
        found = list(tensors["latents"].shape) if "latents" in tensors else None
        if not problem and shape is not None and found != shape:
            problem = f"has latents of shape {found}, {MANIFEST} says {shorten_value(shape)}"
        if problem:
            raise ValueError(f"cache file {path} {problem}; remove it and run the cache step again")
        return tensors


def read_manifest(directory: Path) -> dict[str, Any]:
    """Read `cache.json`.

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
    check_fields(manifest, where, required=_FIELDS, optional=_OPTIONAL_FIELDS)
    sizes = ("height", "width", "num_frames", "max_sequence_length")
    check_fields(manifest["settings"], f"{where}: 'settings'", optional=dict.fromkeys(sizes, (int, type(None))))
    length = manifest["settings"].get("max_sequence_length")
    # It decides how much memory the padding takes.
    if length is not None and not 1 <= length <= LONGEST_TEXT:
        shown = shorten_value(length)
        raise ValueError(f"{where}: 'max_sequence_length' must be from 1 to {LONGEST_TEXT}, and is {shown}.")
    return manifest


def saved_metadata(path: Path) -> dict[str, str]:
    """Metadata of a sample file about its source; empty if the file is missing, damaged or has none."""
    try:
        with safe_open(path, framework="pt") as file:
            return file.metadata() or {}
    except (OSError, SafetensorError):
        return {}


def write_tensors(
    path: Path, tensors: dict[str, torch.Tensor], dtype: torch.dtype, metadata: dict[str, str] | None = None
) -> None:
    """Write one of a cache's tensor files, floating-point tensors in the dtype of the cache."""
    stored = {
        name: tensor.to("cpu", dtype if tensor.is_floating_point() else torch.int64).contiguous()
        for name, tensor in tensors.items()
    }
    with atomic_file(path) as temporary:
        save_file(stored, temporary, metadata=metadata)


def cache_settings(
    pipeline_directory: Path, config: CacheConfig, folders: Iterable[str], num_classes: int = 0
) -> dict[str, Any]:
    """Settings that a cache depends on besides its samples.

    Args:
        pipeline_directory: The pipeline that encodes.
        config: The options.
        folders: Parts of the pipeline that matter, identified by the hashes of their files; see `Family.folders`.
        num_classes: Number of classes of the model; 0 for text-conditional models.
    """
    settings = config.to_dict()
    if config.data not in (None, DIGITS, GENERATED):
        settings["data"] = str(Path(str(config.data)).resolve())
    settings["num_classes"] = num_classes
    for name in ("buckets", "generated_steps", "generated_guidance"):
        if settings[name] is None:
            del settings[name]
    # The identities of the samples cover the prompts, wherever their file is.
    del settings["prompts"]
    return {**settings, **{folder: folder_fingerprint(pipeline_directory / folder) for folder in folders}}


def start_cache(
    directory: Path, settings: dict[str, Any], samples: Sequence[DataSample] = (), *, main_process: bool = True
) -> bool:
    """Open a cache for writing.

    Args:
        directory: The cache.
        settings: See `cache_settings`.
        samples: Samples to encode. A finished cache of different samples is reopened and keeps the unchanged ones.
        main_process: Write the manifest; other processes only check it.

    Returns:
        `False` if a finished cache of the same settings and samples exists, `True` if there are samples to encode.

    Raises:
        ValueError: If a cache made with other settings is there; the error names them.
    """
    manifest: dict[str, Any] = {"format_version": FORMAT_VERSION, "settings": settings}
    if (directory / MANIFEST).is_file():
        manifest = read_manifest(directory)
        old = manifest["settings"]
        different = sorted(name for name in {*settings, *old} if settings.get(name) != old.get(name))
        if different:
            changes = ", ".join(f"{name} {old.get(name)!r} not {settings.get(name)!r}" for name in different)
            raise ValueError(f"cache {directory} was made with {changes}; remove it or choose another cache")
        if manifest["complete"]:
            if not samples or manifest.get("samples_digest") == samples_digest(samples):
                return False
            logger.info("cache: the samples or captions of %s have changed; encoding what is new", directory)
    if main_process:
        write_json(directory / MANIFEST, {**manifest, "complete": False})
    return True


@torch.no_grad()
def build_cache(
    directory: Path,
    sizes: PipelineSizes,
    pipeline: Any,
    config: CacheConfig,
    samples: Sequence[DataSample],
    *,
    generated: bool = False,
    rank: int = 0,
    world_size: int = 1,
    progress: bool = True,
) -> None:
    """Encode this process's share of the samples, skipping those already there; unusable ones are left out.

    Args:
        directory: A cache that `start_cache` opened.
        sizes: The family and the number of classes of the model.
        pipeline: The pipeline, without its transformer, on the device to encode on.
        config: The options.
        samples: All samples.
        generated: True if samples are latents already.
        rank: Number of this process; it takes every `world_size`-th sample.
        world_size: Number of processes.
        progress: Show a progress bar.
    """
    from tqdm.auto import tqdm

    (directory / "samples").mkdir(parents=True, exist_ok=True)
    family, dtype = sizes.family, getattr(torch, config.cache_dtype)
    encode = lru_cache(_REMEMBERED_CONDITIONS)(lambda condition: family.encode_condition(pipeline, condition, config))
    if rank == 0:
        null_condition = family.encode_null_condition(pipeline, config, sizes.num_classes)
        write_tensors(directory / NULL_CONDITION, null_condition, dtype)
    numbers = range(rank, len(samples), world_size)
    for number in tqdm(numbers, desc="caching", unit="sample", disable=not progress):
        sample, path = samples[number], directory / "samples" / f"{number:06d}.safetensors"
        if saved_metadata(path).get("key") == _identity(sample):
            continue
        try:
            media = sample.load()
        except UnusableSampleError as error:
            logger.warning("cache: left out: %s", error)
            path.unlink(missing_ok=True)
            continue
        latents = media if generated else family.encode_media(pipeline, media)
        metadata = {"key": _identity(sample), "source": sample.key, "condition": str(sample.condition)}
        write_tensors(path, {"latents": latents, **encode(sample.condition)}, dtype, metadata)


def finish_cache(directory: Path, samples: Sequence[DataSample]) -> None:
    """Mark a cache complete, once every process has built its share.

    Raises:
        ValueError: If none of the samples could be used.
    """
    manifest = read_manifest(directory)
    paths = [directory / "samples" / f"{number:06d}.safetensors" for number in range(len(samples))]
    present = [path for path in paths if path.is_file()]
    if not present:
        raise ValueError(f"data: none of the {len(samples)} samples could be used; the warnings say why")
    for path in set((directory / "samples").glob("*.safetensors")) - set(paths):
        path.unlink()
    remove_leftovers(directory / "samples")
    made = set(present)
    skipped = [sample.key for sample, path in zip(samples, paths) if path not in made]
    if skipped:
        logger.warning(
            "cache: %d of %d samples were left out; 'skipped' in %s lists them",
            len(skipped), len(samples), directory / MANIFEST,
        )  # fmt: skip
    # Without buckets all have one size, which reading them checks.
    buckets = {}
    shapes = [_latent_shape(path) for path in (present if "buckets" in manifest["settings"] else present[:1])]
    if "buckets" in manifest["settings"]:
        every = sorted(set(shapes))
        buckets = {"buckets": [every.index(shape) for shape in shapes], "latent_shapes": every}
    write_json(
        directory / MANIFEST,
        {
            **manifest,
            "samples": [path.name for path in present],
            "skipped": skipped,
            "latent_shape": shapes[0],
            **buckets,
            "classes": {sample.class_name: sample.condition for sample in samples if sample.class_name is not None},
            "samples_digest": samples_digest(samples),
            "complete": True,
        },
    )


def _latent_shape(path: Path) -> tuple[int, ...]:
    with safe_open(path, framework="pt") as file:
        return tuple(file.get_slice("latents").get_shape())


def samples_digest(samples: Sequence[DataSample]) -> str:
    """Hash the identities of all samples, in order."""
    return hashlib.sha256("".join(_identity(sample) for sample in samples).encode()).hexdigest()


def _identity(sample: DataSample) -> str:
    return hashlib.sha256(f"{sample.key}\n{sample.condition}".encode()).hexdigest()


def make_cache(
    config: TrainingConfig, cache_config: CacheConfig, accelerator: Accelerator, source: PipelineSource | None = None
) -> Path:
    """Make the cache that `config` names, or do nothing if it exists already.

    Args:
        config: Options of the run; `model`, `cache` (or `output`), `component` and `progress` matter.
        cache_config: Options of the cache; sizes that it does not give follow from the pipeline.
        accelerator: The processes; each encodes its share.
        source: The pipeline, if it was found already; None finds `config.model`.

    Returns:
        The cache's directory.

    Raises:
        ValueError: If options or data do not fit the pipeline, or a cache made otherwise is there.
    """
    directory = Path(config.cache) if config.cache is not None else Path(str(config.output)) / "cache"
    for name, value, what in (
        ("model", config.model, "a pipeline directory or a Hub id"),
        ("cache", config.cache or config.output, "the directory to write"),
        ("data", cache_config.data, "a folder of videos or images, or 'digits'"),
    ):
        if value is None:
            raise ValueError(f"{name} must be given: {what}")
    with accelerator.main_process_first():
        if source is None:
            source = PipelineSource.find(str(config.model), config.component, config.teacher)
        if cache_config.data == GENERATED:
            # Found, or downloaded, and remembered.
            _ = source.teacher
    cache_config, samples, generator = open_samples(source, cache_config, config.seed, accelerator.device)
    sizes = source.sizes
    if sizes.num_classes and {cache_config.height, cache_config.width} != {sizes.own_size}:
        logger.warning(
            "height and width: the pipeline of this model makes images of %dx%d only, whatever it is trained on",
            sizes.own_size,
            sizes.own_size,
        )
    settings = cache_settings(source.directory, cache_config, source.family.folders, sizes.num_classes)
    if generator is not None:
        settings |= generator.settings(config.component)
    work, lock = _start(directory, settings, samples, accelerator)
    if not work:
        return directory
    try:
        pipeline = source.load_encoders()
        if accelerator.device.type != "cpu" and "text_encoder" in pipeline.components:
            # Text encoders are made for bfloat16, and Wan's takes 22 GB in float32; the VAE needs float32.
            pipeline.text_encoder.to(torch.bfloat16)
        build_cache(
            directory,
            sizes,
            pipeline.to(accelerator.device),
            cache_config,
            samples,
            generated=generator is not None,
            rank=accelerator.process_index,
            world_size=accelerator.num_processes,
            progress=config.progress and accelerator.is_main_process,
        )
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            finish_cache(directory, samples)
        accelerator.wait_for_everyone()
        del pipeline
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    finally:
        if lock is not None:
            lock.close()
    return directory


def _start(
    directory: Path, settings: dict[str, Any], samples: Sequence[DataSample], accelerator: Accelerator
) -> tuple[bool, Any]:
    """Decide in the main process whether there are samples to encode, and take the lock; all raise its error."""
    found: list[Any] = [False, None]
    lock, failure = None, None
    if accelerator.is_main_process:
        try:
            # A finished cache is not locked: several runs can train on it.
            if start_cache(directory, settings, samples, main_process=False):
                directory.mkdir(parents=True, exist_ok=True)
                taken = f"cache {directory} is in use by another run; wait for it or choose another cache"
                lock = take_lock(directory / LOCK, taken, PATIENCE_SECONDS)
                # Another process may have written it while this one waited.
                found[0] = start_cache(directory, settings, samples)
        except (OSError, ValueError) as error:
            failure, found[1] = error, str(error)
    broadcast_object_list(found)
    if lock is not None and not found[0]:
        lock.close()
    if found[1] is not None:
        raise failure or ValueError(found[1])
    return found[0], lock


def open_samples(
    source: PipelineSource, config: CacheConfig, seed: int, device: torch.device
) -> tuple[CacheConfig, Sequence[DataSample], LatentGenerator | None]:
    """List the samples to encode, without reading or drawing one.

    Args:
        source: The pipeline to train.
        config: The options.
        seed: Seed of samples that the original draws.
        device: Where it draws them.

    Returns:
        The options with every size given, the samples, and what draws them if the original does.

    Raises:
        ValueError: If the data are not there, have no captions or classes, or options or data do not fit the pipeline.
    """
    sizes = source.sizes
    check_options(config, source.family.name)
    config = sizes.complete(config)
    assert config.data is not None
    size: dict[str, Any] = {"height": config.height, "width": config.width, "buckets": sizes.buckets(config)}
    folder = Path(config.data)
    samples: Sequence[DataSample]
    if config.data == GENERATED:
        directory = source.teacher.folder.parent
        generator = LatentGenerator(
            directory=directory, config=config, num_classes=sizes.num_classes, seed=seed, device=device
        )
        return config, generator.samples(), generator
    if config.data == DIGITS:
        count, side = config.num_samples or _DIGIT_COUNT, size["height"]
        if config.num_frames is not None:
            samples = digit_videos(count, side, config.num_frames)
        else:
            samples = digit_images(count, side, captions=not sizes.num_classes)
    elif config.num_frames is not None:
        samples = captioned_videos(folder, num_frames=config.num_frames, fps=config.fps, **size)
    elif sizes.num_classes:
        labels = pipeline_labels(source)
        samples = class_images(folder, known_labels=labels, num_classes=sizes.num_classes, **size)
    else:
        samples = captioned_images(folder, **size)
    return config, samples[: config.num_samples], None
