"""The page in headless Chromium: what it shows, that it needs nothing from elsewhere, that the keyboard suffices."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from outrider.serve.page import PAGE_HEADERS, page
from tests.serve.support import SCRIPTS, LiveServer

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
SCREENSHOTS = os.environ.get("OUTRIDER_SCREENSHOTS")
"""A folder to leave pictures in, for whoever wants to look; then every combination is taken."""
ALL_VIEWS = [(width, scheme) for width in (1280, 380) for scheme in ("light", "dark")]


def test_the_page_stands_alone() -> None:
    text = page()
    assert not re.findall(r"""(?:src|href)=["'](?!data:)|https?://(?!www\.w3\.org/2000/svg)|@import|url\(""", text)
    assert "innerHTML" not in text, "text of a model is never read as HTML"
    assert "default-src 'none'" in PAGE_HEADERS["content-security-policy"]
    labelled = set(re.findall(r'aria-labelledby="([^"]+)"', text)) | set(re.findall(r' for="([^"]+)"', text))
    assert labelled <= set(re.findall(r' id="([^"]+)"', text))


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("no chromium is installed; the page is not looked at")
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (extra 'browser')")
    with sync_api.sync_playwright() as playwright:
        yield playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])


def opened(browser: Any, server: LiveServer, *, width: int, scheme: str) -> tuple[Any, list[str]]:
    """A page and the list of what went wrong on it."""
    view = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    wrong: list[str] = []
    view.on("pageerror", lambda error: wrong.append(str(error)))
    view.on("console", lambda message: wrong.append(message.text) if message.type == "error" else None)
    view.on(
        "request", lambda request: None if request.url.startswith((server.url, "data:")) else wrong.append(request.url)
    )
    view.goto(server.url)
    until(view, "document.getElementById('health').textContent === 'serving'")
    return view, wrong


def until(view: Any, expression: str) -> None:
    """Wait for an expression to hold. Playwright's own waiting evaluates text inside the page, which the page forbids."""
    for _ in range(400):
        if view.evaluate(expression):
            return
        view.wait_for_timeout(25)
    pytest.fail(f"within ten seconds it did not come to: {expression}")


def picture(view: Any, name: str) -> None:
    if SCREENSHOTS:
        view.screenshot(path=str(Path(SCREENSHOTS) / f"{name}.png"), full_page=True)


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (380, "dark")] if not SCREENSHOTS else ALL_VIEWS)
def test_a_drafted_answer_is_coloured(browser: Any, scripted: LiveServer, width: int, scheme: str) -> None:
    view, wrong = opened(browser, scripted, width=width, scheme=scheme)
    for _ in range(2):  # the second time suffix decoding knows the text
        view.fill("#prompt", "Tell a long story, please")
        view.fill("#max_tokens", "600")
        view.focus("#prompt")
        view.keyboard.press("Control+Enter")
        until(view, "document.getElementById('message').textContent === 'done'")
    assert view.text_content("#text-a") == SCRIPTS["long story"]
    assert view.locator("#text-a .draft").count() > 3
    numbers = view.locator("#numbers-a").inner_text()
    assert "tokens/s" in numbers and re.search(r"tokens a pass of the model\s+[2-9]\.\d", numbers)
    assert view.locator("#positions .bar").count() == 8
    # No label is squeezed into several lines by a long value.
    heights = view.evaluate(
        "[...document.querySelectorAll('#load dt')].map(each => each.getBoundingClientRect().height)"
    )
    assert heights and max(heights) < 40
    until(view, "document.querySelectorAll('#decisions .bar').length > 0")
    until(view, "/tokens so far\\s*[1-9]/.test(document.getElementById('load').innerText)")
    view.locator("#planner").evaluate("node => node.parentElement.open = true")
    told = json.loads(view.text_content("#planner"))
    assert "costs" in told and view.locator("#planner").bounding_box()["height"] <= 400
    assert "\n" not in re.findall(r'"rows": (\[[^]]*\])', view.text_content("#planner"))[0], "a list is one line"
    picture(view, f"answer-{scheme}-{width}")
    wide = view.evaluate("document.documentElement.scrollWidth")
    assert wide <= width, f"the page is {wide} pixels wide"
    ground = view.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (int(re.findall(r"\d+", ground)[0]) < 60) == (scheme == "dark")
    view.close()
    assert wrong == []


def test_long_lists_are_folded(browser: Any, scripted: LiveServer) -> None:
    """A server whose grammars force long runs still shows a dozen rows, and one for all that is beyond."""
    view, wrong = opened(browser, scripted, width=390, scheme="dark")
    counts = "Array.from({length: 30}, (_, i) => ({reached: 60 - i, accepted: 30}))"
    view.evaluate(f"clearTimeout(timer); positions('all-positions', {counts})")
    view.evaluate("decisions(Object.fromEntries(Array.from({length: 30}, (_, i) => [i, 1])))")
    for name, rows, last in (
        ("all-positions", 13, "540 of 711"),
        ("decisions", 14, "57 %"),
    ):
        assert view.locator(f"#{name} .bar").count() == rows
        assert view.locator(f"#{name} span").all_inner_texts()[-2:] == ["13+", last]
    tops = view.evaluate("['h1', '#theme'].map(each => document.querySelector(each).getBoundingClientRect().bottom)")
    assert abs(tops[0] - tops[1]) < 20, "the head is one line on a telephone, too"
    view.close()
    assert wrong == []


def test_errors_stop_and_the_other_theme(browser: Any, scripted: LiveServer) -> None:
    view, wrong = opened(browser, scripted, width=1280, scheme="light")
    view.fill("#prompt", "this never ends")
    view.fill("#max_tokens", "99999")
    view.click("#go")
    until(view, "document.getElementById('message').className.includes('bad')")
    assert "max_tokens 99999 does not fit" in view.text_content("#message")
    assert len(wrong) == 1 and "400" in wrong[0], "the browser notes the refusal, and nothing else"
    picture(view, "error-light-1280")
    view.fill("#max_tokens", "4000")
    view.click("#go")
    until(view, "document.getElementById('text-a').textContent.length > 40")
    view.keyboard.press("Escape")
    until(view, "document.getElementById('message').textContent === 'stopped'")
    before = view.evaluate("getComputedStyle(document.body).backgroundColor")
    view.focus("#theme")
    view.keyboard.press("Enter")
    assert view.evaluate("getComputedStyle(document.body).backgroundColor") != before
    view.close()


def test_plain_decoding_stands_beside_it(browser: Any, scripted: LiveServer) -> None:
    view, wrong = opened(browser, scripted, width=1280, scheme="light")
    view.fill("#prompt", "Tell a long story, please")
    view.fill("#temperature", "0.7")
    view.click("#compare")
    until(view, "document.getElementById('verdict').textContent.length > 0")
    assert "Same text, letter for letter" in view.text_content("#verdict")
    assert view.text_content("#text-a") == view.text_content("#text-b") != ""
    assert view.locator("#text-b .draft").count() == 0 and view.input_value("#seed") != ""
    picture(view, "compare-light-1280")
    view.close()
    assert wrong == []
