# SPDX-License-Identifier: Apache-2.0
"""The attention function and the mask function that are registered as `"mhla"`, and what reaches them by hooks.

A model's own inputs (padding, packed documents, image size) are read by a hook on the model and travel down as keyword
arguments; a layer's (rotary angles, cache, hidden states) by a hook on its attention module. Nothing is remembered
between calls, so that gradient checkpointing, compiling and several models at once see what they are given.
"""

from __future__ import annotations

import dis
import inspect
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface
from transformers.utils import logging

from ...layers.sequence import TokenSequence
from .cache import MHLACacheLayer, mhla_cache_layer
from .geometry import is_image_model, patch_grid
from .rotary import make_rotation, uses_rotary


logger = logging.get_logger(__name__)

NAME = "mhla"
# Keyword arguments by which other attentions are told to do what MHLA cannot.
_REFUSED = {
    "softcap": "soft-capped logits",
    "s_aux": "attention sinks",
    "position_bias": "position biases",
    "sliding_window": "sliding windows",
    "head_mask": "head masks",
}
_NOT_BUILT = (
    "This model has no MHLA parameters: attn_implementation='mhla' was set on a model that was not built for it. "
    "Load it with attn_implementation='mhla', or call mhla_hf.convert(model)."
)


@dataclass(frozen=True)
class ModelInputs:
    """What a model's inputs say about its tokens; the same for all its layers.

    Attributes:
        padding: BoolTensor `[B, all tokens so far]`, False for padding; `None` for none.
        documents: LongTensor `[B, T]`, see [`mhla_hf.sequence_layout.SequenceLayout`], or `None`.
        num_documents: An upper bound of their number in a row.
        grid: Rows and columns of patches of an image, or `None`.
    """

    padding: torch.Tensor | None = None
    documents: torch.Tensor | None = None
    num_documents: int = 1
    grid: tuple[int, int] | None = None

    def to(self, *args: Any, **kwargs: Any) -> ModelInputs:
        """Moves the tensors, as `torch.Tensor.to`; models spread over devices call this."""
        moved = [None if tensor is None else tensor.to(*args, **kwargs) for tensor in (self.padding, self.documents)]
        return ModelInputs(moved[0], moved[1], self.num_documents, self.grid)


@dataclass(frozen=True)
class LayerInputs:
    """What one call of an attention module was given.

    Attributes:
        hidden_states: `[B, T, hidden]`.
        position_embeddings: Cosine and sine of rotary embeddings, or `None`.
        cache: The layer's part of the cache, or `None`.
        model: What reached the module of the model's inputs, or `None`.
    """

    hidden_states: torch.Tensor
    position_embeddings: Any
    cache: MHLACacheLayer | None
    model: ModelInputs | None


