# SPDX-License-Identifier: Apache-2.0
"""Data of recoveries and probes: from the user's `--data` to batches for the model's family."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from ..models.directory import ModelDirectory
from ..models.registry import is_mhla_class
from ..models.source import Component
from ..training.config import CacheConfig, TrainingConfig
from ..training.data.batches import BatchSource, Latents, RecordedCalls
from ..training.data.cache import CachePlan, LatentDataset, make_cache, read_prompts
from ..training.data.images import image_batches, open_images
from ..training.data.probes import pipeline_batches
from ..training.data.texts import ROW_LENGTH, PackedText, generate_text, open_texts, text_batches
from ..training.families import objective_for
from ..training.matching.layers import Batch, mhla_layers
from ..utils.locations import PIPELINE_INDEX
from .recipes import TEXT, TRANSFORMERS, Recipe


GENERATED = "generated"
DATA_FREE = ("pixart",)
"""Families without an objective of training: the inputs of their model while the pipeline makes samples are enough to
calibrate and match on."""


@dataclass(frozen=True, kw_only=True)
class RecoveryData:
    """The data of a recovery.

    Attributes:
        root: Directory of the original.
        component: The model that is recovered.
        recipe: The recipe.
        data: The user's data; `generated` for samples of the original, `None` where the family takes nothing else.
        converted: The converted directory.
        cache: Folder to keep them in.
        seed: Seed of their order.
        progress: Show progress.
        prompts: Text file with one prompt a line, for samples of the original.
    """

    root: Path
    component: Component
    recipe: Recipe
    data: str | None
    converted: Path
    cache: Path
    seed: int
    progress: bool
    prompts: str | None

    def check(self) -> None:
        """Check the data before anything is converted, encoded or generated.

        Raises:
            ValueError: If there are no such data, or they do not fit the model.
        """
        family, options, data = self.recipe.family, self.recipe.data, self.data
        unused = "prompts" if family in TRANSFORMERS and self.prompts is not None else ""
        unused = "data" if family in DATA_FREE and data is not None else unused
        if unused:
            raise ValueError(f"{unused} have no effect on models of the family {family}; leave them out")
        if family in DATA_FREE:
            if self.prompts is not None:
                read_prompts(self.prompts)
            return
        assert data is not None
        if family == "causal" and data == GENERATED:
            return
        if family in TEXT:
            config = self.component.load_config()
            corpus, _, _ = open_texts(config, self.root, data, options.max_length, options.text_field)
            # Reads the first of them: a wrong field, or a data set that the Hub does not have.
            next(corpus.documents(), None)
        elif family == "vision":
            open_images(self.component.load_config(), self.root, data)
        else:
            _, cache_config = self._cache_options("cpu")
            directory = ModelDirectory.read(self.root, self.component.name)
            CachePlan.make(directory, cache_config)

    def open(self, model: nn.Module) -> BatchSource:
        """Prepare the data once, as tokens or as latents and embeddings, and open them for the converted model.

        Raises:
            ValueError: If there are no such data, or they do not fit the model.
        """
        family, options, data = self.recipe.family, self.recipe.data, self.data
        if family in DATA_FREE:
            return self._recorded(model)
        assert data is not None
        if family == "causal" and data == GENERATED:
            return self._generated_text(model)
        amounts: dict[str, Any] = {"samples": options.samples, "held_out": options.held_out, "seed": self.seed}
        if family in TEXT:
            amounts |= {"length": options.max_length, "text_field": options.text_field}
            return text_batches(model, self.root, data, cache=self.cache, **amounts)
        if family == "vision":
            return image_batches(model, self.root, data, **amounts)
        self._make_cache(model)
        return _latents(model, self.root, self.cache, options.held_out, TrainingConfig(seed=self.seed))

    def _make_cache(self, model: nn.Module) -> None:
        """Encode images or videos to latents and embeddings."""
        from ..training.processes import make_accelerator

        device = "cpu" if next(model.parameters()).device.type == "cpu" else "auto"
        config, cache_config = self._cache_options(device)
        directory = ModelDirectory.read(self.root, self.component.name)
        make_cache(config, cache_config, make_accelerator(config), directory)

    def _cache_options(self, device: str) -> tuple[TrainingConfig, CacheConfig]:
        options = self.recipe.data
        config = TrainingConfig(
            model=str(self.root),
            component=self.component.name,
            cache=str(self.cache),
            mhla="none",
            device=device,
            progress=self.progress,
            seed=self.seed,
        )
        sides = (options.height, options.width, options.num_frames)
        given = [str(side) for side in sides[: 3 if options.num_frames else 2]]
        return config, CacheConfig(
            data=self.data,
            sizes=",".join(given) if any(sides) else None,
            num_samples=options.samples + options.held_out,
            prompts=self.prompts,
        )

    def _recorded(self, model: nn.Module) -> BatchSource:
        """Record inputs of the model while the pipeline samples with the original attention."""
        from diffusers import DiffusionPipeline

        options, name = self.recipe.data, self.component.name
        pipeline = DiffusionPipeline.from_pretrained(self.converted, **{name: model})
        calls = pipeline_batches(
            pipeline.to(next(model.parameters()).device),
            samples=options.samples + options.held_out,
            prompts=None if self.prompts is None else read_prompts(self.prompts),
            seed=self.seed,
            height=options.height,
            width=options.width,
        )
        return RecordedCalls(calls[name], options.held_out, self.seed)

    def _generated_text(self, model: nn.Module) -> BatchSource:
        """Generate rows of text with the original."""
        from transformers import AutoModelForCausalLM, AutoTokenizer

        options = self.recipe.data
        original = AutoModelForCausalLM.from_pretrained(self.component.folder).to(next(model.parameters()).device)
        rows, length = options.samples + options.held_out, options.max_length or ROW_LENGTH
        table = generate_text(original, self.cache, rows=rows, length=length, seed=self.seed)
        return PackedText(table, options.held_out, self.seed, AutoTokenizer.from_pretrained(self.root).decode)


def probe_batches(
    model: nn.Module,
    directory: Path,
    data: str,
    *,
    samples: int,
    batch_size: int,
    component: str,
    seed: int,
) -> list[Batch]:
    """Make batches of given data to calibrate on.

    Args:
        model: The converted model.
        directory: Its directory, or the pipeline's.
        data: For language models and encoders a folder of texts, a JSONL file, or the id of a data set; for vision
            models a folder of images or `digits`; for diffusion models the cache of a training.
        samples: Rows, passages, images or noisy latents.
        batch_size: Samples of a batch.
        component: Name of the model in a pipeline.
        seed: Seed of their order, and of noise.

    Raises:
        ValueError: If there are no such data, or they do not fit the model.
    """
    source: BatchSource
    if is_mhla_class(type(model).__name__):
        config = TrainingConfig(component=component, seed=seed)
        source = _latents(model, directory, Path(data).expanduser(), 1, config)
    elif any(len(layer.mhla.blocks) == 2 for layer in mhla_layers(model)):
        source = image_batches(model, directory, data, samples=samples, held_out=1, seed=seed)
    else:
        source = text_batches(model, directory, data, samples=samples, held_out=1, seed=seed)
    count = min(samples, 16 * len(source))
    batch_size = min(batch_size, count)
    return source.batches("calibrate", count // batch_size, batch_size)


def _latents(model: nn.Module, directory: Path, cache: Path, held_out: int, config: TrainingConfig) -> Latents:
    """Open cached latents with the objective of the model's pipeline, which adds noise."""
    pipeline = directory if (directory / PIPELINE_INDEX).is_file() else None
    return Latents(LatentDataset(cache), objective_for(model, pipeline, config), model, held_out, config.seed)
