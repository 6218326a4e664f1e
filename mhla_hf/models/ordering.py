# SPDX-License-Identifier: Apache-2.0
"""Tokens in block order through a whole model, in place of a permutation of q, k, v and outputs in every layer.

Everything but MHLA works token by token or, as softmax attention, on a set of tokens. So what a model reads for each
token (patches of latents, positions) is put in block order before it, and its prediction back in rows after it.
Rotary tables and arguments of attention tell layers of the order, so that nothing is remembered between calls.

A model stays in row order unless all that its blocks are made of is known here to work token by token.

Shape letters: B batch, C channels, T tokens.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn as nn
from torch.nn.modules.module import _has_any_global_hook

from ..layers.fused import has_hooks
from ..layers.mixing import layout_at
from ..layouts.blocks import BlockLayout, is_open
from ..utils.compat.diffusers import parallel_config_of


# Where latents carry the layout in whose order their patches are.
_CARRIED = "_mhla_layout"
# What works token by token, by name, since diffusers may drop some of them: blocks, attention in them, and arguments
# of `forward` that no token has a part of its own in.
_BLOCKS = (
    "BasicTransformerBlock", "ChromaSingleTransformerBlock", "ChromaTransformerBlock", "FluxSingleTransformerBlock",
    "FluxTransformerBlock", "HunyuanVideo15TransformerBlock", "HunyuanVideoSingleTransformerBlock",
    "HunyuanVideoTransformerBlock", "SkyReelsV2TransformerBlock", "WanTransformerBlock", "WanVACETransformerBlock",
)  # fmt: skip
_ATTENTIONS = ("attn", "attn1", "attn2")
_PROCESSORS = (
    "AttnProcessor", "AttnProcessor2_0", "FluxAttnProcessor", "HunyuanVideo15AttnProcessor2_0",
    "HunyuanVideoAttnProcessor2_0", "MHLAAttnProcessor", "MHLAJointAttnProcessor",
    "SkyReelsV2AttnProcessor", "WanAttnProcessor",
)  # fmt: skip
_LIBRARIES = ("diffusers", "mhla_hf", "peft")
_SHARED = (
    "attention_kwargs", "control_hidden_states_scale", "encoder_attention_mask", "encoder_attention_mask_2",
    "encoder_hidden_states", "encoder_hidden_states_2", "encoder_hidden_states_image", "fps", "guidance",
    "image_embeds", "pooled_projections", "return_dict", "timestep_r",
)  # fmt: skip


def order_of(model: Any, grid: Sequence[int]) -> BlockLayout | None:
    """Return the layout in whose order the tokens of a model may come; `None` where they have to come row by row.

    Args:
        model: The model. Its attribute `block_order` turns this off.
        grid: Number of tokens along each axis.
    """
    layers = list(model.mhla_modules().values())
    if not model.block_order or not layers or torch.compiler.is_exporting() or any(is_open(side) for side in grid):
        return None
    first = layers[0]
    blocks = [block for child in model.children() if isinstance(child, nn.ModuleList) for block in child]
    # A softmax window needs rows, and would bring them back in every layer.
    if first.window_bias is not None or any(
        x.blocks != first.blocks or (x.config is not first.config and x.config != first.config) for x in layers
    ):
        return None
    parts: list[Any] = [getattr(block, name, None) for block in blocks for name in _ATTENTIONS]
    attentions = [part for part in parts if part is not None]
    processors = [getattr(attention, "processor", None) for attention in attentions]
    if (
        not {id(attention) for attention in model._self_attentions()} <= {id(attention) for attention in attentions}
        or not all(_is_known(block, _BLOCKS) for block in blocks)
        or not all(_is_known(processor, _PROCESSORS) for processor in processors)
        or not all(_is_known(attention) for attention in attentions)
        or any(parallel_config_of(processor) is not None for processor in processors)
    ):
        return None
    # Hooks may read tokens by their places, as those that blur queries do.
    if _has_any_global_hook() or any(has_hooks(module) for module in model.modules() if module is not model):
        return None
    # Of the grid alone: text that is a block beside it is no part of its tokens.
    layout = layout_at(first.config, first.blocks, grid)
    return layout if layout.num_blocks > 1 else None


def _is_known(module: Any, names: Sequence[str] = ()) -> bool:
    """Return whether the class of a module is one of diffusers, of this package, or of peft, which wraps parts."""
    return (not names or type(module).__name__ in names) and _library_of(type(module)) in _LIBRARIES


@torch.compiler.assume_constant_result
def _library_of(kind: type) -> str:
    return kind.__module__.partition(".")[0]


def carried_layout(latents: torch.Tensor) -> BlockLayout | None:
    """Return the layout in whose order the patches of latents are, for a `rope` that reads them; `None` for rows."""
    carried = getattr(latents, _CARRIED, None)
    if carried is None:
        return None
    carried["is_taken"] = True
    return carried["layout"]


def latents_in_block_order(upstream: Any, *latents: str) -> Callable[..., Any]:
    """Return a `forward` that calls that of a class with the patches of its latents in block order.

    The `rope` of the model reads the latents, and hands the order on.

    Args:
        upstream: A class of diffusers, whose `timestep` may have a value for each token.
        *latents: Names of arguments `[B, C, *sizes]`, the first one that of the latents that it predicts for.
    """
    original = upstream.forward
    names = list(inspect.signature(original).parameters)[1:]

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        classes = type(self).__mro__
        own = next(index for index, kind in enumerate(classes) if vars(kind).get("forward") is forward)
        following = next(vars(kind)["forward"] for kind in classes[own + 1 :] if "forward" in vars(kind))
        given = {**dict(zip(names, args)), **kwargs}
        # Others replace `forward`, or come between: to skip blocks for example.
        layout = _layout_for_call(self, given, latents) if following is original else None
        if layout is None:
            return following(self, *args, **kwargs)
        patch = _patch_of(self)
        carried = {"layout": layout, "is_taken": False}
        moved = {name: _ordered(given[name], layout, patch) for name in latents}
        setattr(moved[latents[0]], _CARRIED, carried)
        if given["timestep"].ndim == 2:
            moved["timestep"] = layout.to_block_order(given["timestep"])
        # By place or by name, as they came: upstream takes the scale of adapters out of names alone.
        args = (*(moved.get(name, value) for name, value in zip(names, args)), *args[len(names) :])
        output = original(self, *args, **{name: moved.get(name, value) for name, value in kwargs.items()})
        assert carried["is_taken"]
        return with_sample(output, lambda sample: _in_rows(sample, layout, patch))

    return forward


def with_sample(output: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return the output of a model, a tuple or an object, with a function of its sample in place of that."""
    if isinstance(output, tuple):
        return function(output[0]), *output[1:]
    return type(output)(sample=function(output.sample))


