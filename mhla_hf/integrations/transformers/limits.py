# SPDX-License-Identifier: Apache-2.0
"""Limits of transformers models: sizes that a configuration may ask for, and whether weights belong to it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from ...models.limits import MAX_LAYERS, check_new_size
from ...utils.messages import shorten_list, shorten_value


MAX_SIZE = 2**28
"""The largest width, or number of tokens or positions."""

MAX_LABELS = 2**20
"""The most classes of a head: each has an entry with its name in the configuration that is built."""

_SIZE = re.compile(
    r"hidden_size|d_model|n_embd|num_attention_heads|num_key_value_heads|n_heads?|head_dim|intermediate_size|vocab_size"
    r"|max_position_embeddings|n_positions|patch_size|image_size|num_channels"
)
# Names of the number of modules that towers and heads make one by one.
_MODULE_COUNT = re.compile(r"n_layer|(?:.*_)?(?:layers|blocks|depths?)(?:_per_block)?")
_COUNTED = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers", "decoder_layers")
_NUMBER = re.compile(r"(?<=\.)[0-9]+(?=\.|$)")


def check_sizes(config: Mapping[str, Any], where: str) -> None:
    """Check the sizes in a configuration before a model is built of it, those of its towers included.

    Args:
        config: Contents of `config.json`.
        where: Name of the file, for errors.

    Raises:
        ValueError: If one is no positive integer, or one that no model has.
    """
    for name, part in config.items():
        is_count, is_size = _MODULE_COUNT.fullmatch(name), name in _COUNTED or _SIZE.fullmatch(name)
        largest = MAX_LABELS if name == "num_labels" else MAX_LAYERS if is_count else MAX_SIZE
        for entry in part if isinstance(part, (list, tuple)) else [part]:
            # Some published configurations have such a number with a decimal point.
            value = int(entry) if isinstance(entry, float) and entry.is_integer() else entry
            is_number = isinstance(value, int) and not isinstance(value, bool)
            # Other models may mean something else by names like those of counts, but no large number.
            wrong = is_size and entry is not None and (not is_number or value < (0 if is_count else 1))
            if wrong or ((is_size or is_count or name == "num_labels") and is_number and value > largest):
                raise ValueError(
                    f"{where}: {name}={shorten_value(value)} must be a positive integer, at most {largest}."
                )
        if isinstance(part, Mapping) and name.endswith("_config"):
            check_sizes(part, f"{where}: {name}")


def check_layers(model: Any, missing: Iterable[str], surplus: Iterable[str], where: str) -> None:
    """Refuse weights that have other layers than a model, in either direction.

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
    more = {_layer(name) for name in surplus if ".mhla." not in name and _NUMBER.sub("#", name) in masked} - {""}
    present, absent = {_layer(name) for name in {*names} - {*missing}}, {_layer(name) for name in missing} - {""}
    # A module list absent from the checkpoint is newly initialised, for example a new task head.
    known = {_NUMBER.sub("#", layer) for layer in present}
    less = {layer for layer in absent - present if _NUMBER.sub("#", layer) in known}
    if more or less:
        have, does = ("have", "leaves out") if more else ("lack", "asks for")
        count = getattr(model.config.get_text_config(), "num_hidden_layers", None)
        said = "the configuration" if count is None else f"the configuration (num_hidden_layers={count})"
        raise ValueError(
            f"{where}: the weights {have} {shorten_list(more or less)}, which {said} {does}: the two do not belong "
            "together."
        )


def check_shapes(mismatched: Iterable[tuple[str, Any, Any]], ignored: bool, where: Any) -> None:
    """Refuse options that give MHLA parameters other shapes than their weights have.

    Args:
        mismatched: Names, shapes in the weights and in the model.
        ignored: Whether `ignore_mismatched_sizes` was given.
        where: Location of the weights, for errors.

    Raises:
        ValueError: If there are such, and they are not ignored.
    """
    for name, stored, wanted in () if ignored else sorted(mismatched):
        if ".mhla." in name:
            raise ValueError(
                f"{where}: {name} is {list(stored)} in the weights, but {list(wanted)} by the mhla options. Those "
                "that change shapes (block_size, grid, mixing_storage) must be those of config.json: leave them out."
            )


def check_new_parameters(model: Any, missing_keys: Iterable[str]) -> None:
    """Check that MHLA does not add more parameters than the model has, before there is memory for them.

    Args:
        model: The model.
        missing_keys: Names of its tensors that no checkpoint gives.

    Raises:
        ValueError: See [`check_new_size`][mhla_hf.models.limits.check_new_size].
    """
    if any(".mhla." in key for key in missing_keys):
        shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        check_new_size({name: shape for name, shape in shapes.items() if ".mhla." not in name}, shapes)


def _layer(name: str) -> str:
    """Return a tensor's name up to the first number in it; empty without one."""
    match = _NUMBER.search(name)
    return "" if match is None else name[: match.end()]
