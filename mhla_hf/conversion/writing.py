# SPDX-License-Identifier: Apache-2.0
"""Writing a converted directory: checks of the destination, streamed weights, other files, and the record."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from .. import __version__
from ..config import MHLAConfig
from ..models.directory import CONVERSION_RECORD, TRAINING_RECORD, ModelDirectory
from ..models.registry import LIBRARY, MHLA_CLASSES, recovery_advice
from ..models.stub import STUB
from ..models.weight_files import STUB_MODULE
from ..utils.compat import installed_versions
from ..utils.destinations import Destination
from ..utils.files import list_files, write_staged_json
from ..utils.locations import EXPORT_FOLDERS, PIPELINE_INDEX
from ..utils.messages import format_bytes
from ..utils.model_cards import CARD, carried_metadata
from ..utils.tensor_files import check_safetensors, write_shards
from .planning import ComponentPlan, ComponentReport


SCHEMA_VERSION = 2

_PACKAGES = ("mhla-hf", "torch", "diffusers", "transformers", "safetensors", "huggingface_hub")


@dataclass
class ConversionReport:
    """Result of a conversion, written as `conversion.json`.

    Attributes:
        command: `"convert"` or `"import-official"`.
        destination: The directory written.
        source: Where the weights came from: `location`, the name of a directory or the id of a Hub repository; for
            repositories `revision` and `commit`, for directories `path` and `machine`, by which it is found again on
            this machine and which are not pushed.
        components: Conversion of each model, by component name (`"transformer"`, or `"model"` for one of
            transformers).
        copied_files: Files taken over unchanged, relative to the destination.
        bytes_written: Size of the result.
        source_card: Metadata of the source's model card that hold for the result as well, such as the licence.
    """

    command: str
    destination: Path
    source: dict[str, Any]
    components: dict[str, ComponentReport] = field(default_factory=dict)
    copied_files: list[str] = field(default_factory=list)
    bytes_written: int = 0
    source_card: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types."""
        versions = {"python": platform.python_version(), **installed_versions(*_PACKAGES)}
        # A checkout may be on the path without being installed.
        versions["mhla-hf"] = versions["mhla-hf"] or __version__
        record = {
            "schema_version": SCHEMA_VERSION,
            "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "versions": {name: version for name, version in versions.items() if version is not None},
            **asdict(self),
        }
        del record["destination"]
        return record


def write_result(
    source: ModelDirectory | None,
    plans: list[ComponentPlan],
    report: ConversionReport,
    destination: Destination,
    *,
    progress: bool,
    finish: Callable[[Path], None] | None = None,
) -> ConversionReport:
    """Write converted models and the other files of their directory, and return the report.

    Args:
        source: Origin of the other files; `None` writes a model directory with nothing else.
        plans: The models. In a pipeline each goes to its folder, otherwise the only one to the root.
        report: Completed here, and written as `conversion.json`.
        destination: The directory to write.
        progress: Show a progress bar.
        finish: Called with the complete directory before it moves to its place.

    Raises:
        ValueError: If the disk is too small, or others filled the destination meanwhile.
    """
    pipeline = None if source is None else source.index
    copies: dict[Path, Path] = {}
    if source is not None:
        copies = {path: source.root / path for path in other_files(source, {plan.name for plan in plans})}
        report.copied_files = [path.as_posix() for path in copies]
        report.source_card = carried_metadata(source.root)
    for path in copies.values():
        if path.suffix == ".safetensors":
            check_safetensors(path)
    copied_bytes = sum(path.stat().st_size for path in copies.values())
    written_bytes = sum(weights.nbytes for plan in plans for weights in plan.weights)
    total = copied_bytes + written_bytes
    bar = tqdm(total=total, unit="B", unit_scale=True, disable=not progress)
    with destination.staging() as staging, bar:
        if (free := shutil.disk_usage(staging).free) < total:
            raise ValueError(
                f"destination {destination.path} needs {format_bytes(total)}, but {format_bytes(free)} are free."
            )
        for path, original in copies.items():
            bar.set_description(f"copying {path.parts[0]}")
            (staging / path).parent.mkdir(parents=True, exist_ok=True)
            bar.update(Path(shutil.copyfile(original, staging / path)).stat().st_size)
        for plan in plans:
            folder = staging if pipeline is None else staging / plan.name
            bar.set_description(f"converting {plan.name}")
            for weights in plan.weights:
                write_shards(folder, weights.shards, bar.update)
                weights.report.files = list(weights.shards)
            write_staged_json(folder / "config.json", plan.config)
            if plan.config.get("_class_name") in MHLA_CLASSES:
                (folder / f"{STUB_MODULE}.py").write_text(STUB, encoding="utf-8")
            plan.report.weight_sets = [weights.report for weights in plan.weights]
            report.components[plan.name] = plan.report
        if pipeline is not None:
            names = {plan.name: plan.config["_class_name"] for plan in plans}
            replaced = {part: [LIBRARY if name in MHLA_CLASSES else "diffusers", name] for part, name in names.items()}
            write_staged_json(staging / PIPELINE_INDEX, {**pipeline, **replaced})
        bar.set_description("done")
        report.bytes_written = total
        write_staged_json(staging / CONVERSION_RECORD, report.to_dict())
        if finish is not None:
            finish(staging)
    return report


def other_files(source: ModelDirectory, replaced: set[str]) -> list[Path]:
    """List the files of a source to copy: all but the weights and configurations of replaced components.

    The model card is not copied: what it says of the original does not hold for the result. Nor are the old weights in
    formats that are not written.
    """
    components = [source.select(name) for name in replaced]
    # An MHLA directory that is turned back loses the record of its training and its loading code.
    stale = (TRAINING_RECORD, "report.json", f"{STUB_MODULE}.py", f"{LIBRARY}.py") if source.mhla_models else ()
    files: list[Path] = []
    for path in list_files(source.root):
        if path in (Path(PIPELINE_INDEX), Path(CONVERSION_RECORD), Path(CARD)) or path.name in stale:
            continue
        owner = next((item for item in components if item.folder == (source.root / path).parent), None)
        if owner is not None and (path.name == "config.json" or owner.names.match(path)):
            continue
        if path.parts[0] not in EXPORT_FOLDERS or not any(item.names.exports for item in components):
            files.append(path)
    return files


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


def advice(report: ConversionReport) -> str | None:
    """Return the next step for the new parameters of a conversion; `None` if there are no new parameters."""
    fresh = [part for part in report.components.values() if part.initialised]
    if not fresh:
        return None
    families = [MHLA_CLASSES.get(part.target_class) for part in fresh]
    is_same = all(
        family is not None and family.load_class().starts_as_upstream(MHLAConfig.from_dict(part.mhla))
        for part, family in zip(fresh, families, strict=True)
    )
    has_towers = families[0] is None and all(isinstance(own, dict) for own in fresh[0].mhla.values())
    said = recovery_advice(fresh[0].target_class, is_same=is_same, has_towers=has_towers)
    return f"The new parameters are untrained. {said}"
