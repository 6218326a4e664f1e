# SPDX-License-Identifier: Apache-2.0
"""The transformers models that were tested with MHLA."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TransformersFamily:
    """One tested architecture of transformers.

    Attributes:
        name: Its `model_type`.
        kind: `"language model"`, `"encoder"` or `"vision"`.
        note: What to know about it, or an empty string.
        layers: Where the MHLA layers sit.
    """

    name: str
    kind: str
    note: str = ""
    layers: str = "self-attention `.mhla`"


_LANGUAGE = {
    "gemma3_text": "sliding-window layers stay softmax",
    "gpt2": "",
    "gpt_neox": "partial rotary embeddings",
    "granite": "",
    "llama": "",
    "mistral": "with sliding_window=None",
    "olmo2": "",
    "opt": "",
    "phi": "partial rotary embeddings",
    "phi3": "with sliding_window=None",
    "qwen2": "",
    "qwen3": "",
    "smollm3": "",
    "starcoder2": "with sliding_window=None",
}
_ENCODERS = {
    "bert": "",
    "clip_text_model": "causal, without a cache",
    "distilbert": "",
    "electra": "",
    "modernbert": "local layers stay softmax",
    "roberta": "",
    "siglip_text_model": "",
    "xlm-roberta": "",
}
_VISION = {
    "clip_vision_model": "",
    "deit": "class and distillation tokens in a block of their own",
    "dinov2": "",
    "dinov2_with_registers": "class and register tokens in a block of their own",
    "siglip_vision_model": "",
    "vit": "",
}

TRANSFORMERS_FAMILIES: dict[str, TransformersFamily] = {
    name: TransformersFamily(name, kind, note)
    for kind, notes in (("language model", _LANGUAGE), ("encoder", _ENCODERS), ("vision", _VISION))
    for name, note in notes.items()
}


def is_tested(model_type: str) -> bool:
    """Whether a `model_type` is among the tested ones."""
    return model_type in TRANSFORMERS_FAMILIES
