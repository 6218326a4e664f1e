# SPDX-License-Identifier: Apache-2.0
"""Facts about the attention modules of transformers: dispatch, heads, rotation, token grid, reasons against MHLA.

Attention modules declare little about themselves, so some functions look for words in the source of `forward`, as
transformers does to tell whether a model goes through its attention interface. Where there is no source nothing is
known, and a model is refused.
"""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch.nn as nn

from ...utils.compat import forward_parameters
from ...utils.compat.transformers import can_choose_attention


# Entries of configurations that mean that queries and keys are not what the projections and RoPE give.
_UNSUPPORTED = {
    "is_encoder_decoder": "encoder-decoder models are not supported",
    "attn_logit_softcapping": "its attention logits are soft-capped",
    "alibi": "it uses ALiBi biases",
    "add_cross_attention": "it attends to an encoder as well (cross-attention)",
    "kv_lora_rank": "its keys and values are compressed (multi-head latent attention)",
    "num_kv_shared_layers": "some of its layers use the keys and values of others (num_kv_shared_layers)",
    "cross_attention_layers": "some of its layers attend to an image (cross-attention)",
    "keep_window_size": "it chooses the tokens to attend to (dynamic masks)",
}
# Arguments of towers that are given inputs of several sizes in one row.
_PACKED = ("grid_thw", "image_sizes", "spatial_shapes", "target_sizes", "feature_lens", "merge_sizes")
_RELATIVE = ("relative_attention_bias", "has_relative_attention_bias", "relative_position_bias")
_PREFIX_PARAMETERS = ("cls_token", "class_embedding", "distillation_token", "register_tokens")


@lru_cache(maxsize=1024)
def source_of(thing: Any) -> str:
    """Return the source of a module, class or function; empty where it is not known."""
    try:
        return inspect.getsource(inspect.unwrap(thing))
    except (OSError, TypeError):
        return ""


def dispatches(module: nn.Module) -> bool:
    """Return whether a module's `forward` goes through transformers' attention interface."""
    return hasattr(module, "config") and "ALL_ATTENTION_FUNCTIONS" in source_of(type(module).forward)


def can_dispatch(model_class: type) -> bool:
    """Return whether the attention modules of a model class may go through transformers' attention interface.

    Of a class defined outside transformers, its bases are asked as well.
    """
    bases: list[Any] = [base for base in model_class.__mro__ if hasattr(base, "config_class")][:-1]
    return any(map(can_choose_attention, bases)) and not _looks_attention_up(model_class)


def _looks_attention_up(model_class: type) -> bool:
    """Return whether a model's constructor looks its attention classes up by implementation, in a dict."""
    built: list[Any] = [model_class]
    for built_class in built:
        source = source_of(built_class.__init__)
        for name, value in vars(sys.modules[built_class.__module__]).items():
            if isinstance(value, dict) and "eager" in value and f"{name}[" in source:
                return True
            # Inner models are asked themselves.
            is_module = isinstance(value, type) and issubclass(value, nn.Module) and not hasattr(value, "config_class")
            if is_module and value not in built and f"{name}(" in source:
                built.append(value)
    return False


def reads_keywords(forward: Callable[..., Any]) -> bool:
    """Return whether a function takes any keyword argument and does something with those that it does not know."""
    parameters = inspect.signature(inspect.unwrap(forward)).parameters.values()
    names = [f"**{parameter.name}" for parameter in parameters if parameter.kind is inspect.Parameter.VAR_KEYWORD]
    return any(source_of(forward).count(name) > 1 for name in names)


def keywords_reach(model: nn.Module, name: str) -> bool:
    """Return whether a keyword argument of a model reaches the module `name` inside it."""
    parts = name.split(".")
    above = [model, *(model.get_submodule(".".join(parts[:count])) for count in range(1, len(parts)))]
    # Lists of modules are not called themselves.
    called = [module for module in above if not isinstance(module, (nn.ModuleList, nn.ModuleDict))]
    return all(reads_keywords(type(module).forward) for module in called)


