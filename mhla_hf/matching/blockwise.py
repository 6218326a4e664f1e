# SPDX-License-Identifier: Apache-2.0
"""Block matching: train blocks with MHLA one after the other, each as a whole, on what the blocks before now give it.

Matching trains a layer on the original's inputs; in the converted model it meets those with the errors of the layers
before. A block here gets the inputs that it has in the converted model, and aims at what the original has after that
block; the last block of a model at the model's output. A step computes one block. The hidden states of both models are
carried from block to block, so all records together cost one pass through each model.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from accelerate.utils import recursively_apply
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from ..layers.mhla import MHLA
from ..training.data.order import DataOrder
from ..training.layers import (
    Batch,
    CallArguments,
    LayerCall,
    Trainable,
    evaluating,
    first_output,
    mhla_layers,
    on_device,
    one_sequence,
    only_trainable,
    record_calls,
    replaced_forward,
    take_hidden_states,
    trunk_for,
    valid_tokens,
)
from ..training.processes import Processes
from ..training.teacher import SharedTeacher
from ..utils.messages import format_bytes, shorten_list
from .layer_training import LayerTraining, MatchSettings, Progress
from .records import free_room, tensor_bytes


# The order of batches follows from it.
STAGE = "blocks"


@dataclass(frozen=True)
class Block(Trainable):
    """A block of a model.

    Attributes:
        name: Its name in the model.
        module: The block.
        mhla: Its MHLA layer; `None` for a block that has none.
        before: The blocks before it, of the last block of a model; `None` for others.
        model: Computes the model's output from a batch.
        streams: Its streams in the order in which it returns them; see [`one_sequence`].
    """

    name: str
    module: nn.Module
    mhla: MHLA | None
    before: Sequence[Block] | None
    model: Callable[[Batch], torch.Tensor]
    streams: tuple[str, ...]
    projection: None = None

    def __call__(self, arguments: CallArguments, hidden_states: torch.Tensor) -> torch.Tensor:
        """What the loss is of: the block's output `[B, T, D]`, or the model's.

        Args:
            arguments: The block's arguments, or the batch in place of the keyword arguments for the last block.
            hidden_states: `[B, T, D]`.
        """
        if self.before is None:
            args, kwargs = arguments.with_hidden_states(hidden_states)
            return one_sequence(self.module(*args, **kwargs), self.streams)

        def replace(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
            return self.take(args, kwargs)[0].with_hidden_states(hidden_states)

        with _skipped(self.before), _watched(self.module, replace):
            return self.model(arguments.kwargs)

    def take(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[CallArguments, torch.Tensor]:
        """Split the block's arguments into the hidden states and all others."""
        return take_hidden_states(self.module, args, kwargs, self.streams, masks=True)

    def skip(self, *args: Any, **kwargs: Any) -> Any:
        """Return zeros in place of the hidden states: the next block then sees what comes in between alone."""
        arguments, hidden_states = self.take(args, kwargs)
        hidden_states = torch.zeros_like(hidden_states)
        _, by_name = arguments.with_hidden_states(hidden_states)
        return tuple(by_name[name] for name in self.streams) if arguments.num_beside else hidden_states

    def modules(self) -> dict[str, nn.Module]:
        """The block, by its name."""
        return {self.name: self.module}


@contextmanager
def _skipped(blocks: Iterable[Block]) -> Iterator[None]:
    """A context in which blocks are not computed."""
    with ExitStack() as stack:
        for block in blocks:
            stack.enter_context(replaced_forward(block.module, block.skip))
        yield


@contextmanager
def _watched(block: nn.Module, hook: Callable[..., Any]) -> Iterator[None]:
    """A context in which a hook gets the arguments of a block, and may replace them."""
    # Ahead of hooks that add arguments: they add them again when the block is called separately.
    handle = block.register_forward_pre_hook(hook, with_kwargs=True, prepend=True)
    try:
        yield
    finally:
        handle.remove()


def _output(trunk: nn.Module, batch: Batch) -> torch.Tensor:
    return first_output(trunk, batch, padding=True)


