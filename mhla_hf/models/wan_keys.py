# SPDX-License-Identifier: Apache-2.0
"""Names and sizes in the authors' Wan-MHLA checkpoints, and their names in diffusers.

The authors' code base is Wan's own, with four additions in `self_attn` of an MHLA layer. Its configuration is not to
be trusted (flags in it are not passed on to the modules), so everything comes from the keys and shapes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

from ..utils.compat.diffusers import rename_wan_weights
from ..utils.messages import shorten_text, shorten_value
from .options import MAX_LAYERS


Shape = tuple[int, ...]

MIXING = "block_attn.conv.weight"
OUTPUT_NORM = "g_norm.weight"

MHLA_NAMES = {
    MIXING: "mixing",
    OUTPUT_NORM: "output_norm.weight",
    "g.weight": "gate.weight",
    "g.bias": "gate.bias",
    "lepe.weight": "lepe.weight",
    "lepe.bias": "lepe.bias",
}
"""Names below `blocks.i.self_attn.` that Wan does not have, and those below `blocks.i.attn1.mhla.` they become."""

PREFIXES = ("module.", "_orig_mod.", "model.diffusion_model.", "diffusion_model.", "model.", "transformer.")
"""Prefixes of all keys, by training frameworks."""

_COMFYUI_PREFIX = "model.diffusion_model."

DEFAULT_HEAD_DIM = 128
"""Width of a head in every published Wan, for checkpoints without an output norm, where no shape tells it."""

# First and last frame to video; the one key of Wan that diffusers' own table leaves out.
_MORE_NAMES = {"img_emb.emb_pos": "condition_embedder.image_embedder.pos_embed"}
_UNSUPPORTED = {"face_adapter": "Wan-Animate", "motion_encoder": "Wan-Animate", "vace_": "Wan-VACE"}
_BLOCK = re.compile(r"blocks\.([0-9]{1,6})\.")
# More prefixes than training frameworks nest.
_PREFIX_ROUNDS = 8


def strip_prefixes(names: Iterable[str]) -> dict[str, str]:
    """Removes prefixes that all names share.

    Returns:
        The name in the file by stripped name.
    """
    stripped = {name: name for name in names}
    for _ in range(_PREFIX_ROUNDS):
        prefix = next((prefix for prefix in PREFIXES if all(name.startswith(prefix) for name in stripped)), None)
        if not stripped or prefix is None:
            break
        stripped = {name[len(prefix) :]: original for name, original in stripped.items()}
    return stripped


def diffusers_names(names: Iterable[str]) -> dict[str, str]:
    """Returns the names in diffusers of the authors' names.

    Returns:
        The authors' name by the name below `MHLAWanTransformer3DModel`. Names that nobody knows stay as they are.

    Raises:
        ValueError: For variants of Wan with other modules.
    """
    plain: list[str] = []
    renamed: dict[str, str] = {}
    for name in names:
        model = next((model for part, model in _UNSUPPORTED.items() if part in name), None)
        if model is not None:
            raise ValueError(f"the checkpoint has {shorten_text(name)}: {model} checkpoints cannot be imported.")
        layer, _, rest = name.partition(".self_attn.")
        if rest in MHLA_NAMES and _BLOCK.fullmatch(layer + "."):
            renamed[f"{layer}.attn1.mhla.{MHLA_NAMES[rest]}"] = name
        elif name in _MORE_NAMES:
            renamed[_MORE_NAMES[name]] = name
        else:
            plain.append(name)
    return {**renamed, **rename_wan_weights(plain)}


def softmax_names(names: Iterable[str]) -> dict[str, str]:
    """Returns the names in diffusers of the weights of an ordinary Wan model.

    Of files that hold other models too, as some of ComfyUI's do, only the video model's weights are taken.

    Args:
        names: Names in a file: those of Wan's authors or of diffusers, also behind prefixes.

    Returns:
        The name in the file by the name in `WanTransformer3DModel`. Names that nobody knows stay as they are.

    Raises:
        ValueError: If there are MHLA weights among them, or those of variants of Wan with other modules.
    """
    names = list(names)
    stripped = strip_prefixes([name for name in names if name.startswith(_COMFYUI_PREFIX)] or names)
    if any(name.startswith("condition_embedder.") for name in stripped):
        renamed = {name: name for name in stripped}
    else:
        renamed = diffusers_names(stripped)
    if any(".mhla." in name for name in renamed):
        raise ValueError(
            "it holds MHLA weights already. A directory that was saved loads by from_pretrained; the checkpoints of "
            "MHLA's authors become one by mhla-hf import-official."
        )
    return {name: stripped[original] for name, original in renamed.items()}


def authors_name(name: str) -> str:
    """Returns the authors' name for a diffusers name; the name itself where they have none like it."""
    match = _BLOCK.match(name)
    if match is None:
        return _catalogue().get(name, name)
    known = _catalogue().get(_BLOCK.sub("blocks.0.", name, count=1))
    return name if known is None else known.replace("blocks.0.", f"blocks.{match[1]}.", 1)


