# SPDX-License-Identifier: Apache-2.0
"""Options of the demo. Importing this module loads no torch, so that the command line starts quickly."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..utils.options import Options, option


GRID, BLOCKS = (5, 8, 8), (5, 4, 4)
"""Tokens of a video and blocks of the MHLA copies, along frames, rows and columns."""

PROMPTS = ("a six moves up", "a two moves left", "a six moves right")
"""Captions of the videos that the demo generates. With their noise MHLA and linear attention look alike in the first,
linear attention fails in the second, and MHLA blurs in the third, though less than linear attention."""

SIZE = {"height": 64, "width": 64, "num_frames": 17}
"""Size of a video in pixels and frames."""

TITLES = {"softmax": "softmax", "mhla": "MHLA", "mhla_window": "MHLA + window", "linear": "linear"}
"""Names of the models in pictures and tables."""


def base_pipeline_directory() -> Path:
    """Directory of the pretrained softmax pipeline that comes with the package."""
    return Path(__file__).resolve().parent.parent / "assets" / "digits_wan"


@dataclass(frozen=True, kw_only=True)
class DemoConfig(Options):
    """Options of the demo; their help describes them.

    Raises:
        ValueError: If a value is not allowed; the message names the option.
    """

    output: str = option("demo-output", "Directory to write.")
    base: str | None = option(
        None,
        "Directory of a pretrained softmax pipeline, as `python -m conversion.digits` makes them. Default: the one in "
        "the package.",
    )
    seed: int = option(0, "Seed of all random numbers.", minimum=0, maximum=2**31 - 1)
    resume: bool = option(True, "Resume a stopped demo, or start again.")
    layers: str = option("2/3", "Layers to convert in all copies, in the syntax of `mhla-hf convert`.")
    match_steps: int | None = option(None, "Steps that match each layer's output to softmax.", minimum=1)
    blocks_steps: int | None = option(None, "Steps that match a block's output, on average.", minimum=1)
    distill_steps: int | None = option(None, "Steps that then match the model's prediction. Default: 0.", minimum=1)
    train_videos: int = option(160, "Videos to train on.", minimum=1)
    held_out_videos: int = option(48, "Videos of held-out scans to compare on.", minimum=1)
    prompts: tuple[str, ...] = option(PROMPTS, "Captions to generate.")
    long_frames: int = option(
        257, "Frames of the longer video that compares speed; a multiple of 8 plus 1.", minimum=9, maximum=505
    )
    inference_steps: int = option(20, "Denoising steps.", minimum=1)
    guidance: float = option(4.0, "Guidance scale.", minimum=0)
    progress: bool = option(True, "Show progress on standard error.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.prompts or not all(self.prompts):
            raise ValueError(f"prompts must be captions, got {self.prompts!r:.100}.")
        if self.long_frames % 8 != 1:
            raise ValueError(f"long_frames={self.long_frames} must be a multiple of 8 plus 1, such as 129 or 257.")

    @property
    def directory(self) -> Path:
        """The directory to write."""
        return Path(self.output).expanduser()

    @property
    def base_directory(self) -> Path:
        """The softmax pipeline to start from."""
        return base_pipeline_directory() if self.base is None else Path(self.base).expanduser()
