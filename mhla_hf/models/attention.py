# SPDX-License-Identifier: Apache-2.0
"""Shared parts of the attention of diffusers models: projections, processors, rotary tables, perturbed guidance.

Perturbed-attention guidance compares a prediction with one whose attention maps are identities. Its pipelines set
processors that split the batch into parts, the last of them perturbed; its guider hangs a hook on the attention module
for a pass of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from diffusers.models.attention_processor import Attention

from ..layers import HeadNorms, PairwiseRotary
from ..layouts.blocks import BlockLayout
from ..utils.compat.diffusers import is_attention_skipped, skip_attention_in
from .base import MHLAModelMixin, Upstream
from .ordering import carried_layout


# Parts of the batch that each processor expects, by name, since diffusers may drop these classes.
_PARTS = {
    "PAGCFGIdentitySelfAttnProcessor2_0": 3,
    "PAGCFGSanaLinearAttnProcessor2_0": 3,
    "PAGIdentitySelfAttnProcessor2_0": 2,
    "PAGIdentitySanaLinearAttnProcessor2_0": 2,
}


def attend(
    attn: Any,
    hidden_states: torch.Tensor,
    *,
    rotary_emb: tuple[torch.Tensor, torch.Tensor] | Callable[[torch.Tensor], torch.Tensor] | None = None,
    perturbed: bool = False,
    **where: Any,
) -> torch.Tensor:
    """Self-attention of an MHLA layer, with the projections of its module.

    Args:
        attn: Attention module of diffusers with a submodule `mhla`.
        hidden_states: `[B, T, hidden]`.
        rotary_emb: Cosines and sines `[1, T, 1, K / 2]`, for neighbouring pairs of channels, or what rotates
            `[B, T, H, K]`.
        perturbed: Lets every token attend to itself alone, as a guider's hook on `attn` does.
        **where: `grid` of the T tokens and `block_order`, and `shard` under context parallelism; see
            [`mhla_hf.layers.mhla.MHLA`].

    Returns:
        `[B, T, hidden]`.
    """
    if perturbed or is_attention_skipped(attn):
        value = attn.to_v(hidden_states).unflatten(2, (attn.heads, -1))
        output = attn.mhla(value, value, value, hidden_states=hidden_states, identity=True, **where)
    else:
        if attn.fused_projections:
            query, key, value = attn.to_qkv(hidden_states).chunk(3, dim=-1)
        else:
            query, key, value = attn.to_q(hidden_states), attn.to_k(hidden_states), attn.to_v(hidden_states)
        query, key, value = (tokens.unflatten(2, (attn.heads, -1)) for tokens in (query, key, value))
        rotary = PairwiseRotary(*rotary_emb) if isinstance(rotary_emb, tuple) else rotary_emb
        # Where there are such norms, they go across heads.
        norms = None if attn.norm_q is None else HeadNorms(attn.norm_q, attn.norm_k)
        output = attn.mhla(query, key, value, hidden_states=hidden_states, rotary=rotary, norms=norms, **where)
    if getattr(attn, "to_gate_logits", None) is not None:
        # The gates of heads in LTX-2.
        output = output * (2 * attn.to_gate_logits(hidden_states).sigmoid()).unsqueeze(-1)
    return attn.to_out[1](attn.to_out[0](output.flatten(2, 3).type_as(hidden_states)))


def attend_in_parts(processor: object, own: Any, attn: Any, hidden_states: torch.Tensor, **kwargs: Any) -> Any:
    """Attend as a processor of perturbed-attention guidance does, with MHLA in place of its attention.

    Args:
        processor: The processor.
        own: The layer's MHLA processor.
        attn: The attention module.
        hidden_states: `[B, T, hidden]`, B a multiple of 2, or 3 with classifier-free guidance.
        **kwargs: Further arguments of `own`.

    Raises:
        ValueError: If it is another processor, which would ignore the layer's weights, or the batch has no such parts.
    """
    parts = _PARTS.get(type(processor).__name__, 0)
    if not parts or hidden_states.shape[0] % parts:
        # Raises: none of them is an MHLA processor.
        attn.check_processor(processor)
    size = hidden_states.shape[0] // parts
    attended = own(attn, hidden_states[:-size], **kwargs)
    return torch.cat([attended, own(attn, hidden_states[-size:], perturbed=True, **kwargs)])


def tables_with_grid(
    tables: tuple[torch.Tensor, torch.Tensor], grid: Sequence[int], layout: BlockLayout | None = None
) -> tuple[torch.Tensor, ...]:
    """Return the rotary tables of all layers: those of upstream, and compact ones for MHLA layers.

    Args:
        tables: Cosines and sines `[1, T, 1, K]`, each value twice in a row.
        grid: Number of tokens along each axis.
        layout: The layout in whose order the tokens come; `None` for rows.

    Returns:
        Cosines and sines `(1, *grid, 1, K)`, with one more axis of 1 where tokens come in block order; cosines and
        sines `[1, T, 1, K / 2]`, each value once, dense.
    """
    if layout is None:
        return *(table.unflatten(1, grid) for table in tables), *compact(*tables)
    cosine, sine = (layout.to_block_order(table) for table in tables)
    return *(table.unflatten(1, (*grid, 1)) for table in (cosine, sine)), *compact(cosine, sine)


def compact(cosine: torch.Tensor, sine: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rotary tables `[..., K]` that have each value twice in a row as dense ones `[..., K / 2]`."""
    return cosine[..., 0::2].contiguous(), sine[..., 1::2].contiguous()


