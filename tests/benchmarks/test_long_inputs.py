# SPDX-License-Identifier: Apache-2.0
"""Measurements over very long inputs: their blocks, and their reference."""

from __future__ import annotations

import pytest
import torch

from benchmarks.experiments.long_inputs_cases import (
    GRIDS,
    contestant_shapes,
    measure_breakdown,
    measure_errors,
)


pytestmark = pytest.mark.slow


DEVICE = torch.device("cpu")


@pytest.mark.parametrize("tokens", GRIDS)
@pytest.mark.parametrize("causal", [False, True])
def test_blocks_cover_the_tokens_evenly(tokens, causal):
    shapes = contestant_shapes(tokens, 1, 8, causal)
    assert set(shapes) == {"softmax", "linear", "mhla", "mhla_fixed", *(["mhla_chunk"] if causal else [])}
    assert all(shape.tokens == tokens and shape.causal == causal for shape in shapes.values())
    root = shapes["mhla"].layout()
    assert root.is_uniform and root.num_blocks**2 <= tokens < 16 * root.num_blocks**2
    assert shapes["mhla_fixed"].layout().num_blocks == 64


def test_errors_are_those_of_rounding():
    rows = measure_errors(lengths=[256], width=8, dtypes=["float64", "float32"], num_rows=16, device=DEVICE)["rows"]
    assert len(rows) == 2 * (4 + 5)
    for row in rows:
        # Causal linear attention sums in float32 whatever its inputs are.
        exact = row["dtype"] == "float64" and row["attention"] != "linear"
        assert row["error"] < (1e-13 if exact else 1e-5), row


def test_breakdown_shows_what_it_is_for():
    found = measure_breakdown(
        lengths=[256, 1024], width=8, block_tokens=256, scales=[1.0, 1e-5], many_blocks=[[1, 1, 1], [2, 2, 2]],
        seconds=0.01, device=DEVICE,
    )  # fmt: skip
    outputs = {(row["attention"], row["tokens"]): row["output"] for row in found["magnitudes"]}
    grown = {name: outputs[name, 1024] / outputs[name, 256] for name in ("mhla", "mhla_fixed", "mhla_chunk")}
    assert grown == pytest.approx({"mhla": 2, "mhla_fixed": 4, "mhla_chunk": 1}, rel=0.1)
    assert found["eps"][0]["output"] == pytest.approx(1, abs=0.05) and found["eps"][1]["output"] < 0.5
    assert [row["blocks"] for row in found["many_blocks"]] == [1, 8]
