# SPDX-License-Identifier: Apache-2.0
"""The attention function and the mask function that are registered as `"mhla"`.

Attention functions see queries and keys after RoPE. With `rope="after_feature_map"` they are rotated back, mapped, and
the features are rotated, all with the model's own `apply_rotary_pos_emb`: any order of the rotated pairs works.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface
from transformers.utils import logging

from ...layers.state import TokenSequence
from .cache import MHLACacheLayer
from .configuration import NAME
from .inputs import LayerInputs, ModelInputs
from .modules import rotation_of


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
    """
    mhla = getattr(module, "mhla", None)
    if mhla is None:
        return _softmax(
            module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, is_causal=is_causal, **kwargs
        )
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
    _check_mask(module, attention_mask, given.model)
    query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    rotary = None
    if given.position_embeddings is not None and mhla.config.rope == "after_feature_map":
        rotation = make_rotation(module, given.position_embeddings, query)
        query, key, rotary = rotation.undo(query), rotation.undo(key), rotation.rotate
    if scaling == 1.0 and isinstance(getattr(module, "scaling", None), float) and module.scaling != 1.0:
        # Scaled already, in the query alone; the feature map wants both sides alike.
        query, key = query * module.scaling**-0.5, key * module.scaling**0.5
    if mhla.config.is_sequence:
        causal = _is_causal(module, is_causal)
        sequence = _token_sequence(module, given.model, given.cache, query.shape[:2], causal, mhla.config.block_size)
        where: dict[str, Any] = {"sequence": sequence}
    else:
        sequence, where = None, {"grid": given.model.grid}
    output = mhla(query, key, value, hidden_states=given.hidden_states, rotary=rotary, scaling=scaling, **where)
    if sequence is not None and sequence.state is not None:
        assert given.cache is not None
        output, state = output
        given.cache.store(state, sequence.valid, given.model.hidden)
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
    # Names of functions cannot be read while compiling; a model does the same thing uncompiled.
    name = "" if torch.compiler.is_compiling() else getattr(mask_function, "__qualname__", "")
    if kwargs.get("use_vmap") or name.startswith("or_masks"):
        raise ValueError(
            "This model changes its attention mask (for images or prefixes in a text); MHLA cannot. Other parts can "
            "be asked by name, as in attn_implementation={'vision_config': 'mhla'}."
        )
    if config.mhla is None:
        raise ValueError(_NOT_BUILT)
    if _is_hybrid(config):
        if q_length == 1 and (isinstance(q_offset, torch.Tensor) or kv_offset + kv_length > q_offset + 1):
            # transformers leaves this mask out unless the cache may be compiled, which a hybrid's may not. In a static
            # cache softmax layers would attend to the empty slots behind the tokens.
            kwargs["allow_is_causal_skip"] = False
        return sdpa_mask(
            batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset, kv_offset=kv_offset,
            mask_function=mask_function, attention_mask=attention_mask, **kwargs,
        )  # fmt: skip
    if attention_mask is not None and attention_mask.shape[-1] < kv_length:
        # As long as a static cache from the start, so that compiled decoding is not recompiled for every token.
        return F.pad(attention_mask, (0, kv_length - attention_mask.shape[-1]))
    return attention_mask


def _is_hybrid(config: Any) -> bool:
    """Returns whether some layers of a model are softmax and need its mask."""
    types = getattr(config, "layer_types", None) or ()
    return config.mhla["layers"] is not None or any(kind != "full_attention" for kind in types)


def _check_mask(module: nn.Module, mask: torch.Tensor | None, inputs: ModelInputs) -> None:
    """Refuses biases and masks that a model adds for its attention, and that MHLA would not see."""
    if mask is None or mask.dim() != 4:
        return
    # A boolean mask was either checked on its way in, or made for the softmax layers of a hybrid.
    if mask.is_floating_point() or (inputs.padding is None and not _is_hybrid(module.config)):
        raise ValueError(
            f"{type(module).__name__} gives its attention a bias or mask of its own {tuple(mask.shape)}; MHLA follows "
            "padding and causality only."
        )


