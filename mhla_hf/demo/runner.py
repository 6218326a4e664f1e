# SPDX-License-Identifier: Apache-2.0
"""The demo from end to end: recover three copies of a pipeline, compare, generate, report.

Every stage writes its result to `OUTPUT/work` when it is complete, and is skipped if the result exists: a killed demo
resumes with the interrupted stage, and a recovery from its last checkpoint.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from ..recovery.recover import recover
from ..training import objective_for
from ..training.data.batch_sources import Latents
from ..training.loading import PipelineSource
from ..utils.destinations import TEMPORARY_PREFIX, lock_output, remove_directory, remove_leftovers
from ..utils.files import write_json
from ..utils.json_files import read_json
from .config import DemoConfig, base_pipeline_directory
from .data import DigitLatents, encode_digits
from .figures import TITLES
from .progress import DemoProgress, quiet_libraries


VARIANTS = ("mhla", "mhla_window", "linear")
"""Copies to recover: MHLA, MHLA with a softmax window beside it, and linear attention (MHLA with a single block)."""

WINDOW = "cross"
"""Neighbours in the frame, and the same place in all frames."""

_CHECKPOINT_EVERY = 50
# Files and folders that a demo removes or replaces in its output.
_OUTPUTS = (
    "work", "mhla", "report.json", "report.md", "recovery.png", "mixing.png", "frames.png", "side_by_side.gif",
    "side_by_side.mp4",
)  # fmt: skip
_RECORD = "the demo's record (remove it to repeat this part):"


def run_demo(config: DemoConfig) -> dict[str, Any]:
    """Runs the demo, or the rest of one that was stopped.

    Returns:
        The report, as in `OUTPUT/report.json`.

    Raises:
        ValueError: If `output` holds the work of a demo with other options, or there is no base pipeline.
    """
    return Demo(config).run()


class Demo:
    """One run of the demo.

    Raises:
        ValueError: If `output` holds the work of a demo with other options or unrelated files, or another demo is
            running there.
    """

    def __init__(self, config: DemoConfig) -> None:
        self.config = config
        self.work = config.output / "work"
        self.progress = DemoProgress(config.progress)
        with lock_output(config.output) or nullcontext():
            self._claim_output()

    def run(self) -> dict[str, Any]:
        """Runs every stage that is not complete."""
        with lock_output(self.config.output) or nullcontext():
            for folder in (self.config.output, self.work, *self.work.rglob("*/")):
                remove_leftovers(folder)
            return self._run()

    def _run(self) -> dict[str, Any]:
        from .generation import generate_videos
        from .report import write_outputs

        began = time.perf_counter()
        with quiet_libraries(), _resumable_interrupt(), self.progress:
            base = self.base_pipeline()
            train, held_out = self.data(base)
            results: dict[str, Any] = {name: self.recover(name, base, train, held_out) for name in VARIANTS}
            pipelines = {"softmax": base} | {name: self.pipeline(name) for name in VARIANTS}
            videos, generation = generate_videos(self.config, pipelines, self.work / "videos", self.progress)
            seconds = self._total_seconds(time.perf_counter() - began)
            with self.progress.stage("Write report, figures and pipeline"):
                return write_outputs(self.config, base, pipelines, videos, results, generation, seconds)

    def pipeline(self, variant: str) -> Path:
        """Directory of a variant's recovered pipeline."""
        return self.work / variant

    def _claim_output(self) -> None:
        """Checks the work directory of an earlier run, or creates one."""
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
            found = [name for name in _OUTPUTS if _has_content(self.config.output / name)]
            if found:
                raise ValueError(
                    f"{self.config.output} has {', '.join(found)} and is no output of a demo; choose another directory"
                )
        if self.work.is_dir():
            remove_directory(self.work)
        self.work.mkdir(parents=True)
        write_json(record, identity)

    def base_pipeline(self) -> Path:
        """Directory of the base pipeline, which is pretrained first if the options say so."""
        config = self.config
        if not config.from_scratch:
            return config.base if config.base is not None else base_pipeline_directory()
        directory = config.output / "base"
        if not (directory / "model_index.json").is_file():
            if _has_content(directory):
                raise ValueError(f"{directory} is no pipeline of a demo; choose another output")
            from .pretraining import PretrainingConfig, pretrain

            options = {"seed": config.seed, "device": "cuda" if torch.cuda.is_available() else "cpu"}
            pretraining = PretrainingConfig(**{**options, **config.pretraining})
            with self.progress.stage("Pretrain the base pipeline") as stage:
                pretrain(pretraining, directory, self.work / "pretraining", log=stage.note)
        return directory

    def data(self, base: Path) -> tuple[DigitLatents, DigitLatents]:
        """Training and held-out videos, encoded by the base pipeline."""
        from diffusers import WanPipeline

        config = self.config
        with self.progress.stage("Encode videos", config.train_videos + config.held_out_videos) as stage:
            # Not the seed of the pretraining: the same scans in other videos.
            pipeline = WanPipeline.from_pretrained(base, transformer=None)
            sets = []
            for split, count in (("train", config.train_videos), ("held_out", config.held_out_videos)):
                path = self.work / "data" / f"{split}.safetensors"
                sets.append(
                    encode_digits(pipeline, path, split, count, seed=1000 + config.seed, on_encoded=stage.advance)
                )
        return sets[0], sets[1]

    def recover(
        self,
        name: str,
        base: Path,
        train: DigitLatents,
        held_out: DigitLatents,
        changes: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Recovers a variant, unless that is done, and returns the report of its recovery.

        Args:
            name: One of [`VARIANTS`].
            base: Directory of the base pipeline.
            train: Videos to train on.
            held_out: Videos to measure with.
            changes: Values of the recipe in place of the variant's, by their path.
        """
        config = self.config
        with self.progress.stage(f"Recover with {TITLES[name]}") as stage:

            def data(model: torch.nn.Module) -> Latents:
                return Latents(train, objective_for(model, base), model, held_out, config.seed, draws=config.draws)

            report = recover(
                base,
                self.pipeline(name),
                data,
                layers=config.layers,
                window=WINDOW if name == "mhla_window" else None,
                changes={**self._changes(name, base), **(changes or {})},
                resume=True,
                seed=config.seed,
                device="cpu",
                save_every=_CHECKPOINT_EVERY,
                progress=False,
                on_stage=stage.note,
            )
        return report.to_dict()

    def _changes(self, variant: str, base: Path) -> dict[str, Any]:
        """Changes of a variant to the recipe of its family."""
        config = self.config
        changes: dict[str, Any] = {"mhla.grid": list(token_grid(base)), "mhla.blocks": list(config.blocks)}
        if variant == "linear":
            changes |= {"mhla.blocks": [1, 1, 1]}
        if config.match_steps is not None:
            changes |= {
                "match.steps": config.match_steps,
                "match.batches": min(config.match_steps, config.train_videos),
            }
        if config.distill_steps is not None:
            changes |= {"distill.steps": config.distill_steps}
        return changes

    def _total_seconds(self, seconds: float) -> float:
        """Adds this run's seconds to those of the runs that it resumed."""
        path = self.work / "seconds.json"
        before = read_json(path, _RECORD, required={"seconds": float})["seconds"] if path.is_file() else 0.0
        # The time of a killed run is not known; a run that found everything complete adds next to nothing.
        write_json(path, {"seconds": before + seconds})
        return before + seconds


def _has_content(path: Path) -> bool:
    """True for a file, or a directory with more than temporary files."""
    if not path.is_dir():
        return path.exists()
    return any(not entry.name.startswith(TEMPORARY_PREFIX) for entry in path.iterdir())


@contextmanager
def _resumable_interrupt() -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt as stop:
        stop.args = ("stopped; the same command resumes the demo",)
        raise


def token_grid(base: Path) -> tuple[int, int, int]:
    """Token grid of the demo's videos in a base pipeline: `(frames, rows, columns)`."""
    from ..training.data.digits import MovingDigitsConfig

    appearance = MovingDigitsConfig()
    sizes = PipelineSource(base).sizes
    if sizes.family.name != "wan":
        raise ValueError(f"base {base} is a {sizes.family.name} pipeline; the demo takes those of Wan")
    model = base / "transformer" / "config.json"
    patch = read_json(model, "the model's configuration", required={"patch_size": list})["patch_size"]
    frames = (appearance.num_frames - 1) // sizes.temporal_factor + 1
    side = appearance.size // sizes.spatial_factor
    return frames // patch[0], side // sizes.patch_size[0], side // sizes.patch_size[1]
