# SPDX-License-Identifier: Apache-2.0
"""Processes of a run on CPUs: started where `accelerate launch` does not, and never left behind.

`accelerate launch --cpu --num_processes N` without MPI starts one process only, whatever N is (accelerate 1.15,
`simple_launcher`). Here that process starts the others, so the command does what it says. Every process asks the
kernel to tell it when its parent dies: a killed launcher must not leave trainers behind that go on. Those that it
started itself are asked to stop, as by SIGTERM, and save a last checkpoint; those that they started are killed.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path


logger = logging.getLogger(__name__)

_PARENT = "MHLA_HF_PARENT_PROCESS"
_LAUNCHER_MARKS = ("ACCELERATE_MIXED_PRECISION", "TORCHELASTIC_RUN_ID")
_RANK_VARIABLES = ("RANK", "WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
# `accelerate launch`, `accelerate-launch` and `python -m accelerate.commands.launch`.
_LAUNCH_NAMES = ("launch", "accelerate-launch", "launch.py", "accelerate.commands.launch")
_SET_PARENT_DEATH_SIGNAL = 1

_started: dict[int, subprocess.Popen] = {}


def join_launched_processes() -> None:
    """Makes this process part of the run that launched it; does nothing outside a launcher.

    Call it once, before an `Accelerator` is made.

    Raises:
        ValueError: If `accelerate launch` was asked for CPU processes on several machines, which takes MPI.
    """
    if not any(name in os.environ for name in _LAUNCHER_MARKS):
        return
    _die_with_parent()
    if any(name in os.environ for name in _RANK_VARIABLES):
        return
    # Accelerate sets the address only if it was asked for several processes.
    if os.environ.get("ACCELERATE_USE_CPU", "").lower() not in ("1", "true") or "MASTER_ADDR" not in os.environ:
        return
    _start_others(*_asked_for())


def outlive_parent() -> None:
    """Lets this process finish what it does when the launcher ends; its helpers still end with it."""
    if os.environ.get(_PARENT) is None and any(name in os.environ for name in _LAUNCHER_MARKS):
        _set_parent_death_signal(0)


def ended_process() -> tuple[int, int] | None:
    """Rank and exit code of a process that this one started and that has ended."""
    for rank, process in _started.items():
        code = process.poll()
        if code is not None:
            return rank, code
    return None


def _die_with_parent() -> None:
    """Asks Linux for a signal when the parent of this process dies; other systems have nothing like it."""
    expected = os.environ.get(_PARENT)
    _set_parent_death_signal(signal.SIGTERM if expected is None else signal.SIGKILL)
    if expected is not None and sys.platform.startswith("linux") and int(expected) != os.getppid():
        sys.exit("the process that started this one is gone")


def _set_parent_death_signal(number: int) -> None:
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, number)


def _asked_for() -> tuple[int, int | None]:
    """The number of processes and the port that the `accelerate launch` above this process was asked for."""
    import psutil
    from accelerate.commands.launch import launch_command_parser

    command = psutil.Process(os.getppid()).cmdline()
    names = [Path(part).name for part in command]
    marks = [index for index, name in enumerate(names) if name in _LAUNCH_NAMES]
    if not marks:
        logger.warning(
            "accelerate started one process of several; on CPUs, `torchrun --nproc_per_node N` starts N of them"
        )
        return 1, None
    asked = launch_command_parser().parse_args(command[marks[0] + 1 :])
    count, machines = asked.num_processes, asked.num_machines or 1
    if count is None and asked.config_file is not None:
        from accelerate.commands.config.config_args import load_config_from_file

        stored = load_config_from_file(asked.config_file)
        count, machines = stored.num_processes, stored.num_machines
    if machines > 1:
        raise ValueError("num_machines must be 1 for CPU processes; use torchrun or MPI for several machines")
    return count or 1, asked.main_process_port


def _start_others(count: int, port: int | None) -> None:
    """Makes this process the first of `count`, and starts the rest with the same command line."""
    if count < 2:
        return
    shared = {
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        # Without a port of the user's choice accelerate names a fixed one, which two runs would fight for.
        "MASTER_PORT": str(port or _free_port()),
    }
    for rank in range(1, count):
        environment = {**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank), _PARENT: str(os.getpid())}
        _started[rank] = subprocess.Popen([sys.executable, *sys.orig_argv[1:]], env=environment)
    os.environ.update({**shared, "RANK": "0", "LOCAL_RANK": "0"})


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
