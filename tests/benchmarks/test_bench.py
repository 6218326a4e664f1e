# SPDX-License-Identifier: Apache-2.0
"""`mhla-hf bench`: attention against the naive form, rows and reasons of reports, memory, and the commands."""

from __future__ import annotations

import json
import time
from functools import partial
from itertools import groupby

import pytest
import torch

from mhla_hf import bench, mhla_attention
from mhla_hf.bench import (
    EPS,
    MODEL_CASES,
    MODELS,
    OPERATORS,
    SHAPES,
    BenchOptions,
    ModelCase,
    OperatorShape,
    attend,
    choose_cases,
    make_inputs,
    measure_models,
    measure_operator,
    peak_memory,
    run_operator,
    time_in_rounds,
)
from tests.command_line import run_command


CPU = torch.device("cpu")
FLAT = OperatorShape(2, 3, 8, (4, 6), (2, 2))
CAUSAL = OperatorShape(1, 2, 8, (32,), chunk=8)
DIT = ModelCase("dit-s-2-256", {"num_layers": 2, "num_attention_heads": 2, "sample_size": 8}, (4, 4))
FIGURES = {"milliseconds", "milliseconds_20", "milliseconds_80", "runs", "peak_memory_bytes"}


@pytest.fixture(autouse=True)
def cases(monkeypatch):
    """Tiny cases beside those of models, and small sets of inputs."""
    monkeypatch.setattr(bench, "_INPUT_BYTES", 1 << 16)
    monkeypatch.setattr(bench, "SHAPES", {**SHAPES, "flat": FLAT, "causal": CAUSAL})
    monkeypatch.setattr(bench, "MODEL_CASES", {**MODEL_CASES, "dit": DIT})


def fast(**options) -> BenchOptions:
    return BenchOptions(device="cpu", seconds=0.05, quick=True, **options)


def test_sizes_are_those_of_the_models():
    tokens = {"wan": 31500, "wan-720p": 75600, "dit-512": 1024, "sana-2048": 4096, "causal-128k": 131072}
    assert {name: SHAPES[name].tokens for name in tokens} == tokens
    assert SHAPES["wan"].layout().num_blocks == 150
    assert SHAPES["sana-1024"].heads * SHAPES["sana-1024"].width == 2240
    assert (SHAPES["causal-2k"].batch, SHAPES["causal-32k"].batch) == (8, 1)
    tokens = {"wan": 31500, "dit-256": 256, "dit-512": 1024, "sana-1024": 1024, "wan-small": 1600}
    assert {name: MODEL_CASES[name].tokens for name in tokens} == tokens


@pytest.mark.parametrize("known", [SHAPES, MODEL_CASES], ids=["shapes", "models"])
def test_devices_have_cases_of_their_own(known):
    small = choose_cases("cases", known, None, CPU)
    large = choose_cases("cases", known, None, torch.device("cuda"))
    assert sorted([*small, *large]) == sorted(known) and all(name.endswith("-small") for name in small)
    assert choose_cases("cases", known, None, CPU, quick=True) == small[:1]


@pytest.mark.parametrize("normalizer", ["none", "query"])
@pytest.mark.parametrize("shape", [FLAT, CAUSAL], ids=["flat", "causal"])
def test_contestants_compute_what_they_are_called(shape, normalizer):
    inputs = make_inputs(shape, torch.float64, CPU, seed=3)
    assert inputs.query.min() > 0 and inputs.key.min() > 0
    options = {"normalizer": normalizer, "causal": shape.causal, "eps": EPS, "backend": "naive"}
    expected = mhla_attention(*inputs[:3], inputs.mixing.double(), shape.layout(), **options)
    torch.testing.assert_close(attend("mhla-torch", inputs, shape, normalizer), expected)
    linear = mhla_attention(*inputs[:3], torch.ones_like(inputs.mixing).double(), shape.layout(), **options)
    got = attend("linear", inputs, shape, normalizer)
    torch.testing.assert_close(got, linear, rtol=1e-5, atol=1e-5)
    scores = torch.einsum("bthk,bshk->bhts", inputs.query, inputs.key) / shape.width**0.5
    if shape.causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), float("-inf"))
    softmax = torch.einsum("bhts,bshv->bthv", scores.softmax(-1), inputs.value)
    torch.testing.assert_close(attend("softmax", inputs, shape, None), softmax)


def test_a_backward_pass_returns_gradients():
    inputs = make_inputs(FLAT, torch.float32, CPU, seed=3)
    output, *gradients = run_operator(lambda inputs: attend("mhla-torch", inputs, FLAT, "query"), inputs, True)
    assert not output.requires_grad and [x.shape for x in gradients] == [x.shape for x in inputs[:4]]
    softmax = run_operator(lambda inputs: attend("softmax", inputs, FLAT, None), inputs, True)
    assert softmax[-1] is None and len(run_operator(lambda inputs: inputs.value, inputs, False)) == 1


def test_rows_of_the_operator():
    report = measure_operator(fast(), shapes=["flat", "causal"])
    rows = report["results"]
    assert len(rows) == 2 * 2 * 9 and {row["contestant"] for row in rows} == set(OPERATORS)
    for row in rows:
        if row["reason"] is not None:
            assert not FIGURES & set(row) and "runs on GPUs only" in row["reason"]
            continue
        assert row["milliseconds_20"] <= row["milliseconds"] <= row["milliseconds_80"] and row["runs"] >= 3
        case = ("shape", "direction")
        (softmax,) = (
            other["milliseconds"]
            for other in rows
            if other["contestant"] == "softmax" and [other[key] for key in case] == [row[key] for key in case]
        )
        assert row["speedup_over_softmax"] == pytest.approx(softmax / row["milliseconds"])
    assert {row["contestant"] for row in rows if row["reason"] is None} == {"mhla-torch", "softmax", "linear"}
    assert rows[0]["blocks"] == (2, 2) and report["options"]["dtype"] == "float32"
    json.dumps(report)