def list_blocks(model: nn.Module, batch: Batch) -> list[Block]:
    """List all blocks of a model whose blocks have MHLA layers, in their order.

    Args:
        model: The model.
        batch: A batch to run, on the model's device.

    Raises:
        ValueError: If the MHLA layers are not in one list of blocks, or those of text and grid.
    """
    trunk, modules = trunk_for(model, batch), dict(model.named_modules())
    found: dict[str, MHLA] = {}
    for layer in mhla_layers(model):
        match = re.match(r"(.*)\.\d+(?=\.)", layer.name)
        found[match[0] if match else layer.name] = layer.mhla
    streams = getattr(trunk, "block_streams", ())
    # The lists that the class names: some may have no MHLA layer, and MHLA layers may lie outside of them.
    prefixes = getattr(trunk, "block_lists", None) or {name.rpartition(".")[0] for name in found}
    lists = [(name, module) for name, module in modules.items() if name in prefixes]
    is_known = hasattr(trunk, "block_lists") or len(lists) == 1
    if not is_known or not all(isinstance(module, nn.ModuleList) for _, module in lists):
        raise ValueError(f"{shorten_list(found)}: not in one list of blocks; leave the stage blockwise out.")
    run_model = partial(_output, trunk)
    blocks: list[Block] = []
    everything = [(f"{name}.{number}", block) for name, module in lists for number, block in enumerate(module)]  # type: ignore[arg-type]
    for name, block in everything:
        before = list(blocks) if len(blocks) == len(everything) - 1 else None
        blocks.append(Block(name, block, found.get(name), before, run_model, streams))
    return blocks


