# SPDX-License-Identifier: Apache-2.0
"""Block matching: train blocks with MHLA one after the other, each as a whole, on what the blocks before now give it.

Matching trains a layer on the original's inputs; in the converted model it meets those with the errors of the layers
before. A block here gets the inputs that it has in the converted model, and aims at what the original has after that
block; the last block of a model at the model's output. A step computes one block.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...layers.mhla import MHLA
from ..config import TrainingConfig
from ..data.batches import DataOrder
from .layer_training import LayerTraining
from .layers import (
    Batch,
    CallArguments,
    LayerCall,
    evaluating,
    first,
    first_output,
    mhla_layers,
    on_device,
    only_trainable,
    replaced_forward,
    take_hidden_states,
    trunk_for,
)
from .records import Records, choose_cache, free_room
from .teacher import SharedTeacher


STAGE = "blocks"


@dataclass(frozen=True)
class Block:
    """A block with an MHLA layer: to `LayerTraining` what an `AttentionLayer` is.

    Attributes:
        name: Its name in the model.
        attention: The block.
        mhla: Its MHLA layer.
        before: The blocks before it, of the last block of a model; `None` for others.
        model: Computes the model's output from a batch.
    """

    name: str
    attention: nn.Module
    mhla: MHLA
    before: Sequence[nn.Module] | None
    model: Callable[[Batch], torch.Tensor]
    projection: None = None
    projection_name: str = ""

    def __call__(self, arguments: CallArguments, hidden_states: torch.Tensor) -> torch.Tensor:
        """What the loss is of: the block's output `[B, T, D]`, or the model's.

        Args:
            arguments: The block's arguments, or the batch in place of the keyword arguments for the last block.
            hidden_states: `[B, T, D]`.
        """
        if self.before is None:
            args, kwargs = arguments.with_hidden_states(hidden_states)
            return first(self.attention(*args, **kwargs))

        def replace(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
            return take_hidden_states(args, kwargs, masks=True)[0].with_hidden_states(hidden_states)

        with ExitStack() as stack:
            for module in self.before:
                stack.enter_context(replaced_forward(module, _skip))
            handle = self.attention.register_forward_pre_hook(replace, with_kwargs=True, prepend=True)
            stack.callback(handle.remove)
            return self.model(arguments.kwargs)

    def modules(self) -> dict[str, nn.Module]:
        """The block, by its name."""
        return {self.name: self.attention}

    def parameters(self) -> dict[str, nn.Parameter]:
        """Its parameters, by their names in the model."""
        return {f"{self.name}.{own}": parameter for own, parameter in self.attention.named_parameters()}

    def record(self, batch: Batch, teacher: SharedTeacher, dtype: torch.dtype) -> LayerCall:
        """The block's call in the model as it is, with the original's output.

        Args:
            batch: Keyword arguments of the model's forward.
            teacher: The original.
            dtype: Type of the copies.
        """
        before = partial(self.attention.register_forward_pre_hook, with_kwargs=True, prepend=True)
        arguments, hidden_states = self._seen(batch, before, take_hidden_states)
        if self.before is None:
            after = self.attention.register_forward_hook
            target = teacher.compute(lambda model: self._seen(batch, after, lambda args, output: first(output)))
        else:
            arguments, target = CallArguments((), dict(batch), 0), teacher.compute(lambda model: self.model(batch))
        valid = batch.get("attention_mask")
        valid = valid.bool() if isinstance(valid, torch.Tensor) and valid.shape == target.shape[:2] else None
        copies = [tensor.detach().to("cpu", dtype, copy=True) for tensor in (hidden_states, target)]
        return LayerCall(arguments, copies[0], copies[1], valid)

    def _seen(self, batch: Batch, register: Callable[..., Any], take: Callable[..., Any]) -> Any:
        """What a hook of the block finds when the model runs, which ends there."""

        def hook(module: nn.Module, *given: Any) -> None:
            raise _Seen(take(*given))

        handle = register(hook)
        try:
            with torch.no_grad():
                self.model(batch)
        except _Seen as seen:
            return seen.args[0]
        finally:
            handle.remove()
        raise ValueError(f"the batches do not reach {self.name}")


class _Seen(Exception):
    """Ends a forward pass with what a hook has seen."""


def _skip(*args: Any, **kwargs: Any) -> torch.Tensor:
    """The forward of a block that returns its hidden states."""
    return kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]


def _output(trunk: nn.Module, batch: Batch) -> torch.Tensor:
    return first_output(trunk, batch, padding=True)


def blocks_with_mhla(model: nn.Module, batch: Batch) -> list[Block]:
    """The blocks of a model that have an MHLA layer, in their order.

    Args:
        model: The model.
        batch: A batch to run, on the model's device.

    Raises:
        ValueError: If an MHLA layer is not in a list of blocks.
    """
    trunk, modules = trunk_for(model, batch), dict(model.named_modules())
    found = []
    for layer in mhla_layers(model):
        match = re.match(r"(.*)\.(\d+)(?=\.)", layer.name)
        if match is None or not isinstance(modules.get(match[1]), nn.ModuleList):
            raise ValueError(f"{layer.name} is in no list of blocks: leave the stage blocks out.")
        blocks, number = list(modules[match[1]]), int(match[2])  # type: ignore[call-overload]
        last = number == len(blocks) - 1
        found.append(
            Block(match[0], blocks[number], layer.mhla, blocks[:-1] if last else None, partial(_output, trunk))
        )
    return found


def match_blocks(
    model: nn.Module,
    make_batch: Callable[[int], Batch],
    *,
    num_batches: int,
    steps: Sequence[int],
    teacher: SharedTeacher,
    config: TrainingConfig,
    output: Path,
    progress: Callable[[str, int, float], None] | None = None,
) -> dict[str, dict[str, float]]:
    """Train the blocks of a model that have an MHLA layer, first to last.

    Args:
        model: The model; changed in place.
        make_batch: Makes the keyword arguments of the model's forward of a number, always the same.
        num_batches: Number of batches.
        steps: Steps of each block; one with 0 is left as it is.
        teacher: The original, with the values of all parameters.
        config: Learning rates, optimizer, seed and the rest of the options.
        output: Directory of records and finished blocks; a killed run repeats the block that it was at.
        progress: Called after every step with the block, its steps and the loss.

    Returns:
        Loss of the first step, and mean of the last tenth, of each block that was trained.

    Raises:
        ValueError: If the model has no list of blocks.
        FloatingPointError: If a loss is no longer finite.
    """
    order = DataOrder(dataset_size=num_batches, batch_size=1, seed=config.seed, stage=STAGE)
    report: dict[str, dict[str, float]] = {}
    with evaluating(model):
        blocks = blocks_with_mhla(model, on_device(make_batch(0), model))
        for block, count in zip(blocks, steps, strict=True):
            if not count:
                continue
            training = LayerTraining(block, config, output / f"{block.name}.safetensors", count)  # type: ignore[arg-type]
            with only_trainable(model, training.names), training.prepared(None):
                if not training.finished:
                    numbers = [order.dataset_index(step) for step in range(count)]
                    records = _records(block, sorted(set(numbers)), make_batch, teacher, model)
                    for step, number in enumerate(numbers, start=1):
                        training.take_step([records.call(number, block.name)], [number])
                        if progress is not None:
                            progress(block.name, step, training.losses[-1])
                    training.save()
            last = training.losses[-max(1, len(training.losses) // 10) :]
            report[block.name] = {"steps": count, "first": training.losses[0], "last_tenth": sum(last) / len(last)}
    return report


def _records(
    block: Block, numbers: Sequence[int], make_batch: Callable[[int], Batch], teacher: SharedTeacher, model: nn.Module
) -> Records:
    """Record the calls of a block in memory; see [`Records`]."""
    records = Records()
    for number in numbers:
        call = block.record(on_device(make_batch(number), model), teacher, torch.float32)
        if not records.calls:
            size = len(numbers) * (call.hidden_states.nbytes + call.output.nbytes)
            choose_cache("memory", [size], [free_room(None)])
        records.put(number, {block.name: call})
    return records
