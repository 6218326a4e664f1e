# SPDX-License-Identifier: Apache-2.0
"""What tests of training need of each family: a tiny model, its MHLA version, samples, and the empty condition."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from mhla_hf import convert
from mhla_hf.training import DiTObjective, SanaObjective, WanObjective
from mhla_hf.training.stages.objectives import Objective

from .. import tiny, tiny_images


TOKENS = 6
CLASSES = 10


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
        make_teacher=lambda: tiny_images.sana_transformer(num_layers=3),
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
        make_teacher=lambda: tiny_images.dit_transformer(num_layers=3, num_embeds_ada_norm=CLASSES),
        mhla={"blocks": (2, 2), "output_gate": True, "layers": [1, 2]},
        make_sample=_dit_sample,
        null_condition={"class_label": torch.tensor(CLASSES)},
    ),
}
