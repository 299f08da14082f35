"""The chat page's history, and the page by keyboard, by a screen reader's rules, on a phone and in the dark."""

import re
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.page.support import CHANGE, EXTRA, FIRST, KINDS, Chatting, Open, expect, finished, full, say, text_of
from tests.gateway.scripted import NAME

pytestmark = pytest.mark.long


# --- history ---------------------------------------------------------------------------------------------------------


def test_history_survives_a_reload(open_page: Open, gateway: Chatting) -> None:
    page = open_page()
    gateway.says = [FIRST, "All ", CHANGE, "is well."]
    finished(say(page, "First chat"))
    page.click("#new")
    finished(say(page, "Second chat"))
    page.reload()
    expect(page.locator(".chat")).to_have_text(["Second chat", "First chat"])
    assert page.locator(".bubble").all_inner_texts() == ["Second chat"]
    page.get_by_role("link", name="First chat").click()
    expect(page.locator(".bubble")).to_have_text(["First chat"])
    assert text_of(page.locator(".answer")) == "All is well."
    assert "same text" in page.locator(".changes").inner_text()
    page.go_back()
    expect(page.locator(".bubble")).to_have_text(["Second chat"])


def test_answer_cut_by_a_closed_page_is_marked(open_page: Open, gateway: Chatting) -> None:
    gateway.says = ["word " * 9, Future()]
    page = open_page()
    expect(say(page, "Hello").locator(".text")).to_contain_text("word word")
    page.reload()
    answer = finished(page.locator(".answer"), "broken")
    assert "The page was closed." in answer.locator(".failure").inner_text()


def test_chats_are_renamed_deleted_and_cleared(open_page: Open, gateway: Chatting) -> None:
    page = open_page()
    for name in ("One", "Two", "Three"):
        page.click("#new")
        finished(say(page, name))
    page.get_by_role("link", name="Two").hover()
    page.get_by_role("button", name="Rename Two").click()
    page.get_by_role("textbox", name="Name of the chat").fill("Second")
    page.keyboard.press("Enter")
    expect(page.locator(".chat")).to_have_text(["Three", "Second", "One"])
    page.get_by_role("link", name="Three").hover()
    page.get_by_role("button", name="Delete Three").click()
    page.get_by_role("button", name="Keep").click()
    assert page.locator(".chat").count() == 3
    page.get_by_role("link", name="Three").hover()
    page.get_by_role("button", name="Delete Three").click()
    page.get_by_role("button", name="Delete", exact=True).click()
    expect(page.locator(".chat")).to_have_text(["Second", "One"])
    assert page.locator(".bubble").count() == 0
    page.reload()
    expect(page.locator(".chat")).to_have_text(["Second", "One"])
    page.click("#clear")
    page.get_by_role("button", name="Delete", exact=True).click()
    expect(page.locator(".chat")).to_have_count(0)
    page.reload()
    expect(page.locator("#no-history")).to_be_visible()


def test_another_chat_can_be_read_while_one_is_answered(open_page: Open, gateway: Chatting) -> None:
    page = open_page()
    finished(say(page, "Old"))
    page.click("#new")
    read: Future[None] = Future()
    gateway.says = ["slow ", read, "word"]
    say(page, "New")
    page.get_by_role("link", name="Old").click()
    expect(page.locator(".answer .text")).to_have_text(["All is well."])
    expect(page.locator("#history .busy .chat")).to_have_text("New")
    read.set_result(None)
    expect(page.locator("#history .busy")).to_have_count(0, timeout=15000)
    page.get_by_role("link", name="New").click()
    expect(page.locator(".answer .text")).to_have_text(["slow word"])


def test_nothing_leaves_the_browser_but_the_request(open_page: Open, gateway: Chatting) -> None:
    asked: list[tuple[str, str]] = []
    page = open_page(before=lambda page: page.on("request", lambda sent: asked.append((sent.method, sent.url))))
    asked.clear()
    finished(say(page, "Hello"))
    page.click("#new")
    assert [each for each in asked if not each[1].endswith(("/v1/models", "/icon.svg"))] == [
        ("POST", f"{gateway.url}/v1/chat/completions")
    ]


# --- hands, eyes and ears --------------------------------------------------------------------------------------------


def test_keys_send_stop_focus_and_edit(open_page: Open, gateway: Chatting) -> None:
    gateway.says = ["word " * 9, Future()]
    page = open_page()
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.id") == "prompt"
    page.keyboard.type("two")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("lines")
    page.keyboard.press("Enter")
    assert page.locator(".bubble").inner_text() == "two\nlines"
    expect(page.locator(".text")).to_contain_text("word")
    page.keyboard.press("Escape")
    finished(page.locator(".answer"), "stopped")
    page.keyboard.press("ArrowUp")
    field = page.get_by_role("textbox", name="Edit message")
    assert field.input_value() == "two\nlines"
    assert field.evaluate("element => element === document.activeElement")
    page.keyboard.press("Escape")
    expect(page.locator(".bubble")).to_be_visible()


