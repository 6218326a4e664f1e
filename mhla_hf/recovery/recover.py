# SPDX-License-Identifier: Apache-2.0
"""`recover`: convert, calibrate, match and distill a model in one resumable run.

OUT/work/run.json          the options of the run, and what it reads
OUT/work/converted/        the converted model in `model`, and `done.json`
OUT/work/data/             tokens, or latents and embeddings
OUT/work/<stage>/          what a stage that is under way keeps: checkpoints, activations; of a finished one the report
                           so far as `done.json`, written last, and the weights that the stage changed
OUT/work/result/           the finished directory, on its way into OUT
"""

from __future__ import annotations

import inspect
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from ..config import automatic_measure, automatic_share, parse_keep
from ..conversion import convert_pretrained
from ..conversion.convert import plan_model
from ..conversion.planning import PlanOptions
from ..integrations.transformers.modules import patch_grid
from ..layers.weight_record import record_step
from ..models.directory import ModelDirectory
from ..training.config import TrainingConfig
from ..training.data.batches import BatchSource
from ..training.layers import find_projections, mhla_layers, on_device
from ..training.parameters import load_model
from ..training.processes import Processes, TrainingStopped, has_joined, join_processes
from ..training.teacher import SharedTeacher
from ..utils.destinations import LOCK, MOVED_LAST, RunFolder, atomic_directory, differences, remove_directory
from ..utils.files import TEMPORARY_PREFIX, atomic_file, write_json
from ..utils.locations import HUB_OPTIONS
from ..utils.machine import choose_device, machine_facts, parse_dtype
from ..utils.messages import check_count, shorten_text
from ..utils.options import check_names
from . import stages as runs
from .calibration import write_models
from .data import RecoveryData, data_or_default, origin_of
from .recipes import (
    FORMER,
    STAGES,
    VARIANTS,
    Recipe,
    check_arguments,
    default_recipe,
    models_of,
)
from .report import CONVERTED, PLOT, REPORT, RecoveryReport, is_worse, with_present_names, write_plot
from .selection import select_layers
from .sources import find_start, options_of, take_calibrated
from .stages import Quality, RunProgress, StageSettings


logger = logging.getLogger(__name__)

WORK = "work"
RUN, MODEL, DATA, RESULT = "run.json", "model", "data", "result"
DONE, WEIGHTS = "done.json", "weights.safetensors"
# Batches that layers are tried on when they are selected.
_SELECTION_BATCHES, _SELECTION_BATCH_SIZE = 8, 4
_SAVE_EVERY = 100


