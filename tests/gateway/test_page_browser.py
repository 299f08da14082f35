"""The chat page in Chromium, with a scripted model: by keyboard, by a screen reader's rules, on a phone, in the dark."""

import json
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from swarm.errors import NoRoute, StepTimeout
from swarm.gateway.generation import Rerouted
from tests.gateway.scripted import NAME, ScriptedBackend, scripted
from tests.support.swarms import eventually

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
sync_api = pytest.importorskip("playwright.sync_api", reason="needs the extra `browser`: pip install -e '.[browser]'")
axe = pytest.importorskip("axe_playwright_python.base", reason="needs the extra `browser`: pip install -e '.[browser]'")
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium"),
]

FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking")
FLAGS += ("--disable-component-update", "--disable-sync")
KINDS: dict[str, dict[str, Any]] = {
    "wide": {"viewport": {"width": 1440, "height": 900}},
    "dark": {"viewport": {"width": 1440, "height": 900}, "color_scheme": "dark"},
    "phone": {"viewport": {"width": 390, "height": 844}, "is_mobile": True, "has_touch": True},
    "small phone": {"viewport": {"width": 360, "height": 640}, "is_mobile": True, "has_touch": True},
}
REFUSED = ("Failed to load resource",)  # what Chromium's console says of each status from 400 on
BLOCKED = ("Content Security Policy", "requires 'Trusted")
A, B, C, D = (f"12D3KooWpeer{name * 4}" for name in "abcd")
FIRST = Rerouted((), (f"{A} 0:4", f"{B} 4:8", f"{C} 8:12"), 0.0)
CHANGE = Rerouted((B,), (f"{A} 0:4", f"{D} 4:8", f"{C} 8:12"), 0.41)
MARKDOWN = """# Heading

Some **bold** text, `code`, [a link](https://example.org/) and a list:

- one
- two

```python
print("hello")
```

| a | b |
|---|--:|
| 1 | 2 |

> quoted
"""
Open = Callable[..., Any]


@dataclass
class Chatting:
    """A gateway whose model says `says`."""

    url: str
    backend: ScriptedBackend
    says: Any = "All is well."

    @property
    def prompt(self) -> str:
        return str(self.backend.tokenizer.decode(self.backend.asked[-1].prompt))


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def running() -> Iterator[Chatting]:
    with scripted(lambda _: gateway.says) as (url, backend):
        gateway = Chatting(url, backend)
        yield gateway


@pytest.fixture
def gateway(running: Chatting) -> Chatting:
    running.says, running.backend.token_s = "All is well.", 0.0
    return running


