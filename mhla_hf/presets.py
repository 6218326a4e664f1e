# SPDX-License-Identifier: Apache-2.0
"""The models of the MHLA paper by name, with fresh weights, as classes of transformers and diffusers.

"The paper" is arXiv 2601.07832, "its code" the repository of its authors, github.com/DAGroup-PKU/MHLA.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .config import MHLAConfig
from .models.options import merge_options
from .models.registry import mhla_class_for
from .utils.messages import check_choice, check_names, shorten_value


__all__ = ["PRESETS", "Preset", "from_preset"]


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A named model.

    Attributes:
        description: One line.
        model: Name of the configuration class in transformers, or of the softmax model's class in diffusers.
        sizes: Arguments of that class.
        mhla: Options of [`mhla_hf.MHLAConfig`]. Grids that they leave open follow the model.
        softmax_every: Keep layers 0, N, 2N, … softmax; `None` converts all.
        paper: What the paper states about it.
        code: What the paper's code states.
        chosen: What neither states, and is chosen here.
        published: Parameters and multiply-adds of the softmax model as they were published, with the source.
    """

    description: str
    model: str
    sizes: Mapping[str, Any]
    mhla: Mapping[str, Any]
    softmax_every: int | None = None
    paper: str
    code: str
    chosen: str
    published: str = ""

    @property
    def library(self) -> str:
        """`"transformers"`, whose configuration a preset is, or `"diffusers"`, whose model it is."""
        return "transformers" if self.model.endswith("Config") else "diffusers"

    def mhla_layers(self, num_layers: int) -> list[int] | None:
        """Indices of the MHLA layers of a model with `num_layers` layers; `None` for all."""
        if self.softmax_every is None:
            return None
        return [index for index in range(num_layers) if index % self.softmax_every]


# Several sizes a line, as in a table.
# fmt: off
def _deit(size: str, width: int, heads: int, published: str) -> Preset:
    return Preset(
        description=f"DeiT-{size} for ImageNet-1K at 256 pixels",
        model="DeiTConfig",
        sizes={
            "hidden_size": width, "intermediate_size": 4 * width, "num_hidden_layers": 12,
            "num_attention_heads": heads, "image_size": 256, "patch_size": 16, "num_labels": 1000,
            "architectures": ["DeiTForImageClassification"],
        },
        mhla={"blocks": [4, 4], "lepe_kernel": 3, "feature_map_eps": 1e-6},
        paper="M = 16, for which images of 224 pixels are padded to 256; the normaliser; the linear start of the"
        " mixing weights; a depthwise convolution with a kernel of 3",
        code="ReLU plus 1e-6 as the feature map; the convolution acts on the values (with a kernel of 5 there)",
        chosen="class and distillation tokens, as transformers' DeiT has them, in a block of their own; the code has"
        " none",
        published=published,
    )


def _vlt(size: str, width: int, layers: int, side: int, pixels: int, published: str) -> Preset:
    return Preset(
        description=f"DeiT of about the size of VLT-{size}, with gates as there, at {pixels} pixels",
        model="DeiTConfig",
        sizes={
            "hidden_size": width, "intermediate_size": width * 7 // 2, "num_hidden_layers": layers,
            "num_attention_heads": width // 64, "image_size": pixels, "patch_size": 16, "num_labels": 1000,
            "architectures": ["DeiTForImageClassification"],
        },
        mhla={"blocks": [side, side], "lepe_kernel": 5, "output_gate": True, "feature_map_eps": 1e-6},
        paper="M = 49 and 16; padding to 256 pixels for M = 16; the normaliser; the linear start of the mixing"
        " weights",
        code="ReLU plus 1e-6 as the feature map; a convolution of the values with a kernel of 5",
        chosen="everything else. VLT is taken for the pyramid of four stages of github.com/qhfan/MALA (the code"
        " imports a model of that name), which transformers does not have. This is a plain DeiT with about as many"
        " parameters, whose layers have what its layers have: output gate, heads 64 wide, an MLP ratio of 3.5. The two"
        " M are taken for those of T and S; they may be those of two stages",
        published=published,
    )


