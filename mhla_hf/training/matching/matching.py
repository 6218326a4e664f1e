# SPDX-License-Identifier: Apache-2.0
"""Layer matching: every MHLA layer of a model is trained towards the output of the layer that it replaced.

The original runs once over some batches, and input and output of each layer are kept; then every layer trains alone on
that. Records that do not fit are made again for each step, for all layers at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...conversion.options import parse_dtype, parse_size
from ...layers.original import check_mhla, original_name, record_step
from ...utils.messages import check_count
from ..config import TrainingConfig
from ..processes import StopSignals
from .activations import CACHES
from .engine import Batches, Matching, MatchingReport, Progress, layers_with_projections
from .layers import Batch, evaluating, mhla_layers
from .stage import layer_loss
from .teacher import SharedTeacher, shared_teacher


TRAINED = ("full", "mhla")
PRECISIONS = ("no", "bf16")


def match_layers(
    model: nn.Module,
    batches: Sequence[Batch] | Callable[[int], Batch],
    *,
    steps: int = 600,
    num_batches: int | None = None,
    teacher: nn.Module | SharedTeacher | None = None,
    original_parameters: Mapping[str, torch.Tensor] | None = None,
    batch_size: int = 1,
    learning_rate: float = 3e-3,
    mhla_learning_rate: float = 5e-3,
    train: str = "full",
    warmup_steps: int = 10,
    max_grad_norm: float = 1.0,
    mixed_precision: str = "no",
    cache: str = "auto",
    cache_limit: int | str | None = None,
    cache_dtype: str | torch.dtype = "bfloat16",
    device: torch.device | str | None = None,
    output: str | Path | None = None,
    save_every: int = 200,
    seed: int = 0,
    progress: Progress | None = None,
) -> MatchingReport:
    """Trains the MHLA layers of a model, each alone, towards the outputs of the original's layers.

    The original is the model itself, run with its original attention and its pretrained weights, which the model keeps
    where calibration or matching replaced them. Of a model that was trained, or calibrated before it was loaded, give
    `teacher` or `original_parameters`.

    Dropout is off throughout. Afterwards the model is in the mode it was in, and what required gradients does again.
    With several processes of `torch.distributed`, each trains its share of the layers and all get the result, which is
    that of one process; batches must be the same in all of them, and `output` a directory that all see.

    Args:
        model: A model with MHLA layers, of any family. Changed in place.
        batches: Keyword arguments of the model's `forward`, or a function that makes those of a number, always the
            same. They are visited in an order that follows from `seed`, all of them before any comes again. Tokens
            that an `attention_mask` leaves out do not count.
        steps: Optimizer steps of each layer.
        num_batches: Number of batches; only for a function.
        teacher: The original, of the class that transformers or diffusers has; or a `SharedTeacher` of the model.
        original_parameters: Values of the changed parameters in the original, by name.
        batch_size: Batches that one step learns from.
        learning_rate: Peak learning rate of projections, norms and output projections.
        mhla_learning_rate: That of the parameters of `mhla`; for mixing weights, above 5e-3, times the mean weight
            that a block gives to itself, but at least 5e-3.
        train: `"full"`, or `"mhla"` for the parameters of `mhla` alone.
        warmup_steps: Steps in which the learning rate rises; then it falls to zero along a cosine.
        max_grad_norm: Gradients of a layer are clipped to this norm; 0 switches clipping off.
        mixed_precision: `"bf16"` for autocast, `"no"` for none. Weights are in fp32 while they train.
        cache: Where records are kept: `"memory"`, `"disk"` (in `output`), `"none"` to make them again for each step,
            or `"auto"` for the first of these that they fit in.
        cache_limit: Most bytes of records, such as `"20GB"`; by default half of the free memory, and nearly all of
            the free disk.
        cache_dtype: Type in which hidden states and outputs are kept.
        device: Where a layer trains, while the model stays where it is; by default where it is. Without a cache all
            layers train where they are.
        output: Directory for checkpoints and records. A run that was stopped or killed resumes when called again
            with the same arguments.
        save_every: Steps between the checkpoints of a layer that trains.
        seed: Of the order of batches.
        progress: Called after every step.

    Returns:
        A report.

    Raises:
        ValueError: If the model has no MHLA layers, an argument is wrong, the records do not fit, `output` holds
            another run, or the original of a model that was trained is not given.
        FloatingPointError: If a loss is no longer finite.
        TrainingStopped: After Ctrl-C or SIGTERM, when a checkpoint is saved.
        OSError: If there is no room on the disk.
    """
    for name, number in (("steps", steps), ("batch_size", batch_size), ("save_every", save_every)):
        check_count(name, number)
    for name, value, choices in (
        ("train", train, TRAINED), ("mixed_precision", mixed_precision, PRECISIONS), ("cache", cache, CACHES)
    ):  # fmt: skip
        if value not in choices:
            raise ValueError(f"{name}={value!r:.100} must be one of {', '.join(choices)}.")
    if cache == "disk" and output is None:
        raise ValueError("cache='disk' needs output, the directory to keep the records in.")
    options: dict[str, Any] = {
        "learning_rate": learning_rate, "mhla_learning_rate": mhla_learning_rate, "train": train,
        "warmup_steps": warmup_steps, "max_grad_norm": max_grad_norm, "mixed_precision": mixed_precision, "seed": seed,
    }  # fmt: skip
    config = TrainingConfig(
        transfer_steps=steps,
        max_steps=0,
        # Gradients of one record at a time.
        gradient_accumulation_steps=batch_size,
        lr_schedule="cosine",
        adam_beta2=0.99,
        weight_decay=0.0,
        checkpointing_steps=save_every,
        checkpoints_total_limit=1,
        **options,
    )
    limit, dtype = parse_size(cache_limit, "cache_limit"), parse_dtype(cache_dtype)
    assert dtype is not None
    _check_not_offloaded(model)
    check_mhla(model)
    run = Matching(
        model=model,
        data=Batches.of(batches, num_batches, _input_device(model)),
        config=config,
        teacher=_teacher(model, teacher, original_parameters),
        dtype=dtype,
        device=None if device is None else torch.device(device),
        output=None if output is None else Path(output),
        progress=progress,
        identity={**options, "steps": steps, "batch_size": batch_size, "cache_dtype": str(dtype)},
    )
    with run.locked(), run.whole_model(), StopSignals() as signals:
        before = {
            original_name(name): parameter.detach().to("cpu", copy=True)
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        }
        try:
            return run.run(cache, limit, signals)
        finally:
            record_step(model, "matched", before)


def matching_losses(
    model: nn.Module,
    batch: Batch,
    *,
    teacher: nn.Module | SharedTeacher | None = None,
    original_parameters: Mapping[str, torch.Tensor] | None = None,
) -> dict[str, float]:
    """Matching loss of each MHLA layer on one batch, given the original's hidden states.

    Args:
        model: A model with MHLA layers.
        batch: Keyword arguments of its `forward`.
        teacher: See [`match_layers`].
        original_parameters: See [`match_layers`].

    Returns:
        Loss of each layer, by the name of its attention module; 0 is a perfect match, 1 what the mean would score.
    """
    original = _teacher(model, teacher, original_parameters)
    batch = Batches.of([batch], None, _input_device(model))[0]
    layers = layers_with_projections(model, batch)
    calls = original.record(layers, batch)
    with torch.no_grad(), evaluating(model):
        return {layer.name: layer_loss(layer, calls[layer.name]).item() for layer in layers}


def _teacher(
    model: nn.Module, teacher: nn.Module | SharedTeacher | None, original_parameters: Mapping[str, torch.Tensor] | None
) -> SharedTeacher:
    if original_parameters is None or teacher is not None:
        if original_parameters is not None:
            raise ValueError("give teacher or original_parameters, not both.")
        return shared_teacher(model, teacher)
    parameters = dict(model.named_parameters())
    for name, value in original_parameters.items():
        if name not in parameters:
            raise ValueError(f"original_parameters has {name[:200]}, which is no parameter of the model.")
        if value.shape != parameters[name].shape:
            raise ValueError(
                f"original_parameters has {name} of shape {tuple(value.shape)}; the model has "
                f"{tuple(parameters[name].shape)}."
            )
    return SharedTeacher(model, {original_name(name): value for name, value in original_parameters.items()})


def _check_not_offloaded(model: nn.Module) -> None:
    """Refuses weights that are elsewhere, where training them would be lost."""
    for layer in mhla_layers(model):
        if any(parameter.is_meta for parameter in layer.attention.parameters()):
            raise ValueError(
                f"{layer.name} is offloaded: load the model on the CPU, without a device map, and give device, where "
                "one layer at a time is."
            )


def _input_device(model: nn.Module) -> torch.device:
    """The device of a model's inputs; a model with offloaded weights moves them on by itself."""
    return next((parameter.device for parameter in model.parameters() if not parameter.is_meta), torch.device("cpu"))
