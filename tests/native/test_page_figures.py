"""What the page shows of the engine, and whether everyone can use it: by keys, by ear, on a phone, in the dark."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest

from tests.browser import ANSWER, TREE, ask, asked, opened, shown
from tests.lacking import needs
from tests.page_server import DONE, PageServer, Step, cycle, ends, node, refuses, says

if TYPE_CHECKING:
    from playwright.sync_api import BrowserContext, Page

# A node as it is drawn: its text, state, left edge and row.
DRAWN = """groups => groups.map(group => {
  const box = group.querySelector("rect");
  return { text: group.querySelector("text").textContent, state: group.getAttribute("class"),
    x: Number(box.getAttribute("x")), y: Number(box.getAttribute("y")) };
})"""
LONG: list[Step] = [
    cycle(*TREE, *(node(f" word{i}", i, "drafted", 0.1) for i in range(5, 20)), new_tokens=3),
    says(
        "word" * 100 + " `" + "code" * 50 + "`\n\n```\n" + "x" * 300 + "\n```\n\n|a|b|\n|-|-|\n|" + "c" * 90 + "|d|\n"
    ),
    ends(),
    DONE,
]


def drawn(page: Page) -> list[dict[str, Any]]:
    nodes: list[dict[str, Any]] = page.eval_on_selector_all(".tree g", DRAWN)
    return nodes


# --- the tree -----------------------------------------------------------------------------------------------


def test_the_tree_is_that_of_the_cycle(server: PageServer, page: Page) -> None:
    server.answers.append(ANSWER)
    opened(page)
    page.get_by_role("button", name="Previous cycle").click()
    nodes = drawn(page)

    assert [(it["text"], it["state"]) for it in nodes] == [
        ("·the", "root"),
        ("·quick", "accepted"),
        ("·slow", "checked"),
        ("·brown↵", "accepted"),
        ("·red", "drafted"),
        ("·<b>", "pruned"),
    ]
    columns = sorted({it["x"] for it in nodes})
    assert [columns.index(it["x"]) for it in nodes] == [0, 1, 1, 2, 2, 2]
    assert len({it["y"] for it in nodes if it["state"] in ("root", "accepted")}) == 1  # the path is a straight line
    assert len({(it["x"], it["y"]) for it in nodes}) == len(nodes)
    paths = page.eval_on_selector_all(".tree path", "paths => paths.map((path) => path.getAttribute('class'))")
    assert sorted(paths) == ["accepted", "accepted", "checked", "drafted", "pruned"]
    assert (
        page.inner_text(".caption") == "Guessed 5 tokens, pruned 1, checked 3 in one pass, accepted 2: “quick brown”."
    )


def test_the_tree_can_be_heard(server: PageServer, page: Page) -> None:
    server.answers.append(ANSWER)
    opened(page)
    page.get_by_label("Cycle", exact=True).press("Home")

    assert "accepted 2" in (page.locator(".tree svg").get_attribute("aria-label") or "")
    assert page.locator(".tree ul ul ul li").all_text_contents() == [
        "·brown↵, accepted, reach 80 %",
        "·red, guessed, not checked, reach 4 %",
        "·<b>, pruned, reach 2 %",
    ]


def test_the_cycles_are_walked_through_by_slider_and_buttons(server: PageServer, page: Page) -> None:
    server.answers.append(ANSWER)
    opened(page)
    back, forth = (page.get_by_role("button", name=f"{name} cycle") for name in ("Previous", "Next"))

    assert page.inner_text(".pick output") == "Cycle 2 of 2"
    assert page.inner_text(".caption") == "No guesses: one pass for 1 token."
    assert forth.is_disabled()
    back.click()
    assert back.is_disabled()
    assert len(drawn(page)) == 6
    page.get_by_label("Cycle", exact=True).press("ArrowRight")
    assert len(drawn(page)) == 1


def test_the_tree_follows_the_engine_unless_another_cycle_is_looked_at(server: PageServer, page: Page) -> None:
    pauses = [threading.Event() for _ in range(3)]
    steps: list[Any] = [cycle(), says("a"), pauses[0], cycle(), says("b"), pauses[1], cycle(), says("c"), pauses[2]]
    server.answers.append([*steps, ends(), DONE])
    ask(page)
    page.click("summary")
    page.wait_for_selector("text=Cycle 1 of 1")
    pauses[0].set()
    page.wait_for_selector("text=Cycle 2 of 2")
    page.get_by_role("button", name="Previous cycle").click()
    pauses[1].set()
    page.wait_for_selector("text=Cycle 1 of 3")
    pauses[2].set()


def test_of_hundreds_of_unlikely_guesses_the_likeliest_are_drawn(server: PageServer, page: Page) -> None:
    chain = [node(" a", i - 1, "accepted" if i else "root", 0.9) for i in range(10)]
    many = [node(f" {i}", i % 10, "drafted", 0.5 / (i + 1)) for i in range(300)]
    server.answers.append([cycle(*chain, *many, new_tokens=10), ends(), DONE])
    opened(page)
    nodes = drawn(page)

    assert [it["text"] for it in nodes if it["state"] == "drafted"] == [f"·{i}" for i in range(16)]
    assert "Guessed 309 tokens (of those not checked, the likeliest 16 are drawn)" in page.inner_text(".caption")


# --- figures ------------------------------------------------------------------------------------------------


def test_one_line_has_the_figures(server: PageServer, page: Page) -> None:
    server.answers.append(ANSWER)  # 4 tokens in two cycles of half a second; 10 tokens/s by the server's own figures
    asked(page)

    assert page.locator("summary > span").all_text_contents() == [
        "10 tokens/s",
        "5 \u00d7 plain decoding",
        "2 tokens per cycle",
        "1.5 GB/s read",
    ]


def test_without_a_plain_pass_nothing_is_compared_with_it(server: PageServer, page: Page) -> None:
    server.props["plain_pass_s"] = None
    page.reload()
    page.wait_for_selector("#facts div")
    server.answers.append(ANSWER)
    asked(page)

    assert "plain" not in page.inner_text("summary")
    assert "Plain decoding" not in page.locator("#facts").inner_text()


def test_time_and_memory_are_told_part_by_part(server: PageServer, page: Page) -> None:
    server.answers.append(ANSWER)
    opened(page)
    time, memory = (page.locator(".panel .part").filter(has_text=name) for name in ("Time of this", "Memory by part"))

    assert time.locator("li").all_inner_texts() == [
        "drafting 100 ms",
        "waiting for storage 50 ms",
        "computing layers 250 ms",
        "projecting 20 ms",
        "other 80 ms",
    ]
    assert memory.locator("li").all_inner_texts() == [
        "Python 120 MiB",
        "KV cache 112 MiB",
        "draft 300 MiB",
        "ring 84 MiB",
    ]
    assert memory.locator("h3").inner_text() == "Memory by part 616 MiB of 900 MiB"
    widths = memory.locator(".bar i").evaluate_all("bars => bars.map((bar) => parseFloat(bar.style.width))")
    assert widths == pytest.approx([100 * n / 900 for n in (120, 112, 300, 84)], abs=0.01)


def test_charts_say_what_they_draw(server: PageServer, page: Page) -> None:
    server.answers.append(ANSWER)
    opened(page)
    tokens, storage = (chart.get_attribute("aria-label") for chart in page.locator(".chart").all())

    assert tokens == "Tokens of each cycle: 3, 1"
    assert storage == "Storage rate over 1 s: 1.48 GB/s, up to 1.48 GB/s"


# --- for everyone -------------------------------------------------------------------------------------------


def test_by_keys_alone(server: PageServer, page: Page) -> None:
    server.answers.extend([ANSWER, [says("Anew."), ends(), DONE]])

    def focused() -> str:
        name: str = page.evaluate("document.activeElement.ariaLabel || document.activeElement.textContent")
        return name

    page.keyboard.type("What jumps?")  # the field has the focus
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Regenerate").wait_for()
    page.locator("body").press("Shift+Tab")
    met = []
    for _ in range(12):
        met.append(focused())
        page.keyboard.press("Shift+Tab")
    assert met[:3] == ["Regenerate", "Copy", page.locator("summary").text_content()]
    assert {"Edit", "Clear", "Settings", "Skip to the question"} <= set(met)

    page.focus("summary")
    page.keyboard.press("Enter")
    page.wait_for_selector(".tree svg")
    page.keyboard.press("Tab")
    assert focused() == "Previous cycle"
    page.keyboard.press("Space")
    assert len(drawn(page)) == 6
    page.get_by_role("button", name="Regenerate").focus()
    page.keyboard.press("Enter")
    page.wait_for_selector("text=Anew.")


def test_a_finished_answer_is_said_once_and_no_token_is(server: PageServer, page: Page) -> None:
    more = threading.Event()
    server.answers.append([says("Foxes "), more, says("jump."), ends(), DONE])
    ask(page)
    page.wait_for_selector("text=Foxes")

    assert page.locator("[aria-live=polite]").all_text_contents() == [""]
    more.set()
    page.wait_for_function("() => document.querySelector('[aria-live]').textContent === 'Answer: Foxes jump.'")


def test_on_a_phone_nothing_is_wider_than_the_screen(server: PageServer, page: Page) -> None:
    page.set_viewport_size({"width": 360, "height": 740})
    server.answers.append(LONG)
    page.fill("#question", "longword" * 40)
    page.press("#question", "Enter")
    page.get_by_role("button", name="Regenerate").wait_for()
    page.click("summary")
    page.wait_for_selector(".tree svg")

    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    assert page.evaluate("document.documentElement.scrollHeight === document.body.offsetHeight")  # nothing hangs below
    assert page.evaluate("document.querySelector('.tree').scrollWidth") > 360  # it scrolls inside
    for dialog in ("settings", "locked"):
        page.evaluate(f"document.getElementById('{dialog}').showModal()")
        box = page.locator(f"#{dialog}").bounding_box()
        assert box is not None
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= 360
        page.keyboard.press("Escape")


def test_text_and_code_can_be_copied(server: PageServer, context: BrowserContext, page: Page) -> None:
    context.grant_permissions(["clipboard-read", "clipboard-write"])
    text = "Run\n```sh\nls <x>\n```"
    server.answers.append([says(text), ends(), DONE])
    asked(page)
    for button, copied in ((page.locator(".code button"), "ls <x>"), (page.locator(".row button").first, text)):
        button.click()
        page.wait_for_function("() => document.querySelector('[aria-live]').textContent === 'Copied'")
        assert page.evaluate("navigator.clipboard.readText()") == copied
        page.evaluate("say('')")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing(server: PageServer, page: Page, scheme: Any) -> None:
    axe = needs("axe_playwright_python.sync_playwright").Axe()

    def check() -> None:
        results = axe.run(page)
        assert results.violations_count == 0, results.generate_report()

    page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
    check()
    server.answers.extend([LONG, refuses(500, "the disk is gone")])
    opened(page)
    assert "word" in shown(page)
    check()
    ask(page, "again")
    page.wait_for_selector("text=the disk is gone")
    check()
    page.click("#set")
    check()
    page.keyboard.press("Escape")
    page.evaluate("document.getElementById('locked').showModal()")
    check()
