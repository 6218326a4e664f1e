# SPDX-License-Identifier: Apache-2.0
"""When kernels can compute hedgehog features inside of attention, and running a layer there.

Shape letters: B batch, T tokens, H heads, H_kv key/value heads, K query/key width, V value width.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..config import MHLAConfig
from ..layouts.blocks import BlockLayout
from ..layouts.sequences import SequenceLayout
from ..ops import NORMALIZERS
from ..ops.kernel_check import kernels_pass
from .features import LearnedFeatureMap
from .fused import HeadNorms, PairwiseRotary, has_hooks, is_plain_rotary, rotary_tables, weight_and_eps
from .sequence import TokenSequence


def can_fuse_hedgehog(
    config: MHLAConfig,
    backend: str,
    query: torch.Tensor,
    value: torch.Tensor,
    rotary: Callable[[torch.Tensor], torch.Tensor] | None,
    feature_maps: tuple[LearnedFeatureMap | None, LearnedFeatureMap | None],
    sequence: TokenSequence | None,
) -> bool:
    """Returns whether the kernels with hedgehog features inside can compute a layer, but for output norm and gate.

    They look both ways, over grids and over sequences, padded or packed. Rotary embeddings must come before the map.

    Args:
        config: The layer's options.
        backend: `"torch"` or `"triton"`.
        query: `[B, T, H, K]`.
        value: `[B, T, H_kv, V]`.
        rotary: Rotates `[B, T, H, K]`; `None` without rotary embeddings.
        feature_maps: Those of queries and keys.
        sequence: The sequence, where the tokens are none of a grid.
    """
    if backend != "triton" or config.feature_map != "hedgehog" or config.causal:
        return False
    if sequence is not None and (sequence.causal or sequence.state is not None):
        return False
    from ..ops.triton import fits_hedgehog_kernels

    normalizer = NORMALIZERS[config.normalizer]
    return (
        normalizer.kernel is not None
        # Sums can leave the range of float16, and here an output norm would come after rounding.
        and (normalizer.divides or value.dtype != torch.float16)
        and (rotary is None or config.rope == "before_feature_map")
        and all(entry is not None and not has_hooks(entry) and entry.weight.device == query.device
                for entry in feature_maps)
        and fits_hedgehog_kernels(query.shape[-1], value.shape[-1], rotary is not None, value.dtype)
        and kernels_pass("hedgehog", query, value)
    )  # fmt: skip


def fused_hedgehog_attention(
    config: MHLAConfig,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    feature_maps: tuple[LearnedFeatureMap, LearnedFeatureMap],
    mixing: torch.Tensor,
    layout: BlockLayout | SequenceLayout,
    *,
    rotary: Callable[[torch.Tensor], torch.Tensor] | None,
    norms: HeadNorms | None,
    scaling: float | None,
) -> torch.Tensor:
    """Attention of a layer by these kernels, where [`can_fuse_hedgehog`] says so.

    Norms and rotary embeddings that they do not know come before them. Arguments that are not listed are those of
    [`MHLA.attention_parts`][mhla_hf.layers.MHLA.attention_parts].

    Args:
        config: The layer's options.
        feature_maps: Those of queries and keys.
        mixing: Mixing weights of the layout's blocks.
        layout: The blocks.

    Returns:
        `[B, T, H, V]` in the dtype of `value`; zero for padding.
    """
    from ..ops.triton import hedgehog_mhla_attention

    plain = rotary is None or is_plain_rotary(rotary, query)
    tables: PairwiseRotary | None = rotary if plain else None  # type: ignore[assignment]
    if norms is not None and not (plain and norms.are_plain(query.device)):
        (query, key), norms = norms.apply(query, key), None
    if rotary is not None and not plain:
        query, key = rotary(query), rotary(key)
    return hedgehog_mhla_attention(
        query,
        key,
        value,
        feature_maps[0].weight,
        feature_maps[1].weight,
        mixing,
        layout,
        feature_map_eps=config.feature_map_eps,
        normalizer=config.normalizer,
        eps=config.eps,
        scaling=1.0 if scaling is None else scaling**0.5,
        rotary=rotary_tables(tables),
        query_norm=None if norms is None else weight_and_eps(norms.query),
        key_norm=None if norms is None else weight_and_eps(norms.key),
    )
