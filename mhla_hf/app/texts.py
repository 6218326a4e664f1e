# SPDX-License-Identifier: Apache-2.0
"""Texts of language models, with the same random numbers."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch

from ..utils.machine import synchronize
from .generation import TITLES, Answer, Generator, number_field, prompt_field, seed_field, whole_field
from .limits import MAX_TEMPERATURE, Limits
from .models import Comparison
from .work import Control, Progress


class TextGenerator(Generator):
    """Texts of language models, with the same random numbers.

    Args:
        comparison: The models.
        limits: Bounds of what visitors may ask for.
    """

    def __init__(self, comparison: Comparison, limits: Limits) -> None:
        super().__init__(comparison, limits)
        self.fields = (
            prompt_field("Once upon a time", limits),
            whole_field("new_tokens", "New tokens", min(64, limits.new_tokens), 1, limits.new_tokens),
            number_field("temperature", "Temperature", 0.0, MAX_TEMPERATURE),
            seed_field(),
        )

    def generate(self, model: str, request: Mapping[str, Any], control: Control) -> Answer:
        from transformers import StoppingCriteriaList

        language_model, tokenizer = getattr(self.comparison, model), self.comparison.tokenizer
        device, total = self.comparison.device, request["new_tokens"]
        title = TITLES[model]
        control.limit(self.limits.seconds)
        if tokenizer.chat_template is not None:
            chat = [{"role": "user", "content": request["prompt"]}]
            inputs = tokenizer.apply_chat_template(
                chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
        else:
            inputs = tokenizer(request["prompt"], return_tensors="pt", return_token_type_ids=False)
        inputs = inputs.to(device)
        length = inputs["input_ids"].shape[1]

        def count(tokens: torch.Tensor, _: Any, **__: Any) -> torch.Tensor:
            control.check()
            control.progress = Progress(f"{title}: generating", tokens.shape[1] - length, total)
            return torch.zeros(len(tokens), dtype=torch.bool, device=tokens.device)

        control.progress = Progress(f"{title}: generating", 0, total)
        options: dict[str, Any] = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
        if request["temperature"]:
            options = {"do_sample": True, "temperature": request["temperature"]}
        if language_model.generation_config.pad_token_id is None:
            options["pad_token_id"] = tokenizer.pad_token_id or tokenizer.eos_token_id
        with torch.random.fork_rng(), control.checked_by([language_model]), torch.no_grad():
            torch.manual_seed(request["seed"])
            synchronize(device)
            began = time.perf_counter()
            tokens = language_model.generate(
                **inputs, max_new_tokens=total, stopping_criteria=StoppingCriteriaList([count]), **options
            )
            synchronize(device)
            seconds = time.perf_counter() - began
        new = tokens[0, length:]
        text = tokenizer.decode(new, skip_special_tokens=True)
        return Answer(text, seconds, "token", seconds / max(1, len(new)))
