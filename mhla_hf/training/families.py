# SPDX-License-Identifier: Apache-2.0
"""Families of diffusion models that can be trained: how each encodes its data, and its objective.

Shapes: C channels, F frames (videos only), H height and W width, of media in pixels and with a prime of latents.
"""

from __future__ import annotations

import math
import os
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from accelerate import init_empty_weights

from ..models.directory import ModelDirectory, find_pipeline
from ..models.limits import check_model_config
from ..models.registry import FAMILIES as MODEL_FAMILIES
from ..models.registry import MHLA_CLASSES, TRAINED, mhla_class_for
from ..models.sizes import SampleSize, check_size
from ..models.weight_files import check_weights, damage_named
from ..utils.compat.diffusers import call_default
from ..utils.files import Types, read_json
from .config import COMPONENTS, DIGITS, UNCONVERTED, Bucket, CacheConfig, TrainingConfig, check_options, parse_sizes
from .data.images import find_label, pipeline_labels
from .parameters import check_conversion, check_takes_adapters
from .stages.objectives import (
    DiTObjective,
    FluxObjective,
    HunyuanVideoObjective,
    LTXObjective,
    Objective,
    SanaObjective,
    WanObjective,
    WanVACEObjective,
)


_MOST_TIMESTEPS = 100_000
_SCHEDULER_FIELDS: dict[str, Types] = {"_class_name": str, "num_train_timesteps": int}
_LAYER_COUNTS = ("num_layers", "num_hidden_layers", "num_decoder_layers", "layers_per_block")
# Entries of a scheduler's configuration that the noise of DiT depends on.
_NOISE_ENTRIES = (
    "beta_start", "beta_end", "beta_schedule", "num_train_timesteps", "prediction_type", "trained_betas",
    "rescale_betas_zero_snr", "use_flow_sigmas", "_class_name",
)  # fmt: skip
# Shift of models that come without a pipeline.
_DEFAULT_SHIFT = 3.0
_DIGIT_VIDEO = "64,64,17"
_DIGIT_IMAGE_SIDE = 64
# Parts that encode the samples of pipelines with two text encoders; others have the first three.
TWO_ENCODERS = ("vae", "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2")
# Tensors of text that are stored without padding.
PADDED = ("prompt_embeds", "prompt_attention_mask")
MASKED_NAMES = (*PADDED, *(f"negative_{name}" for name in PADDED))
# The label without class that diffusers' DiTPipeline has built in.
GUIDANCE_LABEL = 1000


