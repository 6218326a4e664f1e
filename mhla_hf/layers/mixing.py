# SPDX-License-Identifier: Apache-2.0
"""Feature maps and mixing weights of a layer: from projected queries and keys to features, and weights among blocks.

Mixing weights are made for a number of blocks, start by a locality bias, and are stored under a constraint. Distances
are between block centres on the block grid, in blocks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F

from ..config import MAX_LEPE_WEIGHTS, MHLAConfig, check_window, default_window_size
from ..layouts import MAX_BLOCKS
from ..layouts.blocks import BlockLayout, block_centers, cached, choose_blocks, indices, positive_axes
from ..layouts.resampling import axis_interpolation, resample_mixing
from ..ops.definitions import FEATURE_MAPS, NORMALIZERS
from ..ops.operands import accumulation_dtype
from ..ops.sums import repeat_heads


# Under a finite `mixing_range` the bias bottoms out here instead of at 0, relative to the block's own weight.
RANGE_FLOOR = 0.01
# Blocks within reach under `local` (the own one and its neighbours, diagonal ones too) and of `exp`'s decay.
LOCAL_RANGE = 1.5
EXPONENTIAL_RANGE = 9.0
# Smallest stored weight under the nonnegative constraint, relative to the equal weight 1/M.
NONNEGATIVE_FLOOR = 0.01
# Steepness of the softplus in units of 1/M: weights of 1/M then learn as fast as unconstrained ones, and the floor
# still receives a tenth of the gradient.
NONNEGATIVE_SHARPNESS = 10.0
# Blocks over which a decaying tail halves at first.
HALF_LIFE = 8.0
# Times as many blocks as weights exist for from which on resampled weights are not made; they cost as much there on a
# CPU.
LOW_RANK_FROM = 4


def layout_at(
    config: MHLAConfig,
    blocks: Sequence[int],
    grid: Sequence[int],
    num_prefix_tokens: int = 0,
    block_order: bool = False,
) -> BlockLayout:
    """Return the layout used on a token grid, following `config.resize`.

    An axis with fewer tokens than blocks gets one block for each token.

    Args:
        config: The options.
        blocks: Block counts that the mixing weights are made for.
        grid: Number of tokens along each axis.
        num_prefix_tokens: Tokens before those of the grid.
        block_order: See [`BlockLayout`].

    Raises:
        ValueError: If the grid has another number of axes than the blocks.
    """
    grid = positive_axes("grid", grid)
    if len(grid) != len(blocks):
        raise ValueError(
            f"grid={grid} has {len(grid)} axes, but this layer's blocks {tuple(blocks)} have more or fewer."
        )
    if config.is_sequence:
        return cached(BlockLayout, grid, None, config.block_size, num_prefix_tokens, block_order)
    if config.grid is not None and (grid == config.grid or _keeps_block_size(config, grid, config.grid)):
        if config.block_size is not None:
            return cached(BlockLayout, grid, None, config.block_size, num_prefix_tokens, block_order)
        # Balanced tiles of the reference's mean length; they need not be a whole number of tokens there.
        counts = [round(n * count / reference) for n, count, reference in zip(grid, blocks, config.grid)]
        counts = [max(1, min(count, n)) for count, n in zip(counts, grid)]
    else:
        counts = [min(count, n) for count, n in zip(blocks, grid)]
    return cached(BlockLayout, grid, tuple(counts), None, num_prefix_tokens, block_order)


def _keeps_block_size(config: MHLAConfig, grid: Sequence[int], reference_grid: Sequence[int]) -> bool:
    if config.resize != "auto":
        return config.resize == "block_size"
    return any(n >= 2 * reference or 2 * n <= reference for n, reference in zip(grid, reference_grid))


def reference_blocks(config: MHLAConfig, default_grid: Sequence[int] | None = None) -> tuple[int, ...]:
    """Return the block counts that the stored mixing weights are made for.

    Args:
        config: Gives `blocks`, or `block_size` and `grid`.
        default_grid: Stands in for a missing `config.grid`.

    Raises:
        ValueError: If there is neither `blocks` nor a grid, there are too many blocks, or the convolution of that many
            axes is too large.
    """
    blocks, grid = config.blocks, config.grid or default_grid
    if blocks is None:
        if grid is None:
            raise ValueError("The mhla options need blocks, or a grid to derive the number of blocks from.")
        size = config.block_size
        blocks = choose_blocks(grid) if size is None else BlockLayout(grid=grid, block_size=size).blocks
    # What `MHLAConfig` cannot check while it does not know the grid.
    if math.prod(blocks) > MAX_BLOCKS:
        raise ValueError(f"The mhla options make {tuple(blocks)} blocks, which are more than {MAX_BLOCKS}.")
    if config.lepe_kernel is not None and config.lepe_kernel ** len(blocks) > MAX_LEPE_WEIGHTS:
        raise ValueError(
            f"lepe_kernel={config.lepe_kernel} has more than {MAX_LEPE_WEIGHTS} weights for each channel over "
            f"{len(blocks)} axes."
        )
    return blocks


def resolve_blocks(config: MHLAConfig, default_grid: Sequence[int]) -> MHLAConfig:
    """Return a config whose blocks and window are pinned, so that they survive a change of defaults.

    Args:
        config: Options as given by the user.
        default_grid: The model's usual token grid.

    Returns:
        `config` itself if it has `blocks`; otherwise a copy with `grid` filled in, and with the chosen `blocks` if
        there was no `block_size` either. The size of a window is filled in too.

    Raises:
        ValueError: If the options are for a grid with another number of axes than the model's.
    """
    given = {name: getattr(config, name) for name in ("blocks", "block_size", "grid") if getattr(config, name)}
    for name, sizes in given.items():
        if len(sizes) != len(default_grid):
            raise ValueError(
                f"{name}={sizes} must have one number for each axis of this model's token grid, "
                f"{' × '.join(map(str, default_grid))}."
            )
    config = with_window_size(config, len(default_grid))
    if config.blocks is not None:
        return config
    grid = config.grid or tuple(default_grid)
    if config.block_size is not None:
        return config.replace(grid=grid)
    return config.replace(grid=grid, blocks=choose_blocks(grid))


def with_window_size(config: MHLAConfig, axes: int) -> MHLAConfig:
    """Return the options with the size of the window's blocks filled in, so that it survives a change of defaults.

    The default for sequences is MHLA's own block size; elsewhere it makes about 200 tokens that a query sees.

    Args:
        config: The options; returned as they are where there is nothing to fill in.
        axes: Number of axes of the token grid.

    Raises:
        ValueError: If the options do not fit that number of axes.
    """
    check_window(config.window, config.window_size, axes)
    if config.window is None or config.window_size is not None:
        return config
    size = config.block_size if config.is_sequence else default_window_size(config.window, axes)
    return config.replace(window_size=size)


def initial_mixing(config: MHLAConfig, blocks: Sequence[int], num_prefix_blocks: int = 0) -> torch.Tensor:
    """Return initial mixing weights; rows sum to one.

    `linear` is the paper's locality bias m_ij ∝ 1 - d_ij / max_k d_ik (section 3). The others have the shapes of
    the authors' code, over a range r that is the row's farthest distance or `mixing_range`: `cos` cos(π d / 4r),
    `gaussian` exp(-(3 d / r)² / 2), `exp` exp(-3 d / r) with r = 9 blocks unless `mixing_range` is given, `local`
    1 for d ≤ 1.5 (or `mixing_range`) and 0 beyond, `uniform` 1.

    Args:
        config: Gives `mixing_init`, `mixing_range` and `causal`. For causal layouts only the lower triangle is kept
            before rows are normalised: `uniform` becomes 1 / (i + 1).
        blocks: Number of blocks along each axis.
        num_prefix_blocks: 1 to add a block of tokens before the grid as the first one. It is equally far from every
            block: it gets the mean of a row's other weights, and gives equal weights itself.

    Returns:
        float32 `[M, M]`.
    """
    centers = block_centers(blocks).double()
    distance = (centers[:, None] - centers[None, :]).square().sum(-1).sqrt()
    if config.causal:
        distance = distance.tril()
    weights = _locality(config, distance)
    if config.causal:
        weights = weights.tril()
    if num_prefix_blocks:
        weights = torch.cat([weights.mean(dim=1, keepdim=True), weights], dim=1)
        weights = torch.cat([torch.ones_like(weights[:1]), weights])
    return (weights / weights.sum(dim=1, keepdim=True)).float()


def _locality(config: MHLAConfig, distance: torch.Tensor) -> torch.Tensor:
    if config.mixing_init == "uniform":
        return torch.ones_like(distance)
    if config.mixing_init == "local":
        return (distance <= (config.mixing_range or LOCAL_RANGE)).double()
    if config.mixing_range is not None:
        reach = torch.full_like(distance[:, :1], config.mixing_range)
    elif config.mixing_init == "exp":
        reach = torch.full_like(distance[:, :1], EXPONENTIAL_RANGE)
    else:
        # A single block is its own farthest one; any positive range will do.
        reach = distance.amax(dim=1, keepdim=True)
        reach = torch.where(reach > 0, reach, 1.0)
    relative = distance / reach
    if config.mixing_init == "linear":
        weights = 1 - relative
    elif config.mixing_init == "cos":
        weights = torch.cos(relative.clamp(max=2) * (math.pi / 4))
    elif config.mixing_init == "exp":
        weights = torch.exp(-3 * relative)
    else:
        weights = torch.exp(-0.5 * (3 * relative).square())
    floor = 0.0 if config.mixing_range is None else RANGE_FLOOR
    return weights.clamp(min=floor)


def mixing_parameter_value(config: MHLAConfig, weights: torch.Tensor) -> torch.Tensor:
    """Return the parameter that stands for mixing weights `[M, M]` or `[H, M, M]`.

    It has their shape; with `mixing_storage="distance"` it is `[M]` or `[H, M]`, of the weights of the last row.
    """
    return unconstrained(config, weights[..., -1, :].flip(-1) if config.mixing_storage == "distance" else weights)


def unconstrained(config: MHLAConfig, weights: torch.Tensor) -> torch.Tensor:
    """Return the parameter that stands for weights of its shape under `config.mixing_constraint`.

    Args:
        config: The options.
        weights: `[..., M]`.

    Returns:
        `weights` itself for `"none"`. For `"nonnegative"` the inverse softplus of the weights; weights below a
        hundredth of 1/M are lifted to that first.
    """
    if config.mixing_constraint == "none":
        return weights
    count = weights.shape[-1]
    floored = weights.double().clamp(min=NONNEGATIVE_FLOOR / count)
    sharpness = NONNEGATIVE_SHARPNESS * count
    # log(expm1(x)) without the overflow of expm1 for weights far above 1/M.
    scaled = sharpness * floored
    return ((scaled + torch.log(-torch.expm1(-scaled))) / sharpness).to(weights.dtype)


def constrained(config: MHLAConfig, parameter: torch.Tensor) -> torch.Tensor:
    """Return the weights that a parameter stands for, in its shape and dtype; differentiable."""
    if config.mixing_constraint == "none":
        return parameter
    return F.softplus(parameter, beta=NONNEGATIVE_SHARPNESS * parameter.shape[-1], threshold=30.0)


def effective_mixing(config: MHLAConfig, parameter: torch.Tensor) -> torch.Tensor:
    """Return the mixing weights `[M, M]` or `[H, M, M]` of a parameter; differentiable, in its dtype."""
    weights = constrained(config, parameter)
    if config.mixing_storage == "matrix":
        return weights
    index = indices(weights.shape[-1], weights.device)
    return weights[..., (index[:, None] - index).clamp(min=0)].tril()


def initial_decay(half_life: float | None) -> float:
    """Return the logit of the decay of a tail that halves over `half_life` blocks."""
    # log(g / (1 - g)) for g = 2^(-1 / half-life).
    return -math.log(math.expm1(math.log(2) / (HALF_LIFE if half_life is None else half_life)))


@dataclass(frozen=True)
class ResampledMixing:
    """Mixing by resampled weights m' = (M / M') R m Rᵀ that does not make them: m' S = (M / M') R (m (Rᵀ S)).

    R is an interpolation along each axis, so that this costs M' · (blocks of an axis) + M² in place of M'².

    Attributes:
        weights: m, `[M, M]` or `[H, M, M]`.
        source: Number of blocks along each axis of m.
        target: Number of blocks along each axis wanted.
        num_prefix_blocks: 1 where the first row and column are those of the tokens before the grid.
    """

    weights: torch.Tensor
    source: tuple[int, ...]
    target: tuple[int, ...]
    num_prefix_blocks: int = 0

    def mix(self, summary: torch.Tensor, num_heads: int) -> torch.Tensor:
        """Return Σ_b m'_ib S_b, `[B, H, M', K, V]` from `[B, H_kv, M', K, V]`."""
        if self.weights.dim() == 3:
            summary = repeat_heads(summary, num_heads, 1)
        weights = self.weights.to(summary.dtype) * (self.weights.shape[-1] / summary.shape[2])
        mixed = self._resample(weights @ self._resample(summary.flatten(3), True), False)
        return repeat_heads(mixed.unflatten(3, summary.shape[3:]), num_heads, 1)

    def matrix(self) -> torch.Tensor:
        """Return m', `[M', M']` or `[H, M', M']`."""
        return resample_mixing(self.weights, self.source, self.target, self.num_prefix_blocks)

    def _resample(self, blocks: torch.Tensor, transpose: bool) -> torch.Tensor:
        """R or Rᵀ of `[B, H, M or M', D]`, one axis after another."""
        prefix, grid = blocks.split([self.num_prefix_blocks, blocks.shape[2] - self.num_prefix_blocks], dim=2)
        shape = list(self.target if transpose else self.source)
        for axis, (source, target) in enumerate(zip(self.source, self.target)):
            matrix = cached(axis_interpolation, source, target, blocks.device).to(blocks.dtype)
            grid = grid.reshape(*blocks.shape[:2], math.prod(shape[:axis]), shape[axis], -1)
            grid = (matrix.T if transpose else matrix) @ grid
            shape[axis] = source if transpose else target
        return torch.cat([prefix, grid.reshape(*blocks.shape[:2], -1, blocks.shape[3])], dim=2)


class LearnedFeatureMap(nn.Module):
    """Feature map with a weight for each feature head, which starts as the identity; by default Hedgehog's.

    Hedgehog (arXiv 2402.04347) is softmax([Wx, -Wx]): `[B, T, H, K]` becomes `[B, T, H, 2K]`, in the dtype of the
    input.

    Args:
        num_heads: H.
        head_dim: K.
        name: Name of a learned map in [`mhla_hf.ops.FEATURE_MAPS`].
    """

    def __init__(self, num_heads: int, head_dim: int, name: str = "hedgehog") -> None:
        super().__init__()
        self.name = name
        self.weight = nn.Parameter(torch.empty(num_heads, head_dim, head_dim))

    def initial_weight(self) -> torch.Tensor:
        """Return the identity for each head, float32 `[H, K, K]`."""
        num_heads, head_dim, _ = self.weight.shape
        return torch.eye(head_dim).repeat(num_heads, 1, 1)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return FEATURE_MAPS[self.name].forward(tokens, self.weight.to(tokens.dtype))


def features_and_normalizer(
    config: MHLAConfig,
    tokens: torch.Tensor,
    learned: LearnedFeatureMap | None,
    rotary: Callable[[torch.Tensor], torch.Tensor] | None,
    scaling: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return features of queries or keys for the numerator, and for the normaliser.

    Args:
        config: The layer's options.
        tokens: `[B, T, H, K]`, in the dtype that features are computed in.
        learned: The feature map where it has a weight.
        rotary: Rotates `[B, T, H, K]`; `None` without rotary embeddings.
        scaling: Scale of q·k, of which the root goes to each side; `None` for 1.

    Returns:
        `[B, T, H, F]`, and the same without the rotation: the same tensor where there is none after the feature map.
    """
    head_dim = tokens.shape[-1]
    if scaling is not None:
        tokens = tokens * math.sqrt(scaling)
    if rotary is not None and config.rope == "before_feature_map":
        tokens = rotary(tokens)
    features = FEATURE_MAPS[config.feature_map].forward(tokens) if learned is None else learned(tokens)
    if config.feature_map_eps:
        features = features + config.feature_map_eps
    if rotary is None or config.rope != "after_feature_map":
        return features, features
    # Features may be several times as wide as what the rotation was made for; each run of that width is rotated alike.
    runs = [rotary(run) for run in features.split(head_dim, dim=-1)]
    return (runs[0] if len(runs) == 1 else torch.cat(runs, dim=-1)), features


def token_dtype(
    config: MHLAConfig, backend: str, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, changed: bool
) -> torch.dtype:
    """Return the dtype that feature maps are computed in and the operator is given tokens in.

    The operator sums in float32 at least. Kernels take half precision as it is. So does plain
    torch, which converts tokens as it groups them, where nothing is rounded on the way that float32 would not round;
    elsewhere tokens go in as float32. So they do for float16 without a normaliser, with any backend: sums can leave
    its range, and the output norm brings them back before anything is rounded.

    Args:
        config: The layer's options.
        backend: `"torch"` or `"triton"`.
        query: Queries of any shape.
        key: Keys.
        value: Values.
        changed: Whether queries and keys are scaled or rotated beside the feature map.
    """
    dtype = value.dtype
    if dtype == torch.float16 and not NORMALIZERS[config.normalizer].divides:
        return accumulation_dtype(dtype)
    exact = (
        query.dtype == key.dtype == dtype
        and FEATURE_MAPS[config.feature_map].is_exact
        and not (changed or config.feature_map_eps or config.output_norm)
    )
    return dtype if backend == "triton" or exact else accumulation_dtype(dtype)
