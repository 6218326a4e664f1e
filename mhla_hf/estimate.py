# SPDX-License-Identifier: Apache-2.0
"""`mhla-hf estimate`: what MHLA can gain in a model, from its configuration alone: operations, speed-up, memory.

Models are built on torch's meta device, without memory for weights, and run once while torch counts the operations of
products. This works for any model of diffusers or transformers whose softmax goes through
`scaled_dot_product_attention`, whether MHLA supports it or not.
"""

from __future__ import annotations

import copy
import inspect
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from .bench import ORDINARY, BenchOptions, cast_model, compare
from .families.inputs import example_inputs
from .integrations.transformers.cache import cache_layer_bytes
from .integrations.transformers.configuration import max_positions
from .integrations.transformers.limits import check_sizes
from .integrations.transformers.modules import is_image_model, patch_grid
from .integrations.transformers.towers import towers_of
from .layouts import MAX_TOKENS
from .matching.blockwise import OnMeta, record_bytes
from .models.directory import ModelDirectory
from .models.limits import check_model_config
from .models.registry import FAMILIES, family_for
from .presets import PRESETS, from_preset, is_preset
from .recovery.recipes import (
    DATA_FREE,
    STAGES,
    Recipe,
    choose_layers,
    default_recipe,
    default_settings,
    packaged_recipes,
)
from .recovery.recipes import FAMILIES as RECOVERED
from .training.layers import AttentionLayer, base_model, mhla_layers, run
from .utils import locations
from .utils.compat.transformers import cache_of_output, set_attention
from .utils.messages import check_count, shorten_list, shorten_text


CHOICES = ("all", "3/4", "2/3", "1/2")
"""Layers that become MHLA: all of them, or the part that a hybrid converts."""

LEAST_BOUND, CLEAR_BOUND = 1.2, 1.5
"""Bounds with two thirds of the layers MHLA: below the first, keep softmax; from the second on, try a conversion."""

MEASURED_TOKENS = 2048
"""Up to this length softmax attention was faster than MHLA on an H100 (benchmarks/README.md)."""

_FP32 = 4  # Bytes of a parameter.
# Relative difference up to which a model has the size that a recipe is recommended for.
_TOLERANCE = 0.2
_TEXT_ROWS = {"causal": 512, "encoder": 128}  # Tokens of a row, or of a passage, in recipes that do not name them.
# Operators of scaled_dot_product_attention.
_ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
_CONFIGURATIONS = ["model_index.json", "config.json", "*/config.json"]


class Candidate:
    """A model as its configuration describes it, whether MHLA supports it or not: a transformer of diffusers.

    Args:
        directory: Its configurations.
        config: Its configuration, a dict.

    Attributes:
        name: Directory, Hub id or name of a preset.
        class_name: Class of the softmax model.
        is_linear: Whether the model's own attention is linear.
        window: Width of the sliding window that some layers have, or `None`.
        windowed: Those layers, where the configuration names them.
    """

    window: int | None = None
    windowed: tuple[int, ...] = ()

    def __init__(self, directory: ModelDirectory, config: Any) -> None:
        self.directory, self.config = directory, config
        self.name, self.class_name = directory.location, directory.class_name
        self.is_linear = self.class_name in FAMILIES and directory.original_attention == "linear"

    def build(self, mhla: Mapping[str, Any] | None = None, *, one_block: bool = False) -> Any:
        """Build the model on the current device.

        Args:
            mhla: Options of its MHLA version; `None` for the softmax model.
            one_block: Leave out all transformer blocks but the first of each list.

        Raises:
            ValueError: If it has sizes that no model has, or MHLA does not support it.
        """
        upstream = self.directory.load_class()
        check_model_config(upstream, self.config, self.name)
        config = dict(self.config)
        if one_block:
            # One of each list of blocks.
            others = {"num_single_layers": 1, "vace_layers": [0]}
            config |= {"num_layers": 1, **{name: value for name, value in others.items() if name in config}}
        if mhla is not None:
            upstream, config["mhla"] = family_for(self.class_name).load_class(), dict(mhla)
        return upstream.from_config(config).eval()

    def grid(self, **given: int) -> tuple[int, ...]:
        """Return the tokens along each axis of a sample; what is not given is the model's own.

        Args:
            **given: `tokens` (the length of a text, or tokens of an image or video), or `height` and `width` in pixels
                and `num_frames`.

        Raises:
            ValueError: If the model does not have what is given, or nothing tells the size.
        """
        return self.directory.sample_grid(**given)

    def inputs(self, model: Any, grid: Sequence[int], dtype: Any, device: Any, text: int = 0) -> dict[str, Any]:
        """Random arguments of the model's `forward`; `text` counts tokens of prompts."""
        return example_inputs(model, grid, dtype, device, text=text)

    def options(self, grid: Sequence[int]) -> dict[str, Any]:
        """Options of MHLA for samples of a size, beside the defaults; none for text."""
        return {"grid": list(grid)} if len(grid) > 1 else {}

    def family(self, model: Any) -> str | None:
        """Family of recipes for the MHLA version of the model; `None` where there is none."""
        return family_for(self.class_name).training


