# SPDX-License-Identifier: Apache-2.0
"""Reach of a NaN in causal attention: never to tokens before it, and from a query to its own token alone."""

from __future__ import annotations

from functools import partial

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


def attend(inputs, backend, normalizer, layout=None):
    layout = layout or BlockLayout((LENGTH,), block_size=(BLOCK,))
    return mhla_attention(
        **inputs, mixing=mixing(), layout=layout, causal=True, normalizer=normalizer, backend=backend
    )


attend_sequence = partial(attend, layout=SequenceLayout(torch.ones(1, LENGTH, dtype=torch.bool), BLOCK))


def decode(inputs, backend, normalizer, ends=(5, *range(6, LENGTH + 1))):
    """In parts up to some tokens, those of one token by steps."""
    outputs, state = [], empty_state(1, 2, 4, 3, BLOCK, 4)
    for start, end in zip((0, *ends), ends):
        run, options = (mhla_step, {"backend": backend}) if end - start == 1 else (mhla_extend, {})
        tokens = {name: x[:, start:end] for name, x in inputs.items()}
        output, state = run(**tokens, state=state, mixing=mixing(), normalizer=normalizer, **options)
        outputs.append(output)
    return torch.cat(outputs, dim=1)


extend = partial(decode, ends=(3, LENGTH - 1, LENGTH))

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
