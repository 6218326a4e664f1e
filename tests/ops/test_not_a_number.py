# SPDX-License-Identifier: Apache-2.0
"""Reach of a NaN in causal attention: never to tokens before it, and from a query to its own token alone."""

from __future__ import annotations

import pytest
import torch

from mhla_hf import BlockLayout, mhla_attention
from mhla_hf.layouts.sequences import SequenceLayout
from mhla_hf.ops import empty_state, mhla_extend, mhla_step


LENGTH, BLOCK, BAD = 16, 4, 6
QUERIES = ("query", "normalizer_query")
OTHERS = ("key", "value", "normalizer_key")


def make_inputs() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = dict.fromkeys(("query", "key", "normalizer_query", "normalizer_key"), (1, LENGTH, 2, 4))
    shapes["value"] = (1, LENGTH, 2, 3)
    return {name: torch.rand(shape, generator=generator) + 0.1 for name, shape in shapes.items()}


def mixing() -> torch.Tensor:
    return torch.rand(4, 4, generator=torch.Generator().manual_seed(1)) + 0.1


def attend(inputs, backend, normalizer):
    layout = BlockLayout((LENGTH,), block_size=(BLOCK,))
    return mhla_attention(
        **inputs, mixing=mixing(), layout=layout, causal=True, normalizer=normalizer, backend=backend
    )


def attend_sequence(inputs, backend, normalizer):
    layout = SequenceLayout(torch.ones(1, LENGTH, dtype=torch.bool), BLOCK)
    return mhla_attention(
        **inputs, mixing=mixing(), layout=layout, causal=True, normalizer=normalizer, backend=backend
    )


def decode(inputs, backend, normalizer):
    state = empty_state(1, 2, 4, 3, BLOCK, 4)
    options = {"mixing": mixing(), "normalizer": normalizer}
    output, state = mhla_extend(**{name: x[:, :5] for name, x in inputs.items()}, state=state, **options)
    outputs = [output]
    for token in range(5, LENGTH):
        output, state = mhla_step(
            **{name: x[:, token : token + 1] for name, x in inputs.items()}, state=state, backend=backend, **options
        )
        outputs.append(output)
    return torch.cat(outputs, dim=1)


def extend(inputs, backend, normalizer):
    state = empty_state(1, 2, 4, 3, BLOCK, 4)
    options = {"mixing": mixing(), "normalizer": normalizer}
    first, state = mhla_extend(**{name: x[:, :3] for name, x in inputs.items()}, state=state, **options)
    second, _ = mhla_extend(**{name: x[:, 3:] for name, x in inputs.items()}, state=state, **options)
    return torch.cat([first, second], dim=1)


PATHS = [
    pytest.param(attend, "naive", id="naive"),
    pytest.param(attend, "torch", id="chunked"),
    pytest.param(attend, "triton", id="chunked-kernels"),
    pytest.param(attend_sequence, "torch", id="padded"),
    pytest.param(attend_sequence, "triton", id="padded-kernels", marks=pytest.mark.slow),
    pytest.param(decode, "torch", id="recurrent"),
    pytest.param(decode, "triton", id="recurrent-kernels", marks=pytest.mark.slow),
    pytest.param(extend, "torch", id="extended"),
]


def run(path, backend, normalizer, name, bad):
    """The outputs before and after one number of token `BAD` and head 1 is replaced."""
    if backend == "triton":
        pytest.importorskip("triton")
    inputs = make_inputs()
    before = path(inputs, backend, normalizer)
    inputs[name][0, BAD, 1, 2] = bad
    return before, path(inputs, backend, normalizer)


@pytest.mark.parametrize(("path", "backend"), PATHS)
@pytest.mark.parametrize("normalizer", ["query", pytest.param("none", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", QUERIES)
def test_a_bad_query_stays_with_its_token(path, backend, normalizer, name):
    before, after = run(path, backend, normalizer, name, float("nan"))
    spoilt = torch.zeros(before.shape[:3], dtype=torch.bool)
    spoilt[0, BAD, 1] = normalizer == "query" or name == "query"
    assert after[spoilt].isnan().all()
    torch.testing.assert_close(after[~spoilt], before[~spoilt])


@pytest.mark.parametrize(("path", "backend"), PATHS)
@pytest.mark.parametrize("bad", [float("nan"), pytest.param(float("inf"), marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", OTHERS)
def test_a_bad_key_or_value_does_not_reach_earlier_tokens(path, backend, name, bad):
    before, after = run(path, backend, "query", name, bad)
    torch.testing.assert_close(after[:, :BAD], before[:, :BAD])
    torch.testing.assert_close(after[:, :, 0], before[:, :, 0])
    if bad != bad:
        # Token by token, a value spoils its own column alone.
        assert after[:, BAD:, 1].isnan().any(dim=-1).all()


@pytest.mark.parametrize("backend", ["naive", "torch", pytest.param("triton", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", QUERIES + OTHERS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_block_query_keeps_what_is_bad_from_earlier_tokens(backend, name, bad):
    before, after = run(attend, backend, "block_query", name, bad)
    torch.testing.assert_close(after[:, :BAD], before[:, :BAD])
    torch.testing.assert_close(after[:, :, 0], before[:, :, 0])
    if bad == bad:
        return
    if name in OTHERS:
        assert after[:, BAD:, 1].isnan().all()
        return
    # By definition the query is part of the denominator at the same position of later blocks, and nowhere else.
    reached = [token for token in range(BAD, LENGTH) if (token - BAD) % BLOCK == 0]
    reached = reached[:1] if name == "query" else reached
    others = [token for token in range(LENGTH) if token not in reached]
    assert after[:, reached, 1].isnan().all()
    torch.testing.assert_close(after[:, others], before[:, others])


def test_gradients_of_block_query_are_those_of_the_dense_form():
    gradients = []
    for backend in ("naive", "torch"):
        inputs = {name: tensor.double().requires_grad_() for name, tensor in make_inputs().items()}
        output = attend(inputs, backend, "block_query")
        gradients.append(torch.autograd.grad(output.square().sum(), list(inputs.values())))
    for expected, actual in zip(*gradients):
        torch.testing.assert_close(actual, expected)
