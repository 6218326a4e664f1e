# SPDX-License-Identifier: Apache-2.0
"""Output directories that appear complete or not at all, written by one process at a time.

The content is collected in a temporary directory beside the destination, flushed to the disk and renamed. A
destination that cannot be renamed (a mount point, the working directory) is filled from a temporary directory inside
it instead, entry by entry. The names of temporary directories tell the next process that writes to the same
destination what a killed one left:

    .tmp-lock-<name>             held by the process that writes
    .tmp-<token>-<name>          incomplete content, or content to be removed
    .tmp-old-<token>-<name>      the previous content; not replaced yet as long as .tmp-<token>-<name> exists
    .tmp-moving-<token>-<name>   complete content on its way into a destination that cannot be renamed
"""

from __future__ import annotations

import errno
import logging
import os
import re
import shutil
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any

from filelock import FileLock, Timeout

from .files import TEMPORARY_PREFIX, clear_write_errors, flush_to_disk, temporary_sibling


logger = logging.getLogger(__name__)

LOCK = ".lock"
"""Name of the lock file of an output directory."""
PATIENCE_SECONDS = 10.0
"""How long to wait for a lock: a process that was killed just now may still hold it for a moment."""

_DESTINATION_PATIENCE_SECONDS = 1.0
_TEMPORARY = re.compile(
    rf"{re.escape(TEMPORARY_PREFIX)}(?P<kind>lock-|(?:old-|moving-)?[0-9a-f]{{8}}-)(?P<name>.+)", re.DOTALL
)
_TAKEN = {errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR, errno.EISDIR}
# Errors of network file systems without locks.
_NO_LOCKS = {errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL}
# The files that make a directory loadable are moved last where it cannot be renamed.
_MOVED_LAST = ("config.json", "model_index.json", "conversion.json")


class Lock(FileLock):  # type: ignore[misc, valid-type]
    """A lock held by this process until it is closed or the process ends, however it ends."""

    def __enter__(self) -> Lock:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    def close(self) -> None:
        """Release the lock."""
        self.release(force=True)


def take_lock(path: Path, taken: str, patience: float = PATIENCE_SECONDS) -> Lock | None:
    """Take the lock of a file.

    The holder may remove the file before it closes the lock; whoever waits for it then locks a new file.

    Args:
        path: The lock file; created if it does not exist, in a directory that does.
        taken: Error message if another process holds the lock.
        patience: Seconds to wait for a lock that is taken.

    Returns:
        The lock, to be kept as long as it is needed; `None` on a file system without locks, where a run must still be
        possible.

    Raises:
        ValueError: If another process holds it.
        OSError: If the file cannot be created.
    """
    # A soft lock would outlive a killed process.
    lock = Lock(path, timeout=patience, thread_local=False, fallback_to_soft=False)
    try:
        lock.acquire(poll_interval=0.1)
    except Timeout:
        raise ValueError(taken) from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return None
    return lock


def lock_output(directory: Path, patience: float = PATIENCE_SECONDS) -> Lock | None:
    """Take the lock of an output directory, which is created if needed; see [`take_lock`]."""
    directory.mkdir(parents=True, exist_ok=True)
    taken = f"output {directory} is in use by another run; wait for it or choose another"
    return take_lock(directory / LOCK, taken, patience)


def share_lock(path: Path, taken: str) -> IO[str] | None:
    """Take a lock that other readers may share; arguments and errors as in [`take_lock`], without waiting.

    Returns:
        The lock file, to be kept open as long as the lock is needed; `None` where it cannot be locked.
    """
    try:
        import fcntl

        file = path.open("a+")
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(taken) from None
    except (ImportError, OSError):
        return None
    return file