class ModelInputsHook:
    """Forward pre-hook of a model: hands [`ModelInputs`] down to its attention modules.

    Args:
        model: The model whose layers attend.
    """

    def __init__(self, model: nn.Module) -> None:
        self.positions = _positions(model, ("attention_mask", "position_ids", "past_key_values", "pixel_values"))

    def __call__(self, model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
        if kwargs.get("mhla_inputs") is not None or model.config._attn_implementation != NAME:
            return None
        given = {name: _argument(args, kwargs, index, name) for name, index in self.positions.items()}
        pixels = given.get("pixel_values")
        if pixels is not None and is_image_model(model.config):
            inputs = ModelInputs(grid=patch_grid(model.config, pixels.shape[-2], pixels.shape[-1]))
        else:
            documents, count = _documents(given, kwargs)
            inputs = ModelInputs(_padding(given.get("attention_mask"), given.get("past_key_values")), documents, count)
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
        self.positions = _positions(attention, names)
        self.layer_index, self.only_mhla = layer_index, only_mhla
        self.rotary, self.hands_on = uses_rotary(attention), _uses_keywords(attention)

    def __call__(
        self, attention: nn.Module, args: tuple, kwargs: dict[str, Any]
    ) -> tuple[tuple, dict[str, Any]] | None:
        if attention.config._attn_implementation != NAME:
            return None
        given = {name: _argument(args, kwargs, index, name) for name, index in self.positions.items()}
        caches = [given.get(name) for name in ("past_key_values", "layer_past", "past_key_value")]
        cache = next((cache for cache in caches if cache is not None), None)
        layer = None
        if cache is not None:
            layer = mhla_cache_layer(cache, self.layer_index, only_mhla=self.only_mhla)
        hidden_states = given.get("hidden_states")
        if hidden_states is None:
            hidden_states = args[0]
        rotary = given.get("position_embeddings") if self.rotary else None
        inputs = LayerInputs(hidden_states, rotary, layer, kwargs.get("mhla_inputs"))
        if self.hands_on:
            return args, {**kwargs, "mhla_layer_inputs": inputs}
        # Fetched by the attention function in this very call.
        attention._mhla_layer_inputs = inputs
        return None


def mhla_attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    mhla_layer_inputs: LayerInputs | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention function of transformers' attention interface; layers without an `mhla` submodule run SDPA.

    There are no attention probabilities, so `dropout` has nothing to drop and no weights are returned.

    Args:
        module: The attention module.
        query: `[B, H, T, K]`, after RoPE.
        key: `[B, H_kv, T, K]`.
        value: `[B, H_kv, T, K]`.
        attention_mask: What [`mhla_mask`] made.
        scaling: What softmax attention would scale its logits with.
        dropout: Ignored.
        is_causal: Whether tokens look back only; the module says so if this is `None`.
        mhla_layer_inputs: From [`LayerInputsHook`].
        **kwargs: What the model passes to every attention function.

    Returns:
        `[B, T, H, K]` and `None`.

    Raises:
        ValueError: If something is asked that MHLA cannot do; the message says what.
    """
    mhla = getattr(module, "mhla", None)
    if mhla is None:
        return _softmax(
            module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, is_causal=is_causal, **kwargs
        )
    for name, what in _REFUSED.items():
        if kwargs.get(name) is not None:
            raise ValueError(f"{type(module).__name__} passes {name} to its attention; MHLA cannot do {what}.")
    if kwargs.get("output_attentions"):
        logger.warning_once("MHLA has no attention weights to return: output_attentions gives None for its layers.")
    given = mhla_layer_inputs
    if given is None:
        given, module._mhla_layer_inputs = getattr(module, "_mhla_layer_inputs", None), None
    if given is None or given.model is None:
        raise ValueError(
            f"The inputs of the model did not reach {type(module).__name__}: it drops keyword arguments, or was "
            "called outside its model. Pass mhla_inputs=ModelInputs() to call a layer alone."
        )
    _check_mask(module, attention_mask)
    query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    if query.shape[2] != mhla.num_heads or key.shape[2] != mhla.num_key_value_heads:
        raise ValueError(
            f"{type(module).__name__} has {query.shape[2]} and {key.shape[2]} heads here, but its mhla is for "
            f"{mhla.num_heads} and {mhla.num_key_value_heads}. Tensor parallelism is not supported."
        )
    rotary = None
    if given.position_embeddings is not None and mhla.config.rope == "after_feature_map":
        rotation = make_rotation(module, given.position_embeddings, query)
        query, key, rotary = rotation.undo(query), rotation.undo(key), rotation.rotate
    if scaling == 1.0 and isinstance(getattr(module, "scaling", None), float) and module.scaling != 1.0:
        # Scaled already, in the query alone; the feature map wants both sides alike.
        query, key = query * module.scaling**-0.5, key * module.scaling**0.5
    if mhla.config.is_sequence:
        causal = getattr(module, "is_causal", False) if is_causal is None else is_causal
        sequence = _token_sequence(module, given.model, given.cache, query.shape[1], bool(causal))
        where: dict[str, Any] = {"sequence": sequence}
    else:
        where = {"grid": given.model.grid}
    output = mhla(query, key, value, hidden_states=given.hidden_states, rotary=rotary, scaling=scaling, **where)
    return output.contiguous(), None


def mhla_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Any = None,
    attention_mask: torch.Tensor | None = None,
    config: Any = None,
    **kwargs: Any,
) -> torch.Tensor | None:
    """Mask function of transformers' mask interface: padding as it is, or SDPA's mask where some layers are softmax.

    MHLA layers do not read it: they get the padding from [`ModelInputsHook`].

    Raises:
        ValueError: If the model adds to its causal or bidirectional mask.
    """
    if kwargs.get("use_vmap") or getattr(mask_function, "__qualname__", "").startswith("or_masks"):
        raise ValueError("This model changes its attention mask (for images or prefixes in a text); MHLA cannot.")
    if config.mhla is None:
        raise ValueError(_NOT_BUILT)
    if _is_hybrid(config):
        return sdpa_mask(
            batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset, kv_offset=kv_offset,
            mask_function=mask_function, attention_mask=attention_mask, **kwargs,
        )  # fmt: skip
    return attention_mask


def _is_hybrid(config: Any) -> bool:
    """Whether some layers of a model are softmax and need its mask."""
    types = getattr(config, "layer_types", None) or ()
    return config.mhla["layers"] is not None or any(kind != "full_attention" for kind in types)


def _check_mask(module: nn.Module, mask: torch.Tensor | None) -> None:
    """Refuses biases and masks that a model adds for its attention, and that MHLA would not see."""
    if mask is not None and mask.dim() == 4 and (mask.is_floating_point() or not _is_hybrid(module.config)):
        raise ValueError(
            f"{type(module).__name__} gives its attention a bias or mask of its own {tuple(mask.shape)}; MHLA follows "
            "padding and causality only."
        )


def _uses_keywords(module: nn.Module) -> bool:
    """Whether a module's `forward` does anything with its further keyword arguments."""
    code = inspect.unwrap(type(module).forward).__code__
    names = [name for name in ("kwargs", "flash_attn_kwargs") if name in code.co_varnames]
    return any(entry.argval in names and "LOAD" in entry.opname for entry in dis.get_instructions(code))


def _softmax(module: nn.Module, query: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
    if getattr(module.config, "mhla", None) is None:
        raise ValueError(_NOT_BUILT)
    return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, *args, **kwargs)


def _token_sequence(
    module: nn.Module, inputs: ModelInputs, cache: MHLACacheLayer | None, length: int, causal: bool
) -> TokenSequence:
    valid = inputs.padding
    if cache is not None and inputs.documents is not None:
        cache.mark_unusable("This cache was filled with packed sequences, which cannot be continued.")
        cache = None
    if valid is not None:
        valid = valid if cache is None else cache.new_tokens(valid, length)
        if valid.shape[1] != length:
            raise ValueError(
                f"attention_mask covers {inputs.padding.shape[1]} tokens, which leaves {valid.shape[1]} for the "  # type: ignore[union-attr]
                f"{length} new ones. It must cover the tokens in the cache as well as the new ones."
            )
    if cache is not None and not causal:
        raise ValueError(f"{type(module).__name__} attends in both directions and cannot decode with a cache.")
    return TokenSequence(causal, valid, inputs.documents, inputs.num_documents, cache)


def _padding(mask: Any, cache: Any) -> torch.Tensor | None:
    """The padding `[B, all tokens]` in a model's `attention_mask`, or None for none."""
    if isinstance(mask, dict):
        # Made by `generate` for models with several kinds of layers.
        mask = mask.get("full_attention")
    if mask is None:
        return None
    if isinstance(mask, torch.Tensor) and mask.dim() == 4 and mask.dtype == torch.bool:
        return _padding_of_causal_mask(mask, cache)
    if not isinstance(mask, torch.Tensor) or mask.dim() != 2:
        raise ValueError(_refused_mask(mask))
    mask = mask.bool()
    # Reading the mask once saves every layer the work on padding that is not there. A single token has little of it.
    if mask.shape[1] > 1 and not torch.compiler.is_compiling() and not mask.is_meta and bool(mask.all()):
        return None
    return mask


def _padding_of_causal_mask(mask: torch.Tensor, cache: Any) -> torch.Tensor:
    """The padding that a causal mask `[B, 1, T, all tokens]` shows, which `generate` makes for static caches."""
    padding = mask[:, 0, -1]
    if torch.compiler.is_compiling():
        if mask.shape[2] > 1:
            raise ValueError(_refused_mask(mask))
        return padding
    past = 0 if cache is None else int(cache.get_seq_length())
    columns, rows = torch.arange(mask.shape[3], device=mask.device), torch.arange(mask.shape[2], device=mask.device)
    causal = columns <= past + rows[:, None]
    if not torch.equal(mask, (padding[:, None] & causal)[:, None].expand_as(mask)):
        raise ValueError(_refused_mask(mask))
    return padding


def _refused_mask(mask: Any) -> str:
    shape = tuple(mask.shape) if isinstance(mask, torch.Tensor) else type(mask).__name__
    return f"attention_mask must be a padding mask [batch, tokens], got {shape}: MHLA cannot follow any other mask."


def _documents(given: dict[str, Any], kwargs: dict[str, Any]) -> tuple[torch.Tensor | None, int]:
    """Documents packed into a row, by `cu_seq_lens` or by `position_ids` that start again."""
    lengths = kwargs.get("cu_seq_lens_q", kwargs.get("cu_seq_lens_k"))
    if lengths is not None:
        ends = lengths[1:].to(torch.long)
        total = next(
            (kwargs[name].shape[1] for name in ("input_ids", "inputs_embeds") if kwargs.get(name) is not None), None
        )
        positions = given.get("position_ids")
        if total is None and positions is not None:
            total = positions.shape[-1]
        if total is None:
            raise ValueError("cu_seq_lens needs input_ids, inputs_embeds or position_ids passed by keyword.")
        tokens = torch.arange(total, device=ends.device)
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
    """Where a module's `forward` takes arguments positionally; -1 for those that it takes by keyword only."""
    parameters = list(inspect.signature(inspect.unwrap(type(module).forward)).parameters)[1:]
    return {name: parameters.index(name) if name in parameters else -1 for name in names}


def _argument(args: tuple, kwargs: dict[str, Any], index: int, name: str) -> Any:
    return args[index] if 0 <= index < len(args) else kwargs.get(name)


AttentionInterface.register(NAME, mhla_attention_forward)
# Under the same name, or transformers would make no mask at all and padding would be seen.
AttentionMaskInterface.register(NAME, mhla_mask)
