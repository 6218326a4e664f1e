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
        assert re.search(r"[\d,]+ ms with MHLA", page.locator("#times").inner_text())

        page.get_by_role("tab", name="Mixing").click()
        picture = page.locator("#mixing img")
        picture.wait_for()
        before = picture.get_attribute("src")
        page.locator("#layer input").click()
        page.get_by_role("option", name="blocks.1.attn1", exact=True).click()
        page.wait_for_function("old => document.querySelector('#mixing img').src != old", arg=before)
        page.set_viewport_size(PHONE)
        for tab in ("Generate", "Mixing"):
            page.get_by_role("tab", name=tab).click()
            assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]


def test_language_models_write_side_by_side(page, saved_language_model):
    with running(saved_language_model) as server:
        page.goto(server.url)
        page.get_by_role("button", name="Generate").click()
        page.locator("#times strong").first.wait_for()
        assert all(page.locator(f"#{name} textarea").input_value() for name in ("original", "mhla"))
