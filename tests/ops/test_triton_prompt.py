# SPDX-License-Identifier: Apache-2.0
"""Prompts with a state by the kernels against plain torch: interpreted on a CPU, compiled on a GPU, the same cases."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from mhla_hf.ops import MHLAState, mhla_extend, mhla_step

from .recurrent_cases import assert_same_state, kernels_counted, make_inputs, part, start
from .triton_checks import DEVICES, buffers_full_of_nan, on


pytest.importorskip("mhla_hf.ops.triton.prompt")

BLOCK_SIZE = 16


def extend(
    inputs: dict[str, torch.Tensor],
    mixing: torch.Tensor,
    state: MHLAState,
    backend: str,
    *ends: int,
    valid: torch.Tensor | None = None,
    **options: object,
) -> tuple[torch.Tensor, MHLAState]:
    """Runs the tokens in parts that end where `ends` say, and then the rest."""
    outputs, first = [], 0
    for last in (*ends, inputs["query"].shape[1]):
        tokens, seen = part(inputs, first, last), None if valid is None else valid[:, first:last]
        output, state = mhla_extend(**tokens, mixing=mixing, state=state, valid=seen, backend=backend, **options)
        outputs.append(output)
        first = last
    return torch.cat(outputs, dim=1), state


def assert_same_prompt(
    inputs: dict[str, torch.Tensor],
    mixing: torch.Tensor,
    *ends: int,
    state: MHLAState | None = None,
    **options: object,
) -> tuple[torch.Tensor, MHLAState]:
    """Compares both backends in float32 and returns the kernels' results."""
    state = start(inputs, mixing, BLOCK_SIZE) if state is None else state
    expected = extend(inputs, mixing, state, "torch", *ends, **options)
    with buffers_full_of_nan():
        actual = extend(inputs, mixing, state, "triton", *ends, **options)
    torch.testing.assert_close(actual[0], expected[0], rtol=1e-5, atol=1e-5, equal_nan=True)
    assert_same_state(actual[1], expected[1], 1e-5, 1e-5)
    return actual


def padding(device: str, length: int, left: tuple[int, int], right: tuple[int, int] = (0, 0)) -> torch.Tensor:
    valid = torch.ones(2, length, dtype=torch.bool, device=device)
    for row in range(2):
        valid[row, : left[row]] = False
        valid[row, length - right[row] :] = False
    return valid


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("length", [1, 15, 16, 48, 63])
def test_lengths(length, device):
    """Within a block, up to the end of one, and with a block that is partly full; grouped heads."""
    inputs, mixing = make_inputs(device, length, per_head=length % 2 == 1)
    _, state = assert_same_prompt(inputs, mixing)
    assert state.position.tolist() == [length, length] and not state.is_empty


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("per_head, key_heads", [(True, 2), (False, 2), (False, 1)])
def test_heads_and_seeds(per_head, key_heads, device):
    for seed in range(2):
        inputs, mixing = make_inputs(device, 21, per_head=per_head, key_heads=key_heads, seed=seed)
        assert_same_prompt(inputs, mixing)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("options", [{"normalizer": "none"}, {"normalizer_query": None, "normalizer_key": None}])
@pytest.mark.parametrize("ends", [(), (20,)], ids=str)
def test_without_a_pair_of_its_own(options, ends, device):
    inputs, mixing = make_inputs(device, 35)
    for name in options:
        inputs.pop(name, None)
    inputs["query"], inputs["key"] = inputs["query"].abs(), inputs["key"].abs()
    options = {name: value for name, value in options.items() if value is not None}
    assert_same_prompt(inputs, mixing, *ends, **options)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("left, right", [((3, 17), (0, 0)), ((0, 0), (9, 33)), ((35, 2), (0, 1))], ids=str)
def test_padding(left, right, device):
    """Rows of their own lengths, one of them without any token."""
    inputs, mixing = make_inputs(device, 35, per_head=True)
    valid = padding(device, 35, left, right)
    for name in inputs:
        inputs[name][~valid] = float("nan")
    output, state = assert_same_prompt(inputs, mixing, valid=valid)
    assert state.position.tolist() == valid.sum(dim=1).tolist()
    assert not output[~valid].any()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("ends", [(5, 16), (16, 32), (1, 40)], ids=str)
@pytest.mark.parametrize("per_head", [False, True])
def test_prompts_in_parts(per_head, ends, device):
    """Parts that end within a block and at its end, rows at different positions."""
    inputs, mixing = make_inputs(device, 47, per_head=per_head)
    assert_same_prompt(inputs, mixing, *ends, valid=padding(device, 47, (0, 3)))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("ends", [(), (9, 24)], ids=str)
