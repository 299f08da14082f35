"""Draws docs/images/health.png, the page of a swarm of volunteers. Run as a script; it needs Chromium."""

from hashlib import sha256
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

from swarm.monitor.state import ProbeStats, Quantiles
from tests.monitor.page_support import NOW, Site, anchor, assessment, audits_of, record, serving
from tests.monitor.test_pages_browser import CHROMIUM, FLAGS

PICTURE = Path(__file__).parents[2] / "docs" / "images" / "health.png"
MODEL, ROOT = "org/Meadow-70B-Instruct", sha256(b"Meadow").hexdigest()
NAMES = ("maria", "Kästner's cellar", "lab 3, rack 12", "tomasz", "", "open-gpu-club", "ines", "garage-4090")
SPANS = ((0, 20), (20, 40), (40, 60), (60, 80), (0, 40), (40, 72), (10, 30), (30, 50), (50, 66), (0, 16), (16, 32))
PROBES = ProbeStats(
    window="24h",
    attempts=288,
    success_rate=0.997,
    ttft_ms=Quantiles(p50=410.0, p95=980.5),
    inter_token_ms=Quantiles(p50=61.0, p95=120.25),
)


def main() -> None:
    """Serve the page, and take its picture."""
    facts: dict[str, Any] = {"model": MODEL, "root": ROOT, "n_blocks": 80, "version": "0.2.0"}
    records = [
        record(n, *span, public_name=NAMES[n % len(NAMES)], anchors=(anchor(4 * (n % 2)),), **facts)
        for n, span in enumerate(SPANS, 1)
    ]
    honest = {each: audit for each, audit in audits_of(records).items() if audit.finding == "agreed"}
    shown = assessment(records, probes={ROOT: (PROBES,)}, audits=honest)
    with serving(Site(shown)) as site, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        page = browser.new_page(viewport={"width": 1440, "height": 900})
        page.clock.install(time=NOW)
        page.goto(site.url)
        page.wait_for_selector(".charts figure:last-of-type canvas")
        page.screenshot(path=PICTURE)
        browser.close()


if __name__ == "__main__":
    main()
