# SPDX-License-Identifier: Apache-2.0
"""Inputs of attention beside queries, keys and values, and the hooks that hand them over.

A model's own inputs (padding, packed documents, image size) are read by a hook on the model and travel down as keyword
arguments; a layer's (rotary angles, cache, hidden states) by a hook on its attention module. Nothing is remembered
between calls, so that gradient checkpointing, compiling and several models at once see what they are given.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn

from ...utils.compat import forward_parameters
from ...utils.compat.transformers import attention_of
from .cache import (
    MHLACacheLayer,
    can_be_read,
    check_softmax_cache,
    follow_mask,
    mhla_cache_layer,
    mhla_cache_layers,
)
from .configuration import NAME
from .modules import is_image_model, patch_grid, reads_keywords, uses_rotary


_MODEL_ARGUMENTS = (
    "input_ids",
    "inputs_embeds",
    "attention_mask",
    "position_ids",
    "past_key_values",
    "pixel_values",
)


@dataclass(frozen=True)
class ModelInputs:
    """Padding, documents and grid of a model's tokens; the same for all its layers.

    Attributes:
        padding: BoolTensor `[B, all tokens so far]`, False for padding; `None` for none.
        documents: LongTensor `[B, T]`, see [`mhla_hf.layouts.sequences.SequenceLayout`], or `None`.
        num_documents: An upper bound of their number in a row.
        grid: Rows and columns of patches of an image, or `None`.
        hidden: Hash of the padding, for the cache: see [`mhla_hf.integrations.transformers.cache.follow_mask`].
    """

    padding: torch.Tensor | None = None
    documents: torch.Tensor | None = None
    num_documents: int = 1
    grid: tuple[int, int] | None = None
    hidden: torch.Tensor | None = None

    def to(self, *args: Any, **kwargs: Any) -> ModelInputs:
        """Moves the tensors, as `torch.Tensor.to`; models spread over devices call this."""
        tensors = {"padding": self.padding, "documents": self.documents, "hidden": self.hidden}
        moved: dict[str, Any] = {
            name: tensor.to(*args, **kwargs) for name, tensor in tensors.items() if tensor is not None
        }
        return dataclasses.replace(self, **moved)


@dataclass(frozen=True)
class LayerInputs:
    """Inputs of one call of an attention module.

    Attributes:
        hidden_states: `[B, T, hidden]`.
        position_embeddings: Cosine and sine of rotary embeddings, or `None`.
        cache: The layer's part of the cache, or `None`.
        model: The model's inputs as far as they reached the module, or `None`.
    """

    hidden_states: torch.Tensor
    position_embeddings: Any
    cache: MHLACacheLayer | None
    model: ModelInputs | None


class ModelInputsHook:
    """Forward pre-hook of a model: hands [`ModelInputs`] down to its attention modules."""

    def __init__(self, model: nn.Module) -> None:
        self.positions = _positions(model, _MODEL_ARGUMENTS)

    def __call__(self, model: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
        if kwargs.get("mhla_inputs") is not None or attention_of(model.config) != NAME:
            return None
        given = {name: _argument(args, kwargs, index, name) for name, index in self.positions.items()}
        pixels = given.get("pixel_values")
        if pixels is not None and is_image_model(model.config):
            inputs = ModelInputs(grid=patch_grid(model.config, pixels.shape[-2], pixels.shape[-1]))
        else:
            documents, count = _documents(given, kwargs)
            causal = bool((model.config.mhla or {}).get("causal"))
            tokens, mask = given.get("input_ids"), given.get("attention_mask")
            if tokens is not None and tokens.dim() == 3:
                # Several choices for each row (GPT-2 with two heads), which the model makes rows of.
                tokens = tokens.flatten(0, 1)
                mask = mask.flatten(0, 1) if isinstance(mask, torch.Tensor) and mask.dim() == 3 else mask
            if tokens is None:
                tokens = given.get("inputs_embeds")
            cache = given.get("past_key_values")
            padding = _padding(mask, cache, causal)
            hidden = None
            if causal and tokens is not None:
                hidden = follow_mask(mhla_cache_layers(cache), padding, tokens.shape[1])
            inputs = ModelInputs(padding, documents, count, hidden=hidden)
        return args, {**kwargs, "mhla_inputs": inputs}


class LayerInputsHook:
    """Forward pre-hook of a self-attention module with an `mhla` submodule: hands over [`LayerInputs`].

    Args:
        attention: The attention module.
        layer_index: Its index in the cache.
        only_mhla: Whether every layer of the model is MHLA.
    """

    def __init__(self, attention: nn.Module, layer_index: int, only_mhla: bool) -> None:
        names = ("hidden_states", "position_embeddings", "past_key_values", "layer_past", "past_key_value")
        self.positions = _positions(attention, (*names, "attention_mask", "position_ids"))
        self.layer_index, self.only_mhla = layer_index, only_mhla
        self.rotary, self.hands_on = uses_rotary(attention), reads_keywords(type(attention).forward)

    def __call__(self, attention: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
        given = {name: _argument(args, kwargs, index, name) for name, index in self.positions.items()}
        caches = [given.get(name) for name in ("past_key_values", "layer_past", "past_key_value")]
        cache = next((cache for cache in caches if cache is not None), None)
        if attention_of(attention.config) != NAME:
            check_softmax_cache(cache, self.layer_index)
            return None
        layer = None
        if cache is not None:
            layer = mhla_cache_layer(cache, self.layer_index, only_mhla=self.only_mhla)
        hidden_states = given.get("hidden_states")
        if hidden_states is None:
            hidden_states = args[0]
        rotary = given.get("position_embeddings") if self.rotary else None
        of_model = kwargs.get("mhla_inputs")
        if of_model is None:
            of_model = _inputs_of_layer(attention, given, cache, kwargs)
            if of_model is not None and layer is not None:
                hidden = follow_mask([layer], of_model.padding, hidden_states.shape[1])
                of_model = dataclasses.replace(of_model, hidden=hidden)
        inputs = LayerInputs(hidden_states, rotary, layer, of_model)
        if self.hands_on:
            return args, {**kwargs, "mhla_layer_inputs": inputs}
        # Fetched by the attention function in this very call.
        attention._mhla_layer_inputs = inputs
        return None


def _inputs_of_layer(attention: Any, given: dict[str, Any], cache: Any, kwargs: dict[str, Any]) -> ModelInputs | None:
    """The model's inputs as far as its layers are given them, for calls of `model.forward`, which run no hooks.

    `None` where that may not be everything: the size of images, and positions that could tell packed documents.
    """
    config, positions = attention.mhla.config, given.get("position_ids")
    if not config.is_sequence or (config.causal and positions is None):
        return None
    # Whether the caller or the model made the cache cannot be told here; positions that start again tell anyway.
    packing = {"position_ids": positions, "attention_mask": given.get("attention_mask")}
    documents, count = _documents(packing, kwargs)
    return ModelInputs(_padding(given.get("attention_mask"), cache, config.causal), documents, count)


def _padding(mask: Any, cache: Any, causal: bool) -> torch.Tensor | None:
    """The padding `[B, all tokens]` in a model's `attention_mask`, or None for none."""
    if isinstance(mask, dict):
        # Made by `generate` for models with several kinds of layers.
        mask = mask.get("full_attention")
    if mask is None:
        return None
    if isinstance(mask, torch.Tensor) and mask.dim() == 4 and mask.dtype == torch.bool:
        padding = mask[:, 0, -1]
        followed = mask.shape[2] == 1 if torch.compiler.is_compiling() else _shows_only(mask, padding, cache, causal)
    else:
        followed = isinstance(mask, torch.Tensor) and mask.dim() == 2
    if not followed:
        shape = tuple(mask.shape) if isinstance(mask, torch.Tensor) else type(mask).__name__
        raise ValueError(
            f"attention_mask must be a padding mask [batch, tokens], got {shape}: MHLA cannot follow any other mask."
        )
    if mask.dim() == 4:
        return padding
    mask = mask.bool()
    # Reading the mask once saves every layer the work on padding that is not there, as transformers does for SDPA.
    return None if can_be_read(mask) and bool(mask.all()) else mask