class TransformersModel(Candidate):
    """A language model, encoder or vision model of transformers; its configuration is an object."""

    def __init__(self, directory: ModelDirectory, config: Any) -> None:
        super().__init__(directory, config)
        text = config.get_text_config()
        self.window = getattr(text, "sliding_window", None) or getattr(text, "local_attention", None)
        kinds = enumerate(getattr(text, "layer_types", None) or ())
        self.windowed = tuple(index for index, kind in kinds if kind == "sliding_attention")

    def build(self, mhla: Mapping[str, Any] | None = None, *, one_block: bool = False) -> Any:
        import transformers

        config = copy.deepcopy(self.config)
        found = getattr(transformers, self.class_name, None) or transformers.MODEL_MAPPING.get(type(config), None)
        if found is None:
            raise ValueError(f"{self.class_name} is not in transformers {transformers.__version__}.")
        if one_block:
            config.num_hidden_layers = 1
            if getattr(config, "layer_types", None):
                config.layer_types = ["full_attention"]
        if mhla is not None:
            config.mhla = dict(mhla)
            set_attention(config, "mhla")
        model = found(config).eval()
        for part in (model.config, *towers_of(model.config).values()) if mhla is None else ():
            # Undeclared too: it is counted, not computed.
            set_attention(part, "sdpa")
        return model

    def grid(self, **given: int) -> tuple[int, ...]:
        if is_image_model(self.config):
            if not given.keys() <= {"height", "width"}:
                raise ValueError(f"{self.class_name} sees images: give height and width.")
            return patch_grid(self.config, **given)
        if not given.keys() <= {"tokens"}:
            raise ValueError(f"{self.class_name} reads text: give tokens.")
        length = given.get("tokens") or max_positions(self.config.get_text_config())
        if length is None:
            raise ValueError("tokens must be given: the configuration does not tell the longest text.")
        return (length,)

    def inputs(self, model: Any, grid: Sequence[int], dtype: Any, device: Any, text: int = 0) -> dict[str, Any]:
        taken = inspect.signature(model.forward).parameters
        if is_image_model(self.config):
            # The patch is one number or two.
            sides = np.multiply(grid, self.config.patch_size).tolist()
            pixels = torch.randn(1, self.config.num_channels, *sides, dtype=dtype, device=device)
            resized = {"interpolate_pos_encoding": True} if "interpolate_pos_encoding" in taken else {}
            return {"pixel_values": pixels, **resized}
        inputs: dict[str, Any] = {"input_ids": torch.zeros(1, *grid, dtype=torch.long, device=device)}
        if self.config.is_encoder_decoder:
            inputs["decoder_input_ids"] = inputs["input_ids"][:, :1]
        if "logits_to_keep" in taken:
            inputs["logits_to_keep"] = 1
        return inputs

    def family(self, model: Any) -> str | None:
        options = model.config.mhla
        if options is None:
            # Several towers, each with options of its own.
            return None
        return "causal" if options["causal"] else "vision" if is_image_model(self.config) else "encoder"


def on_meta(
    candidate: Candidate, mhla: Mapping[str, Any] | None = None, dtype: Any = torch.bfloat16, **options: Any
) -> Any:
    """Build a model without memory for its weights; see [`Candidate.build`].

    Raises:
        ValueError: As in the function above, and for every error of the libraries about a wrong configuration.
    """
    try:
        with torch.device("meta"):
            model = candidate.build(mhla, **options)
    except (ValueError, ImportError):
        raise
    except Exception as error:
        raise ValueError(
            f"{candidate.name}: no {candidate.class_name} can be built of its configuration "
            f"({shorten_text(f'{type(error).__name__}: {error}', 300)}): correct its values."
        ) from error
    if dtype is not None:
        cast_model(model, dtype)
    return model


