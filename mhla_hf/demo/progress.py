# SPDX-License-Identifier: Apache-2.0
"""Progress display of the demo: one line per stage, with a bar where the length is known."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Hides the loading bars of diffusers and transformers, which would break up the demo's own display."""
    from diffusers.utils import logging as diffusers_logging
    from transformers.utils import logging as transformers_logging

    shown = [library for library in (diffusers_logging, transformers_logging) if library.is_progress_bar_enabled()]
    for library in shown:
        library.disable_progress_bar()
    try:
        yield
    finally:
        for library in shown:
            library.enable_progress_bar()


@dataclass(frozen=True)
class Stage:
    """The line of one stage."""

    progress: Progress
    task: TaskID

    def advance(self, number: int) -> None:
        """Adds finished units of work."""
        self.progress.advance(self.task, number)

    def note(self, text: str) -> None:
        """Sets the text behind the bar."""
        self.progress.update(self.task, note=text)


class DemoProgress(Progress):
    """Stages, one below the other, on standard error; a context manager.

    Args:
        shown: False shows nothing.
    """

    def __init__(self, shown: bool = True) -> None:
        super().__init__(
            SpinnerColumn(finished_text="[green]✓[/]"),
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[note]}"),
            console=Console(stderr=True, quiet=not shown),
            disable=not shown,
        )

    @contextmanager
    def stage(self, title: str, total: int | None = None) -> Iterator[Stage]:
        """Shows one stage while the block runs."""
        stage = Stage(self, self.add_task(title, total=total, note=""))
        began = time.perf_counter()
        yield stage
        self.update(stage.task, total=total or 1, completed=total or 1)
        # A terminal redraws the bars; a log file gets a line per finished stage.
        if not self.console.is_terminal:
            self.console.print(f"{title}: {time.perf_counter() - began:.1f} s", highlight=False)