def _softmax(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    is_causal: bool | None,
    mhla_inputs: ModelInputs | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """SDPA for the layers of a hybrid that are softmax."""
    # A mask of padding alone was made for a model without such layers, whose configuration this one shares.
    if getattr(module.config, "mhla", None) is None or (attention_mask is not None and attention_mask.dim() != 4):
        raise ValueError(_NOT_BUILT)
    documents = None if mhla_inputs is None else mhla_inputs.documents
    if documents is not None and key.shape[2] == query.shape[2]:
        same = (documents[:, None, :, None] == documents[:, None, None, :]).expand(query.shape[0], -1, -1, -1)
        if attention_mask is not None:
            attention_mask = attention_mask & same
        else:
            attention_mask = same.tril() if _is_causal(module, is_causal) else same
    return ALL_ATTENTION_FUNCTIONS["sdpa"](
        module, query, key, value, attention_mask, is_causal=is_causal, **kwargs
    )  # fmt: skip


def _is_causal(module: nn.Module, is_causal: bool | None) -> bool:
    """As transformers' SDPA: the call says so, else the module, and one that does not say is causal."""
    return bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)


def _token_sequence(
    module: nn.Module,
    inputs: ModelInputs,
    cache: MHLACacheLayer | None,
    shape: torch.Size,
    causal: bool,
    block_size: tuple[int, ...],
) -> TokenSequence:
    length, valid, documents = shape[1], inputs.padding, inputs.documents
    if documents is not None:
        # Positions are often given once for the whole batch.
        documents = documents.expand(shape[0], -1)
    if cache is not None and documents is not None:
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
    state = None if cache is None else cache.decoding_state(block_size[0], length)
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
        """Rotates `[B, T, H, K]` without scaling."""
        return self._turn(tokens, self.cos / self._scale, self.sin / self._scale)

    def undo(self, tokens: torch.Tensor) -> torch.Tensor:
        """Rotates `[B, T, H, K]` back; a scale that was applied stays applied."""
        return self._turn(tokens, self.cos / self._scale, -self.sin / self._scale)

    def _turn(self, tokens: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        width = cos.shape[-1]
        cos, sin = cos.to(tokens.dtype), sin.to(tokens.dtype)
        rotated = tokens[..., :width].transpose(1, 2)
        # The function takes a query and a key; one head stands in for the key.
        rotated = self.apply(rotated, rotated[:, :1], cos, sin)[0].transpose(1, 2)
        return torch.cat([rotated, tokens[..., width:]], dim=-1) if width < tokens.shape[-1] else rotated


def make_rotation(attention: nn.Module, position_embeddings: Any, query: torch.Tensor) -> Rotation:
    """Builds the rotation of one call, and checks it once for each attention class.

    Args:
        attention: The attention module.
        position_embeddings: The argument of that name of the module.
        query: The rotated queries `[B, T, H, K]` to check on.

    Raises:
        ValueError: If the embeddings are not cosine and sine `[B, T, R]`, or rotating back and forth does not return
            the query.
    """
    apply = rotation_of(attention)
    is_pair = isinstance(position_embeddings, (tuple, list)) and len(position_embeddings) == 2
    undone = apply is not None and is_pair and all(part.dim() == 3 for part in position_embeddings)
    if undone and type(attention) not in _CHECKED and not torch.compiler.is_compiling() and not query.is_meta:
        sample = query[:1, :, :1].detach().float()
        partial = Rotation(apply, *(part[:1].detach() for part in position_embeddings))
        undone = torch.allclose(partial.rotate(partial.undo(sample)), sample, rtol=1e-3, atol=1e-4)
    if not undone:
        raise ValueError(
            f"{type(attention).__name__} has rotary embeddings that cannot be undone; "
            "use mhla={'rope': 'before_feature_map'}."
        )
    _CHECKED.add(type(attention))
    return Rotation(apply, *position_embeddings)


AttentionInterface.register(NAME, mhla_attention_forward)
# Under the same name, or transformers would make no mask at all and padding would be seen.
AttentionMaskInterface.register(NAME, mhla_mask)
