# SPDX-License-Identifier: Apache-2.0
"""The transformers models that were tried with MHLA, and what became of them.

The list is made by `python -m tests.integrations.transformers.family_sweep`, which builds every model at tiny size and
checks each against itself. The tests of the same name keep it up to date.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path


DATA = Path(__file__).with_name("families.json")


@dataclass(frozen=True)
class TransformersFamily:
    """One architecture of transformers.

    Attributes:
        name: Its `model_type`.
        kind: `"language model"`, `"multi-modal"`, `"encoder"` or `"vision"`.
        note: What to know about it, the reason why it is refused, or an empty string.
        layers: Where the MHLA layers sit.
        rope: Where its rotary embeddings, if it has any, are by default; see [`mhla_hf.MHLAConfig`].
    """

    name: str
    kind: str
    note: str = ""
    layers: str = "self-attention `.mhla`"
    rope: str = "after_feature_map"


def _read(status: str) -> dict[str, TransformersFamily]:
    models = json.loads(DATA.read_text(encoding="utf-8"))["models"]
    entries = [entry for entry in models if entry["status"] == status]
    # Of a name that stands for several kinds, such as BERT as a decoder and as an encoder, the last counts.
    return {
        entry["name"]: TransformersFamily(entry["name"], entry["kind"], entry["note"], rope=entry["rope"])
        for entry in entries
    }


TRANSFORMERS_FAMILIES = _read("works")


def refused_families() -> dict[str, TransformersFamily]:
    """The architectures that have no MHLA version; their notes give the reasons."""
    return {name: family for name, family in _read("refused").items() if name not in TRANSFORMERS_FAMILIES}


def is_tested(model_type: str) -> bool:
    """Whether a `model_type` is among the tested ones."""
    return model_type in TRANSFORMERS_FAMILIES


def default_rope(model_type: str) -> str:
    """Where rotary embeddings are by default: before the feature map, unless it is known that they can be after it."""
    return TRANSFORMERS_FAMILIES[model_type].rope if is_tested(model_type) else "before_feature_map"
