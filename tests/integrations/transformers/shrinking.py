# SPDX-License-Identifier: Apache-2.0
"""Tiny configurations of any model class of transformers, from the names of their fields alone."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import torch
import transformers


VOCABULARY = 128
MAX_PARAMETERS = 8_000_000

# First match wins.
_SIZES: list[tuple[str, int | float]] = [
    (r"(num_)?(key_value_heads|kv_heads)|n_head_kv|.*_num_key_value_heads|.*_num_key_heads", 2),
    (r".*(num|n)_attention_heads|num_heads|n_heads?|.*attention_heads|.*_num_heads|.*n_heads|.*num_value_heads", 4),
    (r"(.*_)?head_dim|d_kv|attention_head_size|.*_key_head_dim|.*_value_head_dim|rotary_dim", 8),
    (r"(.*_)?vocab_size(_.*)?", VOCABULARY),
    (r"(num|n)_hidden_layers|(num_)?(encoder_|decoder_|.*_)?layers|n_layers?|depth|num_blocks", 2),
    (r".*intermediate_(size|dim)|.*ffn_dim|n_inner|d_ff|dff|ffn_hidden_size|.*mlp_dim|hidden_dim|mlp_hidden_size", 64),
    (
        r"hidden_size|d_model|n_embd|dim|embed_dim|embedding_size|word_embed_proj_dim|.*hidden_size|.*projection_dim"
        r"|.*embed_dim|.*output_dim|emb_dim|embedding_dim|d_embed|d_inner|.*_latent_size|lru_width",
        32,
    ),
    (
        r".*max_position_embeddings|n_positions|n_ctx|max_(source|target)_positions|max_seq_len|max_sequence_length",
        128,
    ),
    (r"n_routed_experts|num_(local_)?experts|moe_num_experts", 4),
    (r"num_experts_per_tok|moe_topk|moe_k|num_experts_per_token|top_k_experts|num_selected_experts", 2),
    (r"n_group|topk_group|num_groups|first_k_dense_replace", 1),
    (r".*lora_rank|.*_rank", 16),
    (r"qk_rope_head_dim|qk_nope_head_dim|v_head_dim|mamba_d_state|ssm_state_size|state_size", 8),
    (r"(.*_)?image_size", 16),
    (r"patch_size", 4),
    (r"attention_chunk_size|sliding_window.*|(.*_)?window_size|local_attention", 4),
    (r".*dropout.*|.*_pdrop|.*layer_?drop", 0.0),
]


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _small(name: str, value: Any) -> Any:
    size = next((size for pattern, size in _SIZES if re.fullmatch(pattern, name)), None)
    return size if size is not None and _is_number(value) and value > size else value


def tiny_config(config_class: Any, **overrides: Any) -> Any:
    """A configuration of few and narrow layers, of each kind of layer that the class has by default.

    Args:
        config_class: A configuration class of transformers.
        **overrides: Fields to set, where their names do not tell all; a dict for those of an inner configuration.
    """
    default = config_class().__dict__
    inherited = {field.name for field in dataclasses.fields(transformers.PreTrainedConfig)}
    sizes: dict[str, Any] = {"pad_token_id": 0}
    for field in dataclasses.fields(config_class):
        name, value = field.name, default.get(field.name)
        if not field.init or (name in overrides and not isinstance(overrides[name], dict)):
            continue
        if isinstance(value, transformers.PreTrainedConfig):
            sizes[name] = tiny_config(type(value), **overrides.pop(name, {}))
        elif name == "rope_parameters" and isinstance(value, dict) and "mrope_section" in value:
            sizes[name] = {**value, "mrope_section": [1, 1, 2]}
        elif name == "head_dim" and value is None:
            sizes[name] = 8
        elif name == "eos_token_id":
            # Without an end of text, generation always has the length asked for.
            sizes[name] = None
        elif name.endswith(("_token_id", "_token_index")) and _is_number(value) and value >= VOCABULARY:
            sizes[name] = VOCABULARY - 1 - len(sizes) % 32
        elif name == "layer_types" and isinstance(value, (list, tuple)):
            kinds = list(dict.fromkeys(value))
            sizes[name] = kinds if len(kinds) > 1 else kinds * 2
            sizes["num_hidden_layers"] = len(sizes[name])
        elif name not in inherited and name not in sizes and _small(name, value) != value:
            sizes[name] = _small(name, value)
    return config_class(**{**sizes, **overrides})


def num_parameters(model_class: Any, config: Any) -> int:
    """How many parameters a model has, without making them."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in model_class(config).parameters())
