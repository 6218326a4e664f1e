# SPDX-License-Identifier: Apache-2.0
"""The options of one training run, and of the cache it reads.

Both dataclasses are keyword-only, validated when built and never changed afterwards; the command line is generated
from their fields, so a field's `help` is also its documentation there. They import nothing heavy.
"""

from __future__ import annotations

import dataclasses
import json
import math
import operator
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..utils.json_files import check_fields, parse_json, read_json
from ..utils.messages import shorten_value
from .data.buckets import parse_buckets


TRAIN_MODES = ("mhla", "lora", "full")
COMPONENTS = ("transformer", "transformer_2")
PRECISIONS = ("no", "fp16", "bf16")
LR_SCHEDULES = ("constant", "linear", "cosine")
TRACKERS = ("none", "tensorboard", "wandb")
DEVICES = ("auto", "cpu")
TRANSFER_CACHES = ("auto", "memory", "disk", "none")
CACHE_DTYPES = ("float32", "bfloat16", "float16")
# Value of `mhla` for a model that is not converted.
UNCONVERTED = "none"
DISTILL_TARGETS = ("logits", "last_hidden_state", "hidden_states", "pooled")
# Value of `data` for the built-in set.
DIGITS = "digits"
# Value of `data` for samples that the pipeline draws itself.
GENERATED = "generated"
# Far beyond what models are made for; a typing error above asks for more memory than there is.
LONGEST_SIDE = 16_384
MOST_FRAMES = 16_384
LONGEST_TEXT = 65_536
MOST_SAMPLES = 10**7


def _option(default: Any, help: str, **metadata: Any) -> Any:
    """A dataclass field with its help text.

    `metadata` may carry `choices`, `minimum`, `maximum`, `above` and `below`.
    """
    return field(default=default, metadata={"help": help, **metadata})


class _Options:
    """Validation and plain-JSON serialisation shared by the option dataclasses."""

    def _check_fields(self) -> None:
        for item in dataclasses.fields(self):  # type: ignore[arg-type]
            _check_value(item, getattr(self, item.name))

    def changed(self) -> list[str]:
        """Names of the options that differ from their defaults."""
        return [item.name for item in dataclasses.fields(self) if getattr(self, item.name) != item.default]  # type: ignore[arg-type]

    def to_dict(self) -> dict[str, Any]:
        """All options as plain JSON values."""
        return json.loads(json.dumps(dataclasses.asdict(self), default=str))  # type: ignore[call-overload]

    @classmethod
    def from_dict(cls, options: dict[str, Any]):
        """Builds the options from a dict such as `to_dict` returns.

        Raises:
            ValueError: If a key is unknown (the error lists the known ones) or a value is not allowed.
        """
        known = [item.name for item in dataclasses.fields(cls)]  # type: ignore[arg-type]
        unknown = sorted(set(options) - set(known))
        if unknown:
            raise ValueError(f"unknown option {', '.join(unknown)} for {cls.__name__}; known: {', '.join(known)}")
        return cls(**options)

    def replace(self, **changes: Any):
        """A copy with some options changed, validated again."""
        return dataclasses.replace(self, **changes)  # type: ignore[type-var]


def _check_value(item: dataclasses.Field, value: Any) -> None:
    """Checks one value against its field's type and metadata; raises ValueError naming field and allowed values."""
    annotation = str(item.type)
    if value is None:
        if "None" not in annotation:
            raise ValueError(f"{item.name} must be given, got None")
        return
    rules, got = item.metadata, f"got {shorten_value(value)}"
    if "choices" in rules and value not in rules["choices"]:
        raise ValueError(f"{item.name} must be one of {', '.join(rules['choices'])}, {got}")
    if annotation.startswith("bool") and not isinstance(value, bool):
        raise ValueError(f"{item.name} must be true or false, {got}")
    if annotation.startswith("str") and not isinstance(value, str):
        raise ValueError(f"{item.name} must be a text, {got}")
    if annotation.startswith("int") and (isinstance(value, bool) or not isinstance(value, int)):
        raise ValueError(f"{item.name} must be a whole number{_range(rules)}, {got}")
    if annotation.startswith("float") and not _is_finite(value):
        raise ValueError(f"{item.name} must be a finite number{_range(rules)}, {got}")
    for rule, (words, holds) in _RULES.items():
        if rule in rules and not holds(value, rules[rule]):
            raise ValueError(f"{item.name} must be {words} {rules[rule]}, {got}")


