# SPDX-License-Identifier: Apache-2.0
"""Checks of configurations and weights before there is memory for a model: sizes, layers and new parameters."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from ...models.bounds import MAX_LAYERS, check_new_size
from ...utils.messages import shorten_list, shorten_value


MAX_SIZE = 2**28
"""The largest width, or number of tokens or positions."""

MAX_LABELS = 2**20
"""The most classes of a head: each has an entry with its name in the configuration that is built."""

_LAYER_FIELDS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers", "decoder_layers")
_SIZE_FIELDS = (
    "hidden_size", "d_model", "n_embd", "num_attention_heads", "num_key_value_heads", "n_head", "n_heads", "head_dim",
    "intermediate_size", "vocab_size", "max_position_embeddings", "n_positions", "patch_size", "image_size",
    "num_channels",
)  # fmt: skip
# Names of the number of modules that towers and heads make one by one.
_MODULE_COUNT = re.compile(r"(?:.*_)?(?:layers|blocks|depths?)(?:_per_block)?")
_NUMBER = re.compile(r"(?<=\.)[0-9]+(?=\.|$)")


def check_sizes(config: Mapping[str, Any], where: str) -> None:
    """Checks the sizes in a configuration before a model is built of it, those of its towers included.

    Args:
        config: Contents of `config.json`.
        where: Name of the file, for errors.

    Raises:
        ValueError: If one is no positive integer, or one that no model has.
    """
    for name in (*_LAYER_FIELDS, *_SIZE_FIELDS):
        value = config.get(name)
        for entry in value if isinstance(value, (list, tuple)) else [value]:
            _check_size(name, entry, MAX_LAYERS if name in _LAYER_FIELDS else MAX_SIZE, where)
    for name, part in config.items():
        largest = MAX_LABELS if name == "num_labels" else MAX_LAYERS if _MODULE_COUNT.fullmatch(name) else None
        for entry in part if isinstance(part, (list, tuple)) else [part]:
            # Other models may mean something else by such a name, but no large number.
            if largest is not None and isinstance(entry, int):
                _check_largest(name, entry, largest, where)
        if isinstance(part, Mapping) and name.endswith("_config"):
            check_sizes(part, f"{where}: {name}")


def check_configuration(config: Any) -> None:
    """[`check_sizes`] of a configuration that was read already, without its towers.

    Raises:
        ValueError: See [`check_sizes`].
    """
    # Not by attribute: configurations whose layers differ refuse to name a size that is one layer's.
    sizes = {name: vars(config).get(name) for name in (*_LAYER_FIELDS, *_SIZE_FIELDS)}
    check_sizes(sizes, str(getattr(config, "name_or_path", "") or type(config).__name__))


def _check_size(name: str, value: Any, largest: int, where: str) -> None:
    if value is None:
        return
    # Some published configurations have such a number with a decimal point.
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < (0 if largest == MAX_LAYERS else 1):
        raise ValueError(f"{where}: {name}={shorten_value(value)} must be a positive integer.")
    _check_largest(name, value, largest, where)


def _check_largest(name: str, value: int, largest: int, where: str) -> None:
    if value > largest:
        raise ValueError(f"{where}: {name}={shorten_value(value)} is more than {largest}.")


def check_layers(model: Any, missing: Iterable[str], surplus: Iterable[str], where: str) -> None:
    """Refuses weights that have other layers than a model, in either direction.

    Args:
        model: The model.
        missing: Names of its tensors that the weights do not have.
        surplus: Names in the weights that the model does not have, as they would be called in the model.
        where: Location of the weights, for errors.

    Raises:
        ValueError: If all tensors of a layer are missing, or the weights have tensors of one more.
    """
    names = [name for name in model.state_dict() if ".mhla." not in name]
    base = f"{model.base_model_prefix}."
    masked = {_NUMBER.sub("#", name) for name in names}
    # A checkpoint may have been written with the prefix of the base model or without it.
    masked |= {f"{base}{name}" for name in masked} | {name.removeprefix(base) for name in masked}
    left_out = {_layer(name) for name in surplus if ".mhla." not in name and _NUMBER.sub("#", name) in masked}
    if left_out - {None}:
        raise ValueError(
            f"{where}: the weights have {_listed(left_out)}, which {_said(model)} leaves out: the two do not belong "
            "together."
        )
    absent = {name for name in missing if ".mhla." not in name}
    present = {_layer(name) for name in names if name not in absent}
    lacking = {_layer(name) for name in absent} - present
    # Of a list that the weights know nothing of, all is new, as it may be in the head of another task.
    known = {_NUMBER.sub("#", layer) for layer in present if layer is not None}
    lacking = {layer for layer in lacking if layer is not None and _NUMBER.sub("#", layer) in known}
    if lacking:
        raise ValueError(
            f"{where}: the weights lack {_listed(lacking)}, which {_said(model)} asks for: the two do not belong "
            "together."
        )


def refuse_on_disk(missing_keys: Any, device_map: Any) -> None:
    """Refuses new parameters that would have to be offloaded to the disk, where only checkpoints' tensors can go.

    Raises:
        ValueError: If there are any.
    """
    places = device_map if isinstance(device_map, dict) else {}
    for key in missing_keys if "disk" in places.values() else ():
        above = [place for place in places if place == "" or key == place or key.startswith(f"{place}.")]
        if ".mhla." in key and above and places[max(above, key=len)] == "disk":
            raise ValueError(
                f"{key} is new and its layer is offloaded to the disk. Convert the checkpoint first (mhla-hf convert) "
                "and load the result."
            )


def check_new_parameters(model: Any, missing_keys: Iterable[str]) -> None:
    """Checks that MHLA does not add more parameters than the model has, before there is memory for them.

    Args:
        model: The model.
        missing_keys: Names of its tensors that no checkpoint gives.

    Raises:
        ValueError: See [`check_new_size`][mhla_hf.models.bounds.check_new_size].
    """
    if any(".mhla." in key for key in missing_keys):
        shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        check_new_size({name: shape for name, shape in shapes.items() if ".mhla." not in name}, shapes)


def _layer(name: str) -> str | None:
    """A tensor's name up to the first number in it."""
    match = _NUMBER.search(name)
    return None if match is None else name[: match.end()]


def _listed(layers: set[str | None]) -> str:
    return shorten_list(layer for layer in layers if layer is not None)


def _said(model: Any) -> str:
    config = model.config.get_text_config()
    count = getattr(config, "num_hidden_layers", None)
    return "the configuration" if count is None else f"the configuration (num_hidden_layers={count})"
