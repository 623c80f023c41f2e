"""The command; a tiny model that is served; and the page of `lever serve` in Chromium, driven by Playwright.

The server behind the page does what a test says.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.browser import tab
from tests.command import Lever
from tests.lacking import lacking, needs
from tests.page_server import PageServer
from tests.page_server import serving as serving_page
from tests.serving import Serving, serving
from tests.tiny import tiny_model

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Page

CHROMIUM = shutil.which("chromium")
FLAGS = """--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking
--disable-component-update --disable-sync"""


@pytest.fixture(scope="session")
def bytecode(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What Python makes of lever's sources, for all processes of all tests."""
    return tmp_path_factory.mktemp("bytecode")


@pytest.fixture
def lever(tmp_path: Path, bytecode: Path) -> Lever:
    return Lever(tmp_path / "home", bytecode)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model") / "qwen2.gguf", arch="qwen2")


@pytest.fixture(scope="module")
def served(model: Path) -> Iterator[Serving]:
    with serving(model) as found:
        yield found


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
    with serving_page(PageServer()) as server:
        yield server


@pytest.fixture
def context(browser: Browser, server: PageServer) -> Iterator[BrowserContext]:
    with tab(browser, server.url) as context:
        yield context


@pytest.fixture
def page(context: BrowserContext) -> Page:
    """The page, ready for a question."""
    page = context.new_page()
    page.goto("/")
    page.wait_for_selector("#facts div")
    return page
