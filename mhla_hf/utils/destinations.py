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
import json
import logging
import os
import re
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from filelock import AcquireReturnProxy, FileLock, Timeout

from .files import TEMPORARY_PREFIX, clear_write_errors, flush_to_disk, read_json, temporary_sibling, write_json
from .messages import shorten_value


logger = logging.getLogger(__name__)

LOCK = ".lock"
"""Name of the lock file of an output directory."""
PATIENCE_SECONDS = 10.0
"""How long to wait for a lock: a process that was killed just now may still hold it for a moment."""

_DESTINATION_PATIENCE_SECONDS = 1.0
_TEMPORARY = re.compile(
    rf"{re.escape(TEMPORARY_PREFIX)}(?:lock-|(?:old-|moving-)?[0-9a-f]{{8}}-)(?P<name>.+)", re.DOTALL
)
# The files that make a directory loadable, where it cannot be renamed.
MOVED_LAST = ("config.json", "model_index.json", "conversion.json")
# Errors of network file systems without locks.
_NO_LOCKS = {errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL}


def take_lock(path: Path, taken: str, patience: float = PATIENCE_SECONDS) -> AcquireReturnProxy | None:
    """Take the lock of a file.

    The process holds it until `with` ends or it ends itself, however it ends. The holder may remove the file before;
    whoever waits for it then locks a new file.

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
    lock = FileLock(path, timeout=patience, thread_local=False, fallback_to_soft=False)
    try:
        return lock.acquire(poll_interval=0.1)
    except Timeout:
        raise ValueError(taken) from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return None


def lock_output(directory: Path, patience: float = PATIENCE_SECONDS) -> AcquireReturnProxy | nullcontext[None]:
    """Take the lock of an output directory, which is created if needed, until `with` ends; see [`take_lock`]."""
    directory.mkdir(parents=True, exist_ok=True)
    taken = f"output {directory} is in use by another run; wait for it or choose another"
    return take_lock(directory / LOCK, taken, patience) or nullcontext()


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """Describe the options in which two runs differ, with both values; empty if they are the same."""
    # As they are read again: tuples as lists.
    now = json.loads(json.dumps(new))
    return ", ".join(
        f"{name} {shorten_value(old.get(name), 60)} (now {shorten_value(now.get(name), 60)})"
        for name in sorted({*old, *now})
        if old.get(name) != now.get(name)
    )


class RunFolder:
    """A directory of one run, with a record of the options that distinguish it from others.

    Args:
        path: The directory.
        record: Name of the record in it.
        output: What messages call it; the directory by default.
    """

    def __init__(self, path: Path, record: str, output: Path | None = None) -> None:
        self.path, self.record, self.output = path, path / record, output or path

    @property
    def has_progress(self) -> bool:
        """Whether there is something that a run with other options must not replace."""
        return self.record.is_file()

    def identity(self) -> dict[str, Any]:
        """Return the options of the run here; empty if there is none."""
        return read_json(self.record, "the record of a run") if self.record.is_file() else {}

    def clear(self) -> None:
        """Remove the files of the run here."""

    @contextmanager
    def claimed(self, identity: Mapping[str, Any], resume: bool = True) -> Iterator[None]:
        """Claim the folder: within the context only this run writes here.

        A run without progress is replaced by one with other options, and resumes without `resume`.

        Args:
            identity: Options that distinguish this run from others, as plain JSON values.
            resume: Resume the stored run.

        Raises:
            ValueError: If a run with progress is here and `resume` is not asked for, or it is another one; the message
                names what differs.
        """
        with lock_output(self.path):
            remove_leftovers(self.path)
            # Read with the lock: another process may have been here meanwhile.
            stored = self.identity()
            different = differences(stored, identity)
            if self.has_progress and (different or not resume):
                problem = f"with {different}; give the same options" if different else "already; --resume resumes it"
                raise ValueError(f"output {self.output} holds a run {problem}, or choose another output")
            if different:
                if stored:
                    logger.warning("%s: restarted, since a run with %s finished no stage", self.output, different)
                self.clear()
                write_json(self.record, dict(identity))
            yield


class Destination:
    """A directory that only this process writes; see [`claim_destination`].

    Attributes:
        path: The directory, links resolved.
        overwrite: Whether its present content is replaced.
        home: The folder of its temporary directories.
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
        ending = f"{uuid.uuid4().hex[:8]}-{self.path.name}"
        new, old, moving = (self.home / f"{TEMPORARY_PREFIX}{kind}{ending}" for kind in ("", "old-", "moving-"))
        new.mkdir()
        try:
            with clear_write_errors(self.path):
                yield new
                _flush_tree(new)
            self.check_content()
            if self._inside:
                old.mkdir()
                _move_entries(self.path, old)
                os.rename(new, moving)
                _move_entries(moving, self.path)
            else:
                if self.overwrite and _entries(self.path, every=True):
                    os.rename(self.path, old)
                # Replaces an empty directory and nothing else.
                os.rename(new, self.path)
            if old.exists():
                # What is half removed must never be restored.
                os.rename(old, new)
            flush_to_disk(self.home)
        finally:
            self.recover(remove=False)
            # While the old content is aside, the name of the new one says that it was not replaced.
            if not old.exists():
                shutil.rmtree(new, ignore_errors=True)

    def check_content(self) -> None:
        """Refuse to replace content without `overwrite`.

        Raises:
            ValueError: If the destination is not empty.
        """
        if not self.overwrite and (_entries(self.path, every=not self._inside) or self.path.is_file()):
            raise ValueError(
                f"destination {self.path} is not empty; choose another one or pass overwrite=True (--overwrite)."
            )

    def recover(self, remove: bool) -> None:
        """Clean up after a killed process and log it.

        Args:
            remove: Also remove leftovers. Requires the lock: they could belong to a living process. What was not
                replaced, and cannot be put back since something else took its place, is kept.
        """
        for moving in self._leftovers("moving-") if self._inside else []:
            _move_entries(moving, self.path)
            logger.warning("Finished %s, which was left half-way.", self.path)
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
                _move_entries(old, self.path)
            else:
                os.rename(old, self.path)
            logger.warning("Restored %s, which had been put aside.", self.path)
        for path in [*self._leftovers("old-"), *self._leftovers()] if remove else []:
            if path not in kept:
                if path.is_dir():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    path.unlink(missing_ok=True)
                logger.warning("Removed %s, left over from a run that was killed.", path)

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
    claimed.home.mkdir(parents=True, exist_ok=True)
    lock_path = claimed.home / f"{TEMPORARY_PREFIX}lock-{path.name}"
    taken = f"destination {destination} is being written by another run; wait for it or choose another one."
    lock = take_lock(lock_path, taken, _DESTINATION_PATIENCE_SECONDS)
    with lock or nullcontext():
        try:
            claimed.recover(remove=lock is not None)
            claimed.check_content()
            yield claimed
        finally:
            lock_path.unlink(missing_ok=True)


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


def _entries(folder: Path, every: bool) -> list[str]:
    """Names of the entries of a folder, temporary ones only with `every`, in the order in which they enter another."""
    names = os.listdir(folder) if folder.is_dir() else []
    # A new file system has lost+found.
    others = [name for name in names if every or not (name.startswith(TEMPORARY_PREFIX) or name == "lost+found")]
    return sorted(others, key=lambda name: (name in MOVED_LAST, name))


def _move_entries(source: Path, target: Path) -> None:
    """Move every entry of a folder into another; a temporary folder is removed then."""
    # What makes a directory loadable leaves it first and enters it last.
    names = _entries(source, every=source.name.startswith(TEMPORARY_PREFIX))
    for name in reversed(names) if target.name.startswith(TEMPORARY_PREFIX) else names:
        if os.path.lexists(target / name):
            raise ValueError(f"{target / name} is in the way of {source / name}; move one of them away, run again.")
        os.rename(source / name, target / name)
    if source.name.startswith(TEMPORARY_PREFIX):
        os.rmdir(source)


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
