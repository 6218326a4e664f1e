# SPDX-License-Identifier: Apache-2.0
"""The causal kernels against the dense definition: interpreted on a CPU, compiled on a GPU, the same cases."""

from __future__ import annotations

import logging

import pytest
import torch
from safetensors.torch import load_file
from torch.utils.flop_counter import FlopCounterMode

from mhla_hf import BlockLayout, mhla_attention
from mhla_hf.layouts.sequences import SequenceLayout
from mhla_hf.ops import band

from .reference import assert_same, make_inputs, output_and_gradients
from .triton_checks import (
    DEVICES,
    buffers_full_of_nan,
    cast,
    check_compiled_and_checkpointed,
    half_precision_errors,
    on,
)


pytest.importorskip("triton")

from mhla_hf.ops.backends import _log_once
from mhla_hf.ops.band import StoredMixing
from mhla_hf.ops.triton.causal import causal_attention, limits
from mhla_hf.ops.triton.launching import row_count
from tests import GOLDEN


TOKENS = ("query", "key", "value", "normalizer_query", "normalizer_key")


def chunks(length: int, size: int) -> BlockLayout:
    return BlockLayout((length,), block_size=(size,))


def few(inputs: dict[str, torch.Tensor], heads: int = 1, batch: int = 1) -> dict[str, torch.Tensor]:
    """Some batch entries and heads: the interpreter's time is that of its programs."""
    cut = {name: tensor[:batch, :, :heads] if name in TOKENS else tensor for name, tensor in inputs.items()}
    if cut["mixing"].dim() == 3:
        cut["mixing"] = cut["mixing"][:heads]
    return {name: tensor.detach().requires_grad_() for name, tensor in cut.items()}