def rotation_of(attention: nn.Module) -> Callable[..., Any] | None:
    """Return the function that an attention class rotates with, or None where none is found."""
    return getattr(_file_of(attention), "apply_rotary_pos_emb", None)


def _file_of(module: nn.Module) -> Any:
    return sys.modules[type(module).__module__]


def uses_rotary(attention: nn.Module) -> bool:
    """Return whether an attention module rotates its queries and keys inside its `forward`."""
    # Some models leave single layers without positions, and hand them angles all the same.
    source = source_of(type(attention).forward)
    return getattr(attention, "use_rope", True) not in (False, 0) and ("rotary" in source or "rope" in source)


def rotates_sometimes(attention: nn.Module) -> bool:
    """Return whether an attention class rotates under a condition other than its `use_rope`, so that calls differ."""
    return not hasattr(attention, "use_rope") and bool(_rotation_conditions(attention))


def _rotation_conditions(attention: nn.Module) -> list[str]:
    """Return the conditions, as written, under which an attention class rotates queries and keys."""
    branches = [
        node
        for node in ast.walk(ast.parse(textwrap.dedent(source_of(type(attention).forward))))
        if isinstance(node, (ast.If, ast.IfExp))
    ]
    return [
        ast.unparse(branch.test)
        for branch in branches
        if any(isinstance(node, ast.Call) and "rotary" in ast.unparse(node.func) for node in ast.walk(branch))
    ]


def is_cross_attention(name: str, module: nn.Module) -> bool:
    """Return whether a module attends to another sequence than its own."""
    class_name = type(module).__name__
    if getattr(module, "is_cross_attention", False) or "Cross" in class_name or "EncDec" in class_name:
        return True
    return any(part.startswith("cross") or part in ("encoder_attn", "EncDecAttention") for part in name.split("."))


