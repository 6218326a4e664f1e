# SPDX-License-Identifier: Apache-2.0
"""`recover`: convert, calibrate, match and distill a model in one resumable run."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .. import __version__
from ..conversion import convert_pretrained
from ..training.config import DEVICES
from ..training.data.batch_sources import BatchSource
from ..training.matching.layers import find_projections, mhla_layers, on_device
from ..training.matching.teacher import SharedTeacher
from ..training.stopping import TrainingStopped
from ..utils.files import write_json
from ..utils.messages import shorten_text
from .defaults import default_recipe
from .quality import Quality
from .recipes import Recipe, load_recipe, parse_keep
from .recovery_data import DATA_FREE, GENERATED, DigitVideos, open_data
from .recovery_stages import StageRun, changed_parameters, run_stage
from .report import REPORT, TITLES, write_plot
from .selection import select_layers
from .subjects import Subject, find_subject, load_converted, write_recovered
from .work_folder import RESULT, WorkFolder


logger = logging.getLogger(__name__)

CONVERTED = "converted"
MakeSource = Callable[[nn.Module], BatchSource]
_SAVE_EVERY = 100
# What layers are tried on when they are to be chosen.
_TRIAL_BATCHES, _TRIAL_BATCH_SIZE = 8, 4


@dataclass
class RecoveryReport:
    """What a recovery did; `report.json` holds the same.

    Attributes:
        output: The directory written.
        family: See `recipes.FAMILIES`.
        figures: Quality on held-out data: of the original under `softmax`, after the conversion under `converted`,
            and after each stage under its name. The main figure comes last, or is `cosine`.
        seconds: Of each stage: `seconds` by the clock and `cpu_seconds`.
        stages: What each stage says of itself.
        data: What was trained on.
        recipe: The recipe that was followed.
    """

    output: Path
    family: str
    figures: dict[str, dict[str, float]] = field(default_factory=dict)
    seconds: dict[str, dict[str, float]] = field(default_factory=dict)
    stages: dict[str, dict[str, Any]] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    recipe: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "family": self.family,
            "figures": self.figures,
            "seconds": self.seconds,
            "stages": self.stages,
            "data": self.data,
            "recipe": self.recipe,
            "version": __version__,
        }


def recover(
    source: str | Path,
    output: str | Path,
    data: str | Path | MakeSource | None = None,
    *,
    prompts: str | Path | None = None,
    recipe: str | Path | None = None,
    preset: str | None = None,
    layers: str | None = None,
    keep: str | None = None,
    window: str | None = None,
    budget: float | None = None,
    stages: Sequence[str] | None = None,
    changes: Mapping[str, Any] | None = None,
    component: str | None = None,
    resume: bool = False,
    seed: int = 0,
    device: str = "auto",
    save_every: int = _SAVE_EVERY,
    progress: bool = True,
    digit_videos: DigitVideos | None = None,
    on_stage: Callable[[str], None] | None = None,
    **hub: Any,
) -> RecoveryReport:
    """Converts a model to MHLA and makes it as good as the original: calibration, matching, distillation.

    Everything that can be wrong is checked before weights are loaded. Each stage leaves its result in `output/work`,
    so a run that was killed goes on with `resume=True` where it was, and ends where it would have ended. At the end
    `output` is a directory for `from_pretrained`, with `conversion.json`, `report.json` and a plot.

    Args:
        source: A pipeline of diffusers or a model of transformers; a directory or a Hub id.
        output: The directory to make.
        data: For diffusion models a folder of videos or pictures with captions or classes, as for `mhla-hf train`; for
            text a folder of .txt, .md, .rst and .py files, a JSONL file or the id of a data set; for vision models a
            folder of pictures; `digits` where scikit-learn's scans will do; `generated` for samples that the original
            makes. `None` is `generated` for DiT, PixArt and language models, and for others with `prompts`. In a
            program also a function from the converted model to a
            [`BatchSource`][mhla_hf.training.data.batch_sources.BatchSource].
        prompts: Text file with one prompt a line, for samples that the original makes.
        recipe: A YAML file, or the name of a recipe that comes with the package. `None` takes the default of the
            model's family.
        preset: `paper` for the settings of arXiv 2601.07832, in place of a recipe.
        layers: Which layers become MHLA, in place of the recipe's.
        keep: Share of the layers that stay softmax, such as `25%`, those that are worst to replace; in place of
            `layers`.
        window: Softmax window beside MHLA: `block`, `adjacent` or `cross`.
        budget: That many times the steps of the recipe in every stage.
        stages: Only these stages of `calibrate`, `match`, `distill` and `finetune`.
        changes: Values of the recipe by their path, such as `{"match.steps": 1000}`.
        component: Which transformer of a pipeline; the others are copied.
        resume: Go on with the run in `output`.
        seed: Of everything random.
        device: `auto` takes the GPU if there is one, or `cpu`.
        save_every: Steps between checkpoints.
        progress: Show progress.
        digit_videos: Makes moving digits, for `data="digits"` with Wan.
        on_stage: Called with the name of each stage when it begins.
        **hub: `revision`, `token`, `cache_dir` and `local_files_only` for sources on the Hub.

    Returns:
        The figures, stage by stage.

    Raises:
        ValueError: If an option, the recipe, the data or the source is wrong, or `output` holds another run.
        FloatingPointError: If a loss is no longer finite; the message names step, batch and last good checkpoint.
        TrainingStopped: After Ctrl-C or SIGTERM; what was done is kept.
    """
    if device not in DEVICES:
        raise ValueError(f"device must be one of {', '.join(DEVICES)}, got {device!r:.100}")
    given = load_recipe(recipe) if recipe is not None else None
    if given is not None and preset is not None:
        raise ValueError("recipe and preset are both given; give one of them")
    subject = find_subject(source, component, **hub)
    chosen = _with_options(
        given or default_recipe(subject.family, preset, window),
        subject,
        layers=layers,
        keep=keep,
        window=None if given is None else window,
        budget=budget,
        stages=stages,
        changes=changes or {},
    )
    if data is None and chosen.stages() and chosen.family not in DATA_FREE:
        if chosen.family not in ("dit", "causal") and (prompts is None or chosen.family not in ("wan", "sana")):
            raise ValueError(f"data must be given: {_what_to_give(chosen)}")
        data = GENERATED
    work = WorkFolder(Path(output).expanduser())
    identity = {
        "source": str(Path(source).resolve()) if Path(source).is_dir() else str(source),
        "component": subject.component.name,
        # Samples that a program makes are told from others by their fingerprint alone.
        "data": None if data is None or callable(data) else str(data),
        "prompts": None if prompts is None else str(prompts),
        "seed": seed,
        "recipe": {**chosen.to_dict(), "description": None, "expected": None, "model": None},
    }
    with work.claimed(identity, resume):
        run = _Run(subject, work, chosen, seed, _device(device), save_every, progress, hub, on_stage)
        try:
            return run.run(data if data is None or callable(data) else str(data), prompts, digit_videos)
        except TrainingStopped as stop:
            done = shorten_text(str(stop).partition(";")[0], 200) or "stopped"
            raise TrainingStopped(
                f"{done}; the same command with --resume goes on from there ({work.output})", stop.exit_code - 128
            ) from None


def _with_options(
    recipe: Recipe,
    subject: Subject,
    *,
    layers: str | None,
    keep: str | None,
    window: str | None,
    budget: float | None,
    stages: Sequence[str] | None,
    changes: Mapping[str, Any],
) -> Recipe:
    """The recipe with what was given besides."""
    if recipe.family != subject.family:
        raise ValueError(
            f"{recipe.name} is for models of the family {recipe.family}, and {subject.location} is of {subject.family}"
        )
    if layers is not None and keep is not None:
        raise ValueError("layers and keep are both given; give one of them")
    if layers is not None or keep is not None:
        recipe = recipe.changed({"layers": layers if keep is None else parse_keep(keep)})
    if window is not None:
        recipe = recipe.changed({"mhla.window": window})
    if changes:
        recipe = recipe.changed(changes)
    if stages is not None:
        recipe = recipe.only(tuple(stages))
    if budget is not None:
        if isinstance(budget, bool) or not 0 < budget < math.inf:
            raise ValueError(f"budget must be a number above 0, got {budget!r:.100}")
        recipe = recipe.with_budget(budget)
    return recipe


def _part_of(layers: str, count: int) -> int:
    """How many of so many layers `auto:p/q` makes MHLA, one at least."""
    part, _, whole = layers.removeprefix("auto:").partition("/")
    if int(whole) == 0 or not 0 < Fraction(int(part), int(whole)) <= 1:
        raise ValueError(f"layers={layers} must be a fraction above 0 and at most 1, such as auto:2/3.")
    return max(1, round(Fraction(int(part), int(whole)) * count))


def _what_to_give(recipe: Recipe) -> str:
    if recipe.family in ("causal", "encoder"):
        return "a folder of .txt, .md, .rst or .py files, a .jsonl file, or the id of a data set"
    if recipe.family == "vision":
        return "a folder of pictures, or 'digits'"
    if recipe.family == "wan":
        return "a folder of videos with captions, 'digits', or prompts (--prompts FILE) for the original to draw"
    return "a folder of pictures with captions, 'digits', or prompts (--prompts FILE) for the original to draw"


@dataclass
class _Run:
    """One call of [`recover`]."""

    subject: Subject
    work: WorkFolder
    recipe: Recipe
    seed: int
    device: torch.device
    save_every: int
    progress: bool
    hub: Mapping[str, Any]
    on_stage: Callable[[str], None] | None = None

    def run(
        self, data: str | MakeSource | None, prompts: str | Path | None, digit_videos: DigitVideos | None
    ) -> RecoveryReport:
        """Does what is not done yet."""
        stages = self.recipe.stages()
        if not (self.work.path / RESULT).is_dir() and not self.work.is_done(RESULT):
            open_source: MakeSource | None = None
            if callable(data):
                open_source = data
            elif data is not None or self.recipe.family in DATA_FREE:
                open_source = partial(
                    open_data,
                    self.subject,
                    self.recipe,
                    data=data,
                    converted=self.work.path / CONVERTED,
                    prompts=None if prompts is None else str(prompts),
                    cache=self.work.path / "data",
                    seed=self.seed,
                    progress=self.progress,
                    digit_videos=digit_videos,
                )
            self._convert(open_source)
            model, name = self._load(), self.subject.component.name
            source = None
            if open_source is not None and stages:
                source = open_source(model)
                self._stages(model, source)
            report = self._report(source)
            record = {"recovery": {key: value for key, value in report.to_dict().items() if key != "recipe"}}
            if "calibrate" in report.stages:
                record["calibration"] = report.stages["calibrate"]
            write_json(self.work.path / "summary.json", report.to_dict())
            write_recovered(self.work.path / CONVERTED, self.work.path / RESULT, name, model, record)
        if not self.work.is_done(RESULT):
            self.work.publish()
            summary = self.work.read("summary")
            write_json(self.work.output / REPORT, summary)
            write_plot(self.work.output, summary)
            self.work.finish(RESULT, {})
        self.work.remove_large([CONVERTED, "data", *stages])
        return self._finished()

    def _finished(self) -> RecoveryReport:
        """The report of a finished run."""
        summary = self.work.read("summary")
        summary.pop("version", None)
        order = [name for name in TITLES if name in summary["figures"]]
        return RecoveryReport(
            output=self.work.output, **{**summary, "figures": {name: summary["figures"][name] for name in order}}
        )

    def _convert(self, open_source: Callable[[nn.Module], BatchSource] | None) -> None:
        """Converts the source, if that is not done; layers that are to be chosen are tried before."""
        if self.work.is_done(CONVERTED):
            return
        layers = self.recipe.layers
        record: dict[str, Any] = {}
        with _timed() as seconds:
            if layers.startswith("auto:"):
                if open_source is None:
                    raise ValueError(f"layers={layers} needs data to try the layers on; give data or name the layers")
                indices = self._convert_with("all")
                count = _part_of(layers, self._count)
                chosen = indices
                if count < len(indices):
                    model = self._load()
                    batches = open_source(model).batches("layers", _TRIAL_BATCHES, _TRIAL_BATCH_SIZE)
                    selection = select_layers(model, batches, keep=len(indices) - count)
                    chosen = selection.mhla_layers
                    record = {"selection": {**selection.to_dict(), "calibration": None}}
                record["layers"] = chosen
                self._convert_with(chosen)
            else:
                self._convert_with(layers)
        self.work.finish(CONVERTED, {"seconds": seconds, **record})

    def _convert_with(self, layers: str | list[int]) -> list[int]:
        """Writes the converted directory; returns the indices of the layers that are MHLA in it."""
        subject = self.subject
        report = convert_pretrained(
            subject.location,
            self.work.path / CONVERTED,
            dict(self.recipe.mhla),
            component=subject.component.name if subject.is_pipeline else None,
            layers=layers,
            overwrite=True,
            progress=self.progress,
            **self.hub,
        )
        part = report.components[subject.component.name]
        self._count = part.num_layers
        return part.mhla_layers

    def _load(self) -> nn.Module:
        return load_converted(self.work.path / CONVERTED, self.subject.component.name, self.device)

    def _stages(self, model: nn.Module, source: BatchSource) -> None:
        """Runs what is left of the stages; the model ends with the weights of the last."""
        names, work = self.recipe.stages(), self.work
        pending = [name for name in names if not work.is_done(name)]
        done = [name for name in names if work.is_done(name)]
        if pending:
            quality = Quality(model, source)
            if not work.is_done("start"):
                figures = {"softmax": quality.original, "converted": quality.measure(model)}
                work.finish(
                    "start", {"figures": figures, "data": source.describe(), "fingerprint": source.fingerprint}
                )
            elif work.read("start").get("fingerprint") != source.fingerprint:
                raise ValueError(
                    f"data: what {work.output} was begun with has changed since; give the same data, or another output"
                )
            # Before anything changes: the original's values of what later stages train.
            teacher = SharedTeacher(model)
            layers = find_projections(model, mhla_layers(model), on_device(source.batch("start", 0, 1), model))
            changes = {stage: changed_parameters(model, layers, stage) for stage in names}
            teacher.keep(sorted(set().union(*changes.values())))
        if done:
            work.load_weights(done[-1], model)
        for name in pending:
            if self.on_stage is not None:
                self.on_stage(name)
            with _timed() as seconds:
                run = StageRun(
                    recipe=self.recipe,
                    model=model,
                    layers=layers,
                    teacher=teacher,
                    source=source,
                    directory=work.path / name,
                    device=self.device,
                    seed=self.seed,
                    save_every=self.save_every,
                    progress=self.progress,
                )
                details = run_stage(name, run)
            measured = quality.measure(model)
            # What earlier stages changed is in it too: the last file alone makes the model.
            changed = set().union(*(changes[stage] for stage in names[: names.index(name) + 1]))
            weights = {key: value for key, value in model.named_parameters() if key in changed}
            work.finish(name, {"figures": measured, "seconds": seconds, "details": details}, weights)
            logger.info("%s: %s in %.0f s", name, measured, seconds["seconds"])
            # Its checkpoints and activations, and the weights before it: the result has replaced them.
            work.remove_large(names[: names.index(name)])
            work.remove_large([name], weights=False)
        model.requires_grad_(True).eval()

    def _report(self, source: BatchSource | None) -> RecoveryReport:
        report = RecoveryReport(self.work.output, self.recipe.family, recipe=self.recipe.to_dict())
        conversion = self.work.read(CONVERTED)
        report.seconds[CONVERTED] = conversion.pop("seconds")
        if conversion:
            report.stages[CONVERTED] = conversion
        if source is None:
            return report
        start = self.work.read("start")
        report.data = start["data"]
        # Files are sorted by name.
        report.figures = {name: start["figures"][name] for name in ("softmax", CONVERTED)}
        for name in self.recipe.stages():
            record = self.work.read(name)
            report.figures[name], report.seconds[name] = record["figures"], record["seconds"]
            report.stages[name] = record["details"]
        return report


def _device(name: str) -> torch.device:
    return torch.device("cuda" if name == "auto" and torch.cuda.is_available() else "cpu")


@contextmanager
def _timed():
    """Gives a dict that has the seconds when the block ends."""
    seconds: dict[str, float] = {}
    began, cpu = time.perf_counter(), time.process_time()
    yield seconds
    seconds["seconds"] = round(time.perf_counter() - began, 2)
    seconds["cpu_seconds"] = round(time.process_time() - cpu, 2)
