"""A browser, a gateway, and the chat page in between."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.gateway.page.support import CHROMIUM, EXTRA, FLAGS, KINDS, Chatting, Open, expect
from tests.gateway.scripted import NAME, scripted


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api", reason=EXTRA)
    if CHROMIUM is None:
        pytest.skip("needs Chromium: apt-get install chromium")
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
    """Open the page. A complaint in its console fails the test, unless it is expected."""
    contexts, complaints, expected = [], [], []

    def opened(kind: str = "wide", *, complains: tuple[str, ...] = (), before: Any = None, **options: Any) -> Any:
        expected.extend(complains)
        contexts.append(browser.new_context(**KINDS[kind] | options))
        page = contexts[-1].new_page()
        page.on("console", lambda message: complaints.append(message.text) if message.type != "log" else None)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("dialog", lambda dialog: (complaints.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        if before is not None:
            before(page)
        page.goto(gateway.url)
        expect(page.locator("#model .name")).to_have_text(NAME)
        return page

    yield opened
    for context in contexts:
        context.close()
    assert [text for text in complaints if not any(each in text for each in expected)] == []