def only_shared(given: Mapping[str, Any], *known: str) -> bool:
    """Return whether no argument of a call may hold a value for each token, but for known ones."""
    return not any(
        value is not None and value is not False for name, value in given.items() if name not in (*_SHARED, *known)
    )


def _layout_for_call(model: Any, given: Mapping[str, Any], latents: Sequence[str]) -> BlockLayout | None:
    """The layout in whose order the tokens of a call may come."""
    tensors, patch = [given.get(name) for name in latents], _patch_of(model)
    sizes = [x.shape[2:] for x in tensors if x is not None]
    if len(sizes) < len(latents) or any(size != sizes[0] for size in sizes) or len(sizes[0]) != len(patch):
        return None
    timestep, grid = given.get("timestep"), [size // side for size, side in zip(sizes[0], patch)]
    if not only_shared(given, *latents, "timestep") or not isinstance(timestep, torch.Tensor):
        return None
    if any(size % side for size, side in zip(sizes[0], patch)):
        return None
    if timestep.ndim > 2 or (timestep.ndim == 2 and timestep.shape[1] != math.prod(grid)):
        return None
    return order_of(model, grid)


def _patch_of(model: Any) -> tuple[int, ...]:
    side = model.config.patch_size
    return tuple(side) if isinstance(side, (list, tuple)) else (model.config.patch_size_t, side, side)


def _ordered(latents: torch.Tensor, layout: BlockLayout, patch: Sequence[int]) -> torch.Tensor:
    """Latents `[B, C, *sizes]` with their patches in block order."""
    return _move_patches(latents, layout.to_block_order, layout.grid, patch)


def _in_rows(latents: torch.Tensor, layout: BlockLayout, patch: Sequence[int]) -> torch.Tensor:
    """Undo [`_ordered`]."""
    return _move_patches(latents, layout.from_block_order, layout.grid, patch)


def _move_patches(
    latents: torch.Tensor,
    move: Callable[[torch.Tensor], torch.Tensor],
    grid: Sequence[int],
    patch: Sequence[int],
) -> torch.Tensor:
    axes = len(grid)
    split = latents
    for axis in reversed(range(axes)):
        split = split.unflatten(2 + axis, (grid[axis], patch[axis]))
    tokens = split.permute(0, *range(2, 2 + 2 * axes, 2), 1, *range(3, 3 + 2 * axes, 2)).flatten(1, axes)
    moved = move(tokens).unflatten(1, tuple(grid))
    order = [0, 1 + axes]
    for axis in range(axes):
        order += [1 + axis, 2 + axes + axis]
    moved = moved.permute(order)
    for axis in range(axes):
        moved = moved.flatten(2 + axis, 3 + axis)
    return moved.contiguous()
