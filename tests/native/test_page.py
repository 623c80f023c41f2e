"""The page of `lever serve` in a real browser: what people do with it, what hostile models and failing servers do."""

from __future__ import annotations

import json
import re
import threading
from typing import TYPE_CHECKING, Any

import pytest

from tests.browser import ANSWER, ask, asked, opened, shown
from tests.page_server import DONE, PageServer, cycle, ends, node, refuses, says

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Page


# --- asking -------------------------------------------------------------------------------------------------


def test_text_shows_while_it_comes(server: PageServer, page: Page) -> None:
    more = threading.Event()
    server.answers.append([says("Foxes "), more, says("jump."), ends(), DONE])
    ask(page)
    page.wait_for_selector("text=Foxes")

    assert shown(page) == "Foxes"
    assert page.is_visible("#stop")
    more.set()
    page.wait_for_selector("text=Foxes jump.")
    page.wait_for_selector("#send", state="visible")
    assert page.input_value("#question") == ""


def test_the_question_is_sent_with_what_was_said_before_and_the_settings(server: PageServer, page: Page) -> None:
    server.answers.extend([[says("one"), ends(), DONE], [says("two"), ends(), DONE]])
    page.click("#set")
    page.fill("#system", "Be brief.")
    page.fill("#temperature", "0")
    page.fill("#seed", "7")
    page.click("#settings .main")
    asked(page, "first\nwith two lines")
    asked(page, "second")
    first, second = server.asked

    roles = {"stream": True, "return_progress": True, "return_cycles": True, "temperature": 0, "seed": 7}
    assert first.items() >= roles.items()
    assert "top_k" not in first
    assert second["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "first\nwith two lines"},
        {"role": "assistant", "content": "one"},
        {"role": "user", "content": "second"},
    ]


def test_shift_and_enter_begin_a_line_and_the_field_grows(page: Page) -> None:
    low = page.locator("#question").bounding_box()
    page.fill("#question", "a")
    for _ in range(3):
        page.press("#question", "Shift+Enter")
    high = page.locator("#question").bounding_box()

    assert page.input_value("#question") == "a\n\n\n"
    assert low is not None
    assert high is not None
    assert high["height"] > low["height"] + 40


@pytest.mark.parametrize("way", ["button", "Escape"])
def test_K1_stopping_closes_the_connection_and_keeps_the_text(server: PageServer, page: Page, way: str) -> None:
    server.answers.append([says("Foxes "), threading.Event()])
    ask(page)
    page.wait_for_selector("text=Foxes")
    if way == "button":
        page.click("#stop")
    else:
        page.keyboard.press("Escape")

    assert server.left.wait(timeout=20)
    page.wait_for_selector("text=You stopped this answer.")
    assert shown(page) == "Foxes"


def test_an_answer_can_be_had_again_and_its_question_changed(server: PageServer, page: Page) -> None:
    server.answers.extend([[says(text), ends(), DONE] for text in ("one", "two", "three")])
    asked(page, "old")
    page.click("text=Regenerate")
    page.wait_for_selector("text=two")
    page.click("text=Edit")
    page.fill(".edit textarea", "new")
    page.press(".edit textarea", "Enter")
    page.wait_for_selector("text=three")

    assert [body["messages"][-1]["content"] for body in server.asked] == ["old", "old", "new"]
    assert all(len(body["messages"]) == 1 for body in server.asked)
    assert page.locator("article").count() == 1


def test_the_conversation_outlives_a_reload_until_it_is_cleared(server: PageServer, page: Page) -> None:
    server.answers.append(ANSWER)
    asked(page, "kept?")
    page.reload()
    page.wait_for_selector("text=kept?")
    assert shown(page) == "quick brown fox"
    assert "tokens/s" in page.inner_text("summary")

    page.click("#clear")
    page.reload()
    page.wait_for_selector("#facts div")
    assert page.locator("article").count() == 0


def test_a_conversation_too_long_to_be_kept_loses_its_cycles_first(server: PageServer, page: Page) -> None:
    long = cycle(node("x" * 3_000_000, -1, "root", 1.0))
    server.answers.extend([[long, says("one"), ends(), DONE], [long, says("two"), ends(), DONE]])
    asked(page)
    asked(page)
    kept = json.loads(page.evaluate("sessionStorage.getItem('lever.turns')"))

    assert [(turn["text"], len(turn["cycles"])) for turn in kept] == [("one", 0), ("two", 1)]


def test_the_limit_of_tokens_is_told(server: PageServer, page: Page) -> None:
    server.answers.append([says("Foxes"), ends("length"), DONE])
    asked(page)

    assert "The limit of tokens ended this answer." in page.inner_text(".answer")


# --- waiting ------------------------------------------------------------------------------------------------