def _shows_only(mask: torch.Tensor, padding: torch.Tensor, cache: Any, causal: bool) -> bool:
    """Return whether a mask `[B, 1, T, all tokens]`, as transformers makes them for softmax, is mere padding."""
    expected = padding[:, None].expand(-1, mask.shape[2], -1)
    if causal:
        past = 0 if cache is None else int(cache.get_seq_length())
        rows = torch.arange(mask.shape[2], device=mask.device)
        expected = expected & (torch.arange(mask.shape[3], device=mask.device) <= past + rows[:, None])
    return torch.equal(mask, expected[:, None].expand_as(mask))


def _documents(given: dict[str, Any], kwargs: dict[str, Any]) -> tuple[torch.Tensor | None, int]:
    """Documents packed into a row, by `cu_seq_lens` or by `position_ids` that start again."""
    lengths = kwargs.get("cu_seq_lens_q", kwargs.get("cu_seq_lens_k"))
    if lengths is not None:
        ends = lengths[1:].to(torch.long)
        rows = [given.get(name) for name in ("input_ids", "inputs_embeds", "position_ids")]
        total = next((row.shape[-1 if row.dim() == 2 else 1] for row in rows if row is not None), None)
        tokens = torch.arange(int(ends[-1]) if total is None else total, device=ends.device)
        return torch.searchsorted(ends, tokens, right=True).clamp(max=ends.shape[0] - 1)[None], ends.shape[0]
    positions = given.get("position_ids")
    if positions is None or given.get("attention_mask") is not None or given.get("past_key_values") is not None:
        return None, 1
    if positions.dim() != 2 or positions.shape[1] < 2:
        return None, 1
    # As in transformers: a new document starts wherever a position does not follow the one before it.
    starts = positions.diff(dim=1) != 1
    documents = torch.nn.functional.pad(starts.long().cumsum(dim=1), (1, 0))
    count = int(documents[:, -1].max()) + 1
    return (None, 1) if count == 1 else (documents, count)


def _positions(module: nn.Module, names: tuple[str, ...]) -> dict[str, int]:
    """Positions of arguments in a module's `forward`; -1 for those that it takes by keyword only."""
    parameters = list(forward_parameters(module))
    return {name: parameters.index(name) if name in parameters else -1 for name in names}


def _argument(args: tuple, kwargs: dict[str, Any], index: int, name: str) -> Any:
    return args[index] if 0 <= index < len(args) else kwargs.get(name)
