# SPDX-License-Identifier: Apache-2.0
"""Layers with hedgehog features in the kernels, against the same layers in plain torch."""

from __future__ import annotations

import copy

import pytest
import torch

from mhla_hf import MHLAConfig
from mhla_hf.layers import MHLA, HeadNorms
from mhla_hf.layers.state import TokenSequence

from ..ops.triton_checks import DEVICES
from .test_fused import in_torch, make_layer, outputs_and_gradients


pytest.importorskip("triton")

BEFORE = {"feature_map": "hedgehog", "rope": "before_feature_map"}
OPTIONS = {
    "recovery": {**BEFORE, "mixing_heads": "per_head", "lepe_kernel": 3},
    "all": {**BEFORE, "kv_heads": 1, "normalizer": "none", "output_norm": True, "output_gate": True, "head_dim": 12},
    "window": {**BEFORE, "window": "block", "window_size": (2, 2), "feature_map_eps": 1e-3},
}


@pytest.fixture
def calls(monkeypatch):
    """The features that were computed by their kernel, one entry each: what else it computed."""
    from mhla_hf.ops import triton

    features, found = triton.hedgehog_features, []

    def counted(*args, rotary, norm, **kwargs):
        found.append({name for name, part in (("rotary", rotary), ("norm", norm)) if part is not None})
        return features(*args, rotary=rotary, norm=norm, **kwargs)

    monkeypatch.setattr(triton, "hedgehog_features", counted)
    return found


def assert_matches_torch(layer, tokens, arguments):
    plain = copy.deepcopy(layer)
    plain.config = layer.config.replace(backend="torch")
    actual, expected = (outputs_and_gradients(one, tokens, arguments) for one in (layer, plain))
    for name, tensor in expected.items():
        torch.testing.assert_close(actual[name], tensor, rtol=1e-4, atol=2e-5, msg=lambda text, name=name: name + text)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", OPTIONS)
def test_layers_match_torch(case, device, calls):
    layer, tokens, arguments = make_layer(device, **OPTIONS[case])
    assert_matches_torch(layer, tokens, arguments)
    # The window needs normed queries and keys itself.
    assert calls == [{"rotary"} if case == "window" else {"rotary", "norm"}] * 2


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_features_rotated_after_the_map_take_the_other_path(device, calls):
    layer, tokens, arguments = make_layer(device, feature_map="hedgehog")
    assert_matches_torch(layer, tokens, arguments)
    assert not calls


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@torch.no_grad()
def test_norms_and_rotary_embeddings_that_kernels_do_not_know_come_before(device, calls):
    layer, tokens, arguments = make_layer(device, **OPTIONS["recovery"])
    rotary, norms = arguments["rotary"], arguments["norms"]
    expected = in_torch(layer, tokens, arguments)
    others = torch.nn.Sequential(norms.query), torch.nn.Sequential(norms.key)
    for changed in ({"rotary": lambda rows: rotary(rows)}, {"norms": HeadNorms(*others)}):
        torch.testing.assert_close(layer(*tokens, **{**arguments, **changed}), expected, rtol=1e-5, atol=1e-5)
    assert calls == [set()] * 2 + [{"rotary"}] * 2


@pytest.mark.parametrize("device", DEVICES)
@torch.no_grad()
def test_maps_with_hooks_are_called(device, calls):
    """Offloading brings a weight in when its module is called."""
    layer, tokens, arguments = make_layer(device, **OPTIONS["recovery"])
    expected, seen = in_torch(layer, tokens, arguments), []
    layer.feature_map_query.register_forward_pre_hook(lambda *_: seen.append(1))
    torch.testing.assert_close(layer(*tokens, **arguments), expected, rtol=1e-5, atol=1e-5)
    assert seen and not calls


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("padded", [True, False])
def test_sequences(padded, device, calls):
    generator = torch.Generator().manual_seed(0)
    options = {"causal": False, "resize": "extend", "block_size": (4,), "grid": (16,), "mixing_heads": "per_head"}
    config = MHLAConfig(feature_map="hedgehog", backend="triton", **options)
    layer = MHLA(config, hidden_size=6, num_heads=2, head_dim=8).to(device)
    tokens = [torch.randn(2, 18, 2, 8, generator=generator).to(device) for _ in range(3)]
    valid = torch.arange(18, device=device) < torch.tensor([[18], [11]], device=device) if padded else None
    assert_matches_torch(layer, tokens, {"sequence": TokenSequence(False, valid), "scaling": 8**-0.5})
    assert calls == [set()] * 2
