# SPDX-License-Identifier: Apache-2.0
"""`mhla-hf bench decode`: what it reports, and the memory of both caches against figures worked out by hand."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from mhla_hf.benchmarks import DecodeOptions, measure_decoding
from mhla_hf.cli.main import app
from tests import ROOT

from ..integrations.transformers.tiny_models import softmax_model


# Two layers, four query and two key/value heads of width 8, blocks of 16 tokens.
TINY = {
    "hidden_size": 32,
    "layers": 2,
    "heads": 4,
    "kv_heads": 2,
    "block_size": 16,
    "feature_map": "relu",
    "contexts": (32, 64),
    "tokens": 3,
    "warmup": 1,
    "device": "cpu",
}
LAYERS, KV_HEADS, WIDTH, KEPT = 2, 2, 8, 64


def kv_bytes(tokens: int, width: int) -> int:
    return LAYERS * 2 * KV_HEADS * tokens * WIDTH * width


def mhla_bytes(blocks: int, width: int, features: int = WIDTH) -> int:
    """Finished blocks and the last keys and values of `width` bytes a number; the rest in fp32, a position and a hash.

    The rest: three running summaries and the last tokens' features, rotated and not, with a flag for each token.
    """
    summary = KV_HEADS * features * (WIDTH + 1)
    last = KEPT * (KV_HEADS * (2 * features * 4 + 2 * WIDTH * width) + 1)
    return LAYERS * (blocks * summary * width + 3 * summary * 4 + 2 * 8 + last)


def test_dynamic_caches():
    report = measure_decoding(DecodeOptions(**TINY))
    assert [row["context"] for row in report["results"]] == [32, 64]
    for row, blocks in zip(report["results"], (2, 4)):
        assert row["mhla"]["cache_bytes"] == mhla_bytes(blocks, 4)
        assert row["softmax"]["cache_bytes"] == kv_bytes(row["context"], 4)
        assert row["mhla"]["summary_dtype"] == "float32"
        for kind in ("mhla", "softmax"):
            assert row[kind]["seconds_per_token"] > 0
            assert row[kind]["mean_seconds_per_token"] > 0
    # One of these figures in full: 2 layers of 4·144 + 3·144 numbers, a position, a hash, 64 tokens of 64 and a flag.
    assert report["results"][1]["mhla"]["cache_bytes"] == 2 * (4 * (4 * 144 + 3 * 144) + 2 * 8 + 64 * (64 * 4 + 1))
    assert report["results"][1]["softmax"]["cache_bytes"] == 2 * 2 * 2 * 64 * 8 * 4
    assert report["model"]["mhla_layers"] == report["model"]["layers"] == 2
    assert (report["model"]["kv_heads"], report["model"]["head_dim"]) == (2, 8)
    assert set(report["growth"]) == {"float32"}
    assert set(report["machine"]) >= {"date", "device", "threads", "torch", "transformers"}
    json.dumps(report)


def test_static_caches_have_room_for_the_decoded_tokens():
    report = measure_decoding(DecodeOptions(**{**TINY, "cache": "static", "contexts": (64,)}))
    (row,) = report["results"]
    # 64 + 1 + 3 tokens need five blocks.
    assert row["mhla"]["cache_bytes"] == mhla_bytes(5, 4)
    assert row["softmax"]["cache_bytes"] == kv_bytes(68, 4)


def test_each_dtype_is_measured_as_used():
    options = {**TINY, "contexts": (64,), "dtypes": ("float32", "bfloat16"), "feature_map": "hedgehog"}
    full, half = measure_decoding(DecodeOptions(**options))["results"]
    assert (full["dtype"], half["dtype"]) == ("float32", "bfloat16")
    assert half["mhla"]["summary_dtype"] == "bfloat16"
    # Hedgehog features are twice as wide as keys.
    assert full["mhla"]["cache_bytes"] == mhla_bytes(4, 4, 2 * WIDTH)
    assert half["mhla"]["cache_bytes"] == mhla_bytes(4, 2, 2 * WIDTH)
    assert half["softmax"]["cache_bytes"] == kv_bytes(64, 2)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_directories_softmax_and_mhla(name, tmp_path):
    softmax_model(name).save_pretrained(tmp_path / "softmax")
    measured = {"contexts": (40,), "tokens": 2, "warmup": 0, "device": "cpu"}
    report = measure_decoding(DecodeOptions(model=str(tmp_path / "softmax"), block_size=16, **measured))
    assert report["model"]["mhla"]["block_size"] == [16]
    # The first of the three layers of this Gemma has a sliding window of four tokens, and keeps three of them.
    assert report["model"]["mhla_layers"] == (2 if name == "gemma3" else 3)
    tokens = (3 if name == "gemma3" else 40) + 2 * 40
    assert report["results"][0]["softmax"]["cache_bytes"] == tokens * 2 * 2 * 8 * 4
    AutoModelForCausalLM.from_pretrained(
        tmp_path / "softmax", attn_implementation="mhla", mhla={"block_size": 32}
    ).save_pretrained(tmp_path / "mhla")
    report = measure_decoding(DecodeOptions(model=str(tmp_path / "mhla"), **measured))
    assert report["model"]["mhla"]["block_size"] == [32]
    with pytest.raises(ValueError, match="is MHLA already; block_size cannot be changed"):
        measure_decoding(DecodeOptions(model=str(tmp_path / "mhla"), block_size=8, **measured))


def test_learned_positions_end(tmp_path):
    softmax_model("gpt2").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="need 141 positions, but .* has 128"):
        measure_decoding(DecodeOptions(model=str(tmp_path), contexts=(130,), tokens=10, warmup=1, device="cpu"))


def test_command(tmp_path):
    arguments = ["bench", "decode", "--hidden-size", "32", "--layers", "2", "--heads", "4", "--kv-heads", "2"]
    arguments += ["--contexts", "64,32", "--tokens", "2", "--warmup", "1", "--block-size", "16", "--device", "cpu"]
    file = tmp_path / "new" / "decode.json"
    image = tmp_path / "decode.png"
    options = ["--json", str(file), "--plot", str(image)]
    result = CliRunner().invoke(app, [*arguments, *options], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    assert "LlamaForCausalLM" in result.stdout
    assert "from 32 to 64 tokens a decoded token takes" in result.stdout
    assert "measuring float32" in result.stderr
    assert image.read_bytes().startswith(b"\x89PNG")
    report = json.loads(file.read_text())
    assert report["options"]["contexts"] == [64, 32]
    assert [row["softmax"]["cache_bytes"] for row in report["results"]] == [kv_bytes(32, 4), kv_bytes(64, 4)]
    # A table cell of this: 2 layers of keys and values of 2 heads, 64 tokens, 8 numbers, 4 bytes.
    assert "16.4 kB" in result.stdout
    quiet = CliRunner().invoke(app, [*arguments, "--contexts", "16", "--quiet"], env={"COLUMNS": "200"})
    assert quiet.exit_code == 0
    assert quiet.stderr == ""
    assert "times as long" not in quiet.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--contexts", "2k"], "contexts='2k' must be numbers below 10⁹ separated by commas"),
        (["--contexts", "1"], "contexts=(1,) must be numbers of at least 2"),
        (["--cache", "paged"], "cache='paged' must be one of dynamic, static"),
        (["--dtype", "int8"], "dtype='int8' must be one of"),
        (["--hidden-size", "30"], "hidden_size=30 must be heads=4 times an even number"),
        (["--kv-heads", "3"], "kv_heads=3 must divide heads=4"),
        (["--tokens", "0"], "tokens=0 must be at least 1"),
        (["--warmup", "-1"], "warmup=-1 must be at least 0"),
    ],
)
def test_mistakes_are_one_line(arguments, message):
    result = CliRunner().invoke(app, ["bench", "decode", *arguments])
    assert result.exit_code == 1
    assert result.stdout == ""
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


def test_the_script_takes_the_same_options():
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    command = [sys.executable, ROOT / "benchmarks/decode.py", "--help"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=True)
    assert "--kv-heads" in result.stdout
