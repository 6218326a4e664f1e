# SPDX-License-Identifier: Apache-2.0
"""`mhla-hf bench op`: its arithmetic against counts by hand and by torch, its contestants against the naive form."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from itertools import cycle, groupby

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode
from typer.testing import CliRunner

from mhla_hf.benchmarks.attention import EPS, make_inputs, mhla_path
from mhla_hf.benchmarks.contestants import CONTESTANTS, REQUIREMENTS, Contestant
from mhla_hf.benchmarks.measuring import copy_bandwidth, fill_rows, held_bytes, peak_memory, time_in_rounds
from mhla_hf.benchmarks.operator import OperatorOptions, _input_sets, _run, measure_operator
from mhla_hf.benchmarks.plots import plot_report
from mhla_hf.benchmarks.shapes import SHAPES, OperatorShape, choose_cases
from mhla_hf.cli.main import app
from mhla_hf.ops import naive_mhla_attention
from mhla_hf.utils.machine import choose_device, last_cache_bytes, machine_facts
from tests import ROOT


CPU = torch.device("cpu")
FLAT = OperatorShape(name="flat", group="one", batch=2, heads=3, width=8, grid=(4, 6), blocks=(2, 2))
CAUSAL = OperatorShape(name="causal", group="two", batch=1, heads=2, width=8, grid=(32,), chunk=8)
FIGURES = {
    "milliseconds",
    "milliseconds_20",
    "milliseconds_80",
    "host_milliseconds",
    "teraflops_per_second",
    "gigabytes_per_second",
    "floor_milliseconds",
    "share_of_floor",
}


def inputs_of(shape: OperatorShape, dtype: torch.dtype = torch.float64):
    return make_inputs(shape, dtype, CPU, seed=3)


@pytest.fixture(scope="module")
def report():
    options = OperatorOptions(device="cpu", seconds=0.05, rounds=3, quick=True)
    return measure_operator(options, shapes=[FLAT, CAUSAL])


def test_sizes_are_those_of_the_models():
    tokens = {"wan": 31500, "wan-720p": 75600, "dit-512": 1024, "sana-2048": 4096, "causal-128k": 131072}
    assert {name: SHAPES[name].tokens for name in tokens} == tokens
    assert SHAPES["wan"].layout().num_blocks == 150
    assert SHAPES["wan"].layout().is_uniform and SHAPES["wan-720p"].layout().is_uniform
    assert SHAPES["sana-1024"].heads * SHAPES["sana-1024"].width == 2240
    assert {shape.batch * shape.tokens for shape in SHAPES.values() if shape.name in ("causal-2k", "causal-16k")} == {
        16384
    }
    # 31,500 tokens of 12 heads of 128 numbers of two bytes are 96.8 MB, four times for q, k, v and o.
    assert SHAPES["wan"].least_bytes(torch.bfloat16, False) == 4 * 96_768_000
    assert SHAPES["wan"].least_bytes(torch.bfloat16, True) == 8 * 96_768_000


def test_devices_have_shapes_of_their_own():
    small = choose_cases("shapes", SHAPES, None, CPU, quick=False)
    large = choose_cases("shapes", SHAPES, None, torch.device("cuda"), quick=False)
    assert all(shape.name.endswith("-small") for shape in small)
    assert sorted([*(shape.name for shape in small), *(shape.name for shape in large)]) == sorted(SHAPES)
    for shapes, device in ((small, "cpu"), (large, "cuda")):
        quick = choose_cases("shapes", SHAPES, None, torch.device(device), quick=True)
        assert 0 < len(quick) < len(shapes)


@pytest.mark.parametrize("shape", [FLAT, CAUSAL], ids=lambda shape: shape.name)
def test_operations_agree_with_torchs_count(shape):
    inputs = inputs_of(shape, torch.float32)
    for name, family in (("mhla-torch", "mhla"), ("linear", "linear"), ("softmax-math", "softmax")):
        with FlopCounterMode(display=False) as counter:
            CONTESTANTS[name].attend(inputs, shape, "none", "eager")
        # torch computes both triangles where half of the products count: the scores of a chunk, and softmax's.
        half = 0
        if shape.causal:
            length = shape.tokens if family == "softmax" else shape.chunk
            half = 2 * shape.rows * shape.tokens * length * shape.width
        mixing = 0
        if shape.causal and family == "mhla":
            mixing = shape.rows * shape.layout().num_blocks ** 2 * shape.width**2
        # Within a hundredth: causal MHLA multiplies flags of bad tokens too.
        assert counter.get_total_flops() == pytest.approx(shape.flops(family, False) + half + mixing, rel=0.01)


def test_operations_by_hand():
    # 6 heads of 24 tokens: summaries and products with queries of 2 · 24 · 64 each, four blocks mixed by 2 · 16 · 64.
    assert FLAT.flops("linear", False) == 6 * 4 * 24 * 64
    assert FLAT.flops("mhla", False) == 6 * (4 * 24 * 64 + 2 * 16 * 64)
    assert FLAT.flops("softmax", False) == 6 * 4 * 24 * 24 * 8
    assert FLAT.flops("mhla", True) == 3 * FLAT.flops("mhla", False)
    assert FLAT.flops("softmax", True) == 3.5 * FLAT.flops("softmax", False)
    assert CAUSAL.flops("softmax", False) == 2 * 2 * 32 * 32 * 8


@pytest.mark.parametrize("normalizer", ["none", "query"])
@pytest.mark.parametrize("shape", [FLAT, CAUSAL], ids=lambda shape: shape.name)
def test_contestants_compute_what_they_are_called(shape, normalizer):
    inputs = inputs_of(shape)
    options = {"normalizer": normalizer, "causal": shape.causal, "eps": EPS}
    expected = naive_mhla_attention(*inputs.tokens, inputs.mixing.double(), shape.layout(), **options)
    got = CONTESTANTS["mhla-torch"].attend(inputs, shape, normalizer, "eager")
    torch.testing.assert_close(got, expected)
    compiled = CONTESTANTS["mhla-compiled"].attend(inputs, shape, normalizer, "aot_eager")
    torch.testing.assert_close(compiled, expected)
    weights = torch.ones_like(inputs.mixing).double()
    linear = naive_mhla_attention(*inputs.tokens, weights, shape.layout(), **options)
    got = CONTESTANTS["linear"].attend(inputs, shape, normalizer, "eager")
    torch.testing.assert_close(got, linear, rtol=1e-5, atol=1e-5)
    scores = torch.einsum("bthk,bshk->bhts", inputs.query, inputs.key) / shape.width**0.5
    if shape.causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), float("-inf"))
    softmax = torch.einsum("bhts,bshv->bthv", scores.softmax(-1), inputs.value)
    for name in ("softmax", "softmax-math"):
        torch.testing.assert_close(CONTESTANTS[name].attend(inputs, shape, None, "eager"), softmax)


def test_kernels_compute_it_too_but_are_not_timed_on_a_cpu():
    inputs = inputs_of(FLAT, torch.float32)
    expected = CONTESTANTS["mhla-torch"].attend(inputs, FLAT, "query", "eager")
    got = CONTESTANTS["mhla-triton"].attend(inputs, FLAT, "query", "eager")
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    assert "run on GPUs" in (CONTESTANTS["mhla-triton"].obstacle(FLAT, torch.float32, CPU) or "")


@pytest.mark.parametrize("normalizer", ["none", "query"])
def test_whole_paths_compute_the_same(normalizer):
    inputs = inputs_of(FLAT, torch.float32)
    expected = mhla_path(inputs, FLAT, normalizer, backend="torch")
    for fused in (False, True):
        got = mhla_path(inputs, FLAT, normalizer, backend="triton", fused=fused)
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    for backend in ("torch", "triton"):
        got = CONTESTANTS[f"mhla-path-hedgehog-{backend}"].attend(inputs, FLAT, normalizer, "eager")
        torch.testing.assert_close(got, hedgehog_by_hand(inputs, normalizer), rtol=1e-4, atol=1e-4)
    assert REQUIREMENTS["fused"](FLAT, torch.float32, CPU) is None
    assert "too wide" in (REQUIREMENTS["fused"](replace(FLAT, width=256), torch.bfloat16, CPU) or "")


def hedgehog_by_hand(inputs, normalizer):
    """Hedgehog features of normed and rotated queries and keys, with W = 1 as it is in a new layer."""
    tokens = [F.rms_norm(x.flatten(2), (24,), eps=EPS).unflatten(2, (3, 8)) for x in inputs.tokens[:2]]
    angles = (torch.arange(24)[:, None] * torch.linspace(1, 0, 4))[:, None]
    cosine, sine = angles.cos(), angles.sin()
    for index, x in enumerate(tokens):
        even, odd = x[..., ::2], x[..., 1::2]
        turned = torch.stack((even * cosine - odd * sine, even * sine + odd * cosine), -1).flatten(-2)
        tokens[index] = torch.cat((turned, -turned), -1).softmax(-1)
    options = {"normalizer": normalizer, "causal": False, "eps": EPS}
    return naive_mhla_attention(*tokens, inputs.value, inputs.mixing, FLAT.layout(), **options)


def test_kernels_that_failed_their_check_are_not_timed(monkeypatch):
    monkeypatch.setattr("mhla_hf.benchmarks.contestants.kernels_pass", lambda family, *tokens: family == "block")
    requirement = REQUIREMENTS["fused"](FLAT, torch.float32, CPU)
    assert requirement == "the fused kernels failed their check (mhla-hf doctor --kernels)"


def test_whole_path_of_softmax_norms_and_rotates():
    inputs = inputs_of(FLAT)
    query, key = (F.rms_norm(x.flatten(2), (24,), eps=EPS).unflatten(2, (3, 8)) for x in inputs.tokens[:2])
    angles = torch.arange(24)[:, None] * torch.linspace(1, 0, 4)
    turns = torch.polar(torch.ones(24, 4), angles)[:, None].to(torch.complex128)
    query, key = (
        torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (4, 2))) * turns).flatten(-2) for x in (query, key)
    )
    expected = CONTESTANTS["softmax"].attend(replace(inputs, query=query, key=key), FLAT, None, "eager")
    got = CONTESTANTS["softmax-path"].attend(inputs, FLAT, None, "eager")
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)


def test_features_are_positive_and_mixing_looks_back():
    inputs = inputs_of(CAUSAL)
    assert inputs.query.min() > 0 and inputs.key.min() > 0
    assert inputs.mixing.triu(1).abs().max() == 0
    torch.testing.assert_close(inputs.mixing.sum(-1), torch.ones(4))
    assert inputs_of(FLAT).mixing.shape == (4, 4)
    assert not torch.equal(inputs.query, make_inputs(CAUSAL, torch.float64, CPU, seed=4).query)


def test_rows(report):
    usual = [contestant for contestant in CONTESTANTS.values() if contestant.usual]
    assert len(report["results"]) == 2 * 2 * sum(len(contestant.normalizers) for contestant in usual)
    assert report["copy_bandwidth"] > 0
    for row in report["results"]:
        if row["reason"] is not None:
            assert not FIGURES & set(row)
            continue
        assert all(row[name] > 0 for name in FIGURES)
        assert row["milliseconds_20"] <= row["milliseconds"] <= row["milliseconds_80"]
        assert row["runs"] >= 3
        shape = {"flat": FLAT, "causal": CAUSAL}[row["shape"]]
        backward = row["direction"] == "forward+backward"
        seconds, moved = row["milliseconds"] / 1e3, shape.least_bytes(torch.float32, backward)
        family = CONTESTANTS[row["contestant"]].family
        assert row["teraflops_per_second"] == pytest.approx(shape.flops(family, backward) / seconds / 1e12)
        assert row["gigabytes_per_second"] == pytest.approx(moved / seconds / 1e9)
        assert row["share_of_floor"] == pytest.approx(moved / report["copy_bandwidth"] / seconds)
        assert row["peak_memory_bytes"] >= 0
        path = CONTESTANTS[row["contestant"]].whole_path
        best = min(
            other["milliseconds"]
            for other in report["results"]
            if other["contestant"] == ("softmax-path" if path else "softmax")
            and other["reason"] is None
            and (other["shape"], other["direction"]) == (row["shape"], row["direction"])
        )
        assert row["speedup_over_softmax"] == pytest.approx(best / row["milliseconds"])
    measured = {row["contestant"] for row in report["results"] if row["reason"] is None}
    assert measured == {"mhla-torch", "softmax", "linear", "mhla-path-torch", "softmax-path"}


def test_absent_contestants_say_why(report):
    reasons = {(row["contestant"], row["shape"]): row["reason"] for row in report["results"]}
    assert "run on GPUs" in reasons["mhla-triton", "flat"]
    assert "runs on GPUs only" in reasons["softmax-cudnn", "causal"]
    assert reasons["fla-linear", "flat"] == "causal attention only"
    assert reasons["mhla-path-torch", "causal"] == "attention in both directions only"
    assert "run on GPUs" in reasons["mhla-path-fused", "flat"]
    assert reasons["fla-simple-gla", "causal"] is not None


def test_contestants_that_fail_are_rows_and_others_go_on(monkeypatch):
    def explode(*arguments):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate much.")

    monkeypatch.setitem(CONTESTANTS, "broken", Contestant("broken", "softmax", explode, normalizers=(None,)))
    options = OperatorOptions(device="cpu", contestants=("broken", "linear"), seconds=0.01, quick=True)
    report = measure_operator(options, shapes=[FLAT])
    assert [row["reason"] for row in report["results"] if row["contestant"] == "broken"] == [
        "OutOfMemoryError: CUDA out of memory"
    ] * 2
    linear = [row for row in report["results"] if row["contestant"] == "linear"]
    assert all(row["milliseconds"] > 0 and row["speedup_over_softmax"] is None for row in linear)


def test_inputs_that_do_not_fit_are_reasons():
    huge = replace(FLAT, name="huge", batch=1 << 40)
    report = measure_operator(OperatorOptions(device="cpu", seconds=0.01, quick=True), shapes=[huge, FLAT])
    reasons = {(row["shape"], row["contestant"]): row["reason"] for row in report["results"]}
    assert reasons["huge", "linear"].startswith("RuntimeError: ")
    assert reasons["flat", "linear"] is None


def test_the_environment_must_not_decide(monkeypatch):
    monkeypatch.setenv("MHLA_HF_BACKEND", "torch")
    with pytest.raises(ValueError, match="MHLA_HF_BACKEND is set"):
        measure_operator(OperatorOptions(device="cpu"), shapes=[FLAT])


def test_failures_after_the_first_round_count_too():
    calls = {"a": 0}

    def fail_later() -> None:
        calls["a"] += 1
        if calls["a"] > 20:
            raise RuntimeError("no more")

    times = time_in_rounds({"a": fail_later, "b": lambda: time.sleep(1e-3)}, CPU, seconds=0.05, rounds=100)
    assert times["a"] == "RuntimeError: no more"
    assert times["b"]["runs"] >= 100


def test_contestants_take_turns():
    order: list[str] = []

    def run(name: str) -> None:
        order.append(name)
        time.sleep(1e-3)

    times = time_in_rounds({name: partial(run, name) for name in "ab"}, CPU, seconds=0.06, rounds=3)
    assert [name for name, _ in groupby(order)] == ["a", "b", "a", "b", "a", "b"]
    for figures in times.values():
        assert figures["runs"] >= 3
        assert 1 < figures["milliseconds_20"] <= figures["milliseconds"] <= figures["milliseconds_80"]


def test_runs_take_other_inputs():
    seen: list[float] = []
    contestant = Contestant(
        "spy", "softmax", lambda inputs, *_: seen.append(inputs.query.sum().item()) or inputs.value
    )
    sets = _input_sets(FLAT, torch.float64, CPU, backward=False)
    assert 2 <= len(sets) <= 32
    turns = cycle(sets)
    for _ in range(len(sets) + 1):
        _run(contestant, (FLAT, None, "eager"), turns, False)
    assert len(set(seen)) == len(sets) and seen[-1] == seen[0]


def test_a_device_that_fails_leaves_a_reason_in_every_row():
    """As after a fault in a kernel, when a GPU refuses all further work."""
    rows: dict[str, dict] = {"a": {"reason": None}, "b": {"reason": "cannot run"}}
    fill_rows(rows, {"a": lambda: torch.ones(1)}, torch.device("cuda:99"), OperatorOptions(device="cpu"))
    assert rows["a"]["reason"] and "milliseconds" not in rows["a"]
    assert rows["b"] == {"reason": "cannot run"}


def test_peak_memory_is_beyond_what_comes_out():
    tensor = torch.ones(1000)

    def run() -> torch.Tensor:
        wide = tensor.expand(4, 1000).contiguous() + 1
        return wide[0] + wide[1]

    # Two tensors of 4 · 1000 numbers of four bytes at a time, then one of them and the result.
    assert 32_000 <= peak_memory(run, CPU) + 4000 <= 33_000
    assert peak_memory(lambda: tensor + 1, CPU) < 100
    assert held_bytes((tensor, tensor[:10], None)) == 4000


def test_machine():
    assert copy_bandwidth(CPU, 1 << 20) > 0
    assert last_cache_bytes() > 1 << 16
    facts = machine_facts(CPU)
    assert facts["torch"] == torch.__version__ or facts["torch"] in torch.__version__
    assert {"diffusers", "triton", "date", "device"} <= set(facts)
    for name in ("tpu9", "meta"):
        with pytest.raises(ValueError, match="device="):
            choose_device(name)


def test_backward_is_left_out_on_demand():
    options = OperatorOptions(device="cpu", contestants=("mhla-torch",), backward=False, seconds=0.01, quick=True)
    report = measure_operator(options, shapes=[replace(FLAT, batch=1)])
    assert {row["direction"] for row in report["results"]} == {"forward"}


@pytest.mark.gpu
def test_kernels_are_measured_on_a_gpu():
    contestants = ("mhla-torch", "mhla-triton", "softmax-flash", "linear", "mhla-path-fused", "softmax-path")
    options = OperatorOptions(device="cuda", contestants=contestants, seconds=0.1, quick=True)
    wide = [replace(shape, width=64, batch=4) for shape in (FLAT, CAUSAL)]
    rows = measure_operator(options, shapes=wide)["results"]
    assert {row["contestant"] for row in rows if row["reason"] is None} == set(contestants)
    assert all(row["milliseconds"] > 0 and row["peak_memory_bytes"] >= 0 for row in rows)


def test_plots(report, tmp_path):
    plot_report(report, tmp_path / "op.png")
    assert (tmp_path / "op.png").read_bytes().startswith(b"\x89PNG")
    empty = {**report, "results": [row for row in report["results"] if row["reason"] is not None]}
    with pytest.raises(ValueError, match="would be empty"):
        plot_report(empty, tmp_path / "empty.png")
    assert not (tmp_path / "empty.png").exists()


@pytest.mark.parametrize("name", ["op", "decode"])
def test_stored_results_can_be_plotted(name, tmp_path):
    stored = sorted((ROOT / "benchmarks" / "results").glob(f"{name}-*.json"))
    assert stored
    for path in stored:
        plot_report(json.loads(path.read_text()), tmp_path / "stored.png")
        assert (tmp_path / "stored.png").read_bytes().startswith(b"\x89PNG")


def test_command(tmp_path):
    file, image = tmp_path / "new" / "op.json", tmp_path / "op.png"
    arguments = ["bench", "op", "--quick", "--device", "cpu", "--seconds", "0.01", "--shapes", "dit-256-small"]
    arguments += ["--contestants", "mhla-torch,softmax,fla-linear", "--json", str(file), "--plot", str(image)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    report = json.loads(file.read_text())
    assert (report["benchmark"], report["options"]["dtype"]) == ("op", "float32")
    assert report["shapes"]["dit-256-small"]["num_blocks"] == 16
    assert "dit-256-small, forward+backward: B 2, T 256, H 4, K 72, 16 blocks" in result.stdout
    assert "not measured: fla-linear: causal attention only" in result.stdout
    assert "measuring copy bandwidth" in result.stderr
    assert image.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shapes", "wan,flux"], "shapes='flux' must be one of wan, "),
        (["--contestants", "mamba"], "contestants='mamba' must be one of mhla-torch, "),
        (["--dtype", "int8"], "dtype='int8' must be one of"),
        (["--device", "tpu9"], "device='tpu9' must be cpu"),
        (["--seconds", "0"], "seconds=0.0 must be finite and positive"),
        (["--seconds", "nan"], "seconds=nan must be finite and positive"),
        (["--seconds", "inf"], "seconds=inf must be finite and positive"),
        (["--json", "."], "json='.' is a directory"),
    ],
)
def test_mistakes_are_one_line(arguments, message):
    result = CliRunner().invoke(app, ["bench", "op", *arguments])
    assert result.exit_code == 1
    assert result.stdout == ""
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("script", ["op.py", "wan_forward.py"])
def test_scripts_take_the_same_options(script):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    command = [sys.executable, ROOT / "benchmarks" / script, "--help"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=True)
    assert "--plot" in result.stdout
