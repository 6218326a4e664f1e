# SPDX-License-Identifier: Apache-2.0
"""The experiments by name, each imported when it is wanted."""

from __future__ import annotations

from importlib import import_module

from .experiment import Experiment


_MODULES: dict[str, str] = {
    "rank": "rank",
    "blocks": "blocks",
    "initialization": "initialization",
    "auxiliary": "auxiliary",
    "signatures": "signatures",
    "language": "language",
    "recall": "recall",
    "needle": "needle",
    "tails": "tails",
    "long_inputs": "long_inputs",
}


def experiment_names() -> list[str]:
    """Names of all experiments, in the order in which they run."""
    return list(_MODULES)


def find_experiment(name: str) -> Experiment:
    """The experiment with this name, `EXPERIMENT` of its module.

    Raises:
        ValueError: If there is none.
    """
    if name not in _MODULES:
        raise ValueError(f"{name!r} is not an experiment. Experiments: {', '.join(_MODULES)}.")
    return import_module(f".{_MODULES[name]}", __package__).EXPERIMENT
