# SPDX-License-Identifier: Apache-2.0
"""Files of an unfinished recovery: its identity, and the results of finished stages.

OUT/work/run.json                the options of the run, and what it reads
OUT/work/converted/              the converted model
OUT/work/data/                   tokens, or latents and embeddings
OUT/work/<stage>/                what a stage that is under way keeps: checkpoints, activations
OUT/work/<stage>.safetensors     the weights that a finished stage changed
OUT/work/<stage>.json            its figures; written last, so a stage that has it is finished
OUT/work/result/                 the finished directory, on its way into OUT
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from ..training.checkpoints import STATE
from ..utils.destinations import LOCK, lock_output, remove_directory, remove_leftovers
from ..utils.files import atomic_file, read_json, write_json
from ..utils.messages import shorten_value
from .recipes import STAGES


logger = logging.getLogger(__name__)

NAME = "work"
RUN, CONVERTED, DATA, RESULT = "run.json", "converted", "data", "result"
# What makes a directory loadable comes last.
_MOVED_LAST = ("config.json", "model_index.json", "conversion.json")


class WorkFolder:
    """The work folder of an output directory.

    Args:
        output: The output directory.
    """

    def __init__(self, output: Path) -> None:
        self.output = output
        self.path = output / NAME

    @contextmanager
    def claimed(self, identity: Mapping[str, Any], resume: bool) -> Iterator[None]:
        """Claim the folder: within the context only this run writes here.

        A run without progress is replaced by one with other options, and resumes without `resume`.

        Args:
            identity: Options that distinguish this run from others, as plain JSON values.
            resume: Resume the stored run.

        Raises:
            ValueError: If there is something else here, a run with progress and `resume` is not asked for, or the
                run with progress is another one; the message names what differs.
        """
        others = [entry for entry in _entries(self.output) if entry.name != NAME]
        others += [entry for entry in _entries(self.path) if entry.name != LOCK]
        if self._identity() is None and others:
            raise ValueError(f"output {self.output} is not empty; choose another, or remove it")
        with lock_output(self.path) or nullcontext():
            remove_leftovers(self.path)
            # Read with the lock: another process may have been here meanwhile.
            stored = self._identity() or {}
            different = _differences(stored, identity)
            if self.has_progress and (different or not resume):
                problem = f"with {different}; give the same options" if different else "already; --resume resumes it"
                raise ValueError(f"output {self.output} holds a run {problem}, or choose another output")
            if different:
                if stored:
                    logger.warning("%s: restarted, since a run with %s finished no stage", self.output, different)
                self.clear()
                write_json(self.path / RUN, dict(identity))
            yield

    @property
    def has_progress(self) -> bool:
        """Whether a stage is finished or has left a checkpoint, or the result is there."""
        return any(self.is_done(name) or any((self.path / name).rglob(STATE)) for name in STAGES) or self.has_result

    @property
    def has_result(self) -> bool:
        """Whether the result is complete, published or not."""
        return self.is_done(RESULT) or (self.path / RESULT).is_dir()

    def is_run_of(self, identity: Mapping[str, Any]) -> bool:
        """Whether the run here has these options."""
        return not _differences(self._identity() or {}, identity)

    def clear(self, *kept: str) -> None:
        """Remove the files of a run, except those named in `kept`."""
        for entry in _entries(self.path):
            if entry.name in (LOCK, *kept):
                continue
            if entry.is_dir():
                shutil.rmtree(entry)
            else:
                entry.unlink()

    def _identity(self) -> dict[str, Any] | None:
        return self.read("run") if (self.path / RUN).is_file() else None

    def read(self, name: str) -> dict[str, Any]:
        """Read the record of a finished stage.

        Raises:
            ValueError: If it is damaged.
        """
        return read_json(self.path / f"{name}.json", "the record")

    def is_done(self, name: str) -> bool:
        """True for a finished stage."""
        return (self.path / f"{name}.json").is_file()

    def finish(self, name: str, record: Mapping[str, Any], weights: Mapping[str, torch.Tensor] | None = None) -> None:
        """Mark a stage as finished.

        Args:
            name: The stage.
            record: Its figures.
            weights: The weights that it changed.

        Raises:
            OSError: If there is no room; the stage's own checkpoints are still there.
        """
        if weights is not None:
            with atomic_file(self.path / f"{name}.safetensors") as temporary:
                save_file({key: value.detach().cpu().contiguous() for key, value in weights.items()}, temporary)
        write_json(self.path / f"{name}.json", dict(record))

    def load_weights(self, name: str, model: nn.Module) -> None:
        """Load the weights of a finished stage into the model."""
        parameters = dict(model.named_parameters())
        with torch.no_grad():
            for key, value in load_file(self.path / f"{name}.safetensors").items():
                parameters[key].copy_(value)

    def publish(self) -> None:
        """Move the result into the output directory, the files that make it loadable last."""
        result = self.path / RESULT
        for path in sorted(_entries(result), key=lambda entry: (entry.name in _MOVED_LAST, entry.name)):
            destination = self.output / path.name
            if destination.is_dir():
                remove_directory(destination)
            os.replace(path, destination)
            # Renaming a hard link to another one of the same file, from a publication that was killed, leaves both.
            path.unlink(missing_ok=True)
        result.rmdir()

    def remove_large(self, names: Iterable[str], *, weights: bool = True) -> None:
        """Remove files that only an unfinished run needs; the records stay.

        Args:
            names: Stages or folders.
            weights: Whether to remove the weights that finished stages left, too.
        """
        for name in names:
            if weights:
                (self.path / f"{name}.safetensors").unlink(missing_ok=True)
            shutil.rmtree(self.path / name, ignore_errors=True)


def _entries(directory: Path) -> list[Path]:
    return list(directory.iterdir()) if directory.is_dir() else []


def _differences(stored: Mapping[str, Any], identity: Mapping[str, Any]) -> str:
    """Describe the options that differ, with both values; empty if there are none."""
    before, now = _flat(stored), _flat(identity)
    changes = [
        f"{name} {shorten_value(before.get(name), 60)} (now {shorten_value(now.get(name), 60)})"
        for name in sorted({*before, *now})
        if before.get(name) != now.get(name)
    ]
    return ", ".join(changes)


def _flat(content: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested objects to values by path; lists count as values."""
    flat: dict[str, Any] = {}
    for name, value in content.items():
        if isinstance(value, Mapping):
            flat.update(_flat(value, f"{prefix}{name}."))
        elif value is not None:
            flat[f"{prefix}{name}"] = list(value) if isinstance(value, tuple) else value
    return flat
