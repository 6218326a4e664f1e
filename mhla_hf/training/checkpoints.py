# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a run: what trains, the optimizer's state, and where the run stood.

A checkpoint is a directory `<stage>-<step>` with `model.safetensors` (the parameters that train),
`optimizer.safetensors` (AdamW's moments by parameter name) and `state.json`. Everything else follows from the base
model, the seed and the step. It is written under a temporary name and moved, so a name that exists is complete.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from ..files import atomic_directory, remove_directory


STAGES = ("transfer", "finetune")
FORMAT_VERSION = 1
_NAME = re.compile(rf"({'|'.join(STAGES)})-(\d+)")


@dataclass(frozen=True, order=True)
class Position:
    """Where a run stands: the stage (its place in `STAGES`) and the finished optimizer steps of that stage."""

    stage_index: int
    step: int

    @property
    def stage(self) -> str:
        """Name of the stage."""
        return STAGES[self.stage_index]

    @property
    def name(self) -> str:
        """Name of the checkpoint directory."""
        return f"{self.stage}-{self.step:08d}"

    @classmethod
    def of(cls, stage: str, step: int) -> Position:
        """The position after `step` steps of a stage, by name."""
        return cls(STAGES.index(stage), step)


def checkpoint_position(path: Path) -> Position | None:
    """The position a directory name stands for; None for any other name."""
    match = _NAME.fullmatch(path.name)
    return Position.of(match[1], int(match[2])) if match else None


def list_checkpoints(directory: Path) -> list[Path]:
    """The complete checkpoints in a directory, oldest first."""
    if not directory.is_dir():
        return []
    found = [(checkpoint_position(path), path) for path in directory.iterdir() if path.is_dir()]
    return [path for position, path in sorted((p, q) for p, q in found if p is not None)]


def find_checkpoint(resume: str | None, directory: Path) -> Path | None:
    """The checkpoint to go on from.

    Args:
        resume: None, `latest`, the name of a checkpoint in `directory`, or a path.
        directory: Where the run keeps its checkpoints.

    Returns:
        The checkpoint; None to start anew, also for `latest` where there is none yet.

    Raises:
        ValueError: If the checkpoint does not exist, or `resume` is None where there are checkpoints already.
    """
    available = list_checkpoints(directory)
    if resume is None:
        if available:
            raise ValueError(f"output already holds the run {available[-1]}; pass resume='latest' or another output")
        return None
    if resume == "latest":
        return available[-1] if available else None
    for candidate in (Path(resume), directory / resume):
        if candidate.is_dir():
            if checkpoint_position(candidate) is None:
                raise ValueError(f"resume={resume!r} is not a checkpoint: its name must be like transfer-00000100")
            return candidate
    names = ", ".join(path.name for path in available) or "none"
    raise ValueError(f"resume={resume!r} does not exist; 'latest' or one of: {names}")


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The whole of a tensor, gathered if it is sharded over processes, on the CPU."""
    gather = getattr(tensor, "full_tensor", None)
    return (gather() if gather is not None else tensor).detach().cpu().contiguous()


def collect_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, names: Sequence[str]
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Weights by parameter name, and optimizer tensors by `<parameter>::<kind>`. Every process must call it."""
    parameters = dict(model.named_parameters())
    weights = {name: full_tensor(parameters[name]) for name in names}
    moments = {}
    for name in names:
        for kind, value in optimizer.state.get(parameters[name], {}).items():
            moments[f"{name}::{kind}"] = full_tensor(torch.as_tensor(value))
    return weights, moments


def save_checkpoint(
    directory: Path,
    position: Position,
    weights: dict[str, torch.Tensor],
    moments: dict[str, torch.Tensor],
    state: dict[str, Any],
    total_limit: int | None = None,
) -> Path:
    """Writes a checkpoint atomically, then removes the oldest beyond the limit.

    Args:
        directory: Where the run keeps its checkpoints.
        position: Where the run stands.
        weights: See `collect_state`.
        moments: See `collect_state`.
        state: Further plain JSON to keep.
        total_limit: Keep at most so many; None keeps all.

    Returns:
        The checkpoint's path.
    """
    destination = directory / position.name
    with atomic_directory(destination) as temporary:
        save_file(weights, temporary / "model.safetensors")
        save_file(moments, temporary / "optimizer.safetensors")
        record = {"format_version": FORMAT_VERSION, "stage": position.stage, "step": position.step, **state}
        (temporary / "state.json").write_text(json.dumps(record, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    if total_limit is not None:
        for old in list_checkpoints(directory)[:-total_limit]:
            remove_directory(old)
    return destination


def read_state(checkpoint: Path) -> dict[str, Any]:
    """Reads `state.json` of a checkpoint.

    Raises:
        ValueError: If it is missing, unreadable or of another format version.
    """
    try:
        state = json.loads((checkpoint / "state.json").read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise ValueError(f"checkpoint {checkpoint} has no readable state.json: {error}") from error
    if state.get("format_version") != FORMAT_VERSION:
        raise ValueError(
            f"checkpoint {checkpoint} has format {state.get('format_version')}, this version reads {FORMAT_VERSION}"
        )
    return state


def load_weights(checkpoint: Path, model: nn.Module, names: Iterable[str]) -> None:
    """Puts a checkpoint's weights into a model, in place.

    Raises:
        ValueError: If names or shapes are not those of the parameters that train.
    """
    saved = _read(checkpoint / "model.safetensors")
    parameters = dict(model.named_parameters())
    _check_names(checkpoint, saved, names)
    with torch.no_grad():
        for name, value in saved.items():
            _check_shape(checkpoint, name, value, parameters[name])
            parameters[name].copy_(_like(value, parameters[name]))


def load_optimizer(checkpoint: Path, model: nn.Module, optimizer: torch.optim.Optimizer, names: Iterable[str]) -> None:
    """Puts a checkpoint's moments into an optimizer over the model's parameters.

    Raises:
        ValueError: If a tensor belongs to no parameter that trains, or has the wrong shape.
    """
    parameters = dict(model.named_parameters())
    names = set(names)
    for key, value in _read(checkpoint / "optimizer.safetensors").items():
        name, _, kind = key.rpartition("::")
        if name not in names:
            raise ValueError(f"checkpoint {checkpoint} has optimizer state of {name}, which does not train here")
        parameter = parameters[name]
        if value.ndim:
            _check_shape(checkpoint, key, value, parameter)
            value = _like(value, parameter)
        # A single number, the step count, stays on the CPU, where AdamW makes it.
        optimizer.state[parameter][kind] = value


def _like(value: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """The value on the parameter's device, sharded as the parameter is."""
    mesh = getattr(parameter, "device_mesh", None)
    if mesh is None:
        return value.to(device=parameter.device, dtype=parameter.dtype)
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value.to(parameter.dtype), mesh, parameter.placements)


def _read(path: Path) -> dict[str, torch.Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"checkpoint file {path} cannot be read: {error}") from error


def _check_names(checkpoint: Path, saved: Iterable[str], names: Iterable[str]) -> None:
    missing, unexpected = sorted(set(names) - set(saved)), sorted(set(saved) - set(names))
    if missing or unexpected:
        raise ValueError(
            f"checkpoint {checkpoint} is of another run: it lacks {missing[:3] or 'nothing'} and has "
            f"{unexpected[:3] or 'nothing'} that does not train here"
        )


def _check_shape(checkpoint: Path, name: str, value: torch.Tensor, parameter: torch.Tensor) -> None:
    if value.shape != parameter.shape:
        raise ValueError(
            f"checkpoint {checkpoint} has {name} of shape {tuple(value.shape)}, the model has {tuple(parameter.shape)}"
        )
