"""Chats on the chat page: what is sent of them, what a click deletes, two tabs, keys, and names."""

import re
from concurrent.futures import Future
from typing import Any

import pytest

from swarm.errors import NoRoute
from tests.gateway.page.support import REFUSED, Chatting, Open, expect, finished, say, text_of

pytestmark = pytest.mark.long
NO_KEY = {"error": {"message": "a key is needed", "code": "invalid_api_key"}}
LATER = "Delete the 2 messages after this answer?"


def limited(page: Any, tokens: str) -> None:
    page.click("#tune")
    page.fill("#max_tokens", tokens)
    page.keyboard.press("Escape")


def test_an_earlier_answer_goes_on_from_its_own_end(open_page: Open, gateway: Chatting) -> None:
    gateway.says = "one two three four five six"
    page = open_page()
    limited(page, "3")
    first = finished(say(page, "First"))
    begun = text_of(first)
    limited(page, "50")
    gateway.says = "All is well."
    finished(say(page, "Second"))
    gateway.says = " and so on."
    answer = page.locator(".answer").first
    answer.get_by_role("button", name="Continue answer").click()
    expect(answer.locator(".text")).to_have_text(f"{begun} and so on.")
    assert gateway.prompt.endswith(f"assistant\n{begun}")
    assert "Second" not in gateway.prompt


def test_later_messages_are_deleted_only_after_a_question(open_page: Open, gateway: Chatting) -> None:
    page = open_page()
    finished(say(page, "First"))
    finished(say(page, "Second"))
    first = page.locator(".answer").first
    first.get_by_role("button", name="Answer again").click()
    expect(page.get_by_role("heading", name=LATER)).to_be_visible()
    page.get_by_role("button", name="Keep").click()
    assert page.locator(".answer").count() == 2
    first.get_by_role("button", name="Answer again").click()
    page.locator("#confirm").get_by_role("button", name="Delete").click()
    expect(page.locator(".answer")).to_have_count(1)


def test_a_message_behind_an_answer_without_text_joins_the_one_before(open_page: Open, gateway: Chatting) -> None:
    gateway.says = [NoRoute("m", (3,))]
    page = open_page(complains=REFUSED)
    finished(say(page, "First"), "broken")
    gateway.says = "All is well."
    finished(say(page, "Second"))
    said = re.findall(r"<\|im_start\|>(\w+)\n(.*?)<\|im_end\|>", gateway.prompt, re.DOTALL)
    assert said == [("user", "First\n\nSecond")]


def test_two_tabs_keep_each_others_changes(open_page: Open, gateway: Chatting) -> None:
    page = open_page()
    finished(say(page, "First"))
    other = page.context.new_page()
    other.goto(page.url)
    expect(other.locator(".bubble")).to_have_text(["First"])
    finished(say(page, "Second"))
    expect(other.locator(".bubble")).to_have_text(["First", "Second"])
    other.locator("#history li").hover()
    other.get_by_role("button", name="Rename First").click()
    other.get_by_role("textbox", name="Name of the chat").fill("Named")
    other.keyboard.press("Enter")
    expect(page.locator("#history a")).to_have_text(["Named"])
    page.reload()
    expect(page.locator(".bubble")).to_have_text(["First", "Second"])
    page.locator("#history li").hover()
    page.get_by_role("button", name="Delete Named").click()
    page.locator("#confirm").get_by_role("button", name="Delete").click()
    expect(other.locator("#history a")).to_have_count(0)
    expect(other.locator(".bubble")).to_have_count(0)
    other.close()


def test_a_first_message_stays_where_a_key_is_lacking(open_page: Open, gateway: Chatting) -> None:
    page = open_page(complains=REFUSED)
    page.route("**/v1/**", lambda route: route.fulfill(status=401, json=NO_KEY))
    page.evaluate("localStorage.removeItem('swarm-model')")
    page.reload()
    expect(page.get_by_role("button", name="Enter the key")).to_be_visible()
    page.fill("#prompt", "A long prompt")
    page.keyboard.press("Enter")
    expect(page.get_by_role("button", name="Enter the key")).to_be_visible()
    assert page.input_value("#prompt") == "A long prompt"


