# SPDX-License-Identifier: Apache-2.0
"""Decoding from a state, with grouped heads, padding and rows at different positions, against the dense form."""

from __future__ import annotations

import pytest
import torch

from mhla_hf import BlockLayout, mhla_attention
from mhla_hf.ops import MHLAState, empty_state, mhla_extend, mhla_step, rewind_state


BLOCK_SIZE, LENGTH, HEADS, KEY_HEADS = 4, 45, 4, 2


def make_inputs(per_head: bool, seed: int = 0) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Batch of 2, grouped heads; three rows of mixing weights, so that decoding crosses the end of the matrix."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    inputs = {
        "query": normal(2, LENGTH, HEADS, 5),
        "key": normal(2, LENGTH, KEY_HEADS, 5),
        "value": normal(2, LENGTH, KEY_HEADS, 3),
        "normalizer_query": normal(2, LENGTH, HEADS, 5).abs() + 0.05,
        "normalizer_key": normal(2, LENGTH, KEY_HEADS, 5).abs() + 0.05,
    }
    return inputs, normal(*((HEADS, 3, 3) if per_head else (3, 3))).abs() + 0.05


def part(inputs: dict[str, torch.Tensor], first: int, last: int) -> dict[str, torch.Tensor]:
    return {name: tensor[:, first:last] for name, tensor in inputs.items()}


def dense(inputs: dict[str, torch.Tensor], mixing: torch.Tensor, normalizer: str = "query") -> torch.Tensor:
    layout = BlockLayout((inputs["query"].shape[1],), block_size=(BLOCK_SIZE,))
    options = {"causal": True, "normalizer": normalizer, "backend": "naive"}
    return mhla_attention(**inputs, mixing=mixing, layout=layout, **options)


def start(per_head: bool, rewindable: int = 0) -> MHLAState:
    return empty_state(
        2, KEY_HEADS, 5, 3, BLOCK_SIZE, 3,
        num_mixing_heads=HEADS if per_head else KEY_HEADS, rewindable=rewindable, dtype=torch.float64,
    )  # fmt: skip


