# SPDX-License-Identifier: Apache-2.0
"""The picture at the top of the README: what it reads, and that it draws."""

from __future__ import annotations

import pytest
from PIL import Image

from benchmarks import overview
from benchmarks.overview import draw, recovery_lines, time_lines
from mhla_hf.utils.json_files import read_json


@pytest.fixture
def recovery():
    return read_json(overview.RESULTS / "recovery.json", "the recoveries:")


@pytest.fixture
def long_inputs():
    """Times as the experiment reports them: softmax is left out where it takes too long."""
    rows = [
        {"attention": name, "direction": direction, "tokens": tokens, "forward_milliseconds": milliseconds}
        for tokens in (1024, 2048, 4096, 8192)
        for direction in ("bidirectional", "causal")
        for name, milliseconds in {
            "linear": tokens / 1e3,
            "mhla": tokens / 500,
            "softmax": tokens**2 / 1e5 if tokens < 8192 else None,
        }.items()
    ]
    return {"machine": {"device": "CPU", "date": "2026-01-01"}, "summary": {"rows": rows}}


def test_recovery_lines_are_those_of_the_results(recovery):
    lines = recovery_lines(recovery)
    assert list(lines) == ["mhla", "window", "linear"]
    for variant, line in lines.items():
        summary = recovery["summary"]["digits"][variant]
        assert line[-1] == pytest.approx((summary["cpu_seconds"], summary["distill"]))
        assert line[0][1] == pytest.approx(summary["converted"])
        assert [seconds for seconds, _ in line] == sorted(seconds for seconds, _ in line)


def test_time_lines_look_both_ways_and_end_where_nothing_was_measured(long_inputs):
    lines = time_lines(long_inputs)
    assert [tokens for tokens, _ in lines["mhla"]] == [1024, 2048, 4096, 8192]
    assert lines["softmax"][-1] == (4096, pytest.approx(167.8, abs=0.1))


def test_picture_of_times_that_end_early(recovery, long_inputs, tmp_path):
    draw(recovery, long_inputs, tmp_path / "overview.png")
    assert (tmp_path / "overview.png").read_bytes().startswith(b"\x89PNG")


def test_picture_of_the_committed_results_has_the_size_of_the_one_in_the_readme(tmp_path):
    overview.main(["--image", str(tmp_path / "overview.png")])
    with Image.open(tmp_path / "overview.png") as image, Image.open(overview.IMAGE) as committed:
        assert image.size == committed.size == (1440, 648)