def tables_of_layer(
    tables: tuple[torch.Tensor, ...], is_mhla: bool
) -> tuple[tuple[torch.Tensor, ...], tuple[int, ...] | None, bool]:
    """Return the tables for one layer, the token grid if they carry one, and whether tokens come in block order.

    Args:
        tables: Tables of [`tables_with_grid`]; others are returned as they are, without a grid.
        is_mhla: Whether the layer is MHLA, and gets tables `[1, T, 1, K / 2]`; others get upstream's.
    """
    if tables[0].ndim < 6:
        return tables, None, False
    flat = tables[2:] if is_mhla else tuple(table.flatten(1, -3) for table in tables[:2])
    return flat, tuple(tables[0].shape[1:4]), tables[0].ndim > 6


class RotaryWithGrid(Upstream):
    """Goes before a rotary class of diffusers in the bases of its MHLA version."""

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return upstream's values in tables that carry the grid and the order; see [`tables_with_grid`]."""
        grid = tuple(size // patch for size, patch in zip(hidden_states.shape[2:], self.patch_size))
        return tables_with_grid(super().forward(hidden_states), grid, carried_layout(hidden_states))


class MHLAAttnProcessor:
    """Stateless processor of an MHLA self-attention layer; the parameters live in `attn.mhla`."""

    # Set by `enable_parallelism`.
    _parallel_config = None

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        **where: Any,
    ) -> torch.Tensor:
        """Attend over `hidden_states` `[B, T, hidden]`; see [`attend`] for the other arguments.

        Raises:
            ValueError: If a context or an attention mask is given, or the grid is missing.
        """
        if encoder_hidden_states is not None or attention_mask is not None:
            raise ValueError("MHLA is self-attention and takes neither encoder_hidden_states nor attention_mask.")
        return attend(attn, hidden_states, **where)


skip_attention_in(MHLAAttnProcessor)


class KeepsMHLAProcessor(Upstream):
    """Goes before an attention class of diffusers in the bases of its MHLA version."""

    # Processor class of layers with MHLA parameters.
    mhla_processor_class: ClassVar[Any] = MHLAAttnProcessor

    def set_processor(self, processor: object) -> None:
        """As upstream, but an MHLA layer keeps an MHLA processor: another one would drop its trained weights.

        Raises:
            ValueError: If a layer that has MHLA parameters is given another kind of processor.
        """
        self.check_processor(processor)
        super().set_processor(processor)

    def check_processor(self, processor: object) -> None:
        """Raise as `set_processor` does, and changes nothing."""
        if hasattr(self, "mhla") and not isinstance(processor, self.mhla_processor_class):
            raise ValueError(
                f"This layer's weights are MHLA; {type(processor).__name__} would ignore them. Load the original "
                "checkpoint instead, or leave this layer out of `layers` when you convert."
            )


class KeepsMHLAProcessors(MHLAModelMixin):
    """Mixin for models with a model-wide `set_attn_processor`; list it first."""

    def set_attn_processor(self, processor: Any) -> None:
        """As upstream, but all or nothing: MHLA layers keep MHLA processors.

        Args:
            processor: One for all layers, or a dict by the names of `attn_processors`.

        Raises:
            ValueError: If a layer that has MHLA parameters is given another kind of processor, or the dict has not one
                for each name; none is changed.
        """
        names = self.attn_processors
        each = processor if isinstance(processor, dict) else dict.fromkeys(names, processor)
        # Upstream itself rejects a dict that does not cover every layer.
        for name, module in self.named_modules() if len(each) == len(names) else ():
            if isinstance(module, KeepsMHLAProcessor) and f"{name}.processor" in each:
                module.check_processor(each[f"{name}.processor"])
        # Upstream empties the dict that it is given.
        super().set_attn_processor(dict(processor) if isinstance(processor, dict) else processor)


class MHLAImageAttention(KeepsMHLAProcessor, Attention):
    """Self-attention of every layer, MHLA or not: only MHLA layers get the grid.

    It is an argument, so nothing is remembered between calls: checkpointing, compilation and two forwards at different
    grids before one backward cannot go wrong.
    """

    def forward(
        self,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        grid: tuple[int, ...] | None = None,
        block_order: bool = False,
        **kwargs: Any,
    ) -> torch.Tensor:
        if not hasattr(self, "mhla"):
            return super().forward(hidden_states, encoder_hidden_states, attention_mask, **kwargs)
        kwargs.update(encoder_hidden_states=encoder_hidden_states, attention_mask=attention_mask)
        kwargs.update(grid=grid, block_order=block_order)
        if isinstance(self.processor, self.mhla_processor_class):
            return self.processor(self, hidden_states, **kwargs)
        # Pipelines of perturbed-attention guidance set the attribute and put the processors back afterwards.
        return attend_in_parts(self.processor, self.mhla_processor_class(), self, hidden_states, **kwargs)


class RefusesFusedProjections(Upstream):
    """For models whose `fuse_qkv_projections` would replace the processors of MHLA layers; list it first."""

    def fuse_qkv_projections(self) -> None:
        """Not with MHLA layers.

        Raises:
            ValueError: Always. Upstream would set processors that ignore MHLA.
        """
        raise ValueError("Projections of MHLA layers cannot be fused; leave them as they are.")


class MHLAImageModelMixin(MHLAModelMixin):
    """`MHLAModelMixin` for models with `transformer_blocks[i].attn1`, and square `sample_size` and `patch_size`."""

    default_grid: ClassVar[tuple[int, ...]] = (32, 32)
    attention_class = MHLAImageAttention

    @classmethod
    def config_grid(cls, config: Mapping[str, Any]) -> tuple[int, ...] | None:
        """The grid of an image of the size that the model was made for, in patches."""
        size = cls.config_value(config, "sample_size") // cls.config_value(config, "patch_size")
        return (size, size)
