# SPDX-License-Identifier: Apache-2.0
"""What writing a large directory takes: checks of the destination before, copies and a progress bar meanwhile."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from ..utils.destinations import Destination
from .options import format_bytes


_COPY_CHUNK = 8 * 2**20


def check_apart(destination: Destination, *sources: Path | None) -> None:
    """Refuses to write where something is read, or to replace a directory that holds more than a model.

    Args:
        destination: What is to be written.
        *sources: What is read meanwhile.

    Raises:
        ValueError: If the destination overlaps a source, or is to be replaced although the home or working directory
            is in it.
    """
    target = destination.path
    for source in sources:
        if source is None:
            continue
        source = source.resolve()
        if target == source or target in source.parents or source in target.parents:
            raise ValueError(f"destination {target} overlaps the source {source}.")
    home, working = Path(os.path.expanduser("~")).resolve(), Path(os.path.realpath(os.curdir))
    if destination.overwrite and target in (home, *home.parents, *working.parents):
        raise ValueError(f"destination {target} has your home or working directory in it and is not overwritten.")


def check_space(destination: Path, needed: int) -> None:
    """Refuses to start when the disk cannot hold the result.

    Raises:
        ValueError: If less than `needed` bytes are free; the message names both figures.
    """
    absolute = destination.absolute()
    folder = next(path for path in (absolute, *absolute.parents) if path.exists())
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
