# SPDX-License-Identifier: Apache-2.0
"""Shared parts of models whose layers attend jointly to text and a grid: attention, processor, model.

A model says in its attention class where the token grid, rotary tables and padding of the text are among the arguments
of a call. All of them are arguments, so nothing is remembered between calls, as in the models of Wan.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
import torch.nn as nn

from ..layers.joint import JointMHLA, TextTokens, attend_jointly
from ..layers.mhla import MHLA
from ..utils.compat.diffusers import is_attention_skipped, skip_attention_in
from .attention import KeepsMHLAProcessor, KeepsMHLAProcessors


# Projections and norms of an attention module: those of the grid, and those of text where it has its own.
_GRID = ("to_q", "to_k", "to_v", "norm_q", "norm_k", "to_qkv")
_TEXT = ("add_q_proj", "add_k_proj", "add_v_proj", "norm_added_q", "norm_added_k", "to_added_qkv")


class MHLAJointAttnProcessor:
    """Stateless processor of a joint MHLA layer; the parameters live in `attn.mhla`."""

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        *,
        grid: Sequence[int],
        block_order: bool = False,
        rotary: Any = None,
        text_rotary: Any = None,
        valid: torch.Tensor | None = None,
        **unknown: Any,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Attend.

        Args:
            attn: Attention module of diffusers with a submodule `mhla`.
            hidden_states: Tokens of the grid, `[B, T, hidden]`; of text and grid `[B, X + T, hidden]` where
                `encoder_hidden_states` is `None`.
            encoder_hidden_states: The text, `[B, X, hidden]`.
            grid: Number of tokens along each axis.
            block_order: Whether they come block by block.
            rotary: [`PairwiseRotary`][mhla_hf.layers.PairwiseRotary] of the grid.
            text_rotary: That of the text; `None` for none.
            valid: BoolTensor `[B, X]`, False for padding; `None` for no padding.
            **unknown: Refused.

        Returns:
            Grid and text, or `[B, X + T, hidden]`, as the tokens came.

        Raises:
            ValueError: For other arguments, such as those of IP adapters and caches of keys.
        """
        if unknown:
            raise ValueError(f"MHLA layers with joint attention take no {', '.join(unknown)}.")
        text, tokens = encoder_hidden_states, hidden_states
        if text is None:
            text, tokens = hidden_states.split([hidden_states.shape[1] - math.prod(grid), math.prod(grid)], dim=1)
        has_own = getattr(attn, _TEXT[0], None) is not None or hasattr(attn, _TEXT[-1])
        words = TextTokens(*_project(attn, text, _TEXT if has_own else _GRID), text, valid, text_rotary)
        attended, of_text = attend_jointly(
            attn.mhla, *_project(attn, tokens, _GRID), text=words, grid=grid, block_order=block_order,
            hidden_states=tokens, rotary=rotary, identity=is_attention_skipped(attn),
        )  # fmt: skip
        attended, of_text = (x.flatten(2).type_as(hidden_states) for x in (attended, of_text))
        if getattr(attn, "to_out", None) is not None:
            attended = attn.to_out[1](attn.to_out[0](attended))
        if getattr(attn, "to_add_out", None) is not None:
            of_text = attn.to_add_out(of_text)
        return torch.cat([of_text, attended], dim=1) if encoder_hidden_states is None else (attended, of_text)


skip_attention_in(MHLAJointAttnProcessor, is_joint=True)


def _project(attn: Any, tokens: torch.Tensor, names: Sequence[str]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values `[B, T, H, K]`, queries and keys after their norms."""
    *projections, query_norm, key_norm, fused = names
    if attn.fused_projections and hasattr(attn, fused):
        parts = getattr(attn, fused)(tokens).chunk(3, dim=-1)
    else:
        parts = [getattr(attn, name)(tokens) for name in projections]
    query, key, value = (part.unflatten(2, (attn.heads, -1)) for part in parts)
    norms = (getattr(attn, name, None) for name in (query_norm, key_norm))
    query, key = (x if norm is None else norm(x) for norm, x in zip(norms, (query, key)))
    return query, key, value


class MHLAJointAttention(KeepsMHLAProcessor):
    """Goes before an attention class of diffusers in the bases of its joint MHLA version.

    Every layer has it, MHLA or softmax.
    """

    mhla_processor_class = MHLAJointAttnProcessor


class MHLAJointModelMixin(KeepsMHLAProcessors):
    """For models with `transformer_blocks[i].attn` and, in some, `single_transformer_blocks[i].attn` after those."""

    layer_class: ClassVar[type[MHLA]] = JointMHLA
    # In the order in which blocks return them.
    block_streams: ClassVar[tuple[str, ...]] = ("hidden_states", "encoder_hidden_states")
    block_lists: ClassVar[tuple[str, ...]] = ("transformer_blocks", "single_transformer_blocks")

    def _self_attentions(self) -> list[nn.Module]:
        return [block.attn for block in (*self.transformer_blocks, *getattr(self, "single_transformer_blocks", ()))]


class JointImageMixin(MHLAJointModelMixin):
    """For models of images, whose configurations tell no size."""

    block_streams = ("encoder_hidden_states", "hidden_states")

    @classmethod
    def own_inputs(cls, model: Any, grid: tuple[int, ...], text: int, random: Any) -> dict[str, Any]:
        """Return the noise level."""
        return {"timestep": torch.full_like(random(), 0.5)}
