# SPDX-License-Identifier: Apache-2.0
"""Original weights of Wan: their names, and the sizes and MHLA options that they tell.

The code base of MHLA's authors is Wan's own, with four additions in `self_attn` of an MHLA layer. Flags in its
configuration are not passed on to the modules, so everything is read off the checkpoint.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from ..utils.compat.diffusers import rename_wan_weights
from ..utils.messages import shorten_text, shorten_value


Shape = tuple[int, ...]

MHLA_NAMES = {
    "block_attn.conv.weight": "mixing",
    "g_norm.weight": "output_norm.weight",
    "g.weight": "gate.weight",
    "g.bias": "gate.bias",
    "lepe.weight": "lepe.weight",
    "lepe.bias": "lepe.bias",
}
"""Names below `blocks.i.self_attn.` that Wan does not have, and those below `blocks.i.attn1.mhla.` they become."""

PREFIXES = ("module.", "_orig_mod.", "model.diffusion_model.", "diffusion_model.", "model.", "transformer.")
"""Prefixes of all keys, by training frameworks."""

DEFAULT_HEAD_DIM = 128
"""Width of a head in every published Wan, for checkpoints without an output norm, where no shape tells it."""

_COMFYUI_PREFIX = "model.diffusion_model."
# First and last frame to video; the one key of Wan that diffusers' own table leaves out.
_MORE_NAMES = {"img_emb.emb_pos": "condition_embedder.image_embedder.pos_embed"}
_UNSUPPORTED = {"face_adapter": "Wan-Animate", "motion_encoder": "Wan-Animate", "vace_": "Wan-VACE"}
_BLOCK = re.compile(r"blocks\.([0-9]{1,6})\.")
_MIXING = re.compile(r"blocks\.([0-9]{1,6})\.attn1\.mhla\.mixing")
_OTHERS = "Of other models than Wan directories are converted; of a GGUF language model one with that file alone"
_ADVICE = f"{_OTHERS}. If it is a complete Wan, give config (--config), or num_heads of an official checkpoint."
# More prefixes than training frameworks nest.
_PREFIX_ROUNDS = 8


def official_names(names: Iterable[str]) -> dict[str, str]:
    """Return the names in diffusers of the weights of a Wan or Wan-MHLA model.

    Args:
        names: Names in a file: those of the authors or of diffusers, also behind prefixes that all of them share.

    Returns:
        The name in the file by the name below `MHLAWanTransformer3DModel`. Unknown names stay as they are.

    Raises:
        ValueError: For variants of Wan with other modules.
    """
    stripped = {name: name for name in names}
    for _ in range(_PREFIX_ROUNDS):
        prefix = next((prefix for prefix in PREFIXES if all(name.startswith(prefix) for name in stripped)), None)
        if not stripped or prefix is None:
            break
        stripped = {name[len(prefix) :]: original for name, original in stripped.items()}
    for part, model in _UNSUPPORTED.items():
        if found := next((name for name in stripped if part in name), None):
            raise ValueError(f"it has {shorten_text(found)}: of {model} only diffusers directories are converted.")
    if any(name.startswith("condition_embedder.") for name in stripped):
        return stripped
    renamed, plain = {}, []
    for name in stripped:
        layer, _, rest = name.partition(".self_attn.")
        if rest in MHLA_NAMES and _BLOCK.fullmatch(f"{layer}."):
            renamed[f"{layer}.attn1.mhla.{MHLA_NAMES[rest]}"] = name
        elif name in _MORE_NAMES:
            renamed[_MORE_NAMES[name]] = name
        else:
            plain.append(name)
    return {name: stripped[original] for name, original in {**renamed, **rename_wan_weights(plain)}.items()}


def own_weights(weights: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what a file has of the transformer, without ComfyUI's prefix: some of its files hold other models too."""
    size = len(_COMFYUI_PREFIX)
    return {name[size:]: each for name, each in weights.items() if name.startswith(_COMFYUI_PREFIX)} or weights


def softmax_names(names: Iterable[str]) -> dict[str, str]:
    """Return [`official_names`] of the weights of an ordinary Wan model.

    Of files that hold other models too, as some of ComfyUI's do, only the video model's weights are taken.

    Raises:
        ValueError: If there are MHLA weights among them, or those of variants of Wan with other modules.
    """
    names = list(names)
    renamed = official_names([name for name in names if name.startswith(_COMFYUI_PREFIX)] or names)
    if any(".mhla." in name for name in renamed):
        raise ValueError(
            "it holds MHLA weights already. A directory that was saved loads by from_pretrained; the checkpoints of "
            "MHLA's authors become one by mhla-hf import-official."
        )
    return renamed


