# SPDX-License-Identifier: Apache-2.0
"""Configurations of models that ask for MHLA: options, the request in each tower, and what is checked before memory.

A model of several towers may be asked as a whole. Its text part then has to become MHLA, unless the tokens of an image
attend to each other there in both directions; the others follow where they can. A tower that is named, or that was
MHLA when the model was saved, has to become MHLA as well.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from transformers.utils import logging

from ...config import MHLAConfig
from ...layers.mixing import resolve_blocks, with_window_size
from ...models.stub import REFUSAL
from ...models.weight_files import MAX_LAYERS, check_new_size
from ...ops.tables import SEQUENCE_NORMALIZERS
from ...utils.compat.transformers import attention_of, set_attention
from ...utils.messages import shorten_list, shorten_value
from ...utils.options import check_names


logger = logging.get_logger(__name__)

NAME = "mhla"
"""Name of the attention implementation."""

# As many rows of mixing weights as are learned; longer texts go by distance.
MAX_SEQUENCE_BLOCKS = 64
SMALLEST_CAUSAL_BLOCK = 64
SMALLEST_ENCODER_BLOCK = 8
_ALL_OPTIONS = tuple(MHLAConfig().to_dict())
# What models do that were made before there were these options.
_ADDED_OPTIONS = {
    "mixing_storage": "matrix",
    "mixing_tail": "constant",
    "mixing_tail_half_life": None,
    "text": "softmax",
}
# Options that leave the shapes of the weights alone and change what they compute.
_TRAINED_WITH = (
    "feature_map", "feature_map_eps", "normalizer", "rope", "block_size", "mixing_constraint", "mixing_tail", "layers",
    "window", "window_size",
)  # fmt: skip
_NULLABLE = ("layers", "mixing_range", "lepe_kernel", "window", "window_size")


def is_complete(options: Any) -> bool:
    """Return whether options are those of a model that was built, with every one given."""
    return isinstance(options, Mapping) and options.keys() | _ADDED_OPTIONS.keys() == set(_ALL_OPTIONS)


def warn_of_changes(stored: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Warn of options that change the meaning of stored weights."""
    stored = {**_ADDED_OPTIONS, **stored}
    # A window that was not there has a warning of its own, about its fresh bias.
    added = {"window", "window_size"} if stored["window"] is None else set()
    changed = [name for name in _TRAINED_WITH if name in given and name not in added and given[name] != stored[name]]
    if changed:
        made_with = ", ".join(f"{name}={stored[name]!r}" for name in changed)
        logger.warning(
            "The MHLA options of this model were %s; the ones given change what its weights mean.", made_with
        )


def causal_defaults(head_dim: int, max_positions: int | None) -> dict[str, Any]:
    """Return the defaults for causal language models.

    A block's summary has 2K·(K + 1) numbers for a head (hedgehog features are twice as wide as keys), a KV cache
    2K·(tokens). With blocks of 2K tokens the state is half as large as a KV cache of the same dtype for texts of as
    many blocks as have weights, and as large for longer ones. Weights by distance with a decaying tail gave the
    lowest loss, at the trained length and beyond it (docs/results/language.md, "Tails of mixing weights").

    Args:
        head_dim: K.
        max_positions: Longest text that the model was made for, or None.
    """
    block = max(SMALLEST_CAUSAL_BLOCK, 2 * head_dim)
    blocks = min(MAX_SEQUENCE_BLOCKS, max(1, math.ceil((max_positions or block * MAX_SEQUENCE_BLOCKS) / block)))
    mixing = {"mixing_init": "uniform", "mixing_storage": "distance", "mixing_tail": "decay"}
    return {"block_size": [block], "grid": [block * blocks], **mixing}


def encoder_defaults(max_positions: int | None) -> dict[str, Any]:
    """Return the defaults for encoders: at most 64 blocks of at least 8 tokens over their positions."""
    positions = max_positions or SMALLEST_ENCODER_BLOCK * MAX_SEQUENCE_BLOCKS
    # Powers of two: positions are sometimes a few more than the round number that was meant.
    block = max(SMALLEST_ENCODER_BLOCK, 2 ** round(math.log2(max(1, positions / MAX_SEQUENCE_BLOCKS))))
    return {
        "block_size": [block], "grid": [max(block, positions)], "mixing_init": "linear", "mixing_range": 8.0,
    }  # fmt: skip


