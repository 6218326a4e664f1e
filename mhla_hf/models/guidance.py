# SPDX-License-Identifier: Apache-2.0
"""What diffusers' guidance methods ask of attention layers: skipping them, and letting tokens attend to themselves.

Perturbed-attention guidance compares a prediction with one whose attention maps are identities. Its pipelines set
processors that split the batch into parts, the last of them perturbed; its guider hangs a hook on the attention module
for a pass of its own.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn as nn
from diffusers.hooks._helpers import AttentionProcessorRegistry, TransformerBlockMetadata, TransformerBlockRegistry
from diffusers.models.attention_processor import AttnProcessor2_0


# Parts of the batch that each processor expects, by name, since diffusers may drop these classes.
_PARTS = {
    "PAGCFGIdentitySelfAttnProcessor2_0": 3,
    "PAGCFGSanaLinearAttnProcessor2_0": 3,
    "PAGIdentitySelfAttnProcessor2_0": 2,
    "PAGIdentitySanaLinearAttnProcessor2_0": 2,
}


def register_processors(*classes: type) -> None:
    """Lets guiders and caches of diffusers skip the attention that these processors compute.

    Args:
        *classes: Processor classes that return the hidden states alone; those known to diffusers are left alone.
    """
    skipping = AttentionProcessorRegistry.get(AttnProcessor2_0)
    for cls in classes:
        if cls not in AttentionProcessorRegistry._registry:
            AttentionProcessorRegistry.register(cls, skipping)


def register_blocks(*classes: type) -> None:
    """Lets guiders and caches of diffusers skip whole layers of these classes, which return the hidden states alone.

    Args:
        *classes: Layer classes; those known to diffusers are left alone.
    """
    TransformerBlockRegistry._register()
    for cls in classes:
        if cls not in TransformerBlockRegistry._registry:
            metadata = TransformerBlockMetadata(return_hidden_states_index=0, return_encoder_hidden_states_index=None)
            TransformerBlockRegistry.register(cls, metadata)


def is_perturbed(attn: nn.Module) -> bool:
    """Whether a guider asks for identities in place of this module's attention map.

    Args:
        attn: An attention module.
    """
    registry = getattr(attn, "_diffusers_hook", None)
    return registry is not None and any(
        getattr(hook, "skip_attention_scores", False) for hook in registry.hooks.values()
    )


def attend_in_parts(processor: object, own: Any, attn: nn.Module, hidden_states: torch.Tensor, **kwargs: Any) -> Any:
    """Attends as a processor of perturbed-attention guidance does, with MHLA in place of its attention.

    Args:
        processor: The processor.
        own: The layer's MHLA processor.
        attn: The attention module.
        hidden_states: `[B, T, hidden]`, B a multiple of 2, or 3 with classifier-free guidance.
        **kwargs: Further arguments of `own`.

    Raises:
        ValueError: If it is another processor, which would ignore the layer's weights, or the batch has no such parts.
    """
    parts = _PARTS.get(type(processor).__name__)
    if parts is None:
        raise ValueError(
            f"This layer's weights are MHLA; {type(processor).__name__} would ignore them. Set the processors that "
            "the model had before."
        )
    if hidden_states.shape[0] % parts:
        raise ValueError(
            f"{type(processor).__name__} needs a batch of {parts} parts, not of {hidden_states.shape[0]}. If it is "
            "left from a pipeline that was interrupted, set the processors that the model had before."
        )
    size = hidden_states.shape[0] // parts
    attended = own(attn, hidden_states[:-size], **kwargs)
    return torch.cat([attended, own(attn, hidden_states[-size:], perturbed=True, **kwargs)])
