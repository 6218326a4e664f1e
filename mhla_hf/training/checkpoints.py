# SPDX-License-Identifier: Apache-2.0
"""What a run writes while it trains: checkpoints, and reports of its steps (a line of `metrics.jsonl` for each).

A checkpoint is a directory `<stage>-<step>` with `model.safetensors` (the parameters that train),
`optimizer.safetensors` (AdamW's moments by parameter name), `ema.safetensors` where an average of the weights is kept,
and `state.json`. Tensors are stored unsharded, so another number of processes can resume.
Everything else follows from the base model, the seed and the step. A checkpoint is written under a temporary name and
moved, so a name that exists is complete; what disks and people do to it later shows in the fingerprints of its files,
which `state.json` holds.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from accelerate import Accelerator
from safetensors.torch import load_file, save_file
from torch import nn

from ..utils.destinations import atomic_directory, differences, remove_directory
from ..utils.files import atomic_file, clear_write_errors, parse_json, read_json, write_staged_json
from .config import TrainingConfig
from .data.order import file_fingerprint
from .parameters import WeightAverage
from .processes import shard_like


# In the order that a run goes through them, with the option that has their steps; it may leave some out.
_STEPS = {"distill": "distill_steps", "finetune": "max_steps"}
# Matching was the first stage in earlier versions: runs that are past it go on.
MATCHING = "transfer"
STAGES = (MATCHING, *_STEPS)
WEIGHTS, MOMENTS, STATE = "model.safetensors", "optimizer.safetensors", "state.json"
# The average of the weights, and the entry of `state.json` with the number of steps in it.
AVERAGES, AVERAGE_STEPS = "ema.safetensors", "ema_steps"
# A checkpoint made under one of these options cannot go on under another.
IDENTITY = ("component", "train", "lora_rank", "lora_alpha", "mhla")
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
    """Find the checkpoint to resume from.

    Args:
        resume: None, `latest`, `previous` (the newest undamaged one before the latest), or the name of a checkpoint.
        directory: Where the run keeps its checkpoints.

    Returns:
        The checkpoint; None to start from the beginning, also for `latest` before the first checkpoint.

    Raises:
        ValueError: If the checkpoint does not exist or is damaged, or `resume` is None where there are checkpoints
            already.
    """
    available = list_checkpoints(directory)
    if resume is None and available:
        raise ValueError(f"output already holds the run {available[-1]}; pass resume='latest' or another output")
    if resume is None or (resume == "latest" and not available):
        return None
    if resume == "previous":
        found = next(_undamaged(available[:-1]), None)
    else:
        name = available[-1].name if resume == "latest" else resume
        found = next((path for path in available if path.name == name), None)
    if found is None:
        names = ", ".join(path.name for path in available[-10:]) or "none"
        raise ValueError(
            f"resume={resume!r} finds no complete checkpoint; give 'latest', 'previous' or one of: {names}"
        )
    try:
        check_files(found)
    except ValueError as error:
        older = next(_undamaged(available[:-1]), None)
        way_out = f"--resume previous continues from {older.name}" if older else "remove it to start again"
        raise ValueError(f"{error}; {way_out}") from error
    return found


def _undamaged(available: Sequence[Path]) -> Iterator[Path]:
    """Undamaged checkpoints, newest first."""
    for path in reversed(available):
        with suppress(ValueError):
            check_files(path)
            yield path


def last_good_checkpoint(directory: Path, position: Position) -> Path | None:
    """Find the newest undamaged checkpoint before a position whose weights are all finite."""
    earlier = [path for path in list_checkpoints(directory) if checkpoint_position(path) < position]  # type: ignore[operator]
    for path in _undamaged(earlier):
        if all(bool(value.isfinite().all()) for value in load_file(path / WEIGHTS).values()):
            return path
    return None


def check_files(checkpoint: Path) -> None:
    """Check that a checkpoint is what was written.

    Raises:
        ValueError: If it was renamed, or one of its files is missing, unreadable or other than written.
    """
    state = read_state(checkpoint)
    written = f"{state['stage'][:20]}-{state['step']:08d}"
    if checkpoint.name != written:
        raise ValueError(f"checkpoint {checkpoint} was renamed: its {STATE} says {written}; give it back its name")
    there = _fingerprints(checkpoint)
    for name in sorted({WEIGHTS, *there, *state["files"]}):
        if name not in there or there[name] != state["files"].get(name):
            raise ValueError(f"checkpoint {checkpoint} is damaged: {name[:200]} is missing or not what was written")


def _fingerprints(checkpoint: Path) -> dict[str, str]:
    """Hash the files of a checkpoint, without `state.json`."""
    files = sorted(path for path in checkpoint.rglob("*") if path.is_file() and path != checkpoint / STATE)
    return {path.relative_to(checkpoint).as_posix(): file_fingerprint(path) for path in files}


def read_state(checkpoint: Path) -> dict[str, Any]:
    """Read `state.json` of a checkpoint.

    Raises:
        ValueError: If it is missing or unreadable.
    """
    return read_json(
        checkpoint / STATE,
        "checkpoint file",
        required={"stage": str, "step": int, "config": dict, "inputs": dict, "files": dict},
        optional={"scaler": (dict, type(None)), AVERAGE_STEPS: (int, type(None))},
    )


def check_run(checkpoint: Path, current: Mapping[str, Any]) -> None:
    """Check that a checkpoint belongs to this run.

    Args:
        checkpoint: The checkpoint.
        current: The state of the run as checkpoints record it.

    Raises:
        ValueError: If an option differs without which its weights do not fit, the data or weights that the run is
            made from are others, or it was stopped in the stage of matching that runs had in earlier versions.
    """
    state = read_state(checkpoint)
    if state["stage"] == MATCHING:
        refuse_matching_run(checkpoint)
    saved, now, made_from = state["config"], current["config"], state["inputs"]
    changes = [differences(*({name: each.get(name) for name in IDENTITY} for each in (saved, now)))]
    option, step = _STEPS[state["stage"]], state["step"]
    # Without its stage the checkpoint would not be read.
    if not now[option]:
        changes.append(f"{option} {saved.get(option, step)} (now {now[option]})")
    inputs = current["inputs"].items()
    changes += [f"other {name} than this run has" for name, value in inputs if made_from.get(name, value) != value]
    if any(changes):
        made = ", ".join(filter(None, changes))
        raise ValueError(f"resume: {checkpoint} was made with {made}; go on with the same or choose another output")


def refuse_matching_run(place: Path) -> NoReturn:
    """Refuse a run that was stopped in its stage of matching by an earlier version."""
    raise ValueError(
        f"resume: {place} was stopped while it matched layers, which `mhla-hf recover --stages calibrate,match` does "
        "now; train what that writes, in another output"
    )


def save_checkpoint(
    directory: Path,
    position: Position,
    files: Mapping[str, dict[str, torch.Tensor]],
    state: dict[str, Any],
    total_limit: int | None = None,
) -> Path:
    """Write a checkpoint atomically, then remove the oldest beyond the limit. Only one process calls it.

    Args:
        directory: Where the run keeps its checkpoints.
        position: Where the run stands.
        files: Unsharded tensors by file (`WEIGHTS`, `MOMENTS`, `AVERAGES`) and name.
        state: Further plain JSON to keep.
        total_limit: Checkpoints to keep, up to this one; None keeps all. Later ones, which a run that went back has
            not reached again, are left alone.

    Returns:
        The checkpoint's path.
    """
    destination = directory / position.name
    with atomic_directory(destination) as temporary:
        for name, tensors in files.items():
            save_file(tensors, temporary / name)
        record = {**state, "stage": position.stage, "step": position.step, "files": _fingerprints(temporary)}
        write_staged_json(temporary / STATE, record, sort_keys=True)
    if total_limit is not None:
        available = list_checkpoints(directory)
        for old in available[: available.index(destination) + 1][:-total_limit]:
            remove_directory(old)
    return destination


def load_weights(checkpoint: Path, model: nn.Module, names: Iterable[str], averages: bool = False) -> None:
    """Load a checkpoint's weights into an unsharded model, in place.

    Args:
        checkpoint: The checkpoint.
        model: The model.
        names: Parameters that train.
        averages: Take the average of the weights in their place, if the checkpoint holds one.

    Raises:
        ValueError: If names or shapes are not those of the parameters that train.
    """
    parameters = dict(model.named_parameters())
    averages = averages and read_state(checkpoint).get(AVERAGE_STEPS) is not None
    load_tensors(checkpoint / (AVERAGES if averages else WEIGHTS), {name: parameters[name] for name in names})


def load_average(checkpoint: Path, state: Mapping[str, Any], average: WeightAverage) -> None:
    """Load the average of the weights; where the checkpoint has none, it starts from the weights."""
    if state.get(AVERAGE_STEPS) is not None:
        load_tensors(checkpoint / AVERAGES, average.tensors)
        average.ema.optimization_step = state[AVERAGE_STEPS]


def load_tensors(file: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Load a checkpoint's file into tensors of the same names, sharded or not, in place.

    Raises:
        ValueError: If names or shapes are others.
    """
    saved = load_file(file)
    # Copying would broadcast other shapes.
    there, wanted = ({f"{name} {list(each.shape)}" for name, each in group.items()} for group in (saved, tensors))
    if there != wanted:
        raise ValueError(
            f"checkpoint {file.parent} is of another run: it lacks {sorted(wanted - there)[:3] or 'nothing'} and has "
            f"{sorted(there - wanted)[:3] or 'nothing'} that does not train here"
        )
    with torch.no_grad():
        for name, value in saved.items():
            tensors[name].copy_(shard_like(value, tensors[name]))


