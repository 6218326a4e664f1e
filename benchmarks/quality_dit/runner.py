# SPDX-License-Identifier: Apache-2.0
"""The whole comparison. A stopped run resumes from the finished trainings in its work directory."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from safetensors.torch import load_file, save_file

from mhla_hf.utils.destinations import RunFolder, atomic_directory
from mhla_hf.utils.files import atomic_file, read_json, write_json
from mhla_hf.utils.machine import choose_device, machine_facts, synchronize

from .data import NUM_CLASSES, Digits, load_digits
from .fidelity import (
    DigitClassifier,
    FeatureStatistics,
    accuracy,
    feature_statistics,
    frechet_distance,
    nearest_distance,
    train_classifier,
)
from .gated import VARIANT as GATED
from .gated import can_scan
from .models import make_model
from .options import VARIANTS, QualityOptions
from .report import curve, plot_report, plot_samples, summarize
from .training import held_out_losses, sample, train


GRID_ROWS = 2
"""Images of each class that the grid of samples shows."""

_RESULT, _GRID, _CLASSIFIER, _OPTIONS = "result.json", "grid.safetensors", "classifier.safetensors", "options.json"


@dataclass(frozen=True)
class Measurement:
    """The report, ready for JSON, and images `[N, 1, S, S]` by variant, with real digits under `digits`."""

    report: dict[str, Any]
    samples: dict[str, torch.Tensor]


@dataclass(frozen=True)
class _Reference:
    """Data, classifier and statistics that every run is evaluated with."""

    train: Digits
    held_out: Digits
    classifier: DigitClassifier
    statistics: FeatureStatistics
    nearest_distance: float


def measure_quality(
    options: QualityOptions,
    work_directory: Path,
    *,
    setting: str = "own",
    device: str | None = None,
    jobs: int = 1,
    show_progress: bool = False,
) -> Measurement:
    """Trains and evaluates every variant with every seed; gated linear attention too, where its kernels run.

    Args:
        options: Options of the comparison.
        work_directory: Directory of finished trainings; those that exist are not repeated.
        setting: Name of the options in the report.
        device: Device to run on; None for a GPU if there is one.
        jobs: Trainings at a time; several are processes of their own, each with a share of the cores.
        show_progress: Show bars on standard error.

    Returns:
        The report has `machine`, `options`, `classifier` (its held-out accuracy, and the Fréchet distance of the
        held-out from the training digits, which no model is expected to beat), `models`, `runs` (a row for each
        variant and seed, with its own machine), and `summary` and `differences` as `summarize` returns them.

    Raises:
        ValueError: If the work directory holds trainings with other options or is in use, the device is unknown, or
            `jobs` is below 1.
        FloatingPointError: If a loss is not finite.
    """
    if jobs < 1:
        raise ValueError(f"jobs={jobs} must be at least 1.")
    target = choose_device(device)
    # Other seeds may be added to it later.
    identity = {name: value for name, value in asdict(options).items() if name != "seeds"}
    with RunFolder(work_directory, _OPTIONS).claimed(identity):
        variants = (*VARIANTS, GATED) if can_scan(target) else VARIANTS
        wanted = [(variant, seed) for seed in options.seeds for variant in variants]
        pending = [pair for pair in wanted if not _directory(work_directory, *pair).is_dir()]
        with Progress(console=Console(stderr=True), disable=not show_progress) as progress:
            task = progress.add_task("classifier", total=1)
            reference = _make_reference(options, work_directory)
            progress.advance(task)
            if jobs > 1:
                task = progress.add_task("trainings", total=len(wanted), completed=len(wanted) - len(pending))
                _run_in_processes(pending, work_directory, options, target, jobs, partial(progress.advance, task))
            for variant, seed in pending if jobs == 1 else []:
                task = progress.add_task(f"{variant}, seed {seed}", total=options.steps)
                _run(work_directory, options, variant, seed, reference, target, partial(progress.advance, task))
        directories = [_directory(work_directory, *pair) for pair in wanted]
        what = "the result of a training (remove its directory to repeat it):"
        runs = [read_json(directory / _RESULT, what) for directory in directories]
        held_out = reference.held_out
        floor = frechet_distance(feature_statistics(reference.classifier, held_out.images), reference.statistics)
        report = {
            "benchmark": "quality_dit",
            "setting": setting,
            "machine": machine_facts(target),
            "options": asdict(options),
            "data": {"train": len(reference.train), "held_out": len(held_out)},
            "classifier": {
                "held_out_accuracy": accuracy(reference.classifier, held_out.images, held_out.labels),
                "frechet_distance_of_held_out_digits": floor,
            },
            "runs": runs,
            **summarize(runs),
        }
        samples = {"digits": held_out.images[_grid_indices(held_out.labels)]}
        for variant in variants:
            file = _directory(work_directory, variant, options.seeds[0]) / _GRID
            samples[variant] = load_file(file)["images"].float() / 127.5 - 1
        return Measurement(report, samples)


def write_measurement(measurement: Measurement, directory: Path, stem: str) -> list[Path]:
    """Writes `stem.json`, `stem.png` (losses and distances) and `stem_samples.png`; returns their paths."""
    paths = [directory / f"{stem}.json", directory / f"{stem}.png", directory / f"{stem}_samples.png"]
    directory.mkdir(parents=True, exist_ok=True)
    write_json(paths[0], measurement.report)
    plot_report(paths[1], measurement.report)
    plot_samples(paths[2], measurement.samples, columns=NUM_CLASSES)
    return paths


def _run_in_processes(
    pairs: list[tuple[str, int]],
    work_directory: Path,
    options: QualityOptions,
    device: torch.device,
    jobs: int,
    advance: Callable[[], None],
) -> None:
    threads = max(1, (os.cpu_count() or 1) // jobs)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, context, initializer=torch.set_num_threads, initargs=(threads,)) as pool:
        runs = [pool.submit(_run, work_directory, options, *pair, None, device) for pair in pairs]
        try:
            for run in as_completed(runs):
                run.result()
                advance()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _run(
    work_directory: Path,
    options: QualityOptions,
    variant: str,
    seed: int,
    reference: _Reference | None,
    device: torch.device,
    advance: Callable[[int], None] = lambda _: None,
) -> None:
    reference = reference or _make_reference(options, work_directory)
    model = make_model(options, variant, seed).to(device)
    start, start_cpu = time.perf_counter(), time.process_time()
    losses = train(model, reference.train, options, seed, advance)
    synchronize(device)
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - start_cpu
    labels = reference.held_out.labels
    images = sample(model, labels, options)
    statistics = feature_statistics(reference.classifier, images)
    result = {
        "variant": variant,
        "seed": seed,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "mhla": options.mhla(variant) if variant in VARIANTS else None,
        **held_out_losses(model, reference.held_out, options),
        "frechet_distance": frechet_distance(statistics, reference.statistics),
        "class_accuracy": accuracy(reference.classifier, images, labels),
        "nearest_distance": nearest_distance(images, reference.train.images) / reference.nearest_distance,
        "training_seconds": seconds,
        "training_cpu_seconds": cpu_seconds,
        "curve": curve(losses),
        "machine": machine_facts(device),
    }
    classes = torch.arange(NUM_CLASSES).repeat(GRID_ROWS)
    grid = sample(model, classes, options, guidance_scale=options.guidance_scale, name="grid")
    with atomic_directory(_directory(work_directory, variant, seed)) as temporary:
        save_file({"images": ((grid + 1) * 127.5).round().to(torch.uint8)}, temporary / _GRID)
        write_json(temporary / _RESULT, result)


def _make_reference(options: QualityOptions, work_directory: Path) -> _Reference:
    digits = load_digits("train", options.image_size)
    file = work_directory / _CLASSIFIER
    if file.is_file():
        classifier = DigitClassifier().eval().requires_grad_(False)
        classifier.load_state_dict(load_file(file))
    else:
        classifier = train_classifier(digits)
        with atomic_file(file) as temporary:
            save_file(classifier.state_dict(), temporary)
    statistics = feature_statistics(classifier, digits.images)
    held_out = load_digits("held_out", options.image_size)
    return _Reference(digits, held_out, classifier, statistics, nearest_distance(held_out.images, digits.images))


def _directory(work_directory: Path, variant: str, seed: int) -> Path:
    return work_directory / f"{variant}-{seed}"


def _grid_indices(labels: torch.Tensor) -> list[int]:
    """Of each class the first images, ordered like the grid of samples."""
    places = [(labels == digit).nonzero()[:GRID_ROWS, 0].tolist() for digit in range(NUM_CLASSES)]
    return [place[row] for row in range(GRID_ROWS) for place in places]
