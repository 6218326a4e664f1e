# SPDX-License-Identifier: Apache-2.0
"""`from_preset`: a configuration of transformers, or an untrained model of diffusers, from the table."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Collection, Mapping
from typing import Any

from ..config import MHLAConfig
from ..models.options import merge_options
from ..models.registry import mhla_class_for
from ..utils.messages import shorten_list, shorten_value
from .table import PRESETS, Preset


# Arguments that transformers' configurations take beside those of their own signature.
_COMMON_ARGUMENTS = ("num_labels",)


def from_preset(name: str, *, mhla: MHLAConfig | Mapping[str, Any] | bool | None = None, **overrides: Any) -> Any:
    """Returns one of the models of the MHLA paper (arXiv 2601.07832) by name, at full size and without weights.

    Models of transformers (`deit-t`, `deit-s`, `vlt-t`, `vlt-s`, `mhla-lm-340m`) come as their configuration. Those of
    diffusers (`dit-{s,b,l,xl}-2-{256,512}`, `sana-0.6b`, `wan2.1-1.3b`, `wan2.1-1.3b-hybrid`) come as the untrained
    model, on the current device: `with torch.device("meta")` allocates nothing. [`mhla_hf.presets.PRESETS`] says of
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
    if not isinstance(name, str) or name not in PRESETS:
        raise ValueError(f"{shorten_value(name)} is not a preset. Presets: {', '.join(PRESETS)}.")
    if mhla is True or not isinstance(mhla, (MHLAConfig, Mapping, bool, type(None))):
        raise ValueError(
            f"mhla={shorten_value(mhla)} must be a dict of options, an MHLAConfig, None for those of the preset, or "
            "False for the model's own attention."
        )
    preset = PRESETS[name]
    build = _transformers_config if preset.library == "transformers" else _diffusers_model
    return build(name, preset, mhla, overrides)


def _transformers_config(name: str, preset: Preset, mhla: Any, overrides: Mapping[str, Any]) -> Any:
    import transformers
    from huggingface_hub.errors import StrictDataclassError

    config_class = getattr(transformers, preset.model)
    allowed = [*_arguments(config_class), *_COMMON_ARGUMENTS]
    _check_overrides(name, preset, overrides, allowed)
    sizes = {**copy.deepcopy(dict(preset.sizes)), **overrides}
    if mhla is not False:
        sizes.update(mhla=_options(preset, mhla, sizes["num_hidden_layers"]), attn_implementation="mhla")
    try:
        return config_class(**sizes)
    except StrictDataclassError as error:
        raise ValueError(f"Preset {name!r}: {' '.join(str(error).split())}") from error


def _diffusers_model(name: str, preset: Preset, mhla: Any, overrides: Mapping[str, Any]) -> Any:
    mhla_class = mhla_class_for(preset.model)
    import diffusers

    from ..models.bounds import check_model_config

    stock_class = getattr(diffusers, preset.model)
    _check_overrides(name, preset, overrides, _arguments(stock_class))
    sizes = {**copy.deepcopy(dict(preset.sizes)), **overrides}
    check_model_config(stock_class, sizes, f"preset {name!r}")
    if mhla is False:
        return stock_class(**sizes)
    return mhla_class(**sizes, mhla=_options(preset, mhla, sizes["num_layers"]))


def _options(preset: Preset, mhla: MHLAConfig | Mapping[str, Any] | None, num_layers: int) -> dict[str, Any]:
    """Options of the preset with the given ones laid over; all that an `MHLAConfig` was made with, in its place."""
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


def _arguments(model_class: Any) -> list[str]:
    return [name for name in inspect.signature(model_class.__init__).parameters if name not in ("self", "kwargs")]


def _check_overrides(name: str, preset: Preset, overrides: Mapping[str, Any], allowed: Collection[str]) -> None:
    unknown = sorted(option for option in overrides if option not in allowed)
    if unknown:
        raise ValueError(
            f"{preset.model} has no option {shorten_list(unknown)} to override in preset {name!r}. It has: "
            f"{', '.join(allowed)}."
        )
