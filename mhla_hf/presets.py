# SPDX-License-Identifier: Apache-2.0
"""The models of the MHLA paper, and other models of videos and images by name, with fresh weights.

They are classes of transformers and diffusers.

The paper is arXiv 2601.07832, its code github.com/DAGroup-PKU/MHLA.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .config import MHLAConfig, merge_options
from .models.registry import mhla_class_for
from .utils.messages import check_choice, shorten_value
from .utils.options import check_names


__all__ = ["PRESETS", "Preset", "from_preset"]


@dataclass(frozen=True)
class Preset:
    """A named model. docs/presets.md says where each option comes from.

    Attributes:
        description: One line.
        model: Name of the configuration class in transformers, or of the softmax model's class in diffusers.
        sizes: Arguments of that class.
        mhla: Options of [`mhla_hf.MHLAConfig`]. Grids that they leave open follow the model.
    """

    description: str
    model: str
    sizes: Mapping[str, Any]
    mhla: Mapping[str, Any]

    @property
    def library(self) -> str:
        """`"transformers"`, whose configuration a preset is, or `"diffusers"`, whose model it is."""
        return "transformers" if self.model.endswith("Config") else "diffusers"


def _deit(description: str, width: int, heads: int, layers: int, mlp: int, pixels: int, **mhla: Any) -> Preset:
    sizes = {"hidden_size": width, "intermediate_size": mlp, "num_hidden_layers": layers, "num_attention_heads": heads}
    head = {"num_labels": 1000, "architectures": ["DeiTForImageClassification"]}
    mhla["feature_map_eps"] = 1e-6
    return Preset(
        f"{description} at {pixels} pixels",
        "DeiTConfig",
        {**sizes, "image_size": pixels, "patch_size": 16, **head},
        mhla,
    )


def _vlt(size: str, width: int, layers: int, side: int, pixels: int) -> Preset:
    description = f"DeiT of about the size of VLT-{size}, with gates as there,"
    blocks = [side, side]
    return _deit(
        description, width, width // 64, layers, width * 7 // 2, pixels, blocks=blocks, lepe_kernel=5, output_gate=True
    )


def _dit(size: str, layers: int, heads: int, width: int, pixels: int) -> Preset:
    # As facebook/DiT-XL-2-256 and -512, transformer/config.json.
    sizes = {"num_attention_heads": heads, "attention_head_dim": width, "num_layers": layers, "in_channels": 4}
    sizes |= {"out_channels": 8, "patch_size": 2, "sample_size": pixels // 8, "num_embeds_ada_norm": 1000}
    mhla = {"blocks": [4, 4], "lepe_kernel": 3, "output_gate": True}
    return Preset(f"DiT-{size.upper()}/2 for ImageNet-1K at {pixels} pixels", "DiTTransformer2DModel", sizes, mhla)


# Wan-AI/Wan2.1-T2V-1.3B-Diffusers and Wan-AI/Wan2.1-T2V-14B-Diffusers, transformer/config.json.
_WAN_SMALL = {"num_attention_heads": 12, "attention_head_dim": 128, "num_layers": 30}
_WAN_SMALL |= {"ffn_dim": 8960, "text_dim": 4096}
_WAN_LARGE = {**_WAN_SMALL, "num_attention_heads": 40, "ffn_dim": 13824, "num_layers": 40}


def _wan(part: str, **mhla: Any) -> Preset:
    mhla |= {"blocks": [3, 5, 10], "feature_map": "relu", "feature_map_eps": 1e-6, "rope": "after_feature_map"}
    mhla |= {"normalizer": "none", "output_norm": True, "output_gate": True}
    return Preset(f"Wan2.1-T2V-1.3B with MHLA in {part} layers", "WanTransformer3DModel", _WAN_SMALL, mhla)


def _wan_family() -> dict[str, Preset]:
    # Not of the paper: scripts/convert_wan_to_diffusers.py and convert_skyreelsv2_to_diffusers.py of diffusers.
    vace, animate, skyreels = (f"{name}Transformer3DModel" for name in ("WanVACE", "WanAnimate", "SkyReelsV2"))
    with_image = {**_WAN_LARGE, "in_channels": 36, "image_dim": 1280, "added_kv_proj_dim": 5120}
    small, large = ({"vace_layers": [*range(*bounds)]} for bounds in ((0, 30, 2), (0, 40, 5)))
    mhla = {"blocks": [3, 5, 10]}
    return {
        "wan2.1-14b": Preset("Wan2.1-T2V-14B", "WanTransformer3DModel", _WAN_LARGE, mhla),
        "wan2.1-vace-1.3b": Preset("Wan2.1-VACE-1.3B", vace, {**_WAN_SMALL, **small}, mhla),
        "wan2.1-vace-14b": Preset("Wan2.1-VACE-14B", vace, {**_WAN_LARGE, **large}, mhla),
        "wan2.2-animate-14b": Preset("Wan2.2-Animate-14B", animate, with_image, mhla),
        "skyreels-v2-1.3b": Preset("SkyReels-V2 1.3B from text", skyreels, _WAN_SMALL, mhla),
        "skyreels-v2-14b": Preset("SkyReels-V2 14B from text", skyreels, _WAN_LARGE, mhla),
    }


def _other_models() -> dict[str, Preset]:
    # Not of the paper: the defaults of the constructors in diffusers, and Lightricks/LTX-Video-0.9.7-dev,
    # transformer/config.json. Blocks divide the grid of the pipelines' size where it has divisors.
    first = {"num_attention_heads": 32, "attention_head_dim": 64, "num_layers": 28}
    second, about = {**first, "attention_head_dim": 128, "num_layers": 48}, "LTX-2 19B with MHLA for the video"
    double = {"num_attention_heads": 24, "attention_head_dim": 128}
    hunyuan, flux = ({**double, "num_layers": count, "num_single_layers": 2 * count} for count in (20, 19))
    smaller = {**double, "num_attention_heads": 16, "num_layers": 54}
    ltx, first_blocks, flux["guidance_embeds"] = "LTXVideoTransformer3DModel", {"blocks": [7, 4, 2]}, True
    return {
        "ltx-video-2b": Preset("LTX-Video 2B", ltx, first, first_blocks),
        "ltx-video-13b": Preset("LTX-Video 13B", ltx, {**second, "cross_attention_dim": 4096}, first_blocks),
        "ltx-2-19b": Preset(about, "LTX2VideoTransformer3DModel", second, {"blocks": [4, 4, 4]}),
        "hunyuan-video": Preset("HunyuanVideo", "HunyuanVideoTransformer3DModel", hunyuan, {"blocks": [3, 9, 10]}),
        "hunyuan-video-1.5": Preset(
            "HunyuanVideo-1.5", "HunyuanVideo15Transformer3DModel", smaller, {"blocks": [4, 5, 8]}
        ),
        "qwen-image": Preset(
            "Qwen-Image", "QwenImageTransformer2DModel", {**double, "num_layers": 60}, {"blocks": [9, 9]}
        ),
        "flux.1-dev": Preset("FLUX.1-dev", "FluxTransformer2DModel", flux, {"blocks": [8, 8]}),
    }


def _sana() -> Preset:
    # Efficient-Large-Model/Sana_600M_512px_diffusers, transformer/config.json.
    sizes = {"num_attention_heads": 36, "attention_head_dim": 32, "num_layers": 28, "num_cross_attention_heads": 16}
    sizes |= {"cross_attention_head_dim": 72, "cross_attention_dim": 1152, "caption_channels": 2304, "sample_size": 16}
    return Preset("SANA-0.6B at 512 pixels", "SanaTransformer2DModel", {**sizes, "mlp_ratio": 2.5}, {"blocks": [4, 4]})


def _language_model() -> Preset:
    sizes = {"vocab_size": 32_000, "hidden_size": 1024, "intermediate_size": 2432, "num_hidden_layers": 24}
    sizes |= {"num_attention_heads": 16, "num_key_value_heads": 16, "max_position_embeddings": 2048}
    other = {"rms_norm_eps": 1e-6, "tie_word_embeddings": True, "architectures": ["LlamaForCausalLM"]}
    mhla = {"causal": True, "block_size": [64], "feature_map": "relu", "rope": "after_feature_map"}
    mhla |= {"mixing_init": "uniform", "mixing_storage": "matrix", "mixing_tail": "constant"}
    mhla |= {"normalizer": "none", "output_norm": True, "output_gate": True}
    return Preset("causal language model of 338M parameters, as a Llama", "LlamaConfig", {**sizes, **other}, mhla)


_DIT_SIZES = {"s": (12, 6, 64), "b": (12, 12, 64), "l": (24, 16, 64), "xl": (28, 16, 72)}

PRESETS: dict[str, Preset] = {
    "deit-t": _deit("DeiT-T for ImageNet-1K", 192, 3, 12, 768, 256, blocks=[4, 4], lepe_kernel=3),
    "deit-s": _deit("DeiT-S for ImageNet-1K", 384, 6, 12, 1536, 256, blocks=[4, 4], lepe_kernel=3),
    "vlt-t": _vlt("T", 320, 12, 7, 224),
    "vlt-s": _vlt("S", 384, 14, 4, 256),
    **{f"dit-{size}-2-{side}": _dit(size, *sizes, side) for size, sizes in _DIT_SIZES.items() for side in (256, 512)},
    "sana-0.6b": _sana(),
    "wan2.1-1.3b": _wan("all"),
    "wan2.1-1.3b-hybrid": _wan("two thirds of the", layers="2/3"),
    **_wan_family(),
    **_other_models(),
    "mhla-lm-340m": _language_model(),
}
"""All presets by name."""


def from_preset(name: str, *, mhla: MHLAConfig | Mapping[str, Any] | bool | None = None, **overrides: Any) -> Any:
    """Return a model of the MHLA paper (arXiv 2601.07832), or another of videos or images, by name, without weights.

    Models of transformers (`deit-t`, `deit-s`, `vlt-t`, `vlt-s`, `mhla-lm-340m`) come as their configuration. Those of
    diffusers (`dit-{s,b,l,xl}-2-{256,512}`, `sana-0.6b`, `wan2.1-{1.3b,1.3b-hybrid,14b}`, `wan2.1-vace-{1.3b,14b}`,
    `wan2.2-animate-14b`, `skyreels-v2-{1.3b,14b}`, `ltx-video-{2b,13b}`, `ltx-2-19b`, `hunyuan-video`,
    `hunyuan-video-1.5`, `qwen-image`, `flux.1-dev`) come as the untrained model, on the current device:
    `with torch.device("meta")` allocates nothing. docs/presets.md says for each what the paper and its code state, and
    what is chosen here.

    Args:
        name: Name of a preset.
        mhla: Options that replace single ones of the preset, as a dict; an `MHLAConfig` replaces all of them. `False`
            for the model with its own attention (softmax; SANA's is linear), to compare with.
        **overrides: Arguments of the model's class that replace the preset's sizes, such as `num_layers` or
            `num_hidden_layers`. A hybrid with another number of layers follows the same rule.

    Returns:
        A configuration of transformers, or a model of diffusers.

    Raises:
        ValueError: If there is no such preset, or an option is unknown or not allowed; the message lists those that
            there are.

    Examples:
        >>> import torch
        >>> from mhla_hf import from_preset
        >>> with torch.device("meta"):
        ...     model = from_preset("wan2.1-1.3b-hybrid")
        >>> type(model).__name__, len(model.mhla_layers)
        ('MHLAWanTransformer3DModel', 20)
        >>> config = from_preset("deit-t", mhla={"blocks": [2, 2]}, num_hidden_layers=3)
        >>> config.mhla["blocks"], config.hidden_size
        ([2, 2], 192)
    """
    check_choice("name", name, PRESETS)
    if mhla is True or not isinstance(mhla, (MHLAConfig, Mapping, bool, type(None))):
        raise ValueError(
            f"mhla={shorten_value(mhla)} must be a dict of options, an MHLAConfig, None for those of the preset, or "
            "False for the model's own attention."
        )
    preset = PRESETS[name]
    is_config = preset.library == "transformers"
    if is_config:
        import transformers as library
    else:
        import diffusers as library
    stock_class = getattr(library, preset.model)
    # Every configuration of transformers takes the latter, beside what its signature names.
    arguments = [*inspect.signature(stock_class.__init__).parameters, *(["num_labels"] if is_config else [])]
    check_names(f"{preset.model} of preset {name!r}", overrides, [a for a in arguments if a not in ("self", "kwargs")])
    sizes = {**copy.deepcopy(dict(preset.sizes)), **overrides}
    if mhla is False:
        return stock_class(**sizes)
    options = _mhla_options(preset, None if mhla is True else mhla)
    if is_config:
        return stock_class(**sizes, mhla=options, attn_implementation="mhla")
    return mhla_class_for(preset.model)(**sizes, mhla=options)


def _mhla_options(preset: Preset, mhla: MHLAConfig | Mapping[str, Any] | None) -> dict[str, Any]:
    """Options of the preset, with single ones replaced by a dict and all of them by an `MHLAConfig`."""
    if isinstance(mhla, MHLAConfig):
        # The token grid is filled in for the model where it was left open.
        given = mhla.to_dict() if preset.library == "transformers" else mhla.given_options()
        return {option: value for option, value in given.items() if value is not None}
    options = merge_options(copy.deepcopy(dict(preset.mhla)), mhla or {})
    MHLAConfig.from_dict(options)
    return options