def recover(
    source: str | Path,
    output: str | Path,
    data: str | Path | OpenData | None = None,
    *,
    prompts: str | Path | None = None,
    recipe: str | Path | None = None,
    layers: str | None = None,
    keep: str | None = None,
    by: str | None = None,
    window: str | None = None,
    blocks: Sequence[int] | None = None,
    block_size: Sequence[int] | None = None,
    dtype: str | torch.dtype | None = None,
    budget: float | None = None,
    stages: Sequence[str] | None = None,
    changes: Mapping[str, Any] | None = None,
    component: str | None = None,
    resume: bool = False,
    seed: int = 0,
    device: str = "auto",
    save_every: int = _SAVE_EVERY,
    keep_stages: bool = False,
    progress: bool = True,
    **hub: Any,
) -> RecoveryReport:
    """Convert a model to MHLA and recover the quality of the original: calibration, matching, distillation.

    Options, recipe and data are checked before anything is written. Each stage saves its result in `output/work`, so
    a killed run resumes with `resume=True`. A run with other options replaces one that has neither finished a stage
    nor saved a checkpoint. When all stages are done, `output` is a directory for `from_pretrained`, with
    `conversion.json`, `report.json` and a plot.

    Processes of `accelerate launch` or `torchrun` share the stages; all call this with the same arguments, and
    `output` is a directory that all see.

    Args:
        source: A pipeline of diffusers or a model of transformers; a directory or a Hub id. Also a model that was
            calibrated and nothing else: its weights are the result of the stage `calibrate`, and its original is where
            its record says.
        output: The directory to make.
        data: For diffusion models a folder of videos or images with captions or classes, as for `mhla-hf train`; for
            text a folder of .txt, .md, .rst and .py files, a JSONL file or the id of a data set; for vision models a
            folder of images; `digits` where scikit-learn's scans will do; `generated` for samples that the original
            makes. `None` is `generated` for DiT and language models, and for Wan and SANA with `prompts`; families
            that learn from the activations of their own pipeline need no data. In a program also a function from
            the converted model to a [`BatchSource`][mhla_hf.training.data.batches.BatchSource].
        prompts: Text file with one prompt per line, for samples of the original; unused if `data` is a function.
        recipe: A YAML file, or the name of a recipe that comes with the package; `fast` is the default with ReLU,
            which is faster and recovers less, `paper` has the settings of arXiv 2601.07832. `None` takes the default
            of the model's family.
        layers: Which layers become MHLA, in place of the recipe's.
        keep: Share of the layers that stay softmax, such as `25%`, those that are worst to replace; of the groups of
            heads where they are told by look-up. In place of `layers`.
        by: How those are told: by `lookup`, the default for language models, or by the `error` that MHLA leaves.
        window: Softmax window beside MHLA: `block`, `adjacent` or `cross`.
        blocks: Number of blocks along each axis, in place of the recipe's.
        block_size: Tokens of a block along each axis instead.
        dtype: Type that the weights are cast to when the model is converted: float32, bfloat16 or float16. By default
            they keep theirs; training is in float32 either way.
        budget: That many times the steps of the recipe in every stage.
        stages: Only these stages of `calibrate`, `match`, `blockwise`, `distill` and `finetune`.
        changes: Values of the recipe by their path, such as `{"match.steps": 1000}`.
        component: Which transformer of a pipeline; the others are copied.
        resume: Resume the run in `output`.
        seed: Of everything random.
        device: `cpu`, `cuda`, one of several GPUs such as `cuda:1`, or `auto`: a GPU if there is one.
        save_every: Steps between checkpoints.
        keep_stages: Keep the figures and changed tensors of every stage in `output/work`. By default those of a stage
            are deleted when the next one is finished.
        progress: Show progress.
        **hub: `revision`, `token`, `cache_dir` and `local_files_only` for sources on the Hub.

    Returns:
        The figures, stage by stage.

    Raises:
        ValueError: If an option, the recipe, the data or the source is wrong, or `output` holds another run.
        FloatingPointError: If a loss is no longer finite; the message names step, batch and last good checkpoint.
        TrainingStopped: After Ctrl-C or SIGTERM; what was done is kept.
    """
    check_names("recover", hub, [*inspect.signature(recover).parameters][:-1] + [*HUB_OPTIONS])
    was_joined = has_joined()
    accelerator = join_processes(device)
    place, processes = choose_device(device) if accelerator is None else accelerator.device, Processes()
    # As the stages take them.
    TrainingConfig(seed=seed)
    check_count("save_every", save_every)
    cast = parse_dtype(dtype)
    variant = str(recipe) if recipe in VARIANTS else None
    given = check_arguments(recipe, layers, keep, budget, stages, changes, by)
    # Files of the Hub are fetched once.
    part, family, calibrated = processes.in_turn(lambda: find_start(source, component, **hub))
    if given is not None and given.family != family:
        raise ValueError(
            f"{given.name} is for {models_of(given.family)}, not for {models_of(family)} as {part.location}"
        )
    own: dict[str, Any] = {
        "layers": layers if keep is None else parse_keep(keep, by),
        "mhla.window": None if given is None else window,
    }
    own = {name: value for name, value in own.items() if value is not None}
    if calibrated is not None:
        hub.pop("revision", None)
        fixed = [name for name in changes or () if name == "layers" or name.startswith("mhla.")]
        options = (recipe, window, blocks, block_size)
        if own or fixed or any(value is not None for value in options):
            raise ValueError(f"{source} is converted already: leave recipe, layers, keep, window and blocks out")
        own = options_of(calibrated, family)
    for name, other, value in (("blocks", "block_size", blocks), ("block_size", "blocks", block_size)):
        if value is not None:
            own = {f"mhla.{other}": None, **own, f"mhla.{name}": value}
    chosen = (given or default_recipe(family, variant, window)).changed({**own, **(changes or {})})
    if stages is not None:
        chosen = chosen.only((*(["calibrate"] if calibrated else []), *stages))
    if budget is not None:
        chosen = chosen.with_budget(budget)
    share = automatic_share(chosen.layers)
    learns = bool(chosen.stages) or share is not None
    if not learns and (data is not None or prompts is not None):
        raise ValueError("data and prompts have no effect: the recipe has no stage, and its layers are named")
    if learns:
        data = data_or_default(data, family, prompts is not None)
    named = None if data is None or callable(data) else str(data)
    identity = {
        "source": str(Path(source).resolve()) if Path(source).is_dir() else str(source),
        "component": part.component,
        # Samples that a program makes are told from others by their fingerprint alone.
        "data": named,
        "prompts": None if prompts is None else str(prompts),
        "seed": seed,
        "dtype": None if cast is None else str(cast).removeprefix("torch."),
        **{f"recipe.{name}": value for name, value in chosen.values().items()},
    }
    work = WorkFolder(Path(output).expanduser())
    settings = StageSettings(work.path, save_every, seed, place, progress and not processes.rank, accelerator)
    settings.check(chosen)
    open_data: OpenData | None = data if callable(data) else None
    given_data: RecoveryData | None = None
    if learns and open_data is None:
        given_data = RecoveryData(
            directory=part,
            recipe=chosen,
            data=named,
            hub=hub,
            prompts=None if prompts is None else str(prompts),
            cache=work.path / DATA,
            seed=seed,
            progress=settings.progress,
            accelerator=accelerator,
        )
        open_data = given_data.open
    run = Recovery(part, work, chosen, settings, keep_stages, cast, hub, given_data, calibrated)
    with ExitStack() as claim:
        with processes.together():
            if processes.rank == 0:
                is_same = not differences(work.identity(), identity)
                if not is_same or not (work.is_done(CONVERTED) or work.has_result):
                    layout = PlanOptions(layers="all" if share is not None else chosen.layers, dtype=cast)
                    plan_model(part, chosen.mhla, layout)
                    if given_data is not None:
                        given_data.check()
                claim.enter_context(work.claimed(identity, resume))
        try:
            report = run.run(open_data, origin_of(named))
        except TrainingStopped as stop:
            done = shorten_text(str(stop).partition(";")[0], 200) or "stopped"
            raise TrainingStopped(
                f"{done}; the same command with --resume continues from there ({work.output})",
                stop.exit_code - 128,
            ) from None
    if accelerator is not None and not was_joined:
        accelerator.end_training()
    return report


