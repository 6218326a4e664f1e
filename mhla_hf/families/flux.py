# SPDX-License-Identifier: Apache-2.0
"""MHLA for Flux and Chroma, from text to one image.

Their layers see one sequence of text and image, and positions of tokens. The grid travels in `joint_attention_kwargs`,
which blocks hand to their attention.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from diffusers.models.transformers.transformer_chroma import ChromaTransformer2DModel
from diffusers.models.transformers.transformer_flux import FluxAttention, FluxPosEmbed, FluxTransformer2DModel

from ..layers import PairwiseRotary
from ..layouts.blocks import BlockLayout, positive_axes
from ..models.attention import compact
from ..models.joint import JointImageMixin, MHLAJointAttention
from ..models.ordering import only_shared, order_of, with_sample
from ..utils.compat.diffusers import checkpointed, with_checkpoint_function
from .objectives import TWO_ENCODERS, FlowObjective, Inputs, Tensors


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
        attention_mask: torch.Tensor | None = None,
        image_rotary_emb: tuple[torch.Tensor, ...] = (),
        grid: Sequence[int] = (),
        block_order: bool = False,
        **kwargs: Any,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        cosine, sine, *pairs = image_rotary_emb
        if not hasattr(self, "mhla"):
            return super().forward(hidden_states, encoder_hidden_states, attention_mask, (cosine, sine), **kwargs)
        height, width = grid
        count = len(cosine) - height * width
        rotary, text_rotary = (
            PairwiseRotary(*(x[:, part] for x in pairs)) for part in (slice(count, None), slice(count))
        )
        # The mask covers all pairs of tokens, `[B, 1, X + T, X + T]`. The last query belongs to the image.
        valid = None if attention_mask is None else attention_mask[:, 0, -1, :count].bool()
        return self.processor(
            self, hidden_states, encoder_hidden_states, grid=grid, block_order=block_order, rotary=rotary,
            text_rotary=text_rotary, valid=valid, **kwargs,
        )  # fmt: skip

    def recorded(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments that a record of calls keeps in another form: the mask's last row, which MHLA reads."""
        mask = kwargs.get("attention_mask")
        return {} if mask is None else {"attention_mask": mask[:, :, -1:].clone()}


class _FluxMixin(JointImageMixin):
    """What the models of Flux and Chroma have in common."""

    # 1024 × 1024: latents of 128 × 128 in patches of 2 × 2.
    default_grid = (64, 64)
    attention_class = MHLAFluxAttention
    module_classes = MappingProxyType({"pos_embed": MHLAFluxPosEmbed})
    layer_counts = ("num_layers", "num_single_layers")

    @classmethod
    def own_inputs(cls, model: Any, grid: tuple[int, ...], text: int, random: Any) -> dict[str, Any]:
        """Return the noise level and positions of tokens."""
        words = torch.zeros_like(random(text, 3)[0])
        ids = {"img_ids": positions(grid, words), "txt_ids": words}
        return {**super().own_inputs(model, grid, text, random), **ids}

    def _with_grid_and_order(
        self,
        joint_attention_kwargs: dict[str, Any] | None,
        hidden_states: torch.Tensor,
        img_ids: torch.Tensor | None,
        rest: dict[str, Any],
    ) -> tuple[dict[str, Any], torch.Tensor, torch.Tensor | None, BlockLayout | None]:
        """Arguments of attention with `grid` and `block_order`; tokens and positions in that order; its layout."""
        given = _with_grid(joint_attention_kwargs, img_ids)
        # Others are hints of control networks, and images that adapters read.
        is_plain = only_shared(rest) and not given.keys() - {"grid", "scale"}
        layout = order_of(self, given["grid"]) if is_plain else None
        if layout is not None:
            assert img_ids is not None
            hidden_states, img_ids = layout.to_block_order(hidden_states), layout.to_block_order(img_ids, -2)
        return {**given, "block_order": layout is not None}, hidden_states, img_ids, layout


class MHLAFluxTransformer2DModel(_FluxMixin, FluxTransformer2DModel):
    """`FluxTransformer2DModel` whose joint attention is MHLA in the chosen layers.

    Takes upstream's arguments plus `mhla`, an `MHLAConfig` or a dict of its options, kept under the key `mhla` of
    `config.json`. `from_pretrained` loads MHLA checkpoints, and ordinary ones with fresh MHLA parameters. The layers
    of `transformer_blocks` come first, and those of `single_transformer_blocks` after them. Reference images
    (Kontext) and IP adapters raise `ValueError`.
    """

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
        given, hidden_states, img_ids, layout = self._with_grid_and_order(
            joint_attention_kwargs, hidden_states, img_ids, kwargs
        )
        # By name: upstream takes the scale of adapters out of keyword arguments alone.
        output = super().forward(
            hidden_states, encoder_hidden_states, pooled_projections, timestep, img_ids, txt_ids, guidance,
            joint_attention_kwargs=given, **kwargs,
        )  # fmt: skip
        return output if layout is None else with_sample(output, layout.from_block_order)


