# SPDX-License-Identifier: Apache-2.0
"""The options of one training run, and of the cache it reads.

Both dataclasses are keyword-only, validated when built and never changed afterwards; the command line is generated
from their fields, so a field's `help` is also its documentation there. They import nothing heavy.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ..models.registry import TRAINED, names_of
from ..utils.files import check_fields, parse_json, read_json
from ..utils.messages import shorten_value
from ..utils.options import DEVICE_HELP, Options, option


TRANSFORMERS = "transformers"
"""Name in messages of the models of transformers, which have no command."""

TRAIN_MODES = ("mhla", "lora", "full")
COMPONENTS = ("transformer", "transformer_2")
PRECISIONS = ("no", "fp16", "bf16")
LR_SCHEDULES = ("constant", "linear", "cosine")
TRACKERS = ("none", "tensorboard", "wandb")
RECORD_CACHES = ("auto", "memory", "disk", "none")
# Options of earlier versions, in which runs could match layers first.
MATCHING = ("transfer_steps", "transfer_cache", "transfer_optimizer", "transfer_learning_rate")
MATCHING_FLAGS = ("--match-steps", "--match-cache", "--match-optimizer", "--match-learning-rate")
# Value of `mhla` for a model that is not converted.
UNCONVERTED = "none"
# Value of `data` for the built-in set.
DIGITS = "digits"
# Value of `data` for samples that the pipeline draws itself.
GENERATED = "generated"
# Far beyond what models are made for; a typing error above asks for more memory than there is.
LONGEST_SIDE = 16_384
MOST_FRAMES = 16_384
LONGEST_TEXT = 65_536
MOST_SAMPLES = 10**7
# Families that are conditioned on text; all of them are trained by flow matching.
_TEXT = tuple(name for name, family in TRAINED.items() if family.text_tokens)


@dataclass(frozen=True, kw_only=True)
class TrainingConfig(Options):
    """Options of one training run: distillation if wanted, then fine-tuning.

    Learning rates are per optimizer step, `batch_size` is per process and micro-step. The number of samples in one
    optimizer step is `batch_size * gradient_accumulation_steps * number of processes`.

    Raises:
        ValueError: If a value is not allowed; the message names the option and what it may be.
    """

    model: str | None = option(None, "Pipeline to train: a directory or a Hub id, MHLA or ordinary.")
    output: str | None = option(None, "Directory of the run: checkpoints, metrics, validation samples, pipeline.")
    cache: str | None = option(None, "Directory of the cached latents. Default: OUTPUT/cache.")
    component: str = option(
        "transformer", "Transformer to train.", choices=COMPONENTS, families=names_of(TRAINED, two_transformers=True)
    )
    mhla: dict | str | None = option(
        None, "MHLA options (JSON or a JSON file) to convert an ordinary pipeline with; 'none' leaves it unconverted."
    )
    teacher: str | None = option(None, "Ordinary pipeline to distil from. Default: what the model was converted from.")

    train: str = option("full", "Parameters to train: MHLA's, LoRA and MHLA's, or all.", choices=TRAIN_MODES)
    lora_rank: int = option(32, "Rank of the LoRA matrices.", minimum=1)
    lora_alpha: float | None = option(None, "LoRA scale, times 1 / rank. Default: the rank.", above=0)

    distill_steps: int = option(0, "Steps that first match the model's prediction to the original's.", minimum=0)
    max_steps: int = option(1000, "Fine-tuning steps.", minimum=0)
    batch_size: int = option(1, "Samples per process and micro-step.", minimum=1)
    gradient_accumulation_steps: int = option(1, "Micro-steps per optimizer step.", minimum=1)
    dataloader_num_workers: int = option(0, "Worker processes that load batches.", minimum=0, maximum=1024)

    learning_rate: float = option(1e-4, "Peak learning rate.", above=0)
    mhla_learning_rate: float | None = option(
        None, "Peak learning rate of the parameters that MHLA adds. Default: learning_rate.", above=0
    )
    distill_learning_rate: float | None = option(
        None, "Peak learning rate of distillation. Default: learning_rate.", above=0
    )
    distill_ratio: float = option(
        1.0,
        "Weight of the distance to the original in distillation; the rest is the loss on data.",
        above=0,
        maximum=1,
    )
    distill_temperature: float = option(
        1.0, "Temperature of the logits in distillation.", above=0, advanced=True, families=(TRANSFORMERS,)
    )
    lr_schedule: str = option("constant", "Learning rate after the warm-up.", choices=LR_SCHEDULES)
    warmup_steps: int = option(0, "Steps of linear warm-up, in each stage.", minimum=0)
    adam_beta1: float = option(0.9, "AdamW's first beta.", minimum=0, below=1, advanced=True)
    adam_beta2: float = option(0.999, "AdamW's second beta.", minimum=0, below=1, advanced=True)
    adam_epsilon: float = option(1e-8, "AdamW's epsilon.", above=0, advanced=True)
    weight_decay: float = option(0.01, "AdamW's weight decay, on weight matrices only.", minimum=0)
    max_grad_norm: float = option(1.0, "Gradients are clipped to this norm; 0 switches clipping off.", minimum=0)

    ema_decay: float | None = option(
        None, "Export (and validate) a moving average of the weights, with this largest decay.", minimum=0, below=1
    )

    flow_shift: float | None = option(
        None, "Timestep shift of the noise schedule. Default: the scheduler's.", above=0, advanced=True, families=_TEXT
    )
    logit_mean: float | None = option(
        None, "Mean of the logit-normal noise levels. Default: 0.", advanced=True, families=_TEXT
    )
    logit_std: float | None = option(
        None, "Their standard deviation. Default: 1.", above=0, advanced=True, families=_TEXT
    )
    condition_dropout: float = option(
        0.1, "Share of samples that train without their caption or class, for guidance.", minimum=0, maximum=1
    )

    mixed_precision: str | None = option(
        None, "Autocast type over fp32 weights. Default: what `accelerate launch` says.", choices=PRECISIONS
    )
    gradient_checkpointing: bool = option(False, "Recompute activations in the backward pass to save memory.")
    device: str = option("auto", DEVICE_HELP)
    seed: int = option(0, "Seed of data order, noise and new parameters.", minimum=0, maximum=2**32 - 1)

    resume: str | None = option(None, "'latest', 'previous' (the one before it), or the name of a checkpoint.")
    checkpointing_steps: int = option(500, "Save a checkpoint every N steps; 0 switches it off.", minimum=0)
    checkpoints_total_limit: int | None = option(None, "Maximum number of checkpoints to keep.", minimum=1)
    report_to: str = option("none", "Tracker to report to.", choices=TRACKERS)

    validation_prompts: tuple[str, ...] = option(
        (), "Caption or class of a validation sample; may be repeated.", families=tuple(TRAINED)
    )
    validation_steps: int = option(500, "Make validation samples every N fine-tuning steps.", minimum=1)
    validation_inference_steps: int = option(20, "Denoising steps of a validation sample.", minimum=1, advanced=True)
    validation_guidance: float = option(4.0, "Guidance scale of validation samples.", minimum=0, advanced=True)
    validation_negative_prompt: str = option(
        "", "Negative prompt of the samples.", advanced=True, families=names_of(TRAINED, negative_prompts=True)
    )

    progress: bool = option(True, "Show a progress bar.")

    def __new__(cls, **options: Any) -> TrainingConfig:
        """Refuse options of matching, which [`mhla_hf.recover`][mhla_hf.recover] does."""
        refuse_matching(options)
        return super().__new__(cls)

    @classmethod
    def from_dict(cls, options: Mapping[str, Any]) -> TrainingConfig:
        """Build the options from plain JSON types, as those of other `Options`."""
        refuse_matching(options)
        return super().from_dict(options)

    def __post_init__(self) -> None:
        object.__setattr__(self, "mhla", _parse_mhla(self.mhla))
        super().__post_init__()
        if self.distill_steps + self.max_steps == 0:
            raise ValueError("max_steps and distill_steps are both 0: nothing to train")
        if self.mhla == UNCONVERTED and (self.train == "mhla" or self.distill_steps):
            raise ValueError("mhla='none' converts nothing: use train lora or full, without distill_steps")
        needing = [name for name in ("resume", "report_to") if name in self.changed()]
        if self.output is None and needing:
            raise ValueError(f"{needing[0]} needs output")


def refuse_matching(options: Iterable[str]) -> None:
    """Refuse options of the stage of matching that runs had in earlier versions.

    Args:
        options: Names of options.

    Raises:
        ValueError: If one of them was such an option; the message says what matches layers now.
    """
    if given := next((name for name in options if name in (*MATCHING, *MATCHING_FLAGS)), None):
        raise ValueError(
            f"{given} is no option of training any more: match layers with `mhla-hf recover SOURCE OUTPUT "
            "--stages calibrate,match` (mhla_hf.recover(source, output, stages=('calibrate', 'match'))), then train "
            "OUTPUT"
        )


@dataclass(frozen=True)
class Bucket:
    """A size in pixels, and of videos the number of frames; 1 for images."""

    height: int
    width: int
    num_frames: int = 1


def parse_sizes(text: str, num_frames: int = 1, name: str = "sizes") -> tuple[Bucket, ...]:
    """Parse sizes from `"height,width;height,width"`, the format of buckets in diffusers' training scripts.

    Args:
        text: The sizes, `"480,832,81;832,480,81"` for videos.
        num_frames: Frames for sizes that do not name any.
        name: Name of the text, for the error.

    Raises:
        ValueError: If the text is of another form, or a size is far beyond what models are made for.
    """
    number = r"\s*([1-9]\d{0,4})\s*"
    found = []
    for part in text.strip().strip(";").split(";"):
        match = re.fullmatch(f"{number},{number}(?:,{number})?", part)
        if match is None or max(int(side) for side in match.groups("1")) > LONGEST_SIDE:
            raise ValueError(
                f"{name} must be like '480,832;832,480', height and width, or with frames '480,832,81;832,480,49', of "
                f"at most {LONGEST_SIDE:,} each, got {shorten_value(part)}"
            )
        found.append(Bucket(int(match[1]), int(match[2]), int(match[3] or num_frames)))
    return tuple(found)


@dataclass(frozen=True, kw_only=True)
class CacheConfig(Options):
    """Options of the cache step, which encodes videos or images and their captions once.

    Raises:
        ValueError: If a value is not allowed; the message names the option and what it may be.
    """

    data: str | None = option(
        None,
        "Folder of videos or images with captions (metadata.jsonl, metadata.csv or one .txt per file); for DiT, of "
        "one folder of images per class; 'digits'; or 'generated' for samples that the original pipeline draws.",
    )
    sizes: str | None = option(
        None,
        "Height and width in pixels, of videos also frames: '480,832,81'. Several, split by ';', are buckets: each "
        "image or video goes to the nearest; the first is that of validation samples. Default: 480,832,81 for videos, "
        "the model's own for images; less for 'digits'.",
    )
    fps: float | None = option(
        None,
        "Frames per second to sample videos at; 0 takes the frames as they are. Default: what the model was made for, "
        "16 for Wan, 24 for Wan 2.2 5B, SkyReels-V2 and HunyuanVideo, 25 for LTX-Video, which is told them.",
        minimum=0,
        maximum=1000,
        families=names_of(TRAINED, kind="video"),
    )
    background: str | None = option(
        None, "Colour behind transparent parts of images and videos, such as 'black' or '#808080'. Default: white."
    )
    num_samples: int | None = option(
        None,
        "Maximum number of videos or images; for 'digits' and 'generated', how many to make (256).",
        minimum=1,
        maximum=MOST_SAMPLES,
    )
    max_sequence_length: int | None = option(
        None,
        "Tokens that a caption is padded to. Default: the pipeline's.",
        minimum=1,
        maximum=LONGEST_TEXT,
        advanced=True,
        families=_TEXT,
    )
    prompts: str | None = option(None, "Text file with one prompt per line, for data='generated'.", families=_TEXT)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.prompts is not None and self.data != GENERATED:
            raise ValueError("prompts is for data='generated' only")
        if self.background is not None:
            from PIL import ImageColor

            try:
                ImageColor.getrgb(self.background)
            except ValueError:
                raise ValueError(
                    f"background must be a colour such as 'black' or '#808080', got {shorten_value(self.background)}"
                ) from None
        sizes = () if self.sizes is None else parse_sizes(self.sizes)
        if len(sizes) > 1 and self.data in (DIGITS, GENERATED):
            raise ValueError(f"sizes of data={self.data!r} must be one: several are buckets for data in files")
        if self.data == DIGITS and any(size.height != size.width for size in sizes):
            raise ValueError(f"sizes must have the same height and width for data='digits', got {self.sizes}")


def option_families(name: str) -> tuple[str, ...]:
    """Return the families that have an option of a run or its cache.

    Args:
        name: Name of a field of `TrainingConfig` or `CacheConfig`.
    """
    options = {item.name: item.metadata for cls in (TrainingConfig, CacheConfig) for item in fields(cls)}
    return options[name].get("families", (*TRAINED, TRANSFORMERS))


def check_options(config: TrainingConfig | CacheConfig, family: str) -> None:
    """Check that every option that differs from its default is one of a family.

    Args:
        config: The options.
        family: A name in [`TRAINED`][mhla_hf.models.registry.TRAINED], or `TRANSFORMERS`.

    Raises:
        ValueError: If one is not; the message names it.
    """
    for name in config.changed():
        if family not in (families := option_families(name)):
            raise ValueError(f"{name} is not an option of {family} models, only of {', '.join(families)}")


def _parse_mhla(value: Any) -> Any:
    """Return a dict, None or 'none' from a dict, JSON text, the name of a JSON file, or an `MHLAConfig`."""
    if value is None or isinstance(value, dict) or value == UNCONVERTED:
        return value
    if hasattr(value, "given_options"):
        return value.given_options()
    if isinstance(value, str) and value.lstrip().startswith("{"):
        return check_fields(parse_json(value, "mhla"), "mhla")
    if not isinstance(value, str) or not os.path.exists(value):
        raise ValueError(f"mhla must be a JSON object, an existing JSON file or 'none', got {shorten_value(value)}")
    return read_json(Path(value), "mhla:")