OpenData = Callable[[nn.Module], BatchSource]


@dataclass
class Recovery:
    """One call of [`recover`][mhla_hf.recovery.recover.recover]; whatever is finished is not done again.

    Of several processes the first one decides and writes, and all have the model and the data.
    """

    source: ModelDirectory
    work: WorkFolder
    recipe: Recipe
    settings: StageSettings
    keep_stages: bool
    dtype: torch.dtype | None
    hub: Mapping[str, Any]
    data: RecoveryData | None = None
    calibrated: ModelDirectory | None = None

    @property
    def processes(self) -> Processes:
        """The processes of the run."""
        return self.settings.processes

    def run(self, open_data: OpenData | None, origin: Mapping[str, Any]) -> RecoveryReport:
        """Run what is not done yet.

        Args:
            open_data: Opens the data for the converted model; `None` where stages and layers need none.
            origin: What the report says of where the data come from.
        """
        work, stages, decide = self.work, self.recipe.stages, self.processes.decide
        if not decide(lambda: work.has_result):
            data = self._convert(open_data)
            model = self._load()
            done = decide(lambda: [name for name in stages if work.is_done(name)])
            report = decide(lambda: work.read(done[-1] if done else CONVERTED))
            if stages:
                assert open_data is not None
                data = data or open_data(model)
                if report.fingerprint not in (None, data.fingerprint):
                    raise ValueError(
                        f"data: what {work.output} was begun with has changed since; give the same data, or "
                        "another output"
                    )
                report = self._stages(model, data, report, origin, done)
            decide(lambda: self._write(model, report))
        return decide(self._publish)

    def _publish(self) -> RecoveryReport:
        """Move the result into the output, and return the report there."""
        self.work.publish()
        if not self.keep_stages:
            self.work.clear(RUN)
        return RecoveryReport.read(self.work.output)

    def _write(self, model: nn.Module, report: RecoveryReport) -> None:
        """Write the recovered directory, to be published."""
        content = report.to_dict()
        record = {"recovery": {key: value for key, value in content.items() if key != "recipe"}}
        if "calibrate" in report.stages and "calibrate" not in report.discarded:
            record["calibration"] = report.stages["calibrate"]
        with atomic_directory(self.work.path / RESULT) as temporary:
            write_models(self._converted(), temporary, {self.source.component: model}, record)
            write_json(temporary / REPORT, content)
            write_plot(temporary / PLOT, report)

    def _convert(self, open_data: OpenData | None) -> BatchSource | None:
        """Convert the source unless that is done; return the data if they were opened to select layers."""
        decide, data = self.processes.decide, None
        layers: str | list[Any] = self.recipe.layers
        if decide(lambda: self.work.is_done(CONVERTED)):
            return None
        if self.data is not None:
            self.recipe = decide(self.data.fitted)
        report = RecoveryReport(
            self.work.output, self.recipe.family, recipe=self.recipe.to_dict(), seed=self.settings.seed
        )
        share = automatic_share(self.recipe.layers)
        with _timed() as seconds:
            if share is not None:
                assert open_data is not None
                layers, data = self._select(open_data, share, report)
            decide(lambda: self._convert_to_directory(layers))
        report.seconds[CONVERTED] = seconds
        decide(lambda: self.work.finish(CONVERTED, report))
        return data

    def _select(
        self, open_data: OpenData, share: Fraction, report: RecoveryReport
    ) -> tuple[list[Any], BatchSource | None]:
        """Choose the layers that become MHLA, in a model that is converted in memory; note them in the report.

        Returns:
            Their indices, or groups of their heads, and the data, unless all layers become MHLA.
        """
        every = PlanOptions(layers="all")
        plan = self.processes.decide(lambda: plan_model(self.source, self.recipe.mhla, every).report)
        record, data = {}, None
        chosen: list[Any] = plan.mhla_layers
        kept: float = len(chosen) - max(1, round(share * plan.num_layers))
        by = automatic_measure(self.recipe.layers)
        if self.recipe.chooses_groups:
            kept = float(1 - share * plan.num_layers / len(chosen))
        if kept > 0:
            model = load_model(self.source, plan.mhla).to(self.settings.device).eval()
            data = open_data(model)
            batches = data.batches("layers", _SELECTION_BATCHES, _SELECTION_BATCH_SIZE)
            if self.recipe.chooses_groups:
                # One group at least becomes MHLA.
                groups = sum(layer.mhla.num_key_value_heads for layer in mhla_layers(model))
                kept = min(kept, (groups - 1) / groups)
            selection = select_layers(model, batches, keep=kept, by=by, processes=self.processes)
            chosen, report.fingerprint = selection.mhla_layers, data.fingerprint
            record = {"selection": {**selection.to_dict(), "calibration": None}}
        report.stages[CONVERTED] = {**record, "layers": chosen}
        return chosen, data

    def _convert_to_directory(self, layers: str | list[Any]) -> None:
        """Write the converted directory."""
        convert_pretrained(
            self.source.location,
            self.work.path / CONVERTED / MODEL,
            dict(self.recipe.mhla),
            component=self.source.component if self.source.kind == "pipeline" else None,
            layers=layers,
            dtype=self.dtype,
            overwrite=True,
            progress=self.settings.progress,
            **self.hub,
        )

    def _converted(self) -> ModelDirectory:
        return ModelDirectory.read(self.work.path / CONVERTED / MODEL, self.source.component)

    def _load(self) -> nn.Module:
        return load_model(self._converted()).to(self.settings.device).eval()

    def _stages(
        self,
        model: nn.Module,
        data: BatchSource,
        report: RecoveryReport,
        origin: Mapping[str, Any],
        done: Sequence[str],
    ) -> RecoveryReport:
        """Run the stages after those that are done; the model ends with the weights of the last."""
        names, work = [*self.recipe.stages], self.work
        pending = names[names.index(done[-1]) + 1 :] if done else names
        run = RunProgress(self.recipe, len(mhla_layers(model)), self.settings.progress and bool(pending))
        run.bar.set_description_str("measuring")
        if pending:
            quality = Quality(model, data, self.processes)
            if not done:
                report.figures = {"softmax": quality.original, CONVERTED: quality.measure(model)}
                report.data, report.machine = {**data.describe(), **origin}, machine_facts(self.settings.device)
                report.fingerprint = data.fingerprint
                report.beside |= quality.beside(model, "window", "window")
                if "calibrate" not in names:
                    report.beside |= quality.beside(model, "linear", "mixing")
            # Before anything changes: the original's values of what later stages train.
            teacher = SharedTeacher(model)
            layers = find_projections(model, mhla_layers(model), on_device(data.batch("start", 0, 1), model))
            of_layers = {name for layer in layers for name in layer.parameters()}
            everything = {name for name, _ in model.named_parameters()}
            # The names of the parameters that a stage may change; a later stage those of an earlier one, too.
            changes = {name: of_layers if STAGES[name].part == "layer" else everything for name in names}
            teacher.keep(sorted(set().union(*changes.values())))
        if done:
            work.load_weights(done[-1], model)
            if (state := {"calibrate": "calibrated", "match": "matched"}.get(report.kept)) is not None:
                record_step(model, state, {})
        _warn_of_resampling(model, data)
        for name in pending:
            kept, records = report.kept, [layer.mhla.record for layer in layers]
            with _timed() as seconds:
                settings = replace(self.settings, folder=work.path / name, run=run)
                if name == "calibrate" and self.calibrated is not None:
                    details = take_calibrated(model, self.calibrated, layers)
                else:
                    details = getattr(runs, name)(model, teacher, data, self.recipe.stages[name], settings)
            report.figures[name], report.seconds[name], report.stages[name] = quality.measure(model), seconds, details
            if name == "calibrate":
                report.beside |= quality.beside(model, "linear_calibrated", "mixing")
            if self.processes.decide(partial(is_worse, report.figures[name], report.figures[kept])):
                report.discarded.append(name)
                # The first process removes what the others read here when it goes on.
                with self.processes.together():
                    self._restore(model, names[names.index(name) - 1] if name != names[0] else None)
                for layer, record in zip(layers, records, strict=True):
                    layer.mhla.record = record
            changed = {key: each for key, each in model.named_parameters() if key in changes[name]}
            with self.processes.together():
                if self.processes.rank == 0:
                    work.finish(name, report, changed)
                    logger.info("%s: %s in %.0f s", name, report.figures[name], seconds["seconds"])
                    if name in report.discarded:
                        logger.warning(report.notes()[-1])
                    for earlier in () if self.keep_stages else names[: names.index(name)]:
                        work.remove(earlier)
        run.bar.close()
        model.requires_grad_(True).eval()
        return report

    @torch.no_grad()
    def _restore(self, model: nn.Module, stage: str | None) -> None:
        """Give a model the weights that it had after a stage, or the conversion."""
        converted = load_model(self._converted())
        for parameter, value in zip(model.parameters(), converted.parameters(), strict=True):
            parameter.copy_(value)
        if stage is not None:
            self.work.load_weights(stage, model)


