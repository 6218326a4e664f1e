# SPDX-License-Identifier: Apache-2.0
"""Data drawn with the teacher, where there are none: latents of diffusion pipelines, and texts of language models."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from ...layers.mhla import MHLA
from ...utils.files import atomic_file
from ...utils.locks import take_lock
from ..config import GENERATED, LONGEST_TEXT, MOST_SAMPLES, CacheConfig
from ..matching.teacher import SharedTeacher
from .data_order import stable_seed
from .encoding import Encoder
from .fingerprints import folder_fingerprint, model_fingerprint
from .samples import DataSample
from .tokens import TokenTable


_DEFAULT_SAMPLES = 256
_ROWS_AT_ONCE = 8


def read_prompts(path: str | Path) -> list[str]:
    """The lines of a text file, without empty ones.

    Raises:
        ValueError: If the file cannot be read as UTF-8, has no text, or too much.
    """
    try:
        lines = Path(path).expanduser().read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise ValueError(f"prompts: {path} cannot be read as a text file ({error})"[:400]) from error
    prompts = [line.strip() for line in lines if line.strip()]
    if not prompts:
        raise ValueError(f"prompts: {path} has no text; give one prompt a line")
    if len(prompts) > MOST_SAMPLES or max(map(len, prompts)) > LONGEST_TEXT:
        raise ValueError(f"prompts: {path} may have {MOST_SAMPLES:,} lines of {LONGEST_TEXT:,} characters at most")
    return prompts


@dataclass(frozen=True, kw_only=True)
class LatentGenerator:
    """Draws samples with a diffusion pipeline that has its original attention, as the cache step takes data.

    Args:
        directory: The ordinary pipeline.
        config: The options, sizes among them.
        num_classes: How many classes the model has; 0 if it is conditioned on text.
        seed: Seed of the noise; each sample has one of its own that follows from it.
        device: Where the pipeline runs.
    """

    directory: Path
    config: CacheConfig
    num_classes: int
    seed: int
    device: torch.device
    _captured: list[torch.Tensor] = field(default_factory=list)

    def settings(self, component: str) -> dict[str, Any]:
        """What the samples depend on besides the options: the transformer, the scheduler and the seed."""
        parts = {f"teacher_{name}": folder_fingerprint(self.directory / name) for name in (component, "scheduler")}
        return {**parts, "generated_seed": self.seed}

    def samples(self) -> list[DataSample]:
        """What is to be drawn: the prompts in turn, or all classes in turn."""
        config, conditions = self.config, list[str | int](range(self.num_classes))
        if config.prompts is not None:
            if self.num_classes:
                raise ValueError("prompts must not be given for a model of classes: data='generated' draws them all")
            conditions = [*read_prompts(config.prompts)]
        elif not self.num_classes:
            raise ValueError("prompts must be given for data='generated': a text file with one prompt a line")
        count = config.num_samples or _DEFAULT_SAMPLES

        def sample(number: int) -> DataSample:
            condition = conditions[number % len(conditions)]
            return DataSample(f"{GENERATED}:{number}", condition, lambda: self.draw(condition, number))

        return [sample(number) for number in range(count)]

    @cached_property
    def pipeline(self) -> Any:
        """The pipeline."""
        from diffusers import DiffusionPipeline

        pipeline = DiffusionPipeline.from_pretrained(self.directory).to(self.device)
        pipeline.set_progress_bar_config(disable=True)
        if self.num_classes:
            # DiT's pipeline has no way to hand out its latents.
            def decode(latents: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
                self._captured[:] = [latents * pipeline.vae.config.scaling_factor]
                return SimpleNamespace(sample=latents.new_zeros(len(latents), 3, 1, 1))

            pipeline.vae.decode = decode
        return pipeline

    @torch.no_grad()
    def draw(self, condition: str | int, number: int) -> torch.Tensor:
        """The latents `[C, ...]` that the pipeline ends with, fp32.

        Args:
            condition: Prompt or class.
            number: Number of the sample.
        """
        config = self.config
        options: dict[str, Any] = {"height": config.height, "width": config.width, "num_frames": config.num_frames}
        if self.num_classes:
            options = {"class_labels": [condition], "output_type": "np"}
        else:
            options = {"prompt": condition, "output_type": "latent", **options}
            options["max_sequence_length"] = config.max_sequence_length
        options["num_inference_steps"] = config.generated_steps
        options["guidance_scale"] = config.generated_guidance
        generator = torch.Generator().manual_seed(stable_seed(self.seed, GENERATED, number))
        given = {name: value for name, value in options.items() if value is not None}
        output = self.pipeline(**given, generator=generator, return_dict=False)[0]
        return (self._captured.pop() if self.num_classes else output)[:1][0].float().cpu()


class GeneratedEncoder(Encoder):
    """An encoder of conditions, for samples that are latents already."""

    def __init__(self, encoder: Encoder) -> None:
        super().__init__(encoder.pipeline, encoder.config, encoder.num_classes)
        self.encoder = encoder

    def latents(self, media: torch.Tensor) -> torch.Tensor:
        """The sample itself."""
        return media

    def condition(self, condition: str | int) -> dict[str, torch.Tensor]:
        """See the base class."""
        return self.encoder.condition(condition)

    def null_condition(self) -> dict[str, torch.Tensor]:
        """See the base class."""
        return self.encoder.null_condition()


def generate_text(
    model: nn.Module,
    folder: Path,
    *,
    rows: int,
    length: int,
    prompts: Sequence[Sequence[int]] | None = None,
    temperature: float = 1.0,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> TokenTable:
    """Texts of a language model as rows of tokens, sampled with its original attention.

    Rows that are there already are kept, so the call can be killed and repeated.

    Args:
        model: A softmax model, or a converted one whose other weights are those of its original.
        folder: Folder that keeps them.
        rows: How many.
        length: Tokens of each.
        prompts: Tokens that rows start with, in turn; `None` starts with the beginning-of-text token.
        temperature: Of sampling; 1 draws from what the model predicts.
        seed: Each row has a seed of its own that follows from it.
        progress: Called with the number of rows that are there and of all.

    Raises:
        ValueError: If the model generates no text, has no beginning-of-text token and no prompts are given, or a
            number is out of range.
    """
    config: Any = model.config
    if not callable(getattr(model, "generate", None)) or not getattr(model, "can_generate", lambda: False)():
        raise ValueError(
            f"data='generated' needs a model that generates, and {type(model).__name__} does not: give a folder of "
            "texts or pictures"
        )
    if rows < 2 or length < 2 or not temperature > 0:
        raise ValueError(
            f"rows and length must be at least 2 and temperature above 0, got {rows}, {length}, {temperature}"
        )
    first = config.bos_token_id if config.bos_token_id is not None else config.eos_token_id
    if prompts is None and first is None:
        raise ValueError("prompts must be given: the model has no token that texts begin with")
    starts = [list(prompt)[: length - 1] for prompt in prompts or [[first]]]
    if not all(starts):
        raise ValueError("prompts must have a token each")
    identity = {
        "model": model_fingerprint(model), "rows": rows, "length": length, "starts": starts,
        "temperature": temperature, "seed": seed,
    }  # fmt: skip
    fingerprint = f"{stable_seed(json.dumps(identity, sort_keys=True)):016x}"
    folder = folder / f"generated-{fingerprint}"
    folder.mkdir(parents=True, exist_ok=True)
    pieces = []
    lock = take_lock(folder / ".lock", f"{folder} is in use by another run; wait for it")
    with lock or nullcontext():
        for start in range(0, rows, _ROWS_AT_ONCE):
            path = folder / f"rows-{start:08d}.safetensors"
            numbers = range(start, min(start + _ROWS_AT_ONCE, rows))
            piece = _read_rows(path, len(numbers), length)
            if piece is None:
                seeds = [stable_seed(seed, GENERATED, number) for number in numbers]
                drawn = [
                    _row(model, starts[number % len(starts)], length, temperature, own)
                    for number, own in zip(numbers, seeds, strict=True)
                ]
                piece = torch.stack(drawn).int()
                with atomic_file(path) as temporary:
                    save_file({"tokens": piece}, temporary)
            pieces.append(piece)
            if progress is not None:
                progress(numbers.stop, rows)
    tokens = torch.cat(pieces).flatten()
    return TokenTable(tokens, torch.arange(0, rows * length + 1, length), 0, fingerprint)


@torch.no_grad()
def _row(model: Any, start: list[int], length: int, temperature: float, seed: int) -> torch.Tensor:
    """One row `[length]`, sampled token by token from a seed of its own."""
    device = next(model.parameters()).device
    tokens = torch.tensor([start], device=device)
    generator = torch.Generator().manual_seed(seed)
    converted = any(isinstance(module, MHLA) for module in model.modules())
    teacher: Any = SharedTeacher(model) if converted else model.eval()
    cache: Any = None
    while tokens.shape[1] < length:
        # A converted model's cache holds the state of MHLA, which its original attention has no use for.
        inputs = tokens if converted or cache is None else tokens[:, -1:]
        output = teacher(
            input_ids=inputs, use_cache=not converted, **({} if cache is None else {"past_key_values": cache})
        )
        cache = None if converted else output.past_key_values
        chances = (output.logits[0, -1].float().cpu() / temperature).softmax(-1)
        drawn = torch.multinomial(chances, 1, generator=generator)
        tokens = torch.cat([tokens, drawn[None].to(device)], dim=1)
    return tokens[0].cpu()


def _read_rows(path: Path, rows: int, length: int) -> torch.Tensor | None:
    """Rows that are there; None if there are none, or damaged ones."""
    if not path.is_file():
        return None
    try:
        tokens = load_file(path)["tokens"]
    except (OSError, SafetensorError, KeyError):
        return None
    return tokens if tokens.shape == (rows, length) and not tokens.is_floating_point() else None
