# SPDX-License-Identifier: Apache-2.0
"""What MHLA can gain in a model, from its configuration alone: operations, bounds on the speed-up, memory.

Models are built on torch's meta device, without memory for weights, and run once while torch counts the operations of
products. This works for any model of diffusers or transformers whose softmax goes through
`scaled_dot_product_attention`, whether MHLA supports it or not.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from ..bench import ORDINARY, BenchOptions, cast_model, compare
from ..integrations.transformers.cache import cache_layer_bytes
from ..recovery.recipes import (
    DATA_FREE,
    STAGES,
    Recipe,
    choose_layers,
    default_recipe,
    default_settings,
    packaged_recipes,
)
from ..recovery.recipes import FAMILIES as RECOVERED
from ..training.matching.blocks import OnMeta, record_bytes
from ..training.matching.layers import AttentionLayer, base_model, mhla_layers, run
from ..utils.compat.transformers import cache_of_output
from ..utils.messages import shorten_text
from .candidates import Candidate, on_meta


CHOICES = ("all", "3/4", "2/3", "1/2")
"""Layers that become MHLA: all of them, or the part that a hybrid converts."""

LEAST_BOUND, CLEAR_BOUND = 1.2, 1.5
"""Bounds with two thirds of the layers MHLA: below the first, keep softmax; from the second on, try a conversion."""

MEASURED_TOKENS = 2048
"""Up to this length softmax attention was faster than MHLA on an H100 (benchmarks/README.md)."""

# Bytes of a parameter.
_FP32 = 4
# Relative difference up to which a model has the size that a recipe is recommended for.
_TOLERANCE = 0.2
# Tokens of a row, or of a passage, in recipes that do not name them.
_TEXT_ROWS = {"causal": 512, "encoder": 128}


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
    found = Estimate(
        model=candidate.name,
        class_name=candidate.class_name,
        grid=grid,
        tokens=count["tokens"] or math.prod(grid),
        layers=count["layers"],
        operations=count["operations"],
        mixing=count["mixing"],
        parameters=count_parameters(softmax),
        is_linear=candidate.is_linear,
        kv_bytes=count["cache_bytes"],
    )
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


# Counting.


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
        return self._count(*args, **(kwargs or {}))

    def _count(
        self,
        query: Any,
        key: Any,
        value: Any,
        attn_mask: Any = None,
        dropout_p: Any = 0,
        is_causal: Any = False,
        **_: Any,
    ) -> torch.Tensor:
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
    chosen = choose_layers(recipe.layers, len(all_layers))
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


# Measuring.


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
    makers = {
        ORDINARY: partial(_block_run, candidate, name, grid, None, dtype, device),
        "mhla": partial(_block_run, candidate, name, grid, mhla, dtype, device),
    }
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