def test_bad_tokens_spoil_what_comes_after_them(ends, device):
    inputs, mixing = make_inputs(device, 40, heads=4, key_heads=2)
    inputs["value"][0, 21, 1, 2] = float("nan")
    inputs["normalizer_key"][1, 6, 0, 0] = float("inf")
    output, state = assert_same_prompt(inputs, mixing, *ends)
    expected = torch.zeros(2, 40, 4, dtype=torch.bool, device=device)
    expected[0, 21:, 2:] = expected[1, 6:, :2] = True
    assert torch.equal(output.isnan().any(dim=-1), expected)
    assert torch.equal(state.summaries.isnan().flatten(3).any(-1)[0, 1], torch.tensor([0, 1, 0, 0]).bool().to(device))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("ends", [(), (20,)], ids=str)
def test_errors_in_bfloat16_are_those_of_torch(ends, device):
    """Of the prompt's outputs and of tokens decoded after it, against float64."""
    errors = dict.fromkeys(("triton", "torch"), torch.zeros(2))
    for seed in range(2):
        inputs, mixing = make_inputs("cpu", 41, heads=1, width=32, seed=seed)
        inputs = {name: tensor.bfloat16() for name, tensor in inputs.items()}
        wide = {name: tensor.double() for name, tensor in inputs.items()}
        expected, _ = extend(wide, mixing.double(), start(wide, mixing, BLOCK_SIZE, dtype=torch.float64), "torch")
        given, weights = on(device, part(inputs, 0, 40)), mixing.to(device)
        token = on(device, part(inputs, 40, 41))
        for backend in errors:
            state = start(given, weights, BLOCK_SIZE, summary_dtype=torch.bfloat16)
            output, state = extend(given, weights, state, backend, *ends)
            assert state.summaries.dtype == torch.bfloat16 and state.current.dtype == torch.float32
            last, _ = mhla_step(**token, mixing=weights, state=state, backend="torch")
            pairs = (output, expected[:, :40]), (last, expected[:, 40:])
            squares = [(mine.cpu() - theirs).square().sum() / theirs.square().sum() for mine, theirs in pairs]
            errors[backend] = errors[backend] + torch.stack(squares)
    assert (errors["triton"] <= 4 * errors["torch"]).all()


@pytest.mark.parametrize("device", DEVICES)
def test_the_state_before_stays_valid(device):
    inputs, mixing = make_inputs(device, 20, heads=1)
    _, state = extend(part(inputs, 0, 10), mixing, start(inputs, mixing, 8), "triton")
    first, _ = extend(part(inputs, 10, 20), mixing, state, "triton")
    second, _ = extend(part(inputs, 10, 20), mixing, state, "triton")
    assert torch.equal(first, second)


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_extends_in_one_graph(device):
    """From an empty state without padding, and from another one with some."""
    inputs, mixing = make_inputs(device, 6, heads=1)
    valid = padding(device, 6, (0, 3))
    empty = start(inputs, mixing, 4)
    expected = extend(inputs, mixing, empty, "triton")
    again = extend(inputs, mixing, expected[1], "triton", valid=valid)

    def step(state, valid=None):
        return mhla_extend(**inputs, mixing=mixing, state=state, valid=valid, backend="triton")

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for given, (output, after) in (((empty,), expected), ((expected[1], valid), again)):
        actual, state = compiled(*given)
        torch.testing.assert_close(actual, output)
        assert_same_state(state, after)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("has_past", [False, True])
def test_operator_is_what_torch_expects(has_past, device):
    inputs, mixing = make_inputs(device, 5, heads=1)
    state = start(inputs, mixing, 4, num_blocks=2)
    table = torch.tensor([[0, 1, 2, 3], [4, 5, 5, 5]], dtype=torch.int32, device=device)
    past = torch.zeros(2, 1, 2, 5, 4, device=device), state.summaries, state.current
    arguments = *inputs.values(), mixing, mixing, table, *(past if has_past else (None,) * 3)
    torch.library.opcheck(
        torch.ops.mhla_hf.extend_state,
        (*arguments, state.position, state.position + 5, 2, torch.float32, True, 1e-6),
        test_utils=("test_schema", "test_faketensor"),
    )


def test_unsupported_cases_run_in_torch():
    """Gradients and float64."""
    inputs, mixing = make_inputs("cpu", 5)
    wide = {name: tensor.double() for name, tensor in inputs.items()}
    with FlopCounterMode(display=False) as counter:
        output, state = extend(wide, mixing, start(wide, mixing, 2, dtype=torch.float64), "triton")
        assert output.dtype == state.current.dtype == torch.float64
        mixing.requires_grad_()
        output, state = extend(inputs, mixing, start(inputs, mixing, 2), "triton")
        assert output.requires_grad and state.prefix.requires_grad
    assert not kernels_counted(counter)