def max_positions(config: Any) -> int | None:
    """Longest sequence that a configuration speaks of, or None."""
    for name in ("max_position_embeddings", "n_positions", "max_source_positions"):
        value = getattr(config, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return None


def resolve_sequence(given: Any, *, causal: bool, head_dim: int, positions: int | None, rope: str) -> MHLAConfig:
    """Return the options of a language model or encoder: the given ones, over the defaults.

    Args:
        given: `None` or a dict of some options.
        causal: Whether the model looks back only.
        head_dim: K.
        positions: Longest sequence that the model was made for.
        rope: Default position of rotary embeddings.

    Raises:
        ValueError: If the options ask for a number of blocks, or contradict the model.
    """
    defaults = causal_defaults(head_dim, positions) if causal else encoder_defaults(positions)
    defaults |= {"rope": rope, "feature_map": "hedgehog", "mixing_constraint": "nonnegative"}
    options = {} if given is None else given
    if is_complete(options):
        defaults |= _ADDED_OPTIONS
    check_names("mhla", options, _ALL_OPTIONS)
    allowed = {
        "blocks": (None,),
        "causal": (None, causal),
        "resize": (None, "auto", "extend"),
        "normalizer": (None, *SEQUENCE_NORMALIZERS),
    }
    for name, values in allowed.items():
        if options.get(name) not in values:
            direction = "looks back only" if causal else "attends in both directions"
            if name == "blocks":
                raise ValueError(f"{'Language models' if causal else 'Text encoders'} take block_size, not blocks.")
            raise ValueError(
                f"{name}={options[name]!r:.100} contradicts the model, which has blocks of a fixed block_size and "
                f"{direction}: allowed is {' or '.join(map(repr, values[1:]))}."
            )
    # Every option of a sequence has a default but these, whose None means something.
    merged = {**defaults, **{name: value for name, value in options.items() if value is not None or name in _NULLABLE}}
    if merged.get("mixing_init") == "uniform" and "mixing_range" not in options:
        merged["mixing_range"] = None
    block = MHLAConfig.from_dict({"block_size": merged["block_size"]}).block_size
    if options.get("grid") is None and options.get("block_size") is not None and block is not None:
        wanted = positions or block[0] * MAX_SEQUENCE_BLOCKS
        merged["grid"] = [max(block[0], min(wanted, block[0] * MAX_SEQUENCE_BLOCKS))]
    return with_window_size(MHLAConfig.from_dict({**merged, "resize": "extend", "causal": causal}), 1)


def resolve_image(given: Any, grid: tuple[int, int]) -> MHLAConfig:
    """Options of a vision transformer, for its usual grid of patches; `MHLAConfig`'s own defaults fit it.

    Raises:
        ValueError: If the options are for sequences.
    """
    config = MHLAConfig.coerce(given)
    if config.is_sequence:
        raise ValueError("causal and resize='extend' are for sequences; this model attends over a grid of patches.")
    config = resolve_blocks(config, grid)
    return config if config.grid is not None else config.replace(grid=grid)


# Towers.


class InheritedOptions(dict[str, Any]):
    """Options that a part has because the whole model was asked.

    Attributes:
        optional: Whether the part may keep softmax.
        is_text: Whether it is the text part of the model it sits in.
    """

    optional: bool = True
    is_text: bool = False


def wants_mhla(config: Any) -> bool:
    """Return whether a configuration asks for MHLA, by its options or its attention implementation."""
    return getattr(config, "mhla", None) is not None or attention_of(config) == NAME


def inherited(config: Any) -> bool:
    """Return whether MHLA was asked of a part only because the whole model was asked."""
    return isinstance(getattr(config, "mhla", None), InheritedOptions)


def may_keep_softmax(config: Any) -> bool:
    """Return whether a part was asked only because the whole model was, and is not the text part."""
    return inherited(config) and config.mhla.optional


def towers_of(config: Any) -> dict[str, Any]:
    """The configurations inside a composite one, by name."""
    towers = {name: getattr(config, name, None) for name in getattr(config, "sub_configs", {})}
    return {name: tower for name, tower in towers.items() if tower is not None}


def text_part(config: Any) -> Any:
    """The configuration of the text part of a composite model, which may be the whole; None where it is not known."""
    try:
        text = config.get_text_config(decoder=True)
    except ValueError:
        return None
    return text if text is config or any(text is tower for tower in towers_of(config).values()) else None


def prepare_config(config: Any) -> None:
    """Make `mhla` options alone enough, before a model is built.

    Options for a model of several towers go to the configuration of each tower that was asked.

    Args:
        config: The model's configuration; its attention implementation is set where it was left open.
    """
    towers = towers_of(config)
    if towers:
        _ask_towers(config, towers)
    for tower in towers.values():
        prepare_config(tower)
    if getattr(config, "mhla", None) is not None and attention_of(config) is None:
        set_attention(config, NAME)


def _ask_towers(config: Any, towers: dict[str, Any]) -> None:
    given, text = getattr(config, "mhla", None), text_part(config)
    whole = attention_of(config) == NAME
    if isinstance(given, Mapping) and given and all(str(name) in towers for name in given):
        for name, options in given.items():
            towers[str(name)].mhla = options
        config.mhla = given = None
    if (given is None and not whole) or (text is config and is_complete(given)):
        # Complete options are those of layers that the model has beside its towers, and was made with.
        return
    named = [] if whole else [tower for tower in towers.values() if attention_of(tower) == NAME]
    optional = may_keep_softmax(config)
    for tower in named or towers.values():
        if attention_of(tower) not in (None, NAME):
            continue
        options = dict(given or {})
        if tower.mhla is None:
            tower.mhla = options if named else InheritedOptions(options)
            if not named:
                tower.mhla.is_text = tower is text
                tower.mhla.optional = optional or tower is not text
        elif given is not None and not may_keep_softmax(tower):
            tower.mhla = options
    if text is not config or named:
        config.mhla = None


def keep_softmax(name: str, config: Any, implementation: str, reason: str) -> None:
    """Let one tower of a model keep softmax, and says so in one line.

    Args:
        name: Its name in the line.
        config: The tower's configuration.
        implementation: The attention that it uses instead.
        reason: Reason for it.
    """
    config.mhla = None
    if attention_of(config) == NAME:
        set_attention(config, implementation)
    # Its own model may have marked it before it turned out that it has nothing that can be MHLA.
    mark(config)
    logger.warning_once(f"{name} keeps softmax: {reason}. The parts of this model that can be MHLA are.")


def keep_softmax_in_unserved(model: Any) -> None:
    """Take the request from towers that have no attention of their own, if a whole model was asked.

    Raises:
        ValueError: If such a tower was named.
    """
    for name, tower in towers_of(model.config).items():
        if attention_of(tower) != NAME or towers_of(tower):
            continue
        which, reason = f"{name} of {type(model).__name__}", "it has no attention that can be MHLA"
        if may_keep_softmax(tower):
            keep_softmax(which, tower, "sdpa", reason)
        elif tower.mhla is None and any(getattr(module, "config", None) is tower for module in model.modules()):
            raise ValueError(f"{which} cannot use attn_implementation='mhla': {reason}.")


def mark(config: Any) -> None:
    """Write the attention implementation and the refusal into the configuration that is saved.

    Libraries and readers without this package then stop with an error instead of loading the model as softmax.
    """
    found = implementations(config)
    if found:
        config.attn_implementation = found
    else:
        config.__dict__.pop("attn_implementation", None)
    _mark_refusal(config)


def _mark_refusal(config: Any) -> bool:
    """Set the entry of `mhla_hf.models.stub` on a configuration and on its towers, which may be loaded alone."""
    towers = [_mark_refusal(tower) for tower in towers_of(config).values()]
    is_mhla = getattr(config, "mhla", None) is not None or any(towers)
    if is_mhla:
        config.__dict__["transformers_weights"] = REFUSAL
    elif getattr(config, "transformers_weights", None) is None:
        config.__dict__.pop("transformers_weights", None)
    return is_mhla


def implementations(config: Any) -> Any:
    """`"mhla"`, a dict of towers, or None."""
    own = NAME if getattr(config, "mhla", None) is not None else None
    found = {name: implementations(tower) for name, tower in towers_of(config).items()}
    found = {name: value for name, value in found.items() if value}
    if not towers_of(config):
        return own
    # The empty name is that of the model's own layers.
    return {**({"": own} if own else {}), **found} or None


def remember(config: Any) -> list[tuple[Any, Any, Any]]:
    """Options and implementations of a configuration and its towers, for [`restore`]."""
    entries = [(config, getattr(config, "mhla", None), attention_of(config))]
    return entries + [entry for tower in towers_of(config).values() for entry in remember(tower)]


def restore(entries: list[tuple[Any, Any, Any]]) -> None:
    """Restore the state of [`remember`]."""
    for config, mhla, implementation in entries:
        config.mhla = mhla
        set_attention(config, implementation)


# Checks.

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
    # Of a list that the weights know nothing of, all is new, as it may be in the head of another task.
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
        ValueError: See [`check_new_size`][mhla_hf.models.weight_files.check_new_size].
    """
    if any(".mhla." in key for key in missing_keys):
        shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        check_new_size({name: shape for name, shape in shapes.items() if ".mhla." not in name}, shapes)


def _layer(name: str) -> str:
    """Return a tensor's name up to the first number in it; empty without one."""
    match = _NUMBER.search(name)
    return "" if match is None else name[: match.end()]
