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
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from tqdm.auto import tqdm

from ...models.directory import ModelDirectory
from ...utils.destinations import PATIENCE_SECONDS, remove_leftovers, share_lock, take_lock
from ...utils.files import atomic_file, check_fields, path_inside, read_json, write_json
from ...utils.locations import download_pipeline
from ...utils.messages import shorten_text, shorten_value
from ..config import DIGITS, GENERATED, LONGEST_TEXT, Bucket, CacheConfig, TrainingConfig, check_options, parse_sizes
from ..families import Family, family_of_class, load_encoders
from ..processes import Processes
from .batches import stable_seed
from .digits import digit_images, digit_videos
from .folders import DataSample, UnusableSampleError, folder_fingerprint
from .images import captioned_images, class_images, pipeline_labels
from .videos import captioned_videos


logger = logging.getLogger(__name__)

FORMAT_VERSION = 4
MANIFEST = "cache.json"
LOCK = ".lock"
NULL_CONDITION = "null_condition.safetensors"
# Stored without their padding.
_PADDED = ("prompt_embeds", "prompt_attention_mask")
_FLOATS = ("latents", "prompt_embeds")
# Settings that are fingerprints of parts of the pipeline.
_ENCODERS = ("vae", "text_encoder", "tokenizer")
_FIELDS: dict[str, Any] = {"settings": dict, "complete": bool}
_FINISHED: dict[str, Any] = {
    **dict.fromkeys(("samples", "skipped", "latent_shapes", "buckets"), list),
    "samples_digest": str,
    "classes": dict,
}
# Captions often repeat: all digits have ten between them.
_REMEMBERED_CONDITIONS = 64
_MADE_COUNT = 256


class LatentDataset:
    """The samples of a finished cache; see `LatentSamples` for their content.

    Text is stored without its padding and padded with zeros when read: Wan's pipeline pads so, and SANA's masks it.

    Args:
        directory: The cache.

    Attributes:
        manifest: The content of `cache.json`.
        sizes: Sizes of the samples in pixels; the first is that of validation samples.
        null_condition: Condition tensors of a sample without caption or class.
        buckets: Number of each sample's bucket; None where all have one size.

    Raises:
        ValueError: If the cache does not exist, is unfinished, of another format, or its first sample cannot be read.
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        self.manifest = read_manifest(self.directory)
        if not self.manifest["complete"] or not self.manifest["samples"]:
            raise ValueError(f"cache {directory} is unfinished or empty: run the cache step again")
        where = f"cache file {self.directory / MANIFEST}"
        names = self.manifest["samples"]
        self.files = [path_inside(self.directory / "samples", name, f"{where}: 'samples'") for name in names]
        self.sizes: tuple[Bucket, ...] = parse_sizes(self.settings["sizes"], name=f"{where}: 'sizes'")
        self._shapes, self._numbers = self.manifest["latent_shapes"], self.manifest["buckets"]
        in_range = all(type(number) is int and 0 <= number < len(self._shapes) for number in self._numbers)
        if len(self._numbers) != len(self.files) or not in_range:
            raise ValueError(f"{where}: 'buckets' must give each sample an entry of 'latent_shapes'")
        self.buckets: list[int] | None = self._numbers if len(self._shapes) > 1 else None
        self.null_condition = self._read(self.directory / NULL_CONDITION)
        # A cache that another program wrote is wrong from its first sample on.
        self[0]

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self._read(self.files[index], self._shapes[self._numbers[index]])

    def sample_name(self, index: int) -> str:
        """Describe a sample in messages: number, file and source."""
        path = self.files[index]
        source = _saved_metadata(path).get("source")
        return f"{index} ({path.name}{f' from {shorten_value(source)}' if source else ''})"

    @property
    def settings(self) -> dict[str, Any]:
        """The options of the cache step that made it, and hashes of the encoders."""
        return self.manifest["settings"]

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

        It covers the settings and the identities of all samples: encoding the same data again gives the same
        fingerprint, also on a GPU that rounds differently.
        """
        settings = {name: value for name, value in self.settings.items() if name not in _ENCODERS}
        parts = [settings, self.manifest["samples_digest"], [path.name for path in self.files]]
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
    check_fields(manifest, where, required=_FIELDS)
    if manifest["complete"]:
        check_fields(manifest, where, required=_FINISHED)
    fields: dict[str, Any] = {"sizes": str, "max_sequence_length": (int, type(None))}
    length = check_fields(manifest["settings"], f"{where}: 'settings'", required=fields)["max_sequence_length"]
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


