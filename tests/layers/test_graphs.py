# SPDX-License-Identifier: Apache-2.0
"""Layers in CUDA graphs. What they compute there without a GPU is in `tests/layouts/test_tables.py`."""

from __future__ import annotations

import gc

import pytest
import torch

from mhla_hf import MHLA, MHLAConfig
from mhla_hf.layers.state import TokenSequence
from mhla_hf.layouts import blocks as tables
from mhla_hf.layouts.blocks import indices


LAYERS = {
    "uneven": {"blocks": (2, 3), "output_norm": True},
    "resampled": {"blocks": (2, 2), "grid": (2, 3), "resize": "block_size"},
    "window": {"blocks": (2, 3), "window": "adjacent", "window_size": (2, 2)},
    "causal": {"causal": True, "block_size": (16,), "grid": (32,), "window": "adjacent"},
}


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("case", LAYERS)
def test_graphs_compute_what_layers_do(case, backend):
    """Also once tables that others have asked for have taken the place of those that the graph reads."""
    torch.manual_seed(0)
    config = MHLAConfig(**LAYERS[case], backend=backend)
    layer = MHLA(config, hidden_size=64, num_heads=2, head_dim=32).cuda().bfloat16().requires_grad_(False)
    arguments = {"sequence": TokenSequence(True)} if config.causal else {"grid": (7, 10)}
    tokens = torch.randn(3, 1, 70, 2, 32, device="cuda", dtype=torch.bfloat16)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        layer(*tokens, **arguments)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = layer(*tokens, **arguments)
    for count in range(2 * tables.MAX_TABLES):
        indices(1000 + count, tokens.device)
    gc.collect()
    torch.cuda.empty_cache()
    tokens.copy_(torch.randn_like(tokens))
    graph.replay()
    torch.testing.assert_close(output, layer(*tokens, **arguments), rtol=0, atol=0)
