# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed ZeRO-3: its options, and what it has cut into one slice per process, put together and cut again.

Parameters of a model that DeepSpeed has taken over are told by their `ds_id`. Every process must call these functions
for the same parameters in the same order.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from accelerate import Accelerator, DistributedType
from torch import nn

from .config import TrainingConfig


# What AdamW keeps of each element of a parameter.
_MOMENTS = ("exp_avg", "exp_avg_sq")


def is_asked_for() -> bool:
    """Whether `accelerate launch` was told to use DeepSpeed."""
    return os.environ.get("ACCELERATE_USE_DEEPSPEED", "").lower() == "true"


def set_options(accelerator: Accelerator, config: TrainingConfig) -> None:
    """Gives DeepSpeed the options of a run; does nothing without it."""
    if accelerator.distributed_type != DistributedType.DEEPSPEED:
        return
    options = accelerator.state.deepspeed_plugin.deepspeed_config
    options["train_micro_batch_size_per_gpu"] = config.batch_size
    options["gradient_accumulation_steps"] = 1
    options["gradient_clipping"] = config.max_grad_norm
    precision = config.mixed_precision or os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if precision == "bf16":
        # DeepSpeed's own bf16 mode would round rotary tables and all inputs.
        options["torch_autocast"] = {"enabled": True, "dtype": "bfloat16"}


def check_options(accelerator: Accelerator, config: TrainingConfig) -> None:
    """Refuses what does not run under DeepSpeed.

    Raises:
        ValueError: The message names the option.
    """
    stage = accelerator.state.deepspeed_plugin.zero_stage
    if stage != 3:
        raise ValueError(f"zero_stage must be 3 in accelerate's DeepSpeed configuration, got {stage}")
    if config.gradient_accumulation_steps != 1:
        raise ValueError("gradient_accumulation_steps must be 1 under DeepSpeed; use FSDP 2, or a larger batch_size")
    if config.ema_decay is not None:
        raise ValueError("ema_decay does not run under DeepSpeed; use FSDP 2")
    if "fp16" in (config.mixed_precision, os.environ.get("ACCELERATE_MIXED_PRECISION")):
        raise ValueError("mixed_precision must be bf16 or no under DeepSpeed, got 'fp16'")


def is_sliced(tensor: torch.Tensor) -> bool:
    """Whether a parameter is one of DeepSpeed's."""
    return hasattr(tensor, "ds_id")


def whole_parameter(parameter: nn.Parameter) -> torch.Tensor:
    """The value of a parameter, fp32 if it trains."""
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param

    if parameter.requires_grad:
        return safe_get_full_fp32_param(parameter)
    with deepspeed.zero.GatheredParameters([parameter]):
        return parameter.detach().clone()


def whole_moments(parameter: nn.Parameter) -> dict[str, torch.Tensor]:
    """AdamW's state of a parameter that trains, under the names it has in torch."""
    from deepspeed.utils import safe_get_full_optimizer_state

    _, state = _flat_state(parameter)
    # One step count stands for many parameters, which files hold by themselves.
    moments = {kind: safe_get_full_optimizer_state(parameter, kind) for kind in _MOMENTS}
    return {**moments, "step": torch.as_tensor(state["step"]).clone()}


def load_moment(parameter: nn.Parameter, kind: str, value: torch.Tensor) -> None:
    """Puts one of the tensors of `whole_moments` into the optimizer.

    Args:
        parameter: The parameter.
        kind: Name of the tensor.
        value: The tensor, whole.
    """
    from deepspeed.utils import safe_set_local_optimizer_state

    flat, state = _flat_state(parameter)
    if kind == "step":
        state[kind] = value
        return
    # As before the optimizer's first step, which would make them.
    state.setdefault(kind, torch.zeros_like(flat))
    size = parameter.ds_tensor.numel()  # type: ignore[attr-defined]
    begin = size * torch.distributed.get_rank()
    # The slice of the last process is filled up with zeros.
    piece = value.flatten()[begin : begin + size]
    piece = torch.cat([piece, piece.new_zeros(size - len(piece))])
    safe_set_local_optimizer_state(parameter, piece.to(flat.device, flat.dtype), kind)


def _flat_state(parameter: nn.Parameter) -> tuple[torch.Tensor, dict[str, Any]]:
    """The slices of many parameters that the optimizer has as one, and its state of them."""
    optimizer = parameter._z3_optimizer  # type: ignore[attr-defined]
    group, _, _ = optimizer.grad_position[optimizer.get_param_id(parameter)]
    flat = optimizer.fp32_partitioned_groups_flat[group]
    return flat, optimizer.optimizer.state[flat]
