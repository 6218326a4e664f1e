# SPDX-License-Identifier: Apache-2.0
"""Checks that a checkpoint belongs to a run, and the position at which a resumed run starts."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import IO, Any

from accelerate import Accelerator

from ..utils.locks import lock_output
from . import checkpoints
from .checkpoints import Position
from .config import TrainingConfig
from .data.cache import LatentDataset


logger = logging.getLogger(__name__)

# A checkpoint made under one of these options cannot go on under another.
IDENTITY = ("component", "train", "lora_rank", "lora_alpha", "mhla")
# Another value lets the run go on, but it will not end where an uninterrupted one would.
TRAJECTORY = (
    "adam_beta1", "adam_beta2", "adam_epsilon", "condition_dropout", "distill_learning_rate", "distill_ratio",
    "distill_steps", "distill_target", "distill_temperature", "ema_decay", "ema_inv_gamma", "ema_power",
    "gradient_accumulation_steps", "learning_rate", "lr_schedule", "max_grad_norm", "max_steps",
    "mhla_learning_rate", "mixed_precision", "seed", "transfer_cache", "transfer_learning_rate", "transfer_steps",
    "warmup_steps", "weight_decay",
)  # fmt: skip


def check_state(checkpoint: Path, current: dict[str, Any]) -> None:
    """Checks that a checkpoint belongs to this run, and warns of options that changed since.

    Args:
        checkpoint: The checkpoint.
        current: The state of the run as checkpoints record it.

    Raises:
        ValueError: If an option differs without which its weights do not fit, or the data or weights that the run is
            made from are others.
    """
    state = checkpoints.read_state(checkpoint)
    saved, now = state.get("config", {}), current["config"]
    broken = [name for name in IDENTITY if saved.get(name) != now[name]]
    if broken:
        changes = ", ".join(f"{name}={saved.get(name)!r}" for name in broken)
        raise ValueError(f"resume: {checkpoint} was made with {changes}; go on with the same or choose another output")
    made_from = state.get("inputs", {})
    others = [name for name, value in current["inputs"].items() if made_from.get(name, value) != value]
    if others:
        raise ValueError(
            f"resume: {checkpoint} was made with other {', '.join(others)} than this run has; go on with the same or "
            "choose another output"
        )
    changed = [name for name in TRAJECTORY if saved.get(name) != now[name]]
    changed += [name for name in ("dataset_size",) if state.get(name) != current[name]]
    # Two processes see what one with the doubled batch sees.
    if _batch_of_all(state) != _batch_of_all(current):
        changed += ["batch_size times the number of processes"]
    saved_objective, objective = state.get("objective", {}), current["objective"]
    changed += [name for name in objective if saved_objective.get(name) != objective[name]]
    if changed:
        logger.warning(
            "%s was made with other values of %s: the run will not end where an uninterrupted one would",
            checkpoint.name,
            ", ".join(changed),
        )


def _batch_of_all(state: dict[str, Any]) -> Any:
    """Samples in one micro-step of all processes; None if a checkpoint does not say."""
    batch_size, world_size = state.get("config", {}).get("batch_size"), state.get("world_size")
    return batch_size * world_size if isinstance(batch_size, int) and isinstance(world_size, int) else None


def find_start(
    config: TrainingConfig, accelerator: Accelerator, current: dict[str, Any], dataset: Any = None
) -> tuple[Path | None, Position | None, list[IO[str]]]:
    """Locks the output, and the cache for reading, and finds where to go on.

    The main process decides, so that all agree even while files appear; an error it meets is raised in all.

    Args:
        config: The options; `output` must be given.
        accelerator: The processes.
        current: The state of the run as checkpoints record it.
        dataset: The samples.

    Returns:
        The checkpoint and its position, None to start anew; and the locks, to be closed when the run ends.

    Raises:
        ValueError: If the output or the cache is in use, or the checkpoint does not exist or fit.
    """
    from accelerate.utils import broadcast_object_list

    output = Path(str(config.output))
    locks: list[IO[str] | None] = []
    found: list[Any] = [None, None]
    if accelerator.is_main_process:
        try:
            locks.append(lock_output(output))
            if isinstance(dataset, LatentDataset):
                locks.append(dataset.lock())
            path = checkpoints.find_checkpoint(config.resume, output / "checkpoints")
            for finished in (output / "pipeline", output / "model"):
                if config.resume is None and finished.exists():
                    raise ValueError(f"output already holds the finished {finished}; choose another output")
            if path is not None:
                check_state(path, current)
                found[0] = str(path)
        except (OSError, ValueError) as error:
            found[1] = str(error)
    broadcast_object_list(found)
    held = [lock for lock in locks if lock is not None]
    if found[1] is not None:
        for lock in held:
            lock.close()
        raise ValueError(found[1])
    if found[0] is None:
        return None, None, held
    checkpoint = Path(found[0])
    return checkpoint, checkpoints.checkpoint_position(checkpoint), held
