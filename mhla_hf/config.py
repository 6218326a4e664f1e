# SPDX-License-Identifier: Apache-2.0
"""`MHLAConfig`: every option of Multi-Head Linear Attention, validated when it is made."""

from __future__ import annotations

import json
import math
import re
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from .layouts import MAX_BLOCKS, MAX_TOKENS
from .ops.definitions import BACKENDS, FEATURE_MAPS, NORMALIZERS
from .utils.messages import check_choice, shorten_list, shorten_value
from .utils.options import Options, option


MIXING_INITS = ("linear", "cos", "exp", "gaussian", "local", "uniform")
WINDOWS = ("block", "adjacent", "cross")
WINDOW_OPTIONS = ("window", "window_size", "window_share", "sink_tokens")
TEXTS = ("softmax", "block")
MEASURES = ("lookup", "error")
"""By what layers are chosen to stay softmax: look-up of repeated text, or the error that MHLA leaves."""
MAX_WINDOW_TOKENS = 2**14
"""Tokens of one block of a window: each of them attends to all of them."""
# Weights of the depthwise convolution for each channel.
MAX_LEPE_WEIGHTS = 2**15
# About the smallest number that has a reciprocal in float32.
SMALLEST_EPS = 1e-38
# About 200 tokens in the window of a query, which is what a window of a large model needs to matter. Own blocks reach
# over the 21 latent frames of Wan, since those that do were the better ones.
_DEFAULT_SIZES = {
    ("block", 1): (192,),
    ("block", 2): (14, 14),
    ("block", 3): (21, 3, 3),
    ("adjacent", 1): (64,),
    ("adjacent", 2): (5, 5),
    ("adjacent", 3): (2, 2, 2),
    ("cross", 3): (1, 3, 3),
}
_AXES = ("blocks", "block_size", "grid")
_SHARE = re.compile(r"\s*(\d{1,3}(?:\.\d{1,20})?)\s*(%?)\s*")
_FRACTION = re.compile(r"\s*(\d{1,9})\s*/\s*(\d{1,9})\s*")
# Python refuses to convert thousands of digits.
_ENTRY = re.compile(r"\s*([0-9]{1,9})(?:\.([0-9]{1,9}))?\s*")


