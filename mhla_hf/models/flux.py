# SPDX-License-Identifier: Apache-2.0
"""MHLA for Flux, from text to one image.

Its layers see one sequence of text and image, and positions of tokens. The grid travels in `joint_attention_kwargs`,
which blocks hand to their attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

import torch
from diffusers.models.transformers.transformer_flux import FluxAttention, FluxPosEmbed, FluxTransformer2DModel

from ..layers import PairwiseRotary
from .attention import compact
from .joint import JointImageMixin, MHLAJointAttention


class MHLAFluxPosEmbed(FluxPosEmbed):
    """Rotary tables of text and image."""

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return upstream's tables, and compact ones for MHLA layers, `[1, X + T, 1, K / 2]`."""
        cosine, sine = super().forward(ids)
        return cosine, sine, *(table[None, :, None] for table in compact(cosine, sine))


class MHLAFluxAttention(MHLAJointAttention, FluxAttention):
    """Joint attention of both kinds of blocks; those with a single stream get text and image as one sequence."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        image_rotary_emb: tuple[torch.Tensor, ...] = (),
        grid: Sequence[int] = (),
        **kwargs: Any,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        cosine, sine, *pairs = image_rotary_emb
        if not hasattr(self, "mhla"):
            return super().forward(hidden_states, encoder_hidden_states, image_rotary_emb=(cosine, sine), **kwargs)
        height, width = grid
        count = len(cosine) - height * width
        rotary, text_rotary = (
            PairwiseRotary(*(x[:, part] for x in pairs)) for part in (slice(count, None), slice(count))
        )
        return self.processor(
            self, hidden_states, encoder_hidden_states, grid=grid, rotary=rotary, text_rotary=text_rotary, **kwargs
        )


class MHLAFluxTransformer2DModel(JointImageMixin, FluxTransformer2DModel):
    """`FluxTransformer2DModel` whose joint attention is MHLA in the chosen layers.

    Takes upstream's arguments plus `mhla`, an `MHLAConfig` or a dict of its options, kept under the key `mhla` of
    `config.json`. `from_pretrained` loads MHLA checkpoints, and ordinary ones with fresh MHLA parameters. The layers
    of `transformer_blocks` come first, and those of `single_transformer_blocks` after them. Reference images
    (Kontext) and IP adapters raise `ValueError`.
    """

    # 1024 × 1024: latents of 128 × 128 in patches of 2 × 2.
    default_grid = (64, 64)
    attention_class = MHLAFluxAttention
    module_classes = MappingProxyType({"pos_embed": MHLAFluxPosEmbed})
    layer_counts = ("num_layers", "num_single_layers")

    def forward(
        self,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        pooled_projections: torch.Tensor | None = None,
        timestep: torch.Tensor | None = None,
        img_ids: torch.Tensor | None = None,
        txt_ids: torch.Tensor | None = None,
        guidance: torch.Tensor | None = None,
        joint_attention_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """As upstream.

        The grid is read from `img_ids`, which waits for the device once. An entry `grid` of `joint_attention_kwargs`,
        rows and columns of tokens, saves that, and `torch.compile(fullgraph=True)` of the whole model needs it.
        """
        given = joint_attention_kwargs or {}
        if "grid" not in given:
            assert img_ids is not None
            given = {**given, "grid": grid_of(img_ids)}
        # By name: upstream takes the scale of adapters out of keyword arguments alone.
        return super().forward(
            hidden_states, encoder_hidden_states, pooled_projections, timestep, img_ids, txt_ids, guidance,
            joint_attention_kwargs=given, **kwargs,
        )  # fmt: skip


def grid_of(ids: torch.Tensor) -> tuple[int, int]:
    """Return the rows and columns of the image whose tokens have these positions.

    Args:
        ids: Number of the image, row and column of each token, `[T, 3]` or `[B, T, 3]`.

    Raises:
        ValueError: If they are not those of one image, row by row, as with reference images.
    """
    image, row, column = (ids[0] if ids.ndim == 3 else ids).float().unbind(-1)
    place = row * (column[-1] + 1) + column
    order = torch.arange(len(place), device=place.device)
    # One transfer for all.
    height, width, misplaced, other = (
        int(number)
        for number in torch.stack([row[-1], column[-1], (place - order).abs().max(), image.abs().max()]).tolist()
    )
    if misplaced or other or (height + 1) * (width + 1) != len(place):
        raise ValueError(
            "MHLA layers of Flux take the tokens of one image, row by row: no reference images beside it."
        )
    return height + 1, width + 1
