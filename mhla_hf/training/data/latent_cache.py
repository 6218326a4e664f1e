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
from collections.abc import Sequence
from contextlib import ExitStack
from functools import cache, lru_cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from tqdm.auto import tqdm

from ...families.objectives import PADDED, TWO_ENCODERS
from ...models.directory import ModelDirectory
from ...models.limits import check_model_config
from ...models.registry import mhla_class_for, trained_family
from ...models.sizes import check_size
from ...models.weight_files import check_weights, damage_named
from ...utils.destinations import differences, lock_output, remove_leftovers
from ...utils.files import atomic_file, check_fields, path_inside, read_json, write_json
from ...utils.locations import download_pipeline
from ...utils.messages import check_count, shorten_text, shorten_value
from ..config import (
    COMPONENTS,
    DIGITS,
    GENERATED,
    LONGEST_TEXT,
    Bucket,
    CacheConfig,
    TrainingConfig,
    check_options,
    parse_sizes,
)
from ..processes import Processes
from .digits import digit_images, digit_videos
from .folders import DataSample, UnusableSampleError
from .images import captioned_images, class_images, pipeline_labels
from .order import folder_fingerprint, stable_seed
from .videos import captioned_videos


logger = logging.getLogger(__name__)

MANIFEST = "cache.json"
NULL_CONDITION = "null_condition.safetensors"
# The label without class that diffusers' DiTPipeline has built in.
GUIDANCE_LABEL = 1000
_VIDEO, _DIGIT_VIDEO, _DIGIT_IMAGE_SIDE = "480,832,81", "64,64,17", 64
_LAYER_COUNTS = ("num_layers", "num_hidden_layers", "num_decoder_layers", "layers_per_block")
_FINISHED: dict[str, Any] = {"samples": list, "buckets": list, "samples_digest": str, "classes": dict}
_SETTINGS: dict[str, Any] = {"sizes": str, "max_sequence_length": (int, type(None))}
_RATE: dict[str, Any] = {"fps": (int, float, type(None))}
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
        ValueError: If the cache does not exist or is unfinished, or a field of its `cache.json` is out of bounds.
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        where = f"cache file {self.directory / MANIFEST}"
        self.manifest = _read_manifest(self.directory)
        if not self.manifest["complete"]:
            raise ValueError(
                f"cache {directory} does not exist or is unfinished: run the cache step first, or pass data"
            )
        names = check_fields(self.manifest, where, required=_FINISHED)["samples"]
        length = check_fields(self.settings, f"{where}: 'settings'", _SETTINGS, _RATE)["max_sequence_length"]
        # It decides how much memory the padding takes.
        if length is not None:
            check_count(f"{where}: max_sequence_length", length, 1, LONGEST_TEXT)
        self.files = [path_inside(self.directory / "samples", name, f"{where}: 'samples'") for name in names]
        self.sizes: tuple[Bucket, ...] = parse_sizes(self.settings["sizes"], name=f"{where}: 'sizes'")
        buckets = self.manifest["buckets"]
        if len(buckets) != len(names) or not all(type(number) is int for number in buckets):
            raise ValueError(f"{where}: 'buckets' must give each sample a number")
        self.buckets: list[int] | None = buckets if len(set(buckets)) > 1 else None
        self.null_condition = self._read(self.directory / NULL_CONDITION)

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self._read(self.files[index])

    def sample_name(self, index: int) -> str:
        """Describe a sample in messages: number, file and source."""
        path = self.files[index]
        source = _saved_metadata(path).get("source")
        return f"{index} ({path.name}{f' from {shorten_value(source)}' if source else ''})"

    @property
    def settings(self) -> dict[str, Any]:
        """The options of the cache step that made it, and hashes of the encoders."""
        return self.manifest["settings"]

    def fingerprint(self) -> str:
        """Hash that identifies the samples of the cache.

        It covers the settings and the identities of all samples: encoding the same data again gives the same
        fingerprint, also on a GPU that rounds differently.
        """
        settings = {name: value for name, value in self.settings.items() if name not in TWO_ENCODERS}
        parts = [settings, self.manifest["samples_digest"], [path.name for path in self.files]]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]

    def _read(self, path: Path) -> dict[str, torch.Tensor]:
        """Read a file and pad its text."""
        try:
            tensors = load_file(path)
        except (OSError, SafetensorError) as error:
            reason = shorten_text(str(error))
            raise ValueError(
                f"cache file {path} cannot be read ({reason}); remove it and run the cache step again"
            ) from error
        for name in PADDED:
            if name in tensors:
                tensor = tensors[name]
                missing = (self.settings["max_sequence_length"] or 0) - len(tensor)
                tensors[name] = torch.cat([tensor, tensor.new_zeros(missing, *tensor.shape[1:])])
        return tensors


