# SPDX-License-Identifier: Apache-2.0
"""One run at a time per output directory."""

from __future__ import annotations

import time
from pathlib import Path
from typing import IO


# A process that was killed just now may still hold its lock for a moment.
PATIENCE_SECONDS = 10.0


def lock_output(directory: Path, patience: float = PATIENCE_SECONDS) -> IO[str] | None:
    """Takes the directory's lock, which the system releases when the process ends, however it ends.

    Args:
        directory: The output directory; made if it does not exist.
        patience: Seconds to wait for a lock that is taken.

    Returns:
        The open lock file: keep it open as long as the run lasts. None where the system has no such locks.

    Raises:
        ValueError: If another run holds it.
    """
    try:
        import fcntl
    except ImportError:
        return None
    directory.mkdir(parents=True, exist_ok=True)
    file = (directory / ".lock").open("a")
    deadline = time.monotonic() + patience
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() < deadline:
                time.sleep(0.1)
                continue
            file.close()
            raise ValueError(f"output {directory} is in use by another run; wait for it or choose another") from None
        except OSError:
            # Some network file systems have no locks; a run must still be possible there.
            file.close()
            return None
        return file
