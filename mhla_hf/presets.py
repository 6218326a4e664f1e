# SPDX-License-Identifier: Apache-2.0
"""The models of the MHLA paper, and other models of videos, images and text by name, with fresh weights.

They are classes of transformers and diffusers.

The paper is arXiv 2601.07832, its code github.com/DAGroup-PKU/MHLA.
"""

from __future__ import annotations

import copy
import importlib
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from .config import MHLAConfig, merge_options
from .models.registry import mhla_class_for
from .utils.locations import is_hub_id
from .utils.messages import check_choice, did_you_mean, shorten_value
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
        repository: The published model of these sizes on the Hub, or `None`.
    """

    description: str
    model: str
    sizes: Mapping[str, Any]
    mhla: Mapping[str, Any]
    repository: str | None = None

    @property
    def library(self) -> str:
        """`"transformers"`, whose configuration a preset is, or `"diffusers"`, whose model it is."""
        return "transformers" if self.model.endswith("Config") else "diffusers"


PRESETS: dict[str, Preset] = {
    name: Preset(**content)
    for name, content in yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")).items()
}
"""All presets by name."""


def is_preset(name: str, argument: str = "model") -> bool:
    """Tell the name of a preset from a directory, which takes precedence, and the id of a Hub repository.

    Raises:
        ValueError: If it is none of them.
    """
    is_directory = Path(name).expanduser().is_dir()
    if not (is_directory or name in PRESETS or is_hub_id(name)):
        raise ValueError(
            f"{argument} {name} is neither a directory, a Hub id (owner/name) nor a preset (mhla-hf models --presets)."
            f"{did_you_mean(name, PRESETS)}"
        )
    return name in PRESETS and not is_directory


def from_preset(name: str, *, mhla: MHLAConfig | Mapping[str, Any] | bool | None = None, **overrides: Any) -> Any:
    """Return a model of the MHLA paper (arXiv 2601.07832), or another published one, by name, without weights.

    Models of transformers (`deit-t`, `deit-s`, `vlt-t`, `vlt-s`, `mhla-lm-340m`, `llama-3-8b`, `llama-3.2-1b`,
    `qwen3-{0.6b,8b}`, `smollm2-{135m,1.7b}`, `gemma-3-{270m,1b}`) come as their configuration. Those of diffusers
    (`dit-{s,b,l,xl}-2-{256,512}`, `sana-0.6b`, `wan2.1-{1.3b,1.3b-hybrid,14b}`, `wan2.1-vace-{1.3b,14b}`,
    `wan2.2-animate-14b`, `skyreels-v2-{1.3b,14b}`, `ltx-video-{2b,13b}`, `ltx-2-19b`, `hunyuan-video`,
    `hunyuan-video-1.5`, `qwen-image`, `flux.1-dev`, `sd3.5-large`) come as the untrained model, on the current device:
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
    stock_class = getattr(importlib.import_module(preset.library), preset.model)
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
