# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.decode`, `.training` and `.quality_dit`: reports, files, and cache memory by hand."""

from __future__ import annotations

import json
import sys

import pytest

from benchmarks import block_order, decode, plots, training
from benchmarks.decode import DecodeOptions, measure_decoding
from benchmarks.plots import plot_report
from benchmarks.quality_dit import __main__ as quality_dit
from benchmarks.training import measure_training
from mhla_hf.bench import BenchOptions, OperatorShape
from tests import ROOT


pytestmark = pytest.mark.slow

# Two layers, four query and two key/value heads of width 8, blocks of 16 tokens.
TINY = {
    "hidden_size": 32, "layers": 2, "heads": 4, "kv_heads": 2, "block_size": 16, "contexts": (32, 64), "tokens": 3,
    "warmup": 1, "device": "cpu",
}  # fmt: skip
LAYERS, KV_HEADS, WIDTH, KEPT = 2, 2, 8, 64
PROGRAMS = {"decode": decode.main, "training": training.main, "quality_dit": quality_dit.main}


def kv_bytes(tokens: int, width: int) -> int:
    return LAYERS * 2 * KV_HEADS * tokens * WIDTH * width


def mhla_bytes(blocks: int, width: int, features: int) -> int:
    """Finished blocks and the last keys and values of `width` bytes a number; the rest in fp32, a position and a hash.

    The rest: three running summaries and the last tokens' features, rotated and not, with a flag for each token.
    """
    summary = KV_HEADS * features * (WIDTH + 1)
    last = KEPT * (KV_HEADS * (2 * features * 4 + 2 * WIDTH * width) + 1)
    return LAYERS * (blocks * summary * width + 3 * summary * 4 + 2 * 8 + last)


@pytest.mark.parametrize(
    ("cache", "dtype", "feature_map", "kv_tokens", "blocks"),
    # A static cache has room for the decoded tokens, and hedgehog features are twice as wide as keys.
    [("dynamic", "float32", "relu", (32, 64), (2, 4)), ("static", "bfloat16", "hedgehog", (36, 68), (3, 5))],
)
def test_memory_of_caches(cache, dtype, feature_map, kv_tokens, blocks):
    options = DecodeOptions(**TINY, cache=cache, dtypes=(dtype,), feature_map=feature_map)
    report = measure_decoding(options)
    size, features = (4, WIDTH) if dtype == "float32" else (2, 2 * WIDTH)
    for row, tokens, count in zip(report["results"], kv_tokens, blocks, strict=True):
        assert row["mhla"]["cache_bytes"] == mhla_bytes(count, size, features)
        assert row["softmax"]["cache_bytes"] == kv_bytes(tokens, size)
        assert row["mhla"]["summary_dtype"] == dtype and row["mhla"]["seconds_per_token"] > 0
    assert report["model"]["mhla_layers"] == 2 and set(report["growth"]) == {dtype}


def test_a_training_step(tmp_path):
    options = BenchOptions(device="cpu", seconds=0.05, quick=True)
    report = measure_training(options, models=["sana-1024-small"], optimizer=True)
    rows = {row["contestant"]: row for row in report["results"]}
    assert report["benchmark"] == "train" and report["options"]["checkpointing"] is True
    assert rows["mhla-torch"]["milliseconds"] > 0 and rows["mhla-torch"]["peak_memory_bytes"] > 0
    plot_report(report, tmp_path / "train.png")
    assert (tmp_path / "train.png").read_bytes().startswith(b"\x89PNG")


def test_block_order(monkeypatch):
    monkeypatch.setattr(block_order, "SHAPES", {"tiny": OperatorShape(1, 2, 8, (2, 4, 6), (1, 2, 3))})
    monkeypatch.setattr(block_order, "GRID", (2, 4, 6))
    monkeypatch.setattr(block_order, "BLOCKS", (1, 2, 3))
    rows = block_order.run(seconds=0.01)["results"]
    assert len(rows) == 16 and all(row["ms"] > 0 and row["ratio"] > 0 for row in rows)


def test_stored_results_can_be_plotted(tmp_path):
    results = ROOT / "benchmarks" / "results"
    stored = sorted((*results.glob("decode-*.json"), *results.glob("op-*.json")))
    for path in stored:
        plots.main([str(path), str(tmp_path / path.with_suffix(".png").name)])
    assert len(list(tmp_path.iterdir())) == len(stored) > 1


@pytest.mark.parametrize(
    ("program", "arguments", "shown"),
    [
        ("decode", "--hidden-size 32 --layers 2 --contexts 64,32 --tokens 2 --block-size 16", "from 32 to 64 tokens"),
        ("training", "--models sana-1024-small --quick --seconds 0.05", "ordinary"),
        ("quality_dit", "--setting smoke --seeds 0 --quiet", "mhla_cpe_gate"),
    ],
)
def test_programs(program, arguments, shown, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    files = [] if program == "quality_dit" else ["--json", "report.json"]
    monkeypatch.setattr(sys, "argv", [program, *arguments.split(), "--device", "cpu", *files])
    PROGRAMS[program]()
    assert shown in capsys.readouterr().out
    assert json.loads(next(tmp_path.glob("*.json")).read_text())["results" if files else "runs"]


@pytest.mark.parametrize(
    ("program", "arguments", "message"),
    [
        ("decode", "--cache paged", "error: cache='paged' is not one of"),
        ("decode", "--contexts 1", "error: contexts=(1,) must be numbers of at least 2"),
        ("training", "--models flux", "error: models='flux' is not one of"),
        ("quality_dit", "--steps 0", "error: steps=0 must be at least 1"),
    ],
)
def test_mistakes_are_one_line(program, arguments, message, monkeypatch):
    monkeypatch.setattr(sys, "argv", [program, *arguments.split()])
    with pytest.raises(SystemExit) as stop:
        PROGRAMS[program]()
    assert str(stop.value.code).startswith(message)
