# SPDX-License-Identifier: Apache-2.0
"""The kernels of short sequences against the dense definition: interpreted on a CPU, compiled on a GPU."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from mhla_hf import BlockLayout, mhla_attention
from mhla_hf.layouts.sequences import SequenceLayout
from mhla_hf.ops import backends

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

from mhla_hf.ops.triton import small
from mhla_hf.ops.triton.block import triton_block_mhla_attention
from mhla_hf.ops.triton.small import serves_by_small_kernels, small_attention, small_attention_backward


TYPES = [torch.float32, torch.bfloat16, torch.float16]
# Eleven bits of float16 and TF32, with which sums are made; those of bfloat16 are results' own.
TOLERANCES = {torch.float32: 2e-3, torch.bfloat16: 3e-3, torch.float16: 1.2e-3}
LAYOUTS = {
    "ragged": BlockLayout((7, 11), blocks=(2, 3)),
    "prefix": BlockLayout((3, 4), blocks=(2, 2), num_prefix_tokens=2),
    "tiles": BlockLayout((140,), blocks=(2,)),
}


@pytest.fixture(autouse=True)
def serves_few_lines(monkeypatch):
    """These kernels serve any number of heads, and float32, which the interpreter multiplies as TF32."""
    monkeypatch.setattr(small, "MIN_LINES", 1)
    monkeypatch.setattr(small, "multiplies_exactly", lambda dtype: False)


def small_inputs(
    layout: BlockLayout,
    dtype: torch.dtype,
    device: str,
    *,
    repeats: int = 1,
    per_head: bool = False,
    seed: int = 0,
    **options: int,
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Leaves for the kernels, with `repeats` query heads for each of 3 key heads, and the same in float64."""
    inputs = {
        name: tensor.detach() for name, tensor in make_inputs(layout, seed=seed, rotated=False, **options).items()
    }
    generator, heads = torch.Generator().manual_seed(seed + 1), 3 * repeats
    inputs["query"] = (
        torch.rand(*inputs["query"].shape[:2], heads, inputs["query"].shape[3], generator=generator) + 0.05
    )
    if per_head:
        inputs["mixing"] = torch.rand(heads, *inputs["mixing"].shape, generator=generator) + 0.05
    rounded = {name: x.to(torch.float32 if name == "mixing" else dtype) for name, x in inputs.items()}
    tokens = {name: x.to(device).requires_grad_() for name, x in rounded.items()}
    return tokens, {name: x.double().requires_grad_() for name, x in rounded.items()}


def exact_results(inputs, layout, dtype, **options):
    """Outputs and gradients in float64, of gradients that the kernels get in another type."""

    def attend(**arguments):
        output = mhla_attention(**arguments)
        output.register_hook(lambda gradient: gradient.to(dtype).double())
        return output

    return output_and_gradients(inputs, layout, attend, **options)


def check(layout, dtype, device, *, normalizer="query", **options):
    inputs, exact = small_inputs(layout, dtype, device, **options)
    expected = exact_results(exact, layout, dtype, normalizer=normalizer, backend="naive")
    with buffers_full_of_nan():
        actual = output_and_gradients(inputs, layout, normalizer=normalizer, backend="triton")
    assert_same(on("cpu", actual), expected, TOLERANCES[dtype])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(
    "layout, normalizer",
    [
        *(pytest.param(layout, "query", id=name) for name, layout in LAYOUTS.items()),
        *(pytest.param(layout, "none", id=f"{name}, not divided") for name, layout in LAYOUTS.items()),
        # Divided, its output is its value, and gradients of all else are rounding alone.
        pytest.param(BlockLayout((1,), blocks=(1,)), "none", id="one token"),
    ],
)
def test_outputs_and_gradients_match_naive(layout, normalizer, dtype, device):
    check(layout, dtype, device, normalizer=normalizer, per_head=normalizer == "none")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("repeats, per_head", [(1, True), (2, False), (2, True)])