_DIT_SIZES = {"s": (12, 6, 64), "b": (12, 12, 64), "l": (24, 16, 64), "xl": (28, 16, 72)}
_DIT_PUBLISHED = {
    "s": ("33M", {256: "6.06"}),
    "b": ("130M", {256: "23.0"}),
    "l": ("458M", {256: "80.7"}),
    "xl": ("675M", {256: "119", 512: "525"}),
}


def _dit(size: str, pixels: int) -> Preset:
    layers, heads, width = _DIT_SIZES[size]
    parameters, operations = _DIT_PUBLISHED[size]
    counted = f", {operations[pixels]} GMACs" if pixels in operations else ""
    return Preset(
        description=f"DiT-{size.upper()}/2 for ImageNet-1K at {pixels} pixels",
        model="DiTTransformer2DModel",
        # As facebook/DiT-XL-2-256 and -512, transformer/config.json.
        sizes={
            "num_attention_heads": heads, "attention_head_dim": width, "num_layers": layers, "in_channels": 4,
            "out_channels": 8, "patch_size": 2, "sample_size": pixels // 8, "num_embeds_ada_norm": 1000,
        },
        mhla={"blocks": [4, 4], "lepe_kernel": 3, "output_gate": True},
        paper="M = 16; the normaliser; the linear start of the mixing weights; depthwise convolution and output gate,"
        " the best of its variants",
        code="the convolution acts on the values",
        chosen="ReLU as the feature map; a kernel of 3, as for DeiT; SiLU in the gate, as for Wan",
        published=f"{parameters}{counted} (arXiv 2212.09748)",
    )


def _wan(softmax_every: int | None) -> Preset:
    part = "in all layers" if softmax_every is None else "in two thirds of the layers"
    return Preset(
        description=f"Wan2.1-T2V-1.3B with MHLA {part}",
        model="WanTransformer3DModel",
        # Wan-AI/Wan2.1-T2V-1.3B-Diffusers, transformer/config.json.
        sizes={
            "num_attention_heads": 12, "attention_head_dim": 128, "ffn_dim": 8960, "num_layers": 30,
            "text_dim": 4096,
        },
        mhla={
            "blocks": [3, 5, 10], "feature_map": "relu", "feature_map_eps": 1e-6, "rope": "after_feature_map",
            "normalizer": "none", "output_norm": True, "output_gate": True,
        },
        softmax_every=softmax_every,
        paper="81 frames of 480 × 800, 21 × 30 × 50 tokens; MHLA " + part,
        code="3 × 5 × 10 blocks; ReLU plus 1e-6, rotary embedding after it, no normaliser; RMSNorm on each head's"
        " output and a SiLU gate; no convolution"
        + ("" if softmax_every is None else "; layers 0, 3, 6, …, 27 stay softmax"),
        chosen="the linear start of the mixing weights as the paper defines it, with normalised rows; the code"
        " normalises columns",
        published="1.3B (Wan-AI/Wan2.1-T2V-1.3B)",
    )


