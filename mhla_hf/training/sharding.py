# SPDX-License-Identifier: Apache-2.0
"""Parameters sharded over processes, by FSDP 2 or DeepSpeed ZeRO-3: gathered, and sharded again.

FSDP 2 makes `DTensor`s of parameters. Those that DeepSpeed has taken over have a `ds_id`, and one slice in every
process. Every process must call these functions for the same parameters in the same order.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator, DistributedType
from torch import nn

from .config import TrainingConfig


# AdamW's state of each element of a parameter.
_MOMENTS = ("exp_avg", "exp_avg_sq")


def uses_deepspeed() -> bool:
    """True if `accelerate launch` uses DeepSpeed."""
    return os.environ.get("ACCELERATE_USE_DEEPSPEED", "").lower() == "true"


def set_deepspeed_options(accelerator: Accelerator, config: TrainingConfig) -> None:
    """Pass the options of a run to DeepSpeed, if it is in use."""
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


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Gather a tensor on the CPU if it is sharded over processes; in fp32 if DeepSpeed trains it."""
    if _is_sliced(tensor):
        import deepspeed
        from deepspeed.utils import safe_get_full_fp32_param

        if tensor.requires_grad:
            return safe_get_full_fp32_param(tensor).detach().cpu().contiguous()
        with deepspeed.zero.GatheredParameters([tensor]):
            return tensor.detach().clone().cpu().contiguous()
    gather = getattr(tensor, "full_tensor", None)
    return (gather() if gather is not None else tensor).detach().cpu().contiguous()


def full_shape(parameter: torch.Tensor) -> torch.Size:
    """Return the unsharded shape of a parameter; under DeepSpeed it has no elements while it is not in use."""
    return getattr(parameter, "ds_shape", parameter.shape)


def shard_like(value: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Move an unsharded tensor to the device and type of a parameter, and shard it in the same way."""
    mesh, placements = (getattr(parameter, name, None) for name in ("device_mesh", "placements"))
    if mesh is None:
        return value.to(device=parameter.device, dtype=parameter.dtype)
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value.to(parameter.dtype), mesh, placements)


def full_moments(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
    """Gather AdamW's state of a parameter on the CPU, under the names it has in torch."""
    state: Mapping[str, Any] = optimizer.state.get(parameter, {})
    if _is_sliced(parameter):
        from deepspeed.utils import safe_get_full_optimizer_state

        state = {kind: safe_get_full_optimizer_state(parameter, kind) for kind in _MOMENTS}
        # One step count stands for many parameters; files hold it for each.
        state = {**state, "step": torch.as_tensor(_flat_state(parameter)[1]["step"]).clone()}
    return {kind: full_tensor(torch.as_tensor(value)) for kind, value in state.items()}


def load_moment(optimizer: torch.optim.Optimizer, parameter: nn.Parameter, kind: str, value: torch.Tensor) -> None:
    """Load one of the tensors of `full_moments` into the optimizer.

    Args:
        optimizer: AdamW.
        parameter: The parameter.
        kind: Name of the tensor.
        value: The unsharded tensor.
    """
    if not _is_sliced(parameter):
        # The step count stays on the CPU, where AdamW makes it unless it is fused.
        on_cpu = kind == "step" and not optimizer.defaults.get("fused")
        if kind == "step":
            value = value if on_cpu else value.to(parameter.device)
        else:
            value = shard_like(value, parameter)
        optimizer.state[parameter][kind] = value
        return
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


def unsharded(model: nn.Module) -> nn.Module:
    """Return the model, or an unsharded copy on the CPU if it is sharded. Every process must call it."""
    if not any(hasattr(each, "full_tensor") or _is_sliced(each) for each in model.parameters()):
        return model
    # The entries of a state dict are no parameters any more, which DeepSpeed needs to gather them.
    tensors = {**model.state_dict(), **dict(model.named_parameters())}
    state = {name: full_tensor(tensor) for name, tensor in tensors.items()}
    # fully_shard derives a class from the model's; the first base that is not FSDP's is the one to save.
    cls: Any = next(base for base in type(model).__mro__ if not base.__name__.startswith("FSDP"))
    copy = cls.from_config(model.config)
    copy.load_state_dict(state)
    return copy


@contextmanager
def root_gathered(module: nn.Module) -> Iterator[None]:
    """A context in which parts of a model under FSDP 2 can be called by themselves, once the model has run.

    Blocks gather their parameters when they are called, the rest is gathered when the whole model is. Every process
    must enter it.

    Args:
        module: The module that was sharded as a whole; any other is left alone.
    """
    if not is_fully_sharded(module):
        yield
        return
    sharded: Any = module
    sharded.unshard()
    try:
        yield
    finally:
        sharded.reshard()


def is_fully_sharded(module: nn.Module) -> bool:
    """True for a module that FSDP 2 has sharded; does not import FSDP, which some builds of torch lack."""
    return any(base.__name__ == "FSDPModule" for base in type(module).__mro__)


def _is_sliced(tensor: torch.Tensor) -> bool:
    """True for a parameter that DeepSpeed has taken over."""
    return hasattr(tensor, "ds_id")


def _flat_state(parameter: nn.Parameter) -> tuple[torch.Tensor, dict[str, Any]]:
    """The slices of many parameters, which DeepSpeed's optimizer holds as one, and its state of them."""
    optimizer = parameter._z3_optimizer  # type: ignore[attr-defined]
    group, _, _ = optimizer.grad_position[optimizer.get_param_id(parameter)]
    flat = optimizer.fp32_partitioned_groups_flat[group]
    return flat, optimizer.optimizer.state[flat]