@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, *(pytest.param(kind, marks=pytest.mark.slow) for kind in TYPES[::2])]
)
def test_queries_that_share_a_key_head(dtype, repeats, per_head, device):
    check(LAYOUTS["ragged"], dtype, device, repeats=repeats, per_head=per_head)


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("key_width, value_width", [(20, 24), (64, 64), (72, 72), (128, 40)])
@pytest.mark.parametrize("blocks", [(2, 2), (3, 4), (8, 4)])
def test_widths_of_heads_and_numbers_of_blocks(blocks, key_width, value_width, dtype, device):
    layout = BlockLayout((9, 13), blocks=blocks)
    seed = TYPES.index(dtype)
    options = {"key_width": key_width, "value_width": value_width, "repeats": 1 + seed % 2}
    check(layout, dtype, device, seed=seed, **options)


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("size", [1e-12, 1e-6, 1e6, 1e12])
def test_sizes_of_values(size, device):
    """float16 holds none of these; powers of two do."""
    layout = LAYOUTS["tiles"]
    inputs, exact = small_inputs(layout, torch.bfloat16, device, key_width=20, value_width=20)
    for tensors in (inputs, exact):
        tensors["value"] = (tensors["value"].detach() * size).bfloat16().to(tensors["value"].dtype).requires_grad_()
    for name in ("query", "value"):
        # One token and one block are much larger than the others.
        for tensors in (inputs, exact):
            tensors[name].data[:, :3] *= 64
    expected = exact_results(exact, layout, torch.bfloat16, backend="naive")
    actual = on("cpu", output_and_gradients(inputs, layout, backend="triton"))
    for name, reference in expected.items():
        error = (actual[name].double() - reference).norm() / reference.norm()
        assert error <= TOLERANCES[torch.bfloat16], f"{name}: {error:.1e}"


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("normalizer", ["query", "none"])
def test_bfloat16_is_no_more_than_twice_as_wrong_as_torch(normalizer, device):
    errors = half_precision_errors(
        BlockLayout((6, 10), blocks=(2, 3)), torch.bfloat16, device, training=True, normalizer=normalizer,
        rotated=False, causal=False,
    )  # fmt: skip
    for name, (kernel, plain) in errors.items():
        assert kernel <= 2 * plain, f"{name}: error {kernel:.2e}, torch {plain:.2e}"


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("lines, repeats, per_head", [(1, 1, False), (4, 2, True)])
def test_groups_of_lines_change_nothing(lines, repeats, per_head, device, monkeypatch):
    """Six lines: the same bits."""
    inputs, _ = small_inputs(LAYOUTS["ragged"], torch.bfloat16, device, repeats=repeats, per_head=per_head)
    expected = output_and_gradients(inputs, LAYOUTS["ragged"], backend="triton")
    work_in_groups(monkeypatch, lines)
    actual = output_and_gradients(inputs, LAYOUTS["ragged"], backend="triton")
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("padding", [0, 5])
def test_tokens_are_read_through_their_strides(padding, offset, device):
    """Queries, keys and values side by side in one projection, of aligned rows and others."""
    layout, width = LAYOUTS["ragged"], 16
    memory = torch.rand(offset + 2 * 77 * 2 * (3 * width + padding), device=device)
    projected = memory[offset:].view(2, 77, 2, -1).bfloat16().requires_grad_()
    tokens = projected[..., : 3 * width].split(width, dim=-1)
    mixing = torch.rand(6, 6, device=device)
    output = mhla_attention(*tokens, mixing, layout, backend="triton")
    exact = projected.detach().double().requires_grad_()
    expected = mhla_attention(*exact[..., : 3 * width].split(width, dim=-1), mixing.double(), layout, backend="torch")
    # A gradient whose rows do not lie densely either.
    cotangent = torch.rand(2, 2, 77, width, device=device).transpose(1, 2)
    (actual,) = torch.autograd.grad(output, projected, cotangent.bfloat16())
    (wanted,) = torch.autograd.grad(expected, exact, cotangent.bfloat16().double())
    for result, reference in ((output, expected), (actual, wanted)):
        assert (result.double() - reference).norm() <= 3e-3 * reference.norm()


