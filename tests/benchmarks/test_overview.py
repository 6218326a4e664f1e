# SPDX-License-Identifier: Apache-2.0
"""The picture at the top of the README: what it reads, that it draws, and that README and pictures show one run."""

from __future__ import annotations

import re

import pytest
from PIL import Image

from benchmarks import overview
from benchmarks.overview import final_losses, recovery_lines
from mhla_hf.utils.files import read_json
from tests import ROOT


@pytest.fixture
def demo():
    return read_json(overview.RESULTS / "demo.json", "the demo's report:")


def test_recovery_lines_are_those_of_the_demo(demo):
    lines = recovery_lines(demo)
    assert list(lines) == ["mhla", "mhla_window", "linear"]
    for variant, line in lines.items():
        copy = demo["variants"][variant]
        assert line[0] == (0, copy["held_out"]["converted"]["above_softmax_percent"])
        assert line[-1][0] == pytest.approx(sum(copy["cpu_seconds"].values()), abs=0.5)
        assert line[-1][1] == pytest.approx(
            100 * (copy["held_out"]["blockwise"]["loss"] / demo["softmax"]["held_out_loss"] - 1)
        )
        assert [seconds for seconds, _ in line] == sorted(seconds for seconds, _ in line)


def test_readme_and_pictures_show_the_losses_of_one_run(demo):
    losses = final_losses(demo)
    row = re.search(r"^\| the demo's video model.*$", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert re.findall(r"[+-][\d.]+", row.group()) == [losses[name] for name in ("linear", "mhla", "mhla_window")]
    for name in ("overview.png", "side_by_side.png"):
        with Image.open(ROOT / "docs" / "images" / name) as image:
            assert image.text[overview.LOSSES] == " ".join(losses.values()), name


def test_the_demo_is_the_first_of_the_measured_seeds(demo):
    measured = read_json(overview.RESULTS / "recovery.json", "the recoveries:")["results"]
    for variant, name in (("mhla", "mhla"), ("mhla_window", "window"), ("linear", "linear")):
        again = measured[f"digits/{name}/0"]["figures"]["blockwise"]["above_softmax_percent"]
        assert recovery_lines(demo)[variant][-1][1] == pytest.approx(again, abs=0.05)


@pytest.mark.slow
def test_picture_of_the_committed_results_has_the_size_of_the_one_in_the_readme(tmp_path):
    overview.main(["--image", str(tmp_path / "overview.png")])
    with Image.open(tmp_path / "overview.png") as image, Image.open(overview.IMAGE) as committed:
        assert image.size == committed.size == (1440, 600)
        assert image.text == committed.text