def test_finished_answer_is_announced_once(open_page: Open, gateway: Chatting) -> None:
    gateway.says, gateway.backend.token_s = "All **is** well.", 0.02
    page = open_page()
    page.evaluate("""() => {
      window.said = [];
      const announcer = document.getElementById("announcer");
      new MutationObserver(() => window.said.push(announcer.textContent)).observe(announcer, { childList: true });
    }""")
    answer = say(page, "Hello")
    assert page.locator("#announcer").get_attribute("role") == "status"
    finished(answer)
    assert answer.get_attribute("aria-busy") == "false"
    assert page.evaluate("window.said") == ["Answer finished. All is well."]


@pytest.mark.parametrize("kind", KINDS)
def test_axe_finds_no_violation(open_page: Open, gateway: Chatting, kind: str) -> None:
    page = open_page(kind, reduced_motion="reduce")
    axe = pytest.importorskip("axe_playwright_python.base", reason=EXTRA)
    page.evaluate(Path(axe.__file__).with_name("axe.min.js").read_text())

    def violations() -> list[Any]:
        found = page.evaluate("axe.run().then(results => results.violations)")
        return [(rule["id"], [node["html"][:200] for node in rule["nodes"][:3]]) for rule in found]

    assert violations() == []
    full(page, gateway)
    assert violations() == []
    for opener in ("#tune", "#model", "#composer [popovertarget=chats]"):
        if page.locator(opener).is_visible():
            page.click(opener)
            assert violations() == [], opener
            page.keyboard.press("Escape")
    page.keyboard.press("ArrowUp")
    page.locator(".user").last.get_by_role("button", name="Edit message").click()
    assert violations() == []


OUTSIDE = """() => [
  ...document.querySelectorAll("button, a, textarea, summary, .md > div, .route, .failure"),
].filter((element) => {
  const box = element.getBoundingClientRect();
  return box.width && !element.closest(".skip") && (box.right > innerWidth + 1 || box.left < -1);
}).map((element) => element.outerHTML.slice(0, 100))"""


@pytest.mark.parametrize("width", [320, 360, 768, 1024, 1440])
def test_nothing_is_outside_of_the_screen(open_page: Open, gateway: Chatting, width: int) -> None:
    long = {"id": "organisation/A-Model-With-A-Long-Name-70B-Instruct"}
    page = full(open_page(viewport={"width": width, "height": 700}), gateway)
    page.route("**/v1/models", lambda route: route.fulfill(json={"data": [long]}))
    page.evaluate("localStorage.clear()")
    page.reload()
    page.locator("#new-narrow, #new").locator("visible=true").first.click()
    expect(page.locator("#model .name")).to_have_text("A-Model-With-A-Long-Name-70B-Instruct")
    assert page.evaluate(OUTSIDE) == []
    page.go_back()
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate(OUTSIDE) == []


def test_a_thumb_reaches_everything_on_a_small_phone(open_page: Open, gateway: Chatting) -> None:
    page = full(open_page("small phone"), gateway)
    low = 640 * 0.6
    model = re.compile(f"^Model: {NAME}, ")  # its health follows when the gateway has told it
    for name in ("Chats", model, "Sampling", "Send"):
        box = page.locator("#composer").get_by_role("button", name=name).bounding_box()
        assert box["y"] > low, name
        assert min(box["width"], box["height"]) >= 44, name
    page.tap("#composer [popovertarget=chats]")
    new = page.locator("#chats").get_by_role("button", name="New chat")
    assert new.bounding_box()["y"] > low
    new.tap()
    expect(page.locator("#greeting")).to_be_visible()
    assert not page.locator("#chats").is_visible()


def test_colours_follow_the_system_until_chosen(open_page: Open, gateway: Chatting) -> None:
    def ground() -> str:
        return str(page.evaluate("getComputedStyle(document.documentElement).backgroundColor"))

    page = open_page("dark")
    assert ground() == "rgb(15, 18, 22)"
    page.click("#theme")
    assert ground() == "rgb(244, 245, 247)"
    page.reload()
    assert ground() == "rgb(244, 245, 247)"
    assert page.get_by_role("button", name="Colours: light").is_visible()


def test_nothing_moves_for_those_who_want_no_motion(open_page: Open, gateway: Chatting) -> None:
    for motion, moving in (("reduce", 0), ("no-preference", 1)):
        gateway.says = [FIRST, "word ", CHANGE, "word " * 9, Future()]
        page = open_page(reduced_motion=motion)
        answer = say(page, "Hello")
        expect(answer.locator(".changes li")).to_be_visible()
        assert page.evaluate("document.getAnimations().length > 0") == bool(moving)


def test_reader_who_has_scrolled_up_is_left_there(open_page: Open, gateway: Chatting) -> None:
    scrolled: Future[None] = Future()
    gateway.says = ["One line.\n\n" * 75, scrolled, "One line.\n\n" * 75]
    page = open_page()
    answer = say(page, "Hello")
    expect(answer.locator(".text > div:nth-child(60)")).to_be_attached()
    page.evaluate("document.getElementById('scroll').scrollTop = 0")
    scrolled.set_result(None)
    finished(answer)
    assert page.evaluate("document.getElementById('scroll').scrollTop") == 0
    page.get_by_role("button", name="To the end").click()
    expect(page.locator("#down")).to_be_hidden()