@dataclass(frozen=True, kw_only=True)
class MHLAConfig(Options):
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
            attention exactly). Rows sum to one; with `mixing_storage="distance"` the last one does.
        mixing_heads: One mixing matrix a layer (`"shared"`) or one a feature head (`"per_head"`).
        mixing_constraint: `"none"` stores the weights as they are; `"nonnegative"` stores them through a softplus
            so that they stay positive and none of them ever stops learning.
        mixing_range: Distance in blocks over which the locality bias falls off; under `"linear"` the bias reaches its
            floor (a hundredth of the own block's weight) there. `None` is the paper's: the farthest block of each
            row, and no floor.
        mixing_storage: `"matrix"` stores a weight for each pair of blocks; `"distance"`, for `causal=True`, one for
            each distance, M in place of M².
        mixing_tail: For sequences, the weight of blocks that are farther away than the stored weights reach: the
            farthest one (`"constant"`), the same falling by a factor from block to block (`"decay"`), which texts of
            more blocks train, or nothing (`"none"`).
        mixing_tail_half_life: Distance in blocks over which a decaying tail halves at first; `None` for 8.
        feature_map_eps: Added to φ(q) and φ(k). The authors' Wan checkpoints need 1e-6.
        eps: Added to the normaliser before dividing. In joint attention calibration scales the mean normaliser of a
            head to 1, which makes it relative: 0.05 is a floor that keeps outputs and gradients finite.
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
            `"extend"` is for sequences: block boundaries are counted from the first token at every length; the
            leading weights are used, and pairs of blocks past them go by distance. Causal attention always does that.
        output_norm: RMSNorm over each feature head of the output.
        output_gate: Multiply the output by SiLU(linear(hidden states)).
        lepe_kernel: Odd kernel width of a depthwise convolution of the values over the token grid, added to the
            output; `None` for no convolution.
        window: Exact softmax attention over the tokens near a query, beside MHLA:
            `"block"` (own block of the window's layout), `"adjacent"` (own block and its neighbours on every axis,
            diagonal ones too; under `causal=True` own block up to the token and the block before it) or `"cross"`
            (for three axes: the blocks around it in the same frames, and the same place in all frames). The output is
            a · window + (1 - a) · MHLA with the share a that softmax attention gives to these tokens, estimated for
            each query. `None` for no window.
        window_size: Number of tokens of a block of the window along each axis, independent of MHLA's blocks; the last
            block of an axis may be shorter. `None` is MHLA's block size for sequences and else makes about 200 tokens
            that a query sees: (192,), (14, 14) or (21, 3, 3) for `"block"`, (64,), (5, 5) or (2, 2, 2) for
            `"adjacent"`, (1, 3, 3) for `"cross"`.
        window_share: What corrects the estimate of that share: a bias b for each head (`"head"`), or b + u·q with a
            vector u for each head and the query q as MHLA takes it, before a rotation after the feature map
            (`"query"`), the default of new language models. No effect without a window.
        sink_tokens: Number of first tokens that every window has beside those near a query, exactly, and that are left
            out of MHLA: of each document of a sequence, at most a block of the window (1 or 4 for language models,
            which put up to half of their attention there), or of the tokens before a grid. Needs `window`.
        text: Text in joint attention, whose tokens are beside those of the grid: `"softmax"` (exact softmax over the
            text and from it, joined with MHLA over the grid by the share that softmax attention gives to the text,
            estimated for each query) or `"block"` (a block of its own in MHLA). No effect where attention sees no
            text.
        layers: The layers that are MHLA; the others stay softmax. Indices, a fraction such as `"2/3"` (see
            [`parse_layers`][mhla_hf.config.parse_layers]; a model keeps the indices), or `None` for every layer.
        causal: Blocks are consecutive chunks of `block_size` tokens and attention only looks back.
        backend: What computes the operator: `"torch"`, `"triton"` (kernels for GPUs) or `"auto"`, which picks by
            device and dtype. Results agree up to rounding, so any checkpoint runs with any backend. The environment
            variable `MHLA_HF_BACKEND` wins over it. On a GPU it is read when calls of a kind are new.

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

    _kind = "mhla"

    feature_map: str = option("relu", "Feature map φ of queries and keys.", choices=tuple(FEATURE_MAPS))
    rope: str = option(
        "after_feature_map",
        "Whether rotary embeddings act on φ(q) and φ(k) or before φ.",
        choices=("after_feature_map", "before_feature_map"),
    )
    normalizer: str = option("query", "Divisor of each token's output.", choices=tuple(NORMALIZERS))
    mixing_init: str = option(
        "linear", "Initial mixing weights, by the distance between blocks.", choices=MIXING_INITS
    )
    mixing_heads: str = option("shared", "One mixing matrix per layer or per head.", choices=("shared", "per_head"))
    mixing_constraint: str = option(
        "none", "Constraint on the mixing weights.", choices=("none", "nonnegative"), advanced=True
    )
    mixing_range: float | None = option(
        None, "Distance in blocks at which the initial locality bias reaches its floor.", above=0, advanced=True
    )
    mixing_storage: str = option(
        "matrix",
        "One mixing weight per pair of blocks or per distance.",
        choices=("matrix", "distance"),
        advanced=True,
    )
    mixing_tail: str = option(
        "constant",
        "Weight of blocks of a sequence beyond the stored weights.",
        choices=("constant", "decay", "none"),
        advanced=True,
    )
    mixing_tail_half_life: float | None = option(
        None, "Initial distance in blocks over which a decaying tail halves.", minimum=0.01, maximum=1e6, advanced=True
    )
    feature_map_eps: float = option(0.0, "Constant added to φ(q) and φ(k).", minimum=0, advanced=True)
    eps: float = option(1e-6, "Constant added to the normaliser.", minimum=0, advanced=True)
    blocks: tuple[int, ...] | None = option(
        None, "Number of blocks per axis: frames,height,width, such as 3,5,10; height,width for images.", minimum=1
    )
    block_size: tuple[int, ...] | None = option(
        None, "Tokens per block and axis, in place of blocks: such as 7,6,5; one number for text.", minimum=1
    )
    grid: tuple[int, ...] | None = option(
        None,
        "Token grid that the mixing weights are made for: frames,height,width; one number (a length) for text.",
        minimum=1,
    )
    resize: str = option(
        "auto",
        "What stays the same on another token grid.",
        choices=("auto", "blocks", "block_size", "extend"),
        advanced=True,
    )
    output_norm: bool = option(False, "RMSNorm on each head's output.")
    output_gate: bool = option(False, "SiLU gate on the output.")
    lepe_kernel: int | None = option(
        None, "Odd kernel size of a depthwise convolution of the values (LePE).", minimum=1
    )
    window: str | None = option(None, "Exact softmax attention near each token, beside MHLA.", choices=WINDOWS)
    window_size: tuple[int, ...] | None = option(
        None,
        "Tokens per block and axis of the window: frames,height,width, such as 1,3,3; one number for text.",
        minimum=1,
    )
    window_share: str = option(
        "head", "Whether the share of the window has a bias by head, or by query too.", choices=("head", "query")
    )
    sink_tokens: int = option(0, "First tokens of a text that every window has, exactly: 1 or 4.", minimum=0)
    text: str = option("softmax", "Text in joint attention: exact softmax, or a block of MHLA.", choices=TEXTS)
    layers: str | tuple[Any, ...] | None = option(
        None,
        "Layers that become MHLA: all, indices such as 1,2,4, or a fraction: 2/3 keeps layers 0, 3, 6, … softmax. Of "
        "language models also groups of heads: 4.0 is the one of key/value head 0 in layer 4.",
    )
    causal: bool = option(False, "Attend to earlier tokens only.", advanced=True)
    backend: str = option("auto", "Implementation of the operator.", choices=BACKENDS, advanced=True)

    def __new__(cls, **options: Any) -> MHLAConfig:
        config = object.__new__(cls)
        object.__setattr__(config, "_given", tuple(options))
        return config

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", _layers(self.layers))
        super().__post_init__()
        axes = self._check_axes()
        if self.is_sequence:
            self._check_sequence(axes)
        self._check_mixing()
        if self._may_divide_by_zero():
            raise ValueError(
                f"eps={self.eps} must be at least {SMALLEST_EPS} with feature_map={self.feature_map!r}, whose "
                "features may all be zero: 0 / 0 is no number."
            )
        self._check_lepe_kernel(axes or 1)
        check_window(self.window, self.window_size, 1 if self.is_sequence else axes)
        self._check_sinks()
        if self.mixing_range is not None and self.mixing_init == "uniform":
            warnings.warn("mixing_range has no effect with mixing_init='uniform'.", stacklevel=3)

    def _check_axes(self) -> int | None:
        """Check the sizes along the axes against each other; return the number of axes if one of them tells it."""
        if self.blocks is not None and self.block_size is not None:
            raise ValueError(
                f"Give blocks or block_size, not both (got blocks={shorten_value(self.blocks)}, "
                f"block_size={shorten_value(self.block_size)})."
            )
        given = {name: getattr(self, name) for name in (*_AXES, "window_size") if getattr(self, name) is not None}
        for name, sizes in given.items():
            if not 1 <= len(sizes) <= 3:
                raise ValueError(f"{name}={shorten_value(sizes)} must have one to three entries, one for each axis.")
        lengths = {name: len(sizes) for name, sizes in given.items() if name != "window_size"}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"blocks, block_size and grid must have one entry per axis each, got lengths {lengths}.")
        grid, blocks = self.grid, self.blocks
        if grid is not None and math.prod(grid) > MAX_TOKENS:
            raise ValueError(f"grid={shorten_value(grid)} has more than {MAX_TOKENS} tokens.")
        if blocks is not None and grid is not None and any(count > size for count, size in zip(blocks, grid)):
            raise ValueError(f"blocks={blocks} has more blocks than grid={grid} has tokens on an axis.")
        if blocks is not None and grid is None and self.resize == "block_size":
            raise ValueError("resize='block_size' needs grid, the token grid that blocks was chosen for.")
        if grid is not None and self.block_size is not None:
            blocks = tuple(-(-length // size) for length, size in zip(grid, self.block_size))
        if blocks is not None and math.prod(blocks) > MAX_BLOCKS:
            name = "blocks" if self.blocks is not None else "block_size"
            raise ValueError(
                f"{name}={shorten_value(given[name])} makes more than {MAX_BLOCKS} blocks; the mixing weights of a "
                "layer may have the square of their number."
            )
        return next(iter(lengths.values()), None)

    def _check_sequence(self, axes: int | None) -> None:
        mode = "causal=True" if self.causal else "resize='extend'"
        if self.block_size is None or axes != 1:
            raise ValueError(
                f"{mode} needs block_size with a single entry (a 1-D layout): block boundaries must not move with the "
                "length."
            )
        if self.lepe_kernel is not None:
            raise ValueError(
                f"lepe_kernel must be None with {mode}: its convolution looks at padding and later tokens."
            )

    def _check_mixing(self) -> None:
        if self.mixing_tail != "constant" and not self.is_sequence:
            raise ValueError(f"mixing_tail={self.mixing_tail!r} is for sequences (causal=True or resize='extend').")
        if self.mixing_storage != "matrix" and not self.causal:
            raise ValueError(f"mixing_storage={self.mixing_storage!r} needs causal=True.")
        if self.mixing_tail_half_life is not None and self.mixing_tail != "decay":
            raise ValueError(f"mixing_tail_half_life={self.mixing_tail_half_life} needs mixing_tail='decay'.")

    def _check_sinks(self) -> None:
        sinks, size = shorten_value(self.sink_tokens), self.window_size
        if self.sink_tokens and self.window is None:
            raise ValueError(
                f"sink_tokens={sinks} needs window, one of {', '.join(map(repr, WINDOWS))}: exact first tokens alone, "
                "without those near a query, make the error of a layer larger (1.24 of its variance in place of 0.69)."
            )
        if self.is_sequence and size is not None and self.sink_tokens > size[0]:
            raise ValueError(f"sink_tokens={sinks} must be at most a block of the window, window_size={size}.")
        if self.sink_tokens and self.normalizer != "none" and self.eps < SMALLEST_EPS:
            raise ValueError(
                f"eps={self.eps} must be at least {SMALLEST_EPS} with sink_tokens: MHLA of sinks is 0 / eps."
            )

    def _may_divide_by_zero(self) -> bool:
        """Whether a token whose features are all zero is divided by zero, or by what float32 has no reciprocal of."""
        has_zeros = self.feature_map in ("relu", "identity") and self.normalizer != "none"
        return has_zeros and self.eps + self.feature_map_eps**2 < SMALLEST_EPS

    def _check_lepe_kernel(self, axes: int) -> None:
        kernel = self.lepe_kernel or 1
        # Powers of huge numbers take forever.
        if kernel % 2 == 0 or min(kernel, MAX_LEPE_WEIGHTS + 1) ** axes > MAX_LEPE_WEIGHTS:
            raise ValueError(
                f"lepe_kernel={shorten_value(kernel)} must be an odd integer with at most {MAX_LEPE_WEIGHTS} weights "
                f"for each channel over {axes} axes."
            )

    @property
    def is_sequence(self) -> bool:
        """Whether tokens are a sequence in blocks of fixed size, as many as it needs (causal or `resize="extend"`)."""
        return self.causal or self.resize == "extend"

    def given_options(self) -> dict[str, Any]:
        """Return the options that the constructor was called with, as plain JSON types; models default the others."""
        return {name: value for name, value in self.to_dict().items() if name in self.__dict__["_given"]}

    def to_json_string(self) -> str:
        """Return the options as indented JSON with sorted keys."""
        return json.dumps(self.to_dict(), indent=2, sort_keys=True)

    @classmethod
    def coerce(cls, options: MHLAConfig | Mapping[str, Any] | None) -> MHLAConfig:
        """Return `options` as an `MHLAConfig`: itself, built from a dict, or the defaults for `None`."""
        if isinstance(options, MHLAConfig):
            return options
        return cls.from_dict({} if options is None else options)

    def replace(self, **changes: Any) -> MHLAConfig:
        """Return a copy with some options changed; the copy is validated like a new configuration."""
        return type(self).from_dict(with_overrides(self.given_options(), changes))

    def mhla_layers(self, num_layers: int) -> list[int]:
        """Return the indices of the MHLA layers in a model of `num_layers` layers, all of whose heads become MHLA.

        Raises:
            ValueError: If `layers` names a layer that the model does not have, or groups of heads, or is a fraction
                that selects none.
        """
        layers = parse_layers(self.layers, num_layers)
        if any(isinstance(entry, str) for entry in layers or ()):
            raise ValueError(f"layers={shorten_value(layers)}: only language models can have groups of heads as MHLA.")
        return list(range(num_layers)) if layers is None else layers


def with_overrides(stored: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return `stored` options with `given` ones in their place; a window or decay is removed with what needs it."""
    merged = {**stored, **given}
    if "window" in given and given["window"] is None:
        merged.update(window_size=given.get("window_size"), sink_tokens=given.get("sink_tokens", 0))
    if given.get("mixing_tail") not in (None, "decay") and "mixing_tail_half_life" not in given:
        merged["mixing_tail_half_life"] = None
    return merged


def merge_options(stored: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """As [`with_overrides`], but giving `blocks` drops a stored `block_size` and the other way round.

    Callers must verify that stored weights remain valid for the new blocks.
    """
    merged = with_overrides(stored, given)
    for name, other in (("blocks", "block_size"), ("block_size", "blocks")):
        if given.get(name) is not None and given.get(other) is None:
            merged[other] = None
    return merged


def parse_layers(layers: str | Iterable[int | str] | None, num_layers: int) -> list[Any] | None:
    """Read the choice of layers that become MHLA.

    Args:
        layers: `None` or `"all"` for every layer; indices as `"1,2,4"` or as integers; or a fraction `"p/q"`: of each
            q layers in a row the first q - p stay softmax, so `"2/3"` keeps 0, 3, 6, … as the authors' hybrid does.
            `"4.0"` names the key/value head 0 of layer 4 with its query heads; those not named stay softmax.
        num_layers: Number of layers of the model.

    Returns:
        Sorted indices, texts for groups of heads; or `None` for every layer.

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
    beyond = [index for index in layer_groups(chosen or ()) if index >= num_layers]
    if beyond:
        raise ValueError(f"layers names {shorten_list(beyond)}, but the model has layers 0 to {num_layers - 1}.")
    return None if chosen is None else list(chosen)


def automatic_share(layers: str) -> Fraction | None:
    """Read `auto:p/q`: the share p/q of the layers becomes MHLA, and the others are those worst to replace.

    `auto:p/q:lookup` and `auto:p/q:error` also say by what, see [`automatic_measure`].

    Returns:
        The share, or `None` for a choice that names the layers.

    Raises:
        ValueError: If it begins with `auto:`, and the rest is not a fraction above 0 and at most 1, and such a word.
    """
    text = layers.strip()
    if not text.startswith("auto:"):
        return None
    fraction, _, measure = text.removeprefix("auto:").partition(":")
    match = _FRACTION.fullmatch(fraction)
    if match is None or not 0 < int(match[1]) <= int(match[2]) or (measure or MEASURES[0]) not in MEASURES:
        raise ValueError(
            f"layers={layers!r:.100} must be a fraction above 0 and at most 1 after auto:, such as auto:2/3, "
            f"auto:2/3:{' or auto:2/3:'.join(MEASURES)}."
        )
    return Fraction(int(match[1]), int(match[2]))


def automatic_measure(layers: str) -> str | None:
    """By which of [`MEASURES`] layers are chosen under a valid `auto:`; `None` for the default of the model."""
    return layers.strip().partition(":")[2].partition(":")[2] or None


def layer_groups(layers: Iterable[int | str]) -> dict[int, tuple[int, ...]]:
    """The groups of heads that a choice names of each layer; none for layers that are named as a whole."""
    found: dict[int, tuple[int, ...]] = {}
    for layer, _, group in (str(entry).partition(".") for entry in layers):
        found[int(layer)] = (*found.get(int(layer), ()), *([int(group)] if group else []))
    return found


def parse_share(name: str, value: float | str) -> Fraction:
    """Return a share from `0.25` or `"25%"`.

    Raises:
        ValueError: If it is not above 0 and at most 1.
    """
    match = _SHARE.fullmatch(str(value))
    share = Fraction(match[1]) / (100 if match[2] else 1) if match else Fraction(0)
    if not 0 < share <= 1:
        raise ValueError(f"{name}={value!r:.40} must be a share such as 25%, above 0 and at most 100%.")
    return share


def check_shares(**shares: Any) -> None:
    """Check texts that are not numbers of layers, such as `keep="25%"`; see [`parse_share`]."""
    for name, value in shares.items():
        if isinstance(value, str) and not value.isdecimal():
            parse_share(name, value)


def parse_keep(keep: str, by: str | None = None) -> str:
    """Return `auto:p/q` for layers from the share that stays softmax, such as `25%`, with `by` where that is given.

    Raises:
        ValueError: If it is not a share, or `by` not one of [`MEASURES`].
    """
    if by is not None:
        check_choice("by", by, MEASURES)
    share = 1 - parse_share("keep", keep)
    if not share:
        raise ValueError("keep must be below 100%: no layer would become MHLA.")
    return f"auto:{share.numerator}/{share.denominator}{'' if by is None else f':{by}'}"


def _layers(layers: Any) -> tuple[int | str, ...] | str | None:
    """Normalise a choice of layers for a model of any depth to sorted entries, a fraction or `None` for all."""
    if layers is None or layers == "all":
        return None
    fraction = _FRACTION.fullmatch(layers) if isinstance(layers, str) else None
    if fraction and 0 < int(fraction[1]) <= int(fraction[2]):
        return f"{int(fraction[1])}/{int(fraction[2])}"
    entries: list[Any] = layers.split(",") if isinstance(layers, str) else []
    if isinstance(layers, Iterable) and not isinstance(layers, (str, bytes, Mapping)):
        # Neither True nor 18.2, which may have been 18.20, is the name of a layer.
        entries = [None if isinstance(entry, (bool, float)) else str(entry) for entry in layers]
    matches = [_ENTRY.fullmatch(entry or "") for entry in entries]
    found = [tuple(int(part) for part in match.groups() if part) for match in matches if match]
    # A layer is named once as a whole, or by different groups.
    whole = {entry for entry in found if len(entry) == 1}
    if not found or len({entry[:1] if entry[:1] in whole else entry for entry in found}) < len(entries):
        raise ValueError(
            f"layers={shorten_value(layers)} must be all, different layer indices counted from 0 such as 1,2,4, "
            "groups of their heads such as 4.0,4.2, or a fraction above 0 and at most 1 such as 2/3."
        )
    return tuple(entry[0] if len(entry) == 1 else f"{entry[0]}.{entry[1]}" for entry in sorted(found))


def check_window(window: str | None, size: tuple[int, ...] | None, axes: int | None) -> None:
    """Check the options of the window against each other and against the axes of the token grid.

    Args:
        window: One of [`WINDOWS`], or `None` for no window.
        size: Tokens of a block of the window along each axis; `None` for the default.
        axes: Number of axes of the token grid; `None` where it is not known.

    Raises:
        ValueError: If they do not fit; the message names the option.
    """
    if window is None:
        if size is not None:
            raise ValueError(
                f"window_size={shorten_value(size)} needs window, one of {', '.join(map(repr, WINDOWS))}."
            )
        return
    if size is not None and math.prod(size) > MAX_WINDOW_TOKENS:
        raise ValueError(f"window_size={shorten_value(size)} has more than {MAX_WINDOW_TOKENS} tokens in a block.")
    if axes is None:
        axes = None if size is None else len(size)
    if size is not None and len(size) != axes:
        raise ValueError(f"window_size={size} must have one entry for each axis of the layout, which has {axes}.")
    if window == "cross" and axes not in (None, 3):
        raise ValueError(
            f"window='cross' needs the three axes of a video (frames, height, width), but the layout has {axes}: "
            "use 'adjacent' or 'block'."
        )


def default_window_size(window: str, axes: int) -> tuple[int, ...]:
    """Return the tokens of a block of the window along each axis that make about 200 tokens that a query sees."""
    return _DEFAULT_SIZES[window, axes]
