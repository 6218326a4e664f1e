# SPDX-License-Identifier: Apache-2.0
"""Writing a converted directory: checks of the destination, streamed weights, and copies of other files."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tqdm.auto import tqdm

from ..models.directory import CONVERSION_RECORD, TRAINING_RECORD, ModelDirectory
from ..models.stub import LIBRARY, MODULE
from ..utils.destinations import Destination
from ..utils.files import list_files, write_staged_json
from ..utils.locations import PIPELINE_INDEX
from ..utils.messages import format_bytes
from ..utils.model_cards import CARD, carried_metadata
from ..utils.tensor_files import check_safetensors, write_shards
from .planning import ComponentPlan
from .report import ConversionReport, describe_file


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
