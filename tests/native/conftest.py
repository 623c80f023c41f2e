"""The page of `lever serve` in Debian's Chromium, driven by Playwright; the server behind it does what a test says."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.lacking import lacking, needs
from tests.page_server import PageServer, serving

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Page

CHROMIUM = shutil.which("chromium")
FLAGS = """--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking
--disable-component-update --disable-sync"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    playwright = needs("playwright.sync_api")
    if CHROMIUM is None:
        lacking("there is no chromium")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS.split())
        yield browser
        browser.close()


@pytest.fixture
def server() -> Iterator[PageServer]:
    with serving(PageServer()) as server:
        yield server


@pytest.fixture
def context(browser: Browser, server: PageServer) -> Iterator[BrowserContext]:
    """A tab's surroundings. At its end: nothing went wrong in a page, or against its policy, or to another origin."""
    context = browser.new_context(base_url=server.url)
    context.set_default_timeout(20_000)
    problems: list[str] = []
    context.on("weberror", lambda error: problems.append(str(error.error)))
    context.on("console", lambda line: problems.append(line.text) if line.type in ("error", "warning") else None)
    context.on("request", lambda it: None if it.url.startswith((server.url, "data:")) else problems.append(it.url))
    yield context
    context.close()
    assert [line for line in problems if not line.startswith("Failed to load resource")] == []


@pytest.fixture
def page(context: BrowserContext) -> Page:
    """The page, ready for a question."""
    page = context.new_page()
    page.goto("/")
    page.wait_for_selector("#facts div")
    return page
