"""The chat page in Chromium with a scripted model: chats, a server that leaves, and errors."""

import json
import re
from concurrent.futures import Future
from typing import Any

import pytest

from swarm.errors import NoRoute, StepTimeout
from tests.gateway.page.support import (
    CHANGE,
    FIRST,
    MARKDOWN,
    REFUSED,
    A,
    C,
    Chatting,
    D,
    Open,
    expect,
    finished,
    say,
    text_of,
)
from tests.gateway.scripted import NAME
from tests.support.swarms import eventually

pytestmark = pytest.mark.long


def test_answers_with_markdown_and_figures(open_page: Open, gateway: Chatting) -> None:
    gateway.says = MARKDOWN
    answer = finished(say(open_page(), "Hello"))
    for selector in ("h1", "strong", "li", "pre code", "td", "blockquote", "a[href='https://example.org/']"):
        assert answer.locator(f".text {selector}").count() >= 1, selector
    assert answer.locator("td").last.get_attribute("align") == "right"
    assert answer.locator("a").get_attribute("rel") == "noopener noreferrer nofollow"
    assert re.search(r"tok/s · first token [\d.]+ s · \d+ tokens", answer.locator("summary").last.inner_text())


def test_whole_chat_is_sent_with_each_turn(open_page: Open, gateway: Chatting) -> None:
    page = open_page()
    finished(say(page, "First question"))
    finished(say(page, "Second question"))
    said = re.findall(r"<\|im_start\|>(\w+)\n(.*?)<\|im_end\|>", gateway.prompt)
    assert said == [("user", "First question"), ("assistant", "All is well."), ("user", "Second question")]
    first, second = gateway.backend.asked[-2:]
    assert first.conversation == second.conversation != None  # noqa: E711 - both, and not absent


def test_finished_blocks_and_a_selection_stay_while_text_grows(open_page: Open, gateway: Chatting) -> None:
    selected: Future[None] = Future()
    gateway.says = ["The first paragraph.\n\n- **one** is here\n- two\n\nMore ", selected, "words. More " * 60]
    page = open_page()
    answer = say(page, "Hello")
    expect(answer.locator(".text > div")).to_have_count(3)
    page.evaluate("""() => {
      const [first] = document.querySelectorAll(".text > div");
      first.same = true;
      getSelection().selectAllChildren(first);
    }""")
    selected.set_result(None)
    finished(answer)
    assert page.evaluate("document.querySelector('.text > div').same") is True
    assert page.evaluate("getSelection().toString().trim()") == "The first paragraph."


def test_half_written_marks_are_never_shown(open_page: Open, gateway: Chatting) -> None:
    parts = ["Some **bold", " words** and `a bit", " of code` here.\n\nA list:\n-", " **first", "** item\n- second\n"]
    shown = ["Some bold", "and a bit", "A list:", "first"]
    drawn: list[Future[None]] = [Future() for _ in shown]
    gateway.says = [each for pair in zip(parts, [*drawn, ""], strict=True) for each in pair]
    page = open_page()
    page.evaluate("""() => {
      window.seen = [];
      new MutationObserver(() => {
        const text = document.querySelector(".text");
        if (text) window.seen.push(text.textContent, ...[...text.querySelectorAll("h2")].map(() => "# heading"));
      }).observe(document.getElementById("log"), { subtree: true, childList: true, characterData: true });
    }""")
    answer = say(page, "Hello")
    for text, each in zip(shown, drawn, strict=True):
        expect(answer.locator(".text")).to_contain_text(text)
        each.set_result(None)
    finished(answer)
    seen = page.evaluate("window.seen")
    assert len(seen) >= len(parts)
    assert [text for text in seen if re.search(r"\*\*|`|# heading", text)] == []


def test_stop_keeps_the_text_and_frees_the_generation(open_page: Open, gateway: Chatting) -> None:
    gateway.says = ["word " * 9, Future()]
    page = open_page()
    answer = say(page, "Hello")
    expect(answer.locator(".text")).to_contain_text("word word")
    page.click("#stop")
    assert "word" in text_of(finished(answer, "stopped"))
    eventually(lambda: gateway.backend.running == 0, 5)
    expect(page.locator("#send")).to_be_visible()


def test_regenerated_answer_takes_the_place_of_the_old(open_page: Open, gateway: Chatting) -> None:
    page = open_page()
    answer = finished(say(page, "Hello"))
    gateway.says = "Another answer."
    answer.get_by_role("button", name="Answer again").click()
    expect(page.locator(".answer .text")).to_have_text(["Another answer."])
    assert "All is well" not in gateway.prompt


