# SPDX-License-Identifier: Apache-2.0
"""Reach of a bad token in packed sequences, whose numbers `test_band` has; mixing weights past their end."""

from __future__ import annotations

import pytest
import torch

from mhla_hf import mhla_attention
from mhla_hf.layouts.sequences import SequenceLayout
from mhla_hf.ops import extend_mixing, forms

from .test_band import make_tokens, make_weights


@pytest.mark.parametrize("backend", ["torch", pytest.param("triton", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["key", "value", "normalizer_key"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("block_size", [1, 4], ids=["many-blocks", "few-blocks"])
@pytest.mark.parametrize("causal", [False, True])
def test_a_bad_token_stays_in_its_document(causal, block_size, bad, name, backend):
    documents = torch.arange(3).repeat_interleave(torch.tensor([6, 9, 8])).expand(2, -1)
    layout = SequenceLayout(torch.ones(2, 23, dtype=torch.bool), block_size, documents, num_documents=3)
    inputs = {**make_tokens(23, torch.float32), **make_weights(3, False, None, torch.float32)}
    inputs = {key: tensor.detach() for key, tensor in inputs.items()}
    options = {"layout": layout, "causal": causal, "backend": backend}
    clean = mhla_attention(**inputs, **options)
    inputs[name][1, 8, 0, 1] = bad
    output = mhla_attention(**inputs, **options)
    spoilt = torch.zeros(2, 23, 4, dtype=torch.bool)
    spoilt[1, 8 if causal else 6 : 15, :2] = True
    assert torch.equal(output.isnan().all(dim=-1), spoilt)
    assert torch.equal(output[~spoilt], clean[~spoilt])


@pytest.mark.parametrize("per_head", [False, True])
def test_documents_of_each_row_have_their_own_weights_where_heads_are_computed_apart(per_head, monkeypatch):
    documents = torch.stack([torch.arange(23) // 8, torch.arange(23) // 12])
    layout = SequenceLayout(torch.ones(2, 23, dtype=torch.bool), 4, documents, num_documents=3)
    inputs = {**make_tokens(23, torch.float64), **make_weights(3, per_head, None, torch.float64)}
    expected = mhla_attention(**inputs, layout=layout)
    monkeypatch.setattr(forms, "_MIN_HEAD", 1)
    torch.testing.assert_close(mhla_attention(**inputs, layout=layout), expected, rtol=1e-12, atol=1e-12)


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
    assert torch.equal(extend_mixing(mixing, 2, causal=True), expected[:2, :2].tril())
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
