# SPDX-License-Identifier: Apache-2.0
"""`conversion.json`: the sources of a converted directory and how it was made, and advice on the next step."""

from __future__ import annotations

import math
import platform
import re
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from huggingface_hub.utils.sha import sha_fileobj

from .. import __version__
from ..config import MHLAConfig
from ..models.directory import CONVERSION_RECORD
from ..models.registry import MHLA_CLASSES
from ..utils.compat import installed_versions
from ..utils.files import write_staged_json


SCHEMA_VERSION = 2

_PACKAGES = ("mhla-hf", "torch", "diffusers", "transformers", "safetensors", "huggingface_hub")
_TRAINED_FAMILIES = ("wan", "sana", "dit")


@dataclass
class WeightSetReport:
    """One set of a model's weights: the only one, or a variant's.

    Attributes:
        variant: Part of the file names such as `fp16`; `None` for the main set.
        files: Weight files written.
        source_files: Weight files read, each with its size in bytes and SHA-256.
        copied_tensors: Number of tensors taken from the source.
        copied_parameters: Number of values in them.
        dtypes: Number of tensors written in each dtype.
        initialised_dtypes: Number of new tensors in each dtype.
    """

    variant: str | None = None
    files: list[str] = field(default_factory=list)
    source_files: dict[str, dict[str, Any]] = field(default_factory=dict)
    copied_tensors: int = 0
    copied_parameters: int = 0
    dtypes: dict[str, int] = field(default_factory=dict)
    initialised_dtypes: dict[str, int] = field(default_factory=dict)


@dataclass
class ComponentReport:
    """Conversion of one model.

    Attributes:
        source_class: Class that the source's weights were for.
        target_class: Class that the written weights are for.
        weight_sets: Weights read and written, by variant.
        initialised: New tensors by name: shape and the values they start from.
        mhla: The complete MHLA options.
        mhla_layers: Indices of the MHLA layers.
        num_layers: Number of layers. In a model with several towers the layers are counted through all of them, and
            `mhla` holds the options of each.
        dropped: Tensors of the source that were not taken over: the model does not know them, or they repeat a tensor
            they are tied to.
        warning: What the options make of the model that is rarely meant, such as a single block; empty without.
    """

    source_class: str
    target_class: str
    weight_sets: list[WeightSetReport] = field(default_factory=list)
    initialised: dict[str, dict[str, Any]] = field(default_factory=dict)
    mhla: dict[str, Any] = field(default_factory=dict)
    mhla_layers: list[int] = field(default_factory=list)
    num_layers: int = 0
    dropped: list[str] = field(default_factory=list)
    warning: str = ""

    @property
    def initialised_parameters(self) -> int:
        """Number of new values."""
        return sum(math.prod(entry["shape"]) for entry in self.initialised.values())


@dataclass
class ConversionReport:
    """Result of a conversion, written as `conversion.json`.

    Attributes:
        command: `"convert"` or `"import-official"`.
        destination: The directory written.
        source: Where the weights came from: `location`, the name of a directory or the id of a Hub repository; for
            repositories `revision` and `commit`, for directories `path` and `path_code`, by which it is found again on
            this machine and which are not pushed.
        components: Conversion of each model, by component name (`"transformer"`, or `"model"` for one of
            transformers).
        copied_files: Files taken over unchanged, relative to the destination.
        skipped_files: Files not taken over, since they hold the old weights in other formats.
        bytes_written: Size of the result.
        seconds: Time it took.
        source_card: Metadata of the source's model card that hold for the result as well, such as the licence.
    """

    command: str
    destination: Path
    source: dict[str, Any]
    components: dict[str, ComponentReport] = field(default_factory=dict)
    copied_files: list[str] = field(default_factory=list)
    skipped_files: list[str] = field(default_factory=list)
    bytes_written: int = 0
    seconds: float = 0.0
    source_card: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Returns plain JSON types."""
        versions = {"python": platform.python_version(), **installed_versions(*_PACKAGES)}
        # A checkout may be on the path without being installed.
        versions["mhla-hf"] = versions["mhla-hf"] or __version__
        return {
            "schema_version": SCHEMA_VERSION,
            "command": self.command,
            "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "source": self.source,
            "source_card": self.source_card,
            "components": {name: asdict(component) for name, component in self.components.items()},
            "copied_files": self.copied_files,
            "skipped_files": self.skipped_files,
            "bytes_written": self.bytes_written,
            "seconds": round(self.seconds, 2),
            "versions": {name: version for name, version in versions.items() if version is not None},
        }

    def save(self, folder: Path) -> None:
        """Write `conversion.json` into `folder`."""
        write_staged_json(folder / CONVERSION_RECORD, self.to_dict())


def advice(report: ConversionReport) -> str | None:
    """Returns the next step for the new parameters of a conversion; `None` if there are no new parameters."""
    fresh = {name: part for name, part in report.components.items() if part.initialised}
    if not fresh:
        return None
    names = {MHLA_CLASSES[part.target_class].name for part in fresh.values() if part.target_class in MHLA_CLASSES}
    trained = names.intersection(_TRAINED_FAMILIES)
    how = f"with mhla-hf train {trained.pop()}" if len(names) == 1 and trained else "the model"
    families = [(part, MHLA_CLASSES.get(part.target_class)) for part in fresh.values()]
    if all(
        family is not None and family.load_class().starts_as_upstream(MHLAConfig.from_dict(part.mhla))
        for part, family in families
    ):
        return f"The new parameters leave the model's output as it was. To make use of them, fine-tune {how}."
    original = report.source.get("path") or report.source.get("location")
    return (
        f"The new parameters are untrained. Run mhla-hf calibrate {report.destination}, or mhla-hf recover {original} "
        f"OUTPUT to convert, calibrate and train in one go, or fine-tune {how}."
    )


def describe_file(path: Path) -> dict[str, Any]:
    """Return the size and SHA-256 of a weight file.

    Hub downloads are links to blobs named by their SHA-256, which are not read again.
    """
    resolved = path.resolve()
    # Anybody can give a file such a name elsewhere.
    is_blob = resolved.parent.name == "blobs" and resolved.parents[1] / "snapshots" in path.parent.resolve().parents
    if path.is_symlink() and is_blob and re.fullmatch(r"[0-9a-f]{64}", resolved.name):
        digest = resolved.name
    else:
        with resolved.open("rb") as file:
            digest = sha_fileobj(file).hex()
    return {"bytes": resolved.stat().st_size, "sha256": digest}
