# SPDX-License-Identifier: Apache-2.0
"""Data of recoveries and probes: from the user's `--data` to batches for the model's family."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from ..conversion.planning import PlanOptions
from ..conversion.transformers_planning import plan_transformers_model
from ..families.inputs import example_inputs
from ..integrations.transformers.configuration import max_positions
from ..integrations.transformers.modules import patch_grid
from ..matching.blockwise import record_bytes
from ..matching.records import choose_cache, free_room
from ..models.directory import ModelDirectory, find_pipeline
from ..models.registry import TRAINED, is_mhla_class, mhla_class_for
from ..training.config import DIGITS, GENERATED, LONGEST_TEXT, CacheConfig, TrainingConfig, parse_sizes
from ..training.data import probes
from ..training.data.batches import BatchSource, Latents, RecordedCalls, drawn_held_out, load_calls
from ..training.data.images import Images, image_batches, open_images
from ..training.data.latent_cache import MANIFEST, CachePlan, LatentDataset, make_cache, read_prompts
from ..training.data.order import folder_fingerprint, stable_seed
from ..training.data.texts import ROW_LENGTH, PackedText, generate_text, open_texts, text_batches
from ..training.layers import Batch, mhla_layers
from ..training.parameters import load_model
from ..training.processes import Processes, make_accelerator
from ..training.stages.diffusion import objective_for
from ..utils.locations import is_hub_id
from ..utils.machine import choose_device
from ..utils.messages import check_count, format_bytes
from .recipes import (
    DATA_FREE,
    TEXT,
    TRANSFORMERS,
    VIDEO,
    WITHOUT_OBJECTIVE,
    Recipe,
    choose_layers,
    models_of,
    packaged_recipes,
)


logger = logging.getLogger(__name__)

# Blocks of a row of text.
_LEAST_BLOCKS = 4
_TEXTS = "a folder of .txt, .md, .rst or .py files, a .jsonl file, or the id of a data set"
_MEDIA = "a folder of {} with captions, 'digits', or prompts (--prompts FILE) for the original to make"
_DATA = {
    "causal": _TEXTS,
    "encoder": _TEXTS,
    "vision": "a folder of images, or 'digits'",
    **dict.fromkeys(VIDEO, _MEDIA.format("videos")),
}


def data_or_default(data: Any, family: str, has_prompts: bool) -> Any:
    """Return the data of a recovery: what was given, else samples that the original makes where it can.

    Raises:
        ValueError: If data are needed and the original cannot make them.
    """
    makes_data = family == "causal" or (family in TRAINED and (has_prompts or not TRAINED[family].text_tokens))
    if data == "" or (data is None and not makes_data and family not in DATA_FREE):
        raise ValueError(f"data must be given: {_DATA.get(family, _MEDIA.format('images'))}")
    return GENERATED if data is None and family not in DATA_FREE else data


def origin_of(data: str | None) -> dict[str, str]:
    """Return the part of the data's origin that may be published: ids and names, never a user's paths."""
    if data is None or Path(data).expanduser().exists():
        return {}
    known = data in (GENERATED, DIGITS) or is_hub_id(data.partition(":")[0])
    return {"origin": data} if known else {}


def family_of_transformers(part: ModelDirectory) -> str | None:
    """`causal`, `encoder` or `vision`, from the options that a model would have; `None` if it has several towers."""
    options = plan_transformers_model(part, None, PlanOptions()).report.mhla
    if "causal" not in options:
        return None
    return "vision" if len(options.get("grid") or ()) == 2 else "causal" if options["causal"] else "encoder"


def check_samples(part: ModelDirectory, data: str, length: int | None = None, text_field: str | None = None) -> None:
    """Check texts, images or a cache for a model before it is converted; of models with several towers nothing.

    Args:
        part: The model.
        data: See [`open_data`][mhla_hf.recovery.data.open_data].
        length: See `text_batches`.
        text_field: See `text_batches`.

    Raises:
        ValueError: If there are no such data, fewer than two samples, or they do not fit the model.
    """
    family = family_of_transformers(part) if part.is_transformers else part.component
    if family in TEXT:
        open_texts(part.load_config(), part.root, data, family == "causal", 2, length, text_field)
    elif family == "vision":
        open_images(part.load_config(), part.root, data)
    elif family is not None:
        drawn_held_out(len(LatentDataset(Path(data).expanduser())), 1)


@dataclass(frozen=True, kw_only=True)
class RecoveryData:
    """The data of a recovery.

    Attributes:
        directory: The original.
        recipe: The recipe.
        data: The user's data; `generated` for samples of the original, `None` to learn from calls of its pipeline.
        hub: Options that the original was opened with.
        cache: Folder to keep them in.
        seed: Seed of their order.
        progress: Show progress.
        prompts: Text file with one prompt per line, for samples of the original.
        accelerator: The processes that share the run; `None` for one alone.
    """

    directory: ModelDirectory
    recipe: Recipe
    data: str | None
    hub: Mapping[str, Any]
    cache: Path
    seed: int
    progress: bool
    prompts: str | None
    accelerator: Accelerator | None = None

    def check(self) -> None:
        """Check the data before anything is converted, encoded or generated.

        Raises:
            ValueError: If there are no such data, or they do not fit the model.
        """
        family, options, data = self.recipe.family, self.recipe.data, self.data
        unused = "prompts" if family in TRANSFORMERS and self.prompts is not None else ""
        unused = "data" if family in {*DATA_FREE} & {*WITHOUT_OBJECTIVE} and data is not None else unused
        if unused:
            raise ValueError(f"{unused} have no effect on {models_of(family)}; leave them out")
        if family in DATA_FREE and data is None:
            if self.recipe.needs_objective:
                kinds = _DATA.get(family, _MEDIA.format("images"))
                raise ValueError(f"data must be given to distill or finetune: {kinds}, with --data generated")
            if self.prompts is not None:
                read_prompts(self.prompts)
            self._check_room(options)
            return
        assert data is not None
        if family == "causal" and data == GENERATED:
            return
        if family in TRANSFORMERS:
            check_samples(self.directory, data, options.max_length, options.text_field)
        else:
            _, cache_config = self._cache_options("cpu")
            plan = CachePlan(self.directory, cache_config)
            drawn_held_out(len(plan.samples), options.held_out)
            plan.check_samples(2)
            self._check_room(parse_sizes(str(plan.config.sizes))[0])

    @property
    def size(self) -> tuple[int, int] | None:
        """Height and width of the samples, where both are given."""
        options = self.recipe.data
        return None if options.height is None or options.width is None else (options.height, options.width)

    def fitted(self) -> Recipe:
        """The recipe with blocks that fit the samples, where it names none.

        Blocks of vision models are made for the token grid of the images, which need not be the configuration's. Rows
        of text have a few blocks at least: with a single one, MHLA is linear attention.
        """
        recipe, mhla = self.recipe, self.recipe.mhla
        if recipe.family == "causal":
            return self._with_blocks_of_rows()
        if recipe.family != "vision" or mhla.get("grid") or self.data is None:
            return recipe
        config = self.directory.load_config()
        processor, images, _ = open_images(config, self.directory.root, self.data)
        source = Images([*images.values()], processor, 1, "", size=self.size)
        found = patch_grid(config, *source.batch("start", 0, 1)["pixel_values"].shape[-2:])
        if found == (usual := patch_grid(config)):
            return recipe
        logger.warning(
            "images have %d x %d patches, and %d x %d in the model's configuration: the blocks are made for those of "
            "the images (--height and --width choose another size)",
            *found,
            *usual,
        )
        return recipe.changed({"mhla.grid": [*found]})

    def _with_blocks_of_rows(self) -> Recipe:
        every = PlanOptions(layers="all")
        block = plan_transformers_model(self.directory, dict(self.recipe.mhla), every).report.mhla["block_size"][0]
        longest = max_positions(self.directory.load_config().get_text_config()) or LONGEST_TEXT
        length = min(self.recipe.data.max_length or ROW_LENGTH, longest)
        if _LEAST_BLOCKS * block <= length:
            return self.recipe
        own = 2 ** int(math.log2(max(1, length // _LEAST_BLOCKS)))
        is_given = self.recipe.mhla.get("block_size") is not None
        advice = "give longer rows (--max-length)" if is_given else f"they get blocks of {own} (--block-size)"
        logger.warning(
            "rows of %d tokens have fewer than %d blocks of %d, and MHLA with a single one is linear attention: %s",
            *(length, _LEAST_BLOCKS, block, advice),
        )
        return self.recipe if is_given else self.recipe.changed({"mhla.block_size": [own]})

    def _check_room(self, size: Any) -> None:
        """Check that what the stages keep of this many samples fits into memory, or on the disk.

        Args:
            size: Its `height`, `width` and `num_frames` are those of samples; `None` for the model's own.

        Raises:
            ValueError: If it does not.
        """
        recipe, sides = self.recipe, ("height", "width", *(["num_frames"] if self.recipe.family in VIDEO else []))
        given = {name: getattr(size, name) for name in sides if getattr(size, name) is not None}
        match, blocks = (recipe.stages.get(name) for name in ("match", "blockwise"))
        if match is None and blocks is None:
            return
        with torch.device("meta"):
            config = {**self.directory.config, "mhla": dict(recipe.mhla)}
            model = mhla_class_for(self.directory.class_name).from_config(config)
        layers = mhla_layers(model)
        names = {layers[index].name for index in choose_layers(recipe.layers, len(layers))}
        grid = self.directory.sample_grid(**given)
        batch = example_inputs(model, grid, torch.float32, torch.device("meta"), text=recipe.data.max_length or 0)
        kept, from_calls = record_bytes(model, batch, names), self.data is None
        of_layers, of_blocks = recipe.record_bytes(*kept, from_calls)
        smaller = [
            name
            for name, other in packaged_recipes(recipe.family).items()
            if sum(other.record_bytes(*kept, from_calls)) < of_layers + of_blocks
        ]
        advice = f"; --recipe {' or '.join(smaller)} needs less" if smaller else ""
        tokens = f"of {math.prod(grid):,} tokens"
        folder = next(each for each in self.cache.absolute().parents if each.is_dir())
        memory, disk = free_room(folder)
        if of_blocks > memory:
            assert blocks is not None
            raise ValueError(
                f"blockwise.batches: the hidden states of {blocks.batches} batches {tokens} need "
                f"{format_bytes(of_blocks)}, more than half of the free memory, {format_bytes(memory)}: use fewer "
                f"batches{advice}"
            )
        if match is not None and match.cache != "none":
            try:
                place = choose_cache(match.cache, [of_layers], [(memory, disk)])
            except ValueError as error:
                raise ValueError(f"match.{str(error).removesuffix('.')}{advice}") from error
            if place == "none":
                logger.warning(
                    "matching: activations %s need %s and will not fit, so that every step runs the original; use "
                    "fewer batches (match.batches)%s",
                    tokens,
                    format_bytes(of_layers),
                    advice,
                )
            elif place == "disk":
                logger.info("matching will keep %s on the disk", format_bytes(of_layers))

    def open(self, model: nn.Module) -> BatchSource:
        """Prepare the data once, as tokens or as latents and embeddings, and open them for a model with MHLA.

        Of several processes each encodes its share of images or videos; the first one makes everything else, and the
        others read it.

        Raises:
            ValueError: If there are no such data, or they do not fit the model.
        """
        if self.recipe.family not in TRANSFORMERS and self.data is not None:
            self._make_cache(model)
        return Processes(alone=self.accelerator is None).in_turn(lambda: self._open(model))

    def _open(self, model: nn.Module) -> BatchSource:
        family, options, data = self.recipe.family, self.recipe.data, self.data
        if data is None:
            return self._recorded(model)
        if family == "causal" and data == GENERATED:
            return self._generated_text(model)
        if family not in TRANSFORMERS:
            data = str(self.cache)
        amounts: dict[str, Any] = {"samples": options.samples, "held_out": options.held_out, "seed": self.seed}
        of_text: dict[str, Any] = {"length": options.max_length, "text_field": options.text_field}
        return open_data(model, self.directory, data, size=self.size, **amounts, **of_text)

    def _make_cache(self, model: nn.Module) -> None:
        """Encode images or videos to latents and embeddings."""
        device = "cpu" if next(model.parameters()).device.type == "cpu" else "auto"
        config, cache_config = self._cache_options(device)
        make_cache(config, cache_config, self.accelerator or make_accelerator(config), self.directory)

    def _cache_options(self, device: str) -> tuple[TrainingConfig, CacheConfig]:
        options = self.recipe.data
        config = TrainingConfig(
            model=str(self.directory.root),
            component=self.directory.component,
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
            max_sequence_length=options.max_length,
            prompts=self.prompts,
        )

    def _recorded(self, model: nn.Module) -> BatchSource:
        """Record inputs of the model while the pipeline samples with the original attention."""
        from diffusers import DiffusionPipeline

        options, name = self.recipe.data, self.directory.component
        chosen = {
            "samples": options.samples + options.held_out,
            "prompts": None if self.prompts is None else read_prompts(self.prompts),
            "seed": self.seed,
            "max_sequence_length": options.max_length,
            **{side: getattr(options, side) for side in ("height", "width", "num_frames")},
        }
        root = find_pipeline(self.directory.location, **self.hub)
        parts = [root / part for part in sorted(self.directory.index or ())]
        weights = [folder_fingerprint(part) for part in parts if part.is_dir()]
        fingerprint = f"{stable_seed(name, chosen, weights):016x}"
        kept = self.cache / f"{fingerprint}.safetensors"
        if kept.is_file():
            return RecordedCalls(load_calls(kept), options.held_out, fingerprint, self.seed)
        pipeline = DiffusionPipeline.from_pretrained(root, **{name: model})
        calls = probes.pipeline_batches(pipeline.to(next(model.parameters()).device), **chosen)[name]
        source = RecordedCalls(calls, options.held_out, fingerprint, self.seed)
        source.save(kept)
        return source

    def _generated_text(self, model: nn.Module) -> BatchSource:
        """Generate rows of text with the original."""
        from transformers import AutoModelForCausalLM, AutoTokenizer

        options = self.recipe.data
        original = AutoModelForCausalLM.from_pretrained(self.directory.folder).to(next(model.parameters()).device)
        rows, length = options.samples + options.held_out, options.max_length or ROW_LENGTH
        table = generate_text(original, self.cache, rows=rows, length=length, seed=self.seed)
        return PackedText(
            table, options.held_out, self.seed, AutoTokenizer.from_pretrained(self.directory.root).decode
        )


def open_probe(
    parts: Sequence[ModelDirectory],
    mhla: dict[str, Any] | None = None,
    *,
    data: str | None = None,
    samples: int = probes.DEFAULT_SAMPLES,
    batch_size: int = 4,
    seed: int = 0,
    device: str | None = None,
    **call_options: Any,
) -> tuple[dict[str, nn.Module], Mapping[str, Sequence[Batch]], dict[str, Any]]:
    """Load the models of a directory in fp32, and make batches for each.

    Args:
        parts: Models of one directory.
        mhla: Options to convert them with; `None` for models that are MHLA.
        data: See [`open_data`][mhla_hf.recovery.data.open_data]. Pipelines need none.
        samples: Samples of the probe, from 4 (2 of `data`) to 65,536.
        batch_size: Samples of a batch, of `data`, at most 65,536.
        seed: Seed of the probe.
        device: Name of a device, by default a GPU if there is one.
        **call_options: `prompts` of a pipeline's probe, and arguments of its call, such as `height` and `width`.

    Returns:
        The models and their batches, by component, and a record of the probe.

    Raises:
        ValueError: If data are missing, or an argument is wrong.
    """
    check_count("samples", samples, probes.LEAST_SAMPLES if data is None else 2, probes.MOST_SAMPLES)
    check_count("batch_size", batch_size, 1, probes.MOST_SAMPLES)
    torch_device, root = choose_device(device), parts[0].root
    origin = {"data": data or "samples of the pipeline", "samples": samples, "seed": seed}
    if data is not None:
        if unused := sorted(name for name, value in call_options.items() if value is not None):
            raise ValueError(f"{', '.join(unused)}: of no use beside data.")
        models, found = {}, {}
        for part in parts:
            models[part.component] = model = load_model(part, mhla).to(torch_device).eval()
            source = open_data(model, part, data, samples=samples, held_out=1, seed=seed)
            count = min(samples, 16 * len(source))
            size = min(batch_size, count)
            found[part.component] = source.batches("calibrate", count // size, size)
        return models, found, origin
    if parts[0].index is None:
        raise ValueError(f"data must be given: {root} is a model without a pipeline, which cannot generate samples.")
    from ..pipelines import load_pipeline

    chosen: dict[str, Any] = {"attn_implementation": None}
    if mhla is not None:
        chosen = {"mhla": {part.component: mhla for part in parts}}
    pipeline = load_pipeline(root, torch_dtype=torch.float32, **chosen).to(torch_device)
    models = {part.component: getattr(pipeline, part.component) for part in parts}
    return models, probes.pipeline_batches(pipeline, samples=samples, seed=seed, **call_options), origin


def open_data(
    model: nn.Module,
    directory: ModelDirectory,
    data: str,
    *,
    samples: int,
    held_out: int,
    seed: int,
    size: tuple[int, int] | None = None,
    **of_text: Any,
) -> BatchSource:
    """Open data for a converted model.

    Args:
        model: The model.
        directory: Where it, or its original, is, with its tokenizer, image processor or scheduler.
        data: For language models and encoders a folder of texts, a JSONL file, or the id of a data set; for vision
            models a folder of images or `digits`; for diffusion models the cache of a training.
        samples: Rows, passages or images to train on.
        held_out: Samples to hold out.
        seed: Seed of their order, and of noise.
        size: Height and width of images for vision models; `None` for those of the image processor.
        **of_text: Further arguments of `text_batches`; of no effect on others.

    Raises:
        ValueError: If there are no such data, or they do not fit the model.
    """
    if is_mhla_class(type(model).__name__):
        if not (Path(data).expanduser() / MANIFEST).is_file():
            raise ValueError(
                f"data: {data} must be a cache, which mhla-hf train cache makes, for {directory.class_name}"
            )
        config = TrainingConfig(component=directory.component, seed=seed)
        objective = objective_for(model, None if directory.index is None else directory, config)
        return Latents(LatentDataset(Path(data).expanduser()), objective, model, held_out, seed)
    if any(len(layer.mhla.blocks) == 2 for layer in mhla_layers(model)):
        return image_batches(model, directory.root, data, samples=samples, held_out=held_out, seed=seed, size=size)
    return text_batches(model, directory.root, data, samples=samples, held_out=held_out, seed=seed, **of_text)