def _read_manifest(directory: Path) -> dict[str, Any]:
    """Read `cache.json`, which need not be there."""
    path = directory / MANIFEST
    if not path.is_file():
        return {"settings": None, "complete": False}
    return read_json(path, "cache file", required={"settings": dict, "complete": bool})


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
        raise ValueError(f"prompts: {path} must be a text file with one prompt per line ({reason})")
    return prompts


def num_classes(directory: ModelDirectory) -> int:
    """Return the number of classes of a pipeline's model; 0 for those that are conditioned on text."""
    if trained_family(directory.class_name).text_tokens:
        return 0
    name, path = "num_embeds_ada_norm", directory.folder / "config.json"
    return check_size(directory.config.get(name), name, f"the configuration {path}", 10**9)


def with_sizes(config: CacheConfig, directory: ModelDirectory) -> tuple[CacheConfig, tuple[Bucket, ...]]:
    """Fill in the options that were not given, and return them with the sizes that samples of a pipeline have.

    Videos are 480x832 with 81 frames, moving digits 64x64 with 17. Images have the size that the model was made
    for; digits at most 64x64, except for DiT, whose pipeline makes images of one size only.

    Raises:
        ValueError: If a size does not fit the pipeline, or a configuration is damaged; the message names it.
    """
    family = trained_family(directory.class_name)
    is_video, size, default = family.kind == "video", directory.sample_size, ""
    check_model_config(directory.load_class(), directory.config, str(directory.folder / "config.json"))
    if is_video:
        default = _DIGIT_VIDEO if config.data == DIGITS else _VIDEO
    elif not config.sizes:
        own = size.pixels(mhla_class_for(directory.class_name).reference_grid(directory.config))["height"]
        side = min(own, _DIGIT_IMAGE_SIDE) if config.data == DIGITS and family.text_tokens else own
        default = f"{side},{side}"
    frames = parse_sizes(default)[0].num_frames if is_video else 1
    buckets = parse_sizes(config.sizes or default, frames)
    for bucket in buckets:
        size.check(**vars(bucket))
    # Written out: a text without frames means the default.
    names = ("height", "width", "num_frames")[: len(size.patch)]
    text = ";".join(",".join(str(getattr(each, name)) for name in names) for each in buckets)
    length = config.max_sequence_length or family.text_tokens or None
    return config.replace(sizes=text, max_sequence_length=length), buckets


