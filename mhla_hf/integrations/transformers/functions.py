# SPDX-License-Identifier: Apache-2.0
"""The attention function and the mask function that are registered as `"mhla"`, with all that they are given.

Its inputs beside queries, keys and values are handed over by hooks. A model's own (padding, packed documents, image
size) are read by a hook on the model and travel down as keyword arguments; a layer's (rotary angles, cache, hidden
states) are read by a hook on its attention module. Nothing is remembered between calls, so that gradient
checkpointing, compiling and several models at once see what they are given.

Attention functions see queries and keys after RoPE. With `rope="after_feature_map"` they are rotated back, mapped, and
the features are rotated, all with the model's own `apply_rotary_pos_emb`: any order of the rotated pairs works.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface
from transformers.utils import logging

from ...layers.state import TokenSequence
from ...utils.compat import forward_parameters, unknown_shape
from ...utils.compat.transformers import adds_to_mask, attention_of, cache_names
from .cache import MHLACacheLayer, can_be_read, follow_mask, mhla_cache_layer
from .modules import is_image_model, patch_grid, reads_keywords, rotation_of, uses_rotary
from .towers import NAME


logger = logging.get_logger(__name__)

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


def mhla_attention_forward(
    module: Any,
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
        attention_mask: Mask of [`mhla_mask`].
        scaling: Factor of the logits of softmax attention.
        dropout: Ignored.
        is_causal: Whether tokens look back only; the module says so if this is `None`.
        mhla_layer_inputs: From [`LayerInputsHook`].
        **kwargs: Further arguments that the model passes to every attention function.

    Returns:
        `[B, T, H, K]` and `None`.

    Raises:
        ValueError: If something is asked that MHLA cannot do; the message says what.
        UnsupportedVersionError: If transformers hands caches on in an unknown way.
    """
    mhla = getattr(module, "mhla", None)
    if mhla is None:
        tokens = (query, key, value)
        return _softmax(module, tokens, attention_mask, is_causal, scaling=scaling, dropout=dropout, **kwargs)
    for name, what in _REFUSED.items():
        if kwargs.get(name) is not None:
            raise ValueError(f"{type(module).__name__} passes {name} to its attention; MHLA cannot do {what}.")
    if kwargs.get("output_attentions") and not torch.compiler.is_compiling():
        logger.warning_once("MHLA has no attention weights to return: output_attentions gives None for its layers.")
    given = mhla_layer_inputs
    if given is None:
        given, module._mhla_layer_inputs = getattr(module, "_mhla_layer_inputs", None), None
    if given is None or given.model is None:
        raise ValueError(
            f"The inputs of the model did not reach {type(module).__name__}: it drops keyword arguments, or was "
            "called outside its model. Pass mhla_inputs=ModelInputs() to call a layer alone."
        )
    if key.shape[2] != query.shape[2]:
        # A cache that no hook saw gave its keys back.
        raise unknown_shape("transformers", "names of the cache in calls of models")
    _check_mask(module, attention_mask, given.model)
    exact = None
    if mhla.groups is not None:
        (query, key, value), others = zip(*(mhla.groups.split(tokens, 1) for tokens in (query, key, value)))
        if given.cache is not None:
            others = (others[0], *given.cache.softmax_tokens)
        kwargs |= {"mhla_inputs": given.model, "scaling": scaling, "dropout": dropout}
        exact, _ = _softmax(module, others, attention_mask, is_causal, **kwargs)
    query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    rotary = None
    if given.position_embeddings is not None and mhla.config.rope == "after_feature_map":
        rotation = make_rotation(module, given.position_embeddings, query)
        query, key, rotary = rotation.undo(query), rotation.undo(key), rotation.rotate
    if scaling == 1.0 and isinstance(getattr(module, "scaling", None), float) and module.scaling != 1.0:
        # Scaled already, in the query alone; the feature map wants both sides alike.
        query, key = query * module.scaling**-0.5, key * module.scaling**0.5
    if mhla.config.is_sequence:
        sequence = _token_sequence(module, given, query.shape[:2], _is_causal(module, is_causal))
        where: dict[str, Any] = {"sequence": sequence}
    else:
        sequence, where = None, {"grid": given.model.grid}
    if exact is not None:
        where["exact"] = exact
    output = mhla(query, key, value, hidden_states=given.hidden_states, rotary=rotary, scaling=scaling, **where)
    if sequence is not None and sequence.state is not None:
        assert given.cache is not None
        output, state = output
        given.cache.store(state, sequence.valid, given.model.hidden)
    return output.contiguous(), None