def self_attentions(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """List the self-attention modules of a model that go through transformers' attention interface, with names."""
    return [each for each in model.named_modules() if dispatches(each[1]) and not is_cross_attention(*each)]


def heads_of(module: nn.Module) -> dict[str, Any]:
    """Read `num_heads`, `num_key_value_heads`, `head_dim` and `hidden_size` off an attention module.

    Raises:
        ValueError: If they are not to be found.
    """
    config: Any = module.config
    names = ("num_heads", "num_attention_heads", "n_heads")
    num_heads = _first(module, names) or _first(config, ("num_attention_heads", "n_heads", "n_head"))
    head_dim = _first(module, ("head_dim", "attention_head_size", "head_size", "hidden_size_per_head"))
    hidden_size = _first(config, ("hidden_size", "dim", "n_embd", "d_model")) or _first(module, ("embed_dim",))
    if head_dim is None and hidden_size and num_heads:
        head_dim = hidden_size // num_heads
    if not (num_heads and head_dim and hidden_size):
        raise ValueError(f"Cannot tell the number and width of the heads of {type(module).__name__}.")
    groups = _first(module, ("num_key_value_groups",))
    # Configurations whose layers differ refuse to name a number that is one layer's.
    shared = num_heads // groups if groups else _first(module, ("num_key_value_heads",))
    shared = shared or _first(config, ("num_key_value_heads",)) or num_heads
    shared = shared if num_heads % shared == 0 else num_heads
    return {"num_heads": num_heads, "num_key_value_heads": shared, "head_dim": head_dim, "hidden_size": hidden_size}


def unsupported_reason(module: nn.Module) -> str | None:
    """Return the reason why no layer of this kind can be MHLA, or None."""
    config: Any = module.config
    parameters = forward_parameters(module)
    looks_ahead = getattr(config, "use_bidirectional_attention", None) in (True, "all")
    relative = [getattr(module, name, None) not in (None, False) for name in _RELATIVE]
    relative.append(getattr(config, "position_embedding_type", None) in ("relative_key", "relative_key_query"))
    undirected = getattr(config, "is_decoder", False) and getattr(module, "is_causal", True) is False
    reasons = {
        **{reason: getattr(config, name, None) for name, reason in _UNSUPPORTED.items()},
        "its text looks ahead within an image or a prompt (use_bidirectional_attention)": looks_ahead,
        "it reads an image by learned queries (cross-attention)": "QFormer" in type(module).__name__,
        "it uses relative position biases": any(relative),
        "it uses attention sinks": getattr(module, "sinks", None) is not None,
        "it subtracts one attention from another (differential attention)": hasattr(module, "lambda_q1"),
        "it uses position biases": "position_bias" in parameters,
        "its layers run several times for each token, and keep a cache for each time": "cycle_offset" in parameters,
        "it is a decoder whose attention modules do not say that they look back only": undirected,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def window_reason(module: nn.Module, layer_index: int) -> str | None:
    """Return the reason why this layer stays softmax although the model's others can be MHLA, or None."""
    config: Any = module.config
    types = getattr(config, "layer_types", None)
    has_window = getattr(module, "is_sliding", False)
    if isinstance(types, Sequence) and layer_index < len(types):
        # Some models give every module the width of the window, and leave it unused in their full layers.
        kind = str(types[layer_index])
        if kind.startswith("hybrid"):
            return "it keeps a recurrent state beside that of its attention"
        if kind != "full_attention":
            return f"it is a layer of {kind.replace('_', ' ')}"
    else:
        of_model = getattr(config, "use_sliding_window", True) and getattr(config, "sliding_window", None)
        has_window = has_window or getattr(module, "sliding_window", None) or of_model
    return "it attends to a sliding window" if has_window else None


def packed_reason(model: nn.Module) -> str | None:
    """Reason why a tower that is given several images, or stretches of sound, in one row cannot be MHLA, or None."""
    parameters = forward_parameters(model)
    found = [name for name in _PACKED if name in parameters and "input_ids" not in parameters]
    return f"its inputs are packed ({found[0]}), and do not tell it their grid or ends" if found else None


def looks_ahead_in_images(model: nn.Module, text_config: Any) -> bool:
    """Return whether a composite model lets the tokens of an image, or of a prompt, see each other in its text part.

    Args:
        model: The composite model, whose parts need not be built yet.
        text_config: Configuration of its text part.
    """
    source = source_of(type(model).forward)
    if 'use_bidirectional_attention == "vision"' in source and text_config.use_bidirectional_attention != "vision":
        return False
    return "block_sequence_ids" in source


def is_image_model(config: Any) -> bool:
    """Return whether a configuration is that of a vision transformer: a grid of patches of an image."""
    return getattr(config, "patch_size", None) is not None and getattr(config, "image_size", None) is not None


def patch_grid(config: Any, height: int | None = None, width: int | None = None) -> tuple[int, int]:
    """Rows and columns of patches of an image.

    Args:
        config: A vision configuration.
        height: Height in pixels; the configuration's image size if not given.
        width: Width in pixels.
    """
    image, patch = _pair(config.image_size), _pair(config.patch_size)
    height, width = height or image[0], width or image[1]
    return height // patch[0], width // patch[1]


def num_prefix_tokens(model: nn.Module) -> int:
    """Class, distillation and register tokens that a vision model puts before its patches."""
    embeddings = getattr(model, "embeddings", model)
    count = 0
    for name, parameter in embeddings.named_parameters(recurse=False):
        if name in _PREFIX_PARAMETERS and parameter.numel():
            count += parameter.shape[1] if parameter.dim() == 3 else 1
    return count


def _pair(size: Any) -> tuple[int, int]:
    return (int(size[0]), int(size[1])) if isinstance(size, (tuple, list)) else (int(size), int(size))


def _first(owner: Any, names: Sequence[str]) -> int | None:
    found = [getattr(owner, name, None) for name in names]
    return next((value for value in found if isinstance(value, int) and not isinstance(value, bool)), None)
