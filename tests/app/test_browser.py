# SPDX-License-Identifier: Apache-2.0
"""The application in a real browser: generate, cancel, look at mixing weights, measure, be refused."""

from __future__ import annotations

import re
import time

import pytest

from mhla_hf.app.limits import Limits

from .conftest import VIDEO, running, wait_until


pytest.importorskip("gradio", reason="gradio is not installed")

PHONE = {"width": 390, "height": 844}


@pytest.fixture(scope="module")
def server(saved_pipeline):
    with running(saved_pipeline, Limits(prompt=40)) as server:
        yield server


@pytest.fixture
def opened(page, server):
    page.goto(server.url)
    page.get_by_role("button", name="Generate").wait_for()
    return page


def set_fields(page, **values) -> None:
    """Opens the settings and enters values by name of the field."""
    page.get_by_role("button", name="Settings").click()
    for name, value in values.items():
        number = page.locator(f"#field-{name} input[type=number]")
        number.fill(str(value))
        number.press("Tab")


def video(page, name: str) -> dict:
    """Size and length of an answer's video, once the browser has read them."""
    element = page.locator(f"#{name} video")
    element.wait_for(state="attached")
    page.wait_for_function("name => document.querySelector(`#${name} video`).readyState >= 1", arg=name)
    return element.evaluate("v => ({width: v.videoWidth, height: v.videoHeight, seconds: v.duration, url: v.src})")


def test_both_videos_and_their_times_appear(opened):
    opened.locator("#field-prompt textarea").fill("a cat on the moon")
    set_fields(opened, steps=2)
    opened.get_by_role("button", name="Generate").click()
    opened.locator("#times table").wait_for()
    for name in ("original", "mhla"):
        found = video(opened, name)
        assert (found["width"], found["height"]) == (320, 160)
        assert found["seconds"] == pytest.approx(9 / 8, abs=0.2)
    times = opened.locator("#times").inner_text()
    assert re.search(r"Softmax attention\s+[\d.]+ s\s+[\d,]+ ms", times)
    assert re.search(r"MHLA\s+[\d.]+ s\s+[\d,]+ ms", times)
    assert video(opened, "original")["url"] != video(opened, "mhla")["url"]


def test_cancel_stops_the_work_and_shows_progress_before(opened, server):
    calls: list[float] = []

    def wait(module, args):
        calls.append(time.monotonic())
        time.sleep(0.1)

    hook = server.handlers.comparison.original.transformer.register_forward_pre_hook(wait)
    try:
        set_fields(opened, steps=40)
        opened.get_by_role("button", name="Generate").click()
        opened.locator("#status").get_by_text(re.compile(r"Original: step \d+ of 40")).wait_for()
        assert opened.locator("#status progress").get_attribute("max") == "40"
        opened.get_by_role("button", name="Cancel").first.click()
        opened.locator("#status").get_by_text("Cancelled.").wait_for()
        time.sleep(1)
        before = len(calls)
        time.sleep(1)
        assert len(calls) == before < 40
    finally:
        hook.remove()
    assert opened.locator("video").count() == 0


def test_a_full_queue_is_said(page, saved_pipeline):
    gradio_client = pytest.importorskip("gradio_client", reason="gradio is not installed")
    with running(saved_pipeline, Limits(queue=1)) as server:
        transformer = server.handlers.comparison.original.transformer
        calls: list[float] = []

        def wait(module, args):
            calls.append(time.monotonic())
            time.sleep(0.2)

        transformer.register_forward_pre_hook(wait)
        page.goto(server.url)
        client = gradio_client.Client(server.url, verbose=False, analytics_enabled=False)
        jobs = [client.submit(**{**VIDEO, "steps": 50}, api_name="/generate")]
        wait_until(lambda: calls)
        jobs.append(client.submit(**VIDEO, api_name="/generate"))
        wait_until(lambda: server.waiting() == 1)
        page.get_by_role("button", name="Generate").click()
        toast = page.get_by_test_id("toast-body")
        toast.wait_for()
        message = toast.inner_text()
        for job in jobs:
            job.cancel()
    assert "busy" in message.lower() or "queue is full" in message.lower(), message


def test_a_prompt_beyond_the_limit_is_refused_with_one_line(opened):
    opened.locator("#field-prompt textarea").fill("a" * 60)
    opened.get_by_role("button", name="Generate").click()
    toast = opened.get_by_test_id("toast-body")
    toast.wait_for()
    assert "Prompt has 60 characters; at most 40 are taken here." in toast.inner_text()
    assert "Traceback" not in opened.inner_text("body")


def test_mixing_pictures_change_with_the_layer(opened):
    opened.get_by_role("tab", name="Mixing").click()
    picture = opened.locator("#mixing img")
    picture.wait_for()

    def choose(field: str, value: str) -> str:
        before = picture.get_attribute("src")
        opened.locator(f"#{field} input").click()
        opened.get_by_role("option", name=value, exact=True).click()
        opened.wait_for_function("old => document.querySelector('#mixing img').src != old", arg=before)
        return picture.get_attribute("src")

    sources = [picture.get_attribute("src"), choose("layer", "blocks.1.attn1"), choose("layer", "blocks.0.attn1")]
    sources.append(choose("head", "1"))
    opened.wait_for_function("() => document.querySelector('#mixing img').naturalWidth > 300")
    assert sources[0] == sources[2]
    assert len(set(sources)) == 3


def test_time_against_length_is_measured(opened):
    opened.get_by_role("tab", name="Speed").click()
    opened.get_by_role("button", name="Measure").click()
    opened.locator("#speed img").wait_for()
    rows = opened.locator("#speed-table tbody tr")
    rows.first.wait_for()
    lengths = [int(row.split()[0].replace(",", "")) for row in rows.all_inner_texts()]
    assert lengths == sorted(lengths) and lengths
    assert "1 of its threads" in opened.locator("#speed-table").inner_text()


def test_the_page_fits_a_phone_and_says_what_the_model_is(opened):
    opened.set_viewport_size(PHONE)
    assert "Not recovered." in opened.locator(".prose.notice").inner_text()
    for tab in ("Generate", "Mixing", "Speed", "About"):
        opened.get_by_role("tab", name=tab).click()
        assert opened.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    facts = opened.locator(".prose.facts").inner_text()
    assert "MHLAWanTransformer3DModel" in facts and "3 × 2 × 2" in facts
    assert "Files, keys, shapes and types are in order" in facts


def test_language_models_write_side_by_side(page, saved_language_model):
    with running(saved_language_model, Limits(new_tokens=8)) as server:
        page.goto(server.url)
        page.locator("#field-prompt textarea").fill("once upon")
        page.get_by_role("button", name="Generate").click()
        page.locator("#times table").wait_for()
        answers = [page.locator(f"#{name} textarea").input_value() for name in ("original", "mhla")]
    assert all(answers)