def mhla_mask(
    *, q_length: int, kv_length: int, config: Any, attention_mask: torch.Tensor | None = None, **kwargs: Any
) -> torch.Tensor | None:
    """Mask function of transformers' mask interface: padding as it is, or SDPA's mask where some layers are softmax.

    MHLA layers do not read it: they get the padding from [`ModelInputsHook`].

    Raises:
        ValueError: If the model adds to its causal or bidirectional mask.
    """
    # Names of functions cannot be read while compiling; a model does the same thing uncompiled.
    adds = not torch.compiler.is_compiling() and adds_to_mask(kwargs.get("mask_function"))
    if kwargs.get("use_vmap") or adds:
        raise ValueError(
            "This model changes its attention mask (for images or prefixes in a text); MHLA cannot. Other parts can "
            "be asked by name, as in attn_implementation={'vision_config': 'mhla'}."
        )
    if _is_hybrid(config):
        start = kwargs["q_offset"]
        if q_length == 1 and (isinstance(start, torch.Tensor) or kwargs["kv_offset"] + kv_length > start + 1):
            # transformers leaves this mask out unless the cache may be compiled, which a hybrid's may not. In a static
            # cache softmax layers would attend to the empty slots behind the tokens.
            kwargs["allow_is_causal_skip"] = False
        return sdpa_mask(q_length=q_length, kv_length=kv_length, attention_mask=attention_mask, **kwargs)
    if attention_mask is not None and attention_mask.shape[-1] < kv_length:
        # As long as a static cache from the start, so that compiled decoding is not recompiled for every token.
        return F.pad(attention_mask, (0, kv_length - attention_mask.shape[-1]))
    return attention_mask


def _is_hybrid(config: Any) -> bool:
    """Return whether some layers of a model are softmax and need its mask."""
    types = getattr(config, "layer_types", None) or ()
    return (config.mhla or {}).get("layers") is not None or any(kind != "full_attention" for kind in types)


def _check_mask(module: nn.Module, mask: torch.Tensor | None, inputs: ModelInputs) -> None:
    """Refuse biases and masks that a model adds for its attention, and that MHLA would not see."""
    if mask is None or mask.dim() != 4:
        return
    # A boolean mask was either checked on its way in, or made for the softmax layers of a hybrid.
    if mask.is_floating_point() or (inputs.padding is None and not _is_hybrid(module.config)):
        raise ValueError(
            f"{type(module).__name__} gives its attention a bias or mask of its own {tuple(mask.shape)}; MHLA follows "
            "padding and causality only."
        )


def _softmax(
    module: Any, tokens: tuple[torch.Tensor, ...], mask: torch.Tensor | None, is_causal: bool | None, **kwargs: Any
) -> tuple[torch.Tensor, None]:
    """SDPA for the layers of a hybrid that are softmax."""
    # A mask of padding alone was made for a model without such layers, whose configuration this one shares.
    if getattr(module.config, "mhla", None) is None or (mask is not None and mask.dim() != 4):
        raise ValueError(_NOT_BUILT)
    inputs: ModelInputs | None = kwargs.pop("mhla_inputs", None)
    documents, (batch, _, length, _) = None if inputs is None else inputs.documents, tokens[0].shape
    if documents is not None and tokens[1].shape[2] == length:
        same = (documents[:, None, :, None] == documents[:, None, None, :]).expand(batch, -1, -1, -1)
        if mask is not None:
            mask = mask & same
        else:
            mask = same.tril() if _is_causal(module, is_causal) else same
    return ALL_ATTENTION_FUNCTIONS["sdpa"](module, *tokens, mask, is_causal=is_causal, **kwargs)


