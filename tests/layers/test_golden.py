# SPDX-License-Identifier: Apache-2.0
"""Stored outputs of the authors' modules (github.com/DAGroup-PKU/MHLA) with random weights, matched to 1e-4."""

from __future__ import annotations

import json
import math

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from mhla_hf import MHLA, BlockLayout, MHLAConfig, mhla_attention
from tests import GOLDEN


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return ((actual - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("name, kernel", [("dit_layer", 3), ("vit_layer", 5)])
def test_image_layers(name, kernel):
    config = json.loads((GOLDEN / name / "config.json").read_text())
    weights = load_file(GOLDEN / name / "model.safetensors")
    stored = load_file(GOLDEN / name / "io.safetensors")
    batch, num_blocks, _, width = stored["input_blocks"].shape
    side, blocks = math.isqrt(config["embed_len"]), (math.isqrt(num_blocks),) * 2
    layout = BlockLayout((side, side), blocks=blocks)

    hidden_states = F.layer_norm(
        layout.from_blocks(stored["input_blocks"]), (width,), weights["norm.weight"], weights["norm.bias"]
    )
    projected = F.linear(hidden_states, weights["to_qkv.weight"], weights.get("to_qkv.bias"))
    query, key, value = (part.unflatten(-1, (config["heads"], -1)) for part in projected.chunk(3, dim=-1))
    options = MHLAConfig(blocks=blocks, normalizer="block_query", feature_map_eps=1e-6, lepe_kernel=kernel)
    layer = MHLA(options, hidden_size=width, num_heads=config["heads"], head_dim=width // config["heads"])
    layer.load_state_dict(
        {
            "mixing": weights["piece_attn.conv.weight"].flatten(1),
            "lepe.weight": weights["lepe.weight"],
            "lepe.bias": weights["lepe.bias"],
        }
    )
    # Their queries are scaled by K^-1/2, which cancels but for the eps in the denominator.
    attended = layer(query * query.shape[-1] ** -0.5, key, value, grid=(side, side)).flatten(2)
    output = F.linear(attended, weights["to_out.0.weight"], weights["to_out.0.bias"])
    assert relative_error(layout.to_blocks(output), stored["output_blocks"]) < 1e-4


@pytest.mark.parametrize("backend", ["torch", "naive"])
def test_causal_operator(backend):
    stored = load_file(GOLDEN / "causal_op" / "io.safetensors")
    query = stored["query"] * stored["query"].shape[-1] ** -0.5
    output = mhla_attention(
        query, stored["key"], stored["value"], stored["mixing"], BlockLayout((200,), block_size=(64,)),
        normalizer="none", causal=True, backend=backend,
    )  # fmt: skip
    assert relative_error(output, stored["output"]) < 1e-4
