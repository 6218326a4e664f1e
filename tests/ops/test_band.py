# SPDX-License-Identifier: Apache-2.0
"""Linear-time mixing of any number of blocks against the dense matrix of their weights, and the operator on top."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo.testing

from mhla_hf import BlockLayout, mhla_attention
from mhla_hf.layouts.sequences import SequenceLayout
from mhla_hf.ops import extend_mixing
from mhla_hf.ops import forms as forms_module
from mhla_hf.ops import recurrent as recurrent_module
from mhla_hf.ops.band import StoredMixing, TwoSidedMixing, mix_chunks, sequence_mixing


# 17 weights make chunks of more than the least number of blocks.
STORED = [1, 2, 3, 5, 8, 17]
# Heads of the weights, of the summaries and of the mixture.
HEADS = {"shared": (1, 1, 1), "shared-grouped": (1, 2, 4), "per-head": (2, 2, 2), "per-head-grouped": (4, 2, 4)}
DECAYS = ["none", "learned", "zero"]


def normal(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def make_mixing(count: int, heads: int, kind: str, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Weights `[S, M, M]` of any sign, and their decay `[S]`."""
    generator = torch.Generator().manual_seed(seed)
    weights = normal(generator, heads, count, count).requires_grad_()
    decays = {
        "none": None,
        "learned": torch.rand(heads, generator=generator, dtype=torch.float64).requires_grad_(),
        "zero": torch.zeros(heads, dtype=torch.float64, requires_grad=True),
    }
    return weights, decays[kind]


def dense_weights(weights: torch.Tensor, decay: torch.Tensor | None, blocks: int) -> torch.Tensor:
    """The weights of all pairs of blocks by their definition, `[S, n, n]`."""
    last, inside = weights.shape[-1] - 1, min(blocks, weights.shape[-1])
    distance = torch.arange(blocks)[:, None] - torch.arange(blocks)
    reached = distance.abs().clamp(max=last)
    matrix = torch.where(distance >= 0, weights[:, last, last - reached], weights[:, 0, reached])
    if decay is not None:
        matrix = matrix * decay[:, None, None] ** (distance.abs() - last).clamp(min=0)
    matrix[:, :inside, :inside] = weights[:, :inside, :inside]
    return matrix


def document_weights(weights: torch.Tensor, decay: torch.Tensor | None, lengths: list[list[int]]) -> torch.Tensor:
    """The same for rows of packed documents, `[B, S, n, n]`, zero between documents."""
    rows = []
    for row in lengths:
        alone = [dense_weights(weights, decay, length) for length in row]
        rows.append(torch.stack([torch.block_diag(*(x[head] for x in alone)) for head in range(len(weights))]))
    return torch.stack(rows)