class Family:
    """A family of diffusion models: its encoding of data and prompts, and its objective.

    Attributes:
        objective: Class of the objective.
        encoders: Parts of the pipeline that encode samples.
        video_size: Default height, width and number of frames; empty for models of images.
        encoded_names: Arguments of the pipeline's call for what its `encode_prompt` returns, those of negative prompts
            last.
        call_options: Further arguments of the pipeline's call.
        out_channels: Number that configurations without it stand for; None for as many as go in.
    """

    name: ClassVar[str]
    objective: ClassVar[type[Objective]]
    encoders: ClassVar[tuple[str, ...]] = TWO_ENCODERS[:3]
    video_size: ClassVar[str] = ""
    encoded_names: ClassVar[tuple[str, ...]] = ()
    call_options: ClassVar[dict[str, Any]] = {}
    out_channels: ClassVar[int | None] = None

    @property
    def prompt_encoders(self) -> tuple[str, ...]:
        """Parts of the pipeline that encode prompts."""
        return tuple(name for name in self.encoders if name != "vae")

    @property
    def takes_negative(self) -> bool:
        """Whether the pipeline encodes a negative prompt with each prompt."""
        return self.encoded_names[-1].startswith("negative")

    def make_objective(self, config: TrainingConfig, directory: ModelDirectory | None) -> Objective:
        """Make the objective of a run.

        Args:
            config: The options.
            directory: The pipeline that training starts from; None for a model without one.

        Raises:
            ValueError: If the pipeline's scheduler does not go with this objective.
        """
        return self.objective(**self.objective_fields(config, directory))

    def objective_fields(self, config: TrainingConfig, directory: ModelDirectory | None) -> dict[str, Any]:
        """Return the fields of the objective, see `make_objective`; by default the noise levels of flow matching."""
        return _flow_noise(config, directory)

    def check_pipeline(self, directory: ModelDirectory) -> None:
        """Check that the model of a pipeline can be trained.

        Raises:
            ValueError: If it is of a kind that needs another objective, or the pipeline uses it in another way.
        """
        self.check_model(directory.config)
        class_name = (directory.index or {}).get("_class_name")
        if class_name in TRAINED[self.name].refused_pipelines:
            raise ValueError(
                f"model: a {class_name} calls its transformer with more than a text, and cannot be recovered or "
                "trained here; save its parts as the pipeline from text"
            )

    def check_model(self, config: Any) -> None:
        """Check that a model of a configuration can be trained; by default all that take latents and no images.

        Raises:
            ValueError: If it is of a kind that needs another objective.
        """
        channels = config.get("in_channels", self.out_channels)
        # As in diffusers, `null` stands for as many as go in.
        takes_more = channels != (config.get("out_channels", self.out_channels) or channels)
        if takes_more or config.get("image_condition_type"):
            kind = "video" if self.video_size else "image"
            raise ValueError(f"model: this is an image-to-{kind} model, which cannot be recovered or trained here yet")

    def num_classes(self, directory: ModelDirectory) -> int:
        """Return the number of classes of a pipeline's model; 0 for those that are conditioned on text."""
        if TRAINED[self.name].text_tokens:
            return 0
        name, path = "num_embeds_ada_norm", directory.folder / "config.json"
        return check_size(directory.config.get(name), name, f"the configuration {path}", 10**9)

    def complete(self, config: CacheConfig, directory: ModelDirectory) -> tuple[CacheConfig, tuple[Bucket, ...]]:
        """Fill in the options that were not given, and return them with the sizes that samples of a pipeline have.

        Videos are 480x832 with 81 frames, moving digits 64x64 with 17. Images have the size that the model was made
        for; digits at most 64x64, except for DiT, whose pipeline makes images of one size only.

        Raises:
            ValueError: If a size does not fit the pipeline, or a configuration is damaged; the message names it.
        """
        size, default = directory.sample_size, self.video_size
        check_model_config(directory.load_class(), directory.config, str(directory.folder / "config.json"))
        if default and config.data == DIGITS:
            default = _DIGIT_VIDEO
        frames = parse_sizes(default)[0].num_frames if default else 1
        if not (config.sizes or default):
            own = size.pixels(mhla_class_for(directory.class_name).reference_grid(directory.config))["height"]
            side = min(own, _DIGIT_IMAGE_SIDE) if config.data == DIGITS and TRAINED[self.name].text_tokens else own
            default = f"{side},{side}"
        buckets = parse_sizes(config.sizes or default, frames)
        for bucket in buckets:
            size.check(**vars(bucket))
        # Written out: a text without frames means the default.
        names = ("height", "width", "num_frames")[: len(size.patch)]
        text = ";".join(",".join(str(getattr(each, name)) for name in names) for each in buckets)
        length = config.max_sequence_length or TRAINED[self.name].text_tokens or None
        return config.replace(sizes=text, max_sequence_length=length), buckets

    def frame_rate(self, directory: ModelDirectory) -> float:
        """Return the frames per second that a pipeline's model was made for, where it makes videos."""
        return 24.0

    def encode_media(self, pipeline: Any, media: torch.Tensor) -> torch.Tensor:
        """Encode one video or image; by default to the mode of the VAE's distribution, shifted and scaled.

        Args:
            pipeline: The pipeline, without its transformer.
            media: See `DataSample.load`.

        Returns:
            Latents as the transformer takes them, fp32.
        """
        vae, encoded = pipeline.vae, _encode(pipeline.vae, media[None])
        latents = encoded.latent if hasattr(encoded, "latent") else encoded.latent_dist.mode()
        return (latents[0].float() - (vae.config.get("shift_factor") or 0.0)) * vae.config.scaling_factor

    def encode_condition(self, pipeline: Any, condition: str | int, length: int | None) -> dict[str, torch.Tensor]:
        """Encode a caption or class; by default a caption, without guidance.

        Args:
            pipeline: See `encode_media`.
            condition: See `DataSample`.
            length: Tokens that captions are padded to.

        Returns:
            The tensors of the objective's `condition_names`, text that is masked without its padding.
        """
        options = {"do_classifier_free_guidance": False} if self.takes_negative else {}
        encoded = pipeline.encode_prompt(
            str(condition), max_sequence_length=length, **options, **self.prompt_options(pipeline)
        )
        named = zip(self.encoded_names, encoded)
        return _without_padding({name: each[0] for name, each in named if name in self.objective.condition_names})

    def encode_null_condition(self, pipeline: Any, length: int | None, num_classes: int) -> dict[str, torch.Tensor]:
        """Encode the condition of a sample without caption or class; by default the empty prompt."""
        return self.encode_condition(pipeline, "", length)

    def validation_inputs(
        self, pipeline: Any, directory: ModelDirectory, config: TrainingConfig, dataset: Any
    ) -> list[dict[str, Any]]:
        """Encode the prompts of validation samples.

        Args:
            pipeline: See `encode_media`.
            directory: The pipeline that training started from.
            config: The options of the run.
            dataset: The cached data: size of the samples, length of prompts, numbers of classes.

        Returns:
            Arguments of the pipeline's call for each prompt.

        Raises:
            ValueError: If the pipeline cannot make one of the samples.
        """
        negative = {"negative_prompt": config.validation_negative_prompt} if self.takes_negative else {}
        encoded = pipeline.encode_prompt(
            list(config.validation_prompts),
            max_sequence_length=dataset.settings["max_sequence_length"],
            device=pipeline.text_encoder.device,
            **negative,
            **self.prompt_options(pipeline),
        )[: len(self.encoded_names)]
        common = {**self.call_options, **vars(dataset.sizes[0])}
        if not self.video_size:
            del common["num_frames"]
        by_prompt = zip(*(tensor.cpu().split(1) for tensor in encoded), strict=True)
        return [{**dict(zip(self.encoded_names, tensors, strict=True)), **common} for tensors in by_prompt]

    def prompt_options(self, pipeline: Any) -> dict[str, Any]:
        """Return further arguments of the pipeline's `encode_prompt`."""
        return {}


