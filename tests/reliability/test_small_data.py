# SPDX-License-Identifier: Apache-2.0
"""Commands with data that are empty, or too few: each works, or ends in one sentence."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import imageio_ffmpeg
import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from mhla_hf.cli.main import app
from mhla_hf.demo import base_pipeline_directory
from mhla_hf.training.data.images import Images

from ..recovery.sources import model_directory


OPTIONS = {"llama": "--block-size 4", "bert": "--block-size 4", "vit": "--blocks 2,2", "wan": "--blocks 5,4,4"}
SIZE = "--height 64 --width 64 --num-frames 17"
TEXT = "the block mixes its summaries and every token of it reads "


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """Models as they are and converted, and data of few samples."""
    work = tmp_path_factory.mktemp("work")
    for name in ("llama", "bert", "vit"):
        model_directory(name, work / name)
    shutil.copytree(base_pipeline_directory(), work / "wan")
    for name, options in OPTIONS.items():
        result = CliRunner().invoke(app, f"convert {work / name} {work / name}-mhla {options} --quiet".split())
        assert result.exit_code == 0, result.output
    (work / "empty").mkdir()
    for suffix in ("txt", "json", "jsonl", "parquet"):
        (work / f"empty.{suffix}").touch()
    (work / "one.jsonl").write_text(json.dumps({"text": TEXT * 60}) + "\n")
    (work / "short.jsonl").write_text('{"text": "ab"}\n')
    (work / "null.jsonl").write_text('{"text": null}\n')
    for folder in ("image", "clip", "short"):
        (work / folder).mkdir()
        (work / folder / "a.txt").write_text("a six moves up")
    Image.new("RGB", (20, 20), "red").save(work / "image" / "a.png")
    for folder, frames in (("clip", 20), ("short", 3)):
        writer = imageio_ffmpeg.write_frames(str(work / folder / "a.mp4"), (64, 64), fps=16)
        writer.send(None)
        for number in range(frames):
            writer.send(np.full((64, 64, 3), 10 * number, np.uint8))
        writer.close()
    return work


DATA = "empty empty.txt empty.json empty.jsonl empty.parquet short.jsonl null.jsonl image clip".split()
# What is enough for these models.
ENOUGH = {("llama", "one.jsonl")}


def refused(line: str, work: Path) -> str:
    """The one line of a command that refuses its arguments."""
    result = CliRunner().invoke(app, [part.replace("WORK", str(work)) for part in line.split()])
    assert result.exit_code == 2, (line, result.output, result.exception)
    (error,) = [each for each in result.stderr.splitlines() if each.startswith("error: ")]
    assert "unexpected" not in error
    return error


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize(
    "command",
    [
        "recover WORK/{name} WORK/out --stages calibrate {options} {size}",
        "calibrate WORK/{name}-mhla WORK/out",
        "select-layers WORK/{name} --keep 1 {options}",
        "convert WORK/{name} WORK/out --calibrate {options} --overwrite",
    ],
)
def test_too_few_data_are_refused_in_one_sentence(command, name, work):
    size = SIZE if name == "wan" else ""
    for data in (*DATA, "one.jsonl"):
        if (name, data) not in ENOUGH:
            line = command.format(name=name, options=OPTIONS[name], size=size) + f" --quiet --data WORK/{data}"
            error = refused(line, work)
            assert "--data" in error and data in error, error


def test_samples_that_cannot_be_used_are_told_before_anything_is_converted_or_loaded(work, monkeypatch):
    recover = f"recover WORK/wan WORK/out --stages calibrate {OPTIONS['wan']} {SIZE} --quiet --data WORK/"
    monkeypatch.setattr("mhla_hf.recovery.recover.convert_pretrained", None)
    monkeypatch.setattr("mhla_hf.training.data.latent_cache.load_encoders", None)
    assert "clip has 1 of 1 samples that can be used; at least 2 are needed" in refused(recover + "clip", work)
    error = refused(recover + "short", work)
    assert "short has 0 of 1 samples" in error and "a.mp4 has fewer frames that can be read than 17" in error
    for command in ("cache", "wan"):
        line = f"train {command} WORK/wan-mhla WORK/out --quiet --sizes 64,64,17 --data WORK/short"
        assert "at least 1 are needed" in refused(line, work)


def test_a_cache_of_one_sample_trains_and_is_no_probe(work):
    runner = CliRunner()
    line = f"train cache {work / 'wan'} {work / 'cache'} --quiet --sizes 64,64,17 --data {work / 'clip'}"
    assert runner.invoke(app, line.split()).exit_code == 0
    error = refused("calibrate WORK/wan-mhla WORK/none --quiet --data WORK/cache", work)
    assert "at least 2 are needed, since one is held out" in error
    line = f"train wan {work / 'wan-mhla'} {work / 'run'} --quiet --cache {work / 'cache'} --max-steps 1 --device cpu"
    result = runner.invoke(app, line.split())
    assert result.exit_code == 0 and "finetune: loss" in result.output


@pytest.mark.parametrize("shape", [(3, 40), (1, 1), (40, 3), (1, 40)])
def test_images_of_few_rows_keep_their_colours(shape, work):
    from transformers import AutoImageProcessor

    processor = AutoImageProcessor.from_pretrained(work / "vit", do_normalize=False, do_rescale=False)
    red = np.zeros((*shape, 3), np.uint8)
    red[..., 0] = 200
    (batch,) = Images([lambda: red, lambda: red], processor, 1, "x").held_out(1)
    assert batch["pixel_values"].float().mean((0, 2, 3)).tolist() == [200, 0, 0]


def test_a_probe_takes_an_image_of_one_pixel(work):
    Image.new("RGB", (1, 1), "red").save(work / "pixel.png")
    line = f"inspect {work / 'vit-mhla'} --quiet --image {work / 'pixel.png'} --device cpu"
    result = CliRunner().invoke(app, line.split())
    assert result.exit_code == 0, result.output
