# SPDX-License-Identifier: Apache-2.0
"""What follows from sizes alone is made once: also where a CUDA graph is captured later, which has to find it."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from mhla_hf import MHLA, MHLAConfig
from mhla_hf.layers.state import TokenSequence
from mhla_hf.layouts import blocks as tables
from mhla_hf.layouts.blocks import cached


@pytest.fixture(autouse=True)
def nothing_remembered(monkeypatch):
    monkeypatch.setattr(tables, "_tables", type(tables._tables)())
    monkeypatch.setattr(tables, "_captured", {})


@pytest.fixture
def capture(monkeypatch):
    """Makes the code believe that a CUDA graph is being captured."""

    def start(capturing: bool = True) -> None:
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: capturing)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)

    return start


def numbers(count: int) -> torch.Tensor:
    return torch.arange(count)


def test_tables_are_remembered():
    table = cached(numbers, 3)
    assert cached(numbers, 3) is table
    assert cached(numbers, 4).tolist() == [0, 1, 2, 3]


def test_tables_without_values_are_not_remembered():
    with FakeTensorMode():
        cached(numbers, 3)
    assert cached(numbers, 3).tolist() == [0, 1, 2]


def test_tables_of_inference_mode_serve_training():
    with torch.inference_mode():
        table = cached(numbers, 3)
    (torch.ones(3, requires_grad=True) * table).sum().backward()
    assert cached(numbers, 3) is table


def test_graphs_use_what_is_remembered_and_keep_it(capture):
    table = cached(numbers, 3)
    capture()
    assert cached(numbers, 3) is table
    capture(False)
    for count in range(10, 10 + 2 * tables.MAX_TABLES):
        cached(numbers, count)
    assert cached(numbers, 3) is table


def test_graphs_keep_what_they_make_to_themselves(capture):
    capture()
    first = cached(numbers, 3)
    assert cached(numbers, 3) is not first
    capture(False)
    assert cached(numbers, 3) is not first


def test_the_least_used_tables_are_forgotten():
    first, second = cached(numbers, 0), cached(numbers, 1)
    for count in range(2, tables.MAX_TABLES + 1):
        cached(numbers, 0)
        cached(numbers, count)
    assert cached(numbers, 0) is first
    assert cached(numbers, 1) is not second


class Operations(TorchDispatchMode):
    """Counts the operations that run."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.counts[function._schema.name] += 1
        return function(*args, **(kwargs or {}))


# Operations that read nothing but sizes.
OF_SIZES = {"aten::arange", "aten::eye", "aten::ones", "aten::zeros", "aten::full"}
GRID_LAYERS = {
    "uneven": ({"blocks": (2, 2)}, (5, 4)),
    "resampled": ({"blocks": (2, 2), "grid": (4, 4), "block_size": None, "resize": "block_size"}, (8, 8)),
    "adjacent": ({"blocks": (2, 2), "window": "adjacent", "window_size": (2, 2)}, (5, 4)),
    "block": ({"blocks": (2, 2), "window": "block", "window_size": (2, 3)}, (5, 4)),
    "cross": ({"blocks": (2, 2, 2), "window": "cross", "window_size": (1, 2, 2)}, (2, 5, 4)),
    "convolved": ({"blocks": (2, 2), "lepe_kernel": 3, "output_gate": True, "output_norm": True}, (5, 4)),
}
SEQUENCE_LAYERS = {
    "causal": {"causal": True},
    "both directions": {"resize": "extend"},
    "causal window": {"causal": True, "window": "adjacent"},
    "window": {"resize": "extend", "window": "adjacent"},
}


@pytest.mark.parametrize("case", [*GRID_LAYERS, *SEQUENCE_LAYERS])
def test_layers_compute_nothing_from_sizes_in_a_graph(case, capture):
    options, grid = GRID_LAYERS.get(case) or ({"block_size": (4,), "grid": (8,), **SEQUENCE_LAYERS[case]}, (26,))
    layer = MHLA(MHLAConfig(**options), hidden_size=8, num_heads=2, head_dim=4).requires_grad_(False)
    torch.manual_seed(0)
    tokens = torch.randn(3, 1, torch.Size(grid).numel(), 2, 4)
    sequence = case in SEQUENCE_LAYERS
    arguments = {"sequence": TokenSequence(options.get("causal", False))} if sequence else {"grid": grid}
    if layer.gate is not None:
        arguments["hidden_states"] = torch.randn(1, tokens.shape[2], 8)
    with Operations() as first:
        expected = layer(*tokens, **arguments)
    capture()
    with Operations() as captured:
        output = layer(*tokens, **arguments)
    assert torch.equal(output, expected)
    assert not OF_SIZES & set(captured.counts), captured.counts
    assert captured.counts.total() < first.counts.total()
    capture(False)
    with Operations() as again:
        layer(*tokens, **arguments)
    assert again.counts == captured.counts
