"""The tile of a gateway says what the gateway tells; answers that are hostile cost little, and stay text."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="needs pip install 'swarm-inference[health]'")

import httpx2
from click.testing import CliRunner

from swarm.monitor.cli import command
from swarm.monitor.gateways import GatewayLimits, ask, watch
from swarm.monitor.state import GatewayState
from swarm.version import __version__
from tests.monitor.page_support import Site, healthy, serving
from tests.monitor.test_app import World, running
from tests.monitor.test_pages import get

MARKUP = "<script>alert('x')</script>"
LIMITS = GatewayLimits(every_s=0.02, timeout_s=10.0, bytes_max=10_000)
FULL: dict[str, Any] = {
    "ready": True,
    "models": {"org/a": {"ready": True, "reason": ""}, "org/b": {"ready": False, "reason": "no server"}},
    "problems": [],
    "version": "0.2.0",
}


class Raw:
    """An HTTP server that answers with these bytes, then with `more` until the reader has gone, a piece each pause."""

    def __init__(self) -> None:
        self.answer, self.more, self.pause_s = b"", b"", 0.0
        self.url, self.asked = "", b""

    def says(self, body: Any, status: int = 200, *headers: str) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        lines = [f"HTTP/1.1 {status} x", f"Content-Length: {len(data)}", *headers]
        self.answer = "\r\n".join(lines).encode() + b"\r\n\r\n" + data

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            self.asked = await reader.readuntil(b"\r\n\r\n")
            writer.write(self.answer)
            await writer.drain()
            while self.more:
                await asyncio.sleep(self.pause_s)
                writer.write(self.more)
                await writer.drain()
        except ConnectionError:
            pass
        finally:
            writer.close()


@pytest.fixture
async def raw() -> AsyncIterator[Raw]:
    """A server that is no gateway unless it is told to be."""
    made = Raw()
    server = await asyncio.start_server(made.serve, "127.0.0.1", 0)
    made.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    yield made
    server.close()


async def told(raw: Raw, limits: GatewayLimits = LIMITS) -> GatewayState:
    async with httpx2.AsyncClient(trust_env=False) as client:
        return await ask(client, raw.url + "/", limits)


async def test_ready_gateway_tells_its_models_and_version(raw):
    raw.says(FULL)
    state = await told(raw)
    assert (state.ready, state.reason, state.version) == (True, "", "0.2.0")
    assert (state.routed, state.unrouted) == (("org/a",), ("org/b",))
    assert raw.asked.startswith(b"GET /readyz ")
    assert b"authorization" not in raw.asked.lower()


async def test_gateway_with_keys_tells_that_it_is_ready_alone(raw):
    raw.says({"ready": True})
    state = await told(raw)
    assert (state.ready, state.routed, state.version) == (True, None, None)
    raw.says({"ready": False}, 503)
    assert (await told(raw)).reason == "it tells no reason without a key"


async def test_gateway_that_is_not_ready_says_why(raw):
    raw.says({**FULL, "ready": False}, 503)
    assert (await told(raw)).reason == "models have no route"
    raw.says({**FULL, "ready": False, "problems": ["keys cannot be read"]}, 503)
    assert (await told(raw)).reason == "keys cannot be read"
    raw.says(FULL, 503)
    assert not (await told(raw)).ready


DEEP = b'{"ready": true, "models": ' + b"[" * 4000
HUGE = {"ready": True, "models": {f"m{i}" * 60: {"ready": True} for i in range(64)}, "problems": ["p" * 900] * 3}


@pytest.mark.parametrize(
    ("body", "status", "reason"),
    [
        (b"", 200, "not that of a gateway"),
        (b"<html>", 200, "not that of a gateway"),
        (b"\xff\xfe", 200, "not that of a gateway"),
        (DEEP, 200, "not that of a gateway"),
        ([], 200, "not that of a gateway"),
        ({"ready": "yes"}, 200, "not that of a gateway"),
        ({"ready": 1}, 200, "not that of a gateway"),
        ({**FULL, "models": ["a"]}, 200, "not that of a gateway"),
        ({**FULL, "models": {"a": {"ready": None}}}, 200, "not that of a gateway"),
        ({**FULL, "version": {"a": 1}}, 200, "not that of a gateway"),
        ({"ready": True, "more": "x" * 20_000}, 200, "too long"),
        (FULL, 404, "status 404"),
        (FULL, 302, "status 302"),
    ],
)
async def test_other_answers_are_not_ready(raw, body, status, reason):
    raw.says(body, status, "Location: http://127.0.0.1:1/")
    state = await told(raw)
    assert not state.ready
    assert reason in state.reason
    assert state.routed is None


async def test_texts_are_printable_and_bounded(raw):
    raw.says({**HUGE, "version": "\x1b[2J" + "v" * 100, "ready": False}, 503)
    state = await told(raw, GatewayLimits(bytes_max=100_000))
    assert [len(name) for name in state.routed] == [120] * 10 + [128] * 54
    assert (len(state.reason), len(state.version)) == (300, 32)
    assert state.version.isprintable()


async def test_endless_answer_is_read_up_to_its_bound(raw):
    raw.answer, raw.more = b"HTTP/1.1 200 x\r\n\r\n", b"x" * 1000
    state = await told(raw, GatewayLimits(timeout_s=20.0, bytes_max=10_000))
    assert state.reason == "its answer is too long"


async def test_packed_answer_is_not_unpacked(raw):
    raw.says(b"\x1f\x8b" + b"\0" * 100, 200, "Content-Encoding: gzip")
    assert "not that of a gateway" in (await told(raw)).reason


@pytest.mark.parametrize("answer", [b"HTTP/1.1 200 x\r\nA: ", b"HTTP/1.1 200 x\r\n\r\n"])
async def test_slow_gateway_is_given_up(raw, answer):
    """One byte every 10 ms: no single read takes long."""
    raw.answer, raw.more, raw.pause_s = answer, b" ", 0.01
    assert (await told(raw, GatewayLimits(timeout_s=0.2))).reason == "it does not answer within 0.2 s"


async def test_gateway_that_is_gone_cannot_be_reached():
    async with httpx2.AsyncClient(trust_env=False) as client:
        for url in ("http://127.0.0.1:1", "http://127.0.0.1:99999999", "http://[::1", "http://no.such.host.invalid"):
            assert "reached" in (await ask(client, url, LIMITS)).reason


async def test_changes_alone_are_told(raw):
    raw.says(FULL)
    seen: list[bool] = []

    async def note(states: tuple[GatewayState, ...]) -> None:
        seen.append(states[0].ready)
        raw.says({"ready": len(seen) > 1}, 200 if len(seen) > 1 else 503)

    async with watching(raw.url, note):
        async with asyncio.timeout(10):
            while len(seen) < 3:
                await asyncio.sleep(0.01)
        await asyncio.sleep(0)
    assert seen == [True, False, True]


@asynccontextmanager
async def watching(url: str, note: Any) -> AsyncIterator[None]:
    task = asyncio.create_task(watch([url], LIMITS, note))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait({task})


async def test_running_gateway_is_understood():
    scripted = pytest.importorskip("tests.gateway.scripted", reason="needs pip install 'swarm-inference[gateway]'")
    from swarm.gateway.app import Gateway
    from swarm.gateway.health import Readiness

    async def readiness() -> Readiness:
        return Readiness(is_ready=False, models={"org/a": "", "org/b": "no server"}, problems=("the keys are broken",))

    models = scripted.ScriptedModels(scripted.scripted_model(lambda _: "Hello."))
    with scripted.running(Gateway(models, readiness=readiness)) as url:
        async with httpx2.AsyncClient(trust_env=False) as client:
            state = await ask(client, url, GatewayLimits(timeout_s=20.0))
    assert (state.ready, state.reason, state.version) == (False, "the keys are broken", __version__)
    assert (state.routed, state.unrouted) == (("org/a",), ("org/b",))


async def test_monitor_serves_what_gateways_tell(raw, tmp_path):
    raw.says(FULL)
    world = World(tmp_path, gateways=(raw.url,))
    async with running(world) as client:
        await world.until(lambda state: state.gateways)
        (told,) = (await client.get("/api/v1/state")).json()["gateways"]
        assert (told["url"], told["ready"], told["routed"]) == (raw.url, True, ["org/a"])
        raw.says(b"<html>")
        await world.until(lambda state: not state.gateways[0].ready)
    world.database.close()


# The page


def tile(**facts: Any) -> str:
    state = GatewayState(**{"url": "https://gateway.example", "ready": True, "reason": "", **facts})
    with serving(Site(healthy(gateways=(state,)))) as site:
        page = get(site.url + "/")[2]
    return " ".join(page.split('id="gateways"')[1].split("</section>")[0].split())


def test_page_has_a_tile_for_a_gateway():
    shown = tile(routed=("org/a", "org/b"), unrouted=("org/c",), version="0.2.0")
    assert '<span class="pill healthy">ready</span>' in shown
    assert '<bdi class="name">gateway.example</bdi>' in shown
    assert "2 models with a route: org/a, org/b. 1 model without: org/c. Version 0.2.0." in shown


def test_tile_says_why_a_gateway_is_not_ready():
    shown = tile(ready=False, reason="it cannot be reached")
    assert '<span class="pill broken">not ready</span>' in shown
    assert "It cannot be reached." in shown


def test_markup_of_a_gateway_is_text():
    shown = tile(ready=False, reason=MARKUP, routed=(MARKUP,), unrouted=(MARKUP,), version=MARKUP)
    assert "<script" not in shown
    assert shown.count("&lt;script&gt;") == 4


def test_page_without_gateways_has_no_tile():
    with serving(Site(healthy())) as site:
        assert 'id="gateways"' not in get(site.url + "/")[2]


@pytest.mark.parametrize("url", ["gateway.example", "ftp://x", "http://me:secret@x", "http://x?key=1", "http://x/#a"])
def test_urls_that_the_page_should_not_show_are_refused(url, tmp_path: Path):
    arguments = ["--initial-peers", "/ip4/127.0.0.1/tcp/1/p2p/x", "--gateway", url]
    run = CliRunner().invoke(command, arguments, env={"XDG_DATA_HOME": str(tmp_path)})
    assert run.exit_code == 2
    assert "should look like https://" in run.output