class Video(Family):
    """Videos `[3, F, H, W]` to `[C, F', H', W']`."""

    video_size = "480,832,81"

    def encode_media(self, pipeline: Any, media: torch.Tensor) -> torch.Tensor:
        return encode_videos(pipeline.vae, media[None])[0]


class Wan(Video):
    """Videos `[3, F, H, W]` to `[C, F', H', W']`; captions to `prompt_embeds` `[l, D]`."""

    name = "wan"
    objective: ClassVar[type[Objective]] = WanObjective
    encoded_names = ("prompt_embeds", "negative_prompt_embeds")
    out_channels = 16

    def objective_fields(self, config: TrainingConfig, directory: ModelDirectory | None) -> dict[str, Any]:
        """Restrict each of two transformers of a pipeline to its side of the boundary."""
        boundary = None if directory is None or directory.index is None else directory.index.get("boundary_ratio")
        fields = super().objective_fields(config, directory)
        if boundary is not None:
            is_first = directory is not None and directory.component == "transformer"
            fields["sigma_range"] = (float(boundary), 1.0) if is_first else (0.0, float(boundary))
        return fields

    def check_model(self, config: Any) -> None:
        """Refuse image-to-video models, and those that are told the frame rate, which are for diffusion forcing."""
        if config.get("inject_sample_info"):
            raise ValueError("model: this is a diffusion-forcing model, which cannot be trained here yet")
        super().check_model(config)

    def frame_rate(self, directory: ModelDirectory) -> float:
        # Wan 2.2 5B has steps for every token.
        is_faster = "SkyReels" in directory.class_name or (directory.index or {}).get("expand_timesteps")
        return 24.0 if is_faster else 16.0

    def encode_condition(self, pipeline: Any, condition: str | int, length: int | None) -> dict[str, torch.Tensor]:
        embeddings = super().encode_condition(pipeline, condition, length)["prompt_embeds"]
        used = embeddings.abs().sum(dim=1).nonzero()
        return {"prompt_embeds": embeddings[: int(used.max()) + 1 if len(used) else 0]}


class WanVACE(Wan):
    """As Wan, from text alone: without a video, reference images or a mask."""

    name = "wan-vace"
    objective = WanVACEObjective

    def objective_fields(self, config: TrainingConfig, directory: ModelDirectory | None) -> dict[str, Any]:
        """Have the pipeline's VAE encode what controls nothing, once for every size."""
        fields = super().objective_fields(config, directory)
        if directory is not None and directory.index is not None:
            fields["control"] = partial(_without_control, directory.root, directory.sample_size.vae)
        return fields