PRESETS: dict[str, Preset] = {
    "deit-t": _deit("T", 192, 3, "5.7M with the convolution (arXiv 2601.07832)"),
    "deit-s": _deit("S", 384, 6, "22M (arXiv 2601.07832)"),
    "vlt-t": _vlt("T", 320, 12, 7, 224, "15M, 2.4 GMACs for the pyramid RAVLT-T (arXiv 2411.07635)"),
    "vlt-s": _vlt("S", 384, 14, 4, 256, "26M, 4.6 GMACs for the pyramid RAVLT-S (arXiv 2411.07635)"),
    **{f"dit-{size}-2-{pixels}": _dit(size, pixels) for size in _DIT_SIZES for pixels in (256, 512)},
    "sana-0.6b": Preset(
        description="SANA-0.6B at 512 pixels",
        model="SanaTransformer2DModel",
        # Efficient-Large-Model/Sana_600M_512px_diffusers, transformer/config.json.
        sizes={
            "num_attention_heads": 36, "attention_head_dim": 32, "num_layers": 28,
            "num_cross_attention_heads": 16, "cross_attention_head_dim": 72, "cross_attention_dim": 1152,
            "caption_channels": 2304, "mlp_ratio": 2.5, "sample_size": 16,
        },
        mhla={"blocks": [4, 4]},
        paper="SANA-0.6B, fine-tuned with MHLA",
        code="nothing: no code for it was released",
        chosen="512 pixels; M = 16, as for DiT; equal mixing weights to start with, which are SANA's own linear"
        " attention",
        published="0.6B (Efficient-Large-Model/Sana_600M_512px)",
    ),
    "wan2.1-1.3b": _wan(None),
    "wan2.1-1.3b-hybrid": _wan(3),
    "mhla-lm-340m": Preset(
        description="causal language model of 338M parameters, as a Llama",
        model="LlamaConfig",
        sizes={
            "vocab_size": 32_000, "hidden_size": 1024, "intermediate_size": 2432, "num_hidden_layers": 24,
            "num_attention_heads": 16, "num_key_value_heads": 16, "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "architectures": ["LlamaForCausalLM"],
        },
        mhla={
            "causal": True, "block_size": [64], "feature_map": "relu", "rope": "after_feature_map",
            "normalizer": "none", "mixing_init": "uniform", "output_norm": True, "output_gate": True,
        },
        paper="340M parameters; a context of 2,048 tokens in 32 chunks of 64",
        code="mixing weights that start equal over the prefix; rotary embedding after the feature map; no normaliser",
        chosen="ReLU, as in the image and video models; RMSNorm on each head's output and the gate, as for Wan; 24"
        " layers of width 1024 with 16 heads, 32,000 tokens of vocabulary and an RMSNorm eps of 1e-6, as models of"
        " this size in flash-linear-attention; tied embeddings and an MLP width of 2432 in place of its 2816, which"
        " make room for the gates",
        published="340M (arXiv 2601.07832)",
    ),
}
"""All presets by name."""
# fmt: on


def from_preset(name: str, *, mhla: MHLAConfig | Mapping[str, Any] | bool | None = None, **overrides: Any) -> Any:
    """Return a model of the MHLA paper (arXiv 2601.07832) by name, at full size and without weights.

    Models of transformers (`deit-t`, `deit-s`, `vlt-t`, `vlt-s`, `mhla-lm-340m`) come as their configuration. Those of
    diffusers (`dit-{s,b,l,xl}-2-{256,512}`, `sana-0.6b`, `wan2.1-1.3b`, `wan2.1-1.3b-hybrid`) come as the untrained
    model, on the current device: `with torch.device("meta")` allocates nothing. [`mhla_hf.presets.PRESETS`] says for
    each what the paper states, what its code states, and what is chosen here.

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
    options = _mhla_options(
        preset, None if mhla is True else mhla, sizes["num_hidden_layers" if is_config else "num_layers"]
    )
    if is_config:
        return stock_class(**sizes, mhla=options, attn_implementation="mhla")
    return mhla_class_for(preset.model)(**sizes, mhla=options)


def _mhla_options(preset: Preset, mhla: MHLAConfig | Mapping[str, Any] | None, num_layers: int) -> dict[str, Any]:
    """Options of the preset, with single ones replaced by a dict and all of them by an `MHLAConfig`."""
    if isinstance(mhla, MHLAConfig):
        # The token grid is filled in for the model where it was left open.
        given = mhla.to_dict() if preset.library == "transformers" else mhla.given_options()
        return {option: value for option, value in given.items() if value is not None}
    options = copy.deepcopy(dict(preset.mhla))
    layers = preset.mhla_layers(num_layers)
    if layers is not None:
        options["layers"] = layers
    options = merge_options(options, mhla or {})
    MHLAConfig.from_dict(options)
    return options
