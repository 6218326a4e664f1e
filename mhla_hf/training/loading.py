# SPDX-License-Identifier: Apache-2.0
"""Directories of a run: what it loads from the pipeline or model that it starts from, and the copy that it writes."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch

from ..models.directory import TRAINING_RECORD, ModelDirectory
from ..models.weight_files import check_weights, damage_named
from ..utils.destinations import atomic_directory
from ..utils.files import Types, list_files, read_json, write_json
from ..utils.locations import PIPELINE_INDEX
from ..utils.model_cards import CARD, is_own_card
from .config import COMPONENTS


_MOST_TIMESTEPS = 100_000
_SCHEDULER_FIELDS: dict[str, Types] = {
    "_class_name": str,
    "prediction_type": str,
    "beta_schedule": str,
    "num_train_timesteps": int,
    "trained_betas": (list, type(None)),
    **dict.fromkeys(("flow_shift", "shift", "beta_start", "beta_end"), (float, type(None))),
}
_LAYER_COUNTS = ("num_layers", "num_hidden_layers", "num_decoder_layers", "layers_per_block")


def check_conversion(directory: ModelDirectory, mhla: dict | str | None) -> None:
    """Check that an ordinary model comes with MHLA options, or `none`, and an MHLA model without.

    Raises:
        ValueError: If it does not; the message says what to give.
    """
    if directory.is_mhla and mhla is not None:
        raise ValueError(f"mhla: {directory.location} is MHLA already; its options are fixed")
    if not directory.is_mhla and mhla is None:
        kind = "model" if directory.index is None else "pipeline"
        raise ValueError(
            f"model: {directory.location} is an ordinary {kind}; say how to convert it (mhla, blocks), convert it "
            "first with `mhla-hf convert`, or pass mhla='none' to train it as it is"
        )


def load_model(directory: ModelDirectory, mhla: dict | str | None = None) -> torch.nn.Module:
    """Load the model to train, with fp32 weights.

    Args:
        directory: The model.
        mhla: MHLA options for an ordinary model, which is converted on load; `none` leaves it as it is.

    Raises:
        ValueError: If an ordinary model comes without options or an MHLA one with them, or files are damaged.
    """
    check_conversion(directory, mhla)
    return directory.load(mhla if isinstance(mhla, dict) else None)


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


def export_model(directory: ModelDirectory, destination: Path, model: Any, record: dict[str, Any]) -> None:
    """Write a copy of a model's directory, or its pipeline's, with the trained model in it.

    The model card is not copied where it is about the original, or was generated for the model before training.

    Args:
        directory: The model before training.
        destination: Directory to make; written under a temporary name, then moved.
        model: The trained model, whole and without LoRA.
        record: Contents of `training.json`.

    Raises:
        ValueError: If links in the directory lead out of it, see `list_files`.
    """
    root, index, component = directory.root, directory.index, directory.component
    excluded = {TRAINING_RECORD, *({component, PIPELINE_INDEX} if index else {"config.json"})}
    excluded |= set() if directory.is_mhla and is_own_card(root) else {CARD}
    with atomic_directory(destination) as temporary:
        for path in list_files(root):
            is_weight = index is None and len(path.parts) == 1 and directory.names.match(path)
            # Version-control and download bookkeeping of the source does not belong to the copy.
            if not (is_weight or path.parts[0] in excluded or path.parts[0].startswith(".")):
                (temporary / path).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(root / path, temporary / path)
        model.save_pretrained(temporary if index is None else temporary / component)
        if index is not None:
            index = {**index, component: ["diffusers", type(model).__name__]}
            (temporary / PIPELINE_INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        write_json(temporary / TRAINING_RECORD, record)
