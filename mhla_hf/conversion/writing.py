# SPDX-License-Identifier: Apache-2.0
"""Writing a converted directory: checks of the destination, streamed weights, other files, and the record."""

from __future__ import annotations

import os
import platform
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from huggingface_hub.utils.sha import sha_fileobj
from tqdm.auto import tqdm

from .. import __version__
from ..config import MHLAConfig
from ..models.directory import CONVERSION_RECORD, TRAINING_RECORD, ModelDirectory
from ..models.registry import MHLA_CLASSES
from ..models.stub import LIBRARY, MODULE
from ..utils.compat import installed_versions
from ..utils.destinations import Destination
from ..utils.files import list_files, write_staged_json
from ..utils.locations import PIPELINE_INDEX
from ..utils.messages import format_bytes
from ..utils.model_cards import CARD, carried_metadata
from ..utils.tensor_files import check_safetensors, write_shards
from .planning import ComponentPlan, ComponentReport


SCHEMA_VERSION = 2

_PACKAGES = ("mhla-hf", "torch", "diffusers", "transformers", "safetensors", "huggingface_hub")
_TRAINED_FAMILIES = ("wan", "sana", "dit")


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
        """Return plain JSON types."""
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


def write_result(
    source: ModelDirectory | None,
    plans: list[ComponentPlan],
    report: ConversionReport,
    destination: Destination,
    *,
    progress: bool,
    started: float,
    finish: Callable[[Path], None] | None = None,
) -> None:
    """Write converted models and the other files of their directory.

    Args:
        source: Origin of the other files; `None` writes a model directory with nothing else.
        plans: The models. In a pipeline each goes to its folder, otherwise the only one to the root.
        report: Completed here, and written as `conversion.json`.
        destination: The directory to write.
        progress: Show a progress bar.
        started: `time.monotonic()` of the beginning.
        finish: Called with the complete directory before it moves to its place.

    Raises:
        ValueError: If the disk is too small, or others filled the destination meanwhile.
    """
    pipeline = None if source is None else source.index
    copies: dict[Path, Path] = {}
    if source is not None:
        others, skipped = other_files(source, {plan.name for plan in plans})
        copies = {path: source.root / path for path in others}
        report.copied_files = [path.as_posix() for path in others]
        report.skipped_files = [path.as_posix() for path in skipped]
        report.source_card = carried_metadata(source.root)
    for path in copies.values():
        if path.suffix == ".safetensors":
            check_safetensors(path)
    copied_bytes = sum(path.stat().st_size for path in copies.values())
    written_bytes = sum(weights.nbytes for plan in plans for weights in plan.weights)
    check_space(destination.path, copied_bytes + written_bytes)
    total = copied_bytes + written_bytes
    with destination.staging() as staging, byte_progress(total, progress) as (describe, advance):
        for path, original in copies.items():
            describe(f"copying {path.parts[0]}")
            (staging / path).parent.mkdir(parents=True, exist_ok=True)
            advance(Path(shutil.copyfile(original, staging / path)).stat().st_size)
        for plan in plans:
            folder = staging if pipeline is None else staging / plan.name
            describe(f"converting {plan.name}")
            for weights in plan.weights:
                write_shards(folder, weights.shards, advance)
                weights.report.files = list(weights.shards)
            write_staged_json(folder / "config.json", plan.config)
            describe(f"hashing {plan.name}")
            for weights in plan.weights:
                weights.report.source_files = {path.name: describe_file(path) for path in weights.sources}
            plan.report.weight_sets = [weights.report for weights in plan.weights]
            report.components[plan.name] = plan.report
        if pipeline is not None:
            replaced = {plan.name: ["diffusers", plan.config["_class_name"]] for plan in plans}
            write_staged_json(staging / PIPELINE_INDEX, {**pipeline, **replaced})
        describe("done")
        report.bytes_written = copied_bytes + written_bytes
        report.seconds = time.monotonic() - started
        report.save(staging)
        if finish is not None:
            finish(staging)


def other_files(source: ModelDirectory, replaced: set[str]) -> tuple[list[Path], list[Path]]:
    """List the files of a source to copy: all but the weights and configurations of replaced components.

    The model card is not copied: what it says of the original does not hold for the result.

    Returns:
        Those, and the files left out since they hold the old weights in formats that are not written.
    """
    components = [source.select(name) for name in replaced]
    # Of an MHLA directory that is turned back: what was done to it, and how to load it.
    stale = (TRAINING_RECORD, "report.json", f"{MODULE}.py", f"{LIBRARY}.py") if source.mhla_models else ()
    files: list[Path] = []
    skipped: list[Path] = []
    for path in list_files(source.root):
        if path in (Path(PIPELINE_INDEX), Path(CONVERSION_RECORD), Path(CARD)) or path.name in stale:
            continue
        owner = next((item for item in components if item.folder == (source.root / path).parent), None)
        if owner is not None and path.name == "config.json":
            continue
        if owner is not None and owner.names.match(path):
            if path.suffix not in (".safetensors", ".json") or not path.name.startswith(owner.names.stem):
                skipped.append(path)
            continue
        exported = [item for item in components if item.names.is_export(path)]
        (skipped if exported else files).append(path)
    return files, skipped


def check_apart(destination: Destination, *sources: Path | None) -> None:
    """Refuse to write where something is read, or to replace a directory that holds more than a model.

    Raises:
        ValueError: If the destination overlaps a source, or is to be replaced although the home or working directory
            is in it.
    """
    target = destination.path
    for source in (path.resolve() for path in sources if path is not None and path.exists()):
        if target == source or target in source.parents or source in target.parents:
            raise ValueError(f"destination {target} overlaps the source {source}.")
    home, working = Path(os.path.expanduser("~")).resolve(), Path(os.path.realpath(os.curdir))
    if destination.overwrite and target in (home, *home.parents, *working.parents):
        raise ValueError(f"destination {target} has your home or working directory in it and is not overwritten.")


def check_space(destination: Path, needed: int) -> None:
    """Refuse to start when the disk cannot hold the result.

    Raises:
        ValueError: If less than `needed` bytes are free; the message names both figures.
    """
    absolute = destination.absolute()
    folder = next(path for path in (absolute, *absolute.parents) if path.exists())
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise ValueError(
            f"destination {destination} needs {format_bytes(needed)}, but {folder} has {format_bytes(free)} free."
        )


@contextmanager
def byte_progress(total: int, shown: bool) -> Iterator[tuple[Callable[[str], None], Callable[[int], None]]]:
    """Show a progress bar over a total of bytes on standard error.

    Yields:
        `(describe, advance)`: sets the text before the bar; adds bytes.
    """
    with tqdm(total=total, unit="B", unit_scale=True, disable=not shown) as bar:
        yield bar.set_description, bar.update


def advice(report: ConversionReport) -> str | None:
    """Return the next step for the new parameters of a conversion; `None` if there are no new parameters."""
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