class Destination:
    """A directory that only this process writes; see [`claim_destination`].

    Attributes:
        path: The directory, links resolved.
        overwrite: Whether its present content is replaced.
    """

    def __init__(self, path: Path, overwrite: bool) -> None:
        self.path, self.overwrite = path, overwrite
        self._inside = path.is_dir() and _must_stay(path)
        self.home = path if self._inside else path.parent

    @contextmanager
    def staging(self) -> Iterator[Path]:
        """Yield a temporary directory to fill, and publish it when the block ends without an exception.

        On any exception, including Ctrl-C, the destination keeps its content.

        Raises:
            ValueError: If others have put something into the destination meanwhile, which is left alone.
        """
        token = uuid.uuid4().hex[:8]
        new, old = self._temporary(token), self._temporary(token, "old-")
        new.mkdir()
        try:
            with clear_write_errors(self.path):
                yield new
                _flush_tree(new)
            if self._inside:
                self._move_in(new, old, self._temporary(token, "moving-"))
            else:
                self._rename(new, old)
            flush_to_disk(self.home)
        finally:
            # While the old content is aside, the name of the new one says that it was not replaced.
            if not os.path.lexists(old):
                shutil.rmtree(new, ignore_errors=True)

    def check_content(self) -> None:
        """Refuse to replace content without `overwrite`.

        Raises:
            ValueError: If the destination is not empty.
        """
        if not self.overwrite and self._content():
            raise ValueError(
                f"destination {self.path} is not empty; choose another one or pass overwrite=True (--overwrite)."
            )

    def recover(self, remove: bool) -> None:
        """Clean up after a killed process and log it.

        Args:
            remove: Also remove leftovers. Requires the lock: they could belong to a living process. What was not
                replaced, and cannot be put back since something else took its place, is kept.
        """
        for folder in self._leftovers("moving-") if self._inside else []:
            self._empty_into_place(folder)
            logger.warning("Finished %s, which a run that was killed had left half-way.", self.path)
        kept: set[Path] = set()
        for old in self._leftovers("old-"):
            new = old.with_name(old.name.replace("old-", "", 1))
            taken = os.path.lexists(self.path)
            if taken and not new.exists():
                continue
            if taken and not self._inside:
                kept |= {old, new}
                logger.warning("%s holds what stood at %s before a run that was killed.", old, self.path)
                continue
            if self._inside:
                self._empty_into_place(old)
            else:
                os.rename(old, self.path)
            logger.warning("Restored %s, which a run that was killed had put aside.", self.path)
        for path in [*self._leftovers("old-"), *self._leftovers()] if remove else []:
            if path not in kept:
                if path.is_dir():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    path.unlink(missing_ok=True)
                logger.warning("Removed %s, left over from a run that was killed.", path)

    def _rename(self, new: Path, old: Path) -> None:
        replaces = self.overwrite and bool(self._content())
        if replaces:
            os.rename(self.path, old)
        try:
            if os.name == "nt" and self.path.is_dir():
                os.rmdir(self.path)
            # Replaces an empty directory and nothing else.
            os.rename(new, self.path)
        except OSError as error:
            if error.errno in _TAKEN:
                raise self._filled() from None
            raise
        finally:
            if replaces and not os.path.lexists(self.path):
                os.rename(old, self.path)
        if replaces:
            # What is half removed must never be restored.
            os.rename(old, new)

    def _move_in(self, new: Path, old: Path, moving: Path) -> None:
        content = self._content()
        if content:
            if not self.overwrite:
                raise self._filled()
            old.mkdir()
            with ExitStack() as stack:
                stack.callback(self._empty_into_place, old)
                for name in content:
                    os.rename(self.path / name, old / name)
                stack.pop_all()
        os.rename(new, moving)
        self._empty_into_place(moving)
        if content:
            os.rename(old, new)

    def _filled(self) -> ValueError:
        return ValueError(
            f"destination {self.path} was filled by others meanwhile and is left alone; choose another one or pass "
            "overwrite=True (--overwrite)."
        )

    def _empty_into_place(self, folder: Path) -> None:
        for name in sorted(os.listdir(folder), key=lambda name: (name in _MOVED_LAST, name)):
            if os.path.lexists(self.path / name):
                raise ValueError(
                    f"{self.path / name} is in the way of {folder / name}; move one of them away and run again."
                )
            os.rename(folder / name, self.path / name)
        os.rmdir(folder)

    def _content(self) -> list[str]:
        """Names of the entries that others put there."""
        names = sorted(os.listdir(self.path)) if self.path.is_dir() else []
        if not self._inside:
            return names
        # A new file system has lost+found.
        return [name for name in names if not name.startswith(TEMPORARY_PREFIX) and name != "lost+found"]

    def _temporary(self, token: str, kind: str = "") -> Path:
        return self.home / f"{TEMPORARY_PREFIX}{kind}{token}-{self.path.name}"

    def _leftovers(self, kind: str = "") -> list[Path]:
        pattern = re.compile(f"{re.escape(TEMPORARY_PREFIX + kind)}[0-9a-f]{{8}}-{re.escape(self.path.name)}")
        return [self.home / name for name in sorted(os.listdir(self.home)) if pattern.fullmatch(name)]


