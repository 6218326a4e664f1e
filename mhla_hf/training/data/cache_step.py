# SPDX-License-Identifier: Apache-2.0
"""The cache step over several processes, from options to a finished cache."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

from ...utils.locks import PATIENCE_SECONDS, take_lock
from ..config import DIGITS, GENERATED, VIDEO_FAMILIES, CacheConfig, TrainingConfig
from ..families.sizes import PipelineSizes
from ..loading import PipelineSource
from . import cache_building
from .cache import LOCK
from .class_labels import pipeline_labels
from .digits import digit_pictures
from .encoding import ENCODERS
from .images import captioned_pictures, class_pictures
from .samples import DataSample
from .videos import captioned_videos


if TYPE_CHECKING:
    from .generated import LatentGenerator


logger = logging.getLogger(__name__)

_DIGIT_COUNT = 256

DigitVideos = Callable[[CacheConfig], Sequence[DataSample]]


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
    sizes = PipelineSizes.of_pipeline(source)
    cache_config = sizes.complete(cache_config)
    if sizes.num_classes and {cache_config.height, cache_config.width} != {sizes.own_size}:
        logger.warning(
            "height and width: the pipeline of this model makes pictures of %dx%d only, whatever it is trained on",
            sizes.own_size,
            sizes.own_size,
        )
    generator = None
    if cache_config.data == GENERATED:
        generator = _generator(source, config, cache_config, sizes, accelerator)
        samples: Sequence[DataSample] = generator.samples()
    else:
        samples = find_samples(source, sizes, cache_config, digit_videos)
    folders = ENCODERS[sizes.family].folders
    settings = cache_building.cache_settings(source.directory, cache_config, folders, sizes.num_classes)
    if generator is not None:
        settings |= generator.settings(config.component)
    work, lock = _start(directory, settings, samples, accelerator)
    if not work:
        return directory
    try:
        _encode(source, directory, config, cache_config, sizes, samples, accelerator, generator is not None)
    except KeyboardInterrupt as stop:
        stop.args = ("stopped; the same command goes on where the cache is",)
        raise
    finally:
        if lock is not None:
            lock.close()
    return directory


def _start(
    directory: Path, settings: dict[str, Any], samples: Sequence[DataSample], accelerator: Accelerator
) -> tuple[bool, IO[str] | None]:
    """Whether there is work to do, and the cache's lock if so; the main process decides, and all raise its error."""
    found: list[Any] = [False, None]
    lock, failure = None, None
    if accelerator.is_main_process:
        try:
            # A finished cache is not locked: several runs can train on it.
            if cache_building.start_cache(directory, settings, samples, main_process=False):
                directory.mkdir(parents=True, exist_ok=True)
                taken = f"cache {directory} is in use by another run; wait for it or choose another cache"
                lock = take_lock(directory / LOCK, taken, PATIENCE_SECONDS)
                # Another process may have written it while this one waited.
                found[0] = cache_building.start_cache(directory, settings, samples)
        except (OSError, ValueError) as error:
            failure, found[1] = error, str(error)
    broadcast_object_list(found)
    if lock is not None and not found[0]:
        lock.close()
    if found[1] is not None:
        raise failure or ValueError(found[1])
    return found[0], lock


def _encode(
    source: PipelineSource,
    directory: Path,
    config: TrainingConfig,
    cache_config: CacheConfig,
    sizes: PipelineSizes,
    samples: Sequence[DataSample],
    accelerator: Accelerator,
    generated: bool = False,
) -> None:
    """Encodes the samples, each process its share, and marks the cache complete."""
    pipeline = source.load_encoders()
    if accelerator.device.type != "cpu" and "text_encoder" in pipeline.components:
        # Text encoders are made for bfloat16, and Wan's takes 22 GB in float32; the VAE needs float32.
        pipeline.text_encoder.to(torch.bfloat16)
    pipeline.to(accelerator.device)
    encoder = ENCODERS[sizes.family](pipeline, cache_config, sizes.num_classes)
    if generated:
        from .generated import GeneratedEncoder

        encoder = GeneratedEncoder(encoder)
    cache_building.build_cache(
        directory,
        encoder,
        samples,
        rank=accelerator.process_index,
        world_size=accelerator.num_processes,
        progress=config.progress and accelerator.is_main_process,
    )
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        cache_building.finish_cache(directory, samples)
    accelerator.wait_for_everyone()
    del pipeline
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _generator(
    source: PipelineSource,
    config: TrainingConfig,
    cache_config: CacheConfig,
    sizes: PipelineSizes,
    accelerator: Accelerator,
) -> LatentGenerator:
    """What draws the samples: the pipeline that the one to train was converted from."""
    from .generated import LatentGenerator

    with accelerator.main_process_first():
        teacher = source.teacher.folder.parent
    return LatentGenerator(
        directory=teacher,
        config=cache_config,
        num_classes=sizes.num_classes,
        seed=config.seed,
        device=accelerator.device,
    )


def find_samples(
    source: PipelineSource, sizes: PipelineSizes, config: CacheConfig, digit_videos: DigitVideos | None = None
) -> Sequence[DataSample]:
    """The videos or pictures that `data` names.

    Args:
        source: The pipeline to train.
        sizes: What it asks of its data.
        config: The options, with every size given.
        digit_videos: See `make_cache`.

    Raises:
        ValueError: If the data are not there, have no captions or classes, or do not fit the model.
    """
    if config.data is None:
        raise ValueError("data must be given: a folder of videos or pictures, or 'digits'")
    assert config.height is not None and config.width is not None
    folder = Path(config.data)
    size: dict[str, Any] = {"height": config.height, "width": config.width, "buckets": sizes.buckets(config)}
    if config.data == DIGITS:
        count = config.num_samples or _DIGIT_COUNT
        if sizes.family not in VIDEO_FAMILIES:
            return digit_pictures(count, config.height, captions=not sizes.num_classes)
        if digit_videos is None:
            raise ValueError("data='digits' needs digit_videos for this model")
        return digit_videos(config.replace(num_samples=count))
    samples: Sequence[DataSample]
    if sizes.family in VIDEO_FAMILIES:
        assert config.num_frames is not None
        samples = captioned_videos(folder, num_frames=config.num_frames, fps=config.fps, **size)
    elif sizes.num_classes:
        labels = pipeline_labels(source)
        samples = class_pictures(folder, known_labels=labels, num_classes=sizes.num_classes, **size)
    else:
        samples = captioned_pictures(folder, **size)
    return samples[: config.num_samples]