_RULES: dict[str, tuple[str, Callable[[Any, Any], bool]]] = {
    "minimum": ("at least", operator.ge),
    "maximum": ("at most", operator.le),
    "above": ("greater than", operator.gt),
    "below": ("less than", operator.lt),
}


def _range(rules: Mapping[str, Any]) -> str:
    """The allowed range of a number, in brackets; empty if there is none."""
    limits = " and ".join(f"{words} {rules[rule]}" for rule, (words, _) in _RULES.items() if rule in rules)
    return f" ({limits})" if limits else ""


def _is_finite(value: Any) -> bool:
    try:
        return not isinstance(value, bool) and isinstance(value, (int, float)) and math.isfinite(value)
    except OverflowError:  # An integer beyond what a float can hold.
        return False


@dataclass(frozen=True, kw_only=True)
class TrainingConfig(_Options):
    """Options of one training run: stages of layer matching and distillation if wanted, then fine-tuning.

    Learning rates are per optimizer step, `batch_size` is per process and micro-step. The number of samples in one
    optimizer step is `batch_size * gradient_accumulation_steps * number of processes`.

    Raises:
        ValueError: If a value is not allowed; the message names the option and what it may be.
    """

    model: str | None = _option(None, "Pipeline to train: a directory or a Hub id, MHLA or ordinary.")
    output: str | None = _option(None, "Directory of the run: checkpoints, metrics, validation samples, pipeline.")
    cache: str | None = _option(
        None, "Directory of cached latents and their captions or classes. Default: OUTPUT/cache."
    )
    component: str = _option("transformer", "Transformer of the pipeline to train.", choices=COMPONENTS)
    mhla: dict | str | None = _option(
        None,
        "MHLA options as JSON (or a JSON file) to convert an ordinary pipeline on load; 'none' trains it as it is.",
    )
    teacher: str | None = _option(
        None, "Ordinary pipeline to match. Default: what the model was converted from, on the Hub or beside it."
    )

    train: str = _option(
        "full", "Parameters to train: those of MHLA, LoRA and those of MHLA, or all.", choices=TRAIN_MODES
    )
    lora_rank: int = _option(32, "Rank of the LoRA matrices.", minimum=1)
    lora_alpha: float | None = _option(None, "LoRA scale, times 1 / rank. Default: the rank.", above=0)

    transfer_steps: int = _option(0, "Steps that first match each MHLA layer's output to the teacher's.", minimum=0)
    transfer_cache: str = _option(
        "auto",
        "Where the teacher's activations are kept for those steps, so that it runs once per sample; 'none' runs it in "
        "every step, on new noise, and so does 'auto' where they do not fit.",
        choices=TRANSFER_CACHES,
    )
    distill_steps: int = _option(0, "Steps that then match the whole model's prediction to the teacher's.", minimum=0)
    max_steps: int = _option(1000, "Fine-tuning steps.", minimum=0)
    batch_size: int = _option(1, "Samples per process and micro-step.", minimum=1)
    gradient_accumulation_steps: int = _option(1, "Micro-steps per optimizer step.", minimum=1)
    dataloader_num_workers: int = _option(
        0, "Processes that make batches ahead; 0 makes them in the training process.", minimum=0, maximum=1024
    )

    learning_rate: float = _option(1e-4, "Peak learning rate.", above=0)
    mhla_learning_rate: float | None = _option(
        None, "Peak learning rate of the MHLA parameters. Default: the learning rate.", above=0
    )
    transfer_learning_rate: float | None = _option(
        None, "Peak learning rate of the matching stage. Default: the learning rate.", above=0
    )
    distill_learning_rate: float | None = _option(
        None, "Peak learning rate of the distillation stage. Default: the learning rate.", above=0
    )
    distill_ratio: float = _option(
        1.0,
        "Share of the distance to the teacher in the loss of that stage; the rest is the loss on the data.",
        above=0,
        maximum=1,
    )
    distill_target: str | None = _option(
        None,
        "Output of the teacher to match. Default: logits of language models and classifiers, else the last hidden "
        "state.",
        choices=DISTILL_TARGETS,
    )
    distill_temperature: float = _option(1.0, "Temperature of the logits in distillation.", above=0)
    lr_schedule: str = _option("constant", "Learning rate after the warm-up.", choices=LR_SCHEDULES)
    warmup_steps: int = _option(0, "Steps of linear warm-up, in each stage.", minimum=0)
    adam_beta1: float = _option(0.9, "AdamW's first beta.", minimum=0, below=1)
    adam_beta2: float = _option(0.999, "AdamW's second beta.", minimum=0, below=1)
    adam_epsilon: float = _option(1e-8, "AdamW's epsilon.", above=0)
    weight_decay: float = _option(0.01, "AdamW's weight decay, on weight matrices only.", minimum=0)
    max_grad_norm: float = _option(1.0, "Gradients are clipped to this norm; 0 switches clipping off.", minimum=0)

    ema_decay: float | None = _option(
        None,
        "Keep a moving average (EMA) of the weights, with this largest decay; it makes the validation samples and is "
        "what the run exports. Default: none.",
        minimum=0,
        below=1,
    )
    ema_inv_gamma: float | None = _option(
        None, "The decay grows as 1 - (1 + step / ema_inv_gamma)^-ema_power. Default: 1.", above=0
    )
    ema_power: float | None = _option(
        None, "See ema_inv_gamma. Default: the decay grows as (1 + step) / (10 + step).", above=0
    )

    flow_shift: float | None = _option(
        None, "Shift of the noise levels towards noise. Default: the pipeline scheduler's.", above=0
    )
    logit_mean: float | None = _option(None, "Mean of the logit-normal distribution of noise levels. Default: 0.")
    logit_std: float | None = _option(
        None, "Standard deviation of the logit-normal distribution. Default: 1.", above=0
    )
    condition_dropout: float = _option(
        0.1,
        "Share of samples whose caption or class is replaced by the empty one, for guidance.",
        minimum=0,
        maximum=1,
    )

    mixed_precision: str | None = _option(
        None, "Autocast type over fp32 weights. Default: what `accelerate launch` says.", choices=PRECISIONS
    )
    gradient_checkpointing: bool = _option(False, "Recompute activations in the backward pass to save memory.")
    device: str = _option("auto", "Where to run; auto takes the GPU if there is one.", choices=DEVICES)
    seed: int = _option(0, "Seed of data order, noise and new parameters.", minimum=0, maximum=2**32 - 1)

    resume: str | None = _option(
        None, "'latest', 'previous' (the one before), or a checkpoint directory to resume from."
    )
    checkpointing_steps: int = _option(500, "Save a checkpoint every so many steps; 0 switches it off.", minimum=0)
    checkpoints_total_limit: int | None = _option(None, "Keep at most so many checkpoints.", minimum=1)
    report_to: str = _option("none", "Tracker to report to.", choices=TRACKERS)

    validation_prompts: tuple[str, ...] = _option((), "Caption or class of a validation sample; may be repeated.")
    validation_steps: int = _option(500, "Make validation samples every so many fine-tuning steps.", minimum=1)
    validation_inference_steps: int = _option(20, "Denoising steps of a validation sample.", minimum=1)
    validation_guidance: float = _option(4.0, "Guidance scale of validation samples.", minimum=0)
    validation_negative_prompt: str = _option("", "Negative prompt of validation samples.")

    startup_timeout: float = _option(
        10.0, "Minutes that the processes of a run wait for one another when it starts.", above=0, maximum=10_000
    )
    progress: bool = _option(True, "Show a progress bar.")

    def __post_init__(self) -> None:
        object.__setattr__(self, "mhla", _parse_mhla(self.mhla))
        object.__setattr__(self, "validation_prompts", _strings("validation_prompts", self.validation_prompts))
        for name in ("model", "output", "cache", "teacher", "resume"):
            if isinstance(getattr(self, name), Path):
                object.__setattr__(self, name, str(getattr(self, name)))
        self._check_fields()
        if self.transfer_steps + self.distill_steps + self.max_steps == 0:
            raise ValueError("max_steps, distill_steps and transfer_steps are all 0: nothing to train")
        if self.mhla == UNCONVERTED and self.train == "mhla":
            raise ValueError(
                "train='mhla' needs MHLA layers, but mhla='none' converts nothing; use train lora or full"
            )
        for name in ("transfer_steps", "distill_steps"):
            if self.mhla == UNCONVERTED and getattr(self, name):
                raise ValueError(f"{name} needs MHLA layers, but mhla='none' converts nothing")
        for name in ("ema_inv_gamma", "ema_power"):
            needed = "ema_decay" if name == "ema_power" else "ema_power"
            if getattr(self, name) is not None and getattr(self, needed) is None:
                raise ValueError(f"{name} needs {needed}")
        if self.transfer_cache == "disk" and self.transfer_steps and self.output is None:
            raise ValueError("transfer_cache='disk' needs output: the directory to keep activations in")
        if self.resume is not None and self.output is None:
            raise ValueError("resume needs output: the directory with the checkpoints")