def load_encoders(directory: ModelDirectory) -> Any:
    """Load a pipeline without its transformers: VAE, text encoder, tokenizer and scheduler, on the CPU.

    Raises:
        ValueError: If diffusers has no such pipeline, or its files are damaged; the message names them.
    """
    import diffusers

    root, index = directory.root, directory.index or {}
    transformers = {name: None for name in COMPONENTS if name in index}
    for folder in sorted(path for path in root.iterdir() if path.is_dir() and path.name in {*index} - {*transformers}):
        tensors = check_weights(folder)
        for path in sorted(folder.glob("*.json")):
            content = read_json(path, "the pipeline's file")
            for name in _LAYER_COUNTS if tensors and path.name == "config.json" else ():
                # A layer has a tensor at least, and building millions of layers takes hours.
                if isinstance(content.get(name), int) and content[name] > tensors:
                    raise ValueError(f"the pipeline's file {path}: {name!r} is above the {tensors} tensors beside it.")
    with damage_named(root):
        pipeline: Any = diffusers.DiffusionPipeline.from_pretrained(root, **transformers)
    pipeline.set_progress_bar_config(disable=True)
    for component in pipeline.components.values():
        if isinstance(component, torch.nn.Module):
            component.requires_grad_(False).eval()
    return pipeline