def collect_moments(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Gather the state of AdamW, unsharded and on the CPU. Every process must call it; the main one gets the tensors.

    Args:
        model: The model.
        optimizer: AdamW over some of its parameters.

    Returns:
        Tensors by `<parameter>::<kind>`, as in `0.weight::exp_avg`.
    """
    from torch.distributed.checkpoint import state_dict

    options = state_dict.StateDictOptions(full_state_dict=True, cpu_offload=True)
    state: Any = state_dict.get_optimizer_state_dict(model, optimizer, options=options).get("state", {})
    return {f"{name}::{kind}": value for name, kinds in state.items() for kind, value in kinds.items()}


def load_moments(checkpoint: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Load the tensors of `collect_moments` into the optimizer, for any number of processes."""
    from torch.distributed.checkpoint import state_dict

    state: dict[str, Any] = {}
    for key, value in load_file(checkpoint / MOMENTS).items():
        name, _, kind = key.rpartition("::")
        state.setdefault(name, {})[kind] = value
    options = state_dict.StateDictOptions(full_state_dict=True, strict=False)
    groups: Any = state_dict.get_optimizer_state_dict(model, optimizer, options=options)["param_groups"]
    state_dict.set_optimizer_state_dict(model, optimizer, {"state": state, "param_groups": groups}, options=options)
    for name, parameter in model.named_parameters():
        if name not in state:
            # Torch has made moments of zeros for parameters that never had a gradient.
            optimizer.state.pop(parameter, None)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read the rows of a metrics file; a half-written last line, which a kill can leave, is dropped.

    Raises:
        ValueError: If another line is damaged; the message names it.
    """
    if not path.is_file():
        return []
    rows = []
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):
        where = f"line {number} of {path} (remove the file to start another)"
        rows.append(parse_json(line.decode(errors="replace"), where))
    return rows


class MetricsFile:
    """A metrics file that rows are appended to.

    Args:
        path: The file.
        position: Position that the run resumes from; rows of later steps are cut off. None starts an empty file.

    Attributes:
        rows: All rows.
    """

    def __init__(self, path: Path, position: Position | None = None) -> None:
        self.path = path
        self.rows: list[dict[str, Any]] = []
        if position is not None:
            self.rows = [row for row in read_metrics(path) if Position.of(row["stage"], row["step"]) <= position]
        with atomic_file(path) as temporary:
            temporary.write_text("".join(json.dumps(row) + "\n" for row in self.rows), encoding="utf-8")

    def append(self, row: dict[str, Any]) -> None:
        """Write one row, so that a killed process loses none.

        Args:
            row: With at least `stage`, `step` and `loss`.

        Raises:
            OSError: If there is no room for it.
        """
        self.rows.append(row)
        with clear_write_errors(self.path), self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


Callback = Callable[[str, int, float], None]
"""Called with (stage, step, loss)."""

_PROJECT = "mhla-hf"


class Reports:
    """Reports of the steps of a run: rows of `metrics.jsonl`, trackers, records of attention, and the callback.

    Args:
        config: The options, which are the hyperparameters in trackers.
        accelerator: The processes; the main one writes.
        output: Directory of the run; None writes no metrics.
        position: Position that the run resumes from.
        callback: Called after every step.
        tracker: An [`AttentionTracker`][mhla_hf.analysis.AttentionTracker], or None.

    Attributes:
        steps_before: Steps of the stages before the present one, which trackers count too.
    """

    def __init__(
        self,
        config: TrainingConfig,
        accelerator: Accelerator,
        output: Path | None,
        position: Position | None,
        callback: Callback | None,
        tracker: Any,
    ) -> None:
        self.accelerator, self.callback, self.tracker = accelerator, callback, tracker
        self.at_start: dict[str, Any] | None = None
        self.steps_before = 0
        self.metrics: MetricsFile | None = None
        if output is not None and accelerator.is_main_process:
            self.metrics = MetricsFile(output / "metrics.jsonl", position)
            if tracker is not None:
                kinds = ("attention_at_start", "attention")
                tracker.restore(row[kind] for row in self.metrics.rows for kind in kinds if kind in row)
        # Trackers take no lists and mappings.
        options = {
            name: value if isinstance(value, int | float | str) else json.dumps(value)
            for name, value in config.to_dict().items()
        }
        accelerator.init_trackers(_PROJECT, config=options)

    def losses(self, stage: str) -> list[float]:
        """Losses of a stage so far, in the process that keeps the metrics; elsewhere none."""
        return [] if self.metrics is None else [row["loss"] for row in self.metrics.rows if row["stage"] == stage]

    def start(self, stage: str, model: nn.Module) -> None:
        """Record attention before the first step of a run."""
        self.at_start = self._track(model, 0)
        if self.at_start is not None:
            self._log(stage, {}, self.at_start, 0)

    def add(
        self, stage: str, step: int, loss: float, figures: dict[str, float], seconds: float, model: nn.Module | None
    ) -> None:
        """Report a step. Every process must call it.

        Args:
            stage: The stage.
            step: The step of that stage, from 1.
            loss: Its loss.
            figures: Further figures.
            seconds: Its duration.
            model: The model, whose attention is recorded where that is due; None records none.
        """
        run_step = self.steps_before + step
        tracked = None if model is None else self._track(model, run_step)
        if self.metrics is not None:
            row = {"stage": stage, "step": step, "loss": loss, **figures, "seconds": round(seconds, 6)}
            records = {"attention_at_start": self.at_start, "attention": tracked}
            self.metrics.append({**row, **{name: record for name, record in records.items() if record is not None}})
            self.at_start = None
        self._log(stage, {"loss": loss, **figures}, tracked, run_step)
        if self.callback is not None:
            self.callback(stage, step, loss)

    def _track(self, model: nn.Module, run_step: int) -> dict[str, Any] | None:
        """Record attention if it is due, in the main process."""
        if self.tracker is None or not self.accelerator.is_main_process or not self.tracker.is_due(run_step):
            return None
        return self.tracker.record(model, run_step)

    def _log(self, stage: str, figures: dict[str, float], tracked: dict[str, Any] | None, run_step: int) -> None:
        if tracked is not None and self.tracker is not None:
            figures = {**figures, **self.tracker.figures(tracked)}
        self.accelerator.log({f"{stage}/{name}": value for name, value in figures.items()}, step=run_step)
