# SPDX-License-Identifier: Apache-2.0
"""What writing a large directory takes: checks of the destination before, copies and a progress bar meanwhile."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from .options import format_bytes


_COPY_CHUNK = 8 * 2**20


def check_destination(destination: Path, overwrite: bool, sources: Iterable[Path | None] = ()) -> None:
    """Refuses a destination that would destroy something.

    Args:
        destination: The directory to be written.
        overwrite: Whether an existing directory may be replaced.
        sources: What is read while the destination is written.

    Raises:
        ValueError: If it exists and is not empty without `overwrite`, is a file, or overlaps a source.
    """
    if destination.exists() and not destination.is_dir():
        raise ValueError(f"destination {destination} is a file; give a directory.")
    if destination.is_dir() and any(destination.iterdir()) and not overwrite:
        raise ValueError(
            f"destination {destination} is not empty; choose another one or pass overwrite=True (--overwrite)."
        )
    target = destination.resolve()
    for source in sources:
        if source is None:
            continue
        source = source.resolve()
        if target == source or target in source.parents or source in target.parents:
            raise ValueError(f"destination {destination} overlaps the source {source}.")


def check_space(destination: Path, needed: int) -> None:
    """Refuses to start when the disk cannot hold the result.

    Raises:
        ValueError: If less than `needed` bytes are free; the message names both figures.
    """
    folder = next(parent for parent in destination.absolute().parents if parent.exists())
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise ValueError(
            f"destination {destination} needs {format_bytes(needed)}, but {folder} has {format_bytes(free)} free."
        )


def copy_file(source: Path, target: Path, on_bytes: Callable[[int], None] | None = None) -> None:
    """Copies the contents of a file (links are followed), folders made as needed."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with source.open("rb") as reader, target.open("wb") as writer:
        while chunk := reader.read(_COPY_CHUNK):
            writer.write(chunk)
            if on_bytes is not None:
                on_bytes(len(chunk))


@contextmanager
def byte_progress(total: int, shown: bool) -> Iterator[tuple[Callable[[str], None], Callable[[int], None]]]:
    """A progress bar over bytes on standard error.

    Args:
        total: Bytes to do.
        shown: `False` for no bar.

    Yields:
        `(describe, advance)`: sets the text before the bar; adds bytes.
    """
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), disable=not shown) as progress:
        task = progress.add_task("", total=total)
        yield (
            lambda text: progress.update(task, description=text),
            lambda count: progress.update(task, advance=count),
        )
