# SPDX-License-Identifier: Apache-2.0
"""Options of transformers models that ask for MHLA: the defaults of each kind of model under the given options."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from transformers.utils import logging

from ...config import WINDOW_OPTIONS, MHLAConfig, with_overrides
from ...layers.mixing import resolve_blocks, with_window_size
from ...ops.definitions import SEQUENCE_NORMALIZERS
from ...utils.options import check_names


logger = logging.get_logger(__name__)

# As many rows of mixing weights as are learned; longer texts go by distance.
MAX_SEQUENCE_BLOCKS = 64
MAX_CAUSAL_BLOCKS = 32
SMALLEST_CAUSAL_BLOCK = 64
SMALLEST_ENCODER_BLOCK = 8
_ALL_OPTIONS = tuple(MHLAConfig().to_dict())
# What models do that were made before there were these options.
_ADDED_OPTIONS = {
    "mixing_storage": "matrix",
    "mixing_tail": "constant",
    "mixing_tail_half_life": None,
    "text": "softmax",
    "window_share": "head",
    "sink_tokens": 0,
}
# Options that leave the shapes of the weights alone and change what they compute.
_TRAINED_WITH = (
    "feature_map", "feature_map_eps", "normalizer", "rope", "block_size", "mixing_constraint", "mixing_tail", "layers",
    *WINDOW_OPTIONS,
)  # fmt: skip
_NULLABLE = ("layers", "mixing_range", "lepe_kernel", "window", "window_size")


def is_complete(options: Any) -> bool:
    """Return whether options are those of a model that was built, with every one given."""
    return isinstance(options, Mapping) and options.keys() | _ADDED_OPTIONS.keys() == set(_ALL_OPTIONS)


def warn_of_changes(stored: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Warn of options that change the meaning of stored weights."""
    stored = {**_ADDED_OPTIONS, **stored}
    # A window that was not there has a warning of its own, about its fresh bias.
    added = WINDOW_OPTIONS if stored["window"] is None else ()
    changed = [name for name in _TRAINED_WITH if name in given and name not in added and given[name] != stored[name]]
    if changed:
        made_with = ", ".join(f"{name}={stored[name]!r}" for name in changed)
        logger.warning(
            "The MHLA options of this model were %s; the ones given change what its weights mean.", made_with
        )


def causal_defaults(head_dim: int, max_positions: int | None) -> dict[str, Any]:
    """Return the defaults for causal language models.

    Real language models attend to the tokens nearby and, with half of their attention, to the first one: both are
    exact, by a window and a sink (docs/results/real_models.md). MHLA has the blocks of the window, whose weights can
    then leave to the window what it sees.

    A block's summary has 2K·(K + 1) numbers for a head (hedgehog features are twice as wide as keys), a KV cache
    2K·(tokens). With blocks of K tokens the state is as large as a KV cache of the same dtype for texts of as many
    blocks as have weights, and stops growing there: 2,048 tokens for K = 64. Weights by distance with a decaying tail
    gave the lowest loss, at the trained length and beyond it (docs/results/language.md, "Tails of mixing weights").
    The window's share by query takes SmolLM2, calibrated in 22 of 30 layers, from 1.9 to 1.2 % above softmax at 2,048
    tokens, and from 0.9 to 0.5 % at 512.

    Args:
        head_dim: K.
        max_positions: Longest text that the model was made for, or None.
    """
    block = max(SMALLEST_CAUSAL_BLOCK, head_dim)
    blocks = min(MAX_CAUSAL_BLOCKS, max(1, math.ceil((max_positions or block * MAX_CAUSAL_BLOCKS) / block)))
    mixing = {"mixing_init": "uniform", "mixing_storage": "distance", "mixing_tail": "decay"}
    window = {"window": "adjacent", "window_share": "query", "sink_tokens": 1}
    return {"block_size": [block], "grid": [block * blocks], **window, **mixing}


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
    known = {name: value for name, value in options.items() if value is not None or name in _NULLABLE}
    merged = with_overrides(defaults, known)
    if merged.get("mixing_init") == "uniform" and "mixing_range" not in options:
        merged["mixing_range"] = None
    block = MHLAConfig.from_dict({"block_size": merged["block_size"]}).block_size
    if options.get("block_size") is not None and block is not None:
        longest = block[0] * (MAX_CAUSAL_BLOCKS if causal else MAX_SEQUENCE_BLOCKS)
        if options.get("grid") is None:
            merged["grid"] = [max(block[0], min(positions or longest, longest))]
        if causal and "window" not in options and options.get("window_size") is None:
            # Larger blocks than the default ones leave the default window as it is.
            merged["window_size"] = [min(block[0], defaults["block_size"][0])]
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
