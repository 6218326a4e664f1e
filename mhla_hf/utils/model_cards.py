# SPDX-License-Identifier: Apache-2.0
"""Metadata of model cards, and what a record keeps of the card of a source."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any


CARD = "README.md"
LICENSE_FIELDS = ("license", "license_name", "license_link")

_MAX_BYTES = 4 * 2**20


def read_card_metadata(path: Path) -> dict[str, Any]:
    """Returns the metadata of a model card; empty for a file that is absent, has none, or cannot be read."""
    import yaml
    from huggingface_hub import metadata_load

    try:
        if not path.is_file() or path.stat().st_size > _MAX_BYTES:
            return {}
        return metadata_load(path) or {}
    # Cards are prose that others wrote: what is wrong in one is no reason to stop.
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return {}


def license_in(metadata: dict[str, Any]) -> dict[str, str | list[str]]:
    """Returns the fields of a card's metadata that are about the licence; empty without a licence."""

    def is_text(value: Any) -> bool:
        return isinstance(value, str) and bool(value.strip())

    named = metadata.get("license")
    if not is_text(named) and not (isinstance(named, list) and named and all(is_text(entry) for entry in named)):
        return {}
    return {name: metadata[name] for name in LICENSE_FIELDS if name == "license" or is_text(metadata.get(name))}


def describe_card(path: Path) -> dict[str, Any]:
    """Returns the SHA-256 of a model card and the licence that it states, for the record of a conversion.

    By the hash a later step knows a card that is still the source's.
    """
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return {"sha256": digest, **license_in(read_card_metadata(path))}