@pytest.mark.parametrize("device", DEVICES)
def test_padding_is_neither_read_nor_left_unwritten(device):
    """Tables of each batch entry, and its own mixing weights."""
    valid = torch.ones(2, 20, dtype=torch.bool)
    valid[0, :3] = valid[0, 9] = valid[1, 13:] = False
    inputs, exact = small_inputs(BlockLayout((20,), blocks=(1,)), torch.bfloat16, device, blocks=5)
    for name in ("query", "key", "value"):
        exact[name] = exact[name].detach().masked_fill(~valid[..., None, None], 0).requires_grad_()
        inputs[name].data.masked_fill_(~valid[..., None, None].to(device), float("nan"))
    expected = exact_results(exact, SequenceLayout(valid, 4), torch.bfloat16, backend="torch")
    with buffers_full_of_nan():
        actual = output_and_gradients(inputs, SequenceLayout(valid.to(device), 4), backend="triton")
    assert_same(on("cpu", actual), expected, TOLERANCES[torch.bfloat16])
    for name in ("output", "gradient of query", "gradient of key", "gradient of value"):
        assert actual[name][~valid.to(device)].abs().max() == 0


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_query_spoils_its_own_row_only(bad, device):
    """And the gradients of its own head alone, those of queries only in its row."""
    layout = BlockLayout((12,), blocks=(3,))
    inputs, _ = small_inputs(layout, torch.bfloat16, device)
    clean = output_and_gradients(inputs, layout, backend="triton")
    inputs["query"].data[1, 5, 2, 0] = bad
    found = output_and_gradients(inputs, layout, backend="triton")
    for name in ("output", "gradient of query"):
        assert found[name][1, 5, 2].isnan().any()
        found[name][1, 5, 2] = clean[name][1, 5, 2]
        assert torch.equal(found[name], clean[name]), name
    for name in ("gradient of key", "gradient of value"):
        assert not found[name][1, :, 2].isfinite().all()
        found[name][1, :, 2] = clean[name][1, :, 2]
        assert torch.equal(found[name], clean[name]), name


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["key", "value"])
def test_a_bad_key_or_value_stays_with_its_head(name, device):
    layout = BlockLayout((12,), blocks=(3,))
    inputs, _ = small_inputs(layout, torch.bfloat16, device)
    with torch.no_grad():
        clean = mhla_attention(**inputs, layout=layout, backend="triton")
        inputs[name][1, 5, 2, 0] = float("inf")
        output = mhla_attention(**inputs, layout=layout, backend="triton")
    assert not output[1, :, 2].isfinite().all(dim=-1).any()
    if name == "value":
        # Other columns keep their scale and their bits.
        assert torch.equal(output[1, :, 2, 1:], clean[1, :, 2, 1:])
    output[1, :, 2] = clean[1, :, 2]
    assert torch.equal(output, clean)


def test_shapes_type_and_device_choose_the_kernels(monkeypatch):
    monkeypatch.setattr(small, "MIN_LINES", 100)
    monkeypatch.setattr(small, "kernels_pass", lambda *arguments, **options: True)

    def serves(
        batch=8, tokens=1024, heads=16, width=72, blocks=16, key_heads=None, per_head=False, dtype=torch.bfloat16
    ):
        query = torch.empty(batch, tokens, heads, width, dtype=dtype, device="meta")
        key = query[:, :, : key_heads or heads]
        mixing = torch.empty(*([heads] if per_head else []), blocks, blocks, device="meta")
        return serves_by_small_kernels(query, key, key, mixing, "query")

    assert serves() and serves(blocks=32) and serves(width=64, blocks=64) and serves(key_heads=13, batch=8)
    assert serves(key_heads=16, heads=64, per_head=True, width=64) and serves(dtype=torch.float32)
    for other in (
        {"batch": 4}, {"tokens": 2049}, {"blocks": 33}, {"width": 64, "blocks": 65}, {"width": 129},
        {"key_heads": 16, "heads": 64, "per_head": True, "blocks": 17, "width": 64},
    ):  # fmt: skip
        assert not serves(**other), other
    monkeypatch.setattr(small, "multiplies_exactly", lambda dtype: dtype == torch.float32)
    assert serves() and not serves(dtype=torch.float32)
    monkeypatch.setattr(small, "multiplies_by_wgmma", lambda device: False)
    assert not serves()


