# SPDX-License-Identifier: Apache-2.0
"""Sinks: layers against softmax and MHLA in dense form, with masks that are made token by token."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch

from mhla_hf.layers.state import DecodingState, TokenSequence

from ..ops.triton_checks import DEVICES
from .test_joint import assert_equal_with_gradients
from .test_window import (
    HEADS,
    SHARED,
    VALID,
    WIDTH,
    assert_spoils_its_document_alone,
    biases,
    dense_mask,
    dense_window,
    make_layer,
    make_tokens,
)


BLOCK = 4
DOCUMENTS = torch.tensor([[0] * 7 + [1] * 2 + [2] * 12, [0] * 10 + [1] * 11])


def masks_of(window, size, sinks, causal, valid, documents):
    """What softmax sees, what the landmark stands for and what MHLA sees, `[B, T, T]`; blocks of MHLA, `[B, T]`."""
    batch, length = valid.shape
    seen, beyond, summed = torch.zeros(3, batch, length, length, dtype=torch.bool)
    blocks = torch.zeros(batch, length, dtype=torch.long)
    for b in range(batch):
        counts: dict[int, int] = {}
        position = []
        for t in range(length):
            document = int(documents[b, t])
            position.append(counts.get(document, 0))
            counts[document] = counts.get(document, 0) + int(valid[b, t])
        blocks[b] = torch.tensor(position) // BLOCK
        for i, j in itertools.product(range(length), repeat=2):
            apart = documents[b, i] != documents[b, j] or not (valid[b, i] and valid[b, j])
            if apart or (causal and position[j] > position[i]):
                continue
            distance = position[i] // size - position[j] // size
            near = distance == 0 or (window == "adjacent" and abs(distance) == 1)
            is_sink = position[j] < sinks
            seen[b, i, j] = near or is_sink
            beyond[b, i, j] = not near and not is_sink
            summed[b, i, j] = not is_sink
    return seen, beyond, summed, blocks


def dense_mhla(layer, query, key, value, summed, blocks):
    """MHLA with relu features, a row of weights for each pair of tokens, `[B, T, H, V]`."""
    key, value = (x.repeat_interleave(HEADS // x.shape[2], dim=2) for x in (key, value))
    weights = layer.mixing_matrix()[blocks[:, :, None], blocks[:, None, :]] * summed
    scores = torch.einsum("bthk,bshk->bhts", query.relu(), key.relu()) * weights[:, None]
    output = torch.einsum("bhts,bshv->bthv", scores, value)
    return output / (scores.sum(-1).transpose(1, 2).unsqueeze(-1) + layer.config.eps)


def sink_layer(seed=0, *, window="adjacent", size=5, sinks=2, causal=True, **options):
    share = {"window_share": ["query", "head"][seed]}
    options = {"block_size": BLOCK, "grid": 24, "causal": causal, "resize": "extend", **share, **options}
    return make_layer(seed, window=window, window_size=size, sink_tokens=sinks, **options)


def assert_dense(layer, tokens, valid, documents, sequence):
    config = layer.config
    masks = masks_of(config.window, *config.window_size, config.sink_tokens, sequence.causal, valid, documents)
    window, share = dense_window(*tokens, *masks[:2], WIDTH**-0.5, biases(layer, tokens[0]))
    expected = share * window + (1 - share) * dense_mhla(layer, *tokens, *masks[2:])
    expected = expected * valid[..., None, None]
    output = layer(*tokens, sequence=sequence)
    torch.testing.assert_close(output, expected, rtol=1e-10, atol=1e-10)
    assert_equal_with_gradients((output,), (expected,), [*tokens, *layer.parameters()])


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("causal", [False, True], ids=["encoder", "causal"])
@pytest.mark.parametrize("window, size, sinks", [("block", 5, 2), ("adjacent", 3, 3), ("block", 1, 1)])
@pytest.mark.parametrize("padding", [None, "left-padded", "holes", "right-padded"])
def test_sequences_with_sinks_agree_with_the_dense_form(causal, window, size, sinks, padding, seed):
    layer = sink_layer(seed, window=window, size=size, sinks=sinks, causal=causal, shared=[SHARED, HEADS][seed])
    valid = None if padding is None else VALID[padding]
    known = VALID["full"] if valid is None else valid
    tokens = make_tokens(21, seed, shared=[SHARED, HEADS][seed])
    assert_dense(layer, tokens, known, torch.zeros(2, 21, dtype=torch.long), TokenSequence(causal, valid))


@pytest.mark.parametrize("causal", [False, True], ids=["encoder", "causal"])
@pytest.mark.parametrize("window, size, sinks", [("block", 3, 1), ("adjacent", 3, 3)])
@pytest.mark.parametrize("padding", [None, "holes", "left-padded", "right-padded"])
def test_every_document_has_sinks_of_its_own(causal, window, size, sinks, padding):
    layer = sink_layer(window=window, size=size, sinks=sinks, causal=causal)
    valid = None if padding is None else VALID[padding]
    known = VALID["full"] if valid is None else valid
    assert_dense(layer, make_tokens(21), known, DOCUMENTS, TokenSequence(causal, valid, DOCUMENTS, 3))


@pytest.mark.parametrize("causal", [False, True], ids=["encoder", "causal"])
@pytest.mark.parametrize("length", [1, 3, 4, 5, 9])
def test_texts_may_be_shorter_than_the_sinks(causal, length):
    layer, tokens = sink_layer(sinks=4, size=4, causal=causal), make_tokens(length)
    everything = torch.ones(2, length, dtype=torch.bool)
    assert_dense(layer, tokens, everything, torch.zeros(2, length, dtype=torch.long), TokenSequence(causal))


@pytest.mark.parametrize("window", ["block", "adjacent"])
@pytest.mark.parametrize("sinks", [1, 3])
@pytest.mark.parametrize("rope", ["after_feature_map", "before_feature_map"])
def test_tokens_before_a_grid_are_left_out_of_mhla(window, sinks, rope):
    """They are in every window in any case: beside it, the layer is one with zeros for their mapped keys."""
    grid, size, prefix = (5, 4), (2, 2), 3
    options = {"blocks": (2, 2), "window": window, "window_size": size, "prefix": prefix, "rope": rope}
    layer, tokens = make_layer(sink_tokens=sinks, **options), make_tokens(prefix + 20)
    query, key, value = tokens
    mask = dense_mask(grid, window, size, prefix)
    layout = layer.layout_for(grid)
    summed = (torch.arange(prefix + 20) >= sinks).expand(2, prefix + 20, prefix + 20)
    attended = dense_mhla(layer, *tokens, summed, layout.block_of_token.expand(2, -1))
    softmax, share = dense_window(*tokens, mask, ~mask, WIDTH**-0.5, layer.window_bias, layout.block_of_token)
    expected = share * softmax + (1 - share) * attended
    output = layer(*tokens, grid=grid)
    torch.testing.assert_close(output, expected, rtol=1e-10, atol=1e-10)
    assert_equal_with_gradients((output,), (expected,), [*tokens, *layer.parameters()])


@pytest.mark.parametrize("place", [1, 2], ids=["key", "value"])
@pytest.mark.parametrize("causal", [False, True], ids=["encoder", "causal"])
def test_a_bad_sink_spoils_its_document_alone(causal, place):
    layer = sink_layer(size=3, causal=causal)
    assert_spoils_its_document_alone(layer, TokenSequence(causal, None, DOCUMENTS, 3), place, 10)


@torch.no_grad()
@pytest.mark.parametrize("cuts", [[1] * 21, [2, 3, 1, 1, 9, 5], [1, 1, 19]], ids=str)
@pytest.mark.parametrize("padding", [None, "left-padded", "holes"])
@pytest.mark.parametrize("window, size, sinks", [("block", 4, 4), ("adjacent", 3, 1), ("adjacent", 2, 2)])
def test_decoding_with_sinks_is_recomputation(window, size, sinks, padding, cuts):
    layer, tokens = sink_layer(window=window, size=size, sinks=sinks, mixing_tail="decay"), make_tokens(21)
    valid = None if padding is None else VALID[padding]
    expected = layer(*tokens, sequence=TokenSequence(True, valid))
    state, found = DecodingState(rewindable=3), []
    for start, stop in itertools.pairwise(itertools.accumulate(cuts, initial=0)):
        seen = None if valid is None else valid[:, start:stop]
        output, state = layer(*[x[:, start:stop] for x in tokens], sequence=TokenSequence(True, seen, state=state))
        found.append(output)
    torch.testing.assert_close(torch.cat(found, dim=1), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("padding", [None, "left-padded"])
def test_kernels_of_causal_attention_take_sinks(device, padding, monkeypatch):
    pytest.importorskip("triton")
    from mhla_hf.layers import mhla as module

    attend, used = module.attend_on, []
    monkeypatch.setattr(module, "attend_on", lambda backend, *a, **k: used.append(backend) or attend(backend, *a, **k))
    valid = None if padding is None else VALID[padding].to(device)
    options = {"feature_map": "hedgehog", "rope": "before_feature_map", "backend": "triton"}
    layer = sink_layer(**options).float().to(device)
    plain = copy.deepcopy(layer)
    plain.config = layer.config.replace(backend="torch")
    results = []
    for one in (layer, plain):
        tokens = [x.detach().float().to(device).requires_grad_() for x in make_tokens(21)]
        output = one(*tokens, sequence=TokenSequence(True, valid))
        results.append([output, *torch.autograd.grad(output.sin().sum(), [*tokens, *one.parameters()])])
    torch.testing.assert_close(*results, rtol=1e-4, atol=2e-5)
    assert used == ["triton", "torch"]


@pytest.mark.parametrize("device", DEVICES)
@torch.no_grad()
def test_sinks_of_a_grid_leave_the_fused_kernels_out(device, monkeypatch):
    """Those know no mask of keys: features and operator are computed one after the other."""
    pytest.importorskip("triton")
    from mhla_hf.layers import mhla as module

    fused = []
    monkeypatch.setattr(module, "fused_attention", lambda *args: fused.append(1))
    options = {"blocks": (2, 2), "window": "block", "window_size": (2, 2), "prefix": 2, "backend": "triton"}
    layer = make_layer(sink_tokens=1, **options).float().to(device)
    plain = copy.deepcopy(layer)
    plain.config = layer.config.replace(backend="torch")
    tokens = [x.detach().float().to(device) for x in make_tokens(2 + 20)]
    torch.testing.assert_close(layer(*tokens, grid=(5, 4)), plain(*tokens, grid=(5, 4)), rtol=1e-5, atol=1e-5)
    assert not fused


@pytest.mark.slow
@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["text", "documents"])
def test_torch_compile_traces_sinks_whole(documents):
    torch.compiler.reset()
    layer, tokens = sink_layer(), make_tokens(21)
    sequence = TokenSequence(True, documents=documents, num_documents=3)
    output = torch.compile(layer, fullgraph=True, backend="eager")(*tokens, sequence=sequence)
    torch.testing.assert_close(output, layer(*tokens, sequence=sequence), rtol=1e-10, atol=1e-10)
    output.sum().backward()
    assert layer.window_query.grad.abs().sum() > 0
    torch.compiler.reset()


def test_sinks_have_gradients_by_functions_and_run_without_data():
    layer, tokens = sink_layer(), [x.detach() for x in make_tokens(21, batch=1)]
    sequence, parameters = TokenSequence(True), dict(layer.named_parameters())

    def loss(values, *tokens):
        return torch.func.functional_call(layer, values, tokens, {"sequence": sequence}).sin().sum()

    found = torch.func.grad(loss)(parameters, *tokens)
    expected = torch.autograd.grad(loss(parameters, *tokens), [*parameters.values()])
    torch.testing.assert_close([*found.values()], [*expected])
    meta = copy.deepcopy(layer).to("meta")
    assert meta(*[x.to("meta") for x in tokens], sequence=sequence).shape == (1, 21, HEADS, WIDTH)
