"""The health page in Chromium over a real swarm of four servers: one of them is killed, and comes back."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from swarm.demo.local import LocalSwarm
from tests.monitor import needs_light
from tests.monitor.test_page import get, page
from tests.support import warm
from tests.support.swarms import DEMO_CHECKPOINT, environment

pytest.importorskip("playwright.sync_api", reason="needs the extra `browser`: pip install -e '.[browser]'")

from tests.monitor.test_pages_browser import CHROMIUM, FLAGS, sync_api

SPANS = ("0:4", "4:8", "8:10", "10:12")
WITHIN_MS = 120_000
LOST = ".cell.silent, .cell.missing"  # its record outlives it for a while
pytestmark = [
    pytest.mark.long,
    needs_light,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium"),
]


@pytest.fixture
def swarm(tmp_path: Path) -> Iterator[LocalSwarm]:
    with LocalSwarm(DEMO_CHECKPOINT, SPANS, env=environment(tmp_path), launch=warm.launch) as running:
        yield running


@pytest.fixture
def tab() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        yield browser.new_page()
        browser.close()


def test_it_sees_the_only_holder_of_two_blocks_die_and_return(swarm: LocalSwarm, tab: Any, tmp_path: Path) -> None:
    with page(tmp_path, swarm) as running:
        url = running.ready["url"]
        tab.goto(url)
        tab.wait_for_selector(".lead.healthy", timeout=WITHIN_MS)
        assert "4 online" in tab.locator(".facts").inner_text()
        tab.evaluate("window.same = true")  # what follows is seen without reloading

        swarm.servers[3].kill()
        tab.wait_for_selector(".lead.broken", timeout=WITHIN_MS)
        assert "blocks 10:12" in tab.locator(".verdict").inner_text()
        assert tab.locator(LOST).count() == 2
        (model,) = get(url + "/api/v1/state")["models"]
        assert (model["status"], model["missing_blocks"], model["servers_online"]) == ("broken", [10, 11], 3)

        identity = swarm.folder / "server-3.identity"
        swarm.start_server("10:12", "--identity", str(identity))
        tab.wait_for_selector(".lead.healthy", timeout=WITHIN_MS)
        assert tab.locator(LOST).count() == 0
        assert tab.evaluate("window.same") is True
        points = get(f"{url}/api/v1/history?root={model['root']}&window=24h")["points"]
        coverage = [point["coverage"] for point in points]
        assert min(coverage) < 1.0
        shown = tab.locator(".history tbody td:nth-of-type(2)").all_text_contents()
        assert any(not text.startswith("100") for text in shown), shown
