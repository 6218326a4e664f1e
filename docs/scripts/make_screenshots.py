# SPDX-License-Identifier: Apache-2.0
"""Takes the pictures of the application and of inspections in `docs/images`, with the demo's recovered pipeline.

python docs/scripts/make_screenshots.py demo-output/mhla

Needs playwright and a Chromium; see `tests/browser.py`.
"""

from __future__ import annotations

import argparse
import io
import sys
import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright

from mhla_hf.analysis import inspect_directory, write_html
from mhla_hf.app import create_app, serve
from mhla_hf.demo import base_pipeline_directory


ROOT = Path(__file__).resolve().parents[2]
IMAGES = ROOT / "docs" / "images"
_WIDTH, _MARGIN = 1200, 90
# Moment of the videos in seconds.
_MOMENT = 1.3
# Four times as wide as the videos of the demo, and twice as long: 2,304 tokens in place of 320, where MHLA is faster.
# At larger heights its original draws no digits; with this seed both models do.
_SETTINGS = {"number input for Width": 256, "number input for Frames": 33, "Seed": 1}


def save(page: Page, name: str, last: str) -> None:
    """Writes the page down to the element `last`, without margins."""
    page.mouse.move(5, 5)
    page.wait_for_timeout(1000)
    box = page.locator(last).bounding_box()
    clip = {"x": _MARGIN, "y": 0, "width": _WIDTH - 2 * _MARGIN, "height": box["y"] + box["height"] + 16}
    picture = Image.open(io.BytesIO(page.screenshot(clip=clip)))
    picture.convert("RGB").save(IMAGES / f"{name}.png", optimize=True)


def photograph_report(browser: Browser, model: Path) -> None:
    """Pictures of the report on a model of the demo: mixing weights on a desk, figures of attention on a phone."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.html"
        write_html(inspect_directory(model, base=base_pipeline_directory()), report)
        for name, width, height, heading in (
            ("inspect", 1080, 1065, "Mixing weights of each layer"),
            ("inspect_phone", 390, 1085, "Rank and focus of attention"),
        ):
            page = browser.new_page(viewport={"width": width, "height": height})
            page.goto(report.as_uri())
            page.get_by_role("heading", name=heading).evaluate("part => window.scrollTo(0, part.offsetTop - 20)")
            picture = Image.open(io.BytesIO(page.screenshot()))
            picture.convert("RGB").save(IMAGES / f"{name}.png", optimize=True)
            page.close()


def main() -> None:
    sys.path.insert(0, str(ROOT))
    from tests.browser import ARGUMENTS, find_chromium

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, help="MHLA pipeline of videos, such as demo-output/mhla")
    model = parser.parse_args().model
    page_of_app = create_app(model)
    _, url, _ = serve(page_of_app, prevent_thread_lock=True, quiet=True)
    with sync_playwright() as playwright:
        executable = find_chromium(playwright.chromium.executable_path)
        browser = playwright.chromium.launch(executable_path=executable, args=list(ARGUMENTS))
        page = browser.new_page(viewport={"width": _WIDTH, "height": 1000})
        page.goto(url)
        page.get_by_role("button", name="Settings").click()
        for name, value in _SETTINGS.items():
            box = page.get_by_label(name, exact=True)
            box.fill(str(value))
            box.press("Tab")
        page.get_by_role("button", name="Settings").click()
        page.get_by_role("button", name="Generate").click()
        page.locator("#times strong").first.wait_for(timeout=300_000)
        page.wait_for_timeout(1000)
        page.evaluate(
            "moment => document.querySelectorAll('video').forEach(v => { v.pause(); v.currentTime = moment; })",
            _MOMENT,
        )
        save(page, "app", "#times")
        page.get_by_role("tab", name="Mixing").click()
        page.locator("#mixing svg").last.wait_for()
        save(page, "app_mixing", "#mixing")
        photograph_report(browser, model)
        browser.close()
    page_of_app.close()


if __name__ == "__main__":
    main()
