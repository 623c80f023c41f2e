"""Debian's Chromium, driven by Playwright, and the page in it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.lacking import lacking, needs
from tests.page_server import DONE, PageServer, cycle, ends, node, says, serving

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Page

CHROMIUM = shutil.which("chromium")
FLAGS = """--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking
--disable-component-update --disable-sync"""
TREE = (
    node(" the", -1, "root", 1.0),
    node(" quick", 0, "accepted", 0.9),
    node(" slow", 0, "checked", 0.05),
    node(" brown\n", 1, "accepted", 0.8),
    node(" red", 1, "drafted", 0.04),
    node(" <b>", 2, "pruned", 0.02),
)
ANSWER = [cycle(*TREE, new_tokens=3), says("quick **brown**"), cycle(), says(" fox"), ends(), DONE]


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


def ask(page: Page, question: str = "What jumps?") -> None:
    page.fill("#question", question)
    page.press("#question", "Enter")


def asked(page: Page, question: str = "What jumps?") -> None:
    """Ask, and wait for the end of the answer."""
    ask(page, question)
    page.get_by_role("button", name="Regenerate").last.wait_for()


def shown(page: Page) -> str:
    return page.inner_text(".text >> nth=-1").strip()


def opened(page: Page) -> None:
    """Ask, and open what the engine did."""
    asked(page)
    page.click("summary")
    page.wait_for_selector(".tree svg")
