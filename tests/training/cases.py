# SPDX-License-Identifier: Apache-2.0
"""What tests of training need of each family: a tiny model, its MHLA version, samples, and the empty condition."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers import DiTTransformer2DModel, SanaTransformer2DModel

from mhla_hf import convert
from mhla_hf.families.objectives import Objective
from mhla_hf.training import DiTObjective, SanaObjective, WanObjective
from mhla_hf.training.data.latent_cache import MANIFEST, NULL_CONDITION, write_tensors
from mhla_hf.utils.files import write_json

from .. import tiny, tiny_images


TOKENS = 6
CLASSES = 10
DIT = {**tiny_images.DIT, "num_layers": 3, "num_embeds_ada_norm": CLASSES}


@dataclass(frozen=True)
class TrainingCase:
    """One family at its smallest.

    Attributes:
        objective: With the noise that it has by default.
        make_teacher: Makes the ordinary model.
        mhla: Options of its conversion; the first layer stays as it is.
        make_sample: Makes a sample of random numbers.
        null_condition: The condition of a sample without caption or class.
    """

    objective: Objective
    make_teacher: Callable[[], Any]
    mhla: dict[str, Any]
    make_sample: Callable[[torch.Generator], dict[str, torch.Tensor]]
    null_condition: dict[str, torch.Tensor]

    def student(self, teacher: Any) -> Any:
        """A converted copy of the teacher."""
        return convert(copy.deepcopy(teacher), self.mhla)

    def dataset(self, count: int = 5) -> list[dict[str, torch.Tensor]]:
        """Samples, always the same."""
        generator = torch.Generator().manual_seed(0)
        return [self.make_sample(generator) for _ in range(count)]


def _wan_sample(generator: torch.Generator) -> dict[str, torch.Tensor]:
    return {
        "latents": torch.randn(16, 3, 4, 8, generator=generator),
        "prompt_embeds": torch.randn(TOKENS, tiny.TEXT_DIM, generator=generator),
    }


def _sana_sample(generator: torch.Generator) -> dict[str, torch.Tensor]:
    return {
        "latents": torch.randn(4, 4, 6, generator=generator),
        "prompt_embeds": torch.randn(TOKENS, tiny_images.CAPTION_DIM, generator=generator),
        "prompt_attention_mask": (torch.arange(TOKENS) < 4).long(),
    }


def _dit_sample(generator: torch.Generator) -> dict[str, torch.Tensor]:
    return {
        "latents": torch.randn(4, 8, 8, generator=generator),
        "class_label": torch.randint(CLASSES, (), generator=generator),
    }


def video_samples(count: int, seed: int = 0) -> list[dict[str, torch.Tensor]]:
    """Samples of the tiny Wan pipeline at 32 by 32 pixels and five frames, of random numbers."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"latents": (16, 2, 4, 4), "prompt_embeds": (5, tiny.TEXT_DIM)}
    return [{name: torch.randn(shape, generator=generator) for name, shape in shapes.items()} for _ in range(count)]


def write_cache(directory: Path, settings: dict[str, Any], count: int, seed: int = 0) -> None:
    """Write a finished cache of random latents: the encoders have tests of their own."""
    names = [f"{number:06d}.safetensors" for number in range(count)]
    (directory / "samples").mkdir(parents=True)
    for name, tensors in zip(names, video_samples(count, seed), strict=True):
        write_tensors(directory / "samples" / name, tensors)
    write_tensors(directory / NULL_CONDITION, {"prompt_embeds": torch.ones(1, tiny.TEXT_DIM)})
    manifest = {"settings": settings, "complete": True, "samples": names}
    finished = {"buckets": [0] * count, "skipped": [], "classes": {}}
    write_json(directory / MANIFEST, {**manifest, **finished, "samples_digest": str(seed)})


class Interrupted(Exception):
    """Stands for a crash at a given step."""


def crash_at(stage: str, step: int) -> Callable[[str, int, float], None]:
    """A callback of a run that interrupts it."""

    def callback(at_stage: str, at_step: int, loss: float) -> None:
        if (at_stage, at_step) == (stage, step):
            raise Interrupted

    return callback


CASES = {
    "wan": TrainingCase(
        objective=WanObjective(flow_shift=3.0),
        make_teacher=lambda: tiny.wan_transformer(num_layers=3),
        mhla={"blocks": (1, 2, 2), "output_gate": True, "layers": [1, 2]},
        make_sample=_wan_sample,
        null_condition={"prompt_embeds": torch.zeros(TOKENS, tiny.TEXT_DIM)},
    ),
    "sana": TrainingCase(
        objective=SanaObjective(flow_shift=3.0),
        make_teacher=lambda: tiny.make(SanaTransformer2DModel, tiny_images.SANA, num_layers=3),
        # By default MHLA is what SANA has already; with a gate and a norm there is something to match.
        mhla={"blocks": (2, 2), "output_gate": True, "output_norm": True, "layers": [1, 2]},
        make_sample=_sana_sample,
        null_condition={
            "prompt_embeds": torch.zeros(TOKENS, tiny_images.CAPTION_DIM),
            "prompt_attention_mask": (torch.arange(TOKENS) < 1).long(),
        },
    ),
    "dit": TrainingCase(
        objective=DiTObjective(),
        make_teacher=lambda: tiny.make(DiTTransformer2DModel, DIT),
        mhla={"blocks": (2, 2), "output_gate": True, "layers": [1, 2]},
        make_sample=_dit_sample,
        null_condition={"class_label": torch.tensor(CLASSES)},
    ),
}