def check(inputs: dict[str, torch.Tensor], layout: BlockLayout, device: str, normalizer: str = "query") -> None:
    """Outputs and all gradients of float32 kernels against the dense form in float64."""
    options = {"normalizer": normalizer, "causal": True}
    expected = output_and_gradients(inputs, layout, backend="naive", **options)
    actual = on("cpu", output_and_gradients(cast(inputs, device), layout, backend="triton", **options))
    if inputs["mixing"].shape[-1] == 1 and normalizer != "none":
        # Scaling the only weight changes nothing but for eps: the terms of its gradient cancel.
        error = (actual.pop("gradient of mixing") - expected.pop("gradient of mixing")).norm()
        assert error <= 1e-5 * expected["gradient of query"].norm()
    assert_same(actual, expected, 1e-5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("normalizer, rotated", [("query", False), ("query", True), ("none", False)])
@pytest.mark.parametrize("length, size", [(63, 16), (5, 16), (3, 1), (100, 100)])
def test_outputs_and_gradients_match_naive(length, size, normalizer, rotated, device):
    layout = chunks(length, size)
    inputs = make_inputs(layout, seed=length, per_head=rotated, rotated=rotated)
    check(few(inputs), layout, device, normalizer)


@pytest.mark.parametrize("device", DEVICES)
def test_batches_longer_than_the_mixing_weights(device):
    layout = chunks(11, 4)
    check(few(make_inputs(layout, per_head=True, blocks=2, rotated=False), batch=2), layout, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("blocks, decay", [(1, None), (3, 0.7), (3, 0.0)])
@pytest.mark.parametrize("per_head", [False, True])
def test_more_blocks_than_a_matrix_serves(per_head, blocks, decay, device, monkeypatch):
    """Mixed in chunks of blocks, the last of which is not full; grouped queries, and gradients of the decay."""
    monkeypatch.setattr(band, "MIN_CHUNK_BLOCKS", 2)
    layout = chunks(7, 1)
    inputs = few(make_inputs(layout, per_head=per_head, blocks=blocks), heads=2)
    key_side = few(inputs)
    inputs |= {name: key_side[name] for name in ("key", "value", "normalizer_key")}
    if decay is not None:
        inputs["mixing_decay"] = torch.full((2,) if per_head else (), decay, dtype=torch.float64, requires_grad=True)
    check(inputs, layout, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "key_width, value_width", [(32, 40), (136, 24), pytest.param(256, 160, marks=pytest.mark.slow)]
)
def test_widths_of_heads(key_width, value_width, device):
    # Four blocks: with two, the terms of the gradient of the weights nearly cancel, whatever computes them.
    layout = chunks(51, 16)
    rotated = key_width > 128
    check(few(make_inputs(layout, rotated=rotated, key_width=key_width, value_width=value_width)), layout, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("per_head, rotated", [(False, False), (False, True), (True, True)])
def test_grouped_queries(per_head, rotated, device):
    layout = chunks(7, 4)
    inputs = make_inputs(layout, rotated=rotated, per_head=per_head)
    key_side = few(inputs)
    check({**few(inputs, heads=2), "key": key_side["key"], "value": key_side["value"],
           **({"normalizer_key": key_side["normalizer_key"]} if rotated else {})}, layout, device)  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
def test_a_normaliser_with_one_tensor_of_its_own(device):
    layout = chunks(6, 4)
    inputs = few(make_inputs(layout, rotated=False))
    check({**inputs, "normalizer_query": few(make_inputs(layout, seed=1))["normalizer_query"]}, layout, device)


def padded_and_packed(device: str, documents: bool) -> tuple[dict[str, torch.Tensor], torch.Tensor, SequenceLayout]:
    """Inputs with NaN for padding; in the first row of packed ones a document of one token among three."""
    inputs = few(make_inputs(BlockLayout((12,), blocks=(1,)), blocks=3, per_head=documents), heads=2)
    inputs = {name: torch.cat([t, t.flip(1)]) if name in TOKENS else t for name, t in inputs.items()}
    inputs = cast(inputs, device)
    valid = torch.ones(2, 12, dtype=torch.bool, device=device)
    valid[0, :2] = valid[0, 6] = valid[1, 10:] = False
    for name in TOKENS:
        inputs[name] = inputs[name].detach().masked_fill(~valid[..., None, None], float("nan")).requires_grad_()
    index = torch.tensor([[0] * 7 + [1] + [2] * 4, [0] * 5 + [1] * 7], device=device) if documents else None
    return inputs, valid, SequenceLayout(valid, 4, index, 3)


def both_backends(inputs: dict[str, torch.Tensor], layout: SequenceLayout, valid: torch.Tensor) -> list[list]:
    """Output and gradients by the kernels and by plain torch, NaN and padding without influence on the gradients."""
    results = []
    for backend in ("triton", "torch"):
        tokens = [inputs[name] for name in TOKENS[:3]]
        options = {name: inputs[name] for name in TOKENS[3:]}
        output = mhla_attention(*tokens, inputs["mixing"], layout, causal=True, backend=backend, **options)
        counted = valid[..., None, None] & ~output.isnan()
        loss = torch.where(counted, output, 0).square().sum()
        gradients = torch.autograd.grad(loss, list(inputs.values()))
        results.append([output.detach(), *gradients])
    return results


def assert_kernels_equal_torch(
    inputs: dict[str, torch.Tensor], layout: SequenceLayout, valid: torch.Tensor
) -> torch.Tensor:
    """Outputs and gradients, NaN in the same places, each in its own norm; zeros for padding. Returns the outputs."""
    kernels, plain = both_backends(inputs, layout, valid)
    for name, actual, expected in zip(["output", *inputs], kernels, plain, strict=True):
        assert torch.equal(actual.isnan(), expected.isnan()), name
        error = (actual - expected).nan_to_num(0).norm()
        assert error <= 1e-5 * expected.nan_to_num(0).norm(), f"{name}: {error}"
        if name != "mixing":
            assert actual[~valid].abs().max() == 0, name
    return kernels[0]


@pytest.mark.parametrize("device", DEVICES)
def test_padding_is_neither_read_nor_left_unwritten(device):
    inputs, valid, layout = padded_and_packed(device, documents=False)
    assert_kernels_equal_torch(inputs, layout, valid)


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("chunk_blocks", [3, 16])
def test_bad_tokens_spoil_their_head_and_document_from_there_on(chunk_blocks, device, monkeypatch):
    """In packed documents, mixed by a matrix or in chunks; what is spoilt has no part in the gradients of the rest."""
    monkeypatch.setattr(band, "MIN_CHUNK_BLOCKS", chunk_blocks)
    inputs, valid, layout = padded_and_packed(device, documents=True)
    assert layout.num_blocks > 3
    bad = [("key", 0, 8, 1, "nan"), ("value", 1, 1, 0, "inf"), ("normalizer_key", 1, 6, 1, "nan")]
    spoilt = torch.zeros(2, 12, 2, dtype=torch.bool, device=device)
    for name, row, token, head, number in bad:
        inputs[name] = inputs[name].detach().clone()
        inputs[name][row, token, head, 2] = float(number)
        inputs[name].requires_grad_()
    spoilt[0, 8:, 1] = spoilt[1, 1:5, 0] = spoilt[1, 6:10, 1] = True
    output = assert_kernels_equal_torch(inputs, layout, valid)
    assert torch.equal(output.isnan().all(-1), spoilt)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("chunk_blocks", [16, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name, number", [("key", "nan"), ("value", "inf"), ("normalizer_key", "-inf")])
def test_a_bad_number_changes_no_bit_of_what_it_does_not_spoil(name, number, dtype, chunk_blocks, device, monkeypatch):
    """In the middle document of a row of three, beside zeros; with summaries of any type."""
    monkeypatch.setattr(band, "MIN_CHUNK_BLOCKS", chunk_blocks)
    inputs, valid, _ = padded_and_packed(device, documents=True)
    documents = torch.tensor([[0] * 4 + [1] * 5 + [2] * 3, [0] * 12], device=device)
    layout, inputs = SequenceLayout(valid, 2, documents, 3), {key: x.detach().to(dtype) for key, x in inputs.items()}
    inputs["mixing"] = inputs["mixing"].float()
    inputs["key"][0, :, 1, 2] = inputs["value"][0, :, 1, 2] = 0
    options = {"layout": layout, "causal": True, "backend": "triton"}
    before = mhla_attention(**inputs, **options)
    inputs[name][0, 5, 1, 2] = float(number)
    after = mhla_attention(**inputs, **options)
    spoilt = torch.zeros(2, 12, 2, dtype=torch.bool, device=device)
    spoilt[0, 5:9, 1] = valid[0, 5:9]
    assert before.isfinite().all() and after[spoilt].isnan().all()
    assert torch.equal(after[~spoilt], before[~spoilt])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("documents", [False, True])
def test_a_bad_token_spoils_all_later_chunks_of_its_document(documents, device):
    """4 slots each."""
    first_bad = torch.full((2, 1, 140), 4, dtype=torch.int32, device=device)
    first_bad[0, 0, 5], first_bad[0, 0, 70], first_bad[1, 0, 139] = 3, 2, 0
    starts = None
    expected = first_bad.clone()
    expected[0, 0, 6:] = 0
    if documents:
        starts = torch.zeros(2, 140, dtype=torch.long, device=device)
        starts[:, 65:], starts[:, 100:] = 65, 100
        expected[0, 0, 65:] = torch.tensor([4] * 5 + [2] + [0] * 29 + [4] * 40, dtype=torch.int32)
    assert torch.equal(limits(first_bad, starts, 4), expected)


@pytest.mark.parametrize("device", DEVICES)
def test_buffers_full_of_nan_are_written_completely(device):
    layout = chunks(7, 4)
    inputs = cast(few(make_inputs(layout)), device)
    expected = output_and_gradients(inputs, layout, backend="triton", causal=True)
    with buffers_full_of_nan():
        actual = output_and_gradients(inputs, layout, backend="triton", causal=True)
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "dtype, normalizer, rotated, training",
    [
        (torch.bfloat16, "query", False, True),
        (torch.bfloat16, "query", True, False),
        pytest.param(torch.bfloat16, "none", False, True, marks=pytest.mark.slow),
        pytest.param(torch.float16, "query", True, True, marks=pytest.mark.slow),
    ],
)
def test_half_precision_is_no_more_than_twice_as_wrong_as_torch(dtype, normalizer, rotated, training, device):
    errors = half_precision_errors(
        chunks(12, 8), dtype, device, seeds=1,
        training=training, normalizer=normalizer, rotated=rotated, causal=True,
    )  # fmt: skip
    for name, (kernel, plain) in errors.items():
        assert kernel <= 2 * plain, f"{name}: error {kernel:.2e}, torch {plain:.2e}"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("size", [1.0, 1e6])
@pytest.mark.parametrize(
    "layout, stored, per_head, widths",
    [
        pytest.param(chunks(28, 4), 7, True, (24, 40), id="matrix"),
        pytest.param(chunks(28, 4), 7, False, (256, 72), id="tiles-of-columns"),
        pytest.param(chunks(250, 100), 3, True, (24, 40), id="shares-of-slots"),
        pytest.param(chunks(28, 4), 2, True, (136, 40), id="band"),
    ],
)
def test_a_prefix_beside_bfloat16_tokens_errs_as_in_torch(layout, stored, per_head, widths, size, device, monkeypatch):
    """In float16 over powers of two, or in float32 where a band mixes. Tokens of any magnitude, grouped queries."""
    monkeypatch.setattr(band, "MIN_CHUNK_BLOCKS", 2)
    drawn = make_inputs(
        layout, per_head=per_head, rotated=False, blocks=stored, key_width=widths[0], value_width=widths[1]
    )
    inputs = {
        **few(drawn, heads=2),
        **{name: tensor for name, tensor in few(drawn).items() if name in ("key", "value")},
    }
    inputs = {name: tensor.detach().clone() for name, tensor in inputs.items()}
    inputs["key"] *= size**0.5
    inputs["value"] *= size
    rounded = {name: x.to(torch.float32 if name == "mixing" else torch.bfloat16) for name, x in inputs.items()}
    exact = {name: x.double() for name, x in rounded.items()}
    rounded = on(device, rounded)
    expected = mhla_attention(**exact, layout=layout, causal=True, backend="naive")
    outputs = [mhla_attention(**rounded, layout=layout, causal=True, backend=x) for x in ("triton", "torch")]
    kernels, plain = ((output.double().cpu() - expected).norm() / expected.norm() for output in outputs)
    assert kernels <= 2 * plain, f"{kernels:.2e}, torch {plain:.2e}"


@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize("device", DEVICES)
def test_operator_is_what_torch_expects(blocks, device, monkeypatch):
    """Schema, fake tensors, autograd registration and ahead-of-time tracing; by a matrix and in chunks of blocks."""
    monkeypatch.setattr(band, "MIN_CHUNK_BLOCKS", 2)
    layout = chunks(blocks, 1)
    inputs = cast(few(make_inputs(layout, blocks=1, key_width=2, value_width=2)), device)
    mixing = StoredMixing.of(inputs["mixing"].detach(), torch.tensor(0.5, device=device))
    weights = *mixing.earlier_weights(row_count(blocks)), mixing.own(blocks)[None]
    weights = [tensor.requires_grad_() for tensor in weights]
    arguments = *(inputs[name] for name in TOKENS), *weights, layout.token_table(torch.device(device))
    torch.library.opcheck(causal_attention.overload, (*arguments, None, True, 1e-6))


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_compiles_in_one_graph_and_survives_checkpointing(device):
    layout = chunks(3, 2)
    inputs = cast(few(make_inputs(layout, rotated=False)), device)
    check_compiled_and_checkpointed(inputs, layout, causal=True)


@pytest.mark.parametrize("device", DEVICES)
def test_recording_gradients_changes_no_bit_and_keeps_no_summaries(device):
    layout = chunks(24, 8)
    inputs = cast(few(make_inputs(layout, rotated=False)), device, torch.bfloat16)
    kept = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = mhla_attention(**inputs, layout=layout, causal=True, backend="triton")
    with torch.no_grad():
        assert torch.equal(output, mhla_attention(**inputs, layout=layout, causal=True, backend="triton"))
    # Tokens, the output, their denominators, mixing weights and tables.
    tokens = sum(inputs[name].numel() for name in TOKENS[:3])
    others = output.numel() + 24 + 24 + row_count(3) ** 2 + 3 + 24 + layout.num_blocks
    kept = {tensor.data_ptr(): tensor for tensor in kept if tensor.is_floating_point() or tensor.dtype == torch.int32}
    assert sum(tensor.numel() for tensor in kept.values()) <= tokens + others


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_counts_floating_point_operations(device):
    """Summaries and prefix 2 · 2 B T H K V, the mixing 2 B M² H K V, scores and sums B T H N (K + V).

    The backward pass is twice that, and summaries, their mixing, and the scores and their gradients once more.
    """
    layout = chunks(8, 4)
    inputs = cast(few(make_inputs(layout, rotated=False, key_width=8, value_width=16), heads=2), device)
    with FlopCounterMode(display=False) as counter:
        output = mhla_attention(**inputs, layout=layout, normalizer="none", causal=True, backend="triton")
        forward = counter.get_total_flops()
        output.sum().backward()
    own, summaries, mixed = 8 * 2 * 4 * (8 + 16), 2 * 8 * 2 * 8 * 16, 2 * 2**2 * 2 * 8 * 16
    assert forward == 2 * summaries + mixed + own
    assert counter.get_total_flops() == 3 * forward + summaries + mixed + own


@pytest.mark.parametrize("device", DEVICES)
def test_stored_output_of_the_authors_operator(device):
    stored = load_file(GOLDEN / "causal_op" / "io.safetensors", device=device)
    query = stored["query"] * stored["query"].shape[-1] ** -0.5
    # One of the batch entries, and of the heads, is enough for the interpreter.
    tokens = [tensor[:1, :, :1] for tensor in (query, stored["key"], stored["value"])]
    mixing = stored["mixing"] if stored["mixing"].dim() == 2 else stored["mixing"][:1]
    output = mhla_attention(*tokens, mixing, chunks(200, 64), normalizer="none", causal=True, backend="triton")
    expected = stored["output"][:1, :, :1]
    assert (output - expected).norm() / expected.norm() < 1e-4


@pytest.mark.parametrize("device", DEVICES)
def test_block_query_falls_back_to_plain_torch_and_says_so(device, caplog):
    layout = chunks(8, 4)
    inputs = {name: t.detach() for name, t in cast(few(make_inputs(layout, rotated=False)), device).items()}
    _log_once.cache_clear()
    options = {"layout": layout, "causal": True, "normalizer": "block_query"}
    with caplog.at_level(logging.WARNING, logger="mhla_hf"):
        for _ in range(2):
            output = mhla_attention(**inputs, backend="triton", **options)
    assert torch.equal(output, mhla_attention(**inputs, backend="torch", **options))
    assert [record.message.count("block_query") for record in caplog.records] == [1]
