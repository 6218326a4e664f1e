# SPDX-License-Identifier: Apache-2.0
"""Cache step: from options to a finished cache, encoded by any number of processes."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from safetensors import SafetensorError

from ...utils.destinations import PATIENCE_SECONDS, remove_leftovers, take_lock
from ...utils.files import write_json
from ...utils.tensor_files import read_header
from ..config import DIGITS, GENERATED, CacheConfig, TrainingConfig
from ..families import check_options
from ..families.base import PipelineSizes
from ..loading import PipelineSource
from .cache import (
    FORMAT_VERSION,
    LOCK,
    MANIFEST,
    NULL_CONDITION,
    Encoder,
    damaged_file,
    read_manifest,
    saved_key,
    write_tensors,
)
from .class_labels import pipeline_labels
from .digits import digit_images
from .fingerprints import folder_fingerprint
from .folders import DataSample, UnusableSampleError
from .images import captioned_images, class_images
from .videos import captioned_videos


if TYPE_CHECKING:
    from .generated import LatentGenerator

logger = logging.getLogger(__name__)

DigitVideos = Callable[[CacheConfig], Sequence[DataSample]]

_DIGIT_COUNT = 256


def cache_settings(
    pipeline_directory: Path, config: CacheConfig, folders: Iterable[str], num_classes: int = 0
) -> dict[str, Any]:
    """Settings that a cache depends on besides its samples.

    Args:
        pipeline_directory: The pipeline that encodes.
        config: The options.
        folders: Parts of the pipeline that matter; see `Family.folders`. They are told by the hashes of their files.
        num_classes: Number of classes of the model; 0 for text-conditional models.
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
        samples: Samples to encode. A finished cache of different samples is reopened and keeps the unchanged ones.
        main_process: Write the manifest; other processes only check it.

    Returns:
        `False` if a finished cache of the same settings and samples exists, `True` if there are samples to encode.

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


def make_cache(
    config: TrainingConfig,
    cache_config: CacheConfig,
    accelerator: Accelerator,
    digit_videos: DigitVideos | None = None,
    source: PipelineSource | None = None,
) -> Path:
    """Makes the cache that `config` names, or does nothing if it is there already.

    Args:
        config: Options of the run; `model`, `cache` (or `output`), `component` and `progress` matter.
        cache_config: Options of the cache; sizes that it does not give follow from the pipeline.
        accelerator: The processes; each encodes its share.
        digit_videos: Makes the built-in videos, as many as `num_samples`, for `data='digits'`.
        source: The pipeline, if it was found already; None finds `config.model`.

    Returns:
        The cache's directory.

    Raises:
        ValueError: If options or data do not fit the pipeline, or a cache made otherwise is there.
    """
    if config.model is None:
        raise ValueError("model must be given: a pipeline directory or a Hub id")
    if config.cache is None and config.output is None:
        raise ValueError("cache must be given: the directory to write")
    directory = Path(config.cache) if config.cache is not None else Path(str(config.output)) / "cache"
    if source is None:
        with accelerator.main_process_first():
            source = PipelineSource.find(config.model, config.component, config.teacher)
    sizes = source.sizes
    if cache_config.data == GENERATED:
        with accelerator.main_process_first():
            # Found, or downloaded, and remembered.
            _ = source.teacher
    cache_config, samples, generator = open_samples(
        source, cache_config, config.seed, accelerator.device, digit_videos
    )
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
        pipeline.to(accelerator.device)
        build_cache(
            directory,
            Encoder(sizes.family, pipeline, cache_config, sizes.num_classes, generated=generator is not None),
            samples,
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
    except KeyboardInterrupt as stop:
        stop.args = ("stopped; the same command resumes the cache",)
        raise
    finally:
        if lock is not None:
            lock.close()
    return directory


def _start(
    directory: Path, settings: dict[str, Any], samples: Sequence[DataSample], accelerator: Accelerator
) -> tuple[bool, Any]:
    """Decides on the main process whether samples have to be encoded, and takes the lock; all raise its error."""
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
    source: PipelineSource,
    config: CacheConfig,
    seed: int,
    device: torch.device,
    digit_videos: DigitVideos | None = None,
) -> tuple[CacheConfig, Sequence[DataSample], LatentGenerator | None]:
    """The samples to encode, none of which is read or drawn yet.

    Args:
        source: The pipeline to train.
        config: The options.
        seed: Seed of samples that the original draws.
        device: Where it draws them.
        digit_videos: See `make_cache`.

    Returns:
        The options with every size given, the samples, and what draws them if the original does.

    Raises:
        ValueError: If options or data do not fit the pipeline.
    """
    sizes = source.sizes
    check_options(config, source.family.name)
    config = sizes.complete(config)
    if config.data != GENERATED:
        return config, find_samples(source, sizes, config, digit_videos), None
    from .generated import LatentGenerator

    directory = source.teacher.folder.parent
    generator = LatentGenerator(
        directory=directory, config=config, num_classes=sizes.num_classes, seed=seed, device=device
    )
    return config, generator.samples(), generator


def find_samples(
    source: PipelineSource, sizes: PipelineSizes, config: CacheConfig, digit_videos: DigitVideos | None = None
) -> Sequence[DataSample]:
    """The videos or images that `data` names.

    Args:
        source: The pipeline to train.
        sizes: Sizes that the pipeline can be trained on.
        config: The options, with every size given.
        digit_videos: See `make_cache`.

    Raises:
        ValueError: If the data are not there, have no captions or classes, or do not fit the model.
    """
    if config.data is None:
        raise ValueError("data must be given: a folder of videos or images, or 'digits'")
    assert config.height is not None and config.width is not None
    folder = Path(config.data)
    size: dict[str, Any] = {"height": config.height, "width": config.width, "buckets": sizes.buckets(config)}
    if config.data == DIGITS:
        count = config.num_samples or _DIGIT_COUNT
        if not sizes.family.video_size:
            return digit_images(count, config.height, captions=not sizes.num_classes)
        if digit_videos is None:
            raise ValueError("data='digits' needs digit_videos for this model")
        return digit_videos(config.replace(num_samples=count))
    samples: Sequence[DataSample]
    if sizes.family.video_size:
        assert config.num_frames is not None
        samples = captioned_videos(folder, num_frames=config.num_frames, fps=config.fps, **size)
    elif sizes.num_classes:
        labels = pipeline_labels(source)
        samples = class_images(folder, known_labels=labels, num_classes=sizes.num_classes, **size)
    else:
        samples = captioned_images(folder, **size)
    return samples[: config.num_samples]