@pytest.mark.parametrize("device", DEVICES)
def test_a_pair_of_the_normaliser_takes_other_kernels(device, monkeypatch):
    monkeypatch.setattr(small, "multiplies_by_wgmma", lambda device: True)
    layout, calls = BlockLayout((6,), blocks=(2,)), []
    monkeypatch.setattr("mhla_hf.ops.triton.block.small_attention", lambda *inputs: calls.append(inputs) or inputs[2:])
    inputs = {name: x.detach() for name, x in cast(make_inputs(layout), device).items()}
    mhla_attention(**inputs, layout=layout, backend="triton")
    plain = {name: tensor for name, tensor in inputs.items() if not name.startswith("normalizer")}
    mhla_attention(**plain, layout=layout, normalizer="block_query", backend="triton")
    assert not calls
    mhla_attention(**plain, layout=layout, backend="triton")
    assert len(calls) == 1


@pytest.mark.parametrize("device", DEVICES)
def test_kernels_that_fail_their_test_leave_tokens_to_the_others(device, monkeypatch):
    monkeypatch.setattr(small, "multiplies_by_wgmma", lambda device: True)
    from mhla_hf.ops.operands import Operands

    layout, seen = BlockLayout((6,), blocks=(2,)), []

    def kernel_failure(family, *kind):
        seen.append(family)
        return "wrong"

    monkeypatch.setattr(backends, "kernel_failure", kernel_failure)
    monkeypatch.setattr("mhla_hf.ops.triton.block.small_attention", None)
    inputs = {name: x.detach() for name, x in cast(make_inputs(layout, rotated=False), device).items()}
    mixing = inputs.pop("mixing")
    triton_block_mhla_attention(Operands(**inputs), mixing, layout)
    assert seen == ["small"]


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("divides", [False, True])
def test_operators_are_what_torch_expects(divides, device):
    layout = BlockLayout((3, 4), blocks=(2, 2))
    inputs, _ = small_inputs(layout, torch.float32, device, per_head=True)
    tokens, table = (
        [inputs[name] for name in ("query", "key", "value", "mixing")],
        layout.token_table(torch.device(device)),
    )
    arguments = (*tokens, table, divides, 1e-6)
    tests = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(small_attention.overload, arguments, test_utils=tests)
    output, denominator = small_attention(*arguments)
    detached = [tensor.detach() for tensor in (output, denominator, *tokens)]
    torch.library.opcheck(small_attention_backward.overload, (*detached, table, divides), test_utils=tests[::2])


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_compiles_in_one_graph_and_survives_checkpointing(device):
    layout = BlockLayout((5, 7), blocks=(2, 3))
    inputs, _ = small_inputs(layout, torch.float32, device)
    check_compiled_and_checkpointed(inputs, layout)


@pytest.mark.parametrize("device", DEVICES)
def test_counts_floating_point_operations(device):
    """As of the other kernels."""
    layout = BlockLayout((24,), blocks=(3,))
    inputs, _ = small_inputs(layout, torch.float32, device, key_width=8, value_width=16)
    attend = partial(mhla_attention, **inputs, layout=layout, normalizer="none", backend="triton")
    attend()
    with FlopCounterMode(display=False) as counter:
        output = attend()
        forward = counter.get_total_flops()
        output.sum().backward()
    assert forward == 2 * (2 * 2 * 24 * 3 * 8 * 16) + 2 * 2 * 3 * 3**2 * 8 * 16
    assert counter.get_total_flops() == 3 * forward