def test_runs_take_other_inputs():
    sets = bench._input_sets(FLAT, torch.float64, CPU)
    queries = [next(sets).query.sum().item() for _ in range(4)]
    assert len(set(queries)) > 1


@pytest.mark.slow
def test_what_fails_is_a_row_and_the_others_go_on(monkeypatch):
    def explode(*arguments):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate much.")

    monkeypatch.setattr(bench, "_linear", explode)
    rows = measure_operator(fast(), ["flat"], ["linear", "mhla-torch"])["results"]
    assert [row["reason"] for row in rows[:4]] == ["OutOfMemoryError: CUDA out of memory"] * 2 + [None] * 2
    assert all("speedup_over_softmax" not in row for row in rows)


def test_failures_after_the_first_round_count_too():
    calls = iter(range(20))
    times = time_in_rounds({"a": lambda: next(calls), "b": lambda: time.sleep(1e-3)}, CPU, seconds=0.05, rounds=50)
    assert times["a"] == "StopIteration" and times["b"]["runs"] >= 50


def test_contestants_take_turns():
    order: list[str] = []

    def run(name: str) -> None:
        order.append(name)
        time.sleep(1e-3)

    times = time_in_rounds({name: partial(run, name) for name in "ab"}, CPU, seconds=0.06, rounds=3)
    assert [name for name, _ in groupby(order)] == ["a", "b", "a", "b", "a", "b"]
    assert all(figures["milliseconds"] > 1 for figures in times.values())


def test_peak_memory_is_beyond_what_comes_out():
    tensor = torch.ones(1000)

    def run() -> torch.Tensor:
        wide = tensor.expand(4, 1000).contiguous() + 1
        return wide[0] + wide[1]

    # Two tensors of 4 · 1000 numbers of four bytes at a time, then one of them and the result.
    assert 32_000 <= peak_memory(run, CPU) + 4000 <= 33_000
    assert peak_memory(lambda: tensor + 1, CPU) < 100


def test_rows_of_models():
    rows = {row["contestant"]: row for row in measure_models(fast(), ["dit"])["results"]}
    assert list(rows) == list(MODELS) and "runs on GPUs only" in rows["mhla-triton"]["reason"]
    assert (rows["ordinary"]["attention"], rows["mhla-torch"]["attention"]) == ("softmax", "mhla")
    for row in (rows["ordinary"], rows["mhla-torch"]):
        assert row["reason"] is None and set(row) >= FIGURES
        ratio = rows["ordinary"]["milliseconds"] / row["milliseconds"]
        assert row["speedup_over_ordinary"] == pytest.approx(ratio)


@pytest.mark.slow
def test_half_precision_and_compiled_blocks():
    (row,) = measure_models(fast(dtype="bfloat16"), ["dit"], ["mhla-torch"], compile_backend="aot_eager")["results"]
    assert row["reason"] is None, row["reason"]
    assert "speedup_over_ordinary" not in row


def test_models_that_fail_are_rows(monkeypatch):
    monkeypatch.setitem(bench.MODEL_CASES, "wrong", ModelCase("dit-s-2-256", {"norm_type": "layer"}, (4, 8, 8)))
    first, second = measure_models(fast(), ["wrong", "dit"], ["ordinary"])["results"]
    assert first["reason"].startswith("NotImplementedError: ") and second["reason"] is None


@pytest.mark.parametrize(
    ("command", "chosen", "shown"),
    [
        ("op", ["--shapes", "flat"], "fwd+bwd"),
        ("model", ["--models", "dit"], "ordinary"),
    ],
)
def test_commands(command, chosen, shown, tmp_path):
    file = tmp_path / "new" / "report.json"
    options = "--quick", "--device", "cpu", "--seconds", "0.01", "--json", file
    result = run_command("bench", command, *chosen, *options)
    assert json.loads(file.read_text())["benchmark"] == command
    assert shown in result.stdout and "not measured: mhla-triton: runs on GPUs only, not on cpu" in result.stdout
    assert f"measuring {chosen[1]}" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["op", "--shapes", "wan,flux"], "'flux' is not one of 'wan', "),
        (["op", "--contestants", "mamba"], "'mamba' is not one of 'mhla-torch', "),
        (["op", "--seconds", "nan"], "nan must be finite and positive"),
        (["model", "--models", "flux"], "'flux' is not one of 'wan', "),
        (["model", "--contestants", "softmax"], "'softmax' is not one of 'ordinary', "),
    ],
)
def test_mistakes_are_one_line(arguments, message):
    result = run_command("bench", *arguments, code=None, columns=400)
    assert result.exit_code != 0 and result.stdout == ""
    assert message in result.stderr


def test_the_environment_must_not_decide(monkeypatch):
    monkeypatch.setenv("MHLA_HF_BACKEND", "torch")
    with pytest.raises(ValueError, match="MHLA_HF_BACKEND is set"):
        BenchOptions(device="cpu")


@pytest.mark.gpu
def test_kernels_are_measured_on_a_gpu(monkeypatch):
    monkeypatch.setitem(bench.SHAPES, "flat", OperatorShape(4, 3, 64, (4, 6), (2, 2)))
    options = BenchOptions(device="cuda", seconds=0.1, quick=True)
    rows = measure_operator(options, ["flat"], ["mhla-torch", "mhla-triton", "softmax-flash", "linear"])["results"]
    assert all(row["reason"] is None and row["milliseconds"] > 0 for row in rows)