def bounds(lengths: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """First and last block of each block's document, `[B, n]`."""
    counts = [torch.tensor(row) for row in lengths]
    first = torch.stack([(row.cumsum(0) - row).repeat_interleave(row) for row in counts])
    last = torch.stack([(row.cumsum(0) - 1).repeat_interleave(row) for row in counts])
    return first, last


def assert_mixed(
    actual: torch.Tensor, matrix: torch.Tensor, summary: torch.Tensor, *leaves: torch.Tensor | None
) -> None:
    """Compares a mixture `[B, H, n, D]`, and its gradients, with a product by `[S, n, n]` or `[B, S, n, n]`."""
    expected = matrix @ summary.repeat_interleave(actual.shape[1] // summary.shape[1], dim=1)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    cotangent = torch.arange(actual.numel(), dtype=actual.dtype).view(actual.shape).sin()
    inputs = [x for x in (summary, *leaves) if x is not None]
    options = {"allow_unused": True, "materialize_grads": True, "retain_graph": True}
    mine = torch.autograd.grad((actual * cotangent).sum(), inputs, **options)
    theirs = torch.autograd.grad((expected * cotangent).sum(), inputs, **options)
    for gradient, reference in zip(mine, theirs):
        torch.testing.assert_close(gradient, reference, rtol=1e-11, atol=1e-11 * (1 + reference.abs().max().item()))


def check_mixture(count: int, heads: tuple[int, int, int], kind: str, blocks: int) -> None:
    """Mixtures of one document, earlier blocks alone and both ways."""
    weights, decay = make_mixing(count, heads[0], kind)
    stored = StoredMixing(weights, decay)
    summary = normal(torch.Generator().manual_seed(blocks), 2, heads[1], blocks, 3).requires_grad_()
    matrix = dense_weights(weights, decay, blocks)
    torch.testing.assert_close(stored.matrix(blocks), matrix, rtol=1e-13, atol=0)
    assert_mixed(stored.mix_earlier(summary, heads[2]), matrix.tril(-1), summary, weights, decay)
    if blocks > stored.chunk_blocks:
        both = stored.mix_both_ways(summary, heads[2], None, None)
        assert_mixed(both, matrix, summary, weights, decay)


@pytest.mark.parametrize("kind", DECAYS)
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("count", STORED)
def test_mixtures_around_whole_chunks(count, heads, kind):
    chunk = max(count, 16)
    for blocks in {1, 2, count, count + 1, *(k * chunk + more for k in (1, 2, 3) for more in (-1, 0, 1))}:
        check_mixture(count, heads, kind, blocks)


@pytest.mark.parametrize("count", [1, 3, 17])
def test_mixtures_with_every_remainder(count):
    chunk = max(count, 16)
    for blocks in range(2 * chunk, 3 * chunk):
        check_mixture(count, HEADS["per-head-grouped"], "learned", blocks)


# Blocks of the documents of two rows; a row may have documents that reach over chunks, end with one, or are one block.
DOCUMENTS = {
    "short": [[1, 2, 3, 1, 5, 4] * 3, [3] * 16],
    "long": [[40, 8], [7, 41]],
    "both": [[1, 17, 2, 16, 12], [31, 1, 1, 15]],
    "whole-chunks": [[16, 32], [32, 16]],
    "one": [[48], [24, 24]],
}


@pytest.mark.parametrize("kind", DECAYS)
@pytest.mark.parametrize("heads", ["shared-grouped", "per-head-grouped"])
@pytest.mark.parametrize("name", DOCUMENTS)
@pytest.mark.parametrize("count", STORED)
def test_mixtures_of_packed_documents(count, name, heads, kind):
    lengths, (weight_heads, summary_heads, num_heads) = DOCUMENTS[name], HEADS[heads]
    weights, decay = make_mixing(count, weight_heads, kind, seed=1)
    stored, (first, last) = StoredMixing(weights, decay), bounds(lengths)
    summary = normal(torch.Generator().manual_seed(2), 2, summary_heads, 48, 3).requires_grad_()
    matrix = document_weights(weights, decay, lengths)
    torch.testing.assert_close(stored.matrix(48, first), matrix, rtol=1e-13, atol=0)
    earlier = stored.mix_earlier(summary, num_heads, first)
    assert_mixed(earlier, matrix.tril(-1), summary, weights, decay)
    both = stored.mix_both_ways(summary, num_heads, first, last)
    assert_mixed(both, matrix, summary, weights, decay)


@pytest.mark.parametrize("kind", DECAYS)
@pytest.mark.parametrize("blocks", [10, 40])
@pytest.mark.parametrize("count", STORED)
def test_mixtures_of_text_that_began_before(count, blocks, kind):
    """As decoding needs them: every row of the batch is at another place of its text."""
    weights, decay = make_mixing(count, 2, kind, seed=3)
    summary = normal(torch.Generator().manual_seed(4), 2, 1, blocks, 3).requires_grad_()
    offsets = (7, 40)
    matrix = torch.stack([dense_weights(weights, decay, blocks + start)[:, start:, start:] for start in offsets])
    first = -torch.tensor(offsets)[:, None].expand(-1, blocks)
    mixed = StoredMixing(weights, decay).mix_earlier(summary, 2, first)
    assert_mixed(mixed, matrix.tril(-1), summary, weights, decay)


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("lengths", [None, DOCUMENTS["both"]], ids=["one document", "documents"])
def test_the_operator_that_mixes_chunks_is_registered_as_torch_demands(lengths, heads):
    weights, decay = make_mixing(3, heads, "learned")
    first = None if lengths is None else bounds(lengths)[0]
    window, carry = StoredMixing(weights, decay).chunk_weights(48, first)
    summary = normal(torch.Generator().manual_seed(5), 2, 2, 48, 3).requires_grad_()
    leaves = (window.detach().requires_grad_(), carry.detach().requires_grad_())
    torch.library.opcheck(mix_chunks, (summary, *leaves))
    assert torch.autograd.gradcheck(mix_chunks, (summary, *leaves), fast_mode=True)


def test_mixing_in_chunks_counts_its_operations():
    from torch.utils.flop_counter import FlopCounterMode

    weights, _ = make_mixing(3, 1, "none")
    summary = torch.zeros(2, 3, 48, 5, dtype=torch.float64, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        StoredMixing(weights).mix_earlier(summary, 3).sum().backward()
    # A window of two chunks of 16 blocks, the sum before them and an empty column; twice as much backward.
    assert counter.get_total_flops() == 3 * 2 * summary.numel() * 34


def test_weights_by_distance_past_the_end():
    stored = StoredMixing.of(torch.arange(9.0).reshape(3, 3), torch.tensor(0.5))
    expected = torch.tensor(
        [
            [0.0, 1.0, 2.0, 1.0, 0.5],
            [3.0, 4.0, 5.0, 2.0, 1.0],
            [6.0, 7.0, 8.0, 1.0, 2.0],
            [3.0, 6.0, 7.0, 8.0, 1.0],
            [1.5, 3.0, 6.0, 7.0, 8.0],
        ]
    )
    assert torch.equal(stored.matrix(5), expected[None])
    assert torch.equal(stored.own(5), expected.diagonal()[None])
    rows, columns = torch.tensor([[[4], [0]]]), torch.tensor([[[3, 1]]])
    assert torch.equal(stored.at(rows, columns), torch.tensor([[[[7.0, 3.0], [1.0, 1.0]]]]))


BLOCK_SIZE = 2
TOKENS = ("query", "key", "value", "normalizer_query", "normalizer_key")


def make_tokens(length: int, dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    """Batch of 2, grouped heads."""
    generator = torch.Generator().manual_seed(length)

    def positive(heads: int) -> torch.Tensor:
        return torch.rand(2, length, heads, 3, generator=generator, dtype=torch.float64) + 0.05

    shapes = {"query": 4, "key": 2, "normalizer_query": 4, "normalizer_key": 2}
    tokens = {name: positive(heads) for name, heads in shapes.items()}
    tokens["value"] = normal(generator, 2, length, 2, 4)
    return {name: tokens[name].to(dtype).requires_grad_() for name in TOKENS}


def make_weights(count: int, per_head: bool, decay: float | None, dtype=torch.float64) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(count)
    shape = (4, count, count) if per_head else (count, count)
    mixing = (torch.rand(shape, generator=generator, dtype=torch.float64) + 0.1).to(dtype).requires_grad_()
    options = {"mixing": mixing}
    if decay is not None:
        options["mixing_decay"] = torch.full((4,) if per_head else (), decay, dtype=dtype, requires_grad=True)
    return options


def output_and_gradients(output: torch.Tensor, inputs: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    cotangent = torch.arange(output.numel(), dtype=output.dtype).reshape(output.shape).sin()
    gradients = torch.autograd.grad(
        (output * cotangent).sum(), list(inputs.values()), allow_unused=True, materialize_grads=True
    )
    return [output, *gradients]


def assert_close(actual: list[torch.Tensor], expected: list[torch.Tensor], tolerance: float) -> None:
    """Errors relative to the largest number of a tensor, or 1."""
    for mine, theirs in zip(actual, expected, strict=True):
        error, scale = (mine.double() - theirs.double()).abs().max(), max(1.0, theirs.abs().max().item())
        assert error <= tolerance * scale, f"{error / scale:.1e}"


@pytest.mark.parametrize("normalizer", ["query", "none", "block_query"])
@pytest.mark.parametrize("decay", [None, 0.7, 0.0])
@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("count", STORED)
def test_causal_attention_to_three_times_as_many_blocks(count, per_head, decay, normalizer):
    for blocks in {count, 2 * count + 1, 3 * count, 3 * max(count, 16) - 1}:
        for missing in range(BLOCK_SIZE if blocks > 1 else 1):
            layout = BlockLayout((blocks * BLOCK_SIZE - missing,), block_size=(BLOCK_SIZE,))
            inputs = {**make_tokens(layout.num_tokens), **make_weights(count, per_head, decay)}
            options = {"layout": layout, "causal": True, "normalizer": normalizer}
            expected = output_and_gradients(mhla_attention(**inputs, backend="naive", **options), inputs)
            actual = output_and_gradients(mhla_attention(**inputs, backend="torch", **options), inputs)
            assert_close(actual, expected, 1e-12)


@pytest.mark.parametrize("per_head", [False, True])
def test_derivatives_in_forward_mode(per_head, blocks=45):
    layout = BlockLayout((blocks * BLOCK_SIZE,), block_size=(BLOCK_SIZE,))
    inputs = {**make_tokens(layout.num_tokens), **make_weights(3, per_head, 0.7)}
    names, values = list(inputs), tuple(tensor.detach() for tensor in inputs.values())
    tangents = tuple(tensor.sin() for tensor in values)

    def attend(backend: str):
        return lambda *given: mhla_attention(**dict(zip(names, given)), layout=layout, causal=True, backend=backend)

    actual, expected = (torch.func.jvp(attend(backend), values, tangents)[1] for backend in ("torch", "naive"))
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("count", [3, 17])
@pytest.mark.parametrize("normalizer", ["query", "none", "block_query"])
def test_causal_attention_in_single_precision(count, normalizer):
    layout = BlockLayout((6 * max(count, 16) - 1,), block_size=(BLOCK_SIZE,))
    exact = {**make_tokens(layout.num_tokens), **make_weights(count, True, 0.9)}
    single = {name: tensor.detach().float() for name, tensor in exact.items()}
    options = {"layout": layout, "causal": True, "normalizer": normalizer}
    expected = mhla_attention(**exact, backend="naive", **options)
    assert_close([mhla_attention(**single, backend="torch", **options)], [expected], 1e-5)


def alone(
    inputs: dict[str, torch.Tensor], row: int, chosen: torch.Tensor, block_size: int, causal: bool, normalizer: str
) -> torch.Tensor:
    """The dense form on some tokens of one row."""
    tokens = {name: inputs[name][row : row + 1, chosen] for name in TOKENS if name in inputs}
    layout = BlockLayout((int(chosen.sum()),), block_size=(block_size,))
    decay = inputs.get("mixing_decay")
    weights = {"mixing": inputs["mixing"], "mixing_decay": decay}
    if not causal:
        mixing = extend_mixing(inputs["mixing"], layout.num_blocks, causal=False, mixing_decay=decay)
        weights = {"mixing": mixing}
    return mhla_attention(**tokens, **weights, layout=layout, causal=causal, normalizer=normalizer, backend="naive")


@pytest.mark.parametrize(
    ("causal", "normalizer"), [(True, "query"), (True, "none"), (True, "block_query"), (False, "query")]
)
@pytest.mark.parametrize("padding", ["none", "left", "holes", "a row and a half"])
@pytest.mark.parametrize("lengths", [[[81], [81]], [[3, 1, 40, 37], [77, 4]]], ids=["one document", "documents"])
@pytest.mark.parametrize("count", [1, 3, 17])
@pytest.mark.parametrize("block_size, per_head, decay", [(BLOCK_SIZE, True, 0.8), (8, True, 0.8), (8, False, None)])
def test_documents_are_as_if_they_were_alone(block_size, per_head, decay, count, lengths, padding, causal, normalizer):
    """More blocks than a chunk has, and fewer; these without tokens and decays of their own for the normaliser too."""
    inputs = {**make_tokens(81), **make_weights(count, per_head, decay)}
    if decay is None:
        del inputs["normalizer_query"], inputs["normalizer_key"]
    valid = torch.ones(2, 81, dtype=torch.bool)
    if padding == "holes":
        valid = torch.rand(2, 81, generator=torch.Generator().manual_seed(6)) < 0.9
    elif padding == "left":
        valid[0, :9] = False
    elif padding == "a row and a half":
        valid[0], valid[1, 40:] = False, False
    with torch.no_grad():
        for name in inputs.keys() & TOKENS:
            inputs[name][~valid] = float("nan")
    documents = torch.stack([torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in lengths])
    packed = (documents, 4) if len(lengths[0]) > 1 else ()
    layout = SequenceLayout(valid, block_size, *packed)
    output = mhla_attention(**inputs, layout=layout, causal=causal, normalizer=normalizer, backend="torch")
    expected = torch.zeros_like(output)
    for row in range(2):
        for document in range(len(lengths[row])):
            chosen = valid[row] & (documents[row] == document)
            if chosen.any():
                expected[row, chosen] = alone(inputs, row, chosen, block_size, causal, normalizer)[0]
    assert_close(output_and_gradients(output, inputs), output_and_gradients(expected, inputs), 1e-12)


@pytest.mark.parametrize("count", [3, 17])
def test_sequences_are_mixed_by_a_matrix_while_it_is_small(count):
    weights, decay = make_mixing(count, 1, "learned")
    stored = StoredMixing(weights, decay)
    documents = torch.arange(3).repeat_interleave(torch.tensor([9, 50, 61]))[None]
    for tokens in (2 * stored.chunk_blocks, 2 * stored.chunk_blocks + 1):
        layout = SequenceLayout(torch.ones(1, tokens, dtype=torch.bool), BLOCK_SIZE)
        mixing = sequence_mixing(stored, layout)
        assert isinstance(mixing, TwoSidedMixing) == (layout.num_blocks > stored.chunk_blocks)
    layout = SequenceLayout(torch.ones(1, 120, dtype=torch.bool), BLOCK_SIZE, documents, 3)
    mixing = sequence_mixing(stored, layout)
    # Documents of 9, 50 and 61 tokens are 5, 25 and 31 blocks, of which the layout may have one more.
    matrix = document_weights(weights, decay, [[5, 25, 31]])
    torch.testing.assert_close(mixing.matrix()[..., :61, :61], matrix, rtol=1e-13, atol=0)
    summary = normal(torch.Generator().manual_seed(7), 1, 2, layout.num_blocks, 3, 4)
    mixed = mixing.mix(summary, 2)[:, :, :61]
    expected = (matrix @ summary[:, :, :61].flatten(3)).view_as(mixed)
    torch.testing.assert_close(mixed, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("causal", [False, True])
def test_no_sequences_at_all(causal):
    inputs = {name: x[:0].detach().requires_grad_() for name, x in make_tokens(81).items()}
    inputs |= make_weights(3, True, 0.8)
    layout = SequenceLayout(torch.ones(0, 81, dtype=torch.bool), BLOCK_SIZE)
    output = mhla_attention(**inputs, layout=layout, causal=causal, backend="torch")
    assert output.shape == (0, 81, 4, 4)
    gradients = torch.autograd.grad(output.sum(), list(inputs.values()))
    assert not any(gradient.any() for gradient in gradients)


@pytest.mark.parametrize("heads", HEADS)
def test_a_bad_summary_stays_in_its_head(heads):
    weights, summaries, mixed = HEADS[heads]
    stored = StoredMixing(make_mixing(3, weights, "none")[0].detach())
    summary = normal(torch.Generator().manual_seed(0), 2, summaries, 45, 4)
    expected = stored.mix_both_ways(summary, mixed, None, None)
    bad = summary.clone()
    bad[0, -1, [0, -1]] = float("nan")
    actual = stored.mix_both_ways(bad, mixed, None, None)
    same = torch.ones(2, mixed, dtype=torch.bool)
    same[0, mixed - mixed // summaries :] = False
    assert torch.equal(actual[same], expected[same]) and actual[~same].isnan().all()


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_a_bad_summary_reaches_no_chunk_before_its_own(number):
    """Nor a bad gradient one after it: zero times NaN is not zero. In chunks of 16 blocks."""
    stored = StoredMixing(*make_mixing(3, 1, "learned"))
    summary = normal(torch.Generator().manual_seed(0), 1, 1, 107, 4).requires_grad_()
    weights, bad = normal(torch.Generator().manual_seed(1), 1, 1, 107, 4), torch.zeros(1, 1, 107, 4)
    bad[:, :, 50, 1] = number
    output = stored.mix_earlier(summary, 1)
    assert torch.equal(stored.mix_earlier(summary + bad, 1)[:, :, :48], output[:, :, :48])
    expected, actual = (
        torch.autograd.grad(output, summary, x, retain_graph=True)[0] for x in (weights, weights + bad)
    )
    assert torch.equal(actual[:, :, 64:], expected[:, :, 64:])
    assert torch.equal(actual[..., 0], expected[..., 0])


@pytest.mark.parametrize("normalizer", ["query", "none"])
@pytest.mark.parametrize("decay", [None, 0.7, 0.0])
@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("count", [1, 3, 17])
def test_long_texts_in_parts(monkeypatch, count, per_head, decay, normalizer):
    for module in (recurrent_module, forms_module):
        monkeypatch.setattr(module, "PART_CHUNKS", 1)
    parts = []
    monkeypatch.setattr(
        recurrent_module, "_extend", lambda *args, run=recurrent_module._extend: (parts.append(1), run(*args))[1]
    )
    layout = BlockLayout((BLOCK_SIZE * 3 * max(count, 16) - 1,), block_size=(BLOCK_SIZE,))
    inputs = {**make_tokens(layout.num_tokens), **make_weights(count, per_head, decay)}
    options = {"layout": layout, "causal": True, "normalizer": normalizer}
    with torch.no_grad():
        output = mhla_attention(**inputs, backend="torch", **options)
    assert len(parts) == 3
    assert_close([output], [mhla_attention(**inputs, backend="naive", **options)], 1e-12)
    for name in ("key", "value"):
        spoilt = {key: tensor.detach().clone() for key, tensor in inputs.items()}
        spoilt[name][0, 50, 1, 0] = float("nan")
        after = mhla_attention(**spoilt, backend="torch", **options)
        reached = torch.zeros(output.shape[:3], dtype=torch.bool)
        reached[0, 50:, 2:] = True
        assert torch.equal(after.isnan().all(dim=-1), reached)
        assert torch.equal(after[~reached], output[~reached])


@pytest.mark.slow
def test_texts_of_any_length_are_compiled_twice():
    """Once for the matrix of few blocks, once for chunks; a `BlockLayout` is a constant of its graph."""
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    def attend(inputs: dict[str, torch.Tensor], valid: torch.Tensor, documents: torch.Tensor) -> torch.Tensor:
        layout = SequenceLayout(valid, BLOCK_SIZE, documents, 2)
        return mhla_attention(**inputs, layout=layout, causal=True, backend="torch")

    compiled = torch.compile(attend, backend=counter, dynamic=True, fullgraph=True)
    graphs, weights = [], make_weights(3, False, 0.8)
    for length in (9, 20, 29, 40, 71, 96, 101):
        inputs, valid = {**make_tokens(length), **weights}, torch.ones(2, length, dtype=torch.bool)
        documents = (torch.arange(length) > length // 3).long().repeat(2, 1)
        expected = output_and_gradients(attend(inputs, valid, documents), inputs)
        assert_close(output_and_gradients(compiled(inputs, valid, documents), inputs), expected, 1e-12)
        graphs.append(counter.frame_count)
    # A compilation that starts again, as one does to make a constant of eps, is counted twice.
    assert graphs == [graphs[0]] * 3 + [graphs[3]] * 4 and graphs[0] <= 2 and graphs[3] <= 4
    torch._dynamo.reset()


def test_extended_weights_are_those_of_the_definition():
    weights, decay = make_mixing(5, 2, "learned")
    assert torch.equal(extend_mixing(weights, 40, causal=False, mixing_decay=decay), dense_weights(weights, decay, 40))
    assert torch.equal(extend_mixing(weights, 40, causal=True), dense_weights(weights, None, 40).tril())
