# SPDX-License-Identifier: Apache-2.0
"""`from_single_file` of the MHLA classes: original softmax weights, also quantised ones in GGUF, become MHLA."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ..config import MHLAConfig
from ..utils.compat.diffusers import fp32_parts, loads_single_files
from ..utils.locations import hub_downloads
from ..utils.messages import shorten_list, shorten_text
from ..utils.tensor_files import FLOATS, TensorEntry, check_floats, gguf_entries, read_entries
from .converting import convert_model
from .options import check_layer_count, check_model_config, from_stored, merge_options
from .registry import family_for


logger = logging.getLogger(__name__)

GGUF_SUFFIX = ".gguf"

_HUB_OPTIONS = ("cache_dir", "force_download", "local_files_only", "revision", "token")
_URLS = ("https://", "http://", "hf.co/", "huggingface.co/")
_ADDRESS = re.compile(
    r"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/(?P<repository>[^/]+/[^/]+)/(?:(?:blob|resolve)/main/)?(?P<name>.+)"
)


def is_url(location: Any) -> bool:
    """Return whether a location is the address of a file on the Hub, not a path."""
    return str(location).startswith(_URLS)


def find_single_file(location: str | os.PathLike[str], **options: Any) -> Path:
    """Return the path of a weight file; one on the Hub is downloaded.

    Args:
        location: A path, or an address such as `https://huggingface.co/owner/name/blob/main/file.safetensors`.
        **options: For the download: `revision`, `token`, `cache_dir`, `force_download`, `local_files_only`.

    Raises:
        ValueError: If there is no such file, or it cannot be downloaded.
    """
    path = Path(location).expanduser()
    if path.is_file():
        return path
    address = _ADDRESS.fullmatch(str(location))
    if address is None:
        raise ValueError(f"{location} is neither a file nor the address of one on the Hub.")
    from huggingface_hub import hf_hub_download

    hub = {key: options[key] for key in _HUB_OPTIONS if key in options}
    with hub_downloads(address["repository"], hub.get("cache_dir")):
        return Path(hf_hub_download(address["repository"], address["name"], **hub))


def load_single_file(
    mhla_class: Any,
    location: str | os.PathLike[str] | Mapping[str, torch.Tensor],
    mhla: MHLAConfig | Mapping[str, Any] | None,
    config: str | os.PathLike[str] | None,
    options: dict[str, Any],
) -> Any:
    """Load original weights with the softmax class and turn the model into MHLA.

    Args:
        mhla_class: The MHLA class.
        location: A path, an address on the Hub, or a state dict.
        mhla: The options.
        config: Directory or Hub id of the model's configuration; `None` to read it off the weights.
        options: For the softmax class's own `from_single_file`.

    Raises:
        ValueError: See [`MHLAModelMixin.from_single_file`][mhla_hf.models.base.MHLAModelMixin.from_single_file].
    """
    import diffusers

    stock = getattr(diffusers, family_for(mhla_class.__name__).upstream)
    if not loads_single_files(stock.__name__):
        raise ValueError(
            f"{mhla_class.__name__} does not load single files: diffusers has no conversion of original weights for "
            f"{stock.__name__}."
        )
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
        weights = {entry.name: entry.load() for entry in read_weights(find_single_file(location, **options))[0]}
    try:
        names = mhla_class.original_names(weights)
        if names is None:
            model = stock.from_single_file(weights, **{**options, "config": config})
        else:
            weights = {name: weights[original] for name, original in names.items()}
            if config is not None:
                content = _load_config(mhla_class, config, options)
            else:
                content = read_config(
                    mhla_class, {name: tuple(value.shape) for name, value in weights.items()}, "config"
                )
            stored = content.pop("mhla", None)
            if stored is not None and not isinstance(mhla, MHLAConfig):
                mhla = merge_options(stored, mhla or {})
            model = _assign(stock, content, weights, dtype).to(options.get("device") or "cpu")
    # Upstream fails on a missing weight with its name, or with a parameter that stayed on the meta device.
    except (KeyError, NotImplementedError, OSError, RuntimeError, ValueError) as error:
        reason = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        raise ValueError(f"{called} does not fit {stock.__name__}: {shorten_text(reason, 400)}") from error
    return convert_model(model, mhla, called)


def read_weights(path: Path) -> tuple[list[TensorEntry], dict[str, int]]:
    """Read the tensors of a weight file without their values.

    Args:
        path: A safetensors or GGUF file.

    Returns:
        The tensors, and for GGUF the number of tensors by type.

    Raises:
        ValueError: If the file is damaged or quantised in safetensors, or has another suffix: it may be a pickle.
    """
    if path.suffix == GGUF_SUFFIX:
        return gguf_entries(path)
    if path.suffix != ".safetensors":
        raise ValueError(
            f"{path} is not read: only .safetensors and .gguf files are, since others may run code. Save its weights "
            "as safetensors first."
        )
    entries = read_entries(path)
    check_floats(entries, path)
    return entries, {}


def read_config(
    mhla_class: Any, shapes: Mapping[str, tuple[int, ...]], argument: str, called: str = "the weights"
) -> dict[str, Any]:
    """Return the configuration of the softmax model, read off its weights.

    Args:
        mhla_class: An MHLA class that knows the original names.
        shapes: Shapes by name in the softmax model.
        argument: Argument by which the user gives a configuration instead.
        called: Name of the weights in errors.

    Raises:
        ValueError: If the weights do not tell it.
    """
    try:
        return mhla_class.original_config(shapes)
    except ValueError as error:
        raise ValueError(f"{called}: {error} If the weights are complete, give {argument}.") from error


def _load_config(mhla_class: Any, config: str | os.PathLike[str], options: Mapping[str, Any]) -> dict[str, Any]:
    hub = {key: options[key] for key in ("token", "local_files_only", "cache_dir", "subfolder") if key in options}
    content = from_stored(mhla_class.load_config(str(config), revision=options.get("config_revision"), **hub))
    return {**content, **{key: value for key, value in options.items() if key in content}}


def _assign(stock: Any, config: Mapping[str, Any], weights: dict[str, torch.Tensor], dtype: torch.dtype) -> Any:
    """Build a softmax model from weights, which are not copied if they have the right dtype."""
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
    quantised = sorted({str(tensor.dtype) for tensor in weights.values() if tensor.dtype not in FLOATS})
    if quantised:
        raise ValueError(f"The weights are {', '.join(quantised)}; quantised weights are read from GGUF files alone.")
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
