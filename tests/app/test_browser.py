# SPDX-License-Identifier: Apache-2.0
"""The application in a real browser: generate, look at mixing weights, on a desk and on a phone."""

from __future__ import annotations

import re

import pytest

from .conftest import running


pytest.importorskip("gradio", reason="gradio is not installed")
pytestmark = pytest.mark.slow

PHONE = {"width": 390, "height": 844}


def test_both_videos_their_times_and_mixing_weights_appear(page, saved_pipeline):
    with running(saved_pipeline) as server:
        page.goto(server.url)
        assert "Not recovered." in page.locator("#introduction").inner_text()
        page.get_by_role("button", name="Settings").click()
        steps = page.get_by_label("number input for Denoising steps")
        steps.fill("2")
        steps.press("Tab")
        page.get_by_role("button", name="Generate").click()
        page.locator("#times strong").first.wait_for()
        for name in ("original", "mhla"):
            page.wait_for_function("name => document.querySelector(`#${name} video`).readyState >= 1", arg=name)
            video = page.locator(f"#{name} video")
            assert video.evaluate("v => [v.videoWidth, v.videoHeight, v.loop]") == [320, 160, True]
        page.locator("#original video").evaluate("v => { v.pause(); v.currentTime = 0.5; }")
        page.wait_for_function("() => document.querySelector('#mhla video').paused")
        page.wait_for_function("() => Math.abs(document.querySelector('#mhla video').currentTime - 0.5) < 0.1")
        assert re.search(r"[\d,]+ ms with MHLA", page.locator("#times").inner_text())

        page.get_by_role("tab", name="Mixing").click()
        matrix, tokens = (page.locator("#mixing svg").nth(number) for number in range(2))
        tokens.wait_for()
        before = tokens.inner_html()
        assert matrix.bounding_box()["y"] == pytest.approx(tokens.bounding_box()["y"], abs=2)
        page.locator("#layer input").click()
        page.get_by_role("option", name="blocks.1.attn1", exact=True).click()
        page.wait_for_function("old => document.querySelectorAll('#mixing svg')[1]?.innerHTML != old", arg=before)
        page.set_viewport_size(PHONE)
        for tab in ("Generate", "Mixing"):
            page.get_by_role("tab", name=tab).click()
            assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
        # Stacked, and not cut.
        page.wait_for_function(
            """width => {
              const parts = [...document.querySelectorAll('#mixing svg')].map(svg => svg.getBoundingClientRect());
              return parts[1].top >= parts[0].bottom && parts.every(box => box.left >= 0 && box.right <= width);
            }""",
            arg=PHONE["width"],
        )


def test_language_models_write_side_by_side(page, saved_language_model):
    with running(saved_language_model) as server:
        page.goto(server.url)
        page.get_by_role("button", name="Generate").click()
        page.locator("#times strong").first.wait_for()
        assert all(page.locator(f"#{name} textarea").input_value() for name in ("original", "mhla"))
