# SPDX-License-Identifier: Apache-2.0
"""Fixtures of tests in a real browser: Chromium without a window, driven by playwright.

`tests/conftest.py` makes `browser` and `page` known to all tests. Where playwright or a Chromium is missing, the tests
that ask for them are skipped, and the reason says what to install.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

import pytest


EXECUTABLE_VARIABLE = "MHLA_HF_CHROMIUM"
"""Environment variable with the path of a Chromium to use in place of the one on the path."""

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
ARGUMENTS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
"""Arguments of a Chromium without a window, which asks nobody for anything of its own accord."""

_LOCAL = ("", "localhost", "127.0.0.1")
_TIMEOUT = 60_000


def find_chromium(downloaded: str) -> str | None:
    """Path of a Chromium: named by the environment, on the path, or downloaded by `playwright install chromium`."""
    named = os.environ.get(EXECUTABLE_VARIABLE)
    found = [named] if named else [shutil.which(name) for name in _NAMES] + [downloaded]
    return next((path for path in found if path and Path(path).is_file()), None)


# Not of the session: while it is open, no other test of the process can run an event loop of its own.
@pytest.fixture(scope="module")
def browser() -> Iterator:
    """A playwright `Browser`."""
    if find_spec("playwright") is None:
        pytest.skip("playwright is not installed (pip install playwright)")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        executable = find_chromium(playwright.chromium.executable_path)
        if executable is None:
            pytest.skip("no Chromium found (apt-get install chromium, or playwright install chromium)")
        browser = playwright.chromium.launch(executable_path=executable, args=list(ARGUMENTS))
        yield browser
        browser.close()


@pytest.fixture
def page(browser) -> Iterator:
    """A fresh playwright `Page`, 1200 pixels wide, without a network beyond this machine.

    The test fails if the page asks for anything elsewhere, or if one of its scripts raises an error.
    """
    context = browser.new_context(viewport={"width": 1200, "height": 900})
    context.set_default_timeout(_TIMEOUT)
    refused: list[str] = []
    errors: list[str] = []

    def is_elsewhere(url: str) -> bool:
        # Pictures inside a page (data:) and files have no host.
        return (urlsplit(url).hostname or "") not in _LOCAL

    def refuse(route) -> None:
        refused.append(route.request.url)
        route.abort()

    context.route(is_elsewhere, refuse)
    page = context.new_page()
    page.on("pageerror", lambda error: errors.append(str(error)))
    yield page
    context.close()
    assert refused == [], f"the page asks for {refused}"
    assert errors == [], f"scripts of the page fail: {errors}"
