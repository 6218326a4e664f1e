# SPDX-License-Identifier: Apache-2.0
"""The decoding kernel against the step in plain torch: interpreted on a CPU, compiled on a GPU, the same cases."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from mhla_hf.integrations.transformers.cache import MHLACacheLayer
from mhla_hf.layers import mhla
from mhla_hf.layers.state import TokenSequence
from mhla_hf.ops import MHLAState, mhla_step, rewind_state
from mhla_hf.ops.band import StoredMixing
from mhla_hf.ops.operands import Operands

from .recurrent_cases import STATE, assert_same_state, kernel_counted, make_inputs, part, start
from .triton_checks import DEVICES, buffers_full_of_nan


# The counter of operations asks for what is registered when it starts.
kernels = pytest.importorskip("mhla_hf.ops.triton.decode")


def decode(
    inputs: dict[str, torch.Tensor],
    mixing: torch.Tensor,
    state: MHLAState,
    backend: str,
    valid: torch.Tensor | None = None,
    **options: object,
) -> tuple[list[torch.Tensor], list[MHLAState]]:
    """Outputs and states of all positions; the states keep copies of the summaries, which each step writes into."""
    outputs, states = [], []
    for position in range(inputs["query"].shape[1]):
        token = part(inputs, position, position + 1)
        seen = None if valid is None else valid[:, position : position + 1]
        output, state = mhla_step(**token, mixing=mixing, state=state, valid=seen, backend=backend, **options)
        outputs.append(output)
        states.append(dataclasses.replace(state, summaries=state.summaries.clone()))
    return outputs, states


def assert_same_decoding(first: tuple, second: tuple) -> None:
    for output, other in zip(first[0], second[0], strict=True):
        torch.testing.assert_close(output, other, rtol=1e-4, atol=1e-5, equal_nan=True)
    for state, other in zip(first[1], second[1], strict=True):
        assert_same_state(state, other)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("per_head, key_heads", [(False, 1), (True, 1), (True, 2)])
def test_every_position_of_every_block_equals_the_step_in_torch(per_head, key_heads, device):
    """Five blocks of which the last ones lie past the end of the weights."""
    inputs, mixing = make_inputs(device, 9, per_head=per_head, key_heads=key_heads)
    runs = [decode(inputs, mixing, start(inputs, mixing, 2), backend) for backend in ("triton", "torch")]
    assert_same_decoding(*runs)
    assert runs[0][1][-1].position.tolist() == [9, 9]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "stored, size, decay, per_head",
    [(1, 3, 0.6, False), (2, 3, 0.0, True), (3, 2, None, False), (5, 2, 0.8, True), (4, 1, 0.7, False)],
)
def test_walks_through_the_ring(stored, size, decay, per_head, device, length=32):
    """Rows at their own positions, some tokens taken back, and blocks that leave the ring."""
    inputs, _ = make_inputs(device, length, per_head=per_head, width=3)
    generator = torch.Generator().manual_seed(stored)
    shape = (2, stored, stored) if per_head else (stored, stored)
    weights = {"mixing": torch.rand(shape, generator=generator).to(device) + 0.05}
    if decay is not None:
        weights["mixing_decay"] = torch.tensor([decay, decay**2][: 1 + per_head], device=device)
    valid = (torch.rand(2, length, generator=generator) < 0.8).to(device)
    states = [start(inputs, weights["mixing"], size, rewindable=2 * size - 1) for _ in range(2)]
    for place in range(length):
        token, seen = part(inputs, place, place + 1), valid[:, place : place + 1]
        outputs = []
        for index, backend in enumerate(("triton", "torch")):
            output, states[index] = mhla_step(**token, **weights, state=states[index], valid=seen, backend=backend)
            outputs.append(output)
        torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-5)
        assert_same_state(*states)
        if place % 11 == 10:
            last = part(inputs, place - 1, place + 1)
            taken = last["key"], last["normalizer_key"], last["value"], valid[:, place - 1 : place + 1]
            states = [
                rewind_state(state, weights["mixing"], *taken, mixing_decay=weights.get("mixing_decay"))
                for state in states
            ]
    assert states[0].num_left.min() > 0


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("options", [{"normalizer": "none"}, {"normalizer_query": None, "normalizer_key": None}])
def test_without_a_pair_of_its_own(options, device):
    inputs, mixing = make_inputs(device, 4, heads=1)
    for name in options:
        inputs.pop(name, None)
    inputs["query"], inputs["key"] = inputs["query"].abs(), inputs["key"].abs()
    options = {name: value for name, value in options.items() if value is not None}
    assert_same_decoding(
        *(decode(inputs, mixing, start(inputs, mixing, 3), backend, **options) for backend in ("triton", "torch"))
    )


@pytest.mark.parametrize("device", DEVICES)
def test_rows_at_different_positions_padding_and_bad_tokens(device):
    inputs, mixing = make_inputs(device, 7)
    valid = torch.ones(2, 7, dtype=torch.bool, device=device)
    valid[0, 1] = valid[1, 4:6] = False
    for name in inputs:
        inputs[name][~valid] = float("nan")
    inputs["value"][1, 3, 0, 1] = float("nan")
    runs = [decode(inputs, mixing, start(inputs, mixing, 2), backend, valid) for backend in ("triton", "torch")]
    assert_same_decoding(*runs)
    assert runs[0][1][-1].position.tolist() == [6, 5]
    assert not torch.stack(runs[0][0], dim=1)[:, :, 0][~valid].any()


@pytest.mark.parametrize("device", DEVICES)
def test_summaries_that_are_not_dense(device):
    inputs, mixing = make_inputs(device, 4, heads=2, key_heads=2)
    state = start(inputs, mixing, 1)
    strided = state.summaries.transpose(1, 2).contiguous().transpose(1, 2)
    runs = [
        decode(inputs, mixing, dataclasses.replace(state, summaries=strided.clone()), backend)
        for backend in ("triton", "torch")
    ]
    assert_same_decoding(*runs)


@pytest.mark.parametrize("device", DEVICES)
def test_bfloat16_tokens_and_summaries(device):
    inputs, mixing = make_inputs(device, 5, heads=1)
    inputs = {name: tensor.bfloat16() for name, tensor in inputs.items()}
    outputs, states = [], []
    for backend in ("triton", "torch"):
        output, state = decode(inputs, mixing, start(inputs, mixing, 2, summary_dtype=torch.bfloat16), backend)
        outputs.append(torch.cat(output, dim=1).float())
        states.append(state[-1])
    assert states[0].summaries.dtype == torch.bfloat16
    torch.testing.assert_close(*outputs, rtol=2**-7, atol=1e-6)
    torch.testing.assert_close(states[0].current, states[1].current, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(states[0].summaries, states[1].summaries, rtol=2**-7, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_wide_heads_and_buffers_full_of_nan(device):
    inputs, mixing = make_inputs(device, 2, heads=1, width=130)
    inputs["value"] = inputs["key"][..., :70].flip(1)
    expected = decode(inputs, mixing, start(inputs, mixing, 1), "torch")
    with buffers_full_of_nan():
        actual = decode(inputs, mixing, start(inputs, mixing, 1), "triton")
    assert_same_decoding(actual, expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_layers_hand_their_backend_on_to_the_cache(backend, device):
    inputs, mixing = make_inputs(device, 4)
    expected = torch.cat(decode(inputs, mixing, start(inputs, mixing, 2), "torch")[0], dim=1)
    cache, outputs = MHLACacheLayer(), []
    with FlopCounterMode(display=False) as counter:
        for first, last in ((0, 3), (3, 4)):
            tokens = part(inputs, first, last)
            cache.update(tokens["key"].transpose(1, 2), tokens["value"].transpose(1, 2))
            sequence = TokenSequence(causal=True, state=cache.decoding_state(last - first))
            output, state = mhla.decode(Operands(**tokens), StoredMixing.of(mixing), 2, sequence, backend)
            cache.store(state, None)
            outputs.append(output)
    torch.testing.assert_close(torch.cat(outputs, dim=1), expected, rtol=1e-4, atol=1e-5)
    assert kernel_counted(counter) == (backend == "triton")


@pytest.mark.parametrize("device", DEVICES)
def test_decodes_in_one_graph(device):
    inputs, mixing = make_inputs(device, 1)
    expected = decode(inputs, mixing, start(inputs, mixing, 2), "triton")

    def step(state):
        return mhla_step(**inputs, mixing=mixing, state=state, backend="triton")

    torch._dynamo.reset()
    output, state = torch.compile(step, fullgraph=True, backend="aot_eager")(start(inputs, mixing, 2))
    assert_same_decoding(([output], [state]), expected)


@pytest.mark.parametrize("device", DEVICES)
def test_operator_is_what_torch_expects(device):
    inputs, mixing = make_inputs(device, 1, heads=1)
    state = start(inputs, mixing, 2)
    tensors = mixing[None], torch.ones(1, device=device), *(getattr(state, name) for name in STATE)
    torch.library.opcheck(kernels.decode_token.overload, (*inputs.values(), None, *tensors, 2, True, 1e-6))


def test_unsupported_cases_run_in_torch():
    """Gradients and float64."""
    inputs, mixing = make_inputs("cpu", 1)
    wide = {name: tensor.double() for name, tensor in inputs.items()}
    output, state = mhla_step(
        **wide, mixing=mixing, state=start(wide, mixing, 2, dtype=torch.float64), backend="triton"
    )
    assert output.dtype == state.current.dtype == torch.float64
    mixing.requires_grad_()
    output, _ = mhla_step(**inputs, mixing=mixing, state=start(inputs, mixing, 2), backend="triton")
    assert output.requires_grad