def test_cancelling_keeps_a_key_and_forgetting_does_not(open_page: Open, gateway: Chatting) -> None:
    page = open_page()
    page.evaluate("localStorage.setItem('swarm-key', 'sk-kept')")
    page.reload()
    key = "localStorage.getItem('swarm-key')"
    for button, kept in (("Cancel", "sk-kept"), ("Forget the key", None)):
        page.click("#tune")
        page.click("#change-key")
        page.locator("#key").get_by_role("button", name=button).click()
        assert page.evaluate(key) == kept


def test_a_key_works_where_nothing_can_be_stored(open_page: Open, gateway: Chatting) -> None:
    def guard(route: Any) -> None:
        if route.request.headers.get("authorization") == "Bearer sk-secret":
            route.continue_()
        else:
            route.fulfill(status=401, json=NO_KEY)

    throws = "Object.defineProperty(window, '%s', {get() { throw new Error('blocked'); }})"
    page = open_page(
        complains=REFUSED,
        before=lambda page: page.add_init_script(
            ";".join(throws % name for name in ("localStorage", "sessionStorage"))
        ),
    )
    page.route("**/v1/**", guard)
    say(page, "Hello")
    field = page.get_by_role("textbox", name="API key")
    field.fill("sk-secret")
    field.press("Enter")
    expect(page.locator(".answer .text")).to_have_text(["All is well."])


def test_a_text_that_the_parser_does_not_bear_is_shown_plainly(open_page: Open, gateway: Chatting) -> None:
    gateway.says = ">" * 20000  # quotes in quotes, as many as the answer has room for
    page = open_page()
    answer = finished(say(page, "Hello"))
    expect(answer.locator(".text")).to_contain_text(">>>>")
    expect(page.locator("#send")).to_be_visible()
    page.reload()
    expect(page.locator(".answer .text")).to_contain_text(">>>>")


def test_thoughts_that_are_over_are_not_rendered_again(open_page: Open, gateway: Chatting) -> None:
    page = open_page()
    rendered = page.evaluate("""async () => {
      const page = document.querySelector("script[type=module]").src;
      const { Markdown } = await import(new URL("markdown.js", page));
      const real = DOMPurify.sanitize.bind(DOMPurify);
      let count = 0;
      DOMPurify.sanitize = (...all) => (count++, real(...all));
      const thoughts = new Markdown(document.createElement("div"));
      thoughts.update("a\\n\\n[1]: b\\n\\n".repeat(50), true);
      const once = count;
      for (let frame = 0; frame < 60; frame++) thoughts.update("a\\n\\n[1]: b\\n\\n".repeat(50), true);
      return [once > 0, count - once];
    }""")
    assert rendered == [True, 0]


@pytest.mark.parametrize("event", [{"isComposing": True}, {"keyCode": 229}])
def test_an_input_methods_enter_sends_and_names_nothing(
    open_page: Open, gateway: Chatting, event: dict[str, Any]
) -> None:
    page = open_page()
    finished(say(page, "First"))
    press = (
        "(field, event) => field.dispatchEvent(new KeyboardEvent('keydown', {key: 'Enter', bubbles: true, ...event}))"
    )
    page.fill("#prompt", "half")
    page.locator("#prompt").evaluate(press, event)
    page.locator("#history li").hover()
    page.get_by_role("button", name="Rename First").click()
    name = page.get_by_role("textbox", name="Name of the chat")
    name.evaluate(press, event)
    expect(name).to_be_visible()
    assert page.input_value("#prompt") == "half"
    assert page.locator(".answer").count() == 1


def test_an_answer_that_ends_leaves_a_name_that_is_being_written(open_page: Open, gateway: Chatting) -> None:
    end: Future[None] = Future()
    gateway.says = ["All ", end, "is well."]
    page = open_page()
    answer = say(page, "First")
    expect(answer.locator(".text")).to_contain_text("All")
    page.locator("#history li").hover()
    page.get_by_role("button", name="Rename First").click()
    name = page.get_by_role("textbox", name="Name of the chat")
    name.fill("Half a na")
    end.set_result(None)
    finished(answer)
    expect(name).to_have_value("Half a na")


def test_what_cannot_be_copied_is_not_said_to_be(open_page: Open, gateway: Chatting) -> None:
    page = open_page(
        before=lambda page: page.add_init_script("Object.defineProperty(navigator, 'clipboard', {value: undefined})")
    )
    answer = finished(say(page, "Hello"))
    answer.hover()
    button = answer.get_by_role("button", name="Copy answer")
    button.click()
    expect(page.locator("#notice")).to_contain_text("press your keys")
    assert button.locator("use").get_attribute("href") == "#i-copy"