def write_tensors(path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None = None) -> None:
    """Write one of a cache's tensor files, floating-point tensors in fp32."""
    stored = {
        name: tensor.to("cpu", torch.float32 if tensor.is_floating_point() else torch.int64).contiguous()
        for name, tensor in tensors.items()
    }
    with atomic_file(path) as temporary:
        save_file(stored, temporary, metadata=metadata)


def read_prompts(path: str | Path) -> list[str]:
    """Read the lines of a text file, without empty ones.

    Raises:
        ValueError: If the file cannot be read as UTF-8, or has no text.
    """
    lines, reason = [], "it is empty"
    try:
        lines = Path(path).expanduser().read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        reason = shorten_text(str(error), 300)
    prompts = [line.strip() for line in lines if line.strip()]
    if not prompts:
        raise ValueError(f"prompts: {path} must be a text file with one prompt a line ({reason})")
    return prompts


@dataclass(frozen=True, kw_only=True)
class LatentGenerator:
    """Draws samples with a diffusion pipeline that has its original attention, as the cache step takes data.

    Attributes:
        directory: The ordinary pipeline.
        config: The options.
        size: Size of the samples.
        num_classes: Number of classes of the model; 0 for text-conditional models.
        seed: Seed of the noise; the seed of each sample is derived from it.
        device: Where the pipeline runs.
    """

    directory: Path
    config: CacheConfig
    size: Bucket
    num_classes: int
    seed: int
    device: torch.device
    _captured: list[torch.Tensor] = field(default_factory=list)

    def samples(self) -> list[DataSample]:
        """List the samples to generate: prompts or classes in turn."""
        prompts, conditions = self.config.prompts, list[str | int](range(self.num_classes))
        if (prompts is None) is not bool(self.num_classes):
            raise ValueError(
                "prompts, a text file with one prompt a line, must be given for data='generated' of models that take "
                "text, and only for them"
            )
        if prompts is not None:
            conditions = [*read_prompts(prompts)]

        def sample(number: int) -> DataSample:
            condition = conditions[number % len(conditions)]
            return DataSample(f"{GENERATED}:{number}", condition, lambda: self.draw(condition, number))

        return [sample(number) for number in range(self.config.num_samples or _MADE_COUNT)]

    @cached_property
    def pipeline(self) -> Any:
        """The pipeline."""
        from diffusers import DiffusionPipeline

        pipeline = DiffusionPipeline.from_pretrained(self.directory).to(self.device)
        pipeline.set_progress_bar_config(disable=True)
        if self.num_classes:
            # The DiT pipeline has no option that returns latents.
            def decode(latents: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
                self._captured[:] = [latents * pipeline.vae.config.scaling_factor]
                return SimpleNamespace(sample=latents.new_zeros(len(latents), 3, 1, 1))

            pipeline.vae.decode = decode
        return pipeline

    @torch.no_grad()
    def draw(self, condition: str | int, number: int) -> torch.Tensor:
        """Draw the latents `[C, ...]` that the pipeline ends with, fp32, with its own steps and guidance.

        Args:
            condition: Prompt or class.
            number: Number of the sample.
        """
        options: dict[str, Any] = {"class_labels": [condition], "output_type": "np"}
        if self.num_classes:
            # The label without class that the pipeline has built in is that of ImageNet.
            options |= {} if self.num_classes == 1000 else {"guidance_scale": 1.0}
        else:
            length, size = self.config.max_sequence_length, vars(self.size)
            options = {"prompt": condition, "output_type": "latent", "max_sequence_length": length, **size}
            if self.size.num_frames == 1:
                del options["num_frames"]
        generator = torch.Generator().manual_seed(stable_seed(self.seed, GENERATED, number))
        output = self.pipeline(**options, generator=generator, return_dict=False)[0]
        return (self._captured.pop() if self.num_classes else output)[:1][0].float().cpu()


def open_samples(
    directory: ModelDirectory, config: CacheConfig, seed: int, device: torch.device, teacher: str | None = None
) -> tuple[CacheConfig, Sequence[DataSample], LatentGenerator | None]:
    """List the samples to encode, without reading or drawing one.

    Args:
        directory: The pipeline to train.
        config: The options.
        seed: Seed of samples that the original draws.
        device: Where it draws them.
        teacher: The original, if it was given.

    Returns:
        The options with every size given, the samples, and what draws them if the original does.

    Raises:
        ValueError: If the data are not there, have no captions or classes, or options or data do not fit the pipeline.
    """
    family = family_of_class(directory.class_name)
    check_options(config, family.name)
    sizes = family.sizes(directory)
    config, buckets = family.complete(config, sizes)
    size, folder, num_classes = buckets[0], Path(str(config.data)), sizes.num_classes
    samples: Sequence[DataSample]
    if config.data == GENERATED:
        original = directory.original(teacher, "teacher")
        # Of a repository only the model may have been downloaded.
        root = original.root if (original.root / "vae").is_dir() else download_pipeline(original.location)
        generator = LatentGenerator(
            directory=root, config=config, size=size, num_classes=num_classes, seed=seed, device=device
        )
        return config, generator.samples(), generator
    if config.data == DIGITS and family.video_size:
        samples = digit_videos(config.num_samples or _MADE_COUNT, size.height, size.num_frames)
    elif config.data == DIGITS:
        samples = digit_images(config.num_samples or _MADE_COUNT, size.height, captions=not num_classes)
    elif family.video_size:
        samples = captioned_videos(folder, buckets, config.fps)
    elif num_classes:
        labels = pipeline_labels((directory.index or {}).get("id2label"))
        samples = class_images(folder, buckets, known_labels=labels, num_classes=num_classes)
    else:
        samples = captioned_images(folder, buckets)
    return config, samples[: config.num_samples], None


def cache_settings(pipeline: Path, config: CacheConfig, folders: Iterable[str], num_classes: int) -> dict[str, Any]:
    """Settings that a cache depends on besides its samples.

    Args:
        pipeline: The pipeline that encodes.
        config: The options, with every size given.
        folders: Parts of the pipeline that matter, identified by the hashes of their files; see `Family.encoders`.
        num_classes: Number of classes of the model; 0 for text-conditional models.
    """
    settings = {**config.to_dict(), "num_classes": num_classes}
    # The identities of the samples cover the prompts, wherever their file is.
    del settings["prompts"]
    if config.data not in (None, DIGITS, GENERATED):
        settings["data"] = str(Path(str(config.data)).resolve())
    return {**settings, **{folder: folder_fingerprint(pipeline / folder) for folder in folders}}


def start_cache(directory: Path, settings: dict[str, Any], samples: Sequence[DataSample], *, write: bool) -> bool:
    """Open a cache for writing.

    Args:
        directory: The cache.
        settings: See `cache_settings`.
        samples: Samples to encode. A finished cache of different samples is reopened and keeps the unchanged ones.
        write: Write the manifest.

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
            if manifest["samples_digest"] == _digest(samples):
                return False
            logger.info("cache: the samples or captions of %s have changed; encoding what is new", directory)
    if write:
        write_json(directory / MANIFEST, {**manifest, "complete": False})
    return True


def finish_cache(directory: Path, samples: Sequence[DataSample]) -> None:
    """Mark a cache complete, once every process has built its share.

    Raises:
        ValueError: If none of the samples could be used.
    """
    folder = directory / "samples"
    paths = [folder / f"{number:06d}.safetensors" for number in range(len(samples))]
    present = [path for path in paths if path.is_file()]
    if not present:
        raise ValueError(f"data: none of the {len(samples)} samples could be used; the warnings say why")
    for path in set(folder.glob("*.safetensors")) - set(paths):
        path.unlink()
    remove_leftovers(folder)
    made = set(present)
    skipped = [sample.key for sample, path in zip(samples, paths) if path not in made]
    if skipped:
        logger.warning(
            "cache: %d of %d samples were left out; 'skipped' in %s lists them",
            len(skipped), len(samples), directory / MANIFEST,
        )  # fmt: skip
    shapes = [_latent_shape(path) for path in present]
    every = sorted(map(list, {*map(tuple, shapes)}))
    finished = {
        "samples": [path.name for path in present],
        "skipped": skipped,
        "latent_shapes": every,
        "buckets": [every.index(shape) for shape in shapes],
        "classes": {sample.class_name: sample.condition for sample in samples if sample.class_name is not None},
        "samples_digest": _digest(samples),
        "complete": True,
    }
    write_json(directory / MANIFEST, {**read_manifest(directory), **finished})


def make_cache(
    config: TrainingConfig, cache_config: CacheConfig, accelerator: Accelerator, directory: ModelDirectory
) -> Path:
    """Make the cache that `config` names, or do nothing if it exists already.

    Args:
        config: Options of the run; `cache` (or `output`), `teacher`, `seed` and `progress` matter.
        cache_config: Options of the cache; sizes that it does not give follow from the pipeline.
        accelerator: The processes; each encodes its share.
        directory: The pipeline.

    Returns:
        The cache's directory.

    Raises:
        ValueError: If options or data do not fit the pipeline, or a cache made otherwise is there.
    """
    path = Path(config.cache) if config.cache is not None else Path(str(config.output)) / "cache"
    with accelerator.main_process_first():
        opened = open_samples(directory, cache_config, config.seed, accelerator.device, config.teacher)
    cache_config, samples, generator = opened
    family = family_of_class(directory.class_name)
    sizes = family.sizes(directory)
    if sizes.num_classes and cache_config.sizes != f"{sizes.own_size},{sizes.own_size}":
        side = sizes.own_size
        logger.warning(
            "sizes: the pipeline of this model makes images of %dx%d only, whatever it trains on", side, side
        )
    settings = cache_settings(directory.root, cache_config, family.encoders, sizes.num_classes)
    if generator is not None:
        for part in (directory.component, "scheduler"):
            settings[f"teacher_{part}"] = folder_fingerprint(generator.directory / part)
        settings["generated_seed"] = config.seed
    with ExitStack() as locks:
        work = [False]
        with Processes().together():
            # A finished cache is not locked: several runs can train on it.
            if accelerator.is_main_process and start_cache(path, settings, samples, write=False):
                path.mkdir(parents=True, exist_ok=True)
                taken = f"cache {path} is in use by another run; wait for it or choose another cache"
                locks.enter_context(take_lock(path / LOCK, taken, PATIENCE_SECONDS) or nullcontext())
                # Another process may have written it while this one waited.
                work = [start_cache(path, settings, samples, write=True)]
        if broadcast_object_list(work)[0]:
            pipeline = load_encoders(directory)
            if accelerator.device.type != "cpu" and "text_encoder" in pipeline.components:
                # Text encoders are made for bfloat16, and Wan's takes 22 GB in float32; the VAE needs float32.
                pipeline.text_encoder.to(torch.bfloat16)
            build_cache(
                path,
                family,
                pipeline.to(accelerator.device),
                samples,
                length=cache_config.max_sequence_length,
                num_classes=sizes.num_classes,
                generated=generator is not None,
                rank=accelerator.process_index,
                world_size=accelerator.num_processes,
                progress=config.progress and accelerator.is_main_process,
            )
            accelerator.wait_for_everyone()
            if accelerator.is_main_process:
                finish_cache(path, samples)
            accelerator.wait_for_everyone()
            del pipeline
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
    return path


@torch.no_grad()
def build_cache(
    directory: Path,
    family: Family,
    pipeline: Any,
    samples: Sequence[DataSample],
    *,
    length: int | None = None,
    num_classes: int = 0,
    generated: bool = False,
    rank: int = 0,
    world_size: int = 1,
    progress: bool = True,
) -> None:
    """Encode this process's share of the samples, skipping those already there; unusable ones are left out.

    Args:
        directory: A cache that `start_cache` opened.
        family: The model's family.
        pipeline: The pipeline, without its transformer, on the device to encode on.
        samples: All samples.
        length: Tokens that captions are padded to.
        num_classes: Number of classes of the model.
        generated: True if samples are latents already.
        rank: Number of this process; it takes every `world_size`-th sample.
        world_size: Number of processes.
        progress: Show a progress bar.
    """
    (directory / "samples").mkdir(parents=True, exist_ok=True)
    encode = lru_cache(_REMEMBERED_CONDITIONS)(lambda condition: family.encode_condition(pipeline, condition, length))
    if rank == 0:
        write_tensors(directory / NULL_CONDITION, family.encode_null_condition(pipeline, length, num_classes))
    numbers = range(rank, len(samples), world_size)
    for number in tqdm(numbers, desc="caching", unit="sample", disable=not progress):
        sample, path = samples[number], directory / "samples" / f"{number:06d}.safetensors"
        if _saved_metadata(path).get("key") == _identity(sample):
            continue
        try:
            media = sample.load()
        except UnusableSampleError as error:
            logger.warning("cache: left out: %s", error)
            path.unlink(missing_ok=True)
            continue
        latents = media if generated else family.encode_media(pipeline, media)
        metadata = {"key": _identity(sample), "source": sample.key, "condition": str(sample.condition)}
        write_tensors(path, {"latents": latents, **encode(sample.condition)}, metadata)


def _saved_metadata(path: Path) -> dict[str, str]:
    """Metadata of a sample file about its source; empty if the file is missing, damaged or has none."""
    try:
        with safe_open(path, framework="pt") as file:
            return file.metadata() or {}
    except (OSError, SafetensorError):
        return {}


def _latent_shape(path: Path) -> list[int]:
    with safe_open(path, framework="pt") as file:
        return file.get_slice("latents").get_shape()


def _digest(samples: Sequence[DataSample]) -> str:
    """Hash the identities of all samples, in order."""
    return hashlib.sha256("".join(_identity(sample) for sample in samples).encode()).hexdigest()


def _identity(sample: DataSample) -> str:
    return hashlib.sha256(f"{sample.key}\n{sample.condition}".encode()).hexdigest()
