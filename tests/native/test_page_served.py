"""The page on the server that it is made for, with tiny models: a target, and itself as its own draft."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.browser import ask, asked, tab
from tests.fakes import wait_until
from tests.serving import Serving, serving, with_keys
from tests.tiny import tiny_model

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tiny_model(tmp_path / "tiny.gguf")


@pytest.fixture
def served(model: Path) -> Iterator[Serving]:
    """Guesses whatever they bring."""
    with serving(model, draft=model, policy="chain-sd") as served:
        yield served


@pytest.fixture
def page(browser: Browser, served: Serving) -> Iterator[Page]:
    with tab(browser, served.url) as context:
        page = context.new_page()
        page.goto("/")
        page.wait_for_selector("#facts div")
        page.evaluate("() => { settings = { temperature: 0, max_tokens: 12 }; }")
        yield page


def test_the_page_shows_the_text_that_the_api_gives(served: Serving, page: Page) -> None:
    asked(page, "Hello")
    reply = served.chat("Hello", temperature=0, max_tokens=12).json

    assert page.evaluate("turns[0].record.text") == reply["choices"][0]["message"]["content"]
    assert "tokens/s" in page.inner_text("summary")


def test_the_page_draws_the_cycles_of_the_engine(page: Page) -> None:
    asked(page, "Hello")
    page.click("summary")
    page.wait_for_selector(".tree svg")
    cycles = page.evaluate("turns[0].record.cycles")
    brought = sum(cycle["new_tokens"] for cycle in cycles)

    assert len(cycles) < brought <= 13  # guesses by the model itself are taken; the last cycle may go past the limit
    assert page.locator(".tree .root").count() == 1
    page.get_by_label("Cycle", exact=True).press("Home")
    assert page.locator(".tree g.accepted").count() == cycles[0]["new_tokens"] - 1
    assert page.locator(".part").filter(has_text="Memory by part").last.locator("li").count() >= 4


def test_K1_stopping_frees_the_model(served: Serving, page: Page) -> None:
    page.evaluate("() => { settings = { temperature: 0 }; }")
    served.device.delay_s = 0.05
    ask(page, "Hello")
    wait_until(lambda: served.worker.running, seconds=30)
    page.click("#stop")

    wait_until(lambda: not served.worker.running, seconds=30)
    page.wait_for_selector("text=You stopped this answer.")


def test_too_long_a_question_is_told_with_both_numbers(page: Page) -> None:
    ask(page, "x" * 5000)

    page.get_by_role("alert").get_by_text("too long for the model").wait_for()


def test_a_key_is_asked_for(browser: Browser, model: Path) -> None:
    with serving(model, gates=with_keys("secret")) as served, tab(browser, served.url) as context:
        page = context.new_page()
        page.goto("/")
        page.fill("#key", "secret")
        page.press("#key", "Enter")
        page.wait_for_selector("#facts div")
