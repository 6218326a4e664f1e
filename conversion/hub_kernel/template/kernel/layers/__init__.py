# SPDX-License-Identifier: Apache-2.0
"""Layers whose `forward` replaces that of a layer of the same name, see `kernels.use_kernel_forward_from_hub`.

Shape letters: B batch, T tokens, H heads, H_kv key/value heads, K query/key width, V value width, M blocks.
"""

import torch
import torch.nn as nn

from ..layouts.blocks import BlockLayout
from ..ops import mhla_attention


__all__ = ["CausalMHLAttention", "MHLAttention"]


class MHLAttention(nn.Module):
    """MHLA over a token grid, of feature-mapped queries `[B, T, H, K]` and keys and values of H_kv heads.

    Takes from the layer that it replaces: `mixing`, weights `[M, M]` or `[H, M, M]`; `grid`, tokens along each axis;
    `blocks`, blocks along each axis. Returns `[B, T, H, V]` in the dtype of `value`.
    """

    can_torch_compile = True

    mixing: torch.Tensor
    grid: tuple[int, ...]
    blocks: tuple[int, ...]

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        layout = BlockLayout(grid=self.grid, blocks=self.blocks)
        return mhla_attention(query, key, value, self.mixing, layout)


class CausalMHLAttention(nn.Module):
    """Causal MHLA over sequences, of feature-mapped queries `[B, T, H, K]` and keys and values of H_kv heads.

    Takes from the layer that it replaces: `mixing`, weights `[M, M]` or `[H, M, M]`, which continue by distance for
    longer sequences; `block_size`, tokens of a block. Returns `[B, T, H, V]` in the dtype of `value`.
    """

    can_torch_compile = True

    mixing: torch.Tensor
    block_size: int

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        layout = BlockLayout(grid=(query.shape[1],), block_size=(self.block_size,))
        return mhla_attention(query, key, value, self.mixing, layout, causal=True)