class LTX(Video):
    """Videos `[3, F, H, W]` to `[C, F', H', W']`; captions as those of SANA, without instruction."""

    name = "ltx"
    objective = LTXObjective
    encoded_names = MASKED_NAMES

    def frame_rate(self, directory: ModelDirectory) -> float:
        return LTXObjective.frame_rate

    def validation_inputs(
        self, pipeline: Any, directory: ModelDirectory, config: TrainingConfig, dataset: Any
    ) -> list[dict[str, Any]]:
        rate = dataset.settings.get("fps") or LTXObjective.frame_rate
        found = super().validation_inputs(pipeline, directory, config, dataset)
        return [{**inputs, "frame_rate": rate} for inputs in found]

    def objective_fields(self, config: TrainingConfig, directory: ModelDirectory | None) -> dict[str, Any]:
        """Take the distances between latents in seconds and pixels from the pipeline's VAE."""
        fields = super().objective_fields(config, directory)
        if directory is not None and directory.index is not None:
            fields |= dict(zip(("temporal_factor", "spatial_factor"), directory.sample_size.vae))
        return fields


class HunyuanVideo(Video):
    """Videos `[3, F, H, W]` to `[C, F', H', W']`; captions as those of SANA, and to `pooled_prompt_embeds` `[P]`.

    Captions follow the instruction that the pipeline puts before prompts.
    """

    name = "hunyuan-video"
    objective = HunyuanVideoObjective
    encoders = TWO_ENCODERS
    encoded_names = ("prompt_embeds", "pooled_prompt_embeds", "prompt_attention_mask")

    encode_media = Family.encode_media


class Sana(Family):
    """Images `[3, H, W]` to `[C, H', W']`; captions to `prompt_embeds` `[l, D]`, `prompt_attention_mask` `[l]`.

    Captions follow the instruction that the pipeline puts before prompts by default ("complex human instruction"), and
    the empty prompt goes without it: training sees text as inference does.
    """

    name = "sana"
    objective = SanaObjective
    encoded_names = MASKED_NAMES
    # By default the negative prompt is an empty text, which the pipeline refuses beside embeddings.
    call_options = {"negative_prompt": None, "use_resolution_binning": False}

    def check_model(self, config: Any) -> None:
        """Refuse SANA-Sprint, which is distilled."""
        if config.get("guidance_embeds"):
            raise ValueError(
                "model: this is a SANA-Sprint model, which is distilled and not trained by flow matching; train the "
                "SANA model that it comes from"
            )

    def encode_null_condition(self, pipeline: Any, length: int | None, num_classes: int) -> dict[str, torch.Tensor]:
        """Encode the empty negative prompt."""
        _, _, embeddings, mask = pipeline.encode_prompt("", negative_prompt="", max_sequence_length=length)
        return _without_padding({"prompt_embeds": embeddings[0], "prompt_attention_mask": mask[0]})

    def prompt_options(self, pipeline: Any) -> dict[str, Any]:
        """Return the lines that the pipeline puts before prompts by default."""
        return {"complex_human_instruction": list(call_default(pipeline, "complex_human_instruction"))}


class Flux(Family):
    """Images `[3, H, W]` to `[C, H', W']`; captions to `prompt_embeds` `[L, D]`, `pooled_prompt_embeds` `[P]`.

    Flux attends to the padding of captions: it stays.
    """

    name = "flux"
    objective = FluxObjective
    encoders = TWO_ENCODERS
    encoded_names = ("prompt_embeds", "pooled_prompt_embeds")


class DiT(Family):
    """Images `[3, H, W]` to `[C, H', W']`; classes to `class_label` `[]`, int64."""

    name = "dit"
    objective = DiTObjective
    encoders = ("vae",)

    def check_model(self, config: Any) -> None:
        """Take all: variances that a model predicts are further channels."""

    def objective_fields(self, config: TrainingConfig, directory: ModelDirectory | None) -> dict[str, Any]:
        """Take the noise of the pipeline's scheduler."""
        stored = {} if directory is None else read_scheduler(directory)
        noise = {name: stored[name] for name in _NOISE_ENTRIES if stored.get(name) is not None}
        return {"scheduler": noise} if noise else {}

    def encode_condition(self, pipeline: Any, condition: str | int, length: int | None) -> dict[str, torch.Tensor]:
        return {"class_label": torch.tensor(int(condition))}

    def encode_null_condition(self, pipeline: Any, length: int | None, num_classes: int) -> dict[str, torch.Tensor]:
        """Return the label after the last class."""
        return {"class_label": torch.tensor(num_classes)}

    def validation_inputs(
        self, pipeline: Any, directory: ModelDirectory, config: TrainingConfig, dataset: Any
    ) -> list[dict[str, Any]]:
        number, classes = self.num_classes(directory), dataset.manifest["classes"]
        if config.validation_guidance > 1 and number != GUIDANCE_LABEL:
            raise ValueError(
                f"validation_guidance must be at most 1: the pipeline's guidance is for models of {GUIDANCE_LABEL} "
                f"classes, and this one has {number}"
            )
        # The classes of the data come first where an error lists them, and mean what they mean there.
        known = {**classes, **pipeline_labels((directory.index or {}).get("id2label")), **classes}
        return [{"class_labels": [find_label(each, known, number)]} for each in config.validation_prompts]


