# SPDX-License-Identifier: Apache-2.0
"""Layer-wise attention transfer for transformers models: MHLA layers learn to give what softmax attention gave.

Every MHLA layer is trained on its own. It is called on the hidden states that the teacher's layer was called on, and
its output is compared with what the teacher's layer returned; the next layers then go on from the teacher's output.
No labels are needed, nothing but the layers' own parameters changes, and only one layer keeps activations at a time.
(Attention transfer as in Zhang et al., "LoLCATs", 2024.)

Shapes: B batch, T tokens, D width of the model.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from ..layers.mhla import MHLA
from .transfer import AttentionRecord, attention_matching_loss


Batch = Mapping[str, torch.Tensor]

_WARM_UP = 0.1
_SMALLEST_MIXING_RATE = 1e-3


@dataclass(frozen=True)
class TransferStep:
    """What one step of the transfer reports.

    Attributes:
        step: Steps taken so far, from 1.
        losses: Matching loss of each layer on this step's batch, before the step, by the name of its attention
            module: the squared distance to the teacher's output divided by that output's variance.
    """

    step: int
    losses: dict[str, float]

    @property
    def loss(self) -> float:
        """The mean over the layers."""
        return sum(self.losses.values()) / len(self.losses)


def mhla_attentions(model: nn.Module) -> dict[str, nn.Module]:
    """The attention modules of a transformers model that have an `mhla` submodule, by name.

    Raises:
        ValueError: If there is none.
    """
    found = {name: module for name, module in model.named_modules() if isinstance(getattr(module, "mhla", None), MHLA)}
    if not found:
        raise ValueError(f"student has no MHLA layers: load {type(model).__name__} with attn_implementation='mhla'.")
    return found


def transfer_attention(
    student: nn.Module,
    teacher: nn.Module | None,
    batches: Sequence[Batch],
    *,
    steps: int = 200,
    learning_rate: float = 3e-2,
    projections: Sequence[str] = (),
    projection_learning_rate: float = 1e-4,
    weight_decay: float = 0.0,
    seed: int = 0,
    progress: Callable[[TransferStep], None] | None = None,
) -> list[TransferStep]:
    """Trains the MHLA layers of a transformers model towards the attention of its softmax original.

    Dropout is off throughout. Afterwards the student is in the mode it was in, and what required gradients does again.

    Args:
        student: A transformers model with MHLA layers, in fp32 for best results. Changed in place.
        teacher: The softmax model it was made from, of the same class; or `None` for the student itself run with
            softmax, which is exact as long as nothing but MHLA's own parameters was trained.
        batches: Inputs of the model (`input_ids` and `attention_mask`, or `pixel_values`), each on the student's
            device. They are visited in an order that follows from `seed`, all of them before any comes again.
            Tokens that `attention_mask` leaves out do not count.
        steps: Number of batches to learn from.
        learning_rate: Highest learning rate of the `mhla` parameters; it rises over the first tenth of the steps and
            falls to zero along a cosine. Mixing weights learn at this times the mean weight that a block gives
            to itself, since they are the smaller the more blocks there are.
        projections: Names, inside an attention module, of further submodules to train, for example
            `("query", "key")` for BERT and `("q_proj", "k_proj")` for Llama.
        projection_learning_rate: Highest learning rate of those.
        weight_decay: AdamW's, for matrices of the projections only.
        seed: Of the order of batches.
        progress: Called after every step.

    Returns:
        What each step reported.

    Raises:
        ValueError: If the student has no MHLA layers, a projection is not there, the teacher has other modules, or
            `projections` are to be trained without a teacher of their own.
    """
    if not batches:
        raise ValueError("batches is empty: give at least one batch of inputs.")
    if steps < 1:
        raise ValueError(f"steps={steps} must be at least 1.")
    student, teacher = _base(student), None if teacher is None else _base(teacher)
    attentions = mhla_attentions(student)
    _check_teacher(student, teacher, attentions, projections)
    groups = _parameter_groups(attentions, projections, learning_rate, projection_learning_rate, weight_decay)
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.99))
    schedule = LambdaLR(optimizer, lambda step: _rate(step, steps))
    trained = [parameter for group in groups for parameter in group["params"]]
    report = []
    with _only_trainable(student, trained), _evaluating(student), _evaluating(teacher):
        for step, batch in enumerate(_shuffled(batches, steps, seed), start=1):
            losses = match_attention(student, teacher, batch, backward=True)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            schedule.step()
            report.append(TransferStep(step, losses))
            if progress is not None:
                progress(report[-1])
    return report


def match_attention(
    student: nn.Module, teacher: nn.Module | None, batch: Batch, *, backward: bool = False
) -> dict[str, float]:
    """How well each MHLA layer matches the softmax attention on one batch, given the teacher's hidden states.

    Args:
        student: A transformers model with MHLA layers.
        teacher: As in [`transfer_attention`].
        batch: Inputs of the model.
        backward: Whether to add each loss's gradients to those of the parameters that require them.

    Returns:
        Loss of each layer, by the name of its attention module; 0 is a perfect match, 1 what the mean would score.
    """
    student = _base(student)
    attentions = mhla_attentions(student)
    records = _record(student if teacher is None else _base(teacher), attentions, batch, as_softmax=teacher is None)
    mask = batch.get("attention_mask")
    losses: dict[str, float] = {}

    def compare(name: str) -> Callable[..., Any]:
        def hook(module: nn.Module, args: tuple, output: Any) -> Any:
            result, target = _first(output), records[name].output
            valid = slice(None) if mask is None or mask.dim() != 2 else mask.bool()
            loss = attention_matching_loss(result[valid], target[valid])
            losses[name] = loss.item()
            if backward:
                loss.backward()
            # Later layers go on from the teacher's output.
            target = target.to(result.dtype)
            return (target, *output[1:]) if isinstance(output, tuple) else target

        return hook

    def substitute(name: str) -> Callable[..., Any]:
        def hook(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
            hidden_states = records[name].hidden_states.to(_hidden_states(args, kwargs).dtype)
            if "hidden_states" in kwargs:
                return args, {**kwargs, "hidden_states": hidden_states}
            return (hidden_states, *args[1:]), kwargs

        return hook

    with ExitStack() as hooks, torch.set_grad_enabled(backward):
        for name, module in attentions.items():
            # Ahead of the layer's own hook, which hands the hidden states to MHLA.
            before = module.register_forward_pre_hook(substitute(name), with_kwargs=True, prepend=True)
            after = module.register_forward_hook(compare(name))
            hooks.callback(before.remove)
            hooks.callback(after.remove)
        student(**batch, **_no_cache(student))
    return losses


@torch.no_grad()
def _record(
    teacher: nn.Module, names: Mapping[str, nn.Module], batch: Batch, *, as_softmax: bool
) -> dict[str, AttentionRecord]:
    """What went into the teacher's attention modules of these names, and what came out."""
    records: dict[str, AttentionRecord] = {}

    def keep(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
            records[name] = AttentionRecord(_hidden_states(args, kwargs).detach(), _first(output).detach())

        return hook

    with ExitStack() as hooks:
        if as_softmax:
            hooks.enter_context(_softmax(teacher))
        for name in names:
            handle = teacher.get_submodule(name).register_forward_hook(keep(name), with_kwargs=True)
            hooks.callback(handle.remove)
        teacher(**batch, **_no_cache(teacher))
    return records


def _base(model: nn.Module) -> nn.Module:
    """The model without its head, which attention does not need."""
    return getattr(model, "base_model", model)


def _check_teacher(
    student: nn.Module, teacher: nn.Module | None, attentions: Mapping[str, nn.Module], projections: Sequence[str]
) -> None:
    if teacher is None:
        if projections:
            raise ValueError(
                "projections need a teacher of their own: the student is not its softmax original any more once "
                "they are trained."
            )
        return
    if teacher is student:
        raise ValueError("teacher is the student itself; pass teacher=None to run it with softmax.")
    modules = dict(teacher.named_modules())
    missing = [name for name in attentions if name not in modules]
    if missing:
        raise ValueError(f"teacher has no {missing[0]}: it must be of the student's class, {type(student).__name__}.")
    if any(isinstance(module, MHLA) for module in modules.values()):
        raise ValueError("teacher has MHLA layers: load the softmax original with attn_implementation='sdpa'.")


def _parameter_groups(
    attentions: Mapping[str, nn.Module],
    projections: Sequence[str],
    learning_rate: float,
    projection_learning_rate: float,
    weight_decay: float,
) -> list[dict[str, Any]]:
    groups: list[dict[str, Any]] = []
    for module in attentions.values():
        # A learning rate is a distance: mixing weights, the smaller the more blocks there are, get one of their size.
        own_block = module.mhla.mixing_matrix().detach().diagonal(dim1=-2, dim2=-1).mean().item()
        rate = learning_rate * max(own_block, _SMALLEST_MIXING_RATE)
        others = [parameter for name, parameter in module.mhla.named_parameters() if name != "mixing"]
        groups.append({"params": [module.mhla.mixing], "lr": rate, "weight_decay": 0.0})
        if others:
            groups.append({"params": others, "lr": learning_rate, "weight_decay": 0.0})
    shared: list[nn.Parameter] = []
    for name, module in attentions.items():
        for projection in projections:
            if not isinstance(getattr(module, projection, None), nn.Module):
                there = ", ".join(child for child, _ in module.named_children() if child != "mhla")
                raise ValueError(f"projections names {projection!r}, which {name} does not have; it has {there}.")
            shared += getattr(module, projection).parameters()
    for matrices in (True, False):
        chosen = [parameter for parameter in shared if (parameter.dim() > 1) == matrices]
        if chosen:
            decay = weight_decay if matrices else 0.0
            groups.append({"params": chosen, "lr": projection_learning_rate, "weight_decay": decay})
    return groups


def _shuffled(batches: Sequence[Batch], steps: int, seed: int) -> Iterator[Batch]:
    generator = torch.Generator().manual_seed(seed)
    order: list[int] = []
    for _ in range(steps):
        if not order:
            order = torch.randperm(len(batches), generator=generator).tolist()
        yield batches[order.pop()]


def _rate(step: int, steps: int) -> float:
    """Learning rate of a step, counted from 0, relative to the highest."""
    rising = max(1, round(_WARM_UP * steps))
    if step < rising:
        return (step + 1) / rising
    return 0.5 * (1 + math.cos(math.pi * (step - rising) / max(1, steps - rising)))


@contextmanager
def _only_trainable(model: nn.Module, parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    before = {parameter: parameter.requires_grad for parameter in model.parameters()}
    try:
        for parameter in before:
            parameter.requires_grad_(False)
        for parameter in parameters:
            parameter.requires_grad_(True)
        yield
    finally:
        for parameter, required in before.items():
            parameter.requires_grad_(required)


@contextmanager
def _evaluating(model: nn.Module | None) -> Iterator[None]:
    modes = {} if model is None else {module: module.training for module in model.modules()}
    try:
        if model is not None:
            model.eval()
        yield
    finally:
        for module, training in modes.items():
            module.training = training


@contextmanager
def _softmax(model: Any) -> Iterator[None]:
    implementation = model.config._attn_implementation
    try:
        model.set_attn_implementation("sdpa")
        yield
    finally:
        model.set_attn_implementation(implementation)


def _no_cache(model: nn.Module) -> dict[str, Any]:
    """Keyword arguments that keep a language model from making a cache."""
    return {"use_cache": False} if getattr(model.config, "use_cache", None) is not None and _takes_cache(model) else {}


def _takes_cache(model: nn.Module) -> bool:
    return "use_cache" in inspect.signature(type(model).forward).parameters


def _hidden_states(args: tuple, kwargs: Mapping[str, Any]) -> torch.Tensor:
    return kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]


def _first(output: Any) -> torch.Tensor:
    return output[0] if isinstance(output, tuple) else output