def find_candidate(location: str | Path, component: str | None = None, **hub: Any) -> Candidate:
    """Read the configuration of a model, whether MHLA supports it or not.

    Args:
        location: A directory, a Hub id (only configurations are downloaded), or the name of a preset.
        component: Name of the model in a pipeline; by default its first transformer.
        **hub: `revision`, `token` and `cache_dir`, for a Hub repository.

    Raises:
        ValueError: If there is none, or the model is MHLA already.
    """
    name = str(location)
    if is_preset(name):
        with torch.device("meta"):
            made = from_preset(name, mhla=False)
        if PRESETS[name].library == "transformers":
            return TransformersModel(ModelDirectory(name, Path(), None, {"model": made.to_dict()}, "model"), made)
        config = {**made.config, "_class_name": type(made).__name__}
        return Candidate(ModelDirectory(name, Path(), None, {"transformer": config}, "transformer"), config)
    root = locations.local_directory(location, "model")
    if root is None:
        try:
            root = locations.download_repository(name, allow_patterns=_CONFIGURATIONS, **hub)
        except OSError as error:
            for same in (preset for preset, content in PRESETS.items() if content.repository == name):
                error.args = (f"{error} The preset {same} is the same model, and needs no download.",)
            raise
    directory = ModelDirectory.read(locations.unpacked(root), component, location=name, require_supported=False)
    if directory.is_mhla:
        raise ValueError(f"{name} is MHLA already: give the model that it was converted from.")
    if directory.is_transformers:
        # Before the configuration is loaded, which may make a list of all layers.
        check_sizes(directory.config, name)
        return TransformersModel(directory, directory.load_config())
    return Candidate(directory, directory.config)


def find_grid(candidate: Candidate, **size: int | None) -> tuple[int, ...]:
    """Return the token grid of a size that a user gives; see [`Candidate.grid`].

    Raises:
        ValueError: If a number is wrong, or tokens are given with a size in pixels.
    """
    given = {name: value for name, value in size.items() if value is not None}
    for name, value in given.items():
        check_count(name, value, maximum=MAX_TOKENS)
    if "tokens" in given and len(given) > 1:
        raise ValueError(f"tokens cannot be given with {shorten_list(name for name in given if name != 'tokens')}.")
    # A configuration that no model can be built of is reported here.
    on_meta(candidate)
    return candidate.grid(**given)


