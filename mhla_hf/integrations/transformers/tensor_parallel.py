# SPDX-License-Identifier: Apache-2.0
"""Tensor parallelism: every process keeps the MHLA parameters of its own heads.

Where a model's plan splits the heads of an attention module, its `mhla` is split with them: mixing weights and learned
feature maps of each head, the bias of the window, the gate and the convolution of the values by their rows. The
output norm and mixing weights that all heads share stay whole, with the sum of all processes' gradients. Checkpoints
are split and gathered like any other parameter.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from ...layers.mhla import MHLA
from ...utils.compat.transformers import add_parallel_rules, parallel_tools


TensorParallelLayer: Any
TensorParallelLayer, _STYLES, _generic_name = parallel_tools()

STYLE = "mhla_heads"
# Rules by which a projection puts out the heads of its own process only.
_SPLITTING = ("colwise", "packed_colwise")
_SUMMED = "replicated_with_grad_allreduce"
_MIXING = ("mixing", "mixing_decay")


class HeadParallel(TensorParallelLayer):
    """Split the parameters of a module by heads; runs it with its own process's part of them."""

    def should_use_local_tensors(self, module: nn.Module) -> bool:
        """Always: each process computes with its own heads alone."""
        return True

    def shard_param(self, module: nn.Module, param: str, mesh: Any) -> None:
        """Split one parameter; mixing weights that all heads share stay whole."""
        whole = module._parameters.get(param)
        if whole is None or (param in _MIXING and _is_shared(module)):
            return
        split = distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)
        module._parameters[param] = nn.Parameter(split, requires_grad=whole.requires_grad)

    def install_forward(self, module: nn.Module, mesh: Any) -> nn.Module:
        """Make the module expect its own process's heads alone."""
        if isinstance(module, MHLA):
            module.num_heads //= mesh.size()
            module.num_key_value_heads //= mesh.size()
        elif isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
            module.groups //= mesh.size()
        module = super().install_forward(module, mesh)
        if _is_shared(module):
            module.forward = _STYLES[_SUMMED].install_forward(_MixingAlone(module), mesh).forward
        return module


class _MixingAlone:
    """Stands for a module of which the gradient of the mixing weights alone is to be summed over processes."""

    def __init__(self, module: nn.Module) -> None:
        self.module, self.forward = module, module.forward

    def named_parameters(self, recurse: bool = False) -> list[tuple[str, nn.Parameter]]:
        """The mixing weights, as they are just now."""
        found = ((name, self.module._parameters.get(name)) for name in _MIXING)
        return [(name, parameter) for name, parameter in found if parameter is not None]


def plan_heads(model: Any, distributed_config: Any) -> None:
    """Add the rules of MHLA parameters to a model's plan, before any weight is read.

    Args:
        model: A model whose parameters are on the meta device.
        distributed_config: Configuration of the distribution.

    Raises:
        ValueError: If a layer's heads cannot be split evenly.
    """
    size, given = distributed_config.tp_size, distributed_config.tp_plan
    if size < 2 or given == {}:
        return
    given = given if isinstance(given, dict) else {}
    # Models inside others know the end of a given rule's name alone.
    plan = {
        rule: next((given[name] for name in given if name.endswith(f".{rule}")), style)
        for rule, style in model.tp_plan.items()
    } | given
    rules: dict[str, str] = {}
    for name, attention in model.named_modules():
        mhla = getattr(attention, "mhla", None)
        generic = _generic_name(name)
        if isinstance(mhla, MHLA) and any(
            rule.startswith(f"{generic}.") and style in _SPLITTING for rule, style in plan.items()
        ):
            _check_heads(f"{name}.mhla", mhla, size)
            rules.update({f"{generic}.mhla{part}": style for part, style in _rules(mhla).items()})
    add_parallel_rules(model, rules)


def _rules(mhla: MHLA) -> dict[str, str]:
    """Style of each part of a layer."""
    styles = {"feature_map_query": STYLE, "feature_map_key": STYLE, "lepe": STYLE, "gate": "colwise"}
    styles["output_norm"] = _SUMMED
    return {"": STYLE, **{f".{part}": style for part, style in styles.items() if getattr(mhla, part) is not None}}


def _check_heads(name: str, mhla: MHLA, size: int) -> None:
    heads, grouped = mhla.num_heads, mhla.num_key_value_heads
    if mhla.groups is not None:
        raise ValueError(f"{name}: layers of which some heads stay softmax cannot be split over processes.")
    if heads % size or grouped % size:
        learned = mhla.feature_map_key is not None and heads % size == 0
        raise ValueError(
            f"{name}.{'feature_map_key.weight' if learned else 'mixing'} cannot be split over {size} processes: the "
            f"layer has {heads} query and {grouped} key/value heads. Choose a tp_size that divides both."
        )


def _is_shared(module: nn.Module) -> bool:
    return isinstance(module, MHLA) and module.config.mixing_heads == "shared"


def as_distributed(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A whole tensor, laid out as `like` is if that one is distributed over processes."""
    if not isinstance(like, DTensor):
        return tensor
    return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)


_STYLES.register(STYLE, HeadParallel())
