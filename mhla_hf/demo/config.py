# SPDX-License-Identifier: Apache-2.0
"""Options of one run of the demo. Imports nothing heavy."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any


DEFAULT_PROMPTS = ("a zero moves down", "a one moves right", "a six moves up")
"""Captions of the videos that the demo generates."""

NOT_COMPARED = ("output", "resume", "progress")
"""Options that do not change the results of a run."""


def base_pipeline_directory() -> Path:
    """Directory of the pretrained softmax pipeline that the package ships.

    Raises:
        ValueError: If this installation does not have it.
    """
    directory = Path(__file__).resolve().parent.parent / "assets" / "digits_wan"
    if not (directory / "model_index.json").is_file():
        raise ValueError(f"{directory} does not hold the demo's base pipeline; train one: --from-scratch")
    return directory


@dataclass(frozen=True, kw_only=True)
class DemoConfig:
    """Options of the demo.

    Attributes:
        output: Directory to write.
        base: Pretrained softmax pipeline; None takes the one that the package ships.
        from_scratch: Pretrain the base pipeline first, which takes over an hour on a CPU and a checkout of the
            repository.
        pretraining: With `from_scratch`, changes to `PretrainingConfig`; for tests.
        seed: Seed of everything random.
        resume: Resume an earlier, stopped run in `output`.
        blocks: Blocks of the MHLA copies along frames, rows and columns of the 5x8x8 token grid.
        layers: Layers to convert in all copies, in the syntax of `mhla-hf convert`. The default keeps every third one
            softmax, as the paper's hybrid Wan does.
        match_steps: Steps that match each layer's output to the softmax model's; None for the recipe's.
        distill_steps: Steps that match the whole model's prediction; None for the recipe's.
        train_videos: Videos to train on.
        held_out_videos: Videos of held-out scans, for the losses that are reported.
        draws: Noise draws of each held-out video.
        prompts: Captions to generate.
        inference_steps: Denoising steps.
        guidance: Guidance scale.
        progress: Show progress.

    Raises:
        ValueError: If a value is not allowed; the message names the option.
    """

    output: Path
    base: Path | None = None
    from_scratch: bool = False
    pretraining: dict[str, Any] = dataclasses.field(default_factory=dict)
    seed: int = 0
    resume: bool = True
    blocks: tuple[int, int, int] = (5, 4, 4)
    layers: str = "2/3"
    match_steps: int | None = None
    distill_steps: int | None = None
    train_videos: int = 160
    held_out_videos: int = 48
    draws: int = 2
    prompts: tuple[str, ...] = DEFAULT_PROMPTS
    inference_steps: int = 20
    guidance: float = 4.0
    progress: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "output", Path(self.output).expanduser())
        if self.base is not None:
            object.__setattr__(self, "base", Path(self.base).expanduser())
        for name in ("blocks", "prompts"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        for name in ("match_steps", "distill_steps", "train_videos", "held_out_videos", "draws", "inference_steps"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if not 0 <= self.seed < 2**31:
            raise ValueError(f"seed must be from 0 to {2**31 - 1}, got {self.seed}")
        if not 0 <= self.guidance < math.inf:
            raise ValueError(f"guidance must be a finite number of at least 0, got {self.guidance}")
        if not self.prompts or not all(prompt.strip() for prompt in self.prompts):
            raise ValueError("prompts must hold at least one caption, and none may be empty")
        if self.from_scratch and self.base is not None:
            raise ValueError("from_scratch trains a new base pipeline; leave base out")
        if self.base is not None and not (self.base / "model_index.json").is_file():
            raise ValueError(f"base={str(self.base)!r} is not the directory of a pipeline")

    def identity(self) -> dict[str, Any]:
        """Options that a resumed run must share with the original one, as plain JSON values."""
        options = {name: value for name, value in dataclasses.asdict(self).items() if name not in NOT_COMPARED}
        return json.loads(json.dumps(options, default=str))
