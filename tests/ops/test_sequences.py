# SPDX-License-Identifier: Apache-2.0
"""Padded and packed sequences against every document alone in the dense form; mixing weights past their end."""

from __future__ import annotations

import pytest
import torch

from mhla_hf import BlockLayout, mhla_attention
from mhla_hf.layouts.sequences import SequenceLayout
from mhla_hf.ops import extend_mixing


BLOCK_SIZE, LENGTH = 4, 23
OPTIONS = {"eps": 1e-6, "normalizer": "query"}


def make_inputs(per_head: bool, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def positive(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=generator, dtype=torch.float64) + 0.05

    return {
        "query": positive(2, LENGTH, 4, 5),
        "key": positive(2, LENGTH, 2, 5),
        "value": torch.randn(2, LENGTH, 2, 3, generator=generator, dtype=torch.float64),
        # Three rows for up to six blocks.
        "mixing": positive(*((4, 3, 3) if per_head else (3, 3))),
    }


def attend(inputs: dict[str, torch.Tensor], layout: SequenceLayout, causal: bool) -> torch.Tensor:
    return mhla_attention(**inputs, layout=layout, causal=causal, **OPTIONS)


def alone(inputs: dict[str, torch.Tensor], row: int, chosen: torch.Tensor, causal: bool) -> torch.Tensor:
    """The dense form on some tokens of one row."""
    tokens = {name: tensor[row : row + 1, chosen] for name, tensor in inputs.items() if name != "mixing"}
    layout = BlockLayout((int(chosen.sum()),), block_size=(BLOCK_SIZE,))
    mixing = extend_mixing(inputs["mixing"], layout.num_blocks, causal=False)
    return mhla_attention(**tokens, mixing=mixing, layout=layout, causal=causal, backend="naive", **OPTIONS)


def masks() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    valid = {name: torch.ones(2, LENGTH, dtype=torch.bool) for name in ("none", "left", "right")}
    valid["left"][0, :9], valid["right"][1, 14:] = False, False
    valid["interior"] = torch.rand(2, LENGTH, generator=generator) < 0.6
    return valid


def gradients(output: torch.Tensor, inputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    cotangent = torch.arange(output.numel(), dtype=output.dtype).reshape(output.shape).sin()
    return torch.autograd.grad((output * cotangent).sum(), list(inputs.values()))


@pytest.mark.parametrize("name", list(masks()))
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("per_head", [False, True])
def test_padding_is_as_if_it_were_not_there(name, causal, per_head):
    valid = masks()[name]
    inputs = make_inputs(per_head)
    for tensor in (inputs["query"], inputs["key"], inputs["value"]):
        tensor[~valid] = float("nan")
    inputs = {key: tensor.requires_grad_() for key, tensor in inputs.items()}
    output = attend(inputs, SequenceLayout(valid, BLOCK_SIZE), causal)
    expected = torch.zeros_like(output)
    for row in range(2):
        expected[row, valid[row]] = alone(inputs, row, valid[row], causal)[0]
    torch.testing.assert_close(output, expected, rtol=1e-10, atol=1e-10)
    for mine, theirs in zip(gradients(output, inputs), gradients(expected, inputs)):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("padded", [False, True])
def test_packed_documents_are_as_if_they_were_alone(causal, per_head, padded):
    # Documents of 1 to 9 tokens, another number of them in each row.
    lengths = [[5, 1, 9, 8], [7, 16]]
    documents = torch.stack([torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in lengths])
    valid = masks()["interior" if padded else "none"]
    inputs = {name: tensor.requires_grad_() for name, tensor in make_inputs(per_head, seed=1).items()}
    output = attend(inputs, SequenceLayout(valid, BLOCK_SIZE, documents, num_documents=4), causal)
    expected = torch.zeros_like(output)
    for row, count in enumerate(map(len, lengths)):
        for document in range(count):
            chosen = valid[row] & (documents[row] == document)
            if chosen.any():
                expected[row, chosen] = alone(inputs, row, chosen, causal)[0]
    torch.testing.assert_close(output, expected, rtol=1e-10, atol=1e-10)
    for mine, theirs in zip(gradients(output, inputs), gradients(expected, inputs)):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("backend", ["torch", pytest.param("triton", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["key", "value", "normalizer_key"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("block_size", [1, BLOCK_SIZE], ids=["many-blocks", "few-blocks"])
@pytest.mark.parametrize("causal", [False, True])
def test_a_bad_token_stays_in_its_document(causal, block_size, bad, name, backend):
    documents = torch.arange(3).repeat_interleave(torch.tensor([6, 9, 8])).expand(2, -1)
    layout = SequenceLayout(torch.ones(2, LENGTH, dtype=torch.bool), block_size, documents, num_documents=3)
    inputs = {key: tensor.float() for key, tensor in make_inputs(False).items()}
    inputs["normalizer_key"], inputs["normalizer_query"] = inputs["key"] + 0.1, inputs["query"] + 0.1
    clean = mhla_attention(**inputs, layout=layout, causal=causal, backend=backend, **OPTIONS)
    inputs[name][1, 8, 0, 1] = bad
    output = mhla_attention(**inputs, layout=layout, causal=causal, backend=backend, **OPTIONS)
    spoilt = torch.zeros(2, LENGTH, 4, dtype=torch.bool)
    spoilt[1, 8 if causal else 6 : 15, :2] = True
    assert torch.equal(output.isnan().all(dim=-1), spoilt)
    assert torch.equal(output[~spoilt], clean[~spoilt])


def test_weights_past_the_end_go_by_distance():
    mixing = torch.arange(9.0).reshape(3, 3)
    expected = torch.tensor(
        [
            [0.0, 1.0, 2.0, 2.0, 2.0],
            [3.0, 4.0, 5.0, 2.0, 2.0],
            [6.0, 7.0, 8.0, 1.0, 2.0],
            [6.0, 6.0, 7.0, 8.0, 1.0],
            [6.0, 6.0, 6.0, 7.0, 8.0],
        ]
    )
    assert torch.equal(extend_mixing(mixing, 5, causal=False), expected)
    assert torch.equal(extend_mixing(mixing, 5, causal=True), expected.tril())
    assert torch.equal(extend_mixing(mixing.expand(4, 3, 3), 2, causal=False), expected[:2, :2].expand(4, 2, 2))
    halved = extend_mixing(mixing, 5, causal=True, mixing_decay=torch.tensor([0.5, 0.0]))
    assert torch.equal(halved[0, 4], torch.tensor([1.5, 3.0, 6.0, 7.0, 8.0]))
    assert torch.equal(halved[1, 4], torch.tensor([0.0, 0.0, 6.0, 7.0, 8.0]))


def test_wrong_shapes_are_named():
    for shape in ((3, 2), (2, 3), (4, 3, 2), (3,)):
        with pytest.raises(ValueError, match=r"mixing must be \[blocks, blocks\]"):
            extend_mixing(torch.ones(shape), 5, causal=True)
    valid = torch.ones(2, 5, dtype=torch.bool)
    with pytest.raises(ValueError, match="valid must be a bool tensor"):
        SequenceLayout(valid.long(), 4)
    with pytest.raises(ValueError, match="documents must be"):
        SequenceLayout(valid, 4, torch.zeros(2, 4, dtype=torch.long))
    with pytest.raises(ValueError, match="tokens has 6 tokens"):
        SequenceLayout(valid, 4).to_blocks(torch.zeros(2, 6, 1))
