# SPDX-License-Identifier: Apache-2.0
"""Named configurations of whole models: classes of transformers with MHLA options, and no model class of our own."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .config import MHLAConfig


if TYPE_CHECKING:
    from transformers import PreTrainedConfig


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A named configuration.

    Attributes:
        description: One line.
        config_class: Name of the configuration class in transformers.
        sizes: Arguments of that class.
        mhla: Options of [`MHLAConfig`]; the token grid follows the model's longest text.
    """

    description: str
    config_class: str
    sizes: Mapping[str, Any]
    mhla: Mapping[str, Any]


PRESETS: dict[str, Preset] = {
    "mhla-lm-340m": Preset(
        description="causal language model of 338M parameters, after the 340M one of arXiv 2601.07832",
        config_class="LlamaConfig",
        sizes={
            "vocab_size": 32_000,
            "hidden_size": 1024,
            "intermediate_size": 2432,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": True,
        },
        mhla={
            "causal": True,
            "block_size": [64],
            "feature_map": "relu",
            "rope": "after_feature_map",
            "normalizer": "none",
            "mixing_init": "uniform",
            "output_norm": True,
            "output_gate": True,
        },
    ),
}
"""All presets by name. See [`from_preset`] for where the figures come from."""


def from_preset(
    name: str, *, mhla: MHLAConfig | Mapping[str, Any] | None = None, **overrides: Any
) -> PreTrainedConfig:
    """Returns the configuration of a preset, to make a model with fresh weights from.

    `"mhla-lm-340m"` is the language model of the MHLA paper (arXiv 2601.07832) as a Llama with MHLA attention.
    Stated in the paper: 340M parameters, a context of 2,048 tokens in 32 chunks of 64. From the authors' released
    code: the mixing weights start equal over the prefix, RoPE comes after the feature map, and there is no
    normaliser; RMSNorm on each head's output and the SiLU output gate belong to the same design. Not stated, and
    chosen here: ReLU as the feature map (the one of the authors' video and image models); 24 layers of width 1024
    with 16 heads, 32,000 tokens of vocabulary and RMSNorm eps of 1e-6 (as models of this size in the
    flash-linear-attention library, which the authors trained with); tied embeddings and an MLP width of 2432 instead
    of its 2816, which make room for the output gates: 338M parameters in all. No weights were released to compare
    with. The paper trains it with AdamW at a learning rate of 3e-4 with cosine decay, weight decay 0.01, gradient
    clipping at 1 and batches of 0.25M tokens.

    Args:
        name: One of [`PRESETS`].
        mhla: Options that replace the preset's ones, as a dict; an `MHLAConfig` replaces all of them.
        **overrides: Arguments of the preset's configuration class that replace the preset's ones, such as
            `num_hidden_layers` or `vocab_size`.

    Returns:
        A configuration of transformers, a `LlamaConfig` for `"mhla-lm-340m"`.

    Raises:
        ValueError: If there is no such preset (the message lists them), or an option is unknown.

    Examples:
        >>> from transformers import AutoModelForCausalLM
        >>> from mhla_hf import from_preset
        >>> sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2)
        >>> config = from_preset("mhla-lm-340m", vocab_size=259, num_key_value_heads=2, **sizes)
        >>> model = AutoModelForCausalLM.from_config(config)
        >>> type(model).__name__
        'LlamaForCausalLM'
    """
    if name not in PRESETS:
        raise ValueError(f"{name!r} is not a preset. Presets: {', '.join(PRESETS)}.")
    preset = PRESETS[name]
    import transformers

    config_class = getattr(transformers, preset.config_class)
    plain = config_class()
    unknown = sorted(option for option in overrides if not hasattr(plain, option))
    if unknown:
        raise ValueError(f"{config_class.__name__} has no option {', '.join(unknown)} to override in preset {name!r}.")
    if isinstance(mhla, MHLAConfig):
        # The token grid is filled in for the model where it was left open.
        options = {option: value for option, value in mhla.to_dict().items() if value is not None}
    else:
        options = {**copy.deepcopy(dict(preset.mhla)), **({} if mhla is None else mhla)}
        MHLAConfig.from_dict(options)
    return config_class(**{**preset.sizes, **overrides}, mhla=options, attn_implementation="mhla")
