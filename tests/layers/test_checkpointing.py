# SPDX-License-Identifier: Apache-2.0
"""Checkpointed layers compute the same bits twice by kernels, whether autograd records the forward pass or not."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from mhla_hf import MHLA, MHLAConfig
from mhla_hf.layers.state import TokenSequence
from tests.ops.triton_checks import DEVICES


pytest.importorskip("triton")

LAYERS = {
    "fused": {"blocks": (2, 2), "output_norm": True, "output_gate": True},
    "block": {"blocks": (2, 2), "normalizer": "block_query", "mixing_heads": "per_head"},
    "learned": {"blocks": (2, 2), "feature_map": "hedgehog"},
    "causal": {"causal": True, "block_size": (4,), "grid": (16,)},
    "both directions": {"resize": "extend", "block_size": (4,), "grid": (16,)},
}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("case", LAYERS)
@pytest.mark.parametrize("device", DEVICES)
def test_recomputed_outputs_are_the_same(device, case, dtype):
    torch.manual_seed(0)
    config = MHLAConfig(**LAYERS[case], backend="triton")
    layer = MHLA(config, hidden_size=32, num_heads=2, head_dim=16).to(device, dtype)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.1 * torch.rand_like(parameter))
    tokens = torch.randn(3, 1, 16, 2, 16).to(device, dtype).requires_grad_()
    arguments = {"sequence": TokenSequence(config.causal)} if config.is_sequence else {"grid": (4, 4)}
    arguments["hidden_states"] = torch.randn(1, 16, 32).to(device, dtype)
    outputs = []

    def attend(tokens: torch.Tensor) -> torch.Tensor:
        outputs.append(layer(*tokens, **arguments))
        return outputs[-1]

    wanted = [tokens, *layer.parameters()]
    expected = torch.autograd.grad(attend(tokens).float().square().sum(), wanted)
    # Reentrant checkpointing records nothing in its first forward pass. The other kind records both, and stops the
    # second one once it has what the backward pass needs.
    for reentrant in (True, False):
        checkpoint(attend, tokens, use_reentrant=reentrant).float().square().sum().backward()
        for leaf, gradient in zip(wanted, expected):
            assert torch.equal(leaf.grad, gradient)
            leaf.grad = None
    assert len(outputs) >= 4
    assert all(torch.equal(output, outputs[0]) for output in outputs[1:])