@dataclass(frozen=True)
class Estimate:
    """What is known of a model at one size before it is converted; an operation is a multiplication or an addition.

    Attributes:
        model: Its name, as it was given.
        class_name: Class of the softmax model.
        grid: Tokens along each axis; the length of a text.
        tokens: Tokens of self-attention; in some models those of the prompt are among them.
        layers: Layers of softmax self-attention over all tokens.
        operations: Operations of a forward pass.
        mixing: Those of QKᵀ and PV in these layers. Causal attention counts half of the pairs of tokens.
        parameters: Number of parameters.
        mhla_operations: Operations of a forward pass with MHLA in all layers, with default options; `None` for a model
            that MHLA does not support.
        refusal: Why it does not, or `None`.
        is_linear: Whether the model's own attention is linear.
        kv_bytes: Keys and values of all tokens in bfloat16; `None` for models that do not decode.
        state_bytes: The cache of MHLA after as many tokens, in bfloat16.
        windowed: Layers that stay softmax, each with a sliding window of its own.
        training: Memory of a recovery in bytes, a row for each recipe, the recommended one first; see
            [`training_memory`].
    """

    model: str
    class_name: str
    grid: tuple[int, ...]
    tokens: int
    layers: int
    operations: int
    mixing: int
    parameters: int
    mhla_operations: int | None = None
    refusal: str | None = None
    is_linear: bool = False
    kv_bytes: int | None = None
    state_bytes: int | None = None
    windowed: tuple[int, ...] = ()
    training: list[dict[str, Any]] = field(default_factory=list)

    @property
    def share(self) -> float:
        """Share of the token mixing in the operations."""
        return self.mixing / self.operations

    def bounds(self) -> list[dict[str, Any]]:
        """The most that the model can gain, a row for each of [`CHOICES`].

        `mixing_free` is Amdahl's law for token mixing that costs nothing; `with_mhla` the ratio of all operations
        before and after, `None` for unsupported models.
        """
        rows = []
        for name in CHOICES if self.layers else ():
            converted = len(choose_layers(name, self.layers))
            part, with_mhla = converted / self.layers, None
            if self.mhla_operations is not None:
                with_mhla = self.operations / (self.operations - part * (self.operations - self.mhla_operations))
            free = 1 / (1 - part * self.share)
            rows.append({"layers": name, "converted": converted, "mixing_free": free, "with_mhla": with_mhla})
        return rows

    @property
    def advice(self) -> str:
        """`keep softmax`, `measure first` or `worth trying`: by [`LEAST_BOUND`] and [`MEASURED_TOKENS`]."""
        bound = self._gains().get("2/3", 1.0)
        if self.tokens <= MEASURED_TOKENS or bound < LEAST_BOUND:
            return "keep softmax"
        return "worth trying" if bound >= CLEAR_BOUND else "measure first"

    def _gains(self) -> dict[str, float]:
        return {row["layers"]: row["with_mhla"] or row["mixing_free"] for row in self.bounds()}

    def sentence(self) -> str:
        """The advice in words, with its reason."""
        if self.is_linear:
            added = (self.mhla_operations or self.operations) / self.operations - 1
            return f"No gain in speed: its attention is linear already; MHLA adds {100 * added:.1f} % of operations."
        gains = self._gains()
        advice = {"worth trying": "Would be worth trying", "measure first": "Would have to be measured"}
        start = self.advice.capitalize() if self.refusal is None else advice.get(self.advice, "Keep softmax")
        prompt = "" if self.kv_bytes is None else " of a prompt"
        text = (
            f"{start}: the products of softmax attention are {100 * self.share:.0f} % of the operations{prompt}, so "
            f"the model becomes at most {gains['all']:.2f} times as fast with MHLA in all layers, and "
            f"{gains['2/3']:.2f} times with MHLA in two thirds of them."
        )
        if self.windowed:
            text += f" Layers with windows of their own stay softmax: {shorten_list(self.windowed)}."
        if self.tokens <= MEASURED_TOKENS and gains["2/3"] >= LEAST_BOUND:
            text += f" Up to {MEASURED_TOKENS:,} tokens softmax attention was faster on an H100."
        if self.refusal is not None:
            return f"{text} MHLA does not support it: {self.refusal}"
        if self.advice != "keep softmax":
            text += " Operations are not seconds: --measure times one block on this device."
        return text

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain JSON values."""
        derived = {"share": self.share, "bounds": self.bounds(), "advice": self.advice, "sentence": self.sentence()}
        return {**asdict(self), **derived}


def estimate(candidate: Candidate, grid: Sequence[int] | None = None) -> Estimate:
    """Estimate what MHLA can gain in a model.

    Args:
        candidate: The model; see [`find_candidate`].
        grid: Tokens along each axis; the model's own by default.

    Raises:
        ValueError: If the size of its samples is not known, or the model cannot be run without weights.
    """
    softmax = on_meta(candidate)
    grid = tuple(grid or candidate.grid())
    count = count_operations(candidate, softmax, grid)
    if not (count["mixing"] or candidate.is_linear):
        raise ValueError(
            f"{candidate.class_name} has no self-attention that goes through scaled_dot_product_attention: there is "
            "nothing that MHLA could replace."
        )
    kv_bytes, count["tokens"] = count.pop("cache_bytes"), count["tokens"] or math.prod(grid)
    own = {"parameters": count_parameters(softmax), "is_linear": candidate.is_linear, "kv_bytes": kv_bytes}
    found = Estimate(candidate.name, candidate.class_name, grid, **count, **own, windowed=candidate.windowed)
    try:
        model = on_meta(candidate, candidate.options(grid))
    except ValueError as error:
        return replace(found, refusal=shorten_text(str(error), 300))
    count, family = count_operations(candidate, model, grid), candidate.family(model)
    # Some models are only calibrated so far.
    recipes = {"default": default_recipe(family), **packaged_recipes(family)} if family in RECOVERED else {}
    sizes = {name: size for name, size in default_settings()["recommended"].items() if name in recipes}
    near = [name for name, size in sizes.items() if abs(found.parameters / 1e9 / size - 1) <= _TOLERANCE]
    best = near[0] if near else "default" if family in _TEXT_ROWS else None
    training = [
        {"recipe": name, "recommended": name == best, **training_memory(candidate, recipes[name])}
        for name in sorted(recipes, key=lambda name: name != best)
    ]
    return replace(found, mhla_operations=count["operations"], state_bytes=count["cache_bytes"], training=training)


class _Attentions(OnMeta):
    """Counts softmax attention in place of computing it. Where queries are as many as keys it is self-attention.

    Args:
        window: Width of the sliding window of those layers that have a mask, or `None`.
    """

    def __init__(self, window: int | None) -> None:
        super().__init__()
        self.window, self.rest = window, 0
        self.mixing: dict[int, list[int]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__bool__:
            return func(*args)
        if func is not F.scaled_dot_product_attention:
            return super().__torch_function__(func, types, args, kwargs)
        return self._count(**dict(zip(_ARGUMENTS, args)), **(kwargs or {}))

    def _count(self, query: Any, key: Any, value: Any, attn_mask: Any = None, is_causal: Any = False, **_: Any) -> Any:
        tokens, keys = query.shape[-2], key.shape[-2]
        in_window = self.window is not None and attn_mask is not None and self.window < keys
        reached = self.window if in_window else keys
        operations = 2 * math.prod(query.shape[:-1]) * reached * (query.shape[-1] + value.shape[-1])
        # Kernels leave out the pairs that a causal mask hides.
        operations //= 2 if is_causal else 1
        if tokens == keys and not in_window:
            self.mixing.setdefault(tokens, []).append(operations)
        else:
            self.rest += operations
        return query.new_empty(*query.shape[:-1], value.shape[-1])


def _grouped_product(left: Sequence[int], right: Sequence[int], *_: Any, **__: Any) -> int:
    """Operations of a mixture of experts: each row times the matrix of its expert."""
    return 2 * math.prod(left) * right[-1]


def count_operations(candidate: Candidate, model: Any, grid: Sequence[int]) -> dict[str, Any]:
    """Count the operations of a forward pass of a model on the meta device.

    Args:
        candidate: What the model was built from.
        model: The model.
        grid: Tokens along each axis.

    Returns:
        `operations`, `mixing`, `tokens` and `layers` as in [`Estimate`], and `cache_bytes`, the size of the cache.

    Raises:
        ValueError: If the model needs values, or inputs that its configuration does not tell.
    """
    attentions = _Attentions(candidate.window)
    # Older versions of torch do not have it, newer ones do not count it.
    grouped = getattr(torch.ops.aten, "_grouped_mm", None)
    counter = FlopCounterMode(display=False, custom_mapping={grouped: _grouped_product} if grouped else None)
    device = torch.device("meta")
    try:
        inputs = candidate.inputs(model, grid, torch.bfloat16, device)
        with torch.no_grad(), device, counter, attentions:
            # With a cache, language models look for no packed documents, for which they would need values.
            output = model(**inputs, use_cache=True) if "logits_to_keep" in inputs else base_model(model)(**inputs)
    except Exception as error:  # A library's code raises anything.
        reason = shorten_text(str(error) or type(error).__name__, 200)
        raise ValueError(
            f"{candidate.class_name} cannot be run on {' × '.join(map(str, grid))} tokens without weights: {reason}"
        ) from error
    tokens = max(attentions.mixing, default=0)
    mixing = attentions.mixing.pop(tokens, [])
    others = attentions.rest + sum(map(sum, attentions.mixing.values()))
    cache: Any = cache_of_output(output)
    return {
        "operations": counter.get_total_flops() + others + sum(mixing),
        "mixing": sum(mixing),
        "tokens": tokens,
        "layers": len(mixing),
        "cache_bytes": sum(cache_layer_bytes(layer) for layer in cache.layers) if hasattr(cache, "layers") else None,
    }


def count_parameters(module: Any) -> int:
    """Return the number of a module's parameters."""
    return sum(parameter.numel() for parameter in module.parameters())


