# SPDX-License-Identifier: Apache-2.0
"""Context parallelism of diffusers: support by model, and the tokens of each process."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ..ops.sharded import TokenShard
from ..utils.compat.diffusers import context_parallel_group, parallel_config_of, set_parallel_config


def check_parallelism(model: Any, config: Any) -> None:
    """Checks that a model can be split as its configuration says, before anything is changed.

    Args:
        model: The model.
        config: `ContextParallelConfig`, `TensorParallelConfig`, or a `ParallelConfig` of one of them.

    Raises:
        ValueError: If it is not a sequence that MHLA layers can have a part of.
    """
    if not model.supports_context_parallel or _context_config(config) is None:
        supported = (
            "context parallelism alone"
            if model.supports_context_parallel
            else "neither context nor tensor parallelism"
        )
        raise ValueError(f"{type(model).__name__} supports {supported}, got {type(config).__name__}.")
    if getattr(model.mhla_config, "window", None) is not None:
        raise ValueError(
            "Context parallelism does not reach over a softmax window: convert without the option window."
        )


def resolve_parallel_config(model: Any, config: Any) -> Any:
    """Sets up context parallelism among processes of a CPU; upstream counts accelerators there, and has none.

    Args:
        model: Keeps the configuration.
        config: As for [`check_parallelism`].

    Returns:
        The `ParallelConfig`; `None` where upstream can do it, or says why not.
    """
    if not dist.is_available() or not dist.is_initialized() or torch.accelerator.is_available():
        return None
    from diffusers import ParallelConfig

    context = _context_config(config)
    mesh = context.mesh
    if mesh is None:
        mesh = dist.init_device_mesh("cpu", context.mesh_shape, mesh_dim_names=context.mesh_dim_names)
    resolved = ParallelConfig(context_parallel_config=context)
    resolved.setup(dist.get_rank(), dist.get_world_size(), torch.device("cpu"), mesh=mesh)
    set_parallel_config(model, resolved)
    return resolved


def shard_of(processor: Any, num_tokens: int) -> TokenShard | None:
    """Returns the part of a sequence that an attention module gets.

    Args:
        processor: The module's processor, which `enable_parallelism` tells of context parallelism.
        num_tokens: Tokens of the sequence.

    Returns:
        This process's tokens; `None` for all of them.
    """
    context = _context_config(parallel_config_of(processor))
    return None if context is None else TokenShard(context_parallel_group(context), num_tokens)


def _context_config(config: Any) -> Any:
    """The `ContextParallelConfig` that a configuration is or holds."""
    return config if hasattr(config, "ulysses_degree") else getattr(config, "context_parallel_config", None)