@contextmanager
def claim_destination(destination: Path, *, overwrite: bool = False) -> Iterator[Destination]:
    """Claim a directory for this process until the block ends, and clean up after killed ones.

    Args:
        destination: The directory to write. Links are followed.
        overwrite: Whether content may be replaced.

    Raises:
        ValueError: If another process has claimed it, it has content without `overwrite`, or it is not a directory.
        OSError: If it cannot be written.
    """
    path = Path(os.path.realpath(destination))
    if os.path.lexists(path) and not path.is_dir():
        raise ValueError(f"destination {destination} is not a directory; give a directory.")
    claimed = Destination(path, overwrite)
    lock_path = claimed.home / f"{TEMPORARY_PREFIX}lock-{path.name}"
    taken = f"destination {destination} is being written by another run; wait for it or choose another one."
    claimed.home.mkdir(parents=True, exist_ok=True)
    lock = take_lock(lock_path, taken, _DESTINATION_PATIENCE_SECONDS)
    try:
        claimed.recover(remove=lock is not None)
        claimed.check_content()
        yield claimed
    finally:
        lock_path.unlink(missing_ok=True)
        if lock is not None:
            lock.close()


@contextmanager
def atomic_directory(destination: Path) -> Iterator[Path]:
    """Yield a temporary directory to fill, and move it to `destination` when the block ends without an exception.

    The previous content is replaced then. See [`claim_destination`].

    Args:
        destination: The directory to write; its parents are created.
    """
    with claim_destination(destination, overwrite=True) as claimed, claimed.staging() as temporary:
        yield temporary


def remove_directory(directory: Path) -> None:
    """Remove a directory; a kill half-way leaves nothing under its name."""
    doomed = temporary_sibling(directory)
    os.replace(directory, doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def remove_leftovers(parent: Path) -> None:
    """Remove what killed processes left under temporary names in a directory, and restore what they put aside.

    Requires the lock of the directory, or a directory that nobody else writes to. Temporary files of other programs
    are left alone.
    """
    entries = sorted(os.listdir(parent)) if parent.is_dir() else []
    for name in sorted({found["name"] for found in map(_TEMPORARY.fullmatch, entries) if found}):
        Destination(parent / name, overwrite=True).recover(remove=True)
        (parent / f"{TEMPORARY_PREFIX}lock-{name}").unlink(missing_ok=True)


def _flush_tree(folder: Path) -> None:
    for path in [*folder.rglob("*"), folder]:
        if not path.is_symlink():
            flush_to_disk(path)


def _must_stay(path: Path) -> bool:
    """Tell whether a directory can be filled but not replaced: a mount point, in use, or in a read-only folder."""
    return (
        os.path.ismount(path)
        or str(path) in _mount_points()
        or not os.access(path.parent, os.W_OK)
        or path == Path(os.path.realpath(os.curdir))
    )


def _mount_points() -> set[str]:
    """Read the mount points from the system's list, where it has one: `ismount` misses bind mounts."""
    try:
        lines = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return set()
    return {re.sub(r"\\(\d{3})", lambda code: chr(int(code[1], 8)), line.split(" ")[4]) for line in lines}
