# SPDX-License-Identifier: Apache-2.0
"""`from_single_file` of the MHLA classes: loads original softmax weights, also quantised ones in GGUF."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any

import torch

from ..utils.compat.diffusers import fp32_parts
from ..utils.locations import find_file
from ..utils.messages import shorten_list, shorten_text
from ..utils.tensor_files import FLOATS, check_floats, read_entries
from .options import check_layer_count, check_model_config, from_stored


logger = logging.getLogger(__name__)

_CONFIG_OPTIONS = ("token", "local_files_only", "cache_dir", "subfolder")


def load_single_file(
    mhla_class: Any,
    location: str | os.PathLike[str] | Mapping[str, torch.Tensor],
    config: str | os.PathLike[str] | None,
    options: dict[str, Any],
) -> tuple[Any, dict[str, Any] | None, str]:
    """Load original weights into the softmax class.

    Args:
        mhla_class: The MHLA class.
        location: A path, an address on the Hub, or a state dict.
        config: Directory or Hub id of the model's configuration; `None` to read it off the weights.
        options: For the softmax class's `from_single_file`.

    Returns:
        The softmax model, the MHLA options in its configuration, if any, and the name of the weights in messages.

    Raises:
        ValueError: See [`MHLAModelMixin.from_single_file`][mhla_hf.models.base.MHLAModelMixin.from_single_file].
    """
    stock = mhla_class._upstream_class()
    if options.get("quantization_config") is not None:
        raise ValueError(
            f"{mhla_class.__name__}.from_single_file takes no quantization_config: GGUF files are dequantised. "
            "Quantise the saved MHLA directory when it is loaded."
        )
    # As upstream: float32 unless another dtype is asked for.
    dtype = options.get("dtype") or options.get("torch_dtype") or torch.float32
    if dtype not in FLOATS:
        raise ValueError(f"torch_dtype={dtype!r} must be torch.float32, torch.bfloat16 or torch.float16.")
    if isinstance(location, Mapping):
        called, weights = "the state dict", dict(location)
    else:
        called = str(location)
        weights = {entry.name: entry.load() for entry in read_entries(find_file(location, **options))}
    check_floats(weights.values(), called)
    stored = None
    try:
        names = mhla_class.original_names(weights)
        if names is None:
            model = stock.from_single_file(weights, **{**options, "config": config})
        else:
            weights = {name: weights[original] for name, original in names.items()}
            if config is None:
                content = mhla_class.original_config({name: tuple(value.shape) for name, value in weights.items()})
            else:
                hub = {key: options[key] for key in _CONFIG_OPTIONS if key in options}
                content = mhla_class.load_config(str(config), revision=options.get("config_revision"), **hub)
                content = {key: options.get(key, value) for key, value in from_stored(content).items()}
                stored = content.pop("mhla", None)
            model = _assign(stock, content, weights, dtype).to(options.get("device") or "cpu")
    # Upstream fails on a missing weight with its name, or with a parameter that stayed on the meta device.
    except (KeyError, NotImplementedError, OSError, RuntimeError, ValueError) as error:
        reason = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        raise ValueError(f"{called} does not fit {stock.__name__}: {shorten_text(reason, 400)}") from error
    return model, stored, called


def _assign(stock: Any, config: Mapping[str, Any], weights: dict[str, torch.Tensor], dtype: torch.dtype) -> Any:
    """Build a softmax model from weights, which are not copied if they have the right dtype.

    Upstream would hold all weights twice, cast parameters that stay in float32 to bfloat16, and rename weights with
    the names of diffusers again if there is one that the model does not know.
    """
    from accelerate import init_empty_weights

    # Before the model is built: a wrong size may ask for more memory than there is.
    check_model_config(stock, config, "the configuration")
    if "num_layers" in config:
        check_layer_count(config["num_layers"], weights, "the configuration")
    with init_empty_weights():
        model = stock.from_config({**config, "_class_name": stock.__name__})
    surplus = set(weights) - set(model.state_dict())
    if surplus:
        logger.warning("%s does not know the weights %s", stock.__name__, shorten_list(surplus))
    # As in `from_pretrained`: parameters that the class keeps in float32 stay in it.
    kept = fp32_parts(stock)
    cast = {
        name: tensor.to(torch.float32 if kept & set(name.split(".")) else dtype)
        for name, tensor in weights.items()
        if name not in surplus
    }
    model.load_state_dict(cast, assign=True)
    # Assigned weights keep their own setting, and those read from files have none.
    return model.requires_grad_(True).eval()