@pytest.fixture
def open_page(browser: Any, gateway: Chatting) -> Iterator[Open]:
    """Open the page; whatever it complains of in its console fails the test, but for what is expected."""
    contexts, complaints, expected = [], [], []

    def opened(kind: str = "wide", *, expect: tuple[str, ...] = (), before: Any = None, **options: Any) -> Any:
        expected.extend(expect)
        contexts.append(browser.new_context(**KINDS[kind] | options))
        page = contexts[-1].new_page()
        page.on("console", lambda message: complaints.append(message.text) if message.type != "log" else None)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("dialog", lambda dialog: (complaints.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        if before is not None:
            before(page)
        page.goto(gateway.url)
        sync_api.expect(page.locator("#model .name")).to_have_text(NAME)
        return page

    yield opened
    for context in contexts:
        context.close()
    assert [text for text in complaints if not any(each in text for each in expected)] == []


def say(page: Any, text: str) -> Any:
    """Send a message, and return its answer, which may still be on its way."""
    count = page.locator(".answer").count()
    page.fill("#prompt", text)
    page.click("#send")
    sync_api.expect(page.locator(".answer")).to_have_count(count + 1)
    return page.locator(".answer").last


def finished(answer: Any, state: str = "done") -> Any:
    sync_api.expect(answer).to_have_class(re.compile(rf"\b{state}\b"), timeout=15000)
    return answer


def text_of(answer: Any) -> str:
    return str(answer.locator(".text").inner_text())


# --- chatting --------------------------------------------------------------------------------------------------------


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
    gateway.says = "The first paragraph.\n\n- **one** is here\n- two\n\n" + "More words. " * 60
    gateway.backend.token_s = 0.01
    page = open_page()
    answer = say(page, "Hello")
    sync_api.expect(answer.locator(".text > div")).to_have_count(3)
    page.evaluate("""() => {
      const [first] = document.querySelectorAll(".text > div");
      first.same = true;
      getSelection().selectAllChildren(first);
    }""")
    finished(answer)
    assert page.evaluate("document.querySelector('.text > div').same") is True
    assert page.evaluate("getSelection().toString().trim()") == "The first paragraph."


def test_half_written_marks_are_never_shown(open_page: Open, gateway: Chatting) -> None:
    gateway.says = "Some **bold words** and `a bit of code` here.\n\nA list:\n- **first** item\n- second\n"
    gateway.backend.token_s = 0.01
    page = open_page()
    page.evaluate("""() => {
      window.seen = [];
      new MutationObserver(() => {
        const text = document.querySelector(".text");
        if (text) window.seen.push(text.textContent, ...[...text.querySelectorAll("h2")].map(() => "# heading"));
      }).observe(document.getElementById("log"), { subtree: true, childList: true, characterData: true });
    }""")
    finished(say(page, "Hello"))
    seen = page.evaluate("window.seen")
    assert len(seen) > 10
    assert [text for text in seen if re.search(r"\*\*|`|# heading", text)] == []


def test_stop_keeps_the_text_and_frees_the_generation(open_page: Open, gateway: Chatting) -> None:
    gateway.says, gateway.backend.token_s = "word " * 2000, 0.01
    page = open_page()
    answer = say(page, "Hello")
    sync_api.expect(answer.locator(".text")).to_contain_text("word word")
    page.click("#stop")
    assert "word" in text_of(finished(answer, "stopped"))
    eventually(lambda: gateway.backend.running == 0, 5)
    sync_api.expect(page.locator("#send")).to_be_visible()


def test_regenerated_answer_takes_the_place_of_the_old(open_page: Open, gateway: Chatting) -> None:
    page = open_page()
    answer = finished(say(page, "Hello"))
    gateway.says = "Another answer."
    answer.get_by_role("button", name="Answer again").click()
    sync_api.expect(page.locator(".answer .text")).to_have_text(["Another answer."])
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
    sync_api.expect(page.locator(".bubble")).to_have_text(["Better"])
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
    sync_api.expect(answer.locator(".text")).to_have_text(f"{begun} and so on.")
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
    sync_api.expect(page.locator("#announcer")).to_have_text("Copied")
    assert page.evaluate("navigator.clipboard.readText()") == 'print("hello")'


# --- the route -------------------------------------------------------------------------------------------------------


def test_server_that_leaves_is_shown_at_once_and_text_goes_on(open_page: Open, gateway: Chatting) -> None:
    gateway.says = [FIRST, "Before it. ", CHANGE, "After it. " * 40]
    gateway.backend.token_s = 0.01
    page = open_page()
    answer = say(page, "Hello")
    sync_api.expect(answer.locator(".route li")).to_have_text(["0:4 …aaaa", "4:8 …bbbb", "8:12 …cccc"])
    change = page.locator(".answer.running .changes li")
    sync_api.expect(change).to_have_text(
        re.compile(r"after [\d.]+ s Server …bbbb left, another took over: 0.41 s, same text")
    )
    sync_api.expect(page.locator("#announcer")).to_contain_text("A server left")
    finished(answer)
    assert text_of(answer) == "Before it. " + ("After it. " * 40).strip()
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


# --- what goes wrong -------------------------------------------------------------------------------------------------


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
    sync_api.expect(page.locator(".answer .text")).to_have_text(["All is well."])


def test_error_before_the_answer_says_what_to_do(open_page: Open, gateway: Chatting) -> None:
    gateway.says = [NoRoute("m", (3,))]
    page = open_page(expect=REFUSED)
    failure = finished(say(page, "Hello"), "broken").locator(".failure")
    assert "Some blocks of the model have no server now. Retry when a server is back" in failure.inner_text()
    assert not failure.get_by_role("button", name="Continue").is_visible()
    gateway.says = "All is well."
    failure.get_by_role("button", name="Retry").click()
    sync_api.expect(page.locator(".answer .text")).to_have_text(["All is well."])


def test_chat_beyond_the_context_says_so(open_page: Open, gateway: Chatting) -> None:
    failure = finished(say(open_page(expect=REFUSED), "word " * 9000), "broken").locator(".failure")
    assert "This chat is longer than the model can read. Start a new chat" in failure.inner_text()


def test_gateway_that_is_gone_is_said_to_be(open_page: Open, gateway: Chatting) -> None:
    page = open_page(expect=REFUSED)
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

    page = open_page(expect=REFUSED)
    page.route("**/v1/**", guard)
    say(page, "Hello")
    field = page.get_by_role("textbox", name="API key")
    field.fill("sk-secret")
    if remember:
        page.get_by_label("Remember it in this browser").check()
    field.press("Enter")
    sync_api.expect(page.locator(".answer .text")).to_have_text(["All is well."])
    assert set(keys) == {"Bearer sk-secret"}
    stored = page.evaluate("[sessionStorage.getItem('swarm-key'), localStorage.getItem('swarm-key')]")
    assert stored == ([None, "sk-secret"] if remember else ["sk-secret", None])


# --- what others write -----------------------------------------------------------------------------------------------

HOSTILE = """<script>window.hacked = 1</script><img src=x onerror="window.hacked = 1">

<svg onload="window.hacked = 1"><iframe srcdoc="<script>parent.hacked = 1</script>"></iframe>

[a](javascript:window.hacked=1) [b](JaVaScRiPt:window.hacked=1) <javascript:window.hacked=1>
[c](data:text/html,<script>window.hacked=1</script>) [d](https://example.org/"onmouseover="window.hacked=1)
![picture](https://tracker.example/pixel.png) ![p](x" onerror="window.hacked=1)

```"><img src=x onerror=window.hacked=1>
</code></pre><script>window.hacked = 1</script>
```

<style>body { display: none }</style><a href="javascript:window.hacked=1" id="send">e</a><form action="/x"><button>f</button></form>
"""
HARM = """() => [window.hacked ?? null, ...[...document.querySelectorAll(".md *:not(.code .bar *)")].filter((element) =>
  /^(SCRIPT|IMG|SVG|IFRAME|STYLE|FORM|OBJECT|EMBED|LINK|META|BASE|INPUT)$/i.test(element.nodeName) || element.id ||
  [...element.attributes].some(({ name }) => name.startsWith("on") || name === "style") ||
  (element.nodeName === "A" && element.hasAttribute("href") && !/^(https?|mailto):/.test(element.href)))
  .map((element) => element.outerHTML)]"""


def raw_html(page: Any) -> None:
    """Take the page's first defence away: HTML of the model goes on to the sanitiser as it is."""

    def weaken(route: Any) -> None:
        source = route.fetch().text()
        first = "(PLAIN_TAG.test(part) ? part : escaped(part))"
        assert first in source
        route.fulfill(content_type="text/javascript", body=source.replace(first, "part"))

    page.route("**/markdown.js", weaken)


@pytest.mark.parametrize("before", [None, raw_html], ids=["as it is", "with the sanitiser alone"])
def test_markup_in_an_answer_does_nothing(open_page: Open, gateway: Chatting, before: Any) -> None:
    asked: list[str] = []

    def watched(page: Any) -> None:
        page.on("request", lambda request: asked.append(request.url))
        if before is not None:
            before(page)

    gateway.says = HOSTILE
    # In the sanitiser's own document a handler is refused, too, and the console says so.
    page = open_page(before=watched, expect=() if before is None else BLOCKED)
    answer = finished(say(page, "<img src=x onerror=window.hacked=1>"))
    for link in answer.locator(".text a").all():
        link.dispatch_event("mouseover")
    assert page.evaluate(HARM) == [None]
    assert [url for url in asked if not url.startswith(gateway.url)] == []
    if before is None:
        assert "<script>window.hacked = 1</script>" in text_of(answer)
    page.reload()
    finished(page.locator(".answer"))
    assert page.evaluate(HARM) == [None]
    assert page.locator("#history img, #log img, #title img").count() == 0


def test_policy_refuses_code_that_gets_in_all_the_same(open_page: Open, gateway: Chatting) -> None:
    page = open_page(expect=BLOCKED)
    refused = page.evaluate("""async () => {
      const names = [];
      document.addEventListener("securitypolicyviolation", (event) => names.push(event.effectiveDirective));
      const script = document.createElement("script");
      try { script.text = "window.hacked = 1"; document.body.append(script); } catch (error) { names.push(error.name); }
      try { document.body.innerHTML += "<p onclick='1'>"; } catch (error) { names.push(error.name); }
      await fetch("https://example.org/").catch(() => {});
      while (!names.includes("connect-src")) await new Promise(requestAnimationFrame);
      return names;
    }""")
    assert page.evaluate("window.hacked ?? null") is None
    assert "TypeError" in refused
    assert "connect-src" in refused


# --- history ---------------------------------------------------------------------------------------------------------


def test_history_survives_a_reload(open_page: Open, gateway: Chatting) -> None:
    page = open_page()
    gateway.says = [FIRST, "All ", CHANGE, "is well."]
    finished(say(page, "First chat"))
    page.click("#new")
    finished(say(page, "Second chat"))
    page.reload()
    sync_api.expect(page.locator(".chat")).to_have_text(["Second chat", "First chat"])
    assert page.locator(".bubble").all_inner_texts() == ["Second chat"]
    page.get_by_role("link", name="First chat").click()
    sync_api.expect(page.locator(".bubble")).to_have_text(["First chat"])
    assert text_of(page.locator(".answer")) == "All is well."
    assert "same text" in page.locator(".changes").inner_text()
    page.go_back()
    sync_api.expect(page.locator(".bubble")).to_have_text(["Second chat"])


def test_answer_cut_by_a_closed_page_is_marked(open_page: Open, gateway: Chatting) -> None:
    gateway.says, gateway.backend.token_s = "word " * 2000, 0.01
    page = open_page()
    sync_api.expect(say(page, "Hello").locator(".text")).to_contain_text("word word")
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
    sync_api.expect(page.locator(".chat")).to_have_text(["Three", "Second", "One"])
    page.get_by_role("link", name="Three").hover()
    page.get_by_role("button", name="Delete Three").click()
    page.get_by_role("button", name="Keep").click()
    assert page.locator(".chat").count() == 3
    page.get_by_role("link", name="Three").hover()
    page.get_by_role("button", name="Delete Three").click()
    page.get_by_role("button", name="Delete", exact=True).click()
    sync_api.expect(page.locator(".chat")).to_have_text(["Second", "One"])
    assert page.locator(".bubble").count() == 0
    page.reload()
    sync_api.expect(page.locator(".chat")).to_have_text(["Second", "One"])
    page.click("#clear")
    page.get_by_role("button", name="Delete", exact=True).click()
    sync_api.expect(page.locator(".chat")).to_have_count(0)
    page.reload()
    sync_api.expect(page.locator("#no-history")).to_be_visible()


def test_another_chat_can_be_read_while_one_is_answered(open_page: Open, gateway: Chatting) -> None:
    page = open_page()
    finished(say(page, "Old"))
    page.click("#new")
    gateway.says, gateway.backend.token_s = "slow word " * 30, 0.01
    say(page, "New")
    page.get_by_role("link", name="Old").click()
    assert text_of(page.locator(".answer")) == "All is well."
    sync_api.expect(page.locator("#history .busy .chat")).to_have_text("New")
    sync_api.expect(page.locator("#history .busy")).to_have_count(0, timeout=15000)
    page.get_by_role("link", name="New").click()
    assert text_of(finished(page.locator(".answer"))) == ("slow word " * 30).strip()


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
    gateway.says, gateway.backend.token_s = "word " * 2000, 0.01
    page = open_page()
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.id") == "prompt"
    page.keyboard.type("two")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("lines")
    page.keyboard.press("Enter")
    assert page.locator(".bubble").inner_text() == "two\nlines"
    sync_api.expect(page.locator(".text")).to_contain_text("word")
    page.keyboard.press("Escape")
    finished(page.locator(".answer"), "stopped")
    page.keyboard.press("ArrowUp")
    field = page.get_by_role("textbox", name="Edit message")
    assert field.input_value() == "two\nlines"
    assert field.evaluate("element => element === document.activeElement")
    page.keyboard.press("Escape")
    sync_api.expect(page.locator(".bubble")).to_be_visible()


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


def full(page: Any, gateway: Chatting) -> Any:
    gateway.says = [FIRST, MARKDOWN, CHANGE, "And more.\n"]
    finished(say(page, "Hello"))
    gateway.says = ["Half", StepTimeout("peer", "0:4", 5.0)]
    finished(say(page, "Again"), "broken")
    page.locator(".facts summary").first.click()
    return page


@pytest.mark.parametrize("kind", KINDS)
def test_axe_finds_no_violation(open_page: Open, gateway: Chatting, kind: str) -> None:
    page = open_page(kind, reduced_motion="reduce")
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


OUTSIDE = """() => [...document.querySelectorAll("button, a, textarea, summary, .md > div, .route, .failure")].filter((element) => {
  const box = element.getBoundingClientRect();
  return box.width && !element.closest(".skip") && (box.right > innerWidth + 1 || box.left < -1);
}).map((element) => element.outerHTML.slice(0, 100))"""


@pytest.mark.parametrize("width", [320, 360, 768, 1024, 1440])
def test_nothing_is_outside_of_the_screen(open_page: Open, gateway: Chatting, width: int) -> None:
    page = full(open_page(viewport={"width": width, "height": 700}), gateway)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate(OUTSIDE) == []


def test_a_thumb_reaches_everything_on_a_small_phone(open_page: Open, gateway: Chatting) -> None:
    page = full(open_page("small phone"), gateway)
    low = 640 * 0.6
    for name in ("Chats", f"Model: {NAME}, unknown", "Sampling", "Send"):
        box = page.locator("#composer").get_by_role("button", name=name).bounding_box()
        assert box["y"] > low, name
        assert min(box["width"], box["height"]) >= 44, name
    page.tap("#composer [popovertarget=chats]")
    new = page.locator("#chats").get_by_role("button", name="New chat")
    assert new.bounding_box()["y"] > low
    new.tap()
    sync_api.expect(page.locator("#greeting")).to_be_visible()
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
    gateway.says, gateway.backend.token_s = [FIRST, "word ", CHANGE, "word " * 500], 0.01
    for motion, moving in (("reduce", 0), ("no-preference", 1)):
        page = open_page(reduced_motion=motion)
        answer = say(page, "Hello")
        sync_api.expect(answer.locator(".changes li")).to_be_visible()
        assert page.evaluate("document.getAnimations().length > 0") == bool(moving)


def test_reader_who_has_scrolled_up_is_left_there(open_page: Open, gateway: Chatting) -> None:
    gateway.says, gateway.backend.token_s = "One line.\n\n" * 150, 0.002
    page = open_page()
    answer = say(page, "Hello")
    sync_api.expect(answer.locator(".text > div:nth-child(60)")).to_be_attached()
    page.evaluate("document.getElementById('scroll').scrollTop = 0")
    finished(answer)
    assert page.evaluate("document.getElementById('scroll').scrollTop") == 0
    page.get_by_role("button", name="To the end").click()
    sync_api.expect(page.locator("#down")).to_be_hidden()