def training_memory(candidate: Candidate, recipe: Recipe) -> dict[str, Any]:
    """Memory of a recovery, in bytes, without the activations of forward and backward passes.

    Args:
        candidate: The model.
        recipe: The recipe.

    Returns:
        `stages`; `layers`, the number of those that become MHLA; optimizer `steps`; `weights` in fp32; `training`, the
        gradients, optimizer states and kept originals of the stage that has most of them; `records`, the activations
        that are kept to match layers; and `block_records`, those for blocks.
    """
    # Experts are computed in bfloat16 alone on the meta device.
    model = on_meta(candidate, recipe.mhla, torch.bfloat16 if recipe.family == "causal" else None)
    all_layers = mhla_layers(model)
    chosen = choose_layers("all" if recipe.chooses_groups else recipe.layers, len(all_layers))
    converted = [all_layers[index] for index in chosen]
    # Layers that stay softmax do not have what MHLA adds.
    parameters = count_parameters(model) - sum(
        count_parameters(layer.mhla) for index, layer in enumerate(all_layers) if index not in chosen
    )
    rows = _TEXT_ROWS.get(recipe.family)
    size = {"tokens": rows and (recipe.data.max_length or rows)}
    size |= {name: getattr(recipe.data, name) for name in ("height", "width", "num_frames")}
    grid = candidate.grid(**{name: value for name, value in size.items() if value is not None})
    batch = candidate.inputs(model, grid, torch.float32, torch.device("meta"), recipe.data.max_length or 0)
    batch |= {"attention_mask": torch.ones(1, *grid)} if recipe.family == "causal" else {}
    kept = record_bytes(model, batch, {layer.name for layer in converted}, blocks="blockwise" in recipe.stages)
    records, block_records = recipe.record_bytes(*kept, from_calls=recipe.family in DATA_FREE)
    parts = {
        "layer": max(sum(each.numel() for each in layer.parameters().values()) for layer in converted),
        "block": max(count_parameters(model.get_submodule(name)) for name in map(_block_of, converted)),
        "model": parameters,
    }
    return {
        "stages": [*recipe.stages],
        "layers": len(converted),
        "steps": sum(getattr(stage, "steps", 0) for stage in recipe.stages.values()),
        "weights": _FP32 * parameters,
        "training": max((STAGES[name].memory * parts[STAGES[name].part] for name in recipe.stages), default=0),
        "records": records,
        "block_records": block_records,
    }