def test_while_the_model_is_loaded_the_page_says_so_and_sends_nothing(
    server: PageServer, context: BrowserContext
) -> None:
    server.loading = "Loading: reading the weights"
    page = context.new_page()
    page.goto("/")
    page.wait_for_selector("text=Loading: reading the weights")
    page.fill("#question", "Hello")
    page.press("#question", "Enter")

    assert page.is_disabled("#send")
    assert page.input_value("#question") == "Hello"
    server.loading = None
    page.wait_for_selector("#facts div")
    assert page.is_hidden("#state")
    assert page.is_enabled("#send")
    assert server.asked == []


def test_how_much_of_a_long_prompt_was_read_is_shown(server: PageServer, page: Page) -> None:
    go = threading.Event()
    progress = {"total": 2000, "cache": 100, "processed": 860, "time_ms": 900}
    server.answers.append([": ping\n\n", {"choices": [], "prompt_progress": progress}, go, says("Foxes"), ends(), DONE])
    ask(page)
    page.wait_for_selector("text=Reading the prompt: 43 %, 860 of 2,000 tokens, 100 known from before")

    assert page.evaluate("document.querySelector('progress').value") == 0.43
    go.set()
    page.wait_for_selector("text=Foxes")
    assert page.is_hidden("progress")


def test_a_stream_may_be_cut_anywhere(server: PageServer, page: Page) -> None:
    pieces = ": ping\r\n\r\ndata: " + json.dumps(says("fünf")) + "\r\n\r\n" + DONE
    steps: list[Any] = []
    for at in range(0, len(pieces), 7):
        steps.append(pieces[at : at + 7])
    server.answers.append(steps)
    asked(page)

    assert shown(page) == "fünf"


# --- errors -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (refuses(429, "full", {"Retry-After": "5"}), "busy with other questions. Try again in 5 s."),
        (
            refuses(400, "long", type="exceed_context_size_error", n_prompt_tokens=5000, n_ctx=4096),
            "too long for the model: 5000 tokens, and it takes 4096",
        ),
        (refuses(500, "reading m.gguf failed at byte 7"), "reading m.gguf failed at byte 7"),
        ([says("Fo"), 'event: error\ndata: {"error": {"message": "the disk is gone"}}\n\n'], "the disk is gone"),
        ([says("Fo")], "The answer broke off"),
        (["data: {nonsense\n\n"], "The connection to the server broke"),
    ],
    ids=["full", "context", "refused", "error in the stream", "no end", "nonsense"],
)
def test_K5_an_error_is_told_and_can_be_tried_again(server: PageServer, page: Page, answer: Any, words: str) -> None:
    server.answers.extend([answer, [says("Foxes."), ends(), DONE]])
    ask(page)
    page.get_by_role("alert").get_by_text(words).wait_for()
    page.get_by_role("button", name="Try again").click()
    page.get_by_role("button", name="Regenerate").wait_for()

    assert shown(page) == "Foxes."
    assert page.is_hidden(".error")


def test_a_question_without_an_answer_is_not_sent_again(server: PageServer, page: Page) -> None:
    server.answers.extend([refuses(500, "broken"), [says("Foxes."), ends(), DONE]])
    ask(page, "first")
    page.wait_for_selector("text=broken")
    asked(page, "second")

    assert server.asked[1]["messages"] == [{"role": "user", "content": "second"}]


def test_a_server_that_wants_a_key_gets_it_once_and_the_tab_keeps_it(
    server: PageServer, context: BrowserContext
) -> None:
    server.key = "secret"
    server.answers.append([says("Foxes."), ends(), DONE])
    page = context.new_page()
    page.goto("/")
    page.fill("#key", "wrong")
    page.press("#key", "Enter")
    page.wait_for_selector("text=The server did not take that key.")
    page.fill("#key", "secret")
    page.press("#key", "Enter")
    page.wait_for_selector("#facts div")
    asked(page)
    page.reload()
    page.wait_for_selector("text=Foxes.")

    assert page.is_hidden("#locked")
    assert page.evaluate("localStorage.length + document.cookie.length") == 0


def test_who_gives_no_key_is_told_why_nothing_goes_on(server: PageServer, context: BrowserContext) -> None:
    server.key = "secret"
    page = context.new_page()
    page.goto("/")
    page.wait_for_selector("#locked[open]")
    page.keyboard.press("Escape")

    page.wait_for_selector("text=The server answers only with its API key. Reload the page to try again.")


# --- hostile text -------------------------------------------------------------------------------------------

