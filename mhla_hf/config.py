# SPDX-License-Identifier: Apache-2.0
"""`MHLAConfig`: every option of Multi-Head Linear Attention, validated when it is made."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import sys
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from .layouts import MAX_BLOCKS, MAX_TOKENS
from .layouts.windows import WINDOW_GAINS, WINDOWS, check_window
from .ops import BACKENDS
from .ops.feature_maps import FEATURE_MAPS
from .ops.normalizers import NORMALIZERS
from .utils.messages import check_choice, shorten_list, shorten_value


ROPE_ORDERS = ("after_feature_map", "before_feature_map")
MIXING_INITS = ("linear", "cos", "exp", "gaussian", "local", "uniform")
MIXING_HEADS = ("shared", "per_head")
MIXING_CONSTRAINTS = ("none", "nonnegative")
RESIZE_MODES = ("auto", "blocks", "block_size", "extend")

CHOICES: dict[str, tuple[str, ...]] = {
    "feature_map": tuple(FEATURE_MAPS),
    "rope": ROPE_ORDERS,
    "normalizer": tuple(NORMALIZERS),
    "mixing_init": MIXING_INITS,
    "mixing_heads": MIXING_HEADS,
    "mixing_constraint": MIXING_CONSTRAINTS,
    "resize": RESIZE_MODES,
    "backend": BACKENDS,
    "window": WINDOWS,
    "window_gains": WINDOW_GAINS,
}
"""Allowed values of the options that are names. `window` may also be `None`."""

# Weights of the depthwise convolution for each channel.
MAX_LEPE_WEIGHTS = 2**15
_AXES = ("blocks", "block_size", "grid")
_FRACTION = re.compile(r"\s*(\d{1,9})\s*/\s*(\d{1,9})\s*")
_FLAGS = ("output_norm", "output_gate", "causal")


@dataclass(frozen=True, kw_only=True)
class MHLAConfig:
    """Options of Multi-Head Linear Attention (MHLA, arXiv 2601.07832).

    The configuration is immutable; [`MHLAConfig.replace`] returns a changed copy. It is stored as plain JSON under
    the key `mhla` of a model's own `config.json`. Wherever an `MHLAConfig` is taken, a dict is taken too.

    Args:
        feature_map: The map φ applied to queries and keys, the name of an entry of [`mhla_hf.ops.FEATURE_MAPS`]:
            `"relu"`, `"exp"` or the learned `"hedgehog"` for example.
        rope: `"after_feature_map"` rotates φ(q) and φ(k) for the numerator and leaves the normaliser unrotated, so
            that it stays positive. `"before_feature_map"` rotates q and k first and uses φ of that everywhere.
        normalizer: The divisor of each token's output, the name of an entry of [`mhla_hf.ops.NORMALIZERS`]: `"query"`
            (the paper), `"block_query"` (the authors' image code; blocks of equal shape only) or `"none"` (their video
            and language weights) for example.
        mixing_init: How the mixing weights start: `"linear"` (the paper's locality bias), `"cos"`, `"exp"`,
            `"gaussian"`, `"local"` (own and adjacent blocks only) or `"uniform"` (equal weights: vanilla linear
            attention exactly). Rows sum to one.
        mixing_heads: One mixing matrix a layer (`"shared"`) or one a feature head (`"per_head"`).
        mixing_constraint: `"none"` stores the weights as they are; `"nonnegative"` stores them through a softplus
            so that they stay positive and none of them ever stops learning.
        mixing_range: Distance in blocks over which the locality bias falls off; under `"linear"` the bias reaches its
            floor (a hundredth of the own block's weight) there. `None` is the paper's: the farthest block of each
            row, and no floor.
        feature_map_eps: Added to φ(q) and φ(k). The authors' Wan checkpoints need 1e-6.
        eps: Added to the normaliser before dividing.
        blocks: Number of blocks along each axis of the token grid.
        block_size: Number of tokens of a block along each axis. Give `blocks` or `block_size`, not both; when
            neither is given the model picks a number of blocks M with M² ≤ T.
        grid: The token grid that the mixing weights were made for. `block_size` needs it (models know a default);
            with `blocks` it tells from which size on `resize="auto"` resamples. Models whose configuration tells the
            size of their images take that for `blocks` given without it; `blocks` of other models then keep their
            number at any size.
        resize: What happens at another token grid. `"blocks"` keeps the number of blocks and changes their size,
            `"block_size"` keeps the size and resamples the mixing weights over relative block coordinates,
            `"auto"` is `"block_size"` where an axis changed twofold or more against `grid` and `"blocks"` otherwise.
            `"extend"` is for sequences: block boundaries are counted from the first token, whatever the length; the
            leading weights are used, and pairs of blocks past them go by distance. Causal attention always does that.
        output_norm: RMSNorm over each feature head of the output.
        output_gate: Multiply the output by SiLU(linear(hidden states)).
        lepe_kernel: Odd kernel width of a depthwise convolution of the values over the token grid, added to the
            output; `None` for no convolution.
        window: Exact softmax attention over the tokens near a query, beside MHLA and with a normaliser of its own:
            `"block"` (own block of the window's layout), `"adjacent"` (own block and its neighbours on every axis,
            diagonal ones too; under `causal=True` own block up to the token and the block before it) or `"cross"`
            (for three axes: the blocks around it in the same frames, and the same place in all frames). The output is
            g₀ · MHLA + g₁ · window with learned gains that start at 1 and 0. `None` for no window.
        window_size: Number of tokens of a block of the window along each axis, whatever the blocks of MHLA; the last
            block of an axis may be shorter. `None` is MHLA's block size for sequences and else makes about 200 tokens
            that a query sees: (192,), (14, 14) or (21, 3, 3) for `"block"`, (64,), (5, 5) or (2, 2, 2) for
            `"adjacent"`, (1, 3, 3) for `"cross"`.
        window_gains: One pair of gains a feature head (`"per_head"`) or a channel of one (`"per_channel"`).
        layers: The layers that are MHLA; the others stay softmax. Indices, a fraction such as `"2/3"` (see
            [`parse_layers`][mhla_hf.config.parse_layers]; a model keeps the indices), or `None` for every layer.
        causal: Blocks are consecutive chunks of `block_size` tokens and attention only looks back.
        backend: What computes the operator: `"torch"`, `"triton"` (kernels for GPUs) or `"auto"`, which picks by
            device and dtype. Results agree up to rounding, so any checkpoint runs with any backend. The environment
            variable `MHLA_HF_BACKEND` wins over it.

    Raises:
        ValueError: If an option has a value outside its allowed ones; the message names both.
        TypeError: If an unknown option is passed to the constructor ([`MHLAConfig.from_dict`] raises `ValueError`).

    Examples:
        >>> from mhla_hf import MHLAConfig
        >>> config = MHLAConfig(blocks=(3, 5, 10), output_gate=True)
        >>> config.to_dict()["blocks"]
        [3, 5, 10]
        >>> config.replace(lepe_kernel=3).output_gate
        True
    """

    feature_map: str = "relu"
    rope: str = "after_feature_map"
    normalizer: str = "query"
    mixing_init: str = "linear"
    mixing_heads: str = "shared"
    mixing_constraint: str = "none"
    mixing_range: float | None = None
    feature_map_eps: float = 0.0
    eps: float = 1e-6
    blocks: tuple[int, ...] | None = None
    block_size: tuple[int, ...] | None = None
    grid: tuple[int, ...] | None = None
    resize: str = "auto"
    output_norm: bool = False
    output_gate: bool = False
    lepe_kernel: int | None = None
    window: str | None = None
    window_size: tuple[int, ...] | None = None
    window_gains: str = "per_head"
    layers: tuple[int, ...] | str | None = None
    causal: bool = False
    backend: str = "auto"

    def __new__(cls, **options: Any) -> MHLAConfig:
        config = object.__new__(cls)
        object.__setattr__(config, "_given", tuple(options))
        return config

    def __post_init__(self) -> None:
        for name, allowed in CHOICES.items():
            if name != "window":
                check_choice(name, getattr(self, name), allowed)
            elif self.window is not None:
                check_choice(name, self.window, allowed, ", or None")
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}={shorten_value(getattr(self, name))} must be True or False.")
        for name in (*_AXES, "window_size"):
            self._set(name, _axis_tuple(name, getattr(self, name)))
        self._set("layers", _layers(self.layers))
        for name in ("eps", "feature_map_eps"):
            self._set(name, _number(name, getattr(self, name), minimum=0.0))
        if self.mixing_range is not None:
            self._set("mixing_range", _number("mixing_range", self.mixing_range, minimum=0.0, exclusive=True))
        self._check_lepe_kernel()
        self._check_axes()
        given = next((len(value) for value in (self.blocks, self.block_size, self.grid) if value is not None), None)
        check_window(self.window, self.window_size, 1 if self.is_sequence else given)

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _check_lepe_kernel(self) -> None:
        kernel = self.lepe_kernel
        if kernel is None:
            return
        if isinstance(kernel, bool) or not isinstance(kernel, Integral) or kernel < 1 or kernel % 2 == 0:
            raise ValueError(f"lepe_kernel={shorten_value(kernel)} must be an odd integer of at least 1, or None.")
        axes = next((len(getattr(self, name)) for name in _AXES if getattr(self, name) is not None), 1)
        if kernel > MAX_LEPE_WEIGHTS or kernel**axes > MAX_LEPE_WEIGHTS:
            raise ValueError(
                f"lepe_kernel={shorten_value(kernel)} has more than {MAX_LEPE_WEIGHTS} weights for each channel over "
                f"{axes} axes."
            )
        self._set("lepe_kernel", int(kernel))

    def _check_axes(self) -> None:
        if self.blocks is not None and self.block_size is not None:
            raise ValueError(
                f"Give blocks or block_size, not both (got blocks={shorten_value(self.blocks)}, "
                f"block_size={shorten_value(self.block_size)})."
            )
        lengths = {name: len(getattr(self, name)) for name in _AXES if getattr(self, name) is not None}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"blocks, block_size and grid must have one entry per axis each, got lengths {lengths}.")
        self._check_sizes()
        if self.blocks is not None and self.grid is not None:
            too_many = [axis for axis, (b, g) in enumerate(zip(self.blocks, self.grid)) if b > g]
            if too_many:
                raise ValueError(f"blocks={self.blocks} has more blocks than grid={self.grid} has tokens on an axis.")
        if self.resize == "block_size" and self.blocks is not None and self.grid is None:
            raise ValueError("resize='block_size' needs grid, the token grid that blocks was chosen for.")
        if self.is_sequence:
            self._check_sequence(lengths)
        if self.mixing_range is not None and self.mixing_init == "uniform":
            warnings.warn("mixing_range has no effect with mixing_init='uniform'.", stacklevel=3)

    def _check_sizes(self) -> None:
        if self.grid is not None and math.prod(self.grid) > MAX_TOKENS:
            raise ValueError(f"grid={shorten_value(self.grid)} has more than {MAX_TOKENS} tokens.")
        blocks = self.blocks
        if blocks is None and self.block_size is not None and self.grid is not None:
            blocks = tuple(-(-length // size) for length, size in zip(self.grid, self.block_size))
        if blocks is not None and math.prod(blocks) > MAX_BLOCKS:
            name = "blocks" if self.blocks is not None else "block_size"
            raise ValueError(
                f"{name}={shorten_value(getattr(self, name))} makes more than {MAX_BLOCKS} blocks; the mixing weights "
                "of a layer have the square of their number."
            )

    def _check_sequence(self, lengths: dict[str, int]) -> None:
        option = "causal=True" if self.causal else "resize='extend'"
        if self.block_size is None:
            raise ValueError(f"{option} needs block_size: block boundaries must not move with the length.")
        if any(length != 1 for length in lengths.values()):
            raise ValueError(f"{option} needs a 1-D layout: blocks, block_size and grid with a single entry.")
        if self.lepe_kernel is not None:
            raise ValueError(
                f"lepe_kernel must be None with {option}: its convolution looks at padding and later tokens."
            )

    @property
    def is_sequence(self) -> bool:
        """Whether tokens are a sequence in blocks of fixed size, as many as it needs (causal or `resize="extend"`)."""
        return self.causal or self.resize == "extend"

    def to_dict(self) -> dict[str, Any]:
        """Returns every option as plain JSON types (tuples become lists)."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}

    def given_options(self) -> dict[str, Any]:
        """Returns the options that the constructor was called with, as plain JSON types; models default the others."""
        options = self.to_dict()
        return {name: options[name] for name in options if name in self.__dict__["_given"]}

    def to_json_string(self) -> str:
        """Returns the options as indented JSON with sorted keys."""
        return json.dumps(self.to_dict(), indent=2, sort_keys=True)

    @classmethod
    def from_dict(cls, options: Mapping[str, Any]) -> MHLAConfig:
        """Builds a configuration from plain JSON types.

        Args:
            options: Any subset of the options; the others take their defaults.

        Raises:
            ValueError: If a key is unknown (the message lists the known ones) or a value is not allowed.
        """
        if not isinstance(options, Mapping):
            raise ValueError(f"mhla options must be a dict or an MHLAConfig, got {type(options).__name__}.")
        known = [field.name for field in dataclasses.fields(cls)]
        unknown = sorted(set(map(str, options)) - set(known))
        if unknown:
            raise ValueError(f"Unknown mhla option(s) {shorten_list(unknown)}. Known options: {', '.join(known)}.")
        return cls(**options)

    @classmethod
    def coerce(cls, options: MHLAConfig | Mapping[str, Any] | None) -> MHLAConfig:
        """Returns `options` as an `MHLAConfig`: itself, built from a dict, or the defaults for `None`."""
        if isinstance(options, MHLAConfig):
            return options
        return cls.from_dict({} if options is None else options)

    def replace(self, **changes: Any) -> MHLAConfig:
        """Returns a copy with some options changed; the copy is validated like a new configuration."""
        return type(self).from_dict(laid_over(self.given_options(), changes))

    def mhla_layers(self, num_layers: int) -> list[int]:
        """Returns the indices of the MHLA layers in a model of `num_layers` layers.

        Raises:
            ValueError: If `layers` names a layer that the model does not have, or is a fraction that selects none.
        """
        layers = parse_layers(self.layers, num_layers)
        return list(range(num_layers)) if layers is None else layers


def laid_over(stored: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Lays `given` options over `stored` ones; taking the window away takes its stored size with it."""
    merged = {**stored, **given}
    if "window" in given and given["window"] is None and "window_size" not in given:
        merged["window_size"] = None
    return merged


def _axis_tuple(name: str, value: Any) -> tuple[int, ...] | None:
    if value is None:
        return None
    if isinstance(value, Integral) and not isinstance(value, bool):
        value = (value,)
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes)) or not 1 <= len(value) <= 3:
        raise ValueError(
            f"{name}={shorten_value(value)} must be one to three positive integers, one for each axis of the grid."
        )
    if any(isinstance(entry, bool) or not isinstance(entry, Integral) or entry < 1 for entry in value):
        raise ValueError(f"{name}={shorten_value(tuple(value))} must hold positive integers only.")
    return tuple(int(entry) for entry in value)


def parse_layers(layers: str | Iterable[int] | None, num_layers: int) -> list[int] | None:
    """Reads the choice of layers that become MHLA.

    Args:
        layers: `None` or `"all"` for every layer; indices as `"1,2,4"` or as integers; or a fraction `"p/q"`: of each
            q layers in a row the first q - p stay softmax, so `"2/3"` keeps 0, 3, 6, … as the authors' hybrid does.
        num_layers: Number of layers of the model.

    Returns:
        Sorted indices, or `None` for every layer.

    Raises:
        ValueError: If the text is none of these, names a layer twice or one that is not there, or selects none.
    """
    chosen = _layers(layers)
    if isinstance(chosen, str):
        part, whole = map(int, chosen.split("/"))
        indices = [index for index in range(num_layers) if index % whole >= whole - part]
        if not indices:
            raise ValueError(f"layers={chosen} selects none of the model's {num_layers} layers.")
        return None if len(indices) == num_layers else indices
    beyond = [index for index in chosen or () if index >= num_layers]
    if beyond:
        raise ValueError(f"layers names {shorten_list(beyond)}, but the model has layers 0 to {num_layers - 1}.")
    return None if chosen is None else list(chosen)


def _layers(layers: Any) -> tuple[int, ...] | str | None:
    """A choice of layers for a model of any depth: indices, a fraction as text, or `None` for every layer."""
    if layers is None or layers == "all":
        return None
    if isinstance(layers, str):
        fraction = _FRACTION.fullmatch(layers)
        if fraction:
            part, whole = int(fraction[1]), int(fraction[2])
            if not 0 < part <= whole:
                raise ValueError(f"layers={part}/{whole} must be a fraction above 0 and at most 1.")
            return f"{part}/{whole}"
        parts = [part.strip() for part in layers.split(",")]
        # Python refuses to convert thousands of digits.
        if not all(part.isdecimal() and len(part) < 10 for part in parts):
            raise ValueError(
                f"layers={layers!r:.100} must be all, layer indices such as 1,2,4, or a fraction such as 2/3."
            )
        layers = [int(part) for part in parts]
    try:
        layers = list(None if isinstance(layers, bytes) else layers)  # type: ignore[arg-type]
    except TypeError as error:
        raise ValueError(
            f"layers={shorten_value(layers)} must be indices, a fraction such as 2/3, or None for all."
        ) from error
    if any(isinstance(index, bool) or not isinstance(index, Integral) for index in layers):
        raise ValueError(f"layers={shorten_value(layers)} must hold integers.")
    negative = [index for index in layers if index < 0]
    if negative:
        raise ValueError(f"layers names {shorten_list(negative)}, but layers are counted from 0.")
    repeated = [index for index, count in Counter(layers).items() if count > 1]
    if repeated:
        raise ValueError(f"layers names {shorten_list(repeated)} twice.")
    if not layers:
        raise ValueError("layers is empty: no layer would become MHLA.")
    return tuple(sorted(int(index) for index in layers))


def _number(name: str, value: Any, *, minimum: float, exclusive: bool = False) -> float:
    valid = isinstance(value, Real) and not isinstance(value, bool)
    # Integers beyond the largest float count as infinite.
    if not valid or not (value > minimum if exclusive else value >= minimum) or value > sys.float_info.max:
        raise ValueError(
            f"{name}={shorten_value(value)} must be a finite number "
            f"{'above' if exclusive else 'of at least'} {minimum:g}."
        )
    return float(value)