@lru_cache
def _catalogue() -> dict[str, str]:
    """Every name of a Wan-MHLA model with one block: the authors' by the one in diffusers."""
    layers = ["patch_embedding", "text_embedding.0", "text_embedding.2", "time_embedding.0", "time_embedding.2"]
    layers += ["time_projection.1", "head.head", *(f"img_emb.proj.{index}" for index in (0, 1, 3, 4))]
    block = ["norm3", "ffn.0", "ffn.2"]
    for attention in ("self_attn", "cross_attn"):
        block += [f"{attention}.{part}" for part in ("q", "k", "v", "o", "norm_q", "norm_k")]
    block += [f"cross_attn.{part}" for part in ("k_img", "v_img", "norm_k_img")]
    layers += [f"blocks.0.{part}" for part in block]
    names = [f"{layer}.{kind}" for layer in layers for kind in ("weight", "bias")]
    names += ["head.modulation", "img_emb.emb_pos", "blocks.0.modulation"]
    return diffusers_names([*names, *(f"blocks.0.self_attn.{part}" for part in MHLA_NAMES)])


def mhla_layers(shapes: Mapping[str, Shape]) -> list[int]:
    """Indices of the layers that have a mixing matrix."""
    found = [re.fullmatch(rf"blocks\.([0-9]{{1,6}})\.self_attn\.{re.escape(MIXING)}", name) for name in shapes]
    return sorted(int(match[1]) for match in found if match)


def wan_config(shapes: Mapping[str, Shape], num_heads: int | None = None) -> dict[str, Any]:
    """Reads the constructor arguments of `WanTransformer3DModel` off the shapes.

    Args:
        shapes: Shapes by the authors' names without prefix.
        num_heads: Number of heads, where it is known otherwise.

    Raises:
        ValueError: If a tensor that gives a size is missing, or there are too many layers. Other tensors are compared
            with the model.
    """

    def shape(name: str, axes: int) -> Shape:
        found = shapes.get(name, ())
        if len(found) != axes:
            has = f"its shape is {shorten_value(found)}" if found else f"it has tensors such as {_examples(shapes)}"
            raise ValueError(f"the checkpoint lacks {name} with {axes} axes; {has}.")
        return found

    patch_embedding = shape("patch_embedding.weight", 5)
    hidden_size, in_channels, patch_size = patch_embedding[0], patch_embedding[1], patch_embedding[2:]
    patch_volume = math.prod(patch_size)
    head_rows = shape("head.head.weight", 2)[0]
    num_layers = 1 + max((int(match[1]) for match in map(_BLOCK.match, shapes) if match), default=0)
    if num_layers > MAX_LAYERS:
        raise ValueError(f"the checkpoint has blocks.{num_layers - 1}, but a model may have {MAX_LAYERS} layers.")
    config: dict[str, Any] = {
        "patch_size": list(patch_size),
        "num_attention_heads": _head_count(shapes, hidden_size, num_heads),
        "in_channels": in_channels,
        "out_channels": head_rows // patch_volume,
        "text_dim": shape("text_embedding.0.weight", 2)[1],
        "freq_dim": shape("time_embedding.0.weight", 2)[1],
        "ffn_dim": shape("blocks.0.ffn.0.weight", 2)[0],
        "num_layers": num_layers,
        "cross_attn_norm": any(name.endswith(".norm3.weight") for name in shapes),
        "qk_norm": "rms_norm_across_heads" if any(".self_attn.norm_q." in name for name in shapes) else None,
        "image_dim": None,
        "added_kv_proj_dim": None,
        "pos_embed_seq_len": None,
    }
    config["attention_head_dim"] = hidden_size // config["num_attention_heads"]
    if any(name.startswith("img_emb.") for name in shapes):
        config["image_dim"] = shape("img_emb.proj.0.weight", 1)[0]
        config["added_kv_proj_dim"] = shape("blocks.0.cross_attn.k_img.weight", 2)[1]
    if "img_emb.emb_pos" in shapes:
        config["pos_embed_seq_len"] = shape("img_emb.emb_pos", 3)[1]
    return config


