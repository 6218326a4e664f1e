# SPDX-License-Identifier: Apache-2.0
"""The block kernels against the dense definition: interpreted on a CPU, compiled on a GPU, the same cases."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from mhla_hf import BlockLayout, mhla_attention
from mhla_hf.layouts.sequences import SequenceLayout

from .reference import assert_same, make_inputs, output_and_gradients
from .triton_checks import (
    DEVICES,
    buffers_full_of_nan,
    cast,
    check_compiled_and_checkpointed,
    half_precision_errors,
    on,
    work_in_groups,
)


pytest.importorskip("triton")

from mhla_hf.ops.triton import launching
from mhla_hf.ops.triton.block import block_attention
from mhla_hf.ops.triton.block_gradient import block_attention_backward


LAYOUTS = [
    pytest.param(BlockLayout((63,), blocks=(4,)), id="T63"),
    pytest.param(BlockLayout((1,), blocks=(1,)), id="T1"),
    pytest.param(BlockLayout((7, 11), blocks=(2, 3)), id="7x11-over-2x3"),
    pytest.param(BlockLayout((3, 5, 7), blocks=(2, 1, 2)), id="3x5x7-over-2x1x2"),
    pytest.param(BlockLayout((3, 4), blocks=(2, 2), num_prefix_tokens=2), id="prefix"),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize("normalizer", ["query", "none"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_outputs_and_gradients_match_naive(layout, normalizer, rotated, device):
    inputs = make_inputs(layout, seed=int(rotated), per_head=rotated, rotated=rotated)
    expected = output_and_gradients(inputs, layout, normalizer=normalizer, backend="naive")
    actual = output_and_gradients(cast(inputs, device), layout, normalizer=normalizer, backend="triton")
    assert_same(on("cpu", actual), expected, 1e-5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize("layout", [BlockLayout((4, 6), blocks=(2, 2)), BlockLayout((6,), blocks=(3,))])
def test_block_query_matches_naive(layout, rotated, device):
    """Of consecutive blocks too, whose divisors do not lie in the order of tokens and heads."""
    inputs = make_inputs(layout, per_head=rotated, rotated=rotated)
    expected = output_and_gradients(inputs, layout, normalizer="block_query", backend="naive")
    actual = output_and_gradients(cast(inputs, device), layout, normalizer="block_query", backend="triton")
    assert_same(on("cpu", actual), expected, 1e-5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "key_width, value_width", [(32, 40), (72, 72), pytest.param(256, 160, marks=pytest.mark.slow)]
)
def test_widths_of_heads(key_width, value_width, device):
    layout = BlockLayout((9, 5), blocks=(2, 2))
    generator = torch.Generator().manual_seed(3)
    inputs = {
        "query": torch.rand(1, 45, 2, key_width, generator=generator, dtype=torch.float64),
        "key": torch.rand(1, 45, 2, key_width, generator=generator, dtype=torch.float64),
        "value": torch.randn(1, 45, 2, value_width, generator=generator, dtype=torch.float64),
        "mixing": torch.rand(4, 4, generator=generator, dtype=torch.float64),
    }
    inputs = {name: tensor.requires_grad_() for name, tensor in inputs.items()}
    expected = output_and_gradients(inputs, layout, backend="naive")
    assert_same(on("cpu", output_and_gradients(cast(inputs, device), layout, backend="triton")), expected, 1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
def test_more_pairs_of_batch_entry_and_head_than_a_second_axis_has_programs(causal):
    """Two for each of 40,000 batch entries. The interpreter would take minutes."""
    generator = torch.Generator("cuda").manual_seed(0)
    shape = (40_000, 4, 2, 16)
    tokens = [torch.rand(shape, generator=generator, device="cuda", requires_grad=True) for _ in range(3)]
    mixing = torch.rand(2, 2, 2, generator=generator, device="cuda", requires_grad=True)
    layout = BlockLayout((4,), block_size=(2,))
    results = []
    for backend in ("triton", "torch"):
        output = mhla_attention(*tokens, mixing, layout, causal=causal, normalizer="none", backend=backend)
        results.append([output, *torch.autograd.grad(output.square().sum(), [*tokens, mixing])])
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-4)


GROUPED = {
    "one line": (1, {}),
    "two lines": (2, {"rotated": True}),
    "four lines and two": (4, {}),
    "per head": (4, {"per_head": True, "rotated": True}),
    "grouped queries": (1, {"grouped": True}),
    "grouped queries, per head": (4, {"grouped": True, "per_head": True}),
    "not divided": (4, {"normalizer": "none"}),
    "block_query": (4, {"normalizer": "block_query"}),
    "wide": (4, {"key_width": 256, "value_width": 24}),
}


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("lines, case", GROUPED.values(), ids=GROUPED)
def test_groups_of_lines_change_nothing(lines, case, device, monkeypatch):
    """Six lines in groups that may be of different sizes: the same bits, but for sums over lines."""
    layout = BlockLayout((6, 4), blocks=(3, 2))
    case = {"per_head": False, "rotated": False, "grouped": False, "normalizer": "query", **case}
    grouped, normalizer = case.pop("grouped"), case.pop("normalizer")
    inputs = make_inputs(layout, **case)
    if grouped:
        inputs["query"] = torch.cat([inputs["query"].detach(), inputs["query"].detach().flip(1)], 2).requires_grad_()
        if case["per_head"]:
            inputs["mixing"] = inputs["mixing"].detach().repeat(2, 1, 1).requires_grad_()
    exact = output_and_gradients(inputs, layout, normalizer=normalizer, backend="naive")
    inputs = cast(inputs, device)
    expected = output_and_gradients(inputs, layout, normalizer=normalizer, backend="triton")
    work_in_groups(monkeypatch, lines)
    with buffers_full_of_nan():
        actual = output_and_gradients(inputs, layout, normalizer=normalizer, backend="triton")
    assert_same(on("cpu", actual), exact, 1e-5)
    if device == "cpu":  # On a GPU, the library of products chooses an algorithm by how many there are.
        for name, tensor in actual.items():
            assert name == "gradient of mixing" or torch.equal(tensor, expected[name]), name


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("lines", [1, 4])
def test_groups_of_lines_of_padded_rows(lines, device, monkeypatch):
    """Whose tables, and mixing weights, are different for each batch entry."""
    inputs = make_inputs(BlockLayout((20,), blocks=(1,)), blocks=5)
    valid = torch.ones(2, 20, dtype=torch.bool)
    valid[0, :3] = valid[1, 13:] = False
    expected = output_and_gradients(inputs, SequenceLayout(valid, 4), backend="torch")
    inputs, layout = cast(inputs, device), SequenceLayout(valid.to(device), 4)
    results = [output_and_gradients(inputs, layout, backend="triton")]
    work_in_groups(monkeypatch, lines)
    results.append(output_and_gradients(inputs, layout, backend="triton"))
    for actual in results:
        assert_same(on("cpu", actual), expected, 1e-5)


def test_groups_fit_their_memory():
    matrix = 128 * 128
    # Wan in training, and DiT-XL/2 at 512 px: all lines at once.
    assert launching.line_groups(12, 2 * 150 * matrix * 4) == [(0, 12)]
    assert launching.line_groups(256, 2 * 30 * 72 * 72 * 2) == [(0, 256)]
    # 262 MB a line, and more than there is room for; groups of about one size.
    assert launching.line_groups(12, 2 * 2000 * matrix * 4) == [(first, 2) for first in range(0, 12, 2)]
    assert launching.line_groups(3, 2 * 5000 * matrix * 4) == [(0, 1), (1, 1), (2, 1)]
    assert launching.line_groups(7, 1000 * matrix * 8) == [(0, 4), (4, 3)]


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_tokens_are_read_through_their_strides(device):
    layout = BlockLayout((5, 5), blocks=(2, 2))
    inputs = cast(make_inputs(layout, rotated=False), device)
    packed = torch.cat([inputs["query"], inputs["key"], inputs["value"]], dim=-1).detach().requires_grad_()
    tokens = packed.split([5, 5, 4], dim=-1)
    assert not tokens[1].is_contiguous()
    mixing = inputs["mixing"].detach()
    output = mhla_attention(*tokens, mixing, layout, backend="triton")
    expected = mhla_attention(*(token.contiguous() for token in tokens), mixing, layout, backend="torch")
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-6)
    (actual_gradient,) = torch.autograd.grad(output.square().sum(), packed, retain_graph=True)
    (expected_gradient,) = torch.autograd.grad(expected.square().sum(), packed)
    torch.testing.assert_close(actual_gradient, expected_gradient, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_padding_is_neither_read_nor_left_unwritten(device):
    """Outputs and gradients of padding are zeros, not what was in memory."""
    inputs = cast(make_inputs(BlockLayout((20,), blocks=(1,)), blocks=5), device)
    valid = torch.ones(2, 20, dtype=torch.bool, device=device)
    valid[0, :3] = valid[0, 9] = valid[1, 13:] = False
    for name in ("query", "key", "value", "normalizer_query", "normalizer_key"):
        inputs[name] = inputs[name].detach().masked_fill(~valid[..., None, None], float("nan")).requires_grad_()
    layout = SequenceLayout(valid, 4)
    tokens = [inputs[name] for name in ("query", "key", "value")]
    options = {name: inputs[name] for name in ("normalizer_query", "normalizer_key")}
    results = {}
    for backend in ("torch", "triton"):
        output = mhla_attention(*tokens, inputs["mixing"], layout, backend=backend, **options)
        chosen = output.masked_fill(~valid[..., None, None], 0).square().sum()
        gradients = torch.autograd.grad(chosen, [*tokens, *options.values(), inputs["mixing"]], retain_graph=True)
        results[backend] = [output, *gradients]
    for actual, expected in zip(results["triton"], results["torch"], strict=True):
        torch.testing.assert_close(actual.nan_to_num(0), expected.nan_to_num(0), rtol=1e-4, atol=1e-5)
    for tensor in results["triton"][:-1]:
        assert tensor[~valid].abs().max() == 0


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_buffers_full_of_nan_are_written_completely(device):
    """Every element of what the kernels allocate is written: allocations filled with NaN change nothing."""
    layout = BlockLayout((7, 5), blocks=(3, 2))
    inputs = cast(make_inputs(layout), device)
    expected = output_and_gradients(inputs, layout, backend="triton")
    with buffers_full_of_nan():
        actual = output_and_gradients(inputs, layout, backend="triton")
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


@pytest.mark.parametrize("device", DEVICES)
def test_a_bad_query_spoils_its_own_row_only(device):
    layout = BlockLayout((12,), blocks=(3,))
    inputs = {name: tensor.detach() for name, tensor in cast(make_inputs(layout, rotated=False), device).items()}
    clean = mhla_attention(**inputs, layout=layout, backend="triton")
    inputs["query"] = inputs["query"].clone()
    inputs["query"][1, 5, 2, 0] = float("nan")
    output = mhla_attention(**inputs, layout=layout, backend="triton")
    assert output[1, 5, 2].isnan().all()
    output[1, 5, 2] = clean[1, 5, 2]
    assert torch.equal(output, clean)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("normalizer", ["query", "none"])
@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_half_precision_is_no_more_than_twice_as_wrong_as_torch(dtype, normalizer, rotated, training, device):
    layout = BlockLayout((6, 10), blocks=(2, 3))
    errors = half_precision_errors(
        layout, dtype, device, training=training, normalizer=normalizer, rotated=rotated, causal=False
    )
    for name, (kernel, plain) in errors.items():
        assert kernel <= 2 * plain, f"{name}: error {kernel:.2e}, torch {plain:.2e}"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("size", [1.0, 1e-6, 1e6])
@pytest.mark.parametrize("divides", [True, False])
def test_summaries_in_shares_and_tiles_of_any_size(divides, size, device, monkeypatch):
    """Slots that are shared out, heads wider than a tile, grouped queries with weights of their own."""
    monkeypatch.setattr(launching, "MAX_TILE", 32 * 16)
    monkeypatch.setattr("mhla_hf.ops.triton.block.needs_output", lambda *_: True)
    layout, generator = BlockLayout((130,), blocks=(3,)), torch.Generator().manual_seed(0)
    inputs = {
        "query": torch.rand(1, 130, 4, 32, generator=generator),
        "key": torch.rand(1, 130, 2, 32, generator=generator),
        "value": torch.randn(1, 130, 2, 24, generator=generator) * size,
        "mixing": torch.rand(4, 3, 3, generator=generator),
    }
    inputs = {name: part.to(torch.float32 if name == "mixing" else torch.bfloat16) for name, part in inputs.items()}
    options = {"normalizer": "query" if divides else "none"}
    exact = cast(inputs, "cpu", torch.float64)
    expected = output_and_gradients(exact, layout, backend="naive", **options)
    inputs = {name: tensor.to(device).requires_grad_() for name, tensor in inputs.items()}
    actual = on("cpu", output_and_gradients(inputs, layout, backend="triton", **options))
    for name, reference in expected.items():
        error = (actual[name].double() - reference).norm() / reference.norm()
        assert error < 4e-3, f"{name}: {error:.1e}"


@pytest.mark.parametrize("device", DEVICES)
def test_float16_does_not_overflow(device):
    """Summaries of 4,000 tokens of size 20 leave float16's range; outputs do not."""
    layout = BlockLayout((4000,), blocks=(1,))
    generator = torch.Generator().manual_seed(0)
    query, key, value = (20 * torch.rand(1, 4000, 1, 16, generator=generator) for _ in range(3))
    mixing = torch.ones(1, 1)
    tokens = [x[:, ::8].double() for x in (query, key, value)]
    expected = mhla_attention(*tokens, mixing, BlockLayout((500,), blocks=(1,)), backend="naive")
    tokens = [tensor.to(device, torch.float16) for tensor in (query, key, value)]
    output = mhla_attention(*tokens, mixing.to(device), layout, backend="triton")
    assert output.isfinite().all()
    # The mean of random values: an eighth of the tokens already tells it.
    assert (output.mean() - expected.mean()).abs() / expected.mean() < 0.05


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rotated", [False, True])
def test_operators_are_what_torch_expects(rotated, device):
    """Schemas, fake tensors, autograd registration and ahead-of-time tracing of every custom operator."""
    layout = BlockLayout((3, 4), blocks=(2, 2))
    inputs = cast(make_inputs(layout, rotated=rotated), device)
    mixing = inputs["mixing"]
    table = layout.token_table(torch.device(device))
    tokens = [inputs[name] for name in ("query", "key", "value")]
    for divides in (True, False):
        pair = [inputs.get(name) if divides else None for name in ("normalizer_query", "normalizer_key")]
        divisor = None if divides else (torch.rand(2, 12, 3, device=device) + 1).requires_grad_()
        torch.library.opcheck(block_attention, (*tokens, *pair, divisor, mixing, table, divides, 1e-6))


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_gradients_have_the_type_of_their_tensors(device):
    """The normaliser's pair may be float32 beside tokens of half precision."""
    layout = BlockLayout((6,), blocks=(2,))
    inputs = cast(make_inputs(layout), device)
    pair = inputs["normalizer_query"], inputs["normalizer_key"]
    tokens = [inputs[name].to(torch.bfloat16) for name in ("query", "key", "value")]
    table = layout.token_table(torch.device(device))
    output, denominator = block_attention(*tokens, *pair, None, inputs["mixing"], table, True, 1e-6)
    gradients = block_attention_backward(
        output, None, denominator, *tokens, *pair, None, inputs["mixing"], table, True, 1e-6
    )
    assert [gradient.dtype for gradient in gradients[:5]] == [torch.bfloat16] * 3 + [torch.float32] * 2


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_compiles_in_one_graph_and_survives_checkpointing(device):
    layout = BlockLayout((5, 7), blocks=(2, 3))
    check_compiled_and_checkpointed(cast(make_inputs(layout), device), layout)


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_counts_floating_point_operations(device):
    """2 B T H K V for each of two products, 2 B H M² K V for the mixing; the backward pass is twice that."""
    layout = BlockLayout((24,), blocks=(3,))
    inputs = cast(make_inputs(layout, rotated=False, key_width=8, value_width=16), device)
    # The first use of the kernels registers their formulas.
    mhla_attention(**inputs, layout=layout, normalizer="none", backend="triton")
    with FlopCounterMode(display=False) as counter:
        output = mhla_attention(**inputs, layout=layout, normalizer="none", backend="triton")
        forward = counter.get_total_flops()
        output.sum().backward()
    assert forward == 2 * (2 * 2 * 24 * 3 * 8 * 16) + 2 * 2 * 3 * 3**2 * 8 * 16
    assert counter.get_total_flops() == 3 * forward
