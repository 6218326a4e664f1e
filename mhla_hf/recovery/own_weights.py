# SPDX-License-Identifier: Apache-2.0
"""A short training of what MHLA adds to a layer towards the original's heads: feature maps, mixing weights and the
biases of a window and of text.

Queries, keys, values and the original's heads are those of a probe, computed once. Projections, norms, the convolution
and the softmax of a window stay as they are, so a step costs MHLA alone. Errors of a head are relative to its
variance: those of heads with large values would win otherwise.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch
from torch import nn

from ..layers import AttentionParts
from ..training.layers import AttentionLayer, Changes, only_trainable, swapped_parameters
from ..training.optimizers import ADAM, LOGARITHM, Muon
from ..training.parameters import learning_rate_factor, set_learning_rate
from .fits import HeadsCall, fit_heads


# Peak rates of feature maps and biases, and of the logarithms of mixing weights; what measured best on the demo's Wan.
_RATE, _MIXING_RATE = 2e-2, 1e-1
WARMUP_STEPS, _ROUNDS = 10, 2


def trained_weights(layer: AttentionLayer) -> dict[str, nn.Parameter]:
    """What is trained of a layer by its names in `mhla`, where it has any that matter."""
    mhla = layer.mhla
    names = ["mixing"] if mhla.mixing.shape[-1] > 1 else []
    names += [name for name, _ in mhla.named_parameters() if name.startswith(("feature_map_", "text_", "window_"))]
    return {name: mhla.get_parameter(name) for name in names}


def fit_own_weights(
    layer: AttentionLayer, calls: Sequence[HeadsCall], start: Changes, steps: int, advance: Callable[[], None]
) -> Changes:
    """Train a layer's own weights in two rounds, with the convolution in closed form after each.

    Args:
        layer: The layer.
        calls: Its calls; a step learns from one of those that are not held out.
        start: Values of parameters of `mhla` to start from, with the convolution fitted.
        steps: Steps in all.
        advance: Called after every step.

    Returns:
        New values of the same parameters, and of those that were trained.
    """
    found = dict(start)
    for round_number in range(_ROUNDS):
        count = steps * (round_number + 1) // _ROUNDS - steps * round_number // _ROUNDS
        found |= _train(layer, calls, found, count, round_number, advance)
        found |= fit_heads(layer, calls, found)
    return found


def _train(
    layer: AttentionLayer,
    calls: Sequence[HeadsCall],
    start: Changes,
    steps: int,
    seed: int,
    advance: Callable[[], None],
) -> Changes:
    mhla, trained = layer.mhla, trained_weights(layer)
    values = {parameter: start.get(parameter, parameter.detach()) for parameter in trained.values()}
    own: Changes = {parameter: value.float().clone() for parameter, value in values.items()}
    generator = torch.Generator().manual_seed(seed)
    order: list[int] = []
    calls = [call for call in calls if not call.held_out.all()]
    with swapped_parameters({**start, **own}), only_trainable(mhla, trained), torch.enable_grad():
        parts = [_fixed_parts(layer, call) for call in calls]
        rows = torch.cat([call.rows(_target(call, part), held_out=False) for call, part in zip(calls, parts)])
        variance = rows.var(dim=0, unbiased=False).mean(-1).clamp_min(torch.finfo(torch.float32).tiny)
        del rows
        groups = [
            {"params": [parameter], "kind": LOGARITHM, "peak_lr": _MIXING_RATE, "config": mhla.config}
            if name == "mixing"
            else {"params": [parameter], "kind": ADAM, "peak_lr": _RATE}
            for name, parameter in trained.items()
        ]
        optimizer = Muon(groups, weight_decay=0.0)
        for step in range(steps):
            order = order or torch.randperm(len(calls), generator=generator).tolist()
            number = order.pop()
            call = calls[number]
            warmup = min(WARMUP_STEPS, steps)
            factor = learning_rate_factor(step, schedule="cosine", warmup_steps=warmup, total_steps=steps)
            set_learning_rate(optimizer, factor)
            attended = mhla.attention_parts(*call.args, **call.kwargs, attended_alone=True).attended
            output = mhla.join(dataclasses.replace(parts[number], attended=attended))
            error = call.rows(output.float() - call.heads.float(), held_out=False)
            loss = (error.square().mean((0, 2)) / variance).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            advance()
        return {parameter: parameter.detach().to(value.dtype) for parameter, value in values.items()}


@torch.no_grad()
def _fixed_parts(layer: AttentionLayer, call: HeadsCall) -> AttentionParts:
    """What does not depend on the weights that train: window, convolution and text."""
    parts = layer.mhla.attention_parts(*call.args, **call.kwargs)
    return dataclasses.replace(parts, attended=call.heads.new_empty(0))


def _target(call: HeadsCall, parts: AttentionParts) -> torch.Tensor:
    """The original's heads less what the convolution gives, `[B, T, H, V]` in fp32; the heads where there is text."""
    heads = call.heads.float()
    return heads if parts.positional is None or parts.text is not None else heads - parts.positional.float()
