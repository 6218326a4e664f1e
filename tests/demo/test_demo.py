# SPDX-License-Identifier: Apache-2.0
"""The demo from nothing to its report, at the smallest size: real classes and digits, a model that learns nothing."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from huggingface_hub import ModelCard
from PIL import Image
from safetensors.numpy import load_file

from mhla_hf.cli.demo import run_command
from mhla_hf.demo import DemoConfig, base_pipeline_directory, run_demo
from mhla_hf.demo.figures import side_by_side
from mhla_hf.demo.runner import Demo, token_grid

from .test_pretraining import TINY_PRETRAINING


TINY_DEMO = {
    "layers": "all",
    "match_steps": 2,
    "distill_steps": 3,
    "train_videos": 4,
    "held_out_videos": 4,
    "draws": 1,
    "inference_steps": 2,
    "prompts": ("a three moves left",),
    "progress": False,
}
FILES = ["report.json", "report.md", "recovery.png", "mixing.png", "frames.png", "side_by_side.gif", "mhla/README.md"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Directory and report of one whole demo, base pipeline included."""
    output = tmp_path_factory.mktemp("demo") / "output"
    report = run_demo(DemoConfig(output=output, from_scratch=True, pretraining=TINY_PRETRAINING, **TINY_DEMO))
    return output, report


def test_everything_is_written(finished):
    output, report = finished
    for name in FILES:
        assert (output / name).stat().st_size > 0, name
    assert json.loads((output / "report.json").read_text()) == json.loads(json.dumps(report))
    # Without imageio there is no mp4, and the report says so.
    assert (output / "side_by_side.mp4").is_file() or report["notes"]
    assert not list(output.rglob(".tmp-*"))


def test_report_compares_on_the_same_draws(finished):
    _, report = finished
    softmax = report["softmax"]["held_out_loss"]
    assert report["held_out_samples"] == 4
    for entry in report["variants"].values():
        for stage in ("converted", "calibrate", "match", "distill"):
            figures = entry["held_out"][stage]
            assert figures["above_softmax_percent"] == pytest.approx(100 * (figures["loss"] / softmax - 1))
        assert all(seconds > 0 for seconds in entry["cpu_seconds"].values())
    # In each of two layers 80 x 80 mixing weights for each head, against one, the same convolution of 24 channels and
    # the same feature maps of queries and keys; a window has two gains a channel.
    heads, width = 2, 12
    same = 24 * 3**3 + 24 + 2 * heads * width**2
    counts = {name: entry["parameters"] for name, entry in report["variants"].items()}
    assert counts["mhla"] - report["softmax"]["parameters"] == 2 * (heads * 80 * 80 + same)
    assert counts["mhla_window"] - counts["mhla"] == 2 * 2 * heads * width
    assert counts["linear"] - report["softmax"]["parameters"] == 2 * (heads + same)


def test_written_pipeline_generates_with_plain_diffusers(finished):
    from diffusers import DiffusionPipeline

    output, report = finished
    pipeline = DiffusionPipeline.from_pretrained(output / "mhla")
    assert type(pipeline.transformer).__name__ == "MHLAWanTransformer3DModel"
    assert tuple(pipeline.transformer.config.mhla["blocks"]) == (5, 4, 4)
    video = pipeline("a two moves up", height=32, width=32, num_frames=5, num_inference_steps=1, output_type="np")
    assert np.isfinite(video.frames).all()
    record = json.loads((output / "mhla" / "conversion.json").read_text())
    assert "transformer" in json.dumps(record)
    card = ModelCard.load(output / "mhla" / "README.md")
    assert (card.data.license, card.data.library_name, card.data.pipeline_tag) == (
        "apache-2.0",
        "diffusers",
        "text-to-video",
    )
    assert {"mhla", "linear-attention", "wan"} <= set(card.data.tags)
    assert card.data.widget == [{"text": "a three moves left", "output": {"url": "sample.gif"}}]
    assert card.data.eval_results[0].metric_value == pytest.approx(
        report["variants"]["mhla"]["held_out"]["distill"]["loss"], abs=1e-4
    )
    assert "{" not in card.text.split("```")[0]


def test_images_show_what_they_should(finished):
    output, _ = finished
    with Image.open(output / "side_by_side.gif") as gif:
        assert gif.n_frames == 17
    with Image.open(output / "frames.png") as frames:
        assert frames.size == (9 * 64, 4 * 64)


def test_stored_videos_are_what_the_pipeline_made(finished):
    from diffusers import DiffusionPipeline

    output, _ = finished
    pipeline = DiffusionPipeline.from_pretrained(output / "base")
    generator = [torch.Generator().manual_seed(0)]
    options = {
        "num_inference_steps": 2,
        "guidance_scale": DemoConfig(output=output).guidance,
        "max_sequence_length": 32,
    }
    expected = pipeline(
        ["a three moves left"], height=64, width=64, num_frames=17, generator=generator, **options
    ).frames
    stored = load_file(output / "work" / "videos" / "softmax.safetensors")["frames"]
    assert np.abs(stored / 255.0 - np.asarray(expected)).max() < 0.01


