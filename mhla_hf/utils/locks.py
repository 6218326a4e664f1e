# SPDX-License-Identifier: Apache-2.0
"""Locks on files: one process at a time writes to an output."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import IO


# A process that was killed just now may still hold its lock for a moment.
PATIENCE_SECONDS = 10.0
LOCK = ".lock"
"""Name of the lock file of an output directory."""


def lock_output(directory: Path, patience: float = PATIENCE_SECONDS) -> IO[str] | None:
    """Takes the lock of an output directory; see [`take_lock`].

    Args:
        directory: The output directory; made if it does not exist.
        patience: Seconds to wait for a lock that is taken.

    Returns:
        The open lock file: keep it open as long as the run lasts. None where the system has no such locks.

    Raises:
        ValueError: If another run holds it.
    """
    directory.mkdir(parents=True, exist_ok=True)
    taken = f"output {directory} is in use by another run; wait for it or choose another"
    return take_lock(directory / LOCK, taken, patience)


def take_lock(path: Path, taken: str, patience: float = PATIENCE_SECONDS, *, shared: bool = False) -> IO[str] | None:
    """Takes the lock of a file, which the system releases when the process ends, however it ends.

    The holder may remove the file before it closes it: who waits for it then locks the new one.

    Args:
        path: The lock file; made if it does not exist, in a directory that does.
        taken: The error message if another process holds the lock.
        patience: Seconds to wait for a lock that is taken.
        shared: Let others that ask for a shared one have it too, for reading.

    Returns:
        The open file: keep it open as long as the lock is needed. None where the system has no such locks.

    Raises:
        ValueError: If another process holds it.
        OSError: If the file cannot be made.
    """
    try:
        import fcntl
    except ImportError:
        return None
    deadline = time.monotonic() + patience
    while True:
        file = path.open("a+")
        try:
            fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            if time.monotonic() < deadline:
                time.sleep(0.1)
                continue
            raise ValueError(taken) from None
        except OSError:
            # Some network file systems have no locks; a run must still be possible there.
            file.close()
            return None
        if _is_open_file(path, file):
            return file
        file.close()


def _is_open_file(path: Path, file: IO[str]) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False
