# SPDX-License-Identifier: Apache-2.0
"""Kills training runs with SIGKILL and resumes them: `python -m tests.training.kill_training FOLDER HOW COUNT`.

`HOW` is `renames`, before and after every rename that a run does (or `COUNT` of them), or `random`, at `COUNT` random
moments. Every resumed run must end bit for bit where a run that nobody killed does. The runs are forks of this
process, so that nothing is imported more than once.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

# What a run imports on its way, so that it is there for all forks.
import torch._dynamo  # noqa: F401
import tqdm.auto  # noqa: F401
from safetensors.torch import load_file

from mhla_hf.training.checkpoints import WEIGHTS, find_checkpoint, list_checkpoints, read_metrics, read_state
from mhla_hf.training.data.order import evenly_spaced

from .training_process import make_trainer


_MOVES = ("os.rename", "os.remove", "os.rmdir", "os.mkdir")


def train(output: Path) -> None:
    make_trainer(output, distill_steps=1, max_steps=2, checkpointing_steps=1, checkpoints_total_limit=1).run()


def start(action: Callable[[], object]) -> int:
    """Starts a process that runs something; returns its number."""
    sys.stdout.flush()
    process = os.fork()
    if process == 0:
        code = 1
        try:
            action()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return process


def forked(action: Callable[[], None], kill_after: float | None = None) -> int:
    """Runs something in a process of its own; returns the signal that ended it, 0 for none."""
    process = start(action)
    if kill_after is not None:
        time.sleep(kill_after)
        os.kill(process, signal.SIGKILL)
    status = os.waitpid(process, 0)[1]
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, "a run failed"
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0


def hooked(output: Path, on_event: Callable[[int, str], None]) -> None:
    """Trains, and tells of every change of names and every file opened for writing, before it happens."""
    count = 0

    def audit(event: str, arguments: tuple) -> None:
        nonlocal count
        writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        if event in _MOVES or writes:
            on_event(count, event)
            count += 1

    sys.addaudithook(audit)
    train(output)


def moments_of_renames(folder: Path) -> list[int]:
    """The numbers of the events right before and right after a rename."""
    record = folder / "events"

    def note(number: int, event: str) -> None:
        if event == "os.rename":
            os.write(descriptor, f"{number} {number + 1} ".encode())

    descriptor = os.open(record, os.O_WRONLY | os.O_CREAT)
    forked(lambda: hooked(folder / "recorded", note))
    return sorted({int(number) for number in record.read_text().split()})


def result(output: Path) -> tuple:
    """What must be the same: weights, moments, and the metrics without the time that steps took."""
    last = list_checkpoints(output / "checkpoints")[-1]
    files = [(last / name).read_bytes() for name in ("model.safetensors", "optimizer.safetensors")]
    return last.name, files, [{**row, "seconds": 0} for row in read_metrics(output / "metrics.jsonl")]


def check(output: Path, expected: tuple) -> None:
    """What a killed run left is whole, and goes on to the expected end."""
    for path in list_checkpoints(output / "checkpoints"):
        read_state(path)
        load_file(path / WEIGHTS)
    find_checkpoint("latest", output / "checkpoints")
    assert forked(lambda: train(output)) == 0
    assert result(output) == expected, output
    leftovers = list(output.rglob(".tmp-*"))
    assert not leftovers, leftovers


def main(folder: Path, how: str, count: int) -> None:
    began = time.monotonic()
    assert forked(lambda: train(folder / "whole")) == 0
    seconds = time.monotonic() - began
    expected, killed = result(folder / "whole"), 0
    if how == "renames":
        for number in evenly_spaced(moments_of_renames(folder), count):

            def kill(event_number: int, event: str, wanted: int = number) -> None:
                if event_number == wanted:
                    os.kill(os.getpid(), signal.SIGKILL)

            output = folder / f"killed-{number}"
            killed += forked(lambda output=output, kill=kill: hooked(output, kill)) == signal.SIGKILL
            check(output, expected)
    else:
        generator = random.Random(0)
        for number in range(count):
            output = folder / f"killed-{number}"
            killed += forked(lambda output=output: train(output), generator.uniform(0, seconds)) == signal.SIGKILL
            check(output, expected)
    print(f"{killed} killed")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