def test_edited_message_replaces_what_follows(open_page: Open, gateway: Chatting) -> None:
    page = open_page()
    finished(say(page, "First"))
    finished(say(page, "Second"))
    page.locator(".user").first.hover()
    page.locator(".user").first.get_by_role("button", name="Edit message").click()
    field = page.get_by_role("textbox", name="Edit message")
    assert field.input_value() == "First"
    field.fill("Better")
    field.press("Enter")
    expect(page.locator(".bubble")).to_have_text(["Better"])
    finished(page.locator(".answer").last)
    assert page.locator(".answer").count() == 1
    assert "First" not in gateway.prompt


def test_answer_at_its_limit_goes_on_where_it_ended(open_page: Open, gateway: Chatting) -> None:
    gateway.says = "one two three four five six"
    page = open_page()
    page.click("#tune")
    page.fill("#max_tokens", "3")
    page.keyboard.press("Escape")
    answer = finished(say(page, "Count"))
    begun = text_of(answer)
    page.click("#tune")
    page.get_by_role("button", name="Reset to defaults").click()
    page.keyboard.press("Escape")
    gateway.says = " and so on."
    answer.get_by_role("button", name="Continue answer").click()
    expect(answer.locator(".text")).to_have_text(f"{begun} and so on.")
    assert gateway.prompt.endswith(f"assistant\n{begun}")


def test_sampling_is_sent_when_it_was_changed_only(open_page: Open, gateway: Chatting) -> None:
    bodies: list[dict[str, Any]] = []
    page = open_page(before=lambda page: page.on("request", lambda sent: bodies.append(sent.post_data_json or {})))
    finished(say(page, "Hello"))
    assert not {"temperature", "top_p", "max_tokens", "seed"} & bodies[-1].keys()
    page.click("#tune")
    page.get_by_label("Temperature").fill("0.5")
    page.get_by_label("Seed").fill("7")
    page.get_by_label("System prompt").fill("Be brief.")
    page.keyboard.press("Escape")
    finished(say(page, "Again"))
    assert (bodies[-1]["temperature"], bodies[-1]["seed"]) == (0.5, 7)
    assert bodies[-1]["messages"][0] == {"role": "system", "content": "Be brief."}
    assert gateway.backend.asked[-1].sampling.temperature == 0.5


def test_reasoning_is_folded(open_page: Open, gateway: Chatting) -> None:
    def thinking(route: Any) -> None:
        deltas = [{"reasoning_content": "Let me see."}, {"content": "It is 4."}]
        chunks = [json.dumps({"choices": [{"index": 0, "delta": delta, "finish_reason": None}]}) for delta in deltas]
        body = "".join(f"data: {chunk}\n\n" for chunk in [*chunks, "[DONE]"])
        route.fulfill(content_type="text/event-stream", body=body)

    page = open_page(before=lambda page: page.route("**/chat/completions", thinking))
    answer = finished(say(page, "2 + 2?"))
    assert text_of(answer) == "It is 4."
    assert not answer.get_by_text("Let me see.").is_visible()
    answer.locator(".reasoning summary").click()
    assert answer.get_by_text("Let me see.").is_visible()


def test_code_is_copied_exactly(open_page: Open, gateway: Chatting) -> None:
    gateway.says = MARKDOWN
    page = open_page(permissions=["clipboard-read", "clipboard-write"])
    finished(say(page, "Hello")).get_by_role("button", name="Copy code").click()
    expect(page.locator("#announcer")).to_have_text("Copied")
    assert page.evaluate("navigator.clipboard.readText()") == 'print("hello")'


# --- the route -------------------------------------------------------------------------------------------------------


def test_server_that_leaves_is_shown_and_text_goes_on(open_page: Open, gateway: Chatting) -> None:
    leaves: Future[None] = Future()
    goes_on: Future[None] = Future()
    gateway.says = [FIRST, "Before it. ", leaves, CHANGE, "After ", goes_on, "it. After " * 40]
    page = open_page()
    answer = say(page, "Hello")
    expect(answer.locator(".route li")).to_have_text(["0:4 …aaaa", "4:8 …bbbb", "8:12 …cccc"])
    leaves.set_result(None)
    change = page.locator(".answer.running .changes li")
    expect(change).to_have_text(re.compile(r"after [\d.]+ s Server …bbbb left, another took over: 0.41 s, same text"))
    expect(page.locator("#announcer")).to_contain_text("A server left")
    goes_on.set_result(None)
    finished(answer)
    assert text_of(answer) == "Before it. " + ("After it. " * 40) + "After"
    assert answer.locator(".route .fresh").inner_text() == "4:8 …dddd"
    answer.locator(".facts summary").click()
    assert answer.locator(".hops li").all_inner_texts() == [f"blocks 0:4: {A}", f"blocks 4:8: {D}", f"blocks 8:12: {C}"]
    assert "3 servers" in answer.locator(".facts summary").inner_text()


