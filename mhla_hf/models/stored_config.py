# SPDX-License-Identifier: Apache-2.0
"""`config.json` of an MHLA model of diffusers, which a softmax class must not take for its own.

diffusers ignores entries and weights that a class does not know, with a warning. But an unknown `dtype` is handed to
the class's constructor, which refuses it. So one is written, for programs that never import this package; the warning
before the error shows its text. MHLA classes leave it out when they read the file. With this package imported, the
softmax classes hand MHLA checkpoints over (`mhla_hf.integrations.diffusers.loading`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


UNREADABLE_FOR_SOFTMAX = {"dtype": "MHLA weights: import mhla_hf before you load them"}
"""The entry by which softmax classes fail."""


def to_stored(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a model's configuration as it is written.

    Args:
        config: The configuration.
    """
    return {**config, **UNREADABLE_FOR_SOFTMAX}


def from_stored(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a configuration without what [`to_stored`] adds; files of earlier versions do not have it.

    Args:
        config: What was read.
    """
    return {name: value for name, value in config.items() if UNREADABLE_FOR_SOFTMAX.get(name) != value}