def _block_of(layer: AttentionLayer) -> str:
    """Name of the transformer block of a layer."""
    return re.sub(r"(\.\d+)\..*", r"\1", layer.name)


def measure_block(candidate: Candidate, grid: Sequence[int], options: BenchOptions) -> dict[str, Any]:
    """Time the first transformer block of a model with random weights, with its own attention and with MHLA.

    Args:
        candidate: The model.
        grid: Tokens along each axis.
        options: Device, dtype and time.

    Returns:
        A report as those of `mhla-hf bench`.

    Raises:
        ValueError: If MHLA does not support the model.
    """
    device, dtype = options.place()
    mhla = candidate.options(grid)
    name = _block_of(mhla_layers(on_meta(candidate, mhla, None, one_block=True))[0])
    sides = {ORDINARY: None, "mhla": mhla}
    makers = {key: partial(_block_run, candidate, name, grid, side, dtype, device) for key, side in sides.items()}
    own = "linear" if candidate.is_linear else "softmax"
    rows = [
        {"model": name, "contestant": key, "attention": own if key == ORDINARY else "mhla", **row}
        for key, row in compare(makers, options, ORDINARY).items()
    ]
    return options.report("block", rows, model=candidate.name, grid=list(grid))


@torch.no_grad()
def _block_run(
    candidate: Candidate, name: str, grid: Sequence[int], mhla: Any, dtype: torch.dtype, device: torch.device
) -> Any:
    """A function that runs one block with what the model gives it."""
    torch.manual_seed(0)
    with device:
        model = candidate.build(mhla, one_block=True)
    cast_model(model, dtype)
    calls: list[Any] = []
    block = model.get_submodule(name)
    block.register_forward_pre_hook(lambda _, args, kwargs: calls.append((args, kwargs)), with_kwargs=True)
    run(model, candidate.inputs(model, grid, dtype, device))
    block._forward_pre_hooks.clear()
    (args, kwargs), *_ = calls
    return torch.no_grad()(lambda: block(*args, **kwargs))