def drawn_samples(
    root: Path, directory: ModelDirectory, config: CacheConfig, seed: int, device: torch.device | str
) -> list[DataSample]:
    """List latents that a pipeline with its original attention draws, with its own steps and guidance.

    Args:
        root: The ordinary pipeline.
        directory: The pipeline to train.
        config: The options, with every size given. Prompts or classes are taken in turn.
        seed: Seed of the noise; the seed of each sample is derived from it.
        device: Where the pipeline runs.

    Raises:
        ValueError: If a text-conditional model comes without prompts, or another with them.
    """
    family, classes = trained_family(directory.class_name), num_classes(directory)
    objective, size = family.load_objective(), parse_sizes(str(config.sizes))[0]
    if (config.prompts is None) is not bool(classes):
        raise ValueError(
            "prompts, a text file with one prompt per line, must be given for data='generated' of models that take "
            "text, and only for them"
        )
    conditions = range(classes) if config.prompts is None else read_prompts(config.prompts)
    options: dict[str, Any] = {"output_type": "latent", "max_sequence_length": config.max_sequence_length}
    options |= {name: value for name, value in vars(size).items() if family.kind == "video" or name != "num_frames"}
    # Such as the size as it is, in place of the nearest of a list.
    options |= {name: value for name, value in objective.call_options.items() if value is not None}
    if classes:
        # The label without class that the pipeline has built in is that of ImageNet.
        options = {"output_type": "np", **({} if classes == GUIDANCE_LABEL else {"guidance_scale": 1.0})}
    captured: list[torch.Tensor] = []

    @cache
    def load_pipeline() -> Any:
        from diffusers import DiffusionPipeline

        pipeline = DiffusionPipeline.from_pretrained(root).to(device)
        pipeline.set_progress_bar_config(disable=True)

        def decode(latents: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            captured[:] = [latents * pipeline.vae.config.scaling_factor]
            return SimpleNamespace(sample=latents.new_zeros(len(latents), 3, 1, 1))

        if classes:
            # The DiT pipeline has no option that returns latents.
            pipeline.vae.decode = decode
        return pipeline

    @torch.no_grad()
    def draw(number: int) -> torch.Tensor:
        condition = conditions[number % len(conditions)]
        subject = {"class_labels": [condition]} if classes else {"prompt": condition}
        generator = torch.Generator().manual_seed(stable_seed(seed, GENERATED, number))
        output = load_pipeline()(**subject, **options, generator=generator, return_dict=False)[0]
        latents = (captured.pop() if classes else output)[0].float().cpu()
        return objective.unpack(latents, directory.sample_size.grid(**vars(size)))

    return [
        DataSample(f"{GENERATED}:{number}", conditions[number % len(conditions)], partial(draw, number))
        for number in range(config.num_samples or _MADE_COUNT)
    ]


class CachePlan:
    """The samples of a cache, listed without reading or drawing one, and what encodes them.

    Args:
        directory: The pipeline to train.
        config: The options.
        seed: Seed of samples that the original draws.
        device: Where it draws them.
        teacher: The original, if it was given.

    Attributes:
        objective: The model's objective, which encodes them.
        config: The options, with every size given.
        num_classes: Number of classes of the model; 0 for text-conditional models.
        samples: The samples.
        teacher: The original pipeline, if it draws them.

    Raises:
        ValueError: If the data are not there, have no captions or classes, or options or data do not fit the pipeline.
    """

    def __init__(
        self,
        directory: ModelDirectory,
        config: CacheConfig,
        *,
        seed: int = 0,
        device: torch.device | str = "cpu",
        teacher: str | None = None,
    ) -> None:
        family = trained_family(directory.class_name)
        self.objective, is_video = family.load_objective(), family.kind == "video"
        check_options(config, family.name)
        config, buckets = with_sizes(config, directory)
        if is_video and config.data not in (DIGITS, GENERATED):
            rate = self.objective.frames_per_second(directory) if config.fps is None else config.fps
            if not rate and hasattr(self.objective, "frame_rate"):
                raise ValueError(f"fps must be above 0 for {family.title}, which is told the frame rate")
            config = config.replace(fps=rate or None)
        size, folder, classes = buckets[0], Path(str(config.data)), num_classes(directory)
        count, root = config.num_samples or _MADE_COUNT, None
        samples: Sequence[DataSample]
        if config.data == GENERATED:
            original = directory.original(teacher, "teacher")
            # Perhaps only the model of a repository has been downloaded.
            root = original.root if (original.root / "vae").is_dir() else download_pipeline(original.location)
            samples = drawn_samples(root, directory, config, seed, device)
        elif config.data == DIGITS and is_video:
            samples = digit_videos(count, size.height, size.num_frames)
        elif config.data == DIGITS:
            samples = digit_images(count, size.height, captions=not classes)
        elif is_video:
            samples = captioned_videos(folder, buckets, config.fps, config.background)
        elif classes:
            labels = pipeline_labels((directory.index or {}).get("id2label"))
            samples = class_images(
                folder, buckets, known_labels=labels, num_classes=classes, background=config.background
            )
        else:
            samples = captioned_images(folder, buckets, config.background)
        self.directory, self.config, self.seed = directory, config, seed
        self.num_classes, self.teacher, self.samples = classes, root, samples[: config.num_samples]

    def check_samples(self, least: int) -> None:
        """Check that at least this many samples of the user can be read, before anything is converted or loaded.

        Raises:
            ValueError: If fewer can.
        """
        problems: list[str] = []
        for number, sample in enumerate(self.samples, start=1):
            try:
                if self.config.data != GENERATED:
                    sample.load()
            except UnusableSampleError as error:
                problems.append(f" ({error})")
            if number - len(problems) == least:
                return
        usable = f"{len(self.samples) - len(problems)} of {len(self.samples)} samples that can be used"
        problem = problems[0] if problems else ""
        raise ValueError(f"data: {self.config.data} has {usable}; at least {least} needed{problem}")

    def settings(self) -> dict[str, Any]:
        """Return what the cache depends on besides its samples; encoders are identified by hashes of their files."""
        settings = {**self.config.to_dict(), "num_classes": self.num_classes}
        # The identities of the samples cover the prompts, wherever their file is.
        del settings["prompts"]
        if self.config.data not in (DIGITS, GENERATED):
            settings["data"] = str(Path(str(self.config.data)).resolve())
        for folder in self.objective.encoders:
            settings[folder] = folder_fingerprint(self.directory.root / folder)
        if self.teacher is not None:
            for part in (self.directory.component, "scheduler"):
                settings[f"teacher_{part}"] = folder_fingerprint(self.teacher / part)
            settings["generated_seed"] = self.seed
        return settings


def is_finished(directory: Path, settings: dict[str, Any], samples: Sequence[DataSample]) -> bool:
    """Return whether a finished cache of these samples is there.

    Args:
        directory: The cache.
        settings: See `CachePlan.settings`.
        samples: The samples. A cache of others keeps those that are unchanged when it is built again.

    Raises:
        ValueError: If a cache made with other settings is there; the error names them.
    """
    manifest = _read_manifest(directory)
    old = manifest["settings"]
    if old is None:
        return False
    if different := differences(old, settings):
        raise ValueError(f"cache {directory} was made with {different}; remove it or choose another cache")
    return manifest["complete"] and manifest.get("samples_digest") == _digest(samples)


def finish_cache(directory: Path, settings: dict[str, Any], samples: Sequence[DataSample]) -> None:
    """Mark a cache complete, once every process has built its share; arguments as in `is_finished`.

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
    manifest = {
        "settings": settings,
        "samples": [path.name for path in present],
        "skipped": skipped,
        "buckets": [every.index(shape) for shape in shapes],
        "classes": {sample.class_name: sample.condition for sample in samples if sample.class_name is not None},
        "samples_digest": _digest(samples),
        "complete": True,
    }
    write_json(directory / MANIFEST, manifest)


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
        plan = CachePlan(directory, cache_config, seed=config.seed, device=accelerator.device, teacher=config.teacher)
    settings, samples = plan.settings(), plan.samples
    with ExitStack() as locks:
        work = [False]
        with Processes().together():
            # A finished cache is not locked: several runs can train on it.
            if accelerator.is_main_process and not is_finished(path, settings, samples):
                locks.enter_context(lock_output(path))
                # Another process may have written it while this one waited.
                work = [not is_finished(path, settings, samples)]
                if work[0]:
                    plan.check_samples(1)
                    write_json(path / MANIFEST, {"settings": settings, "complete": False})
        if broadcast_object_list(work)[0]:
            pipeline = load_encoders(directory)
            for name in plan.objective.encoders if accelerator.device.type != "cpu" else ():
                # Text encoders are made for bfloat16, and Wan's takes 22 GB in float32; the VAE needs float32.
                if name.startswith("text_encoder"):
                    getattr(pipeline, name).to(torch.bfloat16)
            build_cache(
                path,
                plan,
                pipeline.to(accelerator.device),
                rank=accelerator.process_index,
                world_size=accelerator.num_processes,
                progress=config.progress and accelerator.is_main_process,
            )
            accelerator.wait_for_everyone()
            if accelerator.is_main_process:
                finish_cache(path, settings, samples)
            accelerator.wait_for_everyone()
            del pipeline
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
    return path


@torch.no_grad()
def build_cache(
    directory: Path, plan: CachePlan, pipeline: Any, *, rank: int = 0, world_size: int = 1, progress: bool = True
) -> None:
    """Encode this process's share of the samples, skipping those already there; unusable ones are left out.

    Args:
        directory: The cache.
        plan: The samples.
        pipeline: The pipeline, without its transformer, on the device to encode on.
        rank: Number of this process; it takes every `world_size`-th sample.
        world_size: Number of processes.
        progress: Show a progress bar.
    """
    (directory / "samples").mkdir(parents=True, exist_ok=True)
    objective, length = plan.objective, plan.config.max_sequence_length
    encode = lru_cache(_REMEMBERED_CONDITIONS)(partial(objective.encode_condition, pipeline, length=length))
    if rank == 0:
        null_condition = objective.encode_null_condition(pipeline, length, plan.num_classes)
        write_tensors(directory / NULL_CONDITION, null_condition)
    numbers = range(rank, len(plan.samples), world_size)
    for number in tqdm(numbers, desc="caching", unit="sample", disable=not progress):
        sample, path = plan.samples[number], directory / "samples" / f"{number:06d}.safetensors"
        if _saved_metadata(path).get("key") == _identity(sample):
            continue
        try:
            media = sample.load()
        except UnusableSampleError as error:
            logger.warning("cache: left out: %s", error)
            path.unlink(missing_ok=True)
            continue
        latents = media if plan.teacher is not None else objective.encode_media(pipeline, media)
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