def _warn_of_resampling(model: nn.Module, data: BatchSource) -> None:
    """Warn where images have another grid than the blocks were made for: training then sees resampled weights."""
    pixels = data.batch("start", 0, 1).get("pixel_values")
    mhla: Any = mhla_layers(model)[0].mhla
    if pixels is None or len(mhla.blocks) != 2:
        return
    grid = patch_grid(model.config, *pixels.shape[-2:])
    if (blocks := tuple(mhla.layout_for(grid).blocks)) != tuple(mhla.blocks):
        logger.warning(
            "the mixing weights are those of %s blocks, and images of %s patches have %s: training sees resampled "
            "weights. Convert for this grid (mhla.grid) instead.",
            *("x".join(map(str, sides)) for sides in (mhla.blocks, grid, blocks)),
        )


@contextmanager
def _timed() -> Iterator[dict[str, float]]:
    """Yield a dict that holds the seconds when the block ends."""
    seconds: dict[str, float] = {}
    began, cpu = time.perf_counter(), time.process_time()
    yield seconds
    seconds["seconds"] = round(time.perf_counter() - began, 2)
    seconds["cpu_seconds"] = round(time.process_time() - cpu, 2)


class WorkFolder(RunFolder):
    """The work folder of an output directory.

    Args:
        output: The output directory.
    """

    def __init__(self, output: Path) -> None:
        super().__init__(output / WORK, RUN, output)

    @contextmanager
    def claimed(self, identity: Mapping[str, Any], resume: bool = True) -> Iterator[None]:
        """Claim the folder as [`RunFolder.claimed`] does, unless there is something else in the output."""
        others = [entry for entry in _entries(self.output) if entry.name != WORK]
        # A run that was killed while it wrote its record leaves that under a temporary name.
        unfinished = [path.name for path in self.path.glob(f"{TEMPORARY_PREFIX}*-{RUN}")]
        others += [entry for entry in _entries(self.path) if entry.name not in (LOCK, *unfinished)]
        if not self.record.is_file() and others:
            raise ValueError(f"output {self.output} is not empty; choose another, or remove it")
        if (self.path / FORMER).is_dir():
            (self.path / FORMER).rename(self.path / "blockwise")
        with super().claimed(identity, resume):
            yield

    @property
    def has_progress(self) -> bool:
        """Whether a stage is finished or has left a checkpoint, or the result is there."""
        return any(any((self.path / name).rglob("*.safetensors")) for name in STAGES) or self.has_result

    @property
    def has_result(self) -> bool:
        """Whether the result is complete, published or not."""
        return (self.path / RESULT).is_dir() or (self.output / REPORT).is_file()

    def clear(self, *kept: str) -> None:
        """Remove the files of a run, except those named in `kept`."""
        for entry in _entries(self.path):
            if entry.name not in (LOCK, *kept):
                self.remove(entry.name)

    def remove(self, name: str) -> None:
        """Remove a folder or file, if it is there."""
        path = self.path / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)

    def identity(self) -> dict[str, Any]:
        """Return the options of the run here, with the present names of stages."""
        return with_present_names(super().identity())

    def is_done(self, name: str) -> bool:
        """Return whether a stage is finished."""
        return (self.path / name / DONE).is_file()

    def read(self, name: str) -> RecoveryReport:
        """Read the report up to a finished stage."""
        return RecoveryReport.read(self.output, self.path / name / DONE)

    def finish(self, name: str, report: RecoveryReport, weights: Mapping[str, torch.Tensor] | None = None) -> None:
        """Write the result of a stage, then remove what it needed while it was under way.

        Args:
            name: The stage.
            report: The report so far.
            weights: The weights that it changed.

        Raises:
            OSError: If there is no room; the stage's own checkpoints are still there.
        """
        folder = self.path / name
        folder.mkdir(exist_ok=True)
        if weights is not None:
            with atomic_file(folder / WEIGHTS) as temporary:
                save_file({key: value.detach().cpu().contiguous() for key, value in weights.items()}, temporary)
        write_json(folder / DONE, {**report.to_dict(), "fingerprint": report.fingerprint})
        for entry in _entries(folder):
            if entry.name not in (DONE, WEIGHTS, MODEL):
                self.remove(f"{name}/{entry.name}")

    def load_weights(self, name: str, model: nn.Module) -> None:
        """Load the weights of a finished stage into the model."""
        parameters = dict(model.named_parameters())
        with torch.no_grad():
            for key, value in load_file(self.path / name / WEIGHTS).items():
                parameters[key].copy_(value)

    def publish(self) -> None:
        """Move the result, if it is not there yet, into the output; the files that make it loadable last."""
        result = self.path / RESULT
        if not result.is_dir():
            return
        for path in sorted(_entries(result), key=lambda entry: (entry.name in MOVED_LAST, entry.name)):
            destination = self.output / path.name
            if destination.is_dir():
                remove_directory(destination)
            os.replace(path, destination)
            # Renaming a hard link to another one of the same file, from a publication that was killed, leaves both.
            path.unlink(missing_ok=True)
        result.rmdir()


def _entries(directory: Path) -> list[Path]:
    return list(directory.iterdir()) if directory.is_dir() else []