def test_models_show_their_health_where_it_is_told(open_page: Open, gateway: Chatting) -> None:
    told = [
        {"id": NAME, "swarm": {"status": "healthy", "servers": 3, "context": 8192}},
        {"id": "org/other", "swarm": {"status": "broken"}},
        {"id": "org/odd", "swarm": {"status": ["?"], "servers": "many"}},
        {"id": "org/untold"},
    ]
    page = open_page(before=lambda page: page.route("**/v1/models", lambda route: route.fulfill(json={"data": told})))
    page.click("#model")
    choices = page.locator(".choice")
    assert choices.locator(".small").all_inner_texts() == ["healthy · 3 servers · 8,192 tokens", "broken", "", ""]
    assert [each.get_attribute("class") for each in choices.locator(".dot").all()] == [
        "dot healthy",
        "dot broken",
        "dot unknown",
        "dot unknown",
    ]
    page.get_by_role("radio", name="org/other").check()
    page.keyboard.press("Escape")
    assert page.get_by_role("button", name="Model: org/other, broken").is_visible()


# --- errors ----------------------------------------------------------------------------------------------------------


def test_error_in_mid_stream_leaves_marked_text_that_goes_on(open_page: Open, gateway: Chatting) -> None:
    gateway.says = ["All is", StepTimeout("peer", "0:4", 5.0)]
    page = open_page()
    answer = finished(say(page, "Hello"), "broken")
    assert text_of(answer) == "All is"
    failure = answer.locator(".failure")
    assert "Incomplete. The servers took too long." in failure.inner_text()
    assert "Incomplete" in page.locator("#announcer").inner_text()
    gateway.says = " well."
    failure.get_by_role("button", name="Continue").click()
    finished(answer)
    assert text_of(answer) == "All is well."
    assert not failure.is_visible()
    assert gateway.prompt.endswith("assistant\nAll is")


def test_stream_without_its_end_is_no_answer(open_page: Open, gateway: Chatting) -> None:
    chunk = json.dumps({"choices": [{"index": 0, "delta": {"content": "Half an"}, "finish_reason": None}]})

    def cut(route: Any) -> None:
        route.fulfill(content_type="text/event-stream", body=f"data: {chunk}\n\n")

    page = open_page(before=lambda page: page.route("**/chat/completions", cut))
    answer = finished(say(page, "Hello"), "broken")
    assert "Incomplete. The connection broke." in answer.locator(".failure").inner_text()
    page.unroute("**/chat/completions")
    answer.get_by_role("button", name="Retry").click()
    expect(page.locator(".answer .text")).to_have_text(["All is well."])


def test_error_before_the_answer_says_what_to_do(open_page: Open, gateway: Chatting) -> None:
    gateway.says = [NoRoute("m", (3,))]
    page = open_page(complains=REFUSED)
    failure = finished(say(page, "Hello"), "broken").locator(".failure")
    assert "Some blocks of the model have no server now. Retry when a server is back" in failure.inner_text()
    assert not failure.get_by_role("button", name="Continue").is_visible()
    gateway.says = "All is well."
    failure.get_by_role("button", name="Retry").click()
    expect(page.locator(".answer .text")).to_have_text(["All is well."])


def test_chat_beyond_the_context_says_so(open_page: Open, gateway: Chatting) -> None:
    failure = finished(say(open_page(complains=REFUSED), "word " * 9000), "broken").locator(".failure")
    assert "This chat is longer than the model can read. Start a new chat" in failure.inner_text()


def test_gateway_that_is_gone_is_said_to_be(open_page: Open, gateway: Chatting) -> None:
    page = open_page(complains=REFUSED)
    page.route("**/v1/**", lambda route: route.abort())
    failure = finished(say(page, "Hello"), "broken").locator(".failure")
    assert "The gateway does not answer. Check that swarm-gateway is running" in failure.inner_text()


@pytest.mark.parametrize("remember", [False, True])
def test_key_is_asked_for_and_kept_as_wanted(open_page: Open, gateway: Chatting, remember: bool) -> None:
    keys: list[str] = []

    def guard(route: Any) -> None:
        key = route.request.headers.get("authorization")
        if key is None:
            route.fulfill(status=401, json={"error": {"message": "a key is needed", "code": "invalid_api_key"}})
        else:
            keys.append(key)
            route.continue_()

    page = open_page(complains=REFUSED)
    page.route("**/v1/**", guard)
    say(page, "Hello")
    field = page.get_by_role("textbox", name="API key")
    field.fill("sk-secret")
    if remember:
        page.get_by_label("Remember it in this browser").check()
    field.press("Enter")
    expect(page.locator(".answer .text")).to_have_text(["All is well."])
    assert set(keys) == {"Bearer sk-secret"}
    stored = page.evaluate("[sessionStorage.getItem('swarm-key'), localStorage.getItem('swarm-key')]")
    assert stored == ([None, "sk-secret"] if remember else ["sk-secret", None])
