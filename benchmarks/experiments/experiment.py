# SPDX-License-Identifier: Apache-2.0
"""What an experiment consists of."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any


SETTINGS = ("cpu", "gpu", "smoke")
"""`cpu` takes at most 15 minutes on two cores; `gpu` is larger; `smoke` shows in seconds that everything runs."""


@dataclass(frozen=True)
class Case:
    """One training or measurement, which runs in a process of its own.

    Cases with the same function and options are run once, whatever experiments they belong to.

    Args:
        function: Function to call, `"module:name"`. It takes the options as keyword arguments and a
            `torch.device` as `device`, and returns figures that are ready for JSON. If it has an argument `work`, it
            gets the directory of the cases' results too, for data that cases share.
        options: Arguments ready for JSON.
    """

    function: str
    options: Mapping[str, Any]

    @property
    def key(self) -> str:
        """Name of the stored result."""
        text = json.dumps([self.function, dict(self.options)], sort_keys=True)
        return f"{self.function.rpartition(':')[2]}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"

    def run(self, device: Any, work: Path) -> dict[str, Any]:
        """Calls the function."""
        module, _, name = self.function.partition(":")
        function = getattr(import_module(module), name)
        shared = {"work": work} if "work" in inspect.signature(function).parameters else {}
        return function(**self.options, **shared, device=device)


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """An experiment, and what is made of its results.

    Args:
        title: Title of its plot and of its section in the documentation.
        cases: Gives the cases of a setting by label.
        summarize: Turns the results by label into what the report's JSON file holds under `summary`.
        plot: Draws a report, as `runner.run_experiment` returns it, into a PNG file.
        tables: Gives Markdown tables of a report by the name of their section in `docs/results`.
    """

    title: str
    cases: Callable[[str], Mapping[str, Case]]
    summarize: Callable[[Mapping[str, Mapping[str, Any]]], Mapping[str, Any]]
    plot: Callable[[Mapping[str, Any], Path], None]
    tables: Callable[[Mapping[str, Any]], Mapping[str, str]]