def _is_causal(module: nn.Module, is_causal: bool | None) -> bool:
    """As transformers' SDPA: the call says so, else the module, and one that does not say is causal."""
    return bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)


def _token_sequence(module: Any, given: LayerInputs, shape: torch.Size, causal: bool) -> TokenSequence:
    assert given.model is not None
    inputs, cache, length = given.model, given.cache, shape[1]
    valid, documents = inputs.padding, inputs.documents
    if documents is not None:
        # Positions are often given once for the whole batch.
        documents = documents.expand(shape[0], -1)
    if cache is not None and documents is not None:
        cache.unusable = "This cache was filled with packed sequences, which cannot be continued."
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
    state = None if cache is None else cache.decoding_state(length)
    return TokenSequence(causal, valid, documents, inputs.num_documents, state)


# Attention classes whose rotation was found to be invertible the way `Rotation` does it.
_CHECKED: set[type] = set()


@dataclass(frozen=True)
class Rotation:
    """One call's rotation by the angles whose cosine and sine the model computed.

    Scaled embeddings (YaRN and others) multiply both by a factor s. Queries and keys keep it, features do not: their
    rotation is a pure one, so that numerator and normaliser stay in proportion.

    Attributes:
        apply: `apply_rotary_pos_emb(query, key, cos, sin)` on `[B, H, T, R]`.
        cos: `[B or 1, T, R]`; R is less than the head width where only its first part is rotated.
        sin: Like `cos`.
    """

    apply: Callable[..., Any]
    cos: torch.Tensor
    sin: torch.Tensor

    @property
    def _scale(self) -> torch.Tensor:
        """s as `[B or 1, T, R]`, for each pair by itself: half precision rounds cosine and sine."""
        return (self.cos.float().square() + self.sin.float().square()).sqrt()

    def rotate(self, tokens: torch.Tensor) -> torch.Tensor:
        """Rotate `[B, T, H, K]` without scaling."""
        return self._turn(tokens, self.cos / self._scale, self.sin / self._scale)

    def undo(self, tokens: torch.Tensor) -> torch.Tensor:
        """Rotate `[B, T, H, K]` back; a scale that was applied stays applied."""
        return self._turn(tokens, self.cos / self._scale, -self.sin / self._scale)

    def _turn(self, tokens: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        width = cos.shape[-1]
        cos, sin = cos.to(tokens.dtype), sin.to(tokens.dtype)
        rotated = tokens[..., :width].transpose(1, 2)
        # The function takes a query and a key; one head stands in for the key.
        rotated = self.apply(rotated, rotated[:, :1], cos, sin)[0].transpose(1, 2)
        return torch.cat([rotated, tokens[..., width:]], dim=-1) if width < tokens.shape[-1] else rotated


def make_rotation(attention: nn.Module, position_embeddings: Any, query: torch.Tensor) -> Rotation:
    """Build the rotation of one call, and checks it once for each attention class.

    Args:
        attention: The attention module.
        position_embeddings: The argument of that name of the module.
        query: The rotated queries `[B, T, H, K]`, for their shape and device: they may not be finite.

    Raises:
        ValueError: If the embeddings are not cosine and sine `[B, T, R]`, or rotating back and forth does not return
            the query.
    """
    apply: Any = rotation_of(attention)
    is_pair = isinstance(position_embeddings, (tuple, list)) and len(position_embeddings) == 2
    undone = apply is not None and is_pair and all(part.dim() == 3 for part in position_embeddings)
    if undone and type(attention) not in _CHECKED and not torch.compiler.is_compiling() and not query.is_meta:
        sample = torch.linspace(-1, 1, query[0, :, 0].numel(), device=query.device).view_as(query[:1, :, :1])
        partial = Rotation(apply, *(part[:1].detach() for part in position_embeddings))
        undone = torch.allclose(partial.rotate(partial.undo(sample)), sample, rtol=1e-3, atol=1e-4)
    if not undone:
        raise ValueError(
            f"{type(attention).__name__} has rotary embeddings that cannot be undone; "
            "use mhla={'rope': 'before_feature_map'}."
        )
    _CHECKED.add(type(attention))
    return Rotation(apply, *position_embeddings)


# Inputs.

_MODEL_ARGUMENTS = ("input_ids", "inputs_embeds", "attention_mask", "position_ids", "pixel_values", *cache_names())
# The last two are those of attention modules of some models.
_CACHE_NAMES = (*cache_names(), "layer_past", "past_key_value")


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
        """Move the tensors, as `torch.Tensor.to`; models spread over devices call this."""
        tensors = {name: value for name, value in vars(self).items() if isinstance(value, torch.Tensor)}
        moved: dict[str, Any] = {name: tensor.to(*args, **kwargs) for name, tensor in tensors.items()}
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


def _check_softmax(attention: Any, cache: Any, index: int) -> None:
    """Refuse softmax attention where the weights may have been fitted for MHLA, and with a cache of summaries."""
    record = attention.mhla.record
    if record is None or record[0].fitted is None:
        raise ValueError(
            f"{type(attention).__name__} has an MHLA layer and cannot use {attention_of(attention.config)!r} "
            "attention: switch with model.set_attn_implementation, which restores the softmax weights."
        )
    layers = getattr(cache, "layers", ())
    if index < len(layers) and isinstance(layers[index], MHLACacheLayer):
        raise ValueError("This cache was filled by MHLA attention; softmax attention needs a new one.")


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
            cache = _cache_in(given)
            padding = _padding(mask, cache, causal)
            hidden = None
            if causal and tokens is not None:
                hidden = follow_mask(getattr(cache, "layers", ()), padding, tokens.shape[1])
            inputs = ModelInputs(padding, documents, count, hidden=hidden)
        return args, {**kwargs, "mhla_inputs": inputs}


class LayerInputsHook:
    """Forward pre-hook of a self-attention module with an `mhla` submodule: hands over [`LayerInputs`].

    Args:
        attention: The attention module.
        layer_index: Its index in the cache.
        only_mhla: Whether every layer of the model is MHLA with all its heads.
    """

    def __init__(self, attention: nn.Module, layer_index: int, only_mhla: bool) -> None:
        names = ("hidden_states", "position_embeddings", "attention_mask", "position_ids")
        self.positions = _positions(attention, (*names, *_CACHE_NAMES))
        self.layer_index, self.only_mhla = layer_index, only_mhla
        self.rotary, self.hands_on = uses_rotary(attention), reads_keywords(type(attention).forward)

    def __call__(self, attention: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
        given = {name: _argument(args, kwargs, index, name) for name, index in self.positions.items()}
        cache = _cache_in(given)
        if attention_of(attention.config) != NAME:
            _check_softmax(attention, cache, self.layer_index)
            return None
        layer = None
        if cache is not None:
            groups = attention.mhla.groups
            layer = mhla_cache_layer(cache, self.layer_index, only_mhla=self.only_mhla, groups=groups)
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

    sentence-transformers calls models so. `None` where that may not be everything: the size of images, and positions
    that could tell packed documents.
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
    if positions is None or given.get("attention_mask") is not None or _cache_in(given) is not None:
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


def _cache_in(given: Mapping[str, Any]) -> Any:
    return next((given[name] for name in _CACHE_NAMES if given.get(name) is not None), None)


def _argument(args: tuple, kwargs: dict[str, Any], index: int, name: str) -> Any:
    return args[index] if 0 <= index < len(args) else kwargs.get(name)


AttentionInterface.register(NAME, mhla_attention_forward)
# Under the same name, or transformers would make no mask at all and padding would be seen.
AttentionMaskInterface.register(NAME, mhla_mask)