@pytest.mark.parametrize("normalizer", ["query", "none"])
@pytest.mark.parametrize("parts", [(0,), (1,), (3,), (4,), (5, 8), (16, 17, 30), (30,)], ids=str)
@pytest.mark.parametrize("per_head", [False, True])
def test_prompts_in_parts_and_steps_equal_the_dense_form_at_every_position(normalizer, parts, per_head):
    inputs, mixing = make_inputs(per_head)
    expected = dense(inputs, mixing, normalizer)
    state, position = start(per_head), 0
    for until in parts:
        if until == 0:
            continue
        output, state = mhla_extend(
            **part(inputs, position, until), mixing=mixing, state=state, normalizer=normalizer
        )  # fmt: skip
        torch.testing.assert_close(output, expected[:, position:until], rtol=1e-10, atol=1e-10)
        position = until
    for position in range(parts[-1], LENGTH):
        assert state.position.tolist() == [position, position]
        output, state = mhla_step(
            **part(inputs, position, position + 1), mixing=mixing, state=state, normalizer=normalizer
        )
        torch.testing.assert_close(output, expected[:, position : position + 1], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("pad", [(3, 0), (7, 2), (0, 9)], ids=str)
def test_rows_with_padding_decode_as_if_they_were_alone(per_head, pad):
    inputs, mixing = make_inputs(per_head, seed=1)
    valid = torch.ones(2, LENGTH, dtype=torch.bool)
    for row, count in enumerate(pad):
        valid[row, :count] = False
    # One hole in the middle as well, in the prompt of the first row.
    valid[0, 11] = False
    for name in inputs:
        inputs[name][~valid] = float("nan")
    state = start(per_head)
    output, state = mhla_extend(**part(inputs, 0, 14), mixing=mixing, state=state, valid=valid[:, :14])
    outputs = [output]
    for position in range(14, LENGTH):
        output, state = mhla_step(
            **part(inputs, position, position + 1), mixing=mixing, state=state, valid=valid[:, position : position + 1]
        )
        outputs.append(output)
    output = torch.cat(outputs, dim=1)
    for row in range(2):
        alone = {name: tensor[row : row + 1, valid[row]] for name, tensor in inputs.items()}
        expected = dense(alone, mixing)
        torch.testing.assert_close(output[row : row + 1, valid[row]], expected, rtol=1e-10, atol=1e-10)
    assert state.position.tolist() == valid.sum(dim=1).tolist()
    assert not output[~valid].any()


def test_a_step_without_a_token_leaves_its_row_alone():
    inputs, mixing = make_inputs(True)
    _, state = mhla_extend(**part(inputs, 0, 8), mixing=mixing, state=start(True))
    valid = torch.tensor([[True], [False]])
    _, after = mhla_step(**part(inputs, 8, 9), mixing=mixing, state=state, valid=valid)
    assert after.position.tolist() == [9, 8]
    output, _ = mhla_step(**part(inputs, 8, 9), mixing=mixing, state=after)
    torch.testing.assert_close(output[1:], dense(part(inputs, 0, 9), mixing)[1:, 8:], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("removed", [1, 4, 6, 13, 17])
@pytest.mark.parametrize("per_head", [False, True])
def test_rewinding_takes_tokens_back(removed, per_head):
    inputs, mixing = make_inputs(per_head, seed=2)
    expected = dense(inputs, mixing)
    valid = torch.ones(2, 17, dtype=torch.bool)
    _, state = mhla_extend(**part(inputs, 0, 17), mixing=mixing, state=start(per_head, rewindable=17))
    last = part(inputs, 17 - removed, 17)
    names = ("key", "normalizer_key", "value")
    state = rewind_state(state, mixing, *(last[name] for name in names), valid[:, 17 - removed :])
    for position in range(17 - removed, 24):
        output, state = mhla_step(**part(inputs, position, position + 1), mixing=mixing, state=state)
        torch.testing.assert_close(output, expected[:, position : position + 1], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("per_head", [False, True])
def test_rewinding_keeps_the_tokens_that_it_is_told_to_keep(per_head):
    inputs, mixing = make_inputs(per_head, seed=2)
    valid = torch.rand(2, 17, generator=torch.Generator().manual_seed(3)) < 0.8
    left = valid & (torch.rand(2, 17, generator=torch.Generator().manual_seed(4)) < 0.6)
    left[:, :4] = valid[:, :4]
    tokens = part(inputs, 0, 17)
    _, expected = mhla_extend(**tokens, mixing=mixing, state=start(per_head, rewindable=17), valid=left)
    _, state = mhla_extend(**tokens, mixing=mixing, state=start(per_head, rewindable=17), valid=valid)
    last = [tokens[name][:, 4:] for name in ("key", "normalizer_key", "value")]
    # Those that were not valid are not taken up.
    state = rewind_state(state, mixing, *last, valid[:, 4:], kept=left[:, 4:] | ~valid[:, 4:])
    for name in ("summaries", "current", "prefix", "upcoming", "left", "num_left", "position"):
        torch.testing.assert_close(getattr(state, name), getattr(expected, name), rtol=1e-9, atol=1e-9)


def test_gradients_pass_through_a_state():
    inputs, mixing = make_inputs(True, seed=3)
    inputs = {name: tensor[:, :11].clone().requires_grad_() for name, tensor in inputs.items()}
    mixing.requires_grad_()

    def stepwise() -> torch.Tensor:
        first, state = mhla_extend(**part(inputs, 0, 6), mixing=mixing, state=start(True))
        second, state = mhla_extend(**part(inputs, 6, 8), mixing=mixing, state=state)
        outputs = [first, second]
        for position in range(8, 11):
            output, state = mhla_step(**part(inputs, position, position + 1), mixing=mixing, state=state)
            outputs.append(output)
        return torch.cat(outputs, dim=1)

    cotangent = torch.randn(2, 11, HEADS, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    leaves = [*inputs.values(), mixing]
    actual = torch.autograd.grad(stepwise(), leaves, cotangent)
    expected = torch.autograd.grad(dense(inputs, mixing), leaves, cotangent)
    for mine, theirs in zip(actual, expected):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)


def test_a_bad_token_of_a_prompt_spoils_its_head_from_there_on():
    inputs, mixing = make_inputs(False)
    inputs["value"][0, 9, 1, 2] = float("nan")
    output, state = mhla_extend(**part(inputs, 0, 14), mixing=mixing, state=start(False))
    spoilt = output.isnan().any(dim=-1)
    expected = torch.zeros(2, 14, HEADS, dtype=torch.bool)
    expected[0, 9:, 2:] = True
    assert torch.equal(spoilt, expected)
    output, _ = mhla_step(**part(inputs, 14, 15), mixing=mixing, state=state)
    assert torch.equal(output.isnan().any(dim=-1)[:, 0], expected[:, -1])


def test_a_pair_of_another_width_is_refused():
    """Its sums would be a column of summaries that have fewer rows."""
    inputs, mixing = make_inputs(False)
    inputs["normalizer_key"] = inputs["key"][..., :-1]
    for run, tokens in ((mhla_extend, 5), (mhla_step, 1)):
        with pytest.raises(ValueError, match="normalizer_query has"):
            run(**part(inputs, 0, tokens), mixing=mixing, state=start(False))