def _head_count(shapes: Mapping[str, Shape], hidden_size: int, num_heads: int | None) -> int:
    widths = {shape[0]: name for name, shape in shapes.items() if name.endswith(f".self_attn.{OUTPUT_NORM}")}
    width, given = next(iter(widths.items()), (DEFAULT_HEAD_DIM, "Wan's usual head width"))
    if num_heads is not None:
        if num_heads < 1 or hidden_size % num_heads or (widths and hidden_size // num_heads != width):
            raise ValueError(f"num_heads={num_heads} does not fit width {hidden_size} and {given} ({width}).")
        return num_heads
    if hidden_size % width:
        raise ValueError(f"{given} ({width}) does not divide the model's width {hidden_size}; give num_heads.")
    return hidden_size // width


def mhla_options(shapes: Mapping[str, Shape], blocks: tuple[int, ...] | None) -> dict[str, Any]:
    """Reads the options of MHLA off the keys and shapes.

    Args:
        shapes: Shapes by the authors' names without prefix.
        blocks: Number of blocks along frames, height and width; needed unless there are 150, which are 3 × 5 × 10.

    Returns:
        `blocks`, `output_norm`, `output_gate`, `lepe_kernel` and `layers` (`None` when every layer is MHLA).

    Raises:
        ValueError: If no layer is MHLA, or the blocks are missing or do not fit.
    """
    layers = mhla_layers(shapes)
    if not layers:
        raise ValueError(
            f"no layer of the checkpoint has self_attn.{MIXING}, so it is not MHLA; it has {_examples(shapes)}. "
            "For an ordinary Wan model use mhla-hf convert."
        )
    mixing = shapes[f"blocks.{layers[0]}.self_attn.{MIXING}"]
    count = mixing[0]
    if mixing != (count, count, 1, 1):
        raise ValueError(
            f"blocks.{layers[0]}.self_attn.{MIXING} has shape {shorten_value(mixing)}; expected (M, M, 1, 1)."
        )
    if blocks is None and count == 150:
        blocks = (3, 5, 10)
    if blocks is None or len(blocks) != 3 or math.prod(blocks) != count:
        given = "" if blocks is None else f"={shorten_text(','.join(map(str, blocks)))}"
        raise ValueError(
            f"blocks{given} must be given as three numbers whose product is {count}, the size of the checkpoint's "
            "mixing matrices."
        )

    def has(name: str) -> bool:
        return any(f"blocks.{index}.self_attn.{name}" in shapes for index in layers)

    kernels = [shapes.get(f"blocks.{index}.self_attn.lepe.weight", ())[2:] for index in layers]
    num_layers = len({match[1] for match in map(_BLOCK.match, shapes) if match})
    return {
        "blocks": blocks,
        "output_norm": has(OUTPUT_NORM),
        "output_gate": has("g.weight") or has("g.bias"),
        "lepe_kernel": max((size for kernel in kernels for size in kernel), default=None),
        "layers": layers if len(layers) < num_layers else None,
    }


def _examples(shapes: Mapping[str, Shape]) -> str:
    return ", ".join(shorten_text(name, 60) for name in sorted(shapes)[:3])
