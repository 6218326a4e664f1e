# SPDX-License-Identifier: Apache-2.0
"""Which type a layer hands tokens to the operator in."""

from __future__ import annotations

import torch

from ..config import MHLAConfig
from ..ops import FEATURE_MAPS, NORMALIZERS
from ..ops.numerics import accumulation_dtype


def token_dtype(
    config: MHLAConfig,
    backend: str,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    changed: bool,
) -> torch.dtype:
    """The type that feature maps work in and the operator is given tokens in.

    The operator sums in float32 at least, whatever it is given. Kernels take half precision as it is. So does plain
    torch, which converts tokens as it groups them, where nothing is rounded on the way that float32 would not round;
    elsewhere tokens go in as float32. So they do for float16 without a normaliser, with any backend: sums can leave
    its range, and the output norm brings them back before anything is rounded.

    Args:
        config: The layer's options.
        backend: `"torch"` or `"triton"`.
        query: Queries of any shape.
        key: Keys.
        value: Values.
        changed: Whether more happens to queries and keys than the feature map.
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
