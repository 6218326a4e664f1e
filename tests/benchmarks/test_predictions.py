# SPDX-License-Identifier: Apache-2.0
"""Predictions of the kernels' times: counts by hand, and the tables of the documentation."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.predictions.__main__ import PAGES
from benchmarks.predictions.choosing import CHOICES, PARTS, choices_table
from benchmarks.predictions.stages import CACHE_RATE, MEMORY_RATE, Problem, Stage, block_backward, block_forward
from benchmarks.predictions.tables import CASES, SECTIONS, target_table, with_tables
from benchmarks.recovery import OPTIONS, TITLES
from mhla_hf.benchmarks.shapes import SHAPES
from mhla_hf.layers.lepe import convolved_values, depthwise_convolution
from mhla_hf.layers.window import grid_window_attention


TOKENS = 31500 * 12 * 128 * 2
"""Bytes of q at the Wan shape."""

HALF_SUMMARIES = 150 * 12 * 128 * 128 * 2


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_tables_of_the_documentation_are_those_that_are_computed(page):
    text = page.read_text(encoding="utf-8")
    assert with_tables(text) == text, "run python -m benchmarks.predictions --write"


def test_every_table_is_in_the_documentation():
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    assert all(f"<!-- predictions: {name} -->" in text for name in SECTIONS)


def test_bytes_by_hand():
    problem = Problem(shape=SHAPES["wan"])
    summaries, mixing, outputs = block_forward(problem)
    weights = 150 * 150 * 4
    assert problem.memory(summaries, False, cached=False) == 2 * TOKENS + HALF_SUMMARIES
    assert problem.memory(mixing, False, cached=False) == 2 * HALF_SUMMARIES + weights
    assert problem.memory(outputs, False, cached=True) == 2 * TOKENS
    # Five of eight stages have two tensors of tokens each; summaries, written 4 times and read 7 times, are float32.
    backward = sum(problem.memory(stage, True, cached=False) for stage in block_backward(problem))
    assert backward == 10 * TOKENS + 11 * 2 * HALF_SUMMARIES + 3 * weights
    heads = Problem(shape=SHAPES["wan"], per_head=True)
    assert heads.memory(mixing, False, cached=True) == 12 * weights


def test_time_is_that_of_the_slowest_part():
    problem = Problem(shape=SHAPES["wan"])
    copy, sums = Stage("copy", ("q",), ("o",)), Stage("sums", ("S",), ("S̃",))
    assert problem.seconds(copy, False, cached=True) == pytest.approx(2 * TOKENS / MEMORY_RATE)
    assert problem.seconds(sums, False, cached=True) == pytest.approx(2 * HALF_SUMMARIES / CACHE_RATE)
    again = Stage("again", ("S",), ("S̃",), requests={"S": 3})
    assert problem.seconds(again, False, cached=False) == pytest.approx(4 * HALF_SUMMARIES / CACHE_RATE)
    product = Stage("product", (), (), {"tf32": 395e9})
    assert problem.seconds(product, False, cached=True) == pytest.approx(1e-3)


def test_requests_by_hand():
    # Three tiles of 64 rows read S each, and 128 tiles of columns of 12 heads the weights, 192 x 160 of four bytes.
    problem = Problem(shape=SHAPES["wan"])
    mixing = block_forward(problem)[1]
    weights = 12 * 128 * 192 * 160 * 4
    assert problem.requested(mixing, False) == pytest.approx(3 * HALF_SUMMARIES + weights + HALF_SUMMARIES)
    # Of texts half: for chunks before the own one alone.
    causal = Problem(shape=SHAPES["causal-32k"])
    assert causal.mixing_requests("S")["S"] == 4.5
    # Every head reads the rotary table.
    table = Stage("table", ("table",), ())
    assert problem.requested(table, False) == 12 * problem.memory(table, False, cached=False)


def test_products_by_hand():
    # 150 blocks of 210 slots, padded to 256, for each of 12 heads.
    assert Problem(shape=SHAPES["wan"]).token_products() == 2 * 12 * 150 * 256 * 128 * 128
    # Heads of 72 are padded to 128, blocks of at most 42 slots to 64.
    assert Problem(shape=SHAPES["dit-512"]).token_products() == 2 * 256 * 30 * 64 * 128 * 128
    assert Problem(shape=SHAPES["wan"], features=2).token_products() == 2 * 12 * 150 * 256 * 256 * 128
    # 150 rows padded to 192, as many columns to 160.
    assert Problem(shape=SHAPES["wan"]).mixing_products() == 2 * 12 * 192 * 160 * 128 * 128


@pytest.mark.parametrize("name", CASES)
def test_groups_in_l2_are_never_slower(name):
    assert 0 < CASES[name].seconds(cached=True) <= CASES[name].seconds(cached=False)


def test_choices_are_variants_of_the_recoveries():
    variants = {choice.measured["digits"] for choice in CHOICES}
    assert variants == {*TITLES, *OPTIONS} and len(CHOICES) == len(variants)
    for choice in CHOICES:
        window, changes = OPTIONS.get(choice.measured["digits"], (choice.measured["digits"] == "window", {}))
        assert window == (choice.window is not None)
        assert (changes.get("mhla.window") == "block") == (choice.window == "block")
        assert (changes.get("mhla.mixing_heads") == "shared") != choice.per_head
        assert ("mhla.feature_map" in changes) != choice.hedgehog
        assert ("mhla.lepe_kernel" in changes) != choice.lepe


def test_models_are_slower_with_more_beside_mhla():
    by_title = {choice.title: choice for choice in CHOICES}
    plain, window = by_title["ReLU, shared"], by_title["ReLU, shared, block window"]
    cross = by_title["ReLU, shared, cross window"]
    assert plain.layer_seconds(True) < window.layer_seconds(True) < cross.layer_seconds(True)
    assert cross.layer_seconds(True) < cross.layer_seconds(False)
    assert plain.speedup(True) > window.speedup(True) > window.speedup(True, softmax_layers=10) > 1
    assert plain.speedup(True, softmax_layers=30) == pytest.approx(1)
    missing = choices_table({"digits": {"relu_shared": {"converted": 9.0, "match": 7.25}}})
    assert "| +7.2 % | – |" in missing and missing.count("–") > 20


class Traffic(TorchDispatchMode):
    """Counts the bytes that operations read and write, but for views."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if not function.is_view and "view" not in str(function):
            tensors = [x for x in tree_leaves((args, kwargs, result)) if isinstance(x, torch.Tensor)]
            self.bytes += sum(x.numel() * x.element_size() for x in tensors)
        return result


def test_what_torch_computes_is_counted():
    options = {"device": "meta", "dtype": torch.bfloat16}
    query, key, value = (torch.empty(1, 31500, 12, 128, **options) for _ in range(3))
    convolution = depthwise_convolution(3, 1536, 3).to(**options)
    layout = SHAPES["wan"].layout()

    def lepe():
        return value + convolved_values(convolution, value, layout, 12, None)

    def cross():
        return grid_window_attention(query, key, value, "cross", (1, 3, 3), (21, 30, 50))

    for name, part in (("lepe", lepe), ("cross", cross)):
        with torch.no_grad(), Traffic() as traffic:
            part()
        # Kernels norm and rotate queries and keys, and add up in the end.
        others = 4 + 3 if name == "cross" else 0
        assert traffic.bytes / TOKENS + others == pytest.approx(PARTS[name].eager, rel=0.02)


def test_measured_times_enter_the_table():
    line = next(line for line in target_table({"wan none": 0.153}).splitlines() if line.startswith("| wan none |"))
    assert line.endswith("| 160 µs | 153 µs |")
