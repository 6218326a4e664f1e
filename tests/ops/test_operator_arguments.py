# SPDX-License-Identifier: Apache-2.0
"""Wrong arguments of the operator's functions: each is one line that names the argument."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from mhla_hf import BlockLayout, mhla_attention
from mhla_hf.layouts.sequences import SequenceLayout
from mhla_hf.ops import (
    block_mhla_attention,
    causal_mhla_attention,
    empty_state,
    extend_mixing,
    mhla_extend,
    mhla_step,
    mixing_at,
    naive_mhla_attention,
    naive_mhla_weights,
    rewind_state,
)


BATCH, LENGTH, HEADS, WIDTH, VALUE, BLOCK = 2, 8, 4, 3, 5, 4


def tokens(length: int = LENGTH) -> dict[str, torch.Tensor]:
    return {
        "query": torch.rand(BATCH, length, HEADS, WIDTH),
        "key": torch.rand(BATCH, length, 2, WIDTH),
        "value": torch.rand(BATCH, length, 2, VALUE),
    }


def dense_arguments(causal: bool = True):
    return {**tokens(), "mixing": torch.rand(2, 2), "layout": BlockLayout((LENGTH,), block_size=(BLOCK,))}


def recurrent_arguments(length: int):
    return {
        **tokens(length),
        "mixing": torch.rand(2, 2),
        "state": empty_state(BATCH, 2, WIDTH, VALUE, BLOCK, num_blocks=2),
    }


FUNCTIONS = {
    "attention": (mhla_attention, dense_arguments),
    "causal": (causal_mhla_attention, dense_arguments),
    "block": (block_mhla_attention, dense_arguments),
    "naive": (naive_mhla_attention, dense_arguments),
    "extend": (mhla_extend, lambda: recurrent_arguments(3)),
    "step": (mhla_step, lambda: recurrent_arguments(1)),
}


def refused(function, arguments, name):
    """The message of the error, which is one short line that names the argument."""
    with pytest.raises(ValueError) as caught:
        function(**arguments)
    message = str(caught.value)
    assert name in message and "\n" not in message and len(message) < 300, message
    return message


@pytest.mark.parametrize("case", FUNCTIONS)
@pytest.mark.parametrize("eps", [float("inf"), float("nan"), -1e-6, "1e-6", None, True, torch.tensor(1e-6)], ids=repr)
def test_eps(case, eps):
    function, make = FUNCTIONS[case]
    refused(function, {**make(), "eps": eps}, "eps")


@pytest.mark.parametrize("case", FUNCTIONS)
@pytest.mark.parametrize("normalizer", ["no", None, 3, ["query"], torch.ones(2)], ids=str)
def test_normalizer(case, normalizer):
    function, make = FUNCTIONS[case]
    refused(function, {**make(), "normalizer": normalizer}, "normalizer")


@pytest.mark.parametrize("causal", ["no", 1, 0, None, "True"])
def test_causal(causal):
    refused(mhla_attention, {**dense_arguments(), "causal": causal}, "causal")
    refused(naive_mhla_attention, {**dense_arguments(), "causal": causal}, "causal")


@pytest.mark.parametrize("case", ["attention", "extend", "step"])
@pytest.mark.parametrize("backend", ["cuda", None, 3, ["torch"]], ids=str)
def test_backend(case, backend):
    function, make = FUNCTIONS[case]
    refused(function, {**make(), "backend": backend}, "backend")


@pytest.mark.parametrize("case", FUNCTIONS)
@pytest.mark.parametrize("name", ["query", "key", "value", "normalizer_query", "normalizer_key"])
@pytest.mark.parametrize(
    "change",
    [
        lambda x: "tensor",
        lambda x: x[0],
        lambda x: x.long(),
        lambda x: x.to(torch.complex64),
        lambda x: x[:1],
        lambda x: torch.cat([x, x], dim=1),
        lambda x: torch.cat([x, x[:, :, :1]], dim=2),
        lambda x: x[:, :, :0],
        lambda x: x.to("meta"),
        lambda x: x.to_sparse(),
    ],
    ids=["type", "axes", "integers", "complex", "batch", "tokens", "heads", "no-heads", "device", "sparse"],
)
def test_tokens(case, name, change):
    function, make = FUNCTIONS[case]
    arguments = make()
    source = arguments[name.removeprefix("normalizer_")]
    changed = change(source)
    # Which of the tensors is the odd one is for the reader to say where all differ from the query.
    expected = name if name != "query" or not isinstance(changed, torch.Tensor) else ""
    refused(function, {**arguments, name: changed}, expected)


@pytest.mark.parametrize("case", FUNCTIONS)
@pytest.mark.parametrize("name", ["key", "normalizer_query", "normalizer_key"])
def test_widths(case, name):
    function, make = FUNCTIONS[case]
    arguments = make()
    source = arguments[name.removeprefix("normalizer_")]
    refused(function, {**arguments, name: torch.cat([source, source], dim=-1)}, name)


@pytest.mark.parametrize("case", FUNCTIONS)
@pytest.mark.parametrize(
    "mixing",
    [
        None,
        [[1.0]],
        torch.ones(2),
        torch.ones(2, 3),
        torch.ones(0, 0),
        torch.ones(3, 2, 2),
        torch.ones(2, 2, dtype=torch.long),
        torch.ones(2, 2, device="meta"),
    ],
    ids=["none", "list", "vector", "oblong", "empty", "heads", "integers", "device"],
)
def test_mixing(case, mixing):
    function, make = FUNCTIONS[case]
    if case in ("block", "causal") and isinstance(mixing, torch.Tensor) and mixing.dim() == 3:
        pytest.skip("the forms take weights of any leading axes")
    refused(function, {**make(), "mixing": mixing}, "mixing")


@pytest.mark.parametrize("case", ["attention", "naive", "block", "causal"])
def test_layout(case):
    function, make = FUNCTIONS[case]
    refused(function, {**make(), "layout": (8,)}, "layout")
    refused(function, {**make(), "layout": BlockLayout((9,), block_size=(5,))}, "9")


@pytest.mark.parametrize("case", ["extend", "step"])
@pytest.mark.parametrize(
    "valid",
    [True, [1], torch.ones(BATCH, 1), torch.ones(BATCH, dtype=torch.bool), torch.ones(1, 1, dtype=torch.bool)],
    ids=str,
)
def test_valid(case, valid):
    function, make = FUNCTIONS[case]
    refused(function, {**make(), "valid": valid}, "valid")


@pytest.mark.parametrize("case", ["extend", "step"])
@pytest.mark.parametrize(
    "change",
    [
        lambda state: None,
        lambda state: empty_state(3, 2, WIDTH, VALUE, BLOCK),
        lambda state: empty_state(BATCH, 1, WIDTH, VALUE, BLOCK),
        lambda state: empty_state(BATCH, 2, WIDTH + 1, VALUE, BLOCK),
        lambda state: empty_state(BATCH, 2, WIDTH, VALUE + 1, BLOCK),
        lambda state: empty_state(BATCH, 2, WIDTH, VALUE, BLOCK, num_mixing_heads=6),
        lambda state: empty_state(BATCH, 2, WIDTH, VALUE, BLOCK, dtype=torch.float64),
        lambda state: empty_state(BATCH, 2, WIDTH, VALUE, BLOCK, device="meta"),
        lambda state: dataclasses.replace(state, position=state.position[:1]),
        lambda state: dataclasses.replace(state, upcoming=state.upcoming[:, :1]),
        lambda state: dataclasses.replace(state, summaries=state.summaries[:, 0]),
    ],
    ids=["type", "batch", "heads", "width", "value", "mixing", "dtype", "device", "position", "upcoming", "summaries"],
)
def test_state(case, change):
    function, make = FUNCTIONS[case]
    arguments = make()
    refused(function, {**arguments, "state": change(arguments["state"])}, "state")


def test_per_head_weights_need_a_state_made_for_them():
    arguments = {**recurrent_arguments(1), "mixing": torch.rand(HEADS, 2, 2)}
    refused(mhla_step, arguments, "num_mixing_heads")
    state = empty_state(BATCH, 2, WIDTH, VALUE, BLOCK, num_mixing_heads=HEADS)
    mhla_step(**{**arguments, "state": state})


def test_room_for_a_prompt():
    arguments = recurrent_arguments(13)
    assert "room for 2 finished blocks" in refused(mhla_extend, arguments, "with_room")
    mhla_extend(**{**arguments, "state": arguments["state"].with_room(3)})


@pytest.mark.parametrize(
    "name", ["batch_size", "num_heads", "key_width", "value_width", "block_size", "num_mixing_heads", "num_blocks"]
)
@pytest.mark.parametrize("size", [-1, 1.5, "4", True], ids=repr)
def test_sizes_of_a_state(name, size):
    sizes = {"batch_size": 1, "num_heads": 2, "key_width": 3, "value_width": 3, "block_size": 4}
    refused(empty_state, {**sizes, name: size}, name)


@pytest.mark.parametrize("dtype", [torch.int32, "float32", None], ids=str)
def test_dtype_of_a_state(dtype):
    sizes = {"batch_size": 1, "num_heads": 2, "key_width": 3, "value_width": 3, "block_size": 4}
    refused(empty_state, {**sizes, "dtype": dtype}, "dtype")


def test_rewinding():
    _, state = mhla_extend(**recurrent_arguments(3))
    given = {"state": state, "mixing": torch.rand(2, 2), "valid": torch.ones(BATCH, 1, dtype=torch.bool)}
    given.update(key=torch.rand(BATCH, 1, 2, WIDTH), value=torch.rand(BATCH, 1, 2, VALUE))
    given["normalizer_key"] = given["key"]
    rewind_state(**given)
    refused(rewind_state, {**given, "valid": torch.ones(BATCH, 2, dtype=torch.bool)}, "valid")
    refused(rewind_state, {**given, "kept": torch.ones(BATCH, 1)}, "kept")
    refused(rewind_state, {**given, "value": given["value"][:, :, :1]}, "value")
    refused(rewind_state, {**given, "mixing": torch.rand(2, 3)}, "mixing")
    refused(rewind_state, {**given, "state": None}, "state")
    refused(rewind_state, {**given, "normalizer_key": torch.rand(BATCH, 1, 2, WIDTH + 1)}, "normalizer_key")


@pytest.mark.parametrize("size", [-1, 0, 1.5, "2", None, True], ids=repr)
def test_number_of_blocks_of_a_sequence(size):
    refused(extend_mixing, {"mixing": torch.rand(3, 3), "num_blocks": size, "causal": True}, "num_blocks")
    valid = torch.ones(1, 4, dtype=torch.bool)
    refused(SequenceLayout, {"valid": valid, "block_size": size}, "block_size")
    documents = torch.zeros(1, 4, dtype=torch.long)
    refused(
        SequenceLayout,
        {"valid": valid, "block_size": 2, "documents": documents, "num_documents": size},
        "num_documents",
    )


def test_documents_of_a_sequence():
    valid = torch.ones(1, 4, dtype=torch.bool)
    refused(SequenceLayout, {"valid": valid, "block_size": 2, "documents": valid}, "documents")
    refused(SequenceLayout, {"valid": valid, "block_size": 2, "documents": torch.zeros(1, 5).long()}, "documents")
    refused(SequenceLayout, {"valid": [[True]], "block_size": 2}, "valid")


def test_indices_of_blocks():
    index = torch.arange(2)
    refused(mixing_at, {"mixing": torch.rand(3), "rows": index, "columns": index}, "mixing")
    refused(mixing_at, {"mixing": torch.rand(3, 3), "rows": index.float(), "columns": index}, "rows")


@pytest.mark.parametrize("count", [1.5, -1, "1", None, True, float("nan")], ids=repr)
def test_tokens_before_the_grid(count):
    refused(BlockLayout, {"grid": (4,), "blocks": (2,), "num_prefix_tokens": count}, "num_prefix_tokens")


@pytest.mark.parametrize("axis", [0, -1, 1.5, "4", None, True, float("nan"), torch.tensor(4.0)], ids=repr)
@pytest.mark.parametrize("name", ["grid", "blocks", "block_size"])
def test_axes_of_a_layout(name, axis):
    sizes = {"grid": (4,), "blocks" if name != "block_size" else "block_size": (2,)}
    refused(BlockLayout, {**sizes, name: (axis,)}, name)


def test_weights_of_the_dense_form():
    arguments = {name: value for name, value in dense_arguments().items() if name != "value"}
    arguments["key"] = torch.rand(BATCH, LENGTH, HEADS, WIDTH)
    naive_mhla_weights(**arguments)
    refused(naive_mhla_weights, {**arguments, "mixing": torch.rand(3, 3)}, "mixing")
    refused(naive_mhla_weights, {**arguments, "key": arguments["key"].double()}, "key")