FAMILIES: dict[str, Family] = {
    family.name: family for family in (Wan(), WanVACE(), LTX(), HunyuanVideo(), Sana(), Flux(), DiT())
}
"""The families by name."""


def family_of_class(class_name: str, what: str = "model") -> Family:
    """Return the family of a transformer class, upstream or MHLA.

    Args:
        class_name: As in `_class_name` of a config.
        what: Name of the model in the error.

    Raises:
        ValueError: If such models cannot be trained here.
    """
    known = MODEL_FAMILIES.get(class_name) or MHLA_CLASSES.get(class_name)
    if known is None or known.training not in FAMILIES:
        classes = [each for each in MODEL_FAMILIES.values() if each.training in FAMILIES]
        supported = ", ".join(f"{each.upstream}, {each.mhla_class}" for each in classes)
        raise ValueError(f"{what} is a {class_name}, which cannot be trained here yet; supported: {supported}")
    return FAMILIES[known.training]


def open_pipeline(location: str, component: str = "transformer") -> ModelDirectory:
    """Open a pipeline to train; of a Hub repository, only the pipeline's own files are downloaded.

    Args:
        location: A directory or a Hub id.
        component: Name of the transformer to train.

    Raises:
        ValueError: If there is no pipeline, or its transformer cannot be trained here.
    """
    directory = ModelDirectory.read(find_pipeline(location), component, location=location)
    family_of_class(directory.class_name, f"component: {component} of {location}").check_pipeline(directory)
    return directory


def check_run(directory: ModelDirectory, config: TrainingConfig) -> None:
    """Check the options of a run against the pipeline's files, before data are encoded for it.

    Raises:
        ValueError: If options, pipeline and teacher do not fit together.
    """
    family_of_class(directory.class_name).make_objective(config, directory)
    for name in (directory.component, *TWO_ENCODERS):
        check_weights(directory.root / name)
    check_conversion(directory, config.mhla)
    model_class = directory.load_class() if config.mhla == UNCONVERTED else mhla_class_for(directory.class_name)
    if config.train == "lora":
        check_takes_adapters(model_class)
    if isinstance(config.mhla, dict):
        with init_empty_weights():
            model_class.from_config({**directory.config, "mhla": config.mhla})
    if config.distill_steps:
        directory.original(config.teacher, "teacher")


def objective_for(
    model: Any, directory: ModelDirectory | str | Path | None = None, config: TrainingConfig | None = None
) -> Objective:
    """The objective that a model is trained and evaluated with.

    Args:
        model: The transformer.
        directory: The pipeline it comes from; its scheduler decides how samples are noised. None takes the defaults
            of the family.
        config: Options that change it; None changes nothing.

    Raises:
        ValueError: If such models cannot be trained here, an option belongs to other models, or the scheduler does
            not go with the objective.
    """
    config = config or TrainingConfig()
    # Sharding replaces the class of a model by a subclass.
    names = [cls.__name__ for cls in type(model).__mro__]
    family = family_of_class(next((name for name in names if name in {**MODEL_FAMILIES, **MHLA_CLASSES}), names[0]))
    family.check_model(model.config)
    check_options(config, family.name)
    if directory is not None and not isinstance(directory, ModelDirectory):
        directory = ModelDirectory.open(directory, config.component)
    return family.make_objective(config, directory)


