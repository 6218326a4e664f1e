# SPDX-License-Identifier: Apache-2.0
"""The picture at the top of the README: what it reads, and that it draws."""

from __future__ import annotations

import pytest
from PIL import Image

from benchmarks import overview
from benchmarks.overview import recovery_lines
from mhla_hf.utils.files import read_json


pytestmark = pytest.mark.slow


@pytest.fixture
def recovery():
    return read_json(overview.RESULTS / "recovery.json", "the recoveries:")


def test_recovery_lines_are_those_of_the_results(recovery):
    lines = recovery_lines(recovery)
    assert list(lines) == ["mhla", "window", "linear"]
    for variant, line in lines.items():
        summary = recovery["summary"]["digits"][variant]
        assert line[-1] == pytest.approx((summary["cpu_seconds"], summary["blocks"]))
        assert line[0][1] == pytest.approx(summary["converted"])
        assert [seconds for seconds, _ in line] == sorted(seconds for seconds, _ in line)


def test_picture_of_the_committed_results_has_the_size_of_the_one_in_the_readme(tmp_path):
    overview.main(["--image", str(tmp_path / "overview.png")])
    with Image.open(tmp_path / "overview.png") as image, Image.open(overview.IMAGE) as committed:
        assert image.size == committed.size == (1440, 600)
