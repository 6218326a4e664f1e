# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C, SIGTERM and launchers that die: the step ends, a checkpoint is saved, and the run says how to resume."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from types import FrameType
from typing import Any


# Set by `accelerate launch` and torchrun.
_LAUNCHER_MARKS = ("ACCELERATE_MIXED_PRECISION", "TORCHELASTIC_RUN_ID")
_SET_PARENT_DEATH_SIGNAL = 1
# One Ctrl-C can arrive twice: from the terminal, and from a launcher that hands it on.
_ONE_PRESS_SECONDS = 0.2


class TrainingStopped(KeyboardInterrupt):
    """A run that a signal has ended after a step.

    Args:
        message: State of the run and how to resume it; empty in all processes but the first.
        number: The signal.

    Attributes:
        exit_code: Exit code of a command, 130 after Ctrl-C.
    """

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message)
        self.exit_code = 128 + number


class StopSignals:
    """Remembers Ctrl-C and SIGTERM, for the loop to stop after the step; a context manager.

    A second Ctrl-C raises `KeyboardInterrupt` at once. A signal that the process ignores stays ignored. Outside the
    main thread, where Python handles no signals, nothing changes.

    Attributes:
        received: The signal received; None before that.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self._time = 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                # A script's `... &` ignores the Ctrl-C that is meant for what runs in the foreground.
                if signal.getsignal(number) != signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._remember)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            # A handler that was not set from Python cannot be put back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.received is None:
            self.received, self._time = number, now
            # A launcher that the same signal ends must not take this process along.
            _set_parent_death_signal(0)
        elif number == signal.SIGINT and now - self._time > _ONE_PRESS_SECONDS:
            raise KeyboardInterrupt


def end_with_launcher() -> None:
    """Has this process stop, as by SIGTERM, when the launcher that started it dies, and save a last checkpoint.

    A launcher that is killed leaves its processes behind otherwise. Does nothing outside a launcher.
    """
    _set_parent_death_signal(signal.SIGTERM)


def _set_parent_death_signal(number: int) -> None:
    """Has Linux send a launched process a signal when its parent dies, or none for 0; other systems cannot."""
    if sys.platform.startswith("linux") and any(name in os.environ for name in _LAUNCHER_MARKS):
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, number)
