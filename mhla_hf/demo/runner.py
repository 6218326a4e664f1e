# SPDX-License-Identifier: Apache-2.0
"""The demo from end to end: convert, match, fine-tune, compare, generate, report.

Every stage leaves its result in `OUTPUT/work` when it is complete, and is skipped where that is there, so a demo that
was killed goes on where it was; the training stages go on from their last checkpoint.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from ..conversion import convert_pretrained
from ..destinations import TEMPORARY_PREFIX
from ..files import remove_directory, remove_leftovers, write_json
from ..json_files import read_json
from ..locks import lock_output
from ..training import DiffusionTrainer, EvaluationResult, TrainingConfig, evaluate, objective_for
from ..training.loading import load_student, load_teacher
from ..training.metrics import read_metrics
from ..training.sizes import PipelineSizes
from .config import DemoConfig, base_pipeline_directory
from .data import DigitLatents, encode_digits
from .progress import DemoProgress, quiet_libraries


VARIANTS = ("mhla", "linear")
"""The two copies that are trained: MHLA, and vanilla linear attention, which is MHLA with one block."""

TRANSFER, FINETUNE = "transfer", "finetune"
_CHECKPOINT_EVERY = 50
# What a demo removes or replaces in its output.
_OUTPUTS = (
    "work", "mhla", "report.json", "report.md", "loss.png", "mixing.png", "frames.png", "side_by_side.gif",
    "side_by_side.mp4",
)  # fmt: skip
_RECORD = "the demo's record (remove it to repeat this part):"


def run_demo(config: DemoConfig) -> dict[str, Any]:
    """Run the demo, or what is left of it.

    Args:
        config: The options.

    Returns:
        What `OUTPUT/report.json` holds.

    Raises:
        ValueError: If `output` holds the work of a demo with other options, or there is no base pipeline.
    """
    return Demo(config).run()


class Demo:
    """One run of the demo.

    Args:
        config: The options.

    Raises:
        ValueError: If `output` holds the work of a demo with other options or files of something else, or another
            demo is running there.
    """

    def __init__(self, config: DemoConfig) -> None:
        self.config = config
        self.work = config.output / "work"
        self.progress = DemoProgress(config.progress)
        with lock_output(config.output) or nullcontext():
            self._claim_output()

    def run(self) -> dict[str, Any]:
        """Run every stage that is not done."""
        with lock_output(self.config.output) or nullcontext():
            for folder in (self.config.output, self.work, *self.work.rglob("*/")):
                remove_leftovers(folder)
            return self._run()

    def _run(self) -> dict[str, Any]:
        from .generation import generate_videos
        from .report import write_outputs

        began = time.perf_counter()
        with quiet_libraries(), _saying_how_to_go_on(), self.progress:
            base = self._base_pipeline()
            train, held_out = self._data(base)
            softmax = self._evaluate(base, held_out, "softmax")
            results: dict[str, Any] = {"softmax": softmax, "variants": {}}
            for variant in VARIANTS:
                results["variants"][variant] = self._variant(variant, base, train, held_out)
            pipelines = {"softmax": base} | {name: self.pipeline(name, FINETUNE) for name in VARIANTS}
            videos, seconds = generate_videos(self.config, pipelines, self.work / "videos", self.progress)
            results["generation_seconds"] = seconds
            results["seconds"] = self._total_seconds(time.perf_counter() - began)
            return write_outputs(self.config, base, pipelines, videos, results, self.progress)

    def pipeline(self, variant: str, stage: str) -> Path:
        """Directory of a variant's pipeline after a stage: `"converted"`, `"transfer"` or `"finetune"`."""
        if stage == TRANSFER and not self.config.transfer_steps:
            stage = "converted"
        if stage == FINETUNE and not self.config.steps:
            return self.pipeline(variant, TRANSFER)
        folder = self.work / variant / stage
        return folder if stage == "converted" else folder / "pipeline"

    def _claim_output(self) -> None:
        """Check or start the work directory."""
        record = self.work / "options.json"
        identity = self.config.identity()
        if record.is_file() and self.config.resume:
            before = read_json(record, "the demo's options (--no-resume starts again):")
            changed = sorted(name for name in identity if before.get(name) != identity[name])
            if changed:
                raise ValueError(
                    f"{self.config.output} holds a demo with another {', '.join(changed)}; start again with "
                    "--no-resume, or choose another directory"
                )
            return
        if not record.is_file():
            found = [name for name in _OUTPUTS if _holds_something(self.config.output / name)]
            if found:
                raise ValueError(
                    f"{self.config.output} has {', '.join(found)} and is no output of a demo; choose another directory"
                )
        if self.work.is_dir():
            remove_directory(self.work)
        self.work.mkdir(parents=True)
        write_json(record, identity)

    def _base_pipeline(self) -> Path:
        config = self.config
        if not config.from_scratch:
            return config.base if config.base is not None else base_pipeline_directory()
        directory = config.output / "base"
        if not (directory / "model_index.json").is_file():
            if _holds_something(directory):
                raise ValueError(f"{directory} is no pipeline of a demo; choose another output")
            from .pretraining import PretrainingConfig, pretrain

            options = {"seed": config.seed, "device": "cuda" if torch.cuda.is_available() else "cpu"}
            pretraining = PretrainingConfig(**{**options, **config.pretraining})
            with self.progress.stage("Pretrain the base pipeline") as stage:
                pretrain(pretraining, directory, self.work / "pretraining", log=stage.note)
        return directory

    def _data(self, base: Path) -> tuple[DigitLatents, DigitLatents]:
        from diffusers import WanPipeline

        config = self.config
        with self.progress.stage("Encode videos", config.train_videos + config.held_out_videos) as stage:
            # Another seed than pretraining's: the same scans in other videos.
            pipeline = WanPipeline.from_pretrained(base, transformer=None)
            sets = []
            for split, count in (("train", config.train_videos), ("held_out", config.held_out_videos)):
                path = self.work / "data" / f"{split}.safetensors"
                sets.append(
                    encode_digits(pipeline, path, split, count, seed=1000 + config.seed, on_encoded=stage.advance)
                )
        return sets[0], sets[1]

    def _variant(self, variant: str, base: Path, train: DigitLatents, held_out: DigitLatents) -> dict[str, Any]:
        config = self.config
        result: dict[str, Any] = {"evaluations": {}, "losses": {}, "seconds_per_step": {}}
        self._convert(variant, base)
        result["evaluations"]["converted"] = self._evaluate(self.pipeline(variant, "converted"), held_out, variant)
        for stage, steps in ((TRANSFER, config.transfer_steps), (FINETUNE, config.steps)):
            if steps:
                record = self._train(variant, stage, steps, base, train)
                result["losses"][stage] = record["losses"]
                result["seconds_per_step"][stage] = record["seconds_per_step"]
            directory = self.pipeline(variant, stage)
            result["evaluations"][stage] = self._evaluate(directory, held_out, f"{variant}-{stage}")
        return result

    def _convert(self, variant: str, base: Path) -> None:
        destination = self.pipeline(variant, "converted")
        if destination.is_dir():
            return
        blocks = self.config.blocks if variant == "mhla" else (1, 1, 1)
        label = f"Convert to {'MHLA' if variant == 'mhla' else 'linear attention'}"
        with self.progress.stage(label):
            mhla = {
                "blocks": blocks,
                "normalizer": "query",
                "feature_map": "relu",
                "rope": "after_feature_map",
                "lepe_kernel": self.config.lepe_kernel,
                "grid": token_grid(base),
            }
            convert_pretrained(base, destination, mhla, layers=self.config.layers, progress=False)

    def _train(self, variant: str, stage: str, steps: int, base: Path, train: DigitLatents) -> dict[str, Any]:
        folder = self.work / variant / stage
        record = folder / "result.json"
        if record.is_file():
            return read_json(record, _RECORD, required={"losses": list, "seconds_per_step": float})
        config = self.config
        source = self.pipeline(variant, "converted" if stage == TRANSFER else TRANSFER)
        training = TrainingConfig(
            model=str(source),
            output=str(folder),
            train="full",
            transfer_steps=steps if stage == TRANSFER else 0,
            max_steps=steps if stage == FINETUNE else 0,
            batch_size=config.transfer_batch_size if stage == TRANSFER else config.batch_size,
            learning_rate=config.learning_rate,
            transfer_learning_rate=config.transfer_learning_rate,
            lr_schedule="cosine",
            warmup_steps=min(10, steps),
            weight_decay=0.0,
            adam_beta2=0.99,
            condition_dropout=0.1,
            mixed_precision="no",
            device="cpu",
            # One seed for both variants: the same videos, noise and noise levels in the same order.
            seed=config.seed,
            resume="latest",
            checkpointing_steps=_CHECKPOINT_EVERY,
            checkpoints_total_limit=1,
            progress=False,
        )
        name = {TRANSFER: "Match attention outputs", FINETUNE: "Fine-tune"}[stage]
        with self.progress.stage(f"{name}, {_TITLES[variant]}", steps) as bar:
            teacher = load_teacher(base, "transformer", str(base)) if stage == TRANSFER else None
            trainer = DiffusionTrainer(
                training,
                dataset=train,
                teacher=teacher,
                callback=lambda _, step, loss: bar.reached(step, f"loss {loss:.4f}"),
            )
            result = trainer.run()
        losses = result.losses[stage]
        values = {"losses": losses, "seconds_per_step": typical_seconds(folder / "metrics.jsonl")}
        write_json(record, values)
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)
        return values

    def _evaluate(self, directory: Path, held_out: DigitLatents, name: str) -> EvaluationResult:
        path = self.work / "evaluations" / f"{name}.json"
        if not path.is_file():
            with self.progress.stage(f"Held-out loss, {name}"):
                # "none" keeps an ordinary pipeline softmax; an MHLA one takes no options.
                options = "none" if name == "softmax" else None
                model = load_student(directory, "transformer", options).eval()
                result = evaluate(
                    model,
                    held_out,
                    seed=self.config.seed,
                    batch_size=16,
                    draws_per_sample=self.config.draws,
                    objective=objective_for(model, directory),
                )
                values = {"losses": result.losses, "sigmas": result.levels, "parameters": count_parameters(model)}
                write_json(path, values)
        stored = read_json(path, _RECORD, required={"losses": list, "sigmas": list})
        return EvaluationResult(tuple(stored["losses"]), tuple(stored["sigmas"]))

    def _total_seconds(self, seconds: float) -> float:
        """Add this run's seconds to those of the runs that it went on from."""
        path = self.work / "seconds.json"
        before = read_json(path, _RECORD, required={"seconds": float})["seconds"] if path.is_file() else 0.0
        # Time lost with a killed run is not known; a run that found everything done adds next to nothing.
        write_json(path, {"seconds": before + seconds})
        return before + seconds


