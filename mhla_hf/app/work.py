# SPDX-License-Identifier: Apache-2.0
"""Work in a thread of its own that reports progress, and that ends when it is told to or takes too long."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple, TypeVar

from torch import nn


Result = TypeVar("Result")

_POLL_SECONDS = 0.2


class WorkStopped(Exception):
    """Raised inside work that is to end."""


class Progress(NamedTuple):
    """A stage of work: a title, and how much of it is done if that is known."""

    title: str
    done: int = 0
    total: int = 0


class Control:
    """What a running piece of work shares with those who wait for it.

    Attributes:
        progress: What it does at present.
    """

    def __init__(self) -> None:
        self.progress = Progress("Waiting for the machine")
        self._stopped = threading.Event()
        self._limit: float = 0
        self._deadline: float | None = None

    def stop(self) -> None:
        """Makes the work end at its next check."""
        self._stopped.set()

    def limit(self, seconds: float) -> None:
        """Sets the time from now on after which a check fails."""
        self._limit, self._deadline = seconds, time.monotonic() + seconds

    def check(self) -> None:
        """Ends the work if it is to end; called often by the work itself.

        Raises:
            WorkStopped: If it was stopped.
            ValueError: If its time is over.
        """
        if self._stopped.is_set():
            raise WorkStopped
        if self._deadline is not None and time.monotonic() > self._deadline:
            raise ValueError(f"stopped after {self._limit:g} seconds, the limit here: ask for something smaller.")

    @contextmanager
    def checked_by(self, modules: Iterable[Any]) -> Iterator[None]:
        """A context in which models check before each of their layers; what is no model is passed over."""
        layers = {
            layer
            for module in modules
            if isinstance(module, nn.Module)
            for part in module.modules()
            if isinstance(part, nn.ModuleList)
            for layer in part
        }
        with ExitStack() as hooks:
            for layer in layers:
                hooks.callback(layer.register_forward_pre_hook(lambda *_: self.check()).remove)
            yield


def follow(work: Callable[[Control], Result], control: Control) -> Generator[Progress, None, Result]:
    """Runs work in a thread, yields its progress several times a second, and returns its result.

    Closing the generator stops the work, at its next check.

    Args:
        work: Called with the control.
        control: The control.

    Raises:
        Exception: What the work raises.
    """
    results: list[Result] = []
    errors: list[BaseException] = []
    finished = threading.Event()

    def run() -> None:
        try:
            results.append(work(control))
        except BaseException as error:  # Raised again by who waits.
            errors.append(error)
        finally:
            finished.set()

    # A daemon: a server that is stopped does not wait for the work.
    threading.Thread(target=run, name="mhla-hf-app", daemon=True).start()
    try:
        while not finished.wait(_POLL_SECONDS):
            yield control.progress
    finally:
        control.stop()
    if errors:
        raise errors[0]
    return results[0]
