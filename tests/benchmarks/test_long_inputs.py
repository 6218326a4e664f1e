# SPDX-License-Identifier: Apache-2.0
"""Measurements over very long inputs: their blocks, their reference, and what is made of their figures."""

from __future__ import annotations

import pytest
import torch

from benchmarks.experiments import long_inputs, long_inputs_cases
from benchmarks.experiments.long_inputs_cases import (
    GRIDS,
    contestant_shapes,
    measure_breakdown,
    measure_errors,
    measure_times,
)
from mhla_hf.bench import attend


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


def test_failures_are_named(monkeypatch):
    def fails(name, *arguments):
        if name.startswith("mhla"):
            raise RuntimeError("too large")
        return attend(name, *arguments)

    monkeypatch.setattr(long_inputs_cases, "attend", fails)
    times = measure_times(
        lengths=[256, 512], heads=1, width=8, dtype="float32", seconds=0.02, longest_seconds=1.0, device=DEVICE
    )
    assert all(("failed" in row) == row["attention"].startswith("mhla") for row in times["rows"])
    assert times["rows"][2]["failed"] == "RuntimeError: too large"
    result = {"times": times, "errors": {"rows": []}, "breakdown": {}}
    summary = long_inputs.EXPERIMENT.summarize({"all": result})
    lines = long_inputs._time_table(summary).splitlines()[2:]
    assert [line.count("failed / failed") for line in lines] == [0, 0, 2, 2, 0, 0, 2, 2, 2]
