# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a run: the parameters that train, the optimizer's state, and the position of the run.

A checkpoint is a directory `<stage>-<step>` with `model.safetensors` (the parameters that train),
`optimizer.safetensors` (AdamW's moments by parameter name), `ema.safetensors` where an average of the weights is kept,
and `state.json`. Tensors are stored unsharded, so another number of processes can resume.
Everything else follows from the base model, the seed and the step. A checkpoint is written under a temporary name and
moved, so a name that exists is complete; what disks and people do to it later is noticed by the fingerprints of its
files, which `state.json` holds.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from ..utils.destinations import atomic_directory, remove_directory
from ..utils.files import read_json
from .data.folders import file_fingerprint
from .sharding import full_moments, full_shape, full_tensor, load_moment, shard_like


# In the order that a run goes through them; it may leave some out.
STAGES = ("transfer", "distill", "finetune")
WEIGHTS, MOMENTS, STATE = "model.safetensors", "optimizer.safetensors", "state.json"
# The average of the weights, and the entry of `state.json` with the number of steps in it.
AVERAGES, AVERAGE_STEPS = "ema.safetensors", "ema_steps"
# What AdamW keeps of a parameter.
_KINDS = {"exp_avg", "exp_avg_sq", "step"}
_NAME = re.compile(rf"({'|'.join(STAGES)})-(\d+)")


@dataclass(frozen=True, order=True)
class Position:
    """Position of a run: the stage (its place in `STAGES`) and the finished optimizer steps of that stage."""

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
    """Find the checkpoint to resume from and verify its files.

    Args:
        resume: None, `latest`, `previous`, the name of a checkpoint in `directory`, or a path.
        directory: Where the run keeps its checkpoints.

    Returns:
        The checkpoint; None to start from the beginning, also for `latest` before the first checkpoint.

    Raises:
        ValueError: If the checkpoint does not exist or is damaged, or `resume` is None where there are checkpoints
            already.
    """
    available = list_checkpoints(directory)
    if resume is None:
        if available:
            raise ValueError(f"output already holds the run {available[-1]}; pass resume='latest' or another output")
        return None
    named = [path for path in (Path(resume), directory / resume) if path.is_dir() and checkpoint_position(path)]
    if resume == "latest":
        named = available[-1:]
    elif resume == "previous":
        named = [path for path in [_newest_whole(available[:-1])] if path is not None]
    if not named and resume != "latest":
        names = ", ".join(path.name for path in available[-10:]) or "none"
        raise ValueError(
            f"resume={resume!r} finds no complete checkpoint; give 'latest', 'previous' or one of: {names}"
        )
    for found in named[:1]:
        try:
            read_state(found)
        except ValueError as error:
            older = _newest_whole(available[:-1])
            way_out = f"--resume previous continues from {older.name}" if older else "remove it to start again"
            raise ValueError(f"{error}; {way_out}") from error
    return next(iter(named), None)


def _newest_whole(available: Sequence[Path]) -> Path | None:
    for path in reversed(available):
        try:
            read_state(path)
        except ValueError:
            continue
        return path
    return None


def collect_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, names: Sequence[str], keep: bool = True
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Collect the tensors of a checkpoint from a model and its optimizer. Every process must call it.

    Args:
        model: The model.
        optimizer: AdamW over its parameters.
        names: Parameters that train.
        keep: True if this process keeps the tensors; the others help to gather them, one parameter at a time.

    Returns:
        Weights by parameter name, and optimizer tensors by `<parameter>::<kind>`, unsharded and on the CPU.
    """
    parameters = dict(model.named_parameters())
    weights: dict[str, torch.Tensor] = {}
    moments: dict[str, torch.Tensor] = {}
    for name in names:
        weight, state = full_tensor(parameters[name]), full_moments(optimizer, parameters[name])
        if keep:
            weights[name] = weight
            moments.update({f"{name}::{kind}": value for kind, value in state.items()})
    return weights, moments


def save_checkpoint(
    directory: Path,
    position: Position,
    weights: dict[str, torch.Tensor],
    moments: dict[str, torch.Tensor],
    state: dict[str, Any],
    total_limit: int | None = None,
    averages: tuple[dict[str, torch.Tensor], int] | None = None,
) -> Path:
    """Write a checkpoint atomically, then remove the oldest beyond the limit.

    Args:
        directory: Where the run keeps its checkpoints.
        position: Where the run stands.
        weights: See `collect_state`.
        moments: See `collect_state`.
        state: Further plain JSON to keep.
        total_limit: Keep at most so many up to this one; None keeps all. Later ones, which a run that went back has
            not reached again, are left alone.
        averages: The average of the weights and the number of steps in it; None for none.

    Returns:
        The checkpoint's path.
    """
    destination = directory / position.name
    with atomic_directory(destination) as temporary:
        files = {WEIGHTS: weights, MOMENTS: moments}
        if averages is not None:
            files[AVERAGES] = averages[0]
        for name, tensors in files.items():
            save_file(tensors, temporary / name)
        record = {
            **state,
            AVERAGE_STEPS: averages[1] if averages is not None else None,
            "stage": position.stage,
            "step": position.step,
            "files": {name: file_fingerprint(temporary / name) for name in files},
        }
        (temporary / STATE).write_text(json.dumps(record, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    if total_limit is not None:
        available = list_checkpoints(directory)
        for old in available[: available.index(destination) + 1][:-total_limit]:
            remove_directory(old)
    return destination


def read_state(checkpoint: Path) -> dict[str, Any]:
    """Read `state.json` of a checkpoint and verify its files.

    Raises:
        ValueError: If it is missing or unreadable, the checkpoint was renamed, or one of its files is missing or
            differs from what was written.
    """
    path = checkpoint / STATE
    state = read_json(
        path,
        "checkpoint file",
        required={"stage": str, "step": int, "files": dict},
        optional={"config": dict, "inputs": dict, "scaler": (dict, type(None)), AVERAGE_STEPS: (int, type(None))},
    )
    problem, position = "", checkpoint_position(checkpoint)
    if position is not None and (position.stage, position.step) != (state["stage"], state["step"]):
        says = f"{str(state['stage'])[:20]}, step {state['step']}"
        problem = f"was renamed: its {STATE} says {says}; give it back its name"
    for name in (WEIGHTS, MOMENTS, *([AVERAGES] if state.get(AVERAGE_STEPS) is not None else [])):
        file = checkpoint / name
        if not file.is_file() or state["files"].get(name) != file_fingerprint(file):
            problem = f"is damaged: {name} is missing or not what was written"
    if problem:
        raise ValueError(f"checkpoint {checkpoint} {problem}")
    return state


def average_steps(checkpoint: Path) -> int | None:
    """The number of steps in a checkpoint's average of the weights; None if it holds none."""
    return read_state(checkpoint).get(AVERAGE_STEPS)


def last_good_checkpoint(directory: Path, position: Position) -> Path | None:
    """Find the newest undamaged checkpoint before a position whose weights are all finite."""
    for path in reversed(list_checkpoints(directory)):
        reached = checkpoint_position(path)
        if reached is None or reached >= position or _newest_whole([path]) is None:
            continue
        if all(bool(value.isfinite().all()) for value in load_file(path / WEIGHTS).values()):
            return path
    return None


def load_weights(checkpoint: Path, model: nn.Module, names: Iterable[str], averages: bool = False) -> None:
    """Load a checkpoint's weights into a model, in place.

    Args:
        checkpoint: The checkpoint.
        model: The model.
        names: Parameters that train.
        averages: Take the average of the weights in their place, if the checkpoint holds one.

    Raises:
        ValueError: If names or shapes are not those of the parameters that train.
    """
    parameters = dict(model.named_parameters())
    averaged = averages and average_steps(checkpoint) is not None
    load_tensors(checkpoint, AVERAGES if averaged else WEIGHTS, {name: parameters[name] for name in names})


def load_tensors(checkpoint: Path, file: str, tensors: dict[str, torch.Tensor]) -> None:
    """Load a checkpoint's file into tensors of the same names, in place.

    Raises:
        ValueError: If names or shapes are others.
    """
    saved = load_file(checkpoint / file)
    # Copying would broadcast other shapes.
    _check_shapes(checkpoint, saved, {name: full_shape(tensor) for name, tensor in tensors.items()})
    with torch.no_grad():
        for name, value in saved.items():
            tensors[name].copy_(shard_like(value, tensors[name]))


def load_optimizer(checkpoint: Path, model: nn.Module, optimizer: torch.optim.Optimizer, names: Iterable[str]) -> None:
    """Load a checkpoint's moments into an optimizer over the model's parameters.

    Raises:
        ValueError: If moments of a parameter that trains are missing, or there are others.
    """
    parameters = dict(model.named_parameters())
    saved = load_file(checkpoint / MOMENTS)
    # Parameters that never had a gradient have no moments.
    found = {key.rpartition("::")[0] for key in saved}
    expected = {
        f"{name}::{kind}": torch.Size() if kind == "step" else full_shape(parameters[name])
        for name in names
        if name in found or not found
        for kind in _KINDS
    }
    _check_shapes(checkpoint, saved, expected)
    for key, value in saved.items():
        name, _, kind = key.rpartition("::")
        load_moment(optimizer, parameters[name], kind, value)


def _check_shapes(checkpoint: Path, saved: Mapping[str, torch.Tensor], shapes: Mapping[str, torch.Size]) -> None:
    there = {f"{name} {list(tensor.shape)}" for name, tensor in saved.items()}
    wanted = {f"{name} {list(shape)}" for name, shape in shapes.items()}
    if there != wanted:
        raise ValueError(
            f"checkpoint {checkpoint} is of another run: it lacks {sorted(wanted - there)[:3] or 'nothing'} and has "
            f"{sorted(there - wanted)[:3] or 'nothing'} that does not train here"
        )