def wan_config(shapes: Mapping[str, Shape], num_heads: int | None = None) -> dict[str, Any]:
    """Read the constructor arguments of `WanTransformer3DModel` off the shapes of its weights.

    Args:
        shapes: Shapes by the names of diffusers.
        num_heads: Number of heads, where it is known otherwise.

    Raises:
        ValueError: If a tensor that gives a size is missing or has other axes. Other tensors are compared with the
            model.
    """

    def shape(name: str, axes: int) -> Shape:
        found = shapes.get(name, ())
        if len(found) != axes:
            has = f"its shape is {shorten_value(found)}" if found else f"it has tensors such as {_examples(shapes)}"
            advice = _ADVICE if "patch_embedding.weight" in shapes else f"{_OTHERS}."
            raise ValueError(f"the checkpoint lacks {name} with {axes} axes; {has}. {advice}")
        return found

    width, in_channels, *patch_size = shape("patch_embedding.weight", 5)
    norm = next((shape[0] for name, shape in shapes.items() if name.endswith(".mhla.output_norm.weight")), None)
    head_dim = norm or DEFAULT_HEAD_DIM
    heads = width // head_dim if num_heads is None else num_heads
    fits_norm = width // max(1, heads) == head_dim or (norm is None and num_heads is not None)
    if heads < 1 or width % heads or not fits_norm:
        problem = f"num_heads={num_heads} does not fit its width {width} and its output norm ({norm})"
        if num_heads is None:
            problem = f"its width {width} is not a multiple of {head_dim}, the width of its heads"
        raise ValueError(f"{problem}. {_ADVICE}")
    embedder = "condition_embedder."
    image = f"{embedder}image_embedder."
    has_image = f"{image}norm1.weight" in shapes
    return {
        "patch_size": patch_size,
        "num_attention_heads": heads,
        "attention_head_dim": width // heads,
        "in_channels": in_channels,
        "out_channels": shape("proj_out.weight", 2)[0] // math.prod(patch_size),
        "text_dim": shape(f"{embedder}text_embedder.linear_1.weight", 2)[1],
        "freq_dim": shape(f"{embedder}time_embedder.linear_1.weight", 2)[1],
        "ffn_dim": shape("blocks.0.ffn.net.0.proj.weight", 2)[0],
        "num_layers": _count_layers(shapes),
        "cross_attn_norm": any(name.endswith(".norm2.weight") for name in shapes),
        "qk_norm": "rms_norm_across_heads" if any(".attn1.norm_q." in name for name in shapes) else None,
        "image_dim": shape(f"{image}norm1.weight", 1)[0] if has_image else None,
        "added_kv_proj_dim": shape("blocks.0.attn2.add_k_proj.weight", 2)[1] if has_image else None,
        "pos_embed_seq_len": shape(f"{image}pos_embed", 3)[1] if f"{image}pos_embed" in shapes else None,
    }


def mhla_options(shapes: Mapping[str, Shape], blocks: tuple[int, ...] | None) -> dict[str, Any]:
    """Read the options of MHLA off the names and shapes of weights.

    Args:
        shapes: Shapes by the names of diffusers.
        blocks: Number of blocks along frames, height and width; needed unless there are 150, which are 3 × 5 × 10.

    Returns:
        `blocks`, `output_norm`, `output_gate`, `lepe_kernel` and `layers` (`None` when every layer is MHLA).

    Raises:
        ValueError: If no layer is MHLA, or the blocks are missing or do not fit.
    """
    mixing = {int(match[1]): shape for name, shape in shapes.items() if (match := _MIXING.fullmatch(name))}
    if not mixing:
        raise ValueError(
            f"no layer of the checkpoint has self_attn.block_attn.conv.weight, so it is not MHLA; it has "
            f"{_examples(shapes)}. For an ordinary Wan model use mhla-hf convert."
        )
    layers = sorted(mixing)
    count = next(iter(mixing[layers[0]]), 0)
    if blocks is None and count == 150:
        blocks = (3, 5, 10)
    if blocks is None or len(blocks) != 3 or math.prod(blocks) != count:
        given = "" if blocks is None else f"={shorten_text(','.join(map(str, blocks)))}"
        raise ValueError(
            f"blocks{given} must be given as three numbers whose product is {count}, the size of the checkpoint's "
            "mixing matrices."
        )
    names = {name.partition(".mhla.")[2] for name in shapes}
    kernels = [shape[2:] for name, shape in shapes.items() if name.endswith(".mhla.lepe.weight")]
    return {
        "blocks": blocks,
        "output_norm": "output_norm.weight" in names,
        "output_gate": "gate.weight" in names or "gate.bias" in names,
        "lepe_kernel": max((size for kernel in kernels for size in kernel), default=None),
        "layers": layers if len(layers) < _count_layers(shapes) else None,
    }


def _count_layers(shapes: Mapping[str, Shape]) -> int:
    return 1 + max((int(match[1]) for match in map(_BLOCK.match, shapes) if match), default=0)


def _examples(shapes: Mapping[str, Shape]) -> str:
    return ", ".join(shorten_text(name, 60) for name in sorted(shapes)[:3])
