# SPDX-License-Identifier: Apache-2.0
"""Launches of an operator that are recorded once and repeated for other tensors."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch


pytest.importorskip("triton")


class Pair(NamedTuple):
    data: torch.Tensor
    factor: float


class Kernel:
    """Stands for a kernel and for what it is compiled to: result = left · pair · factor + count, or without left."""

    arg_names = ("result", "left", "pair", "count", "power")

    def __init__(self):
        self.compiled = 0

    def __getitem__(self, grid):
        def start(result, left, pair, count, power):
            product = pair.data.float() * pair.factor
            result.copy_((product if left is None else product * left) ** power + count)

        def run(*args, **keywords):
            self.compiled += bool(keywords)
            start(*args, **keywords)
            return self

        return run


@pytest.fixture
def operator(monkeypatch):
    """An operator of two launches over (left, right), its kernel, and how many times it has run itself."""
    from mhla_hf.ops.triton import launching, replay

    monkeypatch.setattr(launching, "_plans", {})
    monkeypatch.setattr(replay, "_records", {})
    kernel, runs = Kernel(), []

    def function(left, right, factor):
        runs.append(1)
        between, result = right.new_empty(right.shape, dtype=torch.float32), right.new_empty(right.shape)
        launching.prepare(kernel, between, left, Pair(right, factor), power=1)(1, 10)
        launching.prepare(kernel, result, None, Pair(between, 1.0), power=2)(1, 0)
        return result, between

    def expected(left, right, factor):
        between = right.float() * factor * (1 if left is None else left) + 10
        return between.to(right.dtype) ** 2, between

    return function, expected, kernel, runs


def test_records_serve_other_tensors_of_the_same_kind(operator):
    from mhla_hf.ops.triton.replay import replayed

    function, expected, kernel, runs = operator
    for seed in range(4):
        torch.manual_seed(seed)
        left, right = torch.rand(3, 4), torch.rand(3, 4)
        for actual, reference in zip(replayed(function, (right, left), (2.0,)), expected(right, left, 2.0)):
            torch.testing.assert_close(actual, reference)
    assert len(runs) == 1 and kernel.compiled == 2


def test_what_decisions_depend_on_makes_another_record(operator):
    from mhla_hf.ops.triton.replay import replayed

    function, expected, _, runs = operator
    right = torch.rand(3, 4)
    others = [
        ((torch.rand(3, 4), right), 2.0), ((torch.rand(3, 4), right), 3.0), ((torch.rand(1, 4), right), 2.0),
        ((torch.rand(4, 3).T, right), 2.0), ((torch.rand(13)[1:].view(3, 4), right), 2.0),
        ((torch.rand(3, 4).double(), right), 2.0),
    ]  # fmt: skip
    for _ in range(2):
        for inputs, factor in others:
            for actual, reference in zip(replayed(function, inputs, (factor,)), expected(*inputs, factor)):
                torch.testing.assert_close(actual, reference.to(actual.dtype))
    assert len(runs) == len(others)


def test_inputs_that_are_one_tensor_are_not_recorded(operator):
    """Otherwise a launch might take the first of two tensors for the second."""
    from mhla_hf.ops.triton.replay import replayed

    function, expected, _, runs = operator
    both, left, right = torch.rand(3, 4), torch.rand(3, 4), torch.rand(3, 4)
    for inputs in ((both, both), (left, right), (both, both), (right, left)):
        for actual, reference in zip(replayed(function, inputs, (2.0,)), expected(*inputs, 2.0)):
            torch.testing.assert_close(actual, reference)
    assert len(runs) == 3