class MHLAChromaTransformer2DModel(_FluxMixin, ChromaTransformer2DModel):
    """`ChromaTransformer2DModel` whose joint attention is MHLA in the chosen layers.

    Takes arguments and checkpoints as `MHLAFluxTransformer2DModel` does. MHLA layers leave out the text that
    `attention_mask` marks with zeros. Pipelines give it as numbers, which softmax layers, as upstream, add to their
    logits.
    """

    def forward(
        self,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        timestep: torch.Tensor | None = None,
        img_ids: torch.Tensor | None = None,
        txt_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        joint_attention_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """As upstream; the grid is read as in `MHLAFluxTransformer2DModel`."""
        model = self
        given, hidden_states, img_ids, layout = self._with_grid_and_order(
            joint_attention_kwargs, hidden_states, img_ids, kwargs
        )
        if layout is not None and attention_mask is not None:
            text, image = attention_mask.split([attention_mask.shape[1] - layout.num_tokens, layout.num_tokens], 1)
            attention_mask = torch.cat([text, layout.to_block_order(image)], dim=1)
        if torch.is_grad_enabled() and self.gradient_checkpointing:
            # Upstream hands checkpointed blocks no `joint_attention_kwargs`, and those with a single stream no mask.
            # Inputs before these are three or four.
            rest = {"attention_mask": attention_mask, "joint_attention_kwargs": given}
            model = with_checkpoint_function(
                self, lambda block, *inputs: checkpointed(self, partial(block, **rest), *inputs[:4])
            )
        output = super(MHLAChromaTransformer2DModel, model).forward(
            hidden_states, encoder_hidden_states, timestep, img_ids, txt_ids, attention_mask,
            joint_attention_kwargs=given, **kwargs,
        )  # fmt: skip
        return output if layout is None else with_sample(output, layout.from_block_order)


def _with_grid(joint_attention_kwargs: dict[str, Any] | None, img_ids: torch.Tensor | None) -> dict[str, Any]:
    """Arguments of attention with `grid`, which is read from `img_ids` unless it was given."""
    given = joint_attention_kwargs or {}
    assert img_ids is not None
    if "grid" not in given:
        return {**given, "grid": grid_of(img_ids)}
    grid, count = positive_axes("grid", given["grid"], 2), img_ids.shape[-2]
    if math.prod(grid) != count:
        raise ValueError(f"grid={grid} has {math.prod(grid)} tokens, but img_ids has {count}: give rows and columns.")
    return {**given, "grid": grid}


def positions(grid: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    """Invert `grid_of`: the positions `[T, 3]` of an image's tokens, with the device and dtype of a tensor."""
    return torch.cartesian_prod(*(torch.arange(side).to(like) for side in (1, *grid)))


def grid_of(ids: torch.Tensor) -> tuple[int, int]:
    """Return the rows and columns of the image whose tokens have these positions.

    Args:
        ids: Number of the image, row and column of each token, `[T, 3]` or `[B, T, 3]`, as their dtype rounds them.

    Raises:
        ValueError: If they are not those of one image, row by row, as with reference images.
    """
    image, row, column = (ids[0] if ids.ndim == 3 else ids).unbind(-1)
    order = torch.arange(len(row), device=row.device)
    # Half precision rounds positions above 256, so only those of the first row are told apart for sure.
    width = (row == 0).sum().clamp(min=1)
    misplaced = (row != (order // width).to(row)) | (column != (order % width).to(column)) | (image != 0)
    # One transfer for both.
    columns, wrong = torch.stack([width, misplaced.sum()]).tolist()
    if wrong or len(row) % columns:
        raise ValueError(
            "MHLA layers of Flux and Chroma take the tokens of one image, row by row: no reference images beside it."
        )
    return len(row) // columns, columns


@dataclass(frozen=True, kw_only=True)
class FluxObjective(FlowObjective):
    """Flow matching of images.

    Samples have `latents` `[C, H, W]`, `prompt_embeds` `[L, D]` and `pooled_prompt_embeds` `[P]`. Models that are told
    a guidance scale are told 1: data have none.
    """

    name = "flux"
    condition_names = ("prompt_embeds", "pooled_prompt_embeds")
    packed = 2
    encoders = TWO_ENCODERS
    # Flux attends to the padding of captions: it stays.
    encoded_names = ("prompt_embeds", "pooled_prompt_embeds")

    def model_inputs(self, config: Any, noisy: torch.Tensor, levels: torch.Tensor, condition: Tensors) -> Inputs:
        """Return the arguments of `forward`, which predicts the packed direction `[B, H W / 4, 4 C]`."""
        text = condition["prompt_embeds"]
        sides = [side // self.packed for side in noisy.shape[2:]]
        return {
            **super().model_inputs(config, noisy, levels, condition),
            "timestep": levels,
            "guidance": torch.ones_like(levels) if config["guidance_embeds"] else None,
            "pooled_projections": condition["pooled_prompt_embeds"],
            "txt_ids": text.new_zeros(text.shape[1], 3),
            "img_ids": positions(sides, noisy),
        }
