# SPDX-License-Identifier: Apache-2.0
"""The demo from encoding to its report, at the smallest size: real classes and digits, a model that learns nothing."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from huggingface_hub import ModelCard
from PIL import Image
from typer.testing import CliRunner

from conversion.digits import PretrainingConfig, pretrain
from mhla_hf.cli.main import app
from mhla_hf.demo import DemoConfig, base_pipeline_directory, run, run_demo

from .test_pretraining import TINY_PRETRAINING


TINY_DEMO = {
    "match_steps": 2,
    "blocks_steps": 3,
    "train_videos": 4,
    "held_out_videos": 4,
    "long_frames": 9,
    "inference_steps": 2,
    "prompts": ("a three moves left",),
    "progress": False,
}


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """A tiny softmax pipeline."""
    folder = tmp_path_factory.mktemp("base")
    pretrain(PretrainingConfig(**TINY_PRETRAINING), folder / "base", folder / "work", log=lambda line: None)
    return folder / "base"


@pytest.fixture(scope="module")
def finished(base, tmp_path_factory):
    """Directory and report of a complete demo, run by its command."""
    output = tmp_path_factory.mktemp("demo") / "output"
    options = ["--match-steps", "2", "--blocks-steps", "3", "--train-videos", "4", "--held-out-videos", "4"]
    options += ["--prompt", "a three moves left", "--inference-steps", "2", "--original", str(base)]
    options += ["--long-frames", "9"]
    result = CliRunner().invoke(app, ["demo", str(output), *options])
    assert result.exit_code == 0, result.output
    assert "MHLA + window" in result.stdout and "linear" in result.stdout
    assert "A video of 9 frames: softmax" in result.stdout
    return output, json.loads((output / "report.json").read_text())


def test_everything_is_written(finished):
    output, report = finished
    for name in ("report.md", "mixing.png", "side_by_side.gif", "long_videos.png", "mhla/README.md"):
        assert (output / name).stat().st_size > 0, name
    assert report["options"]["prompts"] == ["a three moves left"]
    assert "a three moves left" in (output / "mhla" / "README.md").read_text()
    with Image.open(output / "side_by_side.gif") as gif:
        assert gif.n_frames == 17
    assert not list(output.rglob(".tmp-*"))


def test_report_compares_on_the_same_draws(finished):
    _, report = finished
    softmax = report["softmax"]["held_out_loss"]
    for entry in report["variants"].values():
        for stage in ("converted", "calibrate", "match", "blockwise"):
            figures = entry["held_out"][stage]
            assert figures["above_softmax_percent"] == pytest.approx(100 * (figures["loss"] / softmax - 1))
        assert all(seconds > 0 for seconds in entry["cpu_seconds"].values())
    # In the second of two layers 80 x 80 mixing weights per head, against one, the same convolution of 24 channels and
    # the same feature maps of queries and keys; a window has a bias for each head.
    heads, width = 2, 12
    same = 24 * 3**3 + 24 + 2 * heads * width**2
    counts = {name: entry["parameters"] for name, entry in report["variants"].items()}
    assert counts["mhla"] - report["softmax"]["parameters"] == heads * 80 * 80 + same
    assert counts["mhla_window"] - counts["mhla"] == heads
    assert counts["linear"] - report["softmax"]["parameters"] == heads + same


def test_longer_videos_are_timed_once(finished, base):
    output, report = finished
    lengths = report["long_videos"]["lengths"]
    # 8 x 8 tokens for every fourth frame and the first.
    assert [(each["frames"], each["tokens"]) for each in lengths] == [(5, 128), (9, 192), (17, 320)]
    assert report["long_videos"]["generation"]["inference_steps"] == 1
    assert report["long_videos"]["threads"] == 1
    times = [*(each["seconds"] for each in lengths), report["long_videos"]["generation"]["seconds"]]
    assert all(each.keys() == {"softmax", "mhla"} and min(each.values()) > 0 for each in times)
    slower = [each["tokens"] for each in lengths if each["seconds"]["mhla"] >= each["seconds"]["softmax"]]
    faster = [each["tokens"] for each in lengths if each["tokens"] > max(slower, default=0)]
    assert report["long_videos"]["faster_from"] == min(faster, default=None)
    text = (output / "report.md").read_text()
    assert "Quality is not compared here" in text
    assert f"| 9 | 192 | {lengths[1]['seconds']['softmax']:.3f} | {lengths[1]['seconds']['mhla']:.3f} |" in text
    # A demo that resumes reads the times.
    config = DemoConfig(output=str(output), base=str(base), **TINY_DEMO)
    assert run._long_videos(config) == report["long_videos"]


def test_blocks_of_the_recovered_pipeline_grow_with_the_video(finished):
    output, _ = finished
    config = json.loads((output / "mhla" / "transformer" / "config.json").read_text())["mhla"]
    assert (config["resize"], config["grid"], config["blocks"]) == ("blocks", [5, 8, 8], [5, 4, 4])


def test_lengths_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="long_frames=100 must be a multiple of 8 plus 1, such as 129 or 257"):
        DemoConfig(long_frames=100)


def test_written_pipeline_generates_with_plain_diffusers(finished):
    from diffusers import DiffusionPipeline

    output, report = finished
    pipeline = DiffusionPipeline.from_pretrained(output / "mhla")
    assert type(pipeline.transformer).__name__ == "MHLAWanTransformer3DModel"
    assert tuple(pipeline.transformer.config.mhla["blocks"]) == (5, 4, 4)
    video = pipeline("a two moves up", height=32, width=32, num_frames=5, num_inference_steps=1, output_type="np")
    assert np.isfinite(video.frames).all()
    card = ModelCard.load(output / "mhla" / "README.md")
    assert (card.data.license, card.data.pipeline_tag) == ("apache-2.0", "text-to-video")
    assert card.data.widget == [{"text": "a three moves left", "output": {"url": "sample.gif"}}]
    assert card.data.eval_results[0].metric_value == pytest.approx(
        report["variants"]["mhla"]["held_out"]["blockwise"]["loss"], abs=1e-4
    )


@pytest.mark.slow
def test_a_finished_demo_runs_again_in_no_time(finished, base):
    output, report = finished
    began = time.perf_counter()
    again = run_demo(DemoConfig(output=str(output), base=str(base), **TINY_DEMO))
    assert time.perf_counter() - began < 60
    assert again["variants"]["mhla"]["held_out"] == report["variants"]["mhla"]["held_out"]


def test_other_options_are_not_mixed_into_old_work(finished, base):
    output, _ = finished
    with pytest.raises(ValueError, match=r"blocks_steps 3 \(now 4\), seed 0 \(now 1\); start again with"):
        run_demo(DemoConfig(output=str(output), base=str(base), **{**TINY_DEMO, "blocks_steps": 4, "seed": 1}))


@pytest.mark.parametrize("resume", [True, False])
def test_files_of_something_else_are_left_alone(resume, tmp_path):
    (tmp_path / "mhla").mkdir()
    (tmp_path / "mhla" / "thesis.txt").write_text("mine")
    with pytest.raises(ValueError, match="is not empty and no output of a demo; choose another"):
        run_demo(DemoConfig(output=str(tmp_path), resume=resume))
    assert (tmp_path / "mhla" / "thesis.txt").read_text() == "mine"


def test_the_command_checks_its_options(tmp_path):
    result = CliRunner().invoke(app, ["demo", str(tmp_path / "output"), "--train-videos", "0"])
    assert result.exit_code == 2 and "--train-videos" in result.output
    assert not (tmp_path / "output").exists()


def test_the_package_ships_a_small_base_pipeline():
    directory = base_pipeline_directory()
    weights = [path.stat().st_size for path in directory.rglob("*.safetensors")]
    assert len(weights) == 3 and sum(weights) <= 10e6
    config = json.loads((directory / "transformer" / "config.json").read_text())
    assert config["_class_name"] == "WanTransformer3DModel"


@pytest.mark.slow
def test_a_killed_demo_ends_like_an_uninterrupted_one(base, tmp_path):
    arguments = [
        *(sys.executable, "-m", "mhla_hf", "demo", str(tmp_path / "killed"), "--original", str(base)),
        *("--match-steps", "2", "--blocks-steps", "60", "--inference-steps", "2"),
        *("--train-videos", "4", "--held-out-videos", "4", "--long-frames", "9"),
    ]
    process = subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    blocks = tmp_path / "killed" / "mhla" / "work" / "blockwise"
    deadline = time.monotonic() + 300
    while not list(blocks.glob("*.safetensors")) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "killed" / "report.json").exists()
    subprocess.run(arguments, check=True)
    arguments[4] = str(tmp_path / "whole")
    subprocess.run(arguments, check=True)
    ends = []
    for name in ("killed", "whole"):
        report = json.loads((tmp_path / name / "report.json").read_text())
        ends.append([entry["held_out"]["blockwise"]["loss"] for entry in report["variants"].values()])
    assert ends[0] == pytest.approx(ends[1], rel=1e-5)
