"""Shared by the tests of the chat page: a gateway with a scripted model, and a reader's deeds."""

import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from swarm.errors import StepTimeout
from swarm.gateway.generation import Rerouted
from tests.gateway.scripted import ScriptedBackend

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
EXTRA = "needs the extra `browser`: pip install -e '.[browser]'"
FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking")
FLAGS += ("--disable-component-update", "--disable-sync")
KINDS: dict[str, dict[str, Any]] = {
    "wide": {"viewport": {"width": 1440, "height": 900}},
    "dark": {"viewport": {"width": 1440, "height": 900}, "color_scheme": "dark"},
    "phone": {"viewport": {"width": 390, "height": 844}, "is_mobile": True, "has_touch": True},
    "small phone": {"viewport": {"width": 360, "height": 640}, "is_mobile": True, "has_touch": True},
}
REFUSED = ("Failed to load resource",)  # Chromium's console, of each status from 400 on
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


def expect(locator: Any) -> Any:
    """Playwright's assertions, which wait. Imported here: the tests are collected without it, too."""
    from playwright import sync_api

    return sync_api.expect(locator)


def say(page: Any, text: str) -> Any:
    """Send a message, and return its answer, which may still be on its way."""
    count = page.locator(".answer").count()
    page.fill("#prompt", text)
    page.click("#send")
    expect(page.locator(".answer")).to_have_count(count + 1)
    return page.locator(".answer").last


def finished(answer: Any, state: str = "done") -> Any:
    expect(answer).to_have_class(re.compile(rf"\b{state}\b"), timeout=15000)
    return answer


def text_of(answer: Any) -> str:
    return str(answer.locator(".text").inner_text())


def full(page: Any, gateway: Chatting) -> Any:
    gateway.says = [FIRST, MARKDOWN, CHANGE, "And more.\n"]
    finished(say(page, "Hello"))
    gateway.says = ["Half", StepTimeout("peer", "0:4", 5.0)]
    finished(say(page, "Again"), "broken")
    page.locator(".facts summary").first.click()
    return page
