# SPDX-License-Identifier: Apache-2.0
"""Directories that appear complete or not at all, written by one process at a time.

The content is collected in a temporary directory beside the destination and takes its place by a rename. A destination
that cannot be renamed (a mount point, the working directory) is filled from a temporary directory inside it instead,
entry by entry. The names of temporary directories say what they hold, so that the next process that writes to the same
destination can put right what a killed one left:

    .tmp-lock-<name>             held by the process that writes
    .tmp-<token>-<name>          content that is not complete, or is to be removed
    .tmp-old-<token>-<name>      what stood at the destination; as long as the former exists, it is not replaced yet
    .tmp-moving-<token>-<name>   complete content on its way into a destination that cannot be renamed
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import re
import shutil
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from .files import TEMPORARY_PREFIX, clear_write_errors, flush_to_disk, temporary_sibling


logger = logging.getLogger(__name__)

LOCK = ".lock"
"""Name of the lock file of an output directory."""
PATIENCE_SECONDS = 10.0
"""How long to wait for a lock: a process that was killed just now may still hold it for a moment."""

_PATIENCE_SECONDS = 1.0
_TEMPORARY = re.compile(rf"{re.escape(TEMPORARY_PREFIX)}(lock-|(old-|moving-)?[0-9a-f]{{8}}-)")
_TAKEN = {errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR, errno.EISDIR}
# What makes a directory loadable comes last where it cannot come at once.
_MOVED_LAST = ("config.json", "model_index.json", "conversion.json")


class Destination:
    """A directory that this process alone writes; see [`claim_destination`].

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
        """Yields a temporary directory to fill, and publishes it when the block ends well.

        On any exception, Ctrl-C included, the destination is as it was.

        Raises:
            ValueError: If others put something into the destination meanwhile, which is left as it is.
        """
        token = uuid.uuid4().hex[:8]
        new, old = self._temporary(token), self._temporary(token, "old-")
        new.mkdir()
        try:
            with clear_write_errors(self.path):
                yield new
                flush_tree(new)
            if self._inside:
                self._move_in(new, old, self._temporary(token, "moving-"))
            else:
                self._rename(new, old)
            flush_to_disk(self.home)
        finally:
            # As long as the old content is not back, the name of the new says that it is not replaced.
            if not os.path.lexists(old):
                shutil.rmtree(new, ignore_errors=True)

    def check_content(self) -> None:
        """Refuses to replace content without being told to.

        Raises:
            ValueError: If the destination is not empty, without `overwrite`.
        """
        if not self.overwrite and self._content():
            raise ValueError(
                f"destination {self.path} is not empty; choose another one or pass overwrite=True (--overwrite)."
            )

    def recover(self, remove: bool) -> set[Path]:
        """Puts right what a killed process left, and says so.

        Args:
            remove: Also remove what is left over: only with the lock, or it could be a living process's.

        Returns:
            What was put aside and is kept, since something else stands at the destination.
        """
        for folder in self._leftovers("moving-"):
            self._empty_into_place(folder)
            logger.warning("Finished %s, which a run that was killed had left half-way.", self.path)
        kept: set[Path] = set()
        for old in self._leftovers("old-"):
            new = old.with_name(old.name.replace("old-", "", 1))
            if not new.exists() and os.path.lexists(self.path):
                continue
            if self._inside:
                self._empty_into_place(old)
            elif os.path.lexists(self.path):
                kept |= {old, new}
                logger.warning("%s holds what stood at %s before a run that was killed.", old, self.path)
                continue
            else:
                os.rename(old, self.path)
            logger.warning("Restored %s, which a run that was killed had put aside.", self.path)
        for path in [*self._leftovers("old-"), *self._leftovers()] if remove else []:
            if path not in kept:
                shutil.rmtree(path, ignore_errors=True)
                logger.warning("Removed %s, left over from a run that was killed.", path)
        return kept

    def _rename(self, new: Path, old: Path) -> None:
        if self.overwrite and self._content():
            if exchange_names(new, self.path):
                return
            try:
                os.rename(self.path, old)
                os.rename(new, self.path)
            except BaseException:
                if os.path.lexists(old) and not os.path.lexists(self.path):
                    os.rename(old, self.path)
                raise
            os.rename(old, new)
            return
        try:
            if os.name == "nt" and self.path.is_dir():
                os.rmdir(self.path)
            # Replaces an empty directory and nothing else.
            os.rename(new, self.path)
        except OSError as error:
            if error.errno not in _TAKEN:
                raise
            raise self._filled() from None

    def _move_in(self, new: Path, old: Path, moving: Path) -> None:
        content = self._content()
        if content:
            if not self.overwrite:
                raise self._filled()
            old.mkdir()
            try:
                for name in content:
                    os.rename(self.path / name, old / name)
            except BaseException:
                self._empty_into_place(old)
                raise
        os.rename(new, moving)
        self._empty_into_place(moving)
        if content:
            os.rename(old, new)

    def _filled(self) -> ValueError:
        return ValueError(
            f"destination {self.path} was filled by others meanwhile and is left as it is; choose another one or pass "
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
        """Names of what others put there."""
        if not self.path.is_dir():
            return []
        names = sorted(os.listdir(self.path))
        if not self._inside:
            return names
        # A new file system has the latter.
        return [name for name in names if not name.startswith(TEMPORARY_PREFIX) and name != "lost+found"]

    def _temporary(self, token: str, kind: str = "") -> Path:
        return self.home / f"{TEMPORARY_PREFIX}{kind}{token}-{self.path.name}"

    def _leftovers(self, kind: str = "") -> list[Path]:
        pattern = re.compile(f"{re.escape(TEMPORARY_PREFIX + kind)}[0-9a-f]{{8}}-{re.escape(self.path.name)}")
        return [self.home / name for name in sorted(os.listdir(self.home)) if pattern.fullmatch(name)]


@contextmanager
def atomic_directory(destination: Path) -> Iterator[Path]:
    """Yields a temporary directory to fill, and moves it to `destination` when the block ends well.

    What stood at `destination` is replaced then, and kept until that moment. On any exception, Ctrl-C included,
    nothing new is left behind. See [`claim_destination`].

    Args:
        destination: The directory to make; its parents are made too.
    """
    with claim_destination(destination, overwrite=True) as claimed, claimed.staging() as temporary:
        yield temporary


@contextmanager
def claim_destination(destination: Path, *, overwrite: bool = False) -> Iterator[Destination]:
    """Claims a directory for this process until the block ends, and puts right what killed ones left there.

    Args:
        destination: The directory to write. A link is resolved, and the directory that it leads to is written.
        overwrite: Whether content may be replaced.

    Raises:
        ValueError: If another process has claimed it, it has content without `overwrite`, is no directory, or is a
            link to nothing.
        OSError: If it cannot be written.
    """
    claimed = Destination(resolve_destination(destination), overwrite)
    lock_path = claimed.home / f"{TEMPORARY_PREFIX}lock-{claimed.path.name}"
    made: list[Path] = []
    try:
        try:
            for parent in reversed(
                [parent for parent in (claimed.home, *claimed.home.parents) if not parent.exists()]
            ):
                parent.mkdir(exist_ok=True)
                made.insert(0, parent)
            taken = f"destination {destination} is being written by another run; wait for it or choose another one."
            lock = take_lock(lock_path, taken, _PATIENCE_SECONDS)
        except OSError as error:
            message = f"destination {destination} cannot be written ({error.strerror})"
            raise OSError(error.errno, message) from error
        try:
            claimed.recover(remove=lock is not None)
            claimed.check_content()
            yield claimed
        finally:
            if lock is not None:
                lock_path.unlink(missing_ok=True)
                lock.close()
    finally:
        for folder in made:
            with suppress(OSError):
                folder.rmdir()


def resolve_destination(destination: Path) -> Path:
    """The directory that a destination means, whether it exists or not.

    Raises:
        ValueError: If it is something else, or a link on the way leads to nothing.
    """
    absolute = destination.absolute()
    for path in (absolute, *absolute.parents):
        if path.is_symlink() and not path.exists():
            raise ValueError(
                f"destination {destination}: {path} is a link to {os.readlink(path)}, which does not exist; "
                "make that directory or remove the link."
            )
        if path.exists() and not path.is_dir():
            what = "is a file" if path.is_file() else "is no directory"
            named = f"destination {destination}" if path == absolute else f"destination {destination}: {path}"
            raise ValueError(f"{named} {what}; give a directory.")
    return Path(os.path.realpath(absolute))


def restore_hidden(folder: Path) -> set[Path]:
    """Restores what killed processes had put aside and not replaced, in a folder without a living one.

    Returns:
        What must be kept: put aside, with something else in its place.
    """
    kept: set[Path] = set()
    pattern = re.compile(rf"{re.escape(TEMPORARY_PREFIX)}old-(?P<token>[0-9a-f]{{8}})-(?P<name>.+)", re.DOTALL)
    for match in filter(None, map(pattern.fullmatch, sorted(os.listdir(folder)))):
        destination = Destination(folder / match["name"], overwrite=True)
        if destination.home == folder:
            kept |= destination.recover(remove=False)
    return kept


def remove_directory(directory: Path) -> None:
    """Removes a directory so that a kill half-way leaves nothing under its own name."""
    doomed = temporary_sibling(directory)
    os.replace(directory, doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def remove_leftovers(parent: Path) -> None:
    """Removes what killed processes left under temporary names in a directory, and restores what they put aside.

    Only for a process that holds the directory's lock, or nobody else writes to. Other programs have temporary files
    too: only names as this package makes them count.
    """
    if not parent.is_dir():
        return
    kept = restore_hidden(parent)
    leftovers = [path for path in parent.iterdir() if _TEMPORARY.match(path.name) and path not in kept]
    for path in leftovers:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    count = sum(not path.name.startswith(f"{TEMPORARY_PREFIX}lock-") for path in leftovers)
    if count:
        logger.warning("Removed %d temporary files or folders of a killed run from %s.", count, parent)


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


def exchange_names(first: Path, second: Path) -> bool:
    """Lets two paths of a file system change their names at once, where the system can.

    Returns:
        Whether it was done.
    """
    if sys.platform != "linux":
        return False
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except AttributeError:
        return False
    current_directory, exchange = -100, 2
    names = [os.fsencode(path) for path in (first, second)]
    return renameat2(current_directory, names[0], current_directory, names[1], exchange) == 0


def flush_tree(folder: Path) -> None:
    """Waits until everything below a folder is on the disk."""
    for path in folder.rglob("*"):
        if not path.is_symlink():
            flush_to_disk(path)
    flush_to_disk(folder)


def _must_stay(path: Path) -> bool:
    """True for a directory that can be filled but not replaced: a mount point, in use, or in a read-only folder."""
    return (
        os.path.ismount(path)
        or str(path) in _mount_points()
        or not os.access(path.parent, os.W_OK)
        or path == Path(os.path.realpath(os.curdir))
    )


def _mount_points() -> set[str]:
    """The system's list, where it has one: it has bind mounts too."""
    try:
        lines = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return set()
    return {re.sub(r"\\(\d{3})", lambda code: chr(int(code[1], 8)), line.split(" ")[4]) for line in lines}