def encode_videos(vae: Any, videos: torch.Tensor) -> torch.Tensor:
    """Encode videos to normalised latents: the mean of the distribution, less the VAE's mean, over its deviation.

    Args:
        vae: An `AutoencoderKLWan`, or `AutoencoderKLLTXVideo`.
        videos: `[N, 3, F, H, W]` in [-1, 1].

    Returns:
        `[N, C, F', H', W']`, fp32, as the transformer takes it.
    """
    with torch.no_grad():
        encoded = _encode(vae, videos).latent_dist.mode().float()
    # Of LTX-Video they are buffers.
    stored = ({**vae.config, **dict(vae.named_buffers())}[f"latents_{name}"] for name in ("mean", "std"))
    mean, deviation = (torch.as_tensor(each).to(encoded).view(1, -1, 1, 1, 1) for each in stored)
    return (encoded - mean) / deviation * vae.config.get("scaling_factor", 1.0)


@lru_cache(maxsize=8)
def _without_control(
    root: Path, compression: tuple[int, int], shape: tuple[int, ...], device: torch.device
) -> torch.Tensor:
    """Encode the control of Wan-VACE for latents `[F', H', W']` as its pipeline does that of no video: gray, masked.

    Returns:
        `[1, C, F', H', W']`, fp32: what the mask leaves, what it hides, and the mask itself.
    """
    import diffusers

    size = SampleSize(compression, (1, 1, 1)).pixels(shape)
    gray = torch.zeros(1, 3, size["num_frames"], size["height"], size["width"], device=device)
    with damage_named(root), torch.autocast(device.type, enabled=False):
        vae: Any = diffusers.AutoencoderKLWan.from_pretrained(root / "vae", torch_dtype=torch.float32)
        latents = encode_videos(vae.to(device), gray)
    return torch.cat([latents, latents, latents.new_ones(1, compression[1] ** 2, *shape)], dim=1)


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


def read_scheduler(directory: ModelDirectory) -> dict[str, Any]:
    """Read the scheduler's configuration of a pipeline; empty for a pipeline without scheduler.

    Raises:
        ValueError: If it is damaged.
    """
    path = directory.root / "scheduler" / "scheduler_config.json"
    # A link that leads nowhere is an error, and no missing file.
    if not os.path.lexists(path):
        return {}
    config = read_json(path, "the scheduler's configuration", optional=_SCHEDULER_FIELDS)
    if not 1 <= config.get("num_train_timesteps", 1) <= _MOST_TIMESTEPS:
        raise ValueError(
            f"the scheduler's configuration {path}: 'num_train_timesteps' must be from 1 to {_MOST_TIMESTEPS:,}."
        )
    return config


def _flow_noise(config: TrainingConfig, directory: ModelDirectory | None) -> dict[str, Any]:
    """Distribution of noise levels of flow matching; a shift that the options do not give is the scheduler's."""
    shift: float | None = _DEFAULT_SHIFT
    if directory is not None:
        scheduler = read_scheduler(directory)
        # Schedulers for flow matching alone have no such entry.
        prediction_type = scheduler.get("prediction_type", "flow_prediction")
        shift = float(scheduler.get("flow_shift") or scheduler.get("shift") or 1.0)
        if scheduler.get("use_dynamic_shifting"):
            # The scheduler's largest; how much it shifts a sample depends on its size.
            shift = math.exp(float(scheduler.get("max_shift", 1.15)))
        if prediction_type != "flow_prediction" or not 0 < shift < math.inf:
            raise ValueError(
                f"model: the scheduler of {directory.root}, {scheduler.get('_class_name')}, has prediction_type="
                f"{prediction_type!r} and a shift of {shift}; for flow matching prediction_type must be "
                "'flow_prediction', and the shift above 0"
            )
    given = {"logit_mean": config.logit_mean, "logit_std": config.logit_std, "flow_shift": config.flow_shift or shift}
    return {name: value for name, value in given.items() if value is not None}


def _encode(vae: Any, media: torch.Tensor) -> Any:
    """Call a VAE's `encode` on its device and in its type."""
    parameter = next(vae.parameters())
    return vae.encode(media.to(parameter.device, parameter.dtype))


def _without_padding(text: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Cut the padding off embeddings `[L, D]` and their mask `[L]`, if there is one."""
    if "prompt_attention_mask" not in text:
        return text
    used = text["prompt_attention_mask"].nonzero()
    # With everything masked, attention would look at the padding: it stays.
    length = int(used.max()) + 1 if len(used) else len(text["prompt_attention_mask"])
    return text | {name: text[name][:length] for name in PADDED}
