# SPDX-License-Identifier: Apache-2.0
"""Requests to every kind of pipeline, without a server."""

import numpy as np
import pytest

from mhla_hf import convert_pretrained
from mhla_hf.app.about import facts, notice
from mhla_hf.app.diffusion import DiffusionGenerator
from mhla_hf.app.generation import read_request
from mhla_hf.app.limits import Limits
from mhla_hf.app.mixing import ALL_HEADS, MixingBrowser
from mhla_hf.app.models import demo_model, open_comparison
from mhla_hf.app.speed import SpeedMeter
from mhla_hf.app.work import Control, Progress, WorkStopped, follow
from tests import tiny, tiny_images


PIPELINES = {
    "dit": (tiny_images.dit_pipeline, "image", {"class_label": 7}),
    "pixart": (tiny_images.pixart_pipeline, "image", {"prompt": "a cat", "height": 16, "width": 32}),
    "sana": (tiny_images.sana_pipeline, "image", {"prompt": "a cat", "height": 64, "width": 96}),
    "sana-video": (
        tiny_images.sana_video_pipeline,
        "video",
        {"prompt": "a cat", "height": 32, "width": 64, "frames": 5},
    ),
    "two experts": (
        lambda: tiny.wan_pipeline(second_transformer=True),
        "video",
        {"prompt": "a cat", "height": 32, "width": 48, "num_frames": 5},
    ),
}


@pytest.mark.parametrize("name", PIPELINES)
def test_every_kind_of_pipeline_answers(name, tmp_path):
    make, kind, request = PIPELINES[name]
    make().save_pretrained(tmp_path / "base")
    convert_pretrained(tmp_path / "base", tmp_path / "mhla", progress=False)
    comparison = open_comparison(tmp_path / "mhla", device="cpu")
    generator = DiffusionGenerator(comparison, Limits())
    assert comparison.kind == kind
    assert comparison.attention == ("linear attention" if name.startswith("sana") else "softmax attention")
    given = {"steps": 3, "seed": 1, "guidance_scale": 2.0, **request}
    assert {field.name for field in generator.fields} == set(given)
    checked = read_request(generator, [given[field.name] for field in generator.fields])
    answers = {model: generator.generate(model, checked, Control()) for model in ("original", "mhla")}
    for answer in answers.values():
        assert answer.value.dtype == np.uint8 and answer.value.ndim == (4 if kind == "video" else 3)
        assert 0 < answer.unit_seconds < answer.seconds
    shape = answers["mhla"].value.shape
    assert shape == answers["original"].value.shape
    if "height" in request:
        assert shape[-2] / shape[-3] == request["width"] / request["height"]
    # SANA starts as it was.
    assert (answers["mhla"].value == answers["original"].value).all() == name.startswith("sana")
    browser = MixingBrowser(comparison)
    layer = browser.layers[-1]
    assert browser.picture(layer, ALL_HEADS, browser.middle(layer)).width > 300
    assert [shape.tokens for shape in SpeedMeter(comparison).shapes()][-1] <= 8192
    assert type(comparison.mhla_models()[comparison.components[0]]).__name__ in facts(comparison, generator, Limits())


def test_pipelines_that_need_an_image_are_refused(tmp_path):
    tiny.wan_pipeline(image_to_video=True).save_pretrained(tmp_path / "base")
    convert_pretrained(tmp_path / "base", tmp_path / "mhla", progress=False)
    with pytest.raises(ValueError, match="WanImageToVideoPipeline, which makes nothing of a prompt"):
        DiffusionGenerator(open_comparison(tmp_path / "mhla", device="cpu"), Limits())


def test_first_values_are_within_small_limits(saved_pipeline):
    comparison = open_comparison(saved_pipeline.model, device="cpu")
    for limits in (Limits(pixels=600, frames=3, steps=5), Limits(pixels=100), Limits()):
        generator = DiffusionGenerator(comparison, limits)
        values = [field.default for field in generator.fields]
        if limits.pixels == 100:
            # Less than the smallest picture.
            with pytest.raises(ValueError, match="at most 100 are allowed"):
                read_request(generator, values)
        else:
            read_request(generator, values)


def test_without_a_model_the_demo_is_converted_and_calibrated(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with demo_model() as (directory, base):
        comparison = open_comparison(directory, base, device="cpu")
        assert comparison.is_demo and not comparison.is_recovered
        assert "converted and calibrated, but not trained" in notice(comparison)
    assert not directory.exists()
    (tmp_path / "demo-output" / "mhla").mkdir(parents=True)
    (tmp_path / "demo-output" / "mhla" / "model_index.json").write_text("{}")
    with demo_model() as (directory, _):
        assert directory.parts == ("demo-output", "mhla")


def test_work_reports_returns_raises_and_stops():
    def work(control: Control) -> int:
        control.progress = Progress("half", 1, 2)
        while wait:
            control.check()
        return 7

    wait = True
    control = Control()
    steps = follow(work, control)
    assert next(steps) == Progress("half", 1, 2)
    wait = False
    with pytest.raises(StopIteration) as done:
        while True:
            next(steps)
    assert done.value.value == 7

    wait, control = True, Control()
    steps = follow(work, control)
    next(steps)
    steps.close()
    with pytest.raises(WorkStopped):
        control.check()

    control.limit(0.0)
    with pytest.raises(WorkStopped):
        control.check()
    late = Control()
    late.limit(-1.0)
    with pytest.raises(ValueError, match="stopped after"):
        late.check()
    with pytest.raises(ZeroDivisionError):
        list(follow(lambda control: 1 / 0, Control()))
