# SPDX-License-Identifier: Apache-2.0
"""Tiny softmax models of many transformers families with random weights: real classes, no network and no files.

`FAMILIES` describes them, `softmax_model` makes one, `inputs` what its `forward` takes. All have width 32, three
layers and four heads of width 8 (two key/value heads where the family can), and a vocabulary of 64 with padding token
0 or 1. Dropout is off, so that training mode is deterministic too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
import transformers

from mhla_hf.utils.compat.transformers import cache_names


Padding = Literal["left", "right", "interior"]

# The argument that is the cache; any other of its names warns.
CACHE = cache_names()[0]
VOCABULARY = 64
FIRST_ORDINARY_TOKEN = 3
IMAGE_SIZE = 16
PATCH_SIZE = 4
WEIGHT_STD = 0.24
"""Of every matrix: attention scores then have a standard deviation of about 1.5, and attention is far from uniform."""


@dataclass(frozen=True)
class Family:
    """One tiny model.

    Attributes:
        model: name of the class in transformers.
        config_name: name of its configuration's class.
        sizes: constructor arguments of the configuration.
        kind: "causal" for language models and causal towers, "encoder" for bidirectional text, "vision".
        prefix_tokens: class, distillation and register tokens before the patches of a vision model.
        generates: whether the model has `generate` and a cache.
        interpolation: how a vision model is asked for other image sizes than its own: by the argument
            `interpolate_pos_encoding`, or not at all ("automatic").
        softmax_layers: layers that cannot be converted since they attend within a sliding window.
        first_position: what `position_ids` start from.
    """

    model: str
    config_name: str
    sizes: dict[str, Any]
    kind: Literal["causal", "encoder", "vision"] = "causal"
    prefix_tokens: int = 0
    generates: bool = False
    interpolation: Literal["argument", "automatic"] = "argument"
    softmax_layers: tuple[int, ...] = ()
    first_position: int = 0

    @property
    def model_class(self) -> type[transformers.PreTrainedModel]:
        """The class; looked up late, since importing all of them takes seconds."""
        return getattr(transformers, self.model)

    def config(self, **overrides: Any) -> transformers.PreTrainedConfig:
        """A fresh configuration; `overrides` replace entries of `sizes`."""
        return getattr(transformers, self.config_name)(**{**self.sizes, **overrides})


TEXT: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 128,
}
SPECIAL_TOKENS: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
"""No end of text, so that generation always has the length asked for."""
DECODER = {**TEXT, **SPECIAL_TOKENS, "num_key_value_heads": 2}
ENCODER = {**TEXT, "pad_token_id": 0, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
TOWER = {**TEXT, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}
VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": IMAGE_SIZE,
    "patch_size": PATCH_SIZE,
}


def _decoder(
    prefix: str, sizes: dict[str, Any] | None = None, *, config_name: str | None = None, **options: Any
) -> Family:
    config_name = config_name or f"{prefix}Config"
    return Family(f"{prefix}ForCausalLM", config_name, {**DECODER, **(sizes or {})}, generates=True, **options)


def _scaled_llama(rope_type: str, **parameters: Any) -> Family:
    rope = {"rope_type": rope_type, "rope_theta": 10_000.0, **parameters}
    return _decoder("Llama", {"rope_parameters": rope})


def _encoder(prefix: str, sizes: dict[str, Any], **options: Any) -> Family:
    return Family(f"{prefix}ForMaskedLM", f"{prefix}Config", sizes, "encoder", **options)


def _vision(prefix: str, prefix_tokens: int, sizes: dict[str, Any] | None = None, **options: Any) -> Family:
    config = f"{prefix.removesuffix('Model')}Config"
    model = prefix if prefix.endswith("Model") else f"{prefix}Model"
    return Family(model, config, {**VISION, **(sizes or {})}, "vision", prefix_tokens, **options)


FAMILIES: dict[str, Family] = {
    "llama": _decoder("Llama"),
    "llama_linear": _scaled_llama("linear", factor=4.0),
    "llama_llama3": _scaled_llama(
        "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16
    ),
    # Its cosines and sines are larger than 1: they hold the factor of the attention scores.
    "llama_yarn": _scaled_llama("yarn", factor=8.0, original_max_position_embeddings=16),
    "qwen2": _decoder("Qwen2"),
    "qwen3": _decoder("Qwen3", {"head_dim": 8}),
    "mistral": _decoder("Mistral", {"sliding_window": None}),
    "gemma3": _decoder(
        "Gemma3",
        {
            "head_dim": 8,
            "query_pre_attn_scalar": 8,
            "sliding_window": 4,
            "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        },
        config_name="Gemma3TextConfig",
        softmax_layers=(0,),
    ),
    "phi": _decoder("Phi", {"partial_rotary_factor": 0.5}),
    "phi3": _decoder("Phi3", {"partial_rotary_factor": 0.5}),
    # The last of the three layers has no rotary embedding.
    "smollm3": _decoder("SmolLM3", {"no_rope_layer_interval": 3}),
    "gpt_neox": Family(
        "GPTNeoXForCausalLM", "GPTNeoXConfig", {**TEXT, **SPECIAL_TOKENS, "rotary_pct": 0.5}, generates=True
    ),
    "granite": _decoder("Granite", {"attention_multiplier": 8**-0.5}),
    "olmo2": _decoder("Olmo2"),
    "gpt2": Family(
        "GPT2LMHeadModel",
        "GPT2Config",
        {
            "n_embd": 32,
            "n_layer": 3,
            "n_head": 4,
            "n_positions": 128,
            "vocab_size": VOCABULARY,
            **SPECIAL_TOKENS,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
        },
        generates=True,
    ),
    "opt": Family(
        "OPTForCausalLM",
        "OPTConfig",
        {
            "hidden_size": 32,
            "word_embed_proj_dim": 32,
            "ffn_dim": 64,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "vocab_size": VOCABULARY,
            "max_position_embeddings": 128,
            **SPECIAL_TOKENS,
            "dropout": 0.0,
        },
        generates=True,
    ),
    "starcoder2": _decoder("Starcoder2", {"sliding_window": None, "residual_dropout": 0.0, "embedding_dropout": 0.0}),
    "bert": _encoder("Bert", ENCODER),
    "roberta": _encoder("Roberta", {**ENCODER, "pad_token_id": 1}, first_position=2),
    "xlm_roberta": _encoder("XLMRoberta", {**ENCODER, "pad_token_id": 1}, first_position=2),
    "electra": _encoder("Electra", {**ENCODER, "embedding_size": 16}),
    "distilbert": _encoder(
        "DistilBert",
        {
            "dim": 32,
            "hidden_dim": 64,
            "n_layers": 3,
            "n_heads": 4,
            "vocab_size": VOCABULARY,
            "max_position_embeddings": 128,
            "pad_token_id": 0,
            "dropout": 0.0,
            "attention_dropout": 0.0,
        },
    ),
    # Layers attend globally, within four tokens, and globally again.
    "modernbert": _encoder(
        "ModernBert",
        {
            **TEXT,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "cls_token_id": 1,
            "eos_token_id": 2,
            "sep_token_id": 2,
            "global_attn_every_n_layers": 2,
            "local_attention": 4,
        },
        softmax_layers=(1,),
    ),
    "clip_text": Family("CLIPTextModel", "CLIPTextConfig", TOWER),
    "siglip_text": Family("SiglipTextModel", "SiglipTextConfig", TOWER, "encoder"),
    "vit": _vision("ViT", 1),
    "deit": _vision("DeiT", 2),
    "dinov2": _vision("Dinov2", 1, {"mlp_ratio": 2}, interpolation="automatic"),
    "dinov2_with_registers": _vision(
        "Dinov2WithRegisters", 5, {"mlp_ratio": 2, "num_register_tokens": 4}, interpolation="automatic"
    ),
    "clip_vision": _vision("CLIPVisionModel", 1),
    "siglip_vision": _vision("SiglipVisionModel", 0),
}


def names(*kinds: str, generates: bool | None = None) -> list[str]:
    """Names of the families of these kinds (all by default), with or without `generate`: for parametrized tests."""
    return [
        name
        for name, family in FAMILIES.items()
        if (not kinds or family.kind in kinds) and generates in (None, family.generates)
    ]


@torch.no_grad()
def sharpen(model: torch.nn.Module) -> None:
    """Scale every matrix to a standard deviation of `WEIGHT_STD`; draw those that start constant, such as tokens."""
    for parameter in model.parameters():
        if parameter.ndim >= 2:
            if parameter.std() == 0:
                parameter.normal_()
            parameter.mul_(WEIGHT_STD / parameter.std())


def softmax_model(name: str, *, seed: int = 0, **overrides: Any) -> transformers.PreTrainedModel:
    """The family's own model in evaluation mode, fp32, with transformers' default attention.

    Args:
        name: key of `FAMILIES`.
        seed: of the weights.
        **overrides: replace entries of the configuration.
    """
    family = FAMILIES[name]
    torch.manual_seed(seed)
    model = family.model_class(family.config(**overrides))
    sharpen(model)
    return model.eval()


def clip_model() -> transformers.CLIPModel:
    """A model of two towers in evaluation mode."""
    torch.manual_seed(0)
    config = transformers.CLIPConfig(text_config=TOWER, vision_config=VISION, projection_dim=16)
    return transformers.CLIPModel(config).eval()


def padding_mask(batch: int, length: int, padding: Padding) -> torch.Tensor:
    """A mask of int64, 1 for tokens: row `i` lacks `length // (2 + i)` of them, so no two of the first rows agree.

    Interior padding leaves out every other token, but neither the first nor the last one. Sliding windows count it:
    models with `softmax_layers` then differ from the same text without padding, whatever their attention.
    """
    mask = torch.ones(batch, length, dtype=torch.long)
    for row in range(batch):
        count = length // (2 + row)
        if padding == "left":
            mask[row, :count] = 0
        elif padding == "right":
            mask[row, length - count :] = 0
        else:
            mask[row, 1 + row % 2 : length - 1 : 2][:count] = 0
    return mask


def inputs(
    name: str,
    batch: int = 2,
    length: int = 13,
    padding: Padding | None = None,
    *,
    positions: bool = False,
    image_size: tuple[int, int] | None = None,
    seed: int = 1,
) -> dict[str, Any]:
    """Keyword arguments for the model's `forward`.

    Args:
        name: key of `FAMILIES`.
        batch: number of sequences or images.
        length: of the texts, padding included; images ignore it.
        padding: where the texts are padded, see `padding_mask`; no `attention_mask` without it.
        positions: whether to pass `position_ids` that count tokens and not padding, as `generate` does.
        image_size: height and width of the images, the model's own by default.
        seed: of tokens and images.
    """
    family = FAMILIES[name]
    generator = torch.Generator().manual_seed(seed)
    if family.kind == "vision":
        if padding is not None or positions:
            raise ValueError("images have neither padding nor positions")
        height, width = image_size or (IMAGE_SIZE, IMAGE_SIZE)
        result: dict[str, Any] = {"pixel_values": torch.randn(batch, 3, height, width, generator=generator)}
        if image_size is not None and family.interpolation == "argument":
            result["interpolate_pos_encoding"] = True
        return result
    result = {"input_ids": torch.randint(FIRST_ORDINARY_TOKEN, VOCABULARY, (batch, length), generator=generator)}
    mask = torch.ones(batch, length, dtype=torch.long)
    if padding is not None:
        mask = padding_mask(batch, length, padding)
        result["input_ids"] = result["input_ids"].masked_fill(mask == 0, family.sizes["pad_token_id"])
        result["attention_mask"] = mask
    if positions:
        result["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0) + family.first_position
    return result