def _holds_something(path: Path) -> bool:
    """Whether a file, or a directory with more than temporary files, is there."""
    if not path.is_dir():
        return path.exists()
    return any(not entry.name.startswith(TEMPORARY_PREFIX) for entry in path.iterdir())


@contextmanager
def _saying_how_to_go_on() -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt as stop:
        stop.args = ("stopped; the same command goes on where the demo was",)
        raise


_TITLES = {"mhla": "MHLA", "linear": "linear"}


def token_grid(base: Path) -> tuple[int, int, int]:
    """The token grid of the demo's videos in a base pipeline: `(frames, rows, columns)`."""
    from .digits import MovingDigitsConfig

    appearance = MovingDigitsConfig()
    sizes = PipelineSizes.of_pipeline(base)
    if sizes.family != "wan":
        raise ValueError(f"base {base} is a {sizes.family} pipeline; the demo takes those of Wan")
    model = base / "transformer" / "config.json"
    patch = read_json(model, "the model's configuration", required={"patch_size": list})["patch_size"]
    frames = (appearance.num_frames - 1) // sizes.temporal_factor + 1
    side = appearance.size // sizes.spatial_factor
    return frames // patch[0], side // sizes.patch_size[0], side // sizes.patch_size[1]


def count_parameters(model: torch.nn.Module) -> int:
    """Number of parameters of a model."""
    return sum(parameter.numel() for parameter in model.parameters())


def typical_seconds(metrics: Path) -> float:
    """Median seconds per step in a run's `metrics.jsonl`, which a slow first step or a pause does not move."""
    seconds = sorted(row["seconds"] for row in read_metrics(metrics))
    return seconds[len(seconds) // 2] if seconds else math.nan


def parameters_of(work: Path, names: Mapping[str, str]) -> dict[str, int]:
    """Parameter counts that the evaluations noted, by the name given to each."""
    return {
        name: read_json(work / "evaluations" / f"{file}.json", _RECORD, required={"parameters": int})["parameters"]
        for name, file in names.items()
    }