def test_a_finished_demo_runs_again_in_no_time(finished):
    output, report = finished
    began = time.perf_counter()
    again = run_demo(DemoConfig(output=output, from_scratch=True, pretraining=TINY_PRETRAINING, **TINY_DEMO))
    assert time.perf_counter() - began < 60
    assert again["variants"]["mhla"]["held_out"] == report["variants"]["mhla"]["held_out"]


def test_a_stopped_demo_ends_like_an_uninterrupted_one(finished, tmp_path):
    output, report = finished
    config = DemoConfig(output=tmp_path / "output", base=output / "base", **TINY_DEMO)
    stopped = Demo(config)
    train, held_out = stopped.data(config.base)
    stopped.recover("mhla", config.base, train, held_out)
    resumed = run_demo(config)
    for name, entry in report["variants"].items():
        assert resumed["variants"][name]["held_out"]["distill"]["loss"] == pytest.approx(
            entry["held_out"]["distill"]["loss"], rel=1e-5
        )


def test_other_options_are_not_mixed_into_old_work(finished):
    output, _ = finished
    options = {**TINY_DEMO, "distill_steps": 4, "seed": 1}
    with pytest.raises(ValueError, match="another distill_steps, seed; start again with --no-resume"):
        Demo(DemoConfig(output=output, from_scratch=True, pretraining=TINY_PRETRAINING, **options))


@pytest.mark.parametrize("resume", [True, False])
@pytest.mark.parametrize("name", ["work/thesis.txt", "mhla/model.py", "report.md"])
def test_files_of_something_else_are_left_alone(name, resume, tmp_path):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("mine")
    with pytest.raises(ValueError, match=f"has {name.split('/')[0]} and is no output of a demo; choose another"):
        Demo(DemoConfig(output=tmp_path, resume=resume))
    assert path.read_text() == "mine"


def test_a_base_of_something_else_is_left_alone(tmp_path):
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "mine").touch()
    with pytest.raises(ValueError, match="base is no pipeline of a demo; choose another output"):
        run_demo(DemoConfig(output=tmp_path, from_scratch=True, progress=False))
    assert (tmp_path / "base" / "mine").is_file()


def test_a_demo_killed_before_its_first_record_starts_again(tmp_path):
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / ".tmp-0123abcd-options.json").touch()
    Demo(DemoConfig(output=tmp_path))
    assert [path.name for path in (tmp_path / "work").iterdir()] == ["options.json"]


def test_command(finished, tmp_path, capsys):
    output, _ = finished
    run_command(
        tmp_path / "output",
        base=output / "base",
        match_steps=1,
        distill_steps=1,
        train_videos=5,
        held_out_videos=2,
        prompt=["a one moves up"],
        inference_steps=1,
    )
    shown = capsys.readouterr().out
    assert "MHLA" in shown and "linear" in shown
    assert "a one moves up" in (tmp_path / "output" / "mhla" / "README.md").read_text()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"match_steps": 0}, "match_steps must be at least 1"),
        ({"train_videos": 0}, "train_videos must be at least 1"),
        ({"prompts": ()}, "prompts must hold"),
        ({"from_scratch": True, "base": "somewhere"}, "from_scratch"),
    ],
    ids=["match_steps", "train_videos", "prompts", "from_scratch"],
)
def test_mistakes_are_named(options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        DemoConfig(output=tmp_path, **options)


def test_the_package_ships_a_small_base_pipeline():
    directory = base_pipeline_directory()
    weights = [path.stat().st_size for path in directory.rglob("*.safetensors")]
    assert len(weights) == 3 and sum(weights) <= 10e6
    assert token_grid(directory) == (5, 8, 8)
    config = json.loads((directory / "transformer" / "config.json").read_text())
    assert config["_class_name"] == "WanTransformer3DModel"


def test_side_by_side_has_sizes_for_codecs():
    videos = {name: np.zeros((2, 3, 64, 64, 3), np.uint8) for name in ("softmax", "mhla")}
    frames = side_by_side(videos, ["a one moves up", "a two moves down"])
    assert frames.shape[0] == 3 and frames.shape[1] % 16 == 0 and frames.shape[2] % 16 == 0


@pytest.mark.slow
def test_a_killed_demo_ends_like_an_uninterrupted_one(finished, tmp_path):
    output, _ = finished
    arguments = [
        *(sys.executable, "-m", "mhla_hf", "demo", str(tmp_path / "killed"), "--base", str(output / "base")),
        *("--match-steps", "2", "--distill-steps", "60", "--inference-steps", "2"),
        *("--train-videos", "4", "--held-out-videos", "4"),
    ]
    process = subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    checkpoints = tmp_path / "killed" / "work" / "mhla" / "work" / "distill" / "checkpoints"
    deadline = time.monotonic() + 300
    while not (checkpoints.is_dir() and list(checkpoints.glob("distill-*"))) and time.monotonic() < deadline:
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
        ends.append([entry["held_out"]["distill"]["loss"] for entry in report["variants"].values()])
    assert ends[0] == pytest.approx(ends[1], rel=1e-5)
