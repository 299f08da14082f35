"""Hostile text in answers does nothing to the reader of the chat page."""

from typing import Any

import pytest

from tests.gateway.page.support import BLOCKED, Chatting, Open, finished, say, text_of

pytestmark = pytest.mark.long


HOSTILE = """<script>window.hacked = 1</script><img src=x onerror="window.hacked = 1">

<svg onload="window.hacked = 1"><iframe srcdoc="<script>parent.hacked = 1</script>"></iframe>

[a](javascript:window.hacked=1) [b](JaVaScRiPt:window.hacked=1) <javascript:window.hacked=1>
[c](data:text/html,<script>window.hacked=1</script>) [d](https://example.org/"onmouseover="window.hacked=1)
![picture](https://tracker.example/pixel.png) ![p](x" onerror="window.hacked=1)

```"><img src=x onerror=window.hacked=1>
</code></pre><script>window.hacked = 1</script>
```

<style>body { display: none }</style><a href="javascript:window.hacked=1" id="send">e</a>
<form action="/x"><button>f</button></form>
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
    page = open_page(before=watched, complains=() if before is None else BLOCKED)
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
    page = open_page(complains=BLOCKED)
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
