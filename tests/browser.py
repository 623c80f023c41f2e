"""What tests of the page have in common: answers, and what people do with the page."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tests.page_server import DONE, Step, cycle, ends, node, says

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Page

TREE = (
    node(" the", -1, "root", 1.0),
    node(" quick", 0, "accepted", 0.9),
    node(" slow", 0, "checked", 0.05),
    node(" brown\n", 1, "accepted", 0.8),
    node(" red", 1, "drafted", 0.04),
    node(" <b>", 2, "pruned", 0.02),
)
ANSWER: list[Step] = [cycle(*TREE, new_tokens=3), says("quick **brown**"), cycle(), says(" fox"), ends(), DONE]


@contextmanager
def tab(browser: Browser, url: str) -> Iterator[BrowserContext]:
    """A tab's surroundings. At its end: nothing went wrong in a page, or against its policy, or to another origin."""
    context = browser.new_context(base_url=url)
    context.set_default_timeout(20_000)
    problems: list[str] = []
    context.on("weberror", lambda error: problems.append(str(error.error)))
    context.on("console", lambda line: problems.append(line.text) if line.type in ("error", "warning") else None)
    context.on("request", lambda it: None if it.url.startswith((url, "data:")) else problems.append(it.url))
    yield context
    context.close()
    assert [line for line in problems if not line.startswith("Failed to load resource")] == []


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
