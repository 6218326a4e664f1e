# SPDX-License-Identifier: Apache-2.0
"""Kinds of calls of a layer: what a plan of a call may depend on, and what computes the call."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.modules.module import _has_any_global_hook

from ..config import MHLAConfig
from ..ops.backends import choose_backend, kernels_pass
from ..ops.definitions import FEATURE_MAPS
from ..ops.plans import is_plain, kind_of
from .fused import Call, HalfRotary, OutputNorm, PairwiseRotary, can_fuse, can_rotate, has_hooks
from .mixing import LearnedFeatureMap


def kind_of_call(layer: Any, call: Call, grid: Any, *options: Any) -> tuple[Any, tuple[torch.Tensor | None, ...]]:
    """Return the kind of a call, see [`mhla_hf.ops.plans`], and all tensors that it depends on beside the gate.

    Calls of one kind have the same layout and path. There is none for sequences with padding, documents or a
    state, shards, and modules or rotations that may compute anything.
    """
    sequence, rotary, norms, maps = call.sequence, call.rotary, call.norms, layer._feature_maps
    modules = (layer.output_norm, *maps, *((None, None) if norms is None else (norms.query, norms.key)))
    if (
        call.shard is not None
        or (sequence is not None and not sequence.is_plain)
        or type(rotary) not in (type(None), PairwiseRotary, HalfRotary)
        or type(layer.output_norm) not in (type(None), OutputNorm)
        or (maps[0] is not None and not type(maps[0]) is type(maps[1]) is LearnedFeatureMap)
        or (norms is not None and not norms.are_plain(call.query.device))
        or any(module is not None and has_hooks(module) for module in modules[:3])
        or _has_any_global_hook()
    ):
        return None, ()
    weights = (layer.mixing, layer.mixing_decay, *[None if module is None else module.weight for module in modules])
    tables = (rotary.cosine, rotary.sine) if isinstance(rotary, PairwiseRotary) else (None, None)
    if any(table is not None and table.requires_grad for table in tables):
        return None, ()
    tensors = *call.tensors, *weights, *tables
    if not is_plain(tensors):
        return None, ()
    try:
        place = None if grid is None else tuple(map(int, grid)), tuple(map(type, grid or ()))
    except (OverflowError, RuntimeError, TypeError, ValueError):
        return None, ()
    kind = kind_of(
        tensors, type(layer), id(layer.config), layer.blocks, layer.num_prefix_tokens, layer.num_heads,
        layer.window_size, place, None if sequence is None else sequence.causal, type(rotary), call.scaling,
        type(call.scaling), *[getattr(module, "eps", None) for module in modules], *map(type, modules),
        torch.is_grad_enabled(), *options,
    )  # fmt: skip
    if kind is None or tables[0] is None or tables[1] is None or not can_rotate(layer.config, call):
        return kind, tensors
    from ..ops.triton.fused_products import rotary_table

    # Made for all layers at once; the call that is recorded finds the same.
    return kind, (*tensors, rotary_table(tables[0], tables[1], call.value.dtype))


def choose_path(config: MHLAConfig, call: Call, output_norm: OutputNorm | None) -> str:
    """Return what computes a call.

    Returns:
        `"fused"` for the kernels that compute a whole layer, norms, rotary embedding, output norm and gate
        included; else the backend of the operator, `"triton"` or `"torch"`.
    """
    sequence, query, value = call.sequence, call.query, call.value
    if call.shard is not None:
        return "torch"
    if sequence is not None and sequence.state is not None:
        if query.shape[1] > 1:
            return "torch"
        family = "decode"
    else:
        family = "causal" if (config.causal if sequence is None else sequence.causal) else "block"
    width = query.shape[3] * FEATURE_MAPS[config.feature_map].width_factor
    # Kernels for one token multiply no matrices. The fused ones are tried first: no family is checked yet.
    options: dict[str, Any] = {"width": width, "family": family, "products": family != "decode"}
    backend = choose_backend(config.backend, query, call.key, value, **options, check=False)
    if backend == "triton" and can_fuse(config, call, output_norm):
        return "fused"
    passes = backend == "triton" and kernels_pass(family, query, value, width, config.normalizer)
    return "triton" if passes else "torch"