@dataclass(frozen=True, kw_only=True)
class CacheConfig(_Options):
    """Options of the cache step, which encodes videos or images and their captions once.

    Sizes that are not given depend on the model; see `families.base.PipelineSizes.complete`.

    Raises:
        ValueError: If a value is not allowed; the message names the option and what it may be.
    """

    data: str | None = _option(
        None,
        "Folder of videos or images with captions (metadata.jsonl, metadata.csv or one .txt per file); for DiT, of "
        "one folder of images per class; 'digits'; or 'generated' for samples that the original pipeline draws.",
    )
    height: int | None = _option(
        None,
        "Height in pixels. Default: 480 for videos, the model's own for images; less for 'digits'.",
        minimum=8,
        maximum=LONGEST_SIDE,
    )
    width: int | None = _option(
        None,
        "Width in pixels. Default: 832 for videos, the model's own for images; less for 'digits'.",
        minimum=8,
        maximum=LONGEST_SIDE,
    )
    buckets: str | None = _option(
        None,
        "Sizes to sort images or videos into, in place of height and width: 'height,width;height,width;...', of "
        "videos with frames: '480,832,81;832,480,81'. The first is that of validation samples.",
    )
    num_frames: int | None = _option(
        None, "Frames per video. Default: 81; 17 for 'digits'.", minimum=1, maximum=MOST_FRAMES
    )
    fps: float | None = _option(
        None, "Frame rate to sample at. Default: take the frames as they are.", above=0, maximum=1000
    )
    max_sequence_length: int | None = _option(
        None, "Tokens that a caption is padded to. Default: the pipeline's.", minimum=1, maximum=LONGEST_TEXT
    )
    cache_dtype: str = _option("float32", "Type the cached tensors are stored in.", choices=CACHE_DTYPES)
    num_samples: int | None = _option(
        None,
        "Use at most so many videos or images; for 'digits' and 'generated' how many to make (256).",
        minimum=1,
        maximum=MOST_SAMPLES,
    )
    prompts: str | None = _option(None, "Text file with one prompt a line, for data='generated'.")
    generated_steps: int | None = _option(
        None, "Denoising steps for data='generated'. Default: the pipeline's.", minimum=1, maximum=1000
    )
    generated_guidance: float | None = _option(
        None, "Guidance scale for data='generated'. Default: the pipeline's.", minimum=0
    )

    def __post_init__(self) -> None:
        if isinstance(self.data, Path):
            object.__setattr__(self, "data", str(self.data))
        self._check_fields()
        for name in ("prompts", "generated_steps", "generated_guidance"):
            if getattr(self, name) is not None and self.data != GENERATED:
                raise ValueError(f"{name} is for data='generated' only")
        if self.buckets is not None:
            parse_buckets(self.buckets)
            if self.data in (DIGITS, GENERATED):
                raise ValueError(f"buckets are for data in files: data={self.data!r} has one size")
        if self.data == DIGITS and None not in (self.height, self.width) and self.height != self.width:
            raise ValueError(f"height and width must be the same for data='digits', got {self.height}, {self.width}")


def _parse_mhla(value: Any) -> Any:
    """A dict, None or 'none' from a dict, a JSON text, the name of a JSON file, or an `MHLAConfig`."""
    if value is None or isinstance(value, dict):
        return value
    if hasattr(value, "given_options"):
        return value.given_options()
    if not isinstance(value, str):
        raise ValueError(f"mhla must be JSON, a JSON file or 'none', got {shorten_value(value)}")
    if value == UNCONVERTED:
        return value
    if value.lstrip().startswith("{"):
        return check_fields(parse_json(value, "mhla"), "mhla")
    # Names of files are shorter than any other text that could be meant.
    if len(value) > 1000 or "\0" in value or not os.path.lexists(value):
        raise ValueError(f"mhla must be a JSON object, an existing JSON file or 'none', got {shorten_value(value)}")
    return read_json(Path(value), "mhla:")


def _strings(name: str, value: Any) -> tuple[str, ...]:
    """A tuple of strings from one string or a sequence of them."""
    values = (value,) if isinstance(value, str) else value or ()
    if not isinstance(values, (list, tuple)) or not all(isinstance(entry, str) for entry in values):
        raise ValueError(f"{name} must be texts, got {shorten_value(value)}")
    values = tuple(values)
    return values
