"""Make the README's picture of the page: python docs/images/make_page.py URL PNG, with `lever serve demo` at the URL.

Asks a question, waits for the answer, and opens a cycle that brought many tokens. Needs chromium and Playwright.
"""

from __future__ import annotations

import argparse

from playwright.sync_api import sync_playwright

QUESTION = "Write a Python function that tells whether a word is a palindrome, and explain it in one sentence."
SIZE = {"width": 960, "height": 1000}
MINUTES = 10  # for the answer
# The first of the cycles with the most tokens; its slider hears of it.
MOST = """() => {
  const { figures, record } = turns.at(-1);
  const tokens = record.cycles.map((cycle) => cycle.new_tokens);
  figures.slider.value = tokens.indexOf(Math.max(...tokens)) + 1;
  figures.slider.dispatchEvent(new Event("input"));
  scrollTo(0, document.body.scrollHeight);
}"""


def main() -> None:
    """Take it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("png")
    wanted = parser.parse_args()
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path="/usr/bin/chromium", args=["--headless", "--no-sandbox"])
        page = browser.new_page(viewport=SIZE, color_scheme="light")
        page.goto(wanted.url)
        page.wait_for_selector("#facts div", timeout=60_000 * MINUTES)
        page.fill("#question", QUESTION)
        page.press("#question", "Enter")
        page.get_by_role("button", name="Regenerate").wait_for(timeout=60_000 * MINUTES)
        page.click("summary")
        page.wait_for_selector(".tree svg")
        page.evaluate(MOST)
        page.screenshot(path=wanted.png)
        browser.close()


if __name__ == "__main__":
    main()
