# SPDX-License-Identifier: Apache-2.0
"""The kernel against the dense definition of the operator, forward and gradients.

On a CPU, `TRITON_INTERPRET=1` has Triton interpret the kernels.
"""

import os
from pathlib import Path

import pytest
import torch
from kernels import get_local_kernel


mhla = get_local_kernel(Path(__file__).resolve().parents[1])
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BACKENDS = ["torch"]
if DEVICE == "cuda" or os.environ.get("TRITON_INTERPRET") == "1":
    BACKENDS.append("triton")
LAYOUTS = {
    "grid": (mhla.BlockLayout(grid=(3, 3, 5), blocks=(1, 2, 2)), False),
    "sequence": (mhla.BlockLayout(grid=(21,), block_size=(8,)), True),
}


def reference(query, key, value, mixing, layout, causal):
    """Token t attends to token j with the weight of their blocks times φ(q_t)·φ(k_j)."""
    blocks = layout.block_of_token.to(query.device)
    weights = mixing[blocks][:, blocks]
    if causal:
        earlier = torch.ones_like(weights).tril()
        same = blocks[:, None] == blocks[None, :]
        weights = torch.where(same, mixing[blocks, blocks][:, None].expand_as(weights), weights) * earlier
    scores = torch.einsum("bthk,bjhk->bhtj", query, key) * weights
    return torch.einsum("bhtj,bjhv->bthv", scores / (scores.sum(-1, keepdim=True) + 1e-6), value)


def inputs(layout, dtype, width=16):
    generator = torch.Generator().manual_seed(0)
    count = layout.num_blocks
    query, key = torch.rand(2, 2, layout.num_tokens, 2, width, generator=generator) + 0.05
    value = torch.randn(2, layout.num_tokens, 2, width, generator=generator)
    mixing = torch.rand(count, count, generator=generator) + 0.05
    return [tensor.to(DEVICE, dtype).requires_grad_() for tensor in (query, key, value, mixing)]


@pytest.mark.parametrize("layout, causal", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_output_and_gradients(backend, layout, causal):
    tensors = inputs(layout, torch.float32)
    output = mhla.mhla_attention(*tensors, layout, causal=causal, backend=backend)
    doubles = [tensor.detach().double().requires_grad_() for tensor in tensors]
    expected = reference(*doubles, layout, causal)
    cotangent = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    actual_gradients = torch.autograd.grad(output, tensors, cotangent)
    expected_gradients = torch.autograd.grad(expected, doubles, cotangent.double())
    for actual, wanted in zip((output, *actual_gradients), (expected, *expected_gradients)):
        error = (actual.double() - wanted).norm() / wanted.norm()
        assert error < 1e-4, f"relative error {error:.1e}"


@pytest.mark.parametrize("backend", BACKENDS)
def test_steps_equal_the_whole_sequence(backend):
    layout, _ = LAYOUTS["sequence"]
    *tokens, mixing = (tensor.detach() for tensor in inputs(layout, torch.float32))
    whole = mhla.mhla_attention(*tokens, mixing, layout, causal=True, backend="torch")
    state = mhla.empty_state(2, 2, 16, 16, 8, mixing.shape[-1], device=DEVICE)
    first = [tensor[:, :14] for tensor in tokens]
    output, state = mhla.mhla_extend(*first, mixing, state)
    outputs = [output]
    for position in range(14, layout.num_tokens):
        token = [tensor[:, position : position + 1] for tensor in tokens]
        output, state = mhla.mhla_step(*token, mixing, state, backend=backend)
        outputs.append(output)
    torch.testing.assert_close(torch.cat(outputs, dim=1), whole, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("decay", [None, 0.5, 0.0])
def test_weights_by_distance_past_the_stored_ones(decay):
    layout = mhla.BlockLayout(grid=(200,), block_size=(8,))
    *tokens, _ = (tensor.detach().double() for tensor in inputs(layout, torch.float32))
    mixing = torch.rand(3, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64).to(DEVICE) + 0.05
    distance = (torch.arange(25)[:, None] - torch.arange(25)).clamp(min=0)
    weights = mixing[2, 2 - distance.clamp(max=2)] * (1.0 if decay is None else decay) ** (distance - 2).clamp(min=0)
    weights[:3, :3] = mixing
    options = {} if decay is None else {"mixing_decay": torch.tensor(decay, device=DEVICE)}
    expected = reference(*tokens, weights.tril(), layout, True)
    output = mhla.mhla_attention(*tokens, mixing, layout, causal=True, **options)
    torch.testing.assert_close(output, expected, rtol=1e-10, atol=1e-10)
    state = mhla.empty_state(2, 2, 16, 16, 8, 3, dtype=torch.float64, device=DEVICE)
    first, last = ([tensor[:, part] for tensor in tokens] for part in (slice(199), slice(199, None)))
    _, state = mhla.mhla_extend(*first, mixing, state, **options)
    output, _ = mhla.mhla_step(*last, mixing, state, **options)
    torch.testing.assert_close(output, expected[:, 199:], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("layout, causal", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_compiles_without_graph_breaks(backend, layout, causal):
    tensors = inputs(layout, torch.float32)

    def attend(*tensors):
        return mhla.mhla_attention(*tensors, layout, causal=causal, backend=backend)

    compiler = "inductor" if DEVICE == "cuda" else "eager"
    output = torch.compile(attend, fullgraph=True, backend=compiler)(*tensors)
    torch.testing.assert_close(output, attend(*tensors), rtol=1e-4, atol=1e-4)
    output.sum().backward()
    assert all(tensor.grad.isfinite().all() for tensor in tensors)
