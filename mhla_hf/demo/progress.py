# SPDX-License-Identifier: Apache-2.0
"""The demo's progress display: one line per stage, with a bar where the length is known."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Hide the loading bars of diffusers and transformers, which would break up the demo's own display."""
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


class StageDisplay:
    """The line of one stage.

    Args:
        progress: The display; None shows nothing.
        title: What happens.
        total: Units of work; None if unknown.
    """

    def __init__(self, progress: Progress | None, title: str, total: int | None) -> None:
        self.progress = progress
        self.task = progress.add_task(title, total=total, note="") if progress is not None else None

    def advance(self, number: int) -> None:
        """Add units of work done."""
        if self.progress is not None and self.task is not None:
            self.progress.advance(self.task, number)

    def reached(self, done: int, note: str = "") -> None:
        """Set the units of work done, and a note behind the bar."""
        if self.progress is not None and self.task is not None:
            self.progress.update(self.task, completed=done, note=note)

    def note(self, text: str) -> None:
        """Set the note alone."""
        if self.progress is not None and self.task is not None:
            self.progress.update(self.task, note=text)


class DemoProgress:
    """Shows stages one below the other on standard error; a context manager.

    Args:
        shown: False shows nothing.
    """

    def __init__(self, shown: bool = True) -> None:
        self.console = Console(stderr=True, quiet=not shown)
        self.progress: Progress | None = None
        if shown:
            self.progress = Progress(
                SpinnerColumn(finished_text="[green]✓[/]"),
                TextColumn("{task.description}"),
                BarColumn(bar_width=24),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("{task.fields[note]}"),
                console=self.console,
            )

    def __enter__(self) -> DemoProgress:
        if self.progress is not None:
            self.progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.progress is not None:
            self.progress.stop()

    @contextmanager
    def stage(self, title: str, total: int | None = None) -> Iterator[StageDisplay]:
        """Show one stage while the block runs."""
        display = StageDisplay(self.progress, title, total)
        began = time.perf_counter()
        yield display
        if self.progress is not None and display.task is not None:
            total = total or 1
            self.progress.update(display.task, total=total, completed=total)
            # A terminal redraws the bars; a log file gets a line per finished stage.
            if not self.console.is_terminal:
                self.console.print(f"{title}: {time.perf_counter() - began:.1f} s", highlight=False)