HOSTILE = {
    "markup": "<img src=x onerror=hit()> <script>hit()</script> </script><svg onload=hit()>",
    "code": "```\n</code></pre><img src=x onerror=hit()>\n```",
    "links": "[a](javascript:hit()) [b](data:text/html,x) [c](JaVaScRiPt:hit()) ![d](http://127.0.0.1:1/x.png)",
    "table": "| <b>a | b |\n|---|---|\n| <img src=x onerror=hit()> | c |",
    "controls": "a\x00b\x1b[31mc\u202ed\u2028e\ufeff\x7f",
    "entities": "&lt;b&gt; &#60;img&#62;",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_text_stays_text(server: PageServer, page: Page, name: str) -> None:
    page.evaluate("() => { window.hit = () => { window.hits = 1; }; }")
    text = HOSTILE[name]
    server.answers.append([cycle(node(text, -1, "root", 1.0)), says(text), ends(), DONE])
    opened(page)

    assert page.locator(":is(.text, .tree) :is(img, script, b, svg svg, iframe)").count() == 0
    assert page.evaluate("window.hits") is None
    links = page.eval_on_selector_all(".text a", "links => links.map((link) => [link.protocol, link.rel, link.target])")
    assert all(link == ["http:", "noopener noreferrer", "_blank"] for link in links)
    content = page.locator(".text").text_content() or ""
    if name == "markup":
        assert content == text
    elif name == "controls":
        assert content == text.replace("\x00", "\ufffd") or content == text


@pytest.mark.parametrize("unit", ["A", "**a ", "[", "- a\n"])
def test_a_megabyte_of_anything_is_shown_and_the_page_lives(server: PageServer, page: Page, unit: str) -> None:
    text = unit * (1_000_000 // len(unit))
    pieces = [says(text[at : at + 50_000]) for at in range(0, len(text), 50_000)]
    server.answers.extend([[*pieces, ends(), DONE], [says("alive"), ends(), DONE]])
    page.set_default_timeout(60_000)
    asked(page)
    page.click("#clear")
    asked(page)

    assert shown(page) == "alive"


def test_the_policy_lets_nothing_in_that_is_not_in_the_file(server: PageServer, browser: Browser) -> None:
    context = browser.new_context()
    page = context.new_page()
    page.goto(server.url)
    page.evaluate("""() => {
      window.refused = [];
      document.addEventListener("securitypolicyviolation", (event) => window.refused.push(event.effectiveDirective));
      const script = document.createElement("script");
      script.textContent = "window.hit = 1";
      const image = document.createElement("img");
      image.src = "/x.png";
      const styled = document.createElement("p");
      styled.setAttribute("style", "color: red");
      document.body.append(script, image, styled);
    }""")
    page.wait_for_function("() => window.refused.length === 3")

    assert sorted(page.evaluate("window.refused")) == ["img-src", "script-src-elem", "style-src-attr"]
    assert page.evaluate("window.hit") is None
    context.close()


# --- Markdown -----------------------------------------------------------------------------------------------

MARKDOWN = [
    ("# A\ntext\n***\nmore", "h3 p hr p"),
    ("a **b** *c* `d` ~~e~~ __f__ _g_ ***h***", "p strong em code s strong em strong em"),
    ("1. a\n2. b\n   - c\n\n   d\n3. e", "ol li p li p ul li p p li p"),
    ("- a\n\n- b\n\ntext", "ul li p li p p"),
    ("> a\n> - b\n\nc", "blockquote p ul li p p"),
    ("```py\n# no heading\n```\n~~~\n```\n~~~", "div div span button pre code div div span button pre code"),
    ("|a|b|\n|-|:-:|\n|1|2|\nx", "div table thead tr th th tbody tr td td p"),
    ("[a `b`](https://x.test/(y)) https://z.test/q.", "p a code a"),
    ("snake_case_word 2 * 3 * 4 \\*no\\* **open", "p"),
    ("```\nunclosed", "div div span button pre code"),
]


@pytest.mark.parametrize(("text", "tags"), MARKDOWN)
def test_markdown_becomes_elements_at_once_or_piece_by_piece(page: Page, text: str, tags: str) -> None:
    whole = page.evaluate("(text) => { const it = new Rendered(); it.show(text); return it.element.outerHTML; }", text)
    grown = page.evaluate(
        "(text) => { const it = new Rendered(); for (let n = 0; n <= text.length; n++) it.show(text.slice(0, n));"
        " return it.element.outerHTML; }",
        text,
    )

    assert " ".join(re.findall(r"<(\w+)", whole)[1:]) == tags
    assert grown == whole


def test_what_is_settled_is_not_made_anew(page: Page) -> None:
    same = page.evaluate("""() => {
      const it = new Rendered();
      it.show("one\\n\\ntwo");
      const first = it.element.firstChild;
      it.show("one\\n\\ntwo and more\\n\\nthree");
      return it.element.firstChild === first && it.element.children.length === 3;
    }""")

    assert same
