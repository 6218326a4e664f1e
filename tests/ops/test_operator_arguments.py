# SPDX-License-Identifier: Apache-2.0
"""Wrong arguments of the operator's functions: each is one line that names the argument."""

from __future__ import annotations

import dataclasses
from functools import partial

import pytest
import torch

from mhla_hf import BlockLayout, mhla_attention
from mhla_hf.layouts.sequences import SequenceLayout
from mhla_hf.ops import (
    empty_state,
    mhla_extend,
    mhla_step,
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
        "state": empty_state(BATCH, 2, WIDTH, VALUE, BLOCK, 2),
    }


FUNCTIONS = {
    "attention": (mhla_attention, dense_arguments),
    "naive": (partial(mhla_attention, backend="naive"), dense_arguments),
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
@pytest.mark.parametrize("name, value", [("eps", float("nan")), ("normalizer", "no"), ("mixing", torch.ones(2, 3))])
def test_options_and_weights(case, name, value):
    function, make = FUNCTIONS[case]
    refused(function, {**make(), name: value}, name)


@pytest.mark.parametrize("case", ["attention", "step"])
def test_backend(case):
    function, make = FUNCTIONS[case]
    refused(function, {**make(), "backend": "cuda"}, "backend")


def test_numbers_of_tokens():
    refused(mhla_extend, recurrent_arguments(0), "query has no tokens")
    refused(mhla_step, recurrent_arguments(2), "one token")


def test_causal_and_layout():
    refused(mhla_attention, {**dense_arguments(), "causal": "no"}, "causal")
    refused(mhla_attention, {**dense_arguments(), "layout": (8,)}, "layout")
    refused(mhla_attention, {**dense_arguments(), "layout": BlockLayout((9,), block_size=(5,))}, "9")


@pytest.mark.parametrize("case", FUNCTIONS)
@pytest.mark.parametrize(
    "name, change",
    [
        ("query", lambda x: "tensor"),
        ("key", lambda x: x[0]),
        ("value", lambda x: x.long()),
        ("value", lambda x: x[:1]),
        ("key", lambda x: torch.cat([x, x], dim=1)),
        ("key", lambda x: torch.cat([x, x[:, :, :1]], dim=2)),
        ("key", lambda x: torch.cat([x, x], dim=-1)),
        ("normalizer_query", lambda x: torch.cat([x, x], dim=-1)),
        ("normalizer_key", lambda x: x.to("meta")),
    ],
    ids=["type", "axes", "integers", "batch", "tokens", "heads", "width", "pair's width", "device"],
)
def test_tokens(case, name, change):
    function, make = FUNCTIONS[case]
    arguments = make()
    refused(function, {**arguments, name: change(arguments[name.removeprefix("normalizer_")])}, name)


@pytest.mark.parametrize("case", ["extend", "step"])
def test_valid(case):
    function, make = FUNCTIONS[case]
    refused(function, {**make(), "valid": torch.ones(BATCH, 1)}, "valid")
    refused(function, {**make(), "valid": torch.ones(1, 1, dtype=torch.bool)}, "valid")


@pytest.mark.parametrize("case", ["extend", "step"])
@pytest.mark.parametrize(
    "change",
    [
        lambda state: None,
        lambda state: empty_state(3, 2, WIDTH, VALUE, BLOCK, 2),
        lambda state: empty_state(BATCH, 2, WIDTH + 1, VALUE, BLOCK, 2),
        lambda state: empty_state(BATCH, 2, WIDTH, VALUE, BLOCK, 2, dtype=torch.float64),
        lambda state: empty_state(BATCH, 2, WIDTH, VALUE, BLOCK, 3),
        lambda state: dataclasses.replace(state, left=state.left[:, :1]),
        lambda state: dataclasses.replace(state, position=state.position[:1]),
    ],
    ids=["type", "batch", "width", "dtype", "stored blocks", "left", "position"],
)
def test_state(case, change):
    function, make = FUNCTIONS[case]
    arguments = make()
    refused(function, {**arguments, "state": change(arguments["state"])}, "state")


def test_per_head_weights_need_a_state_made_for_them():
    arguments = {**recurrent_arguments(1), "mixing": torch.rand(HEADS, 2, 2)}
    refused(mhla_step, arguments, "num_mixing_heads")
    state = empty_state(BATCH, 2, WIDTH, VALUE, BLOCK, 2, num_mixing_heads=HEADS)
    mhla_step(**{**arguments, "state": state})


@pytest.mark.parametrize("case", FUNCTIONS)
@pytest.mark.parametrize(
    "decay",
    [0.5, torch.ones(1, dtype=torch.long), torch.ones(3), torch.ones(1, HEADS), torch.ones(1, device="meta")],
    ids=["type", "integers", "heads", "axes", "device"],
)
def test_decay(case, decay):
    function, make = FUNCTIONS[case]
    refused(function, {**make(), "mixing_decay": decay}, "mixing_decay")


def test_a_decay_is_for_sequences():
    arguments = {**dense_arguments(), "mixing_decay": torch.ones(1)}
    assert "causal=True" in refused(mhla_attention, arguments, "mixing_decay")
    layout = SequenceLayout(torch.ones(BATCH, LENGTH, dtype=torch.bool), BLOCK)
    mhla_attention(**{**arguments, "layout": layout})


@pytest.mark.parametrize("case", ["extend", "step"])
def test_a_decay_per_head_needs_a_state_made_for_it(case):
    function, make = FUNCTIONS[case]
    arguments = {**make(), "mixing_decay": torch.ones(HEADS)}
    refused(function, arguments, "num_mixing_heads")
    state = empty_state(BATCH, 2, WIDTH, VALUE, BLOCK, 2, num_mixing_heads=HEADS)
    function(**{**arguments, "state": state})


@pytest.mark.parametrize("case", ["extend", "step"])
def test_normalizers_that_cannot_be_decoded(case):
    function, make = FUNCTIONS[case]
    refused(function, {**make(), "normalizer": "block_query"}, "decoding token by token")


def test_sequences_that_look_both_ways_refuse_sums_over_blocks_of_queries():
    layout = SequenceLayout(torch.ones(BATCH, LENGTH, dtype=torch.bool), BLOCK)
    arguments = {**dense_arguments(), "layout": layout, "normalizer": "block_query"}
    refused(mhla_attention, arguments, "block_query")
    mhla_attention(**arguments, causal=True)


@pytest.mark.parametrize(
    "name, value",
    [
        ("batch_size", -1),
        ("block_size", 1.5),
        ("block_size", 0),
        ("num_stored_blocks", "4"),
        ("num_mixing_heads", 0),
        ("rewindable", -1),
        ("max_tokens", 0),
    ],
)
def test_sizes_of_a_state(name, value):
    sizes = {"batch_size": 1, "num_heads": 2, "key_width": 3, "value_width": 3, "block_size": 4}
    sizes["num_stored_blocks"] = 2
    refused(empty_state, {**sizes, name: value}, name)


def test_rewinding():
    _, state = mhla_extend(**recurrent_arguments(3))
    given = {"state": state, "mixing": torch.rand(2, 2), "valid": torch.ones(BATCH, 1, dtype=torch.bool)}
    given.update(key=torch.rand(BATCH, 1, 2, WIDTH), value=torch.rand(BATCH, 1, 2, VALUE))
    given["normalizer_key"] = given["key"]
    rewind_state(**given)
    refused(rewind_state, {**given, "valid": torch.ones(BATCH, 2, dtype=torch.bool)}, "valid")
    rewind_state(**{**given, "mixing": given["mixing"].bfloat16()})
    refused(rewind_state, {**given, "kept": torch.ones(BATCH, 1)}, "kept")
    refused(rewind_state, {**given, "value": given["value"][:, :, :1]}, "value")
    refused(rewind_state, {**given, "mixing": torch.rand(2, 3)}, "mixing")
    refused(rewind_state, {**given, "mixing_decay": torch.ones(1, 2)}, "mixing_decay")
    refused(rewind_state, {**given, "state": None}, "state")
    refused(rewind_state, {**given, "normalizer_key": torch.rand(BATCH, 1, 2, WIDTH + 1)}, "key")


def test_number_of_blocks_of_a_sequence():
    refused(SequenceLayout, {"valid": torch.ones(1, 4, dtype=torch.bool), "block_size": 1.5}, "block_size")


def test_documents_of_a_sequence():
    valid = torch.ones(1, 4, dtype=torch.bool)
    refused(SequenceLayout, {"valid": valid, "block_size": 2, "documents": valid}, "documents")
    refused(SequenceLayout, {"valid": valid, "block_size": 2, "documents": torch.zeros(1, 5).long()}, "documents")
    refused(SequenceLayout, {"valid": [[True]], "block_size": 2}, "valid")


@pytest.mark.parametrize("name", ["grid", "blocks", "block_size"])
def test_axes_of_a_layout(name):
    sizes = {"grid": (4,), "blocks" if name != "block_size" else "block_size": (2,)}
    refused(BlockLayout, {**sizes, name: (1.5,)}, name)
    refused(BlockLayout, {**sizes, "num_prefix_tokens": -1}, "num_prefix_tokens")


def test_a_state_made_for_fewer_tokens():
    arguments = recurrent_arguments(10 * BLOCK)
    arguments |= {"mixing": torch.rand(8, 8)}
    state = empty_state(BATCH, 2, WIDTH, VALUE, BLOCK, 8, max_tokens=4 * BLOCK)
    assert "max_tokens" in refused(mhla_extend, {**arguments, "state": state}, "state")
    mhla_extend(**{**arguments, "state": state.with_room(10 * BLOCK)})
