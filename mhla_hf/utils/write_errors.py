# SPDX-License-Identifier: Apache-2.0
"""One clear line when there is no room for a file."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


_NO_ROOM = {
    errno.ENOSPC: "no space is left on the disk",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "the file is larger than the system allows",
}


@contextmanager
def clear_write_errors(destination: Path) -> Iterator[None]:
    """Reports in one line that there is no room for a file, whatever the library that wrote it raises.

    Safetensors and PyTorch have exceptions of their own for it, which name neither the file nor what to do.

    Args:
        destination: File or directory that is written, for the error.

    Raises:
        OSError: If the disk or a quota is full, or the system limits the size of files.
    """
    try:
        yield
    except Exception as error:
        reason = _no_room(error, destination.parent)
        if reason is None:
            raise
        raise OSError(
            f"{destination} cannot be written: {reason}. Make room and run the same command again; what was complete "
            "before is still there."
        ) from error


def _no_room(error: Exception, directory: Path) -> str | None:
    """Reason for a lack of room, if that is the cause of an exception."""
    if isinstance(error, OSError) and error.errno is not None:
        return _NO_ROOM.get(error.errno)
    # By name: whoever writes without safetensors need not have it.
    if not isinstance(error, OSError | RuntimeError) and type(error).__name__ != "SafetensorError":
        return None
    for number, reason in _NO_ROOM.items():
        # As safetensors puts it, and copies of whole directories.
        if f"(os error {number})" in str(error) or f"[Errno {number}]" in str(error):
            return reason
    # PyTorch's zip files, and programs that files are written by, do not say.
    with suppress(OSError):
        if shutil.disk_usage(directory).free < 2**16:
            return _NO_ROOM[errno.ENOSPC]
    return "the disk may be full" if "inline_container" in str(error) else None