@dataclass
class _Records:
    """What goes into a block in the converted model and in its original, for some batches; tensors are on the CPU.

    Attributes:
        dtype: Type of the hidden states in the model.
        arguments: Of each batch the arguments of every block.
        student: Hidden states of the converted model by the number of the batch, in fp32.
        original: Those of the original.
        valid: BoolTensor `[B, T]` of the tokens of text and grid, False for padding; `None` for no padding.
        added: What the converted model adds to the hidden states after each block, as VACE its control hints; fp32, or
            `None` for nothing.
        original_added: What the original adds.
    """

    dtype: torch.dtype
    arguments: dict[int, list[CallArguments]]
    student: dict[int, torch.Tensor]
    original: dict[int, torch.Tensor]
    valid: dict[int, torch.Tensor | None]
    added: dict[int, list[torch.Tensor | None]]
    original_added: dict[int, list[torch.Tensor | None]]

    @classmethod
    @torch.no_grad()
    def start(
        cls,
        blocks: Sequence[Block],
        numbers: Sequence[int],
        make_batch: Callable[[int], Batch],
        model: nn.Module,
        teacher: SharedTeacher,
    ) -> _Records:
        """Record what goes into the first block, and the other arguments of all of them.

        Args:
            blocks: The blocks.
            numbers: The batches of this process.
            make_batch: Makes a batch.
            model: The model.
            teacher: Its original.

        Raises:
            ValueError: If they do not fit into memory, or blocks hand on more than hidden states.
        """
        records = cls(torch.float32, {}, {}, {}, {}, {}, {})
        for number in numbers:
            batch = on_device(make_batch(number), model)
            seen = _inputs(blocks, batch)
            records.added[number] = records.original_added[number] = added = _added(seen)
            if any(each is not None for each in added):
                records.original_added[number] = teacher.compute(lambda _: _added(_inputs(blocks, batch)))  # noqa: B023
            if not records.arguments:
                _check_blocks(blocks, seen, batch)
                records.dtype = seen[0][1].dtype
                hints = sum(each is not None for each in added)
                needed, room = len(numbers) * _bytes_of(seen, batch, hints), free_room(None)[0]
                if needed > room:
                    raise ValueError(
                        f"the hidden states of {len(numbers)} batches need {format_bytes(needed)}, more than half of "
                        f"the free memory, {format_bytes(room)}: use fewer batches (blockwise.batches)."
                    )
            copies: dict[int, torch.Tensor] = {}
            # Blocks share tensors, such as rotary tables: each is kept once.
            records.arguments[number] = recursively_apply(
                lambda tensor: copies.setdefault(id(tensor), tensor.detach().cpu()),  # noqa: B023
                _arguments(seen, batch),
            )
            records.student[number] = records.original[number] = seen[0][1].to("cpu", torch.float32, copy=True)
        return records

    @torch.no_grad()
    def advance(self, block: Block, index: int, hidden_states: dict[int, torch.Tensor]) -> None:
        """Replace hidden states by those after a block, or by the model's output after the last one.

        Args:
            block: The block.
            index: Its number.
            hidden_states: `student` or `original`.
        """

        def attending(number: int, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
            valid = valid_tokens(args, kwargs)[0]
            self.valid[number] = None if valid is None else valid.cpu()

        all_added = self.original_added if hidden_states is self.original else self.added
        for number, before in hidden_states.items():
            call = on_device((self.arguments[number][index], before.to(self.dtype)), block.module)
            with nullcontext() if block.mhla is None else _watched(block.mhla, partial(attending, number)):
                hidden_states[number] = block(*call).float().cpu()
            if (added := all_added[number][index]) is not None:
                hidden_states[number] = hidden_states[number] + added

    def call(self, number: int, index: int) -> LayerCall:
        """The call of a block in the converted model, with what the original has after it."""
        target, arguments = self.original[number], self.arguments[number]
        if (added := self.added[number][index]) is not None:
            target = target - added
        valid = self.valid[number]
        if valid is not None and valid.shape != target.shape[:2]:
            valid = None
        return LayerCall(arguments[index], self.student[number], target, valid, arguments[index].num_beside)


def _inputs(blocks: Sequence[Block], batch: Batch) -> list[tuple[CallArguments, torch.Tensor]]:
    """Arguments of all blocks: the hidden states of the first, and of others what is added before them."""
    seen: list[tuple[CallArguments, torch.Tensor]] = []

    def watch(block: Block, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        seen.append(block.take(args, kwargs))

    with ExitStack() as stack:
        stack.enter_context(_skipped(blocks))
        for block in blocks:
            stack.enter_context(_watched(block.module, partial(watch, block)))
        blocks[0].model(batch)
    return seen


def _added(seen: Sequence[tuple[CallArguments, torch.Tensor]]) -> list[torch.Tensor | None]:
    """What is added after each block; nothing after the last one, whose output is the model's."""
    return [each.float().cpu() if each.any() else None for _, each in seen[1:]] + [None]


def _arguments(seen: Sequence[tuple[CallArguments, torch.Tensor]], batch: Batch) -> list[CallArguments]:
    """Arguments of every block; the last one is computed with all that comes after it, from the batch."""
    return [arguments for arguments, _ in seen[:-1]] + [CallArguments((), dict(batch), 0)]


def _bytes_of(seen: Sequence[tuple[CallArguments, torch.Tensor]], batch: Batch, hints: int) -> int:
    """Bytes that are kept of a batch: arguments, and in fp32 the hidden states and hints of both models."""
    return tensor_bytes(_arguments(seen, batch)) + (2 + 2 * hints) * 4 * seen[0][1].numel()


class OnMeta(TorchFunctionMode):
    """Moves tensors with values, such as masks, to the meta device where they meet tensors without.

    Conditions on what is without values hold: that all tokens of a text are there.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        if func is torch.Tensor.__bool__ and tensors[0].is_meta:
            return True
        mixed = len({each.is_meta for each in tensors}) > 1
        if func is F.pad or (mixed and func is not torch.Tensor.__getitem__):
            # Masks of text have values until they meet tensors without, or become masks of all pairs of tokens.
            args, kwargs = tree_map_only(torch.Tensor, lambda each: each.to("meta"), (args, kwargs))
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def record_bytes(
    model: nn.Module, batch: Batch, only: Collection[str] | None = None, blocks: bool = True
) -> tuple[int, int]:
    """Return the bytes that matching keeps of a batch: of the calls of layers, in bfloat16, and of blocks.

    Args:
        model: A model with MHLA layers on the meta device.
        batch: Its arguments.
        only: Names of the layers that are matched; `None` for all.
        blocks: Whether blocks are matched, too.
    """
    with OnMeta(), torch.device("meta"):
        calls = record_calls(model, mhla_layers(model), batch, only=only, keep=lambda each: each.to(torch.bfloat16))
        if not blocks:
            return tensor_bytes(calls), 0
        listed = list_blocks(model, batch)
        # There are no values that tell whether something is added; after the last block it is the model's output.
        hints = sum(index < len(listed) - 1 for index in getattr(model.config, "vace_layers", None) or ())
        return tensor_bytes(calls), _bytes_of(_inputs(listed, batch), batch, hints)


def _check_blocks(blocks: Sequence[Block], seen: Sequence[tuple[CallArguments, torch.Tensor]], batch: Batch) -> None:
    """Compare the model's output with that of its blocks called one by one."""
    expected = blocks[-1].model(batch)
    if not expected.isfinite().all():
        raise ValueError("the model's output is not finite for the first batch of the stage blockwise.")
    hidden_states = seen[0][1]
    for block, (arguments, _), (_, added) in zip(blocks[:-1], seen, seen[1:]):
        hidden_states = block(arguments, hidden_states) + added
    output = blocks[-1](CallArguments((), dict(batch), 0), hidden_states)
    if len(seen) != len(blocks) or not torch.allclose(output, expected, rtol=1e-2, atol=1e-2 * expected.std().item()):
        raise ValueError("the blocks of this model hand on more than hidden states: leave the stage blockwise out.")


def match_blocks(
    model: nn.Module,
    make_batch: Callable[[int], Batch],
    *,
    num_batches: int,
    steps: Sequence[int],
    teacher: SharedTeacher,
    output: Path | None,
    held_out: int = 0,
    progress: Progress | None = None,
    **settings: Any,
) -> dict[str, dict[str, float]]:
    """Train the blocks of a model that have an MHLA layer, first to last.

    Several processes of `torch.distributed` share the batches: each keeps the hidden states of its own, and computes
    what goes into the next block. Every step is computed by all of them, on a batch that its owner sends.

    Args:
        model: The model; changed in place.
        make_batch: Makes the keyword arguments of the model's forward of a number, always the same.
        num_batches: Number of batches.
        steps: Steps of the block of each MHLA layer; one with 0 is left as it is, as are layers outside the blocks.
        teacher: The original, with the values of all parameters; those outside the blocks must be the model's.
        output: Directory of finished blocks; a killed run repeats the block that it was at.
        held_out: Number of the last batches that are not trained on. A block whose error on them does not fall keeps
            the weights that it had.
        progress: Called after every step with the block, its steps and the loss.
        **settings: Options of `MatchSettings`.

    Returns:
        Loss of the first step, and mean of the last tenth, of each block that was trained; and the error on held-out
        batches before and after, where there are such.

    Raises:
        ValueError: If the model has no list of blocks, its blocks hand on more than hidden states, or the hidden
            states do not fit into memory.
        FloatingPointError: If a loss is no longer finite.
    """
    options, processes = MatchSettings.from_dict(settings), Processes()
    order = DataOrder(dataset_size=num_batches - held_out, batch_size=1, seed=options.seed, stage=STAGE)
    report: dict[str, dict[str, float]] = {}
    with evaluating(model):
        blocks = list_blocks(model, on_device(make_batch(0), model))
        by_layer = {layer.mhla: count for layer, count in zip(mhla_layers(model), steps, strict=True)}
        of_blocks = [0 if block.mhla is None else by_layer[block.mhla] for block in blocks]
        counts = {index: count for index, count in enumerate(of_blocks) if count}
        numbers = sorted({order.dataset_index(step) for step in range(max(counts.values(), default=0))})
        unseen = range(num_batches - held_out, num_batches) if numbers else range(0)
        numbers += unseen
        owners = {number: processes.owner(place) for place, number in enumerate(numbers)}
        with processes.together():
            records = _Records.start(blocks, processes.share_of(numbers), make_batch, model, teacher)
        last_trained = max(counts, default=-1)
        for index, block in enumerate(blocks[: last_trained + 1]):
            teacher.compute(lambda _: records.advance(block, index, records.original))  # noqa: B023
            if index in counts:
                count = counts[index]
                file = None if output is None else output / f"{block.name}.safetensors"
                training = LayerTraining(block, options, file, count)
                with only_trainable(model, training.names), training.prepared(None):
                    mine = [number for number in unseen if owners[number] == processes.rank]
                    calls = [partial(records.call, number, index) for number in mine]
                    while not training.finished:
                        for step in range(len(training.losses), count):
                            number = order.dataset_index(step)
                            owner = owners[number]
                            call = records.call(number, index) if owner == processes.rank else None
                            training.take_step([processes.share(call, owner)], [number])
                            if progress is not None:
                                progress(block.name, step + 1, training.losses[-1])
                        if unseen:
                            training.settle(calls, processes)
                    for parameter in training.parameters.values():
                        processes.send(parameter, 0)
                    if processes.rank == 0:
                        training.save()
                report[block.name] = {"steps": count, **training.summary()}
            if index < last_trained:
                records.advance(block, index, records.student)
    return report
